"""The determinism judge: both policies, each numbered rule, its null and its poison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pytest_kvqual.judge.gates import determinism
from pytest_kvqual.judge.gates.determinism import Evidence
from pytest_kvqual.judge.verdict import Outcome, Verdict

FAULT = "batch-leak"


def other(index: int) -> list[int]:
    """An answer in which the third token differs."""
    return [10 + index, 11, 99, 13]


def evidence(make: Any, policy: str = "order-invariant", answers: Any = None, **changes: Any) -> Evidence:
    """One arm's evidence in order but for ``changes``; the stored comparison follows from the records."""
    records = make.orders_records(make.parity_panel(), answers)
    parts = {
        "records": records,
        "inputs": make.orders_inputs(),
        "comparison": make.comparison(policy, records),
        **changes,
    }
    return Evidence(**parts)


def decide(make: Any, policy: str = "order-invariant", **changes: Any) -> Verdict:
    """The verdict over evidence in order but for ``changes``."""
    parts = {
        "candidate": evidence(make, policy),
        "null": evidence(make, policy),
        "poison": {FAULT: make.orders_records(make.parity_panel(), {"original-again": other, "rotated": other})},
        "faults": (FAULT,),
        **changes,
    }
    panel = parts.pop("panel", make.parity_panel())
    return determinism.judge(replace(make.study(), determinism=policy), panel, **parts)


@pytest.mark.parametrize("policy", ["order-invariant", "rotation-diagnostic"])
def test_passes_what_is_in_order(make: Any, policy: str) -> None:
    """Equal answers in every order pass under both policies; the details carry the comparison."""
    verdict = decide(make, policy)
    assert (verdict.outcome, verdict.findings, verdict.gate) == (Outcome.PASS, (), "determinism")
    assert verdict.figure == (
        "requests that differ from the original: rotated 0 of 3, original-again 0 of 3, natural 0 of 3"
    )
    assert verdict.details["comparison"] == evidence(make, policy).comparison
    assert verdict.details["policy"] == policy


@pytest.mark.parametrize("run", ["rotated", "original-again"])
def test_order_invariant_fails_a_token_that_differs(make: Any, run: str) -> None:
    """One token of one request in another order, or in the repetition, fails the arm; in the control's, the null."""
    changed = {run: lambda index: other(index) if index == 1 else make.parity_tokens(index)}
    broken = evidence(make, answers=changed)
    verdict = decide(make, candidate=broken)
    assert verdict.outcome is Outcome.FAIL
    line = (
        f"determinism: 1 of 3 requests answered otherwise in {run}, first 'p1': found token 99 at position 2, expected"
    )
    assert verdict.findings == (f"rule 3: {line} 12",)
    verdict = decide(make, null=broken)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.findings[0].startswith("null: rule 3: null determinism: 1 of 3 requests")


def test_rotation_diagnostic_reports_a_rotation_and_fails_a_repetition(make: Any) -> None:
    """Under the other policy a rotation that differs is reported, and a repetition that differs fails."""
    policy = "rotation-diagnostic"
    rotated = evidence(make, policy, {"rotated": other})
    verdict = decide(make, policy, candidate=rotated, null=rotated)
    assert verdict.outcome is Outcome.PASS
    pair = verdict.details["comparison"]["pairs"][0]  # type: ignore[index]  # details are JSON
    assert (pair["right"], pair["differ"], pair["of"]) == ("rotated", 3, 3)
    assert pair["first"][0] == {"id": "p0", "index": 2, "left": 12, "right": 99}
    verdict = decide(make, policy, candidate=evidence(make, policy, {"original-again": other}))
    assert verdict.outcome is Outcome.FAIL
    assert "3 of 3 requests answered otherwise in original-again" in verdict.findings[0]


@pytest.mark.parametrize("policy", ["order-invariant", "rotation-diagnostic"])
def test_natural_is_reported_only(make: Any, policy: str) -> None:
    """A natural run that differs decides nothing, and may be missing."""
    verdict = decide(make, policy, candidate=evidence(make, policy, {"natural": other}))
    assert verdict.outcome is Outcome.PASS
    assert verdict.figure.endswith("natural 3 of 3")
    records = [record for record in make.orders_records(make.parity_panel()) if record["run"] != "natural"]
    alone = evidence(make, policy, records=records, comparison=make.comparison(policy, records))
    assert decide(make, policy, candidate=alone).outcome is Outcome.PASS


