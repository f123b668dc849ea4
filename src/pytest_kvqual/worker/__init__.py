"""What runs inside the engine's worker process. Imports only ``kv``, ``oracles``, ``wire`` and leaf modules of ours."""
