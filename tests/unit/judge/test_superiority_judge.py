"""The superiority judge: every rule, on synthetic trials of a small plan."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import timed_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_plan import METRIC, cell, closed, comparison, measured

from pytest_kvqual._canonical import canonical_bytes
from pytest_kvqual.faults.blocks import FAULTS, synthetic
from pytest_kvqual.judge.gates.superiority import Trial, judge
from pytest_kvqual.judge.verdict import Outcome, Verdict
from pytest_kvqual.study.plan import Plan

PLAN = timed_plan.plan()
STUDY = timed_plan.study()
KEY = ("open", METRIC)
NINE_TENTHS = Fraction(9, 10)


def verdict(trials: Mapping[tuple[str, int], Trial | None], *, plan: Plan = PLAN, arm: str = "candidate") -> Verdict:
    """The verdict on these trials."""
    declared = tuple(
        comparison(candidate=it.candidate, control=it.control, cell=it.cell, metric=it.metric, better=it.better)
        for it in plan.comparisons
    )
    of = replace(STUDY, timing={plan.length: timed_plan.rules(comparisons=declared)})
    return judge(of, plan, arm=arm, trials=trials)


def with_figure(
    trials: dict[tuple[str, int], Trial], name: tuple[str, int], value: Any
) -> dict[tuple[str, int], Trial]:
    """The trials with one figure of one of them replaced."""
    return trials | {name: replace(trials[name], figures={**trials[name].figures, KEY: value})}


def test_a_candidate_that_is_better_in_every_block_passes() -> None:
    """Ratios near 0.9 in six blocks: significant, beyond the screen, and so is the unfavourable end."""
    found = verdict(measured(PLAN, NINE_TENTHS))
    assert (found.outcome, found.findings) == (Outcome.PASS, ())
    assert found.figure == (
        "ttft_intended_p50 of candidate against 'native' in open: median ratio 0.900 [0.900, 0.900] at 96.9 %, "
        "p = 0.03125 (Holm 0.03125 <= 0.05); screen 5 %: met; claim: supported; A/A 6.25e-07 %"
    )
    assert (found.faults_seeded, found.faults_caught) == (len(FAULTS), len(FAULTS))


def test_the_details_are_exact_and_say_the_same_again() -> None:
    """Every number is a fraction in lowest terms, with its float beside it; JSON can hold them."""
    trials = measured(PLAN, NINE_TENTHS)
    found = json.loads(canonical_bytes(verdict(trials).details))
    (entry,) = found["family"]
    for block in PLAN.measured:
        ratio = Fraction(trials["candidate", block].figures[KEY]) / Fraction(trials["native", block].figures[KEY])  # type: ignore[arg-type]
        assert entry["effects"][str(block)] == f"{ratio.numerator}/{ratio.denominator}"
    effects = sorted(Fraction(it) for it in entry["effects"].values())
    assert Fraction(entry["median"]) == (effects[2] + effects[3]) / 2
    assert (entry["lower"], entry["upper"]) == tuple(
        f"{it.numerator}/{it.denominator}" for it in effects[:: len(effects) - 1]
    )
    assert (entry["coverage"], entry["p"], entry["p_holm"], entry["order"]) == ("31/32", "1/32", "1/32", 1)
    assert entry["floats"]["median"] == float(Fraction(entry["median"]))
    assert (entry["screen"], entry["claim"], entry["missing"]) == (True, True, [])
    (null,) = found["null"]
    assert (null["pair"], null["cell"], null["metric"]) == ([7, 8], "open", METRIC)
    second, first = trials["native", 8].figures[KEY], trials["native", 7].figures[KEY]
    assert Fraction(null["effect"]) == Fraction(second or 0) / Fraction(first or 1)


def test_a_slower_candidate_fails_with_its_figure() -> None:
    """The same p-value in the other direction is no superiority."""
    found = verdict(measured(PLAN, Fraction(11, 10)))
    assert found.outcome is Outcome.FAIL
    assert found.figure.startswith(
        "rule 5: ttft_intended_p50 of candidate against 'native' in open: median ratio 1.100 ["
    )
    assert "p = 0.03125 (Holm 0.03125 <= 0.05); screen 5 %: not met; claim: not supported" in found.figure


def test_one_block_that_disagrees_is_enough_to_fail_six() -> None:
    """Five of six blocks have p = 14/64."""
    found = verdict(measured(PLAN, [NINE_TENTHS] * 5 + [Fraction(11, 10)]))
    assert found.outcome is Outcome.FAIL
    assert "p = 0.2188 (Holm 0.2188 > 0.05); screen 5 %: met; claim: not supported" in found.figure


def test_a_significant_effect_that_does_not_matter_fails_the_screen() -> None:
    """Two per cent better in every block is significant and below the practical effect."""
    found = verdict(measured(PLAN, Fraction(98, 100)))
    assert found.outcome is Outcome.FAIL
    assert found.figure.startswith("rule 6: ")
    assert "screen 5 %: not met" in found.figure


def test_the_claim_is_apart_from_the_decision() -> None:
    """Where the median is beyond the practical effect and the interval's end is not, the gate passes without it."""
    found = verdict(measured(PLAN, [NINE_TENTHS] * 5 + [Fraction(98, 100)]))
    assert found.outcome is Outcome.PASS
    assert "screen 5 %: met; claim: not supported" in found.figure


