"""Which faults every qualification plants, by the gate that must object.

The catalogue holds every fault; planting all of them in a served arm takes most of an hour (``make controls`` does). A
run plants these: for each gate kinds that recur in public reports, in the order given.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from pytest_kvqual.faults.catalogue import FAULTS
from pytest_kvqual.kv.declarations import NEED_DECLARATION

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
        "replay": ("tail-of-v-times-zero", "page-behind-block-multiple-times-zero", "tail-of-v-in-denominator"),
        "determinism": ("output-depends-on-batch-index", "output-depends-on-step-number"),
    }
)


ROTATION_ONLY = ("output-depends-on-batch-index",)
"""The faults that show in another order alone: a policy that lets a rotation differ cannot see them."""


READ_CELLS = ("layer-served-by-another-kernel",)
"""The faults of gates that need no declaration which decode cells themselves."""


def seeded(
    gate: str, *, scales: bool, rotation_may_differ: bool = False, waived: Collection[str] = (), declared: bool = True
) -> tuple[str, ...]:
    """The faults that a run plants against ``gate``.

    Args:
        gate: The gate.
        scales: Whether the arm has declared V scales; without them there is none to drop or to alter.
        waived: The kinds of finding that the study waives for the arm: a fault that makes no other shows nothing there.
        rotation_may_differ: Whether the study's policy of determinism only reports how a rotated order differs.
        declared: Whether the arm's KV format is declared. Where it is not, faults that take a cell's content apart
            cannot be planted, and an oracle gate that needs the declaration is shown none.
    """
    if not declared and gate in NEED_DECLARATION and gate != "identity":
        return ()
    return tuple(
        name
        for name in SEEDED.get(gate, ())
        if (scales or FAULTS[name].needs != "scales")
        and (declared or name not in READ_CELLS)
        and not (rotation_may_differ and name in ROTATION_ONLY)
        and not (FAULTS[name].finding and FAULTS[name].finding in waived)
    )
