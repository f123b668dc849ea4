"""Reading panels and scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_study import DECODE_STEPS, DOCUMENTS, LAYERS, TOKENIZER, VOCABULARY, TinyStudy

from pytest_kvqual._canonical import sha256_file
from pytest_kvqual.errors import StudyError
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.panels import check_files, load_panel, load_scales, selected_scales

NLL = "panels/nll-16.json"
ORACLE = "panels/oracle-16.json"
PARITY = "panels/parity.json"
SCALES = "scales/candidate-v.json"


def _load(tiny: TinyStudy, name: str = NLL, *, task: str = "nll", length: int | None = 16) -> None:
    load_panel(tiny.folder / name, task=task, length=length, vocabulary=VOCABULARY, tokenizer=TOKENIZER)


def test_an_nll_panel_is_read(tiny_study: TinyStudy) -> None:
    """Documents keep their order, prompts hold length - 1 tokens, targets step zero and each decode step."""
    panel = load_panel(tiny_study.folder / NLL, task="nll", length=16, vocabulary=VOCABULARY)
    assert (panel.task, panel.length, len(panel.items)) == ("nll", 16, DOCUMENTS)
    assert panel.sha256 == sha256_file(tiny_study.folder / NLL)
    assert [item.id for item in panel.items] == ["doc-00", "doc-01", "doc-02", "doc-03"]
    for item in panel.items:
        assert (len(item.prompt), len(item.targets), item.max_tokens) == (15, DECODE_STEPS + 1, DECODE_STEPS + 1)


def test_oracle_and_parity_panels_are_read(tiny_study: TinyStudy) -> None:
    """Their items force nothing and say how many tokens to generate; a parity panel has no length."""
    oracle = load_panel(tiny_study.folder / ORACLE, task="oracle", length=16, vocabulary=VOCABULARY)
    assert {(item.targets, item.max_tokens) for item in oracle.items} == {((), 3)}
    parity = load_panel(tiny_study.folder / PARITY, task="parity", length=None, vocabulary=VOCABULARY)
    assert (parity.length, len(parity.items)) == (None, 3)


def _set(path: str, value: object) -> Callable[[Any], object]:
    def change(top: Any) -> None:
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in parents:
            top = top[part]
        top[last] = value

    return change


def _overlap(top: Any) -> None:
    first, second = top["items"][1], top["items"][3]
    document = (first["prompt"] + first["targets"])[3:] + second["targets"][2:]
    second.update(prompt=document[:15], targets=document[15:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("schema", 2), "in 'schema': found 2, expected 1"),
        (_set("task", "oracle"), "in 'task': found 'oracle', expected 'nll'"),
        (_set("task", "mmlu"), "in 'task': found \"mmlu\" (a string), expected one of nll, oracle, parity, retrieval"),
        (_set("length", 32), "in 'length': found length 32, expected length 16"),
        (_set("length", None), "in 'length': found no length (null), expected length 16"),
        (_set("length", "16"), "in 'length': found \"16\" (a string), expected an integer"),
        (_set("tokenizer_sha256", "0" * 64), f"in 'tokenizer_sha256': found {'0' * 64}, expected {TOKENIZER}"),
        (_set("sources", "x"), "in 'sources': found no list"),
        (_set("extra", 1), "found the unknown key 'extra'"),
        (_set("items", []), "in 'items': found no item, expected at least one"),
        (
            _set("items.2.prompt.4", VOCABULARY),
            "in 'items[2].prompt[4]': found 1000 (an integer), expected an integer f",
        ),
        (
            _set("items.2.prompt.4", -1),
            "in 'items[2].prompt[4]': found -1 (an integer), expected an integer from 0 to 999",
        ),
        (_set("items.0.targets.1", True), "in 'items[0].targets[1]': found true (a boolean), expected an integer"),
        (_set("items.0.targets.1", 5.0), "in 'items[0].targets[1]': found 5.0 (a number)"),
        (_set("items.1.id", "doc-00"), "in 'items[1].id': found 'doc-00' again, expected an id that items[0] does not"),
        (_set("items.1.id", "a b"), "in 'items[1].id': found \"a b\""),
        (_set("items.1.max_tokens", 3), "in 'items[1]': found the unknown key 'max_tokens'"),
        (_set("items.1.prompt", []), "in 'items[1].prompt': found no token"),
        (
            _set("items.1.prompt", [1] * 14),
            "in 'items[1].prompt': found 14 tokens, expected 15: one less than the length",
        ),
        (_set("items.1.targets", [1] * 4), "in 'items[1].targets': found 4 tokens, expected 5, as in items[0]"),
        (_set("items.0.targets", [1]), "in 'items[0].targets': found 1 tokens, expected step zero and at least one"),
        (_overlap, "in 'items[3]': found 17 tokens in common with the end of 'doc-01' at the start of 'doc-03'"),
    ],
)
def test_a_panel_that_is_not_the_one_asked_for_is_one_line(
    tiny_study: TinyStudy, change: Callable[[Any], object], words: str
) -> None:
    """Each way in which a panel is malformed or another's is refused with its place."""
    tiny_study.change(NLL, change)
    with pytest.raises(StudyError) as caught:
        _load(tiny_study)
    assert words in str(caught.value)
    assert str(tiny_study.folder / NLL) in str(caught.value)
    assert "\n" not in caught.value.line()


