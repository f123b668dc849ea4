"""The seeded faults by name. Each is planted in the engine's worker and names the gate that must catch it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One seeded fault.

    ``plant`` is ``module:function``, called as ``function(worker)``: live through the worker's RPC, or from an arm's
    ``after_init``. ``exposed_by`` says which condition of the workload shows it.
    """

    name: str
    claimed_by: str
    plant: str
    mechanism: str
    exposed_by: str


def _fault(name: str, claimed_by: str, mechanism: str, exposed_by: str) -> Fault:
    function = name.replace("-", "_")
    return Fault(
        name=name,
        claimed_by=claimed_by,
        plant=f"pytest_kvqual.faults.live:{function}",
        mechanism=mechanism,
        exposed_by=exposed_by,
    )


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        fault.name: fault
        for fault in (
            _fault(
                "weights-altered",
                "identity",
                "one element of one norm weight of the loaded model is changed",
                "any digest taken after the load",
            ),
            _fault(
                "packed-weights-altered",
                "identity",
                "one projection multiplies with a weight of which one element is changed; the parameter is untouched",
                "a weight read back through its kernel",
            ),
            _fault(
                "scale-copy-altered",
                "identity",
                "one layer's V scale differs between the copy that writes and the copy that reads",
                "every copy compared, not one",
            ),
            _fault(
                "slot-off-by-one",
                "routing",
                "every K/V write goes one slot too far",
                "any write",
            ),
            _fault(
                "slot-wrong-at-block-multiple",
                "routing",
                "the write of a position that starts a block goes to the slot before it",
                "lengths that cross a block multiple",
            ),
            _fault(
                "stale-block-table",
                "routing",
                "attention metadata carries the block table of the previous step",
                "a batch that changes, or a request that gets a block while decoding",
            ),
            _fault(
                "key-value-swapped",
                "routing",
                "the cache update takes K for V and V for K",
                "K and V cells compared apart",
            ),
            _fault(
                "padding-writes-slot-zero",
                "routing",
                "a padding row writes its K and V to slot 0",
                "cells that nobody owns compared too",
            ),
            _fault(
                "v-scale-dropped-on-read",
                "placement",
                "the read takes V as stored, without its scale",
                "scales other than 1",
            ),
            _fault(
                "other-layer-cache",
                "placement",
                "attention reads the cache of the next layer",
                "two layers with different content",
            ),
        )
    }
)


def lookup(name: str) -> str:
    """The ``module:function`` that plants a fault.

    Raises:
        KeyError: No fault has this name; the message lists those there are.
    """
    if name not in FAULTS:
        raise KeyError(f"unknown fault {name!r}, expected one of {', '.join(FAULTS)}")
    return FAULTS[name].plant
