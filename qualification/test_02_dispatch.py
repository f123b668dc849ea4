"""Gate 2, dispatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.session import Gate

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.gate("dispatch")
def test_dispatch(gate: Gate) -> None:
    """Each layer runs the declared backend, KV dtype and kernels, and still does after each capture."""
    gate.decide()
