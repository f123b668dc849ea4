"""Recordings made by hand, line by line: nothing of the recorder or of its readers is used here.

Times are nanoseconds after zero; :data:`MS` is a millisecond. A recording is a list of JSON-ready lines, header first
and footer last, that a test may change before :func:`to_bytes` writes it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

MS: Final = 1_000_000
TIMEOUT_NS: Final = 2_000 * MS
PLAN: Final = "9" * 64
DONE: Final = b"data: [DONE]\n\n"
Line = dict[str, Any]
Event = tuple[int, bytes]


def canonical(value: object) -> bytes:
    """A line as it must be written, without its end."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def to_bytes(lines: Iterable[object]) -> bytes:
    """The file of these lines."""
    return b"".join(canonical(line) + b"\n" for line in lines)


def to_lines(data: bytes) -> list[Line]:
    """The lines of a file."""
    return [json.loads(line) for line in data.splitlines()]


def chunk(ids: Sequence[int] = (), *, finish: str | None = None, text: str = "x", end: bytes = b"\n\n") -> bytes:
    """An event with output token ids."""
    choice: dict[str, object] = {"index": 0, "text": text, "finish_reason": finish, "token_ids": list(ids)}
    return b"data: " + json.dumps({"choices": [choice]}, separators=(",", ":")).encode() + end


def usage(completion: int, prompt: int = 7, *, end: bytes = b"\n\n") -> bytes:
    """The event that counts tokens."""
    counts = {"completion_tokens": completion, "prompt_tokens": prompt, "total_tokens": completion + prompt}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + end


