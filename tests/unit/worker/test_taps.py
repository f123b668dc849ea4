"""The oracle window over a synthetic engine: healthy runs stay green, each planted fault is caught by its gate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from synthetic_engine import BLOCK, SyntheticEngine, workload

from pytest_kvqual.faults import FAULTS
from pytest_kvqual.faults.seeded import seeded
from pytest_kvqual.worker.wire import resolve

PLANTED = [
    (kv_format, name)
    for kv_format in ("k16v16", "k16v8")
    for gate in ("stale-maps", "routing", "shifted-outputs", "placement", "replay")
    for name in seeded(gate, scales=kv_format == "k16v8")
    # The synthetic engine has no chunked prompt long enough, and random bytes in its pool, NaN among them.
    if name != "chunk-sees-only-itself"
]


def _run(engine: SyntheticEngine, fault: str | None = None, seed: int = 1, *, fills: bool = False) -> dict[str, Any]:
    if fault is not None:
        resolve(FAULTS[fault].plant)(engine)
    window = engine.open(probe=fills, fills=fills)
    workload(engine, seed=seed)
    record: dict[str, Any] = window.finish()
    while engine.kvqual_undo:
        engine.kvqual_undo.pop()()
    return record


@pytest.mark.parametrize("kv_format", ["k16v16", "k16v8"])
@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_engine_has_no_findings(kv_format: str, seed: int) -> None:
    """Every cell and row is checked and nothing is objected to, whatever the tokens, blocks and stale contents."""
    record = _run(SyntheticEngine(kv_format, seed=seed), seed=seed)
    assert record["routing"]["findings"] == []
    assert record["placement"]["findings"] == []
    assert record["row_map"] == {**record["row_map"], "findings_total": 0, "self_test": "caught"}
    assert record["steps"] == 12
    assert record["layers"] == 2
    assert record["routing"]["cells_checked"] > 1000
    assert record["routing"]["padding_rows"] == 2 * (2 + BLOCK)
    assert record["placement"]["rows_checked"] == 2 * record["row_map"]["checked"]
    assert record["placement"]["worst_ratio"] <= 1


@pytest.mark.parametrize(("kv_format", "fault"), PLANTED)
def test_a_planted_fault_is_caught_by_the_gate_that_claims_it(kv_format: str, fault: str) -> None:
    """The section of the claiming gate has findings, through the taps as the worker puts them on."""
    claimed = FAULTS[fault].claimed_by
    record = _run(SyntheticEngine(kv_format), fault, fills=claimed == "replay")
    assert record[claimed]["findings_total"] > 0


def test_a_fault_is_gone_once_it_is_taken_back() -> None:
    """The same engine is green before a fault, red with it, and green after it."""
    engine = SyntheticEngine()
    for fault, expected in ((None, 0), ("slot-off-by-one", 1), (None, 0)):
        record = _run(engine, fault)
        assert min(1, record["routing"]["findings_total"]) == expected
        for name in list(engine._requests):
            engine.finish(name)


def test_taps_restore_what_they_found() -> None:
    """After a window the layers carry no attribute that was not there before."""
    engine = SyntheticEngine()
    before = {name: dict(vars(layer.impl)) for name, layer in engine.kvqual_layers().items()}
    window = engine.open()
    assert window.installed
    window.finish()
    assert not window.installed
    assert {name: dict(vars(layer.impl)) for name, layer in engine.kvqual_layers().items()} == before


def test_a_write_to_a_block_that_nobody_holds_is_found() -> None:
    """One flipped byte anywhere in the pool outside the window's blocks is a finding at the end."""
    engine = SyntheticEngine()
    window = engine.open()
    workload(engine)
    engine.kvqual_layers()["layers.1.attn"].kv_cache[0, 2, BLOCK - 1, 0] ^= 1
    record: Any = window.finish()
    assert record["routing"]["findings"] == ["layers.1.attn: block 0 changed and no request of the window holds it"]


