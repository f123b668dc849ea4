"""The exact Clopper-Pearson bound."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from pytest_kvqual.stats.bounds import most_lost, preservation_lower, preservation_upper


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


@pytest.mark.parametrize(("total", "limit"), [(100, 0.05), (149, 0.02), (1319, 0.02)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_coverage_of_the_sizes_in_use(total: int, limit: float, confidence: float) -> None:
    """Computed exactly, both bounds cover the true probability often enough, at and around the limit."""
    # Coverage is lowest next to the bounds of the counts: those around the limit, and the limit itself.
    largest = 3 * int(limit * total) + 12
    level = Fraction(repr(confidence))
    upper = [Fraction(preservation_upper(lost, total, confidence)) for lost in range(largest)]
    lower = [Fraction(preservation_lower(lost, total, confidence)) for lost in range(largest)]
    near = range(max(0, int(limit * total) - 3), int(limit * total) + 4)
    step = Fraction(1, 2**60)
    for probability in [
        Fraction(repr(limit)),
        *(upper[lost] - step for lost in near),
        *(lower[lost] + step for lost in near),
    ]:
        whole, lose = probability.denominator, probability.numerator
        # In integers: P(X = lost) times whole**total.
        terms = [math.comb(total, lost) * lose**lost * (whole - lose) ** (total - lost) for lost in range(largest)]
        missed = sum(term for term, bound in zip(terms, upper, strict=True) if bound < probability)
        assert missed * level.denominator <= (level.denominator - level.numerator) * whole**total
        # The counts beyond those summed are left out, as if the lower bound missed them all.
        covered = sum(term for term, bound in zip(terms, lower, strict=True) if bound <= probability)
        assert covered * level.denominator >= level.numerator * whole**total


def test_a_seeded_simulation_is_covered() -> None:
    """Of 20,000 simulated studies with a loss probability of 2 %, the bound misses no more than 5 % can explain."""
    drawn = np.random.default_rng(20).binomial(1319, 0.02, size=20_000)
    bounds = {int(lost): preservation_upper(int(lost), 1319, 0.95) for lost in np.unique(drawn)}
    missed = sum(bounds[int(lost)] < 0.02 for lost in drawn)
    assert stats.binomtest(missed, 20_000, 0.05, alternative="greater").pvalue > 0.001


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("total", [1, 2, 10, 100])
def test_everything_lost_has_a_closed_form(total: int, confidence: float) -> None:
    """With everything lost the lower bound is (1 - confidence)^(1/n); with nothing lost it is 0."""
    assert preservation_lower(total, total, confidence) == pytest.approx((1 - confidence) ** (1 / total), rel=1e-13)
    assert preservation_lower(0, total, confidence) == 0.0


@pytest.mark.parametrize(
    ("total", "limit", "expected"),
    [
        (1319, 0.02, 17),
        (100, 0.05, 1),
        (148, 0.02, None),
        (149, 0.02, 0),
        (58, 0.05, None),
        (59, 0.05, 0),
        (1, 0.95, None),
        (1, 0.96, 0),
        (2, 0.99, 1),
        (1319, 1e-9, None),
        (1319, 1e-30, None),
        (1319, 1 - 2**-53, 1318),
    ],
)
def test_most_lost(total: int, limit: float, expected: int | None) -> None:
    """The largest count whose bound is below the limit, or None; everything lost never passes."""
    assert most_lost(total, limit, 0.95) == expected


@pytest.mark.parametrize(("lost", "total"), [(0, 59), (1, 100), (17, 1319), (30, 40)])
def test_a_bound_at_the_limit_is_not_below_it(lost: int, total: int) -> None:
    """A limit equal to the bound of a count does not let it pass; the next float above does."""
    limit = preservation_upper(lost, total, 0.95)
    assert most_lost(total, limit, 0.95) == (lost - 1 if lost else None)
    assert most_lost(total, math.nextafter(limit, 1), 0.95) == lost


@pytest.mark.parametrize("limit", [0, 1, -0.1, 1.5, math.nan, math.inf, "0.02", True, None])
def test_an_invalid_limit_is_refused(limit: float) -> None:
    """A limit is a number between 0 and 1."""
    with pytest.raises(ValueError, match=r"limit: found .*, expected a number between 0 and 1"):
        most_lost(1319, limit, 0.95)


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
    with pytest.raises(ValueError, match=r"found .*, expected"):
        preservation_lower(lost, total, confidence)
