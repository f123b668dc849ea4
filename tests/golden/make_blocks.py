"""Writes the golden figures of blocks, of scipy and statsmodels: ``python tests/golden/make_blocks.py``.

It needs scipy and statsmodels, nothing of this project. The test that reads them needs neither.
"""

from __future__ import annotations

import csv
import datetime
from pathlib import Path

import numpy as np
import scipy
import statsmodels
from scipy.stats import binom, binomtest
from statsmodels.stats.multitest import multipletests

PATH = Path(__file__).parent / "statistics" / "blocks.csv"
COUNTS = (1, 2, 3, 5, 6, 7, 8, 10, 12, 14, 20, 24, 30, 50)
FAMILIES = (
    (0.03125,), (0.03125, 0.03125), (0.01, 0.04, 0.03, 0.005), (1.0, 0.5, 0.25), (0.2, 0.001, 0.001, 0.9, 0.015),
    (0.0, 0.0, 1.0), (0.015625, 0.0078125, 0.03125, 0.015625, 0.6875, 0.21875),
)  # fmt: skip


def rows() -> list[list[object]]:
    """Figure, arguments, value; several numbers stand in one field, separated by spaces."""
    found: list[list[object]] = []
    for count in COUNTS:
        for above in range(count + 1):
            found.append(["sign_p", f"{above} {count}", repr(float(binomtest(above, count, 0.5).pvalue))])
        for order in range(1, (count + 1) // 2 + 1):
            inside = binom.cdf(count - order, count, 0.5) - binom.cdf(order - 1, count, 0.5)
            found.append(["coverage", f"{order} {count}", repr(float(inside))])
    for family in FAMILIES:
        adjusted = multipletests(family, method="holm")[1]
        found.append(["holm", " ".join(map(repr, family)), " ".join(repr(float(it)) for it in adjusted)])
    return found


if __name__ == "__main__":
    with PATH.open("w", newline="") as file:
        file.write(
            f"# scipy {scipy.__version__}; statsmodels {statsmodels.__version__}; numpy {np.__version__}; "
            f"{datetime.date.today()}\n"
        )
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["figure", "arguments", "value"])
        writer.writerows(rows())
