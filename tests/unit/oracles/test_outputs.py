"""Shifted outputs: no row is the attention of another row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.oracles import outputs
from pytest_kvqual.oracles.findings import Tally
from pytest_kvqual.oracles.outputs import Step, check_shift
from pytest_kvqual.oracles.placement import Reference
from pytest_kvqual.oracles.step import RowRequest, plan_step

HEADS, SIZE, ROWS = 3, 4, 5


def _step(seed: int, *, rows: int = ROWS, name: str = "a") -> Step:
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn(rows, HEADS, SIZE, generator=generator)
    requests = [RowRequest(request=name, start=4, scheduled=rows, blocks=tuple(range(9)))] if rows else []
    return Step(plan=plan_step(requests, 4), reference=Reference(output, torch.full_like(output, 0.01)))


NOW, BEFORE = _step(1), _step(2, rows=3, name="b")


def _check(output: torch.Tensor, *, before: Step | None = BEFORE) -> tuple[tuple[int, int] | None, Tally]:
    tally = Tally()
    return check_shift(tally, NOW, layer="L", output=output, before=before), tally


@pytest.mark.parametrize("before", [None, BEFORE])
def test_rows_of_their_own_are_no_finding(before: Step | None) -> None:
    """Every row within tolerance of its own reference: nothing is found, and the rows are counted."""
    for shape in ((ROWS, HEADS, SIZE), (ROWS, HEADS * SIZE)):
        output = (NOW.reference.output + 0.009).reshape(shape)
        found, tally = _check(torch.cat([output, output[:1] + 9]), before=before)
        assert found is None
        assert tally.to_dict() == {"rows_checked": ROWS, "findings": [], "findings_total": 0, "kinds": {}}


@given(st.permutations(range(ROWS)))
def test_permuted_rows_are_shifted(order: list[int]) -> None:
    """Exactly the rows that stand elsewhere are counted; the first is named with the row whose output it is."""
    found, tally = _check(NOW.reference.output[order])
    moved = [row for row in range(ROWS) if order[row] != row]
    assert tally.findings_total == len(moved)
    if not moved:
        assert found is None
        return
    row = moved[0]
    assert found == (row, order[row])
    assert tally.kinds == {"shifted-row": len(moved)}
    (line,) = tally.findings
    assert line == (
        f"L: row {row} must be the output of request a position {4 + row} and is that of request a position"
        f" {4 + order[row]} of this step ({len(moved)} of 5 rows of this step)"
    )


def test_a_row_of_the_step_before_is_stale() -> None:
    """A row that is the attention of a row of the step before is named as such, and no row of this step is."""
    output = NOW.reference.output.clone()
    output[3] = BEFORE.reference.output[1] + 0.005
    found, tally = _check(output)
    assert found == (3, -1)
    assert tally.kinds == {"stale-row": 1}
    (line,) = tally.findings
    assert line == (
        "L: row 3 must be the output of request a position 7 and is that of request b position 5 of the step before"
        " (1 of 5 rows of this step)"
    )
    found, tally = _check(output, before=None)
    assert (found, tally.findings_total) == (None, 0)


def test_the_same_row_of_the_step_before_is_stale_too() -> None:
    """The row of the same number in the step before is another row, not the row itself."""
    output = NOW.reference.output.clone()
    output[1] = BEFORE.reference.output[1]
    found, tally = _check(output)
    assert found == (1, -1)
    assert tally.kinds == {"stale-row": 1}


def test_this_step_comes_before_the_step_before() -> None:
    """A row that both steps hold is a shift within this step."""
    same = Step(plan=NOW.plan, reference=NOW.reference)
    output = NOW.reference.output.clone()
    output[2] = NOW.reference.output[0]
    found, tally = _check(output, before=same)
    assert found == (2, 0)
    assert tally.kinds == {"shifted-row": 1}


@pytest.mark.parametrize("delta", [0.02, 50.0, -1.0])
def test_a_row_that_is_merely_wrong_is_no_shift(delta: float) -> None:
    """A row near no reference, its own or another's, is not this oracle's to object to."""
    output = NOW.reference.output.clone()
    output[2] += delta
    found, tally = _check(output)
    assert (found, tally.findings_total) == (None, 0)


def test_one_element_out_of_tolerance_is_not_that_row() -> None:
    """A row is another row's only if every element is within tolerance."""
    for element, expected in ((0.009, 1), (0.011, 0), (-0.009, 1), (-0.011, 0)):
        output = NOW.reference.output.clone()
        output[1] = NOW.reference.output[4]
        output[1, 2, 3] += element
        assert _check(output)[1].findings_total == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_a_finding(value: float) -> None:
    """A row that can be assigned to nobody is objected to, and shifted rows beside it are still found."""
    output = NOW.reference.output.clone()
    output[2, 1, 0] = value
    output[0, 0, 0] = value
    found, tally = _check(output)
    assert found is None
    assert tally.kinds == {"not-finite": 2}
    assert tally.findings == ["L: output of request a position 4 is not finite"]
    output[3] = output[4]
    found, tally = _check(output)
    assert found == (3, 4)
    assert tally.kinds == {"not-finite": 2, "shifted-row": 1}


@pytest.mark.parametrize("where", ["output", "tolerance"])
def test_a_reference_of_nan_matches_nothing(where: str) -> None:
    """A damaged reference neither excuses its own row nor claims another's."""
    output = NOW.reference.output.roll(1, 0)
    damaged = Reference(NOW.reference.output.clone(), NOW.reference.tolerance.clone())
    getattr(damaged, where)[0] = math.nan
    tally = Tally()
    found = check_shift(tally, Step(plan=NOW.plan, reference=damaged), layer="L", output=output, before=None)
    assert found == (0, 4)
    assert tally.kinds == {"shifted-row": 4}


@pytest.mark.parametrize("rows", [0, 3])
def test_missing_rows_are_a_finding(rows: int) -> None:
    """Fewer rows of output than the step has, or a step without rows, is objected to."""
    step = NOW if rows else _step(1, rows=0)
    tally = Tally()
    assert check_shift(tally, step, layer="L", output=NOW.reference.output[:rows], before=None) is None
    assert tally.kinds == {"no-rows": max(1, step.plan.rows)}
    assert tally.findings == [f"L: found {rows} output rows for a step of {step.plan.rows} rows"]


def test_lookups_are_bounded_and_begin_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many wrong rows the first ones are looked up."""
    monkeypatch.setattr(outputs, "_LOOKED_UP", 2)
    found, tally = _check(NOW.reference.output.roll(1, 0))
    assert found == (0, 4)
    assert tally.kinds == {"shifted-row": 2}
