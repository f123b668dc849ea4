"""The short way through a recording against the whole one."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import MS, chunk, closed_lines, open_lines, request, to_bytes, usage, whole

from pytest_kvqual.metrics.recording import read_recording
from pytest_kvqual.metrics.requests import figures
from pytest_kvqual.report.gate.latencies import Load, rank, read_load

NAME = "candidate-16-65536/attempt-2/cell-open.jsonl"


def load_of(lines: list[dict[str, Any]]) -> Load:
    """The recording, read the short way."""
    found = read_load(to_bytes(lines), NAME)
    assert found is not None
    return found


def whole_way(lines: list[dict[str, Any]]) -> tuple[list[float], list[float], list[float]]:
    """TTFT, TPOT and lateness in milliseconds, as the metrics define them: failed requests are infinite."""
    ttft, tpot, late = [], [], []
    for line in read_recording(to_bytes(lines), origin="made").requests:
        found = figures(line)
        failed = not found.completed
        ttft.append(math.inf if failed or found.ttft_intended_ns is None else found.ttft_intended_ns / 1e6)
        if failed:
            tpot.append(math.inf)
        elif found.tpot_ns is not None:
            tpot.append(float(found.tpot_ns) / 1e6)
        if found.lateness_ns is not None:
            late.append(found.lateness_ns / 1e6)
    return ttft, tpot, late


@st.composite
def streams(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Requests whose events bring one or more tokens each, with events that bring none between them."""
    found = []
    for place in range(draw(st.integers(1, 5))):
        at, events, total = place * 50 * MS + MS, [], 0
        for _ in range(draw(st.integers(1, 6))):
            at += draw(st.integers(1, 30 * MS))
            count = draw(st.integers(0, 3))
            total += count
            events.append((at, chunk([5] * count)))
        if not total:
            events.append((at + 1, chunk([5])))
            total = 1
        events += [(at + 2, chunk(finish="stop")), (at + 3, usage(total)), (at + 4, b"data: [DONE]\n\n")]
        found.append(request(f"open-{place:04d}", intended=place * 50 * MS, events=events, max_tokens=40))
    return whole(found)


@given(streams())
def test_the_short_way_is_the_whole_way(lines: list[dict[str, Any]]) -> None:
    """Whatever events bring the tokens, TTFT, TPOT and lateness are those of the metrics."""
    found = load_of(lines)
    ttft, tpot, late = whole_way(lines)
    assert list(found.ttft) == pytest.approx(ttft)
    assert list(found.tpot) == pytest.approx(tpot)
    assert list(found.lateness) == pytest.approx(late)


@pytest.mark.parametrize("lines", [open_lines(), closed_lines()], ids=["open", "closed"])
def test_failed_requests_are_infinite(lines: list[dict[str, Any]]) -> None:
    """A request that failed is in the distribution, at infinity; none is dropped."""
    found = load_of(lines)
    ttft, tpot, late = whole_way(lines)
    assert [list(it) for it in (found.ttft, found.tpot, found.lateness)] == [
        pytest.approx(it) for it in (ttft, tpot, late)
    ]
    assert found.failed == sum(math.isinf(it) for it in found.ttft)
    assert found.offered == len(found.ttft)


def test_a_token_id_in_a_text_is_none() -> None:
    """A text that spells the key of token ids brings no token."""
    text = b'data: {"choices":[{"index":0,"text":"\\"token_ids\\":[1"}]}\n\n'
    events = [(MS, text), (9 * MS, chunk([4])), (9 * MS, usage(1)), (9 * MS, b"data: [DONE]\n\n")]
    found = load_of(whole([request("open-0000", intended=0, events=events)]))
    assert found.ttft == (9.0,)
    assert found.tpot == ()


@pytest.mark.parametrize("before", [True, False], ids=["prompt first", "prompt last"])
def test_a_long_prompt_in_the_first_event(before: bool) -> None:
    """An event that repeats a long prompt brings its token, wherever the prompt stands in it."""
    prompt = {"prompt_token_ids": list(range(3000))}
    tokens = {"token_ids": [5]}
    choice = {"index": 0, **(prompt if before else {}), **tokens, **({} if before else prompt)}
    first = b"data: " + json.dumps({"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"
    without = b"data: " + json.dumps({"choices": [{"index": 0, **prompt, "token_ids": []}]}).encode() + b"\n\n"
    events = [(2 * MS, without), (3 * MS, first), (9 * MS, chunk([4], finish="stop")), (9 * MS, usage(2))]
    lines = whole([request("open-0000", intended=0, events=[*events, (9 * MS, b"data: [DONE]\n\n")])])
    found = load_of(lines)
    assert (found.ttft, found.tpot) == ((3.0,), (6.0,))
    assert whole_way(lines)[0] == [3.0]


def test_of_a_closed_loop_the_burst_is_marked() -> None:
    """As many requests as are in flight at first are the burst, which the plots leave out."""
    found = load_of(closed_lines(9, 3))
    assert (found.mode, found.burst, found.offered) == ("closed", 3, 9)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}\n", b"x\ny\nz\n", to_bytes([{"mode": "open"}, {"kind": "request"}, {}]), b"\xff\n\xff\n\xff\n"],
    ids=["empty", "one line", "no JSON", "no keys", "no UTF-8"],
)
def test_no_whole_recording_is_none(data: bytes) -> None:
    """What is no recording is not plotted."""
    assert read_load(data, NAME) is None


@pytest.mark.parametrize("events", [None, "x", [[1]], [["x", "y"]], {}])
def test_events_of_another_form_are_no_whole_recording(events: object) -> None:
    """A line that the metrics refuse leaves its recording out, and does not end the page."""
    lines = whole([request("open-0000", intended=MS)])
    lines[1]["events"] = events
    data = b"".join(json.dumps(line, sort_keys=True, separators=(",", ":")).encode() + b"\n" for line in lines)
    assert read_load(data, NAME) is None


def test_rank_is_the_nearest() -> None:
    """Quantiles are values of the sample, by nearest rank, and of nothing there is none."""
    assert [rank([3, 1, 2, 4], it) for it in (0.5, 0.99, 1.0)] == [2, 4, 4]
    assert math.isnan(rank([], 0.5))


def test_the_bundle_names_the_arm() -> None:
    """The arm is that of the folder, whatever hyphens and prefix its name has."""
    data = to_bytes(whole([request("open-0000", intended=0)]))
    found = read_load(data, "x-native-fa3-16-65536/attempt-1/cell-open.jsonl", prefix="x-")
    assert found is not None
    assert (found.arm, found.cell) == ("native-fa3", "open")


def test_base64_is_what_is_recorded() -> None:
    """The negative control: with its first token taken out of the events the TTFT is another."""
    lines = whole([request("open-0000", intended=0)])
    before = load_of(lines).ttft
    lines[1]["events"][0][1] = base64.b64encode(json.dumps({}).encode()).decode()
    assert load_of(lines).ttft != before
