"""Gate 13, superiority: over the blocks of the frozen plan, the candidate is better than what it is compared with.

The unit is the block: its effect is the candidate's figure of one cell over the control's in the same block, an exact
fraction. What is compared is the plan's family; judged are its comparisons whose candidate is the arm. The hypothesis
tested in each is that the median effect is 1. The rules:

1. The plan is the study's, its family is the declared one, and it names the arm as a candidate.
2. Every measured block of both arms was timed, once, by a trial that is valid. None is dropped and none replaced: a
   comparison with a block that is missing or void cannot pass.
3. The figure is a finite number above 0 in each of these trials; a failed request counts as infinite.
4. No two trials hold the same figures: one trial counts for one block.
5. The p-value of the exact two-sided sign test (:func:`~pytest_kvqual.stats.blocks.sign_test`), adjusted by Holm over
   the whole family, is at most ``alpha``, and more blocks are better than worse. A comparison that cannot be tested
   enters Holm's correction with p = 1.
6. The practical screen: the median effect is at least ``practical`` better, at most 1 - ``practical`` where lower is
   better, at least 1 + ``practical`` where higher is.
7. Null: in each A/A pair, for every cell and metric of the family, the second block over the first differs from 1 by
   less than ``practical``. Otherwise the noise is as large as what is claimed.
8. Poison: each seeded fault of :data:`pytest_kvqual.faults.blocks.FAULTS`, planted in synthetic trials of this plan in
   which the arm is better in every block, keeps the judge from PASS under the rule that it names; unharmed they pass.

Apart from the decision the interval-bound claim is stated: that the unfavourable end of the median's order-statistic
interval (:func:`~pytest_kvqual.stats.blocks.median_interval`), at its actual coverage, is at least ``practical``
better. It is stronger than rule 6, decides nothing, and is per comparison: Holm's correction is none of intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING

from pytest_kvqual._decode import one_line
from pytest_kvqual.judge.gates._conclude import Objections, complete_poison, conclude, null_check, spelled
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict
from pytest_kvqual.stats.blocks import MedianInterval, effect, median_interval, sign_test
from pytest_kvqual.stats.holm import holm

if TYPE_CHECKING:
    from pytest_kvqual.study.model import Comparison, Study
    from pytest_kvqual.study.plan import Plan

GATE = "superiority"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One trial: whether it is valid, why not, and its figures by (cell, metric): exact, infinite, or None."""

    valid: bool
    why: str
    figures: Mapping[tuple[str, str], Fraction | float | None]


Trials = Mapping[tuple[str, int], Trial | None]
"""The trials by (arm, block); None, or no entry, where none was begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One comparison of the family. Without a result where it is incomplete; ``effects`` are then those there are."""

    comparison: Comparison
    effects: Mapping[int, Fraction]
    missing: tuple[tuple[int, str], ...]
    interval: MedianInterval | None
    p: Fraction | None
    p_holm: Fraction | None
    towards: bool
    screen: bool
    claim: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Null:
    """One figure of one A/A pair: the second block over the first; None where there is none."""

    pair: tuple[int, int]
    cell: str
    metric: str
    effect: Fraction | None
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    own: Objections
    idle: Objections
    check: Check
    family: tuple[Compared, ...]
    null: tuple[Null, ...]


def judge(study: Study, plan: Plan, *, arm: str, trials: Trials) -> Verdict:
    """Judge whether one arm is better, by the plan's comparisons of which it is the candidate.

    Args:
        study: The study.
        plan: Its frozen plan of the length.
        arm: The arm under judgement.
        trials: Every trial of the plan.
    """
    if not any(it.candidate == arm for it in plan.comparisons):
        return Verdict(
            gate=GATE,
            outcome=Outcome.INCONCLUSIVE,
            figure=f"rule 1: '{arm}' is the candidate of no comparison of the plan",
            findings=(f"rule 1: '{arm}' is the candidate of no comparison of the plan",),
        )
    found = _judge(plan, arm, trials)
    if plan.study != study.name:
        found.own.gap(1, f"plan: found that of study {plan.study}, expected that of {study.name}")
    for text in _undeclared(study, plan):
        found.own.find(1, text)
    return conclude(
        GATE,
        figure=_figure(plan, arm, found),
        objections=found.own,
        null=found.check,
        null_objections=found.idle,
        poison=_poison(plan, arm),
        details=_details(plan, arm, found),
    )


