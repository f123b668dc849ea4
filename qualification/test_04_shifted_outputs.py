"""Gate 4, shifted-outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Gate

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("shifted-outputs")
def test_shifted_outputs(gate: Gate) -> None:
    """No output row is the attention of another row, of this step or of the one before."""
    gate.decide()