def test_the_screen_is_met_at_the_practical_effect() -> None:
    """A median of exactly 19/20 meets 5 %, one above it does not."""
    exact = {name: replace(it, figures={KEY: Fraction(95 if name[0] == "candidate" else 100) * (name[1] + 9)})
             for name, it in measured(PLAN, Fraction(1)).items()}  # fmt: skip
    # Of two arms with the same figures one would be the other's record.
    for block in PLAN.measured:
        exact["reference", block] = replace(exact["reference", block], figures={KEY: Fraction(70 + block)})
    exact["native", 8] = replace(exact["native", 8], figures={KEY: Fraction(1601)})
    assert verdict(exact).outcome is Outcome.PASS
    above = with_figure(exact, ("candidate", 1), Fraction(951))
    for block in range(2, 7):
        above = with_figure(above, ("candidate", block), Fraction(951 * (block + 9), 10))
    assert verdict(above).figure.startswith("rule 6: ")


def test_higher_is_better_for_a_throughput() -> None:
    """The direction is the metric's: 10 % more passes, 10 % less fails."""
    plan = timed_plan.plan(comparisons=(comparison(metric="output_throughput", better="higher"),))
    assert verdict(measured(plan, Fraction(11, 10)), plan=plan).outcome is Outcome.PASS
    assert verdict(measured(plan, NINE_TENTHS), plan=plan).outcome is Outcome.FAIL


@pytest.mark.parametrize("name", [("candidate", 3), ("native", 3)])
@pytest.mark.parametrize(
    ("trial", "text"),
    [
        (None, "rule 2: {0} cannot pass: block 3 of '{1}' was not timed"),
        (
            Trial(valid=False, why="rule 7: preempted", figures={}),
            "rule 2: {0} cannot pass: block 3 of '{1}' is void: rule",
        ),
    ],
)
def test_a_block_that_is_missing_or_void_is_named_and_not_dropped(
    name: tuple[str, int], trial: Trial | None, text: str
) -> None:
    """Of either arm; the others are then not judged without it."""
    found = verdict(measured(PLAN, NINE_TENTHS) | {name: trial})
    assert found.outcome is Outcome.INCONCLUSIVE
    assert found.figure.startswith(text.format("ttft_intended_p50 of candidate against 'native' in open:", name[0]))
    entry = found.details["family"][0]  # type: ignore[index]
    assert (entry["p"], entry["median"], len(entry["effects"])) == (None, None, 5)


