"""Gate 10, recall."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Gate

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("recall")
def test_recall(gate: Gate) -> None:
    """Of what each control recalls, the arm loses less than the limit."""
    gate.decide()
