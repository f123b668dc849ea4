"""KV cache formats: what a cell must hold, where it lies, and the backends that write and read it.

``geometry`` needs the standard library only; ``formats`` and ``backends`` need torch; ``backends.vllm_cpu`` needs vLLM.
This package imports none of them.
"""