@pytest.mark.parametrize("arm", ["candidate", "native"])
@pytest.mark.parametrize("value", [math.inf, math.nan, None, Fraction(0), -1.0])
def test_a_figure_that_is_no_time_cannot_pass(arm: str, value: Fraction | float | None) -> None:
    """An infinite control is no superiority of the candidate."""
    found = verdict(with_figure(measured(PLAN, NINE_TENTHS), (arm, 2), value))
    assert found.outcome is Outcome.INCONCLUSIVE
    assert found.figure.startswith(
        "rule 3: ttft_intended_p50 of candidate against 'native' in open: cannot pass: block 2"
    )


def test_a_block_of_an_arm_that_is_not_compared_may_be_missing() -> None:
    """The reference is no part of the family: its trials are not asked for."""
    trials = {name: it for name, it in measured(PLAN, NINE_TENTHS).items() if name[0] != "reference"}
    assert verdict(trials).outcome is Outcome.PASS


def test_one_trial_does_not_count_for_two_blocks() -> None:
    """The same record under two names is found, of one arm or of two."""
    trials = measured(PLAN, NINE_TENTHS)
    found = verdict(trials | {("candidate", 1): trials["candidate", 2]})
    assert found.outcome is Outcome.INCONCLUSIVE
    assert (
        found.figure
        == "rule 4: block 1 of 'candidate' and block 2 of 'candidate': found the same figures, expected two trials"
    )
    assert verdict(trials | {("reference", 1): trials["native", 2]}).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("factor", [Fraction(105, 100), Fraction(95, 100), Fraction(2)])
def test_noise_as_large_as_the_claim_decides_nothing(factor: Fraction) -> None:
    """An A/A pair that is the practical effect apart makes a good and a bad set inconclusive."""
    for ratio in (NINE_TENTHS, Fraction(11, 10)):
        trials = measured(PLAN, ratio)
        first = trials["native", 7].figures[KEY]
        found = verdict(with_figure(trials, ("native", 8), Fraction(first or 0) * factor))
        assert found.outcome is Outcome.INCONCLUSIVE
        assert found.figure.startswith("null: rule 7: ttft_intended_p50 of 'native' in open, blocks 7 and 8: found ")
    just = with_figure(trials, ("native", 8), Fraction(first or 0) * Fraction(1049, 1000))
    assert verdict(just).null == replace(verdict(just).null, passed=True)  # type: ignore[type-var]


@pytest.mark.parametrize("trial", [None, Trial(valid=False, why="x", figures={})])
@pytest.mark.parametrize("block", [7, 8])
def test_a_null_that_is_missing_decides_nothing(block: int, trial: Trial | None) -> None:
    """Without the whole A/A pair the noise is not known."""
    found = verdict(measured(PLAN, NINE_TENTHS) | {("native", block): trial})
    assert found.outcome is Outcome.INCONCLUSIVE
    assert found.figure.startswith(
        f"null: rule 7: ttft_intended_p50 of 'native' in open, blocks 7 and 8: block {block} "
    )


def test_the_null_is_of_every_cell_and_metric_of_the_family() -> None:
    """A pair is looked at under each figure that is compared, whoever compares it, and each pair is."""
    plan = timed_plan.plan(
        blocks=12,
        null_pairs=2,
        comparisons=(comparison(), comparison(candidate="reference", cell="closed", metric="e2e_p90")),
    )
    trials = measured(plan, NINE_TENTHS)
    assert len(verdict(trials, plan=plan).details["null"]) == 4  # type: ignore[arg-type]
    figures = {**trials["native", 16].figures, ("closed", "e2e_p90"): Fraction(1)}
    found = verdict(trials | {("native", 16): replace(trials["native", 16], figures=figures)}, plan=plan)
    assert found.figure.startswith("null: rule 7: e2e_p90 of 'native' in closed, blocks 15 and 16: found 100 % apart")


