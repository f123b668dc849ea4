"""The study of somebody's own model: a shipped study with other sizes, and its declaration with every line explained.

Thresholds, engine settings and arms are those of a shipped study; what follows from the model (sizes, pool, numbers) is
worked out here.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from pytest_kvqual.errors import ModelError, StudyError
from pytest_kvqual.kv.declarations import DECLARED, NEED_DECLARATION, is_declared
from pytest_kvqual.model_config import Sizes
from pytest_kvqual.stats.bounds import most_lost
from pytest_kvqual.study.load import load_study
from pytest_kvqual.study.model import Arm, GatePlan, Length, Model, Study

__all__ = ["CANDIDATES", "FEWEST_TOKENS", "LEAVABLE", "explained", "open_gates", "own_study"]

Platform = Literal["cpu", "gpu"]

#: What a candidate may be, by platform: a format of our own backends, or a value of --kv-cache-dtype.
CANDIDATES: Final[Mapping[Platform, tuple[str, ...]]] = {
    "cpu": ("k16v8", "k16v16", "fp8_e4m3", "fp8_e5m2"),
    "gpu": ("k16v8", "k16v16", "fp8_e4m3", "fp8_e5m2"),
}
#: Gates that a model may be unable to take, and that a study may do without.
LEAVABLE: Final = ("nll", "retrieval", "recall")
FEWEST_TOKENS: Final = 128
#: Tokens: the oracle panel has prompts of up to 383 whatever the length, the lists of recall some 250.
_LEAST_CONTEXT: Final = 512
_SPARE: Final = 128
#: K and V of an element, in a 16-bit cache.
_PAIR_BYTES: Final = 4
_LARGEST_POOL: Final[Mapping[Platform, int]] = {"cpu": 4 << 30, "gpu": 32 << 30}
_FEWEST_IN_A_WAVE: Final = 4
#: Prompt tokens of the oracle panel at least: a healthy pass looks at each in every layer, and in every KV head.
_PANEL_TOKENS: Final = 1500
_CPU_DOCUMENTS, _CPU_STEPS = 16, 64
#: The default text has room for 90 texts of 1,024 tokens, and of 59 to 92 questions none may be lost at 5 %.
_QUESTIONS: Final[Mapping[Platform, Mapping[str, int]]] = {
    "cpu": {"retrieval": 60, "recall": 160},
    "gpu": {"retrieval": 60, "recall": 320},
}
_BOOT_S: Final = 900.0
#: What vLLM 0.32.0's CPU attention takes; our Triton kernels take multiples of 8 up to 256.
_CPU_HEADS: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_SIXTEEN: Final = ("float16", "bfloat16")


def own_study(
    *,
    directory: Path,
    model: str,
    sizes: Sizes,
    platform: Platform,
    candidate: str,
    length: int,
    without: Sequence[str] = (),
) -> Study:
    """The study of a model: the shipped one of its platform, with this model's sizes, two arms and one length.

    Args:
        directory: The study's folder; it need not be there. Its name becomes the study's.
        model: The served model's name.
        sizes: The model's.
        platform: ``cpu`` or ``gpu``.
        candidate: One of :data:`CANDIDATES`.
        length: The context length in tokens.
        without: Gates of :data:`LEAVABLE` to leave out.

    Returns:
        A study whose panels, digests and scales are all missing.

    Raises:
        ModelError: The model's context is too short for the length, or no kernel takes its heads.
        StudyError: A length below :data:`FEWEST_TOKENS`, or a shipped study that cannot be read.
    """
    if length < FEWEST_TOKENS:
        raise StudyError(f"--length: found {length}, expected at least {FEWEST_TOKENS} tokens")
    _heads_fit(sizes, platform, candidate)
    cpu = platform == "cpu"
    base = load_study("smollm2-cpu") if cpu else load_study("qwen3-8b-awq", "bf16")
    # The GPU study asks GSM8K instead, whose questions its model can answer.
    rules = {**load_study("smollm2-cpu").preservation, **base.preservation}
    dtype = sizes.dtype if sizes.dtype in _SIXTEEN else "bfloat16"
    nll = replace(base.nll, documents=_CPU_DOCUMENTS, decode_steps=_CPU_STEPS) if cpu else base.nll
    context = max(length + nll.decode_steps, _LEAST_CONTEXT)
    if sizes.positions is not None and sizes.positions < context:
        raise ModelError(
            f"found {sizes.positions} positions in the model, expected at least {context}: {length} tokens and "
            f"{nll.decode_steps} decode steps, and no fewer than {_LEAST_CONTEXT}",
            advice="choose a shorter --length",
        )
    longest = min(context + _SPARE, sizes.positions or context + _SPARE)
    token_bytes = sizes.layers * sizes.kv_heads * sizes.head_size * _PAIR_BYTES
    wave = base.lengths[1024].wave_size
    while wave > _FEWEST_IN_A_WAVE and wave * longest * token_bytes > _LARGEST_POOL[platform]:
        wave //= 2
    tasks = [task for task in ("retrieval", "recall") if task not in without]
    listed = [name for name in ("nll", "oracle", *tasks) if name not in without]
    arm = _candidate(base, candidate, directory, dtype)
    left_out = {*without, *open_gates(arm)}
    order = [gate.name for gate in base.gates if not gate.timing and gate.name not in (*LEAVABLE, "gsm8k")]
    flags = [
        f"--dtype={dtype}" if flag.startswith("--dtype=") else flag
        for flag in base.engine.flags
        if not flag.startswith("--hf-overrides=")
    ]
    return Study(
        name=directory.name,
        directory=directory,
        platform=platform,
        model=Model(
            name=model,
            source="a folder of its own",
            files={},
            layers=sizes.layers,
            query_heads=sizes.query_heads,
            kv_heads=sizes.kv_heads,
            head_size=sizes.head_size,
            vocabulary=sizes.vocabulary,
            files_path=directory / "model.json",
        ),
        engine=replace(
            base.engine,
            flags=tuple(flags),
            # So small that the oracle panel does not fit into one step: some prefill then continues over its cache.
            max_num_batched_tokens=min(base.engine.max_num_batched_tokens, 2 * length),
            boot_timeout_s=_BOOT_S,
        ),
        arms={"native": _native(base, dtype), "candidate": arm},
        lengths={
            length: Length(
                tokens=length,
                cache_bytes=-(-wave * longest * token_bytes >> 20) << 20,
                max_model_len=longest,
                wave_size=wave,
                panels={
                    name: directory / "panels" / (f"{name}.json" if name == "recall" else f"{name}-{length}.json")
                    for name in listed
                },
                questions={task: _QUESTIONS[platform][task] for task in tasks},
            )
        },
        schedule=base.schedule,
        determinism=base.determinism,
        gates=tuple(
            GatePlan(name=name, state="required", timing=False) for name in (*order, *LEAVABLE) if name not in left_out
        ),
        oracle=replace(
            base.oracle,
            minimum_cells=min(base.oracle.minimum_cells, _PANEL_TOKENS * sizes.layers * sizes.kv_heads),
            minimum_rows=min(base.oracle.minimum_rows, _PANEL_TOKENS * sizes.layers),
        ),
        parity=replace(base.parity, panel=directory / "panels" / "parity.json"),
        nll=nll,
        preservation={task: rules[task] for task in tasks},
        gsm8k_source=None,
        fidelity=None,
        timing={},
        waivers=tuple(waiver for waiver in base.waivers if waiver.arm == "native"),
    )


def open_gates(arm: Arm) -> tuple[str, ...]:
    """The gates that an arm's format leaves open, which :func:`own_study` does not list: none of a declared one."""
    return () if is_declared(arm.kv_format) else NEED_DECLARATION


