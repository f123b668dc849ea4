"""A server that queues, pauses and answers as the engine does, without one."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


class FakeEngine:
    """Holds requests while paused; ``order`` is the order in which it got them.

    ``statuses`` maps a position in that order to the HTTP status to answer with; ``die_at`` closes every connection
    once so many requests have arrived; ``mute`` names positions that leave no trace in the log. ``rpc_results`` maps a
    worker method to what its calls return in turn (all others return ``rpc_result``), ``rpc_statuses`` to the HTTP
    status that it is answered with. ``timeline`` has worker methods, ``pause`` and
    ``resume``, and the prompts of requests as they came.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.order: list[str] = []
        self.bodies: list[dict[str, object]] = []
        self.calls: list[str] = []
        self.rpc: list[tuple[str, list[object]]] = []
        self.rpc_result: object = {}
        self.rpc_results: dict[str, list[object]] = {}
        self.rpc_statuses: dict[str, int] = {}
        self.timeline: list[object] = []
        self.statuses: dict[int, int] = {}
        self.answers: dict[int, str] = {}
        self.mute: set[int] = set()
        self.die_at: int | None = None
        self.fail_paths: dict[str, int] = {}
        self.dead = threading.Event()
        self.running = threading.Event()
        self.running.set()
        self.in_flight = 0
        self.most_in_flight = 0
        self._lock = threading.Lock()
        self._random = random.Random(1)
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                engine.handle(self, body)

            def log_message(self, format: str, *arguments: object) -> None:
                return

        log.touch()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self.dead.set()
        self.running.set()
        self.server.shutdown()
        self.server.server_close()

    def handle(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        """One request."""
        path = handler.path
        if self.dead.is_set():
            handler.connection.close()
            handler.close_connection = True
            return
        if path in self.fail_paths:
            self.reply(handler, self.fail_paths[path], '{"error": "told to fail"}')
            return
        if path == "/pause?mode=keep&clear_cache=false":
            self.calls.append("pause")
            self.timeline.append("pause")
            self.running.clear()
            self.reply(handler, 200, "{}")
        elif path == "/resume":
            self.calls.append("resume")
            self.timeline.append("resume")
            self.running.set()
            self.reply(handler, 200, "{}")
        elif path == "/collective_rpc":
            document = json.loads(body)
            method = document["method"]
            self.rpc.append((method, document["args"]))
            self.timeline.append(method)
            turns = self.rpc_results.get(method)
            result = turns.pop(0) if turns else self.rpc_result
            self.reply(handler, self.rpc_statuses.get(method, 200), json.dumps({"results": [result]}))
        else:
            self.complete(handler, json.loads(body))

    def complete(self, handler: BaseHTTPRequestHandler, body: dict[str, object]) -> None:
        """A completion: late acceptance, then a wait for the engine to run."""
        time.sleep(self._random.random() * 0.02)
        with self._lock:
            position = len(self.order)
            self.order.append(str(body["request_id"]))
            self.bodies.append(body)
            self.timeline.append(body["prompt"])
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            if self.die_at is not None and len(self.order) >= self.die_at:
                self.dead.set()
                self.running.set()
            if position not in self.mute:
                with self.log.open("a") as file:
                    file.write(f"INFO Added request cmpl-{body['request_id']}-0-abcd1234.\n")
        self.running.wait(20)
        # Long enough for what may overlap to overlap.
        time.sleep(0.01)
        with self._lock:
            self.in_flight -= 1
        if self.dead.is_set():
            handler.connection.close()
            handler.close_connection = True
            return
        text = json.dumps({"choices": [{"token_ids": [position], "finish_reason": "length"}]})
        self.reply(handler, self.statuses.get(position, 200), self.answers.get(position, text))

    @staticmethod
    def reply(handler: BaseHTTPRequestHandler, status: int, text: str) -> None:
        """Answer, if anybody still listens."""
        data = text.encode()
        try:
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)
        except OSError:
            return


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    """A fake engine on a loopback port; its log is in ``tmp_path``."""
    fake = FakeEngine(tmp_path / "engine.log")
    try:
        yield fake
    finally:
        fake.close()
