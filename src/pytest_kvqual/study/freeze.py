"""Freeze a study: write, and later verify, the digests of everything that a verdict may depend on.

The lock names files relative to what holds them (the study's folder, the package, ``qualification``), so that it is
the same in a checkout and wherever a wheel is installed. Two freezes of the same files give the same bytes.

History of ``lock.json``:
    1: study files, weights, implementation; the model's format, where the study has several.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pytest_kvqual import _places
from pytest_kvqual._canonical import pretty_bytes, sha256_bytes, sha256_file
from pytest_kvqual._decode import Table, parse_json
from pytest_kvqual.errors import EvidenceError, LockError
from pytest_kvqual.study.load import (
    STUDY_FILE,
    argument,
    is_shipped,
    load_study,
    require_own,
    require_prepared,
)
from pytest_kvqual.study.model import Study
from pytest_kvqual.study.panels import check_files
from pytest_kvqual.study.timing_files import check_timing_files

__all__ = ["LOCK_FILE", "Lock", "freeze", "freeze_command", "keep", "lock_path", "verify_lock"]

SCHEMA: Final = 1
LOCK_FILE: Final = "lock.json"

#: What Python can import from an arm's ``pythonpath``.
_CODE: Final = (".py", ".so")
_PACKAGE: Final = "pytest_kvqual"
_SHOWN: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    """A lock that matches.

    ``sha256`` is that of the lock file's bytes. ``files`` (study.toml and what it points to, relative to the study's
    folder), ``weights`` (the model's folder) and ``implementation`` map names to SHA-256.
    """

    path: Path
    sha256: str
    files: Mapping[str, str]
    weights: Mapping[str, str]
    implementation: Mapping[str, str]


def lock_path(study: Study) -> Path:
    """Where the study's lock is, or will be: each format of a model has one of its own."""
    name = study.model.format
    return study.directory / (LOCK_FILE if name is None else f"lock-{name}.json")


def freeze(study: Study) -> Path:
    """Write the study's lock over any earlier one, whole or not at all, and return its path.

    Raises:
        StudyError: The study is not prepared; a panel or scales file does not fit it; a trace or plan is not what
            ``kvqual trace`` and ``kvqual plan`` write; the lock of an installed package's study would be another one.
        LockError: A file cannot be read, or the lock cannot be written.
    """
    require_prepared(study)
    check_files(study)
    check_timing_files(study)
    path = lock_path(study)
    data = pretty_bytes(_content(study))
    if is_shipped(study):
        if path.is_file() and path.read_bytes() == data:
            return path
        require_own(study)
    # The process id keeps two freezes of one study from writing into each other's file.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        raise LockError(
            f"cannot write {path}: {error.strerror or error}", advice="freeze a study in a folder that you may write to"
        ) from error
    return path


def verify_lock(study: Study) -> Lock:
    """The study's lock, if every file that it names is still as it was frozen, and no other has joined them.

    Raises:
        StudyError: The study is not prepared.
        LockError: There is no lock, it is damaged, it is another format's, or it no longer matches: names each file
            that changed, was added or was removed, the first with both digests.
    """
    require_prepared(study)
    path = lock_path(study)
    again = f"`kvqual freeze {argument(study)}`"
    if is_shipped(study):
        again = f"`kvqual copy {study.directory.name} FOLDER` and freeze that one"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise LockError(
            f"found no lock {path}, expected the frozen study {study.name}", advice=f"run {again}"
        ) from None
    except OSError as error:
        raise LockError(f"cannot read {path}: {error.strerror}", advice="check its permissions") from None
    locked = _decode(path, data, again)
    if locked["study"] != study.name:
        raise LockError(
            f"{path}: found the lock of study {locked['study']}, expected that of {study.name}", advice=f"run {again}"
        )
    if locked.get("format") != study.model.format:
        raise LockError(
            f"{path}: found the lock of format {locked.get('format')}, expected that of {study.model.format}",
            advice=f"run {again}",
        )
    current = _content(study)
    changes = [
        *_changes(locked["files"], current["files"]),
        *_changes(locked["weights"], current["weights"], what="weights "),
        *_changes(locked["implementation"], current["implementation"]),
    ]
    if changes:
        raise LockError(
            f"{path} no longer matches: {_list(changes)}",
            advice=f"undo the change, or run {again}: evidence and receipts of the old lock count no more",
        )
    return Lock(
        path=path,
        sha256=sha256_bytes(data),
        files=_frozen(locked["files"]),
        weights=_frozen(locked["weights"]),
        implementation=_frozen(locked["implementation"]),
    )


