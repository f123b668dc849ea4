"""Figures of scipy and statsmodels on blocks, stored with the script that made them."""

from __future__ import annotations

import csv
import math
from fractions import Fraction
from pathlib import Path

from pytest_kvqual.stats.blocks import median_interval, sign_test
from pytest_kvqual.stats.holm import holm
from pytest_kvqual.study import plan

TABLE = Path(__file__).parent / "statistics" / "blocks.csv"


def computed(figure: str, arguments: list[str]) -> list[Fraction]:
    """What this project computes for a row."""
    if figure == "holm":
        return list(holm([Fraction(it) for it in arguments]))
    first, count = map(int, arguments)
    if figure == "sign_p":
        return [sign_test([Fraction(2)] * first + [Fraction(1, 2)] * (count - first)).p]
    exact = plan.coverage(count, first)
    if exact > 0:
        found = median_interval([Fraction(it) for it in range(1, count + 1)], confidence=exact)
        assert (found.order, found.coverage, found.lower, found.upper) == (
            first,
            exact,
            Fraction(first),
            Fraction(count + 1 - first),
        )
    return [exact]


def test_second_opinions_on_blocks() -> None:
    """p-values, coverages and adjusted p-values agree to 1e-12 with scipy and statsmodels."""
    lines = TABLE.read_text().splitlines()
    assert lines[0].startswith("# scipy ")
    rows = list(csv.DictReader(lines[1:]))
    assert {row["figure"] for row in rows} == {"sign_p", "coverage", "holm"}
    assert len(rows) >= 300
    for row in rows:
        found = computed(row["figure"], row["arguments"].split())
        expected = [float(it) for it in row["value"].split()]
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-15), row
