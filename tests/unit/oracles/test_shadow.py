"""The shadow of the touched blocks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.errors import FormatError
from pytest_kvqual.kv import formats
from pytest_kvqual.kv.formats import Cells, Format
from pytest_kvqual.oracles import shadow
from pytest_kvqual.oracles.shadow import Shadow, block_sums, differing

BLOCKS, HEADS, BLOCK, SIZE = 7, 3, 4, 8
FORMATS = ("k16v16", "k16v8", "cpu-attn-bf16", "k8v8-inline")


def _codec(name: str) -> Format:
    order = torch.randperm(2 * BLOCK * SIZE, generator=torch.Generator().manual_seed(3)).view(2, BLOCK, SIZE)
    layout = formats.LayoutPermutation(k=order[0], v=order[1])
    return formats.declared(name, layout=layout if name == "cpu-attn-bf16" else None)


def _cache(name: str, *, strided: bool = False) -> torch.Tensor:
    codec = _codec(name)
    shape = (BLOCKS, HEADS, BLOCK, formats.cell_bytes(codec, SIZE))
    random = torch.Generator().manual_seed(4)
    raw = torch.randint(0, 256, shape, generator=random).to(torch.uint8)
    if name in ("k16v16", "cpu-attn-bf16"):
        raw = raw.view(torch.bfloat16)
    if strided:
        wide = torch.zeros(BLOCKS, 2, *raw.shape[1:], dtype=raw.dtype)
        wide[:, 1] = raw
        return wide[:, 1]
    return raw


def _cells(name: str, rows: int, seed: int = 5) -> Cells:
    random = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(rows, HEADS, SIZE, generator=random).bfloat16() for _ in range(2))
    return _codec(name).encode(key, value, 0.01)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@given(block=st.integers(0, 2), byte=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_one_flipped_bit_of_a_touched_block_is_one_wrong_cell(
    name: str, strided: bool, block: int, byte: int, bit: int
) -> None:
    """Any bit of any touched block, in dense and in strided memory: exactly its (slot, head), in K or in V, differs."""
    cache = _cache(name, strided=strided)
    held = Shadow({"L": (cache, _codec(name))}, BLOCK)
    touched = [5, 0, 3]
    held.adopt(touched)
    assert held.compare("L") == (3 * BLOCK * HEADS, None)
    at = touched[block]
    raw = cache[at].contiguous()
    flat = raw.view(torch.uint8).view(-1)
    byte %= flat.numel()
    before = _codec(name).read(cache, torch.arange(at * BLOCK, (at + 1) * BLOCK))
    flat[byte] ^= 1 << bit
    cache[at] = raw
    cells, wrong = held.compare("L")
    assert cells == 3 * BLOCK * HEADS
    assert wrong is not None
    assert (wrong.cells, wrong.slots.numel()) == (1, 1)
    assert int(wrong.slots[0]) // BLOCK == at
    assert bool(wrong.k.any()) != bool(wrong.v.any())
    offset = int(wrong.slots[0]) % BLOCK
    assert torch.equal(wrong.expected.k[0], before.k[offset])
    assert torch.equal(wrong.expected.v[0], before.v[offset])
    assert int((wrong.found.k != wrong.expected.k).sum() + (wrong.found.v != wrong.expected.v).sum()) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_only_dictated_writes_change_the_image(name: str) -> None:
    """After the dictated writes cache and image agree; a write to one slot more, or one less, is found."""
    cache, codec = _cache(name), _codec(name)
    held = Shadow({"L": (cache, codec)}, BLOCK)
    held.adopt([2])
    held.adopt([6, 2])
    slots = torch.tensor([10, 24, -1, 27])
    cells = _cells(name, 4)
    held.write("L", slots, cells)
    _, wrong = held.compare("L")
    assert wrong is not None
    assert wrong.slots.tolist() == [10, 24, 27]
    assert wrong.cells == 9
    keep = slots >= 0
    codec.place(cache, slots[keep], Cells(k=cells.k[keep], v=cells.v[keep]))
    assert held.compare("L") == (2 * BLOCK * HEADS, None)
    found = held.expected("L", slots[keep])
    assert torch.equal(found.k, cells.k[keep])
    codec.place(cache, torch.tensor([9]), _cells(name, 1, seed=9))
    _, wrong = held.compare("L")
    assert wrong is not None
    assert wrong.slots.tolist() == [9]


def test_a_block_that_was_touched_is_not_adopted_again() -> None:
    """A wrong cell stays wrong when its block is granted again."""
    cache = _cache("k16v8")
    held = Shadow({"L": (cache, _codec("k16v8"))}, BLOCK)
    held.adopt([1])
    cache[1, 0, 0, 0] ^= 1
    held.adopt([1, 4])
    held.adopt([1])
    _, wrong = held.compare("L")
    assert wrong is not None
    assert wrong.slots.tolist() == [4]
    assert held.blocks == {1, 4}
    assert held.covers(torch.tensor([3, 4, 7, 8, 19, -1])).tolist() == [False, True, True, False, True, False]


def test_nothing_touched_is_nothing_compared() -> None:
    """A shadow without blocks has compared no cell; a write of no row is none."""
    cache = _cache("k16v8")
    held = Shadow({"L": (cache, _codec("k16v8"))}, BLOCK)
    assert held.compare("L") == (0, None)
    held.write("L", torch.tensor([-1]), _cells("k16v8", 1))
    held.write("L", torch.empty(0, dtype=torch.int64), _cells("k16v8", 0))
    assert held.compare("L") == (0, None)


def test_layers_are_compared_with_their_own_images() -> None:
    """A difference in one layer is no difference in another."""
    caches = {name: _cache("k16v8") for name in ("L", "M")}
    held = Shadow({name: (cache, _codec("k16v8")) for name, cache in caches.items()}, BLOCK)
    held.adopt([3])
    caches["M"][3, 2, 1, 0] ^= 1
    assert held.compare("L")[1] is None
    wrong = held.compare("M")[1]
    assert wrong is not None
    assert (wrong.slots.tolist(), wrong.k.tolist()) == ([13], [[False, False, True]])


def test_many_blocks_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part size does not show in what is found."""
    cache = _cache("k16v8")
    held = Shadow({"L": (cache, _codec("k16v8"))}, BLOCK)
    held.adopt([6, 1, 2, 5, 0])
    sums = block_sums(cache)
    for block in (6, 2, 0):
        cache[block, 1, 3, 7] ^= 0x10
    for size in (1, 2 * cache[0].numel(), 8 * cache[0].numel() * 3):
        monkeypatch.setattr(shadow, "_COMPARED_BYTES", size)
        cells, wrong = held.compare("L")
        assert cells == 5 * BLOCK * HEADS
        assert wrong is not None
        assert sorted(wrong.slots.tolist()) == [3, 11, 27]
        assert torch.nonzero(block_sums(cache) != sums).flatten().tolist() == [0, 2, 6]


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0])
@pytest.mark.parametrize("side", ["cache", "image"])
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_value_that_is_not_a_number_differs_from_a_number(value: float, side: str, which: str) -> None:
    """NaN, infinity or -0.0 on one side alone, in K or V, is a wrong cell; on both sides not."""
    codec = formats.K16V16()
    cache = torch.zeros(2, HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16)
    held = Shadow({"L": (cache, codec)}, BLOCK)
    held.adopt([1])
    one, odd = torch.zeros(1, HEADS, SIZE).bfloat16(), torch.zeros(1, HEADS, SIZE).bfloat16()
    odd[0, 1, 2] = value
    clean, damaged = codec.encode(one, one, 1.0), codec.encode(*((odd, one) if which == "k" else (one, odd)), 1.0)
    slot = torch.tensor([6])
    codec.place(cache, slot, damaged if side == "cache" else clean)
    held.write("L", slot, clean if side == "cache" else damaged)
    _, wrong = held.compare("L")
    assert wrong is not None
    assert (wrong.k if which == "k" else wrong.v).tolist() == [[False, True, False]]
    assert wrong.cells == 1
    codec.place(cache, slot, damaged)
    held.write("L", slot, damaged)
    assert held.compare("L")[1] is None


