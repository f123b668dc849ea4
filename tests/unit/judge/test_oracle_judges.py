"""The routing and the placement judge: each numbered rule, their nulls and their poison."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest

from pytest_kvqual.judge.gates import placement, routing
from pytest_kvqual.judge.verdict import Outcome, Verdict

DELETE = "DELETE"
JUDGES = {"routing": routing, "placement": placement}
FAULT = {"routing": "slot-off-by-one", "placement": "other-layer-cache"}
RANK = ("healthy", 0)


@pytest.fixture(params=sorted(JUDGES))
def gate(request: pytest.FixtureRequest) -> str:
    """Each of the two gates."""
    return str(request.param)


def decide(make: Any, gate: str, **changes: Any) -> Verdict:
    """The verdict over evidence in order but for ``changes``."""
    module: ModuleType = JUDGES[gate]
    evidence = {"candidate": make.oracle(), "null": make.oracle(), "faults": (FAULT[gate],), **changes}
    verdict: Verdict = module.judge(make.study(), make.oracle_panel(), **evidence)
    return verdict


def damaged(make: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """An oracle document in order but for one value."""
    return make.damage(make.oracle(), path, make.delete if value == DELETE else value)


def test_passes_what_is_in_order(make: Any, gate: str) -> None:
    """Evidence in order passes; only the faults that the gate claims are its poison."""
    verdict = decide(make, gate)
    assert (verdict.outcome, verdict.findings) == (Outcome.PASS, ())
    assert [fault.fault for fault in verdict.poison] == [FAULT[gate]]
    total, line = {"routing": (4, "slot 5 is wrong"), "placement": (3, "row 3 is another's")}[gate]
    assert verdict.poison[0].figure.startswith(f"{total} findings; ")
    assert line in verdict.poison[0].figure
    assert verdict.gate == gate


def test_passes_at_the_limits(make: Any) -> None:
    """Exactly the minimum, the largest ambiguous share and a ratio of exactly 1 pass."""
    document = damaged(make, (*RANK, "routing", "cells_checked"), 100)
    assert decide(make, "routing", candidate=document).outcome is Outcome.PASS
    document["healthy"][0]["placement"] |= {"ambiguous_rows": 12, "worst_ratio": 1.0}
    assert decide(make, "placement", candidate=document).outcome is Outcome.PASS


BROKEN = {
    "routing": {
        "a finding": (("routing",), lambda part: {**part, "findings": ["slot 7"], "findings_total": 1}, 5, "slot 7"),
        "findings beyond those kept": (("routing", "findings_total"), 3, 5, "3 findings, of which 0 are kept"),
        "a row-map finding": (("row_map", "findings_total"), 1, 2, "row map: 1 findings"),
    },
    "placement": {
        "a finding": (("placement",), lambda part: {**part, "findings": ["row 7"], "findings_total": 1}, 5, "row 7"),
        "findings beyond those kept": (("placement", "findings_total"), 3, 5, "3 findings, of which 0 are kept"),
        "a row-map finding": (("row_map", "findings_total"), 1, 2, "row map: 1 findings"),
        "a ratio above 1": (("placement", "worst_ratio"), math.nextafter(1, 2), 4, "the worst error is 1 times"),
        "a ratio of NaN": (("placement", "worst_ratio"), math.nan, 4, "the worst error is nan times"),
        "a ratio of NaN in words": (("placement", "worst_ratio"), "nan", 4, "the worst error is nan times"),
        "an infinite ratio": (("placement", "worst_ratio"), math.inf, 4, "the worst error is inf times"),
    },
}
CASES = [(gate, name) for gate, cases in BROKEN.items() for name in cases]


@pytest.mark.parametrize(("which", "name"), CASES, ids=[f"{gate}: {name}" for gate, name in CASES])
def test_fails_a_broken_rule(make: Any, which: str, name: str) -> None:
    """An objection of the oracle fails the candidate, with the rule, and fails the null of the control."""
    path, value, rule, text = BROKEN[which][name]
    document = damaged(make, (*RANK, *path), value)
    verdict = decide(make, which, candidate=document)
    assert verdict.outcome is Outcome.FAIL
    assert any(line.startswith(f"rule {rule}: ") and text in line for line in verdict.findings), verdict.findings
    verdict = decide(make, which, null=document)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any(line.startswith("null: ") and text in line for line in verdict.findings), verdict.findings


GAPS = {
    "routing": {
        "too few cells": ((*RANK, "routing", "cells_checked"), 99, "cells_checked is 99, expected at least 100"),
        "no history": ((*RANK, "routing", "history_cells"), 0, "history_cells is 0, expected at least 1"),
        "less history than rows": (
            (*RANK, "routing", "history_cells"),
            47,
            "history_cells is 47, expected at least 48",
        ),
        "a layer's writes unseen": ((*RANK, "routing", "writes_checked"), 32, "writes_checked is 32, expected 48"),
        "no free block": ((*RANK, "routing", "blocks_compared"), 0, "blocks_compared is 0, expected at least 1"),
        "no padding count": ((*RANK, "routing", "padding_rows"), DELETE, "padding_rows"),
        "fewer layers": ((*RANK, "layers"), 2, "2 layers were seen, expected 3"),
        "more findings kept than counted": ((*RANK, "routing", "findings"), ["x"], "findings_total"),
        "no findings": ((*RANK, "routing", "findings"), DELETE, "findings"),
        "no routing part": ((*RANK, "routing"), DELETE, "routing"),
    },
    "placement": {
        "a layer's rows unseen": ((*RANK, "placement", "rows_checked"), 32, "rows_checked is 32, expected 48"),
        "too few rows": ((*RANK, "placement", "rows_checked"), 9, "rows_checked is 9, expected at least 10"),
        "too many ambiguous rows": ((*RANK, "placement", "ambiguous_rows"), 13, "13 of 48 rows are ambiguous"),
        "more ambiguous rows than rows": ((*RANK, "placement", "ambiguous_rows"), 49, "at most rows_checked"),
        "fewer layers": ((*RANK, "placement", "layers"), 2, "2 layers were seen, expected 3"),
        "no ratio": ((*RANK, "placement", "worst_ratio"), DELETE, "worst_ratio"),
        "a null ratio": ((*RANK, "placement", "worst_ratio"), None, "worst_ratio"),
        "a negative ratio": ((*RANK, "placement", "worst_ratio"), -1.0, "worst_ratio"),
        "a boolean ratio": ((*RANK, "placement", "worst_ratio"), True, "worst_ratio"),
        "a ratio in other words": ((*RANK, "placement", "worst_ratio"), "small", "worst_ratio"),
        "no placement part": ((*RANK, "placement"), DELETE, "placement"),
    },
    "both": {
        "an unknown schema": (("schema",), 2, "schema"),
        "no schema": (("schema",), DELETE, "schema"),
        "an unknown key": (("more",), 1, "more"),
        "no rank": (("healthy",), [], "no record"),
        "no healthy part": (("healthy",), DELETE, "healthy"),
        "a rank out of order": ((*RANK, "rank"), 1, "rank"),
        "no step": ((*RANK, "steps"), 0, "steps"),
        "a missed self-test": ((*RANK, "row_map", "self_test"), "missed", "missed its known permutation"),
        "no self-test": ((*RANK, "row_map", "self_test"), DELETE, "self_test"),
        "no row checked": ((*RANK, "row_map", "checked"), 0, "checked"),
        "no row map": ((*RANK, "row_map"), DELETE, "row_map"),
        "no response": (("wave",), [], "no record"),
        "responses missing": (("wave",), DELETE, "wave"),
        "a response of status 500": (("wave", 1, "status"), 500, "found status 500, expected 200"),
        "a response that failed": (("wave", 1, "error"), "timeout", "found the error 'timeout'"),
        "a response twice": (("wave", 1, "id"), "r0", "request 'r0' appears twice"),
        "a response without a body": (("wave", 1, "body"), None, "body"),
        "an error object under 200": (("wave", 1, "body"), '{"error": {"code": 500}}', "an error object"),
    },
}
GAP_CASES = [
    (gate, group, name)
    for group, cases in GAPS.items()
    for name in cases
    for gate in (("routing", "placement") if group == "both" else (group,))
]


@pytest.mark.parametrize(
    ("which", "group", "name"), GAP_CASES, ids=[f"{which}: {name}" for which, _, name in GAP_CASES]
)
def test_is_inconclusive_when_evidence_is_incomplete(make: Any, which: str, group: str, name: str) -> None:
    """Too little, missing or malformed evidence concludes nothing, and the finding names the place."""
    path, value, text = GAPS[group][name]
    verdict = decide(make, which, candidate=damaged(make, path, value))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any(text in line for line in verdict.findings), verdict.findings


@pytest.mark.parametrize("value", [None, {}, [], {"schema": 1}])
def test_is_inconclusive_without_a_document(make: Any, gate: str, value: Any) -> None:
    """No candidate document, or an empty one, concludes nothing; neither does a control's."""
    verdict = decide(make, gate, candidate=value)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert value is not None or "rule 1: oracle: the document is missing" in verdict.findings
    verdict = decide(make, gate, null=value)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert (verdict.null is None) == (value is None)


