"""The plugin costs next to nothing in a run that holds no gate."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("numpy", "scipy", "httpx", "torch", "vllm", "jinja2", "psutil", "hypothesis", "asyncio")
BUDGET_S = 0.060


def environment() -> dict[str, str]:
    """Ours, with no plugin but those that a command names."""
    return {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}


def help_seconds(*args: str) -> float:
    """Processor seconds of one ``pytest --help``: one thread, and a busy machine changes them little."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "pytest", "--help", *args],
        check=True,
        stdout=subprocess.DEVNULL,
        env=environment(),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("module", ["pytest_kvqual.plugin", "pytest_kvqual.session", "pytest_kvqual.cli"])
def test_no_heavy_import(module: str) -> None:
    """Neither the plugin, nor the session of a run with gates, nor the command line imports a heavy package."""
    program = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment()
    )
    assert result.stdout.strip() == "[]"


def test_a_run_without_gates_loads_no_session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary test run with the plugin has neither the session's module nor a heavy one in sys.modules."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    names = (*HEAVY, "pytest_kvqual.session", "pytest_kvqual.campaign")
    pytester.makepyfile(
        f"import sys\ndef test_modules():\n    assert [name for name in {names!r} if name in sys.modules] == []\n"
    )
    result = pytester.runpytest_subprocess("-p", "pytest_kvqual.plugin")
    result.assert_outcomes(passed=1)


def test_help_starts_no_process_and_names_the_options(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of ``pytest --help`` names the options, and nothing is started."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    guard = (
        "import subprocess, os\n"
        "def refuse(*args, **kwargs): raise SystemExit('a process was started')\n"
        "subprocess.Popen = os.fork = os.posix_spawn = refuse\n"
    )
    Path(pytester.path / "guard.py").write_text(guard)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
    result = pytester.runpytest_subprocess("-p", "guard", "-p", "pytest_kvqual.plugin", "--help")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["*--study=NAME|PATH*", "*--arm=NAME*", "*--length=N*", "*--run-dir=DIR*", "*--cache-bytes=N*", "*--prefix=P*"]
    )


def test_help_overhead() -> None:
    """The median of paired runs of pytest --help, with the plugin and without, differs by less than 60 ms."""
    differences = []
    for _ in range(9):
        without = help_seconds()
        differences.append(help_seconds("-p", "pytest_kvqual.plugin") - without)
    assert statistics.median(differences) < BUDGET_S, differences
