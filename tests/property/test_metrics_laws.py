"""Laws of framing and of percentiles."""

from __future__ import annotations

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st
from recorded import answer, failed, recorded, request

from pytest_kvqual.metrics.recording import read_recording
from pytest_kvqual.metrics.sse import completions, data_of, split
from pytest_kvqual.metrics.summary import percentile, summarise

STREAMS = st.lists(
    st.sampled_from(
        [b"\r", b"\n", b"\r\n", b"data: a", b"data:", b":", b" ", b"\xef\xbb\xbf", b"\xc3\xa9", b"event: x"]
    ),
    max_size=40,
).map(b"".join)
QUANTILES = st.fractions(min_value=Fraction(1, 1000), max_value=1)
VALUES = st.lists(st.integers(-5, 5) | st.fractions(max_denominator=7) | st.just(math.inf), min_size=1, max_size=30)


@given(STREAMS)
def test_events_are_the_stream(stream: bytes) -> None:
    """Events and rest are the stream's bytes; cut where an event is complete, the stream has it, and not before."""
    whole, rest = split(stream)
    assert b"".join(whole) + rest == stream
    for number, needed in enumerate(completions(whole), start=1):
        assert len(split(stream[:needed])[0]) == number
        assert len(split(stream[: needed - 1])[0]) == number - 1


@given(STREAMS)
def test_data_is_what_a_line_reader_finds(stream: bytes) -> None:
    """The data of each event is what the standard's line by line algorithm gives."""
    events, _ = split(stream)
    for event in events:
        lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").removeprefix(b"\xef\xbb\xbf").split(b"\n")
        values = [line.partition(b":")[2].removeprefix(b" ") for line in lines if line.partition(b":")[0] == b"data"]
        assert data_of(event) == (b"\n".join(values) if values else None)


@given(VALUES, QUANTILES)
def test_a_percentile_is_the_smallest_value_with_enough_at_or_below(
    values: list[int | Fraction | float], quantile: Fraction
) -> None:
    """The nearest rank, by counting."""
    expected = min(it for it in values if sum(other <= it for other in values) >= quantile * len(values))
    assert percentile(values, quantile) == expected


@given(st.lists(st.none() | st.tuples(st.integers(1, 9), st.integers(1, 4)), max_size=8), st.randoms())
def test_the_order_of_an_open_load_changes_no_figure(shapes: list[tuple[int, int] | None], random: object) -> None:
    """Requests are a population: their order in the file decides nothing."""
    requests = [
        failed("timeout", end_ns=50, name=str(place), status=None)
        if shape is None
        else request([(shape[0] * step, raw) for step, raw in enumerate(answer([1] * shape[1]), 1)], name=str(place))
        for place, shape in enumerate(shapes)
    ]
    before = summarise(read_recording(recorded(requests), origin="r"))
    random.shuffle(requests)  # type: ignore[attr-defined]
    assert summarise(read_recording(recorded(requests), origin="r")) == before
