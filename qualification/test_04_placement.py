"""Gate 4, placement."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("placement")
def test_placement(gate):
    """Each output row is the attention of its own request and position."""
    gate.decide()
