"""Faults of a campaign's blocks, planted in its figures: what makes an arm look faster than it was shown to be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pytest_kvqual.judge.gates.superiority import Trial
    from pytest_kvqual.study.model import Comparison
    from pytest_kvqual.study.plan import Plan

    Trials = Mapping[tuple[str, int], Trial | None]
    Plant = Callable[[Plan, Comparison, Trials], Trials]


def _block_lost(plan: Plan, of: Comparison, trials: Trials) -> Trials:
    return {**trials, (of.candidate, plan.measured[0]): None}


def _block_void(plan: Plan, of: Comparison, trials: Trials) -> Trials:
    key = (of.control, plan.measured[-1])
    trial = trials[key]
    return trials if trial is None else {**trials, key: replace(trial, valid=False, why="planted")}


def _changed(trials: Trials, key: tuple[str, int], of: Comparison, change: Callable[[Any], Any]) -> Trials:
    trial = trials[key]
    if trial is None:
        return trials
    figure = (of.cell, of.metric)
    figures = {**trial.figures, figure: change(trial.figures[figure])}
    return {**trials, key: replace(trial, figures=figures)}


def _requests_failed(plan: Plan, of: Comparison, trials: Trials) -> Trials:
    """So many requests of a block failed that the figure is infinite."""
    return _changed(trials, (of.candidate, plan.measured[0]), of, lambda _: math.inf)


def _not_measured(plan: Plan, of: Comparison, trials: Trials) -> Trials:
    return _changed(trials, (of.control, plan.measured[0]), of, lambda _: None)


def _labels_swapped(plan: Plan, of: Comparison, trials: Trials) -> Trials:
    swapped = dict(trials)
    for block in plan.measured:
        swapped[of.candidate, block], swapped[of.control, block] = (
            trials[of.control, block],
            trials[of.candidate, block],
        )
    return swapped


def _two_blocks_worse(plan: Plan, of: Comparison, trials: Trials) -> Trials:
    """In two blocks the effect is on the wrong side."""
    swapped = dict(trials)
    for block in plan.measured[:2]:
        swapped[of.candidate, block], swapped[of.control, block] = (
            trials[of.control, block],
            trials[of.candidate, block],
        )
    return swapped


def _noisy_null(plan: Plan, of: Comparison, trials: Trials) -> Trials:
    """The null arm differs from itself by as much as is claimed."""
    first = plan.null_pairs[0][0]
    return _changed(trials, (plan.null_arm, first), of, lambda value: value * 2)


BLOCK_FAULTS: Final[Mapping[str, Plant]] = MappingProxyType(
    {
        "block-lost": _block_lost,
        "block-void": _block_void,
        "requests-failed": _requests_failed,
        "figure-missing": _not_measured,
        "labels-swapped": _labels_swapped,
        "two-blocks-worse": _two_blocks_worse,
        "noisy-null": _noisy_null,
    }
)
"""The seeded faults of the gate, by name."""
