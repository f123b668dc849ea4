"""A server that is killed in the middle of a capture: what the run says, what it keeps, what the next run does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from pytest_kvqual.study import freeze, load

pytestmark = [pytest.mark.engine]
QUALIFICATION = Path(__file__).parents[2] / "qualification"
GATES = ("test_01_identity.py", "test_02_dispatch.py", "test_03_stale_maps.py", "test_03_routing.py")
NAMES = ("identity", "dispatch", "stale-maps", "routing")
LIMIT_S = 600.0


def run(study: Path, run_dir: Path, on_line: Callable[[str, psutil.Process], None]) -> tuple[int, str]:
    """One run of the first four gates in a process of its own; each line of it is handed on as it comes."""
    command = [sys.executable, "-u", "-m", "pytest", *(str(QUALIFICATION / name) for name in GATES)]
    command += [
        "-m",
        "cpu",
        "--study",
        str(study),
        "--run-dir",
        str(run_dir),
        "--progress",
        "always",
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_kvqual.plugin",
    ]
    # Loaded by name, so that the test is the same whether or not the package is installed.
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        for line in process.stdout or ():
            lines.append(line)
            on_line(line, psutil.Process(process.pid))
        return process.wait(LIMIT_S), "".join(lines)


def engines(process: psutil.Process) -> Sequence[psutil.Process]:
    """The processes of the server that a run has started."""
    return [child for child in process.children(recursive=True) if "api_server" in " ".join(child.cmdline())]


def outcomes(run_dir: Path) -> dict[str, str]:
    """The latest outcome of each gate."""
    found = {}
    for path in sorted(run_dir.glob("receipts/candidate-*/*.json"), key=lambda path: int(path.stem.rpartition("-")[2])):
        predicate = json.loads(path.read_text())["predicate"]
        found[predicate["gate"]["name"]] = predicate["verdict"]["outcome"]
    return found


def test_killed_in_mid_capture(tmp_path: Path) -> None:
    """The gate fails, later gates are refused, the attempt is kept as failed; the next run is attempt 2 and passes."""
    study = tmp_path / "study"
    shutil.copytree(load.studies_folder() / "smollm2-cpu", study)
    (study / "lock.json").unlink(missing_ok=True)
    freeze.freeze(load.load_study(str(study)))
    run_dir = tmp_path / "run"
    killed: list[int] = []

    def kill(line: str, process: psutil.Process) -> None:
        if line.startswith("candidate: oracle") and not killed:
            killed.extend(engine.pid for engine in engines(process))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    status, text = run(study, run_dir, kill)
    assert killed, text
    assert status == 1
    found = outcomes(run_dir)
    assert [found.pop(name) for name in NAMES] == ["PASS", "PASS", "FAIL", "REFUSED"], text
    assert set(found.values()) == {"REFUSED"}, text
    (attempt,) = run_dir.glob("evidence/candidate-*/*")
    assert json.loads((attempt / "outcome.json").read_text())["outcome"] == "failed"
    assert not any(psutil.pid_exists(pid) for pid in killed)

    status, text = run(study, run_dir, lambda line, process: None)
    assert [outcomes(run_dir)[name] for name in NAMES] == ["PASS"] * len(NAMES), text
    assert [path.name for path in sorted(run_dir.glob("evidence/candidate-*/*"))] == ["attempt-1", "attempt-2"]
    assert "native: captured earlier" in text
    # The other gates were left out on purpose, and that is no green run.
    assert status == 1
