"""Strict decoding of mappings into records: unknown keys are refused, ``True`` is not 1, each error carries its path.

Used once, at the edge, on what TOML or JSON gave. The class of the error is the caller's: the same helpers read
declarations (:class:`StudyError`) and records (:class:`EvidenceError`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, TypeGuard

from pytest_kvqual.errors import KvqualError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHOWN = 60


class _Required:
    """The type of the marker that says: this key has no default."""


REQUIRED = _Required()


def _finite(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number that float64 holds; an integer beyond it is not, and ``True`` is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


class Table:
    """One mapping under decoding.

    Args:
        value: What the parser gave.
        origin: The file (or other source) that errors name.
        error: The class of the errors raised.
        known: The keys that may be present. None: any key (a map of names, read with :meth:`names`).
        path: The path of this table within its document; empty for the document itself.

    Raises:
        KvqualError: As ``error``: ``value`` is no table, or holds a key that is not known.
    """

    __slots__ = ("_error", "_origin", "_path", "_values")

    def __init__(
        self,
        value: object,
        *,
        origin: str,
        error: type[KvqualError],
        known: Iterable[str] | None,
        path: str = "",
    ) -> None:
        self._origin = origin
        self._error = error
        self._path = path
        if not isinstance(value, Mapping):
            self._refuse(path, value, "a table")
        for key in value:
            if not isinstance(key, str):
                self._refuse(path, key, "keys that are strings")
        self._values: Mapping[str, object] = value
        if known is not None:
            self._only(tuple(known))

    def names(self) -> tuple[str, ...]:
        """The keys that are present, in the order of the document."""
        return tuple(self._values)

    def has(self, key: str) -> bool:
        """Whether the key is present."""
        return key in self._values

    def where(self, key: str) -> str:
        """The path of ``key`` from the top of the document."""
        return f"{self._path}.{key}" if self._path else key

    def fail(self, key: str, found: str, expected: str, *, advice: str = "") -> NoReturn:
        """Refuse the value under ``key`` (or, with an empty key, this table) in the words of every other error here."""
        place = self.where(key) if key else self._path
        raise self._error(one_line(f"{_place(self._origin, place)}: found {found}, expected {expected}"), advice=advice)

    def string(self, key: str, default: str | _Required = REQUIRED, *, pattern: str = "", form: str = "") -> str:
        """A non-empty string; with ``pattern`` (a full match), one of that ``form``."""
        if self._absent(key, default, "a string"):
            return str(default)
        return self._string(self.where(key), self._values[key], pattern, form)

    def text(self, key: str) -> str:
        """A string that may be empty."""
        self._absent(key, REQUIRED, "a string")
        value = self._values[key]
        if not isinstance(value, str):
            self._refuse(self.where(key), value, "a string")
        return value

    def optional_string(self, key: str) -> str | None:
        """A non-empty string, or None where the key is absent."""
        return self.string(key) if key in self._values else None

    def choice(self, key: str, choices: Sequence[str]) -> str:
        """One of ``choices``."""
        expected = f"one of {', '.join(choices)}"
        self._absent(key, REQUIRED, expected)
        value = self._values[key]
        if not isinstance(value, str) or value not in choices:
            self._refuse(self.where(key), value, expected)
        return value

    def sha256(self, key: str) -> str:
        """A SHA-256: 64 lower-case hex digits."""
        return self.string(key, pattern=_SHA256.pattern, form="a SHA-256 of 64 lower-case hex digits")

    def boolean(self, key: str, default: bool | _Required = REQUIRED) -> bool:
        """A boolean."""
        if self._absent(key, default, "true or false"):
            return bool(default)
        value = self._values[key]
        if not isinstance(value, bool):
            self._refuse(self.where(key), value, "true or false")
        return value

    def integer(self, key: str, *, minimum: int | None = None, maximum: int | None = None) -> int:
        """An integer within the bounds (both included); ``true`` is none."""
        expected = "an integer" + _bounds(minimum, maximum)
        self._absent(key, REQUIRED, expected)
        return self._integer(self.where(key), self._values[key], minimum, maximum)

    def number(self, key: str, *, minimum: float | None = None, maximum: float | None = None) -> float:
        """A finite number within the bounds (both included); an integer is taken as one, ``true`` is not."""
        expected = "a finite number" + _bounds(minimum, maximum)
        self._absent(key, REQUIRED, expected)
        value = self._values[key]
        if not _finite(value):
            self._refuse(self.where(key), value, expected)
        if (minimum is not None and not value >= minimum) or (maximum is not None and not value <= maximum):
            self._refuse(self.where(key), value, expected)
        return float(value)

    def table(self, key: str, *, known: Iterable[str] | None) -> Table:
        """A table of its own."""
        self._absent(key, REQUIRED, "a table")
        return Table(self._values[key], origin=self._origin, error=self._error, known=known, path=self.where(key))

    def tables(self, key: str, *, known: Iterable[str]) -> tuple[Table, ...]:
        """A list of tables."""
        names = tuple(known)
        return tuple(
            Table(value, origin=self._origin, error=self._error, known=names, path=f"{self.where(key)}[{index}]")
            for index, value in enumerate(self._list(key, "a list of tables"))
        )

    def named_tables(self, key: str, *, known: Iterable[str]) -> dict[str, Table]:
        """A table of tables, by name, in the order of the document."""
        names = tuple(known)
        outer = self.table(key, known=None)
        return {name: outer.table(name, known=names) for name in outer.names()}

    def strings(
        self, key: str, default: Sequence[str] | _Required = REQUIRED, *, pattern: str = "", form: str = ""
    ) -> tuple[str, ...]:
        """A list of non-empty strings; with ``pattern`` (a full match), each of that ``form``."""
        if not isinstance(default, _Required) and key not in self._values:
            return tuple(default)
        return tuple(
            self._string(f"{self.where(key)}[{index}]", value, pattern, form)
            for index, value in enumerate(self._list(key, "a list of strings"))
        )

    def integers(self, key: str, *, minimum: int | None = None, maximum: int | None = None) -> tuple[int, ...]:
        """A list of integers, each within the bounds (both included)."""
        values = self._list(key, "a list of integers")
        for index, value in enumerate(values):
            # Token lists are long: the common case is one comparison of types, without a path being made.
            if (
                type(value) is not int
                or (minimum is not None and value < minimum)
                or (maximum is not None and value > maximum)
            ):
                self._integer(f"{self.where(key)}[{index}]", value, minimum, maximum)
        return tuple(values)  # type: ignore[arg-type]  # each element was checked above

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        values = self._list(key, "a list of numbers")
        for index, value in enumerate(values):
            if not _finite(value):
                self._refuse(f"{self.where(key)}[{index}]", value, "a finite number")
        return tuple(float(value) for value in values)  # type: ignore[arg-type]  # each element was checked above

    def string_map(
        self, key: str, default: Mapping[str, str] | _Required = REQUIRED, *, pattern: str = "", form: str = ""
    ) -> dict[str, str]:
        """A table of strings, by name."""
        if not isinstance(default, _Required) and key not in self._values:
            return dict(default)
        inner = self.table(key, known=None)
        return {name: inner.string(name, pattern=pattern, form=form) for name in inner.names()}

    def sha256_map(self, key: str) -> dict[str, str]:
        """A table of SHA-256 digests, by name."""
        return self.string_map(key, pattern=_SHA256.pattern, form="a SHA-256 of 64 lower-case hex digits")

    def raw(self, key: str) -> object:
        """The value as it stands, for a key that must be present."""
        self._absent(key, REQUIRED, "a value")
        return self._values[key]

    def _only(self, known: tuple[str, ...]) -> None:
        for key in self._values:
            if key not in known:
                place = _place(self._origin, self._path)
                raise self._error(
                    one_line(f"{place}: found the unknown key '{key}', expected only {', '.join(known)}"),
                    advice=nearest(key, known) or "remove it",
                )

    def _absent(self, key: str, default: object, expected: str) -> bool:
        if key in self._values:
            return False
        if isinstance(default, _Required):
            raise self._error(
                one_line(f"{_place(self._origin, self._path)}: found no key '{key}', expected {expected}"),
                advice=f"add '{self.where(key)}'",
            )
        return True

    def _list(self, key: str, expected: str) -> Sequence[object]:
        self._absent(key, REQUIRED, expected)
        value = self._values[key]
        if not isinstance(value, list):
            self._refuse(self.where(key), value, expected)
        return value

    def _string(self, place: str, value: object, pattern: str, form: str) -> str:
        expected = form or "a string that is not empty"
        if not isinstance(value, str) or not value:
            self._refuse(place, value, expected)
        if pattern and not re.fullmatch(pattern, value):
            self._refuse(place, value, expected)
        return value

    def _integer(self, place: str, value: object, minimum: int | None, maximum: int | None) -> int:
        expected = "an integer" + _bounds(minimum, maximum)
        if isinstance(value, bool) or not isinstance(value, int):
            self._refuse(place, value, expected)
        if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
            self._refuse(place, value, expected)
        return value

    def _refuse(self, place: str, value: object, expected: str) -> NoReturn:
        raise self._error(one_line(f"{_place(self._origin, place)}: found {describe(value)}, expected {expected}"))


_DIGITS = 300
"""Characters of an integer at most: Python refuses to print a sum of more than 4,300 digits."""


def parse_json(data: bytes, *, origin: str, error: type[KvqualError], advice: str = "") -> object:
    """The value of one JSON document.

    Raises:
        KvqualError: As ``error``, with the line: no UTF-8, no JSON, a key given twice, NaN, or a number beyond float64.
    """

    def refuse_constant(name: str) -> NoReturn:
        raise error(f"{origin}: found {name}, expected a finite number", advice=advice)

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise error(f"{origin}: found {text}, expected a number that float64 can hold", advice=advice)
        return value

    def whole(text: str) -> int:
        if len(text) > _DIGITS:
            raise error(f"{origin}: found {text[:20]}…, expected an integer of at most 300 digits", advice=advice)
        return int(text)

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise error(one_line(f"{origin}: found the key '{twice}' twice, expected it once"), advice=advice)
        return values

    try:
        text = data.decode("utf-8")
        value: object = json.loads(
            text, object_pairs_hook=unique, parse_constant=refuse_constant, parse_float=finite, parse_int=whole
        )
    except UnicodeDecodeError as found:
        reason, where = f"the byte 0x{data[found.start]:02x}", f" at byte {found.start}"
    except json.JSONDecodeError as found:
        reason, where = f"'{found.msg}'", f", line {found.lineno}, column {found.colno}"
    except RecursionError:
        reason, where = "nesting beyond the parser's limit", ""
    except ValueError as found:
        reason, where = f"'{found}'", ""
    else:
        return value
    raise error(f"{origin}{where}: found {reason}, expected JSON in UTF-8", advice=advice)


def one_line(text: str) -> str:
    """``text`` with each character that would end a line or spoil a terminal written as an escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def nearest(name: str, known: Iterable[str]) -> str:
    """``did you mean 'X'?`` for the known name closest to ``name``; empty when none is close."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else ""


def describe(value: object) -> str:
    """The value and its type in a few words, for an error's one line."""
    names: dict[type, str] = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "a table",
    }
    kind = names.get(type(value), type(value).__name__)
    if value is None:
        return "null"
    if isinstance(value, list | dict):
        return f"{kind} of {len(value)}" if value else f"{kind} that is empty"
    shown = json.dumps(value, ensure_ascii=False) if isinstance(value, bool | str) else str(value)
    return f"{shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + '...'} ({kind})"


def _place(origin: str, path: str) -> str:
    return f"{origin}: in '{path}'" if path else origin


def _bounds(minimum: float | None, maximum: float | None) -> str:
    if minimum is not None and maximum is not None:
        return f" from {minimum} to {maximum}"
    if minimum is not None:
        return f" of at least {minimum}"
    if maximum is not None:
        return f" of at most {maximum}"
    return ""
