"""Gate 3, stale-maps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Gate

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("stale-maps")
def test_stale_maps(gate: Gate) -> None:
    """Block table, sequence lengths and query starts of each step and layer are those of this step."""
    gate.decide()
