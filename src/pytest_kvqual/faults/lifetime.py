"""Faults of when a block, a buffer or a request's state may be read or written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from pytest_kvqual.faults.planting import held_as, replace

# -- offload and restore --------------------------------------------------------------------------------------------


def block_saved_after_reuse(worker: Any) -> None:
    """A store in the background reads its blocks two steps late; by then they may be another's."""
    original = worker.when_saved
    waiting = [0]

    def when_saved() -> None:
        waiting[0] = waiting[0] + 1 if worker._to_save else 0
        if waiting[0] > 3:
            original()

    replace(worker, worker, "when_saved", when_saved)


def block_saved_before_write(worker: Any) -> None:
    """The copy to host memory is not ordered after the writes of the step: it holds what was there before them."""
    before: dict[str, torch.Tensor] = {}
    between, save_block = worker.between, worker.save_block

    def remember(metadata: Any) -> None:
        before.update({name: layer.kv_cache.clone() for name, layer in worker.kvqual_layers().items()})
        between(metadata)

    def early(block: int) -> Any:
        with ExitStack() as stack:
            for name, layer in worker.kvqual_layers().items():
                stack.enter_context(held_as(layer, kv_cache=before[name]))
            return save_block(block)

    replace(worker, worker, "between", remember)
    replace(worker, worker, "save_block", early)


def _restored(worker: Any, change: Any) -> None:
    """A block is restored by ``change(original, block, saved)``."""
    original = worker.restore_block
    replace(worker, worker, "restore_block", lambda block, saved: change(original, block, saved))


def block_zeroed_after_load(worker: Any) -> None:
    """The zeroing of a newly granted block runs after the load into it."""

    def change(original: Any, block: int, saved: Any) -> None:
        original(block, saved)
        for layer in worker.kvqual_layers().values():
            layer.kv_cache[block] = 0

    _restored(worker, change)


def load_into_block_in_use(worker: Any) -> None:
    """A load goes to the block's number of a step before, when another request, which still reads it, held it."""

    def change(original: Any, block: int, saved: Any) -> None:
        original(block, saved)
        in_use = [state.blocks[0] for state in worker.runner.states.values() if block not in state.blocks]
        if in_use:
            original(in_use[0], saved)

    _restored(worker, change)


def _reread(worker: Any, view: Any) -> None:
    """A restored block's cells ``[Hkv, block_size, content]`` of each layer are ``view(cells)``."""

    def change(original: Any, block: int, saved: Mapping[str, torch.Tensor]) -> None:
        original(block, {name: view(cells).contiguous() for name, cells in saved.items()})

    _restored(worker, change)


def restored_tokens_major(worker: Any) -> None:
    """The transfer takes pages that lie heads first for pages that lie tokens first."""
    _reread(worker, lambda cells: cells.reshape(cells.shape[1], cells.shape[0], -1).transpose(0, 1))


