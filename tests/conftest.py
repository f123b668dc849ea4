"""Fixtures that tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_study import TinyStudy


@pytest.fixture
def tiny_study(tmp_path: Path) -> TinyStudy:
    """A whole study of a few kilobytes in a folder of its own: ``tmp_path/project/studies/tiny``."""
    return TinyStudy.write(tmp_path / "project" / "studies" / "tiny")
