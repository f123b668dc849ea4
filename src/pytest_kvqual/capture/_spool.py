"""What a run keeps while it runs: one file, one record per request as it ends, so that memory stays flat.

A file that was cut off (a killed process, a full disk) is readable up to its last whole record.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_kvqual.errors import EvidenceError

_MAGIC = b"kvqual-spool-1\n"
# Bytes of the record's JSON, number of reads, bytes of all reads.
_FRAME = struct.Struct("<IIQ")


class Spool:
    """The writer.

    Args:
        path: A new file.
        header: What the recording's header will say, and of each request what is known before it is sent.

    Raises:
        EvidenceError: The file exists or cannot be written.
    """

    def __init__(self, path: Path, header: Mapping[str, object]) -> None:
        self.path = path
        try:
            # Unbuffered: what add() returned from is in the file, whatever ends the process.
            self._file = path.open("xb", buffering=0)
        except FileExistsError:
            raise EvidenceError(
                f"found {path}, expected no file of that name", advice="recordings are never overwritten"
            ) from None
        except OSError as error:
            raise EvidenceError(f"cannot write {path}: {error.strerror}") from None
        self._end = 0
        try:
            self._append(_MAGIC + _record(header, (), ()))
        except BaseException:
            self._file.close()
            path.unlink()
            raise

    def add(self, meta: Mapping[str, object], reads_ns: Sequence[int], reads: Sequence[bytes]) -> None:
        """Keep one request.

        Raises:
            EvidenceError: The file cannot be written; what was kept before stays whole.
        """
        self._append(_record(meta, reads_ns, reads))

    def close(self) -> None:
        """No more records."""
        self._file.close()

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._file.truncate(self._end)
            raise EvidenceError(
                f"cannot write {self.path}: {error.strerror}", advice="what was kept so far stays in it"
            ) from None
        self._end += len(data)


class SpoolReader:
    """The reader: ``header``, and the records by their ``index``.

    Raises:
        EvidenceError: The file is missing, no spool, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._places: dict[int, int] = {}
        try:
            self._file = path.open("rb")
            size = path.stat().st_size
        except OSError as error:
            raise EvidenceError(f"cannot read {path}: {error.strerror}") from None
        try:
            if self._file.read(len(_MAGIC)) != _MAGIC:
                raise EvidenceError(f"{path}: found no spool of a recorder")
            header, _, _ = self._next(size) or ({}, (), ())
            if not header:
                raise EvidenceError(f"{path}: found a spool without a header")
            self.header: dict[str, Any] = header
            while True:
                place = self._file.tell()
                meta = self._meta(size)
                if meta is None:
                    break
                self._places[meta["index"]] = place
            self._size = size
        except (LookupError, TypeError, ValueError) as error:
            self._file.close()
            raise EvidenceError(f"{path}: found a damaged spool: {type(error).__name__}: {error}") from error
        except BaseException:
            self._file.close()
            raise

    def record(self, index: int) -> tuple[dict[str, Any], Sequence[int], list[bytes]] | None:
        """The record of a request with each read's time and bytes; None where there is none."""
        place = self._places.get(index)
        if place is None:
            return None
        self._file.seek(place)
        return self._next(self._size)

    def close(self) -> None:
        """Read no more."""
        self._file.close()

    def _frame(self, size: int) -> tuple[int, int, int] | None:
        start = self._file.read(_FRAME.size)
        if len(start) < _FRAME.size:
            return None
        meta, reads, data = _FRAME.unpack(start)
        return (meta, reads, data) if self._file.tell() + meta + 12 * reads + data <= size else None

    def _meta(self, size: int) -> dict[str, Any] | None:
        frame = self._frame(size)
        if frame is None:
            return None
        found: dict[str, Any] = json.loads(self._file.read(frame[0]))
        self._file.seek(12 * frame[1] + frame[2], 1)
        return found

    def _next(self, size: int) -> tuple[dict[str, Any], Sequence[int], list[bytes]] | None:
        frame = self._frame(size)
        if frame is None:
            return None
        meta = json.loads(self._file.read(frame[0]))
        times, lengths = array("q"), array("I")
        times.frombytes(self._file.read(8 * frame[1]))
        lengths.frombytes(self._file.read(4 * frame[1]))
        if sum(lengths) != frame[2]:
            raise ValueError(f"reads of {sum(lengths)} bytes in {frame[2]}")
        return meta, times, [self._file.read(length) for length in lengths]


def _record(meta: Mapping[str, object], reads_ns: Sequence[int], reads: Sequence[bytes]) -> bytes:
    text = json.dumps(meta, separators=(",", ":")).encode()
    frame = _FRAME.pack(len(text), len(reads), sum(map(len, reads)))
    return b"".join((frame, text, array("q", reads_ns).tobytes(), array("I", map(len, reads)).tobytes(), *reads))
