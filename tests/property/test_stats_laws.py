"""Laws of the statistics, for all inputs. No deadlines: a busy machine is no counterexample."""

from __future__ import annotations

import math
from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from pytest_kvqual.stats.bounds import most_lost, preservation_lower, preservation_upper
from pytest_kvqual.stats.net import net_interval, net_ways
from pytest_kvqual.stats.paired import paired_mean
from pytest_kvqual.stats.power import passing_probability, smallest_possible, smallest_total

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


@given(counts(60), CONFIDENCES)
@settings(deadline=None)
def test_the_lower_bound_is_the_root_of_its_equation(pair: tuple[int, int], confidence: float) -> None:
    """At the lower bound P(X >= lost) is at most 1 - confidence; one step of 2**-53 above it, it is above."""
    lost, total = pair
    assume(lost > 0)
    bound = Fraction(preservation_lower(lost, total, confidence))
    level = 1 - Fraction(repr(confidence))
    assert 1 - tail(lost - 1, total, bound) <= level < 1 - tail(lost - 1, total, bound + Fraction(1, 2**53))


@given(counts(), CONFIDENCES)
@settings(deadline=None)
def test_the_rate_lies_between_the_bounds(pair: tuple[int, int], confidence: float) -> None:
    """At a confidence of at least one half: lower bound <= lost / total <= upper bound."""
    lost, total = pair
    lower, upper = preservation_lower(lost, total, confidence), preservation_upper(lost, total, confidence)
    assert Fraction(lower) <= Fraction(lost, total) <= Fraction(upper)


@given(counts(), CONFIDENCES)
@settings(deadline=None)
def test_the_lower_bound_grows_with_losses(pair: tuple[int, int], confidence: float) -> None:
    """One more loss is a higher lower bound; one more question kept is no higher one."""
    lost, total = pair
    bound = preservation_lower(lost, total, confidence)
    assert lost == total or preservation_lower(lost + 1, total, confidence) > bound
    assert preservation_lower(lost, total + 1, confidence) <= bound


LIMITS = st.one_of(st.sampled_from([0.01, 0.02, 0.05, 0.1, 0.3, 0.7]), st.floats(0.005, 0.995))


@given(st.integers(1, 200), LIMITS, CONFIDENCES)
@settings(deadline=None)
def test_what_passes_agrees_with_the_bound(total: int, limit: float, confidence: float) -> None:
    """The most losses that pass have a bound below the limit, and one more has not."""
    most = most_lost(total, limit, confidence)
    assert most is None or preservation_upper(most, total, confidence) < limit
    assert not preservation_upper(0 if most is None else most + 1, total, confidence) < limit


@given(st.integers(1, 200), LIMITS, LIMITS, CONFIDENCES)
@settings(deadline=None)
def test_more_passes_with_a_wider_limit_or_more_questions(
    total: int, limit: float, other: float, confidence: float
) -> None:
    """A wider limit, and one more question, let no fewer losses pass; one more question lets at most one more."""
    low, high = sorted((limit, other))

    def most(questions: int, share: float) -> int:
        found = most_lost(questions, share, confidence)
        return -1 if found is None else found

    assert most(total, low) <= most(total, high)
    assert most(total, low) <= most(total + 1, low) <= most(total, low) + 1


@st.composite
def nets(draw: st.DrawFn, largest: int = 40) -> tuple[int, int, int]:
    """``lost``, ``gained`` and ``total``."""
    total = draw(st.integers(1, largest))
    lost = draw(st.integers(0, total))
    return lost, draw(st.integers(0, total - lost)), total


@given(nets(), CONFIDENCES)
@settings(deadline=None)
def test_exchange_mirrors_the_net_interval(case: tuple[int, int, int], confidence: float) -> None:
    """Exchanging lost and gained mirrors the interval, but for ends that a percentile meets exactly."""
    lost, gained, total = case
    half = (1 - Fraction(repr(confidence))) / 2
    whole, seen, met = total**total, 0, set()
    for _, ways in net_ways(lost, gained, total):
        seen += ways
        met.add(Fraction(seen, whole))
    one, other = net_interval(lost, gained, total, confidence), net_interval(gained, lost, total, confidence)
    assert one.net == -other.net
    if half not in met:
        assert one.lower == -other.upper
    if 1 - half not in met:
        assert one.upper == -other.lower


@given(nets(), CONFIDENCES)
@settings(deadline=None)
def test_the_ends_of_the_net_interval_are_percentiles(case: tuple[int, int, int], confidence: float) -> None:
    """All resamples are counted; each end holds its share of them, and the value before it does not."""
    lost, gained, total = case
    ways = dict(net_ways(lost, gained, total))
    assert sum(ways.values()) == total**total
    assert sum(net * count for net, count in ways.items()) == (gained - lost) * total**total
    found = net_interval(lost, gained, total, confidence)
    half = (1 - Fraction(repr(confidence))) / 2
    for end, share in ((found.lower, half), (found.upper, 1 - half)):
        at_most = Fraction(sum(count for net, count in ways.items() if net <= end), total**total)
        assert at_most - Fraction(ways[end], total**total) < share <= at_most


@given(nets(), CONFIDENCES, CONFIDENCES)
@settings(deadline=None)
def test_more_confidence_is_no_narrower_net_interval(case: tuple[int, int, int], one: float, other: float) -> None:
    """The interval at the higher confidence holds the one at the lower."""
    narrow, wide = (net_interval(*case, confidence) for confidence in sorted((one, other)))
    assert wide.lower <= narrow.lower <= narrow.upper <= wide.upper


@given(st.integers(1, 120), LIMITS, CONFIDENCES, st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None)
def test_a_higher_loss_rate_passes_less_often(
    total: int, limit: float, confidence: float, one: float, other: float
) -> None:
    """The probability to pass falls with the loss rate; at the limit it is at most 1 - confidence."""
    low, high = sorted((one, other))
    passing = passing_probability(total, limit, confidence, low)
    assert 0 <= passing_probability(total, limit, confidence, high) <= passing <= 1
    assert passing_probability(total, limit, confidence, limit) <= 1 - confidence or math.isclose(
        passing_probability(total, limit, confidence, limit), 1 - confidence
    )


@given(LIMITS, CONFIDENCES)
@settings(deadline=None)
def test_the_fewest_questions_pass_with_nothing_lost(limit: float, confidence: float) -> None:
    """With the smallest possible total 0 lost pass, and with one question fewer nothing does."""
    total = smallest_possible(limit, confidence)
    assert most_lost(total, limit, confidence) is not None
    assert total == 1 or most_lost(total - 1, limit, confidence) is None


@given(st.floats(0.1, 0.95), CONFIDENCES, st.floats(0, 0.6), st.sampled_from([0.5, 0.8, 0.9, 0.99]))
@settings(deadline=None, max_examples=50)
def test_the_smallest_total_is_the_start_of_what_passes(
    limit: float, confidence: float, share: float, wanted: float
) -> None:
    """One question fewer passes less often than wanted; it and the next 60 totals pass as wanted."""
    rate = limit * share
    found = smallest_total(limit, confidence, rate, wanted)
    assert found == 1 or passing_probability(found - 1, limit, confidence, rate) < wanted
    assert all(passing_probability(total, limit, confidence, rate) >= wanted for total in range(found, found + 60))


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
