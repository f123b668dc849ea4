"""Gate 11, fidelity: the recorder agrees with a server of known delays, in what was sent, when, and what came of it.

Evidence: of each case the recording, raw, and the truth document of the deterministic server. Every figure is computed
here from these. Only durations of the server's clock are compared with durations of the client's. Percentiles are
nearest rank; limits are the study's, in ms, and a figure at its limit is not below it. The rules:

1. Every case is there: a recording with its end, and a truth document; of the declared load (open, or closed with
   ``fidelity.concurrency``), ``open``, ``closed`` and ``open-again`` with ``fidelity.requests`` requests of
   ``fidelity.tokens`` tokens; ``quirks`` and ``failures`` have each quirk that the server knows.
2. The requests of the recording are those that the server was sent, each once, and completed + failed = offered.
3. The outcome of each request (completed, or the kind of failure) is the one that the truth expects.
4. Of a completed request the tokens, the tokens of each event and the prompt's tokens are the server's; of a failed
   one no more tokens than were sent.
5. Open loop: of dispatch and of the start of sending after the intended arrival the p99 is below
   ``fidelity.lateness_p99_ms``, and none is before it.
6. Open loop, by the server's clock alone: the arrivals follow the schedule, but for one constant, p99 below the sum of
   ``fidelity.lateness_p99_ms`` and ``fidelity.ttft_error_p99_ms``. A wait that no stamp tells of shows here.
7. The error of the time to the first token, |client's from the start of sending - server's from the first byte|: p50
   below ``fidelity.ttft_error_p50_ms`` (in the three cases of the declared load), p99 below
   ``fidelity.ttft_error_p99_ms`` (in every case).
8. The error of the time per output token, p99 below ``fidelity.tpot_error_p99_ms``, in every case.
9. Closed loop: ``fidelity.concurrency`` requests were in flight at some time, and never more, by both clocks.
10. Null: ``open`` and ``open-again`` each keep rules 1 to 8, and are equal outcome for outcome, token for token.
11. Poison: under each planted fault of the recorder the rules that must see it (:data:`SEEN_BY`) object. Every fault of
    ``faults`` was run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final

from pytest_kvqual._decode import Table, parse_json
from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.judge.gates._conclude import Objections, complete_poison, conclude, null_check
from pytest_kvqual.judge.verdict import Check, Poison, Verdict
from pytest_kvqual.metrics.recording import read_recording
from pytest_kvqual.metrics.requests import RequestFigures, figures
from pytest_kvqual.study.model import FidelityRules, Study
from pytest_kvqual.testing.script import COMPLETED, QUIRKS

GATE = "fidelity"

LOADS: Final = ("open", "closed", "open-again")
CASES: Final = (*LOADS, "quirks", "failures", "large-prompt")
"""The cases of the gate's own evidence."""

_ANY = frozenset(range(1, 10))
SEEN_BY: Final[Mapping[str, frozenset[int]]] = MappingProxyType(
    {
        "first-byte-is-first-token": frozenset({7}),
        "late-stamp": frozenset({7}),
        "hidden-cap": frozenset({5}),
        "hidden-cap-untold": frozenset({6}),
        "failure-dropped": frozenset({2}),
        "error-object-is-success": frozenset({3}),
        "clock-wall": frozenset({1, 5}),
        "token-per-event": frozenset({4}),
    }
)
"""The rules of which one must object under a seeded fault; of a fault that is not here, any rule. Rule 1: the reader
refuses the recording, which is complete, for what it says."""

_TRUTH_KEYS = (
    "arrived_ns", "end_ns", "first_token_ns", "gone", "last_token_ns", "outcome", "per_event", "prompt_tokens", "quirk",
    "received_ns", "times", "tokens",
)  # fmt: skip
_MILLISECOND = 1_000_000
_MOST = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Truth:
    """What the server says of one request; times of its own clock, in ns."""

    arrived_ns: int
    first_ns: int | None
    last_ns: int | None
    tokens: int
    per_event: tuple[int, ...]
    outcome: str
    quirks: tuple[str, ...]
    prompt_tokens: int
    times: int


@dataclass(kw_only=True, slots=True)
class _Case:
    """The evidence of one case that could be read, and the figures found in it, in ms."""

    header: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    footer: Mapping[str, Any]
    figures: dict[str, RequestFigures]
    outcomes: dict[str, str]
    truths: dict[str, _Truth]
    peak: int
    errors: dict[str, dict[str, float | int]] = field(default_factory=dict)


