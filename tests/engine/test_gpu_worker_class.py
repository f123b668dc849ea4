"""ServingWorker over the engine's GPU worker class: its own methods, with a runner whose graphs are recorded steps.

Nothing boots and no device is needed; what of the GPU worker cannot run here is listed in docs/measured.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

SUPPORT = Path(__file__).parents[1] / "support"
STEPS, REPLAYS, ROWS = 5, 3, 18


@cache
def _run(kind: str, taps: str) -> dict[str, Any]:
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, str(SUPPORT / "gpu_worker.py"), kind, taps],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module", params=["v1", "v2"])
def tapped(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A server whose graphs were captured with taps."""
    return {"kind": request.param, **_run(request.param, "taps")}


@pytest.fixture(scope="module", params=["v1", "v2"])
def plain(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A server whose graphs were captured without."""
    return {"kind": request.param, **_run(request.param, "plain")}


def test_scales_are_read_immediately_before_capture(tapped: dict[str, Any], plain: dict[str, Any]) -> None:
    """The engine's own warm-up comes first, then the snapshot, then the capture; every copy of every scale is in it."""
    for found in (tapped, plain):
        assert found["base"] == ["vllm.v1.worker.gpu_worker.Worker"]
        assert found["told"] == ["kernels warm", "capture, scales read"]
        assert [layer["v"] for layer in found["scales"]] == [
            {"_v_scale": [scale.hex()], "_v_scale_float": [scale.hex()]} for scale in (0.5, 1.0)
        ]


def test_taps_are_in_the_graphs_and_nowhere_else(tapped: dict[str, Any]) -> None:
    """After capture the layers are as they were found, and the worker says that taps are in its graphs."""
    assert tapped["left"] == {"a": [], "b": []}
    assert tapped["idle"] == {"installed": True, "faults": 0, "held": 0}
    runner = tapped["runner"]["runner"]
    assert (runner["kind"], runner["graphs"], runner["taps_in_graphs"]) == (tapped["kind"], "FULL_DECODE_ONLY", True)
    assert runner["taps_bytes"] > 0
    assert tapped["runner"]["device"]["reason"] == "the engine's tensors are on cpu"


def test_a_server_without_taps_says_so(plain: dict[str, Any]) -> None:
    """What is timed runs in a server whose graphs have no taps, before and after any window."""
    assert plain["idle"] == plain["after"] == {"installed": False, "faults": 0, "held": 0}
    assert plain["runner"]["runner"] == {
        "kind": plain["kind"],
        "graphs": "FULL_DECODE_ONLY",
        "taps_in_graphs": False,
        "taps_bytes": 0,
    }


def test_a_window_sees_every_row_of_every_step(tapped: dict[str, Any], plain: dict[str, Any]) -> None:
    """With taps in the graphs the steps replay and are seen; without, no step of a window replays."""
    for found, replays in ((tapped, REPLAYS), (plain, 0)):
        window = found["plain"]
        assert (window["eager"], window["replays"]) == (STEPS - replays, replays)
        assert window["record"]["conditions"]["replayed"] == replays
        assert window["record"]["rows"]["scheduled"] == window["record"]["row_map"]["checked"] == ROWS
        assert window["record"]["placement"]["rows_checked"] == 2 * ROWS
        assert {name: kinds for name, kinds in window["kinds"].items() if kinds} == {}
        assert window["outputs"] == STEPS


def test_fingerprints_fills_and_faults_run_without_graphs(tapped: dict[str, Any], plain: dict[str, Any]) -> None:
    """These windows enter Python in every step, find nothing that is not planted, and what is planted."""
    for found in (tapped, plain):
        assert (found["probe"]["eager"], found["probe"]["replays"]) == (STEPS, 0)
        assert {name: kinds for name, kinds in found["probe"]["kinds"].items() if kinds} == {}
        fault = found["fault"]
        assert fault["started"]["fault"] == "gpu_worker:planted"
        assert fault["taps"]["faults"] == 1
        assert (fault["eager"], fault["replays"]) == (STEPS, 0)
        assert fault["kinds"]["routing"]["wrong-cell"] > 0


def test_inputs_and_activity_are_counted(tapped: dict[str, Any], plain: dict[str, Any]) -> None:
    """Each step has one digest of its inputs, no two alike, and the engine's steps and tokens add up."""
    for found in (tapped, plain):
        assert found["inputs"]["steps"] == len(set(found["inputs"]["digests"])) == STEPS
        assert found["activity"] == {"steps": 4 * STEPS, "tokens": 4 * ROWS}
