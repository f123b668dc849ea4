"""Receipts on disk: append-only, numbered, and none left out in silence."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_kvqual.errors import ReceiptError
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.judge.sequence import standing
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict
from pytest_kvqual.receipt.statement import build
from pytest_kvqual.receipt.write import disk_digests, read_all, write

SCOPE = Scope(lock="1" * 64, arm="candidate", length=1024, cache_bytes=4096, engine="2" * 64)
FILE = "candidate-1024-4096/attempt-1/identity.json"


def statement(scope: Scope = SCOPE, *, gate: str = "identity", **changes: Any) -> dict[str, object]:
    """A passed statement."""
    verdict = Verdict(
        gate=gate,
        outcome=changes.pop("outcome", Outcome.PASS),
        figure="as declared",
        null=Check(passed=True, figure="0"),
        poison=(Poison(fault="weights-altered", caught=True, figure="1"),),
    )
    options: dict[str, Any] = {
        "order": 1,
        "evidence": {FILE: hashlib.sha256(b"{}").hexdigest()},
        "requires": {},
        "implementation": "6" * 64,
        **changes,
    }
    return build(verdict, scope, **options)


def evidence(run_dir: Path, data: bytes = b"{}") -> Path:
    """The evidence file that the statements name."""
    path = run_dir / "evidence" / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_numbers_grow_and_nothing_is_overwritten(tmp_path: Path) -> None:
    """Each receipt of a gate in a scope's folder gets the next number; other gates have their own."""
    names = [write(tmp_path, statement()).name for _ in range(3)]
    names.append(write(tmp_path, statement(gate="routing", order=3)).name)
    assert names == ["01-identity-1.json", "01-identity-2.json", "01-identity-3.json", "03-routing-1.json"]
    found = read_all(tmp_path)
    assert [(receipt.gate, receipt.attempt) for receipt in found.receipts] == [
        ("identity", 1),
        ("identity", 2),
        ("identity", 3),
        ("routing", 1),
    ]
    assert not found.damaged
    assert found.receipts[0].name == "receipts/candidate-1024-4096/01-identity-1.json"


def test_nothing_written_yet(tmp_path: Path) -> None:
    """A run directory without receipts has none."""
    found = read_all(tmp_path / "never")
    assert (found.receipts, found.damaged) == ((), ())


def test_prefixes_are_apart(tmp_path: Path) -> None:
    """A prefix has its own folders and numbers; each is read under its own prefix only."""
    write(tmp_path, statement())
    path = write(tmp_path, statement(), prefix="first.")
    assert path.parent.name == "first.candidate-1024-4096"
    assert [receipt.attempt for receipt in read_all(tmp_path).receipts] == [1]
    found = read_all(tmp_path, prefix="first.")
    assert [receipt.name for receipt in found.receipts] == ["receipts/first.candidate-1024-4096/01-identity-1.json"]
    assert not found.damaged
    assert not read_all(tmp_path, prefix="second.").receipts


@pytest.mark.parametrize(
    "scope", [replace(SCOPE, arm="native"), replace(SCOPE, length=8192), replace(SCOPE, cache_bytes=1)]
)
def test_scopes_are_apart(tmp_path: Path, scope: Scope) -> None:
    """Another arm, length or pool has a folder of its own."""
    write(tmp_path, statement())
    assert write(tmp_path, statement(scope)).name == "01-identity-1.json"
    assert len(read_all(tmp_path).receipts) == 2


def test_a_changed_byte_is_named_and_its_number_stays_taken(tmp_path: Path) -> None:
    """A tampered receipt is reported by file and reason, and the next receipt does not take its number."""
    path = write(tmp_path, statement(outcome=Outcome.FAIL))
    path.write_bytes(path.read_bytes().replace(b'"FAIL"', b'"PASS"'))
    found = read_all(tmp_path)
    assert not found.receipts
    assert [(item.name, item.gate, item.attempt) for item in found.damaged] == [
        ("receipts/candidate-1024-4096/01-identity-1.json", "identity", 1)
    ]
    assert "found content of sha256" in found.damaged[0].reason
    assert (found.damaged[0].arm, found.damaged[0].length, found.damaged[0].cache_bytes) == ("candidate", 1024, 4096)
    assert write(tmp_path, statement()).name == "01-identity-2.json"


def test_a_moved_or_renamed_receipt_is_damaged(tmp_path: Path) -> None:
    """A receipt stands only where its content says: another folder or another file name is damage."""
    path = write(tmp_path, statement())
    other = path.parent.with_name("candidate-8192-4096")
    other.mkdir()
    (other / path.name).write_bytes(path.read_bytes())
    path.with_name("01-identity-9.json").write_bytes(path.read_bytes())
    path.with_name("notes.txt").write_text("no receipt")
    found = read_all(tmp_path)
    assert [receipt.attempt for receipt in found.receipts] == [1]
    reasons = {item.name.removeprefix("receipts/"): item.reason for item in found.damaged}
    assert reasons["candidate-8192-4096/01-identity-1.json"].startswith("found a receipt of candidate-1024-4096")
    assert reasons["candidate-1024-4096/01-identity-9.json"].startswith("found the file name 01-identity-9.json")
    assert "candidate-1024-4096/notes.txt" in reasons


