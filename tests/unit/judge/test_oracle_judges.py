"""The five oracle judges: each numbered rule, their nulls, their poison and the waivers of controls."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from pytest_kvqual.judge.gates import placement, replay, routing, shifted_outputs, stale_maps
from pytest_kvqual.judge.verdict import Outcome, Verdict
from pytest_kvqual.study.model import Study, Waiver

DELETE = "DELETE"
JUDGES: dict[str, ModuleType] = {
    "stale-maps": stale_maps,
    "routing": routing,
    "shifted-outputs": shifted_outputs,
    "placement": placement,
    "replay": replay,
}
GATES = tuple(JUDGES)
FAULT = {
    "stale-maps": "stale-block-table",
    "routing": "slot-off-by-one",
    "shifted-outputs": "outputs-shifted",
    "placement": "other-layer-cache",
    "replay": "reads-unwritten",
}
RANK = ("passes", 0, "records", 0)
WAVE = ("passes", 0, "wave")


@pytest.fixture(params=GATES)
def gate(request: pytest.FixtureRequest) -> str:
    """Each of the gates."""
    return str(request.param)


def decide(make: Any, gate: str, *, study: Study | None = None, **changes: Any) -> Verdict:
    """The verdict over evidence in order but for ``changes``."""
    evidence = {
        "arm": "candidate",
        "null_arm": "native",
        "candidate": make.oracle(),
        "null": make.oracle("native"),
        "faults": (FAULT[gate],),
        **changes,
    }
    verdict: Verdict = JUDGES[gate].judge(study or make.study(), make.oracle_panel(), **evidence)
    return verdict


def damaged(make: Any, path: tuple[str | int, ...], value: Any, arm: str = "candidate") -> Any:
    """An oracle document in order but for one value."""
    return make.damage(make.oracle(arm), path, make.delete if value == DELETE else value)


def says(verdict: Verdict, text: str) -> bool:
    """Whether a finding holds the text."""
    return any(text in line for line in verdict.findings)


def test_passes_what_is_in_order(make: Any, gate: str) -> None:
    """Evidence in order passes; only the faults that the gate claims are its poison."""
    verdict = decide(make, gate)
    assert (verdict.outcome, verdict.findings, verdict.gate) == (Outcome.PASS, (), gate)
    assert [fault.fault for fault in verdict.poison] == [FAULT[gate]]
    assert verdict.poison[0].figure.startswith("3 findings; ")
    assert verdict.details["conditions"] == {"mixed": 12, "chunked": 6}


def test_passes_at_the_limits(make: Any) -> None:
    """Exactly the minima, the largest ambiguous share and a ratio of exactly 1 pass."""
    assert decide(make, "routing").details["ranks"][0]["cells_checked"] * 3 == make.study().oracle.minimum_cells  # type: ignore[index]  # details are JSON
    document = damaged(make, (*RANK, "placement", "ambiguous_rows"), 12)
    document["passes"][0]["records"][0]["placement"]["worst_ratio"] = 1.0
    assert decide(make, "placement", candidate=document).outcome is Outcome.PASS


FOUND = {"findings": ["cell 7"], "findings_total": 1, "kinds": {"a-kind": 1}}
MORE = {"findings": [], "findings_total": 3, "kinds": {"a-kind": 3}}
BROKEN: dict[str, dict[str, tuple[tuple[str, ...], Any, int, str]]] = {
    name: {
        "a finding": ((name,), lambda part: {**part, **FOUND}, 5, "pass model, rank 0: cell 7"),
        "findings beyond those kept": ((name,), lambda part: {**part, **MORE}, 5, "3 findings, of which 0 are kept"),
        "a row-map finding": (("row_map",), lambda part: {**part, **MORE}, 2, "row map: 3 findings"),
    }
    for name in GATES
}
BROKEN["placement"] |= {
    "a ratio above 1": (("placement", "worst_ratio"), math.nextafter(1, 2), 4, "the worst error is 1 times"),
    "a ratio of NaN": (("placement", "worst_ratio"), math.nan, 4, "the worst error is nan times"),
    "a ratio of NaN in words": (("placement", "worst_ratio"), "nan", 4, "the worst error is nan times"),
    "an infinite ratio": (("placement", "worst_ratio"), math.inf, 4, "the worst error is inf times"),
}
CASES = [(name, case) for name, cases in BROKEN.items() for case in cases]


@pytest.mark.parametrize(("which", "case"), CASES, ids=[f"{which}: {case}" for which, case in CASES])
def test_fails_a_broken_rule(make: Any, which: str, case: str) -> None:
    """An objection of the oracle fails the arm, with the rule; in the control's document it fails the null."""
    path, value, rule, text = BROKEN[which][case]
    verdict = decide(make, which, candidate=damaged(make, (*RANK, *path), value))
    assert verdict.outcome is Outcome.FAIL
    assert any(line.startswith(f"rule {rule}: ") and text in line for line in verdict.findings), verdict.findings
    verdict = decide(make, which, null=damaged(make, (*RANK, *path), value, "native"))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert all(line.startswith("null: ") for line in verdict.findings), verdict.findings


