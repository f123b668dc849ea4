"""Timing plans: balance of the orders, what is refused, and that a plan is its bytes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import timed_plan
from timed_plan import LENGTH, cell, closed, comparison, rules, study, traces

from pytest_kvqual._canonical import pretty_bytes
from pytest_kvqual.errors import StudyError
from pytest_kvqual.metrics.formulas import FORMULAS
from pytest_kvqual.study import plan
from pytest_kvqual.study.model import TimingRules

MADE = timed_plan.plan()
DATA = MADE.to_bytes()


@pytest.mark.parametrize("count", range(1, 10))
def test_a_williams_design_is_balanced(count: int) -> None:
    """Each arm stands in each place, and follows each other arm, equally often, in as few orders as there are."""
    orders = plan.williams(count)
    assert len(orders) == (count if count % 2 == 0 or count == 1 else 2 * count)
    places = Counter(place for order in orders for place in enumerate(order))
    assert len(places) == count**2
    assert set(places.values()) == {len(orders) // count}
    followed = Counter(pair for order in orders for pair in pairwise(order))
    assert len(followed) == count * (count - 1)
    assert set(followed.values()) <= {1 if count % 2 == 0 else 2}


def test_a_design_of_no_arm_is_refused() -> None:
    """There is no order of nothing."""
    with pytest.raises(ValueError, match="count: found 0, expected at least 1"):
        plan.williams(0)


def test_trials_are_the_measured_blocks_then_the_pairs() -> None:
    """Every arm is timed once in each measured block, then the null arm alone in consecutive blocks."""
    made = timed_plan.plan(null_pairs=2)
    assert made.measured == (1, 2, 3, 4, 5, 6)
    assert made.null_pairs == ((7, 8), (9, 10))
    every = plan.trials(made)
    assert len(set(every)) == len(every) == 6 * 3 + 4
    assert [block for _, block in every] == sorted(block for _, block in every)
    assert [name for name, block in every if block > 6] == ["native"] * 4
    for block in made.measured:
        assert {name for name, number in every if number == block} == set(made.arms)


def test_orders_are_repeated_over_more_blocks() -> None:
    """Twice as many blocks are the same orders twice, so that the balance stays."""
    twice = [it.order for it in timed_plan.plan(blocks=12).blocks if it.kind == plan.MEASURED]
    assert twice[:6] == twice[6:] == [it.order for it in MADE.blocks[:6]]


def test_what_a_plan_can_show_is_in_it() -> None:
    """Six blocks that agree have p = 1/32, and their range covers the median with 31/32."""
    assert MADE.reachable == plan.Reachable(p=0.03125, holm_alpha=0.05, coverage=0.96875)
    assert timed_plan.plan(blocks=12, comparisons=(comparison(), comparison(control="reference"))).reachable == (
        plan.Reachable(p=2**-11, holm_alpha=0.025, coverage=float(1 - Fraction(2 * (1 + 12 + 66), 2**12)))
    )


def test_what_is_just_reached_is_reached() -> None:
    """A p-value at Holm's level and a coverage at the confidence are enough, as decimals and not as binary numbers."""
    made = timed_plan.plan(alpha=0.03125, confidence=0.96875)
    assert (made.reachable.p, made.reachable.coverage) == (made.alpha, made.confidence)


def test_the_order_of_the_interval_is_the_largest_that_covers_enough() -> None:
    """The next order would cover less than the confidence; where the range does not there is none."""
    assert plan.largest_order(12, Fraction(19, 20)) == 3
    assert plan.coverage(12, 3) >= Fraction(19, 20) > plan.coverage(12, 4)
    assert plan.largest_order(5, Fraction(19, 20)) is None
    with pytest.raises(ValueError, match="order: found 4, expected 1 to 3"):
        plan.coverage(6, 4)


