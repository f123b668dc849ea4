"""What ``kvqual init`` leaves behind: a frozen study, or nothing; and what it says last."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from prepared_study import LAYERS, SmallModel, chat, encode, text_of

from pytest_kvqual import init as module
from pytest_kvqual import prepare as preparing
from pytest_kvqual._canonical import sha256_file
from pytest_kvqual.cli import main
from pytest_kvqual.errors import ModelError, ServerError
from pytest_kvqual.prepare import Tokenizer, prepare
from pytest_kvqual.study.freeze import verify_lock
from pytest_kvqual.study.load import load_study

SHORT = ["--length", "128", "--without", "retrieval"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A model of a few bytes, a text, a place to work in, and an engine that tells the largest |V| of each layer."""
    model = SmallModel(tmp_path / "My Model").write(head_dim=64)
    tokenizer = SimpleNamespace(sha256=sha256_file(model.folder / "tokenizer.json"), encode=encode, chat=chat)
    monkeypatch.setattr(preparing, "tokenizer_of", lambda folder: tokenizer)
    monkeypatch.setattr(module, "tokenizer_of", lambda folder: tokenizer)
    monkeypatch.setattr(preparing, "largest_v", lambda study, folder, windows: [3.0, 5.0])
    text = tmp_path / "text.txt"
    text.write_text(text_of(14_000, 1))
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    return SimpleNamespace(model=model, text=text, place=place)


def run(world: SimpleNamespace, *options: str) -> int:
    """The exit status of ``kvqual init`` of the model and the text."""
    return main(["init", str(world.model.folder), "--text", str(world.text), *SHORT, *options])


