"""A recording of a timed load, read again with code of its own: ``kvqual verify``, and for the audit of timing.

``python -m pytest_kvqual.audit.recording RECORD …`` on a bare Python is the same. Exit status 0: verified. 1: findings.
2: usage, or no recording; one line on standard error. The checks:

 1. Form: JSON lines, each in canonical bytes, of the fields that a recording has, each of its kind; canonical base64;
    one header, one end.
 2. Accounting: as many requests as the header says, each named once, numbers in order and without a gap where they are
    numbered; offered = completed + failed, kind by kind.
 3. Times: intended <= dispatch <= admission <= connected <= send start <= send end; headers and events after the send
    began; events in order; nothing after the request's end; no end after that of the recording; a limit of time kept.
    What was answered has a time of each of these; only a request that was cancelled before its dispatch has none.
 4. Events: joined they are the stream that splits into the same events again, and what is left over ends no event.
 5. Tokens and failures: what each request came to, told again from its bytes: the kind of failure, or none. A timeout
    is not before the limit; nothing is sent after an interrupt.
 6. Schedule: requests are dispatched in order. Closed loop: never more than N in flight, each due when one had ended,
    and no slot left empty for more than 50 ms while requests were left. Open loop: arrivals in order, no limit.
 7. Trace (with ``--trace``): its digest and cell, and request for request its name, intended arrival, prompt and output
    limit.

Then every figure is computed from the bytes, exactly, under the names of ``docs/metrics.md``.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Final, NoReturn

from pytest_kvqual.audit.files import DamagedError, canonical, is_digest, one_line, parse, sha256

PROGRAM: Final = "kvqual verify"
SLOT_NS: Final = 50_000_000
"""The longest time for which a closed loop may leave a slot empty."""
_BURST_NS: Final = 100_000
"""What each of the first N requests of a closed loop may cost beyond that: all are due at once."""

_SHOWN: Final = 20
_LIMIT_SLACK_NS: Final = 1_000_000_000
_LARGEST: Final = 2**63 - 1
_HEADER: Final = frozenset(
    {
        "schema", "kind", "cell", "mode", "concurrency", "requests", "trace_sha256", "judgment", "exploratory",
        "zero_monotonic_ns", "zero_wall", "timeout_ns", "loop", "timer", "about",
    }
)  # fmt: skip
_REQUEST: Final = frozenset(
    {
        "kind", "request", "prompt", "max_tokens", "intended_ns", "dispatch_ns", "admission_ns", "connected_ns",
        "send_start_ns", "send_end_ns", "status", "headers_ns", "headers", "body_sha256", "events", "rest", "end_ns",
        "failure",
    }
)  # fmt: skip
_END: Final = frozenset({"kind", "offered", "completed", "failed", "end_ns"})
_BY_CONNECTION: Final = ("refused", "transport", "timeout", "cancelled")
_KINDS: Final = (*_BY_CONNECTION, "status", "error-object", "malformed", "incomplete", "no-tokens", "count")
_STEPS: Final = ("intended_ns", "dispatch_ns", "admission_ns", "connected_ns", "send_start_ns", "send_end_ns")
_WALL: Final = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z", re.ASCII)
_NUMBERED: Final = re.compile(r"(.+)-([0-9]{4,9})", re.ASCII | re.DOTALL)
_QUANTILES: Final = {"p50": Fraction(1, 2), "p90": Fraction(9, 10), "p99": Fraction(99, 100), "max": Fraction(1)}

Value = Fraction | float | None
"""A figure: exact, infinite, or None where nothing defines one."""


@dataclass(kw_only=True, slots=True)
class Answer:
    """One request, told from its bytes. Times in ns after schedule zero."""

    name: str
    prompt: str
    intended: int | None
    dispatch: int | None
    connected: int | None
    sent: int | None
    end: int
    failure: str | None
    ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    prompt_tokens: int | None = None


@dataclass(kw_only=True, slots=True)
class Found:
    """What a recording came to: findings as (number of the check, line), and the figures by name."""

    header: Mapping[str, object] = field(default_factory=dict)
    findings: list[tuple[int, str]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    offered: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    figures: dict[str, Value] = field(default_factory=dict)

    def find(self, check: int, text: str) -> None:
        """The check objects."""
        self.findings.append((check, one_line(text)))

    @property
    def completed(self) -> int:
        """How many requests completed."""
        return self.offered - sum(self.failed.values())


def read(data: bytes, *, trace: bytes | None = None) -> Found:
    """Read a recording again.

    Args:
        data: The file's bytes.
        trace: The bytes of the trace that it must have replayed; None to leave check 7 out.

    Raises:
        DamagedError: It is no recording at all: no JSON lines, or no header.
    """
    found = Found()
    if not data.endswith(b"\n"):
        raise DamagedError("found no end of the last line, expected a whole recording")
    lines = data[:-1].split(b"\n")
    documents = [_document(found, line, number) for number, line in enumerate(lines, start=1)]
    header, last = documents[0], documents[-1]
    if header.get("kind") != "recording" or header.get("schema") != 1:
        raise DamagedError(
            f"line 1: found kind {header.get('kind')!r} and schema {header.get('schema')!r}, expected 'recording' and 1"
        )
    found.header = header
    _fields(found, header, _HEADER, "header")
    _form(found, header, _HEADER_FORM, "header")
    requests = documents[1:]
    if last.get("kind") == "end" and len(documents) > 1:
        requests = documents[1:-1]
        _fields(found, last, _END, "end")
        _form(found, last, _END_FORM, "end")
    else:
        found.find(1, "found no line of kind 'end', expected one as the last: the recording is not whole")
        last = {}
    for number, request in enumerate(requests, start=2):
        where = f"line {number} ({request.get('request')!r:.60})"
        if request.get("kind") != "request":
            found.find(1, f"{where}: found kind {request.get('kind')!r:.40}, expected 'request'")
        _fields(found, request, _REQUEST, where)
        _form(found, request, _REQUEST_FORM, where)
        found.answers.append(_request(found, request, last.get("end_ns"), where))
    _accounting(found, header, last)
    _interrupted(found)
    _schedule(found, header)
    if trace is not None:
        _traced(found, header, requests, trace)
    _figures(found, header)
    return found


def _document(found: Found, line: bytes, number: int) -> Mapping[str, object]:
    value = parse(line)
    if not isinstance(value, dict):
        raise DamagedError(f"line {number}: found no JSON object, expected one")
    if canonical(value) != line:
        found.find(1, f"line {number}: found other bytes than the canonical ones of its content")
    return value


def _fields(found: Found, document: Mapping[str, object], known: frozenset[str], where: str) -> None:
    if set(document) != known:
        missing, extra = sorted(known - set(document)), sorted(set(document) - known)
        found.find(1, f"{where}: found the fields {extra} too many and {missing} missing, expected neither")


def _whole(value: object) -> int | None:
    return value if type(value) is int and abs(value) <= _LARGEST else None


def _count(value: object) -> bool:
    whole = _whole(value)
    return whole is not None and whole >= 0


def _digest_or_none(value: object) -> bool:
    return value is None or is_digest(value)


def _texts(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _least(least: int, most: int = _LARGEST) -> Callable[[object], bool]:
    return lambda value: (whole := _whole(value)) is not None and least <= whole <= most


def _pairs(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(it, str) for it in pair) for pair in value
    )


_Form = Mapping[str, tuple[Callable[[object], bool], str]]
_HEADER_FORM: Final[_Form] = {
    "cell": (_texts, "a name"),
    "mode": (lambda value: value in ("open", "closed"), "open or closed"),
    "concurrency": (lambda value: value is None or _least(1)(value), "null or at least 1"),
    "requests": (_least(0), "a count"),
    "trace_sha256": (_digest_or_none, "a SHA-256 or null"),
    "judgment": (_digest_or_none, "a SHA-256 or null"),
    "exploratory": (lambda value: type(value) is bool, "true or false"),
    "zero_monotonic_ns": (_least(0), "nanoseconds"),
    "zero_wall": (lambda value: isinstance(value, str) and _WALL.fullmatch(value) is not None, "a time in UTC"),
    "timeout_ns": (_least(1), "at least 1 ns"),
    "loop": (_texts, "a name"),
    "timer": (_texts, "a name"),
    "about": (lambda value: isinstance(value, dict), "a table"),
}
_REQUEST_FORM: Final[_Form] = {
    "request": (_texts, "a name"),
    "prompt": (lambda value: isinstance(value, str), "an item's id"),
    "max_tokens": (_least(1), "at least 1"),
    "status": (lambda value: value is None or _least(100, 999)(value), "null or a status"),
    "headers": (_pairs, "pairs of a name and a value"),
    "body_sha256": (is_digest, "a SHA-256"),
}
_END_FORM: Final[_Form] = {
    "offered": (_least(0), "a count"),
    "completed": (_least(0), "a count"),
    "failed": (
        lambda value: isinstance(value, dict) and all(kind in _KINDS and _least(1)(it) for kind, it in value.items()),
        "counts of known kinds, each at least 1",
    ),
    "end_ns": (lambda value: _whole(value) is not None, "nanoseconds"),
}


def _form(found: Found, document: Mapping[str, object], form: _Form, where: str) -> None:
    """Whether each value is of its kind; fields that are missing have been found so."""
    for key, (holds, expected) in form.items():
        if key in document and not holds(document[key]):
            found.find(1, f"{where}: {key}: found {document[key]!r:.80}, expected {expected}")


# -- one request -----------------------------------------------------------------------------------------------------


def _request(found: Found, request: Mapping[str, object], last_end: object, where: str) -> Answer:
    answer = Answer(
        name=str(request.get("request")),
        prompt=str(request.get("prompt")),
        intended=_whole(request.get("intended_ns")),
        dispatch=_whole(request.get("dispatch_ns")),
        connected=_whole(request.get("connected_ns")),
        sent=_whole(request.get("send_start_ns")),
        end=_whole(request.get("end_ns")) or 0,
        failure=None,
    )
    failure = request.get("failure")
    stored = failure.get("kind") if isinstance(failure, dict) else None
    if failure is not None and (
        not isinstance(failure, dict) or set(failure) != {"kind", "text"} or stored not in _KINDS
        or not isinstance(failure.get("text"), str)
    ):  # fmt: skip
        found.find(1, f"{where}: failure: found {failure!r:.80}, expected null or a known kind with its text")
    answer.failure = stored if isinstance(stored, str) else None
    events = _events(found, request, where)
    _times(found, request, answer, events, last_end, where)
    rest = _base64(found, request.get("rest"), f"{where}: rest") or b""
    _resplit(found, request, [raw for _, raw in events], rest, where)
    stream = _stream(events)
    answer.ids, answer.arrivals, answer.prompt_tokens = stream.ids, stream.arrivals, stream.prompt
    _outcome(found, request, answer, stream, where)
    return answer


def _events(found: Found, request: Mapping[str, object], where: str) -> list[tuple[int, bytes]]:
    value, events = request.get("events"), []
    for pair in value if isinstance(value, list) else [None]:
        moment = _whole(pair[0]) if isinstance(pair, list) and len(pair) == 2 else None
        if moment is None or not isinstance(pair, list):
            found.find(1, f"{where}: events: found {pair!r:.60}, expected [nanoseconds, base64]")
            continue
        raw = _base64(found, pair[1], f"{where}: events")
        if raw is not None:
            events.append((moment, raw))
    return events


def _base64(found: Found, value: object, where: str) -> bytes | None:
    if isinstance(value, str):
        try:
            raw = base64.b64decode(value, validate=True)
            if base64.b64encode(raw).decode() == value:
                return raw
        except (binascii.Error, ValueError):
            pass
    found.find(1, f"{where}: found {value!r:.60}, expected canonical base64")
    return None


def _times(
    found: Found, request: Mapping[str, object], answer: Answer, events: Sequence[tuple[int, bytes]], last_end: object,
    where: str,
) -> None:  # fmt: skip
    moments = [(name, request.get(name)) for name in _STEPS]
    cancelled = answer.failure == "cancelled"
    for name, value in [*moments, ("headers_ns", request.get("headers_ns"))]:
        optional = name not in _STEPS[:3] or cancelled
        if _whole(value) is None and not (value is None and optional):
            found.find(1, f"{where}: {name}: found {value!r:.40}, expected nanoseconds")
    if _whole(request.get("end_ns")) is None:
        found.find(1, f"{where}: end_ns: found {request.get('end_ns')!r:.40}, expected nanoseconds")
    _complete(found, request, answer, events, where)
    known = [(name, value) for name, value in moments if _whole(value) is not None]
    for (before, one), (after, other) in pairwise(known):
        if isinstance(one, int) and isinstance(other, int) and other < one:
            found.find(3, f"{where}: found {after} {other} before {before} {one}, expected it not before")
    begun = answer.sent
    later = [moment for moment, _ in events]
    heads = _whole(request.get("headers_ns"))
    if (later or heads is not None) and begun is None:
        found.find(3, f"{where}: found an answer to a request that was never sent, expected a time of sending")
    for name, moment in [("headers_ns", heads), *(("an event", moment) for moment in later)]:
        if moment is not None and begun is not None and moment < begun:
            found.find(3, f"{where}: found {name} at {moment}, expected it after the send began at {begun}")
            break
    if later and heads is not None and min(later) < heads:
        found.find(3, f"{where}: found an event at {min(later)}, expected it after the headers at {heads}")
    if any(after < before for before, after in pairwise(later)):
        found.find(3, f"{where}: found events that go back in time, expected them in order")
    # What was never dispatched has no end of its own.
    steps = [value for _, value in known if isinstance(value, int) and answer.dispatch is not None]
    latest = max([*steps, *later, *([heads] if heads is not None else [])], default=answer.end)
    if latest > answer.end:
        found.find(3, f"{where}: found its end at {answer.end}, expected it not before {latest}")
    if isinstance(last_end, int) and answer.end > last_end:
        found.find(3, f"{where}: found its end at {answer.end} after that of the recording at {last_end}")
    limit = _whole(found.header.get("timeout_ns"))
    if limit is not None and answer.dispatch is not None and answer.end - answer.dispatch > limit + _LIMIT_SLACK_NS:
        found.find(3, f"{where}: found it in flight for {answer.end - answer.dispatch} ns, expected at most {limit}")


def _complete(
    found: Found, request: Mapping[str, object], answer: Answer, events: Sequence[tuple[int, bytes]], where: str
) -> None:
    """Check 3: which times there must be."""
    moments = {name: request.get(name) for name in (*_STEPS, "headers_ns")}
    if answer.dispatch is None and (
        any(moments[name] is not None for name in (*_STEPS[2:], "headers_ns")) or events or request.get("rest") != ""
    ):
        found.find(3, f"{where}: found no dispatch of a request that has other times or bytes, expected one")
    for before, after in pairwise(_STEPS[1:]):
        if moments[before] is None and moments[after] is not None:
            found.find(3, f"{where}: found no {before} of a request with {after}, expected one")
    if (request.get("status") is None) != (moments["headers_ns"] is None):
        found.find(3, f"{where}: found a status or its time without the other, expected both or none")
    if answer.failure is None and None in moments.values():
        found.find(3, f"{where}: found no {next(k for k, v in moments.items() if v is None)} of a completed request")
    if answer.intended is not None and answer.intended < 0:
        found.find(3, f"{where}: found it due at {answer.intended}, expected not before zero")
    if found.header.get("mode") == "open" and moments["admission_ns"] != moments["dispatch_ns"]:
        found.find(3, f"{where}: found another admission than dispatch, expected no limit in an open loop")


def _resplit(found: Found, request: Mapping[str, object], events: list[bytes], rest: bytes, where: str) -> None:
    if request.get("status") != 200:
        if events:
            found.find(4, f"{where}: found events under status {request.get('status')!r}, expected none")
        if request.get("status") is None and rest:
            found.find(4, f"{where}: found {len(rest)} bytes without a status, expected none")
        return
    again, left = split(b"".join(events) + rest)
    if again != events or left != rest:
        found.find(4, f"{where}: found {len(events)} events, expected {len(again)} as its bytes split again")


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """A stream's events, each with the empty line that ends it, and what is left: byte by byte, by the standard."""
    events: list[bytes] = []
    begin = at = 0
    # Whether a line of the present event has ended just before `at`.
    fresh = False
    size = len(data)
    while at < size:
        byte = data[at]
        if byte != 0x0A and byte != 0x0D:
            # To the next end of a line.
            ends = [place for place in (data.find(b"\n", at), data.find(b"\r", at)) if place >= 0]
            if not ends:
                break
            at, fresh = min(ends), False
            continue
        width = 2 if byte == 0x0D and data[at + 1 : at + 2] == b"\n" else 1
        at += width
        if fresh:
            events.append(data[begin:at])
            begin, fresh = at, False
        else:
            fresh = True
    return events, data[begin:]


