"""Panels from a real tokenizer: those of the embedded study byte for byte, and those of a GPU study of its geometry."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from pytest_kvqual.models import model_folder
from pytest_kvqual.prepare import prepare, read_bible, read_topics, tokenizer_of
from pytest_kvqual.study.build import build
from pytest_kvqual.study.load import load_study, studies_folder
from pytest_kvqual.study.panels import check_panels

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(shutil.which("bible") is None, reason="the text of the panels comes from Debian's bible-kjv"),
]


def recipe() -> ModuleType:
    """``studies/smollm2-cpu/build.py``."""
    spec = importlib.util.spec_from_file_location("build_smollm2", studies_folder() / "smollm2-cpu" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_embedded_panels_are_built_again() -> None:
    """Every panel of smollm2-cpu is what the builder makes of the model's tokenizer now."""
    study = load_study("smollm2-cpu")
    tokenizer = tokenizer_of(model_folder(study.model))
    texts = {"cpython": read_topics(None), "kjv": read_bible(None)}
    _, panels = build(
        recipe().RECIPE, texts, encode=tokenizer.encode, chat=tokenizer.chat, tokenizer_sha256=tokenizer.sha256
    )
    built = {(it.task, it.length): it.data for it in panels}
    names = {path.stem for path in (study.directory / "panels").iterdir()}
    assert {task if length is None else f"{task}-{length}" for task, length in built} == names
    for (task, length), data in built.items():
        name = task if length is None else f"{task}-{length}"
        assert data == (study.directory / "panels" / f"{name}.json").read_bytes()


def test_a_gpu_study_is_prepared_from_a_stand_in(tmp_path: Path) -> None:
    """With the geometry of the embedded model, its tokenizer gives every panel of qwen3-8b-awq, whole and fitting."""
    embedded = load_study("smollm2-cpu").model
    folder = tmp_path / "qwen3-8b-awq"
    shutil.copytree(studies_folder() / "qwen3-8b-awq", folder, ignore=shutil.ignore_patterns("awq", "bf16", "lock*"))
    text = (folder / "study.toml").read_text()
    declared = load_study("qwen3-8b-awq").model
    for key in ("layers", "query_heads", "kv_heads", "head_size", "vocabulary"):
        was = f"\n{key} = {getattr(declared, key)}\n"
        assert was in text
        text = text.replace(was, f"\n{key} = {getattr(embedded, key)}\n")
    (folder / "study.toml").write_text(text)
    # The stand-in has no packed weights, which the other format declares.
    list(prepare(str(folder), format="bf16", model=model_folder(embedded)))
    study = load_study(str(folder), "bf16")
    check_panels(study)
    assert [path.name for path in study.missing] == ["v.json"]
