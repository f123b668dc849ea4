"""GSM8K's test set: from a file or the hub, checked, and made into a panel.

The questions here are our own, with a digest of their own. Two tests take the real set, and the real tokenizer, where
``KVQUAL_GSM8K`` and ``KVQUAL_MODEL_DIR`` name them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from scored import rules

from pytest_kvqual import gsm8k
from pytest_kvqual._canonical import sha256_bytes
from pytest_kvqual.errors import StudyError
from pytest_kvqual.study.model import Gsm8kSource

PUBLISHED = "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"
QUESTIONS = [
    {"question": "A shelf holds 12 jars, and 5 are sold. How many are left?", "answer": "12-5=<<12-5=7>>7\n#### 7"},
    {"question": "Zoë’s rope is 1,000 m and 250 m more. How long?", "answer": "<<1000+250=1250>>1250\n#### 1,250"},
]
SHOTS = [{"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4.\n#### 4"}]


def lines(questions: list[dict[str, str]]) -> bytes:
    """The set's published form."""
    return "".join(json.dumps(question) + "\n" for question in questions).encode()


@pytest.fixture
def source(tmp_path: Path) -> Gsm8kSource:
    """Our own set's source; the shots lie beside it."""
    (tmp_path / "shots.json").write_text(json.dumps(SHOTS))
    return Gsm8kSource(
        sha256=sha256_bytes(lines(QUESTIONS)),
        repository="someone/set",
        revision="0" * 40,
        file="main/test.parquet",
        shots=tmp_path / "shots.json",
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Our own set as JSON lines."""
    path = tmp_path / "set.jsonl"
    path.write_bytes(lines(QUESTIONS))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of words that puts a token before each text, with the truncation and padding of a training."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "<s>": 1, "Question": 2, ":": 3, "Answer": 4, "####": 5}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.enable_truncation(5)
    made.enable_padding(length=64)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


def test_a_local_file_is_the_set(source: Gsm8kSource, file: Path) -> None:
    """Its questions come in its order."""
    assert gsm8k.load_questions(source, file) == QUESTIONS


def test_another_digest_is_refused_with_both(source: Gsm8kSource, file: Path) -> None:
    """A set with one byte more is another set."""
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(StudyError) as error:
        gsm8k.load_questions(source, file)
    assert sha256_bytes(file.read_bytes()) in str(error.value)
    assert source.sha256 in str(error.value)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b'{"question": "q"}\n', "line 1: found no key 'answer'"),
        (b'{"question": "q", "answer": "#### 1"}\n\n', "line 2, line 1, column 1: found"),
        (b'{"question": "q", "answer": "#### 1"}\n{"question": "", "answer": "#### 1"}\n', "line 2: in 'question'"),
        (b'{"question": "q", "answer": "1"}\n', "line 1: found an answer that ends '1'"),
        (b'{"question": "q", "answer": "#### 1", "more": 1}\n', "unknown key 'more'"),
        (b"\xff\n", "the byte 0xff"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path: Path, source: Gsm8kSource, data: bytes, text: str) -> None:
    """Also where the digest is the declared one."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(data)
    changed = Gsm8kSource(sha256=sha256_bytes(data), repository="r", revision="v", file="f", shots=source.shots)
    with pytest.raises(StudyError) as error:
        gsm8k.load_questions(changed, path)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(source: Gsm8kSource, tmp_path: Path) -> None:
    """Neither the set nor a folder in its place is read."""
    with pytest.raises(StudyError, match=r"found no file .*none\.jsonl, expected the GSM8K test set"):
        gsm8k.load_questions(source, tmp_path / "none.jsonl")
    with pytest.raises(StudyError, match="cannot read"):
        gsm8k.load_questions(source, tmp_path)


def test_a_parquet_file_has_the_digest_of_its_lines(source: Gsm8kSource, tmp_path: Path) -> None:
    """The same rows in Parquet, with a further column, are the same set; one row less is another."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "set.parquet"
    parquet.write_table(arrow.Table.from_pylist([{"n": 1, **row} for row in QUESTIONS]), path)
    assert gsm8k.load_questions(source, path) == QUESTIONS
    parquet.write_table(arrow.Table.from_pylist(QUESTIONS[:1]), path)
    with pytest.raises(
        StudyError, match=f"its rows as JSON lines have sha256 [0-9a-f]{{64}}, expected {source.sha256}"
    ):
        gsm8k.load_questions(source, path)
    parquet.write_table(arrow.Table.from_pylist([{"question": "q"}]), path)
    with pytest.raises(StudyError, match="found no column 'answer'"):
        gsm8k.load_questions(source, path)
    path.write_bytes(b"PAR1")
    with pytest.raises(StudyError, match="found no Parquet file that can be read"):
        gsm8k.load_questions(source, path)


@pytest.mark.parametrize(("package", "name"), [("pyarrow", "set.parquet"), ("huggingface_hub", None)])
def test_a_missing_package_names_its_extra(
    source: Gsm8kSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str | None
) -> None:
    """Without the reader of Parquet or the hub's client one line says what to install, or to give a file."""
    monkeypatch.setitem(sys.modules, package, None)
    path = None
    if name is not None:
        path = tmp_path / name
        path.write_bytes(b"PAR1")
    with pytest.raises(StudyError, match=f"found no package {package}") as error:
        gsm8k.load_questions(source, path)
    assert "pytest-kvqual[gsm8k]" in error.value.advice
    assert "JSON lines" in error.value.advice


def test_the_hub_is_asked_for_the_pinned_file(source: Gsm8kSource, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repository, revision, file and the kind of repository are the study's; what comes is checked like a file."""
    hub = pytest.importorskip("huggingface_hub")
    asked: list[dict[str, Any]] = []

    def download(**given: Any) -> str:
        asked.append(given)
        return str(file)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    assert gsm8k.load_questions(source, None) == QUESTIONS
    assert asked == [
        {"repo_id": "someone/set", "filename": "main/test.parquet", "repo_type": "dataset", "revision": "0" * 40}
    ]
    file.write_bytes(b"{}\n")
    with pytest.raises(StudyError, match="found sha256"):
        gsm8k.load_questions(source, None)


def test_a_hub_that_is_switched_off_asks_for_a_file(
    source: Gsm8kSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, with nothing in the hub's cache, one line says to give the file."""
    pytest.importorskip("huggingface_hub")
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(StudyError, match=r"someone/set at 0{40}: cannot get main/test\.parquet") as error:
        gsm8k.load_questions(source, None)
    assert "--gsm8k FILE" in error.value.line()
    assert "\n" not in error.value.line()


def test_a_connection_that_breaks_asks_for_a_file(source: Gsm8kSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does the client's own error in the middle of a download."""
    import httpx

    hub = pytest.importorskip("huggingface_hub")

    def broken(**given: object) -> str:
        raise httpx.ReadError("peer closed\nthe connection")

    monkeypatch.setattr(hub, "hf_hub_download", broken)
    with pytest.raises(StudyError, match=r"peer closed$") as error:
        gsm8k.load_questions(source, None)
    assert "--gsm8k FILE" in error.value.advice


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({}, "found no list of worked questions"),
        ([], "found no list of worked questions"),
        ([{"question": "q", "answer": "12"}], "example 1: found an answer that ends '12'"),
        ([*SHOTS, {"question": "q"}], "example 2: found no key 'answer'"),
        ([{**SHOTS[0], "source": "x"}], "example 1: found the unknown key 'source'"),
        (["q"], "example 1: found"),
    ],
)
def test_shots_that_are_none_are_refused(tmp_path: Path, value: object, text: str) -> None:
    """The worked examples are a list of questions with answers that end in their number."""
    path = tmp_path / "shots.json"
    path.write_text(json.dumps(value))
    with pytest.raises(StudyError) as error:
        gsm8k.load_shots(path)
    assert text in str(error.value)


def test_the_panel_is_the_document_of_its_bytes(source: Gsm8kSource, file: Path, tokenizer: Path) -> None:
    """Two builds give the same bytes; the items carry what a scored panel's items carry."""
    document, data = gsm8k.build_panel(source, rules(), tokenizer, file)
    assert json.loads(data) == document
    assert gsm8k.build_panel(source, rules(), tokenizer, file) == (document, data)
    assert (document["schema"], document["task"], document["length"]) == (1, "gsm8k", None)
    assert document["tokenizer_sha256"] == sha256_bytes(tokenizer.read_bytes())
    assert [set(item) for item in document["items"]] == [{"id", "prompt", "max_tokens", "expected", "grade"}] * 2
    assert [(item["id"], item["expected"], item["max_tokens"]) for item in document["items"]] == [
        ("gsm8k-0000", "7", 8),
        ("gsm8k-0001", "1250", 8),
    ]
    assert any(source.sha256 in text for text in document["sources"])


def test_a_prompt_has_the_special_tokens_once_and_whole(source: Gsm8kSource, file: Path, tokenizer: Path) -> None:
    """The token for the beginning stands once, at the beginning; no truncation or padding of the file applies."""
    document, _ = gsm8k.build_panel(source, rules(), tokenizer, file)
    prompt = document["items"][0]["prompt"]
    assert prompt[:3] == [1, 2, 3]
    assert prompt.count(1) == 1
    assert prompt[-2:] == [4, 3]
    assert prompt.count(2) == len(SHOTS) + 1
    assert len(prompt) not in (5, 64)


def test_a_shot_of_the_test_set_is_refused(source: Gsm8kSource, file: Path, tokenizer: Path) -> None:
    """A worked example that is asked too would hand out its answer."""
    source.shots.write_text(json.dumps([*SHOTS, QUESTIONS[1]]))
    with pytest.raises(StudyError, match="example 2: found a question of the test set"):
        gsm8k.build_panel(source, rules(), tokenizer, file)


def test_a_file_that_is_no_tokenizer_is_refused(source: Gsm8kSource, file: Path, tmp_path: Path) -> None:
    """In one line, with its name."""
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(StudyError, match=r"tokenizer\.json: found no tokenizer that can be read") as error:
        gsm8k.build_panel(source, rules(), path, file)
    assert "\n" not in str(error.value)


def real(source: Gsm8kSource) -> tuple[Gsm8kSource, Path]:
    """The published set, where the environment names it."""
    if not (named := os.environ.get("KVQUAL_GSM8K")):
        pytest.skip("KVQUAL_GSM8K names no file")
    changed = Gsm8kSource(sha256=PUBLISHED, repository="openai/gsm8k", revision="v", file="f", shots=source.shots)
    return changed, Path(named)


def test_the_published_set_has_its_digest_and_its_lines(source: Gsm8kSource) -> None:
    """The form that is digested is the published one: 1,319 lines that re-serialise to the same bytes."""
    changed, path = real(source)
    questions = gsm8k.load_questions(changed, path)
    assert len(questions) == 1319
    assert sha256_bytes(lines(questions)) == PUBLISHED


def test_the_published_set_becomes_a_panel(source: Gsm8kSource) -> None:
    """With the embedded study's tokenizer: 1,319 items without annotations, each answer a number."""
    changed, path = real(source)
    tokenizers = pytest.importorskip("tokenizers")
    folder = os.environ.get("KVQUAL_MODEL_DIR")
    if not folder or not (Path(folder) / "tokenizer.json").is_file():
        pytest.skip("KVQUAL_MODEL_DIR holds no tokenizer.json")
    vocabulary = Path(folder) / "tokenizer.json"
    document, data = gsm8k.build_panel(changed, rules(), vocabulary, path)
    assert len(document["items"]) == 1319
    assert document["items"][-1]["id"] == "gsm8k-1318"
    assert all(int(item["expected"]) is not None for item in document["items"])
    back = tokenizers.Tokenizer.from_file(str(vocabulary)).decode(document["items"][0]["prompt"])
    assert back.startswith("Question: Two and two?\nAnswer: 2 + 2 = 4.\n#### 4\n\nQuestion: ")
    assert back.endswith("\nAnswer:")
    assert gsm8k.build_panel(changed, rules(), vocabulary, path)[1] == data
