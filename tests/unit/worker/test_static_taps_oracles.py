"""Static taps feed the oracle window after graph replays: green when nothing is wrong, red in the claiming gate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_engine import BLOCK, HEADS, KV_HEADS, SCALE, SIZE, Batch, GraphEngine

from pytest_kvqual.kv import formats
from pytest_kvqual.oracles.window import LayerView, Window

Plant = Callable[[int, Batch, GraphEngine], None]

PROMPTS = {"x": [3, 7, 9, 4, 1, 8, 2, 30, 31, 32], "y": [11, 5, 12, 6], "z": [20, 21, 22, 23, 24]}
BLOCKS = {"x": [5, 15, 10], "y": [8], "z": [14, 2]}
# (request, rows) in row order: prefills, chunks and decodes over block boundaries, growing and shrinking.
STEPS = [
    [("x", 3), ("y", 2)],
    [("y", 1), ("x", 3), ("z", 2)],
    [("x", 1), ("z", 2), ("y", 1)],
    [("x", 2), ("z", 1)],
    [("x", 1)],
]


def _run(plant: Plant | None = None, *, baked: bool = False) -> dict[str, Any]:
    graph = GraphEngine(Batch([([3, 9], 5, 1), ([7], 2, 1), ([12], 4, 1), ([1], 1, 1)], [4, 9, 11, 30]))
    if baked:
        for layer in graph.layers.values():
            layer.impl.columns = math.ceil(int(graph.inputs["lengths"].max()) / BLOCK)
    graph.capture()
    window = Window(
        [
            LayerView(
                name=name,
                cache=layer.kv_cache,
                codec=formats.declared("k16v16"),
                v_scale=1.0,
                query_heads=HEADS,
                kv_heads=KV_HEADS,
                head_size=SIZE,
                softmax_scale=SCALE,
            )
            for name, layer in graph.layers.items()
        ],
        block_size=BLOCK,
        rounding=float(torch.finfo(torch.bfloat16).eps) / 2,
    )
    window.open()
    computed: dict[str, int] = {}
    for number, step in enumerate(STEPS):
        for name in set(computed) - {name for name, _ in step}:
            window.release(name)
            del computed[name]
        requests, ids, rows = [], [], []
        for name, count in step:
            if name not in computed:
                window.admit(name, tokens=PROMPTS[name], blocks=BLOCKS[name])
                computed[name] = 0
            start = computed[name]
            rows.append((name, start, count))
            ids += PROMPTS[name][start : start + count]
            computed[name] += count
            requests.append((BLOCKS[name], computed[name], count))
        batch = Batch(requests, ids)
        window.begin(rows, batch.ids.clone())
        if plant is not None:
            plant(number, batch, graph)
        graph.run(batch)
        assert graph.tap.feed(window) == ("a", "b")
    record: dict[str, Any] = window.finish()
    return record


def _red(record: dict[str, Any]) -> set[str]:
    sections = ("row_map", "stale-maps", "routing", "shifted-outputs", "placement")
    return {name for name in sections if record[name]["findings_total"]}


def test_healthy_replays_are_green() -> None:
    """Every write, map and row of every replay is checked, and nothing is objected to."""
    record = _run()
    assert _red(record) == set()
    scheduled = sum(count for step in STEPS for _, count in step)
    assert record["rows"]["scheduled"] == record["row_map"]["checked"] == scheduled
    assert record["routing"]["writes_checked"] == record["placement"]["rows_checked"] == 2 * scheduled
    assert record["stale-maps"]["maps_changed"] == len(STEPS) - 1
    assert record["routing"]["padding_rows"] > 0


def _stale(*names: str) -> Plant:
    """Steps after the first put these maps into fresh tensors, so that the captured ones stay."""

    def plant(number: int, batch: Batch, graph: GraphEngine) -> None:
        if number:
            for name in names:
                setattr(batch, name, graph.inputs[name].clone())

    return plant


def _slot_zero(number: int, batch: Batch, graph: GraphEngine) -> None:
    batch.slots[batch.rows :] = 0


def _padding_lengths(number: int, batch: Batch, graph: GraphEngine) -> None:
    if number:
        batch.lengths[batch.requests :] = graph.inputs["lengths"][batch.requests :]


@pytest.mark.parametrize(
    ("plant", "baked", "claimed"),
    [
        (_stale("table"), False, "stale-maps"),
        (_stale("lengths"), False, "stale-maps"),
        (_stale("starts"), False, "stale-maps"),
        (_stale("slots"), False, "routing"),
        (_slot_zero, False, "routing"),
        (_padding_lengths, False, "stale-maps"),
        (None, True, "placement"),
    ],
    ids=["table", "lengths", "starts", "slots", "slot-zero", "padding-lengths", "baked-bound"],
)
def test_a_fault_of_replays_is_found_by_its_gate(plant: Plant | None, baked: bool, claimed: str) -> None:
    """Each planted fault is a finding of the gate that claims it."""
    assert claimed in _red(_run(plant, baked=baked))
