"""The effective settings of an engine are read from its configuration, as JSON."""

from __future__ import annotations

import enum
import json
from types import SimpleNamespace

import torch

from pytest_kvqual.worker.settings import SETTINGS, effective


class Mode(enum.Enum):
    """A setting that the engine holds as an enumeration."""

    NONE = 0


def test_settings_are_read_by_part_and_name() -> None:
    """A setting is named by its part, values keep their JSON type, and what is no JSON is there as its text."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=128, enable_prefix_caching=False, cache_dtype="auto"),
        model_config=SimpleNamespace(dtype=torch.bfloat16, logits_processors=["a:B"], hf_overrides={"n": 1}),
        compilation_config=SimpleNamespace(cudagraph_mode=Mode.NONE, cudagraph_capture_sizes=(1, 2)),
    )
    found = effective(config)
    assert found["cache_config.block_size"] == 128
    assert found["cache_config.enable_prefix_caching"] is False
    assert found["model_config.dtype"] == "torch.bfloat16"
    assert found["model_config.hf_overrides"] == {"n": 1}
    assert found["compilation_config.cudagraph_mode"] == "NONE"
    assert found["compilation_config.cudagraph_capture_sizes"] == [1, 2]
    assert json.loads(json.dumps(found)) == found


def test_a_part_that_the_engine_does_not_use_is_named() -> None:
    """No speculative decoding is a setting too: an arm that switches it on differs from one that does not."""
    found = effective(SimpleNamespace(speculative_config=None))
    assert found == dict.fromkeys(SETTINGS)
    assert "speculative_config.method" in effective(SimpleNamespace(speculative_config=SimpleNamespace(method="ngram")))
