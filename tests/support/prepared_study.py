"""A study that is prepared from a model of a few kilobytes: its folder, the model's, the texts, and a tokenizer."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_kvqual.study.load import studies_folder

VOCABULARY = 5000
LAYERS = 2
WORDS = tuple(f"{a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in "bdfgklmnprst")


def encode(text: str) -> list[int]:
    """A token for each word or line break, by its digest: a stand-in for a tokenizer."""
    pieces = text.replace("\n", " \n ").split(" ")
    return [int(hashlib.sha256(piece.encode()).hexdigest()[:8], 16) % VOCABULARY for piece in pieces if piece]


def chat(question: str) -> list[int]:
    """The question between two marks."""
    return [1, *encode(question), 2]


def text_of(words: int, seed: int) -> str:
    """So many words, drawn at random: no run of 64 of them occurs twice."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


def small_study(folder: Path) -> Path:
    """The study qwen3-8b-awq with lengths, numbers and sizes that a test can afford; returns its folder."""
    text = (studies_folder() / "qwen3-8b-awq" / "study.toml").read_text()
    for length, small in (("8192", "768"), ("1024", "512")):
        text = text.replace(f"lengths.{length}", f"lengths.{small}").replace(f"timing.{length}", f"timing.{small}")
        for kind in ("nll-", "oracle-", "retrieval-", "timing-", "plans/", "traces/", "qwen3-8b-awq "):
            text = text.replace(f"{kind}{length}", f"{kind}{small}")
    for was, now in (
        ("layers = 36", f"layers = {LAYERS}"),
        ("query_heads = 32", "query_heads = 4"),
        ("kv_heads = 8", "kv_heads = 2"),
        ("head_size = 128", "head_size = 8"),
        ("vocabulary = 151936", f"vocabulary = {VOCABULARY}"),
        ("documents = 32", "documents = 8"),
        ("decode_steps = 128", "decode_steps = 8"),
        ("retrieval = 100", "retrieval = 12"),
        ("poison_questions = 32", "poison_questions = 4"),
        ("requests = 128", "requests = 40"),
        ("requests = 64", "requests = 40"),
        ("requests = 32", "requests = 10"),
        ("max_tokens = 128", "max_tokens = 16"),
    ):
        assert was in text, was
        text = text.replace(was, now)
    folder.mkdir(parents=True)
    (folder / "study.toml").write_text(text)
    (folder / "shots").mkdir()
    shots = studies_folder() / "qwen3-8b-awq" / "shots" / "gsm8k.json"
    (folder / "shots" / "gsm8k.json").write_bytes(shots.read_bytes())
    return folder


@dataclass
class SmallModel:
    """A folder with the files of a model: no weights in them, but names, a configuration and a tokenizer's file."""

    folder: Path

    def write(self, **changes: object) -> SmallModel:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = {
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": VOCABULARY,
            "quantization_config": {"quant_method": "awq", "bits": 4},
            **changes,
        }
        (self.folder / "config.json").write_text(json.dumps(config))
        (self.folder / "tokenizer.json").write_text("{}")
        (self.folder / "model.safetensors").write_bytes(b"weights")
        return self


def whole(item: dict[str, Sequence[int]]) -> list[int]:
    """The tokens of one panel item, forced ones included."""
    return [*item["prompt"], *item.get("targets", ())]
