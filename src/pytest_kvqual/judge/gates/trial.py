"""Gate 12, trial: one arm of one frozen block, timed once on a fresh server, is what the plan says, and nothing else.

A trial that breaks a rule is void: its figures are kept and enter no statistics. The rules:

1. The record is of this plan (its SHA-256), arm, length and block, was made under the permit of the standing receipts
   (the judgment's digest, in the record and in every recording), and is not exploratory.
2. Whenever taps were read, before and after each load, no tap, fault or held block was in place on any rank.
3. Each cell's recording is whole: its requests are the frozen trace's (SHA-256), in order, and offered = completed +
   failed; the moments of each follow each other. So is the warm-up's, whose prompts are none of the cells'. By the
   client's clock the intervals of the trial do not overlap, each load lies within its own, and each cell's begins
   ``settle_s`` or more after the end of the load before it.
4. At most ``failed_share`` of a cell's requests failed; none of the warm-up's.
5. The kernels of each layer, read before the warm-up and after the last cell, are those that were qualified.
6. Layers, parameters, scales and settings of the server are those that were qualified (addresses apart).
7. Over each load the server counted what the client did: requests ended, prompt tokens, output tokens; no preemption;
   with ``cold``, no prefix found in the cache. Its counters were read before and after each load, and no request ran or
   waited then.
8. Each canary's tokens are those of the arm's serial reference, as far as both go.
9. The 99th percentile of the dispatch lateness is at most ``lateness_fraction`` of ``practical`` times the median TTFT
   from the intended arrival: what the client adds is small against the effect that is looked for.
10. The client's mean TTFT from the send differs from the server's own mean by at most ``server_ttft_ms``.
11. Null: between a load and the next, while nothing was sent, no counter moved.
12. Poison: each seeded fault of :data:`pytest_kvqual.faults.trial.FAULTS`, planted in a copy of this trial's records,
    is objected to under the rule that it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.judge.gates._conclude import Objections, conclude, null_check
from pytest_kvqual.judge.verdict import Check, Poison, Verdict
from pytest_kvqual.metrics.recording import Recording, read_recording
from pytest_kvqual.metrics.requests import content_failure, disorder, events_of, figures
from pytest_kvqual.metrics.summary import Summary, summarise
from pytest_kvqual.study.trace import Trace, parse_trace
from pytest_kvqual.tasks.parity import reference_output

if TYPE_CHECKING:
    from pytest_kvqual.faults.trial import TrialFault
    from pytest_kvqual.judge.gates._records import Panel
    from pytest_kvqual.study.model import TimingRules

GATE = "trial"
WARM_UP = "warm-up"
ORDER = "forward"
_COUNTED: Final = ("prompt_tokens", "generation_tokens")
_SECOND: Final = 1_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The records of one trial, as they were read.

    ``trial`` is trial.json, ``identity`` trial-identity.json; ``recordings`` the bytes of each cell's recording, and of
    the warm-up's under ``warm-up``.
    """

    trial: Mapping[str, object]
    identity: Mapping[str, object]
    recordings: Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a trial is held against.

    ``traces`` are the bytes of each cell's frozen trace; ``judgment`` is the digest of the permit that the standing
    receipts give; ``kernels`` (by rank), ``identity`` (by rank) and ``reference`` are the qualified attempt's.
    """

    arm: str
    length: int
    block: int
    plan_sha256: str
    judgment: str
    traces: Mapping[str, bytes]
    trace_sha256: Mapping[str, str]
    kernels: Sequence[object]
    identity: Sequence[object]
    reference: Sequence[object]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cell:
    recording: Recording
    summary: Summary


def judge(
    rules: TimingRules, panel: Panel, parity: Panel, *, evidence: Evidence, expected: Expected, faults: Sequence[str]
) -> Verdict:
    """Judge one trial.

    Args:
        rules: The timing rules of the length.
        panel: The timing panel; its canaries name items of ``parity``.
        parity: The parity panel.
        evidence: The trial's records.
        expected: What they are held against.
        faults: The names of the seeded faults that must be caught.
    """
    from pytest_kvqual.faults.trial import FAULTS

    own = Objections()
    cells = _judge(own, rules, panel, parity, evidence, expected)
    idle = Objections()
    _idle(idle, rules, evidence)
    poison = []
    for name in faults:
        fault = FAULTS.get(name)
        damaged = None if fault is None else _planted(fault, evidence)
        if fault is None or damaged is None:
            poison.append(Poison(fault=name, caught=False, figure="found nothing to plant it in"))
            continue
        scratch = Objections()
        _judge(scratch, rules, panel, parity, damaged, expected)
        lines = [text for rule, text in (*scratch.found, *scratch.missing) if rule == fault.rule]
        before = {text for rule, text in (*own.found, *own.missing) if rule == fault.rule}
        new = [text for text in lines if text not in before]
        poison.append(
            Poison(fault=name, caught=bool(new), figure=new[0] if new else f"rule {fault.rule} did not object")
        )
    return conclude(
        GATE,
        figure=_figure(expected, rules, cells),
        objections=own,
        null=_null(idle, rules),
        null_objections=idle,
        poison=poison,
        details={
            "block": expected.block,
            "plan_sha256": expected.plan_sha256,
            "cells": {name: _details(cell) for name, cell in cells.items()},
        },
    )


def too_many(failed: int, share: float, offered: int) -> bool:
    """Whether more than a share of the requests failed, the share as the decimal that it prints as: 0.29 of 100 is 29.

    Raises:
        ValueError: The share is no finite number.
    """
    return failed > Fraction(str(share)) * offered


def _planted(fault: TrialFault, evidence: Evidence) -> Evidence | None:
    try:
        return fault.plant(evidence)
    except (EvidenceError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        # Evidence of another form has no place for the fault: a miss, and no reason to raise.
        return None


def cell_figures(data: bytes, *, origin: str) -> dict[str, Fraction | float | None]:
    """The exact figures of one cell's recording, by name: a Fraction, infinity, or None where there is none.

    Raises:
        EvidenceError: The recording cannot be read.
    """
    return {name: it.value for name, it in summarise(read_recording(data, origin=origin)).figures.items()}


def exact(value: Fraction | float | None) -> str | None:
    """A figure as the receipt states it: ``N/D`` in lowest terms, ``inf``, or None."""
    if value is None:
        return None
    return f"{value.numerator}/{value.denominator}" if isinstance(value, Fraction) else str(value)


def _details(cell: _Cell) -> dict[str, object]:
    summary = cell.summary
    return {
        "offered": summary.offered,
        "completed": summary.completed,
        "failed": dict(summary.failed),
        "figures": {name: exact(figure.value) for name, figure in summary.figures.items()},
    }


def _figure(expected: Expected, rules: TimingRules, cells: Mapping[str, _Cell]) -> str:
    parts = []
    for cell in rules.cells:
        if cell.name in cells:
            summary = cells[cell.name].summary
            ttft, tpot = (summary.figures[name].value for name in ("ttft_intended_p50", "tpot_p50"))
            parts.append(
                f"{cell.name}: {summary.completed} of {summary.offered} completed, TTFT p50 {_ms(ttft)}, "
                f"TPOT p50 {_ms(tpot)}"
            )
    return f"block {expected.block}, {'; '.join(parts)}"


def _ms(value: Fraction | float | None) -> str:
    return "none" if value is None else f"{float(value) / 1e6:.1f} ms"


def _judge(
    own: Objections, rules: TimingRules, panel: Panel, parity: Panel, evidence: Evidence, expected: Expected
) -> dict[str, _Cell]:
    trial = evidence.trial
    # 1.
    declared: tuple[tuple[str, object], ...] = (
        ("schema", 1),
        ("arm", expected.arm),
        ("length", expected.length),
        ("block", expected.block),
        ("plan_sha256", expected.plan_sha256),
        ("judgment", expected.judgment),
        ("exploratory", False),
    )
    for key, wanted in declared:
        if type(trial.get(key)) is not type(wanted) or trial.get(key) != wanted:
            own.find(1, f"trial.json: {key}: found {trial.get(key)!r}, expected {wanted!r}")
    # 2.
    _taps(own, rules, trial)
    # 3. and 4.
    cells: dict[str, _Cell] = {}
    traces: dict[str, Trace] = {}
    for cell in rules.cells:
        with own.reading(3):
            traces[cell.name] = parse_trace(expected.traces[cell.name], origin=f"trace of {cell.name}")
            cells[cell.name] = _recorded(own, evidence, expected, cell.name)
            _as_traced(own, cells[cell.name].recording, traces[cell.name], expected.trace_sha256[cell.name], cell.name)
    sent = {line.prompt for trace in traces.values() for line in trace.requests}
    with own.reading(3):
        warm = _recorded(own, evidence, expected, WARM_UP)
        prompts = [str(record.get("prompt")) for record in warm.recording.requests]
        if len(prompts) != rules.warm_up or sent & set(prompts):
            own.find(3, f"{WARM_UP}: found {len(prompts)} requests, {len(sent & set(prompts))} of them with a cell's "
                        f"prompt, expected {rules.warm_up} and none")  # fmt: skip
        cells[WARM_UP] = warm
    for name, found in cells.items():
        failed = sum(found.summary.failed.values())
        allowed = 0.0 if name == WARM_UP else rules.failed_share
        if too_many(failed, allowed, found.summary.offered):
            kinds = ", ".join(f"{count} {kind}" for kind, count in found.summary.failed.items())
            own.find(4, f"{name}: found {failed} of {found.summary.offered} requests failed ({kinds}), expected at "
                        f"most {allowed:g} of them")  # fmt: skip
    with own.reading(3):
        _apart(own, rules, trial, cells)
    # 5. and 6.
    _kernels(own, trial, expected.kernels)
    _identity(own, evidence.identity, expected.identity)
    # 7.
    with own.reading(7):
        _quiet(own, rules, trial)
        for before, after, name in _loads(rules):
            if name in cells:
                _counted(own, rules, _values(trial, before), _values(trial, after), name, cells[name])
                _asked(own, panel, name, cells[name])
    # 8.
    _canaries(own, rules, panel, parity, cells, expected.reference)
    # 9. and 10.
    for cell in rules.cells:
        if cell.name in cells:
            _late(own, rules, cell.name, cells[cell.name].summary)
            with own.reading(10):
                _server_ttft(own, rules, trial, cell.name, cells[cell.name])
    return {name: cell for name, cell in cells.items() if name != WARM_UP}


def _recorded(own: Objections, evidence: Evidence, expected: Expected, name: str) -> _Cell:
    if name not in evidence.recordings:
        raise EvidenceError(f"{name}: found no recording, expected one")
    recording = read_recording(evidence.recordings[name], origin=name)
    header = recording.header
    for key, wanted in (("cell", name), ("judgment", expected.judgment), ("exploratory", False)):
        if header.get(key) != wanted:
            own.find(1, f"{name}: {key}: found {header.get(key)!r}, expected {wanted!r}")
    about = header.get("about")
    declared: tuple[tuple[str, object], ...] = (
        ("arm", expected.arm),
        ("block", expected.block),
        ("plan_sha256", expected.plan_sha256),
    )
    for key, value in declared:
        found = about.get(key) if isinstance(about, Mapping) else None
        if found != value:
            own.find(1, f"{name}: {key}: found {found!r}, expected {value!r}")
    for record in recording.requests:
        if record["failure"] is None and isinstance(limit := record["max_tokens"], int):
            hidden = content_failure([raw for _, raw in events_of(record, origin=name)], limit)
            if hidden is not None:
                own.find(3, f"{name}, {record['request']}: found a completed request, expected the failure "
                            f"{hidden[0]}: {hidden[1]}")  # fmt: skip
        broken = disorder(record)
        if broken is not None:
            own.find(3, f"{name}, {record['request']}: {broken}")
    summary = summarise(recording)
    if summary.offered != summary.completed + sum(summary.failed.values()):
        own.find(3, f"{name}: found {summary.completed} completed and {sum(summary.failed.values())} failed of "
                    f"{summary.offered} offered requests, expected the same number")  # fmt: skip
    return _Cell(recording=recording, summary=summary)


def _as_traced(own: Objections, recording: Recording, trace: Trace, digest: str, name: str) -> None:
    if recording.header.get("trace_sha256") != digest:
        own.find(3, f"{name}: trace_sha256: found {recording.header.get('trace_sha256')!r}, expected {digest}")
    for key, load in (("mode", trace.mode), ("concurrency", trace.concurrency)):
        if recording.header.get(key) != load:
            own.find(3, f"{name}: {key}: found {recording.header.get(key)!r}, expected {load!r} as in the trace")
    if len(recording.requests) != len(trace.requests):
        own.find(3, f"{name}: found {len(recording.requests)} requests, expected {len(trace.requests)} as in the trace")
        return
    for record, line in zip(recording.requests, trace.requests, strict=True):
        for key, wanted in (("request", line.request), ("prompt", line.prompt), ("max_tokens", line.max_tokens)):
            if record.get(key) != wanted:
                own.find(3, f"{name}, {line.request}: {key}: found {record.get(key)!r}, expected {wanted!r}")
        if line.intended_ns is not None and record.get("intended_ns") != line.intended_ns:
            own.find(3, f"{name}, {line.request}: intended_ns: found {record.get('intended_ns')!r}, expected "
                        f"{line.intended_ns}")  # fmt: skip


def _apart(own: Objections, rules: TimingRules, trial: Mapping[str, object], cells: Mapping[str, _Cell]) -> None:
    """The intervals of the trial, and the loads within them, one after the other on the client's clock."""
    loads = [(WARM_UP, WARM_UP), *((f"measurement {cell.name}", cell.name) for cell in rules.cells)]
    wanted = ["qualification", "profiling", *(interval for interval, _ in loads), "profiling"]
    value = trial.get("intervals")
    intervals = [it for it in value if isinstance(it, Mapping)] if isinstance(value, list) else []
    names = [it.get("name") for it in intervals]
    if names != wanted:
        own.gap(3, f"intervals: found {names!r:.200}, expected {wanted}")
        return
    spans: dict[str, tuple[int, int]] = {}
    last = 0
    for name, it in zip(wanted, intervals, strict=True):
        begin, end = _integer(it, "begin_ns"), _integer(it, "end_ns")
        if not last <= begin <= end:
            own.find(3, f"interval {name}: found {begin} to {end}, expected it after {last}, the end of the one before")
        spans[name] = (begin, end)
        last = end
    settled: int | None = None
    for interval, name in loads:
        if name not in cells:
            settled = None
            continue
        recording = cells[name].recording
        zero = _integer(recording.header, "zero_monotonic_ns")
        end = zero + _integer(recording.footer, "end_ns")
        if not spans[interval][0] <= zero <= end <= spans[interval][1]:
            own.find(3, f"{name}: found a load from {zero} to {end}, expected it within its interval, "
                        f"{spans[interval][0]} to {spans[interval][1]}")  # fmt: skip
        if settled is not None and not zero - settled >= Fraction(str(rules.settle_s)) * _SECOND:
            own.find(3, f"{name}: found it begun {zero - settled} ns after the load before it, expected "
                        f"{rules.settle_s:g} s or more")  # fmt: skip
        settled = end


