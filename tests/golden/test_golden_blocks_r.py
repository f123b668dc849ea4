"""Figures of R on blocks, ties included, stored with the script that made them."""

from __future__ import annotations

import csv
import math
from fractions import Fraction
from pathlib import Path

from pytest_kvqual.stats.blocks import sign_test
from pytest_kvqual.stats.holm import holm
from pytest_kvqual.study.plan import coverage, largest_order

TABLE = Path(__file__).parent / "statistics" / "blocks-r.csv"
Row = dict[str, str]


def computed(row: Row) -> float:
    """What this project computes for a row."""
    if row["figure"] == "holm":
        return float(holm([Fraction(int(it), 1024) for it in row["values"].split()])[int(row["place"]) - 1])
    total = int(row["total"])
    if row["figure"] == "sign":
        better, ties = int(row["better"]), int(row["ties"])
        effects = [Fraction(1, 2)] * better + [Fraction(1)] * ties + [Fraction(2)] * (total - better - ties)
        return float(sign_test(effects).p)
    order = largest_order(total, Fraction(row["confidence"]))
    if order is None or row["figure"] == "rank":
        return float(order or 0)
    return float(coverage(total, order))


def test_second_opinions_of_r_on_blocks() -> None:
    """Orders are equal; p-values (with ties the largest of any split of them), coverages and Holm agree to 1e-12."""
    lines = TABLE.read_text().splitlines()
    assert lines[0].startswith("# R version ")
    rows = list(csv.DictReader(lines[1:]))
    assert {row["figure"] for row in rows} == {"sign", "rank", "coverage", "holm"}
    assert len(rows) >= 330
    for row in rows:
        assert math.isclose(computed(row), float(row["value"]), rel_tol=1e-12, abs_tol=1e-15), row
