"""What importing the judges costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

ROOMS = (
    "pytest_kvqual.judge.sequence",
    "pytest_kvqual.judge.permit",
    "pytest_kvqual.judge.gates.nll",
    "pytest_kvqual.judge.gates.preservation",
    "pytest_kvqual.judge.gates.identity",
    "pytest_kvqual.judge.gates.dispatch",
    "pytest_kvqual.judge.gates.replay",
    "pytest_kvqual.judge.gates.determinism",
    "pytest_kvqual.judge.gates.fidelity",
    "pytest_kvqual.judge.gates.superiority",
    "pytest_kvqual.study.plan",
    "pytest_kvqual.receipt.write",
    "pytest_kvqual.stats.bounds",
    "pytest_kvqual.stats.paired",
)


@pytest.mark.parametrize("room", ROOMS)
def test_importing_is_light(room: str) -> None:
    """A fresh process that imports the module has loaded no numpy, scipy, httpx, torch or vllm."""
    heavy = ("numpy", "scipy", "httpx", "torch", "vllm", "pytest", "jinja2")
    code = f"import sys, {room}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
