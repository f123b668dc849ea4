"""Figures of R, scipy and statsmodels, stored with the scripts that made them."""

from __future__ import annotations

import csv
import math
import shlex
from pathlib import Path

import pytest

from pytest_kvqual import cli
from pytest_kvqual.stats.bounds import most_lost, preservation_lower, preservation_upper
from pytest_kvqual.stats.net import net_interval, net_ways
from pytest_kvqual.stats.power import passing_probability, smallest_total

HERE = Path(__file__).parent
Row = dict[str, str]


def rows(name: str) -> list[Row]:
    """The rows of a stored table, without the line that says which tool made it."""
    lines = (HERE / "statistics" / name).read_text().splitlines()
    assert lines[0].startswith("# ")
    return list(csv.DictReader(lines[1:]))


def computed(row: Row) -> float:
    """What this project computes for a row."""

    def count(key: str) -> int:
        return int(row[key])

    def number(key: str) -> float:
        return float(row[key])

    figure = row["figure"].rsplit("_", 1)[-1]
    kind = row["figure"].removeprefix("scipy_").removeprefix("statsmodels_").replace("bootstrap", "net")
    if kind == "upper":
        return preservation_upper(count("lost"), count("total"), number("confidence"))
    if kind == "lower":
        return preservation_lower(count("lost"), count("total"), number("confidence"))
    if kind == "most":
        found = most_lost(count("total"), number("limit"), number("confidence"))
        return -1 if found is None else found
    if kind == "power":
        return passing_probability(count("total"), number("limit"), number("confidence"), number("rate"))
    if kind == "smallest":
        return smallest_total(number("limit"), number("confidence"), number("rate"), 0.9)
    if kind in ("net_lower", "net_upper"):
        interval = net_interval(count("lost"), count("gained"), count("total"), number("confidence"))
        return interval.lower if figure == "lower" else interval.upper
    assert kind.startswith("net_at_most_")
    ways = net_ways(count("lost"), count("gained"), count("total"))
    return float(sum(number for net, number in ways if net <= int(figure)) / count("total") ** count("total"))


@pytest.mark.parametrize(("name", "least"), [("r.csv", 260), ("scipy.csv", 100)])
def test_second_opinions(name: str, least: int) -> None:
    """Counts and ends are equal, probabilities agree to 1e-10, and scipy's bounds to twice its search's 2e-12."""
    table = rows(name)
    assert len(table) >= least
    for row in table:
        expected = float(row["value"])
        searched = row["figure"] in ("scipy_upper", "scipy_lower")
        assert math.isclose(computed(row), expected, rel_tol=1e-10, abs_tol=4e-12 if searched else 1e-15), row


def documented() -> list[tuple[str, list[str]]]:
    """Each command of the console blocks in docs/statistics.md, with the output that stands below it."""
    found: list[tuple[str, list[str]]] = []
    for block in (HERE.parents[1] / "docs" / "statistics.md").read_text().split("```console\n")[1:]:
        for line in block.partition("```")[0].splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return found


def test_the_documented_commands_print_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Each command shown in docs/statistics.md prints exactly the lines shown below it."""
    shown = documented()
    assert len(shown) >= 4
    for command, expected in shown:
        program, *argv = shlex.split(command)
        assert program == "kvqual"
        cli.main(argv)
        out, err = capsys.readouterr()
        assert (out + err).splitlines() == expected
