"""Paged attention over a cache whose cells hold K and then V, as torch operations on a CPU.

``reference`` and ``k16v8`` are this code with two V codecs, so that a difference between the two is the codec's.

Shapes: query ``[T, Hq, D]``; key, value ``[T, Hkv, D]``; cache ``[blocks, Hkv, block_size, content]``; block table
``[R, B]``; lengths ``[R]``; starts ``[R + 1]``. Query head ``h`` reads KV head ``h // (Hq // Hkv)``. Request ``r`` owns
query rows ``starts[r]`` to ``starts[r + 1]``, which are the last of its ``lengths[r]`` positions, and each row sees the
positions up to its own. Rows from ``starts[R]`` on are padding and come back as zeros.

How it runs:

* Requests with one query row are cut into items of at least ``_ITEM_POSITIONS`` positions (whole blocks). All items of
  all requests have one shape and run as one batch in float32, some at a time; the items of a request are then merged
  in order by their maxima and sums. An item is computed by itself, so the bits of a row depend neither on the other
  requests of the batch nor on their lengths.
* A request with more query rows is gathered once and runs through the fused attention of torch in the cache's 16-bit
  dtype: its earlier positions without a mask and its own rows under the causal mask, merged by log-sum-exp.
* Only the positions below a request's length may reach its output. K and V of the other positions of its last block
  are set to zero after the gather (a weight of zero is not enough, as zero times NaN is NaN), and block-table entries
  behind the last block are not read.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from pytest_kvqual.errors import FormatError

_ITEM_POSITIONS = 128
_CHUNK_POSITIONS = 6144
"""Cache positions gathered at a time: their cells and one float32 copy should fit the second-level caches."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Codec(Protocol):
    """How V lies in a cell."""

    @property
    def v_bytes(self) -> int:
        """Bytes per V element."""
        ...

    def store(self, value: torch.Tensor, v_scale: float) -> torch.Tensor:
        """What the V part of the cells must hold: an integer tensor of ``value``'s shape, ``v_bytes`` wide."""
        ...

    def load(self, raw: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        """Writes the V elements of ``raw`` (uint8 ``[..., v_bytes * D]``) into ``out`` (``[..., D]``), unscaled.

        ``dtype`` is the 16-bit dtype of the layer; ``out`` is float32 or of that dtype.
        """
        ...

    def factor(self, v_scale: float) -> float:
        """What a weighted sum of loaded V must be multiplied by."""
        ...


class _Scratch(threading.local):
    """Buffers that live from call to call: a fresh one of this size costs its page faults in each call."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory of ``shape`` and ``dtype``; valid until the next ``take`` of the same name."""
        count = dtype.itemsize
        for size in shape:
            count *= size
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count:
            with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
                buffer = torch.empty(count, dtype=torch.uint8)
            self._buffers[name] = buffer
        return buffer[:count].view(dtype).view(shape)


_scratch = _Scratch()
scratch = _scratch.take


def write(
    codec: Codec,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    v_scale: float,
) -> None:
    """Stores the first ``len(slot_mapping)`` rows of ``key`` and ``value`` in their slots; slot -1 is skipped.

    Raises:
        FormatError: The cache's cells have not the codec's size.
    """
    rows = slot_mapping.shape[0]
    key, value = key[:rows], value[:rows]
    keep = slot_mapping >= 0
    if not bool(keep.all()):
        key, value, slot_mapping = key[keep], value[keep], slot_mapping[keep]
    raw = _raw(codec, cache, key.shape[-1])
    split = 2 * key.shape[-1]
    slot = slot_mapping.to(torch.int64)
    block = torch.div(slot, raw.shape[2], rounding_mode="floor")
    offset = (slot - block * raw.shape[2])[:, None]
    block = block[:, None]
    heads = torch.arange(raw.shape[1])[None, :]
    stored = codec.store(value, v_scale)
    raw[..., :split].view(torch.int16)[block, heads, offset] = key.contiguous().view(torch.int16)
    raw[..., split:].view(stored.dtype)[block, heads, offset] = stored


def attend(
    codec: Codec,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    v_scale: float,
    output: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of every query row over its request's cached positions, written to ``output`` and returned.

    Args:
        codec: How V lies in the cells.
        query: ``[T, Hq, D]``, bfloat16 or float16.
        cache: ``[blocks, Hkv, block_size, content]``; the positions of the query rows are already written.
        block_table: Integer ``[R, B]``.
        seq_lens: Integer ``[R]``: positions of each request, its query rows included.
        query_start_loc: Integer ``[R + 1]``, ascending from 0.
        scale: Factor of the scores.
        v_scale: Factor of the stored V.
        output: ``[T, Hq, D]`` or ``[T, Hq * D]``; rows from ``query_start_loc[R]`` on are set to zero.

    Raises:
        FormatError: The cache's cells have not the codec's size, or a request has more rows than positions.
    """
    raw = _raw(codec, cache, query.shape[-1])
    result = output.view(output.shape[0], query.shape[1], query.shape[2])
    starts = query_start_loc.to(torch.int64)
    lengths = seq_lens.to(torch.int64)
    rows = starts[1:] - starts[:-1]
    if bool((rows > lengths).any()):
        raise FormatError("found a request with more query rows than positions, expected at most as many, in attention")
    single = (rows == 1).nonzero().flatten()
    if single.numel():
        _attend_single(codec, query, raw, block_table, lengths, starts, single, scale, v_scale, result)
    if single.numel() < rows.numel():
        for request in (rows > 1).nonzero().flatten().tolist():
            first, last = int(starts[request]), int(starts[request + 1])
            _attend_many(
                codec,
                query[first:last],
                raw,
                block_table[request],
                int(lengths[request]),
                scale,
                v_scale,
                result[first:last],
            )
    result[int(starts[-1]) :].zero_()
    return output


def _raw(codec: Codec, cache: torch.Tensor, head_size: int) -> torch.Tensor:
    """The cache as bytes: uint8 ``[blocks, heads, block_size, (2 + v_bytes) * D]``."""
    expected = (2 + codec.v_bytes) * head_size
    if cache.dim() != 4 or cache.stride(-1) != 1 or cache.shape[-1] * cache.element_size() != expected:
        raise FormatError(
            f"found a cache of {cache.dtype} {tuple(cache.shape)} with strides {cache.stride()}, "
            f"expected [blocks, heads, block_size] cells of {expected} dense bytes"
        )
    return cache.view(torch.uint8)


def _attend_single(
    codec: Codec,
    query: torch.Tensor,
    raw: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    requests: torch.Tensor,
    scale: float,
    v_scale: float,
    result: torch.Tensor,
) -> None:
    """The requests with one query row each."""
    _, kv_heads, block_size, content = raw.shape
    query_heads, head_size = query.shape[1], query.shape[2]
    group = query_heads // kv_heads
    blocks_per_item = max(1, _ITEM_POSITIONS // block_size)
    positions = blocks_per_item * block_size
    # Longest first, so that the requests that have a j-th item are a prefix of the rows.
    length, order = lengths[requests].sort(descending=True, stable=True)
    requests = requests[order]
    query_rows = starts[requests]
    items = (length + (positions - 1)) // positions
    # Items in j-major order: item j of each request that has one, then j + 1. The merge then takes slices.
    step = torch.arange(int(items[0]))
    present = step[:, None] < items[None, :]
    item_step, item_row = present.nonzero(as_tuple=True)
    first_block = item_step[:, None] * blocks_per_item + torch.arange(blocks_per_item)
    last_block = (length - 1) // block_size
    # Blocks behind the last one repeat it; their positions are beyond the length and are cleared below.
    column = torch.minimum(first_block, last_block[item_row][:, None])
    blocks = block_table[requests[item_row][:, None], column].to(torch.int64)
    valid = (length[item_row] - item_step * positions).clamp(max=positions)

    scaled = query.index_select(0, query_rows).float().mul_(scale).view(-1, kv_heads * group * head_size)
    count = item_row.numel()
    maxima = torch.empty(count, kv_heads, group, 1)
    sums = torch.empty(count, kv_heads, group, 1)
    partial = _scratch.take("partial", (count, kv_heads, group, head_size), torch.float32)
    size = max(1, _CHUNK_POSITIONS // positions)
    tails = (valid < positions).tolist()
    left = valid.tolist()
    for begin in range(0, count, size):
        end = min(begin + size, count)
        width = end - begin
        tile = _gather(raw, blocks[begin:end].flatten())
        clear = [item for item in range(width) if tails[begin + item]]
        _clear_tails(tile, clear, left[begin:end], blocks_per_item)
        cells = tile.view(width, blocks_per_item, kv_heads, block_size, content)
        # One float32 buffer for K and then for V: what is not touched twice stays in the cache of a core.
        wide = _scratch.take("wide", (width, kv_heads, blocks_per_item, block_size, head_size), torch.float32)
        paged, flat = wide.transpose(1, 2), wide.view(width * kv_heads, positions, head_size)
        paged.copy_(cells[..., : 2 * head_size].view(query.dtype))
        own = scaled.index_select(0, item_row[begin:end]).view(width * kv_heads, group, head_size)
        weights = torch.bmm(own, flat.transpose(1, 2))
        scores = weights.view(width, kv_heads, group, positions)
        for item in clear:
            scores[item, :, :, left[begin + item] :].fill_(-torch.inf)
        peak = maxima[begin:end]
        torch.amax(scores, dim=-1, keepdim=True, out=peak)
        scores.sub_(peak).exp_()
        torch.sum(scores, dim=-1, keepdim=True, out=sums[begin:end])
        codec.load(cells[..., 2 * head_size :], paged, query.dtype)
        torch.bmm(weights, flat, out=partial[begin:end].view(width * kv_heads, group, head_size))
    merged = _merge(maxima, sums, partial, present.sum(dim=1).tolist())
    merged *= codec.factor(v_scale)
    result.index_copy_(0, query_rows, merged.view(-1, query_heads, head_size).to(result.dtype))


def _gather(raw: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """A dense copy of the given blocks: uint8 ``[len(blocks), heads, block_size, content]``, valid until the next."""
    shape = (blocks.numel(), *raw.shape[1:])
    tile = _scratch.take("tile", shape, torch.uint8)
    if raw[0].is_contiguous() and raw[0].numel() % 8 == 0 and raw.stride(0) % 8 == 0 and raw.data_ptr() % 8 == 0:
        # Eight bytes an element: torch splits a copy of more than 2**15 elements among its threads block by block,
        # which costs one barrier per block; below that it splits the blocks once.
        words = raw.flatten(1).view(torch.int64)
        torch.index_select(words, 0, blocks, out=tile.view(shape[0], -1).view(torch.int64))
    else:
        torch.index_select(raw, 0, blocks, out=tile)
    return tile


def _clear_tails(tile: torch.Tensor, items: list[int], valid: list[int], blocks_per_item: int) -> None:
    """Sets the bytes of positions from ``valid[item]`` on to zero, in the given items of ``tile``, in place."""
    block_size = tile.shape[2]
    for item in items:
        count = valid[item]
        block = item * blocks_per_item + count // block_size
        if count % block_size:
            tile[block, :, count % block_size :].zero_()
            block += 1
        tile[block : (item + 1) * blocks_per_item].zero_()


def _merge(maxima: torch.Tensor, sums: torch.Tensor, partial: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """Merges j-major items: ``widths[j]`` rows have a j-th item. Returns float32 ``[rows, Hkv, group, D]``.

    Items are added one after the other, so that a row's result does not depend on how many items other rows have.
    """
    rows = widths[0]
    peak = maxima[:rows].clone()
    begin = rows
    for width in widths[1:]:
        torch.maximum(peak[:width], maxima[begin : begin + width], out=peak[:width])
        begin += width
    total = torch.zeros_like(peak)
    merged = torch.zeros(rows, *partial.shape[1:])
    begin = 0
    for width in widths:
        end = begin + width
        weight = (maxima[begin:end] - peak[:width]).exp_()
        total[:width].addcmul_(weight, sums[begin:end])
        merged[:width].addcmul_(weight, partial[begin:end])
        begin = end
    return merged.div_(total)


def _attend_many(
    codec: Codec,
    query: torch.Tensor,
    raw: torch.Tensor,
    table: torch.Tensor,
    length: int,
    scale: float,
    v_scale: float,
    result: torch.Tensor,
) -> None:
    """One request with several query rows."""
    _, kv_heads, block_size, _ = raw.shape
    rows, query_heads, head_size = query.shape
    group = query_heads // kv_heads
    blocks = (length + block_size - 1) // block_size
    tile = _gather(raw, table[:blocks].to(torch.int64))
    keys = _scratch.take("keys", (kv_heads, blocks, block_size, head_size), query.dtype)
    values = _scratch.take("values", (kv_heads, blocks, block_size, head_size), query.dtype)
    keys.transpose(0, 1).copy_(tile[..., : 2 * head_size].view(query.dtype))
    codec.load(tile[..., 2 * head_size :], values.transpose(0, 1), query.dtype)
    # KV heads as the batch, so that the group shares K and V through a stride of zero.
    shape = (kv_heads, group, length, head_size)
    k = keys.view(kv_heads, 1, blocks * block_size, head_size)[:, :, :length].expand(shape)
    v = values.view(kv_heads, 1, blocks * block_size, head_size)[:, :, :length].expand(shape)
    q = query.view(rows, kv_heads, group, head_size).permute(1, 2, 0, 3)
    before = length - rows
    own, own_lse = _flash(q, k[:, :, before:], v[:, :, before:], 0.0, True, scale=scale)
    total = own.float()
    if before:
        past, past_lse = _flash(q, k[:, :, :before], v[:, :, :before], 0.0, False, scale=scale)
        weight = torch.sigmoid(past_lse - own_lse)[..., None]
        total = torch.lerp(total, past.float(), weight)
    total *= codec.factor(v_scale)
    result.view(rows, kv_heads, group, head_size).copy_(total.permute(2, 0, 1, 3))