def rows_short(name: str) -> tuple[tuple[str | int, ...], Any, str]:
    """A layer's rows that were not compared."""
    return (*RANK, name, "rows_checked"), 32, "rows_checked is 32, expected 48"


ANY = (
    lambda part: {**part, "findings": [], "findings_total": 0, "kinds": {"a-kind": 1}},
    "found 1 findings by kind, expected 0",
)
GAPS: dict[str, dict[str, tuple[tuple[str | int, ...], Any, str]]] = {
    "stale-maps": {
        "fewer maps than steps and layers": (
            (*RANK, "stale-maps", "tables_compared"),
            26,
            "tables_compared is 26, expected at least 27",
        ),
        "no map": ((*RANK, "stale-maps", "tables_compared"), 0, "tables_compared is 0, expected at least 27"),
        "maps that never change": ((*RANK, "stale-maps", "maps_changed"), 0, "maps_changed is 0, expected at least 1"),
        "more changes than steps": ((*RANK, "stale-maps", "maps_changed"), 10, "expected at most the 9 steps"),
    },
    "routing": {
        "too few cells": ((*RANK, "routing", "cells_checked"), 499, "cells_checked is 1499 over all passes, expected"),
        "no cell in one pass": ((*RANK, "routing", "cells_checked"), 0, "cells_checked is 0, expected at least 1"),
        "no history": ((*RANK, "routing", "history_cells"), 0, "history_cells is 0, expected at least 1"),
        "less history than rows": (
            (*RANK, "routing", "history_cells"),
            47,
            "history_cells is 47, expected at least 48",
        ),
        "a layer's writes unseen": ((*RANK, "routing", "writes_checked"), 32, "writes_checked is 32, expected 48"),
        "no write": ((*RANK, "routing", "writes_checked"), 0, "writes_checked is 0, expected 48"),
        "no free block": ((*RANK, "routing", "blocks_compared"), 0, "blocks_compared is 0, expected at least 1"),
        "no padding count": ((*RANK, "routing", "padding_rows"), DELETE, "padding_rows"),
    },
    "shifted-outputs": {
        "a layer's rows unseen": rows_short("shifted-outputs"),
        "no row": ((*RANK, "shifted-outputs", "rows_checked"), 0, "rows_checked is 0, expected 48"),
        "fewer layers": ((*RANK, "shifted-outputs", "layers"), 2, "2 layers were seen, expected 3"),
        "shifted rows missed": ((*RANK, "shifted-outputs", "self_test"), "missed", "missed its known shifted rows"),
        "no self-test": ((*RANK, "shifted-outputs", "self_test"), DELETE, "self_test"),
    },
    "placement": {
        "a layer's rows unseen": rows_short("placement"),
        "no row": ((*RANK, "placement", "rows_checked"), 0, "rows_checked is 0, expected 48"),
        "too many ambiguous rows": ((*RANK, "placement", "ambiguous_rows"), 13, "13 of 48 rows are ambiguous"),
        "more ambiguous rows than rows": ((*RANK, "placement", "ambiguous_rows"), 49, "at most rows_checked"),
        "fewer layers": ((*RANK, "placement", "layers"), 2, "2 layers were seen, expected 3"),
        "no ratio": ((*RANK, "placement", "worst_ratio"), DELETE, "worst_ratio"),
        "a null ratio": ((*RANK, "placement", "worst_ratio"), None, "worst_ratio"),
        "a negative ratio": ((*RANK, "placement", "worst_ratio"), -1.0, "worst_ratio"),
        "a boolean ratio": ((*RANK, "placement", "worst_ratio"), True, "worst_ratio"),
        "a ratio in other words": ((*RANK, "placement", "worst_ratio"), "small", "worst_ratio"),
    },
    "replay": {
        "a fill of fewer rows": (
            (*RANK, "replay", "rows_compared", "large"),
            47,
            "nan 48, large 47, other-request 48, expected as many under each fill",
        ),
        "no row compared": (
            (*RANK, "replay", "rows_compared"),
            {"nan": 0, "large": 0, "other-request": 0},
            "rows_compared is 0 over all passes, expected at least 1",
        ),
        "more rows than the pass has": (
            (*RANK, "replay", "rows_compared"),
            {"nan": 49, "large": 49, "other-request": 49},
            "found 49 rows, expected at most 48",
        ),
        "a fill missing": ((*RANK, "replay", "rows_compared", "nan"), DELETE, "nan"),
        "a fourth fill": ((*RANK, "replay", "rows_compared", "zero"), 48, "zero"),
        "a negative count": ((*RANK, "replay", "rows_compared", "nan"), -48, "nan"),
        "a count of NaN": ((*RANK, "replay", "rows_compared", "nan"), math.nan, "nan"),
        "no cell filled": ((*RANK, "replay", "cells_filled"), 0, "with 0 cells filled, expected at least 1 of each"),
        "fills that were not made": ((*RANK, "fills"), False, "found 48 rows and 70 cells, expected none"),
        "fills not said": ((*RANK, "fills"), DELETE, "fills"),
        "a fill beside the fills": (("passes", 1, "records", 0, "replay", "cells_filled"), 1, "0 rows and 1 cells"),
    },
    "each": {
        "another schema": (("schema",), 1, "schema"),
        "no schema": (("schema",), DELETE, "schema"),
        "an unknown key": (("more",), 1, "more"),
        "no pass": (("passes",), [], "no record"),
        "no passes": (("passes",), DELETE, "passes"),
        "a pass missing": (("passes",), lambda passes: passes[:2], "no pass 'rotated', expected model, probe, rotated"),
        "a pass twice": (("passes",), lambda passes: [*passes, passes[0]], "found 'model' a second time"),
        "a pass that the study lacks": (("passes", 0, "name"), "pressure", "name"),
        "a pass without a name": (("passes", 0, "name"), DELETE, "name"),
        "an unknown key of a pass": (("passes", 0, "more"), 1, "more"),
        "no rank": (("passes", 0, "records"), [], "no record"),
        "a rank too many": (
            ("passes", 0, "records"),
            lambda records: [*records, {**records[0], "rank": 1}],
            "found 2 records, expected 1, one per rank",
        ),
        "a rank out of order": ((*RANK, "rank"), 1, "rank"),
        "no step": ((*RANK, "steps"), 0, "steps"),
        "fewer layers of the model": ((*RANK, "layers"), 2, "2 layers were seen, expected 3"),
        "no layer": ((*RANK, "layers"), DELETE, "layers"),
        "fingerprints in another pass": ((*RANK, "probe"), True, "found true, expected false in pass model"),
        "a probe without fingerprints": (("passes", 1, "records", 0, "probe"), False, "expected true in pass probe"),
        "rows that were not scheduled": ((*RANK, "rows", "scheduled"), 15, "scheduled is 15, expected 16"),
        "rows of a cache that nobody needs": ((*RANK, "rows", "prefix"), 16, "fewer than the 16 rows"),
        "rows of a cache unscheduled": ((*RANK, "rows", "prefix"), 3, "scheduled is 16, expected 13"),
        "rows computed again unscheduled": ((*RANK, "rows", "recomputed"), 2, "scheduled is 16, expected 18"),
        "no rows": ((*RANK, "rows"), DELETE, "rows"),
        "a missed permutation": ((*RANK, "row_map", "self_test"), "missed", "missed its known permutation"),
        "no self-test of the row map": ((*RANK, "row_map", "self_test"), DELETE, "self_test"),
        "no row mapped": ((*RANK, "row_map", "checked"), 0, "checked is 0, expected 16"),
        "no row map": ((*RANK, "row_map"), DELETE, "row_map"),
        "a condition not counted": ((*RANK, "conditions", "mixed"), DELETE, "mixed"),
        "a condition of NaN": ((*RANK, "conditions", "mixed"), math.nan, "mixed"),
        "no conditions": ((*RANK, "conditions"), DELETE, "conditions"),
        "no response": (WAVE, [], "no record"),
        "responses missing": (WAVE, DELETE, "wave"),
        "a request without a response": (WAVE, lambda wave: wave[:1], "1 of 2 requests have no answer, first 'r1'"),
        "a response of status 500": ((*WAVE, 1, "status"), 500, "found status 500, expected 200"),
        "a response that failed": ((*WAVE, 1, "error"), "timeout", "found the error 'timeout'"),
        "a response twice": ((*WAVE, 1, "id"), "r0", "request 'r0' appears twice"),
        "a response without a body": ((*WAVE, 1, "body"), None, "body"),
        "an error object under 200": ((*WAVE, 1, "body"), '{"error": {"code": 500}}', "an error object"),
        "the panel's order again": (
            ("passes", 2, "wave"),
            lambda wave: wave[::-1],
            "pass rotated: the requests were sent in the panel's order, expected another",
        ),
    },
}
for _name in GATES:
    GAPS[_name] |= {
        "kinds that do not add up": ((*RANK, _name), *ANY),
        "more findings kept than counted": ((*RANK, _name, "findings"), ["x"], "findings_total"),
        "a negative kind": ((*RANK, _name, "kinds"), {"a": -1, "b": 1}, "kinds"),
        "no kinds": ((*RANK, _name, "kinds"), DELETE, "kinds"),
        "no findings": ((*RANK, _name, "findings"), DELETE, "findings"),
        "no section": ((*RANK, _name), DELETE, _name),
    }
