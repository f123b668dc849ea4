"""The nll judge: each numbered rule, its null and its poison."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from scipy import stats

from pytest_kvqual.judge.gates import nll
from pytest_kvqual.judge.verdict import Outcome, Verdict

FAULT = "v-scale-dropped-on-read"


def decide(make: Any, **changes: Any) -> Verdict:
    """The verdict over evidence in order but for ``changes``."""
    panel = changes.pop("panel", make.nll_panel())
    study = changes.pop("study", make.study())
    evidence = {
        "candidate": make.nll_records(panel, shift=0.001),
        "controls": {"native": make.nll_records(panel), "reference": make.nll_records(panel, shift=0.0005)},
        "null": (make.nll_records(panel), make.nll_records(panel)),
        "poison": {FAULT: make.nll_records(panel, shift=0.5, documents=2)},
        "faults": (FAULT,),
        **changes,
    }
    return nll.judge(study, panel, **evidence)


def altered(records: list[dict[str, Any]], place: int, change: Any) -> list[dict[str, Any]]:
    """The records with the one at ``place`` changed in its body's only choice."""
    body = json.loads(records[place]["body"])
    change(body["choices"][0])
    return [{**record, "body": json.dumps(body)} if at == place else record for at, record in enumerate(records)]


def test_passes_a_loss_below_the_margin(make: Any) -> None:
    """A small increase with a small spread passes, and the details hold the figures unrounded."""
    verdict = decide(make)
    assert (verdict.outcome, verdict.findings) == (Outcome.PASS, ())
    delta = verdict.details["delta"]
    assert isinstance(delta, dict)
    differences = list(delta["native"]["by_document"].values())
    # Second opinion: scipy's own interval for the same mean, two-sided at 90 % and so one-sided at 95 %.
    expected = stats.ttest_1samp(differences, 0.0).confidence_interval(0.90).high
    assert delta["native"]["upper"] == pytest.approx(expected, rel=1e-12)
    assert delta["native"]["mean"] == pytest.approx(math.fsum(differences) / 4, rel=1e-15)
    means = verdict.details["mean_nll"]
    assert isinstance(means, dict)
    assert means["native"] == 1.5  # step zero's 9.0 is not in it


def test_step_zero_does_not_count(make: Any) -> None:
    """A loss of 100 nats in the prefill step changes nothing."""
    records = altered(
        make.nll_records(make.nll_panel(), shift=0.001),
        0,
        lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(0, -100.0),
    )
    assert decide(make, candidate=records).details == decide(make).details


def test_equal_losses_have_a_bound_of_zero(make: Any) -> None:
    """The candidate equal to every control has mean and bound of exactly 0."""
    panel = make.nll_panel()
    verdict = decide(
        make,
        candidate=make.nll_records(panel),
        controls=dict.fromkeys(("native", "reference"), make.nll_records(panel)),
    )
    assert verdict.outcome is Outcome.PASS
    delta = verdict.details["delta"]
    assert isinstance(delta, dict)
    assert (delta["native"]["mean"], delta["native"]["upper"], delta["native"]["deviation"]) == (0.0, 0.0, 0.0)


def test_a_bound_at_the_margin_fails(make: Any) -> None:
    """The bound must be below the margin: at it the gate fails, one representable number above it passes."""
    study, panel = make.study(), make.nll_panel()
    delta = decide(make).details["delta"]
    assert isinstance(delta, dict)
    upper = delta["native"]["upper"]
    at = replace(study, nll=replace(study.nll, margin_nats=upper))
    verdict = decide(make, study=at)
    assert verdict.outcome is Outcome.FAIL
    assert "against 'native'" in verdict.findings[0]
    above = replace(study, nll=replace(study.nll, margin_nats=math.nextafter(upper, 1)))
    assert decide(make, study=above).outcome is Outcome.PASS
    assert len(panel.items) == 4


def test_fails_against_one_control_alone(make: Any) -> None:
    """A loss above one control fails, whatever it is against the others; the finding names the control."""
    panel = make.nll_panel()
    controls = {"native": make.nll_records(panel, shift=1.0), "reference": make.nll_records(panel, shift=-0.1)}
    verdict = decide(make, controls=controls)
    assert verdict.outcome is Outcome.FAIL
    assert len(verdict.findings) == 1
    assert verdict.findings[0].startswith("rule 6: ")
    assert "against 'reference'" in verdict.findings[0]


def test_spread_counts_not_only_the_mean(make: Any) -> None:
    """A mean of zero over documents that scatter by more than the margin fails."""
    panel = make.nll_panel()
    records = [
        record
        for place, shift in enumerate((0.1, -0.1, 0.1, -0.1))
        for record in [make.nll_records(panel, shift=shift)[place]]
    ]
    assert decide(make, candidate=records).outcome is Outcome.FAIL