@dataclass(kw_only=True, slots=True)
class _Stream:
    ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    prompt: int | None = None
    said: int | None = None
    finished: bool = False
    done: bool = False
    error: bool = False
    malformed: bool = False


def _stream(events: Sequence[tuple[int, bytes]]) -> _Stream:
    stream = _Stream()
    for number, (moment, raw) in enumerate(events):
        data, names = _data(raw, first=number == 0)
        if data is None or not data.strip():
            continue
        named = names[-1:] == [b"error"]
        if data.strip() == b"[DONE]" and not named:
            stream.done = True
            continue
        # A server's JSON, not ours: strict in what JSON is, and no more.
        try:
            document = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            stream.error, stream.malformed = stream.error or named, stream.malformed or not named
            continue
        stream.error |= document.get("error") is not None or named or document.get("object") == "error"
        usage = document.get("usage")
        if isinstance(usage, dict):
            said, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
            stream.said = said if _count(said) else stream.said
            stream.prompt = prompt if _count(prompt) else stream.prompt
        _choices(stream, document.get("choices"), moment)
    return stream


def _no_constant(word: str) -> NoReturn:
    raise ValueError(word)


def _data(raw: bytes, *, first: bool) -> tuple[bytes | None, list[bytes]]:
    """An event's data, and the names that its ``event`` fields give."""
    if first and raw.startswith(b"\xef\xbb\xbf"):
        raw = raw[3:]
    values, names = [], []
    for line in raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        key, colon, value = line.partition(b":")
        value = value[1:] if colon and value.startswith(b" ") else value
        if key == b"data":
            values.append(value)
        elif key == b"event":
            names.append(value.strip())
    return (b"\n".join(values) if values else None), names