def _undeclared(study: Study, plan: Plan) -> list[str]:
    """How the plan's family differs from the declared one: a comparison less weakens Holm's correction of the rest."""
    rules = study.timing.get(plan.length)
    if rules is None:
        return [f"plan: found one of length {plan.length}, expected a length that the study times"]
    declared, planned = rules.comparisons, plan.comparisons
    left_out, added = [it for it in declared if it not in planned], [it for it in planned if it not in declared]
    return [
        f"plan: {_named(it)}: found it {where}, expected the declared family"
        for where, several in (("left out", left_out), ("added", added))
        for it in several
    ]


def _judge(plan: Plan, arm: str, trials: Trials) -> _Found:
    family = _family(plan, trials)
    null = _null(plan, trials)
    idle = Objections()
    for pair in null:
        what = f"{pair.metric} of '{plan.null_arm}' in {pair.cell}, blocks {pair.pair[0]} and {pair.pair[1]}"
        if pair.effect is None:
            idle.gap(7, f"{what}: {pair.why}")
        elif not abs(pair.effect - 1) < _exact(plan.practical):
            idle.find(7, f"{what}: found {_percent(abs(pair.effect - 1))} apart, expected below "
                         f"{_percent(plan.practical)}: the noise is as large as what is claimed")  # fmt: skip
    worst = _noise(null)
    check = null_check(idle, f"A/A of '{plan.null_arm}': {_percent(worst)} apart at most" if worst is not None else "")
    own = Objections()
    for compared in family:
        if compared.comparison.candidate != arm:
            continue
        if compared.missing:
            rule = compared.missing[0][0]
            what = "; ".join(text for _, text in compared.missing)
            own.gap(rule, f"{_named(compared.comparison)}: cannot pass: {what}")
            continue
        line = _line(plan, compared, null)
        better = compared.comparison.better
        if compared.p_holm is None or not compared.p_holm <= _exact(plan.alpha) or not compared.towards:
            own.find(5, f"{line}; expected {better}, at a Holm-adjusted p of at most {plan.alpha:g}")
        if not compared.screen:
            own.find(6, f"{_named(compared.comparison)}: screen {_percent(plan.practical)}: not met: expected a median "
                        f"ratio that much {better} than 1")  # fmt: skip
    for text in _twice(trials):
        own.gap(4, text)
    return _Found(own=own, idle=idle, check=check, family=family, null=null)


def _family(plan: Plan, trials: Trials) -> tuple[Compared, ...]:
    """Every comparison of the plan, with Holm's correction over all of them."""
    found = [_compared(plan, comparison, trials) for comparison in plan.comparisons]
    adjusted = holm([Fraction(1) if it.p is None else it.p for it in found])
    return tuple(
        replace(it, p_holm=None if it.p is None else p_holm) for it, p_holm in zip(found, adjusted, strict=True)
    )


def _compared(plan: Plan, comparison: Comparison, trials: Trials) -> Compared:
    effects, missing = _effects(plan, comparison, trials)
    values = list(effects.values())
    interval = None
    if not missing:
        try:
            interval = median_interval(values, confidence=plan.confidence)
        except ValueError as error:
            missing = ((2, str(error)),)
    if interval is None:
        return Compared(
            comparison=comparison,
            effects=effects,
            missing=missing,
            interval=None,
            p=None,
            p_holm=None,
            towards=False,
            screen=False,
            claim=False,
        )
    practical, tested, lower = _exact(plan.practical), sign_test(values), comparison.better == "lower"
    return Compared(
        comparison=comparison,
        effects=effects,
        missing=(),
        interval=interval,
        p=tested.p,
        p_holm=None,
        towards=tested.below > tested.above if lower else tested.above > tested.below,
        screen=interval.median <= 1 - practical if lower else interval.median >= 1 + practical,
        claim=interval.upper <= 1 - practical if lower else interval.lower >= 1 + practical,
    )