def judge(
    study: Study,
    *,
    recordings: Mapping[str, bytes],
    truths: Mapping[str, object],
    faults: Sequence[str] = (),
) -> Verdict:
    """Judge the recorder.

    Args:
        study: The study; its ``fidelity`` rules are the load and the limits.
        recordings: The bytes of each recording, by case: those of :data:`CASES` and ``poison-FAULT``.
        truths: The server's truth document of each case, as JSON gives it.
        faults: The names of the faults that must be among the recordings.
    """
    own = Objections()
    rules = study.fidelity
    if rules is None:
        own.gap(1, f"the study '{study.name}' has no rules of fidelity")
        return conclude(GATE, figure="", objections=own, null=None, poison=(), details={})
    found: dict[str, tuple[_Case | None, Objections]] = {}
    for name in CASES:
        result = Objections()
        found[name] = (_judged(result, rules, name, recordings.get(name), truths.get(name)), result)
        own.add(result)
    read = {name: case for name, (case, _) in found.items() if case is not None}
    null_objections, null = _null(*found["open"], *found["open-again"])
    seeded = [
        _poisoned(rules, name, recordings[name], truths.get(name)) for name in recordings if name.startswith("poison-")
    ]
    return conclude(
        GATE,
        figure=_figure(rules, read),
        objections=own,
        null=null,
        null_objections=null_objections,
        poison=complete_poison(seeded, faults),
        details={
            "unit": "ms",
            "limits": {
                "lateness_p99": rules.lateness_p99_ms,
                "ttft_error_p50": rules.ttft_error_p50_ms,
                "ttft_error_p99": rules.ttft_error_p99_ms,
                "tpot_error_p99": rules.tpot_error_p99_ms,
            },
            "cases": {name: _details(case) for name, case in read.items()},
        },
    )


def _judged(result: Objections, rules: FidelityRules, name: str, data: bytes | None, document: object) -> _Case | None:
    """Rules 1 to 9 on one case; None where it cannot be read."""
    if data is None or document is None:
        result.gap(1, f"case '{name}': found no {'recording' if data is None else 'truth'}, expected one")
        return None
    case: _Case | None = None
    with result.reading(1):
        case = _read(name, data, document)
    if case is None:
        return None
    # A number beyond float64 is no measurement, wherever it comes up.
    with result.reading(1):
        _load(result, rules, name, case)
        _accounting(result, name, case)
        _outcomes(result, name, case)
        _counts(result, name, case)
        if case.header["mode"] == "open":
            _lateness(result, rules, name, case)
            _arrivals(result, rules, name, case)
        else:
            _concurrency(result, rules, name, case)
        _errors(result, rules, name, case)
    return case


def _read(name: str, data: bytes, document: object) -> _Case:
    recording = read_recording(data, origin=f"fidelity-{name}.jsonl")
    truths, peak = _truths(document, origin=f"fidelity-{name}-truth.json")
    # The reader has checked the types of what a mapping holds.
    lines: Sequence[Mapping[str, Any]] = recording.requests
    found = [figures(record) for record in lines]
    return _Case(
        header=recording.header,
        lines=lines,
        footer=recording.footer,
        figures={one.request: one for one in found},
        outcomes={
            str(record["request"]): COMPLETED if record["failure"] is None else str(record["failure"]["kind"])
            for record in lines
        },
        truths=truths,
        peak=peak,
    )


def _truths(document: object, *, origin: str) -> tuple[dict[str, _Truth], int]:
    keys = ("schema", "kind", "case", "served", "peak", "requests")
    top = Table(document, origin=origin, error=EvidenceError, known=keys)
    if top.integer("schema") != 1 or top.string("kind") != "truth":
        raise EvidenceError(f"{origin}: found another document, expected a truth of schema 1")
    truths: dict[str, _Truth] = {}
    for name, table in top.named_tables("requests", known=_TRUTH_KEYS).items():
        truths[name] = _Truth(
            arrived_ns=table.integer("arrived_ns", minimum=0, maximum=_MOST),
            first_ns=_optional(table, "first_token_ns"),
            last_ns=_optional(table, "last_token_ns"),
            tokens=table.integer("tokens", minimum=0, maximum=_MOST),
            per_event=table.integers("per_event", minimum=1, maximum=_MOST),
            outcome=table.string("outcome"),
            quirks=table.strings("quirk"),
            prompt_tokens=table.integer("prompt_tokens", minimum=0, maximum=_MOST),
            times=table.integer("times", minimum=1, maximum=_MOST),
        )
    return truths, top.integer("peak", minimum=0, maximum=_MOST)


