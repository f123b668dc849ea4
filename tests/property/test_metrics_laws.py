"""Laws of framing and of percentiles."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st
from recorded import answer, failed, recorded, request

from pytest_kvqual.metrics.recording import read_recording
from pytest_kvqual.metrics.sse import Splitter, data_of, split
from pytest_kvqual.metrics.summary import percentile, summarise

STREAMS = st.lists(
    st.sampled_from(
        [b"\r", b"\n", b"\r\n", b"data: a", b"data:", b":", b" ", b"\xef\xbb\xbf", b"\xc3\xa9", b"event: x"]
    ),
    max_size=40,
).map(b"".join)
QUANTILES = st.fractions(min_value=Fraction(1, 1000), max_value=1)
VALUES = st.lists(st.integers(-5, 5) | st.fractions(max_denominator=7) | st.just(math.inf), min_size=1, max_size=30)


@given(STREAMS, st.lists(st.integers(0, 80), max_size=12))
def test_events_do_not_depend_on_the_reads(stream: bytes, cuts: list[int]) -> None:
    """A stream cut anywhere has the same events, which with the rest are its bytes."""
    whole, rest = split(stream)
    assert b"".join(whole) + rest == stream
    splitter, found = Splitter(), []
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    fed, ends = 0, []
    for begin, end in itertools.pairwise(places):
        pending = splitter.pending
        for event in splitter.feed(stream[begin:end]):
            # The read that has an event's last byte can be told.
            ends.append(begin if len(event) <= pending else end)
            pending = 0
            fed += len(event)
            found.append(event)
            assert begin < fed <= end or (ends[-1] == begin and fed == begin)
    found += splitter.finish()
    assert (found, splitter.rest) == (whole, rest)


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