def keep(study: Study, lock: Lock, run_dir: Path) -> Path:
    """Copy the lock and the study files that it names to ``RUN_DIR/study/SHA-256 OF THE LOCK``; returns that folder.

    So a run directory holds all that its verdicts can be derived from again. A copy that is there already is left as it
    is; a reader holds it against the lock.

    Raises:
        EvidenceError: The copy cannot be written.
    """
    folder = run_dir / "study" / lock.sha256
    try:
        for name, source in ((LOCK_FILE, lock.path), *_study_files(study).items()):
            target = folder / name
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                # Runs of other arms may keep the same study in the same run directory at this moment.
                scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
                shutil.copyfile(source, scratch)
                scratch.replace(target)
    except OSError as error:
        raise EvidenceError(
            f"cannot write {folder}: {error.strerror or error}", advice="give a --run-dir that you may write to"
        ) from error
    return folder


def freeze_command(name_or_path: str, *, check: bool, format: str | None = None) -> str:
    """What ``kvqual freeze NAME`` does, or with ``check`` what ``kvqual freeze --check NAME`` does; returns its line.

    Args:
        name_or_path: As :func:`pytest_kvqual.study.load.find_study` takes it.
        check: Write nothing; verify the lock that is there.
        format: As :func:`pytest_kvqual.study.load.load_study` takes it.

    Raises:
        StudyError: The study, a panel or a scales file is malformed.
        LockError: As :func:`freeze` and :func:`verify_lock`.
    """
    study = load_study(name_or_path, format)
    path = lock_path(study)
    if check:
        require_prepared(study)
        check_files(study)
        check_timing_files(study)
        said = "matches"
    else:
        before = path.read_bytes() if path.is_file() else None
        freeze(study)
        said = "frozen" if before is None else "unchanged" if path.read_bytes() == before else "frozen anew"
    lock = verify_lock(study)
    return (
        f"{study.name}: {said}: {path} (sha256 {lock.sha256}; {len(lock.files)} study files, {len(lock.weights)} model "
        f"files, {len(lock.implementation)} implementation files)"
    )


def _content(study: Study) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "study": study.name,
        **({} if study.model.format is None else {"format": study.model.format}),
        "files": _digests(_study_files(study)),
        "weights": dict(study.model.files),
        "implementation": _digests(_implementation_files(study)),
    }


def _study_files(study: Study) -> dict[str, Path]:
    named = [study.directory / STUDY_FILE, study.parity.panel]
    named += [study.model.files_path] if study.model.files_path is not None else []
    named += [path for length in study.lengths.values() for path in length.panels.values()]
    named += [arm.scales for arm in study.arms.values() if arm.scales is not None]
    named += [study.gsm8k_source.shots] if study.gsm8k_source is not None else []
    for rules in study.timing.values():
        named += [rules.panel, rules.plan, *(cell.trace for cell in rules.cells)]
    files = {path.relative_to(study.directory).as_posix(): path for path in named}
    for arm in study.arms.values():
        for index, folder in enumerate(arm.pythonpath):
            inside = folder.is_relative_to(study.directory)
            base = study.directory if inside else folder
            label = "" if inside else f"arms/{arm.name}/pythonpath[{index}]/"
            for path in _code(folder, _CODE):
                files[label + path.relative_to(base).as_posix()] = path
    return files


