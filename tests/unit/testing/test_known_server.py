"""The deterministic server as a process: its pages, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import pytest_kvqual
from pytest_kvqual.capture.fidelity import ask, body, known_server

# Servers and clients in real time: beside other tests they would measure those.
pytestmark = pytest.mark.alone

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(pytest_kvqual.__file__).parent.parent)}
COMMAND = [sys.executable, "-m", "pytest_kvqual.testing.server"]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server."""
    with known_server(seconds=60) as found:
        yield found


def send(port: int, data: bytes) -> bytes:
    """One completion request's body; what came back, without chunk framing."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/v1/completions", data)
    found = connection.getresponse().read()
    connection.close()
    return found


def metrics(port: int) -> dict[str, float]:
    """The samples of /metrics by name and labels, the common labels left out."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    samples = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {
        name.replace('engine="0",model_name="known"', "").replace(",}", "}"): float(value) for name, value in samples
    }


def test_metrics_say_what_was_served(port: int) -> None:
    """Counters, finish reasons and the histogram of the time to the first token agree with the truth."""
    ask(port, "POST", "/reset")
    for index, quirk in enumerate((None, "early-eos", "error-object-at-once")):
        script = {"first_ms": 1, "gap_ms": 1, "quirk": quirk}
        send(port, body(f"m-{index}", tokens=6, script=script, prompt_tokens=5))
    truth = ask(port, "GET", "/truth")["requests"]
    found = metrics(port)
    assert found["vllm:num_requests_running{}"] == 0
    assert found["vllm:prompt_tokens_total{}"] == 15
    assert found["vllm:generation_tokens_total{}"] == sum(one["tokens"] for one in truth.values()) == 9
    assert found["vllm:num_preemptions_total{}"] == found["vllm:prefix_cache_hits_total{}"] == 0
    assert found["vllm:prefix_cache_queries_total{}"] == 15
    reasons = {
        match[1]: value
        for name, value in found.items()
        if (match := re.fullmatch(r'vllm:request_success_total\{finished_reason="(\w+)"\}', name))
    }
    assert reasons == {"stop": 1, "length": 1, "abort": 1}
    assert found["vllm:time_to_first_token_seconds_count{}"] == 2
    ttft = [(one["first_token_ns"] - one["received_ns"]) / 1e9 for one in truth.values() if one["tokens"]]
    assert found["vllm:time_to_first_token_seconds_sum{}"] == pytest.approx(sum(ttft), abs=1e-9)
    assert found['vllm:time_to_first_token_seconds_bucket{le="+Inf"}'] == 2
    assert found['vllm:time_to_first_token_seconds_bucket{le="0.1"}'] == sum(value <= 0.1 for value in ttft)


def test_many_at_once(port: int) -> None:
    """Requests of many connections get their own answers, and the truth counts the most in flight."""
    ask(port, "POST", "/reset")
    script = {"first_ms": 300, "gap_ms": 1}
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda index: send(port, body(f"n-{index}", tokens=2, script=script)), range(20)))
    for index, answer in enumerate(found):
        assert answer.count(b'"id":"n-%d"' % index) == 3
    truth = ask(port, "GET", "/truth")
    assert (truth["served"], truth["peak"]) == (20, 20)


def test_same_request_twice_is_told(port: int) -> None:
    """A request that was sent twice says so."""
    ask(port, "POST", "/reset")
    for _ in range(2):
        send(port, body("twice", tokens=1, script={"first_ms": 0}))
    assert ask(port, "GET", "/truth")["requests"]["twice"]["times"] == 2


def test_malformed_script(port: int) -> None:
    """A script that is not understood is a status 400 with the reason."""
    assert b"unknown quirk 'sideways'" in send(port, body("bad", tokens=1, script={"quirk": "sideways"}))


def start(*arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    """A server of its own, that has said its port."""
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT, **more
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["port"] > 0
    return process


def finish(process: subprocess.Popen[bytes]) -> int:
    """Its exit status, within 5 s."""
    try:
        return process.wait(timeout=5)
    finally:
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def test_ends_with_its_input() -> None:
    """It ends when its standard input is closed."""
    process = start("--seconds", "60")
    assert process.stdin is not None
    process.stdin.close()
    assert finish(process) == 0


def test_ends_with_its_time() -> None:
    """It ends after its seconds."""
    assert finish(start("--seconds", "0.2")) == 0


def test_ends_on_a_signal() -> None:
    """SIGTERM ends it."""
    process = start("--seconds", "60")
    process.send_signal(signal.SIGTERM)
    assert finish(process) == 0


def test_ends_with_its_parent() -> None:
    """It ends when the process that started it is gone, though its input stays open."""
    code = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen({COMMAND!r} + ['--seconds', '60'], stdin=0, stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True)\n"
    )
    # The read end stays with the server, the write end with this test: it is never at its end.
    read, write = os.pipe()
    try:
        found = subprocess.run(
            [sys.executable, "-c", code], stdin=read, stdout=subprocess.PIPE, env=ENVIRONMENT, check=True, timeout=20
        )
        pid = int(found.stdout)
        watched = os.pidfd_open(pid)
        try:
            ready, _, _ = select.select([watched], [], [], 5)
            assert ready, f"process {pid} is still there"
        finally:
            os.close(watched)
    except ProcessLookupError:
        pass
    finally:
        os.close(read)
        os.close(write)
