"""One attention step over a paged cache of random K and V, on any device, against attention in float64.

For what the transfer engine is too small for: thousands of positions, a whole pool, a GPU. Blocks are granted
in random order, and what nobody wrote holds random bytes, NaN among them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from pytest_kvqual.kv import formats
from pytest_kvqual.kv.geometry import Geometry
from pytest_kvqual.oracles.placement import FLOAT32_UNIT, ROUNDINGS, unit
from pytest_kvqual.transfer.engine import Backend

_CHUNK = 1 << 15
"""Positions that are drawn and written at a time."""

_SAMPLE = 1024
"""Positions of a chunk whose cells are compared with the declared encoding."""

_HALF_SMALLEST = {torch.float16: 2.0**-25}
"""Half the smallest number of a 16-bit type, where it is not below what float32 can tell."""


class PagedStep:
    """Requests of ``(positions, query rows)``, their rows the last positions of each, then padding rows.

    Args:
        geometry: Head counts, head size and block size.
        batch: ``(positions, query rows)`` of each request; one of no rows is a padding request.
        kv_format: ``k16v8`` or ``k16v16``.
        dtype: The 16-bit type of K, V, query and output.
        device: Where all of it lies.
        padding: Rows behind the last request's.
        columns: Entries of a block table's row; at least what the longest request needs, which is the default.
        v_scale: Of the layer.
        seed: Of K, V, query and the order of the blocks.

    ``query`` is ``[T, Hq, D]``; ``table`` int32 ``[R, columns]``, ``lengths`` int32 ``[R]``, ``starts`` int32
    ``[R + 1]``; ``cache`` uint8 ``[blocks, Hkv, block_size, content]``.
    """

    def __init__(
        self,
        geometry: Geometry,
        batch: Sequence[tuple[int, int]],
        *,
        kv_format: str = "k16v8",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        padding: int = 0,
        columns: int = 0,
        v_scale: float = 0.02,
        seed: int = 0,
    ) -> None:
        self.geometry = geometry
        self.batch = list(batch)
        self.codec = formats.declared(kv_format, dtype=dtype)
        self.dtype = dtype
        self.device = torch.device(device)
        self.v_scale = v_scale if kv_format == "k16v8" else 1.0
        self.scale = geometry.head_size**-0.5
        self.seed = seed
        size = geometry.block_size
        needed = [math.ceil(positions / size) for positions, _ in batch]
        columns = max(columns, *needed, 1)
        random = torch.Generator().manual_seed(seed)
        blocks = sum(needed) + 2
        order = torch.randperm(blocks, generator=random).to(torch.int32)
        table = torch.zeros(len(batch), columns, dtype=torch.int32)
        taken = 0
        for row, count in enumerate(needed):
            table[row, :count] = order[taken : taken + count]
            taken += count
        self.table = table.to(self.device)
        self.lengths = torch.tensor([positions for positions, _ in batch], dtype=torch.int32).to(self.device)
        starts = [0, *itertools.accumulate(rows for _, rows in batch)]
        self.starts = torch.tensor(starts, dtype=torch.int32).to(self.device)
        self.rows = starts[-1]
        self.most_rows = max(rows for _, rows in batch)
        self._random = torch.Generator(self.device).manual_seed(seed)
        content = formats.cell_bytes(self.codec, geometry.head_size)
        shape = (blocks, geometry.kv_heads, size, content)
        self.cache = torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device, generator=self._random)
        query = (self.rows + padding, geometry.query_heads, geometry.head_size)
        self.query = torch.randn(query, device=self.device, generator=self._random).to(dtype)

    def slots(self) -> torch.Tensor:
        """The slot of every position of every request, in order: int64."""
        size = self.geometry.block_size
        found = []
        for row, (positions, _) in enumerate(self.batch):
            position = torch.arange(positions, device=self.device)
            found.append(self.table[row].long()[position // size] * size + position % size)
        return torch.cat(found)

    def fill(self, backend: Backend) -> int:
        """Writes K and V of every position through the backend; how many sampled cells hold other bytes than declared.

        The draws hang on the seed alone, not on the format.
        """
        slots = self.slots()
        random = torch.Generator(self.device).manual_seed(self.seed + 1)
        wrong = 0
        for first in range(0, slots.numel(), _CHUNK):
            mine = slots[first : first + _CHUNK]
            shape = (mine.numel(), self.geometry.kv_heads, self.geometry.head_size)
            key, value = (
                torch.randn(shape, device=self.device, generator=random).mul_(factor).to(self.dtype)
                for factor in (1.0, 2.0)
            )
            backend.write(key, value, self.cache, mine, v_scale=self.v_scale)
            chosen = torch.linspace(0, mine.numel() - 1, min(_SAMPLE, mine.numel())).long().to(self.device)
            expected = self.codec.encode(key[chosen].cpu(), value[chosen].cpu(), self.v_scale)
            size = self.geometry.block_size
            at = mine[chosen]
            cells = self.cache[at // size, :, at % size].cpu()
            split = expected.k.shape[-1]
            found = formats.Cells(k=cells[..., :split].contiguous(), v=cells[..., split:].contiguous())
            wrong += sum(int(part.sum()) for part in found.unequal(expected))
        return wrong

    def fill_unwritten(self, value: int) -> None:
        """Sets every byte that belongs to no position of a request to ``value``; 0xFF makes NaN of K and V."""
        size = self.geometry.block_size
        free = torch.ones(self.cache.shape[0] * size, dtype=torch.bool, device=self.device)
        free[self.slots()] = False
        block, offset = free.view(-1, size).nonzero(as_tuple=True)
        self.cache[block, :, offset] = value

    def run(self, backend: Backend, *, output: torch.Tensor | None = None, **further: object) -> torch.Tensor:
        """The backend's output ``[T, Hq, D]``; NaN where it wrote none."""
        output = torch.full_like(self.query, math.nan) if output is None else output
        backend.attend(
            self.query,
            self.cache,
            self.table,
            self.lengths,
            self.starts,
            scale=self.scale,
            v_scale=self.v_scale,
            output=output,
            **further,
        )
        return output

    def reference(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A request's rows over its cells in float64, and the tolerance of each element: ``[n, Hq, D]`` each.

        The tolerance is that of :mod:`pytest_kvqual.oracles.placement`.
        """
        positions, rows = self.batch[request]
        g = self.geometry
        first = int(self.starts[request])
        blocks = self.table[request, : math.ceil(positions / g.block_size)].long()
        cells = self.cache[blocks].transpose(0, 1).flatten(1, 2)[:, :positions]
        key = cells[..., : 2 * g.head_size].contiguous().view(self.dtype).double()
        raw = cells[..., 2 * g.head_size :].contiguous()
        if self.codec.v_bytes == 1:
            value = formats.e4m3_values().to(self.device)[raw.long()].double()
            value *= float(torch.tensor(self.v_scale, dtype=torch.float32))
        else:
            value = raw.view(self.dtype).double()
        query = self.query[first : first + rows].double().view(rows, g.kv_heads, g.group, g.head_size)
        scores = torch.einsum("nhgd,hld->nhgl", query, key) * self.scale
        position = torch.arange(positions, device=self.device)
        own = torch.arange(positions - rows, positions, device=self.device)
        scores.masked_fill_((position[None, :] > own[:, None])[:, None, None, :], -math.inf)
        weights = scores.softmax(dim=-1)
        found = torch.einsum("nhgl,hld->nhgd", weights, value)
        absolute = torch.einsum("nhgl,hld->nhgd", weights, value.abs())
        rounding = unit(self.dtype)
        longest = key.norm(dim=-1).amax(dim=-1)[None, :, None, None]
        error = g.head_size * FLOAT32_UNIT * self.scale * query.norm(dim=-1, keepdim=True) * longest
        tolerance = (ROUNDINGS * rounding + (positions + g.head_size) * FLOAT32_UNIT + 2 * error) * absolute
        tolerance += rounding * found.abs()
        lost = _HALF_SMALLEST.get(self.dtype, 0.0)
        tolerance += lost * (2 * value.abs().sum(dim=1)[None, :, None, :] + positions + 2)
        shape = (rows, g.query_heads, g.head_size)
        return found.reshape(shape), tolerance.reshape(shape)

    def worst(self, output: torch.Tensor, requests: Sequence[int] | None = None) -> float:
        """The largest ratio of error to tolerance; infinite where a row is not finite or a padding row not zero."""
        ratios = [0.0]
        for request in range(len(self.batch)) if requests is None else requests:
            rows = self.batch[request][1]
            if rows:
                expected, tolerance = self.reference(request)
                first = int(self.starts[request])
                error = (output[first : first + rows].double() - expected).abs()
                ratio = torch.where(error == 0, 0.0, error / tolerance)
                ratios.append(float(ratio.nan_to_num(nan=math.inf).max()))
        padding = output[self.rows :]
        ratios.append(0.0 if bool((padding == 0).all()) else math.inf)
        return max(ratios)
