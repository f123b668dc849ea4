"""Gate 4, placement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Gate

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("placement")
def test_placement(gate: Gate) -> None:
    """Each output row is the attention of its own request and position."""
    gate.decide()
