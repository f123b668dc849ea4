"""Faults of a set of timed blocks, planted in synthetic trials of the frozen plan.

The trials are made up so that each fault shows on every plan, whatever the real ones were: without a fault the arm is
better in every block by more than the practical effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from pytest_kvqual.stats.blocks import sign_test

if TYPE_CHECKING:
    from pytest_kvqual.judge.gates.superiority import Trial
    from pytest_kvqual.study.plan import Plan

Trials = Mapping[tuple[str, int], "Trial | None"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFault:
    """One fault: the rule of the judge that must object, and how it is planted in the trials of a plan for an arm."""

    rule: int
    plant: Callable[[Plan, str, Trials], Trials]


def synthetic(plan: Plan, arm: str) -> Trials:
    """Every trial of the plan, valid, with the figures of the family: the arm is clearly better in every block.

    No two trials have the same figure; trials of one block differ by less than a tenth of the practical effect, the
    arm's by a third more than the effect.
    """
    from pytest_kvqual.judge.gates.superiority import Trial
    from pytest_kvqual.study.plan import trials

    practical = Fraction(repr(float(plan.practical)))
    wanted = {(it.cell, it.metric): it.better for it in plan.comparisons}
    every = trials(plan)
    found: dict[tuple[str, int], Trial | None] = {}
    for place, (name, block) in enumerate(every):
        noise = 1 + practical * (1 - practical) * Fraction(place, 10 * len(every))
        figures: dict[tuple[str, str], Fraction | float | None] = {}
        for key, better in wanted.items():
            factor = Fraction(1)
            if name == arm and block in plan.measured:
                factor = (1 - practical) * (1 - practical / 3) if better == "lower" else 1 + practical * Fraction(4, 3)
            figures[key] = 10**8 * noise * factor
        found[name, block] = Trial(valid=True, why="", figures=figures)
    return found


def _first(plan: Plan) -> int:
    return plan.measured[0]


def _changed(trials: Trials, name: tuple[str, int], change: Callable[[Trial], Trial | None]) -> Trials:
    trial = trials[name]
    return {**trials, name: None if trial is None else change(trial)}


def _lost(plan: Plan, arm: str, trials: Trials) -> Trials:
    return _changed(trials, (arm, _first(plan)), lambda trial: None)


def _void(plan: Plan, arm: str, trials: Trials) -> Trials:
    return _changed(trials, (arm, _first(plan)), lambda trial: replace(trial, valid=False, why="a planted fault"))


def _infinite(plan: Plan, arm: str, trials: Trials) -> Trials:
    """So many of a block's requests failed that its percentiles are infinite, and the trial was not found void."""
    return _changed(
        trials, (arm, _first(plan)), lambda trial: replace(trial, figures=dict.fromkeys(trial.figures, math.inf))
    )


def _swapped(plan: Plan, arm: str, trials: Trials) -> Trials:
    """In every measured block the trial of the arm goes by the name of its first control, and the reverse."""
    control = next(it.control for it in plan.comparisons if it.candidate == arm)
    found = dict(trials)
    for block in plan.measured:
        found[arm, block], found[control, block] = trials[control, block], trials[arm, block]
    return found


def _used_twice(plan: Plan, arm: str, trials: Trials) -> Trials:
    first, second = plan.measured[:2]
    return {**trials, (arm, first): trials[arm, second]}


def _turned(plan: Plan, arm: str, trials: Trials) -> Trials:
    """In two blocks arm and control change names; in as many more as a plan of many blocks can lose."""
    alpha, count = Fraction(repr(float(plan.alpha))), len(plan.measured)
    turned = 2
    while turned < count and _p(count, turned) <= alpha:
        turned += 1
    control = next(it.control for it in plan.comparisons if it.candidate == arm)
    found = dict(trials)
    for block in plan.measured[:turned]:
        found[arm, block], found[control, block] = trials[control, block], trials[arm, block]
    return found


def _p(count: int, turned: int) -> Fraction:
    worse, better = Fraction(2), Fraction(1, 2)
    return sign_test([worse] * turned + [better] * (count - turned)).p


def _null_apart(plan: Plan, arm: str, trials: Trials) -> Trials:
    """The same arm differs from itself by the practical effect."""
    first, second = ((plan.null_arm, block) for block in plan.null_pairs[0])
    one = trials[first]
    apart = 1 + Fraction(repr(float(plan.practical)))
    figures = {} if one is None else {key: Fraction(value or 0) * apart for key, value in one.figures.items()}
    return _changed(trials, second, lambda trial: replace(trial, figures=figures))


FAULTS: Final[Mapping[str, BlockFault]] = MappingProxyType(
    {
        "block-lost": BlockFault(rule=2, plant=_lost),
        "block-void": BlockFault(rule=2, plant=_void),
        "block-infinite": BlockFault(rule=3, plant=_infinite),
        "labels-swapped": BlockFault(rule=5, plant=_swapped),
        "trial-used-twice": BlockFault(rule=4, plant=_used_twice),
        "effects-turned": BlockFault(rule=5, plant=_turned),
        "null-apart": BlockFault(rule=7, plant=_null_apart),
    }
)
"""The seeded faults of the gate, by name."""
