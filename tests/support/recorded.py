"""Recordings made by hand: streams of events, lines of requests, whole files."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from pytest_kvqual._canonical import canonical_bytes

DONE = b"data: [DONE]\n\n"
MS = 1_000_000


def event(document: object) -> bytes:
    """One event with this document as its data."""
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def token(*ids: int, finish: str | None = None) -> bytes:
    """An event with output tokens."""
    return event({"choices": [{"index": 0, "text": "x", "token_ids": list(ids), "finish_reason": finish}]})


def usage(completion: object, prompt: object = 3) -> bytes:
    """The event with the usage."""
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


def answer(ids: Sequence[int], *, prompt: int = 3) -> list[bytes]:
    """A complete answer, one token an event."""
    finish = event({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}]})
    return [*(token(one) for one in ids), finish, usage(len(ids), prompt), DONE]


def request(events: Sequence[tuple[int, bytes]], *, name: str = "open-0000", **changes: Any) -> dict[str, Any]:
    """One request's line; times in ns."""
    last = events[-1][0] if events else 0
    return {
        "kind": "request", "request": name, "prompt": "p", "max_tokens": 128, "intended_ns": 0, "dispatch_ns": 0,
        "admission_ns": 0, "connected_ns": 0, "send_start_ns": 0, "send_end_ns": 0, "status": 200, "headers_ns": 0,
        "headers": [["content-type", "text/event-stream"]], "body_sha256": "a" * 64,
        "events": [[at, base64.b64encode(raw).decode()] for at, raw in events], "rest": "", "end_ns": last,
        "failure": None, **changes,
    }  # fmt: skip


def failed(kind: str, *, end_ns: int, name: str, **changes: Any) -> dict[str, Any]:
    """The line of a request that failed without an event."""
    return request([], name=name, end_ns=end_ns, failure={"kind": kind, "text": kind}, **changes)


def never_sent(name: str, *, intended_ns: int | None = 0) -> dict[str, Any]:
    """The line of a request that an interrupted run did not come to; ``intended_ns`` is None in a closed loop."""
    times = ("dispatch_ns", "admission_ns", "connected_ns", "send_start_ns", "send_end_ns", "headers_ns", "end_ns")
    line = failed("cancelled", end_ns=0, name=name, status=None, headers=[], intended_ns=intended_ns)
    return line | dict.fromkeys(times)


def lines(requests: Sequence[dict[str, Any]], **header: Any) -> list[dict[str, Any]]:
    """Header, requests and footer."""
    kinds: dict[str, int] = {}
    for one in requests:
        if one["failure"] is not None:
            kinds[one["failure"]["kind"]] = kinds.get(one["failure"]["kind"], 0) + 1
    head = {
        "schema": 1, "kind": "recording", "cell": "open", "mode": "open", "concurrency": None,
        "requests": len(requests), "trace_sha256": None, "judgment": None, "exploratory": False,
        "zero_monotonic_ns": 5, "zero_wall": "2031-01-31T23:59:59Z", "timeout_ns": 1, "loop": "asyncio",
        "timer": "timerfd", "about": {}, **header,
    }  # fmt: skip
    end = {
        "kind": "end", "offered": len(requests), "completed": len(requests) - sum(kinds.values()), "failed": kinds,
        "end_ns": max((one["end_ns"] or 0 for one in requests), default=0),
    }  # fmt: skip
    return [head, *requests, end]


def encoded(documents: Sequence[dict[str, Any]]) -> bytes:
    """The file."""
    return b"".join(canonical_bytes(one) + b"\n" for one in documents)


def recorded(requests: Sequence[dict[str, Any]], **header: Any) -> bytes:
    """A whole recording."""
    return encoded(lines(requests, **header))
