"""Gate 7, parity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Gate

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("parity")
def test_parity(gate: Gate) -> None:
    """Serial HTTP output equals serial in-process generation, token for token."""
    gate.decide()
