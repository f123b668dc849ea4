"""Gate 7, parity."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("parity")
def test_parity(gate):
    """Serial HTTP output equals serial in-process generation, token for token."""
    gate.decide()
