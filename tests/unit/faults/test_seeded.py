"""Which seeded faults a run plants."""

from __future__ import annotations

import pytest

from pytest_kvqual.faults.seeded import SEEDED, seeded
from pytest_kvqual.kv.declarations import NEED_DECLARATION


@pytest.mark.parametrize("gate", list(SEEDED))
def test_faults_of_a_format_without_a_declaration(gate: str) -> None:
    """No gate that judges is left without a fault; those that cannot judge are shown none, nor one that reads cells."""
    planted = seeded(gate, scales=True, declared=False)
    if gate in NEED_DECLARATION and gate != "identity":
        assert planted == ()
        return
    assert planted
    assert set(planted) == set(SEEDED[gate]) - {"layer-served-by-another-kernel"}
    assert seeded(gate, scales=True) == SEEDED[gate]
