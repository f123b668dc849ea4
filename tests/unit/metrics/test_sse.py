"""Framing of server-sent events, by the standard."""

from __future__ import annotations

import time

import pytest

from pytest_kvqual.metrics.sse import Splitter, data_of, split


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b'id: 1\nevent: x\ndata:{"t":1}\n\n', b'{"t":1}'),
        (b"data: a\n\n", b"a"),
        (b"data:  a\n\n", b" a"),
        (b"data\n\n", b""),
        (b"data: a\ndata: b\r\n\r\n", b"a\nb"),
        (b"data: a\rdata:b\r\r", b"a\nb"),
        (b"\xef\xbb\xbfdata: a\n\n", b"a"),
        (b"datum: a\n\n", None),
        (b"data : a\n\n", None),
        (b": data: a\n\n", None),
        (b":\n\n", None),
    ],
    ids=str,
)
def test_the_data_of_an_event(event: bytes, data: bytes | None) -> None:
    """A field ends at its colon, one space after it is none of the value, comments and other fields carry no data."""
    assert data_of(event) == data


def test_a_byte_order_mark_within_a_stream_is_a_character() -> None:
    """Only the first event of a stream may begin with a mark."""
    assert data_of(b"\xef\xbb\xbfdata: a\n\n", first=False) is None


def test_spaces_at_the_edge_of_a_read_are_kept() -> None:
    """Nothing is stripped: a read that begins with a space inside a text loses none."""
    splitter = Splitter()
    assert splitter.feed(b'data: {"t":"a') == []
    (event,) = splitter.feed(b' b"}\n\n')
    assert data_of(event) == b'{"t":"a b"}'


def test_a_character_split_between_reads_is_whole() -> None:
    """Bytes are not decoded before their event has ended."""
    splitter = Splitter()
    splitter.feed(b"data: \xc3")
    (event,) = splitter.feed(b"\xa9\n\n")
    assert (data_of(event) or b"").decode() == "é"


def test_a_long_line_is_one_event() -> None:
    """No line is too long."""
    line = b"data: " + b"x" * 200_000 + b"\n\n"
    assert split(line) == ([line], b"")


def test_keep_alive_comments_carry_nothing() -> None:
    """A comment is framed and has no data."""
    events, rest = split(b":\n\n: keep-alive\n\n")
    assert [data_of(event) for event in events] == [None, None]
    assert rest == b""


def test_a_carriage_return_at_the_end_of_a_read_waits_for_the_next() -> None:
    """The bytes of an event do not depend on the reads, and ``pending`` says in which one it ended."""
    splitter = Splitter()
    assert splitter.feed(b"data: a\r\n\r") == []
    assert splitter.feed(b"\ndata: b\r\r") == [b"data: a\r\n\r\n"]
    pending = splitter.pending
    (event,) = splitter.feed(b"data: c")
    assert event == b"data: b\r\r"
    assert len(event) <= pending
    assert splitter.rest == b"data: c"
    assert splitter.finish() == []


def test_a_final_carriage_return_ends_the_last_event() -> None:
    """Nothing follows the end of a stream."""
    assert split(b"data: a\r\r") == ([b"data: a\r\r"], b"")


def test_time_is_linear_in_the_bytes() -> None:
    """An event eight times as long, in reads of 64 KiB, takes no more than some eight times as long."""

    def seconds(size: int) -> float:
        data, best = b"data: " + b"x\n" * (size // 2) + b"\n\n", 1e9
        for _ in range(3):
            splitter, begun = Splitter(), time.perf_counter()
            for place in range(0, len(data), 65_536):
                splitter.feed(data[place : place + 65_536])
            best = min(best, time.perf_counter() - begun)
        return best

    assert seconds(2_097_152) < 24 * seconds(262_144)