def _optional(table: Table, key: str) -> int | None:
    return None if table.raw(key) is None else table.integer(key, minimum=0, maximum=_MOST)


def _load(result: Objections, rules: FidelityRules, name: str, case: _Case) -> None:
    """Rule 1."""
    header = case.header
    expected = ("closed", rules.concurrency) if name == "closed" else ("open", None)
    if (header["mode"], header["concurrency"]) != expected or header["cell"] != name:
        result.gap(
            1,
            f"case '{name}': found '{header['cell']}', {header['mode']} loop, concurrency {header['concurrency']}, "
            f"expected '{name}', {expected[0]} loop, concurrency {expected[1]}",
        )
    if not case.truths:
        result.gap(1, f"case '{name}': found no request, expected some")
    if name in LOADS:
        sent = sum(truth.tokens == rules.tokens for truth in case.truths.values())
        if sent != rules.requests or len(case.truths) != rules.requests:
            result.gap(
                1,
                f"case '{name}': the server had {len(case.truths)} requests, {sent} of {rules.tokens} tokens, expected "
                f"{rules.requests} of them",
            )
    seen = {quirk for truth in case.truths.values() for quirk in truth.quirks}
    required = {
        "quirks": {quirk for quirk, (outcome, _) in QUIRKS.items() if outcome == COMPLETED},
        "failures": {quirk for quirk, (outcome, _) in QUIRKS.items() if outcome != COMPLETED},
    }.get(name, set())
    if required - seen:
        result.gap(1, f"case '{name}': found no request with the quirk {', '.join(sorted(required - seen))}")


def _accounting(result: Objections, name: str, case: _Case) -> None:
    """Rule 2."""
    for request, truth in case.truths.items():
        if request not in case.figures:
            result.find(2, f"case '{name}': the server was sent '{request}' ({truth.outcome}), found no record of it")
        if truth.times != 1:
            result.find(2, f"case '{name}': the server was sent '{request}' {truth.times} times, expected once")
    for request in case.figures:
        if request not in case.truths:
            result.find(2, f"case '{name}': found '{request}', which the server was never sent")
    footer = case.footer
    failed = Counter(outcome for outcome in case.outcomes.values() if outcome != COMPLETED)
    counted = (len(case.outcomes), len(case.outcomes) - failed.total(), dict(failed))
    stated = (footer["offered"], footer["completed"], dict(footer["failed"]))
    if len(case.outcomes) != len(case.lines) or counted != stated:
        result.find(
            2,
            f"case '{name}': the recording says (offered, completed, failed) {stated}, its requests give {counted}",
        )


def _outcomes(result: Objections, name: str, case: _Case) -> None:
    """Rule 3."""
    for request, outcome in case.outcomes.items():
        truth = case.truths.get(request)
        if truth is not None and outcome != truth.outcome:
            quirks = f" ({', '.join(truth.quirks)})" if truth.quirks else ""
            result.find(3, f"case '{name}': '{request}'{quirks} is {outcome}, expected {truth.outcome}")
        if truth is not None and (outcome == COMPLETED) != case.figures[request].completed:
            result.find(3, f"case '{name}': '{request}' is {outcome}, which its events contradict")


def _counts(result: Objections, name: str, case: _Case) -> None:
    """Rule 4."""
    for request, one in case.figures.items():
        truth = case.truths.get(request)
        if truth is None:
            continue
        if truth.outcome != COMPLETED:
            if one.tokens > truth.tokens:
                result.find(4, f"case '{name}': '{request}' has {one.tokens} tokens, the server sent {truth.tokens}")
            continue
        where = f"case '{name}': '{request}'" + (f" ({', '.join(truth.quirks)})" if truth.quirks else "")
        if one.tokens != truth.tokens:
            result.find(4, f"{where} has {one.tokens} tokens, expected {truth.tokens}")
        elif tuple(one.per_event) != truth.per_event:
            result.find(4, f"{where} has {_few(one.per_event)} tokens an event, expected {_few(truth.per_event)}")
        if one.prompt_tokens != truth.prompt_tokens:
            result.find(4, f"{where} has {one.prompt_tokens} tokens of prompt, expected {truth.prompt_tokens}")


def _few(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:8])) + (", …" if len(values) > 8 else "")


