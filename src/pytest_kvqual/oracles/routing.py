"""Routing: every K/V write goes where the block ids and the position dictate, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from pytest_kvqual.kv.formats import Cells
from pytest_kvqual.oracles.findings import KEPT_FINDINGS, Tally
from pytest_kvqual.oracles.shadow import Wrong
from pytest_kvqual.oracles.step import NO_SLOT, StepPlan
from pytest_kvqual.oracles.whereabouts import Holding, belongs, distance

_LOOKED_UP = 16
"""Wrong cells that are looked up in the ledger, until one is found there."""


def check_slot_mapping(tally: Tally, plan: StepPlan, *, layer: str, slot_mapping: torch.Tensor) -> None:
    """Compares the slot mapping handed to the cache update (int ``[>= T]``) with the plan; rows beyond T must be -1."""
    found = slot_mapping.to(plan.slots.device, torch.int64)
    rows = plan.rows
    if found.numel() < rows:
        tally.find("wrong-slot", f"{layer}: slot mapping has {found.numel()} rows, expected {rows}", rows)
        return
    wrong = torch.nonzero(found[:rows] != plan.slots).flatten()
    if wrong.numel():
        row = int(wrong[0])
        home = int(plan.slots[row])
        where = "" if home == NO_SLOT else f": {distance(int(found[row]), home, plan.block_size)}"
        tally.find(
            "wrong-slot",
            f"{layer}: slot of {plan.name(row)} is {int(found[row])}, expected {home}{where}"
            f" ({wrong.numel()} of {rows} rows)",
            wrong.numel(),
        )
    padding = found[rows:]
    tally.checked("padding_rows", padding.numel())
    written = torch.nonzero(padding >= 0).flatten()
    if written.numel():
        tally.find(
            "padding-slot",
            f"{layer}: padding row {rows + int(written[0])} is mapped to slot {int(padding[int(written[0])])},"
            " expected -1",
            written.numel(),
        )


def check_sharing(
    tally: Tally, holders: Mapping[int, Sequence[tuple[str, int]]], may_share: Callable[[str, str, int], bool]
) -> None:
    """Every block has one holder, unless its holders share it by declaration.

    Args:
        tally: Where findings go.
        holders: For each block its holders, as (request, logical block).
        may_share: Whether two requests may share their logical block of that number: both declared it as taken from the
            cache or complete, with the same tokens up to its end, and neither writes to it any more.
    """
    for block, held in holders.items():
        first, number = held[0]
        for other, place in held[1:]:
            if place == number and other != first and may_share(first, other, number):
                continue
            tally.find(
                "shared-block",
                f"block {block} is held by request {first} block {number} and by request {other} block {place},"
                " expected one holder",
            )


def check_cells(
    tally: Tally,
    wrong: Wrong,
    *,
    layer: str,
    kind: str,
    block_size: int,
    owner: Callable[[int], str],
    holdings: Sequence[Holding],
    decode: Callable[[Cells], tuple[torch.Tensor, torch.Tensor]],
    peek: Callable[[torch.Tensor], Cells],
    slots: int,
) -> None:
    """Records the cells that differ and says, for one of them, what it holds and where that belongs.

    The one is the first whose value the ledger holds somewhere, or else the first. Where somebody wrote it, the slots
    beside it and those of block 0 are searched for the value that it must hold.

    Args:
        tally: Where findings go.
        wrong: What differs; nothing is recorded for no cell.
        layer: The layer's name, for messages.
        kind: The kind of finding.
        block_size: Tokens per block.
        owner: Names who owns a slot (``request R position P``), or that nobody does.
        holdings: All that the ledger holds of the layer.
        decode: K and V that cells stand for, in float32.
        peek: The cells that the cache holds at slots (int64 ``[n]``) now.
        slots: Slots in the pool.
    """
    if not wrong.slots.numel():
        return
    if len(tally.findings) >= KEPT_FINDINGS:
        # Its words would not be kept, and looking them up takes most of the time of a pass that is wrong everywhere.
        tally.find(kind, "", wrong.cells)
        return
    place, text = 0, ""
    for candidate in range(min(_LOOKED_UP, wrong.slots.numel())):
        found = _home(wrong, candidate, holdings, block_size)
        if found:
            place, text = candidate, found
            break
    slot = int(wrong.slots[place])
    k, v = torch.nonzero(wrong.k[place]).flatten().tolist(), torch.nonzero(wrong.v[place]).flatten().tolist()
    what = " and ".join(name for name, heads in (("K", k), ("V", v)) if heads)
    tally.find(
        kind,
        f"{layer}: block {slot // block_size} offset {slot % block_size} (slot {slot}, {owner(slot)}), {what} of KV "
        f"head {', '.join(str(head) for head in sorted({*k, *v}))}: {text or _nowhere(wrong, place, decode)}"
        f"{_elsewhere(wrong, place, holdings, peek, slots, block_size)} "
        f"({int(wrong.k.sum())} K and {int(wrong.v.sum())} V cells differ)",
        wrong.cells,
    )


def _home(wrong: Wrong, place: int, holdings: Sequence[Holding], block_size: int) -> str:
    """``holds K of request R position P (one block early)``, or nothing where the ledger does not hold the value."""
    for what, mask, cells in (("K", wrong.k, wrong.found.k), ("V", wrong.v, wrong.found.v)):
        heads = torch.nonzero(mask[place]).flatten().tolist()
        if heads:
            slot = int(wrong.slots[place])
            home = belongs(cells[place], holdings, what=what, heads=heads, slot=slot)
            if home is not None:
                return f"holds {home[0]} ({distance(slot, home[1], block_size)})"
    return ""


def _elsewhere(
    wrong: Wrong,
    place: int,
    holdings: Sequence[Holding],
    peek: Callable[[torch.Tensor], Cells],
    slots: int,
    block_size: int,
) -> str:
    """``; its own value lies one slot early``, where it is beside the slot or in block 0."""
    slot = int(wrong.slots[place])
    if not any(bool((holding.slots == slot).any()) for holding in holdings):
        # Nobody wrote it: what it must hold (zeros, in a fresh pool) may lie anywhere.
        return ""
    beside = [slot + step for step in (-1, 1, -block_size, block_size)]
    near = torch.tensor(
        [at for at in [*beside, *range(block_size)] if 0 <= at < slots and at != slot], dtype=torch.int64
    )
    cells = peek(near)
    same = (cells.k == wrong.expected.k[place]).flatten(1).all(dim=1)
    same &= (cells.v == wrong.expected.v[place]).flatten(1).all(dim=1)
    if not bool(same.any()):
        return ""
    found = int(near[int(torch.nonzero(same).flatten()[0])])
    return f"; its own value lies in slot {found}, {distance(found, slot, block_size)}"


def _nowhere(wrong: Wrong, place: int, decode: Callable[[Cells], tuple[torch.Tensor, torch.Tensor]]) -> str:
    """What a value is that the ledger does not hold: the other one of K and V, a multiple, or other bytes."""
    one = slice(place, place + 1)
    found = decode(Cells(k=wrong.found.k[one], v=wrong.found.v[one]))
    expected = decode(Cells(k=wrong.expected.k[one], v=wrong.expected.v[one]))
    for name, mine, theirs in (
        ("V where K belongs", found[0], expected[1]),
        ("K where V belongs", found[1], expected[0]),
    ):
        if _near(mine, theirs):
            return f"holds {name}"
    for name, index in (("K", 0), ("V", 1)):
        here, there = found[index].flatten(), expected[index].flatten()
        ratio = float((here @ there) / (there @ there).clamp(min=1e-30))
        if not bool((here == there).all()) and ratio != 0 and _near(here, there * ratio):
            return f"holds {ratio:.4g} times the {name} that belongs there"
    what, mask = ("K", wrong.k) if bool(wrong.k[place].any()) else ("V", wrong.v)
    head = int(torch.nonzero(mask[place]).flatten()[0])
    cells = (wrong.found.k, wrong.expected.k) if what == "K" else (wrong.found.v, wrong.expected.v)
    here, there = cells[0][place, head], cells[1][place, head]
    at = int(torch.nonzero(here != there).flatten()[0])
    return (
        f"byte {at} of {what} is 0x{int(here[at]):02x}, expected 0x{int(there[at]):02x}; the ledger holds this value"
        " nowhere"
    )


def _near(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors agree as well as an 8-bit rounding lets them (2^-4 relative), and are not zero."""
    size = float(right.norm())
    return left.shape == right.shape and 0 < size < math.inf and float((left - right).norm()) <= size / 16