def _choices(stream: _Stream, choices: object, moment: int) -> None:
    brought = 0
    for choice in choices if isinstance(choices, list) else []:
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            continue
        delta = choice.get("delta")
        ids = choice.get("token_ids")
        if ids is None and isinstance(delta, dict):
            ids = delta.get("token_ids")
        if isinstance(ids, list) and all(map(_count, ids)):
            stream.ids += ids
            brought += len(ids)
        elif ids is not None:
            stream.malformed = True
        reason = choice.get("finish_reason")
        stream.error |= reason == "error"
        stream.finished |= isinstance(reason, str) and reason not in ("", "error", "abort")
    if brought:
        stream.arrivals.append((moment, brought))


def _outcome(found: Found, request: Mapping[str, object], answer: Answer, stream: _Stream, where: str) -> None:
    """Check 5: what the bytes say of the request's end, where the connection did not decide it."""
    status, stored = request.get("status"), answer.failure
    if stored in _BY_CONNECTION:
        if stored == "refused" and not (status is None and answer.connected is None and answer.sent is None):
            found.find(5, f"{where}: found the failure 'refused' of a request with a connection, expected another")
        allowed = _whole(found.header.get("timeout_ns"))
        if stored == "timeout" and None not in (allowed, answer.dispatch):
            flown = answer.end - (answer.dispatch or 0)
            if flown < (allowed or 0):
                found.find(5, f"{where}: found the failure 'timeout' {flown} ns after dispatch, expected {allowed}")
        return
    expected: str | None
    limit = _whole(request.get("max_tokens")) or 0
    if status != 200:
        expected = "status"
    elif stream.error:
        expected = "error-object"
    elif stream.malformed:
        expected = "malformed"
    elif not (stream.finished and stream.done):
        expected = "no-tokens" if stream.done and not stream.ids else "incomplete"
    elif not stream.ids:
        expected = "no-tokens"
    elif stream.said != len(stream.ids) or len(stream.ids) > limit:
        expected = "count"
    else:
        expected = None
    if stored != expected:
        found.find(
            5, f"{where}: found {stored or 'completed'}, expected {expected or 'completed'} as its bytes say "
            f"({len(stream.ids)} token ids, usage {stream.said}, limit {limit})"
        )  # fmt: skip


