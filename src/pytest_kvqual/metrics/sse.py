"""Framing of server-sent events: bytes in, the raw bytes of each event out.

By the WHATWG standard (HTML, section 9.2, "Server-sent events", read 2026): a line ends with CR LF, LF or CR; an empty
line ends an event; a field is the text before the first colon, its value what follows, less one space. Nothing is
stripped, and nothing is decoded before an event is whole. Framing is of whole streams, so that where a read ended
changes nothing; :func:`completions` says which byte completed each event.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_BOM = b"\xef\xbb\xbf"
# The end of a line and the empty line after it.
_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")
_LINE = re.compile(rb"\r\n|\n|\r")


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """The events of a stream, each with the empty line that ends it, and what is left after the last of them.

    Joined they are ``data``. Time is linear in its size.
    """
    events: list[bytes] = []
    begin = 0
    for found in _END.finditer(data):
        end = found.end()
        events.append(data[begin:end])
        begin = end
    return events, data[begin:]


def completions(events: Sequence[bytes]) -> list[int]:
    """How many bytes of the stream had to be there for each event to be complete.

    Of an empty line that ends with CR LF the CR completes the event: no reader has to wait for the LF.
    """
    found, at = [], 0
    for event in events:
        at += len(event)
        found.append(at - 1 if event.endswith(b"\r\n") else at)
    return found


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
