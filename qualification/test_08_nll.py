"""Gate 8, nll."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Gate

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("nll")
def test_nll(gate: Gate) -> None:
    """The mean paired loss increase over held-out documents is bounded below the margin."""
    gate.decide()