# -- the whole load --------------------------------------------------------------------------------------------------


def _accounting(found: Found, header: Mapping[str, object], last: Mapping[str, object]) -> None:
    names = [answer.name for answer in found.answers]
    found.offered = len(names)
    for answer in found.answers:
        if answer.failure is not None:
            found.failed[answer.failure] = found.failed.get(answer.failure, 0) + 1
    if len(set(names)) != len(names):
        found.find(2, f"found {len(names) - len(set(names))} requests named twice, expected each once")
    numbered = [_NUMBERED.fullmatch(name) for name in names]
    stems = {match[1] for match in numbered if match is not None}
    if stems == {header.get("cell")}:
        for place, (name, match) in enumerate(zip(names, numbered, strict=True)):
            if match is None or int(match[2]) != place:
                found.find(2, f"found {name!r:.60} as number {place}, expected each number once, in order")
                break
    elif header.get("cell") in stems:
        found.find(2, f"found names of {', '.join(sorted(stems))!r:.80}, expected one cell's")
    if header.get("requests") != len(names):
        found.find(2, f"found {len(names)} requests, expected {header.get('requests')!r} as the header says")
    if not last:
        return
    for key, value in (("offered", found.offered), ("completed", found.completed), ("failed", found.failed)):
        if canonical(last.get(key)) != canonical(value):
            found.find(2, f"end: {key}: found {last.get(key)!r:.80}, expected {value!r:.80} as recorded")
    ends = [answer.end for answer in found.answers]
    if last.get("end_ns") != max(ends, default=0):
        found.find(2, f"end: end_ns: found {last.get('end_ns')!r}, expected {max(ends, default=0)}, the last end")


