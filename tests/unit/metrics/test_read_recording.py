"""Every refusal of a recording is one line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from recorded import answer, encoded, failed, lines, never_sent, recorded, request

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.metrics.recording import END, HEADER, REQUEST, read_recording

GOOD = lines(
    [request([(1, raw) for raw in answer([1])], name="a"), failed("timeout", end_ns=9, name="b", status=None)]
)  # fmt: skip


def test_a_recording_is_read() -> None:
    """Header, requests in order, footer."""
    found = read_recording(encoded(GOOD), origin="r")
    assert [it["request"] for it in found.requests] == ["a", "b"]
    assert (found.footer["offered"], found.concurrency) == (2, None)
    assert read_recording(recorded([], mode="closed", concurrency=3), origin="r").concurrency == 3


@pytest.mark.parametrize("mode", ["open", "closed"])
def test_a_run_that_was_interrupted_is_read(mode: str) -> None:
    """A request that was never sent has no time but the intended arrival of an open loop."""
    intended, most = (7, None) if mode == "open" else (None, 2)
    data = recorded([never_sent("a", intended_ns=intended)], mode=mode, concurrency=most)
    assert read_recording(data, origin="r").requests[0]["intended_ns"] == intended


NEVER: dict[str, tuple[str, object]] = {
    "another failure": ("failure", {"kind": "timeout", "text": ""}),
    "no failure": ("failure", None),
    "no intended arrival": ("intended_ns", None),
    "an intended arrival before zero": ("intended_ns", -1),
    "an admission": ("admission_ns", 0),
    "a connection": ("connected_ns", 0),
    "a send": ("send_start_ns", 0),
    "the end of a send": ("send_end_ns", 0),
    "a header's time": ("headers_ns", 0),
    "an end": ("end_ns", 0),
    "a status": ("status", 200),
    "headers": ("headers", [["a", "b"]]),
    "an event": ("events", [[0, ""]]),
    "bytes": ("rest", "AA=="),
    "a dispatch alone": ("dispatch_ns", 0),
}


@pytest.mark.parametrize("name", NEVER)
def test_a_request_that_was_never_sent_has_nothing_else(name: str) -> None:
    """Each stand-in for what did not happen is refused in one line."""
    key, value = NEVER[name]
    documents = lines([never_sent("a")])
    documents[1][key] = value
    if key == "failure":
        failures = {} if value is None else {"timeout": 1}
        documents[-1].update(failed=failures, completed=1 - len(failures))
    with pytest.raises(EvidenceError, match=r"^r[:,][^\n]+$"):
        read_recording(encoded(documents), origin="r")


def test_a_slot_of_a_closed_loop_was_never_free_for_it() -> None:
    """In a closed loop a request that was never sent has no intended arrival."""
    with pytest.raises(EvidenceError, match=r"'intended_ns': found 0 \(an integer\), expected null"):
        read_recording(recorded([never_sent("a")], mode="closed", concurrency=1), origin="r")


def change(line: int, key: str, value: object) -> Callable[[list[dict[str, Any]]], None]:
    """Sets one value."""

    def apply(documents: list[dict[str, Any]]) -> None:
        documents[line][key] = value

    return apply


def without(line: int, key: str) -> Callable[[list[dict[str, Any]]], object]:
    """Removes one value."""
    return lambda documents: documents[line].pop(key)


REFUSED: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "schema": change(0, "schema", 2),
    "schema of another type": change(0, "schema", True),
    "mode": change(0, "mode", "ajar"),
    "concurrency in an open loop": change(0, "concurrency", 1),
    "closed without concurrency": change(0, "mode", "closed"),
    "requests": change(0, "requests", 3),
    "cell": change(0, "cell", ""),
    "judgment": change(0, "judgment", 1),
    "about": change(0, "about", []),
    "exploratory": change(0, "exploratory", 0),
    "limit": change(0, "timeout_ns", 0),
    "kind of a line": change(1, "kind", "end"),
    "name": change(1, "request", 1),
    "named twice": change(1, "request", "b"),
    "no limit of tokens": change(1, "max_tokens", 0),
    "a boolean as a time": change(1, "send_start_ns", True),
    "a fraction as a time": change(1, "end_ns", 1.5),
    "a time out of range": change(1, "end_ns", 2**63),
    "not dispatched": change(1, "dispatch_ns", None),
    "not dispatched and timed out": change(2, "dispatch_ns", None),
    "status": change(1, "status", "200"),
    "completed without status 200": change(1, "status", 500),
    "headers": change(1, "headers", [["a"]]),
    "events": change(1, "events", {}),
    "rest": change(1, "rest", None),
    "failure": change(2, "failure", "timeout"),
    "kind of a failure": change(2, "failure", {"kind": "other", "text": ""}),
    "failure with more": change(2, "failure", {"kind": "timeout", "text": "", "more": 1}),
    "hidden failure": change(3, "failed", {}),
    "offered": change(3, "offered", 3),
    "completed": change(3, "completed", 2),
    "failed": change(3, "failed", {"timeout": 2}),
    "unknown failure": change(3, "failed", {"other": 1}),
    "end": change(3, "end_ns", None),
    "another end": change(3, "end_ns", 8),
    "a limit of tokens out of range": change(1, "max_tokens", 2**63),
    "a time limit out of range": change(0, "timeout_ns", 2**63),
    "a concurrency out of range": change(0, "concurrency", 2**63),
    "unknown key": change(1, "more", 1),
    "no footer": lambda documents: documents.pop(),
    "request left out": lambda documents: documents.pop(1),
    **{f"header without {key}": without(0, key) for key in HEADER},
    **{f"request without {key}": without(1, key) for key in REQUEST},
    **{f"end without {key}": without(3, key) for key in END},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_recording_is_one_line(name: str) -> None:
    """Each defect is refused in a line that says where it is."""
    documents = copy.deepcopy(GOOD)
    REFUSED[name](documents)
    with pytest.raises(EvidenceError, match=r"^r[:,][^\n]+$"):
        read_recording(encoded(documents), origin="r")


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", encoded(GOOD)[:-1], encoded(GOOD[:1]), b"[]\n[]\n", b"{\n{\n", b"\xff\n\n",
     encoded(GOOD).replace(b'"a"', b' "a"', 1), encoded(GOOD) + b"\n",
     *(encoded(GOOD).replace(b'"about":{}', b'"about":{"x":%s}' % (b"[" * deep + b"]" * deep)) for deep in (600, 900)),
     encoded(GOOD).replace(b'"about":{}', b'"about":{"x":"\\ud800"}')],
    ids=["empty", "blank", "cut", "header alone", "lists", "no JSON", "no UTF-8", "not canonical", "blank line",
         "nested", "nested deeper", "lone surrogate"],
)  # fmt: skip
def test_other_bytes_are_one_line(data: bytes) -> None:
    """A file that is no recording, or half of one."""
    with pytest.raises(EvidenceError, match=r"^r[:,][^\n]+$"):
        read_recording(data, origin="r")
