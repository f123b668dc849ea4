"""Faults of where K and V are written, and of what is written there."""

from __future__ import annotations

from typing import Any

import torch

from pytest_kvqual.faults.planting import Step, override, wrap_updates


def slot_off_by_one(worker: Any) -> None:
    """Every write goes one slot too far."""

    def change(original: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        last = cache.shape[0] * worker.kvqual_block_size() - 1
        original(layer, key, value, cache, torch.where(slots >= 0, (slots + 1).clamp(max=last), slots))

    wrap_updates(worker, change)


def slot_wrong_at_block_multiple(worker: Any) -> None:
    """The write of a position that starts a block goes to the slot before it."""

    def change(original: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        first = (slots > 0) & (slots % worker.kvqual_block_size() == 0)
        original(layer, key, value, cache, torch.where(first, slots - 1, slots))

    wrap_updates(worker, change)


def key_value_swapped(worker: Any) -> None:
    """The cache update takes K for V and V for K."""

    def change(original: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        original(layer, value, key, cache, slots)

    wrap_updates(worker, change)


def last_row_not_written(worker: Any) -> None:
    """The last row of a step is not written."""

    def change(original: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        kept = slots.clone()
        kept[(slots >= 0).nonzero().flatten()[-1:]] = -1
        original(layer, key, value, cache, kept)

    wrap_updates(worker, change)


def padding_writes_slot_zero(worker: Any) -> None:
    """A padding row writes its K and V to slot 0."""

    def change(original: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        original(layer, key, value, cache, slots)
        original(layer, key[:1] + 1, value[:1] + 1, cache, torch.zeros_like(slots[:1]))

    wrap_updates(worker, change)


def padding_keeps_last_slots(worker: Any) -> None:
    """After the batch shrank, its padding rows still write where the last step's rows wrote."""
    last: dict[int, torch.Tensor] = {}

    def change(original: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        kept = slots.clone()
        old = last.get(id(layer), slots)[: len(slots)]
        padding = slots[: len(old)] < 0
        kept[: len(old)][padding] = old[padding]
        original(layer, key, value, cache, kept)
        last[id(layer)] = slots.clone()

    wrap_updates(worker, change)


def _write_at(worker: Any, slots_of: Any) -> None:
    """Writes go to ``slots_of(step, request, position)`` instead of the slot mapping; padding rows stay unwritten."""
    step = Step(worker)

    def change(original: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        request, position, _ = step.places(slots.shape[0])
        found = slots_of(step, request.clamp(min=0), position.clamp(min=0)).to(slots.dtype)
        pool = cache.shape[0] * worker.kvqual_block_size()
        original(layer, key, value, cache, torch.where((slots < 0) | (request < 0), slots, found % pool))

    wrap_updates(worker, change)


def slots_from_manager_block_size(worker: Any) -> None:
    """Slots are computed with a block twice as large as the one that the reader uses."""
    size = 2 * worker.kvqual_block_size()

    def slots_of(step: Step, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return step.table[request, position // size].long() * size + position % size

    _write_at(worker, slots_of)


def slots_from_rope_positions(worker: Any) -> None:
    """Slots are computed from rope positions, which run ahead of the sequence index after an image."""
    size = worker.kvqual_block_size()

    def slots_of(step: Step, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        rope = torch.where(position >= 5, position + 3, position)
        column = (rope // size).clamp(max=step.table.shape[1] - 1)
        return step.table[request, column].long() * size + rope % size

    _write_at(worker, slots_of)


def continuation_written_through_stale_tail(worker: Any) -> None:
    """Compaction moved only the filled part of a table row; a chunk's further blocks are those of the row's last user.

    The reader has the right table.
    """
    size = worker.kvqual_block_size()
    number, wide, now = 0, torch.zeros(0, 0), torch.zeros(0, 0)

    def slots_of(step: Step, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        nonlocal number, wide, now
        if step.number != number:
            number, wide, now = step.number, now, step.table
        counts = step.starts[1:] - step.starts[:-1]
        filled = (step.lengths - counts + size - 1) // size
        row, column = request, position // size
        tail = (column >= filled[row]) & (filled[row] > 0) & (counts[row] > 1)
        tail &= (row < wide.shape[0]) & (column < wide.shape[1])
        block = now[row, column].long()
        block[tail] = wide[row[tail], column[tail]].long()
        return block * size + position % size

    _write_at(worker, slots_of)


def block_number_wraps_on_write(worker: Any) -> None:
    """The offset of a block is one bit too narrow for the pool: the write of a high block lands in a low one."""

    def change(original: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        span = worker.kvqual_block_size() << ((cache.shape[0] - 1).bit_length() - 1)
        original(layer, key, value, cache, torch.where(slots < 0, slots, slots % span))

    wrap_updates(worker, change)


def heads_copied_flat(worker: Any) -> None:
    """Rows are copied head by head into a block as if a head's rows in the block were as many as those copied."""

    def change(kernel: Any, original: Any, cache: Any, cells: Any, block: Any, offset: Any) -> None:
        raw = cache.view(torch.uint8)
        heads, size = raw.shape[1:3]
        for number in block.unique().tolist():
            mine = (block == number).nonzero().flatten()
            first, count = int(offset[mine].min()), len(mine)
            flat = torch.arange(heads)[:, None] * count + first + torch.arange(count)[None, :]
            raw[number, flat // size, flat % size] = cells[mine].transpose(0, 1)

    override(worker, "store", change)


def cached_keys_rotated_again(worker: Any) -> None:
    """A shift of the context rewrites the cached K of a block in place; nothing says that it may."""
    step = Step(worker)

    def change(original: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        original(layer, key, value, cache, slots)
        if int(step.lengths[0]) > worker.kvqual_block_size():
            cell = cache[int(step.table[0, 0]), :, 0]
            half = layer.impl.head_size // 2 * (2 if cache.element_size() == 1 and cache.shape[-1] % 3 == 0 else 1)
            cell[:, : 2 * half] = cell[:, : 2 * half].roll(half, dims=1)

    wrap_updates(worker, change)
