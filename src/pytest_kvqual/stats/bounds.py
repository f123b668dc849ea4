"""Exact bounds on a probability, in integer arithmetic.

Nothing is imported here that could round: the binomial tail is compared with the significance level as integers, so
that a bound that lands on a limit lands there on every machine.
"""

from __future__ import annotations

from fractions import Fraction

from pytest_kvqual.stats._exact import at_most, check_counts, share_of, tail_count

_BITS = 53
_WHOLE = 1 << _BITS


def preservation_upper(lost: int, total: int, confidence: float) -> float:
    """The one-sided Clopper-Pearson upper bound of a loss probability.

    ``lost`` of ``total`` independent paired questions went from right (control) to wrong (candidate). The bound is the
    largest probability p of a loss that the count does not reject at level ``1 - confidence``: the root of
    ``P(X <= lost | total, p) = 1 - confidence`` for binomial X, and 1 when every question was lost. Its coverage is at
    least ``confidence`` for each p.

    The result is the smallest multiple of 2**-53 whose exact tail is at most ``1 - confidence``: the true bound,
    rounded up by less than 1.2e-16. ``confidence`` is taken as the decimal that it prints as (0.95 is 19/20).

    Args:
        lost: Questions lost, 0 to ``total``.
        total: All paired questions, at least 1; gains do not leave the denominator.
        confidence: Between 0 and 1, both excluded.

    Raises:
        ValueError: A count or the confidence is out of range, or of another type.

    References:
        C. J. Clopper and E. S. Pearson, "The use of confidence or fiducial limits illustrated in the case of the
        binomial", Biometrika 26 (1934), pp. 404-413.

    Examples:
        >>> round(100 * preservation_upper(20, 1319, 0.95), 3)
        2.196
    """
    level = 1 - share_of("confidence", confidence)
    check_counts(total, lost=lost)
    if lost == total:
        return 1.0
    # The tail falls as p grows: `low` always has a tail above the level, `high` one at or below it.
    low, high = 0, _WHOLE
    while high - low > 1:
        middle = (low + high) // 2
        if _rejects(lost, total, middle, level):
            high = middle
        else:
            low = middle
    return high / _WHOLE


def preservation_lower(lost: int, total: int, confidence: float) -> float:
    """The one-sided Clopper-Pearson lower bound of a loss probability.

    The smallest probability p of a loss that ``lost`` of ``total`` does not reject at level ``1 - confidence``: the
    root of ``P(X >= lost | total, p) = 1 - confidence`` for binomial X, and 0 when nothing was lost. A poisoned capture
    whose lower bound lies above the limit has shown that its loss probability does.

    The result is the largest multiple of 2**-53 whose exact tail is at most ``1 - confidence``: the true bound, rounded
    down by less than 1.2e-16. ``confidence`` is taken as in :func:`preservation_upper`.

    Args:
        lost: Questions lost, 0 to ``total``.
        total: All paired questions, at least 1.
        confidence: Between 0 and 1, both excluded.

    Raises:
        ValueError: A count or the confidence is out of range, or of another type.

    References:
        Clopper and Pearson (1934), as for :func:`preservation_upper`.

    Examples:
        >>> round(100 * preservation_lower(20, 1319, 0.95), 3)
        1.007
    """
    check_counts(total, lost=lost)
    # Lost questions are those not kept: the largest probability of keeping one is 1 less the smallest of losing one.
    # Both are multiples of 2**-53 between 0 and 1, so that the difference is exact.
    return 1.0 - preservation_upper(total - lost, total, confidence)


def most_lost(total: int, limit: float, confidence: float) -> int | None:
    """The largest count of losses that passes: whose ``preservation_upper`` is below ``limit``.

    It is the gate's own comparison, of two floats. So a bound that rounds to the limit is at the limit, not below it.

    Args:
        total: All paired questions, at least 1.
        limit: Between 0 and 1, both excluded.
        confidence: Between 0 and 1, both excluded.

    Returns:
        The count, or None where not even 0 losses pass.

    Raises:
        ValueError: The total, the limit or the confidence is out of range, or of another type.

    Examples:
        >>> most_lost(1319, 0.02, 0.95)
        17
    """
    level = 1 - share_of("confidence", confidence)
    numerator = below(limit)
    check_counts(total)
    # The tail grows with the count: `low` is a count that passes (or -1), `high` one that does not. Everything lost
    # has a bound of 1 and never passes.
    low, high = -1, 1
    while high < total and _rejects(high, total, numerator, level):
        low, high = high, 2 * high
    high = min(high, total)
    while high - low > 1:
        middle = (low + high) // 2
        if _rejects(middle, total, numerator, level):
            low = middle
        else:
            high = middle
    return None if low < 0 else low


def below(limit: float) -> int:
    """The largest integer m with m / 2**53 below ``limit`` as floats: a bound passes where it is at most m / 2**53.

    Raises:
        ValueError: The limit is not between 0 and 1, both excluded.
    """
    share_of("limit", limit)
    scaled = Fraction(float(limit)) * _WHOLE
    return -(-scaled.numerator // scaled.denominator) - 1


def _rejects(lost: int, total: int, numerator: int, level: Fraction) -> bool:
    """Whether P(X <= lost | total, p) <= level at p = numerator / 2**53."""
    return at_most(tail_count(lost, total, numerator, _WHOLE), _WHOLE**total, level)