def _lateness(result: Objections, rules: FidelityRules, name: str, case: _Case) -> None:
    """Rule 5."""
    dispatch: list[int] = []
    sending: list[int] = []
    for record in case.lines:
        if record["dispatch_ns"] is None:
            continue
        dispatch.append(record["dispatch_ns"] - record["intended_ns"])
        # A request that found no connection was never sent; rule 3 says so.
        if record["send_start_ns"] is not None:
            sending.append(record["send_start_ns"] - record["intended_ns"])
    for what, key, values in (("dispatch", "lateness", dispatch), ("sending", "send_lateness", sending)):
        case.errors[key] = spread(values)
        if min(values, default=0) < 0:
            result.find(5, f"case '{name}': {what} {-min(values) / _MILLISECOND:.3f} ms before the intended arrival")
        _below(result, 5, name, case, key, "p99", rules.lateness_p99_ms, f"{what} after the intended arrival")


def _arrivals(result: Objections, rules: FidelityRules, name: str, case: _Case) -> None:
    """Rule 6."""
    after = [
        case.truths[str(record["request"])].arrived_ns - record["intended_ns"]
        for record in case.lines
        if str(record["request"]) in case.truths
    ]
    # The clocks have no common origin: the request that came soonest after its time stands for it.
    case.errors["arrival"] = spread([value - min(after) for value in after])
    limit = rules.lateness_p99_ms + rules.ttft_error_p99_ms
    _below(result, 6, name, case, "arrival", "p99", limit, "arrival at the server behind the schedule")


def _errors(result: Objections, rules: FidelityRules, name: str, case: _Case) -> None:
    """Rules 7 and 8."""
    ttft: list[Fraction] = []
    tpot: list[Fraction] = []
    for request, one in case.figures.items():
        truth = case.truths.get(request)
        if truth is None or truth.outcome != COMPLETED or not one.completed:
            continue
        if truth.first_ns is None or truth.last_ns is None or one.ttft_send_ns is None:
            result.gap(7, f"case '{name}': '{request}' has no time to the first token")
            continue
        ttft.append(Fraction(abs(one.ttft_send_ns - (truth.first_ns - truth.arrived_ns))))
        if truth.tokens > 1:
            if one.tpot_ns is None:
                result.find(8, f"case '{name}': '{request}' has no time per output token, expected one")
                continue
            tpot.append(abs(one.tpot_ns - Fraction(truth.last_ns - truth.first_ns, truth.tokens - 1)))
    case.errors["ttft_error"] = spread(ttft)
    case.errors["tpot_error"] = spread(tpot)
    what = "error of the time to the first token"
    if name in LOADS:
        _below(result, 7, name, case, "ttft_error", "p50", rules.ttft_error_p50_ms, what)
    _below(result, 7, name, case, "ttft_error", "p99", rules.ttft_error_p99_ms, what)
    _below(result, 8, name, case, "tpot_error", "p99", rules.tpot_error_p99_ms, "error of the time per output token")


def _concurrency(result: Objections, rules: FidelityRules, name: str, case: _Case) -> None:
    """Rule 9."""
    marks = [(record["dispatch_ns"], 1) for record in case.lines if record["dispatch_ns"] is not None]
    marks += [(record["end_ns"], -1) for record in case.lines if record["end_ns"] is not None]
    flying = peak = 0
    # At one moment an end comes before the dispatch that it makes room for.
    for _, change in sorted(marks):
        flying += change
        peak = max(peak, flying)
    case.errors["concurrency"] = {"peak": peak, "peak_at_server": case.peak, "n": len(case.lines)}
    for what, found in (("the recording", peak), ("the server", case.peak)):
        if found != rules.concurrency:
            result.find(9, f"case '{name}': {found} requests in flight by {what}, expected {rules.concurrency}")


def spread(values: Sequence[int | Fraction]) -> dict[str, float | int]:
    """``n`` and, of nanoseconds, ``p50``, ``p99`` (nearest rank) and ``max`` in ms; NaN where there is none."""
    ordered = sorted(values)

    def rank(share: Fraction) -> float:
        return float(ordered[math.ceil(share * len(ordered)) - 1] / Fraction(_MILLISECOND)) if ordered else math.nan

    return {"n": len(ordered), "p50": rank(Fraction(1, 2)), "p99": rank(Fraction(99, 100)), "max": rank(Fraction(1))}


