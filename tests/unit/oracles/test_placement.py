"""The placement oracle: whose attention is this row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvqual.oracles import placement
from pytest_kvqual.oracles.findings import Tally
from pytest_kvqual.oracles.placement import Reference, attention, check_rows, error_ratios, unit
from pytest_kvqual.oracles.step import RowRequest, StepPlan, plan_step

HEADS, KV_HEADS, SIZE = 6, 3, 16
SCALE = SIZE**-0.5
ROUNDING = unit(torch.bfloat16)


def _random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


def _batch() -> tuple[StepPlan, Reference]:
    shapes = [("a", 0, 7), ("b", 12, 1), ("c", 30, 1), ("d", 5, 4)]
    requests = [
        RowRequest(request=name, start=start, scheduled=rows, blocks=tuple(range(10 * index, 10 * index + 9)))
        for index, (name, start, rows) in enumerate(shapes)
    ]
    parts = [
        attention(
            _random(rows, HEADS, SIZE, seed=10 * index),
            _random(start + rows, KV_HEADS, SIZE, seed=10 * index + 1).float(),
            _random(start + rows, KV_HEADS, SIZE, seed=10 * index + 2).float(),
            start=start,
            scale=SCALE,
            rounding=ROUNDING,
        )
        for index, (_, start, rows) in enumerate(shapes)
    ]
    return plan_step(requests, 4), Reference(
        torch.cat([part.output for part in parts]), torch.cat([part.tolerance for part in parts])
    )


def _definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, start: int, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, attention over |V| and the largest |k| of each row and head in float64, one at a time."""
    rows = query.shape[0], query.shape[1]
    output, magnitude = (torch.zeros(*rows, query.shape[2], dtype=torch.float64) for _ in range(2))
    longest = torch.zeros(rows, dtype=torch.float64)
    for row in range(rows[0]):
        seen = slice(max(0, start + row + 1 - (window or 10**9)), start + row + 1)
        for head in range(rows[1]):
            kv_head = head // (rows[1] // key.shape[1])
            keys, values = key[seen, kv_head].double(), value[seen, kv_head].double()
            weights = torch.softmax(keys @ query[row, head].double() * scale, 0)
            output[row, head] = weights @ values
            magnitude[row, head] = weights @ values.abs()
            longest[row, head] = key[:, kv_head].double().norm(dim=1).max()
    return output, magnitude, longest


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2**-24)]
)
def test_the_unit_is_half_an_ulp(dtype: torch.dtype, expected: float) -> None:
    """The rounding unit is the largest relative error of rounding to nearest."""
    assert unit(dtype) == expected


