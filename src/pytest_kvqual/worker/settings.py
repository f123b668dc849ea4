"""The settings that an engine runs with, as its configuration objects hold them after every default was applied."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

#: By configuration object, what changes which tokens a request gets or when it gets them. Places, ports, names of files
#: and identifiers of a process are left out: they differ between two boots of one arm.
SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "model_config": (
        "dtype", "seed", "max_model_len", "quantization", "enforce_eager", "logprobs_mode", "max_logprobs",
        "disable_sliding_window", "disable_cascade_attn", "generation_config", "override_generation_config",
        "hf_overrides", "logits_processors",
    ),
    "cache_config": (
        "block_size", "cache_dtype", "num_gpu_blocks", "enable_prefix_caching", "kv_cache_memory_bytes",
        "sliding_window", "kv_sharing_fast_prefill",
    ),
    "scheduler_config": (
        "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "long_prefill_token_threshold", "policy",
        "async_scheduling",
    ),
    "parallel_config": (
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend",
    ),
    "compilation_config": ("mode", "cudagraph_mode", "cudagraph_capture_sizes", "custom_ops"),
    "attention_config": ("backend",),
    "speculative_config": ("method", "num_speculative_tokens"),
    "lora_config": ("max_loras",),
    "kv_transfer_config": ("kv_connector", "kv_role"),
}  # fmt: skip


def effective(config: object) -> dict[str, object]:
    """``{"cache_config.block_size": 128, …}``: every setting of :data:`SETTINGS` that the engine has.

    A part that the engine does not use (no speculative decoding) is there as None. Values are JSON's; anything else is
    there as its text.
    """
    found: dict[str, object] = {}
    for part, names in SETTINGS.items():
        held = getattr(config, part, None)
        if held is None:
            found[part] = None
            continue
        for name in names:
            if hasattr(held, name):
                found[f"{part}.{name}"] = _plain(getattr(held, name))
    return found


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return str(value)