def _quiet(own: Objections, rules: TimingRules, trial: Mapping[str, object]) -> None:
    """The counters were read when they should be, once each, while no request ran or waited."""
    _, found = _read_when(trial, "counters")
    if found != _readings(rules):
        raise EvidenceError(f"trial.json: found counters read {found!r:.200}, expected {_readings(rules)}")
    for when in _readings(rules):
        values = _values(trial, when)
        for key in ("running", "waiting"):
            if count := _integer(values, key):
                own.find(7, f"counters {when}: found {count} requests {key}, expected none")


def _readings(rules: TimingRules) -> list[str]:
    return [
        f"before-{WARM_UP}",
        f"after {WARM_UP}",
        *(f"{when} {cell.name}" for cell in rules.cells for when in ("before", "after")),
    ]


def _loads(rules: TimingRules) -> list[tuple[str, str, str]]:
    """The readings before and after each load, and its name."""
    return [
        (f"before-{WARM_UP}", f"after {WARM_UP}", WARM_UP),
        *((f"before {cell.name}", f"after {cell.name}", cell.name) for cell in rules.cells),
    ]


def _read_when(trial: Mapping[str, object], key: str) -> tuple[list[Mapping[str, object]], list[object]]:
    """The readings under ``key``, and when each was made."""
    value = trial.get(key)
    readings = [it for it in value if isinstance(it, Mapping)] if isinstance(value, list) else []
    return readings, [it.get("when") for it in readings]


