"""The plan of a length's timed trials: which arm when, what is compared, and what that many blocks can show. Pure.

A trial is one arm of one block: a fresh server, timed once under every cell's trace. In each measured block every arm
is timed once, in an order of a Williams design: over one set of orders each arm stands in each place equally often, and
each ordered pair of arms follows each other equally often, so that a drift of the machine, and what a trial leaves to
the next one, fall on all arms alike. An even number n of arms has n orders, an odd one 2n. After the measured blocks
come the A/A pairs: two blocks of the null arm alone.

A plan is refused that could not show anything: whose comparisons stay above Holm's smallest level even if every block
agrees, or whose interval of the median cannot reach its confidence. Both follow from the number of blocks n. The
two-sided sign test of n blocks that agree has p = 2**(1 - n). The interval from the k-th smallest to the k-th largest
of n effects covers the median with probability 1 - 2 * P(X < k), X binomial (n, 1/2), and at least that where effects
tie.

A primary comparison is of a figure that no arm betters by failing requests or by letting them wait in the client. It
counts every offered request, a failed one as infinite or as nothing gained: a mean over those that got a first token
does not. In an open loop it is measured from the intended arrival: from the send it would leave out how long a request
was kept from being sent, which is the queue that a slow server causes (coordinated omission). In a closed loop the
client waits for the server by declaration, and both origins are accepted. The time per output token has no origin.

History of the format: 1, the first.

Sources:
    G. Tene, "How not to measure latency", QCon San Francisco 2012 (coordinated omission).
    E. J. Williams, "Experimental designs balanced for the estimation of residual effects of treatments", Australian
    Journal of Scientific Research A 2 (1949), pp. 149-168.
    S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979),
    pp. 65-70.
    W. J. Conover, "Practical Nonparametric Statistics", 3rd edition (1999), section 3.4 (sign test) and section 3.2
    (interval of a quantile).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb
from typing import TYPE_CHECKING, Final

from pytest_kvqual._canonical import pretty_bytes, sha256_bytes
from pytest_kvqual._decode import describe, nearest, parse_json
from pytest_kvqual.errors import EvidenceError, StudyError
from pytest_kvqual.metrics.formulas import FORMULAS
from pytest_kvqual.study.model import Comparison
from pytest_kvqual.study.trace import parse_trace

if TYPE_CHECKING:
    from pytest_kvqual.study.model import Cell, Study, TimingRules

SCHEMA: Final = 1
DESIGN: Final = "williams"
MEASURED: Final = "measured"
NULL: Final = "null"

_TOP: Final = (
    "schema", "kind", "study", "length", "arms", "design", "blocks", "null_pairs", "warm_up", "settle_s", "cells",
    "comparisons", "alpha", "confidence", "practical", "lateness_fraction", "server_ttft_ms", "failed_share", "cold",
    "panel_sha256", "reachable",
)  # fmt: skip
_CELL: Final = ("name", "mode", "trace", "trace_sha256", "requests", "max_tokens", "concurrency", "rate")
_COMPARISON: Final = ("candidate", "control", "cell", "metric", "better")
_REACHABLE: Final = ("p", "holm_alpha", "coverage")
_LOWER: Final = ("ttft_intended_", "ttft_send_", "tpot_", "e2e_")
_HIGHER: Final = ("output_throughput", "request_throughput", "goodput_tokens")
_BURST: Final = "burst_"
_FROM_SEND: Final = "ttft_send_"
_FROM_INTENDED: Final = "ttft_intended_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One block: its number from 1, ``measured`` or ``null``, and the arms that are timed in it, in order."""

    block: int
    kind: str
    order: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCell:
    """One load of every trial. ``trace`` is the frozen trace's name in the study's folder."""

    name: str
    mode: str
    trace: str
    trace_sha256: str
    requests: int
    max_tokens: int
    concurrency: int | None
    rate: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reachable:
    """What the plan can show at best.

    ``p``: of the two-sided sign test if all blocks agree. ``holm_alpha``: Holm's smallest level. ``coverage``: of the
    interval that is reported, the narrowest that reaches the confidence.
    """

    p: float
    holm_alpha: float
    coverage: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The trials of one length and what is asked of them; ``null_pairs`` are pairs of block numbers.

    The other fields are those of :class:`pytest_kvqual.study.model.TimingRules`.
    """

    study: str
    length: int
    arms: tuple[str, ...]
    blocks: tuple[Block, ...]
    null_pairs: tuple[tuple[int, int], ...]
    warm_up: int
    settle_s: float
    cells: tuple[PlannedCell, ...]
    comparisons: tuple[Comparison, ...]
    alpha: float
    confidence: float
    practical: float
    lateness_fraction: float
    server_ttft_ms: float
    failed_share: float
    cold: bool
    panel_sha256: str
    reachable: Reachable

    @property
    def measured(self) -> tuple[int, ...]:
        """The numbers of the measured blocks."""
        return tuple(block.block for block in self.blocks if block.kind == MEASURED)

    @property
    def null_arm(self) -> str:
        """The arm of the A/A pairs."""
        return next(block.order[0] for block in self.blocks if block.kind == NULL)

    def to_dict(self) -> dict[str, object]:
        """The plan as a JSON value."""
        return {
            "schema": SCHEMA,
            "kind": "plan",
            "study": self.study,
            "length": self.length,
            "arms": list(self.arms),
            "design": DESIGN,
            "blocks": [{"block": it.block, "kind": it.kind, "order": list(it.order)} for it in self.blocks],
            "null_pairs": [list(pair) for pair in self.null_pairs],
            "warm_up": self.warm_up,
            "settle_s": self.settle_s,
            "cells": [{key: getattr(cell, key) for key in _CELL} for cell in self.cells],
            "comparisons": [{key: getattr(it, key) for key in _COMPARISON} for it in self.comparisons],
            "alpha": self.alpha,
            "confidence": self.confidence,
            "practical": self.practical,
            "lateness_fraction": self.lateness_fraction,
            "server_ttft_ms": self.server_ttft_ms,
            "failed_share": self.failed_share,
            "cold": self.cold,
            "panel_sha256": self.panel_sha256,
            "reachable": {key: getattr(self.reachable, key) for key in _REACHABLE},
        }

    def to_bytes(self) -> bytes:
        """The plan as a file."""
        return pretty_bytes(self.to_dict())


def trials(plan: Plan) -> tuple[tuple[str, int], ...]:
    """Every trial as (arm, block), in the order in which they are run."""
    return tuple((arm, block.block) for block in plan.blocks for arm in block.order)


def williams(count: int) -> tuple[tuple[int, ...], ...]:
    """One set of orders of ``count`` treatments, numbered from 0: ``count`` orders, twice as many where it is odd.

    Each treatment stands in each place equally often, and each ordered pair of different ones is adjacent equally often
    (once, or twice where ``count`` is odd). The first order zigzags 0, 1, n - 1, 2, n - 2, …; the others add 1 to each
    number; for an odd count all of them come again reversed.

    Raises:
        ValueError: ``count`` is below 1.
    """
    if count < 1:
        raise ValueError(f"count: found {count}, expected at least 1")
    first = [0]
    for step in range(1, count):
        first.append((step + 1) // 2 if step % 2 else count - step // 2)
    rows = [tuple((place + shift) % count for place in first) for shift in range(count)]
    if count % 2 and count > 1:
        rows += [tuple(reversed(row)) for row in rows]
    return tuple(rows)


def sign_p(blocks: int) -> Fraction:
    """The two-sided p of the sign test where all of ``blocks`` agree: 2**(1 - blocks)."""
    return Fraction(2, 2**blocks)


def coverage(blocks: int, order: int) -> Fraction:
    """The probability that the ``order``-th smallest to the ``order``-th largest of ``blocks`` effects hold the median.

    Raises:
        ValueError: ``order`` is not 1 to half of ``blocks``, rounded up.
    """
    if not 1 <= order <= (blocks + 1) // 2:
        raise ValueError(f"order: found {order}, expected 1 to {(blocks + 1) // 2}")
    return 1 - Fraction(2 * sum(comb(blocks, below) for below in range(order)), 2**blocks)


def largest_order(blocks: int, confidence: Fraction) -> int | None:
    """The largest order whose coverage is at least ``confidence``; None where not even the whole range reaches it."""
    orders = [k for k in range(1, (blocks + 1) // 2 + 1) if coverage(blocks, k) >= confidence]
    return max(orders, default=None)


def better_of(metric: str) -> str | None:
    """``lower`` or ``higher``: which is better of a figure; None for one that is no performance of an arm."""
    name = metric.removeprefix(_BURST)
    if name in _HIGHER:
        return "higher"
    return "lower" if name.startswith(_LOWER) or name == "mean_ttft_send" else None


def build(study: Study, length: int, traces: Mapping[str, bytes]) -> Plan:
    """The plan of one length, from the study's declaration and its frozen traces.

    Args:
        study: The study.
        length: A length in tokens that has a timing plan.
        traces: The bytes of each cell's trace, by cell.

    Raises:
        StudyError: The declaration contradicts itself or cannot show what it asks; a trace is missing or is that of
            another cell. One line with the numbers.
    """
    if length not in study.timing:
        raise StudyError(
            f"study {study.name}: found no timing plan at length {length}, expected one of "
            f"{', '.join(map(str, study.timing)) or 'none'}"
        )
    rules = study.timing[length]
    origin = f"study {study.name}, timing.{length}"
    _arms(rules, origin)
    cells, panel = _cells(study, rules, traces, origin)
    _comparisons(rules, origin)
    orders = _orders(rules, origin)
    reachable = _reachable(rules, len(orders), origin)
    blocks = [
        Block(
            block=number,
            kind=MEASURED,
            order=tuple(rules.arms[arm] for arm in orders[(number - 1) % len(orders)]),
        )
        for number in range(1, rules.blocks + 1)
    ]
    pairs = []
    for _ in range(rules.null_pairs):
        first = len(blocks) + 1
        pairs.append((first, first + 1))
        blocks += [Block(block=number, kind=NULL, order=(rules.null_arm,)) for number in pairs[-1]]
    return Plan(
        study=study.name,
        length=length,
        arms=tuple(rules.arms),
        blocks=tuple(blocks),
        null_pairs=tuple(pairs),
        warm_up=rules.warm_up,
        settle_s=float(rules.settle_s),
        cells=cells,
        comparisons=rules.comparisons,
        alpha=rules.alpha,
        confidence=rules.confidence,
        practical=rules.practical,
        lateness_fraction=rules.lateness_fraction,
        server_ttft_ms=rules.server_ttft_ms,
        failed_share=float(rules.failed_share),
        cold=rules.cold,
        panel_sha256=panel,
        reachable=reachable,
    )


def check(data: bytes, study: Study, length: int, traces: Mapping[str, bytes], *, origin: str) -> Plan:
    """The plan in the bytes of a file, which must be those that :func:`build` gives.

    Raises:
        StudyError: They are not, and names the first key that differs; or as :func:`build`.
    """
    plan = build(study, length, traces)
    if data == plan.to_bytes():
        return plan
    advice = "run `kvqual plan` and `kvqual freeze`; trials of the old plan count no more"
    found = parse_json(data, origin=origin, error=StudyError, advice=advice)
    if not isinstance(found, dict):
        raise StudyError(f"{origin}: found {describe(found)}, expected a plan", advice=advice)
    difference = _difference("", found, json.loads(plan.to_bytes()), _TOP)
    if difference is None:
        raise StudyError(f"{origin}: found other bytes than `kvqual plan` writes for this plan", advice=advice)
    raise StudyError(f"{origin}: {difference}", advice=advice)


def _arms(rules: TimingRules, origin: str) -> None:
    for index, arm in enumerate(rules.arms):
        if arm in rules.arms[:index]:
            raise StudyError(f"{origin}: arms: found '{arm}' twice, expected each arm once")
    if rules.null_arm not in rules.arms:
        raise StudyError(
            f"{origin}: null_arm: found '{rules.null_arm}', expected one of {', '.join(rules.arms) or 'no arms'}"
        )
    if rules.null_pairs < 1:
        raise StudyError(f"{origin}: null_pairs: found {rules.null_pairs}, expected at least 1")


def _cells(
    study: Study, rules: TimingRules, traces: Mapping[str, bytes], origin: str
) -> tuple[tuple[PlannedCell, ...], str]:
    """The cells with their traces' digests, and the digest of the panel that all of them are of."""
    found, panels = [], set()
    if not rules.cells:
        raise StudyError(f"{origin}: cells: found none, expected at least one")
    for index, cell in enumerate(rules.cells):
        if any(cell.name == other.name for other in rules.cells[:index]):
            raise StudyError(f"{origin}: cells: found '{cell.name}' twice, expected each cell once")
        if cell.name not in traces:
            raise StudyError(f"{origin}: found no trace of cell {cell.name}, expected one", advice="run `kvqual trace`")
        panels.add(_traced(cell, traces[cell.name]))
        inside = cell.trace.is_relative_to(study.directory)
        found.append(
            PlannedCell(
                name=cell.name,
                mode=cell.mode,
                trace=cell.trace.relative_to(study.directory).as_posix() if inside else cell.trace.name,
                trace_sha256=sha256_bytes(traces[cell.name]),
                requests=cell.requests,
                max_tokens=cell.max_tokens,
                concurrency=cell.concurrency,
                rate=cell.rate,
            )
        )
    if len(panels) != 1:
        raise StudyError(
            f"{origin}: found traces of {len(panels)} panels ({', '.join(sorted(panels))}), expected those of one",
            advice="run `kvqual trace`",
        )
    return tuple(found), panels.pop()