GAP_CASES = [
    (which, group, case)
    for group, cases in GAPS.items()
    for case in cases
    for which in (GATES if group == "each" else (group,))
]


@pytest.mark.parametrize(
    ("which", "group", "case"), GAP_CASES, ids=[f"{which}: {case}" for which, _, case in GAP_CASES]
)
def test_is_inconclusive_when_evidence_is_incomplete(make: Any, which: str, group: str, case: str) -> None:
    """Too little, missing or malformed evidence concludes nothing, and the finding names the place."""
    path, value, text = GAPS[group][case]
    verdict = decide(make, which, candidate=damaged(make, path, value))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert says(verdict, text), verdict.findings


@pytest.mark.parametrize("value", [None, {}, [], {"schema": 2}])
def test_is_inconclusive_without_a_document(make: Any, gate: str, value: Any) -> None:
    """No candidate document, or an empty one, concludes nothing; neither does a control's."""
    verdict = decide(make, gate, candidate=value)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert value is not None or "rule 1: oracle: the document is missing" in verdict.findings
    verdict = decide(make, gate, null=value)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert (verdict.null is None) == (value is None)


def test_rows_of_a_cache_and_rows_computed_again_are_counted(make: Any, gate: str) -> None:
    """A prefix hit takes rows away and a preemption adds them; every count follows."""
    document = make.oracle()
    record = document["passes"][0]["records"][0]
    record["rows"] = {"scheduled": 18, "prefix": 3, "recomputed": 5}
    record["row_map"]["checked"] = 18
    record["routing"]["writes_checked"] = 54
    record["placement"]["rows_checked"] = record["shifted-outputs"]["rows_checked"] = 54
    record["replay"]["rows_compared"] = dict.fromkeys(record["replay"]["rows_compared"], 54)
    assert decide(make, gate, candidate=document).findings == ()


