"""Stale maps: block table, lengths and row starts that a layer is about to use are those of this very step."""

from __future__ import annotations

import torch

from pytest_kvqual.oracles.findings import Tally
from pytest_kvqual.oracles.step import NO_SLOT, StepPlan


def check_maps(
    tally: Tally,
    plan: StepPlan,
    *,
    layer: str,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> bool:
    """Compares the attention metadata of one layer with the plan.

    Table entries beyond a request's history, and those of blocks that were taken back, are not looked at. Rows beyond
    the step's requests are padding: they have length 0 and start at T.

    Args:
        tally: Where findings go.
        plan: The step.
        layer: The layer's name, for messages.
        block_table: Integer ``[>= R, B]``.
        seq_lens: Integer ``[>= R]``.
        query_start_loc: Integer ``[>= R + 1]``.

    Returns:
        Whether everything agrees.
    """
    before = tally.findings_total
    starts = query_start_loc.tolist()
    expected_starts = plan.query_start()
    if starts[: len(expected_starts)] != expected_starts:
        tally.find("row-starts", f"{layer}: query_start_loc is {starts[:8]}, expected {expected_starts[:8]}")
    elif any(start != plan.rows for start in starts[len(expected_starts) :]):
        tally.find(
            "padding-rows",
            f"{layer}: query_start_loc of padding requests is {starts[len(expected_starts) :][:8]}, expected"
            f" {plan.rows} in each",
        )
    lengths = seq_lens.tolist()
    padding = [length for length in lengths[len(plan.requests) :] if length != 0]
    if padding:
        tally.find("padding-rows", f"{layer}: seq_len of a padding request is {padding[0]}, expected 0", len(padding))
    rows = block_table.tolist()
    for index, request in enumerate(plan.requests):
        if index >= len(lengths) or lengths[index] != request.seq_len:
            found = lengths[index] if index < len(lengths) else "no row"
            tally.find(
                "sequence-length",
                f"{layer}: seq_len of request {request.request} is {found}, expected {request.seq_len}",
            )
        blocks = plan.blocks_of(index)
        row = rows[index] if index < len(rows) else []
        differing = [
            place
            for place, block in enumerate(blocks)
            if block != NO_SLOT and (place >= len(row) or row[place] != block)
        ]
        if differing:
            first = differing[0]
            value = row[first] if first < len(row) else "nothing"
            tally.find(
                "block-table",
                f"{layer}: block table of request {request.request} holds block {value} at logical block {first},"
                f" expected block {blocks[first]}",
                len(differing),
            )
    tally.checked("tables_compared", len(plan.requests))
    return tally.findings_total == before
