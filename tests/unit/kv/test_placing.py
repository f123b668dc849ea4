"""Placing cells into a physical cache, in every format."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.errors import FormatError
from pytest_kvqual.kv import formats
from pytest_kvqual.kv.formats import Cells, Format

BLOCKS, HEADS, BLOCK, SIZE = 5, 3, 4, 8
FORMATS = (
    "k16v16", "k16v8", "k8v8", "k8v8-inline", "cpu-attn-bf16", "cpu-attn-fp8-e4m3", "cpu-attn-fp8-e5m2-toward-zero",
)  # fmt: skip


def _codec(name: str) -> Format:
    order = torch.randperm(2 * BLOCK * SIZE, generator=torch.Generator().manual_seed(3)).view(2, BLOCK, SIZE)
    layout = formats.LayoutPermutation(k=order[0], v=order[1])
    return formats.declared(name, layout=layout if formats.needs_layout(name) else None)


def _cache(name: str, *, strided: bool = False) -> torch.Tensor:
    shape = (BLOCKS, HEADS, BLOCK, formats.cell_bytes(_codec(name), SIZE))
    raw = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(4)).to(torch.uint8)
    cache = raw.view(torch.bfloat16) if name in ("k16v16", "cpu-attn-bf16") else raw
    if strided:
        wide = torch.zeros(BLOCKS, 2, *cache.shape[1:], dtype=cache.dtype)
        wide[:, 1] = cache
        return wide[:, 1]
    return cache


def _cells(name: str, rows: int, seed: int = 5) -> Cells:
    random = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(rows, HEADS, SIZE, generator=random).bfloat16() for _ in range(2))
    return _codec(name).encode(key, value, 0.01)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@given(st.lists(st.integers(0, BLOCKS * BLOCK - 1), unique=True, max_size=BLOCKS * BLOCK), st.integers(0, 100))
def test_what_is_placed_is_read_and_nothing_else_changes(name: str, strided: bool, slots: list[int], seed: int) -> None:
    """Cells read back bit by bit from their slots, in any order of slots; every other slot keeps its bytes."""
    codec, cache = _codec(name), _cache(name, strided=strided)
    at = torch.tensor(slots, dtype=torch.int64)
    others = torch.tensor([slot for slot in range(BLOCKS * BLOCK) if slot not in slots], dtype=torch.int64)
    before, cells = codec.read(cache, others), _cells(name, len(slots), seed)
    codec.place(cache, at, cells)
    found = codec.read(cache, at)
    assert torch.equal(found.k, cells.k)
    assert torch.equal(found.v, cells.v)
    after = codec.read(cache, others)
    assert torch.equal(after.k, before.k)
    assert torch.equal(after.v, before.v)


@pytest.mark.parametrize("name", FORMATS)
def test_a_block_that_is_read_and_placed_again_is_unchanged(name: str) -> None:
    """Every byte of a cache, whatever it means, survives being read and put back."""
    codec, cache = _codec(name), _cache(name)
    image, every = cache.clone(), torch.arange(BLOCKS * BLOCK)
    kept = codec.read(cache, every)
    cache.zero_()
    codec.place(cache, every, kept)
    assert torch.equal(cache.view(torch.uint8), image.view(torch.uint8))


@pytest.mark.parametrize("name", ["k16v16", "k16v8", "k8v8"])
def test_a_cell_holds_k_and_then_v(name: str) -> None:
    """In the formats of adjacent K and V the bytes lie in one run, K first."""
    codec, cache, cells = _codec(name), _cache(name), _cells(name, 1)
    codec.place(cache, torch.tensor([9]), cells)
    raw = cache.view(torch.uint8)[2, :, 1]
    assert torch.equal(raw, torch.cat([cells.k[0], cells.v[0]], dim=-1))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("slots", [[-1], [BLOCKS * BLOCK], [0, 10**6]])
def test_slots_outside_the_cache_are_refused(name: str, slots: list[int]) -> None:
    """A slot before or behind the cache is an error, and the cache keeps its bytes."""
    cache = _cache(name)
    image = cache.clone()
    with pytest.raises(FormatError, match=f"expected 0 to {BLOCKS * BLOCK - 1}"):
        _codec(name).place(cache, torch.tensor(slots), _cells(name, len(slots)))
    assert torch.equal(cache.view(torch.uint8), image.view(torch.uint8))


@pytest.mark.parametrize("name", FORMATS)
def test_slots_of_another_type_are_refused(name: str) -> None:
    """Slots are int64 ``[T]``."""
    for slots in (torch.tensor([1], dtype=torch.int32), torch.tensor([[1]])):
        with pytest.raises(FormatError, match="expected int64"):
            _codec(name).place(_cache(name), slots, _cells(name, 1))


@pytest.mark.parametrize("name", ["k16v16", "k16v8", "k8v8"])
def test_cells_of_another_format_are_refused(name: str) -> None:
    """Cells whose K or V has another number of bytes do not go into the cache."""
    cells = _cells(name, 1)
    for wrong in (Cells(k=cells.k[..., 1:], v=cells.v), Cells(k=cells.k, v=cells.v[..., 1:])):
        with pytest.raises(FormatError, match=f"for format '{name}'"):
            _codec(name).place(_cache(name), torch.tensor([1]), wrong)


@pytest.mark.parametrize("name", FORMATS)
def test_a_cache_of_another_shape_is_refused(name: str) -> None:
    """A cache that is not ``[blocks, heads, block_size, content]``, or whose content is not dense, is refused."""
    cells, slots = _cells(name, 1), torch.tensor([1])
    cache = _cache(name)
    for wrong in (cache[0], cache.transpose(2, 3)):
        with pytest.raises(FormatError, match=f"for format '{name}'"):
            _codec(name).place(wrong, slots, cells)
