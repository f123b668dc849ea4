"""``kvqual init`` of a model made on the spot: a random Qwen3 with a tokenizer trained on a text of this Python."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pytest_kvqual.init import init
from pytest_kvqual.study.freeze import verify_lock
from pytest_kvqual.study.load import load_study
from pytest_kvqual.study.panels import check_files

pytestmark = pytest.mark.engine


def random_qwen3(folder: Path) -> Path:
    """A Qwen3 of three layers with random weights, saved as anybody would."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    from pytest_kvqual.prepare import read_text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(read_text(None).texts.values(), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=2048, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_a_random_model_becomes_a_frozen_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One boot of its stock cache gives the scales; declaration, panels and scales fit, and the lock matches."""
    model = random_qwen3(tmp_path / "qwen")
    monkeypatch.chdir(tmp_path)
    lines = list(init(model, length=256, without=["nll", "retrieval", "recall"]))
    study = load_study("qwen-k16v8")
    check_files(study)
    verify_lock(study)
    assert (study.model.layers, study.model.query_heads, study.model.kv_heads, study.model.head_size) == (3, 4, 2, 128)
    assert study.missing == ()
    assert [gate.name for gate in study.gates][-1] == "parity"
    assert shlex.split(lines[-1])[-4:] == ["--arm", "candidate", "--length", "256"]
