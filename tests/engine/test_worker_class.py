"""The worker class stands on the platform's own worker."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

PROGRAM = """
import sys
from unittest import mock
from vllm.platforms import current_platform
with mock.patch.object(type(current_platform), "is_cpu", lambda self: sys.argv[1] == "cpu"):
    from pytest_kvqual.worker.serving_worker import ServingWorker
(base,) = ServingWorker.__bases__
print(base.__module__, base.__name__)
"""


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("cpu", "vllm.v1.worker.cpu_worker CPUWorker"), ("cuda", "vllm.v1.worker.gpu_worker Worker")],
)
def test_the_base_is_the_platforms_worker(platform: str, expected: str) -> None:
    """On a CPU the base is vLLM's CPU worker, elsewhere its GPU worker."""
    run = subprocess.run([sys.executable, "-c", PROGRAM, platform], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == expected