def test_a_study_is_written_calibrated_and_frozen(
    world: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command leaves a study whose lock matches, and ends with a command line that names it."""
    assert run(world) == 0
    study = load_study("my-model-k16v8")
    assert len(verify_lock(study).files) == 7
    assert len(json.loads((study.directory / "scales" / "v.json").read_text())["v_scale"]) == LAYERS
    panel = json.loads(study.lengths[128].panels["nll"].read_text())
    assert panel["sources"] == [f"text.txt sha256:{sha256_file(world.text)}"]
    assert [path.name for path in world.place.iterdir()] == ["my-model-k16v8"]
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[0] == f"KVQUAL_MODEL_DIR={world.model.folder}"
    assert words[1] == "pytest"
    asked = ["-m", "cpu", "--study", str(study.directory), "--arm", "candidate", "--length", "128"]
    assert words[-len(asked) :] == asked


def test_the_same_model_gives_the_same_files(world: SimpleNamespace) -> None:
    """Two studies of one model and text have the same panels, digests and scales."""
    for name in ("one", "two"):
        assert run(world, "--output", name) == 0
    files = {path.relative_to("one") for path in Path("one").rglob("*.json") if path.name != "lock.json"}
    assert len(files) == 6
    for file in files:
        assert Path("one", file).read_bytes() == Path("two", file).read_bytes()


def test_any_folder_gives_a_name(world: SimpleNamespace) -> None:
    """A folder whose name no study may have has a study with a like one."""
    assert run(world, "--output", "under/my study!") == 0
    assert load_study("under/my study!").name == "my-study"


def test_without_a_boot_the_rest_is_told(world: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """The study waits for its scales, and the command that was told makes them from the same text."""
    assert run(world, "--no-calibrate") == 0
    study = load_study("my-model-k16v8")
    assert [path.name for path in study.missing] == ["v.json"]
    told = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("next, "))
    assert main(shlex.split(told.partition(": ")[2])[1:]) == 0
    assert load_study("my-model-k16v8").missing == ()


def test_a_gpu_study_can_be_begun_anywhere(
    world: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the device the panels are made, and what is left for the GPU host is told."""
    monkeypatch.setattr("pytest_kvqual.session.gpu_found", lambda: False)
    assert run(world, "--platform", "gpu", "--without", "nll") == 0
    assert [path.name for path in load_study("my-model-k16v8").missing] == ["v.json"]
    told = capsys.readouterr().out
    assert "no scales yet: --calibrate: found no GPU" in told
    assert "next, where arm native boots: kvqual prepare" in told
    assert " -m gpu --study " in told.splitlines()[-1]


def test_a_boot_that_fails_keeps_the_study(
    world: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Panels are not made twice: the error ends with the command that goes on from here."""

    def broken(study: object, folder: object, windows: object) -> list[float]:
        raise ServerError("found no server", advice="read its log")

    monkeypatch.setattr(preparing, "largest_v", broken)
    assert run(world) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "read its log; the study is there: kvqual prepare" in error
    assert load_study("my-model-k16v8").missing != ()


def test_a_stock_candidate_needs_no_scales(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own word for a cache does, and nothing boots for it."""
    monkeypatch.setattr(preparing, "largest_v", None)
    assert run(world, "--kv-cache-dtype", "fp8") == 0
    arm = load_study("my-model-fp8_e4m3").arms["candidate"]
    assert (arm.kv_format, arm.flags, arm.scales) == ("cpu-attn-fp8-e4m3", ("--kv-cache-dtype=fp8_e4m3",), None)
    verify_lock(load_study("my-model-fp8_e4m3"))


def test_another_text_is_not_mixed_in(world: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """Preparing again from another text is refused before a panel is written over."""
    assert run(world, "--no-calibrate") == 0
    before = {path: path.read_bytes() for path in Path("my-model-k16v8").rglob("*.json")}
    other = world.place.parent / "other.txt"
    other.write_text(text_of(14_000, 2))
    capsys.readouterr()
    assert main(["prepare", "my-model-k16v8", "--model", str(world.model.folder), "--text", str(other)]) == 2
    assert "found a panel cut from ['text.txt sha256:" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path("my-model-k16v8").rglob("*.json")} == before


def test_texts_of_other_studies_are_refused(world: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind of study takes its own options for its text, and names the other ones."""
    assert run(world, "--no-calibrate") == 0
    assert main(["prepare", "my-model-k16v8", "--model", str(world.model.folder), "--bible", "x"]) == 2
    assert "found --bible or --topics, expected --text FILE" in capsys.readouterr().err
    assert main(["prepare", "phi-4", "--model", str(world.model.folder), "--text", "x"]) == 2
    assert "found --text, expected none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("break_it", "options", "message"),
    [
        ("", ["--output", "."], "expected no such folder: a study is not overwritten"),
        ("", ["--output", "x" * 300], "File name too long"),
        ("", ["--candidate", "k4v4"], "--candidate: found 'k4v4', expected one of k16v8, k16v16, fp8_e4m3, fp8_e5m2"),
        ("", ["--length", "4096"], "all of them used"),
        ("config.json", [], "config.json: No such file"),
        ("model.safetensors", [], "expected config.json and safetensors"),
        ("text", [], "cannot read"),
        ("bytes", [], "found the byte 0xff, expected a text in UTF-8"),
        ("blank", [], "found no text"),
        ("folder", [], "found a folder, expected the model's files alone"),
        ("latent", [], "multi-head latent attention"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(
    world: SimpleNamespace, capsys: pytest.CaptureFixture[str], break_it: str, options: list[str], message: str
) -> None:
    """What cannot be a study is refused with its reason, and no folder is left half written."""
    folder = world.model.folder
    if break_it in ("config.json", "model.safetensors"):
        (folder / break_it).unlink()
    elif break_it == "text":
        world.text.unlink()
    elif break_it in ("bytes", "blank"):
        world.text.write_bytes(b"\xff" if break_it == "bytes" else b" \n")
    elif break_it == "folder":
        (folder / ".cache").mkdir()
    elif break_it == "latent":
        world.model.write(head_dim=64, kv_lora_rank=512)
    assert run(world, *options) == 2
    error = capsys.readouterr().err
    assert message in error.replace(f"cannot read {folder}/", "")
    assert error.startswith("kvqual init: ")
    assert error.count("\n") == 1
    assert list(world.place.iterdir()) == []


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """Nothing can be cut without one; the file that is looked for is named."""
    model = SmallModel(tmp_path / "model").write().folder
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"found no file .*tokenizer\.json"):
        list(module.init(model, output=tmp_path / "study"))
    assert not (tmp_path / "study").exists()


def test_a_model_without_a_chat_template_is_asked_the_bare_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base model has no template; one that raises is one line."""
    plain = SimpleNamespace(encode=lambda text, add_special_tokens: SimpleNamespace(ids=encode(text)))
    tokenizer = Tokenizer(sha256="0" * 64, plain=plain, folder=Path("model"))
    found = SimpleNamespace(chat_template=None)
    monkeypatch.setattr(preparing, "_chat_template", lambda folder: found)
    assert tokenizer.chat("What is 1 + 1?") == encode("What is 1 + 1?")

    def broken(*args: object, **options: object) -> str:
        raise RuntimeError("roles must alternate")

    found.chat_template, found.apply_chat_template = "{{ x }}", broken
    with pytest.raises(ModelError, match="found no chat template that can be used: roles must alternate"):
        tokenizer.chat("What?")


def test_a_number_can_be_changed_afterwards(world: SimpleNamespace) -> None:
    """Edit the declaration, prepare, freeze: the panel has the new number of questions, and the lock matches again."""
    assert run(world) == 0
    declaration = Path("my-model-k16v8", "study.toml")
    declaration.write_text(declaration.read_text().replace("recall = 160 ", "recall = 64 "))
    again = ["prepare", "my-model-k16v8", "--model", str(world.model.folder), "--text", str(world.text)]
    assert main(again) == 0
    assert main(["freeze", "my-model-k16v8"]) == 0
    study = load_study("my-model-k16v8")
    verify_lock(study)
    assert len(json.loads(study.lengths[128].panels["recall"].read_text())["items"]) == 64


def test_a_prepared_study_names_what_comes_next(world: SimpleNamespace) -> None:
    """A study that times nothing needs no trace and no plan."""
    assert run(world) == 0
    lines = list(prepare("my-model-k16v8", format=None, model=world.model.folder, text=world.text))
    assert lines[-1] == f"next: kvqual freeze {world.place / 'my-model-k16v8'}"
    assert sum(": unchanged; " in line for line in lines) == 5
