"""Framing of server-sent events, by the standard."""

from __future__ import annotations

import time

import pytest

from pytest_kvqual.metrics.sse import completions, data_of, split


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


def test_spaces_are_kept() -> None:
    """Nothing is stripped: a text that begins with a space keeps it."""
    (event,), rest = split(b'data: {"t":"a b"}\n\n')
    assert (data_of(event), rest) == (b'{"t":"a b"}', b"")


def test_a_character_is_decoded_whole() -> None:
    """Bytes are not decoded before their event has ended."""
    assert split(b"data: \xc3") == ([], b"data: \xc3")
    (event,), _ = split(b"data: \xc3\xa9\n\n")
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


def test_the_byte_that_completes_an_event() -> None:
    """A CR completes an empty line, whether or not a LF follows."""
    events, rest = split(b"data: a\r\n\r\ndata: b\r\rdata: c\n\ndata: d")
    assert events == [b"data: a\r\n\r\n", b"data: b\r\r", b"data: c\n\n"]
    assert completions(events) == [10, 20, 29]
    assert rest == b"data: d"


def test_a_final_carriage_return_ends_the_last_event() -> None:
    """Nothing follows the end of a stream."""
    assert split(b"data: a\r\r") == ([b"data: a\r\r"], b"")


def test_time_is_linear_in_the_bytes() -> None:
    """An event eight times as long takes no more than some eight times as long."""

    def seconds(size: int) -> float:
        data, best = b"data: " + b"x\n" * (size // 2) + b"\n\n", 1e9
        for _ in range(3):
            begun = time.perf_counter()
            split(data)
            best = min(best, time.perf_counter() - begun)
        return best

    assert seconds(2_097_152) < 24 * seconds(262_144)
