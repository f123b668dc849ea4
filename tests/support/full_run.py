"""A complete run directory without an engine: a generated study, its evidence and receipts, by the real writers.

What is generated here: the study (three arms: ``candidate``, ``native-flashinfer``, ``native-fa3``), its panels, and
what the engines "answered", as raw bodies of ``POST /v1/completions``. What is real: the freezing of the study, the
bundles, the campaign that reads them, every judge, the receipts and their order. The oracles' records are those of the
judges' own tests. No engine ran, and nothing here is evidence about any.

Everything follows from the arguments and a seed. Which questions each arm answers right is the caller's to say.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest import mock

from pytest_kvqual._canonical import canonical_bytes, digest, sha256_bytes
from pytest_kvqual.attempt import poisoned
from pytest_kvqual.campaign import Campaign
from pytest_kvqual.evidence.bundle import Bundle
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.faults.seeded import SEEDED
from pytest_kvqual.receipt.statement import Receipt
from pytest_kvqual.receipt.write import read_all
from pytest_kvqual.server.command import engine_arguments, worker_config
from pytest_kvqual.study import freeze
from pytest_kvqual.study.load import ORACLE_GATES, load_study, select
from pytest_kvqual.study.model import Study
from pytest_kvqual.study.panels import Panel, PanelItem, load_panel
from pytest_kvqual.tasks import orders

CANDIDATE: Final = "candidate"
CONTROLS: Final = ("native-flashinfer", "native-fa3")
ARMS: Final = (CANDIDATE, *CONTROLS)
FAULT: Final = "v-scale-dropped-on-read"
"""The planted fault of the read path."""
ORDER_FILES: Final = ("determinism.jsonl", *(poisoned("determinism.jsonl", fault) for fault in SEEDED["determinism"]))
IDENTITY_FAULTS: Final = ("weights-altered", "packed-weights-altered", "scale-copy-altered")
SCORED: Final = ("retrieval", "gsm8k")
DECIDED: Final = ("identity", "dispatch", *ORACLE_GATES, "determinism", "parity", "nll", *SCORED)
"""The gates with a receipt, in order."""
CACHE_BYTES: Final = 48 << 30
LAYERS: Final = 3
SCALES: Final = (0.5, 0.25, 0.125)
CREATED: Final = 1_780_000_000
COMMIT: Final = "7" * 40
"""The commit of the checkout that there is not."""
TOKENIZER: Final = "5" * 64
SOURCE: Final = sha256_bytes(b"generated")
"""The digest of the GSM8K set that there is not."""
SHOTS = canonical_bytes([{"question": "How many is two and two?", "answer": "Two and two is four.\n#### 4"}]) + b"\n"
END_OF_TEXT: Final = 7
"""The token that ends an answer."""

Kinds = Sequence[str]
"""What each question of a task came to: ``right``, ``wrong``, ``empty``, ``truncated`` or ``error``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How large a run is. Lengths in tokens; ``gsm8k_prompt`` and ``gsm8k_answer`` are (least, most)."""

    length: int
    vocabulary: int
    documents: int
    decode_steps: int
    poison_documents: int
    retrieval: int
    gsm8k: int
    gsm8k_prompt: tuple[int, int]
    gsm8k_answer: tuple[int, int]
    gsm8k_max_tokens: int
    poison_questions: int
    prompts: int
    parity_tokens: int


SMALL: Final = Size(
    length=32,
    vocabulary=1000,
    documents=4,
    decode_steps=4,
    poison_documents=2,
    retrieval=60,
    gsm8k=150,
    gsm8k_prompt=(8, 12),
    gsm8k_answer=(6, 14),
    gsm8k_max_tokens=40,
    poison_questions=8,
    prompts=3,
    parity_tokens=5,
)
FULL: Final = Size(
    length=8192,
    vocabulary=151_936,
    documents=32,
    decode_steps=128,
    poison_documents=8,
    retrieval=100,
    gsm8k=1319,
    gsm8k_prompt=(640, 780),
    gsm8k_answer=(150, 400),
    gsm8k_max_tokens=2048,
    poison_questions=16,
    prompts=32,
    parity_tokens=24,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FullRun:
    """What was written. ``lock`` is the digest of the lock file; ``receipts`` are those of the candidate, by gate."""

    run_dir: Path
    study: Study
    lock: str
    implementation: str
    receipts: Mapping[str, Receipt] = field(repr=False)

    @property
    def stem(self) -> str:
        """The name of the candidate's folders of evidence and receipts."""
        return self.folder(CANDIDATE)

    @property
    def study_copy(self) -> Path:
        """The study as the run directory holds it."""
        return self.run_dir / "study" / self.lock

    def folder(self, arm: str) -> str:
        """The name of an arm's folders."""
        return f"{arm}-{next(iter(self.study.lengths))}-{CACHE_BYTES}"

    def attempt(self, arm: str) -> Path:
        """An arm's only attempt."""
        return self.run_dir / "evidence" / self.folder(arm) / "attempt-1"

    def receipt(self, gate: str) -> Path:
        """The file of the candidate's receipt of a gate."""
        return self.run_dir / self.receipts[gate].name

    def scope(self, arm: str = CANDIDATE) -> Scope:
        """The scope of an arm."""
        return _scope(self.study, self.lock, arm)


