"""The mean of paired differences, with a one-sided upper confidence bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedMean:
    """The result of :func:`paired_mean`. It keeps its inputs, so that a reader can redo it.

    ``upper`` is the one-sided upper bound of the mean at ``confidence``; ``quantile`` the Student t quantile used, at
    ``count - 1`` degrees of freedom; ``deviation`` the sample standard deviation (n - 1), ``error`` the standard error
    of the mean. All in the unit of the differences, except ``quantile``.
    """

    differences: tuple[float, ...]
    confidence: float
    mean: float
    deviation: float
    error: float
    quantile: float
    upper: float

    @property
    def count(self) -> int:
        """The number of pairs."""
        return len(self.differences)


def paired_mean(differences: Sequence[float], *, confidence: float) -> PairedMean:
    """The mean of independent paired differences and its one-sided upper Student t bound.

    The upper bound is ``mean + t * s / sqrt(n)``, t being the ``confidence`` quantile of Student's distribution with
    n - 1 degrees of freedom: exact where the differences are normal, and close for the mean of 32 documents that are
    not. Identical differences have s = 0 and the bound is the mean. Mean and s are computed as exact fractions and
    rounded once, so that their order does not matter.

    Args:
        differences: Finite numbers, one per independent unit (a document, never a token), at least 2.
        confidence: Between 0 and 1, both excluded.

    Raises:
        ValueError: Fewer than 2 differences, one that is no finite number, a variance beyond float64, or
            a confidence out of range.

    References:
        Student, "The probable error of a mean", Biometrika 6 (1908), pp. 1-25.
    """
    values = _finite(differences)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: found {confidence!r}, expected a number between 0 and 1")
    if len(values) < 2:
        raise ValueError(f"differences: found {len(values)}, expected at least 2")
    exact = [Fraction(value) for value in values]
    mean = sum(exact, Fraction(0)) / len(exact)
    variance = sum(((value - mean) ** 2 for value in exact), Fraction(0)) / (len(exact) - 1)
    try:
        deviation, error = math.sqrt(variance), math.sqrt(variance / len(exact))
    except OverflowError:
        raise ValueError("differences: found a variance beyond float64, expected a finite one") from None
    quantile = student_quantile(confidence, len(values) - 1)
    return PairedMean(
        differences=values,
        confidence=float(confidence),
        mean=float(mean),
        deviation=deviation,
        error=error,
        quantile=quantile,
        upper=float(mean) if variance == 0 else float(mean) + quantile * error,
    )


def student_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution at ``probability`` (0 to 1, both excluded) for ``degrees`` >= 1."""
    # scipy costs a second of import time, and only a judge of an NLL capture needs it.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def _finite(values: Sequence[float]) -> tuple[float, ...]:
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"differences[{index}]: found {value!r}, expected a finite number")
    return tuple(float(value) for value in values)