def test_a_condition_must_be_met_somewhere(make: Any, gate: str) -> None:
    """A condition met in one pass is enough; one met nowhere leaves the gate without a conclusion."""
    document = make.oracle()
    for entry in document["passes"][1:]:
        entry["records"][0]["conditions"]["chunked"] = 0
    assert decide(make, gate, candidate=document).outcome is Outcome.PASS
    document["passes"][0]["records"][0]["conditions"]["chunked"] = 0
    verdict = decide(make, gate, candidate=document)
    assert verdict.findings == ("rule 8: oracle: the condition 'chunked' was met 0 times, expected at least once",)
    assert verdict.outcome is Outcome.INCONCLUSIVE


def test_every_rank_must_be_there_and_in_order(make: Any, gate: str) -> None:
    """With two ranks both are needed, in every pass and under every fault; a finding on the second fails the gate."""
    study = make.study()
    study = replace(study, engine=replace(study.engine, tensor_parallel_size=2))
    document, null = make.oracle(ranks=2), make.oracle("native", ranks=2)
    assert decide(make, gate, study=study, candidate=document, null=null).findings == ()
    verdict = decide(make, gate, study=study, null=null)
    assert says(verdict, "found 1 records, expected 2, one per rank")
    assert not verdict.poison[0].caught
    document["passes"][2]["records"][1][gate] |= {"findings": ["far"], "findings_total": 1, "kinds": {"a": 1}}
    verdict = decide(make, gate, study=study, candidate=document, null=null)
    assert verdict.findings == ("rule 5: oracle, pass rotated, rank 1: far",)
    assert verdict.outcome is Outcome.FAIL


