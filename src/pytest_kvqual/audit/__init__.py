"""The independent reader of a run directory. It imports nothing of the other rooms."""