def _interrupted(found: Found) -> None:
    """Check 5: an interrupt ends everything; nothing is sent after it."""
    flown = [it for it in found.answers if it.dispatch is not None]
    cut = min((it.end for it in flown if it.failure == "cancelled" and it.end != it.dispatch), default=None)
    unsent: Answer | None = None
    for it in found.answers:
        if it.failure == "cancelled" and it.sent is None and it.end in (0, it.dispatch):
            unsent = it
        elif unsent is not None or (cut is not None and (it.dispatch or 0) > cut):
            found.find(5, f"{it.name}: found it dispatched after an interrupt ended the run, expected it cancelled")
            break


def _schedule(found: Found, header: Mapping[str, object]) -> None:
    """Check 6."""
    # One that was cancelled before it was sent has no dispatch, or its end for one.
    flown = [it for it in found.answers if it.dispatch is not None and not (it.failure and it.dispatch == it.end)]
    for what, moments in (
        ("intended arrivals", [it.intended for it in flown if it.intended is not None]),
        ("dispatches", [it.dispatch for it in flown if it.dispatch is not None]),
    ):
        if moments != sorted(moments):
            found.find(6, f"found {what} that go back in time, expected them in order")
    if header.get("mode") != "closed":
        if header.get("concurrency") is not None:
            found.find(1, f"header: concurrency: found {header.get('concurrency')!r:.40}, expected null: mode is open")
        return
    limit = _whole(header.get("concurrency")) or 0
    if limit < 1:
        found.find(1, f"header: concurrency: found {header.get('concurrency')!r:.40}, expected at least 1")
        return
    # At one moment an end comes before the dispatch that it makes room for.
    changes = sorted([(it.dispatch or 0, 1) for it in flown] + [(it.end, -1) for it in flown])
    flying = 0
    for moment, change in changes:
        flying += change
        if flying > limit:
            found.find(6, f"found {flying} requests in flight at {moment}, expected at most {limit}")
            break
    free = sorted(it.end for it in flown)
    for place, it in enumerate(flown):
        expected = 0 if place < limit else free[place - limit]
        if it.intended != expected:
            found.find(6, f"{it.name}: found its slot free at {it.intended}, expected {expected}")
            break
    for place, it in enumerate(flown):
        empty = (it.dispatch or 0) - (it.intended or 0)
        allowed = SLOT_NS + (_BURST_NS * limit if place < limit else 0)
        if empty > allowed:
            found.find(6, f"{it.name}: found its slot empty for {empty} ns, expected at most {allowed}")
            break


