"""Counting checks and objections."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.oracles.findings import KEPT_FINDINGS, Tally


@given(st.lists(st.tuples(st.sampled_from(["wrong-cell", "wrong-slot"]), st.integers(-1, 5)), max_size=60))
def test_every_finding_is_counted_by_kind(found: list[tuple[str, int]]) -> None:
    """Totals and kinds add up over all findings; words are kept of the first ones; none or fewer is no finding."""
    tally = Tally()
    for index, (kind, number) in enumerate(found):
        tally.find(kind, f"line {index}", number)
    real = [(index, kind, number) for index, (kind, number) in enumerate(found) if number > 0]
    assert tally.findings_total == sum(number for *_, number in real)
    assert tally.kinds == {
        kind: sum(number for _, other, number in real if other == kind) for kind in {kind for _, kind, _ in real}
    }
    assert tally.findings == [f"line {index}" for index, *_ in real[:KEPT_FINDINGS]]
    assert KEPT_FINDINGS == 40


def test_a_finding_counts_once_unless_told() -> None:
    """Without a number a finding counts as one."""
    tally = Tally()
    tally.find("wrong-row", "a line")
    tally.find("wrong-row", "another")
    assert (tally.findings_total, tally.kinds) == (2, {"wrong-row": 2})


def test_counts_add_up() -> None:
    """What was checked is added up by name, from nothing."""
    tally = Tally()
    for number in (3, 0, True):
        tally.checked("rows_checked", number)
    assert tally.counts == {"rows_checked": 4}


def test_the_mapping_is_json_and_detached() -> None:
    """The record of a tally is JSON-ready and does not change with the tally."""
    tally = Tally()
    tally.checked("cells_checked", 7)
    tally.find("wrong-cell", "a line", 2)
    record = tally.to_dict()
    tally.find("wrong-slot", "another line")
    assert json.loads(json.dumps(record)) == {
        "cells_checked": 7,
        "findings": ["a line"],
        "findings_total": 2,
        "kinds": {"wrong-cell": 2},
    }


def test_forty_findings_are_kept_in_words() -> None:
    """The forty-first is counted and not kept."""
    tally = Tally()
    for number in range(41):
        tally.find("wrong-cell", f"line {number}")
    assert tally.findings == [f"line {number}" for number in range(40)]
    assert tally.findings_total == 41
