"""The taps: what a window is told of an engine's steps, and that nothing of them stays behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from synthetic_engine import BLOCK, SyntheticEngine, workload

from pytest_kvqual.worker.attributes import Attributes
from pytest_kvqual.worker.taps import layer_order
from pytest_kvqual.worker.wire import WorkerError

FIRST, SECOND = "layers.0.attn", "layers.1.attn"
SECTIONS = ("row_map", "stale-maps", "routing", "shifted-outputs", "placement", "replay")


def _findings(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name]["kinds"] for name in SECTIONS if record[name]["findings_total"]}


def _run(engine: SyntheticEngine, *, seed: int = 1, **options: bool) -> dict[str, Any]:
    window = engine.open(**options)
    workload(engine, seed=seed)
    record: dict[str, Any] = window.finish()
    return record


@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("kv_format", ["k16v16", "k16v8"])
@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_engine_has_no_findings(kv_format: str, seed: int, probe: bool) -> None:
    """Every cell and row is checked and nothing is objected to, whatever the tokens, blocks and stale contents."""
    record = _run(SyntheticEngine(kv_format, seed=seed), seed=seed, probe=probe, fills=True)
    assert _findings(record) == {}
    assert record["row_map"]["self_test"] == record["shifted-outputs"]["self_test"] == "caught"
    assert (record["steps"], record["layers"], record["probe"], record["fills"]) == (12, 2, probe, True)
    scheduled = record["rows"]["scheduled"]
    assert record["row_map"]["checked"] == scheduled > 60
    assert record["routing"]["writes_checked"] == record["placement"]["rows_checked"] == 2 * scheduled
    assert record["routing"]["padding_rows"] == 2 * (2 + BLOCK)
    assert record["replay"]["rows_compared"] == {
        "nan": 2 * scheduled,
        "large": 2 * scheduled,
        "other-request": 2 * scheduled,
    }
    assert record["placement"]["worst_ratio"] <= 1
    for condition in ("mixed", "chunked", "below-block", "at-block", "above-block", "reused-block", "shrinking-batch"):
        assert record["conditions"][condition] > 0


def test_a_fault_beneath_the_taps_is_seen_and_stays_when_they_go() -> None:
    """The taps call what was there before them, a changed function included, and put exactly it back."""
    engine = SyntheticEngine()
    impl = engine.kvqual_layers()[FIRST].impl
    original = impl.do_kv_cache_update

    def late(layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        original(layer, key, value, kv_cache, torch.where(slot_mapping >= 0, slot_mapping ^ 1, -1))

    impl.do_kv_cache_update = late
    record = _run(engine)
    assert record["routing"]["kinds"]["wrong-cell"] > 0
    assert "wrong-slot" not in record["routing"]["kinds"]
    assert all(FIRST in line for line in record["routing"]["findings"])
    assert impl.do_kv_cache_update is late


def test_taps_restore_what_they_found() -> None:
    """After a window the layers carry no attribute that was not there before, and a new window may open."""
    engine = SyntheticEngine()
    before = {name: dict(vars(layer.impl)) for name, layer in engine.kvqual_layers().items()}
    for _ in range(2):
        window = engine.open()
        assert window.installed
        assert all(set(vars(layer.impl)) - set(before[name]) for name, layer in engine.kvqual_layers().items())
        window.finish()
        assert not window.installed
        assert {name: dict(vars(layer.impl)) for name, layer in engine.kvqual_layers().items()} == before


def test_attributes_are_put_back_last_first() -> None:
    """An attribute of the instance comes back, one of the class is uncovered, however often both were replaced."""

    class Holder:
        name = "of the class"

    holder = Holder()
    holder.other = "of the instance"  # type: ignore[attr-defined]  # that is the point
    attributes = Attributes()
    assert not attributes
    for number in range(2):
        attributes.replace(holder, "name", number)
        attributes.replace(holder, "other", number)
    assert attributes
    assert (holder.name, holder.other) == (1, 1)  # type: ignore[attr-defined, comparison-overlap]
    attributes.restore()
    assert not attributes
    assert vars(holder) == {"other": "of the instance"}
    assert holder.name == "of the class"


def test_a_request_in_flight_before_the_window_is_a_finding() -> None:
    """A window that opened over a running request says so, and does not call half of it checked."""
    engine = SyntheticEngine()
    engine.step([("a", 3)], new={"a": [1, 2, 3]})
    window = engine.open()
    engine.step([("a", 1)])
    record: Any = window.finish()
    assert record["routing"]["kinds"]["unknown-request"] == 1
    assert record["routing"]["kinds"]["unseen-history"] == 2
    assert record["placement"]["rows_checked"] == 0


def test_a_permuted_row_map_is_found() -> None:
    """A runner whose batch order is not the order of its rows is a finding of the row map."""
    engine = SyntheticEngine()
    window = engine.open()
    order = engine.model_runner.input_batch
    update = engine.kvqual_layers()[FIRST].impl.do_kv_cache_update

    def rotate(*args: Any) -> None:
        order.req_ids = order.req_ids[1:] + order.req_ids[:1]
        update(*args)

    engine.kvqual_layers()[FIRST].impl.do_kv_cache_update = rotate
    engine.step([("a", 3), ("b", 3)], new={"a": [1, 2, 3], "b": [4, 5, 6]})
    record: Any = window.finish()
    assert record["row_map"]["kinds"] == {"wrong-token": 6}


def test_requests_that_the_runner_lacks_are_an_error() -> None:
    """A batch that does not hold what was scheduled cannot be followed: one line says how many are missing."""
    engine = SyntheticEngine()
    window = engine.open()
    update = engine.kvqual_layers()[FIRST].impl.do_kv_cache_update

    def lose(*args: Any) -> None:
        engine.model_runner.input_batch.req_ids = ["a", "stranger"]
        update(*args)

    engine.kvqual_layers()[FIRST].impl.do_kv_cache_update = lose
    with pytest.raises(WorkerError, match="holds 1 of the 2 requests that the scheduler scheduled, expected all"):
        engine.step([("a", 3), ("b", 3)], new={"a": [1, 2, 3], "b": [4, 5, 6]})
    window.remove()


def test_idle_requests_of_the_batch_are_no_rows() -> None:
    """A request that the runner keeps in its batch and that was not scheduled has no row."""
    engine = SyntheticEngine()
    window = engine.open()
    engine.step([("a", 3), ("b", 3)], new={"a": [1, 2, 3], "b": [4, 5, 6]})
    update = engine.kvqual_layers()[FIRST].impl.do_kv_cache_update

    def keep(*args: Any) -> None:
        engine.model_runner.input_batch.req_ids = ["a", "b"]
        update(*args)

    engine.kvqual_layers()[FIRST].impl.do_kv_cache_update = keep
    engine.step([("b", 1)])
    record: Any = window.finish()
    assert _findings(record) == {}
    assert record["rows"]["scheduled"] == 7


def test_a_value_beyond_the_formats_range_is_held_to_its_clamped_encoding() -> None:
    """V beyond 448 times its scale is stored clamped by the backend and expected clamped by the oracle."""
    engine = SyntheticEngine()
    engine._tables[FIRST][2][5] = 1e4
    window = engine.open()
    engine.step([("a", 9)], new={"a": [5, 1, 5, 2, 5, 3, 5, 4, 5]})
    record: Any = window.finish()
    assert _findings(record) == {}


def test_a_layer_whose_attention_is_not_seen_is_not_counted() -> None:
    """A layer that attends past its tap is missing from the layers and rows that placement checked."""
    engine = SyntheticEngine()
    window = engine.open()
    impl = engine.kvqual_layers()[SECOND].impl
    impl.forward = type(impl).forward.__get__(impl)
    workload(engine)
    record: Any = window.finish()
    assert (record["layers"], record["placement"]["layers"]) == (2, 1)
    assert record["placement"]["rows_checked"] == record["row_map"]["checked"]
    assert record["routing"]["writes_checked"] == 2 * record["row_map"]["checked"]


def test_a_call_without_metadata_is_handed_on() -> None:
    """A profiling call has no metadata: the backend is called, and the window is told nothing."""
    engine = SyntheticEngine()
    layer = engine.kvqual_layers()[FIRST]
    seen: list[tuple[Any, ...]] = []

    def forward(*args: Any, **kwargs: Any) -> str:
        seen.append((*args, kwargs))
        return "result"

    layer.impl.forward = forward
    window = engine.open()
    query = torch.zeros(1, 6, 16)
    assert layer.impl.forward(layer, query, 1, 2, 3, None, 4, 5, scale=6) == "result"
    assert seen == [(layer, query, 1, 2, 3, None, 4, 5, {"scale": 6})]
    record: Any = window.finish()
    assert record["steps"] == record["placement"]["findings_total"] == 0
    assert layer.impl.forward is forward


# -- the scheduler's decisions ------------------------------------------------------------------------------------


def _scheduled(**given: Any) -> SimpleNamespace:
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    vars(cached).update(given.pop("cached", {}))
    return SimpleNamespace(
        **{
            "finished_req_ids": set(),
            "scheduled_new_reqs": [],
            "num_scheduled_tokens": {},
            **given,
            "scheduled_cached_reqs": cached,
        }
    )


def _new(name: str, tokens: list[int] | None, blocks: list[int], computed: int = 0, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        req_id=name, prompt_token_ids=tokens, block_ids=(blocks,), num_computed_tokens=computed, **more
    )


class _Spy:
    """Records what a window is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def tokens(self, request: str) -> tuple[int, ...]:
        return (7, 8, 9)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.told.append((name, *args, *([kwargs] if kwargs else [])))


