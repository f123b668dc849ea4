"""Runs to report on, each written once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from full_run import FullRun
from report_run import write_report_run


@pytest.fixture(scope="session")
def passing_run(tmp_path_factory: pytest.TempPathFactory) -> FullRun:
    """Every gate passes, timing too."""
    return write_report_run(tmp_path_factory.mktemp("passing"))


@pytest.fixture(scope="session")
def failing_run(tmp_path_factory: pytest.TempPathFactory) -> FullRun:
    """gsm8k fails, and nothing was timed."""
    return write_report_run(tmp_path_factory.mktemp("failing"), passes=False)


@pytest.fixture
def copied(tmp_path: Path, passing_run: FullRun) -> Callable[[], Path]:
    """Makes a copy of the passing run's directory, to damage."""

    def copy() -> Path:
        found = tmp_path / "copy"
        shutil.copytree(passing_run.run_dir, found)
        return found

    return copy
