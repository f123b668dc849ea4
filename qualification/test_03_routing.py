"""Gate 3, routing."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("routing")
def test_routing(gate):
    """Each K and V lands in the slot that the block table dictates, in the declared encoding, and nothing else changes."""
    gate.decide()
