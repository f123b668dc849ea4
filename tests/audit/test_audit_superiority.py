"""Superiority derived again by the audit: on made-up campaigns it comes to what the judge comes to, by other code."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvqual._canonical import canonical_bytes
from pytest_kvqual.audit import plans as audited
from pytest_kvqual.audit import superiority as derived
from pytest_kvqual.audit.recorded import Figure, Verified
from pytest_kvqual.audit.rederive import differences
from pytest_kvqual.audit.trials import WARM_UP, Objections, Trial
from pytest_kvqual.judge.gates import superiority as judged
from pytest_kvqual.study.model import Comparison
from pytest_kvqual.study.plan import Block, Plan, PlannedCell, Reachable, trials, williams

ARMS = ("native", "one", "two")
CELLS = ("open", "closed")
FAMILY = (
    Comparison(candidate="one", control="native", cell="open", metric="ttft_intended_p50", better="lower"),
    Comparison(candidate="two", control="native", cell="open", metric="tpot_p90", better="lower"),
    Comparison(candidate="two", control="one", cell="closed", metric="output_throughput", better="higher"),
)
METRICS = ("ttft_intended_p50", "tpot_p90", "output_throughput", "e2e_max")
SEEDS = range(30)


def _plan(sets: int) -> Plan:
    orders = williams(len(ARMS)) * sets
    blocks = [
        Block(block=number, kind="measured", order=tuple(ARMS[place] for place in order))
        for number, order in enumerate(orders, start=1)
    ]
    null = tuple(range(len(blocks) + 1, len(blocks) + 5))
    blocks += [Block(block=number, kind="null", order=("native",)) for number in null]
    return Plan(
        study="made-up",
        length=16,
        arms=ARMS,
        blocks=tuple(blocks),
        null_pairs=((null[0], null[1]), (null[2], null[3])),
        warm_up=2,
        settle_s=1.0,
        cells=tuple(
            PlannedCell(
                name=name, mode="open", trace=f"{name}.jsonl", trace_sha256="a" * 64, requests=4, max_tokens=4,
                concurrency=None, rate=1.0,
            )
            for name in CELLS
        ),
        comparisons=FAMILY,
        alpha=0.1,
        confidence=0.95,
        practical=0.05,
        lateness_fraction=0.1,
        server_ttft_ms=5.0,
        failed_share=0.0,
        cold=True,
        panel_sha256="b" * 64,
        reachable=Reachable(p=0.1, holm_alpha=0.1, coverage=0.9),
    )  # fmt: skip


Figures = dict[tuple[str, str], Fraction | float | None]


def _campaign(plan: Plan, seed: int) -> dict[tuple[str, int], tuple[str, Figures] | None]:
    """Trials of a seed: mostly whole, with effects of every size, ties, and now and then what cannot be used."""
    numbers = random.Random(seed)
    factor = {"native": 1.0, "one": numbers.choice([0.5, 0.9, 0.949, 1.0, 1.3])}
    factor["two"] = numbers.choice([factor["one"], 0.4, 0.96])
    whole, still = numbers.random() < 0.6, numbers.random() < 0.7
    noise = numbers.choice([0, 3, 40, 400])
    found: dict[tuple[str, int], tuple[str, Figures] | None] = {}
    for place, (arm, block) in enumerate(trials(plan)):
        figures: Figures = {}
        for cell in CELLS:
            for metric in METRICS:
                size = Fraction(str(factor[arm])) ** (-1 if metric == "output_throughput" else 1)
                random_part = numbers.randrange(noise) if noise and not (still and arm == "native") else 0
                figures[cell, metric] = size * (1000 + random_part)
            figures[cell, "e2e_max"] = Fraction(10**6 + place)
        why = ""
        if not whole and numbers.random() < 0.06:
            key = (numbers.choice(CELLS), numbers.choice(METRICS))
            bad: list[Fraction | float | None] = [None, math.inf, Fraction(0)]
            figures[key] = numbers.choice(bad)
        if not whole and numbers.random() < 0.04:
            why = "rule 4: too many requests failed"
        found[arm, block] = None if not whole and numbers.random() < 0.03 else (why, figures)
    if numbers.random() < 0.1:
        keys = [key for key, one in found.items() if one is not None]
        found[keys[3]] = found[keys[7]]
    return found


def _as_read(arm: str, block: int, one: tuple[str, Figures] | None) -> Trial | None:
    if one is None:
        return None
    cells = {name: Verified() for name in CELLS}
    for (cell, metric), value in one[1].items():
        cells[cell].figures[metric] = Figure(value=value, unit="ns", of=4)
    cells[WARM_UP] = Verified()
    # What a trial's warm-up took is its own, also where its cells are another trial's.
    cells[WARM_UP].figures["e2e_max"] = Figure(value=Fraction(10 * block + ARMS.index(arm)), unit="ns", of=2)
    return Trial(arm=arm, block=block, name="made-up", objections=Objections(), cells=cells, void=one[0])


def _audited_plan(plan: Plan) -> audited.Plan:
    rules: Mapping[str, Any] = {
        "alpha": plan.alpha, "confidence": plan.confidence, "practical": plan.practical, "null_arm": plan.null_arm,
    }  # fmt: skip
    return audited._plan(json.loads(plan.to_bytes()), rules, "c" * 64)


OUTCOMES: set[str] = set()


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_derived_is_what_the_judge_says(seed: int) -> None:
    """Outcome, null, every number of the details and the figure, for an arm with one comparison and one with two."""
    plan = _plan(2)
    found = _campaign(plan, seed)
    for arm in ("one", "two"):
        study: Any = SimpleNamespace(
            name="made-up", timing={plan.length: SimpleNamespace(comparisons=plan.comparisons)}
        )
        verdict = judged.judge(
            study,
            plan,
            arm=arm,
            trials={
                key: None if one is None else judged.Trial(valid=not one[0], why=one[0], figures=one[1])
                for key, one in found.items()
            },
        )
        mine = derived.derive(_audited_plan(plan), arm, {key: _as_read(*key, one) for key, one in found.items()})
        assert all(fault.caught for fault in verdict.poison)
        assert mine.objections.outcome() == verdict.outcome.value, mine.objections.first()
        assert verdict.null is not None
        assert verdict.null.passed is not bool(mine.objections.idle)
        stored = json.loads(canonical_bytes(verdict.details))
        for entry in stored["family"]:
            entry["missing"] = len(entry["missing"])
        assert differences(stored, mine.details(_audited_plan(plan)), "details", 0.0) == []
        if verdict.outcome.value == "PASS":
            assert mine.figure(_audited_plan(plan)) == verdict.figure
        OUTCOMES.add(verdict.outcome.value)


def test_every_outcome_was_seen() -> None:
    """The campaigns above pass, fail and stay undecided."""
    assert OUTCOMES in ({"PASS", "FAIL", "INCONCLUSIVE"}, set())
