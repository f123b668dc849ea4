"""Recordings with one damage each, every one rejected under the check that claims it; and good ones, accepted."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import inf
from pathlib import Path
from typing import Any

import pytest
from recordings import (
    DONE,
    MS,
    TIMEOUT_NS,
    Line,
    answer,
    chunk,
    closed_lines,
    failure,
    never_sent,
    open_lines,
    request,
    to_bytes,
    trace_of,
    traced,
    usage,
    whole,
)

from pytest_kvqual.audit.recomputed import verify
from pytest_kvqual.audit.recorded import CHECKS, UnreadableError, read_stream, split
from pytest_kvqual.audit.verify import main
from pytest_kvqual.metrics.requests import content_failure

OPEN, CLOSED, TRACED = "open", "closed", "traced"
UNREADABLE = 0

Damage = Callable[[list[Line]], object]


def _good(name: str) -> list[Line]:
    if name == TRACED:
        return traced(open_lines())[0]
    return open_lines() if name == OPEN else closed_lines()


def raw(line: Line, place: int) -> bytes:
    """The bytes of an event."""
    return base64.b64decode(line["events"][place][1])


def put(line: Line, place: int, data: bytes) -> None:
    """Other bytes for an event."""
    line["events"][place][1] = base64.b64encode(data).decode()


def swap(old: bytes, new: bytes, place: int) -> Callable[[Line], None]:
    """Replaces bytes of an event."""

    def change(line: Line) -> None:
        assert old in raw(line, place)
        put(line, place, raw(line, place).replace(old, new))

    return change


def of(number: int, **changed: object) -> Damage:
    """Sets keys of a line; -1 is the footer, 0 the header."""
    return lambda lines: lines[number].update(changed)


def later(number: int, key: str, by: int) -> Damage:
    """Shifts one time."""

    def change(lines: list[Line]) -> None:
        lines[number][key] += by

    return change


def each(number: int, change: Callable[[Line], object]) -> Damage:
    """Changes one line."""
    return lambda lines: change(lines[number])


def moved_event(lines: list[Line]) -> None:
    """An event of one request is in another, at its time there."""
    ns, text = lines[1]["events"].pop(1)
    lines[2]["events"].insert(1, [lines[2]["events"][0][0], text])
    assert ns > 0


def shifted_event(lines: list[Line]) -> None:
    lines[1]["events"][1][0] = lines[1]["events"][0][0] - 1


def shifted_last_event(lines: list[Line]) -> None:
    lines[1]["events"][-1][0] += 5 * MS


def before_send(lines: list[Line]) -> None:
    lines[1]["events"][0][0] = lines[1]["send_start_ns"] - 1


def dropped_failure(lines: list[Line]) -> None:
    """A failed request is gone, and all totals fit."""
    gone = lines.pop(3)
    lines[0]["requests"] -= 1
    lines[-1]["offered"] -= 1
    del lines[-1]["failed"][gone["failure"]["kind"]]


def completed_instead(number: int) -> Damage:
    """A failure is turned into a completed request, and all totals fit."""

    def change(lines: list[Line]) -> None:
        gone = lines[number]["failure"]["kind"]
        lines[number]["failure"] = None
        lines[-1]["completed"] += 1
        del lines[-1]["failed"][gone]

    return change


def failed_instead(kind: str) -> Damage:
    """A completed request is turned into a failure, and all totals fit."""

    def change(lines: list[Line]) -> None:
        lines[1]["failure"] = failure(kind)
        lines[-1]["completed"] -= 1
        lines[-1]["failed"][kind] = lines[-1]["failed"].get(kind, 0) + 1

    return change


def earlier(number: int, by: int) -> Damage:
    """Every time of a request is earlier."""

    def change(lines: list[Line]) -> None:
        line = lines[number]
        for key, value in line.items():
            if key.endswith("_ns") and value is not None:
                line[key] = value - by
        for event in line["events"]:
            event[0] -= by

    return change


def one_too_many(lines: list[Line]) -> None:
    """A fourth request begins with the first three."""
    line = lines[4]
    by = line["dispatch_ns"] - lines[3]["dispatch_ns"]
    earlier(4, by)(lines)
    line["intended_ns"] = 0


def slower_slot(lines: list[Line]) -> None:
    """A slot stays empty for a tenth of a second, consistently with all that follows."""
    earlier(9, -100 * MS)(lines)
    lines[9]["intended_ns"] -= 100 * MS
    lines[-1]["end_ns"] = lines[9]["end_ns"]


def swapped_names(lines: list[Line]) -> None:
    lines[1]["request"], lines[2]["request"] = lines[2]["request"], lines[1]["request"]


def cut_event(lines: list[Line]) -> None:
    put(lines[1], 1, raw(lines[1], 1)[:-5])


def merged_events(lines: list[Line]) -> None:
    line = lines[1]
    first, second = line["events"][:2]
    put(line, 1, raw(line, 0) + raw(line, 1))
    line["events"] = line["events"][1:]
    assert first[0] < second[0]


def event_in_rest(lines: list[Line]) -> None:
    line = lines[1]
    line["rest"] = line["events"].pop()[1]


def padding(lines: list[Line]) -> None:
    """The unused bits of the last base64 digit are set: the same bytes, other text."""
    line = lines[1]
    put(line, 0, chunk([100], text="x" * ((1 - len(raw(line, 0))) % 3 + 1)))
    event = line["events"][0]
    assert event[1].endswith("==")
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    event[1] = event[1][:-3] + digits[digits.index(event[1][-3]) + 1] + "=="


def extra_token(lines: list[Line]) -> None:
    put(lines[1], 0, chunk([100, 100]))


def too_many_tokens(lines: list[Line]) -> None:
    """One more token than was asked for, and the usage says so."""
    line = lines[1]
    put(line, 3, chunk([103, 104], finish="length"))
    put(line, 4, usage(5))


def second_request(lines: list[Line]) -> None:
    """A line of the recording is there twice, and all totals fit."""
    lines.insert(2, dict(lines[1]))
    lines[0]["requests"] += 1
    lines[-1]["offered"] += 1
    lines[-1]["completed"] += 1


def mixed_names(lines: list[Line]) -> None:
    lines[2]["request"] = "another"


def other_cell(lines: list[Line]) -> None:
    lines[2]["request"] = "closed-0001"


def late_timeout(lines: list[Line]) -> None:
    lines[8]["end_ns"] += TIMEOUT_NS + 2_000 * MS
    lines[-1]["end_ns"] = lines[8]["end_ns"]


def sent_after_an_interrupt(lines: list[Line]) -> None:
    lines[7]["failure"] = failure("cancelled")
    lines[7]["rest"] = ""
    lines[7]["end_ns"] = lines[8]["dispatch_ns"] - 1
    lines[7]["events"] = []
    lines[-1]["failed"] = {"cancelled": 1, "error-object": 1, "status": 1}


def unsent(number: int, **changed: object) -> Damage:
    """A request that was never sent, though others after it were, or that has times all the same."""

    def change(lines: list[Line]) -> None:
        failed = lines[number]["failure"]
        lines[number] = never_sent(lines[number]) | changed
        if failed is None:
            lines[-1]["completed"] -= 1
        else:
            del lines[-1]["failed"][failed["kind"]]
        lines[-1]["failed"]["cancelled"] = 1
        lines[-1]["end_ns"] = max(line["end_ns"] or 0 for line in lines[1:-1])

    return change


def event_under_a_status(lines: list[Line]) -> None:
    lines[5]["events"] = [[lines[5]["headers_ns"], base64.b64encode(b"busy\n\n").decode()]]
    lines[5]["rest"] = ""


def error_removed(lines: list[Line]) -> None:
    """The event that says what went wrong is gone."""
    lines[3]["events"].pop()
    lines[3]["end_ns"] = lines[3]["events"][-1][0]


def json_broken(lines: list[Line]) -> None:
    put(lines[1], 1, b"data: {not json}\n\n")


SEMANTIC: dict[str, tuple[int, str, Damage]] = {
    # 2: header
    "a cell without a name": (2, OPEN, of(0, cell="")),
    "another mode": (2, OPEN, of(0, mode="half-open")),
    "an open loop with a concurrency": (2, OPEN, of(0, concurrency=4)),
    "a closed loop without a concurrency": (2, CLOSED, of(0, concurrency=None)),
    "a closed loop of none": (2, CLOSED, of(0, concurrency=0)),
    "a judgment that is no digest": (2, OPEN, of(0, judgment="granted")),
    "a trace that is no digest": (2, OPEN, of(0, trace_sha256="F" * 64)),
    "a wall time of another form": (2, OPEN, of(0, zero_wall="yesterday")),
    "no time limit": (2, OPEN, of(0, timeout_ns=0)),
    "no event loop": (2, OPEN, of(0, loop="")),
    # 3: footer
    "an end before the last one": (3, OPEN, later(-1, "end_ns", -MS)),
    "an end after the last one": (3, OPEN, later(-1, "end_ns", MS)),
    "a kind of failure that there is not": (3, OPEN, of(-1, failed={"error-object": 1, "status": 1, "lost": 1})),
    "a failure counted zero times": (
        3, OPEN, of(-1, failed={"error-object": 1, "status": 1, "transport": 1, "timeout": 0}),
    ),
    # 4: requests
    "a number of requests in the header": (4, OPEN, of(0, requests=9)),
    "a failed request left out": (4, OPEN, dropped_failure),
    "a request twice": (4, OPEN, second_request),
    "two names exchanged": (4, OPEN, swapped_names),
    "a name without a number": (4, OPEN, mixed_names),
    "a name of another cell": (4, OPEN, other_cell),
    # 5: accounting
    "offered edited": (5, OPEN, of(-1, offered=9)),
    "completed edited": (5, OPEN, of(-1, completed=6)),
    "a failure not counted": (5, OPEN, of(-1, failed={"error-object": 1, "status": 1})),
    "a failure counted as another": (5, OPEN, of(-1, failed={"error-object": 1, "status": 1, "timeout": 1})),
    # 6: times
    "admitted before dispatch": (6, CLOSED, later(1, "admission_ns", -MS)),
    "admitted later in an open loop": (6, OPEN, later(1, "admission_ns", 1)),
    "connected before admission": (6, OPEN, later(1, "connected_ns", -MS)),
    "sent before connected": (6, OPEN, later(1, "send_start_ns", -MS)),
    "sending ended before it began": (6, OPEN, later(1, "send_end_ns", -MS)),
    "headers before sending": (6, OPEN, later(1, "headers_ns", -10 * MS)),
    "headers after the first event": (6, OPEN, later(1, "headers_ns", 30 * MS)),
    "an event before the one before it": (6, OPEN, shifted_event),
    "an event before sending": (6, OPEN, before_send),
    "an event after the end": (6, OPEN, shifted_last_event),
    "an end before the last event": (6, OPEN, later(1, "end_ns", -5 * MS)),
    "an end after that of the recording": (6, OPEN, later(8, "end_ns", 5 * MS)),
    "a time limit not kept": (6, OPEN, late_timeout),
    "intended before zero": (6, OPEN, of(1, intended_ns=-1)),
    "no intended arrival": (6, OPEN, of(1, intended_ns=None)),
    "a status without its time": (6, OPEN, of(1, headers_ns=None)),
    "completed without a connection": (6, OPEN, of(1, connected_ns=None)),
    "completed and never sent": (6, OPEN, of(1, send_start_ns=None, send_end_ns=None)),
    "completed and never dispatched": (6, OPEN, of(1, dispatch_ns=None)),
    "never sent and no failure of an interrupt": (6, OPEN, unsent(8, failure=failure("timeout"))),
    "never sent and without its intended arrival": (6, OPEN, unsent(8, intended_ns=None)),
    "never sent and intended before zero": (6, OPEN, unsent(8, intended_ns=-1)),
    "never sent and intended in a closed loop": (6, CLOSED, unsent(7, intended_ns=0)),
    "never sent and answered": (6, OPEN, unsent(8, rest="AA==")),
    **{
        f"never sent and {key}": (6, OPEN, unsent(8, **{key: 0}))
        for key in ("admission_ns", "connected_ns", "send_start_ns", "send_end_ns", "headers_ns", "end_ns")
    },
    # 7: framing
    "an event cut": (7, OPEN, cut_event),
    "two events in one": (7, OPEN, merged_events),
    "an event in the rest": (7, OPEN, event_in_rest),
    "base64 that is not canonical": (7, OPEN, padding),
    "base64 that is none": (7, OPEN, each(1, lambda line: line["events"][0].__setitem__(1, "&&&&"))),
    "an empty event": (7, OPEN, each(1, lambda line: line["events"][0].__setitem__(1, ""))),
    "bytes after the last event": (7, OPEN, of(1, rest=base64.b64encode(b"\n\ndata: {}\n\n").decode())),
    "an event under a status": (7, OPEN, event_under_a_status),
    # 8: outcome and tokens
    "an event moved between requests": (8, OPEN, moved_event),
    "an error object counted as completed": (8, OPEN, completed_instead(3)),
    "a status counted as completed": (8, OPEN, completed_instead(5)),
    "a drop counted as completed": (8, OPEN, completed_instead(7)),
    "a completed request counted as refused": (8, OPEN, failed_instead("refused")),
    "a completed request counted as timeout": (8, OPEN, failed_instead("timeout")),
    "a completed request counted as status": (8, OPEN, failed_instead("status")),
    "a completed request counted as error-object": (8, OPEN, failed_instead("error-object")),
    "a completed request counted as malformed": (8, OPEN, failed_instead("malformed")),
    "a completed request counted as incomplete": (8, OPEN, failed_instead("incomplete")),
    "a completed request counted as no-tokens": (8, OPEN, failed_instead("no-tokens")),
    "a completed request counted as count": (8, OPEN, failed_instead("count")),
    "a completed request counted as cancelled": (8, OPEN, failed_instead("cancelled")),
    "a status of another kind": (8, OPEN, of(1, status=503, events=[])),
    "usage edited": (8, OPEN, each(1, swap(b'"completion_tokens": 4', b'"completion_tokens": 5', 4))),
    "usage removed": (8, OPEN, each(1, lambda line: line["events"].pop(4))),
    "a token removed": (8, OPEN, each(1, lambda line: line["events"].pop(0))),
    "a token added": (8, OPEN, extra_token),
    "more tokens than were asked for": (8, OPEN, too_many_tokens),
    "a smaller limit": (8, OPEN, of(1, max_tokens=3)),
    "no [DONE]": (8, OPEN, each(1, lambda line: line["events"].pop())),
    "no finish reason": (8, OPEN, each(1, swap(b'"length"', b"null", 3))),
    "the error removed": (8, OPEN, error_removed),
    "data that is no JSON": (8, OPEN, json_broken),
    "token ids that are none": (8, OPEN, each(1, swap(b"[100]", b'"hundred"', 0))),
    "sent after an interrupt": (8, OPEN, sent_after_an_interrupt),
    "not sent before one that was": (8, OPEN, unsent(1)),
    # 9 and 10: concurrency and schedule
    "one request too many in flight": (9, CLOSED, one_too_many),
    "a smaller concurrency in the header": (9, CLOSED, of(0, concurrency=2)),
    "intended after dispatch": (10, OPEN, of(1, intended_ns=60 * MS)),
    "arrivals out of order": (10, OPEN, of(4, intended_ns=99 * MS)),
    "dispatched out of order": (10, OPEN, earlier(3, 60 * MS)),
    "a slot that stays empty": (10, CLOSED, slower_slot),
    "intended later than a slot was free": (10, CLOSED, later(5, "intended_ns", 1)),
    "intended earlier than a slot was free": (10, CLOSED, later(5, "intended_ns", -1)),
    "the first one later than zero": (10, CLOSED, of(2, intended_ns=1)),
    "a larger concurrency in the header": (10, CLOSED, of(0, concurrency=4)),
    # 11: trace
    "another trace's digest": (11, TRACED, of(0, trace_sha256="7" * 64)),
    "no trace's digest": (11, TRACED, of(0, trace_sha256=None)),
    "another cell than the trace's": (11, TRACED, of(0, cell="closed")),
    "another prompt than the trace's": (11, TRACED, of(2, prompt="item-0000")),
    "another intended arrival than the trace's": (11, TRACED, later(2, "intended_ns", -1)),
    "another limit than the trace's": (11, TRACED, of(2, max_tokens=5)),
    "another name than the trace's": (11, TRACED, of(2, request="open-0009")),
}  # fmt: skip


@pytest.mark.parametrize("name", SEMANTIC)
def test_a_damage_is_found_under_its_check(name: str) -> None:
    """Canonical bytes, another content: the check that claims the damage objects."""
    check, base, damage = SEMANTIC[name]
    lines = json.loads(json.dumps(_good(base)))
    trace = traced(open_lines())[1] if base == TRACED else None
    assert verify(to_bytes(lines), trace=trace).findings == []
    damage(lines)
    found = verify(to_bytes(lines), trace=trace)
    assert check in found.checks(), [finding.line() for finding in found.findings]
    assert all("\n" not in finding.line() and "found" in finding.line() for finding in found.findings)


def replace(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """The first occurrence replaced; it must be there."""

    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new, 1)

    return change


def line_moved(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[:-2], lines[-1], lines[-2]])


def without_line(number: int) -> Callable[[bytes], bytes]:
    """One line gone."""

    def change(data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        del lines[number]
        return b"".join(lines)

    return change


BYTES: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "a space": (1, replace(b'"schema":1', b'"schema": 1')),
    "CR LF": (1, lambda data: data.replace(b"\n", b"\r\n")),
    "keys in another order": (1, replace(b'"kind":"end","offered":8', b'"offered":8,"kind":"end"')),
    "an escape": (1, replace(b'"cell":"open"', b'"cell":"\\u006fpen"')),
    "a line gone": (4, without_line(1)),
    "no header": (UNREADABLE, without_line(0)),
    "no footer": (UNREADABLE, without_line(-1)),
    "a line after the end": (UNREADABLE, line_moved),
    "a header again": (UNREADABLE, lambda data: data.splitlines(keepends=True)[0] + data),
    "cut in a line": (UNREADABLE, lambda data: data[: len(data) // 2]),
    "no last line end": (UNREADABLE, lambda data: data[:-1]),
    "empty": (UNREADABLE, lambda data: b""),
    "an empty line": (UNREADABLE, replace(b"\n", b"\n\n")),
    "not UTF-8": (UNREADABLE, replace(b"asyncio", b"async\xff\xfe")),
    "a lone surrogate": (UNREADABLE, replace(b"asyncio", b"\\ud800")),
    "a key twice": (UNREADABLE, replace(b'"schema":1', b'"schema":1,"schema":1')),
    "an unknown key": (UNREADABLE, replace(b'"schema":1', b'"schema":1,"skipped":true')),
    "no key about": (UNREADABLE, replace(b'"about":{},', b"")),
    "a missing key": (UNREADABLE, replace(b'"schema":1,', b"")),
    "another schema": (UNREADABLE, replace(b'"schema":1', b'"schema":2')),
    "NaN": (UNREADABLE, replace(b'"max_tokens":4', b'"max_tokens":NaN')),
    "infinity by overflow": (UNREADABLE, replace(b'"max_tokens":4', b'"max_tokens":1e400')),
    "a number of 5,000 digits": (UNREADABLE, replace(b'"max_tokens":4', b'"max_tokens":' + b"9" * 5000)),
    "a number beyond 64 bits": (UNREADABLE, replace(b'"max_tokens":4', b'"max_tokens":18446744073709551616')),
    "a time as a float": (UNREADABLE, replace(b'"intended_ns":0,', b'"intended_ns":0.5,')),
    "a time as a text": (UNREADABLE, replace(b'"intended_ns":0,', b'"intended_ns":"0",')),
    "a time as a boolean": (UNREADABLE, replace(b'"intended_ns":0,', b'"intended_ns":false,')),
    "deep nesting": (UNREADABLE, replace(b'"about":{}', b'"about":' + b"[" * 100_000 + b"]" * 100_000)),
    "a list for a line": (UNREADABLE, replace(b"\n", b"\n[]\n")),
    "events as a table": (UNREADABLE, replace(b'"events":[]', b'"events":{}')),
    "an event without a time": (UNREADABLE, replace(b'"events":[[', b'"events":[["x"],[')),
    "a header of three": (UNREADABLE, replace(b'["content-length","4"]', b'["content-length","4","5"]')),
    "a failure without a kind": (UNREADABLE, replace(b'"kind":"status",', b"")),
    "a failure of no known kind": (UNREADABLE, replace(b'"kind":"status"', b'"kind":"unlucky"')),
    "a body without its digest": (UNREADABLE, replace(b'"body_sha256":"', b'"body_sha256":"0')),
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_damaged_bytes_are_found_or_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other bytes are a finding where a recording can still be read, else exit status 2 and one line."""
    check, damage = BYTES[name]
    data = to_bytes(open_lines())
    path = tmp_path / "cell-open.jsonl"
    path.write_bytes(damage(data))
    status = main([str(path)])
    printed = capsys.readouterr()
    if check == UNREADABLE:
        assert status == 2
        assert printed.out == ""
        assert printed.err.startswith(f"kvqual verify: {path}: ")
        assert printed.err.count("\n") == 1
        assert "Error" not in printed.err
        with pytest.raises(UnreadableError):
            verify(damage(data))
    else:
        assert status == 1
        assert check in verify(damage(data)).checks()
        assert f"check {check} {CHECKS[check]}: " in printed.out


