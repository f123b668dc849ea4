"""What a study declares, as frozen records. Nothing here reads a file.

A study is decoded once, by :func:`pytest_kvqual.study.load.load_study`; everything downstream takes these records.
Paths are absolute, and exist when a record is built, save those of ``Study.missing`` and those that a command writes.
Thresholds live here and nowhere in code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Role = Literal["candidate", "control"]
GateState = Literal["required", "planned"]
Schedule = Literal["serial", "waves", "natural"]
Determinism = Literal["order-invariant", "rotation-diagnostic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The model folder and its geometry.

    ``files`` maps each file name of the folder to its SHA-256 (lower-case hex). Where they are not in ``study.toml``,
    ``files_path`` is the JSON file that ``kvqual prepare`` writes them to; without that file ``files`` is empty.

    ``repository`` and ``revision`` (a commit) name the weights on the Hugging Face hub; None where the study says how
    the folder is built. ``formats`` are the names of the formats that the study has for this model, ``format`` the one
    that this study was loaded for; None where it has one alone.
    """

    name: str
    source: str
    files: Mapping[str, str]
    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    repository: str | None = None
    revision: str | None = None
    format: str | None = None
    formats: tuple[str, ...] = ()
    files_path: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """The engine and the flags that every arm shares.

    ``flags`` are command-line tokens given as they stand; ``environment`` is added to every arm's environment and
    ``unset`` names variables that are removed from it. ``tensor_parallel_size`` is the number of ranks, each of which
    gives a record. Times in seconds.
    """

    distribution: str
    version: str
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor_parallel_size: int
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
    ``installed`` says that the arm's code is no part of the study: interpreter and checkouts come from ``--install``,
    and without it the arm does not run. ``checkouts`` are the roots of the verified source trees, put before
    ``pythonpath``; empty until an install is applied. They are not in the lock but in the scope's engine.

    What each layer must be seen to run: ``kernels`` are patterns (:func:`fnmatch.fnmatchcase`) of which each matches a
    profiler name, ``kernels_absent`` patterns of which none does. ``cache_dtype`` is the cache tensor's dtype in
    torch's words (``torch.uint8``), None where any will do.
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
    kernels: tuple[str, ...]
    kernels_absent: tuple[str, ...]
    cache_dtype: str | None
    installed: bool = False
    checkouts: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """One context length with its own panels and pool.

    ``cache_bytes`` is the KV pool's size in bytes; ``max_model_len`` in tokens; ``wave_size`` the requests per wave.
    ``panels`` maps a task's name (``nll``, ``oracle``, ``retrieval``) to its panel file, ``questions`` the name of each
    scored task to the number of its questions.
    """

    tokens: int
    cache_bytes: int
    max_model_len: int
    wave_size: int
    panels: Mapping[str, Path]
    questions: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleRules:
    """What the oracle gates ask for.

    ``passes`` are the healthy passes of the oracle panel, by name, each captured once. ``conditions`` are the words of
    the workload's conditions (``chunked``, ``reused-block``), each met at least once over all passes and ranks.
    ``minimum_cells`` and ``minimum_rows``: fewer cells or rows checked on a rank, over all passes, is no evidence.
    ``ambiguous_rows``: the largest share of rows (0 to 1) whose nearest reference is not unique within tolerance.
    ``short_prompt_tokens``: the passes ``pressure`` and ``rotated`` have the requests of the oracle panel whose prompts
    are at most this long, ``poison_prompt_tokens`` the same for a seeded fault's. ``free_blocks``: how many blocks of
    the pool are left in the pass ``pressure``. ``rotation``: by how many requests an order is rotated, here and in the
    determinism gate.
    """

    passes: tuple[str, ...]
    conditions: tuple[str, ...]
    minimum_cells: int
    minimum_rows: int
    ambiguous_rows: float
    short_prompt_tokens: int
    poison_prompt_tokens: int
    free_blocks: int
    rotation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiver:
    """A known finding of a control, which does not count against it.

    ``finding`` is the kind under which the oracle of ``gate`` counts it (``nan-fill``). ``reproducer`` says where a
    reader finds the finding shown on its own, ``reason`` in one line why it is no fault of this arm's use.
    """

    arm: str
    gate: str
    finding: str
    reproducer: str
    reason: str


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
class PreservationRules:
    """A scored task, and how much of what a control answers right a candidate may lose.

    ``limit``: the upper bound of the loss probability at the one-sided ``confidence`` must be below it. ``floor``: the
    least share of right answers of each control. ``max_tokens`` and ``stop`` go into each request; with ``reasoning``
    (the markers around a part of the text that is dropped) the parser applies ``stop`` instead, to what is left.
    ``run_on`` are the markers at which an answer ends because the model asks itself a further question.
    ``empty_share``, ``truncated_share``, ``error_share``: the largest shares (0 to 1) of answers of these kinds in any
    one capture. ``poison_questions``: how many questions are asked under a planted fault.
    """

    limit: float
    confidence: float
    floor: float
    max_tokens: int
    stop: tuple[str, ...]
    run_on: tuple[str, ...]
    reasoning: tuple[str, str] | None
    empty_share: float
    truncated_share: float
    error_share: float
    poison_questions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gsm8kSource:
    """Where the GSM8K test set comes from: a local file, or ``file`` of ``repository`` at ``revision`` on the hub.

    ``sha256`` is that of the set as JSON lines; ``shots`` the file with the worked questions before each question.
    """

    sha256: str
    repository: str
    revision: str
    file: str
    shots: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityRules:
    """How well the recorder must agree with a local server of known delays before anything is timed.

    The load: ``rate`` requests/s open loop, then ``concurrency`` in flight closed loop, ``requests`` of ``tokens``
    output tokens each. The limits, in milliseconds: ``lateness_p99_ms`` of the dispatch after the intended arrival;
    ``ttft_error_p50_ms``, ``ttft_error_p99_ms``, ``tpot_error_p99_ms`` of the absolute difference from the server's own
    durations. Failures and token counts must agree exactly.
    """

    rate: float
    concurrency: int
    requests: int
    tokens: int
    lateness_p99_ms: float
    ttft_error_p50_ms: float
    ttft_error_p99_ms: float
    tpot_error_p99_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One load of a timing plan, replayed once in each trial.

    ``mode`` ``open``: requests are sent at their intended arrivals, which are ``arrivals`` (``constant``, ``poisson``
    with ``seed``, or ``file``) at ``rate`` requests/s. ``closed``: ``concurrency`` requests are in flight. ``requests``
    of ``max_tokens`` output tokens each; ``canaries`` of them are canary prompts. ``trace`` is the frozen trace.
    """

    name: str
    mode: Literal["open", "closed"]
    arrivals: Literal["constant", "poisson", "file"] | None
    rate: float | None
    seed: str | None
    concurrency: int | None
    requests: int
    canaries: int
    max_tokens: int
    trace: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One primary comparison: ``metric`` of ``candidate`` over that of ``control`` in ``cell``, and which is better."""

    candidate: str
    control: str
    cell: str
    metric: str
    better: Literal["lower", "higher"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingRules:
    """The timing plan of one length, as declared; :mod:`pytest_kvqual.study.plan` makes the blocks of it.

    ``arms`` are timed in each of ``blocks`` blocks, ``null_arm`` alone in ``null_pairs`` further pairs of blocks (A/A).
    Each trial sends ``warm_up`` requests, waits ``settle_s`` seconds before each of ``cells``, and replays them in
    order. ``comparisons`` are the declared family: Holm's correction at ``alpha`` is over all of them. ``confidence``
    is the least coverage of the median's interval. ``practical``: the least relative improvement that matters (0.05 is
    5 %).

    A trial is void where its dispatch lateness p99 is above ``lateness_fraction`` of the practical effect, where the
    client's mean TTFT differs from the server's own by more than ``server_ttft_ms`` milliseconds, where more than
    ``failed_share`` (0 to 1) of its requests failed, or, with ``cold``, where a prefix was found in the cache.
    """

    arms: tuple[str, ...]
    blocks: int
    null_arm: str
    null_pairs: int
    warm_up: int
    settle_s: float
    cells: tuple[Cell, ...]
    comparisons: tuple[Comparison, ...]
    alpha: float
    confidence: float
    practical: float
    lateness_fraction: float
    server_ttft_ms: float
    failed_share: float
    cold: bool
    panel: Path
    plan: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class GatePlan:
    """One gate of the study's order. ``planned`` gates are declared and have no implementation yet."""

    name: str
    state: GateState
    timing: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """One qualification, declared. ``directory`` holds ``study.toml`` and, once frozen, ``lock.json``.

    ``preservation`` holds the rules of each scored task, by its gate; ``gsm8k_source`` is None without gsm8k.
    ``timing`` holds the timing plan of each length that has one; ``fidelity`` is None where nothing is timed.
    ``missing`` are the declared files that depend on the model's tokenizer or weights and are not there yet: such a
    study is unprepared, and runs no gate.
    """

    name: str
    directory: Path
    platform: Literal["cpu", "gpu"]
    model: Model
    engine: Engine
    arms: Mapping[str, Arm]
    lengths: Mapping[int, Length]
    schedule: Schedule
    determinism: Determinism
    gates: tuple[GatePlan, ...]
    oracle: OracleRules
    parity: ParityRules
    nll: NllRules
    preservation: Mapping[str, PreservationRules]
    gsm8k_source: Gsm8kSource | None
    fidelity: FidelityRules | None
    timing: Mapping[int, TimingRules]
    waivers: tuple[Waiver, ...]
    missing: tuple[Path, ...] = ()

    def controls(self) -> tuple[Arm, ...]:
        """The control arms, in the order of the study."""
        return tuple(arm for arm in self.arms.values() if arm.role == "control")

    def waived(self, arm: str, gate: str) -> tuple[str, ...]:
        """The kinds of finding of ``gate`` that are waived for ``arm``; none for an arm that is no control."""
        return tuple(waiver.finding for waiver in self.waivers if (waiver.arm, waiver.gate) == (arm, gate))

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