def _traced(cell: Cell, data: bytes) -> str:
    """The digest of a trace's panel, if it is the trace of this cell."""
    try:
        trace = parse_trace(data, origin=f"trace of cell {cell.name}")
    except EvidenceError as error:
        raise StudyError(str(error), advice="run `kvqual trace`") from error
    declared = (
        ("cell", trace.cell, cell.name),
        ("mode", trace.mode, cell.mode),
        ("arrivals", trace.arrivals, cell.arrivals),
        ("rate", trace.rate, cell.rate),
        ("seed", trace.seed, cell.seed),
        ("concurrency", trace.concurrency, cell.concurrency),
        ("requests", len(trace.requests), cell.requests),
        ("max_tokens", sorted({it.max_tokens for it in trace.requests}), [cell.max_tokens]),
    )
    for key, found, expected in declared:
        if found != expected:
            raise StudyError(
                f"trace of cell {cell.name}: {key}: found {found}, expected {expected} as declared",
                advice="run `kvqual trace`",
            )
    return trace.panel_sha256


def _comparisons(rules: TimingRules, origin: str) -> None:
    if not rules.comparisons:
        raise StudyError(f"{origin}: comparisons: found none, expected at least one")
    cells, seen = {cell.name: cell for cell in rules.cells}, set()
    for index, it in enumerate(rules.comparisons):
        place = f"{origin}: comparisons[{index}]"
        for key, name in (("candidate", it.candidate), ("control", it.control)):
            if name not in rules.arms:
                raise StudyError(f"{place}.{key}: found '{name}', expected an arm of the plan: {', '.join(rules.arms)}")
        if it.candidate == it.control:
            raise StudyError(f"{place}: found '{it.candidate}' against itself, expected two arms")
        if it.cell not in cells:
            raise StudyError(f"{place}.cell: found '{it.cell}', expected a cell of the plan: {', '.join(cells)}")
        if it.metric not in FORMULAS:
            known = [name for name in FORMULAS if better_of(name) is not None]
            raise StudyError(
                f"{place}.metric: found '{it.metric}', expected the name of a figure such as ttft_intended_p50",
                advice=nearest(it.metric, known),
            )
        better = better_of(it.metric)
        if better is None:
            raise StudyError(f"{place}.metric: found '{it.metric}', expected a figure of what an arm does")
        if it.better != better:
            raise StudyError(f"{place}.better: found '{it.better}', expected '{better}' for {it.metric}")
        _primary(cells[it.cell], it.metric, f"{place}.metric")
        _population(rules, cells[it.cell], it.metric, place)
        # The two-sided test is the same in both directions.
        key4 = (frozenset((it.candidate, it.control)), it.cell, it.metric)
        if key4 in seen:
            raise StudyError(
                f"{place}: found {it.metric} of '{it.candidate}' against '{it.control}' in {it.cell} twice, expected "
                "each comparison once, in one direction"
            )
        seen.add(key4)


