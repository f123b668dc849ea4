"""HTTP/1.1 over asyncio that stamps each socket read before anything else and wakes nobody until a response has ended.

Nothing is retried, re-sent, redirected or sent through a proxy, and no number of connections is a limit.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from pytest_kvqual._clock import monotonic_ns
from pytest_kvqual.capture._response import MalformedError, ResponseReader

_TEXT_LIMIT = 300
RESPONSE_LIMIT = 32 << 20
"""The most bytes of a response. An endless one would take the client's memory, and no reader takes its line."""
Origin = tuple[str, int]


class Exchange:
    """One request and what the socket brought for it. All stamps are of the client's monotonic clock, in ns.

    Args:
        head: The request line and header, to the blank line.
        body: The request's body.
        on_end: Called once, from the event loop, when the exchange has ended.
        index: The caller's own number for it.
        bodiless: The request is a HEAD, whose response has no body whatever its header says.

    Attributes:
        dispatch_ns: When it was handed to the transport.
        connected_ns: When it had a connection: a pooled one, or one opened for it.
        send_start_ns, send_end_ns: Around handing it to the socket; what the socket's buffer does not take is left to
            the event loop's.
        reads_ns, reads: Each socket read's time, taken before anything else, and its bytes.
        end_ns: The time of the read (or end of file, or failure) that ended it; None while in flight.
        eof: The server ended the connection, in order, before the response's framing was complete.
        failure: ``(kind, text)``: ``refused``, ``transport``, ``timeout`` or ``cancelled``; None for a whole response.
    """

    __slots__ = (
        "body",
        "connected_ns",
        "connection",
        "dispatch_ns",
        "end_ns",
        "eof",
        "failure",
        "fed",
        "head",
        "index",
        "on_end",
        "reader",
        "reads",
        "reads_ns",
        "send_end_ns",
        "send_start_ns",
        "task",
    )

    def __init__(
        self, head: bytes, body: bytes, on_end: Callable[[Exchange], None], *, index: int = 0, bodiless: bool = False
    ) -> None:
        self.head, self.body, self.on_end, self.index = head, body, on_end, index
        self.dispatch_ns = 0
        self.connected_ns: int | None = None
        self.send_start_ns: int | None = None
        self.send_end_ns: int | None = None
        self.reads_ns: list[int] = []
        self.reads: list[bytes] = []
        self.end_ns: int | None = None
        self.failure: tuple[str, str] | None = None
        self.eof = False
        self.fed = 0
        self.reader = ResponseReader(bodiless=bodiless)
        self.connection: _Connection | None = None
        self.task: asyncio.Task[None] | None = None

    def look(self) -> int | None:
        """Feed the reads that the reader has not seen; the time of the one that ended the response, None before it.

        Raises:
            MalformedError: The bytes are no HTTP/1.1 response.
        """
        reader, reads = self.reader, self.reads
        while self.fed < len(reads):
            self.fed += 1
            if reader.feed(reads[self.fed - 1]):
                # What came later belongs to no response.
                reader.keep_alive = reader.keep_alive and self.fed == len(reads)
                return self.reads_ns[self.fed - 1]
        return None

    def finish(self, end_ns: int, failure: tuple[str, str] | None = None) -> None:
        """End it, once; later calls do nothing."""
        if self.end_ns is None:
            self.end_ns, self.failure = end_ns, failure
            self.connection = self.task = None
            self.on_end(self)


