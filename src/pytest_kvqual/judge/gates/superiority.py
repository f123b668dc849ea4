"""Gate 13, superiority: over complete blocks of a frozen plan, the arm is faster than what it is compared with.

The hypothesis tested, for each primary comparison: the effect (candidate over control, paired within a block) is above
1 as often as below it. The rules:

1. The plan has a primary comparison whose candidate is the arm.
2. Of each comparison of the whole family every measured block is there for both arms: one valid trial, a finite figure
   above zero. A block that is missing, void or infinite fails the arm's comparison; it is never left out. One of
   another arm's comparison has p = 1 in the family.
3. The exact two-sided sign test, after Holm's correction over the whole family, is at most ``alpha`` in the declared
   direction.
4. Practical screen: the median effect is at least ``practical`` better than 1.
5. The order-statistic interval of the median, with its actual coverage of at least ``confidence``, is stated; and apart
   from the screen whether its unfavourable end is at least ``practical`` better than 1 (the interval-bound claim).
6. Null: in each A/A pair, for each figure of the family, the later block over the earlier differs from 1 by less than
   ``practical``.
7. Poison: on a synthetic campaign of this plan in which the arm is twice as good, the rules pass; under each seeded
   fault of :data:`pytest_kvqual.faults.blocks.BLOCK_FAULTS` they do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from pytest_kvqual.judge.gates._conclude import Objections, conclude, null_check
from pytest_kvqual.judge.verdict import Poison, Verdict
from pytest_kvqual.stats.blocks import MedianInterval, SignTest, effect, median_interval, median_of, sign_test
from pytest_kvqual.stats.holm import holm

if TYPE_CHECKING:
    from pytest_kvqual.study.model import Comparison
    from pytest_kvqual.study.plan import Plan

GATE = "superiority"
Figure = Fraction | float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One trial: whether it may be used, else why not, and its figures by (cell, metric)."""

    valid: bool
    why: str
    figures: Mapping[tuple[str, str], Figure]


