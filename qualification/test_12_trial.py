"""Gate 12, trial: asked for with -m 'cpu and timing' --block N."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Gate

pytestmark = [pytest.mark.cpu, pytest.mark.gpu, pytest.mark.timing]


@pytest.mark.gate("trial")
def test_trial(gate: Gate) -> None:
    """One arm of one frozen block is timed once, on a fresh server, as the plan says."""
    gate.decide()
