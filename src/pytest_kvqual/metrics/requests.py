"""The figures of one request, from its line of a recording. ``docs/metrics.md`` defines each.

All times are integers of nanoseconds after schedule zero, on the client's monotonic clock.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Final, NoReturn

from pytest_kvqual._decode import describe
from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.metrics.sse import data_of, fields_of

DONE = b"[DONE]"
LARGEST: Final = 2**63 - 1
"""The largest integer of a recording, whether a time, a token id or a count."""
DEPTH: Final = 100
"""How deep lists and objects of an event's document may stand in each other."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _each_key_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


# NaN and Infinity are no JSON; of a key that comes twice the second would hide the first, an error say.
_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_each_key_once)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFigures:
    """One request.

    ``token_ids`` are the output's, invisible ones included; ``per_event`` the number of tokens of each event that
    brought any, ``gaps_ns`` the times between successive single-token events: an event of several tokens has no gaps of
    its own. ``first_ns`` and ``last_ns`` are the times of the first and the last event with tokens. Of a failed request
    the figures are what arrived. ``ttft_…``, ``tpot_ns`` and ``e2e_ns`` are None where there is none, ``lateness_ns``
    where the request was cancelled before it was dispatched.
    """

    request: str
    completed: bool
    failure: str | None
    token_ids: tuple[int, ...]
    prompt_tokens: int | None
    first_ns: int | None
    last_ns: int | None
    lateness_ns: int | None
    ttft_intended_ns: int | None
    ttft_send_ns: int | None
    tpot_ns: Fraction | None
    e2e_ns: int | None
    per_event: tuple[int, ...]
    gaps_ns: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """The number of output tokens."""
        return len(self.token_ids)


@dataclass(slots=True)
class _Stream:
    """What the data of a stream's events say, taken together."""

    token_ids: list[int]
    arrivals: list[tuple[int, int]]  # (time, tokens) of each event with tokens
    finished: bool = False
    done: bool = False
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    error: str | None = None
    malformed: str | None = None


def _read(events: Iterable[tuple[int, bytes]]) -> _Stream:
    stream = _Stream(token_ids=[], arrivals=[])
    first = True
    for at, raw in events:
        data = data_of(raw, first=first)
        named_error = b"event" in raw and [it.strip() for it in fields_of(raw, b"event", first=first)][-1:] == [
            b"error"
        ]
        first = False
        if data is None or not data.strip():
            continue
        if data.strip() == DONE and not named_error:
            stream.done = True
            continue
        try:
            # One whole event: no character is split.
            document = _DECODER.decode(data.decode("utf-8"))
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict) or _too_deep(data, document):
            if named_error:
                stream.error = stream.error or f"found the event 'error' with {data[:60]!r}"
            else:
                stream.malformed = stream.malformed or f"found {data[:60]!r}, expected a JSON object"
            continue
        error = document.get("error")
        if error is not None:
            stream.error = stream.error or _one_line(error)
        elif named_error or document.get("object") == "error":
            stream.error = stream.error or _one_line(document)
        # Beside an error: what arrived, arrived.
        _usage(stream, document.get("usage"))
        before = len(stream.arrivals)
        _choice(stream, document.get("choices"), at)
        if stream.done and len(stream.arrivals) > before:
            stream.malformed = stream.malformed or "found output tokens after [DONE], expected none"
    return stream


def _too_deep(data: bytes, document: object) -> bool:
    """Whether its lists and objects stand in each other more than :data:`DEPTH` deep.

    The parser's own limit is what the interpreter's stack has left, which is not the same wherever it is called.
    """
    if data.count(b"[") + data.count(b"{") <= DEPTH:
        return False
    level = [document]
    for _ in range(DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, dict | list)
        ]
    return bool(level)


def _usage(stream: _Stream, usage: object) -> None:
    if not isinstance(usage, Mapping):
        return
    completion, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
    # A server may send the running count with each event: the last one stands. Reasoning is part of it already.
    if type(completion) is int and 0 <= completion <= LARGEST:
        stream.completion_tokens = completion
    if type(prompt) is int and 0 <= prompt <= LARGEST:
        stream.prompt_tokens = prompt


def _choice(stream: _Stream, choices: object, at: int) -> None:
    arrived = 0
    for choice in choices if isinstance(choices, list) else ():
        # One answer is asked for. Tokens of another are not counted, and the usage, which has them, then disagrees.
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            continue
        ids = choice.get("token_ids")
        delta = choice.get("delta")
        if ids is None and isinstance(delta, dict):
            ids = delta.get("token_ids")
        if isinstance(ids, list) and all(type(it) is int and 0 <= it <= LARGEST for it in ids):
            stream.token_ids += ids
            arrived += len(ids)
        elif ids is not None:
            stream.malformed = stream.malformed or f"found the token_ids {describe(ids)}, expected a list of integers"
        reason = choice.get("finish_reason")
        if reason == "error":
            stream.error = stream.error or "found the finish reason 'error'"
        elif isinstance(reason, str) and reason and reason != "abort":
            # A server that gave up has not finished.
            stream.finished = True
    if arrived:
        stream.arrivals.append((at, arrived))


def _one_line(value: object) -> str:
    try:
        # ASCII: a lone surrogate that a server escaped could not be written again.
        return json.dumps(value)[:300]
    except RecursionError:
        return "an error nested beyond the parser's limit"