def test_there_are_enough_damages() -> None:
    """The battery has at least 60 of them, and every check claims some."""
    assert len(SEMANTIC) + len(BYTES) >= 60
    assert {check for check, *_ in [*SEMANTIC.values(), *BYTES.values()]} == {UNREADABLE, *CHECKS}


def test_no_byte_of_a_recording_can_be_changed_into_a_traceback() -> None:
    """Every kind of damage at many places ends in findings or in the one error."""
    data = to_bytes(closed_lines(5))
    lines = []
    for place in range(0, len(data), 17):
        for new in (b"", b"\x00", b'"', b"[", b"9", bytes([data[place] ^ 1])):
            try:
                verify(data[:place] + new + data[place + 1 :])
            except UnreadableError as error:
                lines.append(str(error))
    assert lines
    assert not any("\n" in line for line in lines)


# -- good ones -------------------------------------------------------------------------------------------------------


def _streamed(events: Sequence[tuple[int, bytes]], **changed: object) -> list[Line]:
    return whole([request("open-0000", intended=0, events=events, **changed)])  # type: ignore[arg-type]


def _at(*events: bytes) -> list[tuple[int, bytes]]:
    return [(20 * MS + place * MS, data) for place, data in enumerate(events)]


def _ended(data: bytes, end: bytes) -> bytes:
    return data.replace(b"\n\n", end)