def _traced(found: Found, header: Mapping[str, object], requests: Sequence[Mapping[str, object]], trace: bytes) -> None:
    if header.get("trace_sha256") != sha256(trace):
        found.find(7, f"trace_sha256: found {header.get('trace_sha256')!r}, expected {sha256(trace)}")
    try:
        lines = [parse(line) for line in trace.removesuffix(b"\n").split(b"\n")]
    except DamagedError as error:
        found.find(7, f"trace: {error}")
        return
    head = lines[0]
    if not isinstance(head, dict) or head.get("kind") != "trace":
        found.find(7, "found no header of kind 'trace', expected a trace")
        return
    for key in ("cell", "mode", "concurrency", "requests"):
        if header.get(key) != head.get(key):
            found.find(7, f"{key}: found {header.get(key)!r:.60}, expected {head.get(key)!r:.60} as in the trace")
    planned = [line for line in lines[1:] if isinstance(line, dict)]
    if len(planned) != len(requests):
        found.find(7, f"found {len(requests)} requests, expected {len(planned)} as in the trace")
        return
    for request, line in zip(requests, planned, strict=True):
        for key in ("request", "prompt", "max_tokens", "intended_ns"):
            if key == "intended_ns" and line.get(key) is None:
                continue
            if request.get(key) != line.get(key):
                found.find(
                    7, f"{line.get('request')}: {key}: found {request.get(key)!r:.60}, expected {line.get(key)!r}"
                )


