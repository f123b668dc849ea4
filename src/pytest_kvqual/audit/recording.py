"""``kvqual verify RECORD …``: read a recording again, with code of its own, and recompute every figure.

Standard library only: ``python -m pytest_kvqual.audit.recording RECORD`` runs on a bare Python 3.11. What is checked,
under numbers that are never given to another meaning:

 1. Bytes: each line is the canonical JSON of its content.
 2. Header: cell, mode and concurrency, digests, clocks and time limit are of the form that they must have.
 3. Footer: it ends at the last end of a request, and names failures that there are.
 4. Requests: as many as the header says, each named once, in the order of their numbers.
 5. Accounting: offered = completed + failed, in all and of each kind of failure.
 6. Times: each request's moments follow each other on one clock, and the time limit was kept.
 7. Framing: base64 is canonical; events and rest, put together and split again, give the same events.
 8. Outcome: completed or the kind of failure follow from status, bytes and times; token ids, usage and limit agree.
 9. Concurrency: in a closed loop never more than N requests are in flight.
10. Schedule: nothing is dispatched before it is intended, or out of order; in a closed loop a request is intended when
    a slot became free, and no slot stays empty for long.
11. Trace: with ``--trace``, the recording is that of the trace.

Exit status 0: verified. 1: findings. 2: a file that cannot be read as a recording; one line on standard error.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import io
import json
import math
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final, NoReturn

from pytest_kvqual.audit.files import DOCUMENT_LIMIT, LINE_LIMIT, DamagedError, canonical, is_digest, one_line, parse
from pytest_kvqual.audit.files import sha256 as digest_of
from pytest_kvqual.audit.shapes import kind, shown

PROGRAM: Final = "kvqual verify"

CHECKS: Final[Mapping[int, str]] = MappingProxyType(
    {
        1: "bytes",
        2: "header",
        3: "footer",
        4: "requests",
        5: "accounting",
        6: "times",
        7: "framing",
        8: "outcome and tokens",
        9: "concurrency",
        10: "schedule",
        11: "trace",
    }
)
"""Each check's number and its meaning in a word or two; this module's docstring says it in full."""

CONTENT: Final = ("error-object", "malformed", "incomplete", "no-tokens", "count")
"""The kinds of failure that a stream's content decides."""
FAILURES: Final = ("refused", "status", "transport", "timeout", "cancelled", *CONTENT)
QUANTITIES: Final = ("ttft_intended", "ttft_send", "tpot", "e2e", "lateness")
QUANTILES: Final[Mapping[str, Fraction]] = MappingProxyType(
    {"p50": Fraction(1, 2), "p90": Fraction(9, 10), "p99": Fraction(99, 100), "max": Fraction(1)}
)

EMPTY_SLOT_NS: Final = 50_000_000
"""How long a slot of a closed loop may stay empty while requests are left."""
_BURST_NS: Final = 100_000
"""What each of the first N requests of a closed loop may cost beyond that: all are due at once."""
_OVERRUN_NS: Final = 1_000_000_000
"""How long after its time limit a request may be ended: the client looks at its limits now and then."""
_BILLION: Final = 10**9
_WHOLE: Final = 2**63
_SHOWN: Final = 40

_HEADER: Final = (
    "schema", "kind", "cell", "mode", "concurrency", "requests", "trace_sha256", "judgment", "exploratory",
    "zero_monotonic_ns", "zero_wall", "timeout_ns", "loop", "timer", "about",
)  # fmt: skip
_REQUEST: Final = (
    "kind", "request", "prompt", "max_tokens", "intended_ns", "dispatch_ns", "admission_ns", "connected_ns",
    "send_start_ns", "send_end_ns", "status", "headers_ns", "headers", "body_sha256", "events", "rest", "end_ns",
    "failure",
)  # fmt: skip
_FOOTER: Final = ("kind", "offered", "completed", "failed", "end_ns")
_WALL = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_NUMBERED = re.compile(r"(.+)-(\d{4,})")
_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM: Final = b"\xef\xbb\xbf"

Number = Fraction | float
Value = Number | None
"""A figure: exact, infinity, or None where there is none."""


