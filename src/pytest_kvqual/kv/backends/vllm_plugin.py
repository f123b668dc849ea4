"""What stock vLLM loads by itself, in each of its processes: the entry point ``kvqual`` of ``vllm.general_plugins``.

With it ``--attention-backend CUSTOM`` finds the Triton K16/V8 backend wherever this package is installed. Only a path
is registered: nothing of ours is imported before a layer asks for the class. An arm does not need it: the engine
resolves the class in the worker alone, where ``before_load`` runs first.
"""

from __future__ import annotations

BACKEND = "pytest_kvqual.kv.backends.vllm_gpu.TritonK16V8Backend"


def register() -> None:
    """Makes the Triton K16/V8 backend the one behind ``CUSTOM``, unless another package has taken that name."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
