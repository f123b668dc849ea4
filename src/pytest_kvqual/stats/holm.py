"""Holm's correction for a family of tests.

Source: Holm 1979, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6, pp.
65-70: the smallest of m p-values is held against alpha / m, the next against alpha / (m - 1), and so on; the first that
is not rejected ends the procedure.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def holm(values: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """The adjusted p-values, in the order of ``values``: a test is rejected at alpha exactly when its own is <= alpha.

    Raises:
        ValueError: A value is no probability.
    """
    for value in values:
        if not 0 <= value <= 1:
            raise ValueError(f"found the p-value {value}, expected one between 0 and 1")
    order = sorted(range(len(values)), key=lambda index: values[index])
    adjusted, least = [Fraction(0)] * len(values), Fraction(0)
    for place, index in enumerate(order):
        least = max(least, min(Fraction(1), (len(values) - place) * values[index]))
        adjusted[index] = least
    return tuple(adjusted)
