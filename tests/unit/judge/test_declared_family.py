"""The family that is judged is the one that the study declares."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from timed_plan import comparison, measured, plan, rules, study

from pytest_kvqual.errors import StudyError
from pytest_kvqual.judge.gates.superiority import judge
from pytest_kvqual.judge.verdict import Outcome

BOTH = (comparison(), comparison(metric="tpot_p50"))


@pytest.mark.parametrize("left_out", [True, False])
def test_a_comparison_left_out_or_added_fails(left_out: bool) -> None:
    """With one comparison less than declared, or one more, trials that would pass do not, and it is named."""
    whole, one = plan(blocks=12, comparisons=BOTH), plan(blocks=12)
    declared = study(rules(blocks=12, comparisons=BOTH if left_out else BOTH[:1]))
    given = replace(whole, comparisons=whole.comparisons[:1]) if left_out else whole
    verdict = judge(declared, given, arm="candidate", trials=measured(given, Fraction(1, 2)))
    assert verdict.outcome is Outcome.FAIL
    where = "left out" if left_out else "added"
    assert verdict.figure == (
        f"rule 1: plan: tpot_p50 of candidate against 'native' in open: found it {where}, expected the declared family"
    )
    right, matching = (study(rules(blocks=12)), one) if not left_out else (declared, whole)
    assert judge(right, matching, arm="candidate", trials=measured(matching, Fraction(1, 2))).outcome is Outcome.PASS


def test_one_comparison_in_both_directions_is_refused() -> None:
    """Candidate over control and control over candidate are one two-sided test."""
    with pytest.raises(StudyError, match="in one direction"):
        plan(blocks=12, comparisons=(comparison(), comparison(candidate="native", control="candidate")))
