"""Laws of paired blocks, from the two figures of each block on."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.stats.blocks import effect, median_interval, sign_test

FIGURE = st.fractions(min_value=Fraction(1, 1000), max_value=10**12, max_denominator=10**4)
PAIRS = st.lists(st.tuples(FIGURE, FIGURE), min_size=6, max_size=20)
CONFIDENCE = Fraction(9, 10)


@given(PAIRS)
def test_swapped_arms_invert_the_effects_and_turn_the_interval(pairs: list[tuple[Fraction, Fraction]]) -> None:
    """Each effect becomes its inverse, p stays, and the interval's ends become each other's inverse."""
    there = [effect(candidate, control) for candidate, control in pairs]
    back = [effect(control, candidate) for candidate, control in pairs]
    assert back == [1 / each for each in there]
    assert sign_test(back).p == sign_test(there).p
    first, second = (median_interval(each, confidence=CONFIDENCE) for each in (there, back))
    assert (second.lower, second.upper, second.coverage) == (1 / first.upper, 1 / first.lower, first.coverage)


@given(PAIRS, st.data())
def test_a_factor_on_both_arms_of_a_block_changes_nothing(
    pairs: list[tuple[Fraction, Fraction]], data: st.DataObject
) -> None:
    """A block in which everything took so many times as long has the same effect, exactly."""
    factors = data.draw(st.lists(FIGURE, min_size=len(pairs), max_size=len(pairs)))
    slowed = [(candidate * by, control * by) for (candidate, control), by in zip(pairs, factors, strict=True)]
    assert [effect(*pair) for pair in slowed] == [effect(*pair) for pair in pairs]


def two_sided(signs: Sequence[int]) -> Fraction:
    """The share of all sign patterns that are at least as lopsided."""
    return Fraction(
        sum(abs(sum(each)) >= abs(sum(signs)) for each in product((-1, 1), repeat=len(signs))), 2 ** len(signs)
    )


@pytest.mark.parametrize("total", range(1, 7))
def test_a_tie_is_given_the_side_that_makes_p_largest(total: int) -> None:
    """For every outcome of up to six blocks p is the largest over all ways to give each tie a side, enumerated."""
    exact = {signs: two_sided(signs) for signs in product((-1, 1), repeat=total)}
    for signs in product((-1, 0, 1), repeat=total):
        found = sign_test([(Fraction(1, 2), Fraction(1), Fraction(2))[sign + 1] for sign in signs])
        ways = product(*((sign,) if sign else (-1, 1) for sign in signs))
        assert found.p == max(exact[way] for way in ways)


@pytest.mark.parametrize("total", [7, 8])
def test_the_same_by_counts(total: int) -> None:
    """At seven and eight blocks for every number of effects above, at and below 1."""
    exact = {above: two_sided([1] * above + [-1] * (total - above)) for above in range(total + 1)}
    for above in range(total + 1):
        for ties in range(total + 1 - above):
            effects = [Fraction(2)] * above + [Fraction(1)] * ties + [Fraction(1, 2)] * (total - above - ties)
            assert sign_test(effects).p == max(exact[above + given] for given in range(ties + 1))
