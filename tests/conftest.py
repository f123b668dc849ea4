"""Fixtures that tests of several rooms share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Test files are imported by path (--import-mode=importlib), which leaves sys.path alone.
sys.path.insert(0, str(Path(__file__).parent / "support"))

from tiny_study import TinyStudy  # importable from here on


@pytest.fixture
def tiny_study(tmp_path: Path) -> TinyStudy:
    """A whole study of a few kilobytes in a folder of its own: ``tmp_path/project/studies/tiny``."""
    return TinyStudy.write(tmp_path / "project" / "studies" / "tiny")