def _figures(found: Found, header: Mapping[str, object]) -> None:
    first = _whole(header.get("concurrency")) or 0
    answers = found.answers
    for prefix, part in (("", answers[first:]), ("burst_", answers[:first])):
        for name in ("ttft_intended", "ttft_send", "tpot", "e2e", "lateness"):
            values = sorted(_values(name, part))
            for label, quantile in _QUANTILES.items():
                found.figures[f"{prefix}{name}_{label}"] = _ranked(values, quantile)
    sent = [it.arrivals[0][0] - it.sent for it in answers if it.arrivals and it.sent is not None]
    found.figures["mean_ttft_send"] = Fraction(sum(sent), len(sent)) if sent else None
    whole = [it for it in answers if it.failure is None]
    tokens = sum(len(it.ids) for it in whole)
    begins = [it.intended for it in answers if it.intended is not None]
    span = max(it.end for it in answers) - min(begins) if begins else 0
    found.figures["output_throughput"] = Fraction(tokens * 10**9, span) if span > 0 else None
    found.figures["request_throughput"] = Fraction(len(whole) * 10**9, span) if span > 0 else None
    found.figures["goodput_tokens"] = Fraction(tokens)
    most = [count for it in answers for _, count in it.arrivals]
    found.figures["tokens_per_event_max"] = Fraction(max(most)) if most else None