def _effects(
    plan: Plan, comparison: Comparison, trials: Trials
) -> tuple[dict[int, Fraction], tuple[tuple[int, str], ...]]:
    """The effect in each measured block that has one, and why each other has none, with the rule that it breaks."""
    effects: dict[int, Fraction] = {}
    missing: list[tuple[int, str]] = []
    key = (comparison.cell, comparison.metric)
    for block in plan.measured:
        before = len(missing)
        figures = []
        for arm in (comparison.candidate, comparison.control):
            trial = trials.get((arm, block))
            if trial is None:
                missing.append((2, f"block {block} of '{arm}' was not timed"))
            elif not trial.valid:
                missing.append((2, f"block {block} of '{arm}' is void: {one_line(trial.why) or 'no reason given'}"))
            else:
                figures.append(trial.figures.get(key))
        if len(missing) > before:
            continue
        try:
            effects[block] = effect(*figures)
        except ValueError as error:
            missing.append((3, f"block {block}: {error}"))
    return effects, tuple(missing)


def _null(plan: Plan, trials: Trials) -> tuple[Null, ...]:
    found = []
    wanted = dict.fromkeys((it.cell, it.metric) for it in plan.comparisons)
    for pair in plan.null_pairs:
        both = [trials.get((plan.null_arm, block)) for block in pair]
        for cell, metric in wanted:
            value, why = None, ""
            for block, trial in zip(pair, both, strict=True):
                if trial is None:
                    why = why or f"block {block} was not timed"
                elif not trial.valid:
                    why = why or f"block {block} is void: {one_line(trial.why) or 'no reason given'}"
            if not why:
                first, second = (trial.figures.get((cell, metric)) for trial in both if trial is not None)
                try:
                    value = effect(second, first)
                except ValueError as error:
                    # The function's names of the two are those of a comparison.
                    why = str(error).replace("candidate", f"block {pair[1]}").replace("control", f"block {pair[0]}")
            found.append(Null(pair=pair, cell=cell, metric=metric, effect=value, why=why))
    return tuple(found)


def _twice(trials: Trials) -> list[str]:
    """Trials that hold the same figures: two records of time are not equal in every figure unless they are one."""
    valid = [(name, trial) for name, trial in trials.items() if trial is not None and trial.valid and trial.figures]
    return [
        f"block {first[1]} of '{first[0]}' and block {second[1]} of '{second[0]}': found the same figures, expected "
        "two trials"
        for (first, one), (second, other) in combinations(valid, 2)
        if one.figures == other.figures
    ]


def _poison(plan: Plan, arm: str) -> tuple[Poison, ...]:
    """Each seeded fault, planted in trials of this plan that pass without it."""
    from pytest_kvqual.faults.blocks import FAULTS, synthetic

    whole = synthetic(plan, arm)
    sound = _judge(plan, arm, whole)
    seeded = []
    for name, fault in FAULTS.items():
        if sound.own or sound.idle:
            why = f"the set without a fault did not pass: {sound.own.first() or sound.idle.first()}"
            seeded.append(Poison(fault=name, caught=False, figure=why))
            continue
        damaged = _judge(plan, arm, fault.plant(plan, arm, whole))
        lines = [
            text
            for objections in (damaged.own, damaged.idle)
            for rule, text in (*objections.found, *objections.missing)
            if rule == fault.rule
        ]
        seeded.append(
            Poison(fault=name, caught=bool(lines), figure=lines[0] if lines else f"rule {fault.rule} did not object")
        )
    return complete_poison(seeded, tuple(FAULTS))


def _noise(null: tuple[Null, ...], cell: str | None = None, metric: str | None = None) -> Fraction | None:
    """The largest deviation of the A/A pairs, of one figure where one is named."""
    found = [
        abs(it.effect - 1)
        for it in null
        if it.effect is not None and (cell is None or (it.cell, it.metric) == (cell, metric))
    ]
    return max(found, default=None)