def test_the_same_document_twice_is_an_overlap(tiny_study: TinyStudy) -> None:
    """Two ids for one text do not make two documents."""
    tiny_study.change(NLL, lambda top: top["items"][2].update(top["items"][0], id="doc-02"))
    with pytest.raises(StudyError, match="found 20 tokens in common with the end of 'doc-00' at the start of 'doc-02'"):
        _load(tiny_study)


def test_a_passage_that_two_texts_share_is_no_overlap(tiny_study: TinyStudy) -> None:
    """The same passage in the middle of two documents is text of both, not one window over the other."""

    def share(top: Any) -> None:
        top["items"][2]["prompt"][1:] = top["items"][0]["prompt"][1:]

    tiny_study.change(NLL, share)
    _load(tiny_study)


def test_a_length_for_a_panel_without_one_is_refused(tiny_study: TinyStudy) -> None:
    """A parity panel of a length is not the study's parity panel."""
    tiny_study.change(PARITY, _set("length", 16))
    with pytest.raises(StudyError, match=r"found length 16, expected no length \(null\)"):
        _load(tiny_study, PARITY, task="parity", length=None)


def test_a_missing_or_broken_panel_is_named(tiny_study: TinyStudy) -> None:
    """A panel that is gone, cut off or a folder is each one line with its path."""
    path = tiny_study.folder / NLL
    path.write_text(path.read_text()[:100])
    with pytest.raises(StudyError, match=r"nll-16\.json, line 1, column \d+: found .*, expected JSON"):
        _load(tiny_study)
    path.unlink()
    with pytest.raises(StudyError, match=r"found no file .*nll-16\.json, expected the nll panel"):
        _load(tiny_study)
    path.mkdir()
    with pytest.raises(StudyError, match=r"cannot read .*nll-16\.json, the nll panel: Is a directory"):
        _load(tiny_study)