def _spied() -> tuple[Any, _Spy]:
    taps, spy = SyntheticEngine().open(), _Spy()
    taps.remove()
    taps.window = spy  # type: ignore[assignment]  # a spy
    return taps, spy


def test_decisions_reach_the_window_in_order() -> None:
    """What left comes first, then new requests, then further blocks and what was resumed."""
    taps, spy = _spied()
    taps.begin_step(
        _scheduled(
            finished_req_ids={"old"},
            preempted_req_ids={"thrown"},
            scheduled_new_reqs=[
                _new("fresh", [1, 2], [4], 0),
                _new("again", [1, 2], [5, 6], 4, prefill_token_ids=[1, 2, 3]),
                _new("bare", None, [8]),
            ],
            cached={
                "req_ids": ["grown", "same", "resumed", "empty"],
                "new_block_ids": [([3],), None, ([9, 2],), None],
                "num_computed_tokens": [5, 6, 4, 0],
                "resumed_req_ids": {"resumed", "empty"},
            },
        )
    )
    assert spy.told == [
        ("release", "old"),
        ("release", "thrown"),
        ("admit", "fresh", {"tokens": [1, 2], "blocks": [4], "cached": 0}),
        ("admit", "again", {"tokens": [1, 2, 3], "blocks": [5, 6], "cached": 4}),
        ("admit", "bare", {"tokens": (), "blocks": [8], "cached": 0}),
        ("grant", "grown", [3]),
        ("admit", "resumed", {"tokens": (7, 8, 9), "blocks": [9, 2], "cached": 4}),
        ("admit", "empty", {"tokens": (7, 8, 9), "blocks": (), "cached": 0}),
    ]


