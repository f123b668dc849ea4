"""The real engine: its sockets, its waves, its forced losses, its serial reference, and its end."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from pytest_kvqual.capture import http
from pytest_kvqual.capture.quality import capture_nll, capture_parity, send_all
from pytest_kvqual.errors import CaptureError, ServerError
from pytest_kvqual.models import model_folder, verify_model
from pytest_kvqual.server import rpc
from pytest_kvqual.server.command import PACKAGE_ROOT, serve_command, worker_config
from pytest_kvqual.server.process import Server, Timeouts, free_port
from pytest_kvqual.server.reference import run_reference
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Selection
from pytest_kvqual.study.panels import Panel, load_panel

pytestmark = pytest.mark.engine

LIMIT_S = 300.0


@pytest.fixture(scope="module")
def selection() -> Selection:
    """The embedded study's stock arm at 1,024 tokens."""
    return select(load_study("smollm2-cpu"), arm="native", length=1024, cache_bytes=None)


@pytest.fixture(scope="module")
def model(selection: Selection) -> Path:
    """The study's model folder."""
    folder = model_folder(selection.study.model)
    verify_model(folder, selection.study.model.files)
    return folder


@pytest.fixture(scope="module")
def parity(selection: Selection) -> Panel:
    """The study's parity panel."""
    study = selection.study
    return load_panel(study.parity.panel, task="parity", length=None, vocabulary=study.model.vocabulary)


@pytest.fixture(scope="module")
def nll(selection: Selection) -> Panel:
    """The study's NLL panel."""
    study, length = selection.study, selection.length
    return load_panel(length.panels["nll"], task="nll", length=length.tokens, vocabulary=study.model.vocabulary)


def boot(selection: Selection, model: Path, log: Path) -> Server:
    """Start the stock arm's server."""
    port = free_port()
    command = serve_command(
        selection,
        model=model,
        port=port,
        worker_config=worker_config(selection, model=model),
        python=Path(sys.executable),
        inherited=os.environ,
    )
    return Server.start(command, port=port, log=log, timeouts=Timeouts(boot_s=selection.study.engine.boot_timeout_s))


