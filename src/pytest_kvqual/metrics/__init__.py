"""MEASURES: figures of raw recordings, one definition each. Pure, standard library only."""
