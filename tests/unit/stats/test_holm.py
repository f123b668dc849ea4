"""Holm's correction."""

from __future__ import annotations

from fractions import Fraction

import pytest

from pytest_kvqual.stats.holm import holm


def test_adjusted_values_are_step_down() -> None:
    """The smallest is multiplied by the number of hypotheses, each next by one less, and none falls below another."""
    found = holm([Fraction(1, 100), Fraction(4, 100), Fraction(3, 100), Fraction(5, 1000)])
    assert found == (Fraction(3, 100), Fraction(6, 100), Fraction(6, 100), Fraction(2, 100))
    assert holm([Fraction(1, 32)]) == (Fraction(1, 32),)
    assert holm([Fraction(1, 2), Fraction(3, 4)]) == (Fraction(1), Fraction(1))


@pytest.mark.parametrize("values", [[], [0.5], [Fraction(2)], [Fraction(-1, 2)]])
def test_what_is_no_p_value_is_refused(values: list[Fraction]) -> None:
    """An empty family, a float, and values beyond 0 to 1 are refused."""
    with pytest.raises(ValueError, match="p_values"):
        holm(values)