def test_every_figure_has_a_direction_or_is_none_of_the_arm() -> None:
    """Times are better low, throughputs high; lateness and tokens per event say nothing of an arm."""
    assert {name for name in FORMULAS if plan.better_of(name) == "higher"} == {
        "output_throughput", "request_throughput", "goodput_tokens",
    }  # fmt: skip
    none = {name for name in FORMULAS if plan.better_of(name) is None}
    assert none == {name for name in FORMULAS if "lateness" in name} | {"tokens_per_event_max"}
    assert plan.better_of("burst_tpot_p90") == plan.better_of("mean_ttft_send") == "lower"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"blocks": 5}, "blocks: found 5, expected a multiple of 6 (6, 12, 18, …): the orders of 3 arms are balanced over"),
    ({"blocks": 0}, "blocks: found 0, expected a multiple of 6"),
    ({"arms": ("native", "candidate"), "blocks": 3}, "blocks: found 3, expected a multiple of 2 (2, 4, 6, …)"),
    (
        {"arms": ("native", "candidate"), "blocks": 4},
        ("blocks: found 4, whose sign test has p = 0.125 if all agree, expected at most 0.05, Holm's smallest level in "
        "a family of 1 at 0.05 (6 blocks are the fewest that would do)"),
    ),
    (
        {"comparisons": (comparison(), comparison(control="reference"))},
        ("found 6, whose sign test has p = 0.03125 if all agree, expected at most 0.025, Holm's smallest level in a "
        "family of 2 at 0.05 (12 blocks are the fewest that would do)"),
    ),
    (
        {"confidence": 0.97},
        "found 6, whose widest interval of the median covers 96.875 %, expected at least 97 % (12 blocks are",
    ),
    ({"arms": ("native", "candidate", "native")}, "arms: found 'native' twice, expected each arm once"),
    ({"null_arm": "other"}, "null_arm: found 'other', expected one of native, reference, candidate"),
    ({"null_pairs": 0}, "null_pairs: found 0, expected at least 1"),
    ({"comparisons": ()}, "comparisons: found none, expected at least one"),
    ({"comparisons": (comparison(candidate="x"),)}, "comparisons[0].candidate: found 'x', expected an arm of the plan"),
    ({"comparisons": (comparison(control="x"),)}, "comparisons[0].control: found 'x', expected an arm of the plan"),
    ({"comparisons": (comparison(control="candidate"),)}, "comparisons[0]: found 'candidate' against itself"),
    ({"comparisons": (comparison(cell="x"),)}, "comparisons[0].cell: found 'x', expected a cell of the plan: open"),
    (
        {"comparisons": (comparison(metric="ttft_intended_p51"),)},
        "comparisons[0].metric: found 'ttft_intended_p51', expected the name of a figure",
    ),
    ({"comparisons": (comparison(metric="lateness_p99"),)}, "found 'lateness_p99', expected a figure of what an arm"),
    (
        {"comparisons": (comparison(metric="ttft_send_p99"),)},
        ("comparisons[0].metric: found 'ttft_send_p99' in the open cell open, expected 'ttft_intended_p99': from the "
        "send it leaves out what a request waits in the client (coordinated omission)"),
    ),
    (
        {"comparisons": (comparison(metric="burst_ttft_send_p50"),)},
        "found 'burst_ttft_send_p50' in the open cell open, expected 'burst_ttft_intended_p50'",
    ),
    *(
        (
            {"comparisons": (comparison(metric="mean_ttft_send", cell=name),)},
            "comparisons[0].metric: found 'mean_ttft_send', expected a figure over every offered request, such as",
        )
        for name in ("open", "closed")
    ),
    ({"comparisons": (comparison(better="higher"),)}, "found 'higher', expected 'lower' for ttft_intended_p50"),
    ({"comparisons": (comparison(metric="output_throughput"),)}, "found 'lower', expected 'higher' for output_through"),
    ({"comparisons": (comparison(), comparison())}, "comparisons[1]: found ttft_intended_p50 of 'candidate' against"),
    ({"comparisons": (comparison(metric="burst_tpot_p50"),)}, "in the open cell open, expected no burst there"),
    (
        {"cells": (cell(), closed(requests=2)), "comparisons": (comparison(cell="closed"),)},
        "in the closed cell closed of 2 requests, expected more than its concurrency, 2",
    ),
    ({"cells": (cell(), cell())}, "cells: found 'open' twice, expected each cell once"),
]  # fmt: skip


PRIMARY = {
    "open": {"ttft_intended", "tpot", "e2e"},
    "closed": {
        *("ttft_intended", "ttft_send", "tpot", "e2e"),
        *("burst_ttft_intended", "burst_ttft_send", "burst_tpot", "burst_e2e"),
    },
}


@pytest.mark.parametrize("name", PRIMARY)
def test_what_may_be_a_primary_comparison(name: str) -> None:
    """Percentiles over every offered request, in an open loop from the intended arrival; throughputs; nothing else."""
    accepted = set()
    for metric in FORMULAS:
        one = comparison(cell=name, metric=metric, better=plan.better_of(metric) or "lower")
        try:
            timed_plan.plan(comparisons=(one,))
        except StudyError:
            continue
        accepted.add(metric)
    single = {"output_throughput", "request_throughput", "goodput_tokens"}
    assert accepted == single | {f"{it}_{q}" for it in PRIMARY[name] for q in ("p50", "p90", "p99", "max")}