Trials = Mapping[tuple[str, int], Trial | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compared:
    """One comparison over complete blocks."""

    comparison: Comparison
    effects: Mapping[int, Fraction]
    test: SignTest
    interval: MedianInterval | None
    p_holm: Fraction
    screen: bool
    claim: bool


def judge(plan: Plan, *, arm: str, trials: Trials, faults: Sequence[str] = ()) -> Verdict:
    """Judge the comparisons of one arm.

    Args:
        plan: The frozen plan.
        arm: The arm under qualification.
        trials: Each trial of the plan by (arm, block); None or absent where none was made.
        faults: The names of the seeded faults that must be caught.
    """
    own, idle = Objections(), Objections()
    compared = _judge(own, plan, arm, trials)
    noise = _noise(idle, plan, trials)
    return conclude(
        GATE,
        figure="; ".join(_line(plan, it) for it in compared) + f"; A/A {_percent(max(noise.values(), default=None))}",
        objections=own,
        null=null_check(
            idle, f"{len(plan.null_pairs)} A/A pairs, largest difference {_percent(max(noise.values(), default=None))}"
        ),
        null_objections=idle,
        poison=_poison(plan, arm, faults),
        details={
            "alpha": plan.alpha,
            "practical": plan.practical,
            "blocks": list(plan.measured),
            "family": [_detail(it) for it in compared],
            "null": [
                {"pair": list(pair), "cell": cell, "metric": metric, "difference": str(value)}
                for (pair, cell, metric), value in noise.items()
            ],
        },
    )


def _judge(own: Objections, plan: Plan, arm: str, trials: Trials) -> list[_Compared]:
    if not any(it.candidate == arm for it in plan.comparisons):
        own.gap(1, f"found no primary comparison of '{arm}' in the plan, expected one")
    tested: list[tuple[Comparison, dict[int, Fraction] | None]] = []
    for it in plan.comparisons:
        scratch = Objections()
        effects = {block: _effect(scratch, it, block, trials) for block in plan.measured}
        whole = {block: value for block, value in effects.items() if value is not None}
        if it.candidate == arm:
            own.add(scratch)
        tested.append((it, whole if len(whole) == len(plan.measured) and whole else None))
    tests = [
        None if ratios is None else sign_test(list(ratios.values()), lower_is_better=it.better == "lower")
        for it, ratios in tested
    ]
    adjusted = holm([Fraction(1) if test is None else test.p for test in tests])
    found = []
    for (it, ratios), test, p_holm in zip(tested, tests, adjusted, strict=True):
        if it.candidate != arm or ratios is None or test is None:
            continue
        compared = _compare(plan, it, ratios, test, p_holm)
        found.append(compared)
        toward = test.better > test.worse
        if not (toward and p_holm <= Fraction(str(plan.alpha))):
            own.find(3, f"{_line(plan, compared)}, expected p <= {plan.alpha:g} in favour of '{arm}'")
        if not compared.screen:
            own.find(4, f"{_line(plan, compared)}, expected a median at least {_percent(_share(plan))} better")
        if compared.interval is None:
            own.gap(5, f"{_name(it)}: found no interval of {plan.confidence:g} from {len(ratios)} blocks")
    return found


def _effect(found: Objections, it: Comparison, block: int, trials: Trials) -> Fraction | None:
    values = []
    for name in (it.candidate, it.control):
        trial = trials.get((name, block))
        if trial is None:
            found.gap(
                2, f"{_name(it)}: block {block}: found no trial of '{name}', expected one: a block is never left out"
            )
            continue
        if not trial.valid:
            found.find(
                2, f"{_name(it)}: block {block}: found a void trial of '{name}' ({trial.why}), expected a valid one"
            )
            continue
        value = trial.figures.get((it.cell, it.metric))
        if not isinstance(value, Fraction) or not value > 0:
            found.find(2, f"{_name(it)}: block {block}: found {value} of '{name}', expected a finite figure above zero")
            continue
        values.append(value)
    return effect(*values) if len(values) == 2 else None


def _share(plan: Plan) -> Fraction:
    return Fraction(str(plan.practical))


def _better(plan: Plan, it: Comparison, value: Fraction) -> bool:
    """Whether an effect is at least ``practical`` better than 1."""
    return value <= 1 - _share(plan) if it.better == "lower" else value >= 1 + _share(plan)


def _compare(
    plan: Plan, it: Comparison, effects: Mapping[int, Fraction], test: SignTest, p_holm: Fraction
) -> _Compared:
    values = list(effects.values())
    interval = median_interval(values, Fraction(str(plan.confidence)))
    unfavourable = None if interval is None else interval.upper if it.better == "lower" else interval.lower
    return _Compared(
        comparison=it,
        effects=dict(effects),
        test=test,
        interval=interval,
        p_holm=p_holm,
        screen=_better(plan, it, median_of(values)),
        claim=unfavourable is not None and _better(plan, it, unfavourable),
    )


def _noise(idle: Objections, plan: Plan, trials: Trials) -> dict[tuple[tuple[int, int], str, str], Fraction]:
    """How far each A/A pair differs from 1, by pair, cell and metric of the family."""
    found = {}
    if not plan.null_pairs:
        idle.gap(6, "found no A/A pair in the plan, expected one")
    for pair in plan.null_pairs:
        for cell, metric in dict.fromkeys((it.cell, it.metric) for it in plan.comparisons):
            values = []
            for block in pair:
                trial = trials.get((plan.null_arm, block))
                value = trial.figures.get((cell, metric)) if trial is not None and trial.valid else None
                if not isinstance(value, Fraction) or not value > 0:
                    why = "no trial" if trial is None else trial.why or f"{value}"
                    idle.gap(6, f"A/A block {block}: found {why} of '{plan.null_arm}' in {cell}, expected a {metric}")
                else:
                    values.append(value)
            if len(values) < 2:
                continue
            found[pair, cell, metric] = difference = abs(effect(values[1], values[0]) - 1)
            if not difference < _share(plan):
                idle.find(
                    6, f"A/A blocks {pair[0]} and {pair[1]}: found a difference of {_percent(difference)} in {metric} "
                    f"of {cell}, expected below {_percent(_share(plan))}: the noise is as large as what is claimed"
                )  # fmt: skip
    return found


def _poison(plan: Plan, arm: str, faults: Sequence[str]) -> list[Poison]:
    from pytest_kvqual.faults.blocks import BLOCK_FAULTS

    own = [it for it in plan.comparisons if it.candidate == arm]
    if not own:
        return [Poison(fault=name, caught=False, figure="the plan does not compare the arm") for name in faults]
    healthy = _synthetic(plan)
    lines = _objected(plan, arm, healthy)
    result = []
    for name in faults:
        if lines:
            # An instrument that refuses a campaign without fault shows nothing.
            result.append(Poison(fault=name, caught=False, figure=f"objects to a superior campaign: {lines[0]}"))
            continue
        damaged = _objected(plan, arm, BLOCK_FAULTS[name](plan, own[0], healthy))
        result.append(Poison(fault=name, caught=bool(damaged), figure=damaged[0] if damaged else "it did not object"))
    return result


def _objected(plan: Plan, arm: str, trials: Trials) -> tuple[str, ...]:
    scratch = Objections()
    _judge(scratch, plan, arm, trials)
    _noise(scratch, plan, trials)
    return scratch.lines()


def _synthetic(plan: Plan) -> dict[tuple[str, int], Trial | None]:
    """A campaign in which each candidate is twice as good as its controls, and no two blocks are alike."""
    candidates = {it.candidate for it in plan.comparisons}
    figures = {(it.cell, it.metric): it.better for it in plan.comparisons}
    found: dict[tuple[str, int], Trial | None] = {}
    for block in plan.blocks:
        for name in block.order:
            factor = Fraction(2) if name in candidates else Fraction(1)
            drift = 1 + Fraction(block.number, 10_000)
            values = {key: drift / factor if better == "lower" else drift * factor for key, better in figures.items()}
            found[name, block.number] = Trial(valid=True, why="", figures=values)
    return found


def _name(it: Comparison) -> str:
    return f"{it.metric} of {it.candidate} against '{it.control}' in {it.cell}"


def _line(plan: Plan, found: _Compared) -> str:
    interval, values = found.interval, list(found.effects.values())
    median = median_of(values)
    between = (
        f" [{float(interval.lower):.4f}, {float(interval.upper):.4f}] at {100 * float(interval.coverage):.1f} %"
        if interval is not None
        else ""
    )
    return (
        f"{_name(found.comparison)}: median ratio {float(median):.4f}{between}, {found.test.better} of {len(values)} "
        f"blocks better, p = {float(found.test.p):.4g} (Holm {float(found.p_holm):.4g}, alpha {plan.alpha:g}); screen "
        f"{_percent(_share(plan))}: {'met' if found.screen else 'not met'}; claim: "
        f"{'supported' if found.claim else 'not supported'}"
    )


def _percent(value: Fraction | None) -> str:
    return "none" if value is None else f"{100 * float(value):.3g} %"


def _detail(found: _Compared) -> dict[str, object]:
    it, interval = found.comparison, found.interval
    return {
        "candidate": it.candidate,
        "control": it.control,
        "cell": it.cell,
        "metric": it.metric,
        "better": it.better,
        "effects": {str(block): str(value) for block, value in found.effects.items()},
        "median": None if interval is None else str(interval.median),
        "lower": None if interval is None else str(interval.lower),
        "upper": None if interval is None else str(interval.upper),
        "coverage": None if interval is None else str(interval.coverage),
        "blocks_better": found.test.better,
        "ties": found.test.ties,
        "p": str(found.test.p),
        "p_holm": str(found.p_holm),
        "screen": found.screen,
        "claim": found.claim,
    }