def test_scales_are_read(tiny_study: TinyStudy) -> None:
    """One scale per layer comes back as it stands; an arm without scales has none."""
    assert load_scales(tiny_study.folder / SCALES, LAYERS) == (0.5, 0.25)
    study = load_study(str(tiny_study.folder))
    assert selected_scales(select(study, arm="candidate", length=16, cache_bytes=None)) == (0.5, 0.25)
    assert selected_scales(select(study, arm="native", length=16, cache_bytes=None)) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"schema": 1, "v_scale": [0.5]}', "in 'v_scale': found 1 scales, expected 2: one for each layer"),
        ('{"schema": 1, "v_scale": [0.5, 0.5, 0.5]}', "in 'v_scale': found 3 scales"),
        ('{"schema": 1, "v_scale": [0.5, NaN]}', "found NaN, expected a finite number"),
        ('{"schema": 1, "v_scale": [0.5, Infinity]}', "found Infinity, expected a finite number"),
        ('{"schema": 1, "v_scale": [0.5, 0.0]}', "in 'v_scale[1]': found 0.0, expected a positive number that float32"),
        ('{"schema": 1, "v_scale": [-0.5, 0.5]}', "in 'v_scale[0]': found -0.5"),
        ('{"schema": 1, "v_scale": [0.1, 0.5]}', "in 'v_scale[0]': found 0.1, expected a positive number that float32"),
        ('{"schema": 1, "v_scale": [1e300, 0.5]}', "in 'v_scale[0]': found 1e+300"),
        ('{"schema": 1, "v_scale": [1e-60, 0.5]}', "in 'v_scale[0]': found 1e-60"),
        ('{"schema": 1, "v_scale": [0.5, true]}', "in 'v_scale[1]': found true (a boolean), expected a finite number"),
        ('{"schema": 1, "v_scale": 0.5}', "in 'v_scale': found 0.5 (a number), expected a list of numbers"),
        ('{"schema": 2, "v_scale": [0.5, 0.5]}', "in 'schema': found 2, expected 1"),
        ('{"schema": 1, "k_scale": [0.5, 0.5]}', "found the unknown key 'k_scale'"),
    ],
)
def test_scales_that_do_not_fit_are_one_line(tmp_path: Path, text: str, words: str) -> None:
    """A wrong number of layers, a zero, a NaN and a value that float32 cannot hold are refused with their layer."""
    path = tmp_path / "scales.json"
    path.write_text(text)
    with pytest.raises(StudyError) as caught:
        load_scales(path, LAYERS)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_whole_study_fits_its_panels(tiny_study: TinyStudy) -> None:
    """Every panel and scales file of the study is read and agrees with it."""
    check_files(load_study(str(tiny_study.folder)))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (PARITY, lambda top: top["items"].pop(), "found 2 items, expected 3 (the study's parity.prompts)"),
        (
            PARITY,
            _set("items.1.max_tokens", 4),
            "found 4 max_tokens of 'p1', expected 5 (the study's parity.max_tokens)",
        ),
        (NLL, lambda top: top["items"].pop(), "found 3 items, expected 4 (the study's nll.documents)"),
        (NLL, lambda top: [item["targets"].pop() for item in top["items"]], "found 4 targets of each item, expected 5"),
        (ORACLE, _set("items.0.max_tokens", 40), "found 56 tokens in 'r0' (prompt and generated), expected at most 48"),
        (SCALES, _set("v_scale.0", 0.1), "in 'v_scale[0]': found 0.1"),
    ],
)
def test_a_panel_that_contradicts_the_study_is_one_line(
    tiny_study: TinyStudy, name: str, change: Callable[[Any], object], words: str
) -> None:
    """Counts, sizes and scales that differ from the declaration are refused before anything is frozen."""
    tiny_study.change(name, change)
    with pytest.raises(StudyError) as caught:
        check_files(load_study(str(tiny_study.folder)))
    assert words in str(caught.value)
    assert str(tiny_study.folder / name) in str(caught.value)


def test_a_short_panel_cut_from_a_long_one_is_refused(tiny_study: TinyStudy) -> None:
    """A document of one length that begins a document of a longer one is not a panel of its own."""
    long: list[int] = []
    tiny_study.change("panels/nll-32.json", lambda top: long.extend(top["items"][2]["prompt"]))
    tiny_study.change(NLL, lambda top: top["items"][1].update(prompt=long[:15], targets=long[15:20]))
    with pytest.raises(StudyError, match="found 'doc-01', the first tokens of 'doc-02' in the panel of length 32"):
        check_files(load_study(str(tiny_study.folder)))


def test_a_question_is_asked_once(tiny_study: TinyStudy) -> None:
    """One prompt under two ids would be counted as two questions; of gsm8k the data set decides."""
    item = {"prompt": [1, 2], "max_tokens": 3, "expected": "5", "grade": "x"}
    for task in ("recall", "gsm8k"):
        document = {
            "schema": 1, "task": task, "length": None, "tokenizer_sha256": TOKENIZER, "sources": [],
            "items": [{**item, "id": name} for name in ("a", "b")],
        }  # fmt: skip
        path = tiny_study.folder / "panels" / f"{task}-twice.json"
        path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(StudyError, match=r"found that of 'a' in 'b', expected a question of its own"):
        _load(tiny_study, "panels/recall-twice.json", task="recall", length=None)
    _load(tiny_study, "panels/gsm8k-twice.json", task="gsm8k", length=None)