def test_a_minimum_holds_for_each_rank(make: Any) -> None:
    """Cells that one rank checked do not make up for those that another did not."""
    study = make.study()
    study = replace(study, engine=replace(study.engine, tensor_parallel_size=2))
    document, null = make.oracle(ranks=2), make.oracle("native", ranks=2)
    document["passes"][0]["records"][0]["routing"]["cells_checked"] = 1000
    document["passes"][0]["records"][1]["routing"]["cells_checked"] = 499
    verdict = decide(make, "routing", study=study, candidate=document, null=null)
    assert verdict.findings == (
        "rule 4: oracle, rank 1: cells_checked is 1499 over all passes, expected at least 1500",
    )


def test_too_few_rows_over_all_passes_conclude_nothing(make: Any) -> None:
    """The study's least number of rows is one over all passes."""
    study = make.study()
    study = replace(study, oracle=replace(study.oracle, minimum_rows=145))
    verdict = decide(make, "placement", study=study)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert says(verdict, "rows_checked is 144 over all passes, expected at least 145")


def test_a_pass_may_have_requests_of_its_own(make: Any, gate: str) -> None:
    """Where a pass is given a panel, its requests are that panel's."""
    panel = make.oracle_panel()
    short = replace(panel, items=panel.items[:1])
    verdict = decide(make, gate, panels={"model": short})
    assert says(verdict, "wave[1]: request 'r1' is not the panel's request of that name")


def test_a_waived_finding_of_a_control_does_not_count(make: Any) -> None:
    """The control passes as null and as the arm under qualification; the receipt counts what was waived."""
    verdict = decide(make, "replay")
    assert (verdict.outcome, verdict.details["waived"]) == (Outcome.PASS, {})
    assert verdict.details["null_waived"] == {"nan-fill": 5}
    verdict = decide(make, "replay", arm="native", candidate=make.oracle("native"))
    assert (verdict.outcome, verdict.findings) == (Outcome.PASS, ())
    assert verdict.details["waived"] == {"nan-fill": 5}


