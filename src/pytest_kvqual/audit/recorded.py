"""A recording of a timed load, read again with code of its own, line by line.

:func:`read` takes a file's lines and gives what they say: the header, a :class:`Request` for each request, the footer.
Bytes that are no recording raise :class:`UnreadableError`; what only contradicts the format is a finding, and the
reading goes on. What the lines say together is the matter of :mod:`pytest_kvqual.audit.recomputed`.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Final, NoReturn

from pytest_kvqual.audit.files import DamagedError, canonical, is_digest, one_line, parse
from pytest_kvqual.audit.shapes import kind, shown

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
"""Each check's number and its meaning in a word or two; ``audit/verify.py`` says it in full."""

CONTENT: Final = ("error-object", "malformed", "incomplete", "no-tokens", "count")
"""The kinds of failure that a stream's content decides."""
FAILURES: Final = ("refused", "status", "transport", "timeout", "cancelled", *CONTENT)
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
_DEPTH: Final = 100
"""How deep the containers of an event's document may stand in each other."""
_WALL = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
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
    """One request, as recorded; times in ns after zero. ``failure`` is its kind, None where it completed.

    ``dispatch`` is None of a request that an interrupted run never sent; ``end`` of none else.
    """

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
    end: int | None
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


def read(source: bytes | Iterable[bytes]) -> Verified:
    """The recording in the bytes of a file, or in its lines, each with its end; checks 1, 2 and 7, and 6 in part.

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
        end=_moment(document, "end_ns", where)
        if document["dispatch_ns"] is None
        else _integer(document, "end_ns", where),
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
    return value if isinstance(value, dict) and not _too_deep(data, value) else None


def _too_deep(data: bytes, value: object) -> bool:
    """Whether containers stand in each other more than :data:`_DEPTH` deep; a parser's own limit varies."""
    if data.count(b"{") + data.count(b"[") <= _DEPTH:
        return False
    left: list[tuple[int, object]] = [(1, value)]
    while left:
        depth, one = left.pop()
        inner = list(one.values()) if isinstance(one, dict) else one if isinstance(one, list) else None
        if inner is not None:
            if depth > _DEPTH:
                return True
            left += [(depth + 1, it) for it in inner]
    return False


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object whose keys are all different: the second of two would hide the first."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError("a key twice")
    return dict(pairs)


# -- the trace -------------------------------------------------------------------------------------------------------


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
