"""The conclusion that all judges share."""

from __future__ import annotations

import math

import pytest

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.judge.gates._conclude import Objections, complete_poison, conclude, spelled
from pytest_kvqual.judge.verdict import Check, Outcome, Poison

NULL = Check(passed=True, figure="0 differ")
CAUGHT = Poison(fault="f", caught=True, figure="found")
MISSED = Poison(fault="f", caught=False, figure="nothing")


def conclusion(
    *, found: str = "", missing: str = "", null: Check | None = NULL, poison: tuple[Poison, ...] = (CAUGHT,)
) -> tuple[Outcome, tuple[str, ...], str]:
    """Outcome, findings and figure of one combination."""
    objections = Objections()
    if missing:
        objections.gap(2, missing)
    if found:
        objections.find(1, found)
    verdict = conclude("g", figure="in order", objections=objections, null=null, poison=poison, details={})
    return verdict.outcome, verdict.findings, verdict.figure


def test_passes_with_nothing_against_it() -> None:
    """Only without findings and gaps, with a passed null and every fault caught, is it a PASS."""
    assert conclusion() == (Outcome.PASS, (), "in order")


def test_fails_on_an_objection_even_with_a_gap() -> None:
    """A positive finding fails; what is missing besides is listed after it."""
    assert conclusion(found="bad", missing="gone") == (Outcome.FAIL, ("rule 1: bad", "rule 2: gone"), "rule 1: bad")


def test_is_inconclusive_on_a_gap() -> None:
    """Incomplete evidence concludes nothing."""
    assert conclusion(missing="gone")[0] is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("null", [None, Check(passed=False, figure="3 differ")])
@pytest.mark.parametrize("found", ["", "bad"])
def test_is_inconclusive_without_a_passed_null(null: Check | None, found: str) -> None:
    """Without a passed null not even an objection counts, and the null is named first."""
    outcome, findings, figure = conclusion(found=found, null=null)
    assert outcome is Outcome.INCONCLUSIVE
    assert figure == findings[0]
    assert findings[0].startswith("null: ")


@pytest.mark.parametrize("poison", [(), (MISSED,), (CAUGHT, MISSED)])
def test_is_inconclusive_unless_every_fault_is_caught(poison: tuple[Poison, ...]) -> None:
    """Without poison, or with one fault missed, silence does not count."""
    outcome, findings, _ = conclusion(poison=poison)
    assert outcome is Outcome.INCONCLUSIVE
    assert findings[0].startswith("poison: ")


@pytest.mark.parametrize("poison", [(), (MISSED,), (CAUGHT, MISSED)])
def test_an_objection_stands_although_a_fault_was_missed(poison: tuple[Poison, ...]) -> None:
    """A finding of a gate whose null passed fails the arm, and the missed fault is named after it."""
    outcome, findings, figure = conclusion(found="bad", poison=poison)
    assert outcome is Outcome.FAIL
    assert figure == findings[0]
    assert "bad" in findings[0]
    assert findings[-1].startswith("poison: ")


def test_reading_turns_errors_into_gaps() -> None:
    """Evidence that cannot be read is a gap under its rule; other errors are bugs and propagate."""
    objections = Objections()

    def fail(error: Exception) -> None:
        raise error

    with objections.reading(3):
        fail(EvidenceError("found nothing, expected something, in 'x'"))
    with objections.reading(4):
        float(10**400)
    assert [rule for rule, _ in objections.missing] == [3, 4]
    with pytest.raises(ZeroDivisionError), objections.reading(5):
        fail(ZeroDivisionError())


def test_complete_poison_keeps_order_and_names_what_is_absent() -> None:
    """Each declared fault appears once: as run, as a miss when it was not run, or as a miss when it was run twice."""
    other = Poison(fault="g", caught=True, figure="found")
    assert complete_poison([CAUGHT, other, CAUGHT], ("h", "f")) == (
        Poison(fault="f", caught=False, figure="found 2 records, expected 1"),
        other,
        Poison(fault="h", caught=False, figure="it was not run"),
    )


def test_spelled() -> None:
    """A number that JSON lacks becomes its word."""
    assert [spelled(value) for value in (0.1, math.nan, math.inf, -math.inf)] == [0.1, "nan", "inf", "-inf"]
