"""Paged attention that a graph can hold: every shape follows from the arguments' shapes, and no value is read back.

16-bit K and V, each stored as it came, in the cells of ``reference`` (K then V). What ``paged`` leaves out by looking
at lengths, this masks: each row scores every position of its request's whole block-table row in float32, and those it
must not see are excluded. Cost and memory grow with rows times columns, so it serves small steps that are recorded and
replayed, not a server.
"""

from __future__ import annotations

import torch

from pytest_kvqual.errors import FormatError

_SIXTEEN = (torch.bfloat16, torch.float16)


def _words(cache: torch.Tensor, head_size: int, dtype: torch.dtype) -> torch.Tensor:
    """The cache as 16-bit elements: ``[blocks, heads, block_size, 2 * D]``, a view."""
    if (
        dtype not in _SIXTEEN
        or cache.dim() != 4
        or cache.stride(-1) != 1
        or cache.shape[-1] * cache.element_size() != 4 * head_size
    ):
        raise FormatError(
            f"found a cache of {cache.dtype} {tuple(cache.shape)} with strides {cache.stride()} for rows of {dtype}, "
            f"expected [blocks, heads, block_size] cells of {4 * head_size} dense bytes for 16-bit rows"
        )
    return cache.view(dtype)


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Stores the first ``len(slot_mapping)`` rows of K and V in their slots; a row with slot -1 changes nothing.

    Args:
        key: ``[T, Hkv, D]``, bfloat16 or float16.
        value: As ``key``.
        cache: ``[blocks, Hkv, block_size, 2 * D]`` of that type, or ``[..., 4 * D]`` bytes; may be strided.
        slot_mapping: Integer ``[<= T]``.
        k_scale: Accepted and not applied.
        v_scale: Accepted and not applied.

    Raises:
        FormatError: The cache's cells have not this size.
    """
    rows = slot_mapping.shape[0]
    if not rows:
        return
    head_size = key.shape[-1]
    words = _words(cache, head_size, key.dtype)
    slots = slot_mapping.to(torch.int64)
    keep = slots >= 0
    # A row that must write nothing repeats the write of the first row that writes: the same bytes to the same cell, in
    # whatever order. Where no row writes, all put back what slot 0 holds.
    first = keep.to(torch.int64).argmax().reshape(1)
    row = torch.where(keep, torch.arange(rows, device=slots.device), first)
    some = keep.any()
    slot = torch.where(some, slots.index_select(0, row), torch.zeros_like(slots))
    block = torch.div(slot, words.shape[2], rounding_mode="floor")[:, None]
    offset = torch.remainder(slot, words.shape[2])[:, None]
    heads = torch.arange(words.shape[1], device=slots.device)[None, :]
    cells = torch.cat([key[:rows], value[:rows]], dim=-1).view(torch.int16).index_select(0, row)
    raw = words.view(torch.int16)
    raw[block, heads, offset] = torch.where(some, cells, raw[block, heads, offset])


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    v_scale: float = 1.0,
    output: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of every query row over its request's cached positions, written to ``output`` and returned.

    Args:
        query: ``[T, Hq, D]``, bfloat16 or float16. Query head ``h`` reads KV head ``h // (Hq // Hkv)``.
        cache: As in :func:`write`; the positions of the query rows are already written.
        block_table: Integer ``[R, B]``; entries behind a request's last block may be anything.
        seq_lens: Integer ``[R]``: positions of each request, its query rows included, at most ``B * block_size``.
        query_start_loc: Integer ``[R + 1]``, ascending from 0. A padding request has no rows.
        scale: Factor of the scores.
        v_scale: Accepted and not applied.
        output: ``[T, Hq, D]`` or ``[T, Hq * D]``; rows from ``query_start_loc[R]`` on are set to zero.

    Raises:
        FormatError: The cache's cells have not this size.
    """
    rows, query_heads, head_size = query.shape
    words = _words(cache, head_size, query.dtype)
    blocks, kv_heads, block_size, _ = words.shape
    requests, columns = block_table.shape
    positions = columns * block_size
    device = query.device
    result = output.view(output.shape[0], query_heads, head_size)
    starts = query_start_loc.to(torch.int64)
    lengths = seq_lens.to(torch.int64)
    number = torch.arange(rows, device=device)
    real = number < starts[-1]
    owner = (number[:, None] >= starts[None, 1:]).sum(dim=1).clamp(max=requests - 1)
    length = lengths.index_select(0, owner)
    own = length - (starts.index_select(0, owner + 1) - number)
    position = torch.arange(positions, device=device)
    seen = (position[None, :] <= own[:, None]) & (position[None, :] < length[:, None])
    table = block_table.to(torch.int64).clamp(0, blocks - 1)
    cells = words.index_select(0, table.flatten()).view(requests, columns, kv_heads, block_size, 2 * head_size)
    cells = cells.transpose(2, 3).reshape(requests, positions, kv_heads, 2 * head_size)
    # Replaced, not multiplied by zero: zero times NaN is NaN.
    filled = position[None, :] < lengths[:, None]
    cells = torch.where(filled[:, :, None, None], cells, torch.zeros_like(cells)).float()
    mine = cells.index_select(0, owner).permute(0, 2, 1, 3)  # [T, Hkv, L, 2D]
    keys, values = mine[..., :head_size], mine[..., head_size:]
    grouped = query.float().view(rows, kv_heads, query_heads // kv_heads, head_size)
    scores = torch.matmul(grouped, keys.transpose(-1, -2)) * scale
    scores = torch.where(seen[:, None, None, :], scores, torch.full_like(scores, -torch.inf))
    weights = torch.softmax(scores, dim=-1)
    attended = torch.matmul(weights, values).view(rows, query_heads, head_size)
    # A padding row saw nothing and is NaN up to here.
    attended = torch.where(real[:, None, None], attended, torch.zeros_like(attended))
    result[:rows].copy_(attended)
    result[rows:].zero_()
    return output
