"""The lock: what it names, when it matches, and what it says when it does not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_study import TinyStudy

from pytest_kvqual import _places
from pytest_kvqual._canonical import sha256_bytes, sha256_file
from pytest_kvqual.errors import LockError, StudyError
from pytest_kvqual.study import freeze as room
from pytest_kvqual.study.freeze import Lock, freeze, freeze_command, lock_path, verify_lock
from pytest_kvqual.study.load import load_study

PACKAGE = Path(room.__file__).resolve().parents[1]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of this package that the lock takes for the implementation, to be changed at will."""
    copy = tmp_path / "project" / "src" / "pytest_kvqual"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(_places, "PACKAGE", copy)
    return copy


@pytest.fixture
def gates(tmp_path: Path) -> Path:
    """A ``qualification`` folder next to the tiny study's ``studies`` folder."""
    folder = tmp_path / "project" / "qualification"
    (folder / "controls").mkdir(parents=True)
    (folder / "test_01_identity.py").write_text("one = 1\n")
    (folder / "controls" / "faults.py").write_text("two = 2\n")
    return folder


def _verify(tiny: TinyStudy) -> Lock:
    return verify_lock(load_study(str(tiny.folder)))


def _freeze(tiny: TinyStudy) -> bytes:
    return freeze(load_study(str(tiny.folder))).read_bytes()


def _refusal(tiny: TinyStudy) -> str:
    with pytest.raises(LockError) as caught:
        _verify(tiny)
    assert "\n" not in caught.value.line()
    assert "kvqual freeze" in caught.value.advice
    return str(caught.value)


def test_a_lock_names_study_weights_and_implementation(tiny_study: TinyStudy, gates: Path) -> None:
    """The lock holds digests of the declaration and all it points to, of the weights, and of our source and gates."""
    data = _freeze(tiny_study)
    lock = _verify(tiny_study)
    assert (lock.path, lock.sha256) == (tiny_study.folder / "lock.json", sha256_bytes(data))
    assert sorted(lock.files) == [
        "panels/nll-16.json",
        "panels/nll-32.json",
        "panels/oracle-16.json",
        "panels/oracle-32.json",
        "panels/parity.json",
        "scales/candidate-v.json",
        "study.toml",
    ]
    assert lock.files["study.toml"] == sha256_file(tiny_study.toml)
    assert lock.weights == {"tokenizer.json": "5" * 64, "model.safetensors": "6" * 64}
    ours = {f"pytest_kvqual/{path.relative_to(PACKAGE).as_posix()}" for path in PACKAGE.rglob("*.py")}
    assert set(lock.implementation) == ours | {"qualification/test_01_identity.py", "qualification/controls/faults.py"}
    assert lock.implementation["pytest_kvqual/errors.py"] == sha256_file(PACKAGE / "errors.py")


def test_two_freezes_of_the_same_files_give_the_same_bytes(tiny_study: TinyStudy, gates: Path) -> None:
    """Nothing but the files enters the lock: no time, no path, no order of a directory."""
    assert _freeze(tiny_study) == _freeze(tiny_study)


def test_a_lock_does_not_depend_on_where_things_are(tiny_study: TinyStudy, gates: Path, tmp_path: Path) -> None:
    """A copy of study, gates and package elsewhere, run by a process of its own, freezes to the same bytes."""
    here = _freeze(tiny_study)
    elsewhere = tmp_path / "else where"
    shutil.copytree(tmp_path / "project", elsewhere)
    shutil.copytree(PACKAGE, elsewhere / "site" / "pytest_kvqual", ignore=shutil.ignore_patterns("__pycache__"))
    (elsewhere / "studies" / "tiny" / "lock.json").unlink()
    subprocess.run(
        [sys.executable, "-c",
         "from pytest_kvqual.study.freeze import freeze_command; print(freeze_command('.', check=False))"],
        check=True, cwd=elsewhere / "studies" / "tiny", env={**os.environ, "PYTHONPATH": str(elsewhere / "site")},
    )  # fmt: skip
    assert (elsewhere / "studies" / "tiny" / "lock.json").read_bytes() == here


def test_a_lock_that_is_not_there_says_what_to_run(tiny_study: TinyStudy) -> None:
    """Without a lock there is no run, and the advice is the command with the study's path."""
    with pytest.raises(LockError, match=r"found no lock .*lock\.json, expected the frozen study tiny") as caught:
        _verify(tiny_study)
    assert caught.value.advice == f"run `kvqual freeze {tiny_study.folder}`"


