"""Where evidence lies: ``RUN_DIR/evidence/{prefix}{arm}-{length}-{cache_bytes}/attempt-{n}``.

Each attempt is a folder of its own, numbered from 1 without a gap, and holds:

    attempt.json     its scope and number, with a digest of itself
    manifest.jsonl   one line for each sealed file: name, bytes, sha256, and ``previous``, the SHA-256 of the line
                     before (of the first line: of attempt.json)
    outcome.json     how it ended, the SHA-256 of the manifest, and a digest of itself; absent while it runs, or when
                     the process that ran it was killed

and the files themselves. What is not in the manifest is kept and never read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.evidence.records import Scope

#: The version of the three files above. History: 1, the chained manifest.
SCHEMA: Final = 1
ATTEMPT: Final = "attempt.json"
MANIFEST: Final = "manifest.jsonl"
OUTCOME: Final = "outcome.json"
RESERVED: Final = (ATTEMPT, MANIFEST, OUTCOME)
ATTEMPT_FIELDS: Final = ("schema", "scope", "prefix", "number", "created")
MANIFEST_FIELDS: Final = ("name", "bytes", "sha256", "previous")
OUTCOME_FIELDS: Final = ("schema", "outcome", "reason", "files", "manifest", "finished")
OUTCOMES: Final = ("complete", "failed")

_ATTEMPT_FOLDER = re.compile(r"attempt-([1-9][0-9]{0,8})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PREFIX = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)?")


def scope_folder(root: Path, *, arm: str, length: int, cache_bytes: int, prefix: str = "") -> Path:
    """The folder of one arm's attempts at one length and pool size.

    Raises:
        EvidenceError: ``prefix`` is no part of a folder's name.
    """
    if not _PREFIX.fullmatch(prefix):
        raise EvidenceError(
            f"found the prefix '{prefix}', expected letters, digits, '.', '_' and '-' that begin with a letter or digit"
        )
    return root / "evidence" / f"{prefix}{arm}-{length}-{cache_bytes}"


def folder_of(root: Path, scope: Scope, prefix: str) -> Path:
    """As :func:`scope_folder`, for a scope."""
    return scope_folder(root, arm=scope.arm, length=scope.length, cache_bytes=scope.cache_bytes, prefix=prefix)


def numbers(folder: Path) -> tuple[int, ...]:
    """The numbers of the attempts in a folder, in order; none where the folder is not there.

    Raises:
        EvidenceError: The folder cannot be read.
    """
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise EvidenceError(f"cannot read {folder}: {error.strerror}", advice="check its permissions") from None
    return tuple(sorted(int(match[1]) for name in names if (match := _ATTEMPT_FOLDER.fullmatch(name))))


def attempt_folder(folder: Path, number: int) -> Path:
    """The folder of one attempt."""
    return folder / f"attempt-{number}"


def attempts(root: Path, arm: str, length: int, cache_bytes: int, prefix: str = "") -> tuple[Path, ...]:
    """Every attempt of an arm at a length and pool size, in order, whatever its lock, engine and outcome.

    Raises:
        EvidenceError: A number between 1 and the highest is missing: an attempt was removed.
    """
    folder = scope_folder(root, arm=arm, length=length, cache_bytes=cache_bytes, prefix=prefix)
    found = numbers(folder)
    for expected, number in enumerate(found, start=1):
        if number != expected:
            raise EvidenceError(
                f"{folder}: found attempt-{number}, expected attempt-{expected} before it",
                advice="an attempt was removed, failed ones stay too: restore it, or start over in a new --run-dir",
            )
    return tuple(attempt_folder(folder, number) for number in found)


def may_be_named(name: str) -> bool:
    """Whether evidence may have this name: no separator, not hidden, none of the attempt's own three files."""
    return _FILE.fullmatch(name) is not None and name not in RESERVED


def check_name(name: str, folder: Path) -> None:
    """Refuse a name that evidence may not have.

    Raises:
        EvidenceError: The name is refused.
    """
    if not may_be_named(name):
        raise EvidenceError(
            f"found the evidence name '{name}' for {folder}, expected letters, digits, '.', '_' and '-', and none of "
            f"{', '.join(RESERVED)}"
        )
