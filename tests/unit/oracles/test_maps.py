"""Stale maps: what a layer is about to use is of this very step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.oracles.findings import Tally
from pytest_kvqual.oracles.maps import check_maps
from pytest_kvqual.oracles.step import NO_SLOT, RowRequest, plan_step

PLAN = plan_step(
    [
        RowRequest(request="a", start=0, scheduled=6, blocks=(5, 2)),
        RowRequest(request="b", start=7, scheduled=1, blocks=(NO_SLOT, 3, 6)),
    ],
    4,
)
RIGHT = {
    "block_table": [[5, 2, 0], [1, 3, 9]],
    "seq_lens": [6, 8],
    "query_start_loc": [0, 6, 7],
}


def _check(**changed: list[Any]) -> tuple[bool, Tally]:
    tally = Tally()
    tensors = {name: torch.tensor(value, dtype=torch.int32) for name, value in {**RIGHT, **changed}.items()}
    return check_maps(tally, PLAN, layer="L", **tensors), tally


def test_agreeing_maps_find_nothing() -> None:
    """Maps that follow the plan pass, whatever stands behind a history or for a block that was taken back."""
    good, tally = _check()
    assert good
    assert tally.to_dict() == {"tables_compared": 2, "findings": [], "findings_total": 0, "kinds": {}}


def test_padding_requests_have_no_length_and_start_at_the_end() -> None:
    """Rows behind the step's requests pass with length 0 and start T, whatever their table row holds."""
    good, tally = _check(
        block_table=[[5, 2, 0], [1, 3, 9], [8, 8, 8]], seq_lens=[6, 8, 0, 0], query_start_loc=[0, 6, 7, 7, 7]
    )
    assert good
    assert tally.counts["tables_compared"] == 2


@pytest.mark.parametrize(
    ("changed", "kind", "number", "text"),
    [
        (
            {"block_table": [[5, 9, 0], [1, 3, 9]]},
            "block-table",
            1,
            "L: block table of request a holds block 9 at logical block 1, expected block 2",
        ),
        (
            {"block_table": [[2, 5, 0], [1, 3, 9]]},
            "block-table",
            2,
            "L: block table of request a holds block 2 at logical block 0, expected block 5",
        ),
        (
            {"block_table": [[5, 2, 0]]},
            "block-table",
            1,
            "L: block table of request b holds block nothing at logical block 1, expected block 3",
        ),
        (
            {"block_table": [[5], [1]]},
            "block-table",
            2,
            "L: block table of request a holds block nothing at logical block 1, expected block 2",
        ),
        ({"seq_lens": [6, 9]}, "sequence-length", 1, "L: seq_len of request b is 9, expected 8"),
        ({"seq_lens": [5, 8]}, "sequence-length", 1, "L: seq_len of request a is 5, expected 6"),
        ({"seq_lens": [6]}, "sequence-length", 1, "L: seq_len of request b is no row, expected 8"),
        ({"seq_lens": [6, 8, 3, 4]}, "padding-rows", 2, "L: seq_len of a padding request is 3, expected 0"),
        ({"query_start_loc": [0, 5, 7]}, "row-starts", 1, "L: query_start_loc is [0, 5, 7], expected [0, 6, 7]"),
        ({"query_start_loc": [0, 6]}, "row-starts", 1, "L: query_start_loc is [0, 6], expected [0, 6, 7]"),
        (
            {"query_start_loc": [0, 6, 7, 8, 7]},
            "padding-rows",
            1,
            "L: query_start_loc of padding requests is [8, 7], expected 7 in each",
        ),
    ],
)
def test_wrong_maps_are_named(changed: dict[str, list[Any]], kind: str, number: int, text: str) -> None:
    """Each map that does not follow the plan is named with both values, and every wrong entry counts."""
    good, tally = _check(**changed)
    assert not good
    assert tally.findings[0] == text
    assert sum(tally.kinds.values()) == number
    assert set(tally.kinds) == {kind}


@given(st.sampled_from(sorted(RIGHT)), st.integers(0, 5), st.integers(-3, 12))
def test_any_changed_entry_within_the_history_is_found(name: str, at: int, value: int) -> None:
    """An entry that a kernel would follow cannot change unnoticed; others may."""
    tensor = torch.tensor(RIGHT[name], dtype=torch.int32)
    at %= tensor.numel()
    changed = tensor.clone()
    changed.view(-1)[at] = value
    followed = name != "block_table" or at in (0, 1, 4)
    good, _ = _check(**{name: changed.tolist()})
    assert good == (bool(torch.equal(changed, tensor)) or not followed)


def test_earlier_findings_do_not_spoil_a_later_step() -> None:
    """What is returned is of this call only."""
    _, tally = _check(seq_lens=[6, 9])
    tensors = {name: torch.tensor(value) for name, value in RIGHT.items()}
    assert check_maps(tally, PLAN, layer="L", **tensors)
    assert tally.counts["tables_compared"] == 4