class _Connection(asyncio.Protocol):
    """One connection: carries one exchange at a time, or stands idle in the pool."""

    __slots__ = (
        "_chunked",
        "_exchange",
        "_note",
        "_note_ns",
        "_open",
        "_origin",
        "_poll",
        "_pool",
        "_received",
        "_socket",
        "_stamp",
        "_stream",
    )

    def __init__(self, pool: Transport, origin: Origin, connected: socket.socket) -> None:
        self._pool, self._origin, self._socket = pool, origin, connected
        self._stamp = pool.stamp
        self._exchange: Exchange | None = None
        self._open = True
        self._poll = select.poll()
        self._stream: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The stream is ours."""
        self._stream = transport  # type: ignore[assignment] # a stream's transport is a Transport
        self._poll.register(self._socket, select.POLLIN)

    def usable(self) -> bool:
        """Whether the peer has neither closed it nor sent what nobody asked for.

        The loop may not have seen a close that the kernel already has, so the kernel is asked.
        """
        if not self._open:
            return False
        if self._poll.poll(0):
            self.abort()
            return False
        return True

    def send(self, exchange: Exchange) -> None:
        """Send the request now, in this call, as far as the socket takes it."""
        self._exchange, exchange.connection = exchange, self
        self._note_ns, self._note, self._chunked = exchange.reads_ns.append, exchange.reads.append, False
        self._received = 0
        head, body = exchange.head, exchange.body
        exchange.send_start_ns = self._stamp()
        try:
            # Past the loop's own write: uvloop's waits for the end of the loop's turn. Its buffer is empty here.
            sent = self._socket.sendmsg((head, body))
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._lost(error)
            return
        if sent < len(head) + len(body):
            if self._stream is None:
                self._lost(None)
                return
            if sent < len(head):
                self._stream.write(head[sent:])
                self._stream.write(body)
            else:
                self._stream.write(memoryview(body)[sent - len(head) :])
        exchange.send_end_ns = self._stamp()

    def data_received(self, data: bytes) -> None:
        """Stamp, keep, look for the end where it can be; nothing else happens per read."""
        now = self._stamp()
        if self._exchange is None:
            # Nobody asked for it.
            self.abort()
            return
        self._note_ns(now)
        self._note(data)
        self._received += len(data)
        if self._received > RESPONSE_LIMIT:
            self._fail(now, "transport", f"found a response of more than {RESPONSE_LIMIT} bytes")
            return
        # A chunked body ends in CR LF CR LF. A read without one, and that cannot complete one, needs no look: the
        # reader counts through it later, in one go with others. (Not "in", which tries an integer first and drops the
        # TypeError: as much as the rest of this call.)
        if self._chunked and data[0] > 0x0D and data.find(b"\r\n\r\n") < 0:
            return
        self.look(self._exchange, now)

    def look(self, exchange: Exchange, now: int) -> None:
        """End the exchange if what was read ends it, one way or the other."""
        try:
            end = exchange.look()
        except MalformedError as error:
            self._fail(now, "transport", f"malformed HTTP: {error}")
            return
        if end is not None:
            self._done(exchange, end)
        self._chunked = exchange.reader.chunked

    def eof_received(self) -> None:
        """The peer sent all that it will send; the stream then closes itself."""
        now = self._stamp()
        self._open = False
        if self._exchange is not None:
            self.look(self._exchange, now)
        # The look may have ended it.
        exchange = self._exchange
        if exchange is not None:
            if exchange.reader.eof():
                self._done(exchange, now)
            else:
                exchange.eof = True
                self._fail(now, "transport", f"the server closed the connection before {exchange.reader.missing()}")

    def connection_lost(self, exc: Exception | None) -> None:
        """The stream is gone."""
        self._lost(exc)
        self._pool.forget(self._origin, self)

    def abort(self) -> None:
        """Close without a word."""
        self._open = False
        self._exchange = None
        if self._stream is not None:
            self._stream.abort()

    def _done(self, exchange: Exchange, now: int) -> None:
        self._exchange = None
        if exchange.reader.keep_alive and self._open:
            self._pool.give_back(self._origin, self)
        else:
            self._open = False
            if self._stream is not None:
                self._stream.close()
        exchange.finish(now)

    def _lost(self, error: Exception | None) -> None:
        now = self._stamp()
        self._open = False
        if self._exchange is not None:
            self.look(self._exchange, now)
        if (exchange := self._exchange) is not None:
            what = describe(error) if error is not None else "the connection was closed"
            self._fail(now, "transport", f"{what}, before {exchange.reader.missing()}")

    def _fail(self, now: int, kind: str, text: str) -> None:
        exchange = self._exchange
        self.abort()
        if exchange is not None:
            exchange.finish(now, (kind, text[:_TEXT_LIMIT]))


class Transport(httpx.AsyncBaseTransport):
    """The recorder's transport, for any ``httpx.AsyncClient``, and for :meth:`begin` without one.

    A client gets each response when it has ended, whole; ``response.extensions["kvqual_exchange"]`` is its
    :class:`Exchange`. The client's ``connect`` and ``read`` timeouts hold; ``http://`` only.

    Args:
        stamp: The clock of every stamp.
    """

    def __init__(self, *, stamp: Callable[[], int] = monotonic_ns) -> None:
        self.stamp = stamp
        self._idle: dict[Origin, list[_Connection]] = {}
        self._addresses: dict[Origin, list[tuple[Any, ...]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[_Connection] = set()

    # For the replay.

    async def open(self, origin: Origin, number: int) -> int:
        """Open ``number`` connections into the pool; how many were opened. A refusal is not raised: it will be again.

        At most 64 at a time, so that a listener's queue does not overflow.
        """
        gate = asyncio.Semaphore(64)

        async def one() -> bool:
            async with gate:
                try:
                    self.give_back(origin, await self._connect(origin))
                except OSError:
                    return False
                return True

        return sum(await asyncio.gather(*(one() for _ in range(number))))

    def begin(self, exchange: Exchange, origin: Origin) -> None:
        """Send now, on an idle connection or on a new one. ``exchange.on_end`` is called when it has ended."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.usable():
                exchange.connected_ns = self.stamp()
                connection.send(exchange)
                return
        exchange.task = task = asyncio.get_running_loop().create_task(self._begin_new(exchange, origin))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def fail(self, exchange: Exchange, kind: str, text: str) -> None:
        """End an exchange that is in flight, as a failure unless its bytes say otherwise, and close its connection."""
        connection, task = exchange.connection, exchange.task
        now = self.stamp()
        if connection is not None:
            connection.look(exchange, now)
            if exchange.end_ns is not None:
                return
            connection.abort()
        if task is not None:
            task.cancel()
        exchange.finish(now, (kind, text))

    def give_back(self, origin: Origin, connection: _Connection) -> None:
        """Put a connection into the pool: the one used last is taken first, so that the others may go stale."""
        self._idle.setdefault(origin, []).append(connection)

    def forget(self, origin: Origin, connection: _Connection) -> None:
        """A connection is gone: it is in no pool any more."""
        self._connections.discard(connection)
        idle = self._idle.get(origin, [])
        if connection in idle:
            idle.remove(connection)

    # For httpx.

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request and return its response when it has ended.

        Raises:
            httpx.UnsupportedProtocol: The URL is not ``http://``.
            httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadTimeout, httpx.RemoteProtocolError, httpx.ReadError:
                As httpx's own transport.
        """
        if request.url.scheme != "http":
            raise httpx.UnsupportedProtocol(f"found {request.url.scheme!r}, expected 'http'", request=request)
        body = b"".join([part async for part in request.stream])  # type: ignore[union-attr] # a client's is async
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake(_: Exchange) -> None:
            if not ended.done():
                ended.set_result(None)

        bodiless = request.method == "HEAD"
        exchange = Exchange(head_of(request, len(body)), body, wake, bodiless=bodiless)
        exchange.dispatch_ns = self.stamp()
        self.begin(exchange, origin_of(request.url))
        try:
            await self._wait(exchange, ended, request.extensions.get("timeout", {}))
        except BaseException:
            self.fail(exchange, "cancelled", "the caller gave up")
            raise
        if exchange.failure is not None:
            raise _httpx_error(exchange, request)
        pieces: list[bytes] = []
        reader = ResponseReader(pieces, bodiless=bodiless)
        for data in exchange.reads:
            reader.feed(data)
        return httpx.Response(
            reader.status or 0,
            headers=[(name.encode("ascii"), value.encode("latin-1")) for name, value in reader.headers],
            stream=_Body(b"".join(pieces)),
            extensions={"http_version": b"HTTP/1.1", "kvqual_exchange": exchange},
        )

    async def aclose(self) -> None:
        """Close every connection."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in list(self._connections):
            connection.abort()
        self._idle.clear()
        # Streams close themselves in a later turn of the loop.
        await asyncio.sleep(0)

    async def _wait(self, exchange: Exchange, ended: asyncio.Future[None], timeout: Mapping[str, float | None]) -> None:
        connect, read = timeout.get("connect"), timeout.get("read")
        while not ended.done():
            limit = connect if exchange.connected_ns is None else read
            since = exchange.reads_ns[-1] if exchange.reads_ns else exchange.connected_ns or exchange.dispatch_ns
            left = None if limit is None else limit - (self.stamp() - since) / 1e9
            if left is not None and left <= 0:
                kind = httpx.ConnectTimeout if exchange.connected_ns is None else httpx.ReadTimeout
                raise kind(f"nothing within {limit:g} s")
            # While it connects, the read limit does not run yet: look again when the connection may be there.
            await asyncio.wait({ended}, timeout=left)

    async def _begin_new(self, exchange: Exchange, origin: Origin) -> None:
        try:
            connection = await self._connect(origin)
        except OSError as error:
            exchange.finish(self.stamp(), ("refused", describe(error)[:_TEXT_LIMIT]))
            return
        exchange.task = None
        if exchange.end_ns is None:
            exchange.connected_ns = self.stamp()
            connection.send(exchange)
        else:
            self.give_back(origin, connection)

    async def _connect(self, origin: Origin) -> _Connection:
        loop = asyncio.get_running_loop()
        addresses = self._addresses.get(origin)
        if addresses is None:
            found = await loop.getaddrinfo(origin[0], origin[1], type=socket.SOCK_STREAM)
            addresses = self._addresses[origin] = list(found)
        refusal: OSError = OSError(f"no address of {origin[0]}")
        for family, kind, protocol, _, address in addresses:
            # Its own error leaves this loop: with no descriptor left, no other address helps.
            opened = socket.socket(family, kind, protocol)
            try:
                opened.setblocking(False)
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_connect(opened, address)
                connection = _Connection(self, origin, opened)
                await loop.create_connection(lambda made=connection: made, sock=opened)  # type: ignore[misc]
            except OSError as error:
                opened.close()
                refusal = error
            except BaseException:
                opened.close()
                raise
            else:
                self._connections.add(connection)
                return connection
        raise refusal


