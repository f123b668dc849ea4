"""Routing: every K/V write goes where the block ids and the position dictate, and nowhere else.

Compared bitwise, as bytes: a NaN equals itself only if its bytes do, and -0.0 is not 0.0.
"""

from __future__ import annotations

import torch

from pytest_kvqual.oracles.findings import Tally
from pytest_kvqual.oracles.step import StepPlan, shared_blocks

_HASH_SEED = 0x9E3779B9


def wrong_cells(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Which of ``n`` cells differ: bool ``[n]`` of uint8 tensors ``[n, ...]``.

    Raises:
        ValueError: Shapes or dtypes differ, or the dtype is not uint8.
    """
    if found.dtype != torch.uint8 or expected.dtype != torch.uint8 or found.shape != expected.shape:
        raise ValueError(
            f"found {found.dtype} {tuple(found.shape)}, expected {expected.dtype} {tuple(expected.shape)} of uint8"
        )
    return (found != expected).flatten(1).any(dim=1)


def block_sums(cache: torch.Tensor) -> torch.Tensor:
    """One 64-bit sum per block of a cache ``[blocks, ...]``: int64 ``[blocks]``.

    Each 8-byte word is multiplied by its own odd constant, so a change confined to one word always changes the sum;
    changes of several words cancel with probability 2^-64 for constants unknown to the writer.
    """
    blocks = cache.shape[0]
    flat = cache.reshape(blocks, -1).contiguous().view(torch.uint8)
    padding = -flat.shape[1] % 8
    if padding:
        flat = torch.nn.functional.pad(flat, (0, padding))
    words = flat.view(torch.int64)
    generator = torch.Generator().manual_seed(_HASH_SEED)
    odd = torch.randint(-(2**62), 2**62, (words.shape[1],), generator=generator, dtype=torch.int64) * 2 + 1
    odd = odd.to(words.device)
    sums = torch.empty(blocks, dtype=torch.int64, device=words.device)
    step = max(1, 2**24 // max(1, words.shape[1]))
    for start in range(0, blocks, step):
        sums[start : start + step] = (words[start : start + step] * odd).sum(dim=1)
    return sums


def check_metadata(
    tally: Tally,
    plan: StepPlan,
    *,
    layer: str,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> bool:
    """Compares the attention metadata that a layer is about to use with the plan.

    ``block_table`` int ``[>= R, B]``, ``seq_lens`` int ``[>= R]``, ``query_start_loc`` int ``[>= R + 1]``. Table
    entries beyond a request's history are not looked at.

    Returns:
        Whether everything agrees.
    """
    before = tally.findings_total
    starts = query_start_loc.tolist()
    expected_starts = plan.query_start()
    if starts[: len(expected_starts)] != expected_starts:
        tally.find(f"{layer}: query_start_loc is {starts[:8]}, expected {expected_starts[:8]}")
    lengths = seq_lens.tolist()
    rows = block_table.tolist()
    for index, request in enumerate(plan.requests):
        if index >= len(lengths) or lengths[index] != request.seq_len:
            found = lengths[index] if index < len(lengths) else "no row"
            tally.find(f"{layer}: seq_len of request {request.request} is {found}, expected {request.seq_len}")
        blocks = list(plan.blocks_of(index))
        found_blocks = rows[index][: len(blocks)] if index < len(rows) else []
        if found_blocks != blocks:
            differing = [i for i, block in enumerate(blocks) if i >= len(found_blocks) or found_blocks[i] != block]
            first = differing[0]
            value = found_blocks[first] if first < len(found_blocks) else "nothing"
            tally.find(
                f"{layer}: block table of request {request.request} holds block {value} at logical block {first},"
                f" expected block {blocks[first]}",
                len(differing),
            )
    tally.checked("tables_compared", len(plan.requests))
    return tally.findings_total == before


def check_slot_mapping(tally: Tally, plan: StepPlan, *, layer: str, slot_mapping: torch.Tensor) -> None:
    """Compares the slot mapping handed to the cache update (int ``[>= T]``) with the plan; rows beyond T must be -1."""
    found = slot_mapping.to(torch.int64).cpu()
    rows = plan.rows
    if found.numel() < rows:
        tally.find(f"{layer}: slot mapping has {found.numel()} rows, expected {rows}", rows)
        return
    wrong = torch.nonzero(found[:rows] != plan.slots).flatten()
    if wrong.numel():
        row = int(wrong[0])
        tally.find(
            f"{layer}: slot of {plan.name(row)} is {int(found[row])}, expected {int(plan.slots[row])}", wrong.numel()
        )
    padding = found[rows:]
    tally.checked("padding_rows", padding.numel())
    written = torch.nonzero(padding >= 0).flatten()
    if written.numel():
        tally.find(
            f"{layer}: padding row {rows + int(written[0])} is mapped to slot {int(padding[int(written[0])])},"
            " expected -1",
            written.numel(),
        )


def check_disjoint(tally: Tally, plan: StepPlan) -> None:
    """Live requests hold their blocks alone."""
    for line in shared_blocks(plan):
        tally.find(line)


def describe_cells(plan_slots: torch.Tensor, wrong: torch.Tensor, block_size: int) -> str:
    """``block B offset O`` of the first wrong cell of a gather whose slots are ``plan_slots``."""
    slot = int(plan_slots[int(torch.nonzero(wrong).flatten()[0])])
    return f"block {slot // block_size} offset {slot % block_size}"
