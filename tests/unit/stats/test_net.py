"""The net interval: the bootstrap's distribution, enumerated."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from fractions import Fraction

import pytest

from pytest_kvqual.stats.net import net_interval, net_ways


def resampled(lost: int, gained: int, total: int) -> Counter[int]:
    """The net change of each of the total**total resamples, drawn one by one."""
    changes = [-1] * lost + [1] * gained + [0] * (total - lost - gained)
    return Counter(sum(drawn) for drawn in itertools.product(changes, repeat=total))


def multinomial(lost: int, gained: int, total: int) -> Counter[int]:
    """The same from the multinomial coefficients."""
    found: Counter[int] = Counter()
    same = total - lost - gained
    for losses in range(total + 1):
        for gains in range(total + 1 - losses):
            ways = math.comb(total, losses) * math.comb(total - losses, gains)
            found[gains - losses] += ways * lost**losses * gained**gains * same ** (total - losses - gains)
    return found


def percentile(ways: Counter[int], share: Fraction) -> int:
    """The smallest net change that at least ``share`` of the resamples do not exceed."""
    seen, whole = 0, sum(ways.values())
    for net in sorted(ways):
        seen += ways[net]
        if ways[net] and Fraction(seen, whole) >= share:
            return net
    raise AssertionError("the shares do not add up")


def designs(largest: int) -> list[tuple[int, int, int]]:
    """Each (lost, gained, total) up to ``largest`` questions."""
    return [
        (lost, gained, total)
        for total in range(1, largest + 1)
        for lost in range(total + 1)
        for gained in range(total + 1 - lost)
    ]


@pytest.mark.parametrize(("lost", "gained", "total"), designs(5))
def test_every_resample_of_up_to_five_questions(lost: int, gained: int, total: int) -> None:
    """The distribution counts each of the n^n resamples, and the interval is its percentiles."""
    expected = resampled(lost, gained, total)
    found = dict(net_ways(lost, gained, total))
    assert {net: ways for net, ways in found.items() if ways} == dict(expected)
    for confidence in (0.5, 0.8, 0.95, 0.99):
        half = (1 - Fraction(repr(confidence))) / 2
        interval = net_interval(lost, gained, total, confidence)
        assert (interval.lower, interval.upper) == (percentile(expected, half), percentile(expected, 1 - half))


@pytest.mark.parametrize(("lost", "gained", "total"), [(3, 2, 24), (0, 7, 30), (7, 0, 30), (12, 12, 24), (1, 22, 23)])
def test_multinomial_coefficients(lost: int, gained: int, total: int) -> None:
    """For more questions than can be resampled one by one, the multinomial coefficients say the same."""
    expected = multinomial(lost, gained, total)
    found = dict(net_ways(lost, gained, total))
    assert {net: ways for net, ways in found.items() if ways} == {net: ways for net, ways in expected.items() if ways}
    assert sum(found.values()) == total**total


@pytest.mark.parametrize(
    ("lost", "gained", "net", "points", "interval"),
    [
        # Published with the Qwen3-8B AWQ HTTP study, in percentage points. The page's interval of the first is
        # [-1.137, +0.758]: its upper end is 10 of 1,319 from a seeded resampling, where the 0.975 quantile is 9.
        (20, 17, -3, "-0.227", ["-1.137", "+0.682"]),
        (22, 15, -7, "-0.531", ["-1.440", "+0.379"]),
    ],
)
def test_published_intervals(lost: int, gained: int, net: int, points: str, interval: list[str]) -> None:
    """The published net changes and their intervals, but for one end that lies one question further."""
    found = net_interval(lost, gained, 1319, 0.95)
    assert found.net == net
    assert f"{100 * found.net / 1319:+.3f}" == points
    assert [f"{100 * end / 1319:+.3f}" for end in (found.lower, found.upper)] == interval


def test_the_end_that_the_page_has_one_question_higher() -> None:
    """Of the bootstrap of 20 lost and 17 gained, 98.04 % lie at or below 9 and 97.11 % at or below 8."""
    ways = dict(net_ways(20, 17, 1319))

    def share(last: int) -> Fraction:
        return Fraction(sum(ways[net] for net in ways if net <= last), 1319**1319)

    assert float(share(9)) == 0.980369895537535
    assert share(8) < Fraction(39, 40) < share(9)


@pytest.mark.parametrize(
    ("lost", "gained", "total", "ends"),
    [
        (0, 0, 1319, (0, 0)),
        (1319, 0, 1319, (-1319, -1319)),
        (0, 1319, 1319, (1319, 1319)),
        (0, 0, 1, (0, 0)),
        (1, 0, 1, (-1, -1)),
        (0, 17, 1319, (9, 25)),
        (20, 0, 1319, (-29, -12)),
    ],
)
def test_nothing_lost_or_nothing_gained(lost: int, gained: int, total: int, ends: tuple[int, int]) -> None:
    """Without losses, gains or both the distribution is a binomial or a single value."""
    found = net_interval(lost, gained, total, 0.95)
    assert (found.lower, found.upper) == ends


def test_a_percentile_that_is_met_exactly() -> None:
    """Where a probability equals the level the smaller net change is the end, on both sides."""
    # Net changes -2, -1, 0 with probabilities 1/4, 1/2, 1/4, against shares of 1/4 and 3/4.
    found = net_interval(1, 0, 2, 0.5)
    assert (found.lower, found.upper) == (-2, -1)
    found = net_interval(0, 1, 2, 0.5)
    assert (found.lower, found.upper) == (0, 1)


def test_all_questions_of_gsm8k_in_less_than_a_second() -> None:
    """1,319 questions with every question changed take no minutes; a second is far above what it takes."""
    start = time.process_time()
    net_interval(700, 619, 1319, 0.95)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("lost", "gained", "total", "confidence"),
    [
        (-1, 0, 10, 0.95),
        (0, -1, 10, 0.95),
        (6, 5, 10, 0.95),
        (0, 0, 0, 0.95),
        (True, 0, 10, 0.95),
        (0, 1.0, 10, 0.95),
        (0, 0, 10, 0.0),
        (0, 0, 10, 1),
        (0, 0, 10, math.nan),
        (0, 0, 10, "0.95"),
    ],
)
def test_invalid_nets_are_refused(lost: int, gained: int, total: int, confidence: float) -> None:
    """Counts out of range or of another type, and a confidence outside (0, 1), raise with what was found."""
    with pytest.raises(ValueError, match=r"found .*, expected"):
        net_interval(lost, gained, total, confidence)
