"""Paired effects over blocks: the ratio in each block, the exact sign test, the interval of their median.

A block is the unit: two arms timed under the same conditions, one figure of each. Effects are exact fractions, and
nothing here rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb

from pytest_kvqual.stats._exact import share_of


@dataclass(frozen=True, kw_only=True, slots=True)
class SignTest:
    """The result of :func:`sign_test`: how many effects lie below, above and at the null value, and the p-value."""

    below: int
    above: int
    ties: int
    p: Fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class MedianInterval:
    """The result of :func:`median_interval`: the ``order``-th smallest to the ``order``-th largest effect.

    ``coverage`` is exact for continuous effects and a lower bound where effects tie.
    """

    median: Fraction
    lower: Fraction
    upper: Fraction
    order: int
    coverage: Fraction


def effect(candidate: Fraction | float | None, control: Fraction | float | None) -> Fraction:
    """The effect in one block: the candidate's figure over the control's. 1 is no difference.

    Raises:
        ValueError: One of the two is missing, not finite, or not above 0.
    """
    values = []
    for name, value in (("candidate", candidate), ("control", control)):
        # NaN fails the comparison, as infinity does.
        if value is None or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"{name}: found {value}, expected a finite number above 0")
        values.append(Fraction(value))
    return values[0] / values[1]


def sign_test(effects: Sequence[Fraction], *, at: Fraction = Fraction(1)) -> SignTest:
    """The exact two-sided sign test of the hypothesis that the median effect is ``at``.

    With n effects, of which the more frequent sign has m, p = min(1, 2 * P(X >= m)) for X binomial (n, 1/2).

    Ties: an effect equal to ``at`` is counted with the less frequent sign, the one that speaks least against the
    hypothesis. The block stays in n, and p is never below that of dropping it.

    Args:
        effects: One per block, at least one. Every block: which were dropped is not seen from here.
        at: The effect under the hypothesis.

    Raises:
        ValueError: No effect.

    References:
        W. J. Dixon and A. M. Mood, "The statistical sign test", Journal of the American Statistical Association 41
        (1946), pp. 557-566. J. D. Gibbons and S. Chakraborti, "Nonparametric Statistical Inference", 4th edition
        (2003), section 5.4, on zero differences: assigning them the sign least conducive to rejection is conservative.
    """
    if not effects:
        raise ValueError("effects: found none, expected at least one")
    count = len(effects)
    below, above = sum(it < at for it in effects), sum(it > at for it in effects)
    tail = Fraction(2 * sum(comb(count, more) for more in range(max(below, above), count + 1)), 2**count)
    return SignTest(below=below, above=above, ties=count - below - above, p=min(Fraction(1), tail))


def median_interval(effects: Sequence[Fraction], *, confidence: float | Fraction) -> MedianInterval:
    """The median of the effects and the narrowest symmetric interval of order statistics that reaches a confidence.

    For n effects from one distribution the interval from the k-th smallest to the k-th largest covers its median with
    probability 1 - 2 * P(X < k), X binomial (n, 1/2), whatever the distribution. k is the largest with at least
    ``confidence``; the probability reached is returned, and is what is to be stated. The median of an even number is
    the arithmetic mean of the middle two.

    Args:
        effects: One per block.
        confidence: Between 0 and 1, both excluded; as the decimal that it prints as.

    Raises:
        ValueError: Too few effects for the confidence, or one that is out of range.

    References:
        W. J. Conover, "Practical Nonparametric Statistics", 3rd edition (1999), section 3.2.

    Examples:
        >>> found = median_interval([Fraction(it, 10) for it in (9, 8, 7, 9, 6, 8)], confidence=0.95)
        >>> found.lower, found.upper, float(found.coverage)
        (Fraction(3, 5), Fraction(9, 10), 0.96875)
    """
    wanted = share_of("confidence", confidence)
    ranked, count = sorted(effects), len(effects)
    order, reached, outside = 0, Fraction(0), 0
    while 2 * (order + 1) <= count + 1:
        # One side of the next interval: P(X < order + 1).
        outside += comb(count, order)
        inside = 1 - Fraction(2 * outside, 2**count)
        if inside < wanted:
            break
        order, reached = order + 1, inside
    if order == 0:
        raise ValueError(
            f"effects: found {count}, expected enough for a coverage of {float(wanted):g}: the whole range covers "
            f"{float(max(Fraction(0), 1 - Fraction(2, 2**count))):g}"
        )
    middle = ranked[(count - 1) // 2 : count // 2 + 1]
    return MedianInterval(
        median=sum(middle, Fraction(0)) / len(middle),
        lower=ranked[order - 1],
        upper=ranked[count - order],
        order=order,
        coverage=reached,
    )
