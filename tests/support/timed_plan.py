"""A timing plan that is small: arms, two cells, one comparison, and traces that fit them. No model, no engine."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from pytest_kvqual.judge.gates.superiority import Trial
from pytest_kvqual.study.load import load_study
from pytest_kvqual.study.model import Cell, Comparison, Study, TimingRules
from pytest_kvqual.study.panels import PanelItem
from pytest_kvqual.study.plan import Plan, build, trials
from pytest_kvqual.study.trace import build as build_traces

LENGTH = 16
PANEL = "a" * 64
METRIC = "ttft_intended_p50"
FOLDER = Path("/a/study")
ITEMS = tuple(
    PanelItem(id=f"m{index}", prompt=(index,), targets=(), max_tokens=4, grade="measured") for index in range(20)
)


def cell(name: str = "open", **changes: Any) -> Cell:
    """An open cell of constant arrivals."""
    whole: dict[str, Any] = {
        "name": name, "mode": "open", "arrivals": "constant", "rate": 2.0, "seed": None, "concurrency": None,
        "requests": 4, "canaries": 0, "max_tokens": 4, "trace": FOLDER / f"traces/{name}.jsonl",
    }  # fmt: skip
    return Cell(**(whole | changes))


def closed(**changes: Any) -> Cell:
    """A closed cell of two in flight."""
    return cell("closed", **({"mode": "closed", "arrivals": None, "rate": None, "concurrency": 2} | changes))


def comparison(**changes: Any) -> Comparison:
    """The candidate against native, by the median TTFT of the open cell."""
    whole: dict[str, Any] = {
        "candidate": "candidate", "control": "native", "cell": "open", "metric": METRIC, "better": "lower",
    }  # fmt: skip
    return Comparison(**(whole | changes))


def rules(**changes: Any) -> TimingRules:
    """Three arms in six blocks, one A/A pair of native."""
    whole: dict[str, Any] = {
        "arms": ("native", "reference", "candidate"), "blocks": 6, "null_arm": "native", "null_pairs": 1, "warm_up": 1,
        "settle_s": 1.0, "cells": (cell(), closed()), "comparisons": (comparison(),), "alpha": 0.05,
        "confidence": 0.95, "practical": 0.05, "lateness_fraction": 0.1, "server_ttft_ms": 25.0, "failed_share": 0.0,
        "cold": True, "panel": FOLDER / "panel.json", "plan": FOLDER / "plans/16.json",
    }  # fmt: skip
    return TimingRules(**(whole | changes))


def study(declared: TimingRules | None = None) -> Study:
    """A study with these rules at one length."""
    return replace(load_study("smollm2-cpu"), name="timed", directory=FOLDER, timing={LENGTH: declared or rules()})


def traces(declared: TimingRules) -> dict[str, bytes]:
    """The traces of the rules' cells, by cell."""
    return {name: trace.to_bytes() for name, trace in build_traces(declared.cells, ITEMS, PANEL).items()}


def plan(**changes: Any) -> Plan:
    """The plan of :func:`rules` with changes."""
    declared = rules(**changes)
    return build(study(declared), LENGTH, traces(declared))


def measured(made: Plan, ratio: Fraction | list[Fraction], *, arm: str = "candidate") -> dict[tuple[str, int], Trial]:
    """Valid trials in which one arm has this ratio to the others in every block, or one for each block."""
    found = {}
    for place, (name, block) in enumerate(trials(made)):
        # Blocks differ by far more than the arms do; the pair of a block does not.
        base = Fraction(10**8 + 10**7 * min(block, len(made.measured)) + place)
        if name == arm and block in made.measured:
            here = ratio[made.measured.index(block)] if isinstance(ratio, list) else ratio
        else:
            here = Fraction(1)
        figures = {(it.cell, it.metric): base * here for it in made.comparisons}
        found[name, block] = Trial(valid=True, why="", figures=figures)
    return found
