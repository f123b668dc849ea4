"""What a run keeps while it runs: one file, one record per request as it ends, so that memory stays flat.

A file that was cut off (a killed process, a full disk) is readable up to its last whole record.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_kvqual.errors import EvidenceError

STAMPS: Final = ("intended", "dispatch", "connected", "send_start", "send_end", "end")
"""What :meth:`Spool.add` is given of each request, in this order, beside its reads."""
_MAGIC = b"kvqual-spool-2\n"
# A record: its index, bytes of its JSON, number of reads, bytes of all reads; then the JSON, where there is any; then,
# of 64 bits each, the stamps (-1: none), the reads' times and their lengths; then the reads.
_FRAME = struct.Struct("<qIIQ")
_HEADER = -3
_NO_STAMPS: Final = (None,) * len(STAMPS)


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
            self._append(_MAGIC + _record(_HEADER, header, _NO_STAMPS, (), ()))
        except BaseException:
            self._file.close()
            path.unlink()
            raise

    def add(
        self,
        index: int,
        more: Mapping[str, object],
        stamps: Sequence[int | None] = _NO_STAMPS,
        reads_ns: Sequence[int] = (),
        reads: Sequence[bytes] = (),
    ) -> None:
        """Keep one request: ``stamps`` as :data:`STAMPS` names them, ``more`` what else there is to say, as JSON.

        Raises:
            EvidenceError: The file cannot be written; what was kept before stays whole.
        """
        self._append(_record(index, more, stamps, reads_ns, reads))

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

    def _meta(self, size: int) -> dict[str, Any] | None:
        found = self._start(size)
        if found is None:
            return None
        meta, reads, data = found
        self._file.seek(16 * reads + data, 1)
        return meta

    def _next(self, size: int) -> tuple[dict[str, Any], Sequence[int], list[bytes]] | None:
        found = self._start(size)
        if found is None:
            return None
        meta, reads, data = found
        numbers = self._numbers(2 * reads)
        times, lengths = numbers[:reads], numbers[reads:]
        if any(length < 0 for length in lengths) or sum(lengths) != data:
            raise ValueError(f"reads of {sum(lengths)} bytes in {data}")
        return meta, times, [self._file.read(length) for length in lengths]

    def _start(self, size: int) -> tuple[dict[str, Any], int, int] | None:
        """What stands before the reads' times, the number of reads and their bytes; None without a whole record."""
        start = self._file.read(_FRAME.size)
        if len(start) < _FRAME.size:
            return None
        index, text, reads, data = _FRAME.unpack(start)
        if self._file.tell() + text + 8 * len(STAMPS) + 16 * reads + data > size:
            return None
        more = json.loads(self._file.read(text)) if text else {}
        stamps = (None if stamp < 0 else stamp for stamp in self._numbers(len(STAMPS)))
        return {"index": index, **dict(zip(STAMPS, stamps, strict=True)), **more}, reads, data

    def _numbers(self, count: int) -> array[int]:
        numbers = array("q")
        numbers.frombytes(self._file.read(8 * count))
        return numbers


def _record(
    index: int,
    more: Mapping[str, object],
    stamps: Sequence[int | None],
    reads_ns: Sequence[int],
    reads: Sequence[bytes],
) -> bytes:
    text = json.dumps(more, separators=(",", ":")).encode() if more else b""
    numbers = array("q", [*(-1 if stamp is None else stamp for stamp in stamps), *reads_ns, *map(len, reads)])
    data = b"".join(reads)
    return b"".join((_FRAME.pack(index, len(text), len(reads), len(data)), text, numbers.tobytes(), data))
