"""What ``kvqual prepare`` writes: every panel from the model's tokenizer, the digests, and what it refuses."""

from __future__ import annotations

import json
import math
import struct
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prepared_study import SmallModel, chat, encode, small_study, text_of, whole
from tiny_study import TinyStudy

from pytest_kvqual import prepare as module
from pytest_kvqual._canonical import sha256_file
from pytest_kvqual.errors import CaptureError, ModelError, RefusedError, StudyError
from pytest_kvqual.prepare import largest_of, model_files, prepare, read_bible, read_topics
from pytest_kvqual.server import devices
from pytest_kvqual.study import build as building
from pytest_kvqual.study.load import load_study, require_prepared
from pytest_kvqual.study.panels import check_panels
from pytest_kvqual.study.timing_files import plan_command, trace_command

TEXTS = {"cpython": text_of(12_000, 1), "kjv": text_of(60_000, 2)}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A small study that is not prepared, its model, and texts that need no digest."""
    model = SmallModel(tmp_path / "model").write()
    tokenizer = SimpleNamespace(sha256=sha256_file(model.folder / "tokenizer.json"), encode=encode, chat=chat)
    monkeypatch.setattr(module, "tokenizer_of", lambda folder: tokenizer)
    monkeypatch.setattr(module, "read_topics", lambda path: TEXTS["cpython"])
    monkeypatch.setattr(module, "read_bible", lambda path: TEXTS["kjv"])
    return SimpleNamespace(study=str(small_study(tmp_path / "studies" / "small")), model=model)


def lines(world: SimpleNamespace, **options: Any) -> list[str]:
    """The lines of one run."""
    return list(prepare(world.study, format=options.pop("format", None), model=world.model.folder, **options))


def test_a_study_is_prepared_but_for_its_scales(world: SimpleNamespace) -> None:
    """Every panel and the digests are written and fit the study; the scales, and how to get them, are named."""
    told = lines(world)
    study = load_study(world.study)
    check_panels(study)
    assert [path.name for path in study.missing] == ["v.json"]
    assert dict(study.model.files) == model_files(world.model.folder)
    assert "awq/scales/v.json; run `kvqual prepare" in told[-1]
    assert "--format awq" in told[-1]
    assert "--calibrate" in told[-1]
    assert sum(": written; sha256 " in line for line in told) == 10
    with pytest.raises(StudyError, match=r"found no awq/scales/v\.json, expected it"):
        require_prepared(study)
    with pytest.raises(StudyError, match="is not prepared"):
        require_prepared(load_study(world.study, "bf16"))


def test_the_same_model_gives_the_same_bytes(world: SimpleNamespace) -> None:
    """A second run changes nothing."""
    lines(world)
    again = lines(world)
    assert sum(": unchanged; sha256 " in line for line in again) == 10


def test_a_prepared_study_can_be_timed_and_frozen(world: SimpleNamespace) -> None:
    """With scales in place, traces and plans are made of its panels, and prepare names what comes next."""
    lines(world)
    scales = Path(world.study) / "awq" / "scales" / "v.json"
    scales.parent.mkdir()
    scales.write_bytes(building.encode_rows({"schema": 1}, "v_scale", building.v_scale([3.0, 5.0])))
    assert "kvqual freeze" in lines(world)[-1]
    assert len(trace_command(world.study, check=False)) == 4
    assert any("38 trials" in line for line in plan_command(world.study, check=False, default="none"))


def test_windows_of_documents_share_no_run(world: SimpleNamespace) -> None:
    """No two documents, requests of the oracle, or excerpts of parity have a run of 64 tokens in common."""
    lines(world)
    study = load_study(world.study)
    paths = [study.parity.panel] + [
        length.panels[task] for length in study.lengths.values() for task in ("nll", "oracle")
    ]
    owner: dict[bytes, str] = {}
    for path in paths:
        for item in json.loads(path.read_text())["items"]:
            tokens, label = whole(item), f"{path.name}/{item['id']}"
            data = struct.pack(f"<{len(tokens)}H", *tokens)
            for start in range(0, len(data) - 2 * building.RUN + 1, 2):
                assert owner.setdefault(data[start : start + 2 * building.RUN], label) == label
    assert owner


def test_oracle_requests_lie_around_the_blocks_and_begin_apart(world: SimpleNamespace) -> None:
    """Prompts stand on each side of one and two blocks, decode steps open blocks, and first tokens differ."""
    lines(world)
    study = load_study(world.study)
    block = study.engine.block_size
    for length in study.lengths.values():
        items = json.loads(length.panels["oracle"].read_text())["items"]
        sizes = [len(item["prompt"]) for item in items]
        assert {block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1} <= set(sizes)
        assert max(sizes) <= length.tokens < max(sizes) + 32
        assert len({item["prompt"][0] for item in items}) == len(items)
        opened = [any((size + step) % block == 0 for step in range(item["max_tokens"] - 1))
                  for size, item in zip(sizes, items, strict=True)]  # fmt: skip
        assert sum(opened) >= 5


def test_what_a_canary_answers_stands_in_its_prompt(world: SimpleNamespace) -> None:
    """Each canary is a parity prompt of a text that is repeated, and no two canaries of a length begin alike."""
    lines(world)
    study = load_study(world.study)
    parity = {item["id"]: item["prompt"] for item in json.loads(study.parity.panel.read_text())["items"]}
    for rules in study.timing.values():
        items = json.loads(rules.panel.read_text())["items"]
        canaries = [item for item in items if item["grade"] == "canary"]
        assert len(canaries) == sum(cell.canaries for cell in rules.cells) > 0
        for item in canaries:
            assert item["prompt"] == parity[item["expected"]]
            size = len(item["prompt"])
            assert any(item["prompt"][by:] == item["prompt"][:-by] for by in range(1, size // 2))
        assert len({tuple(item["prompt"][: study.engine.block_size]) for item in canaries}) == len(canaries)


def test_every_question_has_its_answer_in_its_text(world: SimpleNamespace) -> None:
    """A retrieval prompt of exactly the declared size holds the sentence that gives the word asked for, once."""
    lines(world)
    for length in load_study(world.study).lengths.values():
        items = json.loads(length.panels["retrieval"].read_text())["items"]
        grades = {item["grade"] for item in items}
        assert len(grades) == len(items)
        for item in items:
            assert len(item["prompt"]) == length.tokens - length.tokens // 32
            is_it, word = encode(f"is {item['expected']}.")
            assert list(pairwise(item["prompt"])).count((is_it, word)) == 1


def test_a_text_that_is_used_up_is_named(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little text is one line, and leaves the study unprepared."""
    monkeypatch.setattr(module, "read_bible", lambda path: text_of(3_000, 2))
    with pytest.raises(StudyError, match="the text 'kjv': found 3000 tokens, all of them used, expected a window of"):
        lines(world)
    assert load_study(world.study).model.files == {}


