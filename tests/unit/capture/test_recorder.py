"""The recorder: what it records of servers that answer, fail, hang and lie, and that it loses nothing."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from raw_server import HEAD, LAST, Handler, Peer, RawServer, answer, chunk, completing, event, events, serving

from pytest_kvqual._canonical import canonical_bytes, sha256_bytes
from pytest_kvqual.audit.recomputed import verify
from pytest_kvqual.capture import _schedule, _transport, recorder
from pytest_kvqual.capture._spool import Spool, SpoolReader
from pytest_kvqual.capture.recorder import Load, Offered, Seams, convert, replay
from pytest_kvqual.errors import CaptureError, EvidenceError
from pytest_kvqual.metrics.recording import read_recording

# Servers and clients in real time: beside other tests they would measure those.
pytestmark = pytest.mark.alone

Loop = Literal["uvloop", "asyncio"]
MS = 1_000_000


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> str:
    """Either kind of event loop."""
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    return str(request.param)


def trace(number: int, *, every_ns: int | None = 0, body: bytes = b"{}") -> list[Offered]:
    return [
        Offered(
            request=f"r-{index:04}",
            prompt=f"p-{index}",
            max_tokens=4,
            intended_ns=None if every_ns is None else index * every_ns,
            body=body,
        )
        for index in range(number)
    ]


def record(
    url: str, offered: list[Offered], out: Path, *, concurrency: int | None = None, timeout_s: float = 5, **options: Any
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Header, requests and footer of a run's recording; the run's invariants hold."""
    load = Load(mode="open" if concurrency is None else "closed", concurrency=concurrency)
    footer = replay(url, offered, load=load, header={"cell": "c"}, out=out, timeout_s=timeout_s, **options)
    head, lines, end = read(out)
    assert end == footer
    return head, lines, end


