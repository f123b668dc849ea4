"""Gate 6, determinism."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Gate

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("determinism")
def test_determinism(gate: Gate) -> None:
    """The answers follow the requests, not their order, by the policy that the study froze."""
    gate.decide()
