"""Shifted outputs: no output row is the attention of another row.

A row is shifted when it is not within tolerance of its own reference and is within tolerance of another row's: of this
step, or of the step before. A row that is near no reference is wrong, and no shift: that is placement's to say. A row
that is not finite can be assigned to nobody, and is a finding here too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pytest_kvqual.oracles.findings import Tally
from pytest_kvqual.oracles.placement import Reference, error_ratios
from pytest_kvqual.oracles.step import StepPlan

_LOOKED_UP = 64
"""Rows of one step that are looked up among the others; the rest of a step with more wrong rows is like them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The rows of a step with their references."""

    plan: StepPlan
    reference: Reference


def check_shift(
    tally: Tally, step: Step, *, layer: str, output: torch.Tensor, before: Step | None
) -> tuple[int, int] | None:
    """Looks up every row that is not its own reference's among the references of this step and of the one before.

    Args:
        tally: Where findings go.
        step: This step.
        layer: The layer's name, for messages.
        output: ``[>= T, Hq * D]`` or ``[>= T, Hq, D]`` as the backend wrote it.
        before: The layer's step before, where there was one.

    Returns:
        The first shifted row and the row of this step whose attention it is (-1: of the step before); None where
        nothing is shifted.
    """
    plan, reference = step.plan, step.reference
    rows = plan.rows
    tally.checked("rows_checked", rows)
    if output.shape[0] < rows or not rows:
        tally.find("no-rows", f"{layer}: found {output.shape[0]} output rows for a step of {rows} rows", max(1, rows))
        return None
    ratio = error_ratios(output, reference)
    outside = torch.nonzero(~(ratio <= 1.0)).flatten()
    if not outside.numel():
        return None
    found = output[:rows].reshape(rows, -1).float()
    finite = torch.isfinite(found[outside]).all(dim=1)
    if not bool(finite.all()):
        row = int(outside[torch.nonzero(~finite).flatten()[0]])
        tally.find("not-finite", f"{layer}: output of {plan.name(row)} is not finite", int((~finite).sum()))
    shifted: list[tuple[int, int, str]] = []
    for row in outside[finite].tolist()[:_LOOKED_UP]:
        for other, of in ((step, "this step"), (before, "the step before")):
            if other is None:
                continue
            at = _match(found[row], other.reference, skip=row if other is step else None)
            if at is not None:
                shifted.append((row, at if other is step else -1, f"{other.plan.name(at)} of {of}"))
                break
    if not shifted:
        return None
    row, source, name = shifted[0]
    tally.find(
        "shifted-row" if source >= 0 else "stale-row",
        f"{layer}: row {row} must be the output of {plan.name(row)} and is that of {name}"
        f" ({len(shifted)} of {rows} rows of this step)",
        len(shifted),
    )
    return row, source


def _match(found: torch.Tensor, reference: Reference, *, skip: int | None) -> int | None:
    rows = reference.output.shape[0]
    error = (found[None] - reference.output.reshape(rows, -1)).abs()
    within = (error <= reference.tolerance.reshape(rows, -1)).all(dim=1)
    if skip is not None:
        within[skip] = False
    at = torch.nonzero(within).flatten()
    return int(at[0]) if at.numel() else None
