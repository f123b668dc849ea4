"""A server of raw sockets in threads, which sends exactly the bytes that a test tells it to."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator

Handler = Callable[["Peer"], None]


class Peer:
    """One accepted connection. ``number`` counts the connections, from 0."""

    def __init__(self, server: RawServer, connection: socket.socket, number: int) -> None:
        self.server, self.socket, self.number = server, connection, number
        self._rest = b""

    def request(self) -> bytes | None:
        """The body of the next request; None once the client has closed."""
        while b"\r\n\r\n" not in self._rest:
            if not self._more():
                return None
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        length = int(lengths[0].partition(b":")[2]) if lengths else 0
        while len(self._rest) < length:
            if not self._more():
                return None
        body, self._rest = self._rest[:length], self._rest[length:]
        with self.server.lock:
            self.server.heads.append(head)
            self.server.bodies.append(body)
        return body

    def send(self, *parts: bytes) -> None:
        """Each part in a write of its own."""
        for part in parts:
            self.socket.sendall(part)

    def reset(self) -> None:
        """Close with RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.socket.close()

    def _more(self) -> bool:
        try:
            data = self.socket.recv(65_536)
        except OSError:
            return False
        self._rest += data
        return bool(data)


class RawServer:
    """Runs ``handler`` in a thread for each connection. ``heads`` and ``bodies``: the requests as they came."""

    def __init__(self, handler: Handler) -> None:
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self._handler = handler
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept nobody and drop everybody."""
        self.stopped.set()
        for opened in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
            opened.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open.append(connection)
            peer = Peer(self, connection, self.connections)
            self.connections += 1
            threading.Thread(target=self._run, args=(peer,), daemon=True).start()

    def _run(self, peer: Peer) -> None:
        with contextlib.suppress(OSError):
            self._handler(peer)
        with contextlib.suppress(OSError):
            peer.socket.close()


@contextlib.contextmanager
def serving(handler: Handler) -> Iterator[RawServer]:
    """A server for the time of a test."""
    server = RawServer(handler)
    try:
        yield server
    finally:
        server.close()


def chunk(data: bytes) -> bytes:
    """One chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(document: object) -> bytes:
    """One SSE event."""
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def events(tokens: int) -> list[bytes]:
    """The events of a complete answer of so many tokens, each one the next id."""
    found = [
        event({"choices": [{"index": 0, "text": "x", "token_ids": [index], "finish_reason": None}]})
        for index in range(tokens)
    ]
    found.append(event({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}]}))
    usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}
    found.append(event({"choices": [], "usage": usage}))
    return [*found, b"data: [DONE]\n\n"]


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def answer(tokens: int) -> bytes:
    """A complete chunked answer."""
    return HEAD + b"".join(map(chunk, events(tokens))) + LAST


def completing(tokens: int) -> Handler:
    """Answers every request completely and keeps the connection."""

    def handle(peer: Peer) -> None:
        while peer.request() is not None:
            peer.send(answer(tokens))

    return handle