def test_an_answer_that_ends_early_differs(make: Any) -> None:
    """An answer that is the beginning of the other is not equal to it."""
    records = make.orders_records(make.parity_panel())
    place = next(place for place, record in enumerate(records) if record["run"] == "rotated")
    item = make.parity_panel().items[1]
    records[place] = {**records[place], "body": make.body(item.prompt, [11, 11], finish="stop")}
    broken = evidence(make, records=records, comparison=make.comparison("order-invariant", records))
    verdict = decide(make, candidate=broken)
    assert verdict.outcome is Outcome.FAIL
    assert "first 'p1': found 2 tokens, expected 4" in verdict.findings[0]


def of(run: str, change: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """A change of one run's records, which come last then."""

    def apply(records: list[Any]) -> list[Any]:
        chosen = [record for record in records if record["run"] == run]
        return [record for record in records if record["run"] != run] + change(chosen)

    return apply


GAPS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no records": (lambda records: None, "the records are missing"),
    "an empty list": (lambda records: [], "no record of the run 'original'"),
    "no list": (lambda records: {"a": 1}, "found no list of records"),
    "no rotated run": (of("rotated", lambda records: []), "no record of the run 'rotated'"),
    "no repetition": (of("original-again", lambda records: []), "no record of the run 'original-again'"),
    "a run that nobody knows": (lambda records: [*records, {**records[0], "run": "sideways"}], "found no known run"),
    "a record without a run": (lambda records: [*records, 5], "found no known run"),
    "a request missing": (of("rotated", lambda records: records[1:]), "no record of 'p1'"),
    "a request twice": (of("rotated", lambda records: [*records, records[0]]), "found 'p1' twice, expected once"),
    "a natural request missing": (of("natural", lambda records: records[1:]), "no record of 'p0'"),
    "a request that failed": (
        of("original", lambda records: [{**records[0], "status": 500}, *records[1:]]),
        "found status 500, expected 200",
    ),
    "a request in error": (
        of("original", lambda records: [{**records[0], "error": "timeout"}, *records[1:]]),
        "found the error 'timeout'",
    ),
    "no body": (of("original", lambda records: [{**records[0], "body": None}, *records[1:]]), "body"),
    "NaN in a body": (of("original", lambda records: [{**records[0], "body": '{"x": NaN}'}, *records[1:]]), "NaN"),
    "another index": (
        of("rotated", lambda records: [{**records[0], "index": 2}, *records[1:]]),
        "found the index 2, expected 1",
    ),
    "a rotation that was none": (
        of("rotated", lambda records: sorted(records, key=lambda record: record["index"])),
        "the requests were sent in the panel's order, expected another",
    ),
    "an original in another order": (
        of("original", lambda records: records[::-1]),
        "in another order than the panel's",
    ),
    "a repetition in another order": (
        of("original-again", lambda records: records[::-1]),
        "original-again: the requests were sent in another order than the panel's",
    ),
}


@pytest.mark.parametrize(("change", "text"), GAPS.values(), ids=GAPS)
def test_is_inconclusive_when_the_capture_is_incomplete(make: Any, change: Any, text: str) -> None:
    """Runs that are missing, partial, failed, or not sent in the order they claim conclude nothing."""
    records = change(make.orders_records(make.parity_panel()))
    verdict = decide(make, candidate=evidence(make, records=records))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any(text in line for line in verdict.findings), verdict.findings
    verdict = decide(make, null=evidence(make, records=records))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert all(line.startswith("null: ") for line in verdict.findings)


