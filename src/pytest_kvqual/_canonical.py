"""Canonical bytes and digests.

Every byte that the project writes and later compares is made here, so that equal values have equal bytes. The form
follows RFC 8785 (sorted keys, UTF-8, no white space, no NaN) with two differences: keys sort by code point, and
numbers keep Python's shortest form, in which ``1`` and ``1.0`` stay different.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

from pytest_kvqual.errors import EvidenceError

_CHUNK = 1 << 20


def canonical_bytes(value: object) -> bytes:
    """``value`` as JSON with sorted keys, in UTF-8, without white space and without a final newline.

    Accepts None, bool, int, finite float, str, list, tuple and mappings with str keys, nested.

    Raises:
        EvidenceError: NaN, an infinity, a key that is no string, a lone surrogate, any other type (names its place), or
            nesting beyond the interpreter's limit.
    """
    return _encode(value, indent=None)


def pretty_bytes(value: object) -> bytes:
    """The same content as :func:`canonical_bytes` for files that people read: indented by 2, with a final newline."""
    return _encode(value, indent=2) + b"\n"


def sha256_bytes(data: bytes) -> str:
    """The SHA-256 of ``data``: 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes: 64 lower-case hex digits.

    Raises:
        OSError: The file cannot be read.
    """
    state = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def digest(value: object) -> str:
    """The SHA-256 of the canonical bytes of ``value``."""
    return sha256_bytes(canonical_bytes(value))


def tree_digest(files: Mapping[str, str]) -> str:
    """One digest over ``{relative name: sha256}``, whatever the mapping's order."""
    return digest(dict(files))


def _encode(value: object, *, indent: int | None) -> bytes:
    separators = (",", ":") if indent is None else (",", ": ")
    try:
        plain = _plain(value, "")
        text = json.dumps(
            plain, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=separators, indent=indent
        )
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise EvidenceError(
            f"cannot write the record: found the lone surrogate {error.object[error.start]!r}, expected Unicode text"
        ) from None
    except RecursionError:
        raise EvidenceError("cannot write the record: found nesting beyond the interpreter's limit") from None


def _plain(value: object, where: str) -> object:
    # json.dumps turns the key 1 into "1" and True into "true" without a word, so the types are checked here first.
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise EvidenceError(f"cannot write the record: found {value!r}, expected a finite number, {_at(where)}")
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise EvidenceError(f"cannot write the record: found the key {key!r}, expected a string, {_at(where)}")
        return {key: _plain(item, f"{where}.{key}" if where else key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise EvidenceError(
        f"cannot write the record: found {type(value).__name__}, expected None, bool, int, float, str, list or "
        f"mapping, {_at(where)}"
    )


def _at(where: str) -> str:
    return f"in {where!r}" if where else "at the top"