@pytest.mark.parametrize(
    ("start", "rows", "window", "heads", "kv_heads", "scale"),
    [
        (0, 1, None, 6, 3, SCALE),
        (0, 5, None, 6, 2, 0.3),
        (9, 1, None, 4, 4, SCALE),
        (9, 1, 4, 6, 3, SCALE),
        (3, 6, 4, 5, 1, SCALE),
        (0, 6, 1, 6, 3, SCALE),
        (2, 3, 5, 6, 3, SCALE),
        (2, 3, 6, 6, 3, SCALE),
        (4, 130, 100, 3, 1, SCALE),
        (0, 129, None, 3, 1, SCALE),
    ],
)
def test_reference_and_tolerance_follow_their_definitions(
    start: int, rows: int, window: int | None, heads: int, kv_heads: int, scale: float
) -> None:
    """The blocked float32 reference equals the float64 definition, and the tolerance is the documented formula."""
    query = _random(rows, heads, SIZE, seed=1)
    key, value = (_random(start + rows, kv_heads, SIZE, seed=seed).float() for seed in (2, 3))
    found = attention(query, key, value, start=start, scale=scale, rounding=ROUNDING, window=window)
    output, magnitude, longest = _definition(query, key, value, start=start, scale=scale, window=window)
    assert torch.allclose(found.output.double(), output, rtol=0, atol=1e-5)
    small = 2.0**-24
    score = SIZE * small * scale * query.double().norm(dim=2) * longest
    relative = 4 * ROUNDING + (start + rows + SIZE) * small + 2 * score
    expected = relative[..., None] * magnitude + ROUNDING * output.abs()
    assert torch.allclose(found.tolerance.double(), expected, rtol=1e-4, atol=0)
    half = attention(query, key, value, start=start, scale=scale, rounding=unit(torch.float16), window=window)
    expected = (relative - 4 * (ROUNDING - 2**-11))[..., None] * magnitude + 2**-11 * output.abs()
    lost = 2.0**-25 * (2 * value.double().abs().sum(dim=0) + start + rows + 2)
    expected += lost.repeat_interleave(heads // kv_heads, dim=0)
    assert torch.allclose(half.tolerance.double(), expected, rtol=1e-4, atol=0)


def test_the_score_term_shows_where_scores_are_large() -> None:
    """With K of norm 1e5 the error of a float32 score dominates the tolerance, in the rows and heads with large q."""
    query = torch.ones(2, 4, SIZE)
    query[1, 3] = 8
    key = torch.ones(2, 2, SIZE)
    key[0, 1] = 2.0**14
    value = torch.ones(2, 2, SIZE)
    found = attention(query, key, value, start=0, scale=1.0, rounding=0.0)
    small = 2.0**-24
    base = (2 + SIZE) * small
    expected = torch.full((2, 4), base + 2 * SIZE * small * SIZE)
    expected[:, 2:] = base + 2 * SIZE * small * SIZE * 2.0**14
    expected[1, 3] = base + 2 * SIZE * small * 8 * SIZE * 2.0**14
    assert torch.allclose(found.tolerance, expected[..., None].expand(2, 4, SIZE), rtol=1e-5)


def test_no_rows_have_an_empty_reference() -> None:
    """A request that contributes no row to a step has no reference, and no history is needed for it."""
    found = attention(
        torch.empty(0, HEADS, SIZE),
        torch.empty(0, KV_HEADS, SIZE),
        torch.empty(0, KV_HEADS, SIZE),
        start=0,
        scale=SCALE,
        rounding=ROUNDING,
    )
    assert found.output.shape == found.tolerance.shape == (0, HEADS, SIZE)


def _sixteen_bit(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, start: int, dtype: torch.dtype, split: int
) -> torch.Tensor:
    """Attention as a kernel computes it: two parts, weights and partial outputs rounded at the four stated places."""
    outputs = []
    group = query.shape[1] // key.shape[1]
    for row in range(query.shape[0]):
        length = start + row + 1
        keys, values = (it[:length].repeat_interleave(group, dim=1) for it in (key, value))
        scores = torch.einsum("hd,lhd->hl", query[row].float(), keys) * SCALE
        parts = []
        for span in (slice(0, split), slice(split, length)):
            if scores[:, span].shape[1] == 0:
                continue
            peak = scores[:, span].amax(dim=1, keepdim=True)
            weights = torch.exp(scores[:, span] - peak)
            total = weights.sum(dim=1, keepdim=True)
            rounded = weights.to(dtype).float()
            mixed = torch.einsum("hl,lhd->hd", rounded, values[span].to(dtype).float())
            parts.append((peak, total, mixed.to(dtype).float()))
        peak = torch.cat([part[0] for part in parts], 1).amax(1, keepdim=True)
        factors = [torch.exp(part[0] - peak).to(dtype).float() for part in parts]
        exact = [torch.exp(part[0] - peak) for part in parts]
        total = torch.stack([factor * part[1] for factor, part in zip(exact, parts, strict=True)]).sum(0)
        outputs.append((sum(f * part[2] for f, part in zip(factors, parts, strict=True)) / total).to(dtype))
    return torch.stack(outputs)


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.integers(0, 60),
    st.integers(1, 4),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.floats(0.01, 4.0),
    st.integers(0, 30),
)
def test_an_exact_implementation_with_stated_roundings_stays_within_tolerance(
    seed: int, start: int, rows: int, dtype: torch.dtype, spread: float, split: int
) -> None:
    """Rounding V, the weights, the rescaling and the partial output to 16 bits never leaves the tolerance."""
    generator = torch.Generator().manual_seed(seed)
    query = (torch.randn(rows, HEADS, SIZE, generator=generator) * spread).to(dtype)
    key, value = (torch.randn(start + rows, KV_HEADS, SIZE, generator=generator) for _ in range(2))
    # V as an eight-bit cache decodes it: not exact in 16 bits.
    value = (value * 8).round() / 8 * 0.0371
    reference = attention(query, key, value, start=start, scale=SCALE, rounding=unit(dtype))
    output = _sixteen_bit(query, key, value, start=start, dtype=dtype, split=split)
    ratio = error_ratios(output, reference)
    assert bool((ratio <= 1).all()), float(ratio.max())
    exact = _definition(query, key, value, start=start, scale=SCALE, window=None)[0]
    assert bool(((exact - reference.output.double()).abs() <= reference.tolerance.double()).all())


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(0, 60), st.sampled_from([torch.bfloat16, torch.float16]), st.booleans())
def test_an_error_of_a_few_units_is_caught(seed: int, start: int, dtype: torch.dtype, up: bool) -> None:
    """The tolerance is not vacuous: one element off by six units of the attention over |V| is beyond it."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, HEADS, SIZE, generator=generator).to(dtype)
    key, value = (torch.randn(start + 1, KV_HEADS, SIZE, generator=generator) for _ in range(2))
    reference = attention(query, key, value, start=start, scale=SCALE, rounding=unit(dtype))
    output, magnitude, _ = _definition(query, key, value, start=start, scale=SCALE, window=None)
    output = output.float()
    at = tuple(int(index) for index in torch.randint(0, SIZE * HEADS, (1,), generator=generator).div(SIZE).long())
    error = 6 * unit(dtype) * magnitude[0, at[0], 3].float()
    output[0, at[0], 3] += error if up else -error
    assert not bool((error_ratios(output, reference) <= 1).all())


def test_rows_rounded_to_sixteen_bits_pass() -> None:
    """The reference rounded to the engine's type is within tolerance and nearest to itself, in either shape."""
    plan, reference = _batch()
    rounded = reference.output.to(torch.bfloat16)
    for output in (rounded, rounded.flatten(1), torch.cat([rounded, torch.full_like(rounded[:2], math.nan)])):
        tally = Tally()
        ambiguous, worst, first = check_rows(tally, plan, layer="L", output=output, reference=reference)
        assert (tally.findings_total, ambiguous, first) == (0, 0, None)
        assert 0 < worst <= 1
        assert worst == float(error_ratios(output, reference).max())
        assert tally.counts["rows_checked"] == 13