def test_a_block_that_changes_before_it_is_granted_is_found() -> None:
    """A write into a free block is found when the block is granted, although its new owner overwrites it."""
    engine = SyntheticEngine()
    window = engine.open()
    engine.step([("a", 3)], new={"a": [1, 2, 3]})
    future = engine._free[-1]
    engine.kvqual_layers()["layers.0.attn"].kv_cache[future] += 1
    engine.step([("b", 3)], new={"b": [4, 5, 6]})
    record: Any = window.finish()
    assert any("changed before any request held it" in line for line in record["routing"]["findings"])


def test_an_empty_window_has_checked_nothing() -> None:
    """A window without steps reports zero everywhere and a self-test that was not passed."""
    engine = SyntheticEngine()
    record: Any = engine.open().finish()
    assert (record["steps"], record["layers"]) == (0, 0)
    assert record["routing"]["cells_checked"] == 0
    assert record["placement"]["rows_checked"] == 0
    assert record["row_map"]["self_test"] == "missed"


def test_a_request_in_flight_before_the_window_is_a_finding() -> None:
    """A window that opened over a running request says so instead of checking half of it."""
    engine = SyntheticEngine()
    engine.step([("a", 3)], new={"a": [1, 2, 3]})
    window = engine.open()
    engine.step([("a", 1)])
    record: Any = window.finish()
    assert record["routing"]["kinds"]["unknown-request"] > 0


def test_a_permuted_row_map_is_found() -> None:
    """A runner whose batch order is not the order of its rows is a finding of the row map."""
    engine = SyntheticEngine()
    window = engine.open()
    order = engine.model_runner.input_batch
    update = engine.kvqual_layers()["layers.0.attn"].impl.do_kv_cache_update

    def rotate(*args: Any) -> None:
        order.req_ids = order.req_ids[1:] + order.req_ids[:1]
        update(*args)

    engine.kvqual_layers()["layers.0.attn"].impl.do_kv_cache_update = rotate
    engine.step([("a", 3), ("b", 3)], new={"a": [1, 2, 3], "b": [4, 5, 6]})
    record: Any = window.finish()
    assert record["row_map"]["findings_total"] > 0


def test_a_value_beyond_the_formats_range_is_held_to_its_clamped_encoding() -> None:
    """V beyond 448 times its scale is stored clamped by the backend and expected clamped by the oracle."""
    engine = SyntheticEngine()
    table = engine._tables["layers.0.attn"][2]
    table[5] = 1e4
    window = engine.open()
    engine.step([("a", 9)], new={"a": [5, 1, 5, 2, 5, 3, 5, 4, 5]})
    record: Any = window.finish()
    assert record["routing"]["findings_total"] == 0
    assert record["placement"]["findings_total"] == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_cannot_pass(value: float) -> None:
    """K that is not finite makes every later row of its request fail placement."""
    engine = SyntheticEngine()
    engine._tables["layers.0.attn"][1][5] = torch.tensor(value)
    window = engine.open()
    engine.step([("a", 4)], new={"a": [5, 1, 2, 3]})
    record: Any = window.finish()
    assert record["placement"]["findings_total"] > 0
    assert isinstance(record["placement"]["worst_ratio"], str)


def test_a_layer_whose_attention_is_not_seen_is_not_counted() -> None:
    """A layer that attends past its tap is missing from the layers and rows that placement checked."""
    engine = SyntheticEngine()
    window = engine.open()
    impl = engine.kvqual_layers()["layers.1.attn"].impl
    impl.forward = type(impl).forward.__get__(impl)
    workload(engine)
    record: Any = window.finish()
    assert record["layers"] == 2
    assert record["placement"]["layers"] == 1
    assert record["placement"]["rows_checked"] == record["row_map"]["checked"]
    assert record["routing"]["writes_checked"] == 2 * record["row_map"]["checked"]
