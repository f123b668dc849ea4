"""Calls to the workers through the server's development endpoints."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pytest_kvqual.errors import ServerError
from pytest_kvqual.server import rpc


class Answers:
    """What the server answers next, and what it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.text = "{}"
        self.asked: list[tuple[str, bytes]] = []
        self.base_url = ""


@pytest.fixture
def answers() -> Iterator[Answers]:
    """A server that answers as told."""
    told = Answers()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.asked.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(told.status)
            self.end_headers()
            self.wfile.write(told.text.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    told.base_url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_call_returns_one_result_per_rank(answers: Answers) -> None:
    """Arguments go out as JSON, results come back in rank order."""
    answers.text = '{"results": [{"rank": 0}, {"rank": 1}]}'
    assert rpc.call(answers.base_url, "kvqual_plant", "swap", depth=2) == [{"rank": 0}, {"rank": 1}]
    ((path, body),) = answers.asked
    assert path == "/collective_rpc"
    assert json.loads(body) == {"method": "kvqual_plant", "args": ["swap"], "kwargs": {"depth": 2}}


def test_a_worker_that_raises_is_told_with_its_text(answers: Answers) -> None:
    """The engine's text is part of the error, in one line."""
    answers.status, answers.text = 500, '{"error": {"message": "KeyError:\n no such fault"}}'
    with pytest.raises(ServerError, match=r"worker method 'kvqual_plant' answered 500.*KeyError: no such fault"):
        rpc.call(answers.base_url, "kvqual_plant", "x")


@pytest.mark.parametrize("text", ["", "[]", '{"results": 3}'])
def test_an_answer_without_results_is_refused(answers: Answers, text: str) -> None:
    """Anything but a list of results is an error."""
    answers.text = text
    with pytest.raises(ServerError, match="expected a list of results"):
        rpc.call(answers.base_url, "kvqual_identity")


def test_an_answer_that_is_not_json_is_refused(answers: Answers) -> None:
    """The answer is quoted."""
    answers.text = "<html>"
    with pytest.raises(ServerError, match="answered <html>, expected JSON"):
        rpc.call(answers.base_url, "kvqual_identity")


def test_pause_keeps_the_requests(answers: Answers) -> None:
    """Pausing uses the mode that keeps requests, and resuming ends it."""
    rpc.pause(answers.base_url)
    rpc.resume(answers.base_url)
    assert [path for path, _ in answers.asked] == ["/pause?mode=keep&clear_cache=false", "/resume"]


def test_a_server_that_is_gone_is_named() -> None:
    """A refused connection is a ServerError with the address."""
    with pytest.raises(
        ServerError, match=r"worker method 'x' got no answer from http://127.0.0.1:1: ConnectionRefused"
    ):
        rpc.call("http://127.0.0.1:1", "x", timeout_s=2)


def test_a_proxy_is_never_used(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback address is reached directly whatever the environment says."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    answers.text = '{"results": []}'
    assert rpc.call(answers.base_url, "x") == []
