"""The response reader: the end of a response by its framing, however it is split."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.capture._response import HEAD_LIMIT, MalformedError, ResponseReader

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

BODIES = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=40),
        st.sampled_from(
            [b"0\r\n\r\n", b"\r\n0\r\n\r\n", b"data: [DONE]\n\n", b"HTTP/1.1 200 OK\r\n\r\n", b"\r\n", b"5\r\n"]
        ),
    ),
    max_size=6,
)


def chunked(parts: list[bytes], *, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    return b"".join(b"%X%s\r\n%s\r\n" % (len(part), extension, part) for part in parts) + b"0\r\n" + trailer + b"\r\n"


def read(data: bytes, cuts: list[int] | None = None) -> tuple[ResponseReader, bytes, int]:
    """The reader, the body and how many bytes had been fed when it said that the response had ended (-1: never)."""
    pieces: list[bytes] = []
    reader = ResponseReader(pieces)
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts or [])})
    for start, stop in itertools.pairwise(places):
        if reader.feed(data[start:stop]):
            return reader, b"".join(pieces), stop
    return reader, b"".join(pieces), -1


@given(
    BODIES, st.lists(st.integers(0, 2_000), max_size=12), st.sampled_from([b"", b";a=b", b' ; q="0"']), st.booleans()
)
def test_chunks_are_counted_wherever_they_are_split(
    parts: list[bytes], cuts: list[int], extension: bytes, with_trailer: bool
) -> None:
    """A chunked body comes out whole and ends with its last byte, whatever it contains and however it is split."""
    data = CHUNKED + chunked(parts, extension=extension, trailer=b"X-A: 1\r\nX-B: 2\r\n" if with_trailer else b"")
    reader, body, fed = read(data, cuts)
    assert (body, fed) == (b"".join(parts), len(data))
    assert reader.ended
    assert reader.keep_alive
    assert reader.excess == 0


@given(BODIES)
def test_chunks_byte_by_byte(parts: list[bytes]) -> None:
    """One byte per read gives the same body and end as one read."""
    data = CHUNKED + chunked(parts)
    _, body, fed = read(data, list(range(len(data))))
    assert (body, fed) == (b"".join(parts), len(data))


@given(st.binary(max_size=60), st.lists(st.integers(0, 200), max_size=6))
def test_length_is_counted(body: bytes, cuts: list[int]) -> None:
    """A body with Content-Length ends at its length, wherever it is split."""
    data = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    _, found, fed = read(data, cuts)
    assert (found, fed) == (body, len(data))


@given(BODIES, st.integers(1, 60))
def test_what_is_cut_off_never_ends(parts: list[bytes], missing: int) -> None:
    """A chunked response without its last bytes has not ended, at end of file either."""
    data = CHUNKED + chunked(parts)
    reader, _, fed = read(data[: max(len(CHUNKED), len(data) - missing)])
    assert fed == -1
    assert not reader.eof()


@given(st.binary(max_size=200), st.lists(st.integers(0, 300), max_size=5), st.booleans())
def test_any_bytes_give_an_answer_or_a_typed_error(data: bytes, cuts: list[int], after_head: bool) -> None:
    """Whatever a peer sends, the reader returns or raises MalformedError."""
    with contextlib.suppress(MalformedError):
        reader, _, fed = read((CHUNKED if after_head else b"") + data, cuts)
        assert reader.ended is (fed >= 0)


def test_end_of_file_ends_a_body_without_framing() -> None:
    """Without length and chunks the body ends when the peer closes, and the connection is not used again."""
    reader, body, fed = read(b"HTTP/1.1 200 OK\r\n\r\nabc")
    assert (body, fed, reader.ended) == (b"abc", -1, False)
    assert reader.eof()
    assert not reader.keep_alive


def test_interim_responses_are_passed_over() -> None:
    """100 and 103 are not the response."""
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + CHUNKED + chunked([b"a"])
    reader, body, _ = read(data, list(range(len(data))))
    assert (reader.status, body) == (200, b"a")
    assert reader.headers == (("Transfer-Encoding", "chunked"),)


@pytest.mark.parametrize("status", [204, 304])
def test_no_body_follows(status: int) -> None:
    """204 and 304 end with their header."""
    assert read(b"HTTP/1.1 %d X\r\nContent-Length: 5\r\n\r\n" % status)[0].ended


def test_no_body_follows_a_head_request() -> None:
    """The answer to HEAD ends with its header, whatever length that names."""
    assert ResponseReader(bodiless=True).feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")


def test_bytes_after_the_end_spoil_the_connection() -> None:
    """What follows a response belongs to none: it is counted, and nothing else is sent on that connection."""
    reader, body, _ = read(CHUNKED + chunked([b"a"]) + b"HTTP/1.1 200 OK\r\n")
    assert (body, reader.excess, reader.keep_alive) == (b"a", 17, False)


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: foo, Close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: Keep-Alive\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", False),
        (b"HTTP/1.1 200\r\nContent-Length: 0, 0\r\n\r\n", True),
    ],
)
def test_whether_a_connection_may_be_used_again(head: bytes, kept: bool) -> None:
    """RFC 9112, sections 6.3 and 9.3."""
    reader, _, _ = read(head)
    assert reader.ended
    assert reader.keep_alive is kept


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 20x OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na : b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: b\nc: d\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        CHUNKED + b"+5\r\nabcde\r\n",
        CHUNKED + b"0x5\r\nabcde\r\n",
        CHUNKED + b"1_0\r\nabcde\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"\r\n",
        CHUNKED + b"zz",
        CHUNKED + b"5\nabcde\r\n",
        CHUNKED + b"5\r\nabcdefg",
        CHUNKED + b"5\r\nabcde\n\r",
        CHUNKED + b"11111111111111111\r\n",
        CHUNKED + b"5;" + b"x" * 5_000,
        CHUNKED + b"0\r\n" + b"a: b\r\n" * 20_000,
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * HEAD_LIMIT,
    ],
)
def test_malformed(data: bytes) -> None:
    """What is no HTTP/1.1 response is refused as soon as it can be told, whole and byte by byte."""
    with pytest.raises(MalformedError):
        read(data)
    if len(data) < 200:
        with pytest.raises(MalformedError):
            read(data, list(range(len(data))))


def test_sizes_are_read_strictly_after_many_of_them() -> None:
    """The table of known size lines is bounded and takes nothing that is no size."""
    for size in range(1, 9_000, 7):
        assert read(CHUNKED + chunked([b"x" * size]))[2] > size
