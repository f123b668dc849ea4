"""Holm's step-down correction of a family of p-values."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def holm(p_values: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """The adjusted p-values, in the order given; rejecting those at most alpha keeps the family's error at alpha.

    With the m values in ascending order p(1) to p(m), the adjusted p(i) is the largest of (m - j + 1) * p(j) over j up
    to i, and at most 1: the order of the values is kept, and ties stay ties. It holds under any dependence of the
    tests. Exact.

    Args:
        p_values: One per hypothesis of the whole family, 0 to 1.

    Raises:
        ValueError: The family is empty, or a value is no Fraction or out of range.

    References:
        S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979),
        pp. 65-70.
    """
    if not p_values:
        raise ValueError("p_values: found none, expected at least one")
    for index, value in enumerate(p_values):
        if not isinstance(value, Fraction) or not 0 <= value <= 1:
            raise ValueError(f"p_values[{index}]: found {value!r}, expected a Fraction of 0 to 1")
    adjusted = [Fraction(0)] * len(p_values)
    largest = Fraction(0)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        largest = max(largest, min(Fraction(1), (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return tuple(adjusted)