def _taps(own: Objections, rules: TimingRules, trial: Mapping[str, object]) -> None:
    readings, found = _read_when(trial, "taps")
    if found != _readings(rules):
        own.gap(2, f"taps: found readings {found}, expected {_readings(rules)}")
        return
    for reading in readings:
        ranks = reading.get("ranks")
        if not isinstance(ranks, list) or not ranks or not all(map(_clean, ranks)):
            own.find(2, f"taps {reading['when']}: found {ranks!r:.200}, expected none in place on any rank")


def _clean(rank: object) -> bool:
    return (
        isinstance(rank, Mapping)
        and rank.get("installed") is False
        and rank.get("faults") == 0
        and rank.get("held") == 0
    )


def _kernels(own: Objections, trial: Mapping[str, object], qualified: Sequence[object]) -> None:
    readings, found = _read_when(trial, "dispatch")
    if found != ["before", "after"]:
        own.gap(5, f"dispatch: found readings {found}, expected ['before', 'after']")
        return
    for reading in readings:
        if not qualified or reading.get("ranks") != list(qualified):
            own.find(5, f"dispatch {reading['when']}: found other kernels than were qualified, expected the same: a "
                        "layer fell back to another implementation")  # fmt: skip


def _identity(own: Objections, identity: Mapping[str, object], qualified: Sequence[object]) -> None:
    ranks = identity.get("ranks")
    if not isinstance(ranks, list) or len(ranks) != len(qualified) or not ranks:
        own.gap(
            6, f"identity: found {len(ranks) if isinstance(ranks, list) else 'no'} ranks, expected {len(qualified)}"
        )
        return
    for number, (found, wanted) in enumerate(zip(ranks, qualified, strict=True)):
        if not isinstance(found, Mapping) or not isinstance(wanted, Mapping):
            own.gap(6, f"identity: rank {number}: found {found!r:.60}, expected a mapping")
            continue
        for key in ("layers", "attention_backend", "attention_impl", "pool_bytes", "parameters", "scales", "settings"):
            if key not in found or key not in wanted or _placeless(found[key]) != _placeless(wanted[key]):
                own.find(6, f"identity: rank {number}: found other {key} than were qualified, expected the same")


