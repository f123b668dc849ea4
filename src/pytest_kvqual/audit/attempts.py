"""Reading attempts of evidence: manifests, digests, and what the newest receipts rest on (checks 1, 2, 3 and 5)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.files import DamagedError, Hashed, Tree, canonical, parse, sha256
from pytest_kvqual.audit.receipts import Scope, place_of, scope_of
from pytest_kvqual.audit.shapes import NAME, digest, get, integer, table, text

FOLDER: Final = "evidence"
ATTEMPT, MANIFEST, OUTCOME = "attempt.json", "manifest.jsonl", "outcome.json"
SERVER_LOG: Final = "server.log"
_OWN = (ATTEMPT, MANIFEST, OUTCOME)
_NUMBER = re.compile(r"attempt-([1-9][0-9]{0,8})")
#: Written by the arm's interpreter in a form of its own: strict JSON, not the canonical form.
_OTHER_FORM: Final = ("reference.jsonl", "reference-config.json")
_ARGUMENTS: Final = b"non-default args: "
_ARGUMENTS_LIMIT: Final = 1 << 20


@dataclass(kw_only=True, slots=True)
class Attempt:
    """One attempt.

    ``sealed`` maps the files of its manifest to their digests there, ``intact`` those whose bytes have that digest.
    ``kept`` holds the content that was asked for: a list of records, a document, or of ``server.log`` the arguments.
    """

    bundle: str
    number: int
    scope: Scope | None = None
    outcome: str = "unfinished"
    sealed: dict[str, str] = field(default_factory=dict)
    intact: set[str] = field(default_factory=set)
    kept: dict[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder below ``evidence``."""
        return f"{self.bundle}/attempt-{self.number}"


def read_all(
    tree: Tree, prefix: str, *, arms: Iterable[str], place: tuple[int, int], wanted: Mapping[str, set[str]],
    report: Report,
) -> dict[str, Attempt]:  # fmt: skip
    """Every attempt of these arms at a length and pool size, by its folder below ``evidence``.

    Args:
        tree: The run directory.
        prefix: The prefix of the folders.
        arms: The arm under qualification and the controls.
        place: Length and cache bytes.
        wanted: The names of the files to keep, by the attempt's folder below ``evidence``.
        report: Takes the findings.
    """
    found: dict[str, Attempt] = {}
    folders: list[str] = []
    bundles = {f"{prefix}{arm}-{place[0]}-{place[1]}" for arm in arms}
    with report.reading(1, FOLDER):
        folders = tree.names(FOLDER)
    for folder in folders:
        where = f"{FOLDER}/{folder}"
        kind = tree.kind(FOLDER, folder)
        if kind != "folder":
            report.find(1, where, f"found a {kind}, expected folders of attempts alone")
        elif place_of(folder, "") is None:
            report.find(1, where, "found a stray folder, expected ARM-LENGTH-CACHE_BYTES")
        elif folder not in bundles:
            report.note(f"{where}: of another scope; not audited")
        else:
            for attempt in _bundle(tree, folder, wanted, prefix, report):
                found[attempt.name] = attempt
    return found


def _bundle(tree: Tree, folder: str, wanted: Mapping[str, set[str]], prefix: str, report: Report) -> list[Attempt]:
    numbers: list[int] = []
    with report.reading(1, f"{FOLDER}/{folder}"):
        for entry in tree.names(FOLDER, folder):
            where, match = f"{FOLDER}/{folder}/{entry}", _NUMBER.fullmatch(entry)
            kind = tree.kind(FOLDER, folder, entry)
            if kind != "folder" or match is None:
                what = "folder" if kind == "folder" else kind
                report.find(1, where, f"found a stray {what}, expected attempts alone")
            else:
                numbers.append(int(match[1]))
    numbers.sort()
    for expected, number in enumerate(numbers, start=1):
        if number != expected:
            report.find(
                2, f"{FOLDER}/{folder}", f"found attempt-{number}, expected attempt-{expected} before it: one is gone"
            )
            break
    attempts = []
    for number in numbers:
        attempt = Attempt(bundle=folder, number=number)
        report.look(2)
        with report.reading(2, f"{FOLDER}/{attempt.name}"):
            _read(tree, attempt, wanted.get(attempt.name, set()), prefix, report)
        attempts.append(attempt)
    return attempts


