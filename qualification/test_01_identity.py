"""Gate 1, identity."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("identity")
def test_identity(gate):
    """Source, weights, physical cache and scales are what the lock says."""
    gate.decide()
