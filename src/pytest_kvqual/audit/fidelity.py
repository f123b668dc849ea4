"""Fidelity derived anew: the recorder's recordings held against what the server of known delays says (check 19).

The rules have the numbers that the gate has. Chained: that the server's truth is true, and which of its quirks there
are (rule 1, in part).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Final

from pytest_kvqual.audit.attempts import Attempt
from pytest_kvqual.audit.plans import decimal
from pytest_kvqual.audit.recomputed import nearest, per_token
from pytest_kvqual.audit.recorded import Verified
from pytest_kvqual.audit.shapes import integer, items, shown, table, text
from pytest_kvqual.audit.trials import POISON, Objections, Run

LOADS: Final = ("open", "closed", "open-again")
CASES: Final = (*LOADS, "quirks", "failures", "large-prompt")
_MS: Final = 1_000_000
_SEEN_BY: Final[Mapping[str, int]] = MappingProxyType(
    {
        "first-byte-is-first-token": 7,
        "late-stamp": 7,
        "hidden-cap": 5,
        "hidden-cap-untold": 6,
        "failure-dropped": 2,
        "error-object-is-success": 3,
        "clock-wall": 5,
        "token-per-event": 4,
    }
)
"""The rule that must object under a planted fault; under another one, any rule of 1 to 9."""


@dataclass(kw_only=True, slots=True)
class Case:
    """One case: the recording, the server's word on each request, and the figures, in ms."""

    recording: Verified
    truths: Mapping[str, Mapping[str, object]]
    peak: int
    errors: dict[str, dict[str, float | int | str]] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Fidelity:
    """What follows: the objections, each case that could be read, and which planted faults were caught."""

    objections: Objections
    cases: dict[str, Case]
    caught: dict[str, bool]

    def details(self) -> dict[str, object]:
        """What a receipt states of the cases."""
        return {name: _details(case) for name, case in self.cases.items()}


def derive(run: Run, attempt: Attempt) -> Fidelity:
    """The rules 1 to 11 on the evidence of one attempt."""
    rules = run.frozen.part("fidelity")
    own = Objections()
    cases: dict[str, Case] = {}
    judged: dict[str, Objections] = {}
    for name in CASES:
        judged[name] = one = Objections()
        case = _judged(run, attempt, name, rules, one)
        if case is not None:
            cases[name] = case
        own.found += one.found
        own.missing += one.missing
    _null(own, cases, judged)
    caught: dict[str, bool] = {}
    for file in sorted(attempt.intact):
        if file.startswith(POISON) and file.endswith(".jsonl"):
            fault = file[len(POISON) : -len(".jsonl")]
            scratch = Objections()
            case = _judged(run, attempt, f"poison-{fault}", rules, scratch)
            wanted = _SEEN_BY.get(fault)
            seen = [rule for rule, _ in scratch.found if rule == wanted or wanted is None]
            caught[fault] = case is not None and bool(seen)
    return Fidelity(objections=own, cases=cases, caught=caught)


def _judged(run: Run, attempt: Attempt, name: str, rules: Mapping[str, object], own: Objections) -> Case | None:
    case = None
    with own.reading(1):
        document = run.document(attempt, f"fidelity-{name}-truth.json")
        outer = table(document, "truth", ("schema", "kind", "case", "served", "peak", "requests"))
        requests = table(outer["requests"], "truth.requests")
        case = Case(
            recording=run.recording(attempt, f"fidelity-{name}.jsonl"),
            truths={key: table(value, key) for key, value in requests.items()},
            peak=integer(outer, "peak", "truth"),
        )
        _case(own, rules, name, case)
    return case


