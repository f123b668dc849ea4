"""Receipts on disk: ``RUN_DIR/receipts/{prefix}{arm}-{length}-{cache_bytes}/{order:02d}-{gate}-{attempt}.json``.

Append-only: a receipt is never overwritten, and the highest number decides. Written whole or not at all: to a temporary
file, flushed to disk, then linked under its name, which fails where the name is taken.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_kvqual._canonical import sha256_file
from pytest_kvqual.errors import ReceiptError
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.judge.sequence import EvidenceDigests
from pytest_kvqual.receipt.statement import Receipt, encode, parse

FOLDER = "receipts"
_FILE = re.compile(r"(?P<order>\d{2,})-(?P<gate>[A-Za-z0-9._-]+)-(?P<attempt>[1-9]\d*)\.json")
_SCOPE = re.compile(r"(?P<arm>[A-Za-z0-9._-]+)-(?P<length>\d+)-(?P<cache>\d+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LARGEST = 64 << 20
_ADVICE = "free space or give another --run-dir that you may write to"


@dataclass(frozen=True, kw_only=True, slots=True)
class DamagedReceipt:
    """A file among the receipts that cannot be trusted, with what its place says about it."""

    name: str
    gate: str
    arm: str
    length: int
    cache_bytes: int
    attempt: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipts:
    """All receipts of a run directory under one prefix: those that could be read, and those that are damaged."""

    receipts: tuple[Receipt, ...]
    damaged: tuple[DamagedReceipt, ...]


def scope_folder(run_dir: Path, scope: Scope, *, prefix: str = "") -> Path:
    """The folder of a scope's receipts.

    Raises:
        ReceiptError: The arm or the prefix is no plain name.
    """
    for what, value in (("arm", scope.arm), ("prefix", prefix or "x")):
        if not _NAME.fullmatch(value):
            raise ReceiptError(f"{what}: found '{value}', expected letters, digits, '.', '_' and '-'")
    return run_dir / FOLDER / f"{prefix}{_stem(scope)}"


def write(run_dir: Path, statement: Mapping[str, object], *, prefix: str = "") -> Path:
    """Number a statement from :func:`~pytest_kvqual.receipt.statement.build` and put it on disk; returns its path.

    Its number is one above the highest of its gate in its scope's folder, damaged files counted.

    Raises:
        ReceiptError: The statement is not as built, or the disk refuses; one line with the path and what to do.
    """
    first = parse(encode(statement, attempt=1))
    folder = scope_folder(run_dir, first.scope, prefix=prefix)
    if not _NAME.fullmatch(first.gate):
        raise ReceiptError(f"gate: found '{first.gate}', expected letters, digits, '.', '_' and '-'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        attempt = 1 + max((int(match["attempt"]) for match in _files(folder) if match["gate"] == first.gate), default=0)
        while True:
            path = folder / f"{first.order:02d}-{first.gate}-{attempt}.json"
            if _publish(path, encode(statement, attempt=attempt)):
                return path
            attempt += 1
    except OSError as error:
        raise ReceiptError(f"{folder}: cannot write the receipt: {error.strerror or error}", advice=_ADVICE) from error


def read_all(run_dir: Path, *, prefix: str = "") -> Receipts:
    """Every receipt of the run directory under this prefix, by path.

    A file that is not a receipt as it was written, or lies where its content does not belong, is damaged; none is left
    out in silence. Temporary files of an interrupted write (``.tmp-*``) never were receipts.

    Raises:
        ReceiptError: The folder exists and cannot be read.
    """
    receipts: list[Receipt] = []
    damaged: list[DamagedReceipt] = []
    root = run_dir / FOLDER
    try:
        folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        for folder in folders:
            for path in sorted(folder.iterdir()):
                if path.name.startswith(".tmp-") or not folder.name.startswith(prefix):
                    continue
                found = _read(path, prefix)
                if isinstance(found, Receipt):
                    receipts.append(found)
                elif found is not None:
                    damaged.append(found)
    except OSError as error:
        raise ReceiptError(f"{root}: cannot read the receipts: {error.strerror or error}") from error
    return Receipts(receipts=tuple(receipts), damaged=tuple(damaged))


def disk_digests(run_dir: Path) -> EvidenceDigests:
    """What the evidence files of a run directory are now, each hashed at most once."""
    known: dict[str, str | None] = {}

    def look(name: str) -> str | None:
        if name not in known:
            parts = name.split("/")
            try:
                # A receipt must not make us read outside the evidence.
                plain = all(_NAME.fullmatch(part) for part in parts)
                known[name] = sha256_file(run_dir.joinpath("evidence", *parts)) if plain else None
            except OSError:
                known[name] = None
        return known[name]

    return look


def _read(path: Path, prefix: str) -> Receipt | DamagedReceipt | None:
    """A receipt, a damaged one, or None for one that belongs to another prefix."""
    label = f"{FOLDER}/{path.parent.name}/{path.name}"
    try:
        receipt = parse(_bytes(path), name=label)
    except ReceiptError as error:
        return _damaged(path, prefix, label, str(error).removeprefix(f"{label}: "))
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        return _damaged(path, prefix, label, f"found {_NO_FILE[error.errno]}, expected a plain file")
    stem = _stem(receipt.scope)
    if not path.parent.name.endswith(stem):
        return _damaged(path, prefix, label, f"found a receipt of {stem}, expected it in a folder of that name")
    if path.parent.name != prefix + stem:
        return None
    expected = f"{receipt.order:02d}-{receipt.gate}-{receipt.attempt}.json"
    if path.name != expected:
        return _damaged(path, prefix, label, f"found the file name {path.name}, expected {expected}")
    return receipt


_NO_FILE = {
    errno.EINVAL: "a pipe or a device",
    errno.ENXIO: "a socket",
    errno.EISDIR: "a folder",
    errno.EFBIG: f"more than {_LARGEST >> 20} MiB",
    errno.ENOENT: "a link to nothing",
    errno.ELOOP: "a link to itself",
}


def _bytes(path: Path) -> bytes:
    """The bytes of a plain file of moderate size. Anything else could be waited for without end.

    Raises:
        OSError: It cannot be read, or is none.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if found.st_size > _LARGEST:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return file.read()


def _damaged(path: Path, prefix: str, label: str, reason: str) -> DamagedReceipt | None:
    scope = _SCOPE.fullmatch(path.parent.name.removeprefix(prefix))
    file = _FILE.fullmatch(path.name)
    if scope is None:
        return None
    return DamagedReceipt(
        name=label,
        gate=file["gate"] if file else "",
        arm=scope["arm"],
        length=int(scope["length"]),
        cache_bytes=int(scope["cache"]),
        attempt=int(file["attempt"]) if file else 0,
        reason=reason,
    )


def _publish(path: Path, data: bytes) -> bool:
    """Put ``data`` under a new name, whole and flushed; False where the name is taken."""
    descriptor, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return True


def _files(folder: Path) -> list[re.Match[str]]:
    return [match for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))]


def _stem(scope: Scope) -> str:
    return f"{scope.arm}-{scope.length}-{scope.cache_bytes}"
