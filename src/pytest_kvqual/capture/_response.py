"""Where an HTTP/1.1 response ends, by its framing alone (RFC 9112). Pure: bytes in, no clock, no socket.

The end is never guessed from what a body looks like: a chunk may hold the bytes of a last chunk, an event ``[DONE]``.
"""

from __future__ import annotations

import re
from typing import Final

HEAD_LIMIT: Final = 65_536
"""The most bytes that a status line with its header, and a chunked body's trailer, may have."""
_LINE_LIMIT: Final = 4_096
_SIZE_DIGITS: Final = 16
# Chunk sizes recur, and int() also takes "+5", "1_0" and " 5": each line is read strictly once. Bounded.
_SIZES: dict[bytes, int] = {}
_SIZES_LIMIT: Final = 8_192

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n\x00]*)?\Z")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\r\n\x00]*)\Z")
_HEX = re.compile(rb"[0-9A-Fa-f]+\Z")
_FRAMING = frozenset({"connection", "transfer-encoding", "content-length"})
_DIGITS = re.compile(rb"[0-9]+\Z")

# States.
_HEAD, _SIZE, _DATA, _AFTER, _TRAILER, _LENGTH, _UNTIL_EOF, _ENDED = range(8)


class MalformedError(Exception):
    """The bytes are no HTTP/1.1 response; ``str`` says what was found."""


