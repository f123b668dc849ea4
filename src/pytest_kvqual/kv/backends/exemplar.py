"""A readable paged attention in float32, for the test encodings and for faults: each part is a method to replace.

Shapes are those of ``paged``: query ``[T, Hq, D]``; key, value ``[T, Hkv, D]``; cache ``[blocks, Hkv, block_size,
content]``; block table ``[R, B]``; lengths ``[R]``; starts ``[R + 1]``. Query rows of request ``r`` are the last of its
positions; each row sees the positions up to its own, and with a window the last ``window`` of them, its own included.
Rows behind ``starts[R]`` come back as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from pytest_kvqual.errors import FormatError

FORMATS = ("k16v16", "k16v8", "k8v8", "k8v8-inline")
Mode = Literal["whole", "split", "kv-splits", "cascade"]


class Exemplar:
    """Write and attend of one format.

    Args:
        name: One of ``FORMATS``.
        mode: How a request's positions are cut into parts that are computed apart and merged by log-sum-exp: ``whole``
            (one part), ``split`` (the positions before this step, then its own rows), ``kv-splits`` (``splits`` parts
            of whole blocks), ``cascade`` (the blocks that all requests of the step share, computed for all rows as
            one request, then the rest).
        splits: Parts of ``kv-splits``.
        k_factors: One factor of the K scale per KV head; empty stands for 1.
        v_factors: The same for V.
        dtype: The 16-bit dtype of K and V.

    The parts, in the order in which they run. Writing: ``locate``, ``encode`` (``divisors``, ``cast``,
    ``inline_scale``), ``store``. Reading: ``row_ranges``, ``partitions``, ``shared_blocks``, ``bound``, ``address``,
    ``gather``, ``decode`` (``uncast``, ``factors``), ``visible``, ``clear``, ``kv_head``, ``score``, ``softmax``,
    ``weigh``, ``merge``, ``place``.
    """

    takes = frozenset({"k_scale", "window"})
    """What ``attend`` accepts beyond the arguments of ``paged.attend``."""

    def __init__(
        self,
        name: str,
        *,
        mode: Mode = "whole",
        splits: int = 2,
        k_factors: Sequence[float] = (),
        v_factors: Sequence[float] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if name not in FORMATS:
            raise FormatError(f"found format {name!r}, expected one of {', '.join(FORMATS)}, for the exemplar")
        self.name = name
        self.mode = mode
        self.splits = splits
        self.dtype = dtype
        self.k_factors = tuple(k_factors)
        self.v_factors = tuple(v_factors)
        self.k_bytes, self.v_bytes = {"k16v16": (2, 2), "k16v8": (2, 1)}.get(name, (1, 1))
        self.inline = name == "k8v8-inline"

    # -- writing --------------------------------------------------------------------------------------------------

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Stores K and V of each row in its slot; slot -1 is skipped."""
        rows = slot_mapping.shape[0]
        keep = (slot_mapping >= 0).nonzero().flatten()
        cells = self.encode(key[:rows][keep], value[:rows][keep], k_scale, v_scale)
        block, offset = self.locate(slot_mapping[keep].long(), cache.shape[2])
        self.store(cache, cells, block, offset)

    def locate(self, slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and offset of each slot."""
        return slots // block_size, slots % block_size

    def encode(self, key: torch.Tensor, value: torch.Tensor, k_scale: float, v_scale: float) -> torch.Tensor:
        """The cells: uint8 ``[T, Hkv, content bytes]``, K | V | inline scales."""
        if self.inline:
            scales = [self.inline_scale(key.float()), self.inline_scale(value.float())]
            parts = [self.cast(x.float() / scale) for x, scale in zip((key, value), scales, strict=True)]
            return torch.cat([*parts, *(scale.contiguous().view(torch.uint8) for scale in scales)], dim=-1)
        k_by, v_by = self.divisors(k_scale, v_scale, key.shape[1])
        k = self.cast(key.float() / k_by) if self.k_bytes == 1 else key.contiguous().view(torch.uint8)
        v = self.cast(value.float() / v_by) if self.v_bytes == 1 else value.contiguous().view(torch.uint8)
        return torch.cat([k, v], dim=-1)

    def divisors(self, k_scale: float, v_scale: float, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What K and V of each head are divided by on write: float32 ``[Hkv, 1]`` each."""
        k, v = (torch.tensor(factors or (1.0,) * heads)[:, None] for factors in (self.k_factors, self.v_factors))
        return k * k_scale, v * v_scale

    def factors(self, k_scale: float, v_scale: float, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What K and V of each head are multiplied by on read: float32 ``[Hkv, 1]`` each."""
        return Exemplar.divisors(self, k_scale, v_scale, heads)

    def inline_scale(self, values: torch.Tensor) -> torch.Tensor:
        """The scale of each vector: float32 ``[..., 1]``."""
        peak = torch.where(values.isfinite(), values.abs(), 0.0).amax(dim=-1, keepdim=True)
        return torch.where(peak > 0, peak / 448.0, 1.0)

    def cast(self, values: torch.Tensor) -> torch.Tensor:
        """E4M3 bytes of float32 values, clamped; NaN stays NaN."""
        return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)

    def store(self, cache: torch.Tensor, cells: torch.Tensor, block: torch.Tensor, offset: torch.Tensor) -> None:
        """Writes the cells of ``T`` rows."""
        raw = cache.view(torch.uint8)
        for head in range(raw.shape[1]):
            raw[block, head, offset] = cells[:, head]

    # -- reading --------------------------------------------------------------------------------------------------

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        *,
        scale: float,
        v_scale: float = 1.0,
        k_scale: float = 1.0,
        window: int | None = None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of every query row over its request's cached positions, written to ``output`` and returned."""
        ranges = self.row_ranges(seq_lens, query_start_loc)
        tables = [block_table[r] for r in range(len(ranges))]
        blocks = self.shared_blocks(tables, ranges, cache.shape[2]) if self.mode == "cascade" and window is None else 0
        rows: list[torch.Tensor] = []
        common: tuple[torch.Tensor, torch.Tensor] | None = None
        if blocks:
            # The shared prefix is one virtual request: every row of the step sees all of it.
            shared = blocks * cache.shape[2]
            every = query[: ranges[-1][1]]
            positions = torch.full((every.shape[0],), shared, dtype=torch.int64)
            common = self.part(every, cache, tables[0], 0, shared, positions, scale, k_scale, v_scale, None, shared)
        for (first, last, length), table in zip(ranges, tables, strict=True):
            if last <= first:
                continue
            own = query[first:last]
            positions = torch.arange(length - (last - first), length)
            outputs, lses = [], []
            if common is not None:
                outputs.append(common[0][first:last])
                lses.append(common[1][first:last])
            for begin, end in self.partitions(length - (last - first), length, cache.shape[2], blocks):
                part = self.part(own, cache, table, begin, end, positions, scale, k_scale, v_scale, window, length)
                outputs.append(part[0])
                lses.append(part[1])
            rows.append(self.merge(outputs, lses))
        mixed = torch.cat(rows) if rows else query[:0].float()
        return self.place(mixed, ranges, output, query.shape)

    def row_ranges(self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> list[tuple[int, int, int]]:
        """First row, end row and length of each request."""
        starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
        return [(starts[r], starts[r + 1], lengths[r]) for r in range(len(starts) - 1)]

    def shared_blocks(
        self, tables: Sequence[torch.Tensor], ranges: Sequence[tuple[int, int, int]], block_size: int
    ) -> int:
        """How many leading full blocks all requests share and none of them writes in this step."""
        live = [(table, r) for table, r in zip(tables, ranges, strict=True) if r[1] > r[0]]
        if len(live) < 2:
            return 0
        most = min((length - (last - first)) // block_size for _, (first, last, length) in live)
        shared = 0
        while shared < most and len({int(table[shared]) for table, _ in live}) == 1:
            shared += 1
        return shared

    def partitions(self, before: int, length: int, block_size: int, shared: int) -> list[tuple[int, int]]:
        """The parts of a request's positions that are computed apart; the first ``shared`` blocks are done already."""
        begin = shared * block_size
        if self.mode == "split" and before > begin:
            return [(begin, before), (before, length)]
        if self.mode == "kv-splits":
            blocks = -(-length // block_size)
            size = -(-blocks // self.splits) * block_size
            return [(start, min(start + size, length)) for start in range(0, size * self.splits, size)]
        return [(begin, length)]

    def part(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        table: torch.Tensor,
        begin: int,
        end: int,
        positions: torch.Tensor,
        scale: float,
        k_scale: float,
        v_scale: float,
        window: int | None,
        length: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of ``n`` rows over positions ``begin`` to ``end``: ``[n, Hq, D]``, log-sum-exp ``[n, Hq]``."""
        rows, heads, size = query.shape
        if end <= begin:
            return torch.zeros(rows, heads, size), torch.full((rows, heads), -torch.inf)
        block_size = cache.shape[2]
        first = begin // block_size
        cells = self.gather(cache, self.address(table[first : self.bound(end, block_size)].long()))
        columns = torch.arange(first * block_size, first * block_size + cells.shape[0])
        k, v = self.decode(cells, size, k_scale, v_scale)
        inside = (columns >= begin) & (columns < end)
        seen = self.visible(positions, columns, window, length) & inside
        k, v = self.clear(k, v, seen.any(dim=0))
        output, lse = torch.empty(rows, heads, size), torch.empty(rows, heads)
        for head in range(heads):
            source = self.kv_head(head, heads, cache.shape[1])
            scores = self.score(query[:, head].float(), k[:, source], scale)
            scores = torch.where(seen, scores, -torch.inf)
            weights, lse[:, head] = self.softmax(scores)
            output[:, head] = self.weigh(weights, v[:, source])
        return output, lse

    def bound(self, end: int, block_size: int) -> int:
        """How many blocks are read for ``end`` positions."""
        return -(-end // block_size)

    def address(self, blocks: torch.Tensor) -> torch.Tensor:
        """Where in the pool the blocks lie."""
        return blocks

    def gather(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """The cells of whole blocks: uint8 ``[len(blocks) * block_size, Hkv, content bytes]``."""
        return cache.view(torch.uint8)[blocks].transpose(1, 2).flatten(0, 1)

    def decode(
        self, cells: torch.Tensor, size: int, k_scale: float, v_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the cells: float32 ``[n, Hkv, D]`` each."""
        split = self.k_bytes * size
        end = split + self.v_bytes * size
        k, v = cells[..., :split], cells[..., split:end]
        if self.inline:
            scales = cells[..., end:].contiguous().view(torch.float32)
            return self.uncast(k) * scales[..., :1], self.uncast(v) * scales[..., 1:]
        k_by, v_by = self.factors(k_scale, v_scale, cells.shape[1])
        wide_k = self.uncast(k) * k_by if self.k_bytes == 1 else k.contiguous().view(self.dtype).float()
        wide_v = self.uncast(v) * v_by if self.v_bytes == 1 else v.contiguous().view(self.dtype).float()
        return wide_k, wide_v

    def uncast(self, cells: torch.Tensor) -> torch.Tensor:
        """Float32 values of E4M3 bytes."""
        return cells.contiguous().view(torch.float8_e4m3fn).float()

    def clear(self, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V with zeros where no row sees them: a weight of zero is not enough, as zero times NaN is NaN."""
        return torch.where(seen[:, None, None], k, 0.0), torch.where(seen[:, None, None], v, 0.0)

    def kv_head(self, head: int, query_heads: int, kv_heads: int) -> int:
        """The KV head that a query head reads."""
        return head // (query_heads // kv_heads)

    def score(self, query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
        """Scores float32 ``[n, positions]``."""
        return (query @ key.T) * scale

    def visible(self, positions: torch.Tensor, columns: torch.Tensor, window: int | None, length: int) -> torch.Tensor:
        """Which column each row sees: bool ``[n, columns]``."""
        seen = columns[None, :] <= positions[:, None]
        if window is not None:
            seen &= columns[None, :] > positions[:, None] - window
        return seen

    def softmax(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights ``[n, columns]`` and natural log-sum-exp ``[n]``; a row that sees nothing has weights 0 and -inf."""
        peak = scores.amax(dim=-1, keepdim=True)
        weights = (scores - peak.clamp(min=torch.finfo(torch.float32).min)).exp()
        total = weights.sum(dim=-1, keepdim=True)
        lse = (total.log() + peak).squeeze(-1)
        return torch.where(total == 0, 0.0, weights / total), torch.where(total.squeeze(-1) == 0, -torch.inf, lse)

    def weigh(self, weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The weighted sum of V: float32 ``[n, D]``."""
        return weights @ value

    def merge(self, outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> torch.Tensor:
        """One output of parts ``[n, Hq, D]`` with natural log-sum-exps ``[n, Hq]``; a part of -inf weighs nothing."""
        if len(outputs) == 1:
            return outputs[0]
        stacked = torch.stack(list(lses))
        peak = stacked.amax(dim=0).clamp(min=torch.finfo(torch.float32).min)
        weights = (stacked - peak).exp()
        total = weights.sum(dim=0).clamp(min=torch.finfo(torch.float32).tiny)
        return ((weights / total)[..., None] * torch.stack(list(outputs))).sum(dim=0)

    def place(
        self, mixed: torch.Tensor, ranges: Sequence[tuple[int, int, int]], output: torch.Tensor, shape: torch.Size
    ) -> torch.Tensor:
        """Writes the rows of all requests, in row order, to ``output``; rows behind them become zeros."""
        result = output.view(output.shape[0], shape[1], shape[2])
        result[: mixed.shape[0]] = mixed.to(result.dtype)
        result[mixed.shape[0] :].zero_()
        return output


def for_format(name: str) -> Exemplar:
    """The exemplar of one format, with its parts whole and no head factors."""
    return Exemplar(name)