def test_a_length_too_short_for_its_needles_is_named(world: SimpleNamespace) -> None:
    """Where the sentences alone are longer than the prompt, the question is named with both sizes."""
    path = Path(world.study) / "study.toml"
    text = path.read_text()
    for words in ("lengths.512", "timing.512", "nll-512", "oracle-512", "retrieval-512", "timing-512", "plans/512"):
        text = text.replace(words, words.replace("512", "256"))
    path.write_text(text.replace("traces/512", "traces/256"))
    with pytest.raises(StudyError, match=r"retrieval question 3: found sentences of .* expected fewer than 248"):
        lines(world)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "found num_hidden_layers 3, expected 2, as study qwen3-8b-awq declares"),
        ({"head_dim": None, "hidden_size": 64}, "found head_dim 16, expected 8"),
        ({"vocab_size": "many"}, "in 'vocab_size'"),
    ],
)
def test_another_model_is_refused(world: SimpleNamespace, changes: dict[str, object], message: str) -> None:
    """A model of another geometry is named before anything is written."""
    world.model.write(**changes)
    with pytest.raises(ModelError, match=message):
        lines(world)
    assert not (Path(world.study) / "awq").exists()


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("awq", {"quantization_config": None}, "found no quantisation, expected awq_marlin, as the flags of"),
        ("bf16", {}, "found the quantisation awq, expected none, as the flags of"),
        ("awq", {"quantization_config": {"quant_method": "gptq"}}, "found the quantisation gptq, expected awq_marlin"),
        ("awq", {"quantization_config": 3}, "expected a table"),
    ],
)
def test_weights_of_another_format_are_refused(
    world: SimpleNamespace, form: str, changes: dict[str, object], message: str
) -> None:
    """The formats of a model have one geometry: packed weights under a format without, and the reverse, are named."""
    world.model.write(**changes)
    with pytest.raises(ModelError, match=message):
        lines(world, format=form)
    assert not (Path(world.study) / form).exists()


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("{format}/panels/nll-768.json", "study.toml"),
        ("{format}/panels/nll-768.json", "shots/gsm8k.json"),
        ("{format}/panels/nll-768.json", "{format}/panels/parity.json"),
        ("{format}/panels/timing-512.json", "{format}/traces/512-open.jsonl"),
        ('files = "{format}/model.json"', 'files = "lock-awq.json"'),
    ],
)
def test_no_file_of_the_study_is_written_over_another(world: SimpleNamespace, was: str, now: str) -> None:
    """A slip in a path costs nothing: what else is at that place is named, and nothing is written."""
    path = Path(world.study) / "study.toml"
    text = path.read_text().replace(was, now)
    path.write_text(text)
    with pytest.raises(StudyError, match="expected a place of its own"):
        lines(world)
    assert path.read_text() == text
    assert not (Path(world.study) / "awq").exists()


