"""Write raw evidence: append-only, one folder per attempt, each record on disk before the next is asked for.

Nothing is overwritten, nothing is removed. Where a process dies, what it wrote stays, and the next attempt gets the
next number. ``evidence/layout.py`` says what an attempt's folder holds.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from pytest_kvqual import _clock
from pytest_kvqual._canonical import canonical_bytes, sha256_bytes
from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.evidence import layout
from pytest_kvqual.evidence.records import DAMAGED, Scope, with_digest

__all__ = ["Bundle", "RecordWriter"]

_ADVICE: Final = {
    errno.ENOSPC: "free space on its file system or give another --run-dir; the attempt is kept, a run begins the next",
    errno.EDQUOT: "free space within the quota or give another --run-dir; the attempt is kept, a run begins the next",
    errno.EACCES: "give a --run-dir that you may write to",
    errno.EPERM: "give a --run-dir that you may write to",
    errno.EROFS: "give a --run-dir on a file system that is not read-only",
}


class RecordWriter:
    """An open file of JSON lines. Each record is on disk when :meth:`append` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state = hashlib.sha256()
        self._broken = False
        self._closed = False
        self.count = 0
        self.bytes = 0
        with _writing(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, record: Mapping[str, object]) -> None:
        """Write one record as one canonical line, and have it on disk.

        Raises:
            EvidenceError: The record cannot be written as JSON (nothing is written then), the disk refuses it, or an
                earlier record was refused.
        """
        if self._closed or self._broken:
            state = "closed" if self._closed else "broken by an earlier error"
            raise EvidenceError(f"cannot append to {self._path}: the stream is {state}")
        if not isinstance(record, Mapping):
            raise EvidenceError(f"{self._path}: found a record of {type(record).__name__}, expected a mapping")
        line = canonical_bytes(record) + b"\n"
        # Until this record is whole on disk the stream may end in half a line: it must not be sealed then.
        self._broken = True
        with _writing(self._path):
            _write_all(self._descriptor, line)
            os.fsync(self._descriptor)
        self._broken = False
        self._state.update(line)
        self.count += 1
        self.bytes += len(line)

    def _close(self) -> None:
        self._closed = True
        os.close(self._descriptor)

    def _digest(self) -> str:
        if self._broken:
            raise EvidenceError(f"cannot seal {self._path}: an earlier record was refused, the stream may be torn")
        return self._state.hexdigest()


