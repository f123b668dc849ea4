"""The evidence files that receipts name. Each is read at most once for its digest, and only what is intact is used."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal

State = Literal["intact", "missing", "changed", "unreadable"]

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PARTS: Final = 3
_CHUNK: Final = 1 << 20
LARGEST: Final = 1 << 30
"""The most bytes of a file that are held at once; one with more is digested, and nothing of it is shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceFile:
    """One file that a receipt names: its digest there, and what became of it on disk.

    ``found`` is the digest of what lies there now; empty where nothing could be read. ``why`` is one line, empty for an
    intact file.
    """

    name: str
    sha256: str
    state: State
    found: str
    why: str


class Evidence:
    """The folder ``evidence`` of a run directory, read by name and digest.

    No symbolic link is followed and no name leaves the folder. A file in use while the page is made is seen as it was
    when it was digested.
    """

    def __init__(self, run_dir: Path) -> None:
        self._root = run_dir / "evidence"
        self._known: dict[str, tuple[State, str, str]] = {}

    def state(self, name: str, sha256: str) -> EvidenceFile:
        """What became of the file ``BUNDLE/attempt-N/FILE`` that a receipt names with this digest."""
        if name not in self._known:
            self._known[name] = self._digest(name)
        state, found, why = self._known[name]
        if state == "intact" and found != sha256:
            state, why = "changed", f"found sha256 {found}, expected {sha256}"
        return EvidenceFile(name=name, sha256=sha256, state=state, found=found, why=why)

    def data(self, name: str, sha256: str) -> bytes | None:
        """The bytes of a file, None unless they have this digest and are no more than :data:`LARGEST`."""
        try:
            with self._open(name) as file:
                if os.fstat(file.fileno()).st_size > LARGEST:
                    return None
                data = file.read(LARGEST)
        except OSError:
            return None
        found = hashlib.sha256(data).hexdigest()
        self._known[name] = ("intact", found, "")
        return data if found == sha256 else None

    def why_not(self, name: str, sha256: str) -> str:
        """Why :meth:`data` had nothing, in a few words."""
        return self.state(name, sha256).why or f"it has more than {LARGEST:,} bytes"

    def _digest(self, name: str) -> tuple[State, str, str]:
        digest = hashlib.sha256()
        try:
            with self._open(name) as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
        except FileNotFoundError:
            return "missing", "", "found no such file"
        except OSError as error:
            return "unreadable", "", f"cannot be read: {error.strerror or error}"
        return "intact", digest.hexdigest(), ""

    def _open(self, name: str) -> BinaryIO:
        """Open a file below the folder, following no link in any part of its name.

        Raises:
            OSError: There is none, or a part of the name is no plain file or folder.
        """
        parts = name.split("/")
        if len(parts) != _PARTS or not all(_PART.fullmatch(part) for part in parts):
            raise OSError(errno.EINVAL, "its name is no BUNDLE/attempt-N/FILE")
        folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for part in parts[:-1]:
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
                os.close(folder)
                folder = below
            file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "it is no plain file")
        return os.fdopen(file, "rb")
