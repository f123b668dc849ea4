"""Static taps inside a recorded step: what they hand to the window is the step that was replayed, faults included."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_engine import (
    BLOCK,
    COLUMNS,
    HEADS,
    INPUTS,
    KV_HEADS,
    REQUESTS,
    SIZE,
    TOKENS,
    Batch,
    GraphEngine,
    RecordingWindow,
)

from pytest_kvqual.worker.graph import RecordedStep
from pytest_kvqual.worker.static_taps import StaticTap
from pytest_kvqual.worker.wire import WorkerError

FULL = [([3, 9], 5, 1), ([7], 2, 1), ([12], 4, 1), ([1], 1, 1)]
NEXT = [([5, 2], 7, 1), ([8], 3, 1), ([14], 1, 1), ([6, 11], 6, 1)]
LONGER = [([5, 2, 10], 9, 1), ([8], 3, 1), ([14], 1, 1), ([6, 11], 6, 1)]
SHRUNK = [([8], 4, 1), ([14], 2, 1)]


@pytest.fixture
def graph() -> GraphEngine:
    """A graph captured with the batch FULL."""
    made = GraphEngine(Batch(FULL, [4, 9, 11, 30]))
    made.capture()
    return made


def test_each_replay_hands_over_its_own_step(graph: GraphEngine) -> None:
    """Batches other than the captured one, growing and shrinking, are handed over as they were fed, layer by layer."""
    for batch in (Batch(NEXT, [5, 6, 7, 8]), Batch(LONGER, [9, 9, 2, 1]), Batch(SHRUNK, [3, 40])):
        window = graph.replay(batch)
        assert list(window.updates) == list(window.attends) == ["a", "b"]
        assert graph.objections(batch, window) == set()
        assert not bool(window.attends["a"]["output"][batch.rows :].any())


def test_stale_maps_are_seen(graph: GraphEngine) -> None:
    """Maps put into fresh tensors leave the captured ones in force, and the tap shows them."""
    batch = Batch(NEXT, [5, 6, 7, 8])
    captured = dict(graph.inputs)
    graph.inputs = {**captured, **{name: captured[name].clone() for name in ("slots", "table", "lengths")}}
    window = graph.replay(batch)
    assert {"slots", "table", "lengths", "output", "cache"} <= graph.objections(batch, window)
    assert torch.equal(window.updates["a"]["slots"], captured["slots"])


def test_padding_rows_mapped_to_slot_zero_are_seen(graph: GraphEngine) -> None:
    """A padding row that writes to slot 0 is in the slot mapping and in the cache."""
    batch = Batch(SHRUNK, [3, 40])
    planted = Batch(SHRUNK, [3, 40])
    planted.slots[batch.rows :] = 0
    assert graph.objections(batch, graph.replay(planted)) == {"slots", "cache"}


def test_a_block_bound_baked_at_capture_is_seen() -> None:
    """Maps and cache are right; the output of the request that outgrew the captured bound is not."""
    graph = GraphEngine(Batch(FULL, [4, 9, 11, 30]))
    for layer in graph.layers.values():
        layer.impl.columns = math.ceil(int(graph.inputs["lengths"].max()) / BLOCK)
    graph.capture()
    assert graph.objections(Batch(NEXT, [5, 6, 7, 8]), graph.replay(Batch(NEXT, [5, 6, 7, 8]))) == set()
    batch = Batch(LONGER, [9, 9, 2, 1])
    assert graph.objections(batch, graph.replay(batch)) == {"output"}


def test_stale_lengths_of_padding_requests_are_seen(graph: GraphEngine) -> None:
    """After the batch shrank, lengths left in the padding requests are in what the tap hands over."""
    graph.objections(Batch(NEXT, [5, 6, 7, 8]), graph.replay(Batch(NEXT, [5, 6, 7, 8])))
    batch, planted = Batch(SHRUNK, [3, 40]), Batch(SHRUNK, [3, 40])
    planted.lengths[batch.requests :] = torch.tensor([1, 6])
    window = graph.replay(planted)
    assert graph.objections(batch, window) == {"lengths"}
    assert window.attends["b"]["lengths"].tolist() == [4, 2, 1, 6]


def test_a_smaller_graph_hands_over_only_its_own_rows(graph: GraphEngine) -> None:
    """A graph of fewer rows, which shares the buffers, does not bring the rows of the larger one along."""
    graph.replay(Batch(NEXT, [5, 6, 7, 8]))
    small = Batch(SHRUNK, [3, 40])
    graph.inputs = {name: getattr(small, name)[: {"starts": 3}.get(name, 2)].clone() for name in INPUTS}

    def forward() -> None:
        layer = graph.layers["a"]
        query, key, value = graph.rows("a", graph.inputs["ids"])
        layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, graph.inputs["slots"])
        metadata = SimpleNamespace(
            block_table=graph.inputs["table"],
            seq_lens=graph.inputs["lengths"],
            query_start_loc=graph.inputs["starts"],
        )
        layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, torch.zeros_like(query))

    graph.tap.install()
    RecordedStep(forward)
    graph.tap.remove()
    window = RecordingWindow()
    assert graph.tap.feed(window) == ("a",)
    assert window.updates["a"]["key"].shape == (2, KV_HEADS, SIZE)
    assert window.attends["a"]["table"].shape == (2, COLUMNS)
    assert window.attends["a"]["starts"].tolist() == [0, 1, 2]


def test_a_layer_past_its_tap_is_not_handed_over(graph: GraphEngine) -> None:
    """A layer whose attention does not run in the graph is missing from what was fed; its cache update is there."""
    impl = graph.layers["b"].impl
    graph.tap.install()
    tapped = impl.forward
    impl.forward = type(impl).forward.__get__(impl)
    RecordedStep(graph.forward)
    impl.forward = tapped
    graph.tap.remove()
    window = RecordingWindow()
    assert graph.tap.feed(window) == ("a",)
    assert (list(window.updates), list(window.attends)) == (["a", "b"], ["a"])
    assert graph.tap.feed(RecordingWindow()) == ()


def test_a_step_that_nobody_read_is_refused(graph: GraphEngine) -> None:
    """Two replays between two feeds are an error: the first of them was overwritten unseen."""
    assert graph.step is not None
    graph.step.replay()
    graph.step.replay()
    with pytest.raises(WorkerError, match="found 2 steps of a since the last feed, expected one"):
        graph.tap.feed(RecordingWindow())


def test_a_step_larger_than_the_buffers_is_refused_at_capture() -> None:
    """A step of more rows than were allocated is refused with both shapes."""
    graph = GraphEngine(Batch(FULL, [4, 9, 11, 30]))
    graph.tap = StaticTap(graph.layers, tokens=TOKENS - 1, requests=REQUESTS, columns=COLUMNS, dtype=torch.bfloat16)
    with pytest.raises(WorkerError, match=r"found key of a of shape \(6, 3, 16\), expected at most \(5, 3, 16\)"):
        graph.capture()


def test_taps_restore_what_they_found(graph: GraphEngine) -> None:
    """After removal an impl carries what it did before, a replaced method included; a second install is refused."""
    impl = graph.layers["a"].impl

    def replaced(*args: Any) -> None:
        pass

    impl.forward = replaced
    before = {name: dict(vars(layer.impl)) for name, layer in graph.layers.items()}
    graph.tap.install()
    assert graph.tap.installed
    with pytest.raises(WorkerError, match="on already"):
        graph.tap.install()
    graph.tap.remove()
    assert not graph.tap.installed
    assert {name: dict(vars(layer.impl)) for name, layer in graph.layers.items()} == before


def test_a_profiling_run_without_metadata_is_passed_through(graph: GraphEngine) -> None:
    """The engine's call without metadata reaches the implementation and no buffer."""
    seen = []
    layer = graph.layers["a"]
    layer.impl.forward = lambda *args: seen.append(args)
    graph.tap.install()
    layer.impl.forward(layer, *[torch.zeros(9, HEADS, SIZE)] * 4, None, torch.zeros(9, HEADS, SIZE))
    graph.tap.remove()
    assert len(seen) == 1
    assert graph.tap.feed(RecordingWindow()) == ()
