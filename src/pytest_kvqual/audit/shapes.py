"""Taking values out of documents that may hold anything: the value of the expected type, or :class:`DamagedError`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pytest_kvqual.audit.files import DamagedError, is_digest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""The name of an arm, a gate, a prefix, a folder or a file of evidence."""


def table(value: object, where: str, keys: Iterable[str] | None = None) -> dict[str, object]:
    """A JSON object; with ``keys``, of exactly these keys.

    Raises:
        DamagedError: It is none, or a key is missing or unknown.
    """
    if not isinstance(value, dict):
        raise DamagedError(f"{where}: found {kind(value)}, expected a table")
    if keys is not None:
        expected = set(keys)
        for key in value:
            if key not in expected:
                raise DamagedError(f"{where}: found the unknown key {key!r}, expected {', '.join(sorted(expected))}")
        for key in sorted(expected):
            if key not in value:
                raise DamagedError(f"{where}: found no key {key!r}, expected one")
    return value


def get(outer: Mapping[str, object], key: str, where: str) -> object:
    """The value of a key.

    Raises:
        DamagedError: There is none.
    """
    if key not in outer:
        raise DamagedError(f"{where}: found no key {key!r}, expected one")
    return outer[key]


def text(outer: Mapping[str, object], key: str, where: str) -> str:
    """A string.

    Raises:
        DamagedError: There is none.
    """
    value = get(outer, key, where)
    if not isinstance(value, str):
        raise DamagedError(f"{where}.{key}: found {kind(value)}, expected a string")
    return value


def name(outer: Mapping[str, object], key: str, where: str) -> str:
    """A string of the form :data:`NAME`.

    Raises:
        DamagedError: There is none.
    """
    value = text(outer, key, where)
    if not NAME.fullmatch(value):
        raise DamagedError(f"{where}.{key}: found {value!r}, expected letters, digits, '.', '_' and '-'")
    return value


def integer(outer: Mapping[str, object], key: str, where: str, *, minimum: int = 0) -> int:
    """An integer of at least ``minimum``.

    Raises:
        DamagedError: There is none.
    """
    value = get(outer, key, where)
    if type(value) is not int or value < minimum:
        raise DamagedError(f"{where}.{key}: found {shown(value)}, expected an integer of at least {minimum}")
    return value


def digest(outer: Mapping[str, object], key: str, where: str) -> str:
    """A SHA-256 in hexadecimal.

    Raises:
        DamagedError: There is none.
    """
    value = get(outer, key, where)
    if not isinstance(value, str) or not is_digest(value):
        raise DamagedError(f"{where}.{key}: found {shown(value)}, expected a SHA-256 of 64 lower-case hex digits")
    return value


def digests(value: object, where: str) -> dict[str, str]:
    """A table of names and SHA-256.

    Raises:
        DamagedError: It is none.
    """
    outer = table(value, where)
    return {key: digest(outer, key, where) for key in outer}


def strings(outer: Mapping[str, object], key: str, where: str) -> list[str]:
    """A list of strings.

    Raises:
        DamagedError: There is none.
    """
    found: list[str] = []
    for item in items(outer, key, where):
        if not isinstance(item, str):
            raise DamagedError(f"{where}.{key}: found {kind(item)}, expected a string")
        found.append(item)
    return found


def items(outer: Mapping[str, object], key: str, where: str) -> list[object]:
    """A list.

    Raises:
        DamagedError: There is none.
    """
    value = get(outer, key, where)
    if not isinstance(value, list):
        raise DamagedError(f"{where}.{key}: found {kind(value)}, expected a list")
    return value


def kind(value: object) -> str:
    """The JSON word for a value's type."""
    words = {dict: "a table", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return words.get(type(value), "a number")


def shown(value: object) -> str:
    """A scalar as it stands, anything else by its type; of bounded length."""
    return kind(value) if isinstance(value, dict | list) else repr(value)[:120]
