"""Integer arithmetic that the bounds, the net interval and the power of a design share.

Nothing is imported here that could round.
"""

from __future__ import annotations

from fractions import Fraction
from math import comb


def tail_count(lost: int, total: int, numerator: int, whole: int) -> int:
    """The integer N with P(X <= lost) = N / whole**total, for binomial X of ``total`` draws.

    ``numerator`` / ``whole`` is the probability of a loss, 0 to 1; ``lost`` is 0 to ``total``.
    """
    complement = whole - numerator
    # The shorter of the two tails is summed; `rest` is the factor that its terms share.
    rest: int
    if 2 * lost < total:
        rest = complement ** (total - lost)
        return _sum(range(lost, -1, -1), total, numerator, complement) * rest
    above = 0
    if lost < total:
        rest = numerator ** (lost + 1)
        above = _sum(range(lost + 1, total + 1), total, complement, numerator) * rest
    every: int = whole**total
    return every - above


def at_most(count: int, whole: int, share: Fraction) -> bool:
    """Whether ``count`` / ``whole`` <= ``share``."""
    return count * share.denominator <= share.numerator * whole


def share_of(name: str, value: float | Fraction) -> Fraction:
    """A number between 0 and 1, both excluded, as the decimal that it prints as (0.95 is 19/20); a fraction as itself.

    Raises:
        ValueError: It is out of range, or of another type.
    """
    if isinstance(value, Fraction):
        found = value
    elif isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1:
        found = Fraction(repr(float(value)))
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool) and 1 < value < 100
        advice = f" ({value:g} % is {value / 100:g})" if number else ""
        raise ValueError(f"{name}: found {value!r}, expected a number between 0 and 1{advice}")
    if not 0 < found < 1:
        raise ValueError(f"{name}: found {value}, expected a number between 0 and 1")
    return found


def check_counts(total: int, **counts: int) -> None:
    """Refuse counts that are no integers, that leave 0 to ``total``, and a total below 1.

    Raises:
        ValueError: The first count that is refused, by name.
    """
    for name, count in (*counts.items(), ("total", total)):
        if type(count) is not int:
            raise ValueError(f"{name}: found {count!r}, expected an integer")
    if total < 1:
        raise ValueError(f"total: found {total}, expected at least 1")
    for name, count in counts.items():
        if not 0 <= count <= total:
            raise ValueError(f"{name}: found {count}, expected 0 to {total}")


def _sum(counts: range, total: int, near: int, far: int) -> int:
    """Horner's scheme over integers: the terms C(total, i) of a tail, without the factor that they all share.

    ``counts`` runs outwards, by 1. A term is multiplied by ``near`` once for each count after it, by ``far`` once for
    each before it.
    """
    result, power, ways = 0, 1, comb(total, counts[0])
    for count in counts:
        result = result * near + ways * power
        power *= far
        ways = ways * (total - count) // (count + 1) if counts.step > 0 else ways * count // (total - count + 1)
    return result
