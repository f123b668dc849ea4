"""Placement: every output row is the attention of its own request and position over the ledger, and of no other row.

The reference is computed in float32 from the ledger's K and V (decoded from the declared encoding), never from the
cache under test.

Tolerance, per output element, derived and not chosen: with u = 2^-8 the rounding unit of bfloat16 (2^-11 for float16),
e = 2^-24 that of float32, p the softmax weights, A = sum_j p_j |v_j| the attention over the magnitudes of V, n the
positions of the request at the end of the step, D the head size and h half the smallest number of the 16-bit type,

    |out - reference| <= (ROUNDINGS * u + (n + D) * e + 2 * d) * A + u * |reference| + h * (2 * sum_j |v_j| + n + 2)

1. ROUNDINGS = 4 counts the places at which an implementation with float32 accumulation may round to the 16-bit type:
   the decoded V, the weights p (once before and once after rescaling of a partial sum) and the partial output.
2. (n + D) * e bounds the accumulation in float32: n terms of p v and of the softmax's denominator, D terms of a merge.
3. d = D * e * scale * |q| * max_j |k_j| bounds the error of a score that is accumulated in float32 (Cauchy-Schwarz),
   and exp turns an error d of every score into at most 2 d of every weight's share.
4. u * |reference| is the rounding of the output itself.
5. h * (...) is what the same roundings lose below the normal range: a weight twice, each part of the output, V and the
   output once. It counts for float16 only (h = 2^-25): bfloat16 has the range of float32 (h = 2^-134).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pytest_kvqual.oracles.findings import Tally
from pytest_kvqual.oracles.step import StepPlan

ROUNDINGS = 4
FLOAT32_UNIT = 2.0**-24
_ROW_BLOCK = 128
_UNDERFLOW = {2.0**-11: 2.0**-25}
"""h by u, where it is not below what float32 can tell."""


@dataclass(frozen=True, slots=True)
class Reference:
    """``output`` float32 ``[T, Hq, D]`` and ``tolerance`` float32 of the same shape."""

    output: torch.Tensor
    tolerance: torch.Tensor


def unit(dtype: torch.dtype) -> float:
    """The rounding unit (half an ulp, relative) of a floating dtype."""
    return float(torch.finfo(dtype).eps) / 2


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    start: int,
    scale: float,
    rounding: float,
    window: int | None = None,
) -> Reference:
    """Causal attention of one request's rows over its whole history, in float32.

    Args:
        query: ``[n, Hq, D]``: rows of positions ``start`` to ``start + n - 1``.
        key: ``[start + n, Hkv, D]`` float32.
        value: ``[start + n, Hkv, D]`` float32.
        start: Position of the first row.
        scale: Softmax scale.
        rounding: Rounding unit of the engine's 16-bit type.
        window: A row sees its last ``window`` positions, its own included; None for all.

    Query head ``h`` reads KV head ``h // (Hq // Hkv)``.
    """
    rows, query_heads, size = query.shape
    if not rows:
        return Reference(torch.empty(0, query_heads, size), torch.empty(0, query_heads, size))
    kv_heads = key.shape[1]
    group = query_heads // kv_heads
    # [Hkv, group * n, D] against [Hkv, L, D]: one product per KV head serves its whole group.
    queries = query.float().view(rows, kv_heads, group, size).permute(1, 2, 0, 3)
    keys = key.transpose(0, 1).contiguous()
    values = value.transpose(0, 1).contiguous()
    both = torch.cat([values, values.abs()], dim=2)
    output = torch.empty(rows, query_heads, size)
    tolerance = torch.empty_like(output)
    # [Hkv] and [n, Hq]: the two norms of term 3.
    longest = keys.norm(dim=2).amax(dim=1)
    norms = query.float().norm(dim=2).view(rows, kv_heads, group) * longest[None, :, None]
    score_error = (size * FLOAT32_UNIT * scale) * norms.reshape(rows, query_heads)
    for first in range(0, rows, _ROW_BLOCK):
        last = min(rows, first + _ROW_BLOCK)
        length = start + last
        part = queries[:, :, first:last].reshape(kv_heads, group * (last - first), size)
        scores = torch.bmm(part, keys[:, :length].transpose(1, 2)).mul_(scale)
        scores = scores.view(kv_heads, group, last - first, length)
        position = torch.arange(start + first, start + last)[:, None]
        if last - first > 1:
            scores.masked_fill_(torch.arange(length)[None, :] > position, float("-inf"))
        if window is not None and length > window:
            scores.masked_fill_(torch.arange(length)[None, :] <= position - window, float("-inf"))
        weights = torch.softmax(scores, dim=3).view(kv_heads, group * (last - first), length)
        mixed = torch.bmm(weights, both[:, :length]).view(kv_heads, group, last - first, 2 * size)
        mixed = mixed.permute(2, 0, 1, 3).reshape(last - first, query_heads, 2 * size)
        output[first:last] = mixed[..., :size]
        tolerance[first:last] = mixed[..., size:]
    relative = ROUNDINGS * rounding + (start + rows + size) * FLOAT32_UNIT + 2 * score_error
    tolerance.mul_(relative[..., None]).add_(output.abs(), alpha=rounding)
    underflow = _UNDERFLOW.get(rounding, 0.0)
    if underflow:
        lost = underflow * (2 * values.abs().sum(dim=1) + (start + rows + 2))
        tolerance += lost.repeat_interleave(group, dim=0)
    return Reference(output, tolerance)


def error_ratios(output: torch.Tensor, reference: Reference) -> torch.Tensor:
    """The largest ratio of error to tolerance in each row: float32 ``[T]``; NaN where a row is not finite.

    ``output`` is ``[>= T, Hq * D]`` or ``[>= T, Hq, D]``.
    """
    rows = reference.output.shape[0]
    found = output[:rows].reshape(rows, -1).float()
    error = (found - reference.output.reshape(rows, -1)).abs()
    # A difference of exactly zero passes whatever the tolerance; 0/0 must not become NaN.
    ratio = torch.where(error == 0, torch.zeros_like(error), error / reference.tolerance.reshape(rows, -1))
    return ratio.amax(dim=1)


def check_rows(
    tally: Tally, plan: StepPlan, *, layer: str, output: torch.Tensor, reference: Reference, explain: str = ""
) -> tuple[int, float, int | None]:
    """Assigns each output row to the nearest reference row of the step and checks its distance to its own.

    A row passes only if it is finite, each element lies within tolerance of its own reference, and no other reference
    is nearer. A row within tolerance of its own to which another reference is nearer is ambiguous, and no finding: the
    two references are then closer to each other than twice the tolerance (triangle inequality), so that rounding alone
    can decide between them. Whoever calls bounds the share of such rows.

    Args:
        tally: Where findings go.
        plan: The step.
        layer: The layer's name, for messages.
        output: ``[>= T, Hq * D]`` or ``[>= T, Hq, D]`` as the backend wrote it.
        reference: Of the same rows.
        explain: Added to the message.

    Returns:
        The number of ambiguous rows, the worst ratio of error to tolerance (NaN when a row is not finite, or when there
        is no row), and the first row that did not pass.
    """
    rows = plan.rows
    tally.checked("rows_checked", rows)
    if output.shape[0] < rows or not rows:
        tally.find("no-rows", f"{layer}: found {output.shape[0]} output rows for a step of {rows} rows", max(1, rows))
        return 0, math.nan, None
    found = output[:rows].reshape(rows, -1).float()
    expected = reference.output.reshape(rows, -1)
    allowed = reference.tolerance.reshape(rows, -1)
    ratio = error_ratios(output, reference)
    outside = ~(ratio <= 1.0)
    distances = torch.cdist(found, expected)
    nearest = distances.nan_to_num(nan=math.inf).argmin(dim=1)
    elsewhere = nearest != torch.arange(rows)
    if bool(elsewhere.any()):
        # cdist forms products in float32: what it prefers must be as near in differences too.
        elsewhere &= (found - expected[nearest]).norm(dim=1) <= (found - expected).norm(dim=1)
    ambiguous = int((elsewhere & ~outside).sum())
    first: int | None = None
    if bool(outside.any()):
        row = first = int(torch.nonzero(outside).flatten()[0])
        count = int(outside.sum())
        belongs = f", nearest to {plan.name(int(nearest[row]))}" if bool(elsewhere[row]) else ""
        heads = (found[row] - expected[row]).abs().view(reference.output.shape[1], -1)
        head = int((heads / allowed[row].view_as(heads)).nan_to_num(nan=math.inf).amax(dim=1).argmax())
        tally.find(
            "wrong-row",
            f"{layer}: output of {plan.name(row)} is {float(ratio[row]):.3g} times its tolerance from its own"
            f" reference, worst in query head {head}{belongs}{explain} ({count} of {rows} rows of this step)",
            count,
        )
    worst = float("nan") if bool(torch.isnan(ratio).any()) else float(ratio.max())
    return ambiguous, worst, first