def _heads_fit(sizes: Sizes, platform: Platform, candidate: str) -> None:
    if sizes.query_heads % sizes.kv_heads:
        raise ModelError(f"found {sizes.query_heads} query heads, expected a multiple of the {sizes.kv_heads} KV heads")
    if platform == "cpu" and sizes.head_size not in _CPU_HEADS:
        raise ModelError(f"found a head size of {sizes.head_size}, expected one of {', '.join(map(str, _CPU_HEADS))}")
    if platform == "gpu" and candidate.startswith("k16") and (sizes.head_size % 8 or sizes.head_size > 256):
        raise ModelError(f"found a head size of {sizes.head_size}, expected a multiple of 8 up to 256")


def _native(base: Study, dtype: str) -> Arm:
    return replace(
        base.arms["native" if base.platform == "cpu" else "native-flashinfer"],
        name="native",
        cache_dtype=f"torch.{dtype}",
    )


def _candidate(base: Study, candidate: str, directory: Path, dtype: str) -> Arm:
    scales = directory / "scales" / "v.json" if candidate == "k16v8" else None
    if base.platform == "cpu" and candidate.startswith("k16"):
        arm = base.arms["candidate" if candidate == "k16v8" else "reference"]
    elif base.platform == "cpu":
        arm = load_study("smollm2-cpu-fp8").arms[candidate.replace("_", "-")]
    elif candidate == "k16v8":
        arm = base.arms["triton-k16v8"]
    elif candidate == "k16v16":
        arm = replace(
            base.arms["triton-k16v8"],
            attention_backend="KVQUAL_TRITON_K16V16",
            kv_format="k16v16",
            before_load=("pytest_kvqual.kv.backends.vllm_gpu:register_triton_k16v16",),
            cache_dtype=f"torch.{dtype}",
        )
    else:
        # How the kernels of a GPU round into 8 bits has no declaration.
        stock = base.arms["native-flashinfer"]
        arm = replace(
            stock, kv_format=candidate, cache_dtype=None, flags=(*stock.flags, f"--kv-cache-dtype={candidate}")
        )
    if arm.kv_format == "k16v16":
        arm = replace(arm, cache_dtype=f"torch.{dtype}")
    return replace(arm, name="candidate", role="candidate", scales=scales)