@pytest.mark.parametrize(("changes", "text"), REFUSED)
def test_a_plan_that_cannot_show_anything_is_refused_in_one_line(changes: dict[str, Any], text: str) -> None:
    """The line has the numbers, and what would do."""
    with pytest.raises(StudyError) as error:
        timed_plan.plan(**changes)
    line = error.value.line()
    assert line.startswith("study timed, timing.16: ")
    assert text in line
    assert "\n" not in line


def test_no_cell_and_no_plan_of_the_length_are_refused() -> None:
    """Without a cell nothing is measured, and another length has no plan."""
    declared = rules()
    with pytest.raises(StudyError, match="found no timing plan at length 17, expected one of 16"):
        plan.build(study(declared), 17, traces(declared))
    with pytest.raises(StudyError, match="cells: found none, expected at least one"):
        plan.build(study(rules(cells=())), LENGTH, {})
    with pytest.raises(StudyError, match="found no trace of cell closed, expected one"):
        plan.build(study(declared), LENGTH, {"open": traces(declared)["open"]})


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"rate": 3.0}, "trace of cell open: rate: found 3.0, expected 2.0 as declared"),
        ({"requests": 5}, "trace of cell open: requests: found 5, expected 4 as declared"),
        ({"max_tokens": 5}, "trace of cell open: max_tokens: found [5], expected [4] as declared"),
        (
            {"arrivals": "poisson", "seed": "s"},
            "trace of cell open: arrivals: found poisson, expected constant as declared",
        ),
    ],
)
def test_the_trace_of_another_cell_is_refused(other: dict[str, Any], text: str) -> None:
    """A trace whose header is not the cell's is named with what differs."""
    declared = rules()
    with pytest.raises(StudyError) as error:
        plan.build(study(declared), LENGTH, traces(declared) | traces(rules(cells=(cell(**other),))))
    assert error.value.line() == f"{text} (run `kvqual trace`)"


def test_traces_of_two_panels_and_damaged_ones_are_refused() -> None:
    """All traces of a length are of one panel, and each is whole."""
    declared = rules()
    whole = traces(declared)
    with pytest.raises(StudyError, match="found traces of 2 panels"):
        plan.build(study(declared), LENGTH, whole | {"open": whole["open"].replace(b"a" * 64, b"b" * 64)})
    with pytest.raises(StudyError, match="trace of cell open: found no end of the last line"):
        plan.build(study(declared), LENGTH, whole | {"open": whole["open"][:-1]})


def test_a_plan_is_its_bytes() -> None:
    """What was written is read back as the same plan."""
    declared = rules()
    assert plan.check(DATA, study(declared), LENGTH, traces(declared), origin="plan") == MADE
    assert (MADE.null_arm, MADE.cells[0].trace) == ("native", "traces/open.jsonl")


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda it: it["blocks"][1]["order"].reverse(), 'blocks[1].order[0]: found "native" (a string), expected'),
        (lambda it: it["blocks"].pop(), "blocks: found a list of 7, expected a list of 8"),
        (lambda it: it.update(practical=0.01), "practical: found 0.01 (a number), expected 0.05 (a number)"),
        (lambda it: it.update(warm_up=True), "warm_up: found true (a boolean), expected 1 (an integer)"),
        (lambda it: it.pop("alpha"), "alpha: found no such key, expected one"),
        (lambda it: it.update(more=1), "more: found an unknown key, expected none"),
        (lambda it: it["reachable"].update(p=0.5), "reachable.p: found 0.5"),
        (lambda it: it["comparisons"].append(it["comparisons"][0]), "comparisons: found a list of 2"),
    ],
)
def test_another_plan_is_refused_by_its_first_key(change: Callable[[Any], object], place: str) -> None:
    """The line names the first key that differs from what the study gives."""
    value, declared = json.loads(DATA), rules()
    change(value)
    with pytest.raises(StudyError) as error:
        plan.check(pretty_bytes(value), study(declared), LENGTH, traces(declared), origin="p.json")
    assert str(error.value).startswith(f"p.json: {place}")


@pytest.mark.parametrize("data", [b"", b"[]", b"nonsense", DATA[:-1], DATA.replace(b"  ", b" ")])
def test_other_bytes_are_refused_in_one_line(data: bytes) -> None:
    """No JSON, no table, or the same content otherwise written."""
    declared: TimingRules = rules()
    with pytest.raises(StudyError) as error:
        plan.check(data, study(declared), LENGTH, traces(declared), origin="p.json")
    assert str(error.value).startswith("p.json")
    assert "\n" not in error.value.line()
