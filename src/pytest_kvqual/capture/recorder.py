"""Replay a trace over HTTP and record what came back, with the time of each socket read.

Open loop: each request is sent at its intended arrival, however many are in flight. Closed loop: N are in flight, and
the next one is sent when one has ended. During the run nothing is parsed but the framing that tells where a response
ends; the raw reads go to ``NAME.spool`` as each request ends. After it the spool becomes the recording, ``NAME.jsonl``
(:mod:`pytest_kvqual.metrics.recording` reads it), request by request, in the order of the trace.

No request is retried or dropped: offered = completed + failed, always.
"""

from __future__ import annotations

import asyncio
import base64
import resource
import signal
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import httpx

from pytest_kvqual._canonical import canonical_bytes, sha256_bytes
from pytest_kvqual._clock import monotonic_ns, wall_utc
from pytest_kvqual.capture._response import MalformedError, ResponseReader
from pytest_kvqual.capture._schedule import alarm, new_loop, no_collection
from pytest_kvqual.capture._spool import Spool, SpoolReader
from pytest_kvqual.capture._transport import Exchange, Transport, describe, head_of, origin_of
from pytest_kvqual.errors import CaptureError, EvidenceError
from pytest_kvqual.metrics.requests import content_failure
from pytest_kvqual.metrics.sse import completions, split

__all__ = ["Load", "Offered", "Seams", "Transport", "convert", "replay"]