def test_a_waiver_is_of_one_arm(make: Any) -> None:
    """The same finding fails the candidate, and a control without the waiver."""
    for arm in ("candidate", "reference"):
        verdict = decide(make, "replay", arm=arm, candidate=make.oracle("native"))
        assert verdict.outcome is Outcome.FAIL
        assert verdict.findings == (
            "rule 5: oracle, pass model, rank 0: row 4 changed",
            "rule 5: oracle, pass model, rank 0: 5 findings, of which 1 are kept in words",
        )


def test_a_waiver_that_matched_nothing_is_objected_to(make: Any) -> None:
    """A control without the finding fails as the arm under qualification, and fails the null."""
    verdict = decide(make, "replay", arm="native")
    assert verdict.outcome is Outcome.FAIL
    assert verdict.findings == (
        "rule 9: oracle: the waiver of 'nan-fill' for 'native' was not needed, expected its finding",
    )
    verdict = decide(make, "replay", null=make.oracle())
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert says(verdict, "null: rule 9: null oracle: the waiver of 'nan-fill'")


def test_a_waiver_is_of_one_kind(make: Any) -> None:
    """A finding of another kind counts beside the waived one, and alone."""
    path = (*RANK, "replay")
    kinds = {"nan-fill": 2, "other-request-fill": 3}
    document = damaged(make, path, lambda part: {**part, "findings_total": 5, "kinds": kinds}, "native")
    verdict = decide(make, "replay", arm="native", candidate=document)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.findings == (
        "rule 5: oracle, pass model, rank 0: 3 findings of kind 'other-request-fill', which is not waived",
    )
    assert verdict.details["waived"] == {"nan-fill": 2}
    document = damaged(make, path, lambda part: {**part, "kinds": {"large-fill": 5}}, "native")
    verdict = decide(make, "replay", arm="native", candidate=document)
    assert verdict.outcome is Outcome.FAIL
    assert says(verdict, "rule 5: ")
    assert says(verdict, "rule 9: ")


def test_a_waiver_is_of_one_gate(make: Any) -> None:
    """A waiver of another gate changes nothing; each gate knows its own."""
    study = replace(
        make.study(),
        waivers=(Waiver(arm="native", gate="routing", finding="wrong-cell", reproducer="here", reason="Known."),),
    )
    verdict = decide(make, "replay", study=study)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert says(verdict, "null: rule 5: ")
    null = make.oracle()
    null["passes"][1]["records"][0]["routing"] |= {
        "findings": ["cell 1"],
        "findings_total": 2,
        "kinds": {"wrong-cell": 2},
    }
    verdict = decide(make, "routing", study=study, null=null)
    assert (verdict.outcome, verdict.details["null_waived"]) == (Outcome.PASS, {"wrong-cell": 2})


def test_a_waived_kind_is_no_sign_of_a_fault(make: Any) -> None:
    """A fault under which a control shows only what it shows without one was missed."""
    document = damaged(
        make,
        ("poison", 4, "records", 0, "replay"),
        lambda part: {**part, "kinds": {"nan-fill": 3}},
        "native",
    )
    verdict = decide(make, "replay", arm="native", candidate=document)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert says(verdict, "'reads-unwritten' was not caught: found 0 findings of replay")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda entry: {**entry, "records": []}, "no record"),
        (lambda entry: {"fault": entry["fault"], "claimed_by": entry["claimed_by"]}, "records"),
        (lambda entry: {**entry, "records": [3]}, "a table"),
        (lambda entry: {**entry, "records": entry["records"] * 2}, "found 2 records, expected 1, one per rank"),
        (lambda entry: {**entry, "claimed_by": "nobody"}, "claimed_by"),
        (lambda entry: {**entry, "fault": ""}, "fault"),
    ],
)
def test_poison_that_cannot_be_read_is_a_miss(make: Any, gate: str, change: Any, text: str) -> None:
    """A fault without readable records was not caught."""
    verdict = decide(make, gate, candidate=damaged(make, ("poison", GATES.index(gate)), change))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any(text in fault.figure for fault in verdict.poison if not fault.caught), verdict.poison


