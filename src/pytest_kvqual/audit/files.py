"""Reading a run directory that may hold anything: no symbolic link is followed, no document is taken on trust.

JSON is read strictly: UTF-8, no key twice, no NaN, no infinity (written out or by overflow), no lone surrogate.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, NoReturn

DOCUMENT_LIMIT: Final = 256 << 20
"""The largest document that is read whole, in bytes."""

LINE_LIMIT: Final = 64 << 20
"""The longest line of a file of JSON lines, in bytes."""

_CHUNK: Final = 1 << 20
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_SHOWN: Final = 600


class DamagedError(Exception):
    """Content is not what it must be. The message is one line: what was found, what was expected."""


def one_line(text: str) -> str:
    """``text`` in one printable line of bounded length, whatever it was made of."""
    shown = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


def is_digest(value: object) -> bool:
    """Whether a value is a SHA-256 in 64 lower-case hexadecimal digits."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def sha256(data: bytes) -> str:
    """The SHA-256 of ``data`` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def parse(data: bytes | str) -> object:
    """The JSON value in ``data``, read strictly.

    Raises:
        DamagedError: It is no JSON, or none that this project writes.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        return json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float)
    except UnicodeDecodeError as error:
        raise DamagedError(f"found the byte 0x{error.object[error.start]:02x}, expected UTF-8") from None
    except RecursionError:
        raise DamagedError("found nesting beyond the parser's limit, expected JSON") from None
    except ValueError as error:
        raise DamagedError(f"found no JSON: {error}") from None


def canonical(value: object) -> bytes:
    """A value read by :func:`parse` with sorted keys, without white space, in UTF-8.

    Raises:
        DamagedError: It cannot be written so.
    """
    return _encode(value, None)


def pretty(value: object) -> bytes:
    """As :func:`canonical`, indented by 2, with a final newline."""
    return _encode(value, 2) + b"\n"


def _encode(value: object, indent: int | None) -> bytes:
    separators = (",", ":") if indent is None else (",", ": ")
    try:
        text = json.dumps(
            value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=separators, indent=indent
        )
        return text.encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"found content that has no canonical form: {error}") from None


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DamagedError(f"found the key {key!r} twice, expected each key once")
            seen.add(key)
    return found


def _constant(word: str) -> NoReturn:
    raise DamagedError(f"found {word}, expected a finite number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise DamagedError(f"found {text[:40]}, expected a number that float64 holds")
    return value


class Tree:
    """A folder whose files are opened from itself downwards, one name at a time, without following a link.

    Raises:
        OSError: The folder cannot be opened.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the folder."""
        os.close(self._root)

    def kind(self, *parts: str) -> str:
        """``file``, ``folder``, ``link``, ``other`` or ``none``."""
        try:
            with self._folder(parts[:-1]) as folder:
                mode = os.stat(parts[-1], dir_fd=folder, follow_symlinks=False).st_mode
        except (DamagedError, OSError, ValueError):
            return "none"
        if stat.S_ISLNK(mode):
            return "link"
        if stat.S_ISREG(mode):
            return "file"
        return "folder" if stat.S_ISDIR(mode) else "other"

    def names(self, *parts: str) -> list[str]:
        """The names in a folder, sorted.

        Raises:
            OSError: It cannot be read, or is no folder of the tree.
        """
        with self._folder(parts) as folder, os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries)

    @contextmanager
    def open(self, *parts: str) -> Iterator[BinaryIO]:
        """A regular file, for reading.

        Raises:
            OSError: It cannot be read, or the way to it is a link.
            DamagedError: It is no regular file.
        """
        with self._folder(parts[:-1]) as folder:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(parts[-1], flags, dir_fd=folder)
        with os.fdopen(descriptor, "rb", buffering=_CHUNK) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise DamagedError("found no regular file")
            yield file

    def read(self, *parts: str) -> bytes:
        """The bytes of a document.

        Raises:
            OSError: As :meth:`open`.
            DamagedError: As :meth:`open`; or it is larger than :data:`DOCUMENT_LIMIT`.
        """
        with self.open(*parts) as file:
            data = file.read(DOCUMENT_LIMIT + 1)
        if len(data) > DOCUMENT_LIMIT:
            raise DamagedError(f"found more than {DOCUMENT_LIMIT} bytes, expected a document")
        return data

    @contextmanager
    def _folder(self, parts: tuple[str, ...]) -> Iterator[int]:
        descriptor = os.dup(self._root)
        try:
            for part in parts:
                if part in ("", ".", "..") or "/" in part or "\0" in part:
                    raise DamagedError(f"found the name {part!r}, expected one of a file or folder")
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)


class Hashed:
    """A file's chunks and lines, digested as they are read: each byte is read once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._state = hashlib.sha256()
        self.size = 0

    def rest(self) -> None:
        """Read to the end."""
        while chunk := self._file.read(_CHUNK):
            self._take(chunk)

    def whole(self) -> bytes:
        """Everything that is left.

        Raises:
            DamagedError: It is larger than :data:`DOCUMENT_LIMIT`.
        """
        data = self._file.read(DOCUMENT_LIMIT + 1)
        self._take(data)
        if len(data) > DOCUMENT_LIMIT:
            self.rest()
            raise DamagedError(f"found more than {DOCUMENT_LIMIT} bytes, expected a document")
        return data

    def lines(self) -> Iterator[bytes]:
        """Each line with its end, the last one as it is.

        Raises:
            DamagedError: A line is longer than :data:`LINE_LIMIT`; the digest is still that of the whole file.
        """
        while line := self._file.readline(LINE_LIMIT + 1):
            self._take(line)
            if len(line) > LINE_LIMIT:
                self.rest()
                raise DamagedError(f"found a line of more than {LINE_LIMIT} bytes, expected a record")
            yield line

    @property
    def sha256(self) -> str:
        """The digest of what was read."""
        return self._state.hexdigest()

    def _take(self, data: bytes) -> None:
        self._state.update(data)
        self.size += len(data)
