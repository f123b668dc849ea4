"""Laws of the statistics, for all inputs. No deadlines: a busy machine is no counterexample."""

from __future__ import annotations

import math
from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from pytest_kvqual.stats.bounds import preservation_upper
from pytest_kvqual.stats.paired import paired_mean

CONFIDENCES = st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.975, 0.99])
FINITE = st.floats(min_value=-50, max_value=50)


@st.composite
def counts(draw: st.DrawFn, largest: int = 200) -> tuple[int, int]:
    """``lost`` and ``total``."""
    total = draw(st.integers(1, largest))
    return draw(st.integers(0, total)), total


def tail(lost: int, total: int, probability: Fraction) -> Fraction:
    """P(X <= lost) for binomial X, exactly."""
    return sum(
        (math.comb(total, k) * probability**k * (1 - probability) ** (total - k) for k in range(lost + 1)),
        Fraction(0),
    )


@given(counts(60), CONFIDENCES)
@settings(deadline=None)
def test_the_bound_is_the_root_of_its_equation(pair: tuple[int, int], confidence: float) -> None:
    """At the bound the exact tail is at most 1 - confidence; one step of 2**-53 below it, it is above."""
    lost, total = pair
    assume(lost < total)
    bound = Fraction(preservation_upper(lost, total, confidence))
    level = 1 - Fraction(repr(confidence))
    assert tail(lost, total, bound) <= level < tail(lost, total, bound - Fraction(1, 2**53))


@given(counts(), CONFIDENCES)
@settings(deadline=None)
def test_the_bound_agrees_with_the_beta_quantile(pair: tuple[int, int], confidence: float) -> None:
    """Second opinion: the quantile of Beta(lost + 1, total - lost)."""
    lost, total = pair
    expected = 1.0 if lost == total else float(stats.beta.ppf(confidence, lost + 1, total - lost))
    assert math.isclose(preservation_upper(lost, total, confidence), expected, rel_tol=1e-11)


@given(counts(), CONFIDENCES)
@settings(deadline=None)
def test_the_bound_grows_with_losses(pair: tuple[int, int], confidence: float) -> None:
    """One more loss is a higher bound; one more question kept is a lower one; the rate itself lies below it."""
    lost, total = pair
    bound = preservation_upper(lost, total, confidence)
    if lost < total:
        assert preservation_upper(lost + 1, total, confidence) > bound
        assert preservation_upper(lost, total + 1, confidence) < bound
    if confidence >= 0.5 and lost < total:
        assert bound > lost / total


@given(counts(), st.permutations([0.5, 0.8, 0.9, 0.95, 0.99]))
@settings(deadline=None)
def test_the_bound_grows_with_confidence(pair: tuple[int, int], levels: list[float]) -> None:
    """More confidence is never a lower bound."""
    one, other = sorted(levels[:2])
    assert preservation_upper(*pair, one) <= preservation_upper(*pair, other)


@given(st.lists(FINITE, min_size=2, max_size=40), CONFIDENCES)
@settings(deadline=None)
def test_the_mean_does_not_depend_on_order(values: list[float], confidence: float) -> None:
    """Documents have no order."""
    one, other = paired_mean(values, confidence=confidence), paired_mean(values[::-1], confidence=confidence)
    assert (one.mean, one.deviation, one.upper) == (other.mean, other.deviation, other.upper)


@given(st.lists(FINITE, min_size=2, max_size=40), CONFIDENCES)
@settings(deadline=None)
def test_the_bound_is_never_below_the_mean(values: list[float], confidence: float) -> None:
    """At a confidence of at least one half the upper bound is at least the mean."""
    found = paired_mean(values, confidence=confidence)
    assert found.upper >= found.mean or math.isclose(found.upper, found.mean, abs_tol=1e-12)


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=40), st.integers(-1000, 1000), CONFIDENCES)
@settings(deadline=None)
def test_a_shift_shifts_mean_and_bound(values: list[int], shift: int, confidence: float) -> None:
    """Adding a constant to every difference adds it to mean and bound, and leaves the deviation alone."""
    one = paired_mean(values, confidence=confidence)
    other = paired_mean([value + shift for value in values], confidence=confidence)
    assert math.isclose(other.mean, one.mean + shift, rel_tol=1e-12, abs_tol=1e-9)
    assert math.isclose(other.upper, one.upper + shift, rel_tol=1e-12, abs_tol=1e-9)
    assert other.deviation == one.deviation