INPUTS: dict[str, tuple[tuple[str | int, ...], Any, Outcome, str]] = {
    "a rotation with the original's inputs": (
        ("runs", "rotated", 0, "digests", 0),
        "a" * 64,
        Outcome.FAIL,
        "rule 4: determinism inputs, rank 0: the rotated order did not change the graph inputs",
    ),
    "inputs that never change": (
        ("runs", "original-again", 0, "digests"),
        ["c" * 64] * 3,
        Outcome.FAIL,
        "the graph inputs of all 3 steps are equal, expected them to change",
    ),
    "fewer digests than steps": (
        ("runs", "original", 0, "steps"),
        4,
        Outcome.INCONCLUSIVE,
        "found 3 digests, expected 4, one per step",
    ),
    "one step": (
        ("runs", "original", 0),
        {"rank": 0, "steps": 1, "digests": ["a" * 64]},
        Outcome.INCONCLUSIVE,
        "steps",
    ),
    "no step": (("runs", "original", 0), {"rank": 0, "steps": 0, "digests": []}, Outcome.INCONCLUSIVE, "steps"),
    "no digest": (("runs", "rotated", 0, "digests", 1), "abc", Outcome.INCONCLUSIVE, "digests[1]"),
    "another rank": (
        ("runs", "rotated", 0, "rank"),
        1,
        Outcome.INCONCLUSIVE,
        "determinism inputs, rotated, rank 0: in 'rank': found 1, expected 0",
    ),
    "a run without inputs": (("runs", "rotated"), "DELETE", Outcome.INCONCLUSIVE, "rotated"),
    "no rank": (("runs", "rotated"), [], Outcome.INCONCLUSIVE, "found 0 ranks, expected 1"),
    "a run that nobody knows": (("runs", "sideways"), [], Outcome.INCONCLUSIVE, "sideways"),
    "another schema": (("schema",), 2, Outcome.INCONCLUSIVE, "schema"),
    "no runs": (("runs",), None, Outcome.INCONCLUSIVE, "runs"),
    "no inputs": ((), None, Outcome.INCONCLUSIVE, "the graph inputs are missing"),
}


@pytest.mark.parametrize(("path", "value", "outcome", "text"), INPUTS.values(), ids=INPUTS)
def test_the_graph_inputs_must_change(
    make: Any, path: tuple[str | int, ...], value: Any, outcome: Outcome, text: str
) -> None:
    """Inputs that do not change between steps or orders fail; inputs that are not whole conclude nothing."""
    inputs = make.damage(make.orders_inputs(), path, make.delete if value == "DELETE" else value)
    verdict = decide(make, candidate=evidence(make, inputs=inputs))
    assert verdict.outcome is outcome
    assert any(text in line for line in verdict.findings), verdict.findings
    assert decide(make, null=evidence(make, inputs=inputs)).outcome is Outcome.INCONCLUSIVE


def test_the_inputs_of_a_repetition_may_be_its_own(make: Any) -> None:
    """The repetition may get other blocks than the original, or the same."""
    inputs = make.orders_inputs()
    inputs["runs"]["original-again"] = inputs["runs"]["original"]
    assert decide(make, candidate=evidence(make, inputs=inputs)).outcome is Outcome.PASS


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: {},
        lambda stored: 5,
        lambda stored: {**stored, "policy": "rotation-diagnostic"},
        lambda stored: {**stored, "pairs": stored["pairs"][:2]},
        lambda stored: {**stored, "pairs": [{**stored["pairs"][0], "of": 3.0}, *stored["pairs"][1:]]},
        lambda stored: {**stored, "schema": True},
        lambda stored: {**stored, "pairs": [{**stored["pairs"][0], "differ": 1}, *stored["pairs"][1:]]},
    ],
)
def test_a_stored_comparison_that_does_not_follow_is_objected_to(make: Any, change: Any) -> None:
    """The comparison is computed again from the records; another one fails, a missing one concludes nothing."""
    stored = change(make.comparison("order-invariant", make.orders_records(make.parity_panel())))
    verdict = decide(make, candidate=evidence(make, comparison=stored))
    assert verdict.outcome is Outcome.FAIL
    assert verdict.findings == (
        "rule 5: determinism: the stored comparison is not the one that follows from the records",
    )
    verdict = decide(make, candidate=evidence(make, comparison=None))
    assert verdict.outcome is Outcome.INCONCLUSIVE


