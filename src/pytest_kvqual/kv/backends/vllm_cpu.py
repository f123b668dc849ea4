"""The glue that puts our backends into stock vLLM 0.32 on a CPU.

An arm names ``register_k16v16`` or ``register_k16v8`` in ``before_load``. Each replaces the class behind
``AttentionBackendEnum.CPU_ATTN`` in the worker process, which is the one that vLLM's CPU platform selects.
``get_name()`` therefore stays ``CPU_ATTN``: the attention layer looks its backend up by that name in the enum. What
tells the arms apart is ``kvqual_name`` (``KVQUAL_K16V16``, ``KVQUAL_K16V8``); a stock backend has no such attribute,
so ``declared_name(backend)`` is what records must use.

The cache's shape is the backend's: vLLM passes the layer's spec through ``customize_spec`` before it sizes the pool
(``vllm.v1.worker.utils.customize_attention_spec``). K16/V8 asks for ``[blocks, kv_heads, block, 3 * head_size]`` bytes,
K16/V16 keeps the dense ``[blocks, kv_heads, block, 2 * head_size]`` of the model's dtype.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec

from pytest_kvqual.errors import FormatError
from pytest_kvqual.kv.backends import k16v8, reference


class _Functions(Protocol):
    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        k_scale: float = ...,
        v_scale: float = ...,
    ) -> None: ...

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        *,
        scale: float,
        v_scale: float = ...,
        output: torch.Tensor,
    ) -> torch.Tensor: ...


class _Impl(CPUAttentionBackendImpl):
    """Calls the plain functions with what the layer and the step's metadata say, and nothing of its own."""

    functions: ClassVar[_Functions]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unsupported = [
            name
            for name, found, plain in (
                ("alibi_slopes", self.alibi_slopes, None),
                ("sliding_window", self.sliding_window, -1),
                ("logits_soft_cap", self.logits_soft_cap, 0),
                ("sinks", self.sinks, None),
                ("attn_type", self.attn_type, "decoder"),
            )
            if found is not plain and found != plain
        ]
        if unsupported:
            raise FormatError(
                f"found a layer with {', '.join(unsupported)}, expected plain causal attention, in a kvqual backend"
            )

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        self.functions.write(
            key, value, kv_cache, slot_mapping, k_scale=layer._k_scale_float, v_scale=layer._v_scale_float
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # the engine's profiling run
            return output
        if output_scale is not None or output_block_scale is not None or attn_metadata.causal is not True:
            raise FormatError("found fused output quantisation or a non-causal step, expected neither, in attention")
        return self.functions.attend(
            query,
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            scale=self.scale,
            v_scale=layer._v_scale_float,
            output=output,
        )


class K16V16Impl(_Impl):
    """One layer of K16/V16."""

    functions: ClassVar[_Functions] = reference


class K16V8Impl(_Impl):
    """One layer of K16/V8."""

    functions: ClassVar[_Functions] = k16v8


class Builder(AttentionMetadataBuilder[CPUAttentionMetadata]):
    """The stock step metadata without the stock kernel's work schedule, which our functions do not use."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise FormatError("found a per-request causal flag, expected a causal step, in a kvqual backend")
        return CPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            causal=common.causal,
        )


class _Backend(CPUAttentionBackend):
    kvqual_name: ClassVar[str]

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False


class K16V16Backend(_Backend):
    """16-bit K and V in our cell order."""

    kvqual_name = "KVQUAL_K16V16"

    @staticmethod
    def get_impl_cls() -> type[K16V16Impl]:
        return K16V16Impl


class K16V8Backend(_Backend):
    """16-bit K and E4M3 V: 3 bytes per K/V pair in a byte cache."""

    kvqual_name = "KVQUAL_K16V8"

    @staticmethod
    def get_impl_cls() -> type[K16V8Impl]:
        return K16V8Impl

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return dataclasses.replace(spec, dtype=torch.uint8, state_content_bytes=3 * spec.head_size)


def declared_name(backend: type) -> str:
    """The name that tells arms apart: ``kvqual_name`` where the backend has one, else vLLM's ``get_name()``."""
    name = getattr(backend, "kvqual_name", None)
    return str(name) if name is not None else str(backend.get_name())  # type: ignore[attr-defined]


def register_k16v16(worker: object) -> None:
    """Makes K16/V16 the CPU attention backend of this worker process. Call it before the model is built."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.K16V16Backend")


def register_k16v8(worker: object) -> None:
    """Makes K16/V8 the CPU attention backend of this worker process. Call it before the model is built."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.K16V8Backend")