def test_sampled_tokens_reach_the_window() -> None:
    """Each request's tokens of the step are told; an output without requests tells nothing."""
    taps, spy = _spied()
    taps.end_step(None)
    taps.end_step(SimpleNamespace())
    taps.end_step(SimpleNamespace(req_ids=[], sampled_token_ids=[]))
    assert spy.told == []
    taps.end_step(SimpleNamespace(req_ids=["a", "b"], sampled_token_ids=[[1], [2, 3]]))
    assert spy.told == [("sampled", "a", [1]), ("sampled", "b", [2, 3])]


def test_a_step_is_opened_once_by_its_first_call() -> None:
    """The rows are those of the runner's order at the first tap; a step that made no call opens none."""
    taps, spy = _spied()
    step = _scheduled(
        scheduled_new_reqs=[_new("b", [1], [4], 3)],
        num_scheduled_tokens={"a": 2, "b": 1},
        cached={"req_ids": ["a"], "new_block_ids": [None], "num_computed_tokens": [5]},
    )
    taps.begin_step(step)
    taps.end_step(None)
    taps._planned()
    assert [name for name, *_ in spy.told] == ["admit"]
    taps.begin_step(step)
    taps._runner.runner.input_batch.req_ids = ["b", "a"]
    taps._runner.runner.input_ids.gpu = "fed"
    taps._planned()
    taps._planned()
    assert spy.told[-1] == ("begin", [("b", 3, 1), ("a", 5, 2)], "fed")
    assert [name for name, *_ in spy.told] == ["admit", "admit", "begin"]


def test_layers_are_ordered_by_number() -> None:
    """Layer 10 comes after layer 9, and a block of an outer module after those of the one before."""
    names = [
        "model.layers.10.attn",
        "model.layers.9.attn",
        "model.layers.0.attn",
        "draft.1.layers.0",
        "draft.0.layers.3",
    ]
    assert layer_order(dict.fromkeys(names)) == [
        "model.layers.0.attn",
        "draft.0.layers.3",
        "draft.1.layers.0",
        "model.layers.9.attn",
        "model.layers.10.attn",
    ]
