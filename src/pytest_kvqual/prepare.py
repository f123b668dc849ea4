"""Texts and tokenizer of a study's panels, and what ``kvqual prepare`` does with them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_kvqual._canonical import sha256_bytes, sha256_file
from pytest_kvqual._decode import one_line
from pytest_kvqual.errors import ModelError, StudyError
from pytest_kvqual.study.build import CPYTHON, KJV, Source

_LIMIT_S = 120.0
_BIBLE = ("bible", "-f", "gen1:1-rev22:21")
_TOPICS = re.compile(r"\A(?:#[^\n]*\n|\s)*topics = ")


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A model's tokenizer. ``sha256`` is that of its ``tokenizer.json``."""

    sha256: str
    plain: Any
    folder: Path

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens."""
        return list(self.plain.encode(text, add_special_tokens=False).ids)

    def chat(self, question: str) -> list[int]:
        """The token ids of a user's message under the model's chat template, up to where the answer begins."""
        message = [{"role": "user", "content": question}]
        template = _chat_template(self.folder)
        return self.encode(template.apply_chat_template(message, add_generation_prompt=True, tokenize=False))


@functools.cache
def _chat_template(folder: Path) -> Any:
    return _package("transformers").AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def tokenizer_of(model: Path) -> Tokenizer:
    """The tokenizer in a model's folder.

    Raises:
        ModelError: There is none that can be read, or the package for it is missing.
    """
    path = model / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"found no file {path}, expected the model's tokenizer", advice="give the model's folder")
    tokenizers = _package("tokenizers")
    try:
        plain = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises this class itself
        raise ModelError(f"{path}: found no tokenizer that can be read: {one_line(str(error))}") from None
    return Tokenizer(sha256=sha256_file(path), plain=plain, folder=model)


def read_topics(path: Path | None) -> str:
    """The topics of ``pydoc_data`` in the order of their names.

    Args:
        path: CPython 3.11.7's ``Lib/pydoc_data/topics.py``; None for that of the running Python.

    Raises:
        StudyError: There is none, or it is another one.
    """
    if path is None:
        spec = importlib.util.find_spec("pydoc_data.topics")
        if spec is None or spec.origin is None:
            raise StudyError("found no pydoc_data.topics in this Python", advice="give --topics FILE")
        path = Path(spec.origin)
    data = _checked(CPYTHON, _read(path), advice="give CPython 3.11.7's Lib/pydoc_data/topics.py with --topics FILE")
    topics = _literal(data.decode("utf-8"))
    return "\n\n".join(topics[name] for name in sorted(topics))


def read_bible(path: Path | None) -> str:
    """The King James text, one verse a line, without the verse numbers.

    Args:
        path: The text as Debian's ``bible-kjv`` prints it; None runs that program.

    Raises:
        StudyError: There is neither, or it is another text.
    """
    advice = "give it with --bible FILE: apt-get install bible-kjv; bible -f gen1:1-rev22:21 > FILE"
    if path is not None:
        data = _read(path)
    else:
        try:
            data = subprocess.run(_BIBLE, check=True, capture_output=True, timeout=_LIMIT_S).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise StudyError(f"cannot run {_BIBLE[0]}: {one_line(str(error))}", advice=advice) from None
    text = _checked(KJV, data, advice=advice).decode("ascii")
    return "\n".join(re.sub(r"^\S+ ", "", line) for line in text.splitlines())


def _literal(text: str) -> dict[str, str]:
    """The one assignment of the topics module, read without running it."""
    import ast

    start = _TOPICS.match(text)
    return dict(ast.literal_eval(text[start.end() :] if start else "{}"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StudyError(f"cannot read {path}: {error.strerror or error}") from None


def _checked(source: Source, data: bytes, *, advice: str) -> bytes:
    found = sha256_bytes(data)
    if found != source.sha256:
        raise StudyError(f"{source.label}: found sha256 {found}, expected {source.sha256}", advice=advice)
    return data


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ModelError(
            f"found no package {name}, expected it to build panels", advice=f"pip install {name}"
        ) from None
