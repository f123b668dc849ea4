"""Numbers and foreign text, fit to print.

What a model, a server or a file said is shown as it is, and as nothing else: a character that a reader would not see,
or that would move or turn the text around it, is shown by its code point.
"""

from __future__ import annotations

import math
import unicodedata
from fractions import Fraction

_SEEN = {"\n": "\n", "\t": "\t", " ": " "}
# Zl and Zp break lines, Cf joins, hides and reverses, Cs cannot be encoded; Co and Cn have no agreed shape.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# Fillers and blanks: letters and spaces that draw nothing, or another width than one space.
_BLANK = frozenset("\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u2800\u3164\uffa0")


def visible(text: str) -> str:
    """``text`` with every character that cannot be seen, or that acts on others, as ``⟨U+202E⟩``.

    Line ends and tabs stay; any other control, format, private, unassigned or surrogate character, a variation
    selector, a blank letter and a space that is not U+0020 are spelled out. The result can be written as XML 1.0.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character in _SEEN:
        return character
    category = unicodedata.category(character)
    selector = "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"
    if category in _UNSEEN or category == "Zs" or selector or character in _BLANK:
        return f"⟨U+{ord(character):04X}⟩"
    return character


def one_line(text: str, size: int | None = None) -> str:
    """``text`` in one line, every unseen character shown, cut to ``size`` with an ellipsis."""
    found = visible(text).replace("\n", "⏎").replace("\t", " ")
    return found if size is None or len(found) <= size else f"{found[: size - 1]}…"


def number(value: object) -> float | None:
    """A number of a receipt's details as a float, or None: they spell NaN and infinities as words, fractions as a/b."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return float(Fraction(value)) if "/" in value else float(value)
        except (ValueError, ZeroDivisionError, OverflowError):
            return None
    return None


def percent(share: float, digits: int = 3) -> str:
    """``3.257 %``."""
    return f"{100 * share:.{digits}f} %"


def count(value: int) -> str:
    """``1,319``."""
    return f"{value:,}"


def bytes_of(value: int) -> str:
    """``1 GiB (1,073,741,824 bytes)``."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:g} {unit}" if value % size == 0 else f"{value / size:.2f} {unit}"
    return f"{value} bytes"


def milliseconds(value: float) -> str:
    """A time in milliseconds, with as many digits as tell something."""
    if not math.isfinite(value):
        return "inf" if value > 0 else "nan"
    size = abs(value)
    return f"{value:,.0f} ms" if size >= 1000 else f"{value:.1f} ms" if size >= 10 else f"{value:.3f} ms"
