"""Gate 1, identity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Gate

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("identity")
def test_identity(gate: Gate) -> None:
    """Source, weights, physical cache and scales are what the lock says."""
    gate.decide()