def test_a_missed_fault_is_inconclusive(make: Any, gate: str) -> None:
    """A fault under which this gate's own oracle has no finding was missed, whatever another oracle found."""
    path = ("poison", GATES.index(gate), "records", 0, gate)
    verdict = decide(make, gate, candidate=damaged(make, (*path, "findings_total"), 0))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    document = damaged(make, path, lambda part: {**part, "findings": [], "findings_total": 0, "kinds": {}})
    verdict = decide(make, gate, candidate=document)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert f"found 0 findings of {gate}" in verdict.findings[0]


def test_a_fault_that_was_not_run_is_inconclusive(make: Any, gate: str) -> None:
    """Each named fault must be there; without any poison the gate concludes nothing."""
    verdict = decide(make, gate, faults=(FAULT[gate], "another"))
    assert verdict.findings == ("poison: 'another' was not caught: it was not run",)
    verdict = decide(make, gate, candidate=damaged(make, ("poison",), []), faults=())
    assert verdict.findings == ("poison: no seeded fault was run against this gate",)


def test_the_rotated_pass_is_rotated_as_the_study_says(make: Any, gate: str) -> None:
    """Another order than the panel's is not enough: it is the panel's, rotated by the study's number."""
    study = make.study()
    study = replace(study, oracle=replace(study.oracle, rotation=2))
    verdict = decide(make, gate, study=study)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert says(verdict, "the requests were sent in another order than the panel's rotated by 2")


@pytest.mark.parametrize(
    ("path", "value"), [(("rank",), 7), (("steps",), 0), (("rows", "scheduled"), 0), (("rows",), DELETE)]
)
def test_a_poison_record_of_no_step_shows_nothing(make: Any, gate: str, path: tuple[str, ...], value: Any) -> None:
    """A count of findings in what is no record of a rank is no catch."""
    document = make.oracle()
    place = next(at for at, entry in enumerate(document["poison"]) if entry["claimed_by"] == gate)
    document = make.damage(document, ("poison", place, "records", 0, *path), make.delete if value == DELETE else value)
    verdict = decide(make, gate, candidate=document)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert (verdict.faults_caught, verdict.faults_seeded) == (0, 1)


def test_replay_compares_every_row_of_a_pass_with_fills(make: Any) -> None:
    """One row compared is not the pass, also where it is the same one under each fill."""
    fewer = dict.fromkeys(("nan", "large", "other-request"), 1)
    verdict = decide(make, "replay", candidate=damaged(make, (*RANK, "replay", "rows_compared"), fewer))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert says(verdict, "1 rows were compared, expected 48, the rows of the pass in all layers")


# -- formats without a declaration -----------------------------------------------------------------------------------


def undeclared(make: Any, name: str) -> Study:
    """The study with one arm of a format of which nothing is declared."""
    study: Study = make.study()
    return replace(study, arms={**study.arms, name: replace(study.arms[name], kv_format="turboquant_k8v4")})


@pytest.mark.parametrize("arm", ["candidate", "native"])
def test_a_format_without_a_declaration(make: Any, gate: str, arm: str) -> None:
    """A gate that needs the declaration says in one line what stays open; stale-maps needs none, and passes."""
    verdict = decide(make, gate, study=undeclared(make, arm))
    if gate == "stale-maps":
        assert verdict.outcome is Outcome.PASS
        return
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.findings == (verdict.figure,)
    assert verdict.figure.startswith(f"arm '{arm}': found no declaration of the KV format 'turboquant_k8v4', expected ")
    assert verdict.figure.endswith("could not be established")
    assert verdict.poison == ()
