"""Writes the golden figures of scipy and statsmodels: ``python tests/golden/make_statistics.py``.

It needs scipy and statsmodels, nothing of this project. ``make_statistics.R`` writes those of R, next to these. The
test that reads them needs neither.
"""

from __future__ import annotations

import csv
import datetime
from pathlib import Path

import numpy as np
import scipy
import statsmodels
from scipy.stats import binomtest, bootstrap
from statsmodels.stats.proportion import proportion_confint

PATH = Path(__file__).parent / "statistics" / "scipy.csv"
PAIRS = ((20, 1319), (22, 1319), (17, 1319), (0, 149), (1, 100), (7, 12), (650, 1319), (5, 1000))
NETS = ((20, 17, 1319), (22, 15, 1319), (1, 1, 100), (30, 60, 200))
RESAMPLES = 100_000


def rows() -> list[list[object]]:
    """Figure, lost, gained, total, confidence, value."""
    found: list[list[object]] = []
    for lost, total in PAIRS:
        for confidence in (0.9, 0.95, 0.99):
            less = binomtest(lost, total, alternative="less").proportion_ci(confidence, method="exact")
            greater = binomtest(lost, total, alternative="greater").proportion_ci(confidence, method="exact")
            low, high = proportion_confint(float(lost), float(total), alpha=2 * (1 - confidence), method="beta")
            found += [
                ["scipy_upper", lost, "", total, confidence, repr(float(less.high))],
                ["scipy_lower", lost, "", total, confidence, repr(float(greater.low))],
                ["statsmodels_upper", lost, "", total, confidence, repr(float(high))],
                ["statsmodels_lower", lost, "", total, confidence, repr(float(low))],
            ]
    for lost, gained, total in NETS:
        changes = np.repeat([-1.0, 1.0, 0.0], [lost, gained, total - lost - gained])
        drawn = bootstrap(
            (changes,),
            np.sum,
            n_resamples=RESAMPLES,
            batch=1000,
            confidence_level=0.95,
            method="percentile",
            rng=np.random.default_rng(20),
        )
        low, high = drawn.confidence_interval
        found += [
            ["bootstrap_lower", lost, gained, total, 0.95, repr(float(low))],
            ["bootstrap_upper", lost, gained, total, 0.95, repr(float(high))],
        ]
    return found


if __name__ == "__main__":
    with PATH.open("w", newline="") as file:
        file.write(
            f"# scipy {scipy.__version__}; statsmodels {statsmodels.__version__}; numpy {np.__version__}; "
            f"{datetime.date.today()}\n"
        )
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["figure", "lost", "gained", "total", "confidence", "value"])
        writer.writerows(rows())
