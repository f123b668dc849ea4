"""The recorder's transport under a plain httpx client, and its pool."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_server import HEAD, LAST, Peer, chunk, completing, events, serving

from pytest_kvqual.capture._schedule import new_loop
from pytest_kvqual.capture._transport import Exchange, Transport, _Connection

# Servers and clients in real time: beside other tests they would measure those.
pytestmark = pytest.mark.alone

T = TypeVar("T")
LOOPS = ["asyncio", "uvloop"]


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[T]], T]:
    """Runs a coroutine on a loop of either kind."""
    if request.param == "uvloop":
        pytest.importorskip("uvloop")

    def runner(work: Awaitable[T]) -> T:
        loop, _ = new_loop(request.param)
        try:
            return loop.run_until_complete(asyncio.wait_for(work, 10))
        finally:
            loop.close()

    return runner


Runner = Callable[[Awaitable[object]], object]


async def post(url: str, number: int = 1, **options: object) -> list[httpx.Response]:
    async with httpx.AsyncClient(transport=Transport(), trust_env=False, **options) as client:  # type: ignore[arg-type]
        return [await client.post(f"{url}/v1/completions", json={"n": index}) for index in range(number)]


def test_a_client_gets_whole_responses_over_one_connection(run: Runner) -> None:
    """A plain client gets status, headers and body, its requests in order over one kept connection."""
    with serving(completing(3)) as server:
        answers = run(post(server.url, 3))
        assert isinstance(answers, list)
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert {answer.content for answer in answers} == {b"".join(events(3))}
        assert answers[0].headers["content-type"] == "text/event-stream"
        assert server.connections == 1
        assert server.bodies == [b'{"n":0}', b'{"n":1}', b'{"n":2}']
        exchange = answers[0].extensions["kvqual_exchange"]
        assert isinstance(exchange, Exchange)
        stamps = [exchange.dispatch_ns, exchange.connected_ns, exchange.send_start_ns, exchange.send_end_ns]
        stamps += [*exchange.reads_ns, exchange.end_ns]
        assert stamps == sorted(stamps)  # type: ignore[type-var]


def test_a_streaming_client_gets_the_body(run: Runner) -> None:
    """``client.stream`` reads the same bytes, and ``aiter_lines`` works."""

    async def work() -> object:
        async with (
            httpx.AsyncClient(transport=Transport(), trust_env=False) as client,
            client.stream("GET", server.url) as answer,
        ):
            return [line async for line in answer.aiter_lines() if line.startswith("data: [")]

    with serving(completing(2)) as server:
        assert run(work()) == ["data: [DONE]"]


def test_every_read_has_its_own_time(run: Runner) -> None:
    """Events that are written apart are read apart, with their times."""

    def handle(peer: Peer) -> None:
        peer.request()
        peer.send(HEAD)
        for one in events(2):
            time.sleep(0.02)
            peer.send(chunk(one))
        peer.send(LAST)

    with serving(handle) as server:
        answers = run(post(server.url))
        assert isinstance(answers, list)
        times = answers[0].extensions["kvqual_exchange"].reads_ns
        gaps = [after - before for before, after in itertools.pairwise(times[:6])]
        assert min(gaps) > 10_000_000


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"", httpx.RemoteProtocolError),
        (b"garbage\r\n\r\n", httpx.RemoteProtocolError),
        (HEAD + chunk(b"abc"), httpx.RemoteProtocolError),
        (HEAD + b"xx\r\n", httpx.RemoteProtocolError),
    ],
)
def test_a_broken_response_is_httpx_s_error(run: Runner, reply: bytes, error: type[Exception]) -> None:
    """What is no whole response raises as httpx's own transport does."""

    def handle(peer: Peer) -> None:
        peer.request()
        peer.send(reply)

    with serving(handle) as server, pytest.raises(error):
        run(post(server.url))


def test_a_reset_is_a_read_error(run: Runner) -> None:
    """RST in the middle of a body."""

    def handle(peer: Peer) -> None:
        peer.request()
        peer.send(HEAD + chunk(b"abc"))
        time.sleep(0.02)
        peer.reset()

    with serving(handle) as server, pytest.raises(httpx.ReadError):
        run(post(server.url))


def test_a_refusal_is_a_connect_error(run: Runner) -> None:
    """Nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(httpx.ConnectError):
        run(post(f"http://127.0.0.1:{port}"))


def test_a_silent_server_is_a_read_timeout(run: Runner) -> None:
    """The client's read timeout holds between reads, and the connection is closed."""

    def handle(peer: Peer) -> None:
        peer.request()
        peer.send(HEAD)
        peer.server.stopped.wait(5)

    with serving(handle) as server, pytest.raises(httpx.ReadTimeout):
        run(post(server.url, timeout=0.1))


def test_other_schemes_are_refused(run: Runner) -> None:
    """``https`` is not spoken."""
    with pytest.raises(httpx.UnsupportedProtocol):
        run(post("https://127.0.0.1:1"))


