"""Paired effects over blocks: the exact sign test, and the order-statistic interval of the median. All exact.

Both ask nothing of the effects' distribution but that blocks are independent; the interval's coverage also that it is
continuous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb


@dataclass(frozen=True, kw_only=True, slots=True)
class SignTest:
    """The two-sided sign test of the hypothesis that an effect is above 1 as often as below it.

    ``better`` and ``worse`` count the effects on either side of 1, ``ties`` those at 1. ``p`` is exact.
    """

    better: int
    worse: int
    ties: int
    p: Fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class MedianInterval:
    """The median of n effects, and an interval for it with its actual ``coverage``.

    The interval goes from the ``rank``-th smallest to the ``rank``-th largest effect.
    """

    median: Fraction
    lower: Fraction
    upper: Fraction
    rank: int
    coverage: Fraction


def effect(candidate: Fraction, control: Fraction) -> Fraction:
    """The paired effect of a block: candidate over control.

    Raises:
        ValueError: One of them is not above zero.
    """
    if not candidate > 0 or not control > 0:
        raise ValueError(f"found {candidate} over {control}, expected figures above zero")
    return candidate / control


def sign_test(effects: Sequence[Fraction], *, lower_is_better: bool) -> SignTest:
    """The exact two-sided sign test of ratios against 1.

    A tie stays in n and counts half for each side, an odd one for the side with fewer: the test is then conservative,
    where leaving ties out would raise the significance of what is left. Source: Gibbons and Chakraborti, Nonparametric
    Statistical Inference, 5th ed., 2011, section 5.4 (zero differences).

    Raises:
        ValueError: There is no effect.
    """
    if not effects:
        raise ValueError("found no effect, expected at least one")
    below, above = sum(it < 1 for it in effects), sum(it > 1 for it in effects)
    better, worse = (below, above) if lower_is_better else (above, below)
    ties, total = len(effects) - below - above, len(effects)
    # As near to the middle as the ties allow.
    fewer = min(total // 2, min(below, above) + ties)
    tail = Fraction(sum(comb(total, k) for k in range(fewer + 1)), 2**total)
    return SignTest(better=better, worse=worse, ties=ties, p=min(Fraction(1), 2 * tail))


def coverage(total: int, rank: int) -> Fraction:
    """The exact coverage, for the median, of the interval from the ``rank``-th smallest to the ``rank``-th largest.

    1 - 2 P(X < rank) of X ~ Binomial(total, 1/2). Source: David and Nagaraja, Order Statistics, 3rd ed., 2003, p. 160.
    """
    return 1 - 2 * Fraction(sum(comb(total, k) for k in range(rank)), 2**total)


def median_of(effects: Sequence[Fraction]) -> Fraction:
    """The median; of an even number of effects the mean of the middle two.

    Raises:
        ValueError: There is no effect.
    """
    if not effects:
        raise ValueError("found no effect, expected at least one")
    ranked, middle = sorted(effects), len(effects) // 2
    return ranked[middle] if len(ranked) % 2 else (ranked[middle - 1] + ranked[middle]) / 2


def median_interval(effects: Sequence[Fraction], confidence: Fraction) -> MedianInterval | None:
    """The narrowest symmetric order-statistic interval with at least ``confidence``; None where not even the widest is.

    Raises:
        ValueError: There is no effect.
    """
    total, ranked = len(effects), sorted(effects)
    ranks = [rank for rank in range(1, total // 2 + 1) if coverage(total, rank) >= confidence]
    if not ranks:
        return None
    rank = max(ranks)
    return MedianInterval(
        median=median_of(effects),
        lower=ranked[rank - 1],
        upper=ranked[total - rank],
        rank=rank,
        coverage=coverage(total, rank),
    )
