"""What is read from config.json, and which models are refused by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prepared_study import SmallModel

from pytest_kvqual.errors import ModelError
from pytest_kvqual.model_config import Sizes, refuse_other_attention, sizes_of


def config(folder: Path, **values: object) -> Path:
    """A folder with a configuration of these values alone."""
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_sizes_are_those_of_the_file(tmp_path: Path) -> None:
    """Each size stands where transformers writes it; the older word for the dtype is read too."""
    model = SmallModel(tmp_path).write(max_position_embeddings=2048, torch_dtype="float16").folder
    assert sizes_of(model) == Sizes(
        layers=2,
        query_heads=4,
        kv_heads=2,
        head_size=8,
        vocabulary=5000,
        positions=2048,
        dtype="float16",
        quantisation="awq",
    )
    refuse_other_attention(model)


def test_what_is_absent_follows_from_the_rest(tmp_path: Path) -> None:
    """Without a head size it is the hidden size over the heads; without KV heads there are as many as query heads."""
    config(tmp_path, num_hidden_layers=2, num_attention_heads=4, hidden_size=256, vocab_size=9, head_dim=None)
    sizes = sizes_of(tmp_path)
    assert (sizes.head_size, sizes.kv_heads, sizes.positions, sizes.dtype) == (64, 4, None, "")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "num_attention_heads"),
        ({"num_attention_heads": 8, "num_kv_heads": 1, "num_hidden_layers": 1}, "found none, but num_kv_heads"),
        ({"num_attention_heads": 8, "num_hidden_layers": 0, "hidden_size": 8, "vocab_size": 3}, "num_hidden_layers"),
        ({"text_config": {"num_hidden_layers": 4}}, "num_attention_heads"),
    ],
)
def test_a_size_that_is_not_there_is_named(values: dict[str, object], message: str, tmp_path: Path) -> None:
    """Nothing is filled in: a missing or impossible size is one line with its key."""
    with pytest.raises(ModelError, match=message) as caught:
        sizes_of(config(tmp_path, **values))
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize("data", [None, b"", b"[]", b"{", b"\xff"])
def test_a_damaged_file_is_refused(data: bytes | None, tmp_path: Path) -> None:
    """No file, or none with a JSON object, is one line with its path."""
    if data is not None:
        (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        sizes_of(tmp_path)
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"sliding_window": 4096}, "sliding-window attention"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding-window attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "a hybrid"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "a hybrid"),
        ({"mamba_d_state": 16}, "a hybrid"),
        ({"attention_chunk_size": 8192}, "chunked attention"),
        ({"attn_logit_softcapping": 50.0}, "a soft cap"),
        ({"alibi": True}, "biases"),
        ({"position_embedding_type": "alibi"}, "biases"),
        ({"attn_type_list": [0, 0, 1]}, "a hybrid"),
        ({"dual_chunk_attention_config": {"chunk_size": 262144}}, "chunked attention"),
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "no decoder of text alone"),
    ],
)
def test_other_attention_is_refused(values: dict[str, object], kind: str, tmp_path: Path) -> None:
    """A model whose attention no oracle computes is refused by the key that says so."""
    model = SmallModel(tmp_path).write(**values).folder
    with pytest.raises(ModelError, match=kind) as caught:
        refuse_other_attention(model)
    assert f"found {next(iter(values))} " in caught.value.line()


@pytest.mark.parametrize(
    "values",
    [
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        {"layer_types": ["full_attention"] * 2},
        {"attn_type_list": [1, 1], "position_embedding_type": "rope"},
        {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": None}},
        {"architectures": ["Qwen3ForCausalLM"], "is_encoder_decoder": False, "alibi": False},
    ],
)
def test_full_attention_is_taken(values: dict[str, object], tmp_path: Path) -> None:
    """Keys of another attention that are switched off refuse nothing."""
    refuse_other_attention(SmallModel(tmp_path).write(**values).folder)


@pytest.mark.parametrize("key", ["kv_cache_scheme", "kv_cache_quant_algo"])
def test_weights_that_ask_for_a_packed_cache_are_refused(key: str, tmp_path: Path) -> None:
    """The engine would give every arm that cache, the control too."""
    packed = {"quant_method": "compressed-tensors", key: {"num_bits": 8, "type": "float"}}
    model = SmallModel(tmp_path).write(quantization_config=packed).folder
    with pytest.raises(ModelError, match=rf"found quantization_config\.{key}, expected none"):
        refuse_other_attention(model)