def all_right(size: Size) -> dict[str, dict[str, list[str]]]:
    """Every arm right on all but every tenth question, and nothing lost or gained."""
    totals = {"retrieval": size.retrieval, "gsm8k": size.gsm8k}
    return {
        gate: {arm: ["wrong" if index % 10 == 9 else "right" for index in range(total)] for arm in ARMS}
        for gate, total in totals.items()
    }


def build_run(
    folder: Path,
    *,
    size: Size = SMALL,
    seed: int = 20,
    outcomes: Mapping[str, Mapping[str, Kinds]] | None = None,
    again: Mapping[str, Kinds] | None = None,
    schedule: str = "waves",
    shift: float = 0.0005,
    name: str = "synthetic",
    installed: bool = False,
    formats: bool = False,
) -> FullRun:
    """Write the study to ``folder/studies/NAME`` and the run to ``folder/run``.

    Args:
        folder: An empty or missing folder.
        size: How much.
        seed: Of all that is drawn.
        outcomes: What each question came to, by gate (``retrieval``, ``gsm8k``) and arm; :func:`all_right` by default.
        again: The same of the first control's second capture, by gate; what the first one came to by default.
        schedule: The study's.
        shift: What the candidate's losses are above the controls', in nats per token, on average.
        name: The study's.
        installed: Whether the candidate comes from an install, with one checkout.
        formats: Whether the study has two formats of its model; the run is then one of the second.
    """
    found = all_right(size) if outcomes is None else outcomes
    with _no_flush():
        study = _study(folder / "studies" / name, size, seed, schedule, name, installed=installed, formats=formats)
        freeze.freeze(study)
        if installed:
            brought = replace(study.arms[CANDIDATE], checkouts=(Path("/generated/vllm"),))
            study = replace(study, arms={**study.arms, CANDIDATE: brought})
        lock = freeze.verify_lock(study)
        run_dir = folder / "run"
        run_dir.mkdir(parents=True)
        freeze.keep(study, lock, run_dir)
        panels = _panels(study, size, seed)
        for place, arm in enumerate((*CONTROLS, CANDIDATE)):
            _capture(
                run_dir,
                study,
                _scope(study, lock.sha256, arm),
                panels,
                size,
                random.Random(f"{seed} {arm}"),
                kinds={gate: found[gate][arm] for gate in SCORED},
                again={**{gate: found[gate][arm] for gate in SCORED}, **(again or {})} if place == 0 else None,
                shift=shift if arm == CANDIDATE else 0.0,
                seed=seed,
            )
        receipts = _receipts(run_dir, study, lock, gsm8k_bytes(panels["gsm8k"].items))
    return FullRun(
        run_dir=run_dir,
        study=study,
        lock=lock.sha256,
        implementation=digest(dict(lock.implementation)),
        receipts=receipts,
    )


@contextmanager
def _no_flush() -> Iterator[None]:
    """A generated run need not survive a power cut, and flushing each of its records takes most of the time."""
    with mock.patch("os.fsync", return_value=None):
        yield


# -- the study ---------------------------------------------------------------------------------------------------------

_ARM = """
[arms.{name}]
role = "{role}"
attention_backend = "{backend}"
kv_format = "{kv_format}"
cache_dtype = "{dtype}"
kernels = ["*attention*"]
{more}"""

FORMATS: Final = ("bf16", "awq")
_FORMAT = """
[model.formats.{0}]
repository = "generated/{0}"
revision = "1111111111111111111111111111111111111111"
dtype = "float16"
files = "{{format}}.json"
"""