# -- The declaration -----------------------------------------------------------------------------------------------

_WIDTH: Final = 120

_GATES: Final = {
    "identity": "source, weights, cache layout, bytes per element and scales are those of the lock",
    "dispatch": "each layer runs the declared backend and kernels",
    "stale-maps": "block table, lengths and row starts of each step are those of this step",
    "routing": "each K and V lies in its cell, in the declared encoding, and no other cell changes",
    "shifted-outputs": "no output row is the attention of another row",
    "placement": "each output row is near its own attention over what was written",
    "replay": "outputs do not change when cells that nobody wrote hold something",
    "determinism": "the same requests in another order, and again, give the same tokens",
    "parity": "serial answers over HTTP are those of the same engine in process",
    "nll": "the mean loss grows by less than the margin",
    "retrieval": "of what native finds in a long text, the candidate loses less than the limit",
    "recall": "of the words that native recalls from a list, the candidate loses less than the limit",
}

_TASKS: Final = {
    "retrieval": "A secret word in a text of the length.",
    "recall": "The word of a name in a list; the same questions at every length.",
}


def explained(study: Study) -> str:
    """The declaration of :func:`own_study`'s study, as TOML; every key has its explanation beside or above it.

    ``load_study`` of a file with these bytes, in ``study.directory``, gives the study again.
    """
    return "\n".join(_lines(study)).lstrip("\n") + "\n"


