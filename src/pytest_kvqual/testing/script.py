r"""What the deterministic server does with one request: a script in, a schedule of writes out. Pure.

The script stands in the request's body under ``kvqual_script``; each key may be left out::

    {"first_ms": 20, "gap_ms": 10, "tokens": MAX_TOKENS, "per_event": 1, "quirk": NAME | [NAME, ...] | null}

``first_ms``: from the last byte of the request to the first token. ``gap_ms``: between two token events. ``tokens``:
output tokens (default ``max_tokens``). ``per_event``: tokens of each event, or a list that is cycled through.

The answer has the form of a vLLM completion stream: chunked transfer coding, one chunk an event, the finish reason on
the last token's event, then usage with empty choices, then ``[DONE]``. Token number N has the ID 1000 + N.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple

MILLISECOND: Final = 1_000_000
FIRST_TOKEN_ID: Final = 1000

# What happens to the connection once the bytes of a step are written.
GO_ON, FINISH, CLOSE, RESET, SILENT, CLOSE_IDLE = range(6)

COMPLETED: Final = "completed"

QUIRKS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        # name: (expected outcome, what the server does)
        "error-object": ("error-object", "two token events, then an error object and [DONE], all under status 200"),
        "error-object-at-once": ("error-object", "an error object and [DONE] under status 200, no token"),
        "clean-end": ("incomplete", "all tokens, then the body ends without finish reason and [DONE]"),
        "done-without-token": ("no-tokens", "[DONE] and nothing else"),
        "role-first": (COMPLETED, "an empty chunk with a role at 10 ms, the first token at 50 ms"),
        "invisible-first": (COMPLETED, "the first token has an ID and empty text"),
        "ping": (COMPLETED, "comments before the first token and between tokens"),
        "crlf": (COMPLETED, "lines end with CR LF"),
        "cr": (COMPLETED, "lines end with CR"),
        "no-space": (COMPLETED, "no space after 'data:'"),
        "split-anywhere": (
            COMPLETED,
            "each event in two chunks and several writes: cut at white space, in a character, in CR LF, in a size line",
        ),
        "tokens-per-event": (COMPLETED, "2, 3, ... 8 tokens an event"),
        "events-per-write": (COMPLETED, "three events in each write"),
        "late-usage": (COMPLETED, "usage 60 ms after the last token"),
        "usage-after-done": (COMPLETED, "usage after [DONE]"),
        "no-usage": ("count", "no usage"),
        "wrong-usage": ("count", "usage counts one token too many"),
        "early-eos": (COMPLETED, "finish reason 'stop' after half of the tokens"),
        "dropped": ("transport", "the connection is closed after two token events"),
        "dropped-at-once": ("transport", "the connection is closed before any answer"),
        "reset": ("transport", "the connection is reset after two token events"),
        "status-503": ("status", "status 503 with an error object"),
        "status-400": ("status", "status 400 with an error object"),
        "never-answers": ("timeout", "no byte"),
        "stalls": ("timeout", "no further byte after two token events"),
        "big-event": (COMPLETED, "the second token event has 2 MB, in writes of 64 KiB"),
        "fields": (COMPLETED, "id, event and retry lines in each event, and one event of nothing else"),
        "multi-line-data": (COMPLETED, "each event's data on two data lines"),
        "bom": (COMPLETED, "a byte order mark at the start"),
        "eof-after-done": (COMPLETED, "the connection is closed after [DONE], without the last chunk"),
        "until-eof": (COMPLETED, "no transfer coding: the body ends where the connection does"),
        "huge-prompt": (COMPLETED, "the first token event carries the prompt's token IDs"),
        "slow-headers": (COMPLETED, "the header in four writes, before the first token"),
        "idle-close": (COMPLETED, "the kept-alive connection is closed without a word 20 ms after the answer"),
    }
)
"""The quirks by name."""

_AFTER_EVENTS = 2
_STOPPING = frozenset({"error-object", "dropped", "reset", "stalls"})
# The big event's text is sent as one constant, again and again: copies of 2 MB would keep every other answer waiting.
_BIG_MARK = b"\x00"
_BIG_PART = b"x" * 65_536
_BIG_PARTS = 31
_BIG_NS = 50_000
_ROLE_NS = 10 * MILLISECOND
_LATE_NS = 60 * MILLISECOND
_PIECE_NS = 400_000

HEADER: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
    b"x-request-id: %b\r\n\r\n"
)
_HEADER_UNTIL_EOF = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n"
    b"x-request-id: %b\r\n\r\n"
)
_LAST_CHUNK = b"0\r\n\r\n"
_DONE = b"data: [DONE]\n\n"


class ScriptError(ValueError):
    """A script is malformed; one line."""


class Step(NamedTuple):
    """One write: ``at_ns`` after the request was received, the bytes, the tokens that they complete, what follows."""

    at_ns: int
    data: bytes
    tokens: int
    action: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """One request's script, checked. ``events``: the tokens of each token event that a full answer has."""

    first_ns: int
    gap_ns: int
    events: tuple[int, ...]
    quirks: frozenset[str]
    with_ids: bool
    with_usage: bool

    @property
    def outcome(self) -> str:
        """``completed``, or the kind of failure that a client must report."""
        kinds = {QUIRKS[name][0] for name in self.quirks} - {COMPLETED}
        return min(kinds) if kinds else COMPLETED

    @property
    def sent(self) -> tuple[int, ...]:
        """The tokens of each token event that is sent."""
        if self.quirks & _SILENT:
            return ()
        return self.events[:_AFTER_EVENTS] if self.quirks & _STOPPING else self.events


