"""The interval of a net change of right answers: the paired bootstrap, enumerated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_kvqual.stats._exact import check_counts, share_of


@dataclass(frozen=True, kw_only=True, slots=True)
class NetInterval:
    """The result of :func:`net_interval`. It keeps its inputs, so that a reader can redo it.

    ``lower`` and ``upper`` are net changes in questions of ``total``; divided by ``total`` they are changes of
    accuracy.
    """

    lost: int
    gained: int
    total: int
    confidence: float
    lower: int
    upper: int

    @property
    def net(self) -> int:
        """The net change observed, in questions: gained less lost."""
        return self.gained - self.lost


def net_interval(lost: int, gained: int, total: int, confidence: float) -> NetInterval:
    """The two-sided percentile interval of the paired bootstrap of a net change, without resampling.

    A bootstrap draws ``total`` questions with replacement from those asked, and takes the gains less the losses among
    them, net*. Its distribution is known: a power of a trinomial (:func:`net_ways`). With level = 1 - ``confidence``,

        lower = the smallest k with P(net* <= k) >= level / 2
        upper = the smallest k with P(net* <= k) >= 1 - level / 2

    which is what the interval of a seeded bootstrap tends to as its resamples grow. The comparisons are of integers.
    Exchanging lost and gained mirrors the interval, except where a probability equals ``level / 2`` or
    ``1 - level / 2`` exactly: there both rules take the smaller k.

    The interval is reported and decides nothing: a gate bounds losses, and gains cancel none (see
    :func:`pytest_kvqual.stats.bounds.preservation_upper`).

    Args:
        lost: Questions right in the control and not in the candidate, 0 to ``total``.
        gained: Questions right in the candidate and not in the control; ``lost + gained`` is at most ``total``.
        total: All paired questions, at least 1.
        confidence: Of the two-sided interval; between 0 and 1, both excluded, taken as the decimal that it prints as.

    Raises:
        ValueError: A count or the confidence is out of range, or of another type.

    References:
        B. Efron, "Nonparametric standard errors and confidence intervals", Canadian Journal of Statistics 9 (1981),
        pp. 139-158 (the percentile method).

    Examples:
        >>> found = net_interval(20, 17, 1319, 0.95)
        >>> found.net, found.lower, found.upper
        (-3, -15, 9)
    """
    half = (1 - share_of("confidence", confidence)) / 2
    steps = net_ways(lost, gained, total)
    whole, seen, net = total**total, 0, 0
    ends: list[int] = []
    for share in (half, 1 - half):
        while seen * share.denominator < share.numerator * whole:
            net, ways = next(steps)
            seen += ways
        ends.append(net)
    return NetInterval(
        lost=lost, gained=gained, total=total, confidence=float(confidence), lower=ends[0], upper=ends[1]
    )


def net_ways(lost: int, gained: int, total: int) -> Iterator[tuple[int, int]]:
    """The bootstrap distribution of a net change: each net*, ascending, with the number of resamples that have it.

    Of the ``total**total`` equally likely resamples, those with a net change of k are counted by the coefficient of
    x**k in ``(lost / x + same + gained * x)**total``, ``same`` being the rest of the questions. The coefficients follow
    from each other by the recurrence that P(x)**n obeys, P * (P**n)' = n * P' * P**n, in exact integer divisions.
    Every value between the least and the largest possible is given, also one that has 0 ways (where no question is the
    same, every other one).

    Raises:
        ValueError: As :func:`net_interval`.
    """
    check_counts(total, lost=lost, gained=gained)
    same = total - lost - gained
    if same < 0:
        raise ValueError(f"lost + gained: found {lost + gained}, expected at most {total}")
    return _coefficients(lost, same, gained, total)


def _coefficients(lost: int, same: int, gained: int, total: int) -> Iterator[tuple[int, int]]:
    # The lowest term of the trinomial must not be 0: the recurrence divides by it.
    least, (low, middle, high) = next(
        (least, terms)
        for least, terms in (
            (-total, (lost, same, gained)),
            (0, (same, gained, 0)),
            (total, (gained, 0, 0)),
        )
        if terms[0]
    )
    before, ways = 0, low**total
    largest = total if gained else 0 if same else -total
    for step in range(largest - least + 1):
        yield least + step, ways
        after = (total - step) * middle * ways + (2 * total - step + 1) * high * before
        before, ways = ways, after // (low * (step + 1))
