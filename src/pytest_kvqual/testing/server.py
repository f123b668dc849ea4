"""The deterministic server: a program whose every delay and fault is known, to measure a recorder against.

``python -m pytest_kvqual.testing.server --port 0 [--seconds 120] [--log FILE]`` listens on loopback, prints
``{"port": N}`` and ends by itself: after ``--seconds``, when its standard input is closed (where that is a pipe), or
when its parent is gone. One process, one thread.

``POST /v1/completions`` streams what the request's script says (:mod:`~pytest_kvqual.testing.script`); ``stream`` false
is not served. ``GET /truth`` says what was done, ``POST /reset`` forgets it. ``GET /metrics`` speaks in vLLM's names;
``GET /health`` and ``GET /v1/models`` serve clients that ask.

The truth of a request, by its ``request_id``: every time is of this process's monotonic clock, taken on the read that
brought the last byte of the request and just before the write of a token. Its origin is this process's alone: only
differences mean anything elsewhere::

    {"arrived_ns", "received_ns", "first_token_ns", "last_token_ns", "end_ns", "tokens", "per_event", "outcome",
     "quirk", "prompt_tokens", "times", "gone"}

``arrived_ns``: the first byte. ``tokens``, ``per_event``: as written. ``outcome``: what a client must report.
``times``: how often the request came. ``gone``: the client left before the end.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import heapq
import json
import os
import re
import resource
import signal
import socket
import stat
import struct
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from pytest_kvqual._clock import monotonic_ns
from pytest_kvqual.testing.script import (
    CLOSE,
    CLOSE_IDLE,
    GO_ON,
    RESET,
    SILENT,
    Answer,
    Script,
    Step,
    read_script,
    steps,
)

MODEL: Final = "known"
_IDLE_CLOSE_S = 0.02
_WATCH_S = 0.25
_SECOND = 1_000_000_000
_LARGE_BODY = 32_768
_TURN = 64
_LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*([0-9]{1,12})[ \t]*(?:\r\n|\Z)")
_PROMPT = re.compile(rb'"prompt"[ \t\r\n]*:[ \t\r\n]*\[([0-9, \t\r\n]*)\]')
# The boundaries of vLLM's histogram of the time to the first token, in seconds.
_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip


class _Spec(ctypes.Structure):
    """``struct itimerspec``."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class Alarm:
    """Rings at a moment of the monotonic clock: a timerfd on Linux (some 50 µs late), else the loop's timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop, self._callback = loop, callback
        self._fd = -1
        self._handle: asyncio.TimerHandle | None = None
        if sys.platform == "linux":
            library = ctypes.CDLL(None, use_errno=True)
            self._fd = library.timerfd_create(1, os.O_NONBLOCK | os.O_CLOEXEC)
            self._settime = library.timerfd_settime
            self._spec = _Spec(0, 0, 0, 0)
            self._reference = ctypes.byref(self._spec)
        if self._fd >= 0:
            loop.add_reader(self._fd, self._ring)

    def at(self, due_ns: int) -> None:
        """Ring at ``due_ns``; replaces what was set before."""
        if self._fd >= 0:
            self._spec.value_s, self._spec.value_ns = divmod(due_ns, _SECOND)
            self._settime(self._fd, 1, self._reference, None)
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(max(0, due_ns - monotonic_ns()) / _SECOND, self._callback)

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._callback()


class Truth:
    """What was done with one request."""

    __slots__ = (
        "arrived_ns", "end_ns", "first_ns", "gone", "last_ns", "prompt_tokens", "received_ns", "script", "times",
        "tokens",
    )  # fmt: skip

    def __init__(self, script: Script | None, prompt_tokens: int, arrived_ns: int, received_ns: int) -> None:
        self.script = script
        self.prompt_tokens = prompt_tokens
        self.arrived_ns, self.received_ns = arrived_ns, received_ns
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.end_ns: int | None = None
        self.tokens = 0
        self.times = 1
        self.gone = False

    def to_dict(self) -> dict[str, object]:
        """The form that ``GET /truth`` gives."""
        script = self.script
        return {
            "arrived_ns": self.arrived_ns,
            "received_ns": self.received_ns,
            "first_token_ns": self.first_ns,
            "last_token_ns": self.last_ns,
            "end_ns": self.end_ns,
            "tokens": self.tokens,
            "per_event": self._events(),
            "outcome": "status" if script is None else script.outcome,
            "quirk": [] if script is None else sorted(script.quirks),
            "prompt_tokens": self.prompt_tokens,
            "times": self.times,
            "gone": self.gone,
        }

    def _events(self) -> list[int]:
        """The events whose tokens were written: a prefix of the script's."""
        events: list[int] = []
        left = self.tokens
        for size in self.script.sent if self.script is not None else ():
            if left <= 0:
                break
            events.append(size)
            left -= size
        return events