_TOML = """\
# Generated: no engine ran under this study.
schema = 1
name = "{name}"
platform = "gpu"
schedule = "{schedule}"
determinism = "order-invariant"

[model]
name = "Qwen3-8B-AWQ"
source = "generated"
layers = {layers}
query_heads = 32
kv_heads = 8
head_size = 128
vocabulary = {vocabulary}

[model.files]
"model.safetensors" = "{weights}"
"tokenizer.json" = "{tokenizer}"

[engine]
distribution = "vllm"
version = "0.32.0"
block_size = 16
max_num_seqs = 32
max_num_batched_tokens = 8192
flags = ["--dtype=float16", "--no-enable-prefix-caching"]
boot_timeout_s = 600.0
request_timeout_s = 900.0

[engine.environment]
HF_HUB_OFFLINE = "1"
{arms}
[lengths.{length}]
cache_bytes = {cache_bytes}
max_model_len = {max_model_len}
wave_size = 32
panels = {{ nll = "panels/nll.json", oracle = "panels/oracle.json", retrieval = "panels/retrieval.json" }}
questions = {{ retrieval = {retrieval}, gsm8k = {gsm8k} }}

[oracle]
passes = ["model", "probe", "rotated"]
conditions = ["mixed", "chunked"]
minimum_cells = 1500
minimum_rows = 144
ambiguous_rows = 0.25
short_prompt_tokens = 400
poison_prompt_tokens = 400
free_blocks = 8
rotation = 1

[parity]
panel = "panels/parity.json"
prompts = {prompts}
max_tokens = {parity_tokens}

[nll]
documents = {documents}
decode_steps = {decode_steps}
margin_nats = 0.01
confidence = 0.95
poison_documents = {poison_documents}

[retrieval]
limit = 0.05
confidence = 0.95
floor = 0.85
max_tokens = 12
stop = ["\\n"]
run_on = []
reasoning = []
empty_share = 0.02
truncated_share = 0.02
error_share = 0.0
poison_questions = {poison_questions}

[gsm8k]
limit = 0.02
confidence = 0.95
floor = 0.85
max_tokens = {gsm8k_max_tokens}
stop = ["Question:"]
run_on = ["\\nQ:"]
reasoning = []
empty_share = 0.01
truncated_share = 0.01
error_share = 0.0
poison_questions = {poison_questions}
shots = "gsm8k-shots.json"

[gsm8k.source]
sha256 = "{source}"
repository = "generated"
revision = "{revision}"
file = "generated.jsonl"

{gates}"""

_STATES: Final = {
    **dict.fromkeys(DECIDED, 'state = "required"'),
    "fidelity": 'state = "planned"\ntiming = true',
    "trial": 'state = "planned"\ntiming = true',
}


def _study(folder: Path, size: Size, seed: int, schedule: str, name: str, *, installed: bool, formats: bool) -> Study:
    numbers = random.Random(f"{seed} study")

    def tokens(count: int) -> list[int]:
        # The first few stay free for what ends an answer.
        return numbers.choices(range(16, size.vocabulary), k=count)

    def panel(task: str, items: Sequence[Mapping[str, object]], length: int | None) -> None:
        document = {
            "schema": 1,
            "task": task,
            "length": length,
            "tokenizer_sha256": TOKENIZER,
            "sources": ["generated"],
            "items": list(items),
        }
        (folder / "panels" / f"{task}.json").write_bytes(canonical_bytes(document) + b"\n")

    (folder / "panels").mkdir(parents=True)
    panel(
        "nll",
        [
            {"id": f"doc-{index:02d}", "prompt": tokens(size.length - 1), "targets": tokens(size.decode_steps + 1)}
            for index in range(size.documents)
        ],
        size.length,
    )
    panel(
        "oracle",
        [
            {"id": item.id, "prompt": list(item.prompt), "max_tokens": item.max_tokens}
            for item in _FIXTURES.make_oracle_panel().items
        ],
        size.length,
    )
    panel(
        "parity",
        [
            {"id": f"p{index:02d}", "prompt": tokens(6), "max_tokens": size.parity_tokens}
            for index in range(size.prompts)
        ],
        None,
    )
    panel(
        "retrieval",
        [
            {
                "id": f"needle-{index:03d}",
                "prompt": tokens(size.length - 12),
                "max_tokens": 12,
                "expected": str(numbers.randrange(10 ** (digits - 1), 10**digits)),
                "grade": f"{digits} digits",
            }
            for index in range(size.retrieval)
            for digits in (5 + index % 3,)
        ],
        size.length,
    )
    (folder / "scales.json").write_bytes(canonical_bytes({"schema": 1, "v_scale": list(SCALES)}) + b"\n")
    (folder / "gsm8k-shots.json").write_bytes(SHOTS)
    arms = (
        _ARM.format(
            name="native-flashinfer", role="control", backend="FLASHINFER", kv_format="k16v16", dtype="torch.float16",
            more="",
        ),
        _ARM.format(
            name="native-fa3", role="control", backend="FLASH_ATTN", kv_format="k16v16", dtype="torch.float16", more=""
        ),
        _ARM.format(
            name=CANDIDATE, role="candidate", backend="KVQUAL_K16V8", kv_format="k16v8", dtype="torch.uint8",
            more='scales = "scales.json"\nbefore_load = ["package.module:register"]\n'
            + ("installed = true\n" if installed else ""),
        ),
    )  # fmt: skip
    text = _TOML.format(
        **{name: getattr(size, name) for name in Size.__dataclass_fields__},
        name=name,
        schedule=schedule,
        layers=LAYERS,
        weights="6" * 64,
        tokenizer=TOKENIZER,
        arms="".join(arms),
        cache_bytes=CACHE_BYTES,
        max_model_len=max(size.length + size.decode_steps, size.gsm8k_prompt[1] + size.gsm8k_max_tokens),
        source=SOURCE,
        revision="0" * 40,
        gates="".join(f"[gates.{gate}]\n{state}\n" for gate, state in _STATES.items()),
    )
    if formats:
        begin, end = text.index("[model.files]"), text.index("[engine]")
        digests = {"tokenizer.json": TOKENIZER, "model.safetensors": "6" * 64}
        for form in FORMATS:
            (folder / f"{form}.json").write_bytes(canonical_bytes({"schema": 1, "files": digests}) + b"\n")
        text = text[:begin] + "".join(map(_FORMAT.format, FORMATS)) + text[end:]
        text = text.replace("torch.float16", "torch.{dtype}").replace('"scales.json"', '"scales-{format}.json"')
        (folder / "scales.json").rename(folder / f"scales-{FORMATS[1]}.json")
    (folder / "study.toml").write_text(text, encoding="utf-8")
    return load_study(str(folder), FORMATS[1] if formats else None)


