"""Formats of a model, and studies that are not prepared: what loads, what is refused, and whose lock is whose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_study import TOKENIZER, TinyStudy

from pytest_kvqual.audit.frozen import _of_the_format as audited
from pytest_kvqual.errors import LockError, StudyError
from pytest_kvqual.study import freeze as freezing
from pytest_kvqual.study.load import load_study, require_prepared, studies_folder
from pytest_kvqual.study.model import Study

REVISIONS = {"awq": "a" * 40, "bf16": "b" * 40}
FORMATS = """
[model.formats.awq]
repository = "Org/Model-AWQ"
revision = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
dtype = "float16"
flags = ["--quantization=awq_marlin"]
files = "model-{format}.json"

[model.formats.bf16]
repository = "Org/Model"
revision = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
dtype = "bfloat16"
files = "model-{format}.json"
"""


def with_formats(tiny: TinyStudy) -> Path:
    """The tiny study with two formats, both of them prepared; returns its folder."""
    text = (tiny.folder / "study.toml").read_text()
    begin, end = text.index("[model.files]"), text.index("[engine]")
    text = (
        text[:begin] + FORMATS + text[end:].replace('cache_dtype = "torch.bfloat16"', 'cache_dtype = "torch.{dtype}"')
    )
    text = text.replace('"scales/candidate-v.json"', '"scales/{format}-v.json"')
    (tiny.folder / "study.toml").write_text(text)
    for name in REVISIONS:
        digests = {"tokenizer.json": TOKENIZER, "model.safetensors": name[0] * 64}
        (tiny.folder / f"model-{name}.json").write_text(json.dumps({"schema": 1, "files": digests}))
        (tiny.folder / f"scales/{name}-v.json").write_bytes((tiny.folder / "scales/candidate-v.json").read_bytes())
    return tiny.folder


def test_a_format_is_the_study_with_its_own_model(tiny_study: TinyStudy) -> None:
    """Each format has its repository, digests, flags, dtype and files; without --format it is the first."""
    folder = str(with_formats(tiny_study))
    awq, bf16 = load_study(folder, "awq"), load_study(folder, "bf16")
    assert load_study(folder) == awq
    for study, name in ((awq, "awq"), (bf16, "bf16")):
        assert (study.model.format, study.model.formats) == (name, ("awq", "bf16"))
        assert study.model.revision == REVISIONS[name]
        assert study.model.files["model.safetensors"] == name[0] * 64
        assert study.arms["candidate"].scales == study.directory / f"scales/{name}-v.json"
        assert study.missing == ()
        require_prepared(study)
    assert awq.engine.flags == (*bf16.engine.flags, "--quantization=awq_marlin")
    assert (awq.arms["native"].cache_dtype, bf16.arms["native"].cache_dtype) == ("torch.float16", "torch.bfloat16")


@pytest.mark.parametrize(
    ("change", "wanted", "message"),
    [
        (("", ""), "int4", "found --format int4, expected one of awq, bf16"),
        (('repository = "Org/Model"', 'repositori = "Org/Model"'), None, "the unknown key 'repositori'"),
        (('dtype = "float16"', 'dtype = "int4"'), None, "expected one of float16, bfloat16"),
        (('revision = "aaaa', 'revision = "main'), None, "a commit of 40 hexadecimal digits"),
        (('source = "nowhere"', 'source = "nowhere"\nfiles = "x.json"'), None, "one for every format"),
        (("model-{format}.json", "../model-{format}.json"), None, "a path inside"),
    ],
)
def test_a_malformed_format_is_refused(
    tiny_study: TinyStudy, change: tuple[str, str], wanted: str | None, message: str
) -> None:
    """An unknown format, key, dtype, revision or place is one line."""
    folder = with_formats(tiny_study)
    path = folder / "study.toml"
    path.write_text(path.read_text().replace(*change) if change[0] else path.read_text())
    with pytest.raises(StudyError, match=message) as caught:
        load_study(str(folder), wanted)
    assert "\n" not in caught.value.line()


def test_a_study_of_one_format_takes_no_other(tiny_study: TinyStudy) -> None:
    """--format for a study without formats is refused."""
    with pytest.raises(StudyError, match="found --format awq, expected none: its model has one format"):
        load_study(str(tiny_study.folder), "awq")


def test_each_format_has_a_lock_of_its_own(tiny_study: TinyStudy) -> None:
    """The lock of one format is another file with another digest, and does not stand in for the other's."""
    folder = str(with_formats(tiny_study))
    paths = [freezing.freeze(load_study(folder, name)) for name in REVISIONS]
    assert [path.name for path in paths] == ["lock-awq.json", "lock-bf16.json"]
    awq, bf16 = (freezing.verify_lock(load_study(folder, name)) for name in REVISIONS)
    assert awq.sha256 != bf16.sha256
    assert awq.weights != bf16.weights
    assert "model-awq.json" in awq.files
    assert "model-awq.json" not in bf16.files
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(LockError, match="found the lock of format awq, expected that of bf16"):
        freezing.verify_lock(load_study(folder, "bf16"))


def test_changed_digests_are_another_lock(tiny_study: TinyStudy) -> None:
    """Weights whose digests were written anew do not match the old lock."""
    folder = with_formats(tiny_study)
    freezing.freeze(load_study(str(folder), "awq"))
    path = folder / "model-awq.json"
    path.write_text(path.read_text().replace("a" * 64, "c" * 64))
    with pytest.raises(LockError, match="no longer matches"):
        freezing.verify_lock(load_study(str(folder), "awq"))


