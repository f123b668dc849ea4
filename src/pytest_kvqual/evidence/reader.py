"""Read evidence strictly: the manifest's chain, then every sealed file, and only then a record.

Opening an attempt, in this order:

    1. ``attempt.json`` is as it was written, and stands in the folder that it names.
    2. ``outcome.json``, where there is one, is as it was written and carries the digest of this manifest.
    3. Each manifest line carries the digest of the line before; no name comes twice.
    4. Every sealed file is there, with the size and digest of its line.

A document or record is digested once more when it is read, since a file can change in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from pytest_kvqual._canonical import canonical_bytes, sha256_bytes, sha256_file
from pytest_kvqual._decode import Table, parse_json
from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.evidence import layout
from pytest_kvqual.evidence.layout import attempts
from pytest_kvqual.evidence.records import DAMAGED, SCOPE_FIELDS, Scope, read_with_digest, require_canonical

__all__ = ["AttemptOutcome", "Reader", "attempts"]

#: ``unfinished``: no outcome was written; the attempt still runs, or the process that ran it was killed.
AttemptOutcome = Literal["complete", "failed", "unfinished"]


class Reader:
    """One attempt, verified. Made by :meth:`open` or :meth:`latest`.

    Attributes:
        path: The attempt's folder.
        scope: What the attempt is about.
        prefix: The prefix of its folder's name.
        number: The attempt's number, from 1.
        outcome: How it ended.
        reason: Why it failed; empty otherwise.
        digests: The SHA-256 of each sealed file, in the order of sealing.
        unsealed: The names of whatever else is in the folder. Kept, never read.
    """

    __slots__ = ("digests", "number", "outcome", "path", "prefix", "reason", "scope", "unsealed")

    def __init__(self, path: Path) -> None:
        head = _read(path / layout.ATTEMPT)
        self.path: Final = path
        manifest = _read(path / layout.MANIFEST)
        self.scope, self.prefix, self.number = _attempt(path, head)
        self.outcome, self.reason, files = _outcome(path, manifest)
        entries = _entries(path / layout.MANIFEST, manifest, head)
        if files is not None and files != len(entries):
            raise EvidenceError(f"{path / layout.OUTCOME}: found {files} files, expected {len(entries)} as sealed")
        for entry in entries:
            _verify(path / entry.name, entry)
        self.digests: Mapping[str, str] = MappingProxyType({entry.name: entry.sha256 for entry in entries})
        known = {*self.digests, *layout.RESERVED}
        self.unsealed: tuple[str, ...] = tuple(
            sorted(entry.name for entry in path.iterdir() if entry.name not in known)
        )

    @classmethod
    def open(cls, path: Path) -> Reader:
        """The attempt in a folder, verified whole.

        Raises:
            EvidenceError: Anything is missing, damaged, out of its chain, or of an unknown schema; names the file and,
                where there are two, both digests.
        """
        return cls(path)

    @classmethod
    def latest(
        cls,
        root: Path,
        scope: Scope,
        *,
        prefix: str = "",
        names: Sequence[str] = (),
        known: Collection[Path] | None = None,
        first: Collection[str] = (),
        accept: Callable[[Reader], bool] | None = None,
    ) -> Reader | None:
        """The newest complete attempt of exactly this scope that has all of ``names`` sealed; None where there is none.

        With ``known``, only these folders are looked at; attempts that ``first`` names, as ``FOLDER/attempt-N``, come
        before newer ones. With ``accept``, one that it returns False for is passed over.

        Failed and unfinished attempts are passed over, unread but for what says so: evidence of theirs is kept, never
        used in the place of a new capture.

        Raises:
            EvidenceError: As :meth:`open`, for the attempts that are complete; or an attempt's number is missing.
        """
        found = layout.attempts(root, scope.arm, scope.length, scope.cache_bytes, prefix)
        newest = found[::-1]
        for path in sorted(newest, key=lambda it: f"{it.parent.name}/{it.name}" not in first):
            if known is not None and path not in known:
                continue
            # Without an outcome it did not complete, whatever else of it is there: a kill leaves any state behind.
            if not (path / layout.OUTCOME).exists():
                continue
            there, its_prefix, _ = _attempt(path, _read(path / layout.ATTEMPT))
            if there != scope or its_prefix != prefix:
                continue
            manifest = _read(path / layout.MANIFEST)
            if _outcome(path, manifest)[0] != "complete":
                continue
            reader = cls(path)
            if all(name in reader.digests for name in names) and (accept is None or accept(reader)):
                return reader
        return None

    @property
    def name(self) -> str:
        """The attempt's folder below ``evidence``: ``candidate-1024-1073741824/attempt-2``."""
        return f"{self.path.parent.name}/{self.path.name}"

    def has(self, name: str) -> bool:
        """Whether a file of that name is sealed."""
        return name in self.digests

    def data(self, name: str) -> bytes:
        """The bytes of a sealed file, digested once more.

        Raises:
            EvidenceError: No such file is sealed, or it is not as it was sealed.
        """
        if name not in self.digests:
            raise EvidenceError(
                f"{self.path}: found no sealed '{name}', expected it among {', '.join(self.digests) or 'none'}",
                advice="an unsealed file is an interrupted capture: run it again" if name in self.unsealed else "",
            )
        data = _read(self.path / name)
        found = sha256_bytes(data)
        if found != self.digests[name]:
            raise _changed(self.path / name, found, self.digests[name])
        return data

    def document(self, name: str) -> dict[str, object]:
        """The mapping in a sealed JSON document.

        Raises:
            EvidenceError: As :meth:`data`; or the file holds no JSON object.
        """
        return _object(self.data(name), str(self.path / name))

    def records(self, name: str) -> tuple[dict[str, object], ...]:
        """The mappings in a sealed file of JSON lines, in order.

        Raises:
            EvidenceError: As :meth:`data`; or a line is no JSON object, or the last one does not end.
        """
        origin = str(self.path / name)
        lines = _lines(self.data(name), origin)
        return tuple(_object(line, f"{origin}, record {number}") for number, line in enumerate(lines, start=1))


