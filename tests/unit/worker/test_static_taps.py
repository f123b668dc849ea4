"""Static taps inside a recorded step: what they hand to the window is the step that was replayed, faults included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_kvqual.kv.backends import masked, reference
from pytest_kvqual.worker.graph import RecordedStep
from pytest_kvqual.worker.static_taps import StaticTap
from pytest_kvqual.worker.wire import WorkerError

BLOCK, BLOCKS, HEADS, KV_HEADS, SIZE = 4, 16, 6, 3, 16
TOKENS, REQUESTS, COLUMNS = 6, 4, 3
SCALE = SIZE**-0.5
INPUTS = ("ids", "slots", "table", "lengths", "starts")


class _Impl:
    def __init__(self) -> None:
        self.num_heads, self.num_kv_heads, self.head_size = HEADS, KV_HEADS, SIZE
        # What a launch that was sized on the host would have captured.
        self.columns = COLUMNS

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        masked.write(key, value, kv_cache, slot_mapping)

    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, output: Any) -> Any:
        return masked.attend(
            query,
            kv_cache,
            metadata.block_table[:, : self.columns],
            metadata.seq_lens,
            metadata.query_start_loc,
            scale=SCALE,
            output=output,
        )


class _Batch:
    """One decode step padded to the captured size: requests with ``(blocks, length)``, one row each."""

    def __init__(self, requests: Sequence[tuple[Sequence[int], int]], ids: Sequence[int]) -> None:
        self.rows = len(requests)
        pad = TOKENS - self.rows
        self.ids = torch.tensor([*ids, *[0] * pad])
        self.slots = torch.tensor(
            [blocks[(n - 1) // BLOCK] * BLOCK + (n - 1) % BLOCK for blocks, n in requests] + [-1] * pad
        )
        self.table = torch.zeros(REQUESTS, COLUMNS, dtype=torch.int32)
        for row, (blocks, _) in enumerate(requests):
            self.table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        idle = REQUESTS - self.rows
        self.lengths = torch.tensor([n for _, n in requests] + [0] * idle, dtype=torch.int32)
        self.starts = torch.tensor([*range(self.rows + 1), *[self.rows] * idle], dtype=torch.int32)


class _Graph:
    """Two layers whose step is captured once over static inputs, with the taps on."""

    def __init__(self, first: _Batch) -> None:
        random = torch.Generator().manual_seed(0)
        self.layers = {
            name: SimpleNamespace(
                impl=_Impl(),
                kv_cache=torch.randn(BLOCKS, KV_HEADS, BLOCK, 2 * SIZE, generator=random).bfloat16(),
                weights=[torch.randn(50, n * SIZE, generator=random).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS)],
            )
            for name in ("a", "b")
        }
        # What each cache must hold after every healthy step.
        self.ledger = {name: layer.kv_cache.clone() for name, layer in self.layers.items()}
        self.inputs = {name: getattr(first, name).clone() for name in INPUTS}
        self.tap = StaticTap(self.layers, tokens=TOKENS, requests=REQUESTS, columns=COLUMNS, dtype=torch.bfloat16)
        self.step: RecordedStep | None = None

    def rows(self, name: str, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = (
            weight.index_select(0, ids).view(len(ids), -1, SIZE) for weight in self.layers[name].weights
        )
        return query, key, value

    def forward(self) -> None:
        inputs = self.inputs
        metadata = SimpleNamespace(
            block_table=inputs["table"], seq_lens=inputs["lengths"], query_start_loc=inputs["starts"]
        )
        for name, layer in self.layers.items():
            query, key, value = self.rows(name, inputs["ids"])
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, inputs["slots"])
            output = torch.empty(TOKENS, HEADS * SIZE, dtype=torch.bfloat16)
            layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, output)

    def capture(self) -> None:
        self.tap.install()
        self.step = RecordedStep(self.forward)
        self.tap.remove()
        self.tap.skip()
        for name, layer in self.layers.items():
            self.ledger[name].copy_(layer.kv_cache)

    def replay(self, batch: _Batch, *, skip: Sequence[str] = ()) -> _Window:
        """Copies the batch into the captured inputs, ``skip`` excepted, and replays."""
        for name in INPUTS:
            if name not in skip:
                self.inputs[name].copy_(getattr(batch, name))
        assert self.step is not None
        self.step.replay()
        window = _Window()
        assert self.tap.feed(window) == ("a", "b")
        return window

    def objections(self, batch: _Batch, window: _Window) -> set[str]:
        """Which of the tensors handed over are not those of ``batch``, by the healthy reference backend."""
        found = set()
        rows = batch.rows
        for name in self.layers:
            query, key, value = self.rows(name, batch.ids)
            reference.write(key, value, self.ledger[name], batch.slots)
            expected = torch.zeros_like(query)
            reference.attend(
                query[:rows],
                self.ledger[name],
                batch.table[:rows],
                batch.lengths[:rows],
                batch.starts[: rows + 1],
                scale=SCALE,
                output=expected[:rows],
            )
            tapped = {**window.updates[name], **window.attends[name]}
            found |= {
                what
                for what, right in (
                    ("key", key),
                    ("value", value),
                    ("query", query),
                    ("slots", batch.slots),
                    ("table", batch.table.long()),
                    ("lengths", batch.lengths.long()),
                    ("starts", batch.starts.long()),
                )
                if not torch.equal(tapped[what], right)
            }
            if not torch.allclose(tapped["output"].float(), expected.float(), rtol=2**-6, atol=2**-6):
                found.add("output")
            if not torch.equal(self.layers[name].kv_cache, self.ledger[name]):
                found.add("cache")
        return found


class _Window:
    """Keeps what it is given; calls ``write`` and ``run`` as the oracle window does."""

    def __init__(self) -> None:
        self.updates: dict[str, dict[str, torch.Tensor]] = {}
        self.attends: dict[str, dict[str, torch.Tensor]] = {}

    def update(
        self,
        layer: str,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        write: Callable[..., Any],
    ) -> None:
        write(key, value)
        self.updates[layer] = {"key": key, "value": value, "slots": slot_mapping}

    def attend(
        self,
        layer: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        output: torch.Tensor,
        run: Callable[..., Any],
    ) -> object:
        run(query, key, value)
        self.attends[layer] = {
            "query": query,
            "table": block_table,
            "lengths": seq_lens,
            "starts": query_start_loc,
            "output": output,
        }
        return None


FULL = [([3, 9], 5), ([7], 2), ([12], 4), ([1], 1)]
NEXT = [([5, 2], 7), ([8], 3), ([14], 1), ([6, 11], 6)]
LONGER = [([5, 2, 10], 9), ([8], 3), ([14], 1), ([6, 11], 6)]
SHRUNK = [([8], 4), ([14], 2)]


@pytest.fixture
def graph() -> _Graph:
    """A graph captured with the batch FULL."""
    made = _Graph(_Batch(FULL, [4, 9, 11, 30]))
    made.capture()
    return made


def test_each_replay_hands_over_its_own_step(graph: _Graph) -> None:
    """Batches other than the captured one, growing and shrinking, are handed over as they were fed, layer by layer."""
    for batch in (_Batch(NEXT, [5, 6, 7, 8]), _Batch(LONGER, [9, 9, 2, 1]), _Batch(SHRUNK, [3, 40])):
        window = graph.replay(batch)
        assert list(window.updates) == list(window.attends) == ["a", "b"]
        assert graph.objections(batch, window) == set()
        assert not bool(window.attends["a"]["output"][batch.rows :].any())


def test_stale_maps_are_seen(graph: _Graph) -> None:
    """Maps put into fresh tensors leave the captured ones in force, and the tap shows them."""
    batch = _Batch(NEXT, [5, 6, 7, 8])
    captured = dict(graph.inputs)
    graph.inputs = {**captured, **{name: captured[name].clone() for name in ("slots", "table", "lengths")}}
    window = graph.replay(batch)
    assert {"slots", "table", "lengths", "output", "cache"} <= graph.objections(batch, window)
    assert torch.equal(window.updates["a"]["slots"], captured["slots"])


def test_padding_rows_mapped_to_slot_zero_are_seen(graph: _Graph) -> None:
    """A padding row that writes to slot 0 is in the slot mapping and in the cache."""
    batch = _Batch(SHRUNK, [3, 40])
    planted = _Batch(SHRUNK, [3, 40])
    planted.slots[batch.rows :] = 0
    assert graph.objections(batch, graph.replay(planted)) == {"slots", "cache"}


def test_a_block_bound_baked_at_capture_is_seen() -> None:
    """Maps and cache are right; the output of the request that outgrew the captured bound is not."""
    graph = _Graph(_Batch(FULL, [4, 9, 11, 30]))
    for layer in graph.layers.values():
        layer.impl.columns = math.ceil(int(graph.inputs["lengths"].max()) / BLOCK)
    graph.capture()
    assert graph.objections(_Batch(NEXT, [5, 6, 7, 8]), graph.replay(_Batch(NEXT, [5, 6, 7, 8]))) == set()
    batch = _Batch(LONGER, [9, 9, 2, 1])
    assert graph.objections(batch, graph.replay(batch)) == {"output"}


def test_stale_lengths_of_padding_requests_are_seen(graph: _Graph) -> None:
    """After the batch shrank, lengths left in the padding requests are in what the tap hands over."""
    graph.objections(_Batch(NEXT, [5, 6, 7, 8]), graph.replay(_Batch(NEXT, [5, 6, 7, 8])))
    batch, planted = _Batch(SHRUNK, [3, 40]), _Batch(SHRUNK, [3, 40])
    planted.lengths[batch.rows :] = torch.tensor([1, 6])
    window = graph.replay(planted)
    assert graph.objections(batch, window) == {"lengths"}
    assert window.attends["b"]["lengths"].tolist() == [4, 2, 1, 6]


def test_a_smaller_graph_hands_over_only_its_own_rows(graph: _Graph) -> None:
    """A graph of fewer rows, which shares the buffers, does not bring the rows of the larger one along."""
    graph.replay(_Batch(NEXT, [5, 6, 7, 8]))
    small = _Batch(SHRUNK, [3, 40])
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
    window = _Window()
    assert graph.tap.feed(window) == ("a",)
    assert window.updates["a"]["key"].shape == (2, KV_HEADS, SIZE)
    assert window.attends["a"]["table"].shape == (2, COLUMNS)
    assert window.attends["a"]["starts"].tolist() == [0, 1, 2]


def test_a_layer_past_its_tap_is_not_handed_over(graph: _Graph) -> None:
    """A layer whose attention does not run in the graph is missing from what was fed; its cache update is there."""
    impl = graph.layers["b"].impl
    graph.tap.install()
    tapped = impl.forward
    impl.forward = type(impl).forward.__get__(impl)
    RecordedStep(graph.forward)
    impl.forward = tapped
    graph.tap.remove()
    window = _Window()
    assert graph.tap.feed(window) == ("a",)
    assert (list(window.updates), list(window.attends)) == (["a", "b"], ["a"])
    assert graph.tap.feed(_Window()) == ()


def test_a_step_that_nobody_read_is_refused(graph: _Graph) -> None:
    """Two replays between two feeds are an error: the first of them was overwritten unseen."""
    assert graph.step is not None
    graph.step.replay()
    graph.step.replay()
    with pytest.raises(WorkerError, match="found 2 steps of a since the last feed, expected one"):
        graph.tap.feed(_Window())


def test_a_step_larger_than_the_buffers_is_refused_at_capture() -> None:
    """A step of more rows than were allocated is refused with both shapes."""
    graph = _Graph(_Batch(FULL, [4, 9, 11, 30]))
    graph.tap = StaticTap(graph.layers, tokens=TOKENS - 1, requests=REQUESTS, columns=COLUMNS, dtype=torch.bfloat16)
    with pytest.raises(WorkerError, match=r"found key of a of shape \(6, 3, 16\), expected at most \(5, 3, 16\)"):
        graph.capture()


def test_taps_restore_what_they_found(graph: _Graph) -> None:
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


def test_a_profiling_run_without_metadata_is_passed_through(graph: _Graph) -> None:
    """The engine's call without metadata reaches the implementation and no buffer."""
    seen = []
    layer = graph.layers["a"]
    layer.impl.forward = lambda *args: seen.append(args)
    graph.tap.install()
    layer.impl.forward(layer, *[torch.zeros(9, HEADS, SIZE)] * 4, None, torch.zeros(9, HEADS, SIZE))
    graph.tap.remove()
    assert len(seen) == 1
    assert graph.tap.feed(_Window()) == ()