def test_holm_is_over_the_whole_family() -> None:
    """Seven blocks of eight agree: p = 0.07 is judged against the family, also of comparisons of other arms."""
    arms = {"arms": ("native", "candidate"), "blocks": 8}
    alone = timed_plan.plan(**arms, alpha=0.1)
    ratios = [NINE_TENTHS] * 7 + [Fraction(101, 100)]
    assert verdict(measured(alone, ratios), plan=alone).outcome is Outcome.PASS
    family = timed_plan.plan(
        **arms,
        alpha=0.1,
        comparisons=(comparison(), comparison(candidate="native", control="candidate", cell="closed")),
    )
    trials = measured(family, ratios)
    for name, trial in trials.items():
        figures = {**trial.figures, ("closed", METRIC): None}
        trials[name] = replace(trial, figures=figures)
    found = verdict(trials, plan=family)
    assert found.outcome is Outcome.INCONCLUSIVE  # its null has no figure of the closed cell
    assert found.details["family"][0]["p_holm"] == "9/64"  # type: ignore[index]
    assert any("(Holm 0.1406 > 0.1)" in line for line in found.findings)


def test_every_comparison_of_the_arm_has_to_pass() -> None:
    """One that fails fails the gate though the other passes; the figure of a PASS is the least of them."""
    plan = timed_plan.plan(blocks=12, comparisons=(comparison(), comparison(control="reference")))
    trials = measured(plan, NINE_TENTHS)
    passed = verdict(trials, plan=plan)
    assert passed.outcome is Outcome.PASS
    assert passed.figure.endswith("(the least of 2)")
    fast = {
        name: with_figure(trials, name, Fraction(10**7 + name[1]))[name] for name in trials if name[0] == "reference"
    }
    found = verdict(trials | fast, plan=plan)
    assert found.outcome is Outcome.FAIL
    assert found.figure.startswith("rule 5: ttft_intended_p50 of candidate against 'reference' in open")


def test_an_arm_that_is_no_candidate_has_one_line() -> None:
    """Nothing is claimed of it."""
    found = verdict(measured(PLAN, NINE_TENTHS), arm="native")
    assert (found.outcome, len(found.findings)) == (Outcome.INCONCLUSIVE, 1)
    assert found.figure == "rule 1: 'native' is the candidate of no comparison of the plan"


def test_the_plan_of_another_study_decides_nothing() -> None:
    """The plan and the study have one name."""
    found = judge(replace(STUDY, name="other"), PLAN, arm="candidate", trials=measured(PLAN, NINE_TENTHS))
    assert found.figure == "rule 1: plan: found that of study timed, expected that of other"
    assert found.outcome is Outcome.INCONCLUSIVE


def test_nothing_timed_is_inconclusive() -> None:
    """A campaign that has not begun names what is missing."""
    found = verdict({})
    assert found.outcome is Outcome.INCONCLUSIVE
    assert any("block 6 of 'candidate' was not timed" in line for line in found.findings)


