"""The glue that puts our Triton backend into stock vLLM 0.32 on CUDA, as an out-of-tree backend.

An arm says ``--attention-backend CUSTOM`` and names ``register_triton_k16v8`` or ``register_triton_k16v16`` in
``before_load``; the engine resolves the class behind ``AttentionBackendEnum.CUSTOM`` in the worker process, when the
model's layers are made. ``get_name()`` is ``CUSTOM``, as the attention layer looks its backend up by that name in the
enum; ``kvqual_name`` tells the arms apart.

The cache's shape is the backend's (``customize_spec``): K16/V8 asks for ``[blocks, kv_heads, block, 3 * head_size]``
bytes, K16/V16 keeps ``[blocks, kv_heads, block, 2 * head_size]`` of the model's dtype.

Graphs: a step in which every request has one row is what a full graph captures. Everything that such a step reads or
writes lives in the engine's persistent buffers or in the builder's workspace, grids follow from shapes, and nothing is
read back, so a replay follows the buffers. Mixed steps run between piecewise graphs. A layer's V scale goes into a
graph as the number that it is at capture.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from pytest_kvqual.errors import FormatError
from pytest_kvqual.kv.backends.triton_k16v8 import SHORTEST, SPLITS, Triton, Workspace

_LARGEST_HEAD = 256
# Compute capabilities with at least 160 KiB of shared memory for a block (CUDA C++ Programming Guide, technical
# specifications).
_LARGE_SHARED_MEMORY = frozenset({(8, 0), (8, 7), (9, 0), (10, 0), (10, 3)})


@dataclasses.dataclass
class TritonMetadata(AttentionMetadata):
    """One step: the engine's own buffers, and the builder's workspace.

    ``block_table`` int32 ``[R, B]``, ``seq_lens`` int32 ``[R]``, ``query_start_loc`` int32 ``[R + 1]``,
    ``slot_mapping`` int64. A padding request has no rows and length 0.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool
    workspace: Workspace


class TritonBuilder(AttentionMetadataBuilder[TritonMetadata]):
    """Passes a step's buffers on as they are; owns the workspace, which graphs refer to by address."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.workspace = Workspace.make(
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config),
            kv_cache_spec.head_size,
            SPLITS * SHORTEST,  # all parts: a block table may be wider than the longest request
            device,
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonMetadata:
        """The metadata of a step.

        Raises:
            FormatError: The step is not causal.
        """
        common = common_attn_metadata
        if common.causal is not True:
            raise FormatError("found a step that is not causal, expected a causal one, in a kvqual backend")
        return TritonMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            workspace=self.workspace,
        )


class _Impl(AttentionImpl[TritonMetadata]):
    """Hands the functions what the layer and the step's metadata say, and nothing of its own."""

    functions: ClassVar[Triton]

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **further: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        given = {
            "alibi_slopes": alibi_slopes is not None,
            "sliding_window": sliding_window is not None,
            "kv_cache_dtype": kv_cache_dtype not in ("auto", "float16", "bfloat16"),
            "logits_soft_cap": bool(logits_soft_cap),
            "attn_type": attn_type != "decoder",
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name is not None,
            **{name: value is not None for name, value in further.items()},
        }
        unsupported = [name for name, found in given.items() if found]
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
        """Writes the K and V ``[T, Hkv, D]`` of the step to their slots."""
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
        attn_metadata: TritonMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of ``query [T, Hq, D]`` over the cache, into ``output``; zeros in the engine's profiling run.

        Raises:
            FormatError: A fused output scale, or a step that is not causal.
        """
        if attn_metadata is None:
            return output.fill_(0)
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
            max_query_len=attn_metadata.max_query_len,
            workspace=attn_metadata.workspace,
        )


class TritonK16V8Impl(_Impl):
    """One layer of K16/V8."""

    functions: ClassVar[Triton] = Triton("k16v8")


class TritonK16V16Impl(_Impl):
    """One layer of K16/V16."""

    functions: ClassVar[Triton] = Triton("k16v16")


class _Backend(AttentionBackend):
    kvqual_name: ClassVar[str]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_builder_cls() -> type[TritonBuilder]:
        return TritonBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 8 <= head_size <= _LARGEST_HEAD

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: Any,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        # A program of wider heads takes up to 129 KiB of shared memory of a block; other devices have 99 KiB.
        if head_size > 128 and tuple(device_capability) not in _LARGE_SHARED_MEMORY:
            return "heads of more than 128 need a device with 160 KiB"
        return None

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # A head's cells of one page lie side by side: the declared page, and the longest runs for the reader.
        return (KVCacheLayout.LBHNC,)


class TritonK16V8Backend(_Backend):
    """16-bit K and E4M3 V: 3 bytes per K/V pair in a byte cache."""

    kvqual_name = "KVQUAL_TRITON_K16V8"

    @staticmethod
    def get_impl_cls() -> type[TritonK16V8Impl]:
        return TritonK16V8Impl

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return dataclasses.replace(spec, dtype=torch.uint8, state_content_bytes=3 * spec.head_size)


class TritonK16V16Backend(_Backend):
    """16-bit K and V through the same kernels: isolates the implementation from the quantisation."""

    kvqual_name = "KVQUAL_TRITON_K16V16"

    @staticmethod
    def get_impl_cls() -> type[TritonK16V16Impl]:
        return TritonK16V16Impl


def register_triton_k16v8(worker: object) -> None:
    """Puts K16/V8 behind ``CUSTOM`` in this worker process. Call it before the model is built."""
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.TritonK16V8Backend")


def register_triton_k16v16(worker: object) -> None:
    """Puts K16/V16 behind ``CUSTOM`` in this worker process. Call it before the model is built."""
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.TritonK16V16Backend")
