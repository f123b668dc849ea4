"""The ledger: what was handed to the cache update, kept outside the cache.

One entry per (layer, request, position): the bytes that the declared encoding of that K and V must occupy. Independent
of the cache, its block table and the backend's own write path.
"""

from __future__ import annotations

import torch


class Ledger:
    """Cells of every live request, one growing buffer per (layer, request).

    Cells are uint8 ``[positions, kv_heads, cell_bytes]`` (K bytes, then V bytes).
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[str, str], torch.Tensor] = {}
        self._length: dict[tuple[str, str], int] = {}

    def record(self, layer: str, request: str, start: int, cells: torch.Tensor) -> None:
        """Keeps the cells of positions ``start`` onwards; positions after them are forgotten.

        Raises:
            ValueError: Positions below ``start`` are not in the ledger.
        """
        key = (layer, request)
        held = self._length.get(key, 0)
        if start > held:
            raise ValueError(f"ledger of request {request} ends at position {held}, found a write at {start}")
        needed = start + cells.shape[0]
        buffer = self._cells.get(key)
        if buffer is None or buffer.shape[0] < needed:
            grown = torch.empty(max(needed, 2 * held, 64), *cells.shape[1:], dtype=torch.uint8)
            if buffer is not None:
                grown[:held] = buffer[:held]
            buffer = self._cells[key] = grown
        buffer[start:needed] = cells
        self._length[key] = needed

    def history(self, layer: str, request: str, length: int) -> torch.Tensor:
        """The cells of positions 0 to ``length - 1``: uint8 ``[length, kv_heads, cell_bytes]``.

        Raises:
            ValueError: Fewer positions are in the ledger.
        """
        held = self._length.get((layer, request), 0)
        if held < length:
            raise ValueError(f"ledger of request {request} holds {held} positions, expected {length}")
        return self._cells[layer, request][:length]

    def length(self, layer: str, request: str) -> int:
        """How many positions of a request are in the ledger."""
        return self._length.get((layer, request), 0)

    def covers(self, layer: str, request: str, length: int) -> bool:
        """Whether positions 0 to ``length - 1`` are all in the ledger."""
        return self.length(layer, request) >= length

    def forget(self, request: str) -> None:
        """Drops a finished request."""
        for key in [key for key in self._cells if key[1] == request]:
            del self._cells[key], self._length[key]