def answer(sent: int, tokens: int, *, first: int = 20 * MS, gap: int = 10 * MS, base: int = 100) -> list[Event]:
    """A whole stream of single-token events, its usage after the last token, then ``[DONE]``."""
    events = [
        (sent + first + gap * place, chunk([base + place], finish="length" if place == tokens - 1 else None))
        for place in range(tokens)
    ]
    last = events[-1][0]
    return [*events, (last, usage(tokens)), (last + MS // 10, DONE)]


def request(
    name: str,
    *,
    intended: int,
    events: Sequence[Event] | None = None,
    dispatch: int | None = None,
    prompt: str = "",
    max_tokens: int = 4,
    **changed: object,
) -> Line:
    """One request, completed unless ``changed`` says otherwise; every moment follows from its dispatch."""
    at = intended + MS // 20 if dispatch is None else dispatch
    sent = at + MS // 10
    stream = answer(sent, max_tokens) if events is None else list(events)
    line: Line = {
        "kind": "request",
        "request": name,
        "prompt": prompt or f"item-{name.rpartition('-')[2]}",
        "max_tokens": max_tokens,
        "intended_ns": intended,
        "dispatch_ns": at,
        "admission_ns": at,
        "connected_ns": at + MS // 50,
        "send_start_ns": sent,
        "send_end_ns": sent + MS // 50,
        "status": 200,
        "headers_ns": sent + 5 * MS,
        "headers": [["content-type", "text/event-stream"]],
        "body_sha256": hashlib.sha256(name.encode()).hexdigest(),
        "events": [[ns, base64.b64encode(raw).decode()] for ns, raw in stream],
        "rest": "",
        "end_ns": stream[-1][0] if stream else sent + 6 * MS,
        "failure": None,
    }
    return line | changed


def failure(kind: str, text: str = "what was found") -> dict[str, str]:
    """The failure of a request."""
    return {"kind": kind, "text": text}


def never_sent(line: Line) -> Line:
    """The request as a run records it that was interrupted before it came to it."""
    mode = {} if line["request"].startswith("open") else {"intended_ns": None}
    times = ("dispatch_ns", "admission_ns", "connected_ns", "send_start_ns", "send_end_ns", "end_ns")
    return {**line, **without_answer("cancelled"), **dict.fromkeys(times), "rest": "", **mode}


def without_answer(kind: str) -> dict[str, object]:
    """What a request that got no answer lacks."""
    return {"status": None, "headers_ns": None, "headers": [], "events": [], "failure": failure(kind)}


def whole(
    requests: Sequence[Line],
    *,
    cell: str = "open",
    concurrency: int | None = None,
    trace: bytes | None = None,
    judgment: str | None = None,
    about: dict[str, object] | None = None,
    exploratory: bool = False,
) -> list[Line]:
    """Header, requests, and the footer that counts them."""
    failed: dict[str, int] = {}
    for line in requests:
        if line["failure"] is not None:
            failed[line["failure"]["kind"]] = failed.get(line["failure"]["kind"], 0) + 1
    header = {
        "schema": 1,
        "kind": "recording",
        "cell": cell,
        "mode": "open" if concurrency is None else "closed",
        "concurrency": concurrency,
        "requests": len(requests),
        "trace_sha256": None if trace is None else hashlib.sha256(trace).hexdigest(),
        "judgment": judgment,
        "exploratory": exploratory,
        "zero_monotonic_ns": 1_234_567_890_123,
        "zero_wall": "2031-01-31T23:59:59Z",
        "timeout_ns": TIMEOUT_NS,
        "loop": "asyncio",
        "timer": "timerfd",
        "about": {} if about is None else about,
    }
    footer = {
        "kind": "end",
        "offered": len(requests),
        "completed": len(requests) - sum(failed.values()),
        "failed": failed,
        "end_ns": max((line["end_ns"] or 0 for line in requests), default=0),
    }
    return [header, *requests, footer]


def open_lines() -> list[Line]:
    """An open loop of eight requests, 50 ms apart; five completed."""
    at = [50 * MS * place for place in range(8)]
    found = [request(f"open-{place:04d}", intended=ns) for place, ns in enumerate(at)]
    broken = [*answer(at[2] + MS, 2)[:1], (at[2] + 40 * MS, b'data: {"error":{"message":"out of memory"}}\n\n')]
    found[2] = request("open-0002", intended=at[2], events=broken, failure=failure("error-object"))
    found[4] = request(
        "open-0004", intended=at[4], events=[], status=503, rest=base64.b64encode(b"busy").decode(),
        headers=[["content-length", "4"]], failure=failure("status"),
    )  # fmt: skip
    found[6] = request(
        "open-0006", intended=at[6], events=answer(at[6] + MS, 4)[:2], failure=failure("transport"),
        rest=base64.b64encode(b'data: {"cho').decode(),
    )  # fmt: skip
    return whole(found)


def closed_lines(count: int = 9, slots: int = 3) -> list[Line]:
    """A closed loop: each request as soon as a slot is free; answers of different lengths."""
    free = [0] * slots
    found = []
    for place in range(count):
        intended = free.pop(0)
        line = request(f"closed-{place:04d}", intended=intended, max_tokens=2 + place % 3)
        free = sorted([*free, line["end_ns"]])
        found.append(line)
    return whole(found, cell="closed", concurrency=slots)


def trace_of(lines: Sequence[Line]) -> bytes:
    """The trace that a recording is of."""
    header = lines[0]
    head = {
        "schema": 1,
        "kind": "trace",
        "cell": header["cell"],
        "mode": header["mode"],
        "arrivals": None if header["mode"] == "closed" else "constant",
        "rate": None if header["mode"] == "closed" else 20.0,
        "seed": None,
        "generator": "closed loop" if header["mode"] == "closed" else "i / rate",
        "concurrency": header["concurrency"],
        "panel_sha256": "8" * 64,
        "requests": len(lines) - 2,
    }
    asked = [
        {
            "request": line["request"],
            "intended_ns": None if header["mode"] == "closed" else line["intended_ns"],
            "prompt": line["prompt"],
            "max_tokens": line["max_tokens"],
        }
        for line in lines[1:-1]
    ]
    return to_bytes([head, *asked])


def traced(lines: Sequence[Line]) -> tuple[list[Line], bytes]:
    """A recording that names its trace, and the trace."""
    trace = trace_of(lines)
    return [{**lines[0], "trace_sha256": hashlib.sha256(trace).hexdigest()}, *lines[1:]], trace
