"""The ledger of what was handed to the cache update."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.kv.ledger import Ledger


def _cells(rows: int, value: int, *, width: int = 3) -> torch.Tensor:
    return torch.full((rows, 2, width), value, dtype=torch.uint8)


@given(st.lists(st.integers(0, 150), min_size=1, max_size=6))
def test_history_is_what_was_recorded(chunks: list[int]) -> None:
    """Chunks recorded one after the other come back whole and in order, however the buffer grew."""
    ledger = Ledger()
    start = 0
    for number, rows in enumerate(chunks):
        ledger.record("L", "a", start, _cells(rows, number))
        start += rows
        assert ledger.length("L", "a") == start
    expected = torch.cat([_cells(rows, number) for number, rows in enumerate(chunks)])
    assert torch.equal(ledger.history("L", "a", start), expected)
    assert torch.equal(ledger.history("L", "a", start // 2), expected[: start // 2])
    assert ledger.covers("L", "a", start)
    assert not ledger.covers("L", "a", start + 1)


def test_a_gap_is_refused() -> None:
    """A write that leaves positions out is an error, and nothing is recorded of it."""
    ledger = Ledger()
    with pytest.raises(ValueError, match="ledger of request a ends at position 0, found a write at 2"):
        ledger.record("L", "a", 2, _cells(1, 1))
    ledger.record("L", "a", 0, _cells(3, 1))
    with pytest.raises(ValueError, match="ends at position 3, found a write at 4"):
        ledger.record("L", "a", 4, _cells(1, 1))
    assert ledger.length("L", "a") == 3


@given(st.integers(0, 80), st.integers(1, 80))
def test_a_rewrite_forgets_what_was_after_it(start: int, rows: int) -> None:
    """A request that starts again below its end has what was before, and what it wrote again."""
    ledger = Ledger()
    ledger.record("L", "a", 0, _cells(80, 1))
    ledger.record("L", "a", start, _cells(rows, 2))
    assert ledger.length("L", "a") == start + rows
    expected = torch.cat([_cells(start, 1), _cells(rows, 2)])
    assert torch.equal(ledger.history("L", "a", start + rows), expected)
    with pytest.raises(ValueError, match=rf"holds {start + rows} positions, expected {start + rows + 1}"):
        ledger.history("L", "a", start + rows + 1)


def test_what_is_recorded_is_a_copy() -> None:
    """A caller that writes to its tensor afterwards does not write to the ledger."""
    ledger, cells = Ledger(), _cells(2, 1)
    ledger.record("L", "a", 0, cells)
    cells.fill_(9)
    assert torch.equal(ledger.history("L", "a", 2), _cells(2, 1))


def test_one_history_may_be_recorded_as_anothers() -> None:
    """A prefix that is taken over is a copy: what either writes later is its own."""
    ledger = Ledger()
    ledger.record("L", "a", 0, _cells(4, 1))
    ledger.record("L", "b", 0, ledger.history("L", "a", 3))
    ledger.record("L", "b", 2, _cells(2, 5))
    ledger.record("L", "a", 1, _cells(1, 7))
    assert ledger.history("L", "b", 4)[:, 0, 0].tolist() == [1, 1, 5, 5]
    assert ledger.history("L", "a", 2)[:, 0, 0].tolist() == [1, 7]


def test_layers_and_requests_are_apart() -> None:
    """Layers may have cells of other sizes, and nothing that was not recorded is held."""
    ledger = Ledger()
    ledger.record("L", "a", 0, _cells(2, 1))
    ledger.record("M", "a", 0, _cells(3, 2, width=5))
    assert ledger.history("M", "a", 3).shape == (3, 2, 5)
    assert ledger.history("L", "a", 2).shape == (2, 2, 3)
    assert (ledger.length("L", "b"), ledger.length("N", "a")) == (0, 0)
    assert ledger.covers("L", "b", 0)
    assert not ledger.covers("L", "b", 1)
    with pytest.raises(ValueError, match="ledger of request b holds 0 positions, expected 1"):
        ledger.history("L", "b", 1)


def test_a_finished_request_is_forgotten_and_no_other() -> None:
    """Forgetting a request drops it in every layer and leaves the others; it may come back from nothing."""
    ledger = Ledger()
    for layer in ("L", "M"):
        for request in ("a", "b"):
            ledger.record(layer, request, 0, _cells(1, 1))
    ledger.forget("a")
    ledger.forget("nobody")
    assert [ledger.length(layer, "a") for layer in ("L", "M")] == [0, 0]
    assert [ledger.length(layer, "b") for layer in ("L", "M")] == [1, 1]
    ledger.record("L", "a", 0, _cells(1, 6))
    assert ledger.history("L", "a", 1)[0, 0, 0] == 6
