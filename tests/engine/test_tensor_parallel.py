"""Two tensor-parallel ranks on a tiny random model: each answers for its own heads, and only for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_model

from pytest_kvqual.capture.oracle import capture_oracle
from pytest_kvqual.models import model_folder
from pytest_kvqual.server import rpc
from pytest_kvqual.server.command import serve_command, worker_config
from pytest_kvqual.server.process import Server, Timeouts, free_port
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Selection
from pytest_kvqual.study.panels import load_panel

pytestmark = pytest.mark.engine

LIMIT_S = 300.0
SUPPORT = Path(__file__).parents[1] / "support"
RANKS = 2
LAYERS, QUERY_HEADS, KV_HEADS, HEAD_SIZE = 2, 4, 2, 32
# K16/V8 reads V with a factor that is not one, and not the same in both layers.
V_SCALES = [0.01, 0.02]
STRANGER = '''
def plant(worker):
    """On one rank the last cell of each write of the second layer is dropped."""
    if worker.rank != 1:
        return
    impl = list(worker.kvqual_layers().values())[1].impl
    original = impl.do_kv_cache_update

    def update(layer, key, value, kv_cache, slot_mapping):
        slots = slot_mapping.clone()
        slots[-1] = -1
        original(layer, key, value, kv_cache, slots)

    impl.do_kv_cache_update = update
    worker.kvqual_undo.append(lambda: delattr(impl, "do_kv_cache_update"))
'''


def write_model(folder: Path, *, kv_heads: int = KV_HEADS) -> Path:
    """The tiny model with the tokenizer of the embedded study."""
    study = load_study("smollm2-cpu")
    return tiny_model.write(
        folder / "model",
        tokenizer=model_folder(study.model),
        layers=LAYERS,
        query_heads=QUERY_HEADS,
        kv_heads=kv_heads,
        head_size=HEAD_SIZE,
        vocabulary=study.model.vocabulary,
    )


def two_ranks(name: str, folder: Path) -> Selection:
    """The arm of the embedded study for two ranks of the tiny model, with ``folder`` on its import path."""
    selection = select(load_study("smollm2-cpu"), arm=name, length=1024, cache_bytes=16 << 20)
    engine = selection.study.engine
    kept = tuple(flag for flag in engine.flags if not flag.startswith(("--distributed-executor", "--hf-overrides")))
    engine = replace(
        engine,
        flags=(*kept, "--distributed-executor-backend=mp", f"--tensor-parallel-size={RANKS}"),
        environment={**engine.environment, "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    study = replace(selection.study, engine=engine)
    arm = replace(selection.arm, pythonpath=(folder, SUPPORT), after_init=("step_recorder:install",))
    return replace(selection, study=study, arm=arm)


@contextmanager
def serving(selection: Selection, model: Path, log: Path) -> Iterator[Server]:
    """The selection's server."""
    port = free_port()
    scales = V_SCALES if selection.arm.scales is not None else None
    command = serve_command(
        selection,
        model=model,
        port=port,
        worker_config=worker_config(selection, model=model, v_scales=scales),
        python=Path(sys.executable),
        inherited=os.environ,
    )
    with Server.start(command, port=port, log=log, timeouts=Timeouts(boot_s=LIMIT_S)) as server:
        yield server


def oracle(server: Server, selection: Selection, fault: str | None) -> list[dict[str, Any]]:
    """Both ranks' records of one pass over the short requests of the oracle panel, in rank order."""
    study, length = selection.study, selection.length
    panel = load_panel(length.panels["oracle"], task="oracle", length=length.tokens, vocabulary=study.model.vocabulary)
    short = tuple(item for item in panel.items if len(item.prompt) <= study.oracle.poison_prompt_tokens)
    found = capture_oracle(
        server,
        replace(panel, items=short),
        fault=fault,
        model=study.model.name,
        schedule=study.schedule,
        wave_size=length.wave_size,
        timeout_s=LIMIT_S,
    )
    records: Any = found["records"]
    assert [record["rank"] for record in records] == list(range(RANKS))
    return list(records)


def findings(record: dict[str, Any]) -> list[str]:
    """Every line of every gate of one rank's record."""
    parts = [part for part in record.values() if isinstance(part, dict) and "findings_total" in part]
    assert len(parts) >= 3
    lines = [line for part in parts for line in part["findings"]]
    assert bool(lines) == bool(sum(part["findings_total"] for part in parts))
    return lines


def identify(server: Server, heads: int) -> list[dict[str, Any]]:
    """Both ranks' identities: each has ``heads`` KV heads in its caches and exactly its part of the weight files."""
    identities: Any = rpc.call(
        server.base_url, "kvqual_identity", {"parts": ["layers", "parameters", "scales"]}, timeout_s=LIMIT_S
    )
    assert [found["rank"] for found in identities] == list(range(RANKS))
    for found in identities:
        assert [layer["cache_shape"][1] for layer in found["layers"]] == [heads] * LAYERS
        parameters = found["parameters"]
        assert parameters["loaded"] == parameters["expected"]
        assert parameters["now"] == parameters["expected"]
    return list(identities)


def check_healthy(records: list[dict[str, Any]]) -> None:
    """Nothing found on any rank, and nothing left unchecked."""
    for record in records:
        assert findings(record) == []
        assert record["row_map"]["self_test"] == "caught"
        assert record["layers"] == LAYERS
        # Every scheduled row in both layers, by each rank for its own heads.
        assert record["routing"]["writes_checked"] == record["row_map"]["checked"] * LAYERS > 0
        assert record["routing"]["cells_checked"] > 0
        assert record["placement"]["rows_checked"] == record["routing"]["writes_checked"]


@pytest.mark.parametrize("arm", ["native", "candidate"])
def test_each_rank_answers_for_its_heads(arm: str, tmp_path: Path) -> None:
    """Each rank holds its slices of weights and heads and checks healthy; a fault on rank 1 is found there only."""
    (tmp_path / "stranger.py").write_text(STRANGER)
    selection = two_ranks(arm, tmp_path)
    with serving(selection, write_model(tmp_path), tmp_path / "server.log") as server:
        identities = identify(server, KV_HEADS // RANKS)
        first, second = (found["parameters"]["expected"] for found in identities)
        sharded = {name for name in first if first[name] != second[name]}
        assert sharded == {name for name in first if "norm" not in name}

        check_healthy(oracle(server, selection, None))
        healthy, broken = oracle(server, selection, "stranger:plant")
        # Layer 1 is the last: what it attends is summed over the ranks, but no later cache depends on it.
        assert findings(healthy) == []
        assert findings(broken)
        assert all("layers.1." in line for line in findings(broken)), findings(broken)
        # The scheduler is in the core's process, and these workers are not.
        assert rpc.call(server.base_url, "hold", 4, timeout_s=10) == [{"found": False}] * RANKS
        taps = rpc.call(server.base_url, "kvqual_taps", timeout_s=10)
        assert taps == [{"installed": False, "faults": 0, "held": 0}] * RANKS


def test_one_kv_head_is_kept_by_both_ranks(tmp_path: Path) -> None:
    """With fewer KV heads than ranks each rank keeps the head, K and V weights included, and both check healthy."""
    selection = two_ranks("candidate", tmp_path)
    with serving(selection, write_model(tmp_path, kv_heads=1), tmp_path / "server.log") as server:
        first, second = (found["parameters"]["expected"] for found in identify(server, 1))
        assert first["model.layers.0.self_attn.qkv_proj.weight"] != second["model.layers.0.self_attn.qkv_proj.weight"]
        check_healthy(oracle(server, selection, None))
