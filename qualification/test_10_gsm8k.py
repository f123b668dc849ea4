"""Gate 10, gsm8k."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Gate

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("gsm8k")
def test_gsm8k(gate: Gate) -> None:
    """Of the GSM8K questions that each control answers right, the arm loses less than the limit."""
    gate.decide()
