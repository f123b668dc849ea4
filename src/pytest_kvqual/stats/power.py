"""The power of a design: with what probability a number of paired questions passes the preservation bound.

Before a study is frozen its number of questions is chosen; afterwards it is too late. Every figure here is exact: the
decisions are comparisons of integers, and a probability is rounded once, to the nearest float.
"""

from __future__ import annotations

from fractions import Fraction

from pytest_kvqual.stats._exact import at_most, share_of, tail_count
from pytest_kvqual.stats.bounds import below, most_lost

LARGEST = 1_000_000
"""The largest total that is searched for one that passes."""

_WHOLE = 1 << 53
_SCALE = 1 << 256


def passing_probability(total: int, limit: float, confidence: float, loss_rate: float | Fraction) -> float:
    """The probability that ``total`` questions pass: P(X <= most_lost) for binomial X of ``loss_rate``.

    Args:
        total: All paired questions, at least 1.
        limit: The loss probability's upper bound must be below it; between 0 and 1, both excluded.
        confidence: Of the one-sided bound; between 0 and 1, both excluded.
        loss_rate: The true probability that a question is lost, 0 to 1. Like the others it is taken as the decimal
            that it prints as; a fraction as itself.

    Returns:
        The exact probability, rounded once; 0 where not even 0 losses pass.

    Raises:
        ValueError: An argument is out of range, or of another type.

    Examples:
        >>> round(passing_probability(1319, 0.02, 0.95, 0.01), 4)
        0.8808
    """
    rate = _rate(loss_rate)
    most = most_lost(total, limit, confidence)
    if most is None:
        return 0.0
    passing, whole = tail_count(most, total, rate.numerator, rate.denominator), rate.denominator**total
    # A quotient of integers is rounded once, to the nearest float.
    return float(passing / whole)


def smallest_possible(limit: float, confidence: float) -> int:
    """The smallest total that can pass at all: with nothing lost its upper bound is below ``limit``.

    Every larger total can pass too.

    Raises:
        ValueError: An argument is out of range, or the total would be above 1,000,000.

    Examples:
        >>> smallest_possible(0.02, 0.95), smallest_possible(0.05, 0.95)
        (149, 59)
    """
    level = 1 - share_of("confidence", confidence)
    tail = _Tail(Fraction(below(limit), _WHOLE))
    while not tail.at_most(level):
        if tail.total == LARGEST:
            raise ValueError(f"limit: found {limit!r}, expected one that {LARGEST} questions can show")
        tail.ask()
    return tail.total


def smallest_total(limit: float, confidence: float, loss_rate: float | Fraction, wanted: float) -> int:
    """The smallest total such that it, and every larger one, passes with a probability of at least ``wanted``.

    The probability is a saw-tooth in the total: it falls with each question while the count of losses that passes
    stays the same, and jumps where that count grows by one. Smaller totals may pass with ``wanted`` on the crest of a
    tooth (:func:`passing_probability` says so of any one); but questions that turn out unusable would take such a study
    back into the trough, and one question more would not help it. From the total returned on there is no such trough.

    How the infinitely many larger totals are covered: beyond a total given by Chernoff's bounds every one passes with
    ``wanted``; up to there each tooth is checked at its lowest point, its last total.

    Args:
        limit: Between 0 and 1, both excluded.
        confidence: Of the one-sided bound; between 0 and 1, both excluded.
        loss_rate: The true probability that a question is lost: at least 0, below the limit. At or above it the
            probability never exceeds ``1 - confidence``.
        wanted: The probability to pass, between 0 and 1, both excluded.

    Raises:
        ValueError: An argument is out of range; or the loss rate is so close to the limit that the total beyond which
            Chernoff's bounds hold is above 1,000,000.

    References:
        M. Mitzenmacher and E. Upfal, "Probability and Computing", 2nd ed. (2017), theorems 4.4 and 4.5 (Chernoff's
        bounds; the upper one with ln(1 + d) >= 2d / (2 + d)).
    """
    level, share = 1 - share_of("confidence", confidence), share_of("wanted", wanted)
    edge, rate = Fraction(below(limit), _WHOLE), _rate(loss_rate)
    if not rate < edge:
        raise ValueError(f"loss_rate: found {_shown(rate)}, expected a number below the limit {limit!r}")
    last = _certain(edge, rate, level, 1 - share)
    if last > LARGEST:
        raise ValueError(
            f"loss_rate: found {_shown(rate)}, expected one further below the limit {limit!r}: the search would pass "
            f"{LARGEST} questions"
        )
    # `bound` decides which count passes; `passes` is the probability to lose no more than the count before it.
    bound, passes = _Tail(edge), _Tail(rate)
    while not bound.at_most(level):
        bound.ask()
    found = bound.total
    while bound.total <= last:
        # Here begins the tooth of the count `bound.lost`: the first total at which that many losses pass.
        bound.lose()
        while not bound.at_most(level):
            bound.ask()
        while passes.total < bound.total - 1:
            passes.ask()
        if not passes.at_least(share):
            found = bound.total
        passes.lose()
    return found


