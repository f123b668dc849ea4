"""The figures of one load: populations, percentiles, failures, bursts, definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from recorded import MS, answer, failed, recorded, request, token

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.metrics.formulas import FORMULAS
from pytest_kvqual.metrics.recording import read_recording
from pytest_kvqual.metrics.summary import Summary, comparable, percentile, require_comparable, summarise

SECOND = 1000 * MS


def summary(requests: Sequence[dict[str, Any]], **header: Any) -> Summary:
    """The figures of these requests, read from the bytes of a recording."""
    return summarise(read_recording(recorded(requests, **header), origin="open"))


def ok(ttft_ns: int, *, name: str, **changes: Any) -> dict[str, Any]:
    """A request of one token after so long."""
    return request([(ttft_ns, raw) for raw in answer([1])], name=name, **changes)


def value(found: Summary, name: str) -> object:
    """The value of a figure."""
    return found.figures[name].value


def test_waiting_for_a_slot_is_seen() -> None:
    """Both origins stand side by side, and the lateness between them."""
    found = summary(
        [
            ok(SECOND * (place + 1), name=str(place), dispatch_ns=place * SECOND, send_start_ns=place * SECOND)
            for place in range(3)
        ]
    )
    assert [value(found, f"{name}_max") for name in ("ttft_intended", "ttft_send", "lateness")] == [
        3 * SECOND, SECOND, 2 * SECOND,
    ]  # fmt: skip
    assert value(found, "mean_ttft_send") == SECOND
    assert value(found, "ttft_intended_p50") == 2 * SECOND


def test_figures_of_different_origins_are_not_compared() -> None:
    """A comparison asks for one formula and one unit."""
    found = summary([ok(1, name="a")]).figures
    require_comparable(found["ttft_send_p50"], found["ttft_send_p50"])
    assert not comparable(found["ttft_send_p50"], found["ttft_intended_p50"])
    for other in (found["ttft_intended_p50"], replace(found["ttft_send_p50"], unit="s")):
        with pytest.raises(EvidenceError, match=r"^found the figure [^\n]*, expected one definition$"):
            require_comparable(found["ttft_send_p50"], other)


def test_every_figure_has_its_own_formula() -> None:
    """No two definitions read the same, so that formulas tell figures apart."""
    assert len(set(FORMULAS.values())) == len(FORMULAS)
    assert set(summary([]).figures) == set(FORMULAS)


def test_the_burst_of_a_closed_loop_stands_apart() -> None:
    """Eight at once take 2 s, the others 0.2 s: the percentiles are those of the others."""
    requests = [ok(2 * SECOND, name=str(place)) for place in range(8)]
    requests += [ok(200 * MS, name=str(place)) for place in range(8, 40)]
    found = summary(requests, mode="closed", concurrency=8)
    assert value(found, "ttft_intended_p99") == 200 * MS
    assert value(found, "burst_ttft_intended_p50") == 2 * SECOND
    assert (found.figures["ttft_intended_p99"].of, found.figures["burst_ttft_intended_p50"].of) == (32, 8)


def test_a_closed_loop_of_no_more_than_its_first_requests_has_a_burst_alone() -> None:
    """No steady part, no figure."""
    found = summary([ok(1, name="a"), ok(1, name="b")], mode="closed", concurrency=8)
    assert (value(found, "ttft_send_p50"), value(found, "burst_ttft_send_p50")) == (None, 1)


def test_an_outlier_moves_no_median() -> None:
    """A cold first request is in the mean and not in the median, however many follow."""
    for more in (2, 9):
        found = summary([ok(248 * SECOND, name="cold"), *(ok(200 * MS, name=str(it)) for it in range(more))])
        assert value(found, "ttft_send_p50") == 200 * MS
        assert value(found, "mean_ttft_send") == Fraction((248_000 + 200 * more) * MS, more + 1)


def test_a_refused_load_is_not_fast() -> None:
    """Of ten requests five are refused after 1 ms: the median is a slow one, what is above is infinite."""
    requests = [failed("refused", end_ns=MS, name=str(it), status=None) for it in range(5)]
    found = summary([*requests, *(ok(SECOND, name=str(it)) for it in range(5, 10))])
    assert (found.offered, found.completed, dict(found.failed)) == (10, 5, {"refused": 5})
    assert value(found, "ttft_intended_p50") == SECOND
    assert value(found, "ttft_intended_p90") == value(found, "tpot_p50") == math.inf


def test_a_failed_request_is_in_no_throughput() -> None:
    """Its tokens are no goodput, and its end still ends the run."""
    found = summary(
        [ok(200 * MS, name="a"), ok(200 * MS, name="b"),
         request([(SECOND, token(1, 2))], name="c", end_ns=30 * SECOND, failure={"kind": "error-object", "text": ""})]
    )  # fmt: skip
    assert value(found, "goodput_tokens") == 2
    assert value(found, "output_throughput") == value(found, "request_throughput") == Fraction(2, 30)
    assert (found.completed, dict(found.failed)) == (2, {"error-object": 1})
    assert value(found, "tokens_per_event_max") == 2


def test_a_load_of_nothing() -> None:
    """Nothing offered: no percentile, no rate, no token."""
    found = summary([])
    assert (found.offered, found.completed, value(found, "goodput_tokens")) == (0, 0, 0)
    assert value(found, "output_throughput") is value(found, "ttft_send_p50") is None


def test_one_token_is_no_time_per_token() -> None:
    """Completed requests of one token are no part of its population."""
    pair = request([(MS * place, raw) for place, raw in enumerate(answer([1, 2]))], name="b")
    found = summary([ok(1, name="a"), pair]).figures["tpot_p50"]
    assert (found.value, found.of, found.unit) == (MS, 1, "ns")


@pytest.mark.parametrize(
    ("quantile", "rank"), [(Fraction(1, 2), 5), (Fraction(9, 10), 9), (Fraction(99, 100), 10), (Fraction(1), 10)]
)
def test_the_nearest_rank(quantile: Fraction, rank: int) -> None:
    """Of 1 to 10 the percentile is the value of rank ceil(q n): no value that was not measured."""
    assert percentile(list(range(10, 0, -1)), quantile) == rank
    assert percentile([], quantile) is None