class _Body(httpx.AsyncByteStream):
    """A whole body as a stream of one piece."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> Any:
        if self._data:
            yield self._data


def origin_of(url: httpx.URL) -> Origin:
    """The host and port to connect to."""
    return url.host, url.port or 80


def head_of(request: httpx.Request, length: int) -> bytes:
    """The request line and header as sent, to the blank line, for a body of ``length`` bytes sent whole.

    Raises:
        httpx.LocalProtocolError: A header would break the header's lines.
    """
    lines = [b"%s %s HTTP/1.1" % (request.method.encode("ascii"), request.url.raw_path)]
    framing = (b"content-length", b"transfer-encoding")
    lines += [name + b": " + value for name, value in request.headers.raw if name.lower() not in framing]
    if length or request.method in ("POST", "PUT", "PATCH"):
        lines.append(b"Content-Length: %d" % length)
    if any(mark in line for line in lines for mark in (b"\r", b"\n", b"\0")):
        raise httpx.LocalProtocolError("found a line break in a header", request=request)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def describe(error: BaseException) -> str:
    """An error in one line: its kind and its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def _httpx_error(exchange: Exchange, request: httpx.Request) -> httpx.TransportError:
    kind, text = exchange.failure or ("", "")
    if kind == "refused":
        return httpx.ConnectError(text, request=request)
    if text.startswith(("malformed", "the server closed")):
        return httpx.RemoteProtocolError(text, request=request)
    return httpx.ReadError(text, request=request)
