"""The parity judge: each numbered rule, its null and its poison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_kvqual.judge.gates import parity
from pytest_kvqual.judge.verdict import Outcome, Verdict

FAULT = "v-scale-dropped-on-read"


def live(make: Any, tokens: list[int] | None = None) -> list[dict[str, Any]]:
    """A capture of the first prompt under a fault."""
    item = make.parity_panel().items[0]
    return [make.record(item.id, 0, make.body(item.prompt, tokens or [1, 2, 3, 4]))]


def decide(make: Any, **changes: Any) -> Verdict:
    """The verdict over evidence in order but for ``changes``."""
    panel = make.parity_panel()
    evidence = {
        "http": make.parity_records(panel, "forward"),
        "reference": make.parity_reference(panel),
        "null": (make.parity_records(panel, "forward"), make.parity_records(panel, "reverse")),
        "poison": {FAULT: live(make)},
        "faults": (FAULT,),
        **changes,
    }
    panel = evidence.pop("panel", panel)
    return parity.judge(make.study(), panel, **evidence)


def test_passes_what_is_identical(make: Any) -> None:
    """Identical tokens in both orders pass; the damaged copies of the reference are caught too."""
    verdict = decide(make)
    assert (verdict.outcome, verdict.findings) == (Outcome.PASS, ())
    assert {fault.fault for fault in verdict.poison} == {
        FAULT,
        "record-one-token-altered",
        "record-two-prompts-swapped",
        "record-missing",
    }
    assert verdict.details["differing"] == {"forward": 0, "reverse": 0}


def test_passes_an_early_stop_on_both_sides(make: Any) -> None:
    """A prompt that stops early passes when it stops in the same place everywhere."""
    panel = make.parity_panel()

    def early(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        body = make.body(panel.items[1].prompt, [10, 11], finish="stop")
        return [{**record, "body": body} if record["id"] == "p1" else record for record in records]

    reference = [
        {**record, "token_ids": [10, 11], "finish_reason": "stop"} if record["id"] == "p1" else record
        for record in make.parity_reference(panel)
    ]
    verdict = decide(
        make,
        http=early(make.parity_records(panel, "forward")),
        reference=reference,
        null=tuple(early(make.parity_records(panel, order)) for order in ("forward", "reverse")),
    )
    assert verdict.outcome is Outcome.PASS


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_fails_one_differing_token_in_either_order(make: Any, order: str) -> None:
    """One token of one prompt fails the gate, with prompt, position, both tokens and the order."""
    reference = make.parity_reference(make.parity_panel())
    for record in reference:
        if record["order"] == order and record["id"] == "p2":
            record["token_ids"] = [12, 11, 99, 13]
    verdict = decide(make, reference=reference)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.findings == (f"rule 4: prompt 'p2': found token 12 at position 2, expected 99 ({order})",)


def test_fails_another_length_or_finish_reason(make: Any) -> None:
    """An output that is a prefix of the other, or ends for another reason, differs."""
    reference = make.parity_reference(make.parity_panel())
    reference[0] |= {"token_ids": [10, 11, 12], "finish_reason": "stop"}
    assert "found 4 tokens, expected 3" in decide(make, reference=reference).findings[0]
    reference[0] |= {"token_ids": [10, 11, 12, 13]}
    verdict = decide(make, reference=reference)
    assert verdict.outcome is Outcome.FAIL
    assert "found finish_reason 'length', expected 'stop'" in verdict.findings[0]


GAPS = {
    "a missing record": (lambda records: records[:-1], "http: no record of 'p2'"),
    "a record twice": (lambda records: [*records, records[0]], "found 'p0' twice, expected once"),
    "an unknown prompt": (lambda records: [*records, {**records[0], "id": "p9"}], "found the id 'p9'"),
    "a record that is none": (lambda records: [*records, 5], "found no id"),
    "no record": (lambda records: [], "http: no record of 'p0'"),
    "status 500": (lambda records: [{**records[0], "status": 500}, *records[1:]], "found status 500"),
    "a failed request": (lambda records: [{**records[0], "error": "reset"}, *records[1:]], "found the error 'reset'"),
    "an unknown key": (lambda records: [{**records[0], "more": 1}, *records[1:]], "more"),
    "another order": (lambda records: [{**records[0], "order": "reverse"}, *records[1:]], "the order 'reverse'"),
    "another index": (lambda records: [{**records[0], "index": 2}, *records[1:]], "found the index 2, expected 0"),
    "records in another order": (lambda records: records[::-1], "in another order than the panel's"),
    "a body that is no JSON": (lambda records: [{**records[0], "body": "{"}, *records[1:]], "JSON"),
    "NaN in a body": (lambda records: [{**records[0], "body": '{"x": NaN}'}, *records[1:]], "NaN"),
}


@pytest.mark.parametrize(("change", "text"), GAPS.values(), ids=GAPS)
def test_is_inconclusive_when_the_capture_is_incomplete(make: Any, change: Any, text: str) -> None:
    """Records that are missing, repeated, extra, failed or malformed conclude nothing; as the null neither."""
    records = change(make.parity_records(make.parity_panel(), "forward"))
    verdict = decide(make, http=records)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any(text in line for line in verdict.findings), verdict.findings
    verdict = decide(make, null=(records, make.parity_records(make.parity_panel(), "reverse")))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert all(line.startswith("null: ") for line in verdict.findings)


def test_is_inconclusive_when_prompts_came_back_changed(make: Any) -> None:
    """A prompt whose token ids came back other than sent was another question."""
    records = make.parity_records(make.parity_panel(), "forward")
    records[1]["body"] = make.body((2, 2, 3), make.parity_tokens(1))
    verdict = decide(make, http=records)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "prompt 'p1': found 3 tokens, expected 2" in verdict.findings[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda records: None, "reference forward: the records are missing"),
        (lambda records: records[:3], "reference reverse: no record of 'p0'"),
        (lambda records: [*records, records[0]], "found 'p0' twice"),
        (lambda records: [*records, {**records[0], "order": "sideways"}], "found no known order"),
        (lambda records: [*records, 5], "found no known order"),
        (lambda records: [{**records[0], "token_ids": [1, True, 2, 3]}, *records[1:]], "token_ids"),
        (lambda records: [{**records[0], "token_ids": []}, *records[1:]], "found 0 tokens"),
        (lambda records: [*records[:3], *records[:2:-1]], "in another order than the panel's (reverse)"),
    ],
)
def test_is_inconclusive_when_the_reference_is_incomplete(make: Any, change: Any, text: str) -> None:
    """Both orders of the reference must be there, whole."""
    verdict = decide(make, reference=change(make.parity_reference(make.parity_panel())))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any(text in line for line in verdict.findings), verdict.findings


def test_is_inconclusive_when_the_control_differs_from_itself(make: Any) -> None:
    """A control whose reversed capture differs from its own forward one fails the null."""
    panel = make.parity_panel()
    backward = make.parity_records(panel, "reverse")
    backward[0]["body"] = make.body(panel.items[2].prompt, [1, 2, 3, 4])
    verdict = decide(make, null=(make.parity_records(panel, "forward"), backward))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.null is not None
    assert "prompt 'p2': found token 1 at position 0, expected 12" in verdict.null.figure
    assert decide(make, null=None).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize(
    ("poison", "text"),
    [
        ({}, "it was not run"),
        ({FAULT: []}, "found no record"),
        ({FAULT: [5]}, "found no id"),
        ({FAULT: "same"}, "found 0 of 1 prompts that differ"),
        ({FAULT: "failed"}, "found status 500"),
    ],
)
def test_is_inconclusive_when_a_planted_fault_is_not_seen(make: Any, poison: dict[str, Any], text: str) -> None:
    """A fault that was not run, left no readable record, or changed no token was not caught."""
    if poison.get(FAULT) == "same":
        poison = {FAULT: live(make, make.parity_tokens(0))}
    elif poison.get(FAULT) == "failed":
        poison = {FAULT: [{**live(make)[0], "status": 500}]}
    verdict = decide(make, poison=poison)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert text in verdict.findings[0]


def test_a_panel_with_one_answer_cannot_show_a_swap(make: Any) -> None:
    """Where every prompt has the same answer, swapped outputs go unseen: the gate says so."""
    panel = make.parity_panel()

    def same(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        prompts = {item.id: item.prompt for item in panel.items}
        return [{**record, "body": make.body(prompts[record["id"]], [1, 2, 3, 4])} for record in records]

    verdict = decide(
        make,
        http=same(make.parity_records(panel, "forward")),
        reference=[{**record, "token_ids": [1, 2, 3, 4]} for record in make.parity_reference(panel)],
        null=tuple(same(make.parity_records(panel, order)) for order in ("forward", "reverse")),
        poison={FAULT: live(make, [9, 9, 9, 9])},
    )
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "'record-two-prompts-swapped' was not caught" in verdict.findings[0]


def test_the_panel_must_be_the_declared_one(make: Any) -> None:
    """A panel of another size than the study declares concludes nothing."""
    panel = make.parity_panel()
    short = replace(panel, items=panel.items[:2])
    verdict = decide(
        make,
        panel=short,
        http=make.parity_records(short, "forward"),
        reference=make.parity_reference(short),
        null=(make.parity_records(short, "forward"), make.parity_records(short, "reverse")),
    )
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.findings == ("rule 1: panel: found 2 prompts, expected 3",)


def test_the_panel_must_ask_for_the_declared_tokens(make: Any) -> None:
    """An item that generates another number of tokens than the study declares concludes nothing."""
    panel = make.parity_panel()
    longer = replace(panel, items=(replace(panel.items[0], max_tokens=5), *panel.items[1:]))
    verdict = decide(make, panel=longer)
    assert "rule 1: panel 'p0': found 5 tokens, expected 4" in verdict.findings
    assert verdict.outcome is Outcome.INCONCLUSIVE


def test_an_incomplete_reference_cannot_show_damage(make: Any) -> None:
    """Damaged copies of a reference that lacks a prompt are no catch, and a wrong order is said once."""
    verdict = decide(make, reference=[])
    assert [fault.caught for fault in verdict.poison] == [False, False, False, False]
    reference = make.parity_reference(make.parity_panel())
    verdict = decide(make, reference=[*reference, {**reference[0], "order": "sideways"}])
    assert sum("found no known order" in line for line in verdict.findings) == 1


def test_a_caught_fault_shows_its_first_difference(make: Any) -> None:
    """The figure of a caught fault counts the prompts and shows the first that differs."""
    assert decide(make).poison[0].figure == "1 of 1 prompts differ; 'p0': found token 1 at position 0, expected 10"