def _case(own: Objections, rules: Mapping[str, object], name: str, case: Case) -> None:
    header, truths = case.recording.header, case.truths
    closed = name == "closed"
    expected = (name, "closed" if closed else "open", rules.get("concurrency") if closed else None)
    if (header["cell"], header["mode"], header["concurrency"]) != expected or not truths:
        own.gap(1, f"case '{name}': found another load than declared")
    if name in LOADS:
        fitting = sum(truth.get("tokens") == rules.get("tokens") for truth in truths.values())
        if fitting != rules.get("requests") or len(truths) != fitting:
            own.gap(1, f"case '{name}': found {fitting} of {len(truths)} requests of the declared load")
    _sent(own, name, case)
    for request in case.recording.requests:
        truth = truths.get(request.name)
        if truth is None:
            continue
        outcome, wanted = request.failure or "completed", text(truth, "outcome", request.name)
        if outcome != wanted:
            own.find(3, f"case '{name}': '{request.name}' is {outcome}, expected {wanted}")
        tokens, sent = len(request.stream.tokens), integer(truth, "tokens", request.name)
        each = [count for _, count in request.stream.arrivals]
        if wanted != "completed":
            if tokens > sent:
                own.find(4, f"case '{name}': '{request.name}' has {tokens} tokens of {sent}")
        elif tokens != sent or each != items(truth, "per_event", request.name):
            own.find(4, f"case '{name}': '{request.name}' has {tokens} tokens, expected {sent}, event by event")
        elif request.stream.prompt_tokens != truth.get("prompt_tokens"):
            own.find(4, f"case '{name}': '{request.name}' has another number of tokens of prompt")
    if header["mode"] == "open":
        _lateness(own, rules, name, case)
    else:
        _concurrency(own, rules, name, case)
    _errors(own, rules, name, case)


def _sent(own: Objections, name: str, case: Case) -> None:
    """Rule 2."""
    names = {request.name for request in case.recording.requests}
    for request, truth in case.truths.items():
        if request not in names or integer(truth, "times", request) != 1:
            own.find(2, f"case '{name}': '{request}' was sent {shown(truth.get('times'))} times, recorded "
                        f"{int(request in names)} times")  # fmt: skip
    for request in names - set(case.truths):
        own.find(2, f"case '{name}': found '{request}', which was never sent")
    if len(names) != len(case.recording.requests) or any(it.check in (3, 5) for it in case.recording.findings):
        own.find(2, f"case '{name}': found totals that its requests do not give")


def _lateness(own: Objections, rules: Mapping[str, object], name: str, case: Case) -> None:
    """Rules 5 and 6."""
    sent = [it for it in case.recording.requests if it.dispatch is not None and it.intended is not None]
    late = [(it.dispatch or 0) - (it.intended or 0) for it in sent]
    send = [it.send_start - (it.intended or 0) for it in sent if it.send_start is not None]
    limit = decimal(rules, "lateness_p99_ms", "fidelity")
    for key, values in (("lateness", late), ("send_lateness", send)):
        case.errors[key] = spread(values)
        if values and min(values) < 0:
            own.find(5, f"case '{name}': {key} {min(values)} ns")
        _below(own, 5, name, key, values, "p99", limit)
    after = [
        integer(case.truths[it.name], "arrived_ns", it.name, minimum=-(2**63)) - (it.intended or 0)
        for it in sent
        if it.name in case.truths
    ]
    arrival = [value - min(after) for value in after]
    case.errors["arrival"] = spread(arrival)
    _below(own, 6, name, "arrival", arrival, "p99", limit + decimal(rules, "ttft_error_p99_ms", "fidelity"))


def _concurrency(own: Objections, rules: Mapping[str, object], name: str, case: Case) -> None:
    """Rule 9."""
    requests = case.recording.requests
    marks = [(it.dispatch, 1) for it in requests if it.dispatch is not None]
    marks += [(it.end, -1) for it in requests if it.end is not None]
    flying = peak = 0
    for _, change in sorted(marks):
        flying += change
        peak = max(peak, flying)
    case.errors["concurrency"] = {"peak": peak, "peak_at_server": case.peak, "n": len(requests)}
    for what, found in (("the recording", peak), ("the server", case.peak)):
        if found != rules.get("concurrency"):
            own.find(9, f"case '{name}': found {found} in flight by {what}")


