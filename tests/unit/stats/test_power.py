"""The power of a design."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from pytest_kvqual.stats import power
from pytest_kvqual.stats.bounds import most_lost, preservation_upper
from pytest_kvqual.stats.power import passing_probability, smallest_possible, smallest_total


def exact(total: int, limit: float, confidence: float, rate: Fraction) -> Fraction:
    """The probability to pass, term by term, over the counts whose bound is below the limit."""
    return sum(
        (
            math.comb(total, lost) * rate**lost * (1 - rate) ** (total - lost)
            for lost in range(total + 1)
            if preservation_upper(lost, total, confidence) < limit
        ),
        Fraction(0),
    )


@pytest.mark.parametrize(("limit", "expected"), [(0.02, 149), (0.05, 59), (0.01, 299), (0.5, 5), (0.95, 2), (0.96, 1)])
def test_smallest_possible(limit: float, expected: int) -> None:
    """The fewest questions that can pass: with one fewer the bound of 0 lost is not below the limit."""
    assert smallest_possible(limit, 0.95) == expected
    assert preservation_upper(0, expected, 0.95) < limit
    assert expected == 1 or not preservation_upper(0, expected - 1, 0.95) < limit


@pytest.mark.parametrize(("total", "limit"), [(1, 0.5), (58, 0.05), (59, 0.05), (93, 0.05), (40, 0.3), (12, 0.9)])
@pytest.mark.parametrize("rate", ["0", "0.004", "0.05", "0.3", "1"])
def test_passing_probability_term_by_term(total: int, limit: float, rate: str) -> None:
    """It is the exact sum over the counts that pass, rounded once."""
    expected = exact(total, limit, 0.95, Fraction(rate))
    assert passing_probability(total, limit, 0.95, float(rate)) == float(expected)
    assert passing_probability(total, limit, 0.95, Fraction(rate)) == float(expected)


def test_a_seeded_simulation_passes_as_often_as_computed() -> None:
    """Of 20,000 simulated studies of 1,319 questions, as many pass as the exact probability says (p above 0.001)."""
    drawn = np.random.default_rng(1319).binomial(1319, 0.01, size=20_000)
    bounds = {int(lost): preservation_upper(int(lost), 1319, 0.95) for lost in np.unique(drawn)}
    passed = sum(bounds[int(lost)] < 0.02 for lost in drawn)
    expected = passing_probability(1319, 0.02, 0.95, 0.01)
    assert stats.binomtest(passed, 20_000, expected).pvalue > 0.001


@pytest.mark.parametrize("limit", [0.02, 0.05])
@pytest.mark.parametrize("total", [59, 149, 1319])
def test_a_candidate_at_the_limit_passes_at_most_as_often_as_the_level(total: int, limit: float) -> None:
    """The gate's error: a loss rate at the limit passes with a probability of at most 1 - confidence."""
    assert passing_probability(total, limit, 0.95, limit) <= 0.05


@pytest.mark.parametrize(
    ("limit", "rate", "wanted"),
    [
        (0.2, 0.0, 0.9),
        (0.2, 0.01, 0.5),
        (0.2, 0.05, 0.9),
        (0.2, 0.1, 0.8),
        (0.5, 0.2, 0.99),
        (0.5, 0.3, 0.9),
        (0.9, 0.5, 0.999),
        (0.99, 0.9, 0.9),
    ],
)
def test_smallest_total_against_every_total(limit: float, rate: float, wanted: float) -> None:
    """One question fewer does not pass as wanted; it and each of the next 300 totals do."""
    found = smallest_total(limit, 0.95, rate, wanted)
    assert found == 1 or passing_probability(found - 1, limit, 0.95, rate) < wanted
    assert all(passing_probability(total, limit, 0.95, rate) >= wanted for total in range(found, found + 300))


def test_the_probability_is_a_saw_tooth() -> None:
    """A smaller total can pass as wanted on the crest of a tooth, and does not count: the next trough is below."""
    found = smallest_total(0.02, 0.95, 0.01, 0.9)
    assert found == 1390
    lucky = [total for total in range(149, found) if passing_probability(total, 0.02, 0.95, 0.01) >= 0.9]
    assert lucky
    assert max(lucky) < found - 1
    # Within a tooth more questions are less.
    assert most_lost(found - 1, 0.02, 0.95) == most_lost(found - 2, 0.02, 0.95)
    assert passing_probability(found - 1, 0.02, 0.95, 0.01) < passing_probability(found - 2, 0.02, 0.95, 0.01)


