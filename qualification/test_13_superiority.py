"""Gate 13, superiority: asked for with -m 'cpu and timing', once every trial of the plan was made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Gate

pytestmark = [pytest.mark.cpu, pytest.mark.gpu, pytest.mark.timing]


@pytest.mark.gate("superiority")
def test_superiority(gate: Gate) -> None:
    """The arm is faster than its controls in every comparison of the declared family, over complete blocks."""
    gate.decide()