class _Entry:
    """One line of the manifest, and its number: it is the line or the file that was changed, which none can tell."""

    __slots__ = ("bytes", "line", "name", "sha256")

    def __init__(self, line: int, name: str, size: int, sha256: str) -> None:
        self.line = line
        self.name = name
        self.bytes = size
        self.sha256 = sha256


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise EvidenceError(f"found no file {path}, expected it in its attempt", advice=DAMAGED) from None
    except OSError as error:
        raise EvidenceError(f"cannot read {path}: {error.strerror}", advice="check its permissions") from None


def _object(data: bytes, origin: str) -> dict[str, object]:
    value = parse_json(data, origin=origin, error=EvidenceError)
    if not isinstance(value, dict):
        raise EvidenceError(f"{origin}: found no JSON object, expected one")
    return value


def _lines(data: bytes, origin: str) -> list[bytes]:
    # Only "\n" ends a record: bytes.splitlines would also split at "\r", which JSON allows between tokens.
    if data and not data.endswith(b"\n"):
        raise EvidenceError(f"{origin}: found a last line without an end, expected whole lines", advice=DAMAGED)
    return data.split(b"\n")[:-1]


def _changed(path: Path, found: str, expected: str) -> EvidenceError:
    return EvidenceError(f"{path}: found sha256 {found}, expected {expected}", advice=DAMAGED)


def _schema(table: Table) -> None:
    found = table.integer("schema")
    if found != layout.SCHEMA:
        table.fail("schema", str(found), str(layout.SCHEMA), advice="read it with the version that wrote it")


def _attempt(path: Path, data: bytes) -> tuple[Scope, str, int]:
    table = read_with_digest(data, origin=str(path / layout.ATTEMPT), known=layout.ATTEMPT_FIELDS)
    _schema(table)
    scope = Scope.from_table(table.table("scope", known=SCOPE_FIELDS))
    prefix = table.text("prefix")
    number = table.integer("number", minimum=1)
    table.string("created")
    expected = layout.attempt_folder(layout.folder_of(Path(), scope, prefix), number)
    if path.absolute().parts[-2:] != expected.parts[-2:]:
        raise EvidenceError(
            f"{path / layout.ATTEMPT}: found the attempt of {'/'.join(expected.parts[-2:])}, expected that of "
            f"{'/'.join(path.absolute().parts[-2:])}",
            advice="an attempt's folder was copied or renamed: restore it, or start over in a new --run-dir",
        )
    return scope, prefix, number


def _entries(path: Path, data: bytes, head: bytes) -> list[_Entry]:
    entries: dict[str, _Entry] = {}
    previous = sha256_bytes(head)
    for number, line in enumerate(_lines(data, str(path)), start=1):
        origin = f"{path}, line {number}"
        value = parse_json(line, origin=origin, error=EvidenceError, advice=DAMAGED)
        table = Table(value, origin=origin, error=EvidenceError, known=layout.MANIFEST_FIELDS)
        carried = table.sha256("previous")
        if carried != previous:
            before = layout.ATTEMPT if number == 1 else "the line before"
            raise EvidenceError(
                f"{origin}: found sha256 {previous} of {before}, expected {carried}: a line was changed, removed, "
                "added or moved",
                advice=DAMAGED,
            )
        require_canonical(value, line + b"\n", origin=origin)
        name = table.string("name")
        if not layout.may_be_named(name):
            raise EvidenceError(f"{origin}: found the name '{name}', expected one that evidence has", advice=DAMAGED)
        if name in entries:
            raise EvidenceError(f"{origin}: found '{name}' again, expected each file once", advice=DAMAGED)
        entries[name] = _Entry(number, name, table.integer("bytes", minimum=0), table.sha256("sha256"))
        previous = sha256_bytes(canonical_bytes(value))
    return list(entries.values())


def _outcome(path: Path, manifest: bytes) -> tuple[AttemptOutcome, str, int | None]:
    place = path / layout.OUTCOME
    if not place.exists():
        return "unfinished", "", None
    table = read_with_digest(_read(place), origin=str(place), known=layout.OUTCOME_FIELDS)
    _schema(table)
    outcome = table.choice("outcome", layout.OUTCOMES)
    reason = table.text("reason")
    table.string("finished")
    expected = table.sha256("manifest")
    found = sha256_bytes(manifest)
    if found != expected:
        raise _changed(path / layout.MANIFEST, found, expected)
    files = table.integer("files", minimum=0)
    return ("complete" if outcome == "complete" else "failed"), reason, files


def _verify(path: Path, entry: _Entry) -> None:
    said = f"as {layout.MANIFEST}, line {entry.line}, says"
    if not path.is_file():
        raise EvidenceError(
            f"found no file {path}, expected its content of sha256 {entry.sha256}, {said}", advice=DAMAGED
        )
    try:
        found = sha256_file(path)
        size = path.stat().st_size
    except OSError as error:
        raise EvidenceError(f"cannot read {path}: {error.strerror}", advice="check its permissions") from None
    if found != entry.sha256:
        raise EvidenceError(f"{path}: found sha256 {found}, expected {entry.sha256}, {said}", advice=DAMAGED)
    if size != entry.bytes:
        raise EvidenceError(
            f"{path}: found {size} bytes of sha256 {found}, expected {entry.bytes}, {said}", advice=DAMAGED
        )
