"""Effects of blocks: ratios, the sign test with its ties, the interval of the median, and drift."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import pytest

from pytest_kvqual.stats.blocks import effect, median_interval, sign_test
from pytest_kvqual.study.plan import williams

TENTHS = [Fraction(it, 10) for it in (9, 8, 7, 9, 6, 8)]


def test_an_effect_is_the_exact_ratio() -> None:
    """The candidate's figure over the control's, as a fraction."""
    assert effect(Fraction(2, 3), Fraction(4, 5)) == Fraction(5, 6)
    assert effect(1.5, 3) == Fraction(1, 2)


@pytest.mark.parametrize("value", [None, math.inf, -math.inf, math.nan, 0, Fraction(0), -1.0, True])
def test_what_is_no_time_has_no_effect(value: Fraction | float | None) -> None:
    """Nothing, an infinity, NaN, zero and less are refused on either side."""
    with pytest.raises(ValueError, match=f"candidate: found {value}, expected a finite number above 0"):
        effect(value, Fraction(1))
    with pytest.raises(ValueError, match="control: found "):
        effect(Fraction(1), value)


def test_the_sign_test_is_the_enumeration_of_all_signs() -> None:
    """P is the share of all sign patterns that are at least as one-sided, for every count of up to 8 blocks."""
    for count in range(1, 9):
        patterns = list(product((0, 1), repeat=count))
        for above in range(count + 1):
            seen = max(above, count - above)
            as_far = sum(max(sum(it), count - sum(it)) >= seen for it in patterns)
            values = [Fraction(2)] * above + [Fraction(1, 3)] * (count - above)
            assert sign_test(values).p == Fraction(as_far, len(patterns))


def test_a_tie_counts_for_the_side_that_is_less_frequent() -> None:
    """Six blocks of which one ties are as one that disagrees; dropping it would give 1/16."""
    one = sign_test([*TENTHS[:5], Fraction(1)])
    assert (one.below, one.above, one.ties, one.p) == (5, 0, 1, Fraction(14, 64))
    assert sign_test([Fraction(1)] * 6).p == 1
    assert sign_test([Fraction(3), Fraction(3)], at=Fraction(3)).ties == 2
    with pytest.raises(ValueError, match="effects: found none"):
        sign_test([])


def test_the_interval_is_the_narrowest_that_covers_enough() -> None:
    """Six effects need their whole range at 95 %, and at 75 % the second to the fifth."""
    whole = median_interval(TENTHS, confidence=0.95)
    assert (whole.lower, whole.upper, whole.order, whole.coverage) == (
        Fraction(3, 5),
        Fraction(9, 10),
        1,
        Fraction(31, 32),
    )
    assert whole.median == Fraction(8, 10)
    inner = median_interval(TENTHS, confidence=0.75)
    assert (inner.lower, inner.upper, inner.order, inner.coverage) == (
        Fraction(7, 10),
        Fraction(9, 10),
        2,
        Fraction(25, 32),
    )
    assert median_interval(TENTHS, confidence=Fraction(31, 32)).order == 1
    assert median_interval([Fraction(1), Fraction(2), Fraction(4)], confidence=0.5).median == 2


def test_the_coverage_is_that_of_all_sides() -> None:
    """Of all ways in which effects fall beside the median, the stated share leaves it inside the interval."""
    for count in range(2, 10):
        patterns = list(product((0, 1), repeat=count))
        found = median_interval([Fraction(it) for it in range(count)], confidence=Fraction(1, 10**9))
        inside = sum(found.order <= sum(it) <= count - found.order for it in patterns)
        assert found.coverage == Fraction(inside, len(patterns))


@pytest.mark.parametrize(("count", "confidence"), [(0, 0.5), (1, 0.5), (5, 0.95), (6, 0.97)])
def test_too_few_effects_have_no_interval(count: int, confidence: float) -> None:
    """Where the whole range does not cover enough, that is said with what it covers."""
    with pytest.raises(ValueError, match=f"effects: found {count}, expected enough for a coverage of {confidence:g}"):
        median_interval([Fraction(it) for it in range(count)], confidence=confidence)
    with pytest.raises(ValueError, match="confidence: found 95"):
        median_interval(TENTHS, confidence=95)


def drifting(orders: list[tuple[int, ...]], drift: Fraction) -> list[Fraction]:
    """The effects of arm 1 over arm 0, which are the same, on a machine that slows by a factor from slot to slot."""
    effects = []
    for order in orders:
        took = {arm: drift**slot for slot, arm in enumerate(order)}
        effects.append(effect(took[1], took[0]))
    return effects


def test_a_drift_does_not_pass_for_an_effect() -> None:
    """The same arm twice, 10 % slower from slot to slot: order AB shows +10 %, the counterbalanced orders 0 %."""
    naive = drifting([(0, 1)] * 6, Fraction(11, 10))
    found = median_interval(naive, confidence=0.95)
    assert found.lower == found.median == found.upper == Fraction(11, 10)
    assert sign_test(naive).p == Fraction(1, 32)

    balanced = drifting(list(williams(2)) * 3, Fraction(11, 10))
    assert math.prod(balanced) == 1
    assert sign_test(balanced).p == 1
    found = median_interval(balanced, confidence=0.95)
    assert found.lower == 1 / found.upper == Fraction(10, 11)

    # Slowing by a tenth of the first slot each: the times of both arms have the same sum.
    slots = [Fraction(10 + it, 10) for it in range(4)]
    order = [arm for row in williams(2) for arm in row]
    sums = [sum((it for it, arm in zip(slots, order, strict=True) if arm == wanted), Fraction(0)) for wanted in (0, 1)]
    assert order == [0, 1, 1, 0]
    assert sums[0] == sums[1]


@pytest.mark.parametrize("arms", range(2, 8))
def test_no_pair_of_arms_gains_by_a_drift(arms: int) -> None:
    """Over the orders of any number of arms each is before each other equally often, so that its sign test has p 1."""
    orders = williams(arms)
    for one, other in product(range(arms), repeat=2):
        if one != other:
            before = sum(order.index(one) < order.index(other) for order in orders)
            assert 2 * before == len(orders)