FULL = [chunk([1]), chunk([2, 3]), chunk([4], finish="stop"), usage(4), DONE]


def _interrupted() -> list[Line]:
    lines = open_lines()
    requests = lines[1:-1]
    requests[6].update(failure=failure("cancelled"), end_ns=requests[6]["events"][-1][0], rest="")
    return whole([*requests[:7], *map(never_sent, requests[7:])])


def _interrupted_closed() -> list[Line]:
    requests = closed_lines()[1:-1]
    return whole([*requests[:4], *map(never_sent, requests[4:])], cell="closed", concurrency=3)


def _failing(kind: str) -> list[Line]:
    at = 5 * MS
    alone: dict[str, Any] = {"status": None, "headers_ns": None, "headers": []}
    parts: dict[str, tuple[list[tuple[int, bytes]], dict[str, Any]]] = {
        "refused": ([], alone | {"connected_ns": None, "send_start_ns": None, "send_end_ns": None}),
        "status": ([], {"status": 503, "rest": base64.b64encode(b"busy\n\nvery").decode()}),
        "transport": ([], alone),
        "timeout": (_at(chunk([1])), {"end_ns": TIMEOUT_NS + at}),
        "cancelled": (_at(chunk([1])), {}),
        "error-object": (_at(chunk([1]), b'event: error\ndata: {"message":"no"}\n\n'), {}),
        "malformed": (_at(chunk([1]), b"data: {\xff}\n\n"), {}),
        "incomplete": (_at(chunk([1]), usage(1)), {}),
        "no-tokens": (_at(chunk([], finish="stop"), usage(0), DONE), {}),
        "count": (_at(chunk([1], finish="stop"), DONE), {}),
    }
    events, changed = parts[kind]
    return whole([request("open-0000", intended=0, events=events, failure=failure(kind), **changed)])