def test_a_tokenizer_without_a_chat_template_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the package raises of a template is one line with the folder."""

    def from_pretrained(*args: object, **options: object) -> object:
        raise ValueError("tokenizer.chat_template is not set\nread on")

    package = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setattr(module, "_package", lambda name: package)
    tokenizer = module.Tokenizer(sha256="", plain=None, folder=tmp_path / "none")
    with pytest.raises(
        ModelError, match=r"found no chat template that can be used: tokenizer\.chat_template"
    ) as caught:
        tokenizer.chat("?")
    assert "\n" not in caught.value.line()


def test_a_folder_with_more_than_a_model_is_refused(world: SimpleNamespace, tmp_path: Path) -> None:
    """A folder inside the model's, a folder without weights, and no folder are each one line."""
    (world.model.folder / ".cache").mkdir()
    with pytest.raises(ModelError, match=r"\.cache: found a folder, expected the model's files alone"):
        lines(world)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"found no file, expected config\.json and safetensors"):
        model_files(tmp_path / "empty")
    with pytest.raises(ModelError, match="found no folder"):
        model_files(tmp_path / "none")


def test_a_committed_study_is_not_prepared(tiny_study: TinyStudy, tmp_path: Path) -> None:
    """A study whose files are committed with it is refused."""
    with pytest.raises(StudyError, match=r"found no file of digests in \[model\]"):
        list(prepare(str(tiny_study.folder), format=None, model=tmp_path))


