"""The mean of paired differences and its upper Student t bound."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from pytest_kvqual.stats.paired import paired_mean, student_quantile


@pytest.mark.parametrize(
    ("degrees", "printed"),
    # As printed, to three decimals, in tables of Student's distribution under a one-tailed 0.05.
    [(1, 6.314), (7, 1.895), (30, 1.697)],
)
def test_quantiles_of_the_common_tables(degrees: int, printed: float) -> None:
    """The 95 % quantiles agree with the tables to their last digit."""
    assert student_quantile(0.95, degrees) == pytest.approx(printed, abs=5e-4)


@pytest.mark.parametrize("degrees", [1, 2, 3, 7, 15, 31, 99, 1318])
@pytest.mark.parametrize("probability", [0.5, 0.9, 0.95, 0.99])
def test_quantile_inverts_the_distribution(degrees: int, probability: float) -> None:
    """The distribution at the quantile is the probability."""
    assert stats.t.cdf(student_quantile(probability, degrees), degrees) == pytest.approx(probability, abs=1e-12)


def test_agrees_with_scipy() -> None:
    """Mean, standard error and bound agree with scipy's one-sample t interval."""
    values = [0.0012, -0.0004, 0.0031, 0.0007, -0.0011, 0.0002, 0.0040, 0.0009]
    found = paired_mean(values, confidence=0.95)
    assert found.mean == pytest.approx(math.fsum(values) / 8, rel=1e-15)
    assert found.error == pytest.approx(float(stats.sem(values)), rel=1e-12)
    assert found.upper == pytest.approx(stats.ttest_1samp(values, 0).confidence_interval(0.90).high, rel=1e-12)
    assert found.count == 8
    assert found.differences == tuple(values)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e-300])
def test_no_variance_has_its_mean_for_a_bound(value: float) -> None:
    """Equal differences have a deviation of exactly 0, and the bound is the mean itself."""
    found = paired_mean([value] * 7, confidence=0.95)
    assert (found.mean, found.deviation, found.error, found.upper) == (value, 0.0, 0.0, value)


@pytest.mark.parametrize("values", [[], [0.1], [0.1, math.nan], [math.inf, 0.1], [0.1, -math.inf]])
def test_invalid_differences_are_refused(values: list[float]) -> None:
    """Fewer than two differences, NaN and infinities raise with what was found."""
    with pytest.raises(ValueError, match=r"found .*, expected"):
        paired_mean(values, confidence=0.95)


def test_differences_beyond_float64_are_refused() -> None:
    """A variance that float64 cannot hold raises, rather than giving an infinite bound."""
    with pytest.raises(ValueError, match="float64"):
        paired_mean([1e300, -1e300], confidence=0.95)


@pytest.mark.parametrize("confidence", [0.0, 1.0, math.nan, 2.0])
def test_invalid_confidence_is_refused(confidence: float) -> None:
    """A confidence outside (0, 1) raises."""
    with pytest.raises(ValueError, match="confidence: found"):
        paired_mean([0.1, 0.2], confidence=confidence)


def test_coverage() -> None:
    """Of 4,000 normal samples of 8 the bound lies above the true mean as often as it says (exact binomial test)."""
    source = random.Random(20250131)
    covered = sum(
        paired_mean([source.gauss(0.3, 2.0) for _ in range(8)], confidence=0.95).upper >= 0.3 for _ in range(4000)
    )
    assert stats.binomtest(covered, 4000, 0.95).pvalue > 0.001
