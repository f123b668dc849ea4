"""An exploratory measurement of one arm at one load: asked for with -m 'cpu and pilot'. It decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Pilot

pytestmark = [pytest.mark.cpu, pytest.mark.gpu, pytest.mark.pilot]


def test_pilot(pilot: Pilot) -> None:
    """Once the arm is known to work, one load of the plan may be tried on it."""
    pilot.measure()
