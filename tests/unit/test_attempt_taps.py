"""An attempt whose engine captures graphs: the oracles have a server of their own, with taps in its graphs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_kvqual.attempt import Activity, Attempt
from pytest_kvqual.errors import CaptureError
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.server.command import captures_graphs, worker_config
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Selection


class FakeServer:
    """A server of which only the worker's configuration matters."""

    base_url = "http://127.0.0.1:1"
    boot_s = 1.0

    def __init__(self, log: Path, *, taps: bool) -> None:
        self.log = log
        self.taps = taps
        log.write_text("a log\n")

    def check(self) -> None: ...

    def alive(self) -> bool:
        return True

    def sockets(self) -> list[Any]:
        return []

    def stop(self) -> None: ...


class World:
    """Which servers were booted, and what their workers say of themselves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.servers: list[FakeServer] = []
        self.parts: dict[str, object] = {"parameters": "as loaded", "scales": "as declared", "settings": "one"}
        self.other: dict[int, dict[str, object]] = {}
        self.faults = 0
        monkeypatch.setattr("pytest_kvqual.server.process.Server.start", self.start)
        monkeypatch.setattr("pytest_kvqual.server.rpc.call", self.call)
        monkeypatch.setattr("pytest_kvqual.capture.oracle.capture_oracle", self.capture_oracle)
        monkeypatch.setattr("pytest_kvqual.capture.dispatch.read_dispatch", self.read_dispatch)

    def start(self, command: Any, *, port: int, log: Path, timeouts: object, progress: object) -> FakeServer:
        told = json.loads(command.argv[command.argv.index("--additional-config") + 1])["kvqual"]
        self.servers.append(FakeServer(log, taps=told.get("taps", False)))
        self.events.append(f"boot {log.name}{' with taps' if self.servers[-1].taps else ''}")
        return self.servers[-1]

    def call(self, base_url: str, method: str, *args: object, timeout_s: float) -> list[object]:
        if method == "kvqual_taps":
            return [{"installed": self.servers[-1].taps, "faults": self.faults, "held": 0}]
        if method == "kvqual_identity":
            return [{**self.parts, **self.other.get(len(self.servers), {})}]
        return [{"busy_ns": 5}]

    def capture_oracle(self, server: FakeServer, panel: object, **options: object) -> dict[str, object]:
        self.events.append(f"pass{' with taps' if server.taps else ''}")
        return {"fault": options.get("fault"), "records": [{"rank": 0, "reproducers": []}], "responses": []}

    def read_dispatch(self, server: FakeServer, item: object, **options: object) -> list[object]:
        self.events.append(f"reading{' with taps' if server.taps else ''}")
        return [{"rank": 0, "layers": {}}]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Servers and workers of a test."""
    return World(monkeypatch)


def _selection(*flags: str) -> Selection:
    found = select(load_study("smollm2-cpu"), arm="candidate", length=1024, cache_bytes=None)
    study = replace(found.study, platform="gpu", engine=replace(found.study.engine, flags=flags))
    return replace(found, study=study)


def _attempt(tmp_path: Path, selection: Selection) -> Attempt:
    scope = Scope(lock="0" * 64, arm="candidate", length=1024, cache_bytes=1, engine="0" * 64)
    return Attempt(
        selection, scope, run_dir=tmp_path, prefix="", model=tmp_path, progress=lambda text: None, activity=Activity()
    )


def test_the_oracles_have_a_server_with_taps_of_their_own(world: World, tmp_path: Path) -> None:
    """Everything but the oracle passes comes from servers without taps, and three logs and identities are kept."""
    with _attempt(tmp_path, _selection()) as attempt:
        attempt.boot()
        attempt.identity()
        attempt.dispatch(())
        attempt.oracle(())
    assert world.events == [
        "boot server.log",
        "reading",
        "boot server-taps.log with taps",
        *["pass with taps"] * 4,
        "boot server-again.log",
        "reading",
    ]
    for name in ("server.log", "server-taps.log", "server-again.log", "identity-before-taps.json", "oracle.json"):
        assert attempt.has(name)
    taps = {
        name: json.loads((attempt.path / f"identity-{name}.json").read_bytes())["taps"] for name in ("taps", "after")
    }
    assert (taps["taps"][0]["installed"], taps["after"][0]["installed"]) == (True, False)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_an_engine_without_graphs_needs_no_second_server(platform: str, world: World, tmp_path: Path) -> None:
    """In eager mode, and on a CPU, the oracles use the attempt's one server."""
    selection = _selection("--enforce-eager")
    if platform == "cpu":
        selection = replace(selection, study=replace(selection.study, platform="cpu"))
    with _attempt(tmp_path, selection) as attempt:
        attempt.boot()
        attempt.identity()
        attempt.oracle(())
    assert world.events == ["boot server.log", *["pass"] * 4]
    assert not attempt.has("identity-taps.json")


@pytest.mark.parametrize("server", [2, 3])
@pytest.mark.parametrize("part", ["parameters", "scales", "settings"])
def test_the_servers_are_the_same_but_for_the_taps(part: str, server: int, world: World, tmp_path: Path) -> None:
    """Other weights, scales or settings in the server with taps, or in the one after it, fail the attempt."""
    world.other = {server: {part: "another"}}
    attempt = _attempt(tmp_path, _selection())
    attempt.boot()
    attempt.identity()
    with attempt.failing(), pytest.raises(CaptureError, match=f"found other {part} on rank 0 than at the start"):
        attempt.oracle(())


def test_a_fault_left_in_the_server_with_taps_is_seen(world: World, tmp_path: Path) -> None:
    """Taps are expected there; a planted fault that was not taken back is not."""
    attempt = _attempt(tmp_path, _selection())
    attempt.boot()
    attempt.identity()
    capture = world.capture_oracle

    def leaving(*args: Any, **options: Any) -> dict[str, object]:
        world.faults = 1
        return capture(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytest_kvqual.capture.oracle.capture_oracle", leaving)
        with pytest.raises(CaptureError, match="found taps, faults or held blocks"):
            attempt.oracle(())
    attempt.fail(CaptureError("it failed"))
    assert {"server.log", "server-taps.log"} <= {path.name for path in attempt.path.iterdir() if attempt.has(path.name)}


def test_only_a_server_for_the_oracles_is_told_of_taps() -> None:
    """The worker's configuration has the word where it is asked for, and nothing of it elsewhere."""
    selection = _selection()
    assert "taps" not in worker_config(selection, model=Path("/m"))
    assert worker_config(selection, model=Path("/m"), taps=True)["taps"] is True
    assert captures_graphs(selection)
    assert not captures_graphs(_selection("--enforce-eager"))
