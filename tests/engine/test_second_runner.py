"""The real engine under its second model runner, on a CPU: the same worker, taps and oracles.

vLLM's own V2 runner class prepares, runs and samples every step; its Triton kernels run in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_kvqual.models import model_folder
from pytest_kvqual.study.load import load_study

pytest.importorskip("triton")
pytestmark = pytest.mark.engine

SUPPORT = Path(__file__).parents[1] / "support"
LAYERS, PROMPT_TOKENS, TOKENS, REQUESTS = 30, 7 + 40 + 19, 4, 3
ROWS = PROMPT_TOKENS + REQUESTS * (TOKENS - 1)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What one engine said; it boots once for all tests of this module."""
    run = subprocess.run(
        [sys.executable, str(SUPPORT / "second_runner.py"), str(model_folder(load_study("smollm2-cpu").model))],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    record: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return record


def test_the_worker_knows_its_runner(found: dict[str, Any]) -> None:
    """Identity names the second runner, no graphs and no device, and has the scales of every moment."""
    assert found["identity"]["runner"] == {"kind": "v2", "graphs": "NONE", "taps_in_graphs": False, "taps_bytes": 0}
    assert found["identity"]["device"]["devices"] == []
    assert found["layers"] == LAYERS
    assert found["moments"] == ["before_capture", "before_warmup", "now"]


@pytest.mark.parametrize("name", ["plain", "probe"])
def test_a_healthy_window_has_no_finding(name: str, found: dict[str, Any]) -> None:
    """Every row of every step is checked in every layer, chunked prompts beside decodes, and nothing is objected to."""
    window = found[name]
    assert window["kinds"] == {}
    assert window["rows"] == {"scheduled": ROWS, "prefix": 0, "recomputed": 0}
    assert window["checked"]["row_map"] == ROWS
    assert window["checked"]["writes"] == window["checked"]["outputs"] == LAYERS * ROWS
    assert window["checked"]["maps_changed"] > 0
    assert window["conditions"]["mixed"] > 0
    assert window["conditions"]["chunked"] > 0
    assert window["worst_ratio"] <= 1
    assert window["self_tests"] == ["caught", "caught"]
    assert window["taps"]["installed"]


def test_taps_change_no_token(found: dict[str, Any]) -> None:
    """The answers under the taps are those without them, and no tap or fault is left."""
    assert found["plain"]["tokens"] == found["before"]
    assert found["idle"] == {"installed": False, "faults": 0, "held": 0}


def test_seeded_faults_are_found_by_their_gates(found: dict[str, Any]) -> None:
    """A wrong slot is routing's, a stale block table stale-maps'."""
    assert "routing" in found["fault"]["kinds"]
    assert "stale-maps" in found["stale"]["kinds"]


def test_targets_are_forced(found: dict[str, Any]) -> None:
    """Each request answers with its targets, one loss for each."""
    assert found["forced"] == [[11, 12, 13, 14]] * REQUESTS
    assert found["losses"] == [TOKENS] * REQUESTS


def test_inputs_and_kernels_are_read(found: dict[str, Any]) -> None:
    """Each step has a digest of its own, and every layer's kernels have names."""
    assert found["inputs"]["steps"] == found["inputs"]["different"] > TOKENS
    assert any("cpu_attention" in name for name in found["kernels"])