def _lines(study: Study) -> Iterator[str]:
    def inside(path: Path) -> str:
        return path.relative_to(study.directory).as_posix()

    native, candidate = study.arms["native"], study.arms["candidate"]
    (length,) = study.lengths.values()
    model, engine, oracle, nll = study.model, study.engine, study.oracle, study.nll
    yield from _text(
        f"The KV cache of {model.name}: the stock cache (arm native) and {candidate.kv_format} (arm candidate)."
    )
    yield from _text("Written by `kvqual init`; docs/writing-a-study.md has each key. After a change: `kvqual freeze`.")
    yield from _key("schema", 1, "the version of this format")
    yield from _key("name", study.name, "in reports, and in the name of the run directory")
    yield from _key("platform", study.platform, "which gates run it: pytest -m cpu or -m gpu")
    yield from _key("schedule", study.schedule, "how requests are sent: waves repeat batches exactly")
    yield from _key("determinism", study.determinism, "what the gate determinism asks for; chosen before the first run")

    yield from _table("model", "As its config.json has it. The folder is named by KVQUAL_MODEL_DIR at each run.")
    yield from _key("name", model.name, "under which it is served")
    yield from _key("source", model.source, "nothing that `kvqual model` builds")
    yield from _key("layers", model.layers, "attention layers, each with its own cache")
    yield from _key("query_heads", model.query_heads, "query heads of a layer")
    yield from _key("kv_heads", model.kv_heads, "K and V heads of a layer; query heads share them")
    yield from _key("head_size", model.head_size, "elements of a head")
    yield from _key("vocabulary", model.vocabulary, "token ids are below it")
    yield from _key("files", "model.json", "the SHA-256 of each file of the folder; another file is another study")

    yield from _table("engine", "What both arms share.")
    yield from _key("distribution", engine.distribution, "the engine's Python package")
    yield from _key("version", engine.version, "the one version that the gates read")
    yield from _key("block_size", engine.block_size, "tokens of a cache block")
    yield from _key("max_num_seqs", engine.max_num_seqs, "requests in a step, at most")
    yield from _key("max_num_batched_tokens", engine.max_num_batched_tokens, "tokens in a step, at most")
    yield from _key("flags", engine.flags, "of the server's command line, for both arms; --dtype is the model's")
    yield from _key("boot_timeout_s", engine.boot_timeout_s, "seconds for a server to start")
    yield from _key("request_timeout_s", engine.request_timeout_s, "seconds for one request")
    if engine.unset:
        yield from _key("unset", engine.unset, "variables that would override the flags, removed from the environment")
    yield from _table("engine.environment", "Variables of both servers.")
    for variable, value in engine.environment.items():
        yield from _key(variable, value, _VARIABLES.get(variable, "as in the shipped study"))

    yield from _table("arms.native", "The stock cache: the control, against which everything is held.")
    yield from _arm(native)
    yield from _table("arms.candidate", "What is to be qualified.")
    yield from _arm(candidate)

    token = model.layers * model.kv_heads * model.head_size * _PAIR_BYTES
    yield from _table(f"lengths.{length.tokens}", f"Runs with --length {length.tokens}.")
    yield from _key(
        "cache_bytes", length.cache_bytes,
        f"of the KV pool, in each arm: a wave of full requests, {token} bytes a token in 16 bits",
    )  # fmt: skip
    yield from _key("max_model_len", length.max_model_len, "tokens of a request, with some to spare")
    yield from _key("wave_size", length.wave_size, "requests in a wave, or in flight")
    if length.questions:
        yield from _key("questions", dict(length.questions), "how many; below, how many of them may be lost")
    yield from _table(f"lengths.{length.tokens}.panels", "Frozen prompts, as token ids of the model's tokenizer.")
    for task, path in length.panels.items():
        yield from _key(task, inside(path), _PANELS[task])

    yield from _table("oracle", "What the gates stale-maps to replay look at, and how much of it at least.")
    yield from _key("passes", oracle.passes, "as it is; fingerprints for K, V and query; a small pool; reordered")
    yield from _key("conditions", oracle.conditions, "what the requests must have met at least once")
    yield from _key("minimum_cells", oracle.minimum_cells, "cells of the cache, compared")
    yield from _key("minimum_rows", oracle.minimum_rows, "output rows, compared")
    yield from _key("ambiguous_rows", oracle.ambiguous_rows, "largest share of rows that are near another row's output")
    yield from _key("short_prompt_tokens", oracle.short_prompt_tokens, "longest prompt of pressure and rotated")
    yield from _key("poison_prompt_tokens", oracle.poison_prompt_tokens, "longest prompt that a seeded fault is shown")
    yield from _key("free_blocks", oracle.free_blocks, "blocks of the pool that the pass pressure leaves")
    yield from _key("rotation", oracle.rotation, "by how many requests an order is rotated")

    yield from _table("parity", "Serial answers over HTTP against the engine in process: no token may differ.")
    yield from _key("panel", inside(study.parity.panel), "its prompts; determinism sends them too")
    yield from _key("prompts", study.parity.prompts, "how many")
    yield from _key("max_tokens", study.parity.max_tokens, "tokens of an answer")

    required = [gate.name for gate in study.gates]
    yield from _table("nll", "The loss of forced tokens." + ("" if "nll" in required else " The gate is left out."))
    yield from _key("documents", nll.documents, "texts of the length")
    yield from _key("decode_steps", nll.decode_steps, "forced tokens of each")
    yield from _key("margin_nats", nll.margin_nats, "nats a token; the bound of the mean difference must be below")
    yield from _key("confidence", nll.confidence, "of that bound, one-sided")
    yield from _key("poison_documents", nll.poison_documents, "texts that a seeded fault is shown")

    for task, rules in study.preservation.items():
        total = length.questions[task]
        lost = most_lost(total, rules.limit, rules.confidence)
        yield from _table(task, f"{_TASKS[task]} Of {total} questions {lost or 0} may be lost.")
        yield from _key("limit", rules.limit, "the loss probability's bound must be below; gains cancel nothing")
        yield from _key("confidence", rules.confidence, "of that bound, one-sided")
        yield from _key(
            "floor", rules.floor,
            "least share that native answers right; a model that answers fewer shows no loss: INCONCLUSIVE",
        )  # fmt: skip
        yield from _key("max_tokens", rules.max_tokens, "tokens of an answer")
        yield from _key("stop", rules.stop, "texts that end an answer")
        yield from _key("run_on", rules.run_on, "texts at which the model has begun to ask itself")
        yield from _key("reasoning", rules.reasoning or (), "the two marks around thoughts that are no answer")
        yield from _key("empty_share", rules.empty_share, "largest share of empty answers")
        yield from _key("truncated_share", rules.truncated_share, "largest share of answers that were cut off")
        yield from _key("error_share", rules.error_share, "largest share of requests that failed")
        yield from _key("poison_questions", rules.poison_questions, "questions that a seeded fault is shown")

    yield from _text("", "The gates, in order: each rests on those above it. Nothing is timed (docs/timing.md).")
    if missing := open_gates(candidate):
        yield from _text(
            f"Not listed: {', '.join(missing)}. What a cell of {candidate.kv_format} holds is not declared: they "
            "could not be established, and nothing can be timed."
        )
    for gate in study.gates:
        yield from _table(f"gates.{gate.name}", _GATES[gate.name][0].upper() + _GATES[gate.name][1:] + ".", gap=False)
        yield from _key("state", gate.state, "it must pass")

    for waiver in study.waivers:
        yield ""
        yield from _text("A known finding of the stock cache. A candidate has none; one that is not met fails.")
        yield "[[waivers]]"
        yield from _key("arm", waiver.arm, "the control that has it")
        yield from _key("gate", waiver.gate, "the gate that finds it")
        yield from _key("finding", waiver.finding, "the kind of finding")
        yield from _key("reproducer", waiver.reproducer, "where it is shown on its own")
        yield from _key("reason", waiver.reason, "why it is no fault of this use")


