"""The auditor's own arithmetic: bounds of a loss probability, intervals of a net change, Student's t. Standard library.

Every count is decided in integers. The bounds are found the other way round than by searching: a root in decimal
arithmetic says where the bound should lie, and exact tails at that point and at its neighbour prove it.
``confidence`` and ``limit`` are taken as the decimals that they print as (0.95 is 19/20, 0.05 is 1/20).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal, localcontext
from fractions import Fraction
from functools import lru_cache

_GRID = 1 << 53
_DIGITS = 60
_UNIT = 1 << 128


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of paired differences with its one-sided upper bound; all in the unit of the differences."""

    count: int
    mean: float
    deviation: float
    error: float
    quantile: float
    upper: float


@lru_cache(maxsize=4096)
def loss_upper(lost: int, total: int, confidence: float) -> float:
    """The one-sided Clopper-Pearson upper bound of a loss probability, ``lost`` of ``total`` questions lost.

    The smallest multiple of 2**-53 at which P(X <= lost) is at most ``1 - confidence`` for binomial X; 1 where all were
    lost.

    Raises:
        ValueError: A count or the confidence is out of range.

    References:
        C. J. Clopper and E. S. Pearson, Biometrika 26 (1934), pp. 404-413.
    """
    return _grid_point(lost, total, confidence) / _GRID


@lru_cache(maxsize=4096)
def loss_lower(lost: int, total: int, confidence: float) -> float:
    """The one-sided lower bound: the largest multiple of 2**-53 at which P(X >= lost) is at most ``1 - confidence``.

    Raises:
        ValueError: A count or the confidence is out of range.
    """
    # X losses with probability p are total - X questions kept with probability 1 - p.
    return (_GRID - _grid_point(total - lost, total, confidence)) / _GRID


@lru_cache(maxsize=256)
def most_lost(total: int, limit: float, confidence: float) -> int | None:
    """The largest number of losses whose upper bound is below ``limit``; None where no loss at all is too many.

    Raises:
        ValueError: ``total`` is below 1, or limit or confidence is not between 0 and 1.
    """
    level, edge = 1 - _decimal("confidence", confidence), _decimal("limit", limit)
    if total < 1:
        raise ValueError(f"total: found {total}, expected at least 1")
    # The tails at the limit itself say which count it is, but for the last digit of the bound and of the limit.
    whole = edge.denominator**total
    count, tail = 0, 0
    for term in _terms(edge.numerator, edge.denominator, total):
        tail += term
        if tail * level.denominator > level.numerator * whole:
            break
        count += 1
    while count < total and loss_upper(count, total, confidence) < limit:
        count += 1
    while count >= 0 and not loss_upper(count, total, confidence) < limit:
        count -= 1
    return count if count >= 0 else None


@lru_cache(maxsize=1024)
def net_interval(lost: int, gained: int, total: int, confidence: float) -> tuple[int, int]:
    """The percentile interval of the paired bootstrap of ``gained - lost``, in questions.

    A resample draws ``total`` questions with replacement; the numbers of lost and of gained ones in it are trinomial.
    The limits are the smallest k at which P(net <= k) reaches ``(1 - confidence) / 2``, and 1 less that.
    The distribution is taken in fixed point whose error is known; where that does not decide, in counts of resamples.

    Raises:
        ValueError: A count or the confidence is out of range.

    References:
        B. Efron and R. J. Tibshirani, "An Introduction to the Bootstrap" (1993), pp. 168-177.
    """
    if total < 1 or lost < 0 or gained < 0 or lost + gained > total:
        raise ValueError(f"net: found {lost} lost and {gained} gained of {total}, expected counts of one whole")
    outside = (1 - _decimal("confidence", confidence)) / 2
    shares = _net_shares(lost, gained, total)
    lower, upper = (_reaches(shares, wanted) for wanted in (outside, 1 - outside))
    if lower is None or upper is None:
        ways = _net_ways(lost, gained, total)
        lower, upper = (_reached(ways, wanted * total**total) for wanted in (outside, 1 - outside))
    return lower, upper