class UnreadableError(DamagedError):
    """The bytes are no recording. The message is one line: the place, what was found, what was expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One objection: the number of its check, the line and request, and what was found and expected."""

    check: int
    where: str
    text: str

    def line(self) -> str:
        """``check N NAME: WHERE: TEXT`` in one line."""
        return f"check {self.check} {CHECKS[self.check]}: {self.where}: {self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure: its exact value in ``unit``, and over how many requests it is taken."""

    value: Value
    unit: str
    of: int

    def exact(self) -> str | None:
        """``N/D`` in lowest terms, ``inf``, or None."""
        if self.value is None:
            return None
        return f"{self.value.numerator}/{self.value.denominator}" if isinstance(self.value, Fraction) else "inf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """What a stream's events say. ``arrivals`` has the time and the number of token ids of each event with any."""

    tokens: tuple[int, ...] = ()
    arrivals: tuple[tuple[int, int], ...] = ()
    prompt_tokens: int | None = None
    failure: str | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request, as recorded; times in ns after zero. ``failure`` is its kind, None where it completed."""

    where: str
    name: str
    prompt: str
    max_tokens: int
    intended: int | None
    dispatch: int | None
    admission: int | None
    connected: int | None
    send_start: int | None
    send_end: int | None
    status: int | None
    headers: int | None
    end: int
    failure: str | None
    stream: Stream
    first_event: int | None
    last_event: int | None
    received: int

    @property
    def lateness(self) -> int | None:
        """Dispatch after the intended arrival."""
        return None if self.dispatch is None or self.intended is None else self.dispatch - self.intended

    def since(self, begin: int | None, place: int) -> int | None:
        """The first (0) or last (-1) event with token ids after ``begin``; None where there is none."""
        arrivals = self.stream.arrivals
        return None if begin is None or not arrivals else arrivals[place][0] - begin


@dataclass(kw_only=True, slots=True)
class Verified:
    """A recording that could be read, what the checks found, and its figures by name."""

    header: Mapping[str, object] = field(default_factory=dict)
    footer: Mapping[str, object] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    sha256: str = ""

    @property
    def concurrency(self) -> int | None:
        """N of a closed loop; None of an open one."""
        found = self.header.get("concurrency")
        return found if self.header.get("mode") == "closed" and type(found) is int else None

    @property
    def failed(self) -> dict[str, int]:
        """How many requests failed, by kind."""
        found: dict[str, int] = {}
        for request in self.requests:
            if request.failure is not None:
                found[request.failure] = found.get(request.failure, 0) + 1
        return dict(sorted(found.items()))

    def find(self, check: int, where: str, text: str) -> None:
        """The check objects."""
        self.findings.append(Finding(check=check, where=one_line(where), text=one_line(text)))

    def checks(self) -> list[int]:
        """The numbers of the checks that object."""
        return sorted({found.check for found in self.findings})


# -- reading ---------------------------------------------------------------------------------------------------------


def verify(source: bytes | Iterable[bytes], *, trace: bytes | None = None) -> Verified:
    """Check a recording and compute its figures.

    Args:
        source: The bytes of the file, or its lines, each with its end.
        trace: The bytes of the trace that it must be of.

    Raises:
        UnreadableError: It is no recording: not UTF-8, not strict JSON, a value of a type that the format does not
            have, no header, or no footer.
    """
    result = Verified()
    lines = iter(io.BytesIO(source) if isinstance(source, bytes) else source)
    number, ended = 0, False
    for number, line in enumerate(lines, start=1):
        where = f"line {number}"
        document = _document(line, where, result)
        if number == 1:
            result.header = _header(document, where, result)
        elif ended:
            raise UnreadableError(f"{where}: found a line after the end, expected the end last")
        elif document.get("kind") == "end":
            result.footer, ended = _footer(document, where), True
        else:
            result.requests.append(_request(document, where, result))
    if not ended:
        raise UnreadableError(f"found {number} lines and no end among them, expected a whole recording")
    footer_at = f"line {number}"
    _requests(result)
    _accounting(result, footer_at)
    _in_time(result, footer_at)
    for request in result.requests:
        _outcome(result, request)
    _cancelled(result)
    _concurrency(result)
    _schedule(result)
    if trace is not None:
        _traced(result, trace)
    result.figures = figures(result.requests, result.concurrency or 0)
    unseen = sum(it.failure == "transport" and it.status == 200 and it.stream.failure is None for it in result.requests)
    if unseen:
        result.notes.append(f"{unseen} requests failed in transport after a whole answer: no byte shows why")
    return result


def _document(line: bytes, where: str, result: Verified) -> dict[str, object]:
    if not line.endswith(b"\n"):
        raise UnreadableError(f"{where}: found a line without an end, expected whole lines")
    try:
        value = parse(line)
        whole = canonical(value) + b"\n"
    except DamagedError as error:
        raise UnreadableError(f"{where}: {error}") from None
    if not isinstance(value, dict):
        raise UnreadableError(f"{where}: found {kind(value)}, expected a table")
    if whole != line:
        result.find(1, where, "found bytes that are not the canonical form of their content")
    return value


def _fail(where: str, key: str, value: object, expected: str) -> NoReturn:
    raise UnreadableError(one_line(f"{where}: {key}: found {shown(value)}, expected {expected}"))


def _keys(document: Mapping[str, object], where: str, needed: Sequence[str]) -> None:
    for key in needed:
        if key not in document:
            raise UnreadableError(f"{where}: found no key {key!r}, expected one")
    for key in document:
        if key not in needed:
            raise UnreadableError(one_line(f"{where}: found the unknown key {key!r}, expected {', '.join(needed)}"))


def _integer(document: Mapping[str, object], key: str, where: str, *, least: int = -_WHOLE + 1) -> int:
    value = document[key]
    if type(value) is not int or not least <= value < _WHOLE:
        _fail(where, key, value, f"an integer of 64 bits{f' of at least {least}' if least > -_WHOLE + 1 else ''}")
    return value


def _moment(document: Mapping[str, object], key: str, where: str) -> int | None:
    return None if document[key] is None else _integer(document, key, where)


def _string(document: Mapping[str, object], key: str, where: str) -> str:
    value = document[key]
    if not isinstance(value, str):
        _fail(where, key, value, "a string")
    return value


def _header(document: dict[str, object], where: str, result: Verified) -> dict[str, object]:
    if document.get("kind") != "recording":
        _fail(where, "kind", document.get("kind"), "'recording'")
    _keys(document, where, _HEADER)
    if document["schema"] != 1 or type(document["schema"]) is not int:
        _fail(where, "schema", document["schema"], "1")
    for key in ("cell", "mode", "zero_wall", "loop", "timer"):
        _string(document, key, where)
    for key in ("requests", "zero_monotonic_ns", "timeout_ns"):
        _integer(document, key, where)
    _moment(document, "concurrency", where)
    if type(document["exploratory"]) is not bool:
        _fail(where, "exploratory", document["exploratory"], "true or false")
    if not isinstance(document["about"], dict):
        _fail(where, "about", document["about"], "a table")

    def expect(holds: bool, key: str, expected: str) -> None:
        if not holds:
            result.find(2, where, f"{key}: found {shown(document[key])}, expected {expected}")

    mode, most = document["mode"], document["concurrency"]
    expect(document["cell"] != "", "cell", "a name")
    expect(mode in ("open", "closed"), "mode", "open or closed")
    if mode == "closed":
        expect(isinstance(most, int) and most >= 1, "concurrency", "at least 1 in a closed loop")
    else:
        expect(most is None, "concurrency", "null in an open loop")
    for key in ("trace_sha256", "judgment"):
        if document[key] is not None and not isinstance(document[key], str):
            _fail(where, key, document[key], "a SHA-256 or null")
        expect(document[key] is None or is_digest(document[key]), key, "a SHA-256 of 64 lower-case hex digits, or null")
    expect(_WALL.fullmatch(str(document["zero_wall"])) is not None, "zero_wall", "YYYY-MM-DDTHH:MM:SSZ")
    # A run that was interrupted before its zero has none.
    for key, least in (("requests", 0), ("zero_monotonic_ns", 0), ("timeout_ns", 1)):
        value = document[key]
        expect(isinstance(value, int) and value >= least, key, f"at least {least}")
    for key in ("loop", "timer"):
        expect(document[key] != "", key, "what the client ran on")
    return document


def _footer(document: dict[str, object], where: str) -> dict[str, object]:
    _keys(document, where, _FOOTER)
    for key in ("offered", "completed", "end_ns"):
        _integer(document, key, where)
    failed = document["failed"]
    if not isinstance(failed, dict):
        _fail(where, "failed", failed, "a table of counts by kind")
    for name in failed:
        _integer(failed, name, f"{where}: failed")
    return document


def _request(document: dict[str, object], where: str, result: Verified) -> Request:
    if document.get("kind") != "request":
        _fail(where, "kind", document.get("kind"), "'request' or 'end'")
    _keys(document, where, _REQUEST)
    name = _string(document, "request", where)
    where = one_line(f"{where} ({name[:_SHOWN]})")
    status = None if document["status"] is None else _integer(document, "status", where, least=100)
    failure = document["failure"]
    if failure is not None:
        if not isinstance(failure, dict):
            _fail(where, "failure", failure, "a table or null")
        _keys(failure, f"{where}: failure", ("kind", "text"))
        for key in ("kind", "text"):
            _string(failure, key, f"{where}: failure")
        if failure["kind"] not in FAILURES:
            _fail(where, "failure.kind", failure["kind"], f"one of {', '.join(FAILURES)}")
    headers = document["headers"]
    pairs = headers if isinstance(headers, list) else [None]
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(it, str) for it in pair):
            _fail(where, "headers", pair, "pairs of a name and a value")
    if not is_digest(document["body_sha256"]):
        _fail(where, "body_sha256", document["body_sha256"], "a SHA-256 of 64 lower-case hex digits")
    if (status is None) != (document["headers_ns"] is None) or (status is None and headers):
        result.find(6, where, "status and headers: found one without the other, expected both or none")
    events, rest, whole = _bytes(document, where, result)
    limit = _integer(document, "max_tokens", where, least=1)
    if whole:
        _framing(result, where, status, events, rest)
    return Request(
        where=where,
        name=name,
        prompt=_string(document, "prompt", where),
        max_tokens=limit,
        intended=_moment(document, "intended_ns", where),
        dispatch=_moment(document, "dispatch_ns", where),
        admission=_moment(document, "admission_ns", where),
        connected=_moment(document, "connected_ns", where),
        send_start=_moment(document, "send_start_ns", where),
        send_end=_moment(document, "send_end_ns", where),
        status=status,
        headers=_moment(document, "headers_ns", where),
        end=_integer(document, "end_ns", where),
        failure=str(failure["kind"]) if failure is not None else None,
        stream=read_stream(events, limit),
        first_event=events[0][0] if events else None,
        last_event=events[-1][0] if events else None,
        received=sum(len(raw) for _, raw in events) + len(rest),
    )


def _bytes(document: Mapping[str, object], where: str, result: Verified) -> tuple[list[tuple[int, bytes]], bytes, bool]:
    """The events, the rest, and whether all of it could be decoded."""
    values = document["events"]
    if not isinstance(values, list):
        _fail(where, "events", values, "a list of [nanoseconds, base64]")
    events: list[tuple[int, bytes]] = []
    whole, last = True, None
    for place, pair in enumerate(values):
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[1], str):
            _fail(where, f"events[{place}]", pair, "[nanoseconds, base64]")
        if type(pair[0]) is not int or not -_WHOLE < pair[0] < _WHOLE:
            _fail(where, f"events[{place}][0]", pair[0], "an integer of 64 bits")
        raw = _decoded(pair[1], where, f"events[{place}]", result)
        whole = whole and raw is not None
        events.append((pair[0], raw or b""))
        if last is not None and pair[0] < last:
            result.find(6, where, f"events[{place}]: found {pair[0]}, expected at least {last}, the event's before it")
        last = pair[0]
    rest = _decoded(_string(document, "rest", where), where, "rest", result)
    return events, rest or b"", whole and rest is not None


def _decoded(text: str, where: str, key: str, result: Verified) -> bytes | None:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        result.find(7, where, f"{key}: found {text[:_SHOWN]!r}, expected base64")
        return None
    if base64.b64encode(raw).decode("ascii") != text:
        result.find(7, where, f"{key}: found {text[-_SHOWN:]!r}, expected the canonical base64 of its bytes")
    return raw


# -- the stream ------------------------------------------------------------------------------------------------------


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """The events of a stream, each with the empty line that ends it, and what is left.

    A line ends with CR LF, CR or LF. An empty line ends an event, unless it is the event's first.
    """
    events: list[bytes] = []
    begin = line = 0
    for found in _LINE_END.finditer(data):
        if found.start() == line > begin:
            events.append(data[begin : found.end()])
            begin = found.end()
        line = found.end()
    return events, data[begin:]


def _framing(
    result: Verified, where: str, status: int | None, events: Sequence[tuple[int, bytes]], rest: bytes
) -> None:
    recorded = [raw for _, raw in events]
    if status != 200:
        if recorded:
            result.find(7, where, f"events: found {len(recorded)} under status {status}, expected its body in rest")
        if status is None and rest:
            result.find(7, where, f"rest: found {len(rest)} bytes without a status, expected none")
        return
    again, left = split(b"".join(recorded) + rest)
    if (recorded, rest) == (again, left):
        return
    place = next((i for i, (one, other) in enumerate(zip(recorded, again, strict=False)) if one != other), None)
    if place is not None:
        result.find(
            7, where, f"events[{place}]: found {recorded[place][:_SHOWN]!r} of {len(recorded[place])} bytes, expected "
            f"{again[place][:_SHOWN]!r} of {len(again[place])}, as the bytes split",
        )  # fmt: skip
    elif len(recorded) < len(again):
        result.find(7, where, f"rest: found {len(again) - len(recorded)} whole events in it, expected none")
    else:
        result.find(7, where, f"events: found {len(recorded)}, expected {len(again)}, as the bytes split")


def read_stream(events: Iterable[tuple[int, bytes]], max_tokens: int) -> Stream:
    """What the events of a stream under status 200 say, and why it is no complete answer."""
    tokens: list[int] = []
    arrivals: list[tuple[int, int]] = []
    counts: dict[str, int] = {}
    objections: dict[str, str] = {}
    finished = done = False
    for place, (at, raw) in enumerate(events):
        name, data = _fields(raw.removeprefix(_BOM) if place == 0 else raw)
        if data is None or not data.strip():
            continue
        failed = name == b"error"
        if data.strip() == b"[DONE]" and not failed:
            done = True
            continue
        document = _object(data)
        if document is None:
            what = "error-object" if failed else "malformed"
            objections.setdefault(what, f"data of event {place}: {data[:_SHOWN]!r}")
            continue
        if failed or document.get("error") is not None or document.get("object") == "error":
            objections.setdefault("error-object", f"an error in event {place}")
        usage, choices = document.get("usage"), document.get("choices")
        for key in ("completion_tokens", "prompt_tokens"):
            if isinstance(usage, dict) and _natural(usage.get(key)):
                counts[key] = usage[key]
        brought = 0
        for choice in choices if isinstance(choices, list) else ():
            # One answer was asked for: tokens of another are none of its.
            if not isinstance(choice, dict) or choice.get("index", 0) != 0:
                continue
            ids, delta = choice.get("token_ids"), choice.get("delta")
            if ids is None and isinstance(delta, dict):
                ids = delta.get("token_ids")
            if isinstance(ids, list) and all(map(_natural, ids)):
                tokens += ids
                brought += len(ids)
            elif ids is not None:
                objections.setdefault("malformed", f"token_ids of event {place}: {kind(ids)}")
            reason = choice.get("finish_reason")
            if reason == "error":
                objections.setdefault("error-object", f"the finish reason 'error' in event {place}")
            elif isinstance(reason, str) and reason not in ("", "abort"):
                finished = True
        if brought:
            arrivals.append((at, brought))
            if done:
                objections.setdefault("malformed", f"tokens after [DONE] in event {place}")
    usage_says = counts.get("completion_tokens")
    if not done or not finished:
        parts = [name for name, there in (("finish reason", finished), ("[DONE]", done)) if not there]
        lacking = "no-tokens" if done and not tokens else "incomplete"
        objections.setdefault(lacking, f"{len(tokens)} tokens and an end without {' and '.join(parts)}")
    elif not tokens:
        objections["no-tokens"] = "no output token"
    elif usage_says != len(tokens):
        objections["count"] = f"{len(tokens)} token ids, {'no usage' if usage_says is None else f'usage {usage_says}'}"
    elif len(tokens) > max_tokens:
        objections["count"] = f"{len(tokens)} tokens of at most {max_tokens}"
    failure = next((it for it in ("error-object", "malformed", "incomplete", "no-tokens", "count") if it in objections),
                   None)  # fmt: skip
    return Stream(
        tokens=tuple(tokens),
        arrivals=tuple(arrivals),
        prompt_tokens=counts.get("prompt_tokens"),
        failure=failure,
        why="" if failure is None else objections[failure],
    )


def _fields(event: bytes) -> tuple[bytes, bytes | None]:
    """The value of the last ``event`` field, and the ``data`` fields joined by LF; None where there are none."""
    values: list[bytes] = []
    name = b""
    for line in _LINE_END.split(event):
        key, colon, value = line.partition(b":")
        text = value[1:] if colon and value.startswith(b" ") else value
        if key == b"data":
            values.append(text)
        elif key == b"event":
            name = text.strip()
    return name, b"\n".join(values) if values else None


def _natural(value: object) -> bool:
    return type(value) is int and 0 <= value < _WHOLE


def _no_constant(word: str) -> NoReturn:
    raise ValueError(word)


def _object(data: bytes) -> dict[str, object] | None:
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_distinct)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object whose keys are all different: the second of two would hide the first."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError("a key twice")
    return dict(pairs)


# -- the checks ------------------------------------------------------------------------------------------------------


def _requests(result: Verified) -> None:
    """Check 4."""
    declared, found = result.header["requests"], len(result.requests)
    if declared != found:
        result.find(4, "line 1", f"requests: found {declared}, expected {found}, as many as there are")
    first: dict[str, str] = {}
    for request in result.requests:
        if request.name in first:
            result.find(4, request.where, f"found the name of {first[request.name]} again, expected each once")
        first.setdefault(request.name, request.where)
    numbered = [_NUMBERED.fullmatch(request.name) for request in result.requests]
    stems = {match[1] for match in numbered if match is not None}
    if None in numbered and stems:
        result.find(4, "requests", "found names with and without a number, expected all numbered")
    elif len(stems) == 1:
        for expected, (request, match) in enumerate(zip(result.requests, numbered, strict=True)):
            if match is not None and int(match[2]) != expected:
                result.find(4, request.where, f"found the number {int(match[2])}, expected {expected}: one was left "
                            "out, added or moved")  # fmt: skip
                break
    elif stems:
        result.find(4, "requests", one_line(f"found names of {', '.join(sorted(stems))[:200]}, expected one cell's"))


def _accounting(result: Verified, where: str) -> None:
    """Checks 3 and 5."""
    footer, failed = result.footer, result.failed
    stated = footer["failed"] if isinstance(footer["failed"], dict) else {}
    for name, count in stated.items():
        if name not in FAILURES or type(count) is not int or count < 1:
            result.find(
                3, where, f"failed: found {name[:_SHOWN]!r}: {shown(count)}, expected kinds of failure that there are"
            )
    expected: dict[str, object] = {
        "offered": len(result.requests),
        "completed": len(result.requests) - sum(failed.values()),
    }
    for key, value in expected.items():
        if footer[key] != value:
            result.find(5, where, f"{key}: found {footer[key]}, expected {value}, as recorded")
    for name in sorted({*failed, *stated}):
        if failed.get(name) != stated.get(name):
            result.find(
                5, where, f"failed.{name[:_SHOWN]}: found {shown(stated.get(name))}, expected "
                f"{shown(failed.get(name))}, as recorded",
            )  # fmt: skip
    counts = (footer["completed"], *stated.values())
    if footer["offered"] != sum(count for count in counts if type(count) is int):
        result.find(5, where, f"offered: found {footer['offered']}, expected completed + failed")
    last = max((request.end for request in result.requests), default=0)
    if footer["end_ns"] != last:
        result.find(3, where, f"end_ns: found {footer['end_ns']}, expected {last}, the last end of a request")


def _in_time(result: Verified, footer_at: str) -> None:
    """Check 6."""
    limit, end = result.header["timeout_ns"], result.footer["end_ns"]
    for request in result.requests:
        if request.dispatch is None:
            _never_sent(result, request)
            continue
        where = request.where
        chain: list[tuple[str, int | None]] = [
            ("dispatch_ns", request.dispatch),
            ("admission_ns", request.admission),
            ("connected_ns", request.connected),
            ("send_start_ns", request.send_start),
            ("send_end_ns", request.send_end),
        ]
        # What answers may come before all was sent: a request that is too large is refused while it is read.
        received = [("headers_ns", request.headers), ("events", request.first_event)]
        ends = [("end_ns", request.end)]
        _ascending(result, where, chain)
        _ascending(result, where, [*chain[:4], *received, *ends])
        _ascending(result, where, [chain[-1], *ends])
        _ascending(result, where, [("the last event", request.last_event), *ends])
        for before, (key, value) in pairwise(chain):
            if value is not None and before[1] is None:
                result.find(6, where, f"{before[0]}: found null before {key}, expected a time")
        if request.admission is None:
            result.find(6, where, "admission_ns: found null, expected a time of a request that was sent")
        if request.intended is None:
            result.find(6, where, "intended_ns: found null, expected a time of a request that was sent")
        elif request.intended < 0:
            result.find(6, where, f"intended_ns: found {request.intended}, expected none before zero")
        if result.header["mode"] == "open" and request.admission != request.dispatch:
            result.find(
                6,
                where,
                f"admission_ns: found {request.admission}, expected {request.dispatch}, its dispatch",
            )
        if request.send_start is None and (request.status is not None or request.received):
            result.find(6, where, "send_start_ns: found null, expected a time of a request that was answered")
        if request.headers is None and request.received:
            result.find(6, where, "headers_ns: found null, expected a time of a request that was answered")
        if request.failure is None and None in (request.connected, request.send_start, request.send_end):
            result.find(6, where, "found a completed request without a time of its sending, expected all of them")
        if isinstance(end, int) and request.end > end:
            result.find(6, where, f"end_ns: found {request.end}, expected at most {end}, the end of {footer_at}")
        if isinstance(limit, int) and request.end - request.dispatch > limit + _OVERRUN_NS:
            result.find(
                6, where, f"end_ns: found {request.end - request.dispatch} after dispatch, expected at most {limit}, "
                "the time limit",
            )  # fmt: skip


def _never_sent(result: Verified, request: Request) -> None:
    moments = (request.admission, request.connected, request.send_start, request.send_end, request.headers)
    if request.failure != "cancelled" or any(it is not None for it in moments) or request.received or request.end:
        result.find(
            6,
            request.where,
            "dispatch_ns: found null, expected a time, but of a cancelled request without any",
        )


def _ascending(result: Verified, where: str, moments: Sequence[tuple[str, int | None]]) -> None:
    known = [(key, value) for key, value in moments if value is not None]
    for (first, before), (second, after) in pairwise(known):
        if after < before:
            result.find(6, where, f"{second}: found {after}, expected at least {before} of {first}")


def _outcome(result: Verified, request: Request) -> None:
    """Check 8."""
    failure, status, where = request.failure, request.status, request.where
    followed: str | None
    if status is not None and status != 200:
        followed, why = "status", f"status {status}"
    elif status == 200:
        followed, why = request.stream.failure, request.stream.why
    else:
        followed, why = "none that has an answer", "no status"
    if failure is None or failure == "status" or failure in CONTENT:
        if failure != followed:
            result.find(
                8, where, f"found {failure or 'completed'}, expected {followed or 'completed'}"
                f"{f' ({why})' if why else ''}, from its bytes",
            )  # fmt: skip
    elif failure == "refused":
        if request.connected is not None or request.send_start is not None or status is not None or request.received:
            result.find(8, where, "found refused of a request that had a connection, expected none")
    elif failure == "timeout":
        limit = result.header["timeout_ns"]
        if request.dispatch is not None and isinstance(limit, int) and request.end - request.dispatch < limit:
            result.find(
                8, where, f"found timeout {request.end - request.dispatch} ns after dispatch, expected at least {limit}"
            )
    elif failure == "transport" and request.connected is None:
        result.find(8, where, "found transport of a request without a connection, expected refused")


def _cancelled(result: Verified) -> None:
    """Check 8: an interrupt ends everything; nothing is sent after it."""
    sent = [it for it in result.requests if it.dispatch is not None]
    cut = [it.end for it in sent if it.failure == "cancelled"]
    for request in sent if cut else ():
        if request.dispatch is not None and request.dispatch > min(cut):
            result.find(
                8, request.where, f"found dispatch at {request.dispatch}, expected none after {min(cut)}, when another "
                "was cancelled: an interrupt ends the run",
            )  # fmt: skip
    before: Request | None = None
    for request in result.requests:
        if before is not None and request.dispatch is not None:
            result.find(8, before.where, "found a request not sent before one that was, expected the last ones")
            break
        before = request if request.dispatch is None else before


def _concurrency(result: Verified) -> None:
    """Check 9."""
    most = result.concurrency
    if most is None:
        return
    marks: list[tuple[int, int, str]] = []
    for request in result.requests:
        if request.dispatch is not None:
            # At one moment an end makes room for a dispatch.
            marks += [(request.dispatch, 1, request.where), (request.end, -1, request.where)]
    flying = 0
    for _, change, where in sorted(marks):
        flying += change
        if flying > most:
            result.find(9, where, f"found {flying} requests in flight at its dispatch, expected at most {most}")
            return


def _schedule(result: Verified) -> None:
    """Check 10."""
    most = result.concurrency
    sent = [it for it in result.requests if it.dispatch is not None and it.intended is not None]
    freed = sorted(it.end for it in sent)
    last_intended = last_dispatch = None
    for place, request in enumerate(sent):
        intended, dispatch, where = request.intended, request.dispatch, request.where
        if intended is None or dispatch is None:
            continue
        if dispatch < intended:
            result.find(10, where, f"dispatch_ns: found {dispatch}, expected at least {intended}, the intended arrival")
        if last_dispatch is not None and dispatch < last_dispatch:
            result.find(10, where, f"dispatch_ns: found {dispatch}, expected at least {last_dispatch}, the last one")
        if last_intended is not None and intended < last_intended:
            result.find(10, where, f"intended_ns: found {intended}, expected at least {last_intended}, the last one")
        last_intended, last_dispatch = intended, dispatch
        if most is None:
            continue
        expected = 0 if place < most else freed[place - most]
        if intended != expected:
            why = "the first N begin at zero" if place < most else f"when slot {place - most + 1} became free"
            result.find(10, where, f"intended_ns: found {intended}, expected {expected}: {why}")
        allowed = EMPTY_SLOT_NS + (_BURST_NS * most if place < most else 0)
        if dispatch - intended > allowed:
            result.find(
                10, where, f"dispatch_ns: found {dispatch - intended} after a slot became free, expected at most "
                f"{allowed}: fewer than {most} were in flight",
            )  # fmt: skip


def _traced(result: Verified, data: bytes) -> None:
    """Check 11."""
    found = result.header["trace_sha256"]
    if found != digest_of(data):
        result.find(11, "line 1", f"trace_sha256: found {shown(found)}, expected {digest_of(data)}, the trace's")
    lines = trace_lines(data)
    header, asked = lines[0], lines[1:]
    for key in ("cell", "mode", "concurrency", "requests"):
        if result.header[key] != header.get(key):
            result.find(11, "line 1", f"{key}: found {shown(result.header[key])}, expected {shown(header.get(key))}")
    if len(asked) != len(result.requests):
        result.find(11, "requests", f"found {len(result.requests)}, expected {len(asked)}, the trace's")
    for request, line in zip(result.requests, asked, strict=False):
        expected: dict[str, object] = {
            "request": request.name,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
        }
        if line.get("intended_ns") is not None or result.header["mode"] == "open":
            expected["intended_ns"] = request.intended
        for key, value in expected.items():
            if line.get(key) != value:
                result.find(11, request.where, f"{key}: found {shown(value)}, expected {shown(line.get(key))}")


def trace_lines(data: bytes) -> list[dict[str, object]]:
    """The header and the requests of a trace.

    Raises:
        UnreadableError: It is none.
    """
    found: list[dict[str, object]] = []
    for number, line in enumerate(io.BytesIO(data), start=1):
        try:
            value = parse(line)
        except DamagedError as error:
            raise UnreadableError(f"the trace, line {number}: {error}") from None
        if not isinstance(value, dict):
            raise UnreadableError(f"the trace, line {number}: found {kind(value)}, expected a table")
        found.append(value)
    if not found or found[0].get("kind") != "trace":
        raise UnreadableError("the trace: found no header, expected the kind 'trace'")
    return found


# -- figures ---------------------------------------------------------------------------------------------------------


def figures(requests: Sequence[Request], burst: int) -> dict[str, Figure]:
    """Every figure of a recording by name; ``burst`` is N of a closed loop, 0 of an open one."""
    found: dict[str, Figure] = {}
    for prefix, part in (("", requests[burst:]), ("burst_", requests[:burst])):
        for name in QUANTITIES:
            values = sorted(_values(name, part))
            for label, share in QUANTILES.items():
                found[f"{prefix}{name}_{label}"] = Figure(value=nearest(values, share), unit="ns", of=len(values))
    sent = [value for it in requests if (value := it.since(it.send_start, 0)) is not None]
    found["mean_ttft_send"] = Figure(value=Fraction(sum(sent), len(sent)) if sent else None, unit="ns", of=len(sent))
    whole = [it for it in requests if it.failure is None]
    tokens = sum(len(it.stream.tokens) for it in whole)
    begins = [it.intended for it in requests if it.intended is not None]
    span = max((it.end for it in requests), default=0) - min(begins) if begins else 0
    for name, count in (("output_throughput", tokens), ("request_throughput", len(whole))):
        rate = Fraction(count * _BILLION, span) if span else None
        found[name] = Figure(value=rate, unit="1/s", of=len(whole))
    found["goodput_tokens"] = Figure(value=Fraction(tokens), unit="tokens", of=len(whole))
    most = [max(count for _, count in it.stream.arrivals) for it in requests if it.stream.arrivals]
    found["tokens_per_event_max"] = Figure(value=Fraction(max(most)) if most else None, unit="tokens", of=len(most))
    return found


def nearest(ranked: Sequence[Number], share: Fraction) -> Value:
    """The value of the nearest rank in ascending values: the smallest one that ``share`` of them do not exceed."""
    if not ranked:
        return None
    # The smallest rank r with r / n >= share, in integers.
    rank = -(-share.numerator * len(ranked) // share.denominator)
    return ranked[max(rank, 1) - 1]


def _values(name: str, requests: Sequence[Request]) -> Iterator[Number]:
    for request in requests:
        value: Value = None
        if name == "lateness":
            if request.lateness is not None:
                yield Fraction(request.lateness)
            continue
        if name == "tpot":
            if request.failure is None and len(request.stream.tokens) < 2:
                continue
            value = per_token(request)
        else:
            begin = request.send_start if name == "ttft_send" else request.intended
            since = request.since(begin, -1 if name == "e2e" else 0)
            value = None if since is None else Fraction(since)
        yield math.inf if value is None or request.failure is not None else value


def per_token(request: Request) -> Fraction | None:
    """The time per output token after the first event with any, in ns; None below two tokens."""
    arrivals, tokens = request.stream.arrivals, len(request.stream.tokens)
    return Fraction(arrivals[-1][0] - arrivals[0][0], tokens - 1) if tokens > 1 else None


# -- the command -----------------------------------------------------------------------------------------------------


def add_arguments(found: argparse.ArgumentParser) -> None:
    """Declare the arguments, here and for ``kvqual verify``."""
    found.add_argument("records", nargs="+", type=Path, metavar="RECORD", help="a recording, cell-NAME.jsonl")
    found.add_argument("--trace", type=Path, metavar="FILE", help="the trace that the (one) recording must be of")
    found.add_argument("--json", action="store_true", help="print JSON, figures as exact fractions")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, and status 2."""
        raise UnreadableError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = _Parser(prog=PROGRAM, description="Verify recordings of a timed load, and recompute their figures.")
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except UnreadableError as error:
        _say(f"{PROGRAM}: {error}", sys.stderr)
        return 2