def _errors(own: Objections, rules: Mapping[str, object], name: str, case: Case) -> None:
    """Rules 7 and 8."""
    ttft: list[Fraction] = []
    tpot: list[Fraction] = []
    for request in case.recording.requests:
        truth = case.truths.get(request.name)
        if truth is None or truth.get("outcome") != "completed" or request.failure is not None:
            continue
        since, where = request.since(request.send_start, 0), request.name
        if since is None or truth.get("first_token_ns") is None or truth.get("last_token_ns") is None:
            own.gap(7, f"case '{name}': '{where}' has no time to the first token")
            continue
        arrived, first, last = (
            integer(truth, key, where, minimum=-(2**63)) for key in ("arrived_ns", "first_token_ns", "last_token_ns")
        )
        ttft.append(Fraction(abs(since - (first - arrived))))
        tokens = integer(truth, "tokens", where)
        if tokens > 1:
            own_tpot = per_token(request)
            if own_tpot is None:
                own.find(8, f"case '{name}': '{where}' has no time per output token")
            else:
                tpot.append(abs(own_tpot - Fraction(last - first, tokens - 1)))
    case.errors["ttft_error"], case.errors["tpot_error"] = spread(ttft), spread(tpot)
    if name in LOADS:
        _below(own, 7, name, "ttft_error", ttft, "p50", decimal(rules, "ttft_error_p50_ms", "fidelity"))
    _below(own, 7, name, "ttft_error", ttft, "p99", decimal(rules, "ttft_error_p99_ms", "fidelity"))
    _below(own, 8, name, "tpot_error", tpot, "p99", decimal(rules, "tpot_error_p99_ms", "fidelity"))


_RANKS: Final[Mapping[str, Fraction]] = MappingProxyType(
    {"p50": Fraction(1, 2), "p99": Fraction(99, 100), "max": Fraction(1)}
)


def spread(values: Sequence[int | Fraction]) -> dict[str, float | int | str]:
    """How many, and nearest ranks in ms; ``nan`` of none."""
    ranked = sorted(Fraction(value) for value in values)
    found: dict[str, float | int | str] = {"n": len(ranked)}
    for key, share in _RANKS.items():
        value = nearest(ranked, share)
        found[key] = str(math.nan) if value is None else float(Fraction(value) / _MS)
    return found


def _below(
    own: Objections, rule: int, name: str, what: str, values: Sequence[int | Fraction], key: str, limit: Fraction
) -> None:
    value = nearest(sorted(Fraction(it) for it in values), _RANKS[key])
    if value is None or not float(Fraction(value) / _MS) < float(limit):
        own.find(rule, f"case '{name}': {what}: found a {key} that is not below {float(limit):g} ms")


def _null(own: Objections, cases: Mapping[str, Case], judged: Mapping[str, Objections]) -> None:
    """Rule 10."""
    pair = [cases[name] for name in ("open", "open-again") if name in cases]
    if len(pair) < 2:
        own.idle.append((10, "null: found no pair of open loads"))
        return
    for name in ("open", "open-again"):
        own.idle += [*judged[name].found, *judged[name].missing]
    views = [
        [
            (it.failure, it.stream.tokens, tuple(count for _, count in it.stream.arrivals))
            for it in case.recording.requests
        ]
        for case in pair
    ]
    if views[0] != views[1]:
        own.idle.append((10, "null: found other outcomes or tokens in the second open load"))


def _details(case: Case) -> dict[str, object]:
    outcomes = Counter(it.failure or "completed" for it in case.recording.requests)
    return {
        "requests": len(case.recording.requests),
        "outcomes": dict(sorted(outcomes.items())),
        "loop": case.recording.header["loop"],
        "timer": case.recording.header["timer"],
        "tokens": sum(len(it.stream.tokens) for it in case.recording.requests),
        **case.errors,
    }