def _figure(plan: Plan, arm: str, found: _Found) -> str:
    """The line of the comparison that passes by least."""
    complete = [it for it in found.family if it.comparison.candidate == arm and it.interval is not None]
    if not complete:
        return "no comparison"

    def margin(it: Compared) -> tuple[Fraction, Fraction]:
        median = it.interval.median if it.interval is not None else Fraction(1)
        return (it.p_holm or Fraction(0), median - 1 if it.comparison.better == "lower" else 1 - median)

    line = _line(plan, max(complete, key=margin), found.null)
    return f"{line} (the least of {len(complete)})" if len(complete) > 1 else line


def _named(comparison: Comparison) -> str:
    return f"{comparison.metric} of {comparison.candidate} against '{comparison.control}' in {comparison.cell}"


def _line(plan: Plan, compared: Compared, null: tuple[Null, ...]) -> str:
    interval, p, p_holm = compared.interval, compared.p, compared.p_holm
    if interval is None or p is None or p_holm is None:
        return f"{_named(compared.comparison)}: incomplete"
    noise = _noise(null, compared.comparison.cell, compared.comparison.metric)
    return (
        f"{_named(compared.comparison)}: median ratio {_float(interval.median):.3f} [{_float(interval.lower):.3f}, "
        f"{_float(interval.upper):.3f}] at {100 * float(interval.coverage):.1f} %, p = {float(p):.4g} (Holm "
        f"{float(p_holm):.4g} {'<=' if p_holm <= _exact(plan.alpha) else '>'} {plan.alpha:g}); screen "
        f"{_percent(plan.practical)}: {'met' if compared.screen else 'not met'}; claim: "
        f"{'supported' if compared.claim else 'not supported'}; A/A {'none' if noise is None else _percent(noise)}"
    )


def _details(plan: Plan, arm: str, found: _Found) -> dict[str, object]:
    return {
        "arm": arm,
        "blocks": list(plan.measured),
        "alpha": plan.alpha,
        "confidence": plan.confidence,
        "practical": plan.practical,
        "family": [_entry(compared) for compared in found.family],
        "null": [
            {
                "pair": list(it.pair),
                "cell": it.cell,
                "metric": it.metric,
                "effect": _text(it.effect),
                "float": None if it.effect is None else spelled(_float(it.effect)),
            }
            for it in found.null
        ],
    }


def _entry(compared: Compared) -> dict[str, object]:
    """One comparison with each number exact, and again as a float under ``floats``; None where it is incomplete."""
    interval, comparison = compared.interval, compared.comparison
    numbers = {
        "median": None if interval is None else interval.median,
        "lower": None if interval is None else interval.lower,
        "upper": None if interval is None else interval.upper,
        "coverage": None if interval is None else interval.coverage,
        "p": compared.p,
        "p_holm": compared.p_holm,
    }
    return {
        "candidate": comparison.candidate,
        "control": comparison.control,
        "cell": comparison.cell,
        "metric": comparison.metric,
        "better": comparison.better,
        "effects": {str(block): _text(value) for block, value in compared.effects.items()},
        **{name: _text(value) for name, value in numbers.items()},
        "floats": {name: None if value is None else spelled(_float(value)) for name, value in numbers.items()},
        "order": None if interval is None else interval.order,
        "screen": None if interval is None else compared.screen,
        "claim": None if interval is None else compared.claim,
        "missing": [text for _, text in compared.missing],
    }


def _exact(value: float) -> Fraction:
    """A declared number as the decimal that it prints as: 0.05 is 1/20."""
    return Fraction(repr(float(value)))


def _float(value: Fraction | float) -> float:
    """The nearest float; infinity for a ratio beyond float64, which no clock gives."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _text(value: Fraction | None) -> str | None:
    return None if value is None else f"{value.numerator}/{value.denominator}"


def _percent(share: float | Fraction) -> str:
    return f"{100 * _float(share):.3g} %"
