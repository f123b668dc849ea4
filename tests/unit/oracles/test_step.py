"""The plan of a step, derived from the scheduler's decisions."""

from __future__ import annotations

import random as standard_random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.oracles.step import NO_SLOT, RowRequest, plan_step, row_map_mismatches, slots_of


def _request(name: str, start: int, scheduled: int, blocks: tuple[int, ...]) -> RowRequest:
    return RowRequest(request=name, start=start, scheduled=scheduled, blocks=blocks)


@pytest.mark.parametrize(
    ("blocks", "positions", "expected"),
    [
        ([7, 2], [0, 3, 4, 7], [28, 31, 8, 11]),
        ([0], [0, 3], [0, 3]),
        ([7, 2], [7, 8, 400], [11, NO_SLOT, NO_SLOT]),
        ([NO_SLOT, 2], [0, 3, 4], [NO_SLOT, NO_SLOT, 8]),
        ([], [0], [NO_SLOT]),
        ([3], [], []),
    ],
)
def test_slots_follow_the_block_ids(blocks: list[int], positions: list[int], expected: list[int]) -> None:
    """A slot is block times block size plus offset; a position without a block has none."""
    assert slots_of(blocks, torch.tensor(positions, dtype=torch.int64), 4).tolist() == expected


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=0, max_size=5),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_rows_count_up_within_each_request(
    shapes: list[tuple[int, int]], block_size: int, random: standard_random.Random
) -> None:
    """Rows are grouped by request in order, positions count up from its start, and slots never repeat."""
    pool = list(range(1, 200))
    random.shuffle(pool)
    requests = []
    for index, (start, scheduled) in enumerate(shapes):
        needed = -(-(start + scheduled) // block_size)
        requests.append(_request(f"r{index}", start, scheduled, tuple(pool.pop() for _ in range(needed))))
    plan = plan_step(requests, block_size)
    starts = plan.query_start()
    assert len(starts) == len(requests) + 1
    assert (starts[0], starts[-1]) == (0, plan.rows)
    assert plan.rows == sum(scheduled for _, scheduled in shapes)
    assert len(set(plan.slots.tolist())) == plan.rows
    held = set()
    for index, request in enumerate(requests):
        rows = range(starts[index], starts[index + 1])
        assert plan.owner[rows.start : rows.stop].tolist() == [index] * len(rows)
        assert plan.positions[rows.start : rows.stop].tolist() == list(range(request.start, request.seq_len))
        for row in rows:
            position = int(plan.positions[row])
            block = request.blocks[position // block_size]
            assert divmod(int(plan.slots[row]), block_size) == (block, position % block_size)
            assert plan.name(row) == f"request r{index} position {position}"
        assert plan.blocks_of(index) == request.blocks
        held |= set(request.blocks)
    assert plan.live_blocks() == sorted(held)


def test_only_blocks_with_history_are_live() -> None:
    """A block granted ahead of its first position, and one that was taken back, hold no history."""
    plan = plan_step([_request("a", 3, 2, (NO_SLOT, 9, 3)), _request("b", 0, 4, (5, 1))], 4)
    assert plan.blocks_of(0) == (NO_SLOT, 9)
    assert plan.blocks_of(1) == (5,)
    assert plan.live_blocks() == [5, 9]
    assert plan.slots.tolist() == [NO_SLOT, 36, 20, 21, 22, 23]


def test_the_row_map_is_checked_by_what_rows_were_fed() -> None:
    """A rotated batch order is caught by the tokens, and rows whose token is unknown are not counted."""
    requests = [_request("a", 0, 2, (1,)), _request("b", 3, 1, (2,))]
    tokens = {"a": [10, 11], "b": [20, 21, 22, 23]}
    fed = torch.tensor([10, 11, 23, 99])
    assert row_map_mismatches(plan_step(requests, 4), fed, tokens) == (3, [])
    rotated = plan_step(requests[1:] + requests[:1], 4)
    assert row_map_mismatches(rotated, fed, tokens) == (3, [0, 1, 2])
    assert row_map_mismatches(plan_step(requests, 4), fed, {"a": [10]}) == (1, [])
    assert row_map_mismatches(plan_step(requests, 4), fed, {"b": [20, 21, 22]}) == (0, [])
    assert row_map_mismatches(plan_step(requests, 4), fed, {"b": [20, 21, 22, 24]}) == (1, [2])


def test_a_row_that_was_fed_nothing_is_wrong() -> None:
    """Fewer tokens than rows: the rows without one are wrong, not unchecked."""
    plan = plan_step([_request("a", 0, 3, (1,))], 4)
    assert row_map_mismatches(plan, torch.tensor([10, 11]), {"a": [10, 11, 12]}) == (3, [2])
    assert row_map_mismatches(plan_step([], 4), torch.tensor([1]), {}) == (0, [])


def test_no_slot_is_what_the_engine_writes_for_it() -> None:
    """A position without a block has the slot that engines give to rows that are not written."""
    assert NO_SLOT == -1
