"""Framing of server-sent events: bytes in, the raw bytes of each event out.

By the WHATWG standard (HTML, section 9.2, "Server-sent events", read 2026): a line ends with CR LF, LF or CR; an empty
line ends an event; a field is the text before the first colon, its value what follows, less one space. Nothing is
stripped, and nothing is decoded before an event is whole, so that a read may end anywhere.
"""

from __future__ import annotations

import re

_BOM = b"\xef\xbb\xbf"
# The end of a line and the empty line after it. A CR as the last byte may be half of a CR LF: it is looked at again.
_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")
_LINE = re.compile(rb"\r\n|\n|\r")
# The longest end of an event.
_LONGEST = 4


class Splitter:
    """Splits a stream into events, fed in pieces of any size. Time is linear in the bytes fed."""

    __slots__ = ("_buffer", "_scanned")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0

    @property
    def pending(self) -> int:
        """How many bytes ``rest`` has. The next event ended in an earlier read where it is no longer than this.

        Only a final CR makes that happen: whether it is half of a CR LF is known with the next byte.
        """
        return len(self._buffer)

    @property
    def rest(self) -> bytes:
        """The bytes after the last event that ended."""
        return bytes(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """The events that ``data`` completes, each with the empty line that ends it."""
        return self._take(data, last=False)

    def finish(self) -> list[bytes]:
        """The event that a final CR ended, if there is one: nothing follows that could make it a CR LF."""
        return self._take(b"", last=True)

    def _take(self, data: bytes, *, last: bool) -> list[bytes]:
        buffer = self._buffer
        buffer += data
        events: list[bytes] = []
        begin = 0
        at = max(0, self._scanned - _LONGEST)
        while True:
            found = _END.search(buffer, at)
            if found is None:
                break
            end = found.end()
            if end == len(buffer) and buffer[end - 1 :] == b"\r" and not last:
                break
            events.append(bytes(buffer[begin:end]))
            begin = at = end
        if begin:
            del buffer[:begin]
        self._scanned = len(buffer)
        return events


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """The events of a whole stream, and what is left after the last of them."""
    splitter = Splitter()
    events = [*splitter.feed(data), *splitter.finish()]
    return events, splitter.rest


def data_of(event: bytes, *, first: bool = True) -> bytes | None:
    """The data of an event: the values of its ``data`` fields, joined by LF; None where it has no such field.

    ``first``: it may be the first of its stream, where a byte order mark is no part of a line.
    """
    # Nearly every event is one line of this form, and there are half a million of them.
    if (
        event.startswith(b"data: ")
        and event.endswith(b"\n\n")
        and event.find(b"\n") == len(event) - 2
        and b"\r" not in event
    ):
        return event[6:-2]
    values = fields_of(event, b"data", first=first)
    return b"\n".join(values) if values else None


def fields_of(event: bytes, name: bytes, *, first: bool = True) -> list[bytes]:
    """The values of the fields of that name, in order."""
    values = []
    for line in _LINE.split(event.removeprefix(_BOM) if first else event):
        found, _, value = line.partition(b":")
        if found == name:
            values.append(value[1:] if value[:1] == b" " else value)
    return values