def content_failure(events: Iterable[bytes], max_tokens: int) -> tuple[str, str] | None:
    """Why a stream that ended cleanly under status 200 is no complete answer: (kind, text), or None.

    ``error-object``: an error among the events. ``malformed``: data that is neither a JSON object nor ``[DONE]``,
    or tokens after it.
    ``incomplete``: the end came without a finish reason and ``[DONE]``. ``no-tokens``: no output token. ``count``: the
    token ids are not as many as the usage says, or more than ``max_tokens``; or there is no usage.

    Args:
        events: The raw bytes of each event.
        max_tokens: The output limit that was sent.
    """
    return _failure(_read((0, raw) for raw in events), max_tokens)


def _failure(stream: _Stream, max_tokens: int) -> tuple[str, str] | None:
    found = len(stream.token_ids)
    if stream.error is not None:
        return "error-object", stream.error
    if stream.malformed is not None:
        return "malformed", stream.malformed
    if not (stream.finished and stream.done):
        missing = [name for name, seen in (("finish reason", stream.finished), ("[DONE]", stream.done)) if not seen]
        # A server that says [DONE] after no token at all has answered nothing, whatever it left out besides.
        kind = "no-tokens" if stream.done and not found else "incomplete"
        return kind, f"found {found} tokens and an end without {' and '.join(missing)}, expected both"
    if not found:
        return "no-tokens", "found no output token, expected at least one"
    if stream.completion_tokens is None:
        return "count", f"found {found} token ids and no usage, expected one"
    if stream.completion_tokens != found:
        return "count", f"found {found} token ids, expected {stream.completion_tokens} as the usage says"
    if found > max_tokens:
        return "count", f"found {found} tokens, expected at most {max_tokens}"
    return None


def events_of(record: Mapping[str, object], *, origin: str) -> list[tuple[int, bytes]]:
    """The time and raw bytes of each event of a recorded request.

    Raises:
        EvidenceError: They are not a list of [integer, base64].
    """
    value = record.get("events")
    found: list[tuple[int, bytes]] = []
    for pair in value if isinstance(value, list) else [None]:
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or type(pair[0]) is not int
            or not isinstance(pair[1], str)
            or abs(pair[0]) > LARGEST
        ):
            raise EvidenceError(f"{origin}: events: found {pair!r:.60}, expected [nanoseconds, base64]")
        try:
            found.append((pair[0], b64decode(pair[1], validate=True)))
        except ValueError:
            raise EvidenceError(f"{origin}: events: found {pair[1]!r:.60}, expected base64") from None
    return found


def figures(record: Mapping[str, object]) -> RequestFigures:
    """The figures of one line of a recording that :func:`~pytest_kvqual.metrics.recording.read_recording` accepted.

    Raises:
        EvidenceError: Its events cannot be decoded.
    """
    name = str(record["request"])
    stream = _read(events_of(record, origin=name))
    failure = record["failure"]
    kind = str(failure["kind"]) if isinstance(failure, Mapping) else None
    intended, dispatch, sent = (_time(record, key) for key in ("intended_ns", "dispatch_ns", "send_start_ns"))
    first = stream.arrivals[0][0] if stream.arrivals else None
    last = stream.arrivals[-1][0] if stream.arrivals else None
    tokens = len(stream.token_ids)
    gaps = [
        after - before
        for (before, one), (after, other) in zip(stream.arrivals, stream.arrivals[1:], strict=False)
        if one == other == 1
    ]
    return RequestFigures(
        request=name,
        completed=kind is None,
        failure=kind,
        token_ids=tuple(stream.token_ids),
        prompt_tokens=stream.prompt_tokens,
        first_ns=first,
        last_ns=last,
        lateness_ns=None if dispatch is None or intended is None else dispatch - intended,
        ttft_intended_ns=None if first is None or intended is None else first - intended,
        ttft_send_ns=None if first is None or sent is None else first - sent,
        tpot_ns=Fraction(last - first, tokens - 1) if first is not None and last is not None and tokens > 1 else None,
        e2e_ns=None if last is None or intended is None else last - intended,
        per_event=tuple(count for _, count in stream.arrivals),
        gaps_ns=tuple(gaps),
    )


def disorder(record: Mapping[str, object]) -> str | None:
    """Where the moments of a recorded request do not follow each other, in words; None where they do.

    Intended, dispatch, admission, connected, send start, send end; and send start, header, each event, end. A moment
    that was not reached is passed over, as is a request that was never dispatched.

    Raises:
        EvidenceError: Its events cannot be decoded.
    """
    if record["dispatch_ns"] is None:
        return None
    sending = ("intended_ns", "dispatch_ns", "admission_ns", "connected_ns", "send_start_ns", "send_end_ns")
    events = [(f"events[{place}]", at) for place, (at, _) in enumerate(events_of(record, origin="events"))]
    end = ("end_ns", _time(record, "end_ns"))
    # What answers may come before all was sent.
    chains = (
        [*((key, _time(record, key)) for key in sending), end],
        [("send_start_ns", _time(record, "send_start_ns")), ("headers_ns", _time(record, "headers_ns")), *events, end],
    )
    for chain in chains:
        known = [(key, at) for key, at in chain if at is not None]
        for (first, before), (second, after) in pairwise(known):
            if after < before:
                return f"found {second} at {after}, expected at least {before} of {first}"
    return None


def _time(record: Mapping[str, object], key: str) -> int | None:
    value = record[key]
    if value is not None and type(value) is not int:
        raise EvidenceError(f"{record.get('request')}: {key}: found {value!r}, expected nanoseconds")
    return value