@given(st.integers(0, 11), st.integers(0, 1), st.integers(1, 255))
def test_differing_keeps_the_cells_that_differ(at: int, which: int, delta: int) -> None:
    """Of four slots the one whose K or V differs is kept, with both contents."""
    slots = torch.tensor([4, 9, 2, 7])
    expected = Cells(k=torch.zeros(4, 3, 2, dtype=torch.uint8), v=torch.zeros(4, 3, 1, dtype=torch.uint8))
    found = Cells(k=expected.k.clone(), v=expected.v.clone())
    row, head = divmod(at, 3)
    (found.k, found.v)[which][row, head, 0] += delta
    wrong = differing(slots, found, expected)
    assert wrong.slots.tolist() == [int(slots[row])]
    assert (wrong.k, wrong.v)[which].nonzero().tolist() == [[0, head]]
    assert not bool((wrong.k, wrong.v)[1 - which].any())
    assert int(wrong.found.k.sum() + wrong.found.v.sum()) == delta
    assert int(wrong.expected.k.sum() + wrong.expected.v.sum()) == 0


def test_cells_of_other_shapes_are_refused() -> None:
    """Comparing what cannot be compared is an error and no pass."""
    one, two = _cells("k16v8", 1), _cells("k16v8", 2)
    with pytest.raises(FormatError, match="found K cells of shape"):
        differing(torch.tensor([0]), one, two)