def _placeless(value: object) -> object:
    """A part of an identity with addresses replaced by which layers share a storage: a fresh process has others."""
    if not isinstance(value, list):
        return value
    known: dict[str, int] = {}
    return [
        {**it, "storage_id": known.setdefault(repr(it.get("storage_id")), len(known))}
        if isinstance(it, Mapping)
        else it
        for it in value
    ]


def _values(trial: Mapping[str, object], when: str) -> Mapping[str, object]:
    readings = trial.get("counters")
    for reading in readings if isinstance(readings, list) else []:
        if isinstance(reading, Mapping) and reading.get("when") == when and isinstance(reading.get("values"), Mapping):
            values: Mapping[str, object] = reading["values"]
            return values
    raise EvidenceError(f"trial.json: found no counters {when}, expected them")


def _integer(values: Mapping[str, object], key: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise EvidenceError(f"trial.json: {key}: found {value!r:.100}, expected an integer")
    return value


def _ended(values: Mapping[str, object]) -> int:
    success = values.get("success")
    if not isinstance(success, Mapping) or not all(type(count) is int for count in success.values()):
        raise EvidenceError(f"trial.json: counter success: found {success!r:.100}, expected a count by reason")
    return sum(success.values())


def _counted(
    own: Objections,
    rules: TimingRules,
    before: Mapping[str, object],
    after: Mapping[str, object],
    name: str,
    cell: _Cell,
) -> None:
    whole = not cell.summary.failed
    ended = _ended(after) - _ended(before)
    if ended != cell.summary.completed if whole else ended < cell.summary.completed:
        own.find(7, f"{name}: found {ended} requests ended on the server, expected {cell.summary.completed}")
    answers = [figures(record) for record in cell.recording.requests]
    wanted = {
        "prompt_tokens": sum(answer.prompt_tokens or 0 for answer in answers),
        "generation_tokens": sum(answer.tokens for answer in answers),
    }
    for key in _COUNTED:
        found = _integer(after, key) - _integer(before, key)
        # What a failed request cost the server is not known to the client.
        if (found != wanted[key]) if whole else (found < wanted[key]):
            own.find(7, f"{name}: found {found} {key} on the server, expected {wanted[key]} as the client received")
    moved = _integer(after, "preemptions") - _integer(before, "preemptions")
    if moved:
        own.find(7, f"{name}: found {moved} preemptions, expected none")
    hits = _integer(after, "prefix_cache_hits") - _integer(before, "prefix_cache_hits")
    if rules.cold and hits:
        own.find(7, f"{name}: found {hits} prompt tokens in the prefix cache, expected none: the plan says cold")


def _asked(own: Objections, panel: Panel, name: str, cell: _Cell) -> None:
    """The server counts as many prompt tokens of each request as the panel has: both have one tokenizer."""
    lengths = {item.id: len(item.prompt) for item in panel.items}
    for record in cell.recording.requests:
        wanted, found = lengths.get(str(record["prompt"])), figures(record)
        if found.completed and found.prompt_tokens != wanted:
            own.find(7, f"{name}, {found.request}: found {found.prompt_tokens} prompt tokens, expected {wanted} as in "
                        "the panel")  # fmt: skip


def _canaries(
    own: Objections,
    rules: TimingRules,
    panel: Panel,
    parity: Panel,
    cells: Mapping[str, _Cell],
    reference: Sequence[object],
) -> None:
    prompts = {item.id: item for item in parity.items}
    serial: dict[str, tuple[int, ...]] = {}
    with own.reading(8):
        for record in reference:
            name = record.get("id") if isinstance(record, Mapping) else None
            if (
                isinstance(record, Mapping)
                and record.get("order") == ORDER
                and isinstance(name, str)
                and name in prompts
            ):
                item = prompts[name]
                output = reference_output(
                    record, origin=f"reference '{name}'", prompt=item.prompt, max_tokens=item.max_tokens
                )
                serial[name] = output.token_ids
    canaries = {item.id: item.expected for item in panel.items if item.grade == "canary"}
    for cell in rules.cells:
        if cell.name not in cells:
            continue
        asked = 0
        for record in cells[cell.name].recording.requests:
            name = canaries.get(str(record.get("prompt")))
            if name is None:
                continue
            asked += 1
            if name not in serial:
                own.gap(8, f"{cell.name}: canary '{name}': found no serial reference, expected one")
                continue
            with own.reading(8):
                found = figures(record).token_ids
                shared = min(len(found), len(serial[name]))
                if not shared or found[:shared] != serial[name][:shared]:
                    place = next((i for i in range(shared) if found[i] != serial[name][i]), 0)
                    own.find(
                        8, f"{cell.name}, {record.get('request')}: canary '{name}': found token "
                        f"{found[place] if found else 'none'} at {place}, expected {serial[name][place]} as serially"
                    )  # fmt: skip
        if asked != cell.canaries:
            own.gap(8, f"{cell.name}: found {asked} canaries, expected {cell.canaries}")


def _late(own: Objections, rules: TimingRules, name: str, summary: Summary) -> None:
    lateness, ttft = summary.figures["lateness_p99"].value, summary.figures["ttft_intended_p50"].value
    share = Fraction(str(rules.lateness_fraction)) * Fraction(str(rules.practical))
    if lateness is None or not isinstance(ttft, Fraction):
        own.find(9, f"{name}: found no median TTFT to hold the dispatch lateness against, expected one")
    elif not lateness <= share * ttft:
        own.find(
            9, f"{name}: found a dispatch lateness p99 of {_ms(lateness)}, expected at most {_ms(share * ttft)}: "
            f"{rules.lateness_fraction:g} of the practical effect of {rules.practical:g} on a TTFT of {_ms(ttft)}"
        )  # fmt: skip


def _server_ttft(own: Objections, rules: TimingRules, trial: Mapping[str, object], name: str, cell: _Cell) -> None:
    before, after = _values(trial, f"before {name}"), _values(trial, f"after {name}")
    count = _integer(after, "ttft_count") - _integer(before, "ttft_count")
    sums = [values.get("ttft_sum_s") for values in (before, after)]
    if not all(isinstance(value, float | int) and not isinstance(value, bool) for value in sums):
        raise EvidenceError(f"trial.json: counter ttft_sum_s: found {sums!r}, expected numbers")
    own_mean = [
        answer.ttft_send_ns for answer in map(figures, cell.recording.requests) if answer.ttft_send_ns is not None
    ]
    if count <= 0 or count != len(own_mean):
        own.find(
            10, f"{name}: found {count} first tokens on the server, expected {len(own_mean)} as the client received"
        )
        return
    try:
        first, last = (Fraction(str(value)) for value in sums)
    except ValueError:
        raise EvidenceError(f"trial.json: counter ttft_sum_s: found {sums!r}, expected finite numbers") from None
    # Exact, as the decimals that were read: a difference at the limit is at the limit.
    server_ms, client_ms = (last - first) * 1000 / count, Fraction(sum(own_mean), len(own_mean) * 10**6)
    if not abs(client_ms - server_ms) <= Fraction(str(rules.server_ttft_ms)):
        own.find(
            10, f"{name}: found a mean TTFT of {float(client_ms):.1f} ms at the client and {float(server_ms):.1f} ms "
            "at the server, "
            f"expected at most {rules.server_ttft_ms:g} ms between them: the client or the way to it is the bound"
        )  # fmt: skip


def _idle(idle: Objections, rules: TimingRules, evidence: Evidence) -> None:
    names = [WARM_UP, *(cell.name for cell in rules.cells)]
    with idle.reading(11):
        for before, after in pairwise(names):
            first, second = _values(evidence.trial, f"after {before}"), _values(evidence.trial, f"before {after}")
            if dict(first) != dict(second):
                keys = sorted(key for key in {*first, *second} if first.get(key) != second.get(key))
                idle.find(
                    11, f"between {before} and {after}: found other {', '.join(keys)}, expected no request at all"
                )


def _null(idle: Objections, rules: TimingRules) -> Check:
    return null_check(idle, f"{len(rules.cells)} idle intervals, no counter moved")