@pytest.mark.parametrize("name", ["study.toml", "panels/nll-16.json", "panels/parity.json", "scales/candidate-v.json"])
def test_one_changed_byte_in_a_study_file_is_named_with_both_digests(tiny_study: TinyStudy, name: str) -> None:
    """A study file that differs by one byte of white space no longer matches."""
    _freeze(tiny_study)
    path = tiny_study.folder / name
    before = sha256_file(path)
    path.write_bytes(path.read_bytes() + b"\n")
    assert f"no longer matches: {name}: found sha256 {sha256_file(path)}, expected {before}" in _refusal(tiny_study)


def test_a_changed_threshold_is_a_changed_study(tiny_study: TinyStudy) -> None:
    """A threshold edited after the freeze is refused."""
    _freeze(tiny_study)
    tiny_study.replace("margin_nats = 0.01", "margin_nats = 0.02")
    assert "study.toml: found sha256" in _refusal(tiny_study)


def test_another_panel_under_the_same_key_is_removed_and_added(tiny_study: TinyStudy) -> None:
    """A study that points to another file names the file that left and the one that came."""
    _freeze(tiny_study)
    (tiny_study.folder / "panels" / "other.json").write_bytes((tiny_study.folder / "panels/nll-16.json").read_bytes())
    tiny_study.replace("panels/nll-16.json", "panels/other.json")
    message = _refusal(tiny_study)
    assert "panels/nll-16.json: found no such file (removed), expected sha256" in message
    assert "panels/other.json: found sha256" in message
    assert "expected no such file (added)" in message


def test_another_weight_digest_is_named(tiny_study: TinyStudy) -> None:
    """A weight that the study declares anew is named beside the study file."""
    _freeze(tiny_study)
    tiny_study.replace("6" * 64, "7" * 64)
    assert f"weights model.safetensors: found sha256 {'7' * 64}, expected {'6' * 64}" in _refusal(tiny_study)


def test_a_changed_source_file_is_named_with_both_digests(tiny_study: TinyStudy, package: Path) -> None:
    """One comment more in one of our modules is another implementation."""
    _freeze(tiny_study)
    path = package / "judge" / "verdict.py"
    before = sha256_file(path)
    path.write_text(path.read_text() + "# more\n")
    expected = f"pytest_kvqual/judge/verdict.py: found sha256 {sha256_file(path)}, expected {before}"
    assert expected in _refusal(tiny_study)


def test_added_and_removed_source_files_are_named(tiny_study: TinyStudy, package: Path, gates: Path) -> None:
    """A module that joined, one that left, and a gate that left are each named."""
    _freeze(tiny_study)
    (package / "judge" / "lenient.py").write_text("")
    (package / "_clock.py").unlink()
    (gates / "test_01_identity.py").unlink()
    message = _refusal(tiny_study)
    assert f"pytest_kvqual/judge/lenient.py: found sha256 {sha256_bytes(b'')}, expected no such file (added)" in message
    assert "pytest_kvqual/_clock.py: found no such file (removed), expected sha256 " in message
    assert "qualification/test_01_identity.py: found no such file (removed)" in message


def test_a_gates_folder_that_appears_later_is_an_addition(tiny_study: TinyStudy, package: Path) -> None:
    """Gates that the freeze did not see are not taken in silently."""
    _freeze(tiny_study)
    folder = package.parent.parent / "qualification"
    folder.mkdir()
    (folder / "test_01_identity.py").write_text("")
    assert "qualification/test_01_identity.py: found sha256" in _refusal(tiny_study)


def test_byte_code_and_hidden_files_are_no_implementation(tiny_study: TinyStudy, package: Path, gates: Path) -> None:
    """What Python and editors leave behind does not break a lock."""
    _freeze(tiny_study)
    for folder in (package, package / "study", gates):
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"")
        (folder / "__pycache__" / "x.py").write_bytes(b"")
        (folder / ".#load.py").symlink_to("nowhere")
        (folder / "README.md").write_text("")
    _verify(tiny_study)


def test_many_changes_are_one_line(tiny_study: TinyStudy, package: Path) -> None:
    """The first five changes are spelled out, the rest are counted."""
    _freeze(tiny_study)
    for number in range(9):
        (package / f"added_{number}.py").write_text("")
    assert _refusal(tiny_study).endswith("; and 4 more")


