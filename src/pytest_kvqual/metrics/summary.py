"""The figures of one recorded load. Exact: integers and fractions, nothing rounded, a failed request as +inf."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.metrics.formulas import FORMULAS, QUANTILES, QUANTITIES, unit_of
from pytest_kvqual.metrics.recording import Recording
from pytest_kvqual.metrics.requests import RequestFigures, figures

Value = Fraction | float | None
"""A figure: exact, ``inf``, or None where nothing is defined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure: its value in ``unit``, the formula that defines it, and over how many requests it is taken."""

    value: Value
    unit: str
    formula: str
    of: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One load: what was offered, what became of it, and the figures by name. offered = completed + failed."""

    offered: int
    completed: int
    failed: Mapping[str, int]
    figures: Mapping[str, Figure]


def percentile(values: Sequence[Fraction | int | float], quantile: Fraction) -> Value:
    """The value of the nearest rank, ``ceil(quantile * n)`` from 1; None of nothing.

    Source: the nearest-rank definition, Hyndman and Fan 1996, p. 361, type 1.
    """
    if not values:
        return None
    ranked = sorted(values)
    found = ranked[max(1, math.ceil(quantile * len(ranked))) - 1]
    return math.inf if isinstance(found, float) else Fraction(found)


def summarise(recording: Recording) -> Summary:
    """The figures of a recording.

    Raises:
        EvidenceError: A request's events cannot be decoded.
    """
    answers = [figures(request) for request in recording.requests]
    failed: dict[str, int] = {}
    for answer in answers:
        if answer.failure is not None:
            failed[answer.failure] = failed.get(answer.failure, 0) + 1
    burst = recording.concurrency or 0
    found: dict[str, Figure] = {}
    for prefix, part in (("", answers[burst:]), ("burst_", answers[:burst])):
        for name in QUANTITIES:
            values = _population(name, part)
            for label, (numerator, denominator) in QUANTILES.items():
                _add(
                    found, f"{prefix}{name}_{label}", percentile(values, Fraction(numerator, denominator)), len(values)
                )
    sent = [answer.ttft_send_ns for answer in answers if answer.ttft_send_ns is not None]
    _add(found, "mean_ttft_send", Fraction(sum(sent), len(sent)) if sent else None, len(sent))
    whole = [answer for answer in answers if answer.completed]
    tokens = sum(answer.tokens for answer in whole)
    span = _span(recording)
    _add(found, "output_throughput", Fraction(tokens * 10**9, span) if span else None, len(whole))
    _add(found, "request_throughput", Fraction(len(whole) * 10**9, span) if span else None, len(whole))
    _add(found, "goodput_tokens", Fraction(tokens), len(whole))
    most = [max(answer.per_event) for answer in answers if answer.per_event]
    _add(found, "tokens_per_event_max", Fraction(max(most)) if most else None, len(most))
    return Summary(offered=len(answers), completed=len(whole), failed=dict(sorted(failed.items())), figures=found)


def comparable(one: Figure, other: Figure) -> bool:
    """Whether two figures may be compared: they have the same formula and unit."""
    return (one.formula, one.unit) == (other.formula, other.unit)


def require_comparable(one: Figure, other: Figure) -> None:
    """Refuse to compare figures of different definitions.

    Raises:
        EvidenceError: Their formulas or units differ.
    """
    if not comparable(one, other):
        raise EvidenceError(
            f"found the figure '{other.formula}' in {other.unit} to compare with '{one.formula}' in {one.unit}, "
            "expected one definition"
        )


def _add(found: dict[str, Figure], name: str, value: Value, of: int) -> None:
    found[name] = Figure(value=value, unit=unit_of(name), formula=FORMULAS[name], of=of)


def _population(name: str, answers: Sequence[RequestFigures]) -> list[Fraction | int | float]:
    if name == "lateness":
        return [answer.lateness_ns for answer in answers if answer.lateness_ns is not None]
    values: list[Fraction | int | float] = []
    for answer in answers:
        value: Fraction | int | None
        if name == "tpot":
            if answer.completed and answer.tokens < 2:
                continue
            value = answer.tpot_ns
        else:
            value = {
                "ttft_intended": answer.ttft_intended_ns, "ttft_send": answer.ttft_send_ns, "e2e": answer.e2e_ns,
            }[name]  # fmt: skip
        values.append(math.inf if not answer.completed or value is None else value)
    return values


def _span(recording: Recording) -> int:
    """Nanoseconds from the first intended arrival to the last end of a request."""
    begins = [request["intended_ns"] for request in recording.requests]
    ends = [request["end_ns"] for request in recording.requests]
    first, last = [it for it in begins if isinstance(it, int)], [it for it in ends if isinstance(it, int)]
    return max(last) - min(first) if first and last else 0
