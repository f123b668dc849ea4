"""Faults of the maps that a layer is given: block table, lengths, row starts."""

from __future__ import annotations

from typing import Any

import torch

from pytest_kvqual.faults.planting import Call, wrap_attention, wrap_metadata


def _overlaid(current: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """``current`` with the leading part that ``old`` has too taken from ``old``."""
    mixed = current.clone()
    place = tuple(slice(min(a, b)) for a, b in zip(current.shape, old.shape, strict=True))
    mixed[place] = old[place]
    return mixed


def stale_block_table(worker: Any) -> None:
    """Attention metadata carries the block table of the previous step."""
    previous: dict[int, torch.Tensor] = {}

    def change(metadata: Any, number: int) -> None:
        current = metadata.block_table.clone()
        metadata.block_table = _overlaid(current, previous.get(number, current))
        previous[number] = current

    wrap_metadata(worker, change)


def captured_table_never_refreshed(worker: Any) -> None:
    """The table of the first step stays in the buffer that a captured graph reads; later ones go elsewhere."""
    captured: dict[int, torch.Tensor] = {}

    def change(metadata: Any, number: int) -> None:
        held = captured.setdefault(number, metadata.block_table.clone())
        metadata.block_table = _overlaid(metadata.block_table, held)

    wrap_metadata(worker, change)


def _no_fewer_than_rows(lengths: torch.Tensor, metadata: Any) -> torch.Tensor:
    """Lengths that a kernel can take: at least a request's query rows."""
    starts = metadata.query_start_loc
    return torch.maximum(lengths, (starts[1:] - starts[:-1]).to(lengths.dtype)[: lengths.numel()])


def stale_lengths(worker: Any) -> None:
    """Attention metadata carries the sequence lengths of the previous step."""
    previous: dict[int, torch.Tensor] = {}

    def change(metadata: Any, number: int) -> None:
        current = metadata.seq_lens.clone()
        metadata.seq_lens = _no_fewer_than_rows(_overlaid(current, previous.get(number, current)), metadata)
        previous[number] = current

    wrap_metadata(worker, change)


def stale_row_starts(worker: Any) -> None:
    """The first two requests' row starts are those of the previous step, as far as the batch still holds them."""
    previous: dict[int, torch.Tensor] = {}

    def change(metadata: Any, number: int) -> None:
        current = metadata.query_start_loc.clone()
        old = previous.get(number, current)
        if len(current) > 2 and len(old) > 2:
            mixed = current.clone()
            mixed[1] = old[1].clamp(max=current[2])
            metadata.query_start_loc = mixed
            metadata.seq_lens = _no_fewer_than_rows(metadata.seq_lens, metadata)
        previous[number] = current

    wrap_metadata(worker, change)


def rows_swapped_through_views(worker: Any) -> None:
    """Two rows of a reordered table are swapped back through views of one buffer: both end as the second."""

    def change(metadata: Any, number: int) -> None:
        if metadata.block_table.shape[0] > 1:
            table = metadata.block_table.clone()
            table[:2] = table[:2].flip(0)
            table[0], table[1] = table[1], table[0]
            metadata.block_table = table

    wrap_metadata(worker, change)


def lengths_advanced_by_draft(worker: Any) -> None:
    """Every row is advanced by the full length of a draft of two, however many of its tokens were accepted."""

    def change(metadata: Any, number: int) -> None:
        most = metadata.block_table.shape[1] * worker.kvqual_block_size()
        metadata.seq_lens = (metadata.seq_lens + 2).clamp(max=most)

    wrap_metadata(worker, change)


def table_row_recycled_mid_step(worker: Any) -> None:
    """The row of a request is given to another after the first layer has read it: later layers read the new one."""

    def change(call: Call) -> None:
        call.run()
        if call.table.shape[0] > 1:
            call.table[0] = call.table[1].clone()

    wrap_attention(worker, change, only=0)


def stale_tail_in_table(worker: Any) -> None:
    """Table entries behind a request's blocks are those of the row's last user; nothing reads them."""
    size = worker.kvqual_block_size()
    previous: dict[int, torch.Tensor] = {}

    def change(metadata: Any, number: int) -> None:
        current = metadata.block_table.clone()
        old = _overlaid(current, previous.get(number, current))
        used = (metadata.seq_lens[:, None] + size - 1) // size
        unused = torch.arange(current.shape[1])[None, :] >= used
        metadata.block_table = torch.where(unused, old, current)
        previous[number] = current

    wrap_metadata(worker, change)