_SILENT = frozenset(
    {"error-object-at-once", "done-without-token", "dropped-at-once", "never-answers", "status-503", "status-400"}
)


def read_script(body: Mapping[str, object]) -> Script:
    """The script of a request's body.

    Raises:
        ScriptError: An unknown key or quirk, a value out of range, or two quirks that ask for different failures.
    """
    given = body.get("kvqual_script") or {}
    if not isinstance(given, Mapping):
        raise ScriptError("kvqual_script: expected an object")
    unknown = set(given) - {"first_ms", "gap_ms", "tokens", "per_event", "quirk"}
    if unknown:
        raise ScriptError(f"kvqual_script: found the unknown key {min(unknown)!r}")
    named = given.get("quirk") or ()
    quirks = frozenset([named] if isinstance(named, str) else named)
    if quirks - set(QUIRKS):
        raise ScriptError(f"kvqual_script: found the unknown quirk {min(quirks - set(QUIRKS))!r}")
    if len({QUIRKS[name][0] for name in quirks} - {COMPLETED}) > 1:
        raise ScriptError(f"kvqual_script: {', '.join(sorted(quirks))} ask for different failures")
    first_ms = _number(given, "first_ms", 50.0 if "role-first" in quirks else 20.0)
    tokens = given.get("tokens", body.get("max_tokens", 16))
    if not isinstance(tokens, int) or tokens < 1:
        raise ScriptError(f"kvqual_script: found {tokens!r} tokens, expected at least 1")
    if "early-eos" in quirks:
        tokens = max(1, tokens // 2)
    per_event = given.get("per_event", 1)
    sizes = tuple(per_event) if isinstance(per_event, list) else (per_event,)
    if "tokens-per-event" in quirks:
        sizes = tuple(range(2, 9))
    if not sizes or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ScriptError(f"kvqual_script: found per_event {per_event!r}, expected integers of at least 1")
    options = body.get("stream_options")
    return Script(
        first_ns=round(first_ms * MILLISECOND),
        gap_ns=round(_number(given, "gap_ms", 10.0) * MILLISECOND),
        events=event_sizes(tokens, sizes),
        quirks=quirks,
        with_ids=body.get("return_token_ids", True) is not False,
        with_usage=not (isinstance(options, Mapping) and options.get("include_usage") is False),
    )


def _number(given: Mapping[str, object], key: str, default: float) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 3_600_000:
        raise ScriptError(f"kvqual_script: found {key} {value!r}, expected milliseconds of at least 0")
    return float(value)


@lru_cache(maxsize=1024)
def event_sizes(tokens: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """``tokens`` cut into events of ``sizes``, cycled; the last event has what is left."""
    events: list[int] = []
    while tokens > 0:
        size = min(tokens, sizes[len(events) % len(sizes)])
        events.append(size)
        tokens -= size
    return tuple(events)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What an answer says apart from its script. ``prompt``: the JSON list of token IDs that ``huge-prompt`` echoes."""

    request: str
    model: str
    created: int
    prompt_tokens: int
    prompt: bytes = b"null"


def steps(script: Script, answer: Answer) -> Iterator[Step]:
    """The writes of one answer in order of time; the last has an action other than ``GO_ON``."""
    return _plain(script, answer) if not script.quirks else _quirky(script, answer)


def chunk(data: bytes) -> bytes:
    """One chunk of the chunked transfer coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _head(answer: Answer, space: bytes = b" ") -> bytes:
    return b'data:%b{"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":[' % (
        space,
        json.dumps(answer.request).encode(),
        answer.created,
        json.dumps(answer.model).encode(),
    )


@lru_cache(maxsize=8192)
def _choice(first: int, tokens: int, finish: bytes, ids: bool, letter: str = "w") -> bytes:
    """A choice and the rest of its event; the tokens from number ``first`` on. ``letter`` empty: no text."""
    text = "".join(f" {letter}{number}" for number in range(first, first + tokens)) if letter else ""
    listed = ",".join(str(FIRST_TOKEN_ID + number) for number in range(first, first + tokens))
    return (
        b'{"index":0,"text":"%b","logprobs":null,"finish_reason":%b,"stop_reason":null,"token_ids":%b,'
        b'"prompt_token_ids":null}],"usage":null}\n\n'
        % (text.encode(), finish, b"[%b]" % listed.encode() if ids else b"null")
    )


def _usage(head: bytes, answer: Answer, tokens: int) -> bytes:
    return b'%b],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}\n\n' % (
        head,
        answer.prompt_tokens,
        answer.prompt_tokens + tokens,
        tokens,
    )


def _plain(script: Script, answer: Answer) -> Iterator[Step]:
    """Without quirks: made as it is sent, about a microsecond an event."""
    head, ids, gap_ns = _head(answer), script.with_ids, script.gap_ns
    size = len(head)
    yield Step(0, HEADER % answer.request.encode(), 0, GO_ON)
    at_ns, sent, last = script.first_ns, 0, len(script.events) - 1
    for index, tokens in enumerate(script.events):
        rest = _choice(sent, tokens, b'"length"' if index == last else b"null", ids)
        yield Step(at_ns, b"%x\r\n%b%b\r\n" % (size + len(rest), head, rest), tokens, GO_ON)
        sent += tokens
        at_ns += gap_ns
    tail = chunk(_usage(head, answer, sent)) if script.with_usage else b""
    yield Step(at_ns - gap_ns, tail + chunk(_DONE) + _LAST_CHUNK, 0, FINISH)


Event = tuple[int, bytes, int]


def _quirky(script: Script, answer: Answer) -> Iterator[Step]:
    quirks = script.quirks
    for status, reason in ((503, b"Service Unavailable"), (400, b"Bad Request")):
        if f"status-{status}" in quirks:
            body = json.dumps({"error": _error(status)}).encode()
            text = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            yield Step(script.first_ns, text % (status, reason, len(body), body), 0, FINISH)
            return
    if "dropped-at-once" in quirks or "never-answers" in quirks:
        yield Step(script.first_ns, b"", 0, CLOSE if "dropped-at-once" in quirks else SILENT)
        return
    until_eof = "until-eof" in quirks
    yield from _header(script, (_HEADER_UNTIL_EOF if until_eof else HEADER) % answer.request.encode())
    at_ns = 0
    for at_ns, event, tokens in _grouped(script, _events(script, answer)):
        if _BIG_MARK in event:
            yield from _big(at_ns, event, tokens, bytes if until_eof else chunk)
        elif "split-anywhere" in quirks:
            yield from _split(at_ns, event, tokens, framed=not until_eof)
        else:
            yield Step(at_ns, event if until_eof else b"".join(map(chunk, _each(event))), tokens, GO_ON)
    if "stalls" in quirks:
        yield Step(at_ns + script.gap_ns, b"", 0, SILENT)
    elif "reset" in quirks or "dropped" in quirks:
        yield Step(at_ns + script.gap_ns, b"", 0, RESET if "reset" in quirks else CLOSE)
    elif "eof-after-done" in quirks or until_eof:
        yield Step(at_ns, b"", 0, CLOSE)
    else:
        yield Step(at_ns, _LAST_CHUNK, 0, CLOSE_IDLE if "idle-close" in quirks else FINISH)


def _each(event: bytes) -> Sequence[bytes]:
    """The events of one write, each for a chunk of its own where line ends are plain."""
    parts = event.split(b"\n\n")
    return [part + b"\n\n" for part in parts[:-1]] if not parts[-1] else [event]


def _header(script: Script, header: bytes) -> Iterator[Step]:
    if "slow-headers" not in script.quirks:
        yield Step(0, header, 0, GO_ON)
        return
    # Cut inside the status line, inside a name, and inside the CR LF that ends the header.
    cuts = [0, 10, 40, len(header) - 1, len(header)]
    for index in range(4):
        yield Step(script.first_ns * (index + 1) // 6, header[cuts[index] : cuts[index + 1]], 0, GO_ON)


def _grouped(script: Script, events: Iterator[Event]) -> Iterator[Event]:
    """What goes into one write, with the line ends of the script; a write waits for the last of its events."""
    size = 3 if "events-per-write" in script.quirks else 1
    held: list[Event] = []
    for event in events:
        held.append(event)
        if len(held) == size:
            yield _joined(script, held)
            held = []
    if held:
        yield _joined(script, held)


def _joined(script: Script, held: Sequence[Event]) -> Event:
    data = b"".join(event[1] for event in held)
    if "crlf" in script.quirks:
        data = data.replace(b"\n", b"\r\n")
    elif "cr" in script.quirks:
        data = data.replace(b"\n", b"\r")
    return held[-1][0], data, sum(event[2] for event in held)


def _split(at_ns: int, event: bytes, tokens: int, *, framed: bool) -> Iterator[Step]:
    """One write as several, the last at the event's time."""
    # After the colon, after the space, after the first byte of a two-byte character, before the last byte.
    places = {event.find(b":") + 1, event.find(b" ") + 1, event.find(b"\xc3") + 1, len(event) - 1}
    cuts = sorted(place for place in places if 0 < place < len(event))
    wire, marks = event, cuts
    if framed:
        # The character lies in two chunks; the size line of the second is cut between CR and LF.
        middle = next((cut for cut in cuts if event[cut - 1] == 0xC3), len(event) // 2)
        first, second = chunk(event[:middle]), chunk(event[middle:])
        lead = first.index(b"\n") + 1
        second_lead = second.index(b"\n") + 1
        wire = first + second
        marks = [lead + cut for cut in cuts if cut < middle]
        marks += [len(first), len(first) + second_lead - 1]
        marks += [len(first) + second_lead + cut - middle for cut in cuts if cut > middle]
    pieces = [wire[start:stop] for start, stop in zip([0, *marks], [*marks, len(wire)], strict=True)]
    for index, piece in enumerate(pieces):
        last = index == len(pieces) - 1
        early = (len(pieces) - 1 - index) * _PIECE_NS
        yield Step(max(0, at_ns - early), piece, tokens if last else 0, GO_ON)


def _big(at_ns: int, event: bytes, tokens: int, frame: Callable[[bytes], bytes]) -> Iterator[Step]:
    """The event with its big text in writes of 64 KiB, the last at the event's time."""
    before, _, after = event.partition(_BIG_MARK)
    part = frame(_BIG_PART)
    for index, piece in enumerate([frame(before), *[part] * _BIG_PARTS]):
        yield Step(max(0, at_ns - (_BIG_PARTS + 1 - index) * _BIG_NS), piece, 0, GO_ON)
    yield Step(at_ns, frame(after), tokens, GO_ON)


def _error(status: int) -> dict[str, object]:
    return {"object": "error", "message": "planted by the script", "type": "PlantedError", "param": None,
            "code": status}  # fmt: skip


def _events(script: Script, answer: Answer) -> Iterator[Event]:
    """The events in the standard's plainest form, with LF, in order of time."""
    quirks, first_ns, gap_ns = script.quirks, script.first_ns, script.gap_ns
    space = b"" if "no-space" in quirks else b" "
    head = _head(answer, space)
    done = b"data:" + space + b"[DONE]\n\n"
    mark = b"\xef\xbb\xbf" if "bom" in quirks else b""
    if "ping" in quirks:
        yield first_ns // 4, mark + b": ping\n\n", 0
        mark = b""
    if "role-first" in quirks:
        role = b'{"index":0,"delta":{"role":"assistant","content":""},"text":"","token_ids":null}],"usage":null}\n\n'
        yield min(_ROLE_NS, first_ns // 2), mark + head + role, 0
        mark = b""
    if "fields" in quirks:
        yield first_ns // 2, mark + b"event: open\nretry: 3000\n\n", 0
        mark = b""
    if "done-without-token" in quirks or "error-object-at-once" in quirks:
        if "error-object-at-once" in quirks:
            yield first_ns, _error_event(space), 0
        yield first_ns, done, 0
        return
    letter = "é" if "split-anywhere" in quirks else "w"
    finish = b'"stop"' if "early-eos" in quirks else b'"length"'
    at_ns, sent, last = first_ns, 0, len(script.events) - 1
    for index, tokens in enumerate(script.sent):
        end = index == last and "clean-end" not in quirks
        hidden = index == 0 and "invisible-first" in quirks
        rest = _choice(sent, tokens, finish if end else b"null", script.with_ids, "" if hidden else letter)
        if index == 0 and "huge-prompt" in quirks:
            rest = rest.replace(b'"prompt_token_ids":null', b'"prompt_token_ids":%b' % answer.prompt, 1)
        if index == 1 and "big-event" in quirks:
            rest = rest.replace(b'"text":"', b'"text":"' + _BIG_MARK, 1)
        event = mark + head + rest
        mark = b""
        if "multi-line-data" in quirks:
            event = event.replace(b',"choices":', b",\ndata:" + space + b'"choices":', 1)
        if "fields" in quirks:
            event = b"id: %d\nevent: message\nretry: 3000\n" % index + event
        if "ping" in quirks and index:
            yield at_ns - gap_ns // 2, b": ping\n\n", 0
        yield at_ns, event, tokens
        sent += tokens
        at_ns += gap_ns
    if "error-object" in quirks:
        yield at_ns, _error_event(space), 0
        yield at_ns, done, 0
    if quirks & (_STOPPING | {"clean-end"}):
        return
    at_ns -= gap_ns
    usage = _usage(head, answer, sent + ("wrong-usage" in quirks))
    if not script.with_usage or "no-usage" in quirks:
        usage = b""
    if "late-usage" in quirks:
        at_ns += _LATE_NS
    for event in (done, usage) if "usage-after-done" in quirks else (usage, done):
        if event:
            yield at_ns, event, 0


def _error_event(space: bytes) -> bytes:
    return b"data:" + space + json.dumps({"error": _error(500)}).encode() + b"\n\n"