def _read(tree: Tree, attempt: Attempt, wanted: set[str], prefix: str, report: Report) -> None:
    path = (FOLDER, attempt.bundle, f"attempt-{attempt.number}")
    where = "/".join(path)
    names = tree.names(*path)
    for entry in names:
        kind = tree.kind(*path, entry)
        if kind != "file":
            report.find(1, f"{where}/{entry}", f"found a {kind}, expected files alone")
    ended = OUTCOME in names
    if not ended and not wanted:
        # A kill leaves any state behind; nothing rests on this one.
        report.note(f"{where}: begun and never ended; not read")
        return
    try:
        head, manifest = tree.read(*path, ATTEMPT), tree.read(*path, MANIFEST)
    except FileNotFoundError:
        raise DamagedError(f"found no {ATTEMPT} or no {MANIFEST}, expected both") from None
    with report.reading(2, f"{where}/{ATTEMPT}"):
        _head(head, attempt, prefix, f"{where}/{ATTEMPT}", report)
    entries = _manifest(manifest, sha256(head), f"{where}/{MANIFEST}", report)
    attempt.sealed = {name: found for name, (_, found) in entries.items()}
    if ended:
        with report.reading(2, f"{where}/{OUTCOME}"):
            _outcome(tree.read(*path, OUTCOME), attempt, manifest, f"{where}/{OUTCOME}", report)
    for name, (size, stated) in entries.items():
        place = f"{where}/{name}"
        report.look(2)
        with report.reading(2, place):
            found = _file(tree, path, name, attempt if name in wanted else None, report)
            if found != (stated, size):
                what = "sha256 " + found[0] if found[0] != stated else f"{found[1]} bytes"
                expected = stated if found[0] != stated else f"{size} bytes"
                raise DamagedError(f"found {what}, expected {expected}, as the manifest says")
            attempt.intact.add(name)
    loose = [name for name in names if name not in entries and name not in _OWN]
    if loose:
        report.note(f"{where}: unsealed and not read: {', '.join(loose)}")


def _head(data: bytes, attempt: Attempt, prefix: str, where: str, report: Report) -> None:
    document = _sealed(data, ("schema", "scope", "prefix", "number", "created"), where, report)
    attempt.scope = scope_of(get(document, "scope", "attempt"), "scope")
    stem, number = f"{text(document, 'prefix', 'attempt')}{attempt.scope.stem}", integer(document, "number", "attempt")
    if (stem, number) != (attempt.bundle, attempt.number) or document["prefix"] != prefix:
        report.find(2, where, f"found the attempt of {stem}/attempt-{number}, expected that of {attempt.name}")


def _outcome(data: bytes, attempt: Attempt, manifest: bytes, where: str, report: Report) -> None:
    known = ("schema", "outcome", "reason", "files", "manifest", "finished")
    document = _sealed(data, known, where, report)
    outcome = text(document, "outcome", "outcome")
    if outcome not in ("complete", "failed"):
        report.find(2, where, f"outcome: found {outcome!r}, expected complete or failed")
    attempt.outcome = outcome
    stated, found = digest(document, "manifest", "outcome"), sha256(manifest)
    if stated != found:
        report.find(2, where, f"found the manifest of sha256 {found}, expected {stated}")
    files = integer(document, "files", "outcome")
    if files != len(attempt.sealed):
        report.find(2, where, f"files: found {files}, expected {len(attempt.sealed)}, as many as the manifest has")