def _primary(cell: Cell, metric: str, place: str) -> None:
    """Refuse a figure that an arm could better by failing requests, or by letting them wait in the client."""
    if metric == "mean_ttft_send":
        raise StudyError(
            f"{place}: found '{metric}', expected a figure over every offered request, such as ttft_intended_p50: it "
            "leaves out each request without a first token"
        )
    if cell.mode == "open" and _FROM_SEND in metric:
        raise StudyError(
            f"{place}: found '{metric}' in the open cell {cell.name}, expected "
            f"'{metric.replace(_FROM_SEND, _FROM_INTENDED)}': from the send it leaves out what a request waits in the "
            "client (coordinated omission)"
        )


def _population(rules: TimingRules, cell: Cell, metric: str, place: str) -> None:
    """A figure that no request of the cell enters would make every trial incomplete."""
    if metric.startswith(_BURST):
        if cell.mode == "open":
            raise StudyError(f"{place}.metric: found '{metric}' in the open cell {cell.name}, expected no burst there")
    elif metric.startswith(_LOWER) and cell.concurrency is not None and cell.requests <= cell.concurrency:
        raise StudyError(
            f"{place}.metric: found '{metric}' in the closed cell {cell.name} of {cell.requests} requests, expected "
            f"more than its concurrency, {cell.concurrency}: the first {cell.concurrency} are the burst"
        )