def test_a_wanted_probability_that_is_met_exactly() -> None:
    """Equal is enough: the comparison that rounded limits cannot decide is made with the exact integers."""
    # Up to 4 questions at a limit of 0.6 the count that passes stays 0, and 4 questions pass with (1/2)^4.
    assert [most_lost(total, 0.6, 0.95) for total in (3, 4, 5)] == [None, 0, 0]
    walk = power._Tail(Fraction(1, 2))
    for _ in range(4):
        walk.ask()
    assert walk.at_least(Fraction(1, 16))
    assert walk.at_most(Fraction(1, 16))
    assert not walk.at_least(Fraction(1, 16) + Fraction(1, 2**300))
    assert not walk.at_most(Fraction(1, 16) - Fraction(1, 2**300))


@pytest.mark.parametrize("rate", [Fraction(1, 3), Fraction(1, 50), Fraction(9, 10)])
def test_the_walk_keeps_the_probability_between_its_ends(rate: Fraction) -> None:
    """After each question and each loss the exact tail lies between the two integers, 2**-240 apart at most."""
    walk = power._Tail(rate)
    for step in range(120):
        walk.lose() if step % 5 == 4 and walk.total > walk.lost else walk.ask()
        tail = sum(
            math.comb(walk.total, lost) * rate**lost * (1 - rate) ** (walk.total - lost)
            for lost in range(min(walk.lost, walk.total) + 1)
        )
        low, high = (Fraction(end, 1 << 256) for end in walk._tail)
        assert low <= tail <= high
        assert high - low < Fraction(1, 2**240)


@pytest.mark.parametrize(
    ("limit", "rate", "text"),
    [
        (0.02, 0.02, "loss_rate: found 0.02, expected a number below the limit 0.02"),
        (0.02, 0.5, "loss_rate: found 0.5, expected a number below the limit 0.02"),
        (0.02, 0.01999, "expected one further below the limit 0.02: the search would pass 1000000 questions"),
        (1e-9, 0.0, "1000000 questions"),
    ],
)
def test_no_total_can_be_named(limit: float, rate: float, text: str) -> None:
    """At or above the limit no total passes; too close to it none is searched for. Both say so."""
    with pytest.raises(ValueError, match=text):
        smallest_total(limit, 0.95, rate, 0.9)


def test_a_limit_that_needs_too_many_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that the largest total cannot show is refused."""
    monkeypatch.setattr(power, "LARGEST", 1000)
    with pytest.raises(ValueError, match="limit: found 1e-06, expected one that 1000 questions can show"):
        smallest_possible(1e-6, 0.95)


@pytest.mark.parametrize("bad", [0, 1, -0.1, math.nan, math.inf, "0.5", True, None])
def test_invalid_designs_are_refused(bad: float) -> None:
    """A limit, confidence or wanted probability outside (0, 1), or of another type, raises with what was found."""
    for call in (
        lambda: passing_probability(100, bad, 0.95, 0.01),
        lambda: passing_probability(100, 0.05, bad, 0.01),
        lambda: smallest_total(bad, 0.95, 0.01, 0.9),
        lambda: smallest_total(0.05, bad, 0.01, 0.9),
        lambda: smallest_total(0.05, 0.95, 0.01, bad),
        lambda: smallest_possible(bad, 0.95),
        lambda: smallest_possible(0.05, bad),
    ):
        with pytest.raises(ValueError, match=r"found .*, expected"):
            call()


@pytest.mark.parametrize("bad", [-0.1, 1.5, math.nan, "0.5", True, None])
def test_an_invalid_loss_rate_is_refused(bad: float) -> None:
    """A loss rate is a number from 0 to 1."""
    with pytest.raises(ValueError, match=r"loss_rate: found .*, expected a number from 0 to 1"):
        passing_probability(100, 0.05, 0.95, bad)


@pytest.mark.parametrize("bad", [0, -1, 1.0, True])
def test_an_invalid_total_is_refused(bad: int) -> None:
    """A total is a positive integer."""
    with pytest.raises(ValueError, match=r"total: found .*, expected"):
        passing_probability(bad, 0.05, 0.95, 0.01)
