"""The shadow: what every block touched in a window must hold, in the cache's own physical form.

An image of each touched block lies beside the cache. It starts as what the cache held when the block was first granted,
and from then on only the writes that the plan dictates are applied to it. Cache and image are compared as bytes, a
block at a time, so a NaN equals itself only if its bytes do, and -0.0 is not 0.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pytest_kvqual.kv.formats import Cells, Format

_HASH_SEED = 0x9E3779B9
_COMPARED_BYTES = 1 << 25
"""Bytes of blocks gathered at a time for a comparison."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrong:
    """Cells that differ: ``slots`` int64 ``[n]``, ``k`` and ``v`` bool ``[n, Hkv]``, and both contents of them."""

    slots: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    found: Cells
    expected: Cells

    @property
    def cells(self) -> int:
        """How many (slot, head) pairs differ, in K or in V."""
        return int((self.k | self.v).sum())


def differing(slots: torch.Tensor, found: Cells, expected: Cells) -> Wrong:
    """The cells of ``slots`` whose K or V bytes differ.

    Raises:
        FormatError: The shapes differ.
    """
    k, v = found.unequal(expected)
    at = torch.nonzero((k | v).any(dim=1)).flatten()
    return Wrong(
        slots=slots[at],
        k=k[at],
        v=v[at],
        found=Cells(k=found.k[at], v=found.v[at]),
        expected=Cells(k=expected.k[at], v=expected.v[at]),
    )


def _words(blocks: torch.Tensor) -> torch.Tensor:
    """Whole blocks as rows of the widest integer that divides them: ``[blocks, n]``."""
    flat = blocks.reshape(blocks.shape[0], -1).contiguous().view(torch.uint8)
    return flat.view(torch.int64) if flat.shape[1] % 8 == 0 else flat


def block_sums(cache: torch.Tensor) -> torch.Tensor:
    """One 64-bit sum per block of a cache ``[blocks, ...]``: int64 ``[blocks]``.

    Each 8-byte word is multiplied by its own odd constant, so a change confined to one word always changes the sum;
    changes of several words cancel with probability 2^-64 for constants unknown to the writer.
    """
    blocks = cache.shape[0]
    sums = torch.empty(blocks, dtype=torch.int64, device=cache.device)
    width = -(-cache[0].numel() * cache.element_size() // 8)
    generator = torch.Generator().manual_seed(_HASH_SEED)
    # On the host, whatever the default device: the same constants everywhere.
    odd = torch.randint(-(2**62), 2**62, (width,), generator=generator, dtype=torch.int64, device="cpu") * 2 + 1
    odd = odd.to(cache.device)
    step = max(1, _COMPARED_BYTES // max(1, 8 * width))
    for start in range(0, blocks, step):
        part = cache[start : start + step]
        flat = part.reshape(part.shape[0], -1).contiguous().view(torch.uint8)
        padding = -flat.shape[1] % 8
        if padding:
            flat = torch.nn.functional.pad(flat, (0, padding))
        sums[start : start + step] = (flat.view(torch.int64) * odd).sum(dim=1)
    return sums


class Shadow:
    """Images of the touched blocks of every layer.

    Args:
        caches: The physical cache ``[blocks, Hkv, block_size, content]`` and the format of each layer, by name.
        block_size: Tokens per block.
    """

    def __init__(self, caches: Mapping[str, tuple[torch.Tensor, Format]], block_size: int) -> None:
        self._caches = dict(caches)
        self._block_size = block_size
        self._place: dict[int, int] = {}
        self._blocks: list[int] = []
        self._images = {
            name: torch.empty(0, *cache.shape[1:], dtype=cache.dtype, device=cache.device)
            for name, (cache, _) in self._caches.items()
        }

    @property
    def blocks(self) -> frozenset[int]:
        """The touched blocks."""
        return frozenset(self._place)

    def adopt(self, blocks: Sequence[int]) -> None:
        """Takes the present content of blocks that have no image yet, before anything is written to them."""
        fresh = [block for block in blocks if block not in self._place]
        if not fresh:
            return
        for block in fresh:
            self._place[block] = len(self._blocks)
            self._blocks.append(block)
        at = torch.tensor(fresh, dtype=torch.int64)
        for name, (cache, _) in self._caches.items():
            image = self._images[name]
            if image.shape[0] < len(self._blocks):
                grown = torch.empty(
                    max(len(self._blocks), 2 * image.shape[0]), *image.shape[1:], dtype=image.dtype, device=image.device
                )
                grown[: len(self._blocks) - len(fresh)] = image[: len(self._blocks) - len(fresh)]
                self._images[name] = image = grown
            image[len(self._blocks) - len(fresh) : len(self._blocks)] = cache.index_select(0, at)

    def write(self, layer: str, slots: torch.Tensor, cells: Cells) -> None:
        """Applies the writes that the plan dictates; rows without a slot write nothing."""
        keep = slots >= 0
        if not bool(keep.all()):
            slots, cells = slots[keep], Cells(k=cells.k[keep], v=cells.v[keep])
        if slots.numel():
            self._caches[layer][1].place(self._images[layer], self._image_slots(slots), cells)

    def expected(self, layer: str, slots: torch.Tensor) -> Cells:
        """What the cells of ``slots`` (int64 ``[n]``, all in touched blocks) must hold."""
        return self._caches[layer][1].read(self._images[layer], self._image_slots(slots))

    def covers(self, slots: torch.Tensor) -> torch.Tensor:
        """Which of ``slots`` lie in touched blocks: bool ``[n]``."""
        blocks = (slots // self._block_size).tolist()
        return torch.tensor([block in self._place for block in blocks], dtype=torch.bool)

    def compare(self, layer: str) -> tuple[int, Wrong | None]:
        """Compares every touched block of one layer with its image.

        Returns:
            The number of cells (slot, head) compared, and those that differ; None when all agree.
        """
        cache, codec = self._caches[layer]
        count = len(self._blocks)
        cells = count * cache.shape[1] * self._block_size
        if not count:
            return 0, None
        size = max(1, cache[0].numel() * cache.element_size())
        step = max(1, _COMPARED_BYTES // size)
        at = torch.tensor(self._blocks, dtype=torch.int64)
        bad: list[int] = []
        for start in range(0, count, step):
            found = _words(cache.index_select(0, at[start : start + step]))
            image = _words(self._images[layer][start : min(count, start + step)])
            if not torch.equal(found, image):
                rows = torch.nonzero((found != image).any(dim=1)).flatten() + start
                bad += [self._blocks[row] for row in rows.tolist()]
        if not bad:
            return cells, None
        offsets = torch.arange(self._block_size, dtype=torch.int64)
        slots = (torch.tensor(bad, dtype=torch.int64)[:, None] * self._block_size + offsets).flatten()
        return cells, differing(slots, codec.read(cache, slots), self.expected(layer, slots))

    def _image_slots(self, slots: torch.Tensor) -> torch.Tensor:
        places = torch.tensor([self._place[block] for block in (slots // self._block_size).tolist()], dtype=torch.int64)
        return places * self._block_size + slots % self._block_size
