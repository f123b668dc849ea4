"""The study of somebody's own model: a shipped study with other sizes, and its declaration with every line explained.

Thresholds, engine settings and arms are those of a shipped study; what follows from the model (sizes, pool, numbers) is
worked out here.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from pytest_kvqual.errors import ModelError, StudyError
from pytest_kvqual.kv.declarations import DECLARED, NEED_DECLARATION, is_declared
from pytest_kvqual.model_config import Sizes
from pytest_kvqual.stats.bounds import most_lost
from pytest_kvqual.study.keys import CONDITIONS, PASSES, SECTIONS, TABLE, TABLES, keys_of
from pytest_kvqual.study.load import load_study
from pytest_kvqual.study.model import Arm, GatePlan, Length, Model, Study

__all__ = ["CANDIDATES", "FEWEST_TOKENS", "LEAVABLE", "explained", "open_gates", "own_study", "plain"]

Platform = Literal["cpu", "gpu"]

#: What a candidate may be: a format of this project's backends, or a value of --kv-cache-dtype.
CANDIDATES: Final = ("k16v8", "k16v16", "fp8_e4m3", "fp8_e5m2")
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
        directory: The study's folder; it need not be there. Its name becomes the study's, as :func:`plain` has it.
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
        name=plain(directory.name),
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


def plain(text: str) -> str:
    """A name that a study may have, like ``text``."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-._") or "own"


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
    "identity": "Source, weights, cache layout, bytes per element and scales are those of the lock.",
    "dispatch": "Each layer runs the declared backend and kernels.",
    "stale-maps": "Block table, lengths and row starts of each step are those of this step.",
    "routing": "Each K and V lies in its cell, in the declared encoding; no other cell changes.",
    "shifted-outputs": "No output row is the attention of another row.",
    "placement": "Each output row is the attention of its own history.",
    "replay": "Outputs do not change when cells that nobody wrote hold something.",
    "determinism": "The same requests in another order, and again, give the same tokens.",
    "parity": "Answers over HTTP are those of the engine in process.",
    "nll": "The mean loss grows by less than the margin.",
    "retrieval": "Of what native finds in a long text, little is lost.",
    "recall": "Of the words that native recalls from a list, little is lost.",
}
_TASKS: Final = {
    "retrieval": "A secret word in a text of the length.",
    "recall": "The word of a name in a list.",
}
_VARIABLES: Final = {
    "HF_HUB_OFFLINE": "nothing is fetched",
    "VLLM_NO_USAGE_STATS": "nothing is sent",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "the worker lives in the engine's process: one import of the engine less",
    "VLLM_USE_V2_MODEL_RUNNER": "the V1 model runner",
    "VLLM_USE_FLASHINFER_SAMPLER": "greedy decoding has no use for it, and it is compiled on first use",
}
#: Where the list of keys points to a table of the reference.
_MEANINGS: Final = {
    "schema": "the version of this format",
    "passes": "the healthy runs of the oracle panel",
    "conditions": "what the requests must have met at least once",
}
_WORDS: Final[Mapping[str, Mapping[str, str]]] = {"passes": PASSES, "conditions": CONDITIONS}


def explained(study: Study) -> str:
    """The declaration of :func:`own_study`'s study, as TOML; each key has its meaning beside or right above it.

    ``load_study`` of a file with these bytes, in ``study.directory``, gives the study again.
    """
    return "\n".join(_lines(study)) + "\n"