def test_calibration_without_a_gpu_is_one_line(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """--calibrate boots the first control, so it is refused at once where that cannot boot; nothing is written."""
    monkeypatch.setattr("pytest_kvqual.session.gpu_found", lambda: False)
    with pytest.raises(RefusedError, match="--calibrate: found no GPU, expected one: it boots arm native-flashinfer"):
        lines(world, calibrate=True)
    assert not (Path(world.study) / "awq").exists()


def test_scales_come_from_what_the_control_told(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The V scales of every arm are made of the control's largest |V|, over text that no document has."""
    seen: list[list[int]] = []

    def told(study: object, model: Path, windows: list[list[int]]) -> list[float]:
        seen.extend(windows)
        return [3.0, 5.0]

    monkeypatch.setattr("pytest_kvqual.session.gpu_found", lambda: True)
    monkeypatch.setattr(module, "largest_v", told)
    lines(world, calibrate=True)
    study = load_study(world.study)
    assert study.missing == ()
    assert json.loads((Path(world.study) / "awq/scales/v.json").read_text())["v_scale"] == building.v_scale([3.0, 5.0])
    document = json.loads(study.lengths[768].panels["nll"].read_text())["items"]
    runs = {tuple(window[i : i + building.RUN]) for window in seen for i in range(len(window) - building.RUN + 1)}
    for item in document:
        tokens = whole(item)
        assert not any(tuple(tokens[i : i + building.RUN]) in runs for i in range(len(tokens) - building.RUN + 1))


def rank(*largest: object) -> list[dict[str, object]]:
    """What one rank tells."""
    return [{"layer": f"layers.{index}", "largest": value} for index, value in enumerate(largest)]


def test_nothing_is_calibrated_while_an_arm_is_timed(
    tiny_study: TinyStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control that scales are made in would take the CPU of what is timed: it does not boot beside it."""
    monkeypatch.setenv(devices.LOCKS, str(tmp_path / "locks"))
    study = load_study(str(tiny_study.folder))
    with devices.hold("host", "taken"), pytest.raises(RefusedError, match="found a run on this host that times an arm"):
        module.largest_v(study, tmp_path, [[1, 2, 3]])


def test_ranks_are_joined_by_their_largest() -> None:
    """Each rank has some of the heads: the largest of a layer is that of any rank, and NaN is not lost."""
    assert largest_of([rank(1.0, 4.0), rank(2.0, 3.0)], 2) == [2.0, 4.0]
    assert math.isnan(largest_of([rank("nan", 1.0), rank(2.0, 3.0)], 2)[0])


@pytest.mark.parametrize("ranks", [[], [rank(1.0)], [rank(1.0, 2.0), rank(1.0)], [None], [[{"layer": "a"}]]])
def test_other_layers_than_the_models_are_refused(ranks: list[object]) -> None:
    """A rank that tells of too few layers, of others, or of nothing is no calibration."""
    with pytest.raises(CaptureError, match="calibration: found"):
        largest_of(ranks, 2)


@given(st.lists(st.floats(2.0**-20, 2.0**20, width=32), min_size=1, max_size=8))
@example([448.0 / 1.5 * 2])
@example([3.0, 3.0, 3.0])
def test_a_scale_covers_what_was_seen(largest: list[float]) -> None:
    """A scale is exact in float32, its range holds 1.5 times the largest |V|, by little more, for its layer alone."""
    scales = building.v_scale(largest)
    assert len({1.0, *scales}) == len(scales) + 1
    for value, scale in zip(largest, scales, strict=True):
        assert struct.unpack("<f", struct.pack("<f", scale))[0] == scale
        assert scale * building.E4M3_MAX >= value * building.HEADROOM
        # One step of rounding, and one for each other scale that may be in the way.
        steps = len(largest) + 1
        most = value * building.HEADROOM * (1 + 2.0 ** (1 - building.SCALE_BITS)) ** steps
        assert scale * building.E4M3_MAX <= most * 1.0001


def test_layers_with_one_largest_v_have_scales_of_their_own() -> None:
    """In bfloat16 two layers often have the same largest |V|: the later one's scale is the next one up."""
    first, second, third = building.v_scale([2.5, 3.0, 2.5])
    assert first < third < second
    assert third / first < 1 + 2.0 ** (2 - building.SCALE_BITS)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_no_scale_is_made_of_nothing(value: float) -> None:
    """A layer that wrote nothing, NaN or infinity has no scale."""
    with pytest.raises(StudyError, match="layer 1: found a largest"):
        building.v_scale([1.5, value])


def test_sources_are_held_against_their_digests(tmp_path: Path) -> None:
    """Another text, and a file that is not there, are refused with what to give instead."""
    other = tmp_path / "other"
    other.write_text("topics = {}\n")
    with pytest.raises(StudyError, match=r"found sha256 .* expected abaa56a6"):
        read_topics(other)
    with pytest.raises(StudyError, match=r"found sha256 .* expected cd45f0c9"):
        read_bible(other)
    with pytest.raises(StudyError, match="cannot read"):
        read_bible(tmp_path / "none")
