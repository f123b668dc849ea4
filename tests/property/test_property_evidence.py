"""Properties of canonical bytes and of evidence: round trips, numbering, and that no edit goes unseen."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from attempt import SCOPE, write_attempt
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvqual._canonical import canonical_bytes, pretty_bytes
from pytest_kvqual._decode import parse_json
from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.evidence.bundle import Bundle
from pytest_kvqual.evidence.reader import Reader, attempts

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4))
RECORDS = st.dictionaries(TEXT, VALUES, max_size=4)


@given(VALUES)
def test_a_value_comes_back_from_its_canonical_bytes(value: object) -> None:
    """Reading gives an equal value of the same types, and writing it again the same bytes."""
    data = canonical_bytes(value)
    back = parse_json(data, origin="FILE", error=EvidenceError)
    assert back == value
    assert repr(back) == repr(json.loads(json.dumps(value, sort_keys=True)))
    assert canonical_bytes(back) == data
    assert parse_json(pretty_bytes(value), origin="FILE", error=EvidenceError) == value


@given(st.dictionaries(TEXT, SCALARS, max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(value: dict[str, object], random: object) -> None:
    """Two mappings of the same items have the same bytes."""
    items = list(value.items())
    random.shuffle(items)  # type: ignore[attr-defined]  # Hypothesis types its Random as object
    assert canonical_bytes(dict(items)) == canonical_bytes(value)


@given(st.binary(max_size=60) | TEXT.map(str.encode))
def test_no_bytes_raise_anything_but_the_given_error(data: bytes) -> None:
    """Whatever stands in a file, reading it gives a value or one typed error of one line."""
    try:
        parse_json(data, origin="FILE", error=EvidenceError)
    except EvidenceError as error:
        assert error.line().isprintable()  # noqa: PT017  # the absence of an error is right too


@settings(max_examples=25, deadline=None)
@given(st.lists(RECORDS, max_size=5), RECORDS)
def test_records_and_documents_come_back(records: list[dict[str, object]], document: dict[str, object]) -> None:
    """What is appended and written is read, in order, from a verified attempt."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = Bundle.create(Path(folder), SCOPE)
        with bundle.stream("records.jsonl") as stream:
            for record in records:
                stream.append(record)
        bundle.write("document.json", document)
        bundle.complete()
        reader = Reader.latest(Path(folder), SCOPE, names=["records.jsonl", "document.json"])
        assert reader is not None
        assert reader.records("records.jsonl") == tuple(records)
        assert reader.document("document.json") == document


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(1, 10**6), max_size=6))
def test_the_next_attempt_is_one_above_the_highest(numbers: set[int]) -> None:
    """Whatever numbers are there, the next one is new and the largest."""
    with tempfile.TemporaryDirectory() as folder:
        scope_folder = Path(folder) / "evidence" / "candidate-1024-4096"
        for number in numbers:
            (scope_folder / f"attempt-{number}").mkdir(parents=True)
        assert Bundle.create(Path(folder), SCOPE).number == max(numbers, default=0) + 1


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12))
def test_attempts_are_listed_in_the_order_of_their_numbers(count: int) -> None:
    """Attempt 10 comes after attempt 9, and no attempt is left out."""
    with tempfile.TemporaryDirectory() as folder:
        made = [Bundle.create(Path(folder), SCOPE).path for _ in range(count)]
        assert attempts(Path(folder), "candidate", 1024, 4096) == tuple(made)


class _Attempt:
    """An attempt that each example damages and gets back as it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = {entry.name: entry.read_bytes() for entry in sorted(path.iterdir())}

    def refused(self, name: str, data: bytes) -> bool:
        """Whether the attempt is refused with these bytes in one file."""
        (self.path / name).write_bytes(data)
        try:
            Reader.open(self.path)
        except EvidenceError as error:
            return name in str(error) and error.line().isprintable()
        finally:
            (self.path / name).write_bytes(self.files[name])
        return False

    def may_end_with(self, manifest: bytes) -> bool:
        """Whether an attempt that was killed before it sealed the rest would have left this manifest."""
        whole = not manifest or manifest.endswith(b"\n")
        return whole and "outcome.json" not in self.files and self.files["manifest.jsonl"].startswith(manifest)


@pytest.fixture(scope="module", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """These properties are about bytes: what fsync promises is tested where bundles are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module", params=["complete", "failed", "unfinished"])
def attempt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Attempt]:
    """A whole attempt of each outcome."""
    root = tmp_path_factory.mktemp("tamper")
    yield _Attempt(write_attempt(root, outcome=request.param))
    shutil.rmtree(root)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_one_edited_byte_of_any_file_is_seen(attempt: _Attempt, data: st.DataObject) -> None:
    """Any byte of any file of an attempt, changed to any other, is refused with the file's name."""
    name = data.draw(st.sampled_from(sorted(attempt.files)))
    content = attempt.files[name]
    place = data.draw(st.integers(0, len(content) - 1))
    flip = data.draw(st.integers(1, 255))
    edited = content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :]
    assert attempt.refused(name, edited)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_inserted_bytes_of_any_file_are_seen(attempt: _Attempt, data: st.DataObject) -> None:
    """Bytes inserted anywhere in any file are refused with the file's name."""
    name = data.draw(st.sampled_from(sorted(attempt.files)))
    content = attempt.files[name]
    place = data.draw(st.integers(0, len(content)))
    added = data.draw(st.binary(min_size=1, max_size=3) | st.sampled_from([b" ", b"\n", content]))
    assert attempt.refused(name, content[:place] + added + content[place:])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cut_bytes_of_any_file_are_seen(attempt: _Attempt, data: st.DataObject) -> None:
    """Bytes removed anywhere in any file are refused, except the last whole manifest lines of an unfinished attempt."""
    name = data.draw(st.sampled_from(sorted(attempt.files)))
    content = attempt.files[name]
    start = data.draw(st.integers(0, len(content) - 1))
    stop = data.draw(st.integers(start + 1, len(content)))
    kept = content[:start] + content[stop:]
    if name == "manifest.jsonl" and attempt.may_end_with(kept):
        return
    assert attempt.refused(name, kept)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_other_arrangement_of_the_manifest_is_seen(attempt: _Attempt, data: st.DataObject) -> None:
    """Lines removed, repeated or reordered are refused, except, again, the last ones of an unfinished attempt."""
    lines = attempt.files["manifest.jsonl"].splitlines(keepends=True)
    chosen = data.draw(st.lists(st.sampled_from(lines), max_size=6))
    kept = b"".join(chosen)
    if chosen == lines or attempt.may_end_with(kept):
        return
    assert attempt.refused("manifest.jsonl", kept)