def run(arguments: argparse.Namespace) -> int:
    """Verify, print; the exit status."""
    status, shown_as_json = 0, []
    try:
        if arguments.trace is not None and len(arguments.records) != 1:
            raise UnreadableError(f"--trace: found {len(arguments.records)} recordings, expected the one of the trace")
        trace = None
        if arguments.trace is not None:
            with _opened(arguments.trace) as file:
                trace = file.read(DOCUMENT_LIMIT)
    except (OSError, ValueError, UnreadableError) as error:
        _say(f"{PROGRAM}: {_reason(error)}", sys.stderr)
        return 2
    for path in arguments.records:
        try:
            with _opened(path) as file:
                result = verify(_limited(file), trace=trace)
        except Exception as error:
            # Whatever bytes are there, the reader of the output gets a line and not a traceback.
            _say(f"{PROGRAM}: {path}: {_reason(error)}", sys.stderr)
            status = 2
            continue
        status = max(status, 1 if result.findings else 0)
        if arguments.json:
            shown_as_json.append(as_json(result, str(path)))
        else:
            for line in lines(result, str(path)):
                _say(line, sys.stdout)
    if arguments.json:
        document = {"schema": 1, "kind": "verified", "recordings": shown_as_json}
        _say(json.dumps(document, sort_keys=True, ensure_ascii=True, indent=2), sys.stdout)
    return status


