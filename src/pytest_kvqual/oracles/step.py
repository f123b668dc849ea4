"""What one engine step must do with the KV cache, derived from the scheduler's decisions alone.

The derivation uses only the block ids and token counts that the scheduler sent; the block table, slot mapping and
sequence lengths that the runner computed from them are what it is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

NO_SLOT = -1
"""The slot of a position without a block: nothing may be written for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRequest:
    """One request in one step: it contributes ``scheduled`` rows for positions ``start`` to ``start + scheduled - 1``.

    ``blocks`` are its block ids in logical order, as far as the scheduler has granted them; :data:`NO_SLOT` stands for
    a block that was taken back (it lies before a sliding window).
    """

    request: str
    start: int
    scheduled: int
    blocks: tuple[int, ...]

    @property
    def seq_len(self) -> int:
        """Tokens in the cache once this step has written its rows."""
        return self.start + self.scheduled


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The rows of one step, in row order.

    ``owner``, ``positions``, ``slots`` are int64 ``[T]``: index into ``requests``, position in the request, and the
    slot ``block * block_size + offset`` that the block ids dictate.
    """

    requests: tuple[RowRequest, ...]
    block_size: int
    owner: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    @property
    def rows(self) -> int:
        """T, the number of rows of the step."""
        return int(self.positions.numel())

    def query_start(self) -> list[int]:
        """The first row of each request, and T at the end."""
        starts = [0]
        for request in self.requests:
            starts.append(starts[-1] + request.scheduled)
        return starts

    def blocks_of(self, index: int) -> tuple[int, ...]:
        """The blocks that hold the history of request ``index`` at the end of this step."""
        request = self.requests[index]
        return request.blocks[: -(-request.seq_len // self.block_size)]

    def live_blocks(self) -> list[int]:
        """All blocks that hold history of this step's requests, ascending, without repetition."""
        held = {block for index in range(len(self.requests)) for block in self.blocks_of(index)}
        return sorted(held - {NO_SLOT})

    def name(self, row: int) -> str:
        """``request R position P`` of a row."""
        return f"request {self.requests[int(self.owner[row])].request} position {int(self.positions[row])}"


def slots_of(blocks: Sequence[int], positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots of ``positions`` (int64 ``[T]``) in a request whose block ids are ``blocks``: int64 ``[T]``.

    A position without a block has :data:`NO_SLOT`.
    """
    table = torch.tensor([*blocks, NO_SLOT], dtype=torch.int64)
    block = table[(positions // block_size).clamp(max=len(blocks))]
    return torch.where(block == NO_SLOT, NO_SLOT, block * block_size + positions % block_size)


def plan_step(requests: Sequence[RowRequest], block_size: int) -> StepPlan:
    """Builds the plan of one step from its requests in row order."""
    owners, positions, slots = [], [], []
    for index, request in enumerate(requests):
        where = torch.arange(request.start, request.seq_len, dtype=torch.int64)
        owners.append(torch.full_like(where, index))
        positions.append(where)
        slots.append(slots_of(request.blocks, where, block_size))
    empty = [torch.empty(0, dtype=torch.int64)]
    return StepPlan(
        requests=tuple(requests),
        block_size=block_size,
        owner=torch.cat(owners or empty),
        positions=torch.cat(positions or empty),
        slots=torch.cat(slots or empty),
    )


def row_map_mismatches(
    plan: StepPlan, input_ids: torch.Tensor, tokens: Mapping[str, Sequence[int]]
) -> tuple[int, list[int]]:
    """Checks the request-to-row map by what each row was fed.

    ``input_ids`` is int ``[>= T]``: the token of each row as the model received it; ``tokens`` the known tokens of each
    request from position 0. A row whose token is not known yet is not counted; a row that is missing is wrong.

    Returns:
        The number of rows checked, and the rows whose token is not the one of their request and position.
    """
    checked, wrong = 0, []
    fed = input_ids[: plan.rows].tolist()
    for row, (owner, position) in enumerate(zip(plan.owner.tolist(), plan.positions.tolist(), strict=True)):
        known = tokens.get(plan.requests[owner].request, ())
        if position < len(known):
            checked += 1
            if row >= len(fed) or fed[row] != known[position]:
                wrong.append(row)
    return checked, wrong
