"""Paged-attention backends as plain functions over tensors, and the glue that puts them into an engine.

A backend module offers ``write`` and ``attend`` (see ``paged``). Only ``vllm_cpu`` knows of vLLM.
"""
