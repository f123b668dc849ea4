"""Holm's correction."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, product

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


def closed(values: Sequence[Fraction]) -> list[Fraction]:
    """The adjusted values of the closed test with Bonferroni's test of each intersection, enumerated."""
    indices = range(len(values))
    subsets = [subset for size in range(1, len(values) + 1) for subset in combinations(indices, size)]
    tested = {subset: min(Fraction(1), len(subset) * min(values[each] for each in subset)) for subset in subsets}
    return [max(p for subset, p in tested.items() if index in subset) for index in indices]


@pytest.mark.parametrize("family", [1, 2, 3, 4])
def test_adjusted_values_are_those_of_the_closed_test(family: int) -> None:
    """Holm's procedure is a shortcut of the closed test; here every subset of the family is tested, on a grid."""
    grid = [Fraction(each) for each in ("0", "1/64", "1/40", "1/20", "3/10", "1")]
    for values in product(grid, repeat=family):
        assert list(holm(values)) == closed(values)