def _values(name: str, answers: Sequence[Answer]) -> Iterator[Fraction | int | float]:
    for it in answers:
        if name == "lateness":
            if it.dispatch is not None and it.intended is not None:
                yield it.dispatch - it.intended
            continue
        if name == "tpot" and it.failure is None and len(it.ids) < 2:
            continue
        if it.failure is not None or not it.arrivals or it.intended is None or it.sent is None:
            yield math.inf
            continue
        start, stop = it.arrivals[0][0], it.arrivals[-1][0]
        if name == "tpot":
            yield Fraction(stop - start, len(it.ids) - 1)
        elif name == "e2e":
            yield stop - it.intended
        else:
            yield start - (it.intended if name == "ttft_intended" else it.sent)


def _ranked(values: Sequence[Fraction | int | float], quantile: Fraction) -> Value:
    if not values:
        return None
    value = values[max(1, math.ceil(quantile * len(values))) - 1]
    return math.inf if isinstance(value, float) else Fraction(value)


# -- the command -----------------------------------------------------------------------------------------------------


def spelled(value: Value) -> str | None:
    """A figure as ``N/D`` in lowest terms, ``inf``, or None."""
    if value is None:
        return None
    return f"{value.numerator}/{value.denominator}" if isinstance(value, Fraction) else "inf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments, here and for ``kvqual verify``."""
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD", help="a recording (cell-….jsonl)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the trace that it must have replayed")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, exact")


def run(arguments: argparse.Namespace) -> int:
    """Verify, and print; the exit status."""
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has read enough; what is still buffered must not raise once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    return status


def _run(arguments: argparse.Namespace) -> int:
    status = 0
    for path in arguments.records:
        try:
            trace = None if arguments.trace is None else arguments.trace.read_bytes()
            found = read(path.read_bytes(), trace=trace)
        except DamagedError as error:
            return _refused(f"{path}: {error}")
        except OSError as error:
            return _refused(f"{error.filename or path}: cannot be read: {error.strerror or error}")
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, MemoryError) as error:
            return _refused(f"{path}: cannot be verified: {type(error).__name__}: {error}")
        for check, line in found.findings[:_SHOWN]:
            print(one_line(f"{path}: check {check}: {line}"))
        if len(found.findings) > _SHOWN:
            print(f"{path}: and {len(found.findings) - _SHOWN} more findings")
        count = len(found.findings)
        verdict = "verified" if not count else f"{count} finding{'s' if count > 1 else ''}"
        if arguments.json:
            figures = {name: spelled(value) for name, value in found.figures.items()}
            document = {"record": str(path), "verified": not found.findings, "figures": figures}
            print(canonical(document).decode())
        else:
            failed = ", ".join(f"{count} {kind}" for kind, count in sorted(found.failed.items())) or "none"
            print(
                one_line(f"{path}: {verdict}: {found.offered} offered, {found.completed} completed, failed: {failed}")
            )
            for name, value in found.figures.items():
                if value is not None:
                    print(f"  {name}: {_shown(name, value)}")
        status = max(status, 1 if found.findings else 0)
    return status


def _shown(name: str, value: Fraction | float) -> str:
    if name.endswith("_throughput"):
        return f"{float(value):.6g} 1/s"
    if name in ("goodput_tokens", "tokens_per_event_max"):
        return f"{float(value):.0f} tokens"
    return f"{float(value) / 1e6:.6f} ms"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, and status 2."""
        raise SystemExit(_refused(message))


def _refused(text: str) -> int:
    print(f"{PROGRAM}: {one_line(text)}", file=sys.stderr)
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = _Parser(
        prog=PROGRAM, description="Read a recording again with code of its own, and recompute its figures."
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
