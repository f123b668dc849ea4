"""Fills: cells that nobody wrote must not reach an output."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.kv import formats
from pytest_kvqual.kv.formats import Cells
from pytest_kvqual.oracles import fills
from pytest_kvqual.oracles.findings import Tally
from pytest_kvqual.oracles.step import NO_SLOT, RowRequest, plan_step

BLOCK, BLOCKS = 4, 12


def _slots(
    requests: list[RowRequest],
    table: list[list[int]],
    *,
    held: set[int] | None = None,
    recycled: frozenset[int] = frozenset(),
) -> list[int]:
    own = {block for request in requests for block in request.blocks if block != NO_SLOT}
    found = fills.unwritten(
        plan_step(requests, BLOCK),
        torch.tensor(table, dtype=torch.int32).view(len(table), -1),
        held=frozenset(own | (held or set())),
        blocks=BLOCKS,
        recycled=recycled,
    )
    assert found.dtype == torch.int64
    return found.tolist()


def _whole(*blocks: int) -> set[int]:
    return {block * BLOCK + offset for block in blocks for offset in range(BLOCK)}


def _request(name: str, length: int, *blocks: int) -> RowRequest:
    return RowRequest(request=name, start=length - 1, scheduled=1, blocks=blocks)


def test_the_rest_of_a_last_block_and_what_is_in_reach_are_unwritten() -> None:
    """The tail, the block behind it, the unused table entries, block 0 and the last one; not what a request wrote."""
    found = _slots([_request("a", 6, 7, 3)], [[7, 3, 5, 9]])
    assert found == sorted({14, 15} | _whole(0, 4, 5, 9, 11))


@pytest.mark.parametrize(("length", "tail"), [(4, set()), (5, {13, 14, 15}), (7, {15}), (8, set())])
def test_the_tail_begins_behind_the_last_position(length: int, tail: set[int]) -> None:
    """A full last block has no tail; the others begin at the length."""
    found = set(_slots([_request("a", length, 7, 3)], [[7, 3]]))
    if length > 4:
        assert found == tail | _whole(0, 4, 11)
    else:
        # Block 3 is granted ahead: nobody has written to it.
        assert found == _whole(0, 3, 8, 11)
        assert set(_slots([_request("a", 4, 7, 0)], [[7, 0]])) == _whole(0, 8, 11)
        assert set(_slots([_request("a", 4, 7, 400, -3)], [[7]])) == _whole(0, 8, 11)


def test_blocks_that_others_hold_are_left_alone() -> None:
    """Block 0, the last, the one behind, a recycled one and a table entry are spared where a request holds them."""
    found = _slots([_request("a", 6, 7, 3)], [[7, 3, 5, 6]], held={0, 4, 5, 11, 8}, recycled=frozenset({8, 9}))
    assert found == sorted({14, 15} | _whole(6, 9))


def test_recycled_blocks_are_filled() -> None:
    """A block that a finished request held is a stale one in reach."""
    assert set(_slots([_request("a", 4, 7)], [[7]], recycled=frozenset({2, 7}))) == _whole(0, 2, 8, 11)


def test_blocks_outside_the_pool_are_not_touched() -> None:
    """Wild table entries and the block behind the last of the pool are not there to be filled."""
    found = _slots([_request("a", 4, 11)], [[11, -1, 12, 400]])
    assert set(found) == _whole(0)


def test_requests_without_blocks_and_without_table_rows() -> None:
    """A request whose last block was taken back, or that has no table row, has no tail."""
    found = _slots(
        [RowRequest(request="a", start=4, scheduled=1, blocks=(7, NO_SLOT)), _request("b", 3, 5)], [[7, NO_SLOT, 9]]
    )
    assert set(found) == _whole(0, 9, 11) | {23} | _whole(6)
    assert set(_slots([RowRequest(request="a", start=0, scheduled=1, blocks=())], [[3]])) == _whole(0, 3, 11)


def test_a_later_requests_table_is_looked_at_too() -> None:
    """Every request contributes its own tail and table."""
    found = _slots([_request("a", 4, 7), _request("b", 1, 2)], [[7, 1], [2, 6]])
    assert set(found) == _whole(0, 1, 3, 6, 8, 11) | {9, 10, 11}


@given(st.lists(st.integers(1, 11), min_size=1, max_size=3), st.integers(0, 2**31))
def test_no_written_cell_is_filled_and_each_slot_once(lengths: list[int], seed: int) -> None:
    """Whatever the batch and the tables, a position that a request has written is never filled."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randperm(BLOCKS, generator=generator).tolist()
    requests, table, written = [], [], set()
    for index, length in enumerate(lengths):
        blocks = [pool.pop() for _ in range(-(-length // BLOCK))]
        requests.append(_request(f"r{index}", length, *blocks))
        table.append((blocks + torch.randint(0, BLOCKS, (5,), generator=generator).tolist())[:5])
        written |= {blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(length)}
    found = _slots(requests, table)
    assert found == sorted(set(found))
    assert not set(found) & written
    tails = {slot for block in _blocks(requests) for slot in range(block * BLOCK, block * BLOCK + BLOCK)} - written
    assert tails <= set(found)


def _blocks(requests: list[RowRequest]) -> set[int]:
    return {block for request in requests for block in request.blocks}


@pytest.mark.parametrize("name", ["k16v16", "k16v8", "k8v8", "k8v8-inline"])
def test_the_three_contents(name: str) -> None:
    """NaN and 1e4 as the format stores them, and the other cells repeated as often as needed."""
    codec = formats.declared(name)
    key, value = (torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
    other = codec.encode(key, value, 0.5)
    made = fills.contents(codec, count=5, kv_heads=3, head_size=8, dtype=torch.bfloat16, v_scale=0.5, other=other)
    assert set(made) == set(fills.NAMES) == {"nan", "large", "other-request"}
    assert all(cells.k.shape == (5, 3, other.k.shape[2]) and cells.v.shape[0] == 5 for cells in made.values())
    assert torch.equal(made["other-request"].k, other.k[[0, 1, 0, 1, 0]])
    assert torch.equal(made["other-request"].v, other.v[[0, 1, 0, 1, 0]])
    for decoded in codec.decode(made["nan"], 0.5):
        assert bool(decoded.isnan().all())
    large = codec.decode(made["large"], 0.5)
    expected = {"k16v16": 9984.0, "k8v8-inline": float(large[1][0, 0, 0])}.get(name, 224.0)
    assert torch.equal(large[1], torch.full_like(large[1], expected))
    assert bool((large[0] >= (448 if name == "k8v8" else 9000)).all())
    assert fills.LARGE == 1e4


def test_no_cells_are_no_contents() -> None:
    """Nothing to fill gives cells of no slot."""
    codec = formats.K16V8()
    one = torch.ones(1, 3, 8).bfloat16()
    made = fills.contents(
        codec, count=0, kv_heads=3, head_size=8, dtype=torch.bfloat16, v_scale=1.0, other=codec.encode(one, one, 1.0)
    )
    assert all(isinstance(cells, Cells) and cells.k.shape == (0, 3, 16) for cells in made.values())


# -- comparison ----------------------------------------------------------------------------------------------------

PLAN = plan_step([_request("a", 6, 7, 3), RowRequest(request="b", start=2, scheduled=2, blocks=(5,))], BLOCK)


def _output(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(3)).to(dtype)


def _changed(before: torch.Tensor, after: torch.Tensor, fill: str = "nan") -> tuple[int | None, Tally]:
    tally = Tally()
    return fills.check_fill(tally, PLAN, layer="L", fill=fill, before=before, after=after), tally


@given(st.integers(0, 4 * 12 - 1), st.integers(0, 15))
def test_any_changed_bit_of_a_row_is_found(element: int, bit: int) -> None:
    """Outputs are compared bit by bit, over the rows of the step; padding rows behind them are not looked at."""
    before, after = _output(), _output()
    after.view(torch.int16).view(-1)[element] ^= torch.tensor(1 << bit if bit < 15 else -(1 << 15), dtype=torch.int16)
    row, tally = _changed(before, after)
    expected = element // 12
    assert row == (expected if expected < 3 else None)
    assert tally.findings_total == (expected < 3)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [(0.0, -0.0, 1), (math.nan, math.nan, 0), (math.nan, 1.0, 1), (1.0, math.nan, 1), (math.inf, math.inf, 0)],
)
def test_the_comparison_is_of_bits(left: float, right: float, expected: int) -> None:
    """-0.0 is not 0.0; NaN equals NaN of the same bits and no number."""
    before, after = _output(), _output()
    before[1, 1, 2], after[1, 1, 2] = left, right
    assert _changed(before, after)[1].findings_total == expected


@pytest.mark.parametrize(
    ("fill", "kind", "words"),
    [
        ("nan", "nan-fill", "NaN"),
        ("large", "large-fill", "1e4"),
        ("other-request", "other-request-fill", "another request's cells"),
    ],
)
def test_the_finding_names_row_fill_and_tail(fill: str, kind: str, words: str) -> None:
    """Kind and words are those of the fill; the first changed row is named with the tail of its last block."""
    before, after = _output(), _output()
    after[:3] += 1
    row, tally = _changed(before.flatten(1), after.flatten(1), fill)
    assert row == 0
    assert tally.kinds == {kind: 3}
    (line,) = tally.findings
    assert line == (
        f"L: output of request a position 5 changed when cells that nobody wrote were filled with {words}; its last"
        " block 3 is unwritten from offset 2 (3 of 3 rows of this step)"
    )
    row, tally = _changed(before, torch.cat([before[:1], after[1:]]), fill)
    assert row == 1
    assert "request b position 2 changed" in tally.findings[0]
    assert "its last block" not in tally.findings[0]
    assert tally.findings[0].endswith(" (2 of 3 rows of this step)")


def test_equal_outputs_are_no_finding() -> None:
    """Nothing changed, in either width."""
    for dtype in (torch.bfloat16, torch.float32):
        assert _changed(_output(dtype), _output(dtype))[0] is None
    empty = plan_step([], BLOCK)
    tally = Tally()
    assert fills.check_fill(tally, empty, layer="L", fill="nan", before=_output(), after=_output() + 1) is None
    assert tally.findings_total == 0