def test_is_inconclusive_without_evidence(make: Any) -> None:
    """No evidence of the arm, or none of the control, concludes nothing; nor does a panel without a request."""
    verdict = decide(make, candidate=None)
    assert verdict.findings == ("rule 1: determinism: the evidence is missing",)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert decide(make, null=None).outcome is Outcome.INCONCLUSIVE
    empty = replace(make.parity_panel(), items=())
    assert decide(make, panel=empty).outcome is Outcome.INCONCLUSIVE


def test_every_rank_has_inputs_of_its_own(make: Any) -> None:
    """With two ranks, the second one's inputs must change too."""
    study = make.study()
    study = replace(study, engine=replace(study.engine, tensor_parallel_size=2))
    inputs = make.orders_inputs()
    for ranks in inputs["runs"].values():
        ranks.append({**ranks[0], "rank": 1})
    parts: dict[str, Any] = {
        "null": evidence(make, inputs=inputs),
        "poison": {FAULT: make.orders_records(make.parity_panel(), {"rotated": other})},
    }
    candidate = evidence(make, inputs=inputs)
    assert determinism.judge(study, make.parity_panel(), candidate=candidate, **parts).outcome is Outcome.PASS
    stuck = make.damage(inputs, ("runs", "rotated", 1), inputs["runs"]["original"][1])
    verdict = determinism.judge(study, make.parity_panel(), candidate=evidence(make, inputs=stuck), **parts)
    assert verdict.outcome is Outcome.FAIL
    assert "rank 1: the rotated order" in verdict.findings[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda records: None, "it was not run"),
        (lambda records: [], "no record of the run 'original'"),
        (lambda records: 5, "found no list of records"),
        (lambda records: [5], "found no known run"),
        (of("rotated", lambda records: []), "no record of the run 'rotated'"),
        (of("rotated", lambda records: [{**records[0], "status": 500}, *records[1:]]), "found status 500"),
        (of("rotated", lambda records: records[1:]), "found runs of different requests"),
        (lambda records: [record for record in records if record["id"] == "p0"], "in the panel's order"),
    ],
)
def test_poison_that_cannot_be_read_is_a_miss(make: Any, change: Any, text: str) -> None:
    """A fault that was not run, or whose three runs are not whole, was not caught."""
    records = change(make.orders_records(make.parity_panel(), {"rotated": other}))
    verdict = decide(make, poison={} if records is None else {FAULT: records})
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any(text in fault.figure for fault in verdict.poison if not fault.caught), verdict.poison


def test_a_fault_must_break_the_policy(make: Any) -> None:
    """A fault that changes no answer, or only what the policy reports, was missed; part of the panel may show it."""
    panel = make.parity_panel()
    verdict = decide(make, poison={FAULT: make.orders_records(panel)})
    assert verdict.findings == (f"poison: '{FAULT}' was not caught: found 0 of 3 requests that break order-invariant",)
    rotated = make.orders_records(panel, {"rotated": other})
    assert decide(make, poison={FAULT: rotated}).outcome is Outcome.PASS
    assert decide(make, "rotation-diagnostic", poison={FAULT: rotated}).outcome is Outcome.INCONCLUSIVE
    part = [record for record in rotated if record["id"] != "p2" and record["run"] != "natural"]
    assert not decide(make, poison={FAULT: part}).poison[0].figure.startswith("found 0")
    order = [record for record in part if record["run"] == "rotated"]
    assert [record["id"] for record in order] == ["p1", "p0"]
    assert decide(make, poison={FAULT: part}).outcome is Outcome.PASS


def test_earlier_failures_are_named_and_stay(make: Any) -> None:
    """A verdict names the earlier receipts that say FAIL, in its details and where a reader looks first."""
    earlier = ("receipts/x/08-determinism-1.json", "receipts/x/08-determinism-2.json")
    verdict = decide(make, earlier_failures=earlier)
    assert verdict.outcome is Outcome.PASS
    assert verdict.details["earlier_failures"] == list(earlier)
    assert verdict.figure.endswith(f"; earlier FAIL: {', '.join(earlier)}")
    verdict = decide(make, candidate=evidence(make, answers={"rotated": other}), earlier_failures=earlier[:1])
    assert verdict.outcome is Outcome.FAIL
    assert verdict.findings[-1] == f"earlier FAIL: {earlier[0]}"
    assert decide(make).details["earlier_failures"] == []
