"""Scored tasks in a study: their rules, their panels, and the copy of the study that a run directory keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_study import LENGTHS, QUESTIONS, TOKENIZER, VOCABULARY, TinyStudy

from pytest_kvqual._canonical import sha256_file
from pytest_kvqual.errors import EvidenceError, StudyError
from pytest_kvqual.study.freeze import freeze, keep, verify_lock
from pytest_kvqual.study.load import load_study
from pytest_kvqual.study.panels import check_files, load_panel

RETRIEVAL = "panels/retrieval-16.json"


@pytest.fixture
def scored(tiny_study: TinyStudy) -> TinyStudy:
    """The tiny study with retrieval and recall required."""
    tiny_study.require_scored()
    return tiny_study


def test_rules_are_read_per_gate_and_questions_per_length(scored: TinyStudy) -> None:
    """Each required scored gate has its own rules; each length says how many questions it has."""
    study = load_study(str(scored.folder))
    assert set(study.preservation) == {"retrieval", "recall"}
    assert study.gsm8k_source is None
    assert all(dict(length.questions) == dict.fromkeys(("retrieval", "recall"), QUESTIONS)
               for length in study.lengths.values())  # fmt: skip
    check_files(study)


def test_a_scored_panel_has_answers_and_grades(scored: TinyStudy) -> None:
    """Items of a scored panel hold the right answer and the group that they are reported in."""
    panel = load_panel(scored.folder / RETRIEVAL, task="retrieval", length=16, vocabulary=VOCABULARY)
    assert [item.expected for item in panel.items] == [str(10000 + index) for index in range(QUESTIONS)]
    assert {item.grade for item in panel.items} == {"5 digits"}
    assert panel.items[0].targets == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("limit = ", "limit = 1.0 #", "a loss probability between 0 and 1"),
        ("limit = ", "limit = 5 #", "found 5.0, expected a loss probability between 0 and 1 (5 % is 0.05)"),
        ("confidence = ", "confidence = 0.5 #", "a one-sided confidence between 0.5 and 1"),
        ("floor = ", "floor = 1.5 #", "floor"),
        ("stop = ", 'stop = "Question:" #', "stop"),
        ("stop = ", 'stop = [""] #', "stop"),
        ("reasoning = ", 'reasoning = ["<think>"] #', "found 1 markers"),
        ("reasoning = ", 'reasoning = ["<think>", "<think>"] #', "two of which none is in the other"),
        ("reasoning = ", 'reasoning = ["think", "/think"] #', "two of which none is in the other"),
        ("empty_share = ", "empty_share = -0.1 #", "empty_share"),
        ("poison_questions = ", "poison_questions = 0 #", "poison_questions"),
        ("poison_questions = ", "poison_questions = 999 #", "poison_questions"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(scored: TinyStudy, old: str, new: str, message: str) -> None:
    """A limit, a share, a stop or a count out of range is refused with its path; a stop that is one text above all."""
    text = scored.toml.read_text(encoding="utf-8")
    start = text.index("[retrieval]")
    scored.toml.write_text(text[:start] + text[start:].replace(old, new, 1), encoding="utf-8")
    with pytest.raises(StudyError) as caught:
        load_study(str(scored.folder))
    assert message in caught.value.line()
    assert "retrieval" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rules_of_a_gate_that_is_not_required_are_refused(scored: TinyStudy) -> None:
    """Rules that decide nothing would look like rules, and so would a number of questions."""
    scored.replace('[gates.retrieval]\nstate = "required"', '[gates.retrieval]\nstate = "planned"')
    with pytest.raises(StudyError, match="unknown key 'retrieval'"):
        load_study(str(scored.folder))
    for _ in LENGTHS:
        scored.replace(f"retrieval = {QUESTIONS}, ", "")
    with pytest.raises(StudyError, match="rules of a gate that is not required"):
        load_study(str(scored.folder))


def test_a_required_gate_without_rules_or_questions_is_refused(tiny_study: TinyStudy) -> None:
    """A scored gate cannot be required without its section."""
    tiny_study.replace('[gates.recall]\nstate = "planned"', '[gates.recall]\nstate = "required"')
    with pytest.raises(StudyError, match=r"lengths\.16"):
        load_study(str(tiny_study.folder))


def test_the_number_of_questions_is_the_study_s(scored: TinyStudy) -> None:
    """A panel with a question less than declared, or one of another output limit, is refused."""
    scored.change(RETRIEVAL, lambda top: top["items"].pop())
    with pytest.raises(StudyError, match=rf"found {QUESTIONS - 1} items, expected {QUESTIONS}"):
        check_files(load_study(str(scored.folder)))
    scored.change(
        RETRIEVAL, lambda top: top["items"].append({**top["items"][0], "id": "more", "prompt": [1], "max_tokens": 2})
    )
    with pytest.raises(StudyError, match="max_tokens of 'more'"):
        check_files(load_study(str(scored.folder)))


@pytest.mark.parametrize("key", ["expected", "grade"])
@pytest.mark.parametrize("value", ["", "  ", 7, None])
def test_a_question_without_an_answer_is_refused(scored: TinyStudy, key: str, value: object) -> None:
    """An empty answer would be right for an empty one."""
    scored.change(RETRIEVAL, lambda top: top["items"][1].update({key: value}))
    with pytest.raises(StudyError, match=rf"items\[1\]\.{key}"):
        load_panel(scored.folder / RETRIEVAL, task="retrieval", length=16, vocabulary=VOCABULARY, tokenizer=TOKENIZER)


def test_recall_has_the_same_questions_at_every_length(scored: TinyStudy) -> None:
    """A recall panel has no length; one with a length is refused."""
    scored.change("panels/recall.json", lambda top: top.update(length=16))
    with pytest.raises(StudyError, match="found length 16, expected no length"):
        check_files(load_study(str(scored.folder)))


def test_a_run_directory_keeps_the_frozen_study(scored: TinyStudy, tmp_path: Path) -> None:
    """The copy has the lock under its own digest and every study file that it names, byte for byte."""
    study = load_study(str(scored.folder))
    freeze(study)
    lock = verify_lock(study)
    folder = keep(study, lock, tmp_path / "run")
    assert folder == tmp_path / "run" / "study" / lock.sha256
    assert sha256_file(folder / "lock.json") == lock.sha256
    assert {name: sha256_file(folder / name) for name in lock.files} == dict(lock.files)
    named = json.loads((folder / "lock.json").read_text())["files"]
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()) == sorted(
        [*named, "lock.json"]
    )


def test_a_kept_study_is_not_written_over(scored: TinyStudy, tmp_path: Path) -> None:
    """What an earlier run left is left as it is: a reader holds it against the lock."""
    study = load_study(str(scored.folder))
    freeze(study)
    folder = keep(study, verify_lock(study), tmp_path)
    (folder / "study.toml").write_text("changed")
    keep(study, verify_lock(study), tmp_path)
    assert (folder / "study.toml").read_text() == "changed"


def test_a_study_that_cannot_be_kept_is_one_line(scored: TinyStudy, tmp_path: Path) -> None:
    """A run directory that cannot be written is named."""
    study = load_study(str(scored.folder))
    freeze(study)
    (tmp_path / "study").write_text("a file where the folder belongs")
    with pytest.raises(EvidenceError, match="cannot write"):
        keep(study, verify_lock(study), tmp_path)
