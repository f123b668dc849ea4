"""The placement oracle: whose attention is this row."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_kvqual.oracles import placement
from pytest_kvqual.oracles.findings import Tally
from pytest_kvqual.oracles.step import RowRequest, StepPlan, plan_step

HEADS, KV_HEADS, SIZE = 6, 3, 16
SCALE = SIZE**-0.5
ROUNDING = placement.unit(torch.bfloat16)


def _random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


def _batch() -> tuple[StepPlan, list[placement.Reference]]:
    shapes = [("a", 0, 7), ("b", 12, 1), ("c", 30, 1), ("d", 5, 4)]
    requests = [
        RowRequest(request=name, start=start, scheduled=rows, blocks=tuple(range(10 * index, 10 * index + 9)))
        for index, (name, start, rows) in enumerate(shapes)
    ]
    references = [
        placement.attention(
            _random(rows, HEADS, SIZE, seed=10 * index),
            _random(start + rows, KV_HEADS, SIZE, seed=10 * index + 1).float(),
            _random(start + rows, KV_HEADS, SIZE, seed=10 * index + 2).float(),
            start=start,
            scale=SCALE,
            rounding=ROUNDING,
        )
        for index, (_, start, rows) in enumerate(shapes)
    ]
    return plan_step(requests, 4), references


def _joined(references: list[placement.Reference]) -> placement.Reference:
    return placement.Reference(
        torch.cat([reference.output for reference in references]),
        torch.cat([reference.tolerance for reference in references]),
    )


def _float64(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int) -> torch.Tensor:
    rows = []
    for row in range(query.shape[0]):
        length = start + row + 1
        heads = []
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = key[:length, kv_head].double() @ query[row, head].double() * SCALE
            heads.append(torch.softmax(scores, 0) @ value[:length, kv_head].double())
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 5), (9, 1), (4, 200)])
def test_the_reference_is_attention_by_its_definition(start: int, rows: int) -> None:
    """The blocked float32 reference equals the float64 definition, one row and head at a time."""
    query = _random(rows, HEADS, SIZE, seed=1)
    key, value = (_random(start + rows, KV_HEADS, SIZE, seed=seed).float() for seed in (2, 3))
    found = placement.attention(query, key, value, start=start, scale=SCALE, rounding=ROUNDING)
    expected = _float64(query, key, value, start)
    assert torch.allclose(found.output.double(), expected, rtol=0, atol=1e-5)
    assert bool((found.tolerance > 0).all())


def test_rows_rounded_to_sixteen_bits_pass() -> None:
    """The reference rounded to the engine's type is within tolerance and nearest to itself."""
    plan, references = _batch()
    reference = _joined(references)
    tally = Tally()
    ambiguous, worst = placement.check_rows(
        tally, plan, layer="L", output=reference.output.to(torch.bfloat16), reference=reference
    )
    assert (tally.findings_total, ambiguous) == (0, 0)
    assert 0 < worst <= 1
    assert tally.counts["rows_checked"] == 13


def test_swapped_rows_are_assigned_to_their_owners() -> None:
    """Two rows that changed places are both found, and the first one's owner is named."""
    plan, references = _batch()
    reference = _joined(references)
    output = reference.output.clone()
    output[[2, 7]] = output[[7, 2]]
    tally = Tally()
    placement.check_rows(tally, plan, layer="L", output=output, reference=reference)
    assert tally.findings_total == 2
    assert "output of request a position 2" in tally.findings[0]
    assert "nearest to request b position 12" in tally.findings[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_output_that_is_not_finite_fails(value: float) -> None:
    """A row with one element that is not finite is a finding."""
    plan, references = _batch()
    reference = _joined(references)
    output = reference.output.clone()
    output[4, 1, 3] = value
    tally = Tally()
    _, worst = placement.check_rows(tally, plan, layer="L", output=output, reference=reference)
    assert tally.findings_total == 1
    assert not worst <= 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reference_that_is_not_finite_fails(value: float) -> None:
    """A damaged reference cannot make its row pass."""
    plan, references = _batch()
    reference = _joined(references)
    output = reference.output.clone()
    reference.output[4, 1, 3] = value
    tally = Tally()
    placement.check_rows(tally, plan, layer="L", output=output, reference=reference)
    assert tally.findings_total >= 1


def test_one_element_beyond_its_tolerance_fails() -> None:
    """The tolerance is per element: 0.9 of it passes and 1.1 of it does not."""
    plan, references = _batch()
    reference = _joined(references)
    for factor, expected in ((0.9, 0), (1.1, 1)):
        output = reference.output.clone()
        output[3, 2, 5] += factor * reference.tolerance[3, 2, 5]
        tally = Tally()
        placement.check_rows(tally, plan, layer="L", output=output, reference=reference)
        assert tally.findings_total == expected


def test_equal_rows_are_ambiguous_and_no_finding() -> None:
    """Two requests with one content have one reference: the row is counted as ambiguous."""
    plan, references = _batch()
    twice = plan_step([plan.requests[1], plan.requests[1]], 4)
    reference = _joined([references[1], references[1]])
    tally = Tally()
    ambiguous, _ = placement.check_rows(tally, twice, layer="L", output=reference.output, reference=reference)
    assert tally.findings_total == 0
    assert ambiguous == 1


def test_a_dropped_boundary_key_with_weight_fails() -> None:
    """Leaving out a key that carries weight moves the row beyond its tolerance."""
    query = _random(1, HEADS, SIZE, seed=4)
    key = _random(33, KV_HEADS, SIZE, seed=5).float()
    value = _random(33, KV_HEADS, SIZE, seed=6).float()
    key[31] = query[0].float().view(KV_HEADS, HEADS // KV_HEADS, SIZE).mean(1) * 4
    whole = placement.attention(query, key, value, start=32, scale=SCALE, rounding=ROUNDING)
    kept = [index for index in range(33) if index != 31]
    dropped = placement.attention(query, key[kept], value[kept], start=31, scale=SCALE, rounding=ROUNDING)
    plan = plan_step([RowRequest(request="a", start=32, scheduled=1, blocks=tuple(range(9)))], 4)
    tally = Tally()
    placement.check_rows(tally, plan, layer="L", output=dropped.output, reference=whole)
    assert tally.findings_total == 1
