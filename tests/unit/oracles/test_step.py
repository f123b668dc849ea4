"""The plan of a step, derived from the scheduler's decisions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.oracles.step import RowRequest, plan_step, row_map_mismatches, shared_blocks, slots_of


def _request(name: str, start: int, scheduled: int, blocks: tuple[int, ...]) -> RowRequest:
    return RowRequest(request=name, start=start, scheduled=scheduled, blocks=blocks)


def test_slots_follow_the_block_ids() -> None:
    """A slot is the block of its position times the block size, plus the offset."""
    found = slots_of([7, 2], torch.tensor([0, 3, 4, 7]), 4)
    assert found.tolist() == [28, 31, 8, 11]


def test_a_position_beyond_the_blocks_is_refused() -> None:
    """A position that no granted block holds is an error that names both numbers."""
    with pytest.raises(ValueError, match="position 8 needs block 2, found 2 blocks"):
        slots_of([7, 2], torch.tensor([8]), 4)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_rows_count_up_within_each_request(shapes: list[tuple[int, int]], block_size: int, random: object) -> None:
    """Rows are grouped by request in order, positions count up from its start, and slots never repeat."""
    pool = list(range(1, 200))
    random.shuffle(pool)  # type: ignore[attr-defined]  # Hypothesis' random is a random.Random
    requests = []
    for index, (start, scheduled) in enumerate(shapes):
        needed = -(-(start + scheduled) // block_size)
        requests.append(_request(f"r{index}", start, scheduled, tuple(pool.pop() for _ in range(needed))))
    plan = plan_step(requests, block_size)
    assert plan.query_start()[-1] == plan.rows
    assert len(set(plan.slots.tolist())) == plan.rows
    for index, request in enumerate(requests):
        rows = plan.positions[plan.owner == index].tolist()
        assert rows == list(range(request.start, request.seq_len))
    assert not shared_blocks(plan)


def test_a_block_held_twice_is_named() -> None:
    """Two live requests that hold one block are named with their logical blocks."""
    plan = plan_step([_request("a", 0, 5, (3, 4)), _request("b", 0, 2, (4,))], 4)
    assert shared_blocks(plan) == ["block 4 is held by request a block 1 and by request b block 0, expected one holder"]


def test_a_block_beyond_the_history_is_not_shared() -> None:
    """A granted block that holds no history yet is nobody's."""
    plan = plan_step([_request("a", 0, 2, (3, 4)), _request("b", 0, 2, (4,))], 4)
    assert shared_blocks(plan) == []


def test_the_row_map_is_checked_by_what_rows_were_fed() -> None:
    """A rotated batch order is caught by the tokens, and rows whose token is unknown are not counted."""
    requests = [_request("a", 0, 2, (1,)), _request("b", 3, 1, (2,))]
    tokens = {"a": [10, 11], "b": [20, 21, 22, 23]}
    fed = torch.tensor([10, 11, 23, 99])
    assert row_map_mismatches(plan_step(requests, 4), fed, tokens) == (3, [])
    rotated = plan_step(requests[1:] + requests[:1], 4)
    assert row_map_mismatches(rotated, fed, tokens) == (3, [0, 1, 2])
    assert row_map_mismatches(plan_step(requests, 4), fed, {"a": [10]}) == (1, [])
