"""Which faults every qualification plants, by the gate that must object.

The catalogue holds every fault; planting all of them in a served arm takes most of an hour (``make controls`` does). A
run plants these: for each gate kinds that recur in public reports, in the order given.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pytest_kvqual.faults.catalogue import FAULTS

SEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "identity": ("weights-altered", "packed-weights-altered", "scale-copy-altered"),
        "dispatch": ("layer-served-by-another-kernel", "layer-has-another-implementation-class"),
        "stale-maps": ("stale-block-table", "captured-table-never-refreshed"),
        "routing": (
            "slot-off-by-one",
            "slot-wrong-at-block-multiple",
            "key-value-swapped",
            "last-row-not-written",
            "padding-writes-slot-zero",
        ),
        "shifted-outputs": ("outputs-rolled-by-one-row", "outputs-of-previous-step"),
        "placement": ("v-scale-dropped-on-read", "other-layer-cache", "head-map-by-modulus"),
        "replay": ("tail-of-v-times-zero", "page-behind-block-multiple-times-zero"),
        "determinism": ("output-depends-on-batch-index", "output-depends-on-step-number"),
    }
)


def seeded(gate: str, *, scales: bool) -> tuple[str, ...]:
    """The faults that a run plants against ``gate`` in an arm with or without declared V scales."""
    # Without scales there is none to drop or to alter.
    return tuple(name for name in SEEDED.get(gate, ()) if scales or FAULTS[name].needs != "scales")