SCHEMA = 1
_PRE_OPENED = 64
_PRE_OPEN_LIMIT_S = 10.0
_BURST_NS = 100_000_000
_NOT_SENT = ("cancelled", "not sent: the run was interrupted")
_NO_RECORD = ("cancelled", "not sent, or in flight when the recorder ended")
# Records of the spool that are of no request: zero, and that every request that was sent has one.
_ZERO, _WHOLE = -1, -2
# From the last preparation to zero: the first request is then as little late as any other.
_LEAD_NS = 20_000_000
_PROGRESS_NS = 250_000_000
# Beside the connections: files, the loop's own, what the process had open.
_SPARE_DESCRIPTORS = 256
_HEADER_KEYS = {"cell", "trace_sha256", "judgment", "exploratory", "about"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Offered:
    """One request of a trace.

    Attributes:
        request: Its name, unique in the run.
        prompt: The name of its prompt in the panel.
        max_tokens: Its output limit.
        intended_ns: Its intended arrival after zero; None exactly in closed loop.
        body: The JSON that is sent, as bytes.
        path: Where it is sent.
    """

    request: str
    prompt: str
    max_tokens: int
    intended_ns: int | None
    body: bytes
    path: str = "/v1/completions"


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """``open``, or ``closed`` with ``concurrency`` requests in flight."""

    mode: Literal["open", "closed"]
    concurrency: int | None = None


@dataclass(kw_only=True, slots=True)
class Seams:
    """Where a seeded recorder fault gets in: ``plant`` is called with this, once, before zero, and changes it.

    Attributes:
        stamp: The clock of every stamp, ns.
        due: The moment (ns after zero) at which an open-loop request is sent, from its intended arrival.
        cap: The most requests in flight in open loop, the others wait and are dispatched after it; None for no limit.
        record: A last look at each request's line; returns what is written instead, None to leave the request out.
    """

    stamp: Callable[[], int] = monotonic_ns
    due: Callable[[int], int] | None = None
    cap: int | None = None
    record: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None


def replay(
    base_url: str,
    offered: Sequence[Offered],
    *,
    load: Load,
    header: Mapping[str, object],
    out: Path,
    timeout_s: float,
    plant: Callable[[Seams], object] | None = None,
    progress: Callable[[int, int], None] | None = None,
    loop: Literal["uvloop", "asyncio"] | None = None,
) -> Mapping[str, Any]:
    """Send ``offered`` to ``base_url`` and write the recording ``out``; returns its footer.

    A request's failure is in its line, not raised. SIGINT and SIGTERM end the run: what was in flight or not sent yet
    is ``cancelled``, the recording is written, and KeyboardInterrupt is raised.

    Args:
        base_url: ``http://HOST:PORT``.
        offered: The trace, in order; ascending intended arrivals in open loop.
        load: How it is sent.
        header: ``cell``; optionally ``trace_sha256``, ``judgment``, ``exploratory``, ``about``: they stand in the
            recording's header.
        out: A new file. ``out.with_suffix(".spool")`` holds the raw reads until ``out`` is complete.
        timeout_s: The most seconds from a request's dispatch to its end.
        plant: Plants a fault of the recorder; see :class:`Seams`.
        progress: Called with (requests ended, requests), at most four times a second and at the end.
        loop: The event loop to have; None for uvloop where it is installed.

    Raises:
        CaptureError: The trace, the load or the header is not as described, or the run needs more open files than the
            system allows; nothing was sent.
        EvidenceError: A file exists or cannot be written; what was kept before stays in the spool.
        KeyboardInterrupt: The run was interrupted; the recording is complete.
    """
    _check(offered, load, header, out, timeout_s)
    _allow_connections(load, len(offered))
    url = httpx.URL(base_url)
    if url.scheme != "http" or not url.host:
        raise CaptureError(f"found the URL {base_url!r}, expected http://HOST:PORT")
    heads = _heads(url, offered)
    seams = Seams()
    if plant is not None:
        plant(seams)
    event_loop, loop_name = new_loop(loop)
    spool: Spool | None = None
    interrupt: BaseException | None = None
    try:
        run = _Run(event_loop, url, offered, heads, load, seams, round(timeout_s * 1e9), progress)
        spool = Spool(out.with_suffix(".spool"), _spool_header(header, offered, load, run, loop_name, timeout_s))
        run.spool = spool
        with _signals(run.interrupt):
            try:
                with no_collection():
                    event_loop.run_until_complete(run.main())
            except BaseException as error:
                # Not ours to swallow, and no reason to lose what was recorded.
                run.stop(error)
            interrupt = run.trouble
            _close(event_loop, run.transport)
            if isinstance(interrupt, EvidenceError):
                raise interrupt
            spool.add(_WHOLE, {})
            spool.close()
            footer = convert(spool.path, out, record=seams.record)
            spool.path.unlink()
            if run.interrupted and interrupt is None:
                interrupt = KeyboardInterrupt()
    finally:
        if spool is not None:
            spool.close()
        event_loop.close()
    if interrupt is not None:
        raise interrupt
    return footer


class _Run:
    """One run, from the opening of the pool to the last end. Lives on one event loop; its methods are callbacks."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        url: httpx.URL,
        offered: Sequence[Offered],
        heads: list[bytes],
        load: Load,
        seams: Seams,
        timeout_ns: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._loop, self._origin = loop, origin_of(url)
        self._offered, self._heads, self._load, self._seams = offered, heads, load, seams
        self._timeout_ns, self._progress, self._progress_ns = timeout_ns, progress, 0
        self._stamp = seams.stamp
        self.transport = Transport(stamp=seams.stamp)
        self.spool: Spool | None = None
        self.zero_ns = 0
        self.zero_wall = ""
        self.trouble: BaseException | None = None
        self.interrupted = False
        self._stopped = False
        self._next = 0
        self._ended = 0
        # In the order of dispatch, which with one time limit for all is the order of their deadlines.
        self._flying: dict[int, Exchange] = {}
        self._free: list[int] = []
        self._intended: dict[int, int] = {}
        self._pumping = False
        self._done: asyncio.Future[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._alarm = alarm(loop, self._ring)
        self.timer = self._alarm.name

    async def main(self) -> None:
        """The whole run."""
        self._done = self._loop.create_future()
        self._loop.set_exception_handler(self._unexpected)
        closed = self._load.mode == "closed"
        wanted = self._load.concurrency or 0 if closed else max(_PRE_OPENED, _burst(self._offered))
        try:
            async with asyncio.timeout(min(_PRE_OPEN_LIMIT_S, self._timeout_ns / 1e9)):
                await self.transport.open(self._origin, min(wanted, len(self._offered)))
        except TimeoutError:
            pass
        if not self._stopped:
            self.zero_ns = monotonic_ns() + _LEAD_NS
            self.zero_wall = wall_utc()
            self._keep_zero()
            if closed:
                self._free = [self.zero_ns] * min(wanted, len(self._offered))
            self._alarm.at(self.zero_ns)
            self._watch()
            await self._done
        self._alarm.close()
        if self._expiry is not None:
            self._expiry.cancel()

    def interrupt(self) -> None:
        """End the run from a signal handler: nothing is touched here, the loop does it in its own turn."""
        self.interrupted = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.stop, None)

    def stop(self, error: BaseException | None) -> None:
        """Send no more and end what is in flight as ``cancelled``. Safe while the loop does not run."""
        if self._stopped:
            return
        self._stopped = True
        self.trouble = self.trouble or error
        why = describe(error) if error is not None else "a signal"
        for exchange in list(self._flying.values()):
            self.transport.fail(exchange, "cancelled", f"the run was interrupted by {why}")
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    # Dispatch.

    def _ring(self) -> None:
        if self._load.mode == "open":
            self._pump_open()
        else:
            self._pump_closed()

    def _pump_open(self) -> None:
        zero, offered, due_of, cap = self.zero_ns, self._offered, self._seams.due, self._seams.cap
        while self._next < len(offered) and not self._stopped:
            index = self._next
            intended = offered[index].intended_ns or 0
            due = zero + (due_of(intended) if due_of is not None else intended)
            now = self._stamp()
            if now < due:
                self._alarm.at(due)
                return
            if cap is not None and len(self._flying) >= cap:
                return
            self._next += 1
            self._send(index, zero + intended, now)

    def _pump_closed(self) -> None:
        # A request that fails at once frees its slot inside this loop: no recursion.
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._free and self._next < len(self._offered) and not self._stopped:
                now = self._stamp()
                if now < self._free[0]:
                    self._alarm.at(self._free[0])
                    return
                self._next += 1
                self._send(self._next - 1, self._free.pop(0), now)
        finally:
            self._pumping = False

    def _send(self, index: int, intended: int, now: int) -> None:
        exchange = Exchange(self._heads[index], self._offered[index].body, self._on_end, index=index)
        self._heads[index] = b""
        exchange.dispatch_ns = now
        self._intended[index] = intended
        self._flying[index] = exchange
        self.transport.begin(exchange, self._origin)

    # Ends.

    def _on_end(self, exchange: Exchange) -> None:
        index = exchange.index
        del self._flying[index]
        self._ended += 1
        if not self._stopped:
            if self._load.mode == "closed":
                # The next request before the bookkeeping of this one.
                self._free.append(exchange.end_ns or 0)
                self._pump_closed()
            elif self._seams.cap is not None:
                self._pump_open()
        try:
            self._keep(exchange, self._intended.pop(index))
            self._report()
        except BaseException as error:
            # Raised into the loop it would be logged and forgotten.
            self.stop(error)
        if self._ended == len(self._offered) and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _keep(self, exchange: Exchange, intended: int) -> None:
        if self.spool is None:
            return
        # As in STAMPS.
        stamps = (
            intended,
            exchange.dispatch_ns,
            exchange.connected_ns,
            exchange.send_start_ns,
            exchange.send_end_ns,
            exchange.end_ns,
        )
        more = {} if exchange.failure is None else {"eof": exchange.eof, "failure": exchange.failure}
        self.spool.add(exchange.index, more, stamps, exchange.reads_ns, exchange.reads)

    def _keep_zero(self) -> None:
        if self.spool is not None:
            self.spool.add(_ZERO, {"zero": self.zero_ns, "wall": self.zero_wall})

    def _report(self) -> None:
        if self._progress is None:
            return
        now = monotonic_ns()
        if now - self._progress_ns >= _PROGRESS_NS or self._ended == len(self._offered):
            self._progress_ns = now
            self._progress(self._ended, len(self._offered))

    # Time limits.

    def _watch(self) -> None:
        """Fail what is past its time limit; look again at the next deadline. One timer for all requests."""
        now = self._stamp()
        left = self._timeout_ns
        for exchange in list(self._flying.values()):
            left = exchange.dispatch_ns + self._timeout_ns - now
            if left > 0:
                break
            self.transport.fail(exchange, "timeout", f"no end within {self._timeout_ns / 1e9:g} s")
            left = self._timeout_ns
        if not self._stopped:
            self._expiry = self._loop.call_later(max(left, 1_000_000) / 1e9, self._watch)

    def _unexpected(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        # A connection that breaks is told to its protocol; the loop's own account of it is no news.
        if isinstance(error, OSError):
            return
        self.stop(error or CaptureError(f"the event loop failed: {context.get('message')}"))


def convert(
    spool: Path, out: Path, *, record: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None
) -> Mapping[str, Any]:
    """Write the recording ``out`` from a spool; returns its footer. Also for the spool of a process that was killed.

    A request without a record in the spool is ``cancelled``, and each of its times is null but the intended arrival of
    an open loop, which is the trace's. It was never sent; or, in the spool of a process that was killed or of a disk
    that was full, it was in flight then. ``kvqual verify`` objects where a later one has a record (check 8).

    Raises:
        EvidenceError: The spool is damaged, or ``out`` exists or cannot be written; the spool stays.
    """
    reader = SpoolReader(spool)
    try:
        return _convert(reader, spool, out, record)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if record is not None:
            # A planted fault's own.
            raise
        raise EvidenceError(f"{spool}: found a damaged spool: {describe(error)}") from error
    finally:
        reader.close()


def _convert(
    reader: SpoolReader, spool: Path, out: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None] | None
) -> Mapping[str, Any]:
    requests = reader.header["requests"]
    found = reader.record(_ZERO)
    zero = found[0]["zero"] if found is not None else 0
    whole = reader.record(_WHOLE) is not None

    def lines() -> Iterator[dict[str, Any]]:
        for index, request in enumerate(requests):
            line = _line(request, reader.record(index), zero, whole=whole)
            changed = line if change is None else change(line)
            if changed is not None:
                yield changed

    # Only a planted fault leaves a request out; it then does not count it either.
    offered = len(requests) if change is None else sum(1 for _ in lines())
    head = {
        **reader.header["header"],
        "schema": SCHEMA,
        "kind": "recording",
        "requests": offered,
        "zero_monotonic_ns": zero,
        "zero_wall": found[0]["wall"] if found is not None else reader.header["wall"],
    }
    failed: dict[str, int] = {}
    end = 0
    try:
        file = out.open("xb")
        try:
            # The last bytes leave the buffer when the file is closed: a full disk may show only then.
            with file:
                file.write(canonical_bytes(head) + b"\n")
                for line in lines():
                    if line["failure"] is not None:
                        kind = line["failure"]["kind"]
                        failed[kind] = failed.get(kind, 0) + 1
                    end = max(end, line["end_ns"] or 0)
                    file.write(canonical_bytes(line) + b"\n")
                footer = {
                    "kind": "end",
                    "offered": offered,
                    "completed": offered - sum(failed.values()),
                    "failed": failed,
                    "end_ns": end,
                }
                file.write(canonical_bytes(footer) + b"\n")
        except BaseException:
            # Half a recording beside the whole spool would only be mistaken for one.
            out.unlink()
            raise
    except FileExistsError:
        raise EvidenceError(f"found {out}, expected no file of that name", advice=f"{spool} holds the reads") from None
    except OSError as error:
        raise EvidenceError(
            f"cannot write {out}: {error.strerror}", advice=f"{spool} holds every read: make room and convert it"
        ) from None
    return footer


def _line(
    request: Mapping[str, Any],
    kept: tuple[dict[str, Any], Sequence[int], list[bytes]] | None,
    zero: int,
    *,
    whole: bool,
) -> dict[str, Any]:
    """One request's line of the recording; ``whole``: whether the spool has every request that was sent."""
    if kept is None:
        intended = None if request["intended_ns"] is None else zero + request["intended_ns"]
        kept = {"intended": intended, "failure": _NOT_SENT if whole else _NO_RECORD}, (), []
    meta, times, reads = kept
    pieces: list[bytes] = []
    reader = ResponseReader(pieces)
    body: list[bytes] = []
    # How many bytes of the body were there after each read that brought some, and when.
    arrived: list[int] = []
    moments: list[int] = []
    size = 0
    headers_ns: int | None = None
    for time, data in zip(times, reads, strict=True):
        # The failure says so already; what came before it stays.
        with suppress(MalformedError):
            reader.feed(data)
        if headers_ns is None and reader.status is not None:
            headers_ns = time - zero
        if pieces:
            body += pieces
            size += sum(map(len, pieces))
            arrived.append(size)
            moments.append(time - zero)
            pieces.clear()
    # The body of any other status is no stream of events.
    raw, rest = split(b"".join(body)) if reader.status == 200 else ([], b"".join(body))
    events = [
        (moments[bisect_left(arrived, needed)], event) for needed, event in zip(completions(raw), raw, strict=True)
    ]

    def after_zero(name: str) -> int | None:
        stamp = meta.get(name)
        return None if stamp is None else stamp - zero

    failure = meta.get("failure")
    if failure is None and reader.status != 200:
        failure = ("status", f"HTTP status {reader.status}")
    # Some servers close after the last event and send no last chunk. The stream then says itself whether it is whole.
    whole_at_eof = meta.get("eof", False) and reader.status == 200 and reader.between_chunks and not rest
    if failure is None or whole_at_eof:
        by_content = content_failure([event for _, event in events], request["max_tokens"])
        failure = by_content if failure is None or by_content is None else failure
    dispatch = after_zero("dispatch")
    return {
        "kind": "request",
        "request": request["request"],
        "prompt": request["prompt"],
        "max_tokens": request["max_tokens"],
        "intended_ns": after_zero("intended"),
        "dispatch_ns": dispatch,
        "admission_ns": dispatch,
        "connected_ns": after_zero("connected"),
        "send_start_ns": after_zero("send_start"),
        "send_end_ns": after_zero("send_end"),
        "status": reader.status,
        "headers_ns": headers_ns,
        "headers": [list(pair) for pair in reader.headers],
        "body_sha256": request["body_sha256"],
        "events": [[at, base64.b64encode(event).decode("ascii")] for at, event in events],
        "rest": base64.b64encode(rest).decode("ascii"),
        "end_ns": after_zero("end"),
        "failure": None if failure is None else {"kind": failure[0], "text": failure[1]},
    }


def _check(offered: Sequence[Offered], load: Load, header: Mapping[str, object], out: Path, timeout_s: float) -> None:
    if not offered:
        raise CaptureError("found a trace of no requests, expected at least one")
    if len({one.request for one in offered}) != len(offered):
        raise CaptureError("found two requests of one name in the trace")
    if not timeout_s > 0:
        raise CaptureError(f"found a time limit of {timeout_s:g} s, expected more than 0")
    closed = load.mode == "closed"
    if closed and (load.concurrency is None or load.concurrency < 1):
        raise CaptureError(f"found a closed loop of {load.concurrency} requests in flight, expected at least 1")
    if not closed and load.concurrency is not None:
        raise CaptureError(f"found an open loop with {load.concurrency} requests in flight, expected no limit")
    last = 0
    for one in offered:
        if closed != (one.intended_ns is None):
            raise CaptureError(f"{one.request}: found the intended arrival {one.intended_ns} in a {load.mode} loop")
        if one.intended_ns is not None:
            if one.intended_ns < last:
                raise CaptureError(f"{one.request}: found an intended arrival before the one above it, or before zero")
            last = one.intended_ns
    if "cell" not in header or not set(header) <= _HEADER_KEYS:
        raise CaptureError(f"found the header keys {sorted(header)}, expected 'cell' and of {sorted(_HEADER_KEYS)}")
    if out.suffix == ".spool":
        raise CaptureError(f"found the recording's name {out.name!r}, expected one that does not end in .spool")
    if out.exists():
        raise EvidenceError(f"found {out}, expected no file of that name", advice="recordings are never overwritten")


def _allow_connections(load: Load, requests: int) -> None:
    """Raise the soft limit of open files to what the run can need.

    A closed loop needs its connections. How many an open loop needs is not known: as many as the system allows, and
    a request that finds none is a failure of its own.
    """
    closed = load.mode == "closed"
    needed = min(load.concurrency or 0, requests) + _SPARE_DESCRIPTORS if closed else requests + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        if closed:
            raise CaptureError(
                f"found a hard limit of {hard} open files, expected {needed} for {load.concurrency} connections",
                advice="raise it (ulimit -Hn) or lower the concurrency",
            )
        needed = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _burst(offered: Sequence[Offered]) -> int:
    """The most requests of an open loop that are due within any 100 ms: opening a connection takes some 100 µs."""
    most = start = 0
    for stop, one in enumerate(offered, start=1):
        while (one.intended_ns or 0) - (offered[start].intended_ns or 0) > _BURST_NS:
            start += 1
        most = max(most, stop - start)
    return most


def _heads(url: httpx.URL, offered: Sequence[Offered]) -> list[bytes]:
    """Each request's line and header as sent. Requests of one path and body length share one."""
    shared: dict[tuple[str, int], bytes] = {}
    heads = []
    for one in offered:
        key = (one.path, len(one.body))
        if key not in shared:
            request = httpx.Request(
                "POST",
                url.join(one.path),
                headers={
                    "Accept": "text/event-stream",
                    "Accept-Encoding": "identity",
                    "Content-Type": "application/json",
                    "User-Agent": "pytest-kvqual",
                },
            )
            shared[key] = head_of(request, len(one.body))
        heads.append(shared[key])
    return heads


def _spool_header(
    header: Mapping[str, object], offered: Sequence[Offered], load: Load, run: _Run, loop: str, timeout_s: float
) -> dict[str, object]:
    return {
        "header": {
            "trace_sha256": None,
            "judgment": None,
            "exploratory": False,
            "about": {},
            **header,
            "mode": load.mode,
            "concurrency": load.concurrency,
            "timeout_ns": round(timeout_s * 1e9),
            "loop": loop,
            "timer": run.timer,
        },
        "wall": wall_utc(),
        "requests": [
            {
                "request": one.request,
                "prompt": one.prompt,
                "max_tokens": one.max_tokens,
                "intended_ns": one.intended_ns,
                "body_sha256": sha256_bytes(one.body),
            }
            for one in offered
        ],
    }


@contextmanager
def _signals(interrupt: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM end the run and not the process, until the recording is written; main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def caught(number: int, frame: FrameType | None) -> None:
        interrupt()

    before = {number: signal.signal(number, caught) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: it was not set from Python, and cannot be set back from here.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _close(loop: asyncio.AbstractEventLoop, transport: Transport) -> None:
    """Close what the loop still holds."""
    try:
        loop.run_until_complete(transport.aclose())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    except RuntimeError:
        # A loop that was stopped by an error in the middle of a turn may refuse to run again.
        return
