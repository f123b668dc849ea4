"""The gates of a study. The plugin orders them, judges them and writes their receipts; this file only insists on it."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    """Without the plugin no gate can be decided, so none may be collected."""
    if not hasattr(config.option, "study"):
        raise pytest.UsageError(
            "gates: found no pytest-kvqual plugin, expected it: remove -p no:kvqual, or pip install pytest-kvqual"
        )
