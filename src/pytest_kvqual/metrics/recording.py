"""Read a recording: JSON lines as ``capture.recorder`` writes them; ``docs/metrics.md`` describes the fields.

History of the format: 1, the first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pytest_kvqual._canonical import canonical_bytes
from pytest_kvqual._decode import Table, describe, parse_json
from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.metrics.requests import LARGEST

SCHEMA: Final = 1
HEADER: Final = (
    "schema", "kind", "cell", "mode", "concurrency", "requests", "trace_sha256", "judgment", "exploratory",
    "zero_monotonic_ns", "zero_wall", "timeout_ns", "loop", "timer", "about",
)  # fmt: skip
REQUEST: Final = (
    "kind", "request", "prompt", "max_tokens", "intended_ns", "dispatch_ns", "admission_ns", "connected_ns",
    "send_start_ns", "send_end_ns", "status", "headers_ns", "headers", "body_sha256", "events", "rest", "end_ns",
    "failure",
)  # fmt: skip
END: Final = ("kind", "offered", "completed", "failed", "end_ns")
FAILURES: Final = (
    "refused", "status", "transport", "timeout", "cancelled", "error-object", "malformed", "incomplete", "no-tokens",
    "count",
)  # fmt: skip
# Of every request that was sent.
_REQUIRED_TIMES: Final = ("intended_ns", "dispatch_ns", "admission_ns", "end_ns")
_TIMES: Final = ("connected_ns", "send_start_ns", "send_end_ns", "headers_ns")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """One load, recorded: the header, one mapping for each offered request in the order of the trace, the footer."""

    header: Mapping[str, object]
    requests: tuple[Mapping[str, object], ...]
    footer: Mapping[str, object]

    @property
    def concurrency(self) -> int | None:
        """The number of requests in flight of a closed loop; None for an open one."""
        value = self.header["concurrency"]
        return value if isinstance(value, int) else None


def read_recording(data: bytes, *, origin: str) -> Recording:
    """The recording in the bytes of a file.

    Raises:
        EvidenceError: No whole recording: a line that is not canonical JSON of a known form, a request named twice, or
            totals that do not balance; names the line.
    """
    if not data.endswith(b"\n"):
        raise EvidenceError(f"{origin}: found no end of the last line, expected a whole recording")
    lines = data[:-1].split(b"\n")
    if len(lines) < 2:
        raise EvidenceError(f"{origin}: found {len(lines)} lines, expected a header, requests and an end")
    documents = [_line(line, f"{origin}, line {number}") for number, line in enumerate(lines, start=1)]
    header = _header(documents[0], f"{origin}, line 1")
    requests = tuple(
        _request(document, f"{origin}, line {number}", str(header["mode"]))
        for number, document in enumerate(documents[1:-1], start=2)
    )
    footer = _footer(documents[-1], f"{origin}, line {len(lines)}")
    names = [request["request"] for request in requests]
    if len(set(map(str, names))) != len(names):
        raise EvidenceError(f"{origin}: found a request named twice, expected each once")
    failed: dict[str, int] = {}
    for request in requests:
        failure = request["failure"]
        if isinstance(failure, Mapping):
            kind = str(failure["kind"])
            failed[kind] = failed.get(kind, 0) + 1
    counted = {"offered": len(requests), "completed": len(requests) - sum(failed.values()), "failed": failed}
    for key, value in counted.items():
        if footer[key] != value:
            raise EvidenceError(f"{origin}: {key}: found {footer[key]!r} at the end, expected {value!r} as recorded")
    last = max((it for it in (request["end_ns"] for request in requests) if isinstance(it, int)), default=0)
    if footer["end_ns"] != last:
        raise EvidenceError(f"{origin}: end_ns: found {footer['end_ns']!r} at the end, expected {last!r} as recorded")
    if header["requests"] != len(requests):
        raise EvidenceError(
            f"{origin}: found {len(requests)} requests, expected {header['requests']} as the header says"
        )
    return Recording(header=header, requests=requests, footer=footer)


def _line(line: bytes, origin: str) -> Mapping[str, object]:
    value = parse_json(line, origin=origin, error=EvidenceError)
    if not isinstance(value, Mapping):
        raise EvidenceError(f"{origin}: found {type(value).__name__}, expected a JSON object")
    try:
        same = canonical_bytes(value) == line
    except EvidenceError as error:
        raise EvidenceError(f"{origin}: found content that has no canonical bytes: {error}") from None
    if not same:
        raise EvidenceError(f"{origin}: found other bytes than the canonical ones of this content")
    return value


def _table(document: Mapping[str, object], origin: str, known: tuple[str, ...], kind: str) -> Table:
    table = Table(document, origin=origin, error=EvidenceError, known=known)
    found = table.string("kind")
    if found != kind:
        table.fail("kind", f"'{found}'", f"'{kind}'")
    missing = [key for key in known if not table.has(key)]
    if missing:
        table.fail(missing[0], "nothing", "a value")
    return table


def _header(document: Mapping[str, object], origin: str) -> Mapping[str, object]:
    table = _table(document, origin, HEADER, "recording")
    schema = table.integer("schema")
    if schema != SCHEMA:
        table.fail("schema", str(schema), str(SCHEMA))
    mode = table.choice("mode", ("open", "closed"))
    if mode == "closed":
        table.integer("concurrency", minimum=1, maximum=LARGEST)
    elif document["concurrency"] is not None:
        table.fail("concurrency", repr(document["concurrency"]), "null in an open loop")
    table.string("cell")
    table.integer("requests", minimum=0, maximum=LARGEST)
    table.integer("timeout_ns", minimum=1, maximum=LARGEST)
    table.integer("zero_monotonic_ns", minimum=-LARGEST, maximum=LARGEST)
    table.boolean("exploratory")
    for key in ("trace_sha256", "judgment"):
        if document[key] is not None:
            table.string(key)
    for key in ("zero_wall", "loop", "timer"):
        table.string(key)
    table.table("about", known=None)
    return document


def _request(document: Mapping[str, object], origin: str, mode: str) -> Mapping[str, object]:
    table = _table(document, origin, REQUEST, "request")
    table.string("request")
    table.string("prompt")
    table.string("body_sha256")
    table.integer("max_tokens", minimum=1, maximum=LARGEST)
    failure = document["failure"]
    if document["dispatch_ns"] is None:
        _never_sent(table, document, mode)
    else:
        for key in (*_REQUIRED_TIMES, *_TIMES):
            if document[key] is not None or key in _REQUIRED_TIMES:
                table.integer(key, minimum=-LARGEST, maximum=LARGEST)
    if document["status"] is not None:
        table.integer("status", minimum=100, maximum=999)
    headers = document["headers"]
    if not isinstance(headers, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(it, str) for it in pair) for pair in headers
    ):
        table.fail("headers", "another value", "a list of [name, value]")
    if not isinstance(document["events"], list):
        table.fail("events", "another value", "a list of [nanoseconds, base64]")
    table.text("rest")
    if failure is None and document["status"] != 200:
        table.fail("failure", f"null with status {document['status']}", "a failure: only status 200 completes")
    if failure is not None:
        inner = Table(failure, origin=origin, error=EvidenceError, known=("kind", "text"), path="failure")
        inner.choice("kind", FAILURES)
        inner.text("text")
    return document


def _never_sent(table: Table, document: Mapping[str, object], mode: str) -> None:
    """An interrupted run did not come to it: it has no time but that of an open loop's trace, and nothing came back."""
    failure = document["failure"]
    if not isinstance(failure, Mapping) or failure.get("kind") != "cancelled":
        table.fail("dispatch_ns", "null", "nanoseconds of a request that is not cancelled")
    if mode == "open":
        table.integer("intended_ns", minimum=0, maximum=LARGEST)
    nothing: dict[str, object] = dict.fromkeys((*_REQUIRED_TIMES, *_TIMES, "status"))
    nothing |= {"headers": [], "events": [], "rest": ""}
    for key, value in nothing.items():
        if document[key] != value and not (key == "intended_ns" and mode == "open"):
            table.fail(key, describe(document[key]), f"{json.dumps(value)} of a request that was never sent")


def _footer(document: Mapping[str, object], origin: str) -> Mapping[str, object]:
    table = _table(document, origin, END, "end")
    table.integer("offered", minimum=0)
    table.integer("completed", minimum=0)
    table.integer("end_ns", minimum=-LARGEST, maximum=LARGEST)
    failed = table.table("failed", known=FAILURES)
    for kind in failed.names():
        failed.integer(kind, minimum=1)
    return document