def test_a_head_request_and_an_empty_body(run: Runner) -> None:
    """HEAD ends with the header; a GET sends no length."""

    async def work() -> object:
        async with httpx.AsyncClient(transport=Transport(), trust_env=False) as client:
            return (await client.head(server.url)).status_code, (await client.get(server.url)).content

    def handle(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")

    with serving(handle) as server:
        assert run(work()) == (200, b"hello")
        assert not any(b"content-length" in head.lower() for head in server.heads)
        assert server.connections == 1


def test_a_generator_body_is_sent_whole(run: Runner) -> None:
    """A body without a known length is sent with one, not in chunks."""

    async def work() -> object:
        async def parts() -> object:
            yield b"ab"
            yield b"cd"

        async with httpx.AsyncClient(transport=Transport(), trust_env=False) as client:
            return (await client.post(server.url, content=parts())).status_code  # type: ignore[arg-type]

    with serving(completing(1)) as server:
        assert run(work()) == 200
        assert server.bodies == [b"abcd"]
        assert b"chunked" not in server.heads[0]


def test_a_connection_that_the_server_closed_while_idle_is_never_used(run: Runner) -> None:
    """The next request goes over a new connection, though the loop has had no turn to see the close."""

    def handle(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async def work() -> object:
        async with httpx.AsyncClient(transport=Transport(), trust_env=False) as client:
            statuses = []
            for _ in range(3):
                statuses.append((await client.get(server.url)).status_code)
                # Blocks the loop: only the kernel knows that the peer has closed.
                time.sleep(0.05)
            return statuses

    with serving(handle) as server:
        assert run(work()) == [200, 200, 200]
        assert server.connections == 3


def test_unasked_bytes_close_an_idle_connection(run: Runner) -> None:
    """A peer that speaks while nothing is asked loses its connection, and its words belong to no response."""

    def handle(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        time.sleep(0.02)
        peer.send(b"HTTP/1.1 500 Late\r\nContent-Length: 0\r\n\r\n")
        peer.server.stopped.wait(5)

    async def work() -> object:
        async with httpx.AsyncClient(transport=Transport(), trust_env=False) as client:
            first = (await client.get(server.url)).status_code
            await asyncio.sleep(0.06)
            return first, (await client.get(server.url)).status_code

    with serving(handle) as server:
        assert run(work()) == (200, 200)
        assert server.connections == 2


def test_cancelling_closes_the_connection(run: Runner) -> None:
    """A caller that gives up leaves no exchange behind, and its connection is not used again."""

    def handle(peer: Peer) -> None:
        peer.request()
        peer.server.stopped.wait(0.3)
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno")

    async def work() -> object:
        transport = Transport()
        async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
            task = asyncio.create_task(client.get(server.url))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.sleep(0.01)
            return task.cancelled(), len(transport._connections)

    with serving(handle) as server:
        assert run(work()) == (True, 0)


def test_a_header_with_a_line_break_is_refused(run: Runner) -> None:
    """A header that would become two is not sent."""
    with serving(completing(1)) as server, pytest.raises(httpx.LocalProtocolError):
        run(post(server.url, headers={"X-A": "b\r\nX-C: d"}))


class Taken:
    """A socket that takes everything."""

    def sendmsg(self, parts: tuple[bytes, ...]) -> int:
        return sum(map(len, parts))


@given(
    st.lists(st.sampled_from([b"a", b"\r\n\r\n", b"0\r\n\r\n", b"\n\n", b"\r", b"x" * 30]), max_size=6),
    st.sampled_from([b"", b"X-A: 1\r\n"]),
    st.lists(st.integers(0, 400), max_size=30),
    st.booleans(),
)
def test_the_end_is_seen_with_its_last_byte(parts: list[bytes], trailer: bytes, cuts: list[int], closed: bool) -> None:
    """However a chunked answer is cut into reads, it ends with the read that brings its last byte, and not before."""
    data = HEAD + b"".join(map(chunk, parts)) + b"0\r\n" + trailer + b"\r\n"
    ended: list[Exchange] = []
    ticks = itertools.count(1)
    transport = Transport(stamp=lambda: next(ticks))
    connection = _Connection(transport, ("h", 1), Taken())  # type: ignore[arg-type] # sends are all that it is for
    exchange = Exchange(b"", b"", ended.append)
    connection.send(exchange)
    places = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    for start, stop in itertools.pairwise(places):
        assert not ended
        connection.data_received(data[start:stop])
    if closed:
        connection.eof_received()
    assert ended == [exchange]
    assert exchange.failure is None
    assert exchange.end_ns == exchange.reads_ns[-1]
    assert b"".join(exchange.reads) == data


def test_bytes_after_the_end_are_no_reason_to_wait() -> None:
    """An answer with something behind it in the same read has ended, and its connection is not used again."""
    ended: list[Exchange] = []
    transport = Transport()
    connection = _Connection(transport, ("h", 1), Taken())  # type: ignore[arg-type] # sends are all that it is for
    connection.send(Exchange(b"", b"", ended.append))
    connection.data_received(HEAD)
    connection.data_received(chunk(b"a") + LAST + b"HTTP/1.1 500 X")
    assert [one.failure for one in ended] == [None]
    assert not transport._idle


def test_garbage_in_a_body_is_no_timeout(run: Runner) -> None:
    """A body that stops being HTTP and goes on for ever is malformed, though it is looked at only in the end."""

    def handle(peer: Peer) -> None:
        peer.request()
        peer.send(HEAD)
        time.sleep(0.01)
        peer.send(b"no size at all\r\n")
        peer.server.stopped.wait(5)

    async def work() -> object:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        transport = Transport()
        exchange = Exchange(b"GET / HTTP/1.1\r\n\r\n", b"", lambda _: done.set_result(None))
        transport.begin(exchange, ("127.0.0.1", server.port))
        await asyncio.sleep(0.1)
        transport.fail(exchange, "timeout", "late")
        await done
        await transport.aclose()
        return exchange.failure

    with serving(handle) as server:
        found = run(work())
        assert isinstance(found, tuple)
        assert found[0] == "transport"
        assert "malformed" in found[1]