def test_an_interrupted_write_leaves_no_receipt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up while a receipt is written raises one line with the path, and nothing half is read later."""
    write(tmp_path, statement())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(ReceiptError, match="cannot write the receipt: No space left on device") as error:
            write(tmp_path, statement())
    assert "free space or give another --run-dir" in error.value.line()
    assert len(read_all(tmp_path).receipts) == 1
    assert [path.name for path in (tmp_path / "receipts" / "candidate-1024-4096").iterdir()] == ["01-identity-1.json"]
    (tmp_path / "receipts" / "candidate-1024-4096" / ".tmp-x").write_bytes(b"{")
    assert not read_all(tmp_path).damaged


def test_a_taken_number_is_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another process takes the number first, the next one is used and both files stay."""
    link = os.link
    raced: list[bytes] = []

    def race(source: Any, target: Any) -> None:
        if not raced:
            raced.append(b"other")
            Path(target).write_bytes(b"other")
        link(source, target)

    monkeypatch.setattr("os.link", race)
    path = write(tmp_path, statement())
    assert path.name == "01-identity-2.json"
    assert path.with_name("01-identity-1.json").read_bytes() == b"other"


@pytest.mark.parametrize(
    ("given", "prefix", "text"),
    [
        (statement(gate="a/b"), "", "gate: found 'a/b'"),
        (statement(), "../x", "prefix: found '../x'"),
        ({"predicate": {}}, "", "receipt"),
    ],
)
def test_names_that_are_no_names_are_refused(tmp_path: Path, given: dict[str, object], prefix: str, text: str) -> None:
    """Nothing is written outside the receipts' folder, nor anything that is no statement."""
    with pytest.raises(ReceiptError) as error:
        write(tmp_path, given, prefix=prefix)
    assert text in str(error.value)
    assert not list(tmp_path.rglob("*.json"))


def test_disk_digests(tmp_path: Path) -> None:
    """An evidence file has its digest, hashed once; one that is absent, or outside the evidence, has none."""
    path = evidence(tmp_path)
    (tmp_path / "secret").write_text("x")
    look = disk_digests(tmp_path)
    assert look(FILE) == hashlib.sha256(b"{}").hexdigest()
    path.write_bytes(b"changed")
    assert look(FILE) == hashlib.sha256(b"{}").hexdigest()
    assert disk_digests(tmp_path)(FILE) == hashlib.sha256(b"changed").hexdigest()
    for name in ("../secret", "a/../../secret", "nothing", "", "/etc/hostname", "candidate-1024-4096"):
        assert look(name) is None, name


def test_from_disk_to_standing(tmp_path: Path, small_study: Any) -> None:
    """What was written stands; one changed byte of evidence or of the receipt does not, and the reason is named."""
    evidence(tmp_path)
    path = write(tmp_path, statement())

    def refusal() -> str:
        found = read_all(tmp_path)
        state = standing(
            small_study,
            "routing",
            found.receipts,
            SCOPE,
            implementation="6" * 64,
            digests=disk_digests(tmp_path),
            damaged=found.damaged,
        )
        return "; ".join(item.line() for item in state.refusals)

    assert refusal() == ""
    evidence(tmp_path, b"[]")
    assert f"evidence {FILE}: found sha256 {hashlib.sha256(b'[]').hexdigest()}, expected sha256" in refusal()
    evidence(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"as declared", b"as Declared"))
    assert refusal().startswith("identity: damaged: receipts/candidate-1024-4096/01-identity-1.json: found content")


def _as_pipe(path: Path) -> None:
    os.mkfifo(path)


def _as_folder(path: Path) -> None:
    path.mkdir()


def _as_link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def _as_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def _as_huge_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 65 << 20)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (_as_pipe, "a pipe or a device"),
        (_as_folder, "a folder"),
        (_as_link_to_nothing, "a link to nothing"),
        (_as_link_to_itself, "a link to itself"),
        (_as_huge_file, "more than 64 MiB"),
    ],
)
def test_what_is_no_plain_file_is_a_damaged_receipt(tmp_path: Path, make: Callable[[Path], None], what: str) -> None:
    """A pipe in the place of the newest receipt is not waited for, and nothing else hides those beside it."""
    write(tmp_path, statement())
    make(tmp_path / "receipts" / "candidate-1024-4096" / "01-identity-2.json")
    found = read_all(tmp_path)
    assert [receipt.attempt for receipt in found.receipts] == [1]
    assert [(it.gate, it.attempt, it.reason) for it in found.damaged] == [
        ("identity", 2, f"found {what}, expected a plain file")
    ]