@lru_cache(maxsize=256)
def student_quantile(p: float, degrees: int) -> float:
    """The quantile of Student's t at probability ``p`` for whole ``degrees`` of freedom, to the last digit of float64.

    For whole degrees the distribution is a finite sum in the angle ``atan(t / sqrt(degrees))``, which is concave above
    the median: Newton's steps from the median rise to the root and never pass it.

    Raises:
        ValueError: ``p`` is not between 0 and 1, or ``degrees`` is below 1.

    References:
        M. Abramowitz and I. A. Stegun, "Handbook of Mathematical Functions" (1964), 26.7.3 and 26.7.4, p. 948.
    """
    if not 0 < p < 1:
        raise ValueError(f"p: found {p!r}, expected a number between 0 and 1")
    if degrees < 1:
        raise ValueError(f"degrees: found {degrees}, expected at least 1")
    with localcontext(Context(prec=_DIGITS, Emax=10**9, Emin=-(10**9))):
        exact = Decimal(p)
        if exact == Decimal("0.5"):
            return 0.0
        tangent = _tangent(abs(2 * exact - 1), degrees)
        return math.copysign(float(tangent * Decimal(degrees).sqrt()), p - 0.5)


def paired_mean(differences: Sequence[float], confidence: float) -> Mean:
    """The mean of paired differences and its one-sided upper Student t bound at ``confidence``.

    All differences are written over one power of two, so that both sums are sums of integers. Differences that are all
    equal have the mean as their bound.

    Raises:
        ValueError: Fewer than 2 differences, one that is no finite number, or a variance beyond float64.
    """
    for place, value in enumerate(differences):
        if not math.isfinite(value):
            raise ValueError(f"differences[{place}]: found {value!r}, expected a finite number")
    count = len(differences)
    if count < 2:
        raise ValueError(f"differences: found {count}, expected at least 2")
    ratios = [float(value).as_integer_ratio() for value in differences]
    scale = max(below for _, below in ratios)
    whole = [above * (scale // below) for above, below in ratios]
    total, squares = sum(whole), sum(value * value for value in whole)
    spread = count * squares - total * total
    try:
        mean = total / (count * scale)
        deviation = math.sqrt(spread / (count * (count - 1) * scale * scale))
        error = math.sqrt(spread / (count * count * (count - 1) * scale * scale))
    except OverflowError:
        raise ValueError("differences: found a variance beyond float64, expected a finite one") from None
    quantile = student_quantile(confidence, count - 1)
    upper = mean if spread == 0 else mean + quantile * error
    return Mean(count=count, mean=mean, deviation=deviation, error=error, quantile=quantile, upper=upper)


def _grid_point(lost: int, total: int, confidence: float) -> int:
    """The smallest k with P(X <= lost | k / 2**53) <= 1 - confidence, proved at k and k - 1."""
    level = 1 - _decimal("confidence", confidence)
    if total < 1 or not 0 <= lost <= total:
        raise ValueError(f"counts: found {lost} of {total}, expected 0 to the total, and a total of at least 1")
    if lost == total:
        return _GRID
    low, high = 0, _GRID
    guess = min(max(_guess(lost, total, level), 1), _GRID - 1)
    step = 1
    # `low` is always known to have a tail above the level, `high` one at or below it. From the guess outwards the steps
    # double, so that a poor guess costs time and never the result.
    while low < guess < high:
        if _within(lost, total, guess, level):
            high = guess
            guess -= step
        else:
            low = guess
            guess += step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if _within(lost, total, middle, level):
            high = middle
        else:
            low = middle
    return high


def _within(lost: int, total: int, point: int, level: Fraction) -> bool:
    """Whether the exact tail P(X <= lost) at ``point / 2**53`` is at most ``level``."""
    # The shorter side is summed: of the questions kept, where most were lost.
    if lost <= total - lost:
        terms = _terms(point, _GRID, total)
        tail = sum(next(terms) for _ in range(lost + 1))
        return bool(tail * level.denominator <= level.numerator * _GRID**total)
    terms = _terms(_GRID - point, _GRID, total)
    rest = sum(next(terms) for _ in range(total - lost))
    return bool(rest * level.denominator >= (level.denominator - level.numerator) * _GRID**total)


def _terms(above: int, below: int, total: int) -> Iterator[int]:
    """The terms of the binomial distribution at ``above / below``, from 0 up, times ``below ** total``: integers."""
    rest = below - above
    term = rest**total
    for count in range(total + 1):
        yield term
        # Exact: the next term is an integer too.
        term = term * ((total - count) * above) // ((count + 1) * rest)


def _guess(lost: int, total: int, level: Fraction) -> int:
    """Where the bound should lie on the grid: float64 to some ten digits, then Newton's steps in decimals."""
    low, high = 0.0, 1.0
    ways = math.lgamma(total + 1) - math.lgamma(lost + 1) - math.lgamma(total - lost + 1)
    for _ in range(44):
        middle = (low + high) / 2
        ratio = rest = 1.0
        for count in range(lost, 0, -1):
            ratio *= count / (total - count + 1) * ((1 - middle) / middle)
            rest += ratio
            if ratio < 1e-17 * rest:
                break
        logarithm = ways + lost * math.log(middle) + (total - lost) * math.log1p(-middle)
        # A sum beyond float64 is infinite, and the tail then above the level.
        if logarithm + math.log(rest) > math.log(level):
            low = middle
        else:
            high = middle
    with localcontext(Context(prec=50, Emax=10**9, Emin=-(10**9))):
        point = Decimal(high)
        wanted = Decimal(level.numerator) / level.denominator
        choices = Decimal(math.comb(total, lost))
        for _ in range(4):
            odds = (1 - point) / point
            term = at_lost = choices * point**lost * (1 - point) ** (total - lost)
            tail = term
            for count in range(lost, 0, -1):
                term *= odds * count / (total - count + 1)
                tail += term
                if term < tail.scaleb(-45):
                    break
            better = point + (tail - wanted) * (1 - point) / ((total - lost) * at_lost)
            if not 0 < better < 1:
                break
            point = better
        return int((point * _GRID).to_integral_value(ROUND_CEILING))


def _reached(ways: Mapping[int, int], wanted: Fraction) -> int:
    """The smallest net up to which there are at least ``wanted`` resamples."""
    below = 0
    for net in sorted(ways):
        below += ways[net]
        if below >= wanted:
            return net
    raise ValueError(f"found {below} resamples, expected at least {wanted}")


def _net_ways(lost: int, gained: int, total: int) -> dict[int, int]:
    """Each net change with the number of ordered resamples that have it: a sum of trinomial coefficients."""
    same = total - lost - gained
    ways: dict[int, int] = {}
    for losses in range(total + 1) if lost else (0,):
        rest = total - losses
        row = math.comb(total, losses) * lost**losses
        for gains in range(rest + 1) if gained else (0,):
            if same or gains == rest:
                count = row * math.comb(rest, gains) * gained**gains * same ** (rest - gains)
                ways[gains - losses] = ways.get(gains - losses, 0) + count
    return ways


def _net_shares(lost: int, gained: int, total: int) -> list[int]:
    """The probabilities of the nets from ``-total`` to ``total`` in units of 2**-128, none of them too large.

    The distribution of one draw is raised to the power ``total`` by repeated squaring. A product of two distributions
    is one product of integers that hold them side by side; each result is rounded down, so that what is missing from
    the whole at the end bounds the error of every sum.
    """
    same = total - lost - gained
    now = [_UNIT]
    for bit in f"{total:b}":
        now = _squared(now)
        if bit == "1":
            padded = [0, 0, *now, 0, 0]
            # The place in the list is the net plus the number of draws; a draw adds 0 (lost), 1 or 2 (gained).
            now = [
                (lost * three + same * two + gained * one) // total
                for one, two, three in zip(padded, padded[1:], padded[2:], strict=False)
            ]
    return now


def _squared(shares: list[int]) -> list[int]:
    # Each sum of products is below 2**256, and one byte more keeps neighbours apart.
    width = 33
    packed = int.from_bytes(b"".join(share.to_bytes(width, "little") for share in shares), "little")
    count = 2 * len(shares) - 1
    data = (packed * packed).to_bytes(width * count, "little")
    # Rounded down to units of 2**-128 by leaving out the low 16 bytes.
    return [int.from_bytes(data[place + 16 : place + width], "little") for place in range(0, width * count, width)]


def _reaches(shares: list[int], wanted: Fraction) -> int | None:
    """The smallest net at which the sum of shares reaches ``wanted``; None where their rounding leaves that open."""
    missing = _UNIT - sum(shares)
    total = len(shares) // 2
    edge = wanted * _UNIT
    below = 0
    for net, share in enumerate(shares, -total):
        below += share
        if below >= edge:
            return net
        if below + missing >= edge:
            return None
    return None


def _tangent(share: Decimal, degrees: int) -> Decimal:
    """``tan(a)`` for the angle with P(|T| <= sqrt(degrees) tan a) = ``share``, 0 < share < 1."""
    small = Decimal(10) ** -45
    # The series in cos: each coefficient from the one before it; after the last comes that of the derivative.
    first = degrees % 2
    factors = [Decimal(1)]
    for step in range(2 if first else 1, degrees - 1, 2):
        factors.append(factors[-1] * step / (step + 1))
    if not first:
        # factors[j] is 1·3···(2j-1) over 2·4···2j; the derivative by the sine is the last one times degrees - 1.
        slope = factors[-1] * (degrees - 1)
        sine = Decimal(0)
        for _ in range(2000):
            square = 1 - sine * sine
            step_by = (share - sine * _horner(factors[: degrees // 2], square)) / (slope * square ** (degrees // 2 - 1))
            sine += step_by
            if step_by <= small * sine * (1 - sine):
                break
        return sine / (1 - sine * sine).sqrt()
    pi = _pi()
    slope = 2 / pi * (factors[-1] * (degrees - 1) if degrees > 1 else 1)
    angle = Decimal(0)
    sine, cosine = Decimal(0), Decimal(1)
    for _ in range(2000):
        square = cosine * cosine
        series = cosine * _horner(factors[: degrees // 2], square) if degrees > 1 else Decimal(0)
        step_by = (share - 2 / pi * (angle + sine * series)) / (slope * cosine ** (degrees - 1))
        angle += step_by
        sine, cosine = _sine(angle), _sine(pi / 2 - angle)
        if step_by <= small * sine * cosine:
            break
    return sine / cosine


def _horner(factors: Sequence[Decimal], variable: Decimal) -> Decimal:
    result = Decimal(0)
    for factor in reversed(factors):
        result = result * variable + factor
    return result


def _sine(angle: Decimal) -> Decimal:
    """The sine of an angle from 0 to pi / 2, by its series."""
    square = angle * angle
    term = result = angle
    place = 1
    while abs(term) > abs(result).scaleb(-_DIGITS - 5):
        place += 2
        term *= -square / (place * (place - 1))
        result += term
    return result


def _pi() -> Decimal:
    """Pi, by J. Machin's formula."""

    def inverse_tangent(whole: int) -> Decimal:
        power = result = Decimal(1) / whole
        place = 1
        while abs(power) > Decimal(10) ** -(_DIGITS + 10):
            power /= -whole * whole
            place += 2
            result += power / place
        return result

    return 4 * (4 * inverse_tangent(5) - inverse_tangent(239))


def _decimal(name: str, value: float) -> Fraction:
    """A probability as the decimal that it prints as."""
    if not 0 < value < 1:
        raise ValueError(f"{name}: found {value!r}, expected a number between 0 and 1")
    return Fraction(repr(float(value)))