def _panels(study: Study, size: Size, seed: int) -> dict[str, Panel]:
    """The study's panels, and that of gsm8k, which no study holds."""
    length = next(iter(study.lengths.values()))
    places = {**length.panels, "parity": study.parity.panel}
    panels = {
        task: load_panel(
            path, task=task, length=None if task == "parity" else length.tokens, vocabulary=study.model.vocabulary
        )
        for task, path in places.items()
    }
    numbers = random.Random(f"{seed} gsm8k")
    items = tuple(
        PanelItem(
            id=f"gsm8k-{index:04d}",
            prompt=tuple(numbers.choices(range(16, size.vocabulary), k=numbers.randint(*size.gsm8k_prompt))),
            targets=(),
            max_tokens=size.gsm8k_max_tokens,
            expected=str(numbers.randrange(1, 10**5)),
            grade=f"{numbers.randint(2, 8)} steps",
        )
        for index in range(size.gsm8k)
    )
    return {**panels, "gsm8k": Panel(task="gsm8k", length=None, items=items, sha256=sha256_bytes(gsm8k_bytes(items)))}


def gsm8k_bytes(items: Sequence[PanelItem]) -> bytes:
    """The gsm8k panel's file."""
    document = {
        "schema": 1,
        "task": "gsm8k",
        "length": None,
        "tokenizer_sha256": TOKENIZER,
        "sources": [
            "generated",
            f"the set as JSON lines, sha256 {SOURCE}",
            f"1 worked question, sha256 {sha256_bytes(SHOTS)}",
        ],
        "items": [
            {
                "id": item.id,
                "prompt": list(item.prompt),
                "max_tokens": item.max_tokens,
                "expected": item.expected,
                "grade": item.grade,
            }
            for item in items
        ],
    }
    return canonical_bytes(document) + b"\n"


def _scope(study: Study, lock: str, arm: str) -> Scope:
    engine = {"schema": 1, "python": "3.11.0", "machine": "generated", "distributions": []}
    return Scope(lock=lock, arm=arm, length=next(iter(study.lengths)), cache_bytes=CACHE_BYTES, engine=digest(engine))


# -- what the engines answered -----------------------------------------------------------------------------------------


