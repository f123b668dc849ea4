"""The declaration of somebody's own model: it is the study that was worked out, and explains each of its keys."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvqual.errors import ModelError, StudyError
from pytest_kvqual.kv.declarations import NEED_DECLARATION
from pytest_kvqual.model_config import Sizes
from pytest_kvqual.own_study import CANDIDATES, FEWEST_TOKENS, LEAVABLE, Platform, explained, own_study
from pytest_kvqual.study.load import load_study
from pytest_kvqual.study.model import Study

QWEN3 = Sizes(
    layers=36, query_heads=32, kv_heads=8, head_size=128, vocabulary=151936, positions=40960, dtype="bfloat16"
)


def made(folder: Path, **options: object) -> Study:
    """A study of Qwen3-8B's sizes, but for what is given."""
    asked = {"model": "Own", "sizes": QWEN3, "platform": "cpu", "candidate": "k16v8", "length": 1024, **options}
    return own_study(directory=folder, **asked)  # type: ignore[arg-type]


@st.composite
def asked(draw: st.DrawFn) -> dict[str, object]:
    """Whatever may be asked of a model that has full causal attention."""
    platform: Platform = draw(st.sampled_from(("cpu", "gpu")))
    kv_heads = draw(st.integers(1, 16))
    length = draw(st.integers(FEWEST_TOKENS, 40_000))
    return {
        "platform": platform,
        "candidate": draw(st.sampled_from(CANDIDATES)),
        "length": length,
        "without": draw(st.lists(st.sampled_from(LEAVABLE), unique=True)),
        "model": draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True)),
        "sizes": Sizes(
            layers=draw(st.integers(1, 200)),
            query_heads=kv_heads * draw(st.integers(1, 16)),
            kv_heads=kv_heads,
            head_size=draw(st.sampled_from((32, 64, 80, 96, 128, 192, 256))),
            vocabulary=draw(st.integers(2, 300_000)),
            positions=draw(st.none() | st.integers(max(512, length + 128), 2_000_000)),
            dtype=draw(st.sampled_from(("", "float16", "bfloat16", "float32"))),
        ),
    }


@settings(max_examples=20)
@given(asked=asked())
def test_what_is_written_is_the_study(asked: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> None:
    """A strict reader finds in the declaration the study that it was written from, with every made file missing."""
    folder = tmp_path_factory.mktemp("study")
    study = made(folder, **asked)
    (folder / "study.toml").write_text(explained(study), encoding="utf-8")
    found = load_study(str(folder))
    assert replace(found, missing=()) == study
    scales = [arm.scales for arm in study.arms.values() if arm.scales is not None]
    length = next(iter(study.lengths.values()))
    assert {*found.missing} == {study.model.files_path, study.parity.panel, *length.panels.values(), *scales}


def leaves(document: object) -> int:
    """How many keys a declaration has that are no tables."""
    if isinstance(document, list):
        return sum(map(leaves, document)) if document and isinstance(document[0], dict) else 1
    if not isinstance(document, dict):
        return 1
    return sum(map(leaves, document.values()))


@settings(max_examples=20)
@given(asked=asked())
def test_each_key_is_explained(asked: dict[str, object]) -> None:
    """Beside each key, or right above it by its name, stands why; each table has a comment right above."""
    text = explained(made(Path("own"), **asked))
    above: list[str] = []
    keys = 0
    for line in text.splitlines():
        if line.startswith("#"):
            above.append(line)
            continue
        if line.startswith("["):
            assert above, line
        elif match := re.match(r"([A-Za-z_0-9]+) = ", line):
            keys += 1
            assert re.search(r"  # \S", line) or any(it.startswith(f"# {match[1]}: ") for it in above), line
        above = []
    assert keys == leaves(tomllib.loads(text))


@settings(max_examples=20)
@given(asked=asked())
def test_the_pool_holds_a_wave_within_bounds(asked: dict[str, object]) -> None:
    """The pool is that of a whole wave of full requests, and beyond the platform's bound only for the smallest wave."""
    study = made(Path("own"), **asked)
    (length,) = study.lengths.values()
    token = study.model.layers * study.model.kv_heads * study.model.head_size * 4
    wave = length.wave_size * length.max_model_len * token
    assert wave <= length.cache_bytes < wave + (1 << 20)
    assert length.wave_size == 4 or length.cache_bytes <= (32 << 30 if study.platform == "gpu" else 4 << 30)
    assert length.wave_size <= study.engine.max_num_seqs
    assert length.max_model_len >= max(512, length.tokens + study.nll.decode_steps)


def test_gates_that_could_not_be_established_are_left_out_by_name() -> None:
    """Where nobody declared what a cell holds, the gates that need it are not listed, and the file says why."""
    study = made(Path("own"), platform="gpu", candidate="fp8_e4m3")
    names = [gate.name for gate in study.gates]
    assert names == ["dispatch", "stale-maps", "determinism", "parity", "nll", "retrieval", "recall"]
    assert f"# Not listed: {', '.join(NEED_DECLARATION)}. What a cell of fp8_e4m3 holds" in explained(study)
    declared = made(Path("own"), candidate="fp8_e4m3")
    assert {*NEED_DECLARATION} < {gate.name for gate in declared.gates}
    assert "Not listed" not in explained(declared)


def test_a_gate_that_is_left_out_leaves_nothing_behind() -> None:
    """Its rules, its panel and its questions go with it."""
    study = made(Path("own"), without=["recall", "nll"])
    names = [gate.name for gate in study.gates]
    assert "recall" not in names
    assert "nll" not in names
    assert names[-1] == "retrieval"
    assert [*study.preservation] == ["retrieval"]
    assert [*study.lengths[1024].panels] == ["oracle", "retrieval"]
    assert study.lengths[1024].questions == {"retrieval": 60}


def test_thresholds_are_those_of_the_shipped_study() -> None:
    """No limit, margin, floor or waiver is looser than in the study that is committed."""
    shipped, study = load_study("smollm2-cpu"), made(Path("own"))
    assert dict(study.preservation) == dict(shipped.preservation)
    assert study.nll.margin_nats == shipped.nll.margin_nats
    assert (study.oracle.passes, study.oracle.conditions) == (shipped.oracle.passes, shipped.oracle.conditions)
    assert study.waivers == shipped.waivers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 64}, "--length: found 64, expected at least 128"),
        ({"length": 40_950}, "found 40960 positions in the model, expected at least 41014"),
        ({"sizes": replace(QWEN3, positions=256), "length": 128}, "found 256 positions in the model, expected"),
        ({"sizes": replace(QWEN3, head_size=72)}, "found a head size of 72, expected one of 32"),
        ({"sizes": replace(QWEN3, head_size=320), "platform": "gpu"}, "found a head size of 320"),
        ({"sizes": replace(QWEN3, kv_heads=5)}, "found 32 query heads, expected a multiple of the 5 KV heads"),
    ],
)  # fmt: skip
def test_what_no_study_can_have_is_one_line(options: dict[str, object], message: str) -> None:
    """A model or a length that would stop every gate is refused with what was found and expected."""
    with pytest.raises((ModelError, StudyError)) as caught:
        made(Path("own"), **options)
    assert caught.value.line().startswith(message)
    assert "\n" not in caught.value.line()