def _sealed(data: bytes, known: tuple[str, ...], where: str, report: Report) -> dict[str, object]:
    """A document that carries its own digest, of schema 1."""
    document = table(parse(data), "document", (*known, "sha256"))
    stated = digest(document, "sha256", "document")
    found = sha256(canonical({key: value for key, value in document.items() if key != "sha256"}))
    if found != stated:
        raise DamagedError(f"found content of sha256 {found}, expected {stated}")
    if canonical(document) + b"\n" != data:
        report.find(1, where, "found bytes that are not the canonical form of their content")
    report.look(3)
    if document["schema"] != 1:
        report.find(3, where, f"schema: found {document['schema']!r}, expected 1")
    return document


def _manifest(data: bytes, previous: str, where: str, report: Report) -> dict[str, tuple[int, str]]:
    entries: dict[str, tuple[int, str]] = {}
    if data and not data.endswith(b"\n"):
        report.find(2, where, "found a last line without an end, expected whole lines")
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        place = f"{where}, line {number}"
        with report.reading(2, place):
            entry = table(parse(line), "line", ("name", "bytes", "sha256", "previous"))
            carried = digest(entry, "previous", "line")
            if carried != previous:
                report.find(
                    2, place, f"previous: found {carried}, expected {previous} of "
                    f"{ATTEMPT if number == 1 else 'the line before'}: a line was changed, removed, added or moved",
                )  # fmt: skip
            if canonical(entry) != line:
                report.find(1, place, "found bytes that are not the canonical form of their content")
            name = text(entry, "name", "line")
            if not NAME.fullmatch(name) or name in _OWN:
                raise DamagedError(f"found the name {name!r}, expected one that evidence has")
            if name in entries:
                raise DamagedError(f"found {name!r} again, expected each file once")
            entries[name] = (integer(entry, "bytes", "line"), digest(entry, "sha256", "line"))
        previous = sha256(line)
    return entries


def _file(tree: Tree, path: tuple[str, ...], name: str, keep: Attempt | None, report: Report) -> tuple[str, int]:
    """The digest and the size of a sealed file; what is to be kept of it goes into ``keep``."""
    where = f"{'/'.join(path)}/{name}"
    if tree.kind(*path, name) == "none":
        raise DamagedError("found no file, expected what the manifest says")
    with tree.open(*path, name) as file:
        hashed = Hashed(file)
        if keep is not None and name.endswith(".jsonl"):
            keep.kept[name] = _records(hashed, name, where, report)
        elif keep is not None and name.endswith(".json"):
            with report.reading(1, where):
                report.look(1)
                data = hashed.whole()
                keep.kept[name] = value = parse(data)
                if name not in _OTHER_FORM and canonical(value) + b"\n" != data:
                    report.find(1, where, "found bytes that are not the canonical form of their content")
        elif keep is not None and name == SERVER_LOG:
            keep.kept[name] = _arguments(hashed, report, where)
        hashed.rest()
        return hashed.sha256, hashed.size


def _records(hashed: Hashed, name: str, where: str, report: Report) -> list[object]:
    records: list[object] = []
    with report.reading(1, where):
        for number, line in enumerate(hashed.lines(), start=1):
            report.look(1)
            with report.reading(1, f"{where}, line {number}"):
                value = parse(line)
                if not line.endswith(b"\n"):
                    report.find(1, f"{where}, line {number}", "found a last line without an end, expected whole lines")
                elif name not in _OTHER_FORM and canonical(value) + b"\n" != line:
                    report.find(1, f"{where}, line {number}", "found bytes that are not the canonical form of a record")
                records.append(value)
    return records


def _arguments(hashed: Hashed, report: Report, where: str) -> dict[str, object] | None:
    """The engine's arguments as the server printed them once at its start; None where no line has them."""
    with report.reading(1, where):
        for line in hashed.lines():
            start = line.find(_ARGUMENTS)
            if start < 0 or len(line) > _ARGUMENTS_LIMIT:
                continue
            try:
                value = ast.literal_eval(line[start + len(_ARGUMENTS) :].decode("utf-8", "replace").strip())
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                report.note(f"{where}: the line of the engine's arguments cannot be read")
                return None
            if isinstance(value, dict) and all(isinstance(key, str) for key in value):
                return value
            return None
    return None