class Metrics:
    """The counters behind ``GET /metrics``."""

    def __init__(self) -> None:
        self.running = 0
        self.peak = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0}
        self.counts = [0] * (len(_BUCKETS) + 1)
        self.sum_ns = 0

    def observe(self, ttft_ns: int) -> None:
        """One time to the first token."""
        self.counts[bisect_left(_BUCKETS, ttft_ns / _SECOND)] += 1
        self.sum_ns += ttft_ns

    def text(self) -> str:
        """The Prometheus text format."""
        label = f'engine="0",model_name="{MODEL}"'
        lines: list[str] = []

        def metric(name: str, kind: str, *samples: tuple[str, str, object]) -> None:
            lines.append(f"# HELP {name} Of the deterministic server.")
            lines.append(f"# TYPE {name} {kind}")
            lines.extend(f"{name}{suffix}{{{extra}{label}}} {value}" for suffix, extra, value in samples)

        metric("vllm:num_requests_running", "gauge", ("", "", float(self.running)))
        metric("vllm:num_requests_waiting", "gauge", ("", "", 0.0))
        for name, value in (
            ("prompt_tokens", self.prompt_tokens),
            ("generation_tokens", self.generation_tokens),
            ("prefix_cache_queries", self.prompt_tokens),
            ("prefix_cache_hits", 0),
            ("num_preemptions", 0),
        ):
            metric(f"vllm:{name}_total", "counter", ("", "", float(value)))
        metric(
            "vllm:request_success_total",
            "counter",
            *(("", f'finished_reason="{reason}",', float(count)) for reason, count in self.finished.items()),
        )
        total, samples = 0, []
        for bound, count in zip([*map(str, _BUCKETS), "+Inf"], self.counts, strict=True):
            total += count
            samples.append(("_bucket", f'le="{bound}",', float(total)))
        samples += [("_count", "", float(total)), ("_sum", "", self.sum_ns / _SECOND)]
        metric("vllm:time_to_first_token_seconds", "histogram", *samples)
        return "\n".join(lines) + "\n"


class Stream:
    """One answer under way: the next step, and who receives it."""

    __slots__ = ("_connection", "_steps", "begin_ns", "step", "truth")

    def __init__(self, connection: Connection, plan: Iterator[Step], truth: Truth) -> None:
        self._connection, self._steps, self.truth = connection, plan, truth
        self.begin_ns = truth.received_ns
        self.step = next(plan)

    def advance(self) -> int | None:
        """Do the step that is due; when the next is due, None where there is none."""
        connection, step = self._connection, self.step
        if connection.stream is not self:
            return None
        _, data, tokens, action = step
        if tokens:
            truth = self.truth
            truth.last_ns = now = monotonic_ns()
            if truth.first_ns is None:
                truth.first_ns = now
                connection.server.metrics.observe(now - truth.received_ns)
            truth.tokens += tokens
            connection.server.metrics.generation_tokens += tokens
        if action != GO_ON:
            connection.finish(self, data, action)
            return None
        connection.send(data)
        self.step = step = next(self._steps)
        return self.begin_ns + step[0]


