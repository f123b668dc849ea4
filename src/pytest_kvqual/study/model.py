"""What a study declares, as frozen records. Nothing here reads a file.

A study is decoded once, by :func:`pytest_kvqual.study.load.load_study`; everything downstream takes these records.
Paths are absolute and already exist when a record is built. Thresholds live here and nowhere in code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Role = Literal["candidate", "control"]
GateState = Literal["required", "planned"]
Schedule = Literal["serial", "waves", "natural"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The model folder and its geometry.

    ``files`` maps each file name of the folder to its SHA-256 (lower-case hex).
    """

    name: str
    source: str
    files: Mapping[str, str]
    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocabulary: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """The engine and the flags that every arm shares.

    ``flags`` are command-line tokens given as they stand; ``environment`` is added to every arm's environment and
    ``unset`` names variables that are removed from it. Times in seconds.
    """

    distribution: str
    version: str
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    flags: tuple[str, ...]
    environment: Mapping[str, str]
    unset: tuple[str, ...]
    boot_timeout_s: float
    request_timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One server configuration.

    ``before_load`` and ``after_init`` name ``module:function`` pairs called as ``function(worker)`` inside the engine's
    worker: the first before the model is built, the second once model and KV caches exist, before warm-up.
    ``interpreter`` is None for the interpreter that runs pytest. ``scales`` is a JSON file of per-layer V scales.
    """

    name: str
    role: Role
    attention_backend: str
    kv_format: str
    interpreter: Path | None
    pythonpath: tuple[Path, ...]
    flags: tuple[str, ...]
    environment: Mapping[str, str]
    before_load: tuple[str, ...]
    after_init: tuple[str, ...]
    scales: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """One context length with its own panels and pool.

    ``cache_bytes`` is the KV pool's size in bytes; ``max_model_len`` in tokens; ``wave_size`` the requests per wave.
    ``panels`` maps a task's name (``nll``, ``oracle``) to its panel file.
    """

    tokens: int
    cache_bytes: int
    max_model_len: int
    wave_size: int
    panels: Mapping[str, Path]


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleRules:
    """Thresholds of the routing and placement gates.

    ``minimum_cells`` and ``minimum_rows``: fewer checked cells or rows is no evidence. ``ambiguous_rows``: the largest
    share of rows (0 to 1) whose nearest reference is not unique within tolerance. ``poison_prompt_tokens``: a seeded
    fault is shown the requests of the oracle panel whose prompts are at most this long.
    """

    minimum_cells: int
    minimum_rows: int
    ambiguous_rows: float
    poison_prompt_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityRules:
    """Serial parity: ``prompts`` requests of ``max_tokens`` greedy tokens; no difference is allowed."""

    panel: Path
    prompts: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NllRules:
    """The NLL margin: ``documents`` × ``decode_steps`` losses; margin in nats per token; one-sided confidence."""

    documents: int
    decode_steps: int
    margin_nats: float
    confidence: float
    poison_documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GatePlan:
    """One gate of the study's order. ``planned`` gates are declared and have no implementation yet."""

    name: str
    state: GateState
    timing: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """One qualification, declared. ``directory`` holds ``study.toml`` and, once frozen, ``lock.json``."""

    name: str
    directory: Path
    platform: Literal["cpu", "gpu"]
    model: Model
    engine: Engine
    arms: Mapping[str, Arm]
    lengths: Mapping[int, Length]
    schedule: Schedule
    determinism: Literal["order-invariant", "rotation-diagnostic"]
    gates: tuple[GatePlan, ...]
    oracle: OracleRules
    parity: ParityRules
    nll: NllRules

    def controls(self) -> tuple[Arm, ...]:
        """The control arms, in the order of the study."""
        return tuple(arm for arm in self.arms.values() if arm.role == "control")

    def before(self, gate: str) -> tuple[str, ...]:
        """The names of the gates that ``gate`` rests on: all that stand above it in the study's order.

        For a timing gate these are every gate above it, planned ones included: a planned gate refuses timing.
        """
        names = [plan.name for plan in self.gates]
        return tuple(names[: names.index(gate)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """One arm of one study at one length: what a run is about.

    ``arm`` is the arm under qualification, whatever its role. ``length.cache_bytes`` equals ``cache_bytes``, the KV
    pool's size in bytes that was asked for.
    """

    study: Study
    arm: Arm
    length: Length
    cache_bytes: int
