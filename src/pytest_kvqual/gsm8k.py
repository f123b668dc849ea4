"""GSM8K's test set and its panel: from a file or the hub, held against the study's digest, never stored in a study.

The digest is that of the set as JSON lines ``{"question": …, "answer": …}`` in the set's order, each line as Python's
:func:`json.dumps` writes it and ended by a line feed: the form of the published ``test.jsonl``. A Parquet file is
brought into that form first, so one digest stands for both.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_kvqual._canonical import canonical_bytes, sha256_bytes
from pytest_kvqual._decode import Table, one_line, parse_json
from pytest_kvqual.errors import StudyError
from pytest_kvqual.tasks.gsm8k import build_items, expected_answer

if TYPE_CHECKING:
    from pytest_kvqual.study.model import Gsm8kSource, PreservationRules

SCHEMA = 1

_KEYS = ("question", "answer")
_GIVE_FILE = "give the test set with --gsm8k FILE (JSON lines or Parquet)"
_INSTALL = "install pytest-kvqual[gsm8k]"


def load_questions(source: Gsm8kSource, file: Path | None) -> list[dict[str, str]]:
    """The test set, ``{"question", "answer"}`` each, in its order.

    Args:
        source: Where the set is, and its digest.
        file: The set as JSON lines, or as Parquet where the name ends in ``.parquet``; None takes it from the hub (from
            its cache where the hub is switched off or cannot be reached).

    Raises:
        StudyError: No file, or one that cannot be read or fetched; another digest, with both; a line that is no
            question; a package that is not installed, with the extra that has it.
    """
    path = _download(source) if file is None else file
    parquet = path.suffix == ".parquet"
    data = _parquet_lines(path) if parquet else _read(path, "the GSM8K test set")
    found = sha256_bytes(data)
    if found != source.sha256:
        form = "its rows as JSON lines have" if parquet else "found"
        raise StudyError(
            f"{path}: {form} sha256 {found}, expected {source.sha256}, the study's",
            advice="another set is another study",
        )
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [_question(parse_json(line, origin=f"{path}, line {number}", error=StudyError), f"{path}, line {number}")
            for number, line in enumerate(lines, start=1)]  # fmt: skip


def load_shots(path: Path) -> list[dict[str, str]]:
    """The worked questions of a prompt: a JSON list of ``{"question", "answer"}``, at least one.

    Raises:
        StudyError: No file; no such list; an empty question; an answer that does not end in ``#### NUMBER``.
    """
    data = _read(path, "the GSM8K shots")
    values = parse_json(data, origin=str(path), error=StudyError)
    if not isinstance(values, list) or not values:
        raise StudyError(f"{path}: found no list of worked questions, expected at least one")
    return [_question(value, f"{path}, example {number}") for number, value in enumerate(values, start=1)]


def build_panel(
    source: Gsm8kSource, rules: PreservationRules, tokenizer_json: Path, file: Path | None
) -> tuple[dict[str, Any], bytes]:
    """GSM8K's panel document, and its bytes: canonical JSON and a line feed.

    Prompts are encoded with the tokenizer's own special tokens, once, as a server encodes a text prompt; so a token for
    the text's beginning stands in them exactly where the tokenizer adds one.

    Args:
        source: Where the set and the worked questions are.
        rules: ``max_tokens`` of each question.
        tokenizer_json: The model's ``tokenizer.json``.
        file: As in :func:`load_questions`.

    Raises:
        StudyError: As :func:`load_questions` and :func:`load_shots`; a worked question that is a question of the test
            set; a tokenizer that cannot be read.
    """
    questions, shots = load_questions(source, file), load_shots(source.shots)
    asked = {question["question"].strip() for question in questions}
    for number, shot in enumerate(shots, start=1):
        if shot["question"].strip() in asked:
            raise StudyError(
                f"{source.shots}, example {number}: found a question of the test set, expected one of your own",
                advice="its answer would stand in its prompt",
            )
    vocabulary = _read(tokenizer_json, "the model's tokenizer")
    tokenizer = _tokenizer(tokenizer_json, vocabulary)
    items = build_items(questions, shots, lambda text: tokenizer.encode(text, add_special_tokens=True).ids,
                        rules.max_tokens)  # fmt: skip
    worked = sha256_bytes(_read(source.shots, "the GSM8K shots"))
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "task": "gsm8k",
        "length": None,
        "tokenizer_sha256": sha256_bytes(vocabulary),
        "sources": [
            f"GSM8K test set (MIT), {source.repository} at {source.revision}, {source.file}",
            f"the set as JSON lines, sha256 {source.sha256}",
            f"{len(shots)} worked questions, {source.shots.name}, sha256 {worked}",
        ],
        "items": [
            {
                "id": item.id,
                "prompt": list(item.prompt),
                "max_tokens": item.max_tokens,
                "expected": item.expected,
                "grade": item.grade,
            }
            for item in items
        ],
    }
    return document, canonical_bytes(document) + b"\n"


def _question(value: object, where: str) -> dict[str, str]:
    table = Table(value, origin=where, error=StudyError, known=_KEYS)
    question = {key: table.string(key) for key in _KEYS}
    expected_answer(question["answer"], where=where)
    return question


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StudyError(f"found no file {path}, expected {what}") from None
    except OSError as error:
        raise StudyError(f"cannot read {path}, {what}: {error.strerror or error}") from None


def _download(source: Gsm8kSource) -> Path:
    import httpx

    hub = _package("huggingface_hub", "to fetch GSM8K", f"{_INSTALL}, or {_GIVE_FILE}")
    try:
        # The hub's own switch (HF_HUB_OFFLINE) holds: then only its cache is looked into.
        return Path(
            hub.hf_hub_download(
                repo_id=source.repository, filename=source.file, repo_type="dataset", revision=source.revision
            )
        )
    except (OSError, ValueError, httpx.HTTPError) as error:
        # Its classes for "switched off", "not in the cache" and "no such file" are OSErrors, that for a bad name a
        # ValueError; a connection that breaks midway is httpx's own.
        reason = one_line(next(iter(str(error).strip().splitlines()), type(error).__name__))
        raise StudyError(
            f"{source.repository} at {source.revision}: cannot get {source.file}: {reason}", advice=_GIVE_FILE
        ) from None


def _parquet_lines(path: Path) -> bytes:
    _read(path, "the GSM8K test set")
    arrow = _package("pyarrow", f"to read {path.name}", f"{_INSTALL}, or give the set as JSON lines")
    parquet = _package("pyarrow.parquet", f"to read {path.name}", f"{_INSTALL}, or give the set as JSON lines")
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError, arrow.ArrowException) as error:
        reason = one_line(next(iter(str(error).strip().splitlines()), type(error).__name__))
        raise StudyError(f"{path}: found no Parquet file that can be read: {reason}") from None
    missing = [key for key in _KEYS if key not in table.column_names]
    if missing:
        raise StudyError(
            f"{path}: found no column {missing[0]!r}, expected {' and '.join(_KEYS)}", advice="give the test set's file"
        )
    return b"".join(
        json.dumps({key: row[key] for key in _KEYS}).encode("ascii") + b"\n"
        for row in table.select(list(_KEYS)).to_pylist()
    )


def _tokenizer(path: Path, data: bytes) -> Any:
    tokenizers = _package("tokenizers", "to build the GSM8K panel", _INSTALL)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the package raises this class itself
        raise StudyError(f"{path}: found no tokenizer that can be read: {one_line(str(error))}") from None
    # A file may carry a truncation or padding of its training; a server's encoding switches both off.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _package(name: str, purpose: str, advice: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise StudyError(f"found no package {name.split('.')[0]}, expected it {purpose}", advice=advice) from None
