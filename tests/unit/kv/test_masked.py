"""The graph-safe backend against the reference backend."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from pytest_kvqual.errors import FormatError
from pytest_kvqual.kv.backends import masked, reference

BLOCK, BLOCKS = 8, 24
GEOMETRIES = [(6, 3, 16), (9, 3, 64), (28, 4, 32), (4, 4, 16)]


def _cache(kv_heads: int, size: int, dtype: torch.dtype, fill: float, *, strided: bool = False) -> torch.Tensor:
    if strided:
        return torch.full((BLOCKS, kv_heads + 1, BLOCK, 2 * size), fill, dtype=dtype)[:, :kv_heads]
    return torch.full((BLOCKS, kv_heads, BLOCK, 2 * size), fill, dtype=dtype)


class _Step:
    """Requests with ``(positions, query rows)`` over shuffled blocks, then padding rows and padding requests."""

    def __init__(
        self, batch: Sequence[tuple[int, int]], *, heads: tuple[int, int, int], padding: int = 0, seed: int = 0
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        query_heads, kv_heads, size = heads
        order = torch.randperm(BLOCKS, generator=random).tolist()
        columns = max(math.ceil(positions / BLOCK) for positions, _ in batch) + 1
        # What lies behind the last block of a row may be anything.
        self.table = torch.full((len(batch), columns), 10**6, dtype=torch.int32)
        slots: list[int] = []
        self.history: list[int] = []
        for row, (positions, rows) in enumerate(batch):
            blocks = [order.pop() for _ in range(math.ceil(positions / BLOCK))]
            self.table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            mine = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(positions)]
            self.history += mine[: positions - rows]
            slots += mine[positions - rows :]
        self.lengths = torch.tensor([positions for positions, _ in batch], dtype=torch.int32)
        self.starts = torch.tensor([0, *itertools.accumulate(rows for _, rows in batch)], dtype=torch.int32)
        self.slots = torch.tensor(slots + [-1] * padding)
        tokens = len(self.slots)
        self.query, self.key, self.value = (
            torch.randn(tokens, count, size, generator=random).bfloat16() for count in (query_heads, kv_heads, kv_heads)
        )
        self.past = torch.randn(2, len(self.history), kv_heads, size, generator=random).bfloat16()
        self.scale = size**-0.5

    def run(self, backend: object, cache: torch.Tensor) -> torch.Tensor:
        write, attend = backend.write, backend.attend  # type: ignore[attr-defined]  # a module
        write(self.past[0], self.past[1], cache, torch.tensor(self.history, dtype=torch.int64))
        write(self.key, self.value, cache, self.slots)
        output = torch.full_like(self.query, 7.0)
        attend(self.query, cache, self.table, self.lengths, self.starts, scale=self.scale, output=output)
        return output


BATCHES = [
    [(1, 1)],
    [(BLOCK - 1, 1), (BLOCK, 1), (BLOCK + 1, 1), (2 * BLOCK, 1), (2 * BLOCK + 1, 1)],
    [(BLOCK + 3, BLOCK + 3), (5, 1)],
    [(2 * BLOCK, 3), (4, 1), (BLOCK + 1, BLOCK)],
]


@pytest.mark.parametrize("heads", GEOMETRIES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("padding", [0, 3])
def test_it_agrees_with_the_reference_backend(
    heads: tuple[int, int, int], batch: list[tuple[int, int]], padding: int
) -> None:
    """Caches are equal bit for bit and outputs within three roundings, over ragged, chunked and padded steps."""
    step = _Step(batch, heads=heads, padding=padding)
    caches = [_cache(heads[1], heads[2], torch.bfloat16, 0.5) for _ in range(2)]
    found, expected = step.run(masked, caches[0]), step.run(reference, caches[1])
    assert torch.equal(caches[0], caches[1])
    torch.testing.assert_close(found, expected, rtol=3 * 2**-8, atol=3 * 2**-8)
    rows = int(step.starts[-1])
    assert not bool(found[rows:].any())


@pytest.mark.parametrize("fill", [math.nan, 1e4])
def test_unwritten_cells_reach_no_output(fill: float) -> None:
    """Whatever lies in cells that nobody wrote, the outputs are bitwise the same and finite."""
    step = _Step(BATCHES[3], heads=(6, 3, 16), padding=2)
    plain = step.run(masked, _cache(3, 16, torch.bfloat16, 0.0))
    filled = step.run(masked, _cache(3, 16, torch.bfloat16, fill))
    assert torch.equal(plain, filled)
    assert bool(torch.isfinite(filled).all())


@pytest.mark.parametrize("strided", [False, True])
def test_a_strided_cache_and_a_byte_cache(strided: bool) -> None:
    """A cache with a gap after each block keeps the gap, and a byte cache holds the same bits."""
    step = _Step(BATCHES[1], heads=(6, 3, 16))
    cache = _cache(3, 16, torch.bfloat16, 3.0, strided=strided)
    output = step.run(masked, cache)
    if strided:
        assert cache._base is not None
        assert bool((cache._base[:, 3] == 3.0).all())
    raw = _cache(3, 16, torch.bfloat16, 3.0).view(torch.uint8)
    assert torch.equal(step.run(masked, raw), output)
    assert torch.equal(raw.view(torch.bfloat16), cache)


@pytest.mark.parametrize("slots", [[0, -1, -1], [-1, 0, -1], [-1, -1, 5], [-1, -1, -1]])
def test_padding_rows_write_nothing(slots: list[int]) -> None:
    """Only the cells of slots that are not -1 change, slot 0 included, whichever row is padding."""
    key, value = torch.randn(2, 3, 3, 16).bfloat16()
    caches = [_cache(3, 16, torch.bfloat16, 9.0) for _ in range(2)]
    masked.write(key, value, caches[0], torch.tensor(slots))
    reference.write(key, value, caches[1], torch.tensor(slots))
    assert torch.equal(caches[0], caches[1])


def test_no_rows_are_no_write() -> None:
    """An empty slot mapping leaves the cache as it is."""
    cache = _cache(3, 16, torch.bfloat16, 9.0)
    masked.write(torch.zeros(2, 3, 16).bfloat16(), torch.zeros(2, 3, 16).bfloat16(), cache, torch.tensor([]).long())
    assert bool((cache == 9.0).all())


def test_padding_requests_and_trailing_output_rows_come_back_as_zeros() -> None:
    """Rows of no request are zero, also where padding requests follow and the output is longer than the query."""
    step = _Step([(5, 1)], heads=(6, 3, 16), padding=2)
    table = torch.cat([step.table, torch.zeros_like(step.table)])
    cache = _cache(3, 16, torch.bfloat16, math.nan)
    expected = step.run(masked, cache)
    output = torch.full((5, 6 * 16), 7.0).bfloat16()
    masked.attend(
        step.query, cache, table, torch.tensor([5, 0]), torch.tensor([0, 1, 1]), scale=step.scale, output=output
    )
    assert torch.equal(output[0], expected[0].flatten())
    assert not bool(output[1:].any())


@pytest.mark.parametrize(
    ("cache", "dtype"),
    [
        (torch.zeros(2, 3, BLOCK, 48, dtype=torch.uint8), torch.bfloat16),
        (torch.zeros(2, 3, BLOCK, 64), torch.bfloat16),
        (torch.zeros(2, 3, BLOCK, 32, dtype=torch.bfloat16), torch.float32),
    ],
)
def test_cells_of_another_size_are_refused(cache: torch.Tensor, dtype: torch.dtype) -> None:
    """A cache of another format, or rows that are not 16-bit, are refused in one line."""
    with pytest.raises(FormatError, match=r"expected \[blocks, heads, block_size\] cells of 64 dense bytes"):
        masked.write(torch.zeros(1, 3, 16, dtype=dtype), torch.zeros(1, 3, 16, dtype=dtype), cache, torch.tensor([0]))
