"""The catalogue of seeded faults."""

from __future__ import annotations

import pytest

from pytest_kvqual.faults import FAULTS
from pytest_kvqual.faults.catalogue import lookup
from pytest_kvqual.worker.wire import resolve


@pytest.mark.parametrize("name", list(FAULTS))
def test_every_fault_can_be_planted_by_its_name(name: str) -> None:
    """Each fault's name leads to a function, and it names a gate, a mechanism and what exposes it."""
    pytest.importorskip("torch")
    fault = FAULTS[name]
    assert fault.name == name
    assert callable(resolve(lookup(name)))
    assert fault.claimed_by in {"identity", "routing", "placement"}
    assert fault.mechanism
    assert fault.exposed_by


def test_an_unknown_fault_lists_the_known_ones() -> None:
    """A mistyped fault is an error that lists what there is."""
    with pytest.raises(KeyError, match=r"unknown fault 'slot-of-by-one', expected one of .*slot-off-by-one"):
        lookup("slot-of-by-one")