GAPS = {
    "a missing document": (lambda records: records[1:], "no record of 'd0'"),
    "a document twice": (lambda records: [*records, records[0]], "found 'd0' twice"),
    "an unknown document": (lambda records: [*records, {**records[0], "id": "d9"}], "found the id 'd9'"),
    "status 500": (lambda records: [{**records[0], "status": 500}, *records[1:]], "found status 500"),
    "another target": (
        lambda records: altered(records, 0, lambda choice: choice["token_ids"].__setitem__(2, 99)),
        "targets: found token 99 at position 2, expected 7",
    ),
    "another prompt": (
        lambda records: altered(records, 0, lambda choice: choice["prompt_token_ids"].__setitem__(0, 99)),
        "prompt: found token 99 at position 0, expected 1",
    ),
    "a log-probability above 0": (
        lambda records: altered(records, 0, lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(3, 0.1)),
        "step 3: found a log-probability of 0.1, expected at most 0",
    ),
    "a clamped log-probability": (
        lambda records: altered(
            records, 0, lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(3, -9999.0)
        ),
        "step 3: found -9999.0, the engine's clamp",
    ),
    "a NaN log-probability": (
        lambda records: altered(
            records, 0, lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(3, math.nan)
        ),
        "NaN",
    ),
    "an absent log-probability": (
        lambda records: altered(records, 0, lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(3, None)),
        "token_logprobs[3]",
    ),
    "a log-probability too few": (
        lambda records: altered(records, 0, lambda choice: choice["logprobs"]["token_logprobs"].pop()),
        "found 3 values, expected 4",
    ),
    "no log-probabilities": (
        lambda records: altered(records, 0, lambda choice: choice.update(logprobs=None)),
        "logprobs",
    ),
    "an early stop": (
        lambda records: altered(records, 0, lambda choice: choice.update(finish_reason="stop")),
        "found finish_reason 'stop'",
    ),
}


@pytest.mark.parametrize(("change", "text"), GAPS.values(), ids=GAPS)
@pytest.mark.parametrize("side", ["candidate", "control", "null", "poison"])
def test_is_inconclusive_when_a_capture_is_incomplete(make: Any, side: str, change: Any, text: str) -> None:
    """A document that is missing, repeated, extra or not teacher-forced as frozen concludes nothing, on any side."""
    panel = make.nll_panel()
    if side == "candidate":
        verdict = decide(make, candidate=change(make.nll_records(panel)))
    elif side == "control":
        verdict = decide(
            make, controls={"native": make.nll_records(panel), "reference": change(make.nll_records(panel))}
        )
    elif side == "null":
        verdict = decide(make, null=(make.nll_records(panel), change(make.nll_records(panel))))
    else:
        verdict = decide(make, poison={FAULT: change(make.nll_records(panel, shift=0.5, documents=2))})
        text = "found 1 records, expected 2" if "no record" in text else text
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any(text in line for line in verdict.findings), verdict.findings


def test_every_control_is_needed(make: Any) -> None:
    """A control of the study that was not captured concludes nothing; without any the same."""
    panel = make.nll_panel()
    verdict = decide(make, controls={"native": make.nll_records(panel)})
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any("control 'reference': the records are missing" in line for line in verdict.findings)
    assert decide(make, controls={}).outcome is Outcome.INCONCLUSIVE
    study = make.study()
    alone = replace(study, arms={"candidate": study.arms["candidate"]})
    assert "rule 5: the study has no control to compare with" in decide(make, study=alone, controls={}).findings


def test_a_control_under_judgement_is_not_compared_with_itself(make: Any) -> None:
    """With ``arm`` given, only the other controls are needed."""
    panel = make.nll_panel()
    verdict = decide(make, arm="reference", controls={"native": make.nll_records(panel)})
    assert verdict.outcome is Outcome.PASS
    assert list(verdict.details["delta"]) == ["native"]  # type: ignore[call-overload]  # a table by its construction


def test_waves_must_repeat_exactly(make: Any) -> None:
    """Captured in waves, two captures of one control that differ in one loss fail the null; natural ones may."""
    panel = make.nll_panel()
    again = altered(
        make.nll_records(panel), 1, lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(2, -1.0000001)
    )
    null = (make.nll_records(panel), again)
    verdict = decide(make, null=null)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "document 'd1': the losses of two waves differ, first at decode step 2" in verdict.findings[0]
    assert decide(make, null=null, study=make.with_schedule(make.study(), "natural")).outcome is Outcome.PASS


@pytest.mark.parametrize("shifts", [(0.0, 1.0), (1.0, 0.0)])
def test_the_null_holds_in_both_directions(make: Any, shifts: tuple[float, float]) -> None:
    """A control that drifts from itself, in either direction, fails the null."""
    panel = make.nll_panel()
    study = make.with_schedule(make.study(), "natural")
    null = tuple(make.nll_records(panel, shift=shift) for shift in shifts)
    verdict = decide(make, null=null, study=study)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.null is not None
    assert not verdict.null.passed
    assert decide(make, null=None).outcome is Outcome.INCONCLUSIVE


def test_a_fault_within_the_margin_is_missed(make: Any) -> None:
    """A planted fault whose bound is below the margin was not caught, nor one that was not run."""
    panel = make.nll_panel()
    verdict = decide(make, poison={FAULT: make.nll_records(panel, shift=0.001, documents=2)})
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.faults_caught == 0
    assert decide(make, poison={}).outcome is Outcome.INCONCLUSIVE


def test_a_wide_bound_alone_does_not_catch_a_fault(make: Any) -> None:
    """Two documents make any bound wide: the mean must reach the margin as well."""
    panel = make.nll_panel()
    records = [make.nll_records(panel, shift=0.1)[0], make.nll_records(panel, shift=-0.1)[1]]
    verdict = decide(make, poison={FAULT: records})
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert not verdict.poison[0].caught


def test_the_panel_must_be_the_declared_one(make: Any) -> None:
    """Another number of documents or of decode steps than the study declares concludes nothing."""
    study = make.study()
    more = replace(study, nll=replace(study.nll, documents=5, decode_steps=4))
    verdict = decide(make, study=more)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "rule 1: panel: found 4 documents, expected 5" in verdict.findings
    assert "rule 1: panel 'd0': found 4 targets, expected 5" in verdict.findings


def test_the_figure_names_the_worst_control(make: Any) -> None:
    """The deciding line is the comparison with the highest bound."""
    assert "(against 'native')" in decide(make).figure