@pytest.fixture(scope="module")
def server(selection: Selection, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests that leave it as it was."""
    with boot(selection, model, tmp_path_factory.mktemp("server") / "server.log") as booted:
        yield booted


def tokens(records: Sequence[dict[str, object]]) -> dict[str, list[int]]:
    """The generated token ids by request."""
    return {str(it["id"]): json.loads(str(it["body"]))["choices"][0]["token_ids"] for it in records}


def wave(server: Server, selection: Selection, panel: Panel) -> dict[str, list[int]]:
    """One wave of the panel in its order."""
    kept: list[dict[str, object]] = []
    capture_parity(
        server,
        panel,
        cast(Any, kept),
        model=selection.study.model.name,
        schedule="waves",
        wave_size=len(panel.items),
        timeout_s=LIMIT_S,
    )
    return tokens(kept)


def gone(pids: Sequence[int], seconds: float = 20.0) -> bool:
    """True once none of the processes runs any more."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(running(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def running(pid: int) -> bool:
    """True for a process that is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_every_socket_of_the_engine_is_loopback(server: Server) -> None:
    """The server's port and all that its processes open among themselves are loopback; the core is in the tree."""
    listeners = server.check_loopback()
    assert any(it.port == server.port for it in listeners)
    assert len(server.tree.processes()) >= 2


def test_the_same_wave_gives_the_same_tokens(server: Server, selection: Selection, parity: Panel) -> None:
    """A wave sent twice, and sent in a rotated order, differs in none of 32 outputs."""
    first = wave(server, selection, parity)
    assert len(first) == 32
    assert all(first.values())
    assert [name for name, found in wave(server, selection, parity).items() if found != first[name]] == []
    rotated = replace(parity, items=parity.items[7:] + parity.items[:7])
    assert [name for name, found in wave(server, selection, rotated).items() if found != first[name]] == []


def test_two_boots_give_the_same_wave(
    server: Server, selection: Selection, model: Path, parity: Panel, tmp_path: Path
) -> None:
    """A wave on a second server differs in none of 32 outputs."""
    first = wave(server, selection, parity)
    with boot(selection, model, tmp_path / "log") as second:
        assert wave(second, selection, parity) == first


def test_forced_tokens_are_the_targets_with_their_raw_loss(server: Server, selection: Selection, nll: Panel) -> None:
    """Each returned token is its target, and its log-probability is that of the distribution before forcing."""
    panel = replace(nll, items=nll.items[:4])
    kept: list[dict[str, object]] = []
    name = selection.study.model.name
    capture_nll(server, panel, cast(Any, kept), model=name, wave_size=4, timeout_s=LIMIT_S)
    for item, record in zip(panel.items, kept, strict=True):
        choice = json.loads(str(record["body"]))["choices"][0]
        assert choice["token_ids"] == list(item.targets)
        losses = choice["logprobs"]["token_logprobs"]
        assert len(losses) == len(item.targets)
        # After forcing, the distribution is one point: every figure would be zero.
        assert all(math.isfinite(loss) and loss <= 0 for loss in losses)
        assert sum(losses) < -1
    # The same figures without the processor: the prompt's own log-probabilities over prompt and targets.
    item = panel.items[0]
    answer = cast(
        dict[str, Any],
        rpc.post(
            server.base_url,
            "/v1/completions",
            {
                "model": name,
                "prompt": [*item.prompt, *item.targets],
                "max_tokens": 1,
                "temperature": 0,
                "prompt_logprobs": 0,
            },
            timeout_s=LIMIT_S,
            what="prompt logprobs",
        ),
    )
    rows = answer["choices"][0]["prompt_logprobs"][len(item.prompt) :]
    plain = [row[str(target)]["logprob"] for row, target in zip(rows, item.targets, strict=True)]
    forced = json.loads(str(kept[0]["body"]))["choices"][0]["logprobs"]["token_logprobs"]
    # bfloat16 weights in a prefill of 1,152 rows against decode steps of 4 rows: sums are ordered differently.
    assert max(abs(a - b) for a, b in zip(forced, plain, strict=True)) < 0.25
    assert abs(sum(forced) - sum(plain)) / len(plain) < 0.01


def test_malformed_targets_are_refused_and_the_engine_goes_on(server: Server, selection: Selection) -> None:
    """Targets that cannot be forced get status 400, ids beyond the vocabulary end nothing."""
    name = selection.study.model.name

    def ask(targets: list[int], max_tokens: int) -> http.Response:
        request = http.completion(
            id="x", index=0, request_id=f"bad-{len(targets)}-{max_tokens}", model=name, prompt=[1, 2], max_tokens=1
        )
        body = dict(request.body) | {"max_tokens": max_tokens, "vllm_xargs": {"kvqual_targets": targets}}
        found: list[http.Response] = []
        send_all(
            server,
            [replace(request, body=body)],
            schedule="serial",
            wave_size=1,
            timeout_s=60,
            on_response=found.append,
        )
        return found[0]

    refused = ask([5, 6], 3)
    assert refused.status == 400
    assert "expected 2, one a target" in str(refused.body)
    assert ask([selection.study.model.vocabulary + 10**6], 1).status == 200
    assert ask([5, 6], 2).error is None
    assert server.alive()


def test_serial_answers_equal_generation_in_process(
    server: Server, selection: Selection, model: Path, parity: Panel, tmp_path: Path
) -> None:
    """Served one at a time, prompts give the tokens that the engine gives in process, in both orders."""
    panel = replace(parity, items=parity.items[:4])
    kept: list[dict[str, object]] = []
    capture_parity(server, panel, cast(Any, kept), model=selection.study.model.name, timeout_s=LIMIT_S)
    steps: list[tuple[int, int]] = []
    count = run_reference(
        selection,
        model=model,
        panel=panel,
        worker_config=worker_config(selection, model=model),
        python=Path(sys.executable),
        inherited=os.environ,
        log=tmp_path / "reference.log",
        out=tmp_path / "reference.jsonl",
        timeout_s=LIMIT_S,
        progress=lambda done, total: steps.append((done, total)),
    )
    records = [json.loads(line) for line in (tmp_path / "reference.jsonl").read_text().splitlines()]
    assert count == len(records) == 8
    assert [(it["order"], it["index"]) for it in records] == [
        *(("forward", n) for n in range(4)),
        *(("reverse", n) for n in reversed(range(4))),
    ]
    served = tokens(kept)
    assert all(it["token_ids"] == served[it["id"]] for it in records)
    assert steps[-1] == (8, 8)


def test_a_failing_reference_says_why(selection: Selection, model: Path, parity: Panel, tmp_path: Path) -> None:
    """An engine that does not start in process is one error with the cause and the log's path."""
    with pytest.raises(
        CaptureError, match=r"exit status 1 and 0 records, expected 0 and 2; .*no_such_module"
    ) as caught:
        run_reference(
            selection,
            model=model,
            panel=replace(parity, items=parity.items[:1]),
            worker_config=worker_config(selection, model=model),
            python=Path(sys.executable),
            inherited=os.environ,
            log=tmp_path / "reference.log",
            out=tmp_path / "reference.jsonl",
            timeout_s=LIMIT_S,
            worker_class="no_such_module.Worker",
        )
    assert str(tmp_path / "reference.log") in str(caught.value)


def test_an_engine_that_cannot_start_says_why(selection: Selection, model: Path, tmp_path: Path) -> None:
    """The first exception of the engine's process is in the error, and no process is left."""
    with pytest.raises(
        ServerError,
        match=r"ended with exit status 1 while starting.*ValueError: No available memory for the cache blocks",
    ):
        boot(replace(selection, cache_bytes=4096), model, tmp_path / "log")


def test_a_server_killed_in_a_wave_leaves_every_record_and_no_process(
    selection: Selection, model: Path, nll: Panel, tmp_path: Path
) -> None:
    """SIGKILL of the API server in a wave: one typed failure per request, a CaptureError, nothing hangs or is left."""
    server = boot(selection, model, tmp_path / "log")
    try:
        pids = [process.pid for process in server.tree.processes()]
        kept: list[dict[str, object]] = []
        timer = threading.Timer(3.0, os.kill, (server.pid, signal.SIGKILL))
        timer.start()
        begun = time.monotonic()
        with pytest.raises(CaptureError, match="32 of 32 requests failed"):
            capture_nll(
                server,
                nll,
                cast(Any, kept),
                model=selection.study.model.name,
                wave_size=32,
                timeout_s=LIMIT_S,
            )
        assert time.monotonic() - begun < 30
        assert [it["id"] for it in kept] == [item.id for item in nll.items]
        assert all(it["body"] is None and it["error"] for it in kept)
        assert gone(pids)
        # The supervisor reports the end in a process of its own, moments after the end itself.
        deadline = time.monotonic() + 10
        while server.alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(ServerError, match="ended with signal 9"):
            server.check()
    finally:
        server.stop()


STARTER = """
    import os, sys
    from pathlib import Path
    from pytest_kvqual.models import model_folder
    from pytest_kvqual.server.command import serve_command, worker_config
    from pytest_kvqual.server.process import ProcessTree, Server, Timeouts, free_port
    from pytest_kvqual.study.load import load_study, select

    selection = select(load_study("smollm2-cpu"), arm="native", length=1024, cache_bytes=None)
    model, port = model_folder(selection.study.model), free_port()
    command = serve_command(
        selection, model=model, port=port, worker_config=worker_config(selection, model=model),
        python=Path(sys.executable), inherited=os.environ,
    )
    if sys.argv[2] == "ready":
        tree = Server.start(command, port=port, log=Path(sys.argv[1]), timeouts=Timeouts(boot_s=240)).tree
    else:
        tree = ProcessTree(command, log=Path(sys.argv[1]), stop_s=10)
    print(tree._supervisor.pid, flush=True)
    sys.stdin.read()
"""


def core_is_up(log: Path, supervisor: psutil.Process) -> bool:
    """The core's process has begun to build the engine."""
    return b"Initializing a V1 LLM engine" in log.read_bytes() and len(supervisor.children(recursive=True)) >= 2


@pytest.mark.parametrize("moment", ["importing", "core", "ready"])
def test_sigkill_of_the_starter_leaves_no_engine(tmp_path: Path, moment: str) -> None:
    """However far the engine is, it ends with the process that started it: no core, no tracker, no supervisor."""
    log = tmp_path / "log"
    starter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STARTER), str(log), moment],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)},
        text=True,
    )
    try:
        assert starter.stdout is not None
        supervisor = psutil.Process(int(starter.stdout.readline()))
        wait_for: dict[str, Callable[[], bool]] = {
            "importing": lambda: len(supervisor.children(recursive=True)) >= 1,
            "core": lambda: core_is_up(log, supervisor),
            "ready": lambda: True,
        }
        deadline = time.monotonic() + 120
        while not wait_for[moment]():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        pids = [supervisor.pid, *(child.pid for child in supervisor.children(recursive=True))]
        assert len(pids) >= (2 if moment == "importing" else 3)
    finally:
        starter.kill()
        starter.communicate()
    assert gone(pids)