def _lines(study: Study) -> Iterator[str]:
    native, candidate = study.arms["native"], study.arms["candidate"]
    (length,) = study.lengths.values()
    model = study.model
    yield from _text(f"The KV cache of {model.name}: the stock one (native) and {candidate.kv_format} (candidate).")
    yield from _text(
        "Written by `kvqual init`. After a change: `kvqual prepare` where panels depend on it, `kvqual freeze`."
    )
    yield from _keys(study, "", {"schema": 1, **_values(study, "")})
    yield from _table(study, "model", "[model]", model, "From its config.json. KVQUAL_MODEL_DIR names the folder.")
    yield from _table(study, "engine", "[engine]", study.engine)
    yield from _text("", "Variables of every server.")
    yield "[engine.environment]"
    for variable, value in study.engine.environment.items():
        yield from _key(variable, value, _VARIABLES.get(variable, "as in the shipped studies"))
    for arm, about in (
        (native, "The stock cache, against which all is held."),
        (candidate, "What is to be qualified."),
    ):
        cell = f" In a cell: {DECLARED[arm.kv_format].line}." if is_declared(arm.kv_format) else ""
        yield from _table(study, f"arms.{arm.name}", "[arms.NAME]", arm, about + cell)

    token = model.layers * model.kv_heads * model.head_size * _PAIR_BYTES
    name = f"lengths.{length.tokens}"
    pool = f"Its pool holds a wave of full requests, at {token} bytes a token in 16 bits."
    yield from _table(study, name, "[lengths.TOKENS]", length, pool)
    yield from _table(
        study, f"{name}.panels", "[lengths.TOKENS.panels]", length.panels, "Frozen prompts, as token ids."
    )
    if length.questions:
        yield from _table(study, f"{name}.questions", "[lengths.TOKENS.questions]", length.questions)
    yield from _table(study, "oracle", "[oracle]", study.oracle)
    yield from _table(study, "parity", "[parity]", study.parity)
    yield from _table(study, "nll", "[nll]", study.nll)
    for task, rules in study.preservation.items():
        total = length.questions[task]
        lost = most_lost(total, rules.limit, rules.confidence) or 0
        harm = f"{_TASKS[task]} Of {total} questions {lost} may be lost; INCONCLUSIVE where native is below the floor."
        yield from _table(study, task, f"[{task}]", rules, harm)

    yield from _text("", "The gates, in order: each rests on those above it. Nothing is timed (docs/timing.md).")
    if missing := open_gates(candidate):
        yield from _text(
            f"Not listed: {', '.join(missing)}. What a cell of {candidate.kv_format} holds is not declared: they "
            "could not be established, and nothing can be timed."
        )
    for gate in study.gates:
        yield from _text(_GATES[gate.name])
        yield f"[gates.{gate.name}]"
        yield from _key("state", gate.state, "it must pass")
    for waiver in study.waivers:
        yield from _table(study, "[waivers]", "[[waivers]]", waiver)


def _table(study: Study, name: str, header: str, record: object, more: str = "") -> Iterator[str]:
    """One table, with what the reference and ``more`` say of it; ``header`` is the reference's."""
    about = next(section.about for section in SECTIONS if section.header == header)
    yield from _text("", about, *([more] if more else []))
    yield f"[{name}]"
    yield from _keys(study, header, record if isinstance(record, Mapping) else _values(record, header))


def _values(record: object, header: str) -> dict[str, object]:
    """What a record has of the keys of a table; no tables, and nothing that a default says."""
    found: dict[str, object] = {}
    for key in keys_of(header):
        value = getattr(record, "files_path" if (header, key.name) == ("[model]", "files") else key.name, None)
        if key.type not in (TABLE, TABLES) and not (key.default and value in (None, (), False)):
            found[key.name] = value
    found.pop("schema", None)
    return found


def _keys(study: Study, header: str, values: Mapping[str, object]) -> Iterator[str]:
    for key in keys_of(header):
        if key.name not in values:
            continue
        value = values[key.name]
        meaning = _MEANINGS.get(key.name, key.meaning) + (f" ({key.unit})" if key.unit else "")
        if isinstance(value, Path):
            value = value.relative_to(study.directory).as_posix()
        for word in value if key.name in _WORDS and isinstance(value, tuple) else ():
            yield from _text(f"{word}: {_WORDS[key.name][word]}.")
        yield from _key(key.name, () if value is None else value, meaning)


def _text(*lines: str) -> Iterator[str]:
    for line in lines:
        yield from ([f"# {it}" for it in textwrap.wrap(line, _WIDTH - 2)] if line else [""])


def _key(key: str, value: object, meaning: str) -> Iterator[str]:
    line = f"{key} = {_toml(value)}"
    if len(beside := f"{line}  # {meaning}") <= _WIDTH:
        yield beside
        return
    yield from _text(f"{key}: {meaning}.")
    if len(line) <= _WIDTH or not isinstance(value, tuple):
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
    if isinstance(value, bool):
        return str(value).lower()
    return "[" + ", ".join(map(_toml, value)) + "]" if isinstance(value, tuple) else repr(value)