def restored_halves_as_heads(worker: Any) -> None:
    """The K and V halves of a cell are taken for the dimension of the heads: with two heads the shapes are the same."""

    def view(cells: torch.Tensor) -> torch.Tensor:
        heads, size, content = cells.shape
        halves = cells.reshape(heads, size, 2, content // 2)
        return halves.transpose(0, 2).reshape(heads, size, content) if heads == 2 else cells

    _reread(worker, view)


def rank_slice_without_replication(worker: Any) -> None:
    """A rank's heads of a saved block start at its number times its heads, although ranks share heads."""
    original, all_heads = worker.rank_heads, worker.geometry.kv_heads

    def rank_heads(rank: int) -> tuple[int, int]:
        _, count = original(rank)
        return rank * count % all_heads, count

    _restored(worker, lambda restore, block, saved: _with(worker, rank_heads, restore, block, saved))


def _with(worker: Any, rank_heads: Any, restore: Any, block: int, saved: Any) -> None:
    with held_as(worker, rank_heads=rank_heads):
        restore(block, saved)


# -- freed blocks ---------------------------------------------------------------------------------------------------


def late_write_into_freed_block(worker: Any) -> None:
    """A transfer that failed freed its blocks while another part of it still writes to them, a step later."""
    late: list[int] = []
    give, between = worker.pool.give, worker.between

    def giving(blocks: Iterable[int], **named: Any) -> None:
        blocks = list(blocks)
        give(blocks, **named)
        late.extend(blocks[:1])

    def writing(metadata: Any) -> None:
        between(metadata)
        while late:
            block = late.pop()
            for layer in worker.kvqual_layers().values():
                layer.kv_cache[block, :, 0] = layer.kv_cache[block, :, 1].clone()

    replace(worker, worker.pool, "give", giving)
    replace(worker, worker, "between", writing)


def window_block_taken_back_early(worker: Any) -> None:
    """Pruning counts the positions of the step in flight as done: the oldest block in the window loses its entry."""
    original = worker.fill
    size, window = worker.kvqual_block_size(), worker.evict_window

    def fill(*args: Any) -> Any:
        host = original(*args)
        for row, length in enumerate(host.seq_lens.tolist()):
            oldest = (length - window) // size
            if length % size == 0 and length > window:
                host.block_table[row, oldest] = 0
        return host

    replace(worker, worker, "fill", fill)


def evicted_ids_kept(worker: Any) -> None:
    """The ids of blocks that were taken back stay in the worker's table; what they hold gets no weight."""
    replace(worker, worker.runner, "drop", lambda name, logical: None)


# -- buffers ----------------------------------------------------------------------------------------------------------


def maps_of_the_next_step(worker: Any) -> None:
    """One pinned buffer serves all steps, and the host writes the next step's maps before the device has read it."""
    replace(worker, worker, "host_buffers", 1)
    replace(worker, worker, "upload", lambda host: host)


def _refreshed(worker: Any, change: Any) -> None:
    """Static buffers are refreshed by ``change(original, static, inputs)``."""
    original = worker.refresh
    replace(worker, worker, "refresh", lambda static, inputs: change(original, static, inputs))


def replay_keeps_captured_table(worker: Any) -> None:
    """A replay reads the table that was in the buffer at capture: the new one is in a fresh tensor."""
    captured: list[torch.Tensor] = []

    def change(original: Any, static: Any, inputs: Any) -> None:
        original(static, inputs)
        captured.append(static.block_table.clone())
        static.block_table.copy_(captured[0])

    _refreshed(worker, change)


def replay_keeps_captured_lengths(worker: Any) -> None:
    """A replay reads the lengths of the step before: the copy into the buffer was queued behind the launch."""
    held: list[torch.Tensor] = []

    def change(original: Any, static: Any, inputs: Any) -> None:
        original(static, inputs)
        held.append(static.seq_lens.clone())
        counts = static.query_start_loc[1:] - static.query_start_loc[:-1]
        static.seq_lens.copy_(torch.maximum(held[max(0, len(held) - 2)], counts))

    _refreshed(worker, change)


def padding_mapped_to_slot_zero(worker: Any) -> None:
    """Rows behind a captured step's last are mapped to slot 0, which is live."""

    def change(original: Any, static: Any, inputs: Any) -> None:
        original(static, inputs)
        static.slot_mapping[inputs.tokens.numel() :] = 0

    _refreshed(worker, change)


def padding_rows_keep_last_slots(worker: Any) -> None:
    """After a shrink only the maps of the live rows are refreshed: slots behind them are the last step's."""

    def change(original: Any, static: Any, inputs: Any) -> None:
        old = static.slot_mapping.clone()
        original(static, inputs)
        static.slot_mapping[inputs.tokens.numel() :] = old[inputs.tokens.numel() :]

    _refreshed(worker, change)


def padding_rows_keep_last_table(worker: Any) -> None:
    """Padding rows of the batch keep the tables of the last step, but not its lengths; nothing reads them."""

    def change(original: Any, static: Any, inputs: Any) -> None:
        old = static.block_table.clone()
        original(static, inputs)
        static.block_table[inputs.seq_lens.numel() :] = old[inputs.seq_lens.numel() :]

    _refreshed(worker, change)


# -- a request's own state --------------------------------------------------------------------------------------------


def runner_rows_swapped_through_views(worker: Any) -> None:
    """A reorder exchanges two table rows through views of one buffer: both end as the second."""
    original = worker.runner.swap

    def swap(left: int, right: int) -> None:
        table = worker.runner.table
        kept = table.clone()
        kept[left], kept[right] = kept[right], kept[left]
        original(left, right)
        table.copy_(kept)

    replace(worker, worker.runner, "swap", swap)


def resumed_without_last_tokens(worker: Any) -> None:
    """After a preemption the runner is told a request's tokens without the last ones that were sampled."""
    replace(worker, worker, "resume_tokens", lambda request: [*request.tokens[:-2], 0, 0][: len(request.tokens)])


def all_drafts_counted(worker: Any) -> None:
    """Every request advances by all of its drafts, however many were accepted."""
    original = worker.runner.advance

    def advance(name: str, *, scheduled: int, kept: int, tokens: Sequence[int]) -> None:
        original(name, scheduled=scheduled, kept=scheduled, tokens=tokens)

    replace(worker, worker.runner, "advance", advance)


def last_draft_never_rolled_back(worker: Any) -> None:
    """When only the last draft was rejected, nothing is rolled back."""
    original = worker.runner.advance

    def advance(name: str, *, scheduled: int, kept: int, tokens: Sequence[int]) -> None:
        original(name, scheduled=scheduled, kept=kept + (kept == scheduled - 1), tokens=tokens)

    replace(worker, worker.runner, "advance", advance)
