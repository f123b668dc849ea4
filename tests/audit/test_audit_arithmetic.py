"""The auditor's arithmetic against that of the judges, and against scipy: two implementations agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from pytest_kvqual.audit import arithmetic
from pytest_kvqual.stats import bounds, net, paired

CONFIDENCES = st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.975, 0.99, 0.999999])
TOTALS = st.one_of(st.integers(1, 60), st.integers(61, 400), st.just(1319))


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the words of its refusal."""
    try:
        return call()
    except ValueError as refusal:
        return str(refusal)


def tail(lost: int, total: int, point: Fraction) -> Fraction:
    """P(X <= lost) as its definition has it."""
    return sum(
        (math.comb(total, count) * point**count * (1 - point) ** (total - count) for count in range(lost + 1)),
        Fraction(0),
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), total=TOTALS, confidence=CONFIDENCES)
def test_bounds_are_those_of_the_judges(data: Any, total: int, confidence: float) -> None:
    """Upper and lower bound are the same float64 for every count."""
    lost = data.draw(st.one_of(st.integers(0, total), st.integers(0, min(total, 40))))
    assert arithmetic.loss_upper(lost, total, confidence) == bounds.preservation_upper(lost, total, confidence)
    assert arithmetic.loss_lower(lost, total, confidence) == bounds.preservation_lower(lost, total, confidence)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), total=st.integers(1, 25), confidence=CONFIDENCES)
def test_bounds_are_what_they_are_defined_as(data: Any, total: int, confidence: float) -> None:
    """The upper bound is the smallest multiple of 2**-53 whose exact tail is at most 1 - confidence."""
    lost = data.draw(st.integers(0, total - 1))
    level = 1 - Fraction(str(confidence))
    upper = Fraction(arithmetic.loss_upper(lost, total, confidence))
    assert (upper * 2**53).denominator == 1
    assert tail(lost, total, upper) <= level < tail(lost, total, upper - Fraction(1, 2**53))


def test_a_poor_first_guess_costs_only_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound rests on the exact tails and not on where the search for it began."""
    expected = bounds.preservation_upper(3, 50, 0.95)
    for guess in (0, 1, 2**52, 2**53, 2**60):
        monkeypatch.setattr(arithmetic, "_guess", lambda lost, total, level, guess=guess: guess)
        assert arithmetic.loss_upper.__wrapped__(3, 50, 0.95) == expected


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(1, 500),
    limit=st.one_of(st.sampled_from([0.01, 0.02, 0.05, 0.1, 0.5]), st.floats(0.001, 0.999)),
    confidence=CONFIDENCES,
)
def test_most_lost_is_that_of_the_judges(total: int, limit: float, confidence: float) -> None:
    """The number of losses that would pass is the same, for any limit."""
    assert arithmetic.most_lost(total, limit, confidence) == bounds.most_lost(total, limit, confidence)


def test_a_limit_at_a_bound_excludes_it() -> None:
    """A limit equal to the bound of one loss lets none pass; the next number lets it pass."""
    limit = bounds.preservation_upper(1, 100, 0.95)
    for value in (limit, math.nextafter(limit, 1)):
        assert arithmetic.most_lost(100, value, 0.95) == bounds.most_lost(100, value, 0.95)
    assert arithmetic.most_lost(100, limit, 0.95) == 0


@settings(max_examples=80, deadline=None)
@given(data=st.data(), total=TOTALS, confidence=CONFIDENCES)
def test_the_interval_of_a_net_change_is_that_of_the_judges(data: Any, total: int, confidence: float) -> None:
    """Both limits of the bootstrap interval are the same number of questions."""
    lost = data.draw(st.integers(0, total))
    gained = data.draw(st.integers(0, total - lost))
    expected = net.net_interval(lost, gained, total, confidence)
    assert arithmetic.net_interval(lost, gained, total, confidence) == (expected.lower, expected.upper)


@pytest.mark.parametrize("total", range(1, 6))
def test_the_interval_is_that_of_all_resamples(total: int) -> None:
    """For a few questions the limits are those of every ordered resample, also where a probability is hit exactly."""
    for lost in range(total + 1):
        for gained in range(total + 1 - lost):
            values = [-1] * lost + [1] * gained + [0] * (total - lost - gained)
            sums = [0]
            for _ in range(total):
                sums = [one + value for one in sums for value in values]
            sums.sort()
            for confidence in (0.5, 0.9, 0.95):
                outside = (1 - Fraction(str(confidence))) / 2
                limits = tuple(sums[math.ceil(share * len(sums)) - 1] for share in (outside, 1 - outside))
                assert arithmetic.net_interval(lost, gained, total, confidence) == limits


def test_the_published_figures() -> None:
    """The bounds of the published result, the counts that would pass, and the intervals of its net changes."""
    shown = [round(100 * arithmetic.loss_upper(*counts, 0.95), 3) for counts in ((20, 1319), (22, 1319), (1, 100))]
    assert shown == [2.196, 2.373, 4.656]
    assert (arithmetic.most_lost(1319, 0.02, 0.95), arithmetic.most_lost(100, 0.05, 0.95)) == (17, 1)
    assert (arithmetic.most_lost(148, 0.02, 0.95), arithmetic.most_lost(149, 0.02, 0.95)) == (None, 0)
    assert arithmetic.net_interval(20, 17, 1319, 0.95) == (-15, 9)
    assert arithmetic.net_interval(22, 15, 1319, 0.95) == (-19, 5)


@pytest.mark.parametrize("p", [0.01, 0.05, 0.75, 0.9, 0.95, 0.975, 0.99, 0.999])
def test_the_student_quantile_is_scipys(p: float) -> None:
    """For 1 to 200 degrees of freedom thirteen digits agree."""
    for degrees in range(1, 201):
        assert arithmetic.student_quantile(p, degrees) == pytest.approx(float(special.stdtrit(degrees, p)), rel=1e-13)


def test_the_student_quantile_where_it_has_a_closed_form() -> None:
    """One degree is Cauchy's distribution, two have a root; the median is 0, and the tails are mirrored."""
    assert arithmetic.student_quantile(0.75, 1) == 1.0
    for p in (0.6, 0.95, 1 - 1e-12):
        exact = Decimal(p)
        two = (2 * exact - 1) / (2 * exact * (1 - exact)).sqrt()
        assert arithmetic.student_quantile(p, 2) == pytest.approx(float(two), rel=4e-16)
    assert arithmetic.student_quantile(0.5, 7) == 0.0
    assert arithmetic.student_quantile(0.25, 9) == -arithmetic.student_quantile(0.75, 9)


