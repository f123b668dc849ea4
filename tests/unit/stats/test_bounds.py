"""The exact Clopper-Pearson bound."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from scipy import stats

from pytest_kvqual.stats.bounds import preservation_upper


@pytest.mark.parametrize(
    ("lost", "total", "percent"),
    [
        # Published with the Qwen3-8B AWQ HTTP study: GSM8K against FlashInfer and FA3, and retrieval, in percent to
        # three decimals.
        (20, 1319, "2.196"),
        (22, 1319, "2.373"),
        (1, 100, "4.656"),
    ],
)
def test_published_bounds(lost: int, total: int, percent: str) -> None:
    """The three published one-sided 95 % bounds come out to the digits that were published."""
    assert f"{100 * preservation_upper(lost, total, 0.95):.3f}" == percent


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("total", [1, 2, 10, 100])
def test_nothing_lost_has_a_closed_form(total: int, confidence: float) -> None:
    """With nothing lost the bound is 1 - (1 - confidence)^(1/n)."""
    expected = -math.expm1(math.log1p(-confidence) / total)
    assert preservation_upper(0, total, confidence) == pytest.approx(expected, rel=1e-13)


def test_everything_lost() -> None:
    """With everything lost the bound is 1."""
    assert [preservation_upper(total, total, 0.95) for total in (1, 7, 1319)] == [1.0, 1.0, 1.0]


def test_large_counts() -> None:
    """1,000 of 1,319 agrees with the beta quantile to 1e-14."""
    assert preservation_upper(1000, 1319, 0.95) == pytest.approx(stats.beta.ppf(0.95, 1001, 319), rel=1e-14)


@pytest.mark.parametrize(("total", "confidence"), [(5, 0.95), (12, 0.9), (30, 0.95)])
def test_coverage_is_at_least_the_confidence(total: int, confidence: float) -> None:
    """Enumerated exactly over the outcomes, the bound covers each true loss probability of a grid often enough."""
    bounds = [Fraction(preservation_upper(lost, total, confidence)) for lost in range(total + 1)]
    level = Fraction(repr(confidence))
    # The probabilities just below each bound are where coverage is lowest.
    grid = [Fraction(step, 64) for step in range(1, 64)] + [bound - Fraction(1, 2**60) for bound in bounds[:-1]]
    for probability in grid:
        covered = sum(
            math.comb(total, lost) * probability**lost * (1 - probability) ** (total - lost)
            for lost in range(total + 1)
            if bounds[lost] >= probability
        )
        assert covered >= level, float(probability)


@pytest.mark.parametrize(
    ("lost", "total", "confidence"),
    [
        (-1, 10, 0.95),
        (11, 10, 0.95),
        (0, 0, 0.95),
        (1, -5, 0.95),
        (True, 10, 0.95),
        (1.0, 10, 0.95),
        (1, 10, 0.0),
        (1, 10, 1.0),
        (1, 10, math.nan),
        (1, 10, -0.5),
    ],
)
def test_invalid_counts_are_refused(lost: int, total: int, confidence: float) -> None:
    """Counts out of range or of another type, and a confidence outside (0, 1), raise with what was found."""
    with pytest.raises(ValueError, match=r"found .*, expected"):
        preservation_upper(lost, total, confidence)