PLANS = [
    PLAN,
    timed_plan.plan(arms=("native", "candidate"), blocks=24),
    timed_plan.plan(arms=("native", "candidate"), blocks=2, alpha=0.6, confidence=0.5),
    timed_plan.plan(comparisons=(comparison(metric="output_throughput", better="higher"),), practical=0.9),
    timed_plan.plan(practical=0.001, null_pairs=3, null_arm="candidate"),
    timed_plan.plan(
        blocks=12, cells=(cell(), closed()),
        comparisons=(
            comparison(control="reference"), comparison(cell="closed", metric="tpot_p50"),
            comparison(metric="request_throughput", better="higher"), comparison(candidate="reference"),
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_synthetic_trials_pass_and_each_fault_keeps_them_from_it(plan: Plan) -> None:
    """On plans of many and few blocks, low and high metrics, small and large effects."""
    whole = synthetic(plan, "candidate")
    assert verdict(whole, plan=plan).outcome is Outcome.PASS
    for name, fault in FAULTS.items():
        damaged = verdict(fault.plant(plan, "candidate", whole), plan=plan)
        assert damaged.outcome is not Outcome.PASS, name
        assert any(f"rule {fault.rule}:" in line for line in damaged.findings), name


@pytest.mark.parametrize("blocks", [6, 12, 18, 30, 60])
@pytest.mark.parametrize("practical", [0.00001, 0.05, 0.5, 0.9])
def test_no_plan_is_beyond_passing(blocks: int, practical: float) -> None:
    """Whatever its blocks and its practical effect, a plan can be passed: each fault is caught in it."""
    plan = timed_plan.plan(blocks=blocks, practical=practical)
    whole = dict(measured(plan, Fraction(1, 20)))
    first, second = (whole["native", block] for block in plan.null_pairs[0])
    near = 1 + Fraction(repr(practical)) / 2
    whole["native", plan.null_pairs[0][1]] = replace(
        second, figures={key: Fraction(value or 0) * near for key, value in first.figures.items()}
    )
    found = verdict(whole, plan=plan)
    assert found.outcome is Outcome.PASS, found.findings


def test_a_candidate_may_be_the_control_of_another() -> None:
    """In a chain of comparisons each arm is judged by its own, and both can pass."""
    plan = timed_plan.plan(
        blocks=12,
        comparisons=(comparison(candidate="reference"), comparison(control="reference")),
    )
    trials = measured(plan, Fraction(7, 10))
    for block in plan.measured:
        figures = {key: Fraction(value or 0) * NINE_TENTHS for key, value in trials["reference", block].figures.items()}
        trials["reference", block] = replace(trials["reference", block], figures=figures)
    for arm in ("reference", "candidate"):
        assert verdict(trials, plan=plan, arm=arm).outcome is Outcome.PASS


def test_a_blind_judge_misses_its_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that changes nothing is not caught, and the gate then does not pass."""
    from pytest_kvqual.faults import blocks

    idle = {"idle": blocks.BlockFault(rule=2, plant=lambda plan, arm, trials: trials)}
    monkeypatch.setattr(blocks, "FAULTS", idle)
    found = verdict(measured(PLAN, NINE_TENTHS))
    assert found.outcome is Outcome.INCONCLUSIVE
    assert found.figure == "poison: 'idle' was not caught: rule 2 did not object"


HUGE = Fraction(10**400)


def test_figures_beyond_float64_are_judged_too() -> None:
    """The ratios are exact; where a float cannot hold one it is spelled."""
    trials = measured(PLAN, NINE_TENTHS)
    for block in PLAN.measured:
        trials = with_figure(trials, ("candidate", block), HUGE + block)
    found = verdict(trials)
    assert found.outcome is Outcome.FAIL
    assert "median ratio inf [inf, inf]" in found.figure
    assert found.details["family"][0]["floats"]["median"] == "inf"  # type: ignore[index]
    found = verdict(with_figure(measured(PLAN, NINE_TENTHS), ("native", 8), HUGE))
    assert found.outcome is Outcome.INCONCLUSIVE
    canonical_bytes(found.details)


VALUES = st.none() | st.floats() | st.fractions() | st.sampled_from([HUGE, 1 / HUGE])
FIGURES = st.fixed_dictionaries({}, optional={KEY: VALUES})
TRIAL = st.none() | st.builds(Trial, valid=st.booleans(), why=st.text(max_size=3), figures=FIGURES)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(measured(PLAN, Fraction(1)))), TRIAL, min_size=1, max_size=5))
def test_no_figures_make_the_judge_raise_or_pass(changed: dict[tuple[str, int], Trial | None]) -> None:
    """Whatever stands for a few trials of a set that shows no effect, the verdict is no PASS and can be written."""
    found = verdict(measured(PLAN, Fraction(1)) | changed)
    assert found.outcome is not Outcome.PASS
    assert "\n" not in found.figure
    canonical_bytes(found.details)
