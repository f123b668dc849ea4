"""When the gates of a clone are collected: when a path or a platform names them, and never without the plugin."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.plugin.conftest import Runner

pytest_plugins = ["pytester"]
QUALIFICATION = Path(__file__).parents[2] / "qualification"


@pytest.fixture
def clone(gates: Runner) -> Runner:
    """A folder as a clone has it: ``tests`` is what plain pytest runs, ``qualification`` lies beside it."""
    path = gates.pytester.path
    (path / "tests").mkdir()
    (path / "tests" / "test_plain.py").write_text("import pytest\n@pytest.mark.cpu\ndef test_plain(): pass\n")
    (path / "pytest.ini").write_text(
        "[pytest]\naddopts = --strict-markers --import-mode=importlib\ntestpaths = tests\n"
    )
    shutil.copy(QUALIFICATION / "conftest.py", gates.folder)
    return gates


def test_plain_pytest_collects_no_gate(clone: Runner) -> None:
    """Nothing boots by surprise."""
    result = clone.run()
    assert result.ret == 0
    result.assert_outcomes(passed=1)
    assert not clone.run_dir.exists()


def test_naming_a_platform_collects_the_gates(clone: Runner) -> None:
    """``pytest -m cpu`` in a clone is the CPU part whole: the tests so marked, and the gates."""
    result = clone.run("-m", "cpu")
    assert result.ret == 0
    result.assert_outcomes(passed=4, deselected=1)


def test_the_whole_tree_without_a_platform_is_refused(clone: Runner) -> None:
    """``pytest .`` names the gates and no platform: one line, exit status 4."""
    result = clone.run(".")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: gates boot real engines: found no -m, expected -m cpu or -m gpu*"])


@pytest.mark.parametrize("where", ["qualification", "qualification/test_01_routing.py", "."])
def test_without_the_plugin(clone: Runner, where: str) -> None:
    """Gates without the plugin are one line, not a list of missing fixtures."""
    (clone.pytester.path / "conftest.py").unlink()
    (clone.pytester.path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    cpu\n    gpu\n    timing\n    gate(name)\n"
    )
    result = clone.pytester.runpytest_inprocess(where)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: gates: found no pytest-kvqual plugin, expected it: *"])