def test_swapped_rows_are_assigned_to_their_owners() -> None:
    """Two rows that changed places are both found, and the first one's owner is named."""
    plan, reference = _batch()
    output = reference.output.clone()
    output[[2, 7]] = output[[7, 2]]
    tally = Tally()
    _, worst, first = check_rows(tally, plan, layer="L", output=output, reference=reference, explain=" (told)")
    assert (tally.findings_total, tally.kinds, first) == (2, {"wrong-row": 2}, 2)
    assert worst > 1
    text = tally.findings[0]
    assert text.startswith(
        f"L: output of request a position 2 is {float(error_ratios(output, reference)[2]):.3g} times"
    )
    assert "its tolerance from its own reference, worst in query head " in text
    assert text.endswith(", nearest to request b position 12 (told) (2 of 13 rows of this step)")


def test_a_wrong_row_names_its_worst_head_and_no_owner() -> None:
    """A row that is nearest to its own reference and beyond tolerance names the head, and nobody else."""
    plan, reference = _batch()
    output = reference.output.clone()
    output[3, 2, 5] += 2 * reference.tolerance[3, 2, 5]
    output[3, 4, 0] += 3 * reference.tolerance[3, 4, 0]
    tally = Tally()
    check_rows(tally, plan, layer="L", output=output, reference=reference)
    (line,) = tally.findings
    assert line == (
        "L: output of request a position 3 is 3 times its tolerance from its own reference, worst in query head 4"
        " (1 of 13 rows of this step)"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_output_that_is_not_finite_fails(value: float) -> None:
    """A row with one element that is not finite is a finding, of its own head."""
    plan, reference = _batch()
    output = reference.output.clone()
    output[4, 1, 3] = value
    tally = Tally()
    _, worst, first = check_rows(tally, plan, layer="L", output=output, reference=reference)
    assert (tally.findings_total, first) == (1, 4)
    assert not worst <= 1
    assert "worst in query head 1" in tally.findings[0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reference_that_is_not_finite_fails(value: float) -> None:
    """A damaged reference cannot make its row pass."""
    plan, reference = _batch()
    output = reference.output.clone()
    reference.output[4, 1, 3] = value
    tally = Tally()
    check_rows(tally, plan, layer="L", output=output, reference=reference)
    assert tally.findings_total >= 1
    tally = Tally()
    check_rows(tally, plan, layer="L", output=reference.output, reference=reference)
    assert tally.findings_total >= 1


def test_a_tolerance_that_is_no_number_fails() -> None:
    """A tolerance of NaN admits nothing but the reference itself."""
    plan, reference = _batch()
    output = reference.output.clone()
    output[4, 0, 0] += 1e-3
    reference.tolerance[4] = math.nan
    tally = Tally()
    _, worst, first = check_rows(tally, plan, layer="L", output=output, reference=reference)
    assert (tally.findings_total, first) == (1, 4)
    assert math.isnan(worst)


@pytest.mark.parametrize("side", ["query", "key", "value"])
def test_a_nan_that_went_in_comes_out(side: str) -> None:
    """NaN in the query, K or V of a row makes its reference NaN, and the row fails whatever was put out."""
    given = {
        "query": _random(1, HEADS, SIZE, seed=1),
        "key": _random(9, KV_HEADS, SIZE, seed=2).float(),
        "value": _random(9, KV_HEADS, SIZE, seed=3).float(),
    }
    clean = attention(*given.values(), start=8, scale=SCALE, rounding=ROUNDING)
    given[side].view(-1, SIZE)[0, 2] = math.nan
    reference = attention(*given.values(), start=8, scale=SCALE, rounding=ROUNDING)
    plan = plan_step([RowRequest(request="a", start=8, scheduled=1, blocks=(1, 2, 3))], 4)
    for output in (clean.output, reference.output, torch.zeros_like(clean.output)):
        tally = Tally()
        _, worst, first = check_rows(tally, plan, layer="L", output=output, reference=reference)
        assert (tally.findings_total, first) == (1, 0)
        assert math.isnan(worst)


def test_one_element_beyond_its_tolerance_fails() -> None:
    """The tolerance is per element: 0.9 of it passes and 1.1 of it does not, up and down."""
    plan, reference = _batch()
    for factor, expected in ((0.9, 0), (1.1, 1), (-0.9, 0), (-1.1, 1)):
        output = reference.output.clone()
        output[3, 2, 5] += factor * reference.tolerance[3, 2, 5]
        tally = Tally()
        check_rows(tally, plan, layer="L", output=output, reference=reference)
        assert tally.findings_total == expected


def test_no_difference_passes_at_any_tolerance() -> None:
    """Where V is zero so is the tolerance: exactly zero passes, the smallest number does not."""
    plan = plan_step([RowRequest(request="a", start=0, scheduled=1, blocks=(1,))], 4)
    reference = Reference(torch.zeros(1, HEADS, SIZE), torch.zeros(1, HEADS, SIZE))
    for value, expected in ((0.0, 0), (1e-38, 1)):
        tally = Tally()
        output = torch.full((1, HEADS, SIZE), value)
        check_rows(tally, plan, layer="L", output=output, reference=reference)
        assert tally.findings_total == expected


def test_equal_rows_are_ambiguous_and_no_finding() -> None:
    """Two requests with one content have one reference: the row is counted as ambiguous."""
    plan, reference = _batch()
    twice = plan_step([plan.requests[1], plan.requests[1]], 4)
    both = Reference(reference.output[[7, 7]], reference.tolerance[[7, 7]])
    tally = Tally()
    ambiguous, _, _ = check_rows(tally, twice, layer="L", output=both.output, reference=both)
    assert (tally.findings_total, ambiguous) == (0, 1)


def test_a_row_within_its_tolerance_and_nearer_to_another_is_ambiguous() -> None:
    """Rounding alone can decide between two references that a tolerance admits: counted, and no finding."""
    plan = plan_step([RowRequest(request="a", start=0, scheduled=2, blocks=(1,))], 4)
    output = torch.stack([torch.full((HEADS, SIZE), 0.9), torch.ones(HEADS, SIZE)])
    for own, expected in ((0.95, (0, 1, None)), (0.901, (0, 1, None)), (0.89, (1, 0, 0))):
        reference = Reference(torch.zeros(2, HEADS, SIZE), torch.full((2, HEADS, SIZE), 0.05))
        reference.output[1] = 1.0
        reference.tolerance[0] = own
        tally = Tally()
        ambiguous, _, first = check_rows(tally, plan, layer="L", output=output, reference=reference)
        assert (tally.findings_total, ambiguous, first) == expected
        assert all("nearest to request a position 1" in line for line in tally.findings)


def test_what_a_product_of_rows_rounds_away_is_no_misplacement() -> None:
    """Many rows that differ by a little more than their tolerances keep their own references."""
    rows = 64
    plan = plan_step([RowRequest(request="a", start=0, scheduled=rows, blocks=tuple(range(16)))], 4)
    output = torch.full((rows, 9, 64), 100.0)
    output[:, 0, 0] += torch.arange(rows) * 0.03
    reference = Reference(output.clone(), torch.full_like(output, 0.012))
    tally = Tally()
    ambiguous, worst, _ = check_rows(tally, plan, layer="L", output=output, reference=reference)
    assert (tally.findings, worst) == ([], 0.0)
    assert ambiguous == 0


@pytest.mark.parametrize("rows", [0, 5])
def test_missing_rows_are_a_finding(rows: int) -> None:
    """A step without rows, or fewer rows of output than the step has, is not checked but objected to."""
    plan, reference = _batch()
    if rows == 0:
        plan, reference = plan_step([], 4), Reference(reference.output[:0], reference.tolerance[:0])
    tally = Tally()
    ambiguous, worst, first = check_rows(tally, plan, layer="L", output=reference.output[:rows], reference=reference)
    assert (ambiguous, first) == (0, None)
    assert math.isnan(worst)
    assert tally.kinds == {"no-rows": max(1, plan.rows)}
    assert tally.findings == [f"L: found {rows} output rows for a step of {plan.rows} rows"]


def test_a_dropped_key_with_weight_fails() -> None:
    """Leaving out a key that carries weight moves the row beyond its tolerance."""
    query = _random(1, HEADS, SIZE, seed=4)
    key = _random(33, KV_HEADS, SIZE, seed=5).float()
    value = _random(33, KV_HEADS, SIZE, seed=6).float()
    key[31] = query[0].float().view(KV_HEADS, HEADS // KV_HEADS, SIZE).mean(1) * 4
    whole = attention(query, key, value, start=32, scale=SCALE, rounding=ROUNDING)
    kept = [index for index in range(33) if index != 31]
    dropped = attention(query, key[kept], value[kept], start=31, scale=SCALE, rounding=ROUNDING)
    plan = plan_step([RowRequest(request="a", start=32, scheduled=1, blocks=tuple(range(9)))], 4)
    tally = Tally()
    check_rows(tally, plan, layer="L", output=dropped.output, reference=whole)
    assert tally.findings_total == 1


def test_the_number_of_roundings_is_four() -> None:
    """The tolerance counts the four places that the documentation lists."""
    assert placement.ROUNDINGS == 4
    assert placement.FLOAT32_UNIT == 2.0**-24
