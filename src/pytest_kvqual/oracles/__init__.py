"""Oracles: records in, findings out. Torch tensors and no engine."""