def _implementation_files(study: Study) -> dict[str, Path]:
    package = _places.PACKAGE
    # What a wheel puts there has its name from the checkout: the gates one of their own, studies and documents none.
    apart = tuple(package / name for name in _places.SHIPPED) if _places.installed() else ()
    files = {
        f"{_PACKAGE}/{path.relative_to(package).as_posix()}": path
        for path in _code(package, (".py",))
        if not any(path.is_relative_to(folder) for folder in apart)
    }
    # The gates stand next to the studies; a study elsewhere is run by the package's own. So is every study under an
    # installed package, whatever else its user's project calls by that name.
    name = _places.QUALIFICATION
    beside = () if _places.installed() else (study.directory.parent.parent / name,)
    places = (*beside, _places.folder(name))
    gates = next((place for place in places if place.is_dir()), None)
    if gates is not None:
        files |= {f"{name}/{path.relative_to(gates).as_posix()}": path for path in _code(gates, (".py",))}
    return files


def _code(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """The code below a folder. Byte code and hidden files (an editor's, a repository's) are none."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        for name in sorted(names):
            if name.endswith(suffixes) and not name.startswith("."):
                yield Path(place) / name


def _digests(files: Mapping[str, Path]) -> dict[str, str]:
    found = {}
    for name, path in files.items():
        try:
            found[name] = sha256_file(path)
        except OSError as error:
            raise LockError(
                f"cannot read {path}: {error.strerror}",
                advice="restore it or its permissions; `kvqual trace` and `kvqual plan` write traces and plans",
            ) from None
    return found


def _decode(path: Path, data: bytes, again: str) -> dict[str, object]:
    advice = f"restore it, or run {again}"
    value = parse_json(data, origin=str(path), error=LockError, advice=advice)
    table = Table(
        value,
        origin=str(path),
        error=LockError,
        known=("schema", "study", "format", "files", "weights", "implementation"),
    )
    schema = table.integer("schema")
    if schema != SCHEMA:
        table.fail("schema", str(schema), str(SCHEMA), advice=f"run {again}")
    content: dict[str, object] = {
        "schema": schema,
        "study": table.string("study"),
        **({"format": table.string("format")} if table.has("format") else {}),
        "files": table.sha256_map("files"),
        "weights": table.sha256_map("weights"),
        "implementation": table.sha256_map("implementation"),
    }
    expected = pretty_bytes(content)
    if data != expected:
        raise LockError(
            f"{path}: found bytes of sha256 {sha256_bytes(data)}, expected {sha256_bytes(expected)} as freeze writes "
            "this content",
            advice=advice,
        )
    return content


def _map(value: object) -> dict[str, str]:
    return {str(name): str(digest) for name, digest in value.items()} if isinstance(value, dict) else {}


def _frozen(value: object) -> Mapping[str, str]:
    return MappingProxyType(_map(value))


def _changes(locked_value: object, current_value: object, *, what: str = "") -> list[tuple[str, str]]:
    """The name and the story of each difference, changed files first."""
    locked, current = _map(locked_value), _map(current_value)
    changed = [
        (what + name, f"found sha256 {current[name]}, expected {locked[name]}")
        for name in sorted(locked.keys() & current.keys())
        if locked[name] != current[name]
    ]
    added = [
        (what + name, f"found sha256 {current[name]}, expected no such file (added)")
        for name in sorted(current.keys() - locked.keys())
    ]
    removed = [
        (what + name, f"found no such file (removed), expected sha256 {locked[name]}")
        for name in sorted(locked.keys() - current.keys())
    ]
    return changed + added + removed


def _list(changes: list[tuple[str, str]]) -> str:
    shown = [f"{name}: {story}" for name, story in changes[:_SHOWN]]
    more = len(changes) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")