def _orders(rules: TimingRules, origin: str) -> tuple[tuple[int, ...], ...]:
    orders = williams(len(rules.arms))
    size = len(orders)
    if rules.blocks < 1 or rules.blocks % size:
        raise StudyError(
            f"{origin}: blocks: found {rules.blocks}, expected a multiple of {size} ({size}, {2 * size}, {3 * size}, "
            f"…): the orders of {len(rules.arms)} arms are balanced over {size} blocks"
        )
    return orders


def _reachable(rules: TimingRules, size: int, origin: str) -> Reachable:
    """What so many blocks can show; refused where that is nothing."""
    count = len(rules.comparisons)
    level, confidence = Fraction(repr(float(rules.alpha))) / count, Fraction(repr(float(rules.confidence)))
    p, order = sign_p(rules.blocks), largest_order(rules.blocks, confidence)
    enough = size
    while sign_p(enough) > level or 1 - sign_p(enough) < confidence:
        enough += size
    advice = f"{enough} blocks are the fewest that would do"
    if p > level:
        raise StudyError(
            f"{origin}: blocks: found {rules.blocks}, whose sign test has p = {float(p):.6g} if all agree, expected at "
            f"most {float(level):.6g}, Holm's smallest level in a family of {count} at {rules.alpha:g}",
            advice=advice,
        )
    if order is None:
        raise StudyError(
            f"{origin}: blocks: found {rules.blocks}, whose widest interval of the median covers "
            f"{100 * float(coverage(rules.blocks, 1)):.6g} %, expected at least {100 * rules.confidence:g} %",
            advice=advice,
        )
    return Reachable(p=float(p), holm_alpha=float(level), coverage=float(coverage(rules.blocks, order)))


def _difference(path: str, found: object, expected: object, order: Sequence[str] = ()) -> str | None:
    """Where two JSON values first differ, in the order of the document."""
    if isinstance(found, dict) and isinstance(expected, dict):
        rest = [key for key in (*expected, *found) if key not in order]
        for key in dict.fromkeys((*order, *rest)):
            place = f"{path}.{key}" if path else key
            if key not in found or key not in expected:
                here, there = ("no such key", "one") if key in expected else ("an unknown key", "none")
                return f"{place}: found {here}, expected {there}"
            inner = _difference(place, found[key], expected[key])
            if inner is not None:
                return inner
        return None
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            inner = _difference(f"{path}[{index}]", one, other)
            if inner is not None:
                return inner
        return None
    if type(found) is type(expected) and found == expected:
        return None
    return f"{path}: found {describe(found)}, expected {describe(expected)}"
