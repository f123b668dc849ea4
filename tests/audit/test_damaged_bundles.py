"""Damaged attempts, named by their defect: each is refused, with the file and, where there are two, both digests."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from attempt import SCOPE, write_attempt

from pytest_kvqual._canonical import canonical_bytes, sha256_file
from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.evidence.reader import Reader
from pytest_kvqual.evidence.records import with_digest

DIGESTS = r"found sha256 [0-9a-f]{64}.*, expected [0-9a-f]{64}"


def _lines(path: Path) -> list[bytes]:
    return (path / "manifest.jsonl").read_bytes().splitlines(keepends=True)


def _put(path: Path, lines: list[bytes]) -> None:
    (path / "manifest.jsonl").write_bytes(b"".join(lines))


def _one_byte_of_a_document(path: Path) -> None:
    data = (path / "identity.json").read_bytes()
    (path / "identity.json").write_bytes(data.replace(b"0.25", b"0.26"))


def _one_byte_of_a_stream(path: Path) -> None:
    data = (path / "nll.jsonl").read_bytes()
    (path / "nll.jsonl").write_bytes(data.replace(b"doc-01", b"doc-11"))


def _last_record_cut_off(path: Path) -> None:
    data = (path / "nll.jsonl").read_bytes()
    (path / "nll.jsonl").write_bytes(data[: data.rindex(b"\n", 0, -1) + 1])


def _record_added(path: Path) -> None:
    with (path / "nll.jsonl").open("ab") as file:
        file.write(b"{}\n")


def _file_emptied(path: Path) -> None:
    (path / "reference.jsonl").write_bytes(b"")


def _file_removed(path: Path) -> None:
    (path / "nll.jsonl").unlink()


def _file_replaced_by_a_folder(path: Path) -> None:
    (path / "nll.jsonl").unlink()
    (path / "nll.jsonl").mkdir()


def _two_files_swapped(path: Path) -> None:
    (path / "nll.jsonl").rename(path / "x")
    (path / "reference.jsonl").rename(path / "nll.jsonl")
    (path / "x").rename(path / "reference.jsonl")


def _first_manifest_line_removed(path: Path) -> None:
    _put(path, _lines(path)[1:])


def _middle_manifest_line_removed(path: Path) -> None:
    lines = _lines(path)
    _put(path, [lines[0], *lines[2:]])


def _last_manifest_line_removed(path: Path) -> None:
    _put(path, _lines(path)[:-1])


def _manifest_lines_reordered(path: Path) -> None:
    lines = _lines(path)
    _put(path, [lines[1], lines[0], *lines[2:]])


def _manifest_line_duplicated(path: Path) -> None:
    lines = _lines(path)
    _put(path, [*lines, lines[-1]])


def _manifest_emptied(path: Path) -> None:
    _put(path, [])


def _manifest_removed(path: Path) -> None:
    (path / "manifest.jsonl").unlink()


def _manifest_line_of_a_changed_file_made_to_fit(path: Path) -> None:
    _one_byte_of_a_stream(path)
    lines = _lines(path)
    entry = json.loads(lines[1])
    entry["sha256"] = sha256_file(path / "nll.jsonl")
    _put(path, [lines[0], canonical_bytes(entry) + b"\n", *lines[2:]])


def _failed_outcome_made_complete(path: Path) -> None:
    data = (path / "outcome.json").read_bytes()
    (path / "outcome.json").write_bytes(data.replace(b'"reason":""', b'"reason":"x"'))


def _outcome_of_another_attempt(path: Path) -> None:
    other = write_attempt(path.parents[3] / "other", scope=replace(SCOPE, engine="c" * 64), outcome="complete")
    (path / "outcome.json").write_bytes((other / "outcome.json").read_bytes())


def _outcome_that_counts_wrong(path: Path) -> None:
    document = json.loads((path / "outcome.json").read_bytes())
    document.pop("sha256")
    (path / "outcome.json").write_bytes(with_digest({**document, "files": 9}))


def _outcome_of_an_unknown_schema(path: Path) -> None:
    document = json.loads((path / "outcome.json").read_bytes())
    document.pop("sha256")
    (path / "outcome.json").write_bytes(with_digest({**document, "schema": 2}))


def _attempt_of_an_unknown_schema(path: Path) -> None:
    document = json.loads((path / "attempt.json").read_bytes())
    document.pop("sha256")
    (path / "attempt.json").write_bytes(with_digest({**document, "schema": 2}))


def _scope_edited(path: Path) -> None:
    data = (path / "attempt.json").read_bytes()
    (path / "attempt.json").write_bytes(data.replace(b"b" * 64, b"c" * 64))


def _scope_edited_and_digested_anew(path: Path) -> None:
    document = json.loads((path / "attempt.json").read_bytes())
    document.pop("sha256")
    document["scope"]["engine"] = "c" * 64
    (path / "attempt.json").write_bytes(with_digest(document))


def _attempt_removed(path: Path) -> None:
    (path / "attempt.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_one_byte_of_a_document, rf"identity\.json: {DIGESTS}"),
        (_one_byte_of_a_stream, rf"nll\.jsonl: {DIGESTS}"),
        (_last_record_cut_off, rf"nll\.jsonl: {DIGESTS}"),
        (_record_added, rf"nll\.jsonl: {DIGESTS}"),
        (_file_emptied, rf"reference\.jsonl: {DIGESTS}"),
        (
            _file_removed,
            r"found no file .*nll\.jsonl, expected its content of sha256 \w{64}, as manifest\.jsonl, line 2, says",
        ),
        (_file_replaced_by_a_folder, r"found no file .*nll\.jsonl, expected its content"),
        (_two_files_swapped, rf"nll\.jsonl: {DIGESTS}"),
        (_first_manifest_line_removed, rf"manifest\.jsonl: {DIGESTS}"),
        (_middle_manifest_line_removed, rf"manifest\.jsonl: {DIGESTS}"),
        (_last_manifest_line_removed, rf"manifest\.jsonl: {DIGESTS}"),
        (_manifest_lines_reordered, rf"manifest\.jsonl: {DIGESTS}"),
        (_manifest_line_duplicated, rf"manifest\.jsonl: {DIGESTS}"),
        (_manifest_emptied, rf"manifest\.jsonl: {DIGESTS}"),
        (_manifest_removed, r"found no file .*manifest\.jsonl"),
        (_manifest_line_of_a_changed_file_made_to_fit, rf"manifest\.jsonl: {DIGESTS}"),
        (_failed_outcome_made_complete, r"outcome\.json: found content of sha256 \w{64}, expected \w{64}"),
        (_outcome_of_another_attempt, rf"manifest\.jsonl: {DIGESTS}"),
        (_outcome_that_counts_wrong, r"outcome\.json: found 9 files, expected 4 as sealed"),
        (_outcome_of_an_unknown_schema, r"outcome\.json: in 'schema': found 2, expected 1"),
        (_attempt_of_an_unknown_schema, r"attempt\.json: in 'schema': found 2, expected 1"),
        (_scope_edited, r"attempt\.json: found content of sha256 \w{64}, expected \w{64}"),
        (_scope_edited_and_digested_anew, rf"manifest\.jsonl, line 1: {DIGESTS}"),
        (_attempt_removed, r"found no file .*attempt\.json"),
    ],
)
def test_a_damaged_attempt_is_refused(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    """The defect is found on opening, named in one line, and not passed over when the attempt is looked for."""
    path = write_attempt(tmp_path / "run", outcome="complete")
    damage(path)
    with pytest.raises(EvidenceError) as caught:
        Reader.open(path)
    assert re.search(words, str(caught.value))
    assert "\n" not in caught.value.line()
    assert str(path) in str(caught.value)
    if damage is _scope_edited_and_digested_anew:
        # It passes for another scope then, which is not what is looked for.
        assert Reader.latest(tmp_path / "run", SCOPE, names=["nll.jsonl"]) is None
        return
    with pytest.raises(EvidenceError):
        Reader.latest(tmp_path / "run", SCOPE, names=["nll.jsonl"])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_first_manifest_line_removed, rf"manifest\.jsonl, line 1: {DIGESTS}"),
        (_middle_manifest_line_removed, rf"manifest\.jsonl, line 2: {DIGESTS}"),
        (_manifest_lines_reordered, rf"manifest\.jsonl, line 1: {DIGESTS}"),
        (_manifest_line_duplicated, rf"manifest\.jsonl, line 5: {DIGESTS}"),
        (_manifest_line_of_a_changed_file_made_to_fit, rf"manifest\.jsonl, line 3: {DIGESTS}"),
    ],
)
def test_the_chain_alone_shows_an_edited_manifest(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    """Without an outcome, the lines themselves still tell that one of them was removed, moved, doubled or changed."""
    path = write_attempt(tmp_path / "run", outcome="unfinished")
    damage(path)
    with pytest.raises(EvidenceError) as caught:
        Reader.open(path)
    assert re.search(words, str(caught.value))


def test_a_torn_manifest_is_named(tmp_path: Path) -> None:
    """Half a line at the end, as a power cut leaves it, is no line."""
    path = write_attempt(tmp_path / "run", outcome="unfinished")
    _put(path, [*_lines(path)[:-1], _lines(path)[-1][:40]])
    with pytest.raises(EvidenceError, match=r"manifest\.jsonl: found a last line without an end"):
        Reader.open(path)


def test_a_manifest_line_with_other_white_space_is_refused(tmp_path: Path) -> None:
    """Even the last line of an unfinished attempt is what was written, byte for byte."""
    path = write_attempt(tmp_path / "run", outcome="unfinished")
    lines = _lines(path)
    _put(path, [*lines[:-1], lines[-1].replace(b'":', b'": ', 1)])
    with pytest.raises(EvidenceError, match=r"manifest\.jsonl, line 4: found bytes that are not the canonical form"):
        Reader.open(path)


def test_a_manifest_that_leaves_its_folder_is_refused(tmp_path: Path) -> None:
    """A line that names a file elsewhere is not followed."""
    path = write_attempt(tmp_path / "run", outcome="unfinished")
    lines = _lines(path)
    entry = json.loads(lines[-1])
    _put(path, [*lines[:-1], canonical_bytes({**entry, "name": "../x"}) + b"\n"])
    with pytest.raises(EvidenceError, match=r"manifest\.jsonl, line 4: found the name '\.\./x'"):
        Reader.open(path)


def test_an_attempt_copied_to_another_number_is_refused(tmp_path: Path) -> None:
    """A copy does not become a second attempt."""
    path = write_attempt(tmp_path / "run", outcome="complete")
    shutil.copytree(path, path.parent / "attempt-2")
    with pytest.raises(
        EvidenceError, match=r"found the attempt of candidate-1024-4096/attempt-1, expected that of .*-2"
    ):
        Reader.open(path.parent / "attempt-2")


def test_an_attempt_moved_to_another_pool_is_refused(tmp_path: Path) -> None:
    """Renaming its folder does not make evidence of another scope."""
    path = write_attempt(tmp_path / "run", outcome="complete")
    path.parent.rename(path.parent.with_name("candidate-1024-8192"))
    with pytest.raises(EvidenceError, match="expected that of candidate-1024-8192/attempt-1"):
        Reader.open(path.parent.with_name("candidate-1024-8192") / "attempt-1")


def test_a_run_directory_may_be_moved_whole(tmp_path: Path) -> None:
    """Evidence does not depend on where the run directory is: a reviewer reads a copy."""
    write_attempt(tmp_path / "run", outcome="complete")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert Reader.latest(tmp_path / "copy", SCOPE, names=["nll.jsonl"]) is not None
