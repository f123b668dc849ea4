"""An answer that is one word or one string of digits: the first run of letters and digits, read strictly."""

from __future__ import annotations

import unicodedata
from typing import Final

from pytest_kvqual._decode import one_line
from pytest_kvqual.tasks.numbers import plain_digits
from pytest_kvqual.tasks.segment import Reading, Segment

SHOWN: Final = 60
"""Characters of a text that a line shows at most."""

_BEFORE: Final = "\"'`:=$#\uff02\uff07\uff1a\uff1d\uff04\uff03"
# Opening brackets and low quotes; opening and closing quotes.
_BEFORE_CATEGORIES: Final = ("Ps", "Pi", "Pf")


def read(segment: Segment, expected: str) -> Reading:
    """The first run of letters and digits of a segment, decimal digits of every script as ASCII ones.

    It is right where it equals ``expected``, letter for letter, and nothing stands before it but white space, quotes,
    ``:``, ``=``, ``$``, ``#`` and opening brackets. Leniently, ``expected`` stands anywhere in the segment.
    """
    text = plain_digits(segment.text)
    lenient = bool(expected) and expected in text
    start = next((place for place, char in enumerate(text) if char.isalnum()), None)
    if start is None:
        what = shown(text.strip())
        return Reading(
            found=what or None, right=False, complete=segment.cut, lenient=lenient,
            reason=f"found {what!r}, expected a word or a number",
        )  # fmt: skip
    end = next((place for place in range(start, len(text)) if not text[place].isalnum()), len(text))
    complete = segment.cut or end < len(text)
    if not all(map(_may_stand_before, text[:start])):
        what = shown(text.strip())
        return Reading(
            found=what, right=False, complete=complete, lenient=lenient,
            reason=f"found {what!r}, expected the answer at its beginning",
        )  # fmt: skip
    found = text[start:end]
    right = found == expected
    return Reading(
        found=found, right=right, complete=complete, lenient=lenient,
        reason="" if right else f"found {shown(found)}, expected {shown(expected)}",
    )  # fmt: skip


def shown(text: str) -> str:
    """The beginning of ``text`` in printable characters, for one line."""
    line = one_line(text[: SHOWN + 1])
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1]}…"


def _may_stand_before(char: str) -> bool:
    return char.isspace() or char in _BEFORE or unicodedata.category(char) in _BEFORE_CATEGORIES