def _below(
    result: Objections, rule: int, name: str, case: _Case, key: str, figure: str, limit: float, what: str
) -> None:
    value = case.errors[key][figure]
    if not value < limit:
        result.find(rule, f"case '{name}': {what}: {figure} {value:.3f} ms, expected below {limit:g} ms")


def _null(
    first: _Case | None, first_result: Objections, second: _Case | None, second_result: Objections
) -> tuple[Objections | None, Check | None]:
    """Rule 10."""
    if first is None or second is None:
        return None, None
    result = Objections()
    result.add(first_result)
    result.add(second_result)
    pairs = list(zip(first.lines, second.lines, strict=False))
    if len(first.lines) != len(second.lines):
        result.find(10, f"null: {len(first.figures)} and {len(second.figures)} requests, expected the same number")
    views: tuple[tuple[str, Callable[[_Case, str], object]], ...] = (
        ("outcomes", lambda case, request: case.outcomes[request]),
        ("tokens", lambda case, request: case.figures[request].token_ids),
        ("tokens an event", lambda case, request: tuple(case.figures[request].per_event)),
    )
    for one, other in pairs:
        for what, view in views:
            if view(first, str(one["request"])) != view(second, str(other["request"])):
                result.find(10, f"null: the {what} of '{one['request']}' and '{other['request']}' differ")
    figure = f"{len(pairs)} requests twice: the same outcomes and tokens, each time within the limits"
    return result, null_check(result, figure)


def _poisoned(rules: FidelityRules, name: str, data: bytes, document: object) -> Poison:
    """Rule 11."""
    fault = name.removeprefix("poison-")
    scratch = Objections()
    case = _judged(scratch, rules, name, data, document)
    required = SEEN_BY.get(fault, _ANY)
    lines = [text for rule, text in scratch.found if rule in required]
    if case is None and 1 in required and document is not None and _whole(data):
        # Times that go backwards: what was written is all there, and the reader will not have it.
        return Poison(fault=fault, caught=True, figure=f"rules 1: {scratch.first()}")
    if case is None or not lines:
        wanted = ", ".join(map(str, sorted(required)))
        figure = scratch.first() or "no rule objected"
        return Poison(fault=fault, caught=False, figure=f"{figure}; expected an objection of rule {wanted}")
    ruled = ", ".join(map(str, sorted(scratch.rules())))
    return Poison(fault=fault, caught=True, figure=f"rules {ruled}: {lines[0]}")


def _whole(data: bytes) -> bool:
    """Whether a recording has its header, all its requests and its end; what they say is not looked at."""
    try:
        lines = [parse_json(line, origin="recording", error=EvidenceError) for line in data.splitlines()]
    except EvidenceError:
        return False
    tables = [line for line in lines if isinstance(line, dict)]
    kinds = [table.get("kind") for table in tables]
    return (
        len(tables) == len(lines) >= 3
        and kinds == ["recording", *["request"] * (len(lines) - 2), "end"]
        and tables[0].get("requests") == tables[-1].get("offered") == len(lines) - 2
    )


def _details(case: _Case) -> dict[str, object]:
    outcomes = Counter(case.outcomes.values())
    return {
        "requests": len(case.outcomes),
        "outcomes": dict(sorted(outcomes.items())),
        "loop": case.header["loop"],
        "timer": case.header["timer"],
        "tokens": sum(one.tokens for one in case.figures.values()),
        **{key: _spelled(values) for key, values in case.errors.items()},
    }


def _spelled(values: Mapping[str, float | int]) -> dict[str, float | int | str]:
    return {key: value if math.isfinite(value) else str(value) for key, value in values.items()}


def _worst(cases: Iterable[_Case], key: str, figure: str) -> float:
    return max((case.errors[key][figure] for case in cases if key in case.errors), default=math.nan)


def _figure(rules: FidelityRules, read: Mapping[str, _Case]) -> str:
    loads = [read[name] for name in LOADS if name in read]
    every: Sequence[Any] = list(read.values())
    return (
        f"TTFT error p50 {_worst(loads, 'ttft_error', 'p50'):.3f} ms, p99 {_worst(every, 'ttft_error', 'p99'):.3f} ms; "
        f"TPOT error p99 {_worst(every, 'tpot_error', 'p99'):.3f} ms; "
        f"lateness p99 {_worst(every, 'lateness', 'p99'):.3f} ms; "
        f"{sum(len(case.outcomes) for case in every)} outcomes as expected"
    )
