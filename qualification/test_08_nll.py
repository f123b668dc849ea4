"""Gate 8, nll."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("nll")
def test_nll(gate):
    """The mean paired loss increase over held-out documents is bounded below the margin."""
    gate.decide()
