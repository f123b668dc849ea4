"""What every test needs. Fixtures of one kind of test live beside it."""

import os
import tempfile

import pytest
from hypothesis import settings

pytest_plugins = ["pytester"]

# Two test processes share two cores: how long one example takes says nothing.
settings.register_profile("kvqual", deadline=None)
settings.load_profile("kvqual")


def pytest_configure(config: pytest.Config) -> None:
    """Locks of devices and of the host are each test process's own: other tests, and runs beside them, hold theirs."""
    folder = tempfile.TemporaryDirectory(prefix="kvqual-locks-")
    config.add_cleanup(folder.cleanup)
    os.environ["KVQUAL_LOCK_DIR"] = folder.name
