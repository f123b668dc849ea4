"""The oracles on synthetic inputs: a paged-attention engine without a model, its workload, and a check of a backend.

Needs torch; knows nothing of pytest. This package imports none of its modules.
"""
