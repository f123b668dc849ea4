"""The sizes of a model, and what kind of attention it has, from its ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytest_kvqual._decode import Table, parse_json
from pytest_kvqual.errors import ModelError

__all__ = ["CONFIG_FILE", "Sizes", "refuse_other_attention", "sizes_of"]

CONFIG_FILE: Final = "config.json"

#: A key that says how many KV heads there are, other than the one that is read here.
_OTHER_KV_HEADS: Final = ("multi_query", "num_kv_heads", "n_head_kv", "multi_query_group_num")

#: Of packed weights, the keys that say how the cache is to be packed too.
_CACHE_SCHEMES: Final = ("kv_cache_scheme", "kv_cache_quant_algo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What ``config.json`` says.

    ``positions`` is the longest context in tokens, None where it says nothing; ``dtype`` that of the weights as it
    stands there (``bfloat16``), empty where it says nothing; ``quantisation`` the method of packed weights (``awq``),
    empty where there are none.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    positions: int | None
    dtype: str
    quantisation: str = ""


def sizes_of(model: Path) -> Sizes:
    """The sizes of the model in a folder.

    Raises:
        ModelError: No ``config.json`` that can be read, or one without these sizes.
    """
    config = _config(model)
    query_heads = config.integer("num_attention_heads", minimum=1)
    named = next((key for key in _OTHER_KV_HEADS if config.has(key)), None)
    if named is not None and not config.has("num_key_value_heads"):
        config.fail("num_key_value_heads", f"none, but {named}", "the number of KV heads under this name")
    # transformers takes an absent number of KV heads, or null, for that of the query heads.
    kv_heads = (
        config.integer("num_key_value_heads", minimum=1) if _given(config, "num_key_value_heads") else query_heads
    )
    return Sizes(
        layers=config.integer("num_hidden_layers", minimum=1),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_size=(
            config.integer("head_dim", minimum=1)
            if _given(config, "head_dim")
            else config.integer("hidden_size", minimum=1) // query_heads
        ),
        vocabulary=config.integer("vocab_size", minimum=1),
        positions=(
            config.integer("max_position_embeddings", minimum=1) if _given(config, "max_position_embeddings") else None
        ),
        dtype=next((config.string(key) for key in ("dtype", "torch_dtype") if _given(config, key)), ""),
        quantisation=(
            config.table("quantization_config", known=None).string("quant_method")
            if _given(config, "quantization_config")
            else ""
        ),
    )


def refuse_other_attention(model: Path) -> None:
    """Refuse a model whose attention is not full causal attention over all positions in every layer.

    The oracles' references compute nothing else. Refused too is one whose weights ask for a cache of 8 bits: the engine
    then gives it to every arm, and nothing is left to compare with.

    Raises:
        ModelError: It is another kind; names the key that says so.
    """
    config = _config(model)
    values = {key: config.raw(key) for key in config.names()}
    packed = values.get("quantization_config")
    for key in _CACHE_SCHEMES:
        if isinstance(packed, Mapping) and packed.get(key):
            raise ModelError(
                f"{model / CONFIG_FILE}: found quantization_config.{key}, expected none: the engine then gives a cache "
                "of 8 bits to every arm, native too"
            )
    for key, says, kind in _OTHER_ATTENTION:
        if says(values.get(key), values):
            raise ModelError(
                f"{model / CONFIG_FILE}: found {key} {values[key]!r:.60}, that is {kind}, expected full causal "
                "attention in every layer: no oracle declares another"
            )


def _given(config: Table, key: str) -> bool:
    return config.has(key) and config.raw(key) is not None


def _config(model: Path) -> Table:
    path = model / CONFIG_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"cannot read {path}: {error.strerror or error}", advice="give the folder that holds the model's files"
        ) from None
    return Table(parse_json(data, origin=str(path), error=ModelError), origin=str(path), error=ModelError, known=None)


def _set(value: object, values: Mapping[str, object]) -> bool:
    return bool(value)


def _window(value: object, values: Mapping[str, object]) -> bool:
    # The key counts unless it is switched off by the other one.
    return bool(value) and values.get("use_sliding_window", True) is not False


def _not_full(value: object, values: Mapping[str, object]) -> bool:
    return isinstance(value, list) and any(it not in ("full_attention", "attention") for it in value)


def _no_decoder(value: object, values: Mapping[str, object]) -> bool:
    return isinstance(value, list) and not any(str(it).endswith(("ForCausalLM", "LMHeadModel")) for it in value)


def _not_ones(value: object, values: Mapping[str, object]) -> bool:
    return isinstance(value, list) and any(it != 1 for it in value)


def _alibi(value: object, values: Mapping[str, object]) -> bool:
    return value == "alibi"


_OTHER_ATTENTION: Final[tuple[tuple[str, Callable[[object, Mapping[str, object]], bool], str], ...]] = (
    ("kv_lora_rank", _set, "multi-head latent attention"),
    ("layer_types", _not_full, "a hybrid"),
    ("layers_block_type", _not_full, "a hybrid"),
    ("sliding_window", _window, "sliding-window attention"),
    ("attention_chunk_size", _set, "chunked attention"),
    ("dual_chunk_attention_config", _set, "chunked attention"),
    ("attn_type_list", _not_ones, "a hybrid"),
    ("hybrid_override_pattern", _set, "a hybrid"),
    ("full_attention_interval", _set, "a hybrid"),
    ("attn_layer_period", _set, "a hybrid"),
    ("mamba_d_state", _set, "a hybrid"),
    ("state_size", _set, "a state space"),
    ("attn_logit_softcapping", _set, "attention with a soft cap"),
    ("alibi", _set, "attention with biases"),
    ("position_embedding_type", _alibi, "attention with biases"),
    ("num_kv_shared_layers", _set, "a cache that layers share"),
    ("use_cla", _set, "a cache that layers share"),
    ("is_encoder_decoder", _set, "an encoder and a decoder"),
    ("architectures", _no_decoder, "no decoder of text alone"),
)