def test_an_arms_code_is_frozen_wherever_it_is(tiny_study: TinyStudy, tmp_path: Path) -> None:
    """Code on an arm's import path is locked under its place in the study's folder, else under arm and position."""
    inside, outside = tiny_study.folder / "code", tmp_path / "checkout"
    for folder in (inside, outside):
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "backend.py").write_text("x = 1\n")
        (folder / "kernel.so").write_bytes(b"\x7fELF")
        (folder / "notes.txt").write_text("")
    tiny_study.replace('kv_format = "k16v8"', f'kv_format = "k16v8"\npythonpath = ["code", "{outside}"]')
    _freeze(tiny_study)
    names = set(_verify(tiny_study).files)
    assert {"code/deep/backend.py", "code/kernel.so"} <= names
    label = "arms/candidate/pythonpath[1]/"
    assert {f"{label}deep/backend.py", f"{label}kernel.so"} <= names
    assert not any("notes" in name for name in names)
    (outside / "deep" / "backend.py").write_text("x = 2\n")
    assert f"{label}deep/backend.py: found sha256" in _refusal(tiny_study)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1, column 2: found"),
        ("{}", "found no key 'schema', expected an integer"),
        ("[]", "found a list that is empty, expected a table"),
    ],
)
def test_a_damaged_lock_is_named(tiny_study: TinyStudy, text: str, words: str) -> None:
    """A lock that is no lock is refused, with its path."""
    _freeze(tiny_study)
    lock_path(load_study(str(tiny_study.folder))).write_text(text)
    with pytest.raises(LockError) as caught:
        _verify(tiny_study)
    assert words in str(caught.value)
    assert str(tiny_study.folder / "lock.json") in str(caught.value)


def _edit_lock(tiny: TinyStudy, change: Any) -> None:
    path = tiny.folder / "lock.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def test_a_lock_edited_by_hand_does_not_match(tiny_study: TinyStudy) -> None:
    """Another schema, another study, another digest, another key and another layout of the lock are each refused."""
    _freeze(tiny_study)
    data = (tiny_study.folder / "lock.json").read_bytes()
    for change, words in (
        (lambda value: value.update(schema=2), "in 'schema': found 2, expected 1"),
        (lambda value: value.update(study="other"), "found the lock of study other, expected that of tiny"),
        (lambda value: value.update(extra=1), "found the unknown key 'extra'"),
        (lambda value: value["files"].update({"study.toml": "0" * 64}), f"expected {'0' * 64}"),
        (lambda value: value["files"].update({"study.toml": "x"}), "in 'files.study.toml': found"),
        (lambda value: value["files"].pop("study.toml"), "study.toml: found sha256"),
    ):
        (tiny_study.folder / "lock.json").write_bytes(data)
        _edit_lock(tiny_study, change)
        with pytest.raises(LockError) as caught:
            _verify(tiny_study)
        assert words in str(caught.value)
    (tiny_study.folder / "lock.json").write_bytes(data + b"\n")
    with pytest.raises(LockError, match="as freeze writes this content"):
        _verify(tiny_study)


def test_a_study_that_does_not_fit_is_not_frozen(tiny_study: TinyStudy) -> None:
    """A malformed panel leaves no lock behind."""
    tiny_study.change("panels/nll-16.json", lambda top: top["items"].pop())
    with pytest.raises(StudyError, match="nll\\.documents"):
        _freeze(tiny_study)
    assert not (tiny_study.folder / "lock.json").exists()


def test_a_disk_that_refuses_the_lock_keeps_the_earlier_one(
    tiny_study: TinyStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is written whole or not at all, and the refusal is one line."""
    before = _freeze(tiny_study)
    tiny_study.replace("margin_nats = 0.01", "margin_nats = 0.02")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LockError, match=r"cannot write .*lock\.json: No space left on device"):
        _freeze(tiny_study)
    assert (tiny_study.folder / "lock.json").read_bytes() == before
    assert [path.name for path in tiny_study.folder.glob(".lock*")] == []


def test_the_command_says_what_it_did(tiny_study: TinyStudy) -> None:
    """Freezing says frozen, unchanged or frozen anew; checking says matches, or raises what no longer does."""
    name = str(tiny_study.folder)
    with pytest.raises(LockError, match="found no lock"):
        freeze_command(name, check=True)
    first = freeze_command(name, check=False)
    assert first.startswith(f"tiny: frozen: {tiny_study.folder / 'lock.json'} (sha256 ")
    assert "7 study files, 2 model files" in first
    assert freeze_command(name, check=False).startswith("tiny: unchanged: ")
    assert freeze_command(name, check=True).startswith("tiny: matches: ")
    tiny_study.replace("margin_nats = 0.01", "margin_nats = 0.02")
    with pytest.raises(LockError, match="no longer matches"):
        freeze_command(name, check=True)
    assert freeze_command(name, check=False).startswith("tiny: frozen anew: ")
