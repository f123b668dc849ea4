"""Reading evidence: what may be reused, and what is never read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from attempt import RECORDS, SCOPE, write_attempt

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.evidence.bundle import Bundle
from pytest_kvqual.evidence.reader import Reader
from pytest_kvqual.evidence.records import Scope

NAMES = ("identity.json", "nll.jsonl")


def test_the_newest_complete_attempt_is_reused(tmp_path: Path) -> None:
    """Of several complete attempts of one scope the last one is given."""
    for _ in range(3):
        write_attempt(tmp_path, outcome="complete")
    reader = Reader.latest(tmp_path, SCOPE, names=NAMES)
    assert reader is not None
    assert (reader.number, reader.records("nll.jsonl")) == (3, RECORDS)


def test_what_is_not_accepted_is_passed_over(tmp_path: Path) -> None:
    """An older attempt is given where the newer ones are not accepted, and none where none is."""
    for _ in range(3):
        write_attempt(tmp_path, outcome="complete")
    reader = Reader.latest(tmp_path, SCOPE, names=NAMES, accept=lambda it: it.number < 3)
    assert reader is not None
    assert reader.number == 2
    assert Reader.latest(tmp_path, SCOPE, names=NAMES, accept=lambda it: False) is None


def test_nothing_is_reused_where_nothing_is(tmp_path: Path) -> None:
    """An empty run directory holds no attempt, which is no error."""
    assert Reader.latest(tmp_path / "gone", SCOPE, names=NAMES) is None


def test_failed_and_unfinished_attempts_are_kept_and_not_reused(tmp_path: Path) -> None:
    """Only a complete attempt stands in for a new capture, however much the others sealed."""
    write_attempt(tmp_path, outcome="failed")
    write_attempt(tmp_path, outcome="unfinished")
    assert Reader.latest(tmp_path, SCOPE, names=NAMES) is None
    write_attempt(tmp_path, outcome="complete")
    write_attempt(tmp_path, outcome="failed")
    reader = Reader.latest(tmp_path, SCOPE, names=NAMES)
    assert reader is not None
    assert reader.number == 3


def test_an_attempt_that_was_killed_at_birth_is_passed_over(tmp_path: Path) -> None:
    """An empty folder, or one with half of what a creation writes, counts as an attempt and stops nothing."""
    path = write_attempt(tmp_path, outcome="complete")
    (path.parent / "attempt-2").mkdir()
    (path.parent / "attempt-3").mkdir()
    (path.parent / "attempt-3" / "attempt.json").write_text("{")
    reader = Reader.latest(tmp_path, SCOPE, names=NAMES)
    assert reader is not None
    assert reader.number == 1
    assert Bundle.create(tmp_path, SCOPE).number == 4


@pytest.mark.parametrize("scope", [replace(SCOPE, lock="c" * 64), replace(SCOPE, engine="c" * 64)])
def test_another_lock_or_engine_is_another_scope(tmp_path: Path, scope: Scope) -> None:
    """Evidence of another lock or engine lies in the same folder and is not reused."""
    write_attempt(tmp_path, scope=scope, outcome="complete")
    assert Reader.latest(tmp_path, SCOPE, names=NAMES) is None


def test_another_length_pool_arm_or_prefix_is_another_folder(tmp_path: Path) -> None:
    """Evidence of another length, pool, arm or prefix is not looked at."""
    write_attempt(tmp_path, outcome="complete")
    for scope in (replace(SCOPE, length=8192), replace(SCOPE, cache_bytes=1), replace(SCOPE, arm="native")):
        assert Reader.latest(tmp_path, scope, names=NAMES) is None
    assert Reader.latest(tmp_path, SCOPE, prefix="x", names=NAMES) is None


def test_a_prefix_is_not_mistaken_for_the_beginning_of_an_arms_name(tmp_path: Path) -> None:
    """Two scopes whose folders have one name keep their evidence apart."""
    write_attempt(tmp_path, scope=replace(SCOPE, arm="xcandidate"), outcome="complete")
    write_attempt(tmp_path, prefix="x", outcome="complete")
    reader = Reader.latest(tmp_path, replace(SCOPE, arm="xcandidate"), names=NAMES)
    other = Reader.latest(tmp_path, SCOPE, prefix="x", names=NAMES)
    assert reader is not None
    assert other is not None
    assert (reader.number, other.number, other.prefix) == (1, 2, "x")


def test_an_attempt_without_all_the_names_gives_way_to_an_older_one(tmp_path: Path) -> None:
    """What is reused has every file that is asked for."""
    write_attempt(tmp_path, outcome="complete")
    bundle = Bundle.create(tmp_path, SCOPE)
    bundle.write("identity.json", {})
    bundle.complete()
    reader = Reader.latest(tmp_path, SCOPE, names=NAMES)
    assert reader is not None
    assert reader.number == 1
    assert Reader.latest(tmp_path, SCOPE, names=[*NAMES, "other.json"]) is None


def test_a_damaged_complete_attempt_is_not_passed_over(tmp_path: Path) -> None:
    """Damage is reported, not avoided by an older or no attempt."""
    write_attempt(tmp_path, outcome="complete")
    path = write_attempt(tmp_path, outcome="complete")
    (path / "oracle.json").write_text("{}")
    with pytest.raises(EvidenceError, match=r"attempt-2/oracle\.json: found sha256"):
        Reader.latest(tmp_path, SCOPE, names=NAMES)


def test_an_unfinished_attempt_can_be_read_while_it_runs(tmp_path: Path) -> None:
    """What is sealed so far is there, for the run that writes it."""
    bundle = Bundle.create(tmp_path, SCOPE)
    bundle.write("identity.json", {"rank": 0})
    reader = Reader.open(bundle.path)
    assert (reader.outcome, reader.document("identity.json")) == ("unfinished", {"rank": 0})


def test_a_file_that_changes_after_it_was_verified_is_not_read(tmp_path: Path) -> None:
    """Each read digests the bytes that it returns."""
    path = write_attempt(tmp_path, outcome="complete")
    reader = Reader.open(path)
    (path / "identity.json").write_text("{}")
    (path / "nll.jsonl").unlink()
    with pytest.raises(EvidenceError, match=r"identity\.json: found sha256 \w{64}, expected \w{64}"):
        reader.document("identity.json")
    with pytest.raises(EvidenceError, match=r"found no file .*nll\.jsonl"):
        reader.records("nll.jsonl")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a": 1}\n[2]\n', r"w\.jsonl, record 2: found no JSON object"),
        (b'{"a": 1}\n{"a": NaN}\n', r"w\.jsonl, record 2: found NaN"),
        (b'{"a": 1}\n\n', r"w\.jsonl, record 2, line 1, column 1: found 'Expecting value'"),
        (b'{"a": 1}\n{"a": 2}', r"w\.jsonl: found a last line without an end"),
        (b'{"a": 1, "a": 2}\n', r"w\.jsonl, record 1: found the key 'a' twice"),
        (b"\xff\n", r"w\.jsonl, record 1 at byte 0: found the byte 0xff"),
    ],
)
def test_records_that_another_process_wrote_are_decoded_strictly(tmp_path: Path, data: bytes, words: str) -> None:
    """A sealed file of another hand is what it was, and still refused where it holds no records."""
    bundle = Bundle.create(tmp_path, SCOPE)
    (bundle.path / "w.jsonl").write_bytes(data)
    bundle.seal("w.jsonl")
    with pytest.raises(EvidenceError, match=words):
        Reader.open(bundle.path).records("w.jsonl")


def test_a_record_may_hold_any_line_end_within(tmp_path: Path) -> None:
    """Only a newline ends a record: carriage returns and Unicode line separators belong to it."""
    bundle = Bundle.create(tmp_path, SCOPE)
    record: dict[str, object] = {"body": "a\r\nb\u2028c\x85d\x0c"}
    with bundle.stream("nll.jsonl") as stream:
        stream.append(record)
    assert Reader.open(bundle.path).records("nll.jsonl") == (record,)


def test_an_empty_stream_is_no_record(tmp_path: Path) -> None:
    """A sealed stream without records is read as none, for the judge to refuse."""
    bundle = Bundle.create(tmp_path, SCOPE)
    with bundle.stream("nll.jsonl"):
        pass
    assert Reader.open(bundle.path).records("nll.jsonl") == ()


def test_a_document_that_is_no_object_is_refused(tmp_path: Path) -> None:
    """A sealed list is no document."""
    bundle = Bundle.create(tmp_path, SCOPE)
    (bundle.path / "w.json").write_text("[]")
    bundle.seal("w.json")
    with pytest.raises(EvidenceError, match=r"w\.json: found no JSON object, expected one"):
        Reader.open(bundle.path).document("w.json")
