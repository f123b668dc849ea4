"""What the recorder measures, against servers of raw sockets whose delays and defects are known."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from raw_server import HEAD, LAST, Handler, Peer, answer, chunk, completing, event, events, serving

from pytest_kvqual.capture import recorder
from pytest_kvqual.capture.recorder import Load, Offered, replay
from pytest_kvqual.metrics.recording import Recording, read_recording
from pytest_kvqual.metrics.requests import figures
from pytest_kvqual.metrics.summary import summarise

# Servers and clients in real time: beside other tests they would measure those.
pytestmark = pytest.mark.alone

MS = 1_000_000
Replay = Callable[..., Recording]


@pytest.fixture
def record(tmp_path: Path) -> Replay:
    """Replays so many requests against a handler and reads the recording."""

    def run(handler: Handler, arrivals: list[int] | int, concurrency: int | None = None) -> Recording:
        times = [None] * arrivals if isinstance(arrivals, int) else arrivals
        offered = [
            Offered(request=f"r{index}", prompt="p", max_tokens=9, intended_ns=at, body=b"{}")
            for index, at in enumerate(times)
        ]
        load = Load(mode="closed", concurrency=concurrency) if concurrency else Load(mode="open")
        out = tmp_path / "cell.jsonl"
        with serving(handler) as server:
            replay(server.url, offered, load=load, header={"cell": "c"}, out=out, timeout_s=5.0)
        return read_recording(out.read_bytes(), origin="cell")

    return run


def stream(*parts: bytes) -> Handler:
    """Answers each request with these bytes, each in a chunk of its own, 100 ms apart."""

    def handle(peer: Peer) -> None:
        while peer.request() is not None:
            peer.send(HEAD)
            for part in parts:
                peer.send(chunk(part))
                time.sleep(0.1)
            peer.send(LAST)

    return handle


def slow(seconds: float) -> Handler:
    """Answers after so long."""

    def handle(peer: Peer) -> None:
        while peer.request() is not None:
            time.sleep(seconds)
            peer.send(answer(2))

    return handle


def test_an_open_loop_waits_for_nobody(record: Replay) -> None:
    """Three arrivals at once are in flight together: none waits for another's answer."""
    requests = record(slow(0.15), [0, 0, 0]).requests
    found = [figures(it) for it in requests]
    assert all(it.completed for it in found)
    first = min(it.first_ns or 0 for it in found)
    assert first >= 150 * MS
    assert all(isinstance(it["send_end_ns"], int) and it["send_end_ns"] < first for it in requests)


def test_a_closed_loop_counts_no_wait_for_a_slot(record: Replay) -> None:
    """One in flight: each request's arrival is the end of the one before, and its latency that of the server."""
    found = record(slow(0.05), 3, 1)
    ends = [it["end_ns"] for it in found.requests]
    assert [it["intended_ns"] for it in found.requests] == [0, *ends[:2]]
    assert all((figures(it).ttft_intended_ns or 0) >= 50 * MS for it in found.requests)


def test_a_wall_clock_that_steps_back_changes_no_duration(record: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Durations are of the monotonic clock: the wall clock goes back an hour during the request."""
    begun = time.monotonic()
    monkeypatch.setattr(time, "time", lambda: 1e9 - 3600 * (time.monotonic() - begun > 0.05))
    monkeypatch.setattr(recorder, "wall_utc", lambda: "2001-09-09T01:46:40Z")
    (found,) = record(slow(0.1), [0]).requests
    assert 100 * MS <= (figures(found).e2e_ns or 0) < 1000 * MS


def test_a_long_event_is_one_event(record: Replay) -> None:
    """An event of 200 000 bytes is no failure."""
    long = event({"choices": [{"index": 0, "text": "x" * 200_000, "token_ids": [1]}]})
    (found,) = record(stream(long, *events(1)[1:]), [0]).requests
    assert found["failure"] is None
    assert len(base64.b64decode(found["events"][0][1])) == len(long)  # type: ignore[index]


def test_refused_requests_are_counted(tmp_path: Path) -> None:
    """Nobody listens: all failed, none completed, every percentile infinite."""
    with serving(completing(1)) as server:
        url = server.url
    out = tmp_path / "cell.jsonl"
    offered = [Offered(request=str(it), prompt="p", max_tokens=1, intended_ns=0, body=b"{}") for it in range(3)]
    footer = replay(url, offered, load=Load(mode="open"), header={"cell": "c"}, out=out, timeout_s=2.0)
    assert (footer["offered"], footer["completed"], footer["failed"]) == (3, 0, {"refused": 3})
    summary = summarise(read_recording(out.read_bytes(), origin="cell"))
    assert summary.figures["ttft_intended_p50"].value == float("inf")


def test_a_forced_close_is_a_transport_failure_and_nothing_is_sent_again(tmp_path: Path) -> None:
    """The server closes within the answer: one request there, one failure here."""

    def handle(peer: Peer) -> None:
        if peer.request() is not None:
            peer.send(HEAD, chunk(events(2)[0]))
            peer.reset()

    out = tmp_path / "cell.jsonl"
    offered = [Offered(request="r", prompt="p", max_tokens=2, intended_ns=0, body=b"{}")]
    with serving(handle) as server:
        footer = replay(server.url, offered, load=Load(mode="open"), header={"cell": "c"}, out=out, timeout_s=2.0)
        assert len(server.bodies) == 1
    assert footer["failed"] == {"transport": 1}


def test_a_connection_closed_while_idle_costs_no_request(record: Replay) -> None:
    """The server closes each connection after its answer: the next request gets a new one and completes."""

    def handle(peer: Peer) -> None:
        if peer.request() is not None:
            peer.send(answer(1))

    found = record(handle, [0, 150 * MS, 300 * MS])
    assert [it["failure"] for it in found.requests] == [None] * 3


def test_an_error_within_a_stream_is_a_failure(record: Replay) -> None:
    """Status 200, tokens and [DONE] beside an error, whose text no encoding can hold, are no success."""
    error = b'data: {"error":{"message":"\\ud83d"}}\n\n'
    found = record(stream(*events(2)[:2], error, *events(2)[2:]), [0])
    assert found.footer["failed"] == {"error-object": 1}
    assert json.dumps(found.requests[0]["failure"])


def test_lines_that_end_with_a_carriage_return(record: Replay) -> None:
    """Such a stream is read to its end, each event at the time of the read that had its last byte."""
    parts = [it.replace(b"\n", b"\r") for it in events(3)]
    (line,) = record(stream(*parts), [0]).requests
    found = figures(line)
    assert (found.failure, found.tokens, line["rest"]) == (None, 3, "")
    assert len({at for at, _ in line["events"]}) == len(parts)  # type: ignore[attr-defined]
    assert b"".join(base64.b64decode(raw) for _, raw in line["events"]) == b"".join(parts)  # type: ignore[attr-defined]
