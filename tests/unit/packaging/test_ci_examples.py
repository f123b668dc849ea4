"""The CI files: this project's own, and the examples of docs/ci.md for other projects."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from pytest_kvqual import __version__, plugin
from pytest_kvqual.cli import _parser

yaml: Any = pytest.importorskip("yaml", reason="PyYAML comes with the engine")

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
JOBS = ("backend", "gates", "gpu", "audit")


@pytest.fixture(scope="module")
def github() -> dict[str, list[str]]:
    """The commands of each job of the first example."""
    document = yaml.safe_load(_blocks()[0])
    return {name: [it["run"] for it in job["steps"] if "run" in it] for name, job in document["jobs"].items()}


@pytest.fixture(scope="module")
def gitlab() -> dict[str, list[str]]:
    """The commands of each job of the second."""
    document = yaml.safe_load(_blocks()[1])
    return {name: job["script"] for name, job in document.items() if name != "stages"}


def _blocks() -> list[str]:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.S)
    assert len(blocks) == 2
    return blocks


def test_both_examples_run_the_same_commands(github: dict[str, list[str]], gitlab: dict[str, list[str]]) -> None:
    """Job by job; only the run directory of the GPU job is named apart: GitLab has one folder for all artifacts."""
    assert set(github) == set(gitlab) == set(JOBS)
    for job in JOBS:
        assert [line.replace("kvqual-run-gpu", "kvqual-run") for line in gitlab[job]] == github[job]


def test_each_command_of_the_examples_can_be_typed(gitlab: dict[str, list[str]]) -> None:
    """The commands of kvqual parse, and pytest's options are its own or the plugin's."""
    added: list[str] = []

    class Group:
        def addoption(self, name: str, **_: Any) -> None:
            added.append(name)

    class Parser:
        def getgroup(self, *_: str) -> Group:
            return Group()

    plugin.pytest_addoption(Parser())  # type: ignore[arg-type]  # records what is declared
    typed = {"kvqual": 0, "pytest": 0, "pip": 0}
    for line in (line for script in gitlab.values() for line in script):
        program, *args = shlex.split(line)
        typed[program] += 1
        if program == "kvqual":
            _parser().parse_args(args)
        if program == "pytest":
            options = [arg for arg in args if arg.startswith("-")]
            assert args[:2] == ["--pyargs", "pytest_kvqual.qualification"]
            assert set(options) <= {"--pyargs", "-m", "-k", *added}
        if program == "pip" and "pytest-kvqual" in line:
            assert f"=={__version__}" in line
    assert typed == {"kvqual": 4, "pytest": 3, "pip": 7}


def test_this_projects_ci_runs_tests_and_archives() -> None:
    """The workflow calls what can be called by hand: .ci/run, and make dist with each Python of its matrix."""
    document = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    jobs = document["jobs"]
    assert [it["run"] for it in jobs["test"]["steps"] if "run" in it] == [".ci/run"]
    assert [it["run"] for it in jobs["dist"]["steps"] if "run" in it] == ["make dist PYTHON=python"]
    assert "3.11" in jobs["dist"]["strategy"]["matrix"]["python"]
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.partition("\ndist:\n")[2].partition("\n\n")[0]
    for part in ("-m build ", "twine check --strict", "scripts/check_wheel.py"):
        assert part in recipe
