"""A control whose known findings did not count is never called simply passed."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_kvqual.audit import chained
from pytest_kvqual.audit.rederive import GateResult
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict
from pytest_kvqual.report.terminal import null_word


@pytest.mark.parametrize(
    ("details", "word"),
    [
        ({}, "passed"),
        ({"null_waived": {}}, "passed"),
        ({"null_waived": {"nan-fill": 0}}, "passed"),
        ({"null_waived": {"nan-fill": 6540}}, "passed, waived"),
        ({"null_waived": "nan-fill"}, "passed"),
        ({"null_waived": {"nan-fill": "6540"}}, "passed"),
    ],
)
def test_a_null_with_waived_findings_says_so(details: dict[str, Any], word: str) -> None:
    """The word of the table and the page follows from the receipt's own count."""
    null = Check(passed=True, figure="0 findings")
    poison = (Poison(fault="tail", caught=True, figure="1 finding"),)
    verdict = Verdict(
        gate="replay", outcome=Outcome.PASS, figure="0 findings", null=null, poison=poison, details=details
    )
    assert null_word(verdict) == word


def test_the_audit_counts_what_is_waived() -> None:
    """Over all passes and ranks, by kind; kinds that are not waived are findings, and none of its numbers."""
    sections = [{"nan-fill": 2, "large-fill": 1}, {"nan-fill": 3}, {}]
    passes = [
        {"name": f"pass-{place}", "records": [{"rank": 0, "replay": {"kinds": kinds}}]}
        for place, kinds in enumerate(sections)
    ]
    assert chained._waived("replay", {"passes": passes}, {"nan-fill", "other"}) == {"nan-fill": 5}
    assert chained._waived("replay", {"passes": passes}, set()) == {}
    assert chained._waived("replay", None, {"nan-fill"}) == {}


@pytest.mark.parametrize(
    ("derived", "figure", "end"),
    [
        ("", "", "0.1"),
        ("PASS", "0.1", "0.1"),
        ("PASS", "0.2", "0.1; derived PASS: 0.2"),
        ("FAIL", "0.1", "0.1; derived FAIL: 0.1"),
    ],
)
def test_a_derived_figure_is_told_beside_a_stored_one(derived: str, figure: str, end: str) -> None:
    """A figure that does not follow from the records never stands alone, whatever the outcome."""
    result = GateResult(
        gate="nll", required=True, stored="PASS", figure="0.1", how="re-derived", derived=derived, derived_figure=figure
    )
    assert result.line() == f"nll: PASS (re-derived): {end}"