def _certain(edge: Fraction, rate: Fraction, level: Fraction, miss: Fraction) -> int:
    """A total from which on each one passes with a probability of at least 1 - miss.

    With t halfway between rate and edge, P(Bin(n, edge) <= tn) <= exp(-n (edge - t)^2 / (2 edge)): once that is at most
    the level, tn losses pass. P(Bin(n, rate) >= tn) <= exp(-n (t - rate)^2 / (t + rate)): once that is at most `miss`,
    no more are lost often enough. Both fall with n.
    """
    half = (edge - rate) / 2
    needed = max(
        _log(level) * 2 * edge / half**2,
        _log(miss) * (2 * rate + half) / half**2,
    )
    return int(needed) + 1


def _log(share: Fraction) -> Fraction:
    """A number at least ln(1 / share): 0.7 > ln 2 for each doubling."""
    return Fraction(7 * (share.denominator // share.numerator).bit_length(), 10)


def _rate(loss_rate: float | Fraction) -> Fraction:
    if not isinstance(loss_rate, bool) and isinstance(loss_rate, int | float | Fraction) and loss_rate in (0, 1):
        return Fraction(loss_rate)
    try:
        return share_of("loss_rate", loss_rate)
    except ValueError:
        raise ValueError(f"loss_rate: found {loss_rate!r}, expected a number from 0 to 1") from None


def _shown(rate: Fraction) -> str:
    return f"{float(rate):g}"


class _Tail:
    """P(X <= lost) of ``total`` draws between two integers of 2**-256, one draw or one loss more at a time.

    Each step rounds the lower integer down and the upper one up, so that the probability stays between them. A
    comparison that they cannot decide is made with the exact integers. It starts at no draw and no loss.
    """

    def __init__(self, rate: Fraction) -> None:
        self.total = 0
        self.lost = 0
        self._rate = rate
        # [lower, upper] of P(X <= lost) and of P(X = lost).
        self._tail = [_SCALE, _SCALE]
        self._term = [_SCALE, _SCALE]

    def ask(self) -> None:
        """One question more."""
        # Of those with `lost` losses, a share `rate` loses this one too.
        numerator, whole = self._rate.numerator, self._rate.denominator
        low, high = self._term
        self._tail[0] -= -(-high * numerator // whole)
        self._tail[1] -= low * numerator // whole
        self.total += 1
        self._grow(self.total * (whole - numerator), (self.total - self.lost) * whole)

    def lose(self) -> None:
        """One loss more; there must be a question left that can be lost."""
        numerator, whole = self._rate.numerator, self._rate.denominator
        self._grow((self.total - self.lost) * numerator, (self.lost + 1) * (whole - numerator))
        self.lost += 1
        self._tail[0] += self._term[0]
        self._tail[1] += self._term[1]

    def at_most(self, share: Fraction) -> bool:
        """Whether P(X <= lost) <= share."""
        if self._tail[1] * share.denominator <= share.numerator * _SCALE:
            return True
        if self._tail[0] * share.denominator > share.numerator * _SCALE:
            return False
        return at_most(self._count(), self._rate.denominator**self.total, share)

    def at_least(self, share: Fraction) -> bool:
        """Whether P(X <= lost) >= share."""
        if self._tail[0] * share.denominator >= share.numerator * _SCALE:
            return True
        if self._tail[1] * share.denominator < share.numerator * _SCALE:
            return False
        whole: int = self._rate.denominator**self.total
        return self._count() * share.denominator >= share.numerator * whole

    def _grow(self, factor: int, divisor: int) -> None:
        low, high = self._term
        self._term = [low * factor // divisor, -(-high * factor // divisor)]

    def _count(self) -> int:
        return tail_count(min(self.lost, self.total), self.total, self._rate.numerator, self._rate.denominator)
