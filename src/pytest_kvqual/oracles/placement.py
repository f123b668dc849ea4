"""Placement: every output row is the attention of its own request and position over the ledger, and of no other row.

The reference is computed in float32 from the ledger's K and V (decoded from the declared encoding), never from the
cache under test.

Tolerance, per output element, derived and not chosen: with u = 2^-9 the rounding unit of bfloat16 (2^-12 for float16),
p the softmax weights and A = sum_j p_j |v_j| the attention over the magnitudes of V,

    |out - reference| <= ROUNDINGS * u * A + u * |reference|

where ROUNDINGS = 4 counts the places at which an implementation with float32 accumulation may round to the 16-bit
type: the decoded V, the weights p (once before and once after rescaling of a partial sum) and the partial output; the
last term is the rounding of the output itself. Scores are products of 16-bit numbers accumulated in float32, whose
error (head_size * 2^-24 relative) vanishes beside these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pytest_kvqual.oracles.findings import Tally
from pytest_kvqual.oracles.step import StepPlan

ROUNDINGS = 4
_ROW_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Reference:
    """``output`` float32 ``[T, Hq, D]`` and ``tolerance`` float32 of the same shape."""

    output: torch.Tensor
    tolerance: torch.Tensor


def unit(dtype: torch.dtype) -> float:
    """The rounding unit (half an ulp, relative) of a floating dtype."""
    return float(torch.finfo(dtype).eps) / 2


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, start: int, scale: float, rounding: float
) -> Reference:
    """Causal attention of one request's rows over its whole history, in float32.

    Args:
        query: ``[n, Hq, D]``: rows of positions ``start`` to ``start + n - 1``.
        key: ``[start + n, Hkv, D]`` float32.
        value: ``[start + n, Hkv, D]`` float32.
        start: Position of the first row.
        scale: Softmax scale.
        rounding: Rounding unit of the engine's 16-bit type.

    Query head ``h`` reads KV head ``h // (Hq // Hkv)``.
    """
    rows, query_heads, size = query.shape
    kv_heads = key.shape[1]
    group = query_heads // kv_heads
    # [Hkv, group * n, D] against [Hkv, L, D]: one product per KV head serves its whole group.
    queries = query.float().view(rows, kv_heads, group, size).permute(1, 2, 0, 3)
    keys = key.transpose(0, 1).contiguous()
    values = value.transpose(0, 1).contiguous()
    both = torch.cat([values, values.abs()], dim=2)
    output = torch.empty(rows, query_heads, size)
    tolerance = torch.empty_like(output)
    for first in range(0, rows, _ROW_BLOCK):
        last = min(rows, first + _ROW_BLOCK)
        length = start + last
        part = queries[:, :, first:last].reshape(kv_heads, group * (last - first), size)
        scores = torch.bmm(part, keys[:, :length].transpose(1, 2)).mul_(scale)
        scores = scores.view(kv_heads, group, last - first, length)
        if last - first > 1:
            position = torch.arange(start + first, start + last)
            scores.masked_fill_(torch.arange(length)[None, :] > position[:, None], float("-inf"))
        weights = torch.softmax(scores, dim=3).view(kv_heads, group * (last - first), length)
        mixed = torch.bmm(weights, both[:, :length]).view(kv_heads, group, last - first, 2 * size)
        mixed = mixed.permute(2, 0, 1, 3).reshape(last - first, query_heads, 2 * size)
        output[first:last] = mixed[..., :size]
        tolerance[first:last] = mixed[..., size:]
    tolerance.mul_(ROUNDINGS * rounding).add_(output.abs(), alpha=rounding)
    return Reference(output, tolerance)


def check_rows(
    tally: Tally, plan: StepPlan, *, layer: str, output: torch.Tensor, reference: Reference
) -> tuple[int, float]:
    """Assigns each output row to the nearest reference row of the step and checks its distance to its own.

    A row passes only if it is finite, each element lies within tolerance of its own reference, and no other reference
    is nearer, unless that other reference is itself within tolerance of its own (then the row is ambiguous).

    Args:
        tally: Where findings go.
        plan: The step.
        layer: The layer's name, for messages.
        output: ``[>= T, Hq * D]`` or ``[>= T, Hq, D]`` as the backend wrote it.
        reference: Of the same rows.

    Returns:
        The number of ambiguous rows, and the worst ratio of error to tolerance (NaN when a row is not finite).
    """
    rows = plan.rows
    found = output[:rows].reshape(rows, -1).float()
    expected = reference.output.reshape(rows, -1)
    allowed = reference.tolerance.reshape(rows, -1)
    tally.checked("rows_checked", rows)
    error = (found - expected).abs()
    # A difference of exactly zero passes whatever the tolerance; 0/0 must not become NaN.
    ratio = torch.where(error == 0, torch.zeros_like(error), error / allowed).amax(dim=1)
    outside = ~(ratio <= 1.0)
    distances = torch.cdist(found, expected)
    nearest = distances.nan_to_num(nan=math.inf).argmin(dim=1)
    own = torch.arange(rows)
    elsewhere = nearest != own
    ambiguous = 0
    if bool(elsewhere.any()):
        apart = (expected[nearest] - expected).abs()
        same = (apart <= allowed + allowed[nearest]).all(dim=1)
        ambiguous = int((elsewhere & same & ~outside).sum())
        misplaced = elsewhere & ~same
    else:
        misplaced = torch.zeros_like(outside)
    bad = outside | misplaced
    if bool(bad.any()):
        row = int(torch.nonzero(bad).flatten()[0])
        count = int(bad.sum())
        if bool(misplaced[row]) and float(distances[row, nearest[row]]) < float(distances[row, row]):
            belongs = f", nearest to {plan.name(int(nearest[row]))}"
        else:
            belongs = ""
        tally.find(
            f"{layer}: output of {plan.name(row)} is {float(ratio[row]):.3g} times its tolerance from its own"
            f" reference{belongs} ({count} of {rows} rows of this step)",
            count,
        )
    worst = float("nan") if bool(torch.isnan(ratio).any()) else float(ratio.max()) if rows else 0.0
    return ambiguous, worst
