"""V scales from a booted control: those of the embedded study, made by another program, are near them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_kvqual.models import model_folder
from pytest_kvqual.prepare import largest_v, read_bible, read_topics, tokenizer_of
from pytest_kvqual.study.build import CALIBRATION_TOKENS, build, recipe_of, v_scale
from pytest_kvqual.study.load import load_study
from pytest_kvqual.study.panels import load_scales

pytestmark = pytest.mark.engine


def test_what_the_control_hands_to_its_cache_gives_the_studys_scales() -> None:
    """The largest |V| of each layer, in bfloat16 arithmetic, agrees with float32's within two in a hundred."""
    study = load_study("smollm2-cpu")
    model = model_folder(study.model)
    tokenizer = tokenizer_of(model)
    texts = {"cpython": read_topics(None), "kjv": read_bible(None)}
    windows, _ = build(
        recipe_of(study), texts, encode=tokenizer.encode, chat=tokenizer.chat, tokenizer_sha256=tokenizer.sha256
    )
    assert sum(map(len, windows)) == CALIBRATION_TOKENS
    found = v_scale(largest_v(study, model, windows))
    scales = study.arms["candidate"].scales
    assert isinstance(scales, Path)
    assert found == pytest.approx(list(load_scales(scales, study.model.layers)), rel=0.02)