@settings(max_examples=100, deadline=None)
@given(
    differences=st.lists(
        st.one_of(st.floats(-10, 10), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([0.0, 1e-9])),
        max_size=40,
    ),
    confidence=st.sampled_from([0.9, 0.95, 0.99]),
)
def test_the_paired_mean_is_that_of_the_judges(differences: list[float], confidence: float) -> None:
    """Mean, deviation, error and bound agree to 1e-12 and refusals word for word."""
    expected: Any = outcome(lambda: paired.paired_mean(differences, confidence=confidence))
    mean: Any = outcome(lambda: arithmetic.paired_mean(differences, confidence))
    if isinstance(expected, str):
        assert mean == expected
        return
    assert (mean.count, mean.mean, mean.deviation, mean.error) == (
        expected.count, expected.mean, expected.deviation, expected.error
    )  # fmt: skip
    assert mean.quantile == pytest.approx(expected.quantile, rel=1e-13)
    assert mean.upper == pytest.approx(expected.upper, rel=1e-12, abs=1e-13 * (abs(mean.mean) + mean.error))


def test_numbers_that_are_none_are_refused() -> None:
    """NaN, infinity, counts beyond the total and probabilities of 0 or 1 are refused."""
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"differences\[1\]"):
            arithmetic.paired_mean([0.0, bad], 0.95)
    for call in (
        lambda: arithmetic.loss_upper(3, 2, 0.95),
        lambda: arithmetic.loss_upper(0, 0, 0.95),
        lambda: arithmetic.loss_lower(-1, 2, 0.95),
        lambda: arithmetic.loss_upper(0, 2, 1.0),
        lambda: arithmetic.loss_upper(0, 2, math.nan),
        lambda: arithmetic.most_lost(10, 0.0, 0.95),
        lambda: arithmetic.most_lost(0, 0.1, 0.95),
        lambda: arithmetic.net_interval(2, 2, 3, 0.95),
        lambda: arithmetic.student_quantile(0.95, 0),
        lambda: arithmetic.student_quantile(1.0, 3),
    ):
        with pytest.raises(ValueError):
            call()
