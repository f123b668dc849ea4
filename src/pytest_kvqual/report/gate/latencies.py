"""What the recordings of trials say of each request: TTFT, TPOT, and how late it was dispatched.

The definitions are those of :mod:`pytest_kvqual.metrics.formulas`. A recording of a full study has hundreds of
thousands of events, so only the two ends of each stream are decoded here; the gates decode all of it.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_kvqual.errors import KvqualError
from pytest_kvqual.metrics.requests import figures
from pytest_kvqual.report.gate.run import GateState, RunState, ScopeState

_CELL = re.compile(r"cell-([A-Za-z0-9._-]+)\.jsonl")
_FOLDER = re.compile(r"(?P<arm>.+)-(?P<length>\d+)-(?P<cache>\d+)")
_TOKENS = re.compile(rb'"token_ids":\s*\[\s*\d')
_COMPLETION = re.compile(rb'"completion_tokens":\s*(\d+)')
_EVENTS: Final = b'"events":[['
_NEXT: Final = b'"failure":'
_AFTER: Final = b"]]," + _NEXT
_USAGE_AMONG: Final = 4
# A multiple of 4, so that the end of base64 can be decoded alone.
_TAIL: Final = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One cell of one trial. Times in milliseconds, one for each request in the order of the trace.

    ``ttft`` is from the intended arrival; a failed request is infinite. ``tpot`` leaves out requests of one token.
    ``burst`` is how many requests at the start of a closed loop arrived at once: figures leave them out. ``begun`` is
    the client's monotonic clock at schedule zero, in nanoseconds, by which trials of one boot are put in order.
    """

    arm: str
    block: int | None
    cell: str
    mode: str
    file: str
    begun: int
    burst: int
    offered: int
    failed: int
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    lateness: tuple[float, ...]


def loads(run: RunState, scope: ScopeState) -> tuple[tuple[Load, ...], tuple[str, ...]]:
    """Every cell of every trial that the receipts of trial and superiority name, of all arms; and what is not there."""
    wanted: dict[str, str] = {}
    for other in run.scopes:
        same = (other.scope.lock, other.scope.length, other.scope.cache_bytes)
        if same != (scope.scope.lock, scope.scope.length, scope.scope.cache_bytes):
            continue
        for gate in (other.gate("trial"), other.gate("superiority")):
            wanted |= _cells(gate)
    found, notes = [], []
    for name in sorted(wanted):
        data = run.evidence.data(name, wanted[name])
        if data is None:
            notes.append(f"evidence/{name}: {run.evidence.why_not(name, wanted[name])}: left out of the plots")
            continue
        load = read_load(data, name, scope.prefix)
        if load is None:
            notes.append(f"evidence/{name}: no whole recording: left out of the plots")
        else:
            found.append(load)
    found.sort(key=lambda it: (it.begun, it.arm, it.cell))
    return tuple(found), tuple(notes)


def _cells(gate: GateState | None) -> dict[str, str]:
    if gate is None:
        return {}
    return {
        name: sha256
        for receipt in gate.receipts
        for name, sha256 in receipt.evidence.items()
        if _CELL.fullmatch(name.rpartition("/")[2])
    }


def read_load(data: bytes, name: str, prefix: str = "") -> Load | None:
    """The requests of a recording; None where it is no whole one.

    Args:
        data: The recording's bytes.
        name: ``BUNDLE/attempt-N/cell-NAME.jsonl``.
        prefix: Of the bundle's name.
    """
    bundle, _, file = name.split("/") if name.count("/") == 2 else ("", "", name)
    folder, cell = _FOLDER.fullmatch(bundle.removeprefix(prefix)), _CELL.fullmatch(file)
    try:
        lines = data.split(b"\n")
        if len(lines) < 3 or lines.pop():
            return None
        head, _ = json.loads(lines[0]), json.loads(lines[-1])
        burst = head["concurrency"] if head["mode"] == "closed" else 0
        times = [_times(line) for line in lines[1:-1]]
        about = head["about"]
        return Load(
            arm=folder["arm"] if folder else str(about.get("arm", "")),
            block=about.get("block"),
            cell=cell[1] if cell else str(head["cell"]),
            mode=head["mode"],
            file=name,
            begun=head["zero_monotonic_ns"],
            burst=burst,
            offered=len(times),
            failed=sum(it.failed for it in times),
            ttft=tuple(it.ttft for it in times),
            tpot=tuple(it.tpot for it in times if it.tpot is not None),
            lateness=tuple(it.lateness for it in times if it.lateness is not None),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, KvqualError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Times:
    failed: bool
    ttft: float
    tpot: float | None
    lateness: float | None


def _times(line: bytes) -> _Times:
    """TTFT from the intended arrival, TPOT, lateness of the dispatch; in milliseconds."""
    request, events = _parts(line)
    intended, dispatch = request["intended_ns"], request["dispatch_ns"]
    late = (dispatch - intended) / 1e6 if isinstance(dispatch, int) and isinstance(intended, int) else None
    if request["failure"] is not None or not isinstance(intended, int):
        return _Times(failed=True, ttft=math.inf, tpot=math.inf, lateness=late)
    first, last, tokens = _first(events), _first(reversed(events)), _completion(events)
    if first is None or last is None or tokens is None:
        # Another shape than the engine's: read it whole.
        read = figures(json.loads(line))
        return _Times(
            failed=False,
            ttft=math.inf if read.ttft_intended_ns is None else read.ttft_intended_ns / 1e6,
            tpot=None if read.tpot_ns is None else float(read.tpot_ns) / 1e6,
            lateness=late,
        )
    tpot = (last - first) / (tokens - 1) / 1e6 if tokens > 1 else None
    return _Times(failed=False, ttft=(first - intended) / 1e6, tpot=tpot, lateness=late)


_Event = tuple[int, bytes]


def _parts(line: bytes) -> tuple[Mapping[str, object], Sequence[_Event]]:
    """A request without its events, and these as (nanoseconds, base64).

    Events are nearly all of a line, and the keys of a recording stand in order: those before hold no text, and base64
    holds no bracket.
    """
    begin = line.find(_EVENTS)
    end = line.find(_AFTER, begin)
    if begin < 0 or end < 0:
        request = json.loads(line)
        return request, [(at, raw.encode("ascii")) for at, raw in request["events"]]
    request = json.loads(line[:begin] + line[end + len(_AFTER) - len(_NEXT) :])
    pieces = (piece.partition(b',"') for piece in line[begin + len(_EVENTS) : end].split(b"],["))
    return request, [(int(at), raw[:-1]) for at, _, raw in pieces]


def _first(events: Iterable[_Event]) -> int | None:
    return next((at for at, raw in events if _brings_tokens(raw)), None)


def _brings_tokens(raw: bytes) -> bool:
    """Whether an event has output tokens. Those of the prompt, which the first one repeats, stand before them."""
    if _TOKENS.search(b64decode(raw[-_TAIL:])):
        return True
    return len(raw) > _TAIL and _TOKENS.search(b64decode(raw)) is not None


def _completion(events: Sequence[_Event]) -> int | None:
    for _, raw in events[: -_USAGE_AMONG - 1 : -1]:
        match = _COMPLETION.search(b64decode(raw))
        if match:
            return int(match[1])
    return None


def rank(values: Sequence[float], quantile: float) -> float:
    """The value of the nearest rank, as the figures take it; NaN of nothing."""
    ranked = sorted(values)
    return ranked[max(1, math.ceil(quantile * len(ranked) - 1e-9)) - 1] if ranked else math.nan
