"""The stock CPU cache of the pinned engine, through its own update operation."""

from __future__ import annotations

import pytest
import torch

from pytest_kvqual.errors import FormatError
from pytest_kvqual.kv import formats
from pytest_kvqual.kv.formats import Write

pytestmark = pytest.mark.engine


def stock_write(
    dtype: torch.dtype,
    block_size: int,
    head_size: int,
    *,
    flag: str = "auto",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Write:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    torch.cpu._init_amx()  # without it the AMX path dies of SIGILL
    isa = _get_attn_isa(dtype, block_size, head_size, flag)

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        blocks, heads, positions, _ = cache.shape
        k_cache, v_cache = cache.view(blocks, heads, 2 * positions, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            key, value, k_cache, v_cache, slots, isa, k_scale=k_scale, v_scale=v_scale, kv_cache_dtype=flag
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("heads", "size", "block"), [(3, 64, 128), (10, 128, 32)])
def test_layout_of_eight_bits_is_derived(heads: int, size: int, block: int, kind: str, dtype: torch.dtype) -> None:
    """The layout is found although the kernel rounds, one byte an element, and the other type's flag has none."""
    write = stock_write(dtype, block, size, flag=f"fp8_{kind}")
    sizes = {"head_size": size, "block_size": block, "kv_heads": heads, "dtype": dtype}
    layout = formats.probe_layout(write, name=f"cpu-attn-fp8-{kind}", **sizes)  # type: ignore[arg-type]  # of a table
    every = torch.cat([layout.k.flatten(), layout.v.flatten()]).sort().values
    assert torch.equal(every, torch.arange(2 * block * size))
    like = torch.zeros(4, heads, block, 2 * size, dtype=torch.uint8)
    assert formats.observe_bytes(write, like=like, head_size=size, dtype=dtype) == (1, 1)
    other = {"e4m3": "e5m2", "e5m2": "e4m3"}[kind]
    with pytest.raises(FormatError):
        formats.probe_layout(write, name=f"cpu-attn-fp8-{other}", **sizes)  # type: ignore[arg-type]  # of a table


@pytest.mark.parametrize(("k_scale", "v_scale"), [(1.0, 1.0), (41.0, 0.0137), (1e-3, 7.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_every_input_is_cut_off_as_declared(kind: str, dtype: torch.dtype, k_scale: float, v_scale: float) -> None:
    """The stock kernel writes what the format toward zero says for each of 65,536 inputs, and not what OFP8 defines."""
    flag, name = f"fp8_{kind}", f"cpu-attn-fp8-{kind}"
    plain = stock_write(dtype, 128, 64, flag=flag)
    layout = formats.probe_layout(plain, head_size=64, block_size=128, kv_heads=3, dtype=dtype, name=name)
    write = stock_write(dtype, 128, 64, flag=flag, k_scale=k_scale, v_scale=v_scale)
    for toward_zero in (True, False):
        fmt = formats.CpuAttn8(kind=kind, layout=layout, toward_zero=toward_zero, dtype=dtype, k_scale=k_scale)
        found = formats.probe_encoding(write, fmt, kv_heads=3, v_scale=v_scale)
        assert all((part.finite == 0 and part.not_finite == 0) is toward_zero for part in found.values())
