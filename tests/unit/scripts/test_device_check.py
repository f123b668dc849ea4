"""The device check, in the tiny form that Triton's interpreter can run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "device_check.py"


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("device_check", SCRIPT)
    if spec is None or spec.loader is None:
        raise AssertionError(SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.engine  # a quarter of a minute; no engine is booted
def test_the_tiny_form_runs_every_section(tmp_path: Path) -> None:
    """Every section of the check runs and passes; the document is JSON, and the same text goes to the file."""
    command = [sys.executable, str(SCRIPT), "--cpu", "--output", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((tmp_path / "found.json").read_text())
    assert document["ok"] is True
    assert document["not_run"] == []
    sections = document["sections"]
    assert set(sections) == {
        *("casts", "decode", "graph", "prefill", "planted", "smaller", "transfer", "catalogue", "peer", "sweep"),
    }
    assert sections["decode"]["k16v8"]["kv_bytes"] * 4 == sections["decode"]["k16v16"]["kv_bytes"] * 3
    assert sections["decode"]["ratio_floor"] == 0.75
    assert sections["planted"]["caught"] == sections["planted"]["seeded"] == 1
    assert sections["catalogue"]["right"] == 1
    assert "decode                 ok" in done.stderr


def test_without_a_gpu_it_is_one_line() -> None:
    """Where torch finds no GPU the check ends with 2 and says so."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "found no GPU that torch can use, expected one; --cpu runs a tiny version without"
    ]


def test_what_time_runs_out_for_is_not_a_pass() -> None:
    """A section that time did not reach is named and spoils the verdict; one that raises has failed and says why."""
    module = _module()
    report = module.Report(module.Clock(5.0))
    report.section("quick", lambda: {"ok": True}, seconds=0)
    assert report.ok
    report.section("information", lambda: {"ok": True}, seconds=100, decides=False)
    assert report.ok
    report.section("slow", lambda: {"ok": True}, seconds=100)
    assert (report.ok, report.not_run) == (False, ["slow"])
    other = module.Report(module.Clock(5.0))
    assert not other.ok

    def broken() -> dict[str, Any]:
        raise ValueError("no such kernel")

    other.section("broken", broken, seconds=0)
    assert not other.ok
    assert other.sections["broken"]["error"] == "ValueError: no such kernel"
    assert module.plain({"a": [float("inf"), 1.5]}) == {"a": ["inf", 1.5]}


@pytest.mark.parametrize(
    "arguments", [["--seconds", "nan"], ["--seconds", "0"], ["--output", "/no/such/file"], ["--cp"]]
)
def test_a_slip_in_the_arguments_costs_no_time_on_a_device(arguments: list[str]) -> None:
    """What could only fail after the minutes of the check fails before them, with usage and status 2."""
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
    assert "Traceback" not in done.stderr


def test_what_was_timed_is_what_is_compared() -> None:
    """A timed call that writes nothing, or something else, spoils the measurement: its own output is looked at."""
    module = _module()
    check = module.Check(torch.device("cpu"), module.Clock(60.0), tiny=True)
    outputs = {"a": torch.zeros(2), "b": torch.zeros(2)}
    times = check.times({"a": lambda: outputs["a"].fill_(1.0), "b": lambda: None}, outputs)
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3}
    assert outputs["a"].tolist() == [1.0, 1.0]
    assert bool(outputs["b"].isnan().all())
