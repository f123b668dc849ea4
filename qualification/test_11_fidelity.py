"""Gate 11, fidelity: asked for with -m 'cpu and timing'."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Gate

pytestmark = [pytest.mark.cpu, pytest.mark.gpu, pytest.mark.timing]


@pytest.mark.gate("fidelity")
def test_fidelity(gate: Gate) -> None:
    """The recorder measures a server of known delays as it is, failures and all."""
    gate.decide()
