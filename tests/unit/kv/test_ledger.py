"""The ledger of what was handed to the cache update."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.kv.ledger import Ledger


def _cells(rows: int, value: int) -> torch.Tensor:
    return torch.full((rows, 2, 3), value, dtype=torch.uint8)


@given(st.lists(st.integers(1, 150), min_size=1, max_size=6))
def test_history_is_what_was_recorded(chunks: list[int]) -> None:
    """Chunks recorded one after the other come back whole and in order."""
    ledger = Ledger(2, 3)
    start = 0
    for number, rows in enumerate(chunks):
        ledger.record("L", "a", start, _cells(rows, number))
        start += rows
    expected = torch.cat([_cells(rows, number) for number, rows in enumerate(chunks)])
    assert torch.equal(ledger.history("L", "a", start), expected)


def test_a_gap_is_refused() -> None:
    """A write that leaves positions out is an error."""
    ledger = Ledger(2, 3)
    with pytest.raises(ValueError, match="ends at position 0, found a write at 2"):
        ledger.record("L", "a", 2, _cells(1, 1))


def test_a_rewrite_forgets_what_was_after_it() -> None:
    """A resumed request that starts again has only what it wrote again."""
    ledger = Ledger(2, 3)
    ledger.record("L", "a", 0, _cells(5, 1))
    ledger.record("L", "a", 0, _cells(2, 2))
    assert ledger.covers("L", "a", 2)
    with pytest.raises(ValueError, match="holds 2 positions, expected 3"):
        ledger.history("L", "a", 3)


def test_a_finished_request_is_forgotten_and_no_other() -> None:
    """Forgetting a request drops it in every layer and leaves the others."""
    ledger = Ledger(2, 3)
    for layer in ("L", "M"):
        for request in ("a", "b"):
            ledger.record(layer, request, 0, _cells(1, 1))
    ledger.forget("a")
    assert not ledger.covers("L", "a", 1)
    assert not ledger.covers("M", "a", 1)
    assert ledger.covers("M", "b", 1)
