"""Fixtures that tests of several rooms share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from tiny_study import TinyStudy


def pytest_configure(config: pytest.Config) -> None:
    """Locks of devices and of the host are each test process's own: other tests, and runs beside them, hold theirs."""
    folder = tempfile.TemporaryDirectory(prefix="kvqual-locks-")
    config.add_cleanup(folder.cleanup)
    os.environ["KVQUAL_LOCK_DIR"] = folder.name


@pytest.fixture
def tiny_study(tmp_path: Path) -> TinyStudy:
    """A whole study of a few kilobytes in a folder of its own: ``tmp_path/project/studies/tiny``."""
    return TinyStudy.write(tmp_path / "project" / "studies" / "tiny")