@pytest.mark.parametrize("name", ["awq", "bf16"])
def test_an_unprepared_study_loads_and_runs_nothing(tiny_study: TinyStudy, name: str) -> None:
    """Missing digests, scales and panels are named in one line with the command that makes them; nothing is frozen."""
    folder = with_formats(tiny_study)
    for path in (folder / f"model-{name}.json", folder / f"scales/{name}-v.json", folder / "panels/nll-16.json"):
        path.unlink()
    study = load_study(str(folder), name)
    assert study.model.files == {}
    for refused in (require_prepared, freezing.freeze, freezing.verify_lock):
        with pytest.raises(StudyError, match="is not prepared") as caught:
            refused(study)
        line = caught.value.line()
        assert "\n" not in line
        assert f"found no model-{name}.json, scales/{name}-v.json, panels/nll-16.json, expected them" in line
        assert f"kvqual prepare {folder} --format {name} --model DIR`" in line
        assert f"at {REVISIONS[name]}" in line


def test_missing_scales_are_made_by_calibrating(tiny_study: TinyStudy) -> None:
    """Where the scales alone are missing, the command that is named is the one that makes them."""
    folder = with_formats(tiny_study)
    (folder / "scales/awq-v.json").unlink()
    with pytest.raises(StudyError, match="is not prepared") as caught:
        require_prepared(load_study(str(folder), "awq"))
    assert f"kvqual prepare {folder} --format awq --model DIR --calibrate`" in caught.value.line()


def test_a_study_whose_files_are_committed_misses_none(tiny_study: TinyStudy) -> None:
    """Without a repository to prepare it from, a missing panel is an error when the study is loaded."""
    (tiny_study.folder / "panels/nll-16.json").unlink()
    with pytest.raises(StudyError, match=r"no file .*nll-16"):
        load_study(str(tiny_study.folder))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "found no key 'schema'"),
        ('{"schema": 2, "files": {}}', "found 2, expected 1"),
        ('{"schema": 1, "files": {}}', "found no files"),
        ('{"schema": 1, "files": {"a/b": "%s"}}' % ("a" * 64), "a name without a folder"),
        ("{", "expected JSON in UTF-8"),
    ],
)
def test_malformed_digests_are_refused(tiny_study: TinyStudy, text: str, message: str) -> None:
    """A file of digests is read as strictly as a declaration."""
    folder = with_formats(tiny_study)
    (folder / "model-awq.json").write_text(text)
    with pytest.raises(StudyError, match=message):
        load_study(str(folder), "awq")


@pytest.mark.parametrize(
    ("name", "form"), [("qwen3-8b-awq", "awq"), ("qwen3-8b-awq", "bf16"), ("phi-4", None), ("smollm2-cpu", None)]
)
def test_the_audit_reads_a_format_as_the_loader_does(name: str, form: str | None) -> None:
    """The independent reader comes to the same flags, dtypes, paths and digests."""
    import tomllib

    study = load_study(name, form)
    text = (studies_folder() / name / "study.toml").read_text()
    files = study.model.files_path
    contents = (
        {} if files is None else {files.relative_to(study.directory).as_posix(): b'{"schema": 1, "files": {"a": "b"}}'}
    )
    found: Any = audited(tomllib.loads(text), form, contents)
    assert tuple(found["engine"]["flags"]) == study.engine.flags
    assert {key: arm.get("cache_dtype") for key, arm in found["arms"].items()} == {
        key: arm.cache_dtype for key, arm in study.arms.items()
    }
    for tokens, length in study.lengths.items():
        assert {task: study.directory / path for task, path in found["lengths"][str(tokens)]["panels"].items()} == dict(
            length.panels
        )
    assert found["model"]["files"] == ({"a": "b"} if files is not None else dict(study.model.files))


GEOMETRY = {"qwen3-8b-awq": (36, 32, 8, 128, 151936), "phi-4": (40, 40, 10, 128, 100352)}


def gpu_studies() -> list[Study]:
    """Every GPU study in every format."""
    return [load_study(name, form) for name in GEOMETRY for form in load_study(name).model.formats or (None,)]


@pytest.mark.parametrize("study", gpu_studies(), ids=lambda study: f"{study.name}-{study.model.format}")
def test_what_the_gpu_studies_declare(study: Study) -> None:
    """Geometry, pools, controls, tasks, limits and the order of gates are those of the published method."""
    model = study.model
    assert (model.layers, model.query_heads, model.kv_heads, model.head_size, model.vocabulary) == GEOMETRY[study.name]
    assert study.platform == "gpu"
    assert {tokens: length.cache_bytes >> 30 for tokens, length in study.lengths.items()} == {8192: 48, 1024: 32}
    assert {length.wave_size for length in study.lengths.values()} == {32}
    assert study.schedule == "natural"
    assert all(dict(length.questions) == {"retrieval": 100, "gsm8k": 1319} for length in study.lengths.values())
    assert (study.nll.documents, study.nll.decode_steps) == (32, 128)
    assert {task: rules.limit for task, rules in study.preservation.items()} == {"retrieval": 0.05, "gsm8k": 0.02}
    assert study.preservation["gsm8k"].max_tokens == 2048
    assert [arm.name for arm in study.controls()] == ["native-flashinfer", "native-fa3"]
    assert [arm.name for arm in study.arms.values() if arm.installed] == ["candidate"]
    assert all(gate.state == "required" for gate in study.gates)
    assert set(study.timing) == set(study.lengths)
