"""Where a value belongs: a wrong cell or row is looked up among all that the ledger holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What the ledger holds of one request in one layer.

    ``k`` and ``v`` are uint8 ``[positions, Hkv, bytes]``; ``slots`` int64 ``[positions]`` says where they belong.
    """

    request: str
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor


def belongs(
    found: torch.Tensor, holdings: Iterable[Holding], *, what: str, heads: list[int], slot: int
) -> tuple[str, int] | None:
    """Whose K (``what`` is ``"K"``) or V the bytes ``found`` (uint8 ``[Hkv, n]``) are, looking at ``heads`` only.

    Same heads first, then the other of K and V where it has as many bytes, then the first of ``heads`` among all heads.
    Of several places the one whose home is nearest to ``slot``.

    Returns:
        ``K of request R position P`` and the slot where it belongs, or None where the ledger does not hold it.
    """
    held = list(holdings)
    other = "V" if what == "K" else "K"
    for name in (what, other):
        matches: list[tuple[int, str, int]] = []
        for holding in held:
            cells = holding.k if name == "K" else holding.v
            if cells.shape[-1] == found.shape[-1] and cells.shape[0]:
                same = (cells[:, heads] == found[heads]).flatten(1).all(dim=1)
                for position in torch.nonzero(same).flatten().tolist():
                    home = int(holding.slots[position])
                    matches.append((abs(home - slot), f"{name} of request {holding.request} position {position}", home))
        if matches:
            return min(matches)[1:]
    for holding in held:
        cells = holding.k if what == "K" else holding.v
        same = (cells == found[heads[0]]).all(dim=-1)
        if bool(same.any()):
            position, source = (int(index) for index in torch.nonzero(same)[0])
            text = f"{what} of request {holding.request} position {position}, KV head {source}"
            return text, int(holding.slots[position])
    return None


def distance(found: int, home: int, block_size: int) -> str:
    """How far a value lies from its home slot: ``one block early``, ``3 slots late``, ``in another block``."""
    delta = found - home
    if delta == 0:
        return "in its own slot"
    word = "late" if delta > 0 else "early"
    blocks, rest = divmod(abs(delta), block_size)
    if rest == 0:
        return f"{'one block' if blocks == 1 else f'{blocks} blocks'} {word}"
    if abs(delta) < block_size:
        return f"{'one slot' if abs(delta) == 1 else f'{abs(delta)} slots'} {word}"
    return f"home is block {home // block_size} offset {home % block_size}"