class ResponseReader:
    """One response, fed with what each socket read brought, however it was split.

    Args:
        pieces: Receives the body's bytes in order, without framing, as slices of what was fed; None to drop them.
        bodiless: The answer to a HEAD: no body follows the header.

    Attributes:
        status: The final status (1xx responses are passed over), None until the header is complete.
        headers: The final header's ``(name, value)`` pairs, as sent.
        keep_alive: Whether the connection may carry another request after this response.
        excess: Bytes fed after the end, which belong to no response.
    """

    __slots__ = (
        "_bodiless",
        "_line",
        "_pieces",
        "_remaining",
        "_state",
        "_trailer",
        "excess",
        "headers",
        "keep_alive",
        "status",
    )

    def __init__(self, pieces: list[bytes] | None = None, *, bodiless: bool = False) -> None:
        self._pieces, self._bodiless = pieces, bodiless
        self._state = _HEAD
        # What of an incomplete line or header was fed so far.
        self._line = b""
        self._remaining = 0
        self._trailer = 0
        self.status: int | None = None
        self.headers: tuple[tuple[str, str], ...] = ()
        self.keep_alive = False
        self.excess = 0

    @property
    def ended(self) -> bool:
        """Whether the response is complete."""
        return self._state == _ENDED

    @property
    def chunked(self) -> bool:
        """Whether the next bytes belong to a chunked body, which ends in an empty line, wherever else one may be."""
        return self._state in (_SIZE, _DATA, _AFTER, _TRAILER)

    @property
    def between_chunks(self) -> bool:
        """Whether every chunk so far is whole, the last one excepted, which has not come."""
        return self._state == _SIZE and not self._line

    def feed(self, data: bytes) -> bool:
        """Take the next bytes; True once the response is complete.

        Raises:
            MalformedError: The bytes are no HTTP/1.1 response.
        """
        # Nearly every read of a stream is exactly one chunk: a dictionary look-up and two comparisons.
        if self._state == _SIZE and not self._line:
            cut = data.find(b"\r\n", 0, _SIZE_DIGITS + 2)
            size = _SIZES.get(data[:cut])
            if size and len(data) == cut + size + 4 and data.endswith(b"\r\n"):
                if self._pieces is not None:
                    self._pieces.append(data[cut + 2 : -2])
                return False
        return self._feed(data)

    def eof(self) -> bool:
        """The peer closed its side; True where that completes the response."""
        if self._state == _UNTIL_EOF:
            self._state = _ENDED
        return self._state == _ENDED

    def missing(self) -> str:
        """What is still to come, for a message."""
        if self._state == _HEAD:
            return "the header" if self._line or self.status is not None else "any answer"
        if self._state in (_DATA, _LENGTH):
            return f"{self._remaining} more bytes of the body"
        return "the end of the body"

    def _feed(self, data: bytes) -> bool:
        at, length = 0, len(data)
        while True:
            state = self._state
            if state == _ENDED:
                self.excess += length - at
                if self.excess:
                    self.keep_alive = False
                return True
            if at == length:
                return False
            if state == _HEAD:
                at = self._head(data, at)
            elif state == _SIZE:
                at = self._size(data, at)
            elif state in (_DATA, _LENGTH):
                stop = min(length, at + self._remaining)
                self._keep(data, at, stop)
                self._remaining -= stop - at
                at = stop
                if not self._remaining:
                    self._state = _AFTER if state == _DATA else _ENDED
                    self._remaining = 2
            elif state == _AFTER:
                if data[at] != b"\r\n"[2 - self._remaining]:
                    raise MalformedError(f"found {data[at : at + 1]!r} after a chunk's data, expected CR LF")
                at += 1
                self._remaining -= 1
                if not self._remaining:
                    self._state = _SIZE
            elif state == _TRAILER:
                at = self._trailing(data, at)
            else:
                self._keep(data, at, length)
                at = length

    def _keep(self, data: bytes, start: int, stop: int) -> None:
        if self._pieces is not None and stop > start:
            self._pieces.append(data[start:stop])

    def _take_line(self, data: bytes, at: int, limit: int, what: str) -> tuple[bytes | None, int]:
        """A line without its CR LF and where the next begins; None where it is not complete yet."""
        before = self._line
        # The CR may have come with an earlier read.
        if before.endswith(b"\r") and data[at] == 0x0A:
            self._line = b""
            return before[:-1], at + 1
        cut = data.find(b"\r\n", at)
        stop = len(data) if cut < 0 else cut
        if len(before) + stop - at > limit:
            raise MalformedError(f"found {what} of more than {limit} bytes")
        if cut < 0:
            self._line = before + data[at:]
            return None, len(data)
        self._line = b""
        return before + data[at:cut], cut + 2

    def _size(self, data: bytes, at: int) -> int:
        line, at = self._take_line(data, at, _LINE_LIMIT, "a chunk's size line")
        if line is None:
            # A line that cannot become a size is refused at once, rather than waited for.
            if not _HEX.match(self._line.split(b";")[0].rstrip(b" \t\r") or b"0"):
                raise MalformedError(f"found {self._line[:40]!r}, expected a chunk's size")
            return at
        size = _SIZES.get(line)
        if size is None:
            digits = line.split(b";", 1)[0].rstrip(b" \t")
            if not _HEX.match(digits) or len(digits) > _SIZE_DIGITS:
                raise MalformedError(f"found {line[:40]!r}, expected a chunk's size")
            size = int(digits, 16)
            if len(line) <= _SIZE_DIGITS and len(_SIZES) < _SIZES_LIMIT:
                _SIZES[line] = size
        self._state = _DATA if size else _TRAILER
        self._remaining = size
        return at

    def _trailing(self, data: bytes, at: int) -> int:
        line, after = self._take_line(data, at, HEAD_LIMIT, "a trailer")
        self._trailer += after - at
        if self._trailer > HEAD_LIMIT:
            raise MalformedError(f"found a trailer of more than {HEAD_LIMIT} bytes")
        if line == b"":
            self._state = _ENDED
        return after

    def _head(self, data: bytes, at: int) -> int:
        before = self._line
        joined = before + data[at:] if before else data[at:]
        if not b"HTTP/1.".startswith(joined[:7]):
            raise MalformedError(f"found {joined[:20]!r}, expected HTTP/1.1")
        # Only the last three bytes of what was searched before can belong to the end.
        cut = joined.find(b"\r\n\r\n", max(0, len(before) - 3))
        if (len(joined) if cut < 0 else cut) > HEAD_LIMIT:
            raise MalformedError(f"found a header of more than {HEAD_LIMIT} bytes")
        if cut < 0:
            self._line = joined
            return len(data)
        self._line = b""
        self._parse(joined[:cut])
        return at + cut + 4 - len(before)

    def _parse(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        match = _STATUS.match(first)
        if not match:
            raise MalformedError(f"found the status line {first[:60]!r}")
        version, status = int(match[1]), int(match[2])
        pairs: list[tuple[str, str]] = []
        framing: dict[str, list[str]] = {}
        for line in lines:
            field = _FIELD.match(line)
            if not field:
                raise MalformedError(f"found the header line {line[:60]!r}")
            pair = field[1].decode("ascii"), field[2].rstrip(b" \t").decode("latin-1")
            pairs.append(pair)
            key = pair[0].lower()
            if key in _FRAMING:
                framing.setdefault(key, []).extend(part.strip(" \t") for part in pair[1].split(","))
        if status == 101:
            raise MalformedError("found status 101 (another protocol), which was not asked for")
        if status < 200:
            return
        self.status, self.headers = status, tuple(pairs)
        self._frame(version, status, framing)

    def _frame(self, version: int, status: int, values: dict[str, list[str]]) -> None:
        """Which of the framings this body has: RFC 9112, section 6.3."""
        connection = {value.lower() for value in values.get("connection", ())}
        self.keep_alive = "close" not in connection and (version == 1 or "keep-alive" in connection)
        codings = [value.lower() for value in values.get("transfer-encoding", ())]
        lengths = set(values.get("content-length", ()))
        if self._bodiless or status in (204, 304):
            self._state = _ENDED
        elif codings:
            if codings != ["chunked"]:
                raise MalformedError(f"found the transfer coding {', '.join(codings)[:60]!r}, expected 'chunked'")
            # Both headers: the message may be smuggled, so nothing follows it on this connection.
            self.keep_alive = self.keep_alive and not lengths
            self._state = _SIZE
        elif lengths:
            text = lengths.pop()
            if lengths or not _DIGITS.match(text.encode("latin-1")) or len(text) > 18:
                raise MalformedError(f"found the Content-Length {', '.join([text, *lengths])[:60]!r}")
            self._remaining = int(text)
            self._state = _LENGTH if self._remaining else _ENDED
        else:
            self.keep_alive = False
            self._state = _UNTIL_EOF
