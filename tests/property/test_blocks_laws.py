"""Laws of the statistics of blocks."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.stats.blocks import median_interval, sign_test
from pytest_kvqual.stats.holm import holm
from pytest_kvqual.study import plan

RATIOS = st.lists(st.fractions(min_value=Fraction(1, 9), max_value=9, max_denominator=9), min_size=1, max_size=24)
FAMILY = st.lists(st.fractions(min_value=0, max_value=1, max_denominator=64), min_size=1, max_size=9)


@given(RATIOS)
def test_the_order_of_blocks_does_not_matter(effects: list[Fraction]) -> None:
    """Neither test nor interval depends on which block came first."""
    turned = sorted(effects, reverse=True)
    assert sign_test(turned) == sign_test(effects)
    if len(effects) > 1:
        half = Fraction(1, 2)
        assert median_interval(turned, confidence=half) == median_interval(effects, confidence=half)


@given(RATIOS)
def test_swapped_labels_give_the_same_p(effects: list[Fraction]) -> None:
    """The test is two-sided: candidate and control may change places, and below and above do."""
    one, other = sign_test(effects), sign_test([1 / it for it in effects])
    assert (one.p, one.below, one.above) == (other.p, other.above, other.below)


@given(RATIOS)
def test_ties_are_never_better_than_dropped(effects: list[Fraction]) -> None:
    """Keeping a tied block against the effect gives no smaller p than leaving it out."""
    kept = [it for it in effects if it != 1]
    if kept:
        assert sign_test(effects).p >= sign_test(kept).p


@given(RATIOS, st.sampled_from([0.5, 0.75, 0.9, 0.95]))
def test_the_interval_holds_the_median_at_its_coverage(effects: list[Fraction], confidence: float) -> None:
    """It contains the median, covers at least what was asked, and is refused exactly where no order does."""
    order = plan.largest_order(len(effects), Fraction(repr(confidence)))
    try:
        found = median_interval(effects, confidence=confidence)
    except ValueError:
        assert order is None
        return
    assert found.lower <= found.median <= found.upper
    assert found.order == order
    assert found.coverage == plan.coverage(len(effects), found.order) >= confidence


@given(RATIOS, st.sampled_from([Fraction(1, 2), Fraction(3, 4), Fraction(9, 10)]))
def test_interval_and_test_agree(effects: list[Fraction], confidence: Fraction) -> None:
    """A value outside the interval is rejected by the sign test at 1 - confidence: the one is the other inverted."""
    order = plan.largest_order(len(effects), confidence)
    if order is None:
        return
    found = median_interval(effects, confidence=confidence)
    for at in (found.lower - 1, found.upper + 1):
        assert sign_test(effects, at=at).p <= 1 - confidence


@given(FAMILY)
def test_holm_keeps_order_and_lies_between_none_and_bonferroni(family: list[Fraction]) -> None:
    """No adjusted value is below its own or above m times it; equal values stay equal, and the order stays."""
    found = holm(family)
    for index, (raw, adjusted) in enumerate(zip(family, found, strict=True)):
        assert raw <= adjusted <= min(Fraction(1), len(family) * raw)
        for other, value in zip(family[:index], found[:index], strict=True):
            assert (raw < other) <= (adjusted <= value)
            assert (raw == other) <= (adjusted == value)
    assert min(found) == min(Fraction(1), len(family) * min(family))


@given(FAMILY, st.fractions(min_value=0, max_value=1, max_denominator=64))
def test_a_larger_family_is_no_easier(family: list[Fraction], more: Fraction) -> None:
    """A further hypothesis lowers no adjusted value."""
    assert all(one <= other for one, other in zip(holm(family), holm([*family, more])[: len(family)], strict=True))
