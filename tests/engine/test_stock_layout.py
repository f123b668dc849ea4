"""The stock CPU cache of the pinned engine, through its own update operation."""

from __future__ import annotations

import pytest
import torch

from pytest_kvqual.kv import formats
from pytest_kvqual.kv.formats import Write

pytestmark = pytest.mark.engine


def stock_write(dtype: torch.dtype, block_size: int, head_size: int) -> Write:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    torch.cpu._init_amx()  # without it the AMX path dies of SIGILL
    isa = _get_attn_isa(dtype, block_size, head_size, "auto")

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        blocks, heads, positions, _ = cache.shape
        k_cache, v_cache = cache.view(blocks, heads, 2 * positions, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            key, value, k_cache, v_cache, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )

    return write


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "size", "block"), [(3, 64, 128), (8, 128, 32), (10, 128, 128)])
def test_layout_is_derived(heads: int, size: int, block: int, dtype: torch.dtype) -> None:
    """The stock layout is a permutation inside each tile, with all K of a tile before its V."""
    write = stock_write(dtype, block, size)
    layout = formats.probe_layout(write, head_size=size, block_size=block, kv_heads=heads, dtype=dtype)
    every = torch.cat([layout.k.flatten(), layout.v.flatten()]).sort().values
    assert torch.equal(every, torch.arange(2 * block * size))
    assert int(layout.k.max()) < int(layout.v.min())


def test_observed_bytes() -> None:
    """The stock cache is observed to hold two bytes per K element and two per V element."""
    like = torch.zeros(4, 3, 128, 128, dtype=torch.bfloat16)
    write = stock_write(torch.bfloat16, 128, 64)
    assert formats.observe_bytes(write, like=like, head_size=64) == (2, 2)
