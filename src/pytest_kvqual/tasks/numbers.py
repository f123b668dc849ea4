r"""Numbers in a model's words, read strictly into exact rationals.

One number is: white space, ``**``, a currency sign (``$``, ``€``, ``£``; ``\$`` too) with a sign before or behind it,
digits with thousands separators in groups of three, decimals or a fraction ``a/b``; then ``%``, ``**``, a unit without
digits, a period. ``%`` is a unit: ``50%`` is 50. Decimal digits of every script count, and the minus, comma, period,
slash, currency and percent signs that stand for the ASCII ones. A range, a list, a mixed number, a separator at the
wrong place, a superscript and a numeral word character (``½``, ``万``) make it no number.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

MAX_DIGITS: Final = 600
"""Digits of a number at most. Below 640, the least limit to which Python's conversion of integers can be set."""

_SIGNS: Final = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"),
    "\uff0b": "+",
    **dict.fromkeys("\u066c\ufe50\uff0c", ","),
    **dict.fromkeys("\u066b\ufe52\uff0e", "."),
    **dict.fromkeys("\u2044\u2215\uff0f", "/"),
    **dict.fromkeys("\ufe69\uff04", "$"),
    "\uffe1": "£",
    **dict.fromkeys("\u066a\ufe6a\uff05", "%"),
    "\uff0a": "*",
}

# [0-9] and not \d: the text is plain() by then, and a digit that it left alone is none.
_WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = rf"(?:(?P<over>{_WHOLE})/(?P<under>{_WHOLE})|(?P<whole>{_WHOLE})?\.(?P<part>[0-9]+)|(?P<only>{_WHOLE}))"
_CURRENCY = r"(?:\\?[$€£][^\S\r\n]*)"
_STRICT = re.compile(rf"(?:\*\*\s*)?(?:(?P<before>[+-]){_CURRENCY}?|{_CURRENCY}(?P<behind>[+-])?)?{_NUMBER}")
_LOOSE = re.compile(rf"(?:(?<![\w)\].])(?P<before>[+-]))?{_CURRENCY}?(?:(?<![\w)\].])(?P<behind>[+-]))?{_NUMBER}")
# A unit begins with one of these or with a letter; what follows holds no character with a numeric value.
_UNIT_STARTS: Final = "%$€£¥°\\("
_TAIL = re.compile(r"\s*%?\s*(?:\*\*)?\.?(?:\*\*)?\s*(?P<unit>.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A number, and where in the text the characters end that belong to it or would go on with it."""

    value: Fraction
    end: int


def plain(text: str) -> str:
    """``text`` with decimal digits of every script, and the signs that numbers are made of, in ASCII.

    Each character becomes one character, so positions stay.
    """
    return text if text.isascii() else "".join(map(_plain, text))


def plain_digits(text: str) -> str:
    """``text`` with decimal digits of every script in ASCII, and nothing else changed. Positions stay."""
    return text if text.isascii() else "".join(map(_digit, text))


def read_number(text: str) -> Number | None:
    """The number that ``text`` is, read as this module says; None where it is not exactly one."""
    shown = plain(text)
    # The white space is skipped here: two runs of it side by side in the pattern would cost their product.
    match = _STRICT.match(shown, len(shown) - len(shown.lstrip()))
    if match is None:
        return None
    value = _value(match)
    if value is None:
        return None
    tail = _TAIL.match(shown, match.end())
    unit = "" if tail is None else tail["unit"]
    if unit and not (unit[0].isalpha() or unit[0] in _UNIT_STARTS):
        return None
    if any(char.isnumeric() for char in shown[match.end() :]):
        return None
    end = match.end()
    if end < len(shown) and shown[end] == ".":
        # A period at the end may be the point of decimals that did not come.
        end += 1
    return Number(value=value, end=end)


def parse_number(text: str) -> Fraction | None:
    """The value of the number that ``text`` is; None where it is not exactly one."""
    number = read_number(text)
    return None if number is None else number.value


def last_number(text: str) -> Fraction | None:
    """The value of the last number anywhere in ``text``; None where there is none, or the last one has no value.

    A sign counts where it stands behind no letter, digit or closing bracket: ``10-3`` ends in 3.
    """
    last: re.Match[str] | None = None
    for match in _LOOSE.finditer(plain(text)):
        last = match
    return None if last is None else _value(last)


def normal(value: Fraction) -> str:
    """The normal form: ``18``, ``-3``, ``59/2``."""
    return str(value)


def _value(match: re.Match[str]) -> Fraction | None:
    over, under = match["over"], match["under"]
    whole, part = match["only"] or match["whole"] or "", match["part"] or ""
    if sum(map(len, (over or "", under or "", whole, part))) > MAX_DIGITS:
        return None
    if over is not None:
        bottom = _integer(under)
        if bottom == 0:
            return None
        value = Fraction(_integer(over), bottom)
    else:
        value = Fraction(_integer(whole + part), 10 ** len(part))
    return -value if "-" in (match["before"], match["behind"]) else value


def _integer(digits: str) -> int:
    return int(digits.replace(",", ""))


def _plain(char: str) -> str:
    return _SIGNS.get(char) or _digit(char)


def _digit(char: str) -> str:
    digit = unicodedata.decimal(char, None)
    return char if digit is None else str(digit)