class Bundle:
    """One attempt's folder, open for writing. Made by :meth:`create`.

    Methods may be called from several threads; each stream belongs to one.
    """

    def __init__(self, path: Path, scope: Scope, number: int, head: str) -> None:
        self._path = path
        self._scope = scope
        self._number = number
        self._previous = head
        self._manifest = hashlib.sha256()
        self._manifest_bytes = 0
        self._digests: dict[str, str] = {}
        self._closed = False
        self._lock = threading.Lock()

    @classmethod
    def create(cls, root: Path, scope: Scope, *, prefix: str = "") -> Bundle:
        """A new attempt under ``root``, numbered one above the highest there.

        Two processes that create at once get two numbers: the folder's creation decides.

        Raises:
            EvidenceError: The folder cannot be made or written, or the prefix is no part of a name.
        """
        folder = layout.folder_of(root, scope, prefix)
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        number = max(layout.numbers(folder), default=0) + 1
        while True:
            path = layout.attempt_folder(folder, number)
            if _make_folder(path):
                break
            number += 1
        data = with_digest(
            {
                "schema": layout.SCHEMA,
                "scope": scope.to_dict(),
                "prefix": prefix,
                "number": number,
                "created": _clock.wall_utc(),
            }
        )
        _write_atomic(path / layout.ATTEMPT, data)
        _write_atomic(path / layout.MANIFEST, b"")
        for made in (folder, folder.parent, root):
            _sync_folder(made)
        return cls(path, scope, number, sha256_bytes(data))

    @property
    def path(self) -> Path:
        """The attempt's folder."""
        return self._path

    @property
    def scope(self) -> Scope:
        """What the attempt is about."""
        return self._scope

    @property
    def number(self) -> int:
        """The attempt's number, from 1."""
        return self._number

    @property
    def name(self) -> str:
        """The attempt's folder below ``evidence``: ``candidate-1024-1073741824/attempt-2``."""
        return f"{self._path.parent.name}/{self._path.name}"

    @property
    def digests(self) -> Mapping[str, str]:
        """The SHA-256 of each file sealed so far."""
        return dict(self._digests)

    @contextmanager
    def stream(self, name: str) -> Iterator[RecordWriter]:
        """A new file of JSON lines, sealed when the block ends without an exception; kept unsealed otherwise.

        Raises:
            EvidenceError: The name is refused or taken, the attempt is closed, or the disk refuses.
        """
        self._refuse_closed(name)
        self._refuse_taken(name)
        path = self._path / name
        writer = RecordWriter(path)
        try:
            _sync_folder(self._path)
            yield writer
        finally:
            writer._close()
        self._seal(name, expected=writer._digest())

    def write(self, name: str, document: Mapping[str, object]) -> str:
        """Write one document whole or not at all, seal it, and return the SHA-256 of its bytes.

        Raises:
            EvidenceError: The name is refused or taken, the document cannot be written as JSON, the attempt is closed,
                or the disk refuses.
        """
        self._refuse_closed(name)
        self._refuse_taken(name)
        if not isinstance(document, Mapping):
            raise EvidenceError(f"{self._path / name}: found {type(document).__name__}, expected a mapping")
        data = canonical_bytes(document) + b"\n"
        _write_atomic(self._path / name, data)
        return self._seal(name, expected=sha256_bytes(data))

    def seal(self, name: str) -> str:
        """Seal a file that another process wrote into the attempt's folder, and return the SHA-256 of its bytes.

        Raises:
            EvidenceError: No regular file of that name is there, the name is refused or sealed already, the attempt is
                closed, or the disk refuses.
        """
        self._refuse_closed(name)
        layout.check_name(name, self._path)
        return self._seal(name, expected=None)

    def complete(self) -> None:
        """Close the attempt: all that was planned was captured.

        Raises:
            EvidenceError: The attempt is closed already, or the disk refuses.
        """
        self._finish("complete", "")

    def fail(self, reason: str) -> None:
        """Close the attempt as failed, with the reason in one line. It stays, and counts as an attempt.

        Raises:
            EvidenceError: The attempt is closed already, or the disk refuses.
        """
        self._finish("failed", " ".join(reason.split()) or "no reason was given")

    def _finish(self, outcome: str, reason: str) -> None:
        self._refuse_closed(layout.OUTCOME)
        with self._lock:
            data = with_digest(
                {
                    "schema": layout.SCHEMA,
                    "outcome": outcome,
                    "reason": reason,
                    "files": len(self._digests),
                    "manifest": self._manifest.hexdigest(),
                    "finished": _clock.wall_utc(),
                }
            )
            _write_atomic(self._path / layout.OUTCOME, data)
            self._closed = True

    def _seal(self, name: str, *, expected: str | None) -> str:
        path = self._path / name
        with self._lock:
            # A stream may have been open when the attempt was closed.
            self._refuse_closed(name)
            if name in self._digests:
                raise EvidenceError(f"cannot seal {path}: it is sealed already", advice="give each file its own name")
            found, size = _hash_regular(path)
            if expected is not None and found != expected:
                raise EvidenceError(
                    f"{path}: found sha256 {found}, expected {expected} as written", advice="another process wrote it"
                )
            line = canonical_bytes({"name": name, "bytes": size, "sha256": found, "previous": self._previous})
            self._append_manifest(line + b"\n")
            self._previous = sha256_bytes(line)
            self._digests[name] = found
        return found

    def _append_manifest(self, line: bytes) -> None:
        path = self._path / layout.MANIFEST
        with _writing(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                size = os.fstat(descriptor).st_size
                if size != self._manifest_bytes:
                    raise EvidenceError(
                        f"{path}: found {size} bytes, expected the {self._manifest_bytes} written", advice=DAMAGED
                    )
                try:
                    _write_all(descriptor, line)
                    os.fsync(descriptor)
                except OSError:
                    # Half a line would make a reader call the whole attempt damaged; it sealed nothing, so it goes.
                    with suppress(OSError):
                        os.ftruncate(descriptor, size)
                    raise
            finally:
                os.close(descriptor)
        self._manifest.update(line)
        self._manifest_bytes += len(line)

    def _refuse_closed(self, name: str) -> None:
        if self._closed:
            raise EvidenceError(
                f"cannot write {self._path / name}: the attempt is closed", advice="create a new attempt"
            )

    def _refuse_taken(self, name: str) -> None:
        layout.check_name(name, self._path)
        if os.path.lexists(self._path / name):
            raise EvidenceError(
                f"cannot write {self._path / name}: it is there already", advice="evidence is never overwritten"
            )


def _make_folder(path: Path) -> bool:
    """Whether this call made the folder; False where something of that name is there."""
    with _writing(path):
        try:
            path.mkdir()
        except FileExistsError:
            return False
    return True


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into one line."""
    try:
        yield
    except FileExistsError as error:
        raise EvidenceError(
            f"cannot write {path}: it is there already", advice="evidence is never overwritten"
        ) from error
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "give another --run-dir, or mend the file system")
        raise EvidenceError(f"cannot write {path}: {error.strerror or error}", advice=advice) from error


def _write_all(descriptor: int, data: bytes) -> None:
    # A full disk may take a part of the data first and refuse only the rest.
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _write_atomic(path: Path, data: bytes) -> None:
    scratch = path.with_name(f".{path.name}.tmp")
    with _writing(path):
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                _write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            scratch.rename(path)
        except BaseException:
            with suppress(OSError):
                scratch.unlink()
            raise
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    with _writing(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _hash_regular(path: Path) -> tuple[str, int]:
    """The digest and size of a file that is on disk when this returns."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise EvidenceError(f"cannot seal {path}: {error.strerror}", advice="its writer left no such file") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise EvidenceError(f"cannot seal {path}: found no regular file")
        state = hashlib.sha256()
        size = 0
        with _writing(path):
            os.fsync(descriptor)
            while chunk := os.read(descriptor, 1 << 20):
                state.update(chunk)
                size += len(chunk)
    finally:
        os.close(descriptor)
    return state.hexdigest(), size
