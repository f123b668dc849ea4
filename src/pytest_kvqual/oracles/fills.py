"""Fills: cells that nobody wrote must not reach an output, whatever they hold.

The same attention call is made again with the unwritten cells within reach filled with NaN, with 1e4 and with another
request's cells. A kernel that gives a position no weight must give its content no influence: outputs are compared
bitwise. (Zero times NaN is NaN; a zero-filled pool hides it.)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pytest_kvqual.kv.formats import Cells, Format, nan_cells
from pytest_kvqual.oracles.findings import Tally
from pytest_kvqual.oracles.step import NO_SLOT, StepPlan

NAMES = ("nan", "large", "other-request")
KINDS: Mapping[str, str] = {"nan": "nan-fill", "large": "large-fill", "other-request": "other-request-fill"}
_WORDS: Mapping[str, str] = {"nan": "NaN", "large": "1e4", "other-request": "another request's cells"}
LARGE = 1e4


def unwritten(
    plan: StepPlan, block_table: torch.Tensor, *, held: frozenset[int], blocks: int, recycled: frozenset[int]
) -> torch.Tensor:
    """The slots that no request has written and that a kernel could come to read: int64 ``[n]``, ascending.

    The rest of each request's last block; and of the blocks that nobody holds: those in the unused part of its table
    row, block 0, the last of the pool, those that were held before, and the one behind each last block.

    Args:
        plan: The step.
        block_table: Integer ``[>= R, B]``.
        held: The blocks that some live request holds.
        blocks: Blocks in the pool.
        recycled: Blocks that a finished or preempted request held.
    """
    size = plan.block_size
    free: set[int] = {0, blocks - 1, *recycled}
    slots: list[torch.Tensor] = []
    table = block_table.tolist()
    for index, request in enumerate(plan.requests):
        used = plan.blocks_of(index)
        if used and used[-1] != NO_SLOT:
            tail = request.seq_len % size
            if tail:
                slots.append(torch.arange(used[-1] * size + tail, (used[-1] + 1) * size))
            free.add(used[-1] + 1)
        if index < len(table):
            free.update(table[index][len(used) :])
        free.update(block for block in request.blocks[len(used) :])
    unheld = sorted(block for block in free if 0 <= block < blocks and block not in held)
    granted = {block for request in plan.requests for block in request.blocks}
    used_blocks = set(plan.live_blocks())
    # A block that is granted ahead of its first position is held, and nobody has written to it.
    ahead = sorted(block for block in granted - used_blocks - {NO_SLOT} if 0 <= block < blocks)
    for block in dict.fromkeys([*unheld, *ahead]):
        slots.append(torch.arange(block * size, (block + 1) * size))
    return torch.unique(torch.cat(slots)) if slots else torch.empty(0, dtype=torch.int64)


def contents(
    codec: Format, *, count: int, kv_heads: int, head_size: int, dtype: torch.dtype, v_scale: float, other: Cells
) -> dict[str, Cells]:
    """What ``count`` cells are filled with, by the fill's name. ``other`` (at least one cell) is repeated as needed."""
    shape = (count, kv_heads, head_size)
    index = torch.arange(count) % other.k.shape[0]
    large = torch.full(shape, LARGE, dtype=dtype)
    return {
        "other-request": Cells(k=other.k[index], v=other.v[index]),
        "nan": nan_cells(codec, shape, dtype, v_scale),
        "large": codec.encode(large, large, v_scale),
    }


def changed_rows(before: torch.Tensor, after: torch.Tensor, rows: int) -> torch.Tensor:
    """The first ``rows`` rows of two outputs that differ in a bit: int64 ``[n]``."""
    left, right = (
        part[:rows].reshape(rows, -1).contiguous().view(torch.uint8) if rows else part.new_empty(0, 1)
        for part in (before, after)
    )
    return torch.nonzero((left != right).any(dim=1)).flatten()


def check_fill(
    tally: Tally, plan: StepPlan, *, layer: str, fill: str, before: torch.Tensor, after: torch.Tensor
) -> int | None:
    """Compares the outputs of two calls bitwise, row by row.

    Returns:
        The first row that changed, or None.
    """
    rows = plan.rows
    changed = changed_rows(before, after, rows)
    if not changed.numel():
        return None
    row = int(changed[0])
    request = plan.requests[int(plan.owner[row])]
    last = plan.blocks_of(int(plan.owner[row]))[-1:]
    tail = request.seq_len % plan.block_size
    near = f"; its last block {last[0]} is unwritten from offset {tail}" if last and tail else ""
    tally.find(
        KINDS[fill],
        f"{layer}: output of {plan.name(row)} changed when cells that nobody wrote were filled with"
        f" {_WORDS[fill]}{near}"
        f" ({changed.numel()} of {rows} rows of this step)",
        changed.numel(),
    )
    return row