def test_every_rank_must_be_in_order(make: Any, gate: str) -> None:
    """A finding on the second rank alone fails the gate."""
    document = make.oracle()
    document["healthy"].append(make.damage(document["healthy"][0], ("rank",), 1))
    assert decide(make, gate, candidate=document).outcome is Outcome.PASS
    document["healthy"][1][gate] |= {"findings": ["far away"], "findings_total": 1}
    verdict = decide(make, gate, candidate=document)
    assert verdict.outcome is Outcome.FAIL
    assert "healthy[1]: far away" in verdict.findings[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda entry: {**entry, "records": []}, "no record"),
        (lambda entry: {"fault": entry["fault"], "claimed_by": entry["claimed_by"]}, "records"),
        (lambda entry: {**entry, "records": [3]}, "a table"),
        (lambda entry: {**entry, "claimed_by": "nobody"}, "claimed_by"),
        (lambda entry: {**entry, "fault": ""}, "fault"),
    ],
)
def test_poison_that_cannot_be_read_is_a_miss(make: Any, gate: str, change: Any, text: str) -> None:
    """A fault without readable records was not caught."""
    place = 0 if gate == "routing" else 1
    verdict = decide(make, gate, candidate=damaged(make, ("poison", place), change))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any(text in fault.figure for fault in verdict.poison if not fault.caught), verdict.poison


def test_a_missed_fault_is_inconclusive(make: Any, gate: str) -> None:
    """A fault under which this gate's own oracle has no finding was missed, whatever another oracle found."""
    place = 0 if gate == "routing" else 1
    verdict = decide(make, gate, candidate=damaged(make, ("poison", place, "records", 0, gate, "findings_total"), 0))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    document = damaged(
        make, ("poison", place, "records", 0, gate), lambda part: {**part, "findings": [], "findings_total": 0}
    )
    verdict = decide(make, gate, candidate=document)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert f"found 0 findings of {gate}" in verdict.findings[0]


def test_a_fault_that_was_not_run_is_inconclusive(make: Any, gate: str) -> None:
    """Each named fault must be there; without any poison the gate concludes nothing."""
    verdict = decide(make, gate, faults=(FAULT[gate], "another"))
    assert verdict.findings == ("poison: 'another' was not caught: it was not run",)
    verdict = decide(make, gate, candidate=damaged(make, ("poison",), []), faults=())
    assert verdict.findings == ("poison: no seeded fault was run against this gate",)
