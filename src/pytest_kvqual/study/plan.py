"""The timing plan: which arm is timed in which block, in which order, and what will be concluded. Pure.

A plan is made from the study's timing rules and its traces, and has no other content: the same rules and traces give
the same bytes, so a plan is valid exactly when it is what :func:`build` gives.

Order. Measured blocks follow a Williams design (Williams 1949, Aust. J. Sci. Res. A2, pp. 149-168): over one set of
blocks each arm stands in each position equally often and follows each other arm equally often, so that a drift over a
block, and what one trial leaves behind for the next, fall on all arms alike. A set has n blocks for an even number of
arms, 2n for an odd one. Then come pairs of blocks in which the null arm alone is timed (A/A).

History of the format: 1, the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import comb
from typing import TYPE_CHECKING, Final

from pytest_kvqual._canonical import pretty_bytes, sha256_bytes
from pytest_kvqual._decode import parse_json
from pytest_kvqual.errors import StudyError
from pytest_kvqual.metrics.formulas import FORMULAS, PER_SECOND, QUANTITIES, unit_of
from pytest_kvqual.study.model import Comparison, TimingRules

if TYPE_CHECKING:
    from pytest_kvqual.study.model import Study

__all__ = ["Block", "Plan", "build", "check", "reachable", "trials", "williams"]

SCHEMA: Final = 1
_MOST_BLOCKS: Final = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One block: its number from 1, ``measured`` or ``null``, and the arms in the order in which they are timed."""

    number: int
    kind: str
    order: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A timing plan. ``data`` are its bytes, ``document`` their content; ``null_pairs`` are pairs of block numbers."""

    arms: tuple[str, ...]
    blocks: tuple[Block, ...]
    null_arm: str
    null_pairs: tuple[tuple[int, int], ...]
    comparisons: tuple[Comparison, ...]
    alpha: float
    confidence: float
    practical: float
    data: bytes

    @property
    def measured(self) -> tuple[int, ...]:
        """The numbers of the blocks in which every arm is timed."""
        return tuple(block.number for block in self.blocks if block.kind == "measured")

    def to_bytes(self) -> bytes:
        """The plan as a file."""
        return self.data


@dataclass(frozen=True, kw_only=True, slots=True)
class Reachable:
    """What a number of blocks can show at best.

    ``p`` is the two-sided p of the sign test where all blocks agree, ``level`` Holm's smallest level over the family,
    ``coverage`` that of the narrowest interval of the median that has the confidence asked for, else of the widest.
    """

    p: Fraction
    level: Fraction
    coverage: Fraction


def williams(arms: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """One set of a Williams design: n sequences for an even number of arms, 2n for an odd one; of one arm, itself."""
    count = len(arms)
    zigzag = [0]
    for step in range(1, count):
        zigzag.append((zigzag[-1] + (step if step % 2 else -step)) % count)
    rows = [tuple(arms[(place + shift) % count] for place in zigzag) for shift in range(count)]
    return tuple(rows if count % 2 == 0 or count == 1 else [*rows, *(row[::-1] for row in rows)])


def coverage(blocks: int, rank: int) -> Fraction:
    """The exact coverage of the interval from the ``rank``-th smallest to the ``rank``-th largest of n for the median.

    P(rank <= X <= n - rank) of X ~ Binomial(n, 1/2), for a continuous distribution. Source: David and Nagaraja, Order
    Statistics, 3rd ed., 2003, p. 160.
    """
    return 1 - 2 * Fraction(sum(comb(blocks, k) for k in range(rank)), 2**blocks)


def rank_of(blocks: int, confidence: float) -> int:
    """The largest rank whose interval covers the median with at least ``confidence``; 0 where not even rank 1 does."""
    wanted = Fraction(str(confidence))
    return max((rank for rank in range(1, blocks // 2 + 1) if coverage(blocks, rank) >= wanted), default=0)


def reachable(blocks: int, family: int, alpha: float, confidence: float) -> Reachable:
    """What ``blocks`` blocks can show at best, for a family of ``family`` comparisons."""
    return Reachable(
        p=min(Fraction(1), Fraction(2, 2**blocks)),
        level=Fraction(str(alpha)) / family,
        coverage=coverage(blocks, rank_of(blocks, confidence) or 1),
    )


def build(study: Study, length: int, traces: Mapping[str, bytes]) -> Plan:
    """The plan of one length.

    Args:
        study: The study.
        length: A length with timing rules.
        traces: The bytes of each cell's trace, by the cell's name.

    Raises:
        StudyError: A plan that could not be significant even if all blocks agree, whose interval cannot have its
            confidence, or whose order cannot be balanced; a metric that is unknown, or better the other way.
    """
    rules, where = study.timing[length], f"timing.{length}"
    _check(rules, where)
    sequences = williams(rules.arms)
    blocks = [
        Block(number=index + 1, kind="measured", order=sequences[index % len(sequences)])
        for index in range(rules.blocks)
    ]
    pairs = []
    for _ in range(rules.null_pairs):
        first = len(blocks) + 1
        blocks += [Block(number=first + step, kind="null", order=(rules.null_arm,)) for step in (0, 1)]
        pairs.append((first, first + 1))
    best = reachable(rules.blocks, len(rules.comparisons), rules.alpha, rules.confidence)
    document: dict[str, object] = {
        "schema": SCHEMA,
        "kind": "plan",
        "study": study.name,
        "length": length,
        "arms": list(rules.arms),
        "design": "williams",
        "blocks": [{"block": it.number, "kind": it.kind, "order": list(it.order)} for it in blocks],
        "null_arm": rules.null_arm,
        "null_pairs": [list(pair) for pair in pairs],
        "warm_up": rules.warm_up,
        "settle_s": rules.settle_s,
        "cells": [
            {
                "name": cell.name,
                "mode": cell.mode,
                "trace": cell.trace.relative_to(study.directory).as_posix(),
                "trace_sha256": sha256_bytes(traces[cell.name]),
                "requests": cell.requests,
                "max_tokens": cell.max_tokens,
                "concurrency": cell.concurrency,
                "rate": cell.rate,
            }
            for cell in rules.cells
        ],
        "comparisons": [
            {
                "candidate": it.candidate,
                "control": it.control,
                "cell": it.cell,
                "metric": it.metric,
                "better": it.better,
                "formula": FORMULAS[it.metric],
            }
            for it in rules.comparisons
        ],
        "alpha": rules.alpha,
        "confidence": rules.confidence,
        "practical": rules.practical,
        "lateness_fraction": rules.lateness_fraction,
        "server_ttft_ms": rules.server_ttft_ms,
        "failed_share": rules.failed_share,
        "cold": rules.cold,
        "reachable": {"p": float(best.p), "holm_alpha": float(best.level), "coverage": float(best.coverage)},
    }
    return Plan(
        arms=rules.arms,
        blocks=tuple(blocks),
        null_arm=rules.null_arm,
        null_pairs=tuple(pairs),
        comparisons=rules.comparisons,
        alpha=rules.alpha,
        confidence=rules.confidence,
        practical=rules.practical,
        data=pretty_bytes(document),
    )


def _check(rules: TimingRules, where: str) -> None:
    size = len(williams(rules.arms))
    if rules.blocks % size:
        raise StudyError(
            f"{where}.blocks: found {rules.blocks}, expected a multiple of {size}: so many blocks balance the order of "
            f"{len(rules.arms)} arms",
            advice=f"take {size * (rules.blocks // size + 1)}",
        )
    seen = set()
    for index, it in enumerate(rules.comparisons):
        if it.metric not in FORMULAS or not (_timed(it.metric) or it.metric.endswith("_throughput")):
            raise StudyError(
                f"{where}.comparisons[{index}].metric: found '{it.metric}', expected a figure to compare, such as "
                "ttft_intended_p50 or output_throughput"
            )
        wanted = "higher" if unit_of(it.metric) == PER_SECOND else "lower"
        if it.better != wanted:
            raise StudyError(
                f"{where}.comparisons[{index}].better: found '{it.better}', expected '{wanted}' of {it.metric}"
            )
        key = (it.candidate, it.control, it.cell, it.metric)
        if key in seen:
            raise StudyError(f"{where}.comparisons[{index}]: found a comparison a second time, expected each once")
        seen.add(key)
    family = len(rules.comparisons)
    best = reachable(rules.blocks, family, rules.alpha, rules.confidence)
    if best.p > best.level:
        raise StudyError(
            f"{where}: found {rules.blocks} blocks, whose smallest p is {float(best.p):.4g}, expected at most "
            f"{float(best.level):.4g}, {rules.alpha:g} over a family of {family}: it could not be significant even if "
            "all blocks agree",
            advice=f"take {_enough(rules, size)} blocks, or a smaller family",
        )
    if not rank_of(rules.blocks, rules.confidence):
        raise StudyError(
            f"{where}.confidence: found {rules.confidence:g}, expected at most {float(best.coverage):.4g}, what the "
            f"interval of {rules.blocks} blocks can cover",
            advice=f"take {_enough(rules, size)} blocks",
        )


def _timed(metric: str) -> bool:
    name = metric.removeprefix("burst_")
    return any(name.startswith(f"{quantity}_") for quantity in QUANTITIES if quantity != "lateness")


def _enough(rules: TimingRules, size: int) -> int:
    """The smallest number of blocks that balances the order, can be significant, and has its confidence."""
    for blocks in range(size, _MOST_BLOCKS, size):
        best = reachable(blocks, len(rules.comparisons), rules.alpha, rules.confidence)
        if best.p <= best.level and rank_of(blocks, rules.confidence):
            return blocks
    return _MOST_BLOCKS


def check(data: bytes, study: Study, length: int, traces: Mapping[str, bytes], *, origin: str) -> Plan:
    """The plan in a file, which must be what :func:`build` gives.

    Raises:
        StudyError: It is another one; names the first key that differs.
    """
    plan = build(study, length, traces)
    if plan.data == data:
        return plan
    found, expected = (parse_json(each, origin=origin, error=StudyError) for each in (data, plan.data))
    if not isinstance(found, dict) or not isinstance(expected, dict):
        raise StudyError(f"{origin}: found no plan, expected one", advice="run `kvqual plan`")
    key = next((key for key in expected if found.get(key) != expected[key]), "its bytes")
    raise StudyError(
        f"{origin}: found another {key} than the study's timing rules and traces give, expected their plan",
        advice="run `kvqual plan` and `kvqual freeze`",
    )


def trials(plan: Plan) -> tuple[tuple[str, int], ...]:
    """Every trial as (arm, block), in the order in which they are to be made."""
    return tuple((arm, block.number) for block in plan.blocks for arm in block.order)
