"""Gate 5, replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Gate

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("replay")
def test_replay(gate: Gate) -> None:
    """Outputs are bitwise unchanged whatever the cells hold that nobody wrote."""
    gate.decide()