def _opened(path: Path) -> BinaryIO:
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise UnreadableError("found no regular file, expected a recording")
    return path.open("rb")


def _limited(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(LINE_LIMIT + 1):
        if len(line) > LINE_LIMIT:
            raise UnreadableError(f"found a line of more than {LINE_LIMIT} bytes, expected a request")
        yield line


def _reason(error: BaseException) -> str:
    if isinstance(error, DamagedError):
        return str(error)
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or type(error).__name__}"
    return f"cannot be read: {type(error).__name__}: {error}"


def lines(result: Verified, name: str) -> list[str]:
    """What the command prints of one recording: its totals, each finding, notes, each figure."""
    failed = result.failed
    kinds = f" ({', '.join(f'{count} {it}' for it, count in failed.items())})" if failed else ""
    load = f"closed loop of {result.concurrency}" if result.concurrency is not None else "open loop"
    verdict = f"{len(result.findings)} findings" if result.findings else "verified"
    offered, lost = len(result.requests), sum(failed.values())
    found = [f"{name}: {verdict}; {load}, {offered} offered, {offered - lost} completed, {lost} failed{kinds}"]
    found += [finding.line() for finding in result.findings]
    found += [f"note {note}" for note in result.notes]
    found += [f"{key} = {_words(figure)}" for key, figure in result.figures.items()]
    return found


def _words(figure: Figure) -> str:
    exact = figure.exact()
    if exact is None:
        return f"none of {figure.of}"
    scale = 1e6 if figure.unit == "ns" else 1.0
    unit = "ms" if figure.unit == "ns" else figure.unit
    near = f" ({float(figure.value) / scale:.6g} {unit})" if isinstance(figure.value, Fraction) else ""
    return f"{exact} {figure.unit}{near} of {figure.of}"


def as_json(result: Verified, name: str) -> dict[str, object]:
    """The result of one recording, JSON-ready; figures as ``N/D``, ``inf`` or null."""
    failed = result.failed
    return {
        "file": name,
        "verified": not result.findings,
        "offered": len(result.requests),
        "completed": len(result.requests) - sum(failed.values()),
        "failed": failed,
        "findings": [{"check": it.check, "where": it.where, "text": it.text} for it in result.findings],
        "notes": list(result.notes),
        "figures": {
            key: {"value": figure.exact(), "unit": figure.unit, "of": figure.of}
            for key, figure in result.figures.items()
        },
    }


def _say(line: str, to: object) -> None:
    encoding = getattr(to, "encoding", None) or "ascii"
    text = line if "\n" in line else one_line(line)
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=to)  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.exit(main())