class Connection(asyncio.Protocol):
    """One client connection: requests one after the other."""

    __slots__ = ("_arrived_ns", "_fd", "_gone", "_have", "_need", "_parts", "_transport", "server", "stream")

    def __init__(self, server: Server) -> None:
        self.server = server
        self.stream: Stream | None = None
        self._transport: Any = None
        self._fd = -1
        self._gone = False
        self._parts: list[bytes] = []
        self._have = self._need = self._arrived_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the socket: a token's bytes go to it at once, past the loop's queue of writes."""
        self._transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._fd = sock.fileno()
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Whatever was under way ends."""
        self._gone = True
        self.server.connections.discard(self)
        if self.stream is not None:
            self.stream.truth.gone = True
            self.server.ended(self.stream.truth, "abort")
            self.stream = None

    def data_received(self, data: bytes) -> None:
        """Collect a request; answer it when it is complete."""
        now = monotonic_ns()
        if not self._have:
            self._arrived_ns = now
        self._parts.append(data)
        self._have += len(data)
        if self._have >= self._need and self.stream is None:
            self._next(now)

    def send(self, data: bytes) -> None:
        """Write now; what the socket does not take waits in the transport."""
        if self._gone:
            return
        if self._transport.get_write_buffer_size():
            self._transport.write(data)
            return
        try:
            sent = os.write(self._fd, data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._transport.abort()
            return
        if sent < len(data):
            self._transport.write(data[sent:])

    def finish(self, stream: Stream, data: bytes, action: int) -> None:
        """The last write of an answer, and what the script does to the connection."""
        if action == SILENT:
            return
        truth = stream.truth
        quirks = truth.script.quirks if truth.script is not None else frozenset()
        # Before the write: a client that asks for the truth once it has the answer finds it whole.
        self.stream = None
        self.server.ended(truth, "stop" if "early-eos" in quirks else "length" if truth.tokens else "abort")
        if data:
            self.send(data)
        if action == CLOSE:
            self._close()
        elif action == RESET:
            self._gone = True
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        elif action == CLOSE_IDLE:
            self.server.loop.call_later(_IDLE_CLOSE_S, self._close_idle)
        if self._have and not self._gone and self._have >= self._need:
            self._next(monotonic_ns())

    def abort(self) -> None:
        """Leave the client alone."""
        self._gone = True
        self._transport.abort()

    def _close(self) -> None:
        self._gone = True
        self._transport.close()

    def _close_idle(self) -> None:
        if self.stream is None and not self._have and not self._gone:
            self._close()

    def _next(self, now: int) -> None:
        """The next request of what was read, if it is complete."""
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = [data]
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > 65_536:
                self._transport.abort()
            return
        head = data[:end]
        found = _LENGTH.search(head)
        stop = end + 4 + (int(found[1]) if found else 0)
        if len(data) < stop:
            self._need = stop
            return
        arrived = self._arrived_ns
        left = data[stop:]
        self._parts, self._have, self._need = ([left] if left else []), len(left), 0
        self._arrived_ns = now
        line = head.split(b"\r\n", 1)[0].split(b" ")
        route = b" ".join(line[:2])
        if route == b"POST /v1/completions":
            self._complete(data[end + 4 : stop], arrived, now)
        else:
            self._reply(*self.server.page(route.decode("latin-1")))
            if self._have:
                self._next(now)

    def _complete(self, body: bytes, arrived: int, now: int) -> None:
        try:
            values, prompt_tokens, prompt = read_body(body)
            name = str(values.get("request_id") or f"cmpl-{self.server.served}")
            script = read_script(values)
            answer = Answer(
                request=name,
                model=str(values.get("model", MODEL)),
                created=self.server.created,
                prompt_tokens=prompt_tokens,
                prompt=prompt if "huge-prompt" in script.quirks else b"null",
            )
        except (ValueError, TypeError) as error:
            self._reply(400, "application/json", json.dumps({"error": {"message": str(error), "code": 400}}))
            return
        truth = Truth(script, prompt_tokens, arrived, now)
        self.server.started(name, truth)
        self.stream = Stream(self, steps(script, answer), truth)
        self.server.schedule(self.stream)

    def _reply(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send(
            b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"
            % (status, b"OK" if status == 200 else b"No", kind.encode(), len(body), body)
        )


def read_body(body: bytes) -> tuple[Mapping[str, Any], int, bytes]:
    """A request's values without a long prompt, the number of its tokens, and the prompt's JSON.

    A list of 100,000 token IDs takes 5 ms to parse, and every other answer would wait for it: it is cut out instead.

    Raises:
        ValueError: The body is no JSON object.
    """
    found = _PROMPT.search(body) if len(body) >= _LARGE_BODY else None
    if found:
        rest = json.loads(body[: found.start(1)] + body[found.end(1) :])
        if isinstance(rest, dict) and rest.get("prompt") == []:
            return rest, body.count(b",", found.start(1), found.end(1)) + 1, b"[%b]" % found[1]
    values = json.loads(body)
    if not isinstance(values, dict):
        raise ValueError("expected a JSON object")
    prompt = values.get("prompt", "")
    count = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    return values, count, json.dumps(prompt).encode() if isinstance(prompt, list) else b"null"


class Server:
    """All connections, one timer, and what was done."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: IO[str] | None = None) -> None:
        self.loop = loop
        self.metrics = Metrics()
        self.connections: set[Connection] = set()
        self.served = 0
        self.created = monotonic_ns() // _SECOND
        self._truths: dict[str, Truth] = {}
        self._heap: list[tuple[int, int, Stream]] = []
        self._serial = 0
        self._armed = 0
        self._alarm = Alarm(loop, self._due)
        self._log = log

    def started(self, name: str, truth: Truth) -> None:
        """A request was received."""
        before = self._truths.get(name)
        if before is not None:
            truth.times += before.times
        self._truths[name] = truth
        self.served += 1
        metrics = self.metrics
        metrics.running += 1
        metrics.peak = max(metrics.peak, metrics.running)
        metrics.prompt_tokens += truth.prompt_tokens

    def ended(self, truth: Truth, reason: str) -> None:
        """An answer is over."""
        truth.end_ns = monotonic_ns()
        self.metrics.running -= 1
        self.metrics.finished[reason] += 1
        if self._log is not None:
            self._log.write(json.dumps(truth.to_dict()) + "\n")

    def schedule(self, stream: Stream) -> None:
        """Send what is due of a new answer, and wait for the rest."""
        due: int | None = stream.begin_ns + stream.step.at_ns
        while due is not None and due <= monotonic_ns():
            due = stream.advance()
        if due is not None:
            self._push(due, stream)
            self._arm()

    def page(self, route: str) -> tuple[int, str, str]:
        """Status, type and text of a page."""
        if route == "GET /truth":
            return 200, "application/json", json.dumps(self.truth())
        if route == "GET /metrics":
            return 200, "text/plain; version=0.0.4; charset=utf-8", self.metrics.text()
        if route == "GET /health":
            return 200, "text/plain", ""
        if route == "GET /v1/models":
            return 200, "application/json", json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        if route == "POST /reset":
            self._truths, self.served = {}, 0
            running, self.metrics = self.metrics.running, Metrics()
            self.metrics.running = self.metrics.peak = running
            return 200, "application/json", "{}"
        return 404, "application/json", json.dumps({"error": {"message": f"no page {route}", "code": 404}})

    def truth(self) -> dict[str, object]:
        """The truth of every request since the start or the last reset."""
        return {
            "schema": 1,
            "kind": "truth",
            "served": self.served,
            "peak": self.metrics.peak,
            "requests": {name: truth.to_dict() for name, truth in self._truths.items()},
        }

    def _push(self, due: int, stream: Stream) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (due, self._serial, stream))

    def _arm(self) -> None:
        if self._heap and self._heap[0][0] != self._armed:
            self._armed = self._heap[0][0]
            self._alarm.at(self._armed)

    def _due(self) -> None:
        heap = self._heap
        self._armed = 0
        # Bounded: a server that is behind must still read, or the requests that wait would look as if they came late.
        for _ in range(_TURN):
            if not heap or heap[0][0] > monotonic_ns():
                break
            # Out of the heap before it is served: the end of an answer can begin the next one.
            stream = heapq.heappop(heap)[2]
            due = stream.advance()
            if due is not None:
                self._push(due, stream)
        self._arm()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(port: int, seconds: float, log: IO[str] | None) -> None:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    server = Server(loop, log)
    listening = await loop.create_server(lambda: Connection(server), "127.0.0.1", port, backlog=4096)
    loop.call_later(seconds, over.set)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    parent = os.getppid()

    def closed() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            over.set()

    def watch() -> None:
        if os.getppid() != parent:
            over.set()
        loop.call_later(_WATCH_S, watch)

    if _is_pipe(0):
        # A reader rather than a thread: nothing here may wait for the interpreter's lock.
        loop.add_reader(0, closed)
    watch()
    sys.stdout.write(json.dumps({"port": listening.sockets[0].getsockname()[1]}) + "\n")
    sys.stdout.flush()
    gc.collect()
    gc.freeze()
    gc.disable()
    await over.wait()
    listening.close()
    for connection in list(server.connections):
        connection.abort()


def _is_pipe(fd: int) -> bool:
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def main(arguments: list[str] | None = None) -> int:
    """The program; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_kvqual.testing.server", description="A server of known delays."
    )
    parser.add_argument("--port", type=int, default=0, help="0: any free one, printed")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long it lives at most")
    parser.add_argument("--log", type=Path, help="a file that receives the truth of each request, as JSON lines")
    options = parser.parse_args(arguments)
    # Whatever happens to the loop, the process ends.
    signal.alarm(int(options.seconds) + 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop = _new_loop()
    log = options.log.open("a", encoding="utf-8") if options.log else None
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(_serve(options.port, options.seconds, log))
    finally:
        if log is not None:
            log.close()
        loop.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