_PANELS: Final = {
    "nll": "documents, and the tokens that are forced after them",
    "oracle": "requests around multiples of the block size",
    "retrieval": "texts with a secret word",
    "recall": "lists of names and words",
}

_VARIABLES: Final = {
    "HF_HUB_OFFLINE": "nothing is fetched",
    "VLLM_NO_USAGE_STATS": "nothing is sent",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "the worker lives in the engine's process: one import of the engine less",
    "VLLM_USE_V2_MODEL_RUNNER": "the V1 model runner",
    "VLLM_USE_FLASHINFER_SAMPLER": "greedy decoding has no use for it, and it is compiled on first use",
}


def _arm(arm: Arm) -> Iterator[str]:
    cell = DECLARED[arm.kv_format].line if is_declared(arm.kv_format) else "not declared"
    yield from _key("role", arm.role, "control: each gate's null; candidate: what the verdicts are about")
    yield from _key("attention_backend", arm.attention_backend, "what each layer must report")
    yield from _key("kv_format", arm.kv_format, f"what a cell must hold: {cell}")
    if arm.cache_dtype is not None:
        yield from _key("cache_dtype", arm.cache_dtype, "the cache tensor's")
    if arm.flags:
        yield from _key("flags", arm.flags, "added to the engine's")
    yield from _key("kernels", arm.kernels, "profiler names that must all be seen in each layer")
    yield from _key("kernels_absent", arm.kernels_absent, "names of which none may be: those of a fallback")
    if arm.before_load:
        yield from _key("before_load", arm.before_load, "called in the worker: it puts the backend in")
    if arm.scales is not None:
        yield from _key("scales", "scales/v.json", "one V scale a layer; `kvqual prepare --calibrate` writes them")


def _table(name: str, why: str, *, gap: bool = True) -> Iterator[str]:
    if gap:
        yield ""
    yield from _text(why)
    yield f"[{name}]"


def _text(*lines: str) -> Iterator[str]:
    for line in lines:
        yield from ([f"# {it}" for it in textwrap.wrap(line, _WIDTH - 2)] if line else [""])


def _key(key: str, value: object, why: str) -> Iterator[str]:
    line = f"{key} = {_toml(value)}"
    beside = f"{line}  # {why}"
    if len(beside) <= _WIDTH:
        yield beside
        return
    yield from _text(f"{key}: {why}.")
    if len(line) <= _WIDTH or not isinstance(value, (tuple, list)):
        yield line
        return
    yield f"{key} = ["
    items = ""
    for item in map(_toml, value):
        if items and len(items) + len(item) > _WIDTH - 4:
            yield f" {items}"
            items = ""
        items += f" {item},"
    yield f" {items}"
    yield "]"


def _toml(value: object) -> str:
    if isinstance(value, str):
        # TOML knows JSON's escapes, but no pair of surrogates, and wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, Iterable):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)
