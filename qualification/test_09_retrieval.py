"""Gate 9, retrieval."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Gate

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("retrieval")
def test_retrieval(gate: Gate) -> None:
    """Of what each control finds in a long text, the arm loses less than the limit."""
    gate.decide()
