"""Exact bounds on a probability, in integer arithmetic.

Nothing is imported here that could round: the binomial tail is compared with the significance level as integers, so
that a bound that lands on a limit lands there on every machine.
"""

from __future__ import annotations

from fractions import Fraction
from math import comb

_BITS = 53


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
    level = 1 - _confidence(confidence)
    for name, count in (("lost", lost), ("total", total)):
        if type(count) is not int:
            raise ValueError(f"{name}: found {count!r}, expected an integer")
    if total < 1:
        raise ValueError(f"total: found {total}, expected at least 1")
    if not 0 <= lost <= total:
        raise ValueError(f"lost: found {lost}, expected 0 to {total}")
    if lost == total:
        return 1.0
    # The tail falls as p grows: `low` always has a tail above the level, `high` one at or below it.
    low, high = 0, 1 << _BITS
    while high - low > 1:
        middle = (low + high) // 2
        if _rejects(lost, total, middle, level):
            high = middle
        else:
            low = middle
    return high / (1 << _BITS)


def _rejects(lost: int, total: int, numerator: int, level: Fraction) -> bool:
    """Whether P(X <= lost | total, p) <= level at p = numerator / 2**53."""
    whole = 1 << _BITS
    complement = whole - numerator
    # The shorter of the two tails is summed: P(X <= lost) <= level is P(X > lost) >= 1 - level.
    if 2 * lost < total:
        tail = _sum(range(lost, -1, -1), total, numerator, complement) * complement ** (total - lost)
        return bool(tail * level.denominator <= level.numerator * whole**total)
    tail = _sum(range(lost + 1, total + 1), total, complement, numerator) * numerator ** (lost + 1)
    return bool(tail * level.denominator >= (level.denominator - level.numerator) * whole**total)


def _sum(counts: range, total: int, near: int, far: int) -> int:
    """Horner's scheme over integers: the terms C(total, i) of a tail, without the factor that they all share.

    ``counts`` runs outwards. A term is multiplied by ``near`` once for each count after it, by ``far`` once for each
    before it.
    """
    result, power = 0, 1
    for count in counts:
        result = result * near + comb(total, count) * power
        power *= far
    return result


def _confidence(confidence: float) -> Fraction:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: found {confidence!r}, expected a number between 0 and 1")
    return Fraction(repr(float(confidence)))