def body(
    name: str,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    text: str,
    finish: str,
    stop: str | None = None,
    losses: Sequence[float] | None = None,
) -> str:
    """The body of an answered request, with the keys of vLLM 0.32.0 in its order."""
    words = [f"t{token}" for token in tokens] if losses is not None else []
    logprobs = None
    if losses is not None:
        logprobs = {
            "text_offset": [6 * place for place in range(len(words))],
            "token_logprobs": [-loss for loss in losses],
            "tokens": words,
            "top_logprobs": [{word: -loss} for word, loss in zip(words, losses, strict=True)],
        }
    document = {
        "id": f"cmpl-{name}",
        "object": "text_completion",
        "created": CREATED,
        "model": "Qwen3-8B-AWQ",
        "choices": [
            {
                "index": 0,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": finish,
                "stop_reason": stop,
                "token_ids": list(tokens),
                "prompt_logprobs": None,
                "prompt_token_ids": list(prompt),
                "routed_experts": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": "vllm-0.32.0-generated",
        "usage": {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + len(tokens),
            "completion_tokens": len(tokens),
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _record(item: PanelItem, index: int, text: str | None, order: str = "forward") -> dict[str, object]:
    error = "the server closed the connection" if text is None else None
    return {
        "id": item.id,
        "order": order,
        "index": index,
        "status": None if text is None else 200,
        "body": text,
        "error": error,
    }


_WORDS: Final = (
    "she",
    "has",
    "each",
    "day",
    "then",
    "costs",
    "sells",
    "half",
    "twice",
    "left",
    "week",
    "apples",
    "hours",
)


def _scored(
    task: str, item: PanelItem, index: int, kind: str, name: str, size: Size, seed: int, numbers: random.Random
) -> dict[str, object]:
    """One answered question. Arms that come to the same give the same tokens, but for a few."""
    if kind == "error":
        return _record(item, index, None)
    own = random.Random(f"{seed} {task} {item.id} {kind}")
    number = item.expected if kind in ("right", "truncated") else str(int(item.expected) + own.randint(1, 97))
    least, most = size.gsm8k_answer if task == "gsm8k" else (3, 9)
    count = own.randint(least, most)
    words = " ".join(own.choices(_WORDS, k=max(1, count * 3 // 5)))
    finish, stop = "stop", "\n" if task == "retrieval" else None
    if kind == "empty":
        count, text, stop = 1, "", None
    elif kind == "truncated":
        count, text, finish, stop = item.max_tokens, words if task == "gsm8k" else "  ", "length", None
    elif task == "gsm8k":
        text = f" {words}.\n{words[:40]} is {number}.\n#### {number}"
    else:
        text = f" {number}"
    tokens = own.choices(range(16, size.vocabulary), k=count)
    if kind in ("right", "wrong") and numbers.random() < 0.05:
        tokens[0] = numbers.randrange(16, size.vocabulary)
    if finish == "stop":
        tokens[-1] = END_OF_TEXT
    return _record(item, index, body(name, item.prompt, tokens, text=text, finish=finish, stop=stop))


def _losses(item: PanelItem, seed: int, shift: float, numbers: random.Random) -> list[float]:
    own = random.Random(f"{seed} nll {item.id}")
    level = shift + (numbers.gauss(0, 0.002) if shift else 0.0)
    # In thousandths of a nat, so that a loss is what its decimal says.
    return [round(own.gammavariate(1.2, 1.8) + 0.5 + level, 9) for _ in item.targets]


def _capture(
    run_dir: Path,
    study: Study,
    scope: Scope,
    panels: Mapping[str, Panel],
    size: Size,
    numbers: random.Random,
    *,
    kinds: Mapping[str, Kinds],
    again: Mapping[str, Kinds] | None,
    shift: float,
    seed: int,
) -> None:
    """One arm's attempt. ``again`` is given for the first control alone."""
    arm, candidate = scope.arm, scope.arm == CANDIDATE
    selection = select(study, arm=arm, length=scope.length, cache_bytes=scope.cache_bytes)
    brought = selection.arm.checkouts
    config = worker_config(
        selection,
        model=Path("/generated/model"),
        v_scales=SCALES if candidate else None,
        checkouts=Path("/generated/install.json") if brought else None,
    )
    arguments = engine_arguments(selection, model=Path("/generated/model"), worker_config=config)
    bundle = Bundle.create(run_dir, scope)
    serial = iter(range(1, 1_000_000))

    def name(task: str) -> str:
        return f"{arm}-{task}-{next(serial)}-{numbers.getrandbits(64):016x}"

    def stream(file: str, records: Iterator[dict[str, object]]) -> None:
        with bundle.stream(file) as writer:
            for record in records:
                writer.append(record)

    def nll_records(count: int, level: float) -> Iterator[dict[str, object]]:
        for index, item in enumerate(panels["nll"].items[:count]):
            losses = _losses(item, seed, level, numbers)
            text = body(name("nll"), item.prompt, item.targets, text="…", finish="length", losses=losses)
            yield _record(item, index, text)

    def scored(task: str, outcomes: Kinds) -> Iterator[dict[str, object]]:
        for index, (item, kind) in enumerate(zip(panels[task].items, outcomes, strict=False)):
            yield _scored(task, item, index, kind, name(task), size, seed, numbers)

    def serially(order: str, wrong: bool = False) -> Iterator[dict[str, object]]:
        for index, item in _ordered(panels["parity"], order):
            tokens = [_parity_token(arm, index, step) + wrong for step in range(item.max_tokens)]
            yield _record(item, index, body(name("parity"), item.prompt, tokens, text="…", finish="length"), order)

    if brought:
        checkout = {
            "name": "vllm",
            "commit": COMMIT,
            "tree": "8" * 64,
            "built": {},
            "path": str(brought[0]),
            "files": 1,
        }
        modules = {"modules": {"vllm/__init__.py": "9" * 64}}
        bundle.write("install.json", {"schema": 1, "arm": arm, "checkouts": [checkout | modules]})
    document = _identity(study, arm)
    bundle.write("identity.json", document)
    if candidate:
        bundle.write("identity-poison.json", {"schema": 1, "poison": _identity_poison(document)})
    if candidate or again is not None:
        bundle.write("dispatch.json", _dispatch(study, arm))
        bundle.write("oracle.json", _oracle())
        for file in ORDER_FILES if candidate else ORDER_FILES[:1]:
            stream(file, _orders(panels["parity"], arm, name, wrong=file != ORDER_FILES[0]))
        bundle.write("determinism-inputs.json", _FIXTURES.make_orders_inputs())
        equal = {run: {item.id: [0] for item in panels["parity"].items} for run in orders.RUNS}
        bundle.write("order-comparison.json", orders.comparison(study.determinism, equal))
        stream("parity.jsonl", serially("forward"))
    if again is not None:
        stream("parity-reverse.jsonl", serially("reverse"))
    stream("nll.jsonl", nll_records(size.documents, shift))
    if again is not None:
        stream("nll-again.jsonl", nll_records(size.documents, 0.0))
    if candidate:
        stream(poisoned("parity.jsonl", FAULT), serially("forward", wrong=True))
        stream(poisoned("nll.jsonl", FAULT), nll_records(size.poison_documents, 1.0))
    for task in SCORED:
        if task == "gsm8k":
            (bundle.path / "gsm8k-panel.json").write_bytes(gsm8k_bytes(panels["gsm8k"].items))
            bundle.seal("gsm8k-panel.json")
        stream(f"{task}.jsonl", scored(task, kinds[task]))
        if again is not None:
            stream(f"{task}-again.jsonl", scored(task, again[task]))
        if candidate:
            stream(poisoned(f"{task}.jsonl", FAULT), scored(task, ["wrong"] * size.poison_questions))
    after = {"schema": 1, "arm": arm, "ranks": [_alterable(document)], "taps": [_TAPS]}
    bundle.write("identity-after.json", after)
    if candidate or again is not None:
        ranks = _dispatch(study, arm)["readings"][0]["ranks"]
        moments = ("boot", "oracle", "determinism", "parity", "nll", *SCORED)
        readings = [{"after": moment, "ranks": ranks} for moment in moments]
        bundle.write("dispatch-after.json", {"schema": 1, "arm": arm, "readings": readings})
    (bundle.path / "server.log").write_text(_log(arguments), encoding="utf-8")
    bundle.seal("server.log")
    if candidate:
        items = [
            {"id": item.id, "index": index, "prompt": list(item.prompt), "max_tokens": item.max_tokens}
            for index, item in enumerate(panels["parity"].items)
        ]
        configuration = {"engine": list(arguments), "orders": ["forward", "reverse"], "items": items}
        (bundle.path / "reference-config.json").write_text(json.dumps(configuration))
        bundle.seal("reference-config.json")
        (bundle.path / "reference.log").write_text("generated: no engine ran\n")
        bundle.seal("reference.log")
        lines = [
            {
                "order": order,
                "index": index,
                "id": item.id,
                "token_ids": [_parity_token(arm, index, step) for step in range(item.max_tokens)],
                "finish_reason": "length",
            }
            for order in ("forward", "reverse")
            for index, item in _ordered(panels["parity"], order)
        ]
        (bundle.path / "reference.jsonl").write_bytes(b"".join(canonical_bytes(line) + b"\n" for line in lines))
        bundle.seal("reference.jsonl")
    bundle.complete()


def _log(arguments: Sequence[str]) -> str:
    """A server's log: the line in which vLLM says what it was told, and a last one."""
    told: dict[str, object] = {"host": "127.0.0.1", "port": 40001, "disable_uvicorn_access_log": True}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if name.startswith("no-"):
            told[name.removeprefix("no-").replace("-", "_")] = False
            continue
        text = value if equals else next(words)
        key = name.replace("-", "_")
        if key in ("served_model_name", "logits_processors"):
            told[key] = [text]
        elif key == "additional_config":
            told[key] = json.loads(text)
        else:
            told[key] = int(text) if text.isdecimal() else text
    told["enable_log_requests"] = True
    stamp = "(APIServer pid=1) INFO 01-01 00:00:00"
    return f"generated: no server ran\n{stamp} [api_utils.py:286] non-default args: {told!r}\n{stamp} the end\n"


_TAPS: Final = {"installed": False, "faults": 0, "held": 0}


def _ordered(panel: Panel, order: str) -> list[tuple[int, PanelItem]]:
    items = list(enumerate(panel.items))
    return items if order == "forward" else items[::-1]


def _parity_token(arm: str, index: int, step: int) -> int:
    return 20 + 7 * ARMS.index(arm) + 30 * (index % 10) + step


#: What a worker records of its GPU.
DEVICE = {
    "driver": "600.1",
    "cuda": "13.0",
    "devices": [
        {
            "uuid": "GPU-0",
            "name": "a device",
            "memory_bytes": 1 << 37,
            "compute_capability": "9.0",
            "settings": {"power_limit": "700 W"},
            "state": {"temperature": "40 C"},
        }
    ],
}


def _identity(study: Study, arm: str) -> dict[str, Any]:
    declared = study.arms[arm]
    quantised = declared.kv_format == "k16v8"
    scales = SCALES if declared.scales is not None else (1.0,) * LAYERS
    names = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]
    row = 3 * 128 if quantised else 4 * 128
    blocks = CACHE_BYTES // LAYERS // (8 * 16 * row)
    parameters = {"model.embed_tokens.weight": "a" * 64, "model.norm.weight": "b" * 64}

    def snapshot() -> list[dict[str, object]]:
        one = [(1.0).hex()]
        return [
            {
                "layer": name,
                "k": {"_k_scale": one, "_k_scale_float": one},
                "v": {"_v_scale": [scale.hex()], "_v_scale_float": [scale.hex()]},
            }
            for name, scale in zip(names, scales, strict=True)
        ]

    return {
        "schema": 1,
        "arm": arm,
        "ranks": [
            {
                "rank": 0,
                "arm": arm,
                "attention_backend": dict.fromkeys(names, declared.attention_backend),
                "attention_impl": dict.fromkeys(names, "generated.Impl"),
                "block_size": 16,
                "kv_format": declared.kv_format,
                "layers": [
                    {
                        "name": layer,
                        "cache_shape": [blocks, 8, 16, row],
                        "cache_dtype": "uint8",
                        "cache_strides": [8 * 16 * row, 16 * row, row, 1],
                        "cache_bytes": blocks * 8 * 16 * row,
                        "storage_id": 7000 + index,
                        "storage_offset": 0,
                        "bound": True,
                        "k_bytes_per_element": 2.0,
                        "v_bytes_per_element": 1.0 if quantised else 2.0,
                    }
                    for index, layer in enumerate(names)
                ],
                "pool_bytes": LAYERS * blocks * 8 * 16 * row,
                "parameters": {moment: dict(parameters) for moment in ("loaded", "now", "expected")},
                "scales": {moment: snapshot() for moment in ("before_warmup", "before_capture", "now")},
                "distributions": [
                    {"name": "vllm", "version": "0.32.0", "files": 10, "mismatched": [], "editable": False},
                    *(
                        {"name": "checkout vllm", "version": COMMIT, "files": 1, "mismatched": [], "editable": True}
                        for _ in declared.checkouts
                    ),
                ],
                "modules": {"traced": 5, "untraced": []},
                "device": DEVICE,
                "settings": {
                    "model_config.dtype": "torch.float16",
                    "model_config.max_model_len": next(iter(study.lengths.values())).max_model_len,
                    "model_config.enforce_eager": False,
                    "cache_config.block_size": 16,
                    "cache_config.cache_dtype": "auto",
                    "cache_config.num_gpu_blocks": blocks,
                    "cache_config.enable_prefix_caching": False,
                    "cache_config.kv_cache_memory_bytes": CACHE_BYTES,
                    "scheduler_config.max_num_seqs": 32,
                    "scheduler_config.max_num_batched_tokens": 8192,
                    "parallel_config.tensor_parallel_size": 1,
                    "compilation_config.cudagraph_mode": "FULL_AND_PIECEWISE",
                    "speculative_config": None,
                },
            }
        ],
        "sockets": [["127.0.0.1", 40001]],
    }


def _alterable(document: Mapping[str, Any]) -> dict[str, object]:
    rank = document["ranks"][0]
    return {"rank": 0, "parameters": rank["parameters"], "scales": rank["scales"]}


def _identity_poison(document: Mapping[str, Any]) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    for fault in IDENTITY_FAULTS:
        copy = json.loads(json.dumps(document))
        rank = copy["ranks"][0]
        if fault == "scale-copy-altered":
            rank["scales"]["now"][1]["v"]["_v_scale_float"] = [(3.0).hex()]
        else:
            rank["parameters"]["now"]["model.norm.weight"] = "d" * 64
        entries.append({"fault": fault, "identity": copy})
    return entries


def _dispatch(study: Study, arm: str) -> dict[str, Any]:
    declared = study.arms[arm]

    def ranks(**altered: object) -> list[dict[str, object]]:
        layer = {
            "backend": declared.attention_backend,
            "impl": "generated.Impl",
            "cache_dtype": declared.cache_dtype,
            "kernels": ["paged_attention"],
        }
        names = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]
        return [{"rank": 0, "layers": {**dict.fromkeys(names, layer), names[1]: {**layer, **altered}}}]

    poison = [
        {"fault": "layer-served-by-another-kernel", "ranks": ranks(kernels=["sdpa"])},
        {"fault": "layer-has-another-implementation-class", "ranks": ranks(impl="generated.Other")},
    ]
    return {
        "schema": 1,
        "arm": arm,
        "readings": [{"after": "boot", "ranks": ranks()}],
        "poison": poison if arm == CANDIDATE else [],
    }


def _oracle() -> dict[str, object]:
    document: dict[str, object] = _FIXTURES.make_oracle()
    document["poison"] = [
        {
            "fault": fault,
            "claimed_by": gate,
            "records": [_FIXTURES.make_rank(fills=True, findings={gate: 3})],
            "responses": [],
        }
        for gate in ORACLE_GATES
        for fault in SEEDED[gate]
    ]
    return document


def _orders(panel: Panel, arm: str, name: Callable[[str], str], *, wrong: bool) -> Iterator[dict[str, object]]:
    """The parity panel in every order; ``wrong``: all but its last prompt, and the repeated order answers otherwise."""
    # A campaign, too, asks fewer prompts under a planted fault.
    items = list(enumerate(panel.items))[: -1 if wrong else None]
    for run in orders.REQUIRED if wrong else orders.RUNS:
        for index, item in (*items[1:], items[0]) if run == orders.ROTATED else items:
            other = wrong and run == orders.AGAIN
            tokens = [_parity_token(arm, index, step) + other for step in range(item.max_tokens)]
            text = body(name("orders"), item.prompt, tokens, text="…", finish="length")
            yield {**_record(item, index, text), "run": run}


def _fixtures() -> ModuleType:
    """The builders of the judges' own tests."""
    path = Path(__file__).resolve().parents[1] / "unit" / "judge" / "conftest.py"
    spec = spec_from_file_location("judge_fixtures", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"found no module {path}, expected the builders of the judges' tests")
    module = module_from_spec(spec)
    # Its dataclasses look up their module by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_FIXTURES: Final = _fixtures()


# -- verdicts and receipts ---------------------------------------------------------------------------------------------


class _Judged(Campaign):
    """A campaign whose captures are all there: it judges them and writes the receipts. It never boots anything."""

    def ready(self, lock: freeze.Lock, gsm8k: bytes) -> None:
        """What :meth:`prepare` and the engines' interpreters would say."""
        self._gates = DECIDED
        self._lock = lock.sha256
        self._implementation = digest(dict(lock.implementation))
        self._gsm8k_panel = gsm8k
        self._scopes = {arm: _scope(self.study, lock.sha256, arm) for arm in ARMS}


def _receipts(run_dir: Path, study: Study, lock: freeze.Lock, gsm8k: bytes) -> dict[str, Receipt]:
    selection = select(study, arm=CANDIDATE, length=next(iter(study.lengths)), cache_bytes=CACHE_BYTES)
    campaign = _Judged(selection, run_dir=run_dir, progress=lambda line: None)
    campaign.ready(lock, gsm8k)
    for gate in DECIDED:
        campaign.decide(gate)
    return {receipt.gate: receipt for receipt in read_all(run_dir).receipts}
