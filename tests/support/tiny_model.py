"""A model folder of random weights that the engine loads in a second: Qwen3, two layers, real tokenizer, no sense."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write(
    folder: Path,
    *,
    tokenizer: Path,
    layers: int = 2,
    query_heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 32,
    hidden: int = 128,
    intermediate: int = 256,
    vocabulary: int = 49152,
    positions: int = 2048,
    seed: int = 0,
) -> Path:
    """Writes ``config.json`` and ``model.safetensors`` (bfloat16) and copies the tokenizer of ``tokenizer``.

    The same arguments give the same bytes. ``head_size`` must be a multiple of 32 for the CPU kernels.
    """
    folder.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": head_size,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": positions,
        "model_type": "qwen3",
        "num_attention_heads": query_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for layer in range(layers):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (query_heads * head_size, hidden),
                "self_attn.k_proj": (kv_heads * head_size, hidden),
                "self_attn.v_proj": (kv_heads * head_size, hidden),
                "self_attn.o_proj": (hidden, query_heads * head_size),
                "self_attn.q_norm": (head_size,),
                "self_attn.k_norm": (head_size,),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (intermediate, hidden),
                "mlp.up_proj": (intermediate, hidden),
                "mlp.down_proj": (hidden, intermediate),
            }.items()
        }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        values = torch.randn(*shape, generator=generator)
        # Norms near one, matrices that keep the scale of what they multiply.
        values = 1 + values / 10 if len(shape) == 1 else values / shape[1] ** 0.5
        weights[name] = values.to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