def read(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """A recording, with what holds of every one."""
    # What others read it with takes it, an interrupted run's too.
    read_recording(out.read_bytes(), origin=out.name)
    head, *lines, end = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert head["requests"] == end["offered"] == len(lines)
    assert end["completed"] + sum(end["failed"].values()) == end["offered"]
    assert end["completed"] == sum(line["failure"] is None for line in lines)
    assert not out.with_suffix(".spool").exists()
    for line in lines:
        stamps = [line[name] for name in ("intended_ns", "dispatch_ns", "admission_ns", "connected_ns")]
        stamps += [line["send_start_ns"], line["send_end_ns"]]
        stamps = [stamp for stamp in stamps if stamp is not None]
        assert stamps == sorted(stamps)
        times = [at for at, _ in line["events"]]
        assert times == sorted(times)
        assert all(at <= line["end_ns"] for at in times)
    return head, lines, end


def body_of(line: dict[str, Any]) -> bytes:
    return b"".join(base64.b64decode(part) for part in (*(data for _, data in line["events"]), line["rest"]))


def failure_of(
    handler: Handler, out: Path, *, timeout_s: float = 5, loop: Loop = "asyncio"
) -> tuple[str, dict[str, Any]]:
    """The kind of failure of one request to a server, and its line."""
    with serving(handler) as server:
        _, (line,), _ = record(server.url, trace(1), out, timeout_s=timeout_s, loop=loop)
    return (line["failure"] or {"kind": ""})["kind"], line


def replying(*parts: bytes, then: Callable[[Peer], None] | None = None) -> Handler:
    def handle(peer: Peer) -> None:
        if peer.request() is not None:
            peer.send(*parts)
            if then is not None:
                then(peer)

    return handle


def hang(peer: Peer) -> None:
    peer.server.stopped.wait(10)


class TestWhatIsRecorded:
    """A healthy server."""

    def test_open_loop(self, tmp_path: Path, loop: Loop) -> None:
        """Each request is sent at its arrival and never before, and its events come back raw with their times."""
        with serving(completing(3)) as server:
            head, lines, end = record(
                server.url, trace(20, every_ns=5 * MS, body=b'{"a":1}'), tmp_path / "r.jsonl", loop=loop
            )
        assert end["completed"] == 20
        assert [line["request"] for line in lines] == [f"r-{index:04}" for index in range(20)]
        assert [line["intended_ns"] for line in lines] == [index * 5 * MS for index in range(20)]
        assert all(line["dispatch_ns"] >= line["intended_ns"] for line in lines)
        for line in lines:
            assert body_of(line) == b"".join(events(3))
            assert [base64.b64decode(data) for _, data in line["events"]] == events(3)
            assert (line["status"], line["rest"]) == (200, "")
            assert line["send_end_ns"] <= line["headers_ns"] <= line["events"][0][0]
            assert ["Content-Type", "text/event-stream"] in line["headers"]
            assert line["body_sha256"] == sha256_bytes(b'{"a":1}')
        assert head["kind"] == "recording"
        assert head["loop"].startswith(loop)
        assert (head["mode"], head["concurrency"], head["timeout_ns"]) == ("open", None, 5_000 * MS)
        assert end["end_ns"] == max(line["end_ns"] for line in lines)

    def test_closed_loop(self, tmp_path: Path, loop: Loop) -> None:
        """N are in flight and never more, and each next one is due when the slot became free."""
        lock, state = threading.Lock(), {"now": 0, "most": 0}

        def handle(peer: Peer) -> None:
            while peer.request() is not None:
                with lock:
                    state["now"] += 1
                    state["most"] = max(state["most"], state["now"])
                time.sleep(0.01)
                with lock:
                    state["now"] -= 1
                peer.send(answer(1))

        with serving(handle) as server:
            _, lines, end = record(server.url, trace(20, every_ns=None), tmp_path / "r.jsonl", concurrency=4, loop=loop)
            assert server.connections == 4
        assert (end["completed"], state["most"]) == (20, 4)
        assert [line["intended_ns"] for line in lines[:4]] == [0, 0, 0, 0]
        ends = sorted(line["end_ns"] for line in lines)
        assert [line["intended_ns"] for line in lines[4:]] == ends[:16]
        marks = sorted([(line["dispatch_ns"], 1) for line in lines] + [(line["end_ns"], -1) for line in lines])
        flying = most = 0
        for _, step in marks:
            flying += step
            most = max(most, flying)
        assert most == 4

    def test_fewer_requests_than_slots(self, tmp_path: Path) -> None:
        """A closed loop of more slots than requests sends them all at once."""
        with serving(completing(1)) as server:
            assert record(server.url, trace(3, every_ns=None), tmp_path / "r.jsonl", concurrency=9)[2]["completed"] == 3

    def test_open_loop_has_no_cap(self, tmp_path: Path, loop: Loop) -> None:
        """500 requests due in the same millisecond are all at the server before one is answered."""
        gate = threading.Barrier(500)

        def handle(peer: Peer) -> None:
            if peer.request() is not None:
                gate.wait(20)
                peer.send(answer(1))

        with serving(handle) as server:
            _, lines, end = record(server.url, trace(500), tmp_path / "r.jsonl", timeout_s=30, loop=loop)
        assert end["completed"] == 500
        assert max(line["send_start_ns"] for line in lines) < min(line["end_ns"] for line in lines)

    def test_events_split_anywhere(self, tmp_path: Path, loop: Loop) -> None:
        """An event's time is that of the read which completed it, wherever chunks and reads cut it."""
        first = event({"choices": [{"index": 0, "text": "0\r\n\r\n é", "token_ids": [1], "finish_reason": None}]})

        def handle(peer: Peer) -> None:
            peer.request()
            wire = chunk(first[:20]) + chunk(first[20:])
            peer.send(HEAD + wire[:25])
            time.sleep(0.03)
            peer.send(wire[25:])
            peer.send(*(chunk(one) for one in events(1)[1:]), LAST)

        kind, line = failure_of(handle, tmp_path / "r.jsonl", loop=loop)
        assert kind == ""
        assert base64.b64decode(line["events"][0][1]) == first
        assert line["events"][0][0] - line["headers_ns"] > 20 * MS

    def test_a_two_megabyte_event(self, tmp_path: Path, loop: Loop) -> None:
        """An event of 2 MB is one event."""
        big = event({"choices": [{"index": 0, "text": "x" * 2_000_000, "token_ids": [1], "finish_reason": None}]})
        kind, line = failure_of(
            replying(HEAD, chunk(big), *map(chunk, events(1)[1:]), LAST), tmp_path / "r.jsonl", loop=loop
        )
        assert kind == ""
        assert base64.b64decode(line["events"][0][1]) == big

    def test_a_large_prompt(self, tmp_path: Path, loop: Loop) -> None:
        """A body that no socket buffer takes in one piece arrives whole."""
        body = json.dumps({"prompt": list(range(600_000))}).encode()

        def handle(peer: Peer) -> None:
            time.sleep(0.05)
            peer.request()
            peer.send(answer(1))

        with serving(handle) as server:
            _, _, end = record(server.url, trace(1, body=body), tmp_path / "r.jsonl", loop=loop)
            assert end["completed"] == 1
            assert server.bodies == [body]

    def test_a_body_that_ends_with_the_connection(self, tmp_path: Path, loop: Loop) -> None:
        """Without length and chunks the answer is complete when the server closes."""
        assert failure_of(replying(b"HTTP/1.1 200 OK\r\n\r\n", *events(2)), tmp_path / "r.jsonl", loop=loop)[0] == ""

    def test_the_caller_s_header(self, tmp_path: Path) -> None:
        """What the caller states stands in the header."""
        stated = {"cell": "x", "trace_sha256": "ab", "judgment": "cd", "exploratory": True, "about": {"arm": "a"}}
        with serving(completing(1)) as server:
            replay(server.url, trace(1), load=Load(mode="open"), header=stated, out=tmp_path / "r.jsonl", timeout_s=5)
        head = read(tmp_path / "r.jsonl")[0]
        assert {key: head[key] for key in stated} == stated

    def test_progress(self, tmp_path: Path) -> None:
        """Progress ends with all of all."""
        seen: list[tuple[int, int]] = []
        with serving(completing(1)) as server:
            record(server.url, trace(5), tmp_path / "r.jsonl", progress=lambda done, of: seen.append((done, of)))
        assert seen[-1] == (5, 5)

    def test_collection_is_off_during_the_run_only(self, tmp_path: Path) -> None:
        """No garbage is collected while requests are in flight; afterwards it is as it was."""
        seen: list[bool] = []
        with serving(completing(1)) as server:
            record(server.url, trace(2), tmp_path / "r.jsonl", progress=lambda done, of: seen.append(gc.isenabled()))
        assert seen
        assert not any(seen)
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0


class TestFailures:
    """A server that does not answer as it should: one typed failure, nothing sent twice."""

    @pytest.mark.parametrize(
        ("handler", "kind", "text"),
        [
            (replying(), "transport", "closed the connection before any answer"),
            (replying(HEAD, chunk(events(1)[0])), "transport", "before the end of the body"),
            (replying(HEAD + b"50\r\nabc"), "transport", "before 77 more bytes of the body"),
            (replying(b"\x16\x03\x01 nonsense"), "transport", "malformed HTTP"),
            (replying(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000), "transport", "header of more than 65536 bytes"),
            (replying(HEAD, b"-5\r\nhello\r\n"), "transport", "expected a chunk's size"),
            (replying(HEAD, chunk(events(1)[0]), then=lambda peer: peer.reset()), "transport", ""),
            (replying(then=lambda peer: peer.reset()), "transport", ""),
            (replying(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"), "status", "503"),
            (replying(b"HTTP/1.1 307 Go\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n"), "status", "307"),
        ],
    )
    def test_kinds(self, tmp_path: Path, loop: Loop, handler: Handler, kind: str, text: str) -> None:
        """Each is the failure that it is."""
        found, line = failure_of(handler, tmp_path / "r.jsonl", loop=loop)
        assert found == kind
        assert text in line["failure"]["text"]
        assert "\n" not in line["failure"]["text"]

    def test_what_came_before_a_drop_is_kept(self, tmp_path: Path, loop: Loop) -> None:
        """Events and the rest of a dropped answer are in its line."""
        cut = events(2)[0] + b"data: {"
        _, line = failure_of(replying(HEAD, chunk(cut)), tmp_path / "r.jsonl", loop=loop)
        assert body_of(line) == cut
        assert len(line["events"]) == 1

    def test_a_close_after_done_without_the_last_chunk(self, tmp_path: Path, loop: Loop) -> None:
        """A stream that says itself that it is whole is complete, though the server sent no last chunk."""
        whole = [chunk(one) for one in events(2)]
        assert failure_of(replying(HEAD, *whole), tmp_path / "a.jsonl", loop=loop)[0] == ""
        kind = failure_of(replying(HEAD, *whole, then=lambda peer: peer.reset()), tmp_path / "b.jsonl", loop=loop)[0]
        assert kind == "transport"
        assert failure_of(replying(HEAD, *whole, b"1"), tmp_path / "c.jsonl", loop=loop)[0] == "transport"

    def test_the_body_of_a_status_is_the_rest(self, tmp_path: Path) -> None:
        """Another status than 200 has no events, whatever its body looks like."""
        body = event({"error": "x"})
        reply = b"HTTP/1.1 500 X\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        _, line = failure_of(replying(reply), tmp_path / "r.jsonl")
        assert (line["events"], base64.b64decode(line["rest"])) == ([], body)

    @pytest.mark.parametrize(
        "parts", [(), (HEAD,), (HEAD, *map(chunk, events(1)))], ids=["nothing", "header", "no end"]
    )
    def test_timeout(self, tmp_path: Path, loop: Loop, parts: tuple[bytes, ...]) -> None:
        """A server that accepts and does not end its answer costs one time limit."""
        kind, line = failure_of(replying(*parts, then=hang), tmp_path / "r.jsonl", timeout_s=0.2, loop=loop)
        assert kind == "timeout"
        assert 190 * MS < line["end_ns"] - line["dispatch_ns"] < 600 * MS

    def test_an_endless_answer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Loop) -> None:
        """A server that never stops sending is a failure at the largest response, and not the end of the memory."""
        monkeypatch.setattr(_transport, "RESPONSE_LIMIT", 1 << 20)

        def handle(peer: Peer) -> None:
            if peer.request() is not None:
                peer.send(HEAD)
                while not peer.server.stopped.is_set():
                    peer.send(chunk(b": ping\n\n" * 8_000))

        kind, line = failure_of(handle, tmp_path / "r.jsonl", loop=loop)
        assert kind == "transport"
        assert line["failure"]["text"] == "found a response of more than 1048576 bytes"
        assert 1_000_000 < len(body_of(line)) < 3_000_000

    def test_refused(self, tmp_path: Path, loop: Loop) -> None:
        """Nobody listens: each request is a failure, none raises, in both modes."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        _, lines, end = record(url, trace(3), tmp_path / "a.jsonl", loop=loop)
        assert end["failed"] == {"refused": 3}
        assert lines[0]["connected_ns"] is None
        _, _, end = record(url, trace(300, every_ns=None), tmp_path / "b.jsonl", concurrency=2, loop=loop)
        assert end["failed"] == {"refused": 300}

    def test_a_server_that_dies(self, tmp_path: Path, loop: Loop) -> None:
        """What was in flight and what came later are failures; what had ended stays complete."""
        server: RawServer

        def handle(peer: Peer) -> None:
            while peer.request() is not None:
                if len(peer.server.bodies) > 5:
                    peer.server.close()
                    return
                peer.send(answer(1))

        with serving(handle) as server:
            _, lines, end = record(server.url, trace(10, every_ns=20 * MS), tmp_path / "r.jsonl", loop=loop)
        assert end["completed"] == 5
        assert {line["failure"]["kind"] for line in lines[5:]} <= {"transport", "refused"}
        assert len(server.bodies) == 6

    def test_connections_closed_while_idle(self, tmp_path: Path, loop: Loop) -> None:
        """A server that closes kept connections early costs nothing, and nothing is sent twice."""

        def handle(peer: Peer) -> None:
            peer.socket.settimeout(0.03)
            while peer.request() is not None:
                peer.send(answer(1))

        with serving(handle) as server:
            _, _, end = record(server.url, trace(6, every_ns=60 * MS), tmp_path / "r.jsonl", loop=loop)
            assert end["completed"] == 6
            assert len(server.bodies) == 6

    def test_one_failure_does_not_touch_another(self, tmp_path: Path, loop: Loop) -> None:
        """Every third answer breaks off; the others are complete."""

        def handle(peer: Peer) -> None:
            while (body := peer.request()) is not None:
                if json.loads(body)["n"] % 3 == 0:
                    peer.send(HEAD, chunk(events(1)[0]))
                    return
                peer.send(answer(2))

        offered = [
            Offered(request=str(n), prompt="p", max_tokens=2, intended_ns=n * MS, body=b'{"n":%d}' % n)
            for n in range(30)
        ]
        with serving(handle) as server:
            _, lines, _ = record(server.url, offered, tmp_path / "r.jsonl", loop=loop)
        assert [line["failure"] is None for line in lines] == [n % 3 != 0 for n in range(30)]


class TestRefusals:
    """What is refused before anything is sent, in one line."""

    @pytest.mark.parametrize(
        ("offered", "load", "header", "text"),
        [
            ([], Load(mode="open"), {"cell": "c"}, "no requests"),
            (trace(2) + trace(1), Load(mode="open"), {"cell": "c"}, "two requests of one name"),
            (trace(2, every_ns=None), Load(mode="open"), {"cell": "c"}, "intended arrival None"),
            (trace(2), Load(mode="closed", concurrency=1), {"cell": "c"}, "in a closed loop"),
            (list(reversed(trace(2, every_ns=1))), Load(mode="open"), {"cell": "c"}, "before the one above"),
            (trace(2, every_ns=-1), Load(mode="open"), {"cell": "c"}, "before zero"),
            (trace(1, every_ns=None), Load(mode="closed"), {"cell": "c"}, "at least 1"),
            (trace(1), Load(mode="open", concurrency=3), {"cell": "c"}, "expected no limit"),
            (trace(1), Load(mode="open"), {}, "expected 'cell'"),
            (trace(1), Load(mode="open"), {"cell": "c", "mode": "x"}, "header keys"),
        ],
    )
    def test_input(
        self, tmp_path: Path, offered: list[Offered], load: Load, header: dict[str, object], text: str
    ) -> None:
        """A trace, load or header that is not as described."""
        with pytest.raises(CaptureError) as caught:
            replay("http://127.0.0.1:1", offered, load=load, header=header, out=tmp_path / "r.jsonl", timeout_s=1)
        assert text in str(caught.value)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("url", ["https://127.0.0.1:1", "127.0.0.1:1", "http://"])
    def test_url(self, tmp_path: Path, url: str) -> None:
        """Only http://HOST:PORT."""
        with pytest.raises(CaptureError, match="expected http://HOST:PORT"):
            record(url, trace(1), tmp_path / "r.jsonl")

    @pytest.mark.parametrize("name", ["r.jsonl", "r.spool"])
    def test_nothing_is_overwritten(self, tmp_path: Path, name: str) -> None:
        """A recording or a spool of that name stays as it is."""
        (tmp_path / name).write_bytes(b"mine")
        with pytest.raises(EvidenceError, match="no file of that name"):
            record("http://127.0.0.1:1", trace(1), tmp_path / "r.jsonl")
        assert (tmp_path / name).read_bytes() == b"mine"

    def test_descriptors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A closed loop that needs more connections than the hard limit allows is refused; a soft limit is raised."""
        limits: list[tuple[int, int]] = [(256, 3_000)]
        monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
        monkeypatch.setattr(resource, "setrlimit", lambda which, both: limits.append(both))
        with pytest.raises(CaptureError, match="hard limit of 3000 open files"):
            record("http://127.0.0.1:1", trace(4_000, every_ns=None), tmp_path / "r.jsonl", concurrency=4_000)
        recorder._allow_connections(Load(mode="closed", concurrency=2_000), 2_000)
        assert limits[-1] == (2_256, 3_000)
        recorder._allow_connections(Load(mode="open"), 100_000)
        assert limits[-1] == (3_000, 3_000)


INTERRUPTED = """
import sys
from pathlib import Path
from pytest_kvqual.capture.recorder import Load, Offered, replay
offered = [Offered(request=str(n), prompt="p", max_tokens=1, intended_ns=n * 20_000_000, body=b"{}")
           for n in range(500)]
try:
    replay(sys.argv[1], offered, load=Load(mode="open"), header={"cell": "c"}, out=Path(sys.argv[2]), timeout_s=30,
           loop=sys.argv[3])
except KeyboardInterrupt:
    print("interrupted")
"""


class TestInterrupts:
    """A run that is ended from outside loses nothing that was recorded."""

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signals(self, tmp_path: Path, loop: Loop, number: int) -> None:
        """The recording is complete, what had not ended is cancelled, and KeyboardInterrupt is raised."""
        count = 0

        def handle(peer: Peer) -> None:
            while peer.request() is not None:
                if len(peer.server.bodies) % 2:
                    peer.send(answer(1))
                else:
                    peer.send(HEAD)
                    hang(peer)

        out = tmp_path / "r.jsonl"
        with serving(handle) as server:
            process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(INTERRUPTED), server.url, str(out), loop],
                stdout=subprocess.PIPE,
                text=True,
            )
            while len(server.bodies) < 8 and process.poll() is None and count < 1_000:
                time.sleep(0.01)
                count += 1
            process.send_signal(number)
            printed, _ = process.communicate(timeout=20)
        assert (process.returncode, printed) == (0, "interrupted\n")
        _, lines, end = read(out)
        assert end["offered"] == 500
        assert end["completed"] >= 3
        assert set(end["failed"]) == {"cancelled"}
        flying = [line for line in lines if line["failure"] and line["headers_ns"] is not None]
        assert len(flying) >= 3
        never = [line for line in lines if line["dispatch_ns"] is None]
        assert lines[-len(never) :] == never
        for line in never:
            unknown = {key for key, value in line.items() if value is None}
            assert unknown == {"status", *(key for key in line if key.endswith("_ns"))} - {"intended_ns"}
            assert line["failure"] == {"kind": "cancelled", "text": "not sent: the run was interrupted"}
        assert verify(out.read_bytes()).findings == []

    def test_an_error_of_the_caller(self, tmp_path: Path, loop: Loop) -> None:
        """What a callback raises ends the run, is raised again, and the recording is complete."""

        def progress(done: int, of: int) -> None:
            raise ZeroDivisionError

        with serving(completing(1)) as server, pytest.raises(ZeroDivisionError):
            record(server.url, trace(50, every_ns=20 * MS), tmp_path / "r.jsonl", progress=progress, loop=loop)
        assert read(tmp_path / "r.jsonl")[2]["completed"] == 1

    def test_a_closed_loop(self, tmp_path: Path, loop: Loop) -> None:
        """No slot became free for what was never sent: it has no time at all, and the recording verifies."""

        def progress(done: int, of: int) -> None:
            raise ZeroDivisionError

        out = tmp_path / "r.jsonl"
        with serving(completing(1)) as server, pytest.raises(ZeroDivisionError):
            record(server.url, trace(50, every_ns=None), out, concurrency=2, progress=progress, loop=loop)
        _, lines, end = read(out)
        never = [line for line in lines if line["dispatch_ns"] is None]
        assert 45 < len(never) == sum(line["intended_ns"] is None for line in lines)
        assert end["end_ns"] == max(line["end_ns"] for line in lines if line["end_ns"] is not None)
        assert verify(out.read_bytes()).findings == []

    def test_a_killed_process(self, tmp_path: Path, loop: Loop) -> None:
        """SIGKILL leaves a spool that can be converted: what had ended is there, the rest is cancelled."""
        out = tmp_path / "r.jsonl"
        with serving(completing(1)) as server:
            process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(INTERRUPTED), server.url, str(out), loop],
                stdout=subprocess.DEVNULL,
            )
            for _ in range(1_000):
                if len(server.bodies) >= 8 or process.poll() is not None:
                    break
                time.sleep(0.01)
            process.kill()
            process.wait(10)
        spool = out.with_suffix(".spool")
        with spool.open("ab") as file:
            file.write(b"\x10\0\0\0\x01\0\0\0\xff")
        convert(spool, out)
        spool.unlink()
        _, lines, end = read(out)
        assert end["completed"] >= 7
        assert end["failed"] == {"cancelled": 500 - end["completed"]}
        # Of a process that was killed nothing says what was in flight.
        texts = {line["failure"]["text"] for line in lines if line["failure"]}
        assert texts == {"not sent, or in flight when the recorder ended"}


def kept(folder: Path) -> Path:
    """A spool as a killed process leaves it: two requests, of which one had ended."""
    head = {
        "header": {
            "cell": "r", "trace_sha256": None, "judgment": None, "exploratory": False, "about": {}, "mode": "closed",
            "concurrency": 1, "timeout_ns": 5_000 * MS, "loop": "asyncio", "timer": "timerfd",
        },
        "wall": "2031-01-31T23:59:59Z",
        "requests": [
            {"request": it.request, "prompt": it.prompt, "max_tokens": 4, "intended_ns": None, "body_sha256": "a" * 64}
            for it in trace(2, every_ns=None)
        ],
    }  # fmt: skip
    spool = Spool(folder / "kept.spool", head)
    spool.add(-1, {"zero": 10, "wall": "2031-01-31T23:59:59Z"})
    spool.add(0, {}, (10, 11, 12, 13, 14, 20), [15, 20], [HEAD, answer(1)[len(HEAD) :]])
    spool.close()
    return spool.path


class TestDisk:
    """A disk that takes no more."""

    def test_full_during_the_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Loop) -> None:
        """The run ends with one line, and what was kept stays whole in the spool."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        out = tmp_path / "r.jsonl"
        with serving(completing(2)) as server:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
            try:
                with pytest.raises(EvidenceError) as caught:
                    record(server.url, trace(200, every_ns=MS), out, loop=loop)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "cannot write" in str(caught.value)
        assert "\n" not in caught.value.line()
        assert not out.exists()
        convert(out.with_suffix(".spool"), out)
        out.with_suffix(".spool").unlink()
        _, _, end = read(out)
        assert end["completed"] > 20
        assert set(end["failed"]) == {"cancelled"}

    def test_full_during_the_conversion(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The spool stays, half a recording does not, and the conversion can be done again."""
        out, real = tmp_path / "r.jsonl", canonical_bytes
        calls = iter(range(100))

        def full(value: object) -> bytes:
            if next(calls) == 3:
                raise OSError(28, os.strerror(28))
            return real(value)

        monkeypatch.setattr(recorder, "canonical_bytes", full)
        with serving(completing(1)) as server, pytest.raises(EvidenceError, match="No space left"):
            record(server.url, trace(5), out)
        monkeypatch.undo()
        assert not out.exists()
        assert convert(out.with_suffix(".spool"), out)["completed"] == 5

    @pytest.mark.parametrize("taken", [1, 500, 1_500])
    def test_full_at_the_last_byte(self, tmp_path: Path, taken: int) -> None:
        """A disk that is full only when the file is closed leaves no half recording either."""
        spool, out = kept(tmp_path), tmp_path / "r.jsonl"
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (taken, before[1]))
        try:
            with pytest.raises(EvidenceError, match="cannot write") as caught:
                convert(spool, out)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "\n" not in caught.value.line()
        assert not out.exists()
        assert convert(spool, out)["offered"] == 2

    def test_no_folder(self, tmp_path: Path) -> None:
        """A folder that is not there is one line."""
        with pytest.raises(EvidenceError, match="cannot write"):
            record("http://127.0.0.1:1", trace(1), tmp_path / "none" / "r.jsonl")

    def test_a_spool_is_checked(self, tmp_path: Path) -> None:
        """Another file is no spool, and one without a header neither."""
        (tmp_path / "a.spool").write_bytes(b"something else")
        with pytest.raises(EvidenceError, match="no spool"):
            SpoolReader(tmp_path / "a.spool")
        spool = Spool(tmp_path / "b.spool", {"requests": []})
        spool.close()
        data = (tmp_path / "b.spool").read_bytes()
        (tmp_path / "c.spool").write_bytes(data[:-3])
        with pytest.raises(EvidenceError, match="without a header"):
            SpoolReader(tmp_path / "c.spool")

    def test_a_damaged_spool_is_one_line(self, tmp_path: Path) -> None:
        """Whatever byte of a spool was changed, it is converted, or refused in one line, and leaves no recording."""
        spool, out = kept(tmp_path), tmp_path / "r.jsonl"
        data, refusals = spool.read_bytes(), []
        for place in range(len(data)):
            spool.write_bytes(data[:place] + bytes([data[place] ^ 0xA5]) + data[place + 1 :])
            try:
                convert(spool, out)
                out.unlink()
            except EvidenceError as error:
                refusals.append(error.line())
            assert not out.exists()
        assert len(refusals) > len(data) // 4
        assert not any("\n" in line for line in refusals)


class TestSeams:
    """Seeded recorder faults change what the seams say they change, and nothing without them."""

    def test_a_hidden_cap(self, tmp_path: Path) -> None:
        """With a cap, requests wait for others and are dispatched late."""

        def plant(seams: Seams) -> None:
            seams.cap = 1

        def handle(peer: Peer) -> None:
            while peer.request() is not None:
                time.sleep(0.02)
                peer.send(answer(1))

        with serving(handle) as server:
            _, lines, end = record(server.url, trace(4), tmp_path / "r.jsonl", plant=plant)
        assert end["completed"] == 4
        assert lines[3]["dispatch_ns"] >= lines[2]["end_ns"] > 50 * MS

    def test_late_dispatch_and_a_changed_record(self, tmp_path: Path) -> None:
        """A dispatch that is moved is late by that; a record that is changed is written so."""

        def plant(seams: Seams) -> None:
            seams.due = lambda intended: intended + 30 * MS
            seams.record = lambda line: {**line, "prompt": "other"}

        with serving(completing(1)) as server:
            _, (line,), _ = record(server.url, trace(1), tmp_path / "r.jsonl", plant=plant)
        assert line["dispatch_ns"] >= 30 * MS
        assert line["prompt"] == "other"


class TestAlarm:
    """The dispatch timer."""

    def test_the_loop_s_own_timer_is_never_early(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Loop
    ) -> None:
        """Where there is no timerfd the loop's timer is used, named in the header, and no dispatch is early."""

        class NoTimer:
            def __init__(self, *arguments: object) -> None:
                raise OSError("none here")

        monkeypatch.setattr(_schedule, "TimerFd", NoTimer)
        with serving(completing(1)) as server:
            head, lines, _ = record(server.url, trace(30, every_ns=3_333_333), tmp_path / "r.jsonl", loop=loop)
        assert head["timer"] == "call_at"
        assert all(line["dispatch_ns"] >= line["intended_ns"] for line in lines)

    @pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's")
    def test_timerfd(self, tmp_path: Path, loop: Loop) -> None:
        """On Linux the timer is a timerfd; a moment that has passed rings at once, a later setting replaces."""
        made, _ = _schedule.new_loop(loop)
        rung: list[int] = []
        alarm = _schedule.alarm(made, lambda: rung.append(time.monotonic_ns()))
        try:
            assert alarm.name == "timerfd"
            alarm.at(1)
            made.run_until_complete(asyncio.sleep(0.01))
            assert len(rung) == 1
            due = time.monotonic_ns() + 20 * MS
            alarm.at(due + 60_000 * MS)
            alarm.at(due)
            made.run_until_complete(asyncio.sleep(0.05))
            assert len(rung) == 2
            assert rung[1] >= due
        finally:
            alarm.close()
            alarm.close()
            made.close()