@given(st.integers(0, 5), st.integers(0, 41), st.integers(1, 255))
def test_any_changed_byte_changes_the_sum_of_its_block(block: int, byte: int, delta: int) -> None:
    """One changed byte changes the sum of its block and of no other, also where rows are no multiple of eight bytes."""
    cache = torch.arange(6 * 42, dtype=torch.int64).to(torch.uint8).view(6, 3, 14)
    before = block_sums(cache)
    cache.view(6, 42)[block, byte] += delta
    changed = (block_sums(cache) != before).tolist()
    assert changed == [index == block for index in range(6)]


def test_words_that_change_places_change_the_sum() -> None:
    """The sum of a block is not blind to order: two swapped words, and two words that change by opposite amounts."""
    cache = torch.arange(2 * 64, dtype=torch.int64).to(torch.uint8).view(2, 64)
    before = block_sums(cache)
    words = cache.view(torch.int64)
    words[0, [1, 5]] = words[0, [5, 1]]
    assert (block_sums(cache) != before).tolist() == [True, False]
    words[0, [1, 5]] = words[0, [5, 1]]
    words[0, 2] += 5
    words[0, 3] -= 5
    assert (block_sums(cache) != before).tolist() == [True, False]


def test_sums_of_a_strided_cache_see_its_own_bytes_only() -> None:
    """A cache that is a slice of a wider allocation is summed over its own cells."""
    wide = torch.zeros(4, 2, 8, 10, dtype=torch.bfloat16)
    cache = wide[:, :, :, 2:8]
    before = block_sums(cache)
    assert before.shape == (4,)
    wide[:, :, :, 9] = 1
    assert torch.equal(block_sums(cache), before)
    wide[2, 1, 3, 4] = 1
    assert (block_sums(cache) != before).tolist() == [False, False, True, False]


def test_blocks_that_are_touched_one_by_one_keep_their_images() -> None:
    """The image grows with the blocks, and none loses what it held; slot 0 is a slot."""
    cache, codec = _cache("k16v8"), _codec("k16v8")
    held = Shadow({"L": (cache, codec)}, BLOCK)
    image = cache.clone()
    for count, block in enumerate([4, 0, 6, 2, 1, 5, 3]):
        held.adopt([block])
        assert held.compare("L") == ((count + 1) * BLOCK * HEADS, None)
    every = torch.arange(BLOCKS * BLOCK)
    assert torch.equal(held.expected("L", every).k, codec.read(image, every).k)
    held.write("L", torch.tensor([0]), _cells("k16v8", 1))
    _, wrong = held.compare("L")
    assert wrong is not None
    assert wrong.slots.tolist() == [0]


@pytest.mark.parametrize("size", [5, 7])
def test_blocks_of_any_number_of_bytes_are_compared(size: int) -> None:
    """A block whose bytes are no multiple of eight is compared to its last byte."""
    codec = formats.K16V8()
    cache = torch.arange(3 * 1 * 3 * 3 * size, dtype=torch.int64).to(torch.uint8).view(3, 1, 3, 3 * size)
    held = Shadow({"L": (cache, codec)}, 3)
    held.adopt([2, 1])
    assert held.compare("L") == (6, None)
    cache[1, 0, 2, -1] ^= 0x80
    _, wrong = held.compare("L")
    assert wrong is not None
    assert wrong.slots.tolist() == [5]


def test_the_top_bit_of_every_word_counts() -> None:
    """The factors of the sum are odd: the highest bit of a word changes it too."""
    for word in range(32):
        cache = torch.zeros(1, 32 * 8, dtype=torch.uint8)
        before = block_sums(cache)
        cache[0, 8 * word + 7] = 0x80
        assert not torch.equal(block_sums(cache), before)