GOOD: dict[str, Callable[[], list[Line]]] = {
    "an open loop": open_lines,
    "a closed loop": closed_lines,
    "a closed loop of fewer requests than slots": lambda: closed_lines(2, 4),
    "no request": lambda: whole([]),
    "several tokens an event": lambda: _streamed(_at(*FULL)),
    "CR LF": lambda: _streamed(_at(*[_ended(data, b"\r\n\r\n") for data in FULL])),
    "CR": lambda: _streamed(_at(*[_ended(data, b"\r\r") for data in FULL])),
    "mixed line ends": lambda: _streamed(_at(*[_ended(data, b"\n\r\n") for data in FULL])),
    "late usage": lambda: _streamed([*_at(*FULL[:3]), (90 * MS, usage(4)), (95 * MS, DONE)]),
    "usage with every event": lambda: _streamed(_at(FULL[0], usage(1), FULL[1], usage(3), *FULL[2:])),
    "comments, a BOM and a role": lambda: _streamed(
        _at(b"\xef\xbb\xbf: hello\n\n", chunk([]), b": ping\n\n", *FULL[:2], b"retry: 5\n\n", *FULL[2:])
    ),
    "data without a space, and over two lines": lambda: _streamed(
        _at(*FULL[:3], b'data:{"usage":\ndata:{"completion_tokens":4}}\n\n', b"data:[DONE]\n\n")
    ),
    "several events of one read": lambda: _streamed([(20 * MS, data) for data in FULL]),
    "a line end after the last event": lambda: _streamed(_at(*FULL), rest=base64.b64encode(b"\n").decode()),
    "an answer before all was sent": lambda: _streamed(
        [], status=413, headers_ns=MS, send_end_ns=3 * MS, end_ns=4 * MS, failure=failure("status")
    ),
    "an early end": lambda: whole([request("open-0000", intended=0, events=answer(MS, 2), max_tokens=24)]),
    "an interrupted run": _interrupted,
    "an interrupted closed loop": _interrupted_closed,
    **{f"failed: {kind}": (lambda kind=kind: _failing(kind)) for kind in (  # type: ignore[misc]
        "refused", "status", "transport", "timeout", "cancelled", "error-object", "malformed", "incomplete",
        "no-tokens", "count",
    )},
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_good_recording_is_verified(name: str) -> None:
    """What a recorder may write is no finding."""
    lines = GOOD[name]()
    assert [finding.line() for finding in verify(to_bytes(lines)).findings] == []
    lines, trace = traced(lines)
    assert [finding.line() for finding in verify(to_bytes(lines), trace=trace).findings] == []


STREAMS: dict[str, tuple[str | None, list[bytes]]] = {
    "an error beside the tokens": (
        "error-object", [FULL[0].replace(b'{"choices"', b'{"error":{},"choices"'), *FULL[1:]],
    ),
    "an error of null": (None, [FULL[0].replace(b'{"choices"', b'{"error":null,"choices"'), *FULL[1:]]),
    "an object that is an error": ("error-object", [*FULL[:-1], b'data: {"object":"error"}\n\n', DONE]),
    "an event named error": ("error-object", [*FULL[:-1], b"event: error\ndata: {}\n\n", DONE]),
    "an event named error without JSON": ("error-object", [*FULL[:-1], b"event: error\ndata: gone\n\n", DONE]),
    "[DONE] in an event named error": ("error-object", [*FULL[:-1], b"event: error\ndata: [DONE]\n\n"]),
    "another event's name": (None, [b"event: message\n" + FULL[0], *FULL[1:]]),
    "a finish reason of error": ("error-object", [*FULL[:-1], chunk([], finish="error"), DONE]),
    "a finish reason of abort alone": (
        "incomplete", [chunk([1], finish="abort"), usage(1), DONE],
    ),
    "an empty finish reason alone": ("incomplete", [chunk([1], finish=""), usage(1), DONE]),
    "NaN": ("malformed", [b'data: {"logprob":NaN}\n\n', *FULL]),
    "100 deep": (None, [b'data: {"x":' + b"[" * 99 + b'"[["' + b"]" * 99 + b"}\n\n", *FULL]),
    "101 deep": ("malformed", [b'data: {"x":' + b"[" * 100 + b"]" * 100 + b"}\n\n", *FULL]),
    "an error 101 deep": ("malformed", [b'data: {"error":' + b'{"a":' * 100 + b"0" + b"}" * 101 + b"\n\n", *FULL]),
    "101 lists beside each other": (None, [b'data: {"x":[' + b"[]," * 101 + b"0]}\n\n", *FULL]),
    "not UTF-8": ("malformed", [b"data: \xff{}\n\n", *FULL]),
    "a BOM in a later event": ("malformed", [FULL[0], b"data: \xef\xbb\xbf{}\n\n", *FULL[1:]]),
    "a token id of true": ("malformed", [b'data: {"choices":[{"index":0,"token_ids":[true]}]}\n\n', *FULL]),
    "a token id below zero": ("malformed", [b'data: {"choices":[{"index":0,"token_ids":[-1]}]}\n\n', *FULL]),
    "tokens of a second answer": (None, [b'data: {"choices":[{"index":1,"token_ids":[9]}]}\n\n', *FULL]),
    "token ids of a chat": (
        None,
        [b'data: {"choices":[{"index":0,"delta":{"token_ids":[9]},"finish_reason":"stop"}]}\n\n', usage(1), DONE],
    ),
    "no usage": ("count", [chunk([1], finish="stop"), DONE]),
    "a usage of true": (
        "count", [chunk([1], finish="stop"), b'data: {"usage":{"completion_tokens":true}}\n\n', DONE],
    ),
    "[DONE] without a token": ("no-tokens", [DONE]),
    "nothing": ("incomplete", []),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_what_a_stream_comes_to(name: str) -> None:
    """The kind of failure, or none, that the bytes of a stream have."""
    expected, events = STREAMS[name]
    assert read_stream([(place * MS, raw) for place, raw in enumerate(events)], 4).failure == expected
    # The recorder and the judges decide by other code.
    found = content_failure(events, 4)
    assert (None if found is None else found[0]) == expected


# -- figures and command ---------------------------------------------------------------------------------------------


def test_figures_are_exact() -> None:
    """Percentiles by nearest rank over all offered requests, failures as infinity; rates with drain; none rounded."""
    found = verify(to_bytes(open_lines())).figures
    ttft = 20 * MS + MS // 10 + MS // 20
    assert found["ttft_intended_p50"].value == Fraction(ttft)
    assert found["ttft_intended_max"].value == inf
    assert found["ttft_intended_max"].of == 8
    assert found["ttft_send_p50"].value == Fraction(20 * MS)
    assert found["tpot_p50"].value == Fraction(10 * MS)
    assert found["lateness_max"].value == Fraction(MS // 20)
    assert found["e2e_p50"].value == Fraction(ttft + 30 * MS)
    assert found["burst_e2e_p50"].value is None
    assert found["burst_e2e_p50"].of == 0
    span = 350 * MS + ttft + 30 * MS + MS // 10
    assert found["output_throughput"].value == Fraction(20 * 10**9, span)
    assert found["request_throughput"].value == Fraction(5 * 10**9, span)
    assert found["goodput_tokens"].value == 20
    assert found["tokens_per_event_max"].value == 1


def test_the_burst_of_a_closed_loop_stands_apart() -> None:
    """The first N requests are burst figures, the rest the others."""
    found = verify(to_bytes(closed_lines(9, 3))).figures
    assert (found["ttft_intended_p50"].of, found["burst_ttft_intended_p50"].of) == (6, 3)


def test_several_tokens_an_event_claim_no_gap() -> None:
    """The time per output token is over tokens, not over events."""
    figures = verify(to_bytes(_streamed(_at(*FULL)))).figures
    assert figures["tpot_max"].value == Fraction(2 * MS, 3)
    assert figures["tokens_per_event_max"].value == 2


def test_split_agrees_with_itself_wherever_a_stream_is_cut() -> None:
    """Events and what is left, put together, are the stream again."""
    data = b"".join(_ended(one, end) for one in FULL for end in (b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r"))
    for cut in range(len(data)):
        events, rest = split(data[:cut])
        assert b"".join(events) + rest == data[:cut]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line of totals, a line for each figure; JSON with exact fractions; the trace is held against it."""
    lines, trace = traced(open_lines())
    record, arrivals = tmp_path / "cell-open.jsonl", tmp_path / "trace.jsonl"
    record.write_bytes(to_bytes(lines))
    arrivals.write_bytes(trace)
    assert main([str(record), "--trace", str(arrivals)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == (
        f"{record}: verified; open loop, 8 offered, 5 completed, 3 failed (1 error-object, 1 status, 1 transport)"
    )
    assert "tpot_p50 = 10000000/1 ns (10 ms) of 8" in printed
    assert main([str(record), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recordings"][0]["figures"]["tpot_p50"] == {"value": "10000000/1", "unit": "ns", "of": 8}
    assert document["recordings"][0]["figures"]["tpot_max"]["value"] == "inf"
    arrivals.write_bytes(trace_of(closed_lines()))
    assert main([str(record), "--trace", str(arrivals)]) == 1


@pytest.mark.parametrize("words", [[], ["--nothing"], ["gone.jsonl"], ["."], ["a", "b", "--trace", "c"]])
def test_what_cannot_be_used_is_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Usage, a missing file and a folder: exit status 2 and one line."""
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_it_runs_on_a_bare_interpreter(tmp_path: Path) -> None:
    """``python -m pytest_kvqual.audit.verify`` needs nothing but the source."""
    record = tmp_path / "cell-open.jsonl"
    record.write_bytes(to_bytes(open_lines()))
    source = Path(__file__).resolve().parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-S", "-B", "-m", "pytest_kvqual.audit.verify", str(record)],
        capture_output=True, text=True, check=False, timeout=60, cwd=source, env={"PATH": ""},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
