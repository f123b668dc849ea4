"""Damage to a run directory by someone who can write every file of it, and who makes the cheap checks fit again.

What no key protects can be written anew: the digests of manifests, outcomes, receipts and of the lock. Each method
edits one thing; :meth:`Attacker.seal` then recomputes every digest that rests on the edited bytes, in the order in
which they rest on each other, so that only a check that derives something from the content can object.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from full_run import ARMS, FullRun

from pytest_kvqual._canonical import canonical_bytes, digest, pretty_bytes, sha256_bytes, sha256_file

Change = Callable[[Any], object]


class Attacker:
    """One run directory, damaged.

    Args:
        run: The run that was copied.
        folder: The copy of its run directory.
    """

    def __init__(self, run: FullRun, folder: Path) -> None:
        self.run = run
        self.folder = folder

    @classmethod
    def copy(cls, run: FullRun, folder: Path) -> Attacker:
        """A copy of the run's directory in ``folder``, which must not exist."""
        shutil.copytree(run.run_dir, folder)
        return cls(run, folder)

    # -- places ------------------------------------------------------------------------------------------------------

    def attempt(self, arm: str) -> Path:
        """An arm's first attempt."""
        return self.folder / "evidence" / self.run.folder(arm) / "attempt-1"

    def receipt(self, gate: str) -> Path:
        """The receipt of a gate."""
        return self.folder / self.run.receipts[gate].name

    @property
    def receipts(self) -> list[Path]:
        """Every receipt, in the gates' order."""
        return sorted((self.folder / "receipts").glob("*/*.json"))

    @property
    def study(self) -> Path:
        """The only copy of a study."""
        (found,) = (self.folder / "study").iterdir()
        return found

    # -- edits -------------------------------------------------------------------------------------------------------

    def document(self, path: Path, change: Change) -> None:
        """Edit a JSON document in place, and write it in the form that it had."""
        data = path.read_bytes()
        value = json.loads(data)
        pretty = pretty_bytes(value) == data
        change(value)
        path.write_bytes(pretty_bytes(value) if pretty else canonical_bytes(value) + b"\n")

    def records(self, arm: str, name: str, change: Change) -> None:
        """Edit a list of records in place."""
        path = self.attempt(arm) / name
        records = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        change(records)
        path.write_bytes(b"".join(canonical_bytes(record) + b"\n" for record in records))

    def body(self, arm: str, name: str, place: int, change: Change) -> None:
        """Edit the body of one record in place."""

        def one(records: list[dict[str, Any]]) -> None:
            value = json.loads(records[place]["body"])
            change(value)
            records[place]["body"] = json.dumps(value, ensure_ascii=False, separators=(",", ":"))

        self.records(arm, name, one)

    def predicate(self, gate: str, change: Change) -> None:
        """Edit the predicate of a receipt in place."""
        self.document(self.receipt(gate), lambda statement: change(statement["predicate"]))

    def text(self, path: Path, old: str, new: str) -> None:
        """Replace the first occurrence of a text that must be there."""
        found = path.read_text(encoding="utf-8")
        if old not in found:
            raise ValueError(f"{path} has no {old!r}")
        path.write_text(found.replace(old, new, 1), encoding="utf-8")

    # -- digests made to fit -----------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Recompute every digest: lock, scopes, manifests, outcomes, then each receipt on the ones before it."""
        lock = self._lock()
        for arm in ARMS:
            for attempt in sorted((self.folder / "evidence" / self.run.folder(arm)).glob("attempt-*")):
                self.seal_attempt(attempt, lock)
        self.seal_receipts(lock)

    def _lock(self) -> str:
        path = self.study / "lock.json"

        def fit(lock: dict[str, Any]) -> None:
            lock["files"] = {name: sha256_file(self.study / name) for name in lock["files"]}

        self.document(path, fit)
        found = sha256_file(path)
        if self.study.name != found:
            self.study.rename(self.study.with_name(found))
        return found

    def seal_attempt(self, attempt: Path, lock: str | None = None) -> None:
        """Recompute an attempt's own digests, with its files in their order; a file that is gone loses its line."""
        if not (attempt / "attempt.json").exists() or not (attempt / "manifest.jsonl").exists():
            return

        def own(document: dict[str, Any]) -> None:
            if lock is not None:
                document["scope"]["lock"] = lock
            document.pop("sha256")
            document["sha256"] = digest(document)

        self.document(attempt / "attempt.json", own)
        previous, lines = sha256_file(attempt / "attempt.json"), []
        for entry in (json.loads(line) for line in (attempt / "manifest.jsonl").read_bytes().splitlines()):
            place = attempt / entry["name"]
            if not place.exists():
                continue
            data = place.read_bytes()
            line = canonical_bytes(
                {"name": entry["name"], "bytes": len(data), "sha256": sha256_bytes(data), "previous": previous}
            )
            lines.append(line)
            previous = sha256_bytes(line)
        manifest = b"".join(line + b"\n" for line in lines)
        (attempt / "manifest.jsonl").write_bytes(manifest)

        def outcome(document: dict[str, Any]) -> None:
            document.pop("sha256")
            document |= {"files": len(lines), "manifest": sha256_bytes(manifest)}
            document["sha256"] = digest(document)

        if (attempt / "outcome.json").exists():
            self.document(attempt / "outcome.json", outcome)

    def seal_receipts(self, lock: str | None = None) -> None:
        """Recompute what receipts say of evidence, of the lock and of each other, and their own digests."""
        known: dict[str, str] = {}
        for path in self.receipts:
            statement = json.loads(path.read_bytes())
            predicate = statement["predicate"]
            if lock is not None:
                predicate["scope"]["lock"] = lock
                predicate["configuration"][0]["digest"]["sha256"] = lock
            for entry in predicate["evidence"]:
                place = self.folder / "evidence" / entry["name"]
                if place.is_file():
                    entry["digest"]["sha256"] = sha256_file(place)
            predicate["requires"] = {gate: known.get(gate, old) for gate, old in predicate["requires"].items()}
            self._number(path, statement)
            known[predicate["gate"]["name"]] = sha256_file(path)

    def _number(self, path: Path, statement: dict[str, Any]) -> None:
        predicate = statement["predicate"]
        predicate.pop("content", None)
        predicate["content"] = digest(statement)
        path.write_bytes(pretty_bytes(statement))
