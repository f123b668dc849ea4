"""Gate 3, routing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Gate

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("routing")
def test_routing(gate: Gate) -> None:
    """Each K and V lands in the cell that the block table dictates, as the format encodes it; no other changes."""
    gate.decide()
