"""Oracle windows over steps of which some replay a captured graph, through both model runners' ways into a step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from graph_engine import BLOCK, COLUMNS, HEADS, KV_HEADS, REQUESTS, SCALE, SIZE, TOKENS, Batch, GraphEngine  # noqa: E402
from vllm.config import CUDAGraphMode  # noqa: E402 - the engine may be absent
from vllm.forward_context import ForwardContext, override_forward_context  # noqa: E402

from pytest_kvqual.kv import formats  # noqa: E402
from pytest_kvqual.oracles.window import LayerView  # noqa: E402
from pytest_kvqual.worker.taps import OracleTaps  # noqa: E402
from pytest_kvqual.worker.wire import WorkerError  # noqa: E402

Kind = Literal["v1", "v2"]
Plant = Callable[[Batch, GraphEngine], None]

PROMPTS = {"x": [3, 7, 9, 4], "y": [11, 5, 12, 6], "z": [20, 21, 22]}
BLOCKS = {"x": [5, 15, 10], "y": [8, 3], "z": [14, 2]}
SAMPLED = {"x": [30, 31, 32, 33], "y": [40, 41, 42], "z": [22, 1, 2]}
# Prompts as they come, whole or in chunks; then one row each, which is what a full graph is captured for.
STEPS: list[list[tuple[str, int]]] = [
    [("x", 3), ("y", 3)],
    [("x", 1), ("y", 1), ("z", 3)],
    [("x", 1), ("y", 1), ("z", 1)],
    [("y", 1), ("x", 1), ("z", 1)],
    [("x", 1)],
]
SECTIONS = ("row_map", "stale-maps", "routing", "shifted-outputs", "placement")


class Served:
    """An engine of two layers behind a model runner of one kind; full graphs for steps of one row a request."""

    def __init__(self, kind: Kind) -> None:
        self.graph = GraphEngine(Batch([([3, 9], 5, 1), ([7], 2, 1), ([12], 4, 1), ([1], 1, 1)], [4, 9, 11, 30]))
        self.graph.capture()
        self.kind = kind
        self.plant: Plant | None = None
        self.eager = 0
        self.replays = 0
        compiled = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)
        if kind == "v1":
            self.runner: Any = SimpleNamespace(
                input_batch=SimpleNamespace(req_ids=[]),
                input_ids=SimpleNamespace(gpu=torch.zeros(TOKENS, dtype=torch.int64)),
                cudagraph_dispatcher=SimpleNamespace(
                    dispatch=lambda uniform, valid_modes=None, invalid_modes=None: (
                        CUDAGraphMode.FULL
                        if uniform and (valid_modes is None or CUDAGraphMode.FULL in valid_modes)
                        else CUDAGraphMode.NONE
                    )
                ),
                _model_forward=self._layers,
                compilation_config=compiled,
            )
        else:
            self.runner = SimpleNamespace(
                req_states=SimpleNamespace(req_id_to_index={}),
                prepare_attn=lambda batch: None,
                cudagraph_manager=SimpleNamespace(run_fullgraph=self._replay, _graphs_captured=True),
                compilation_config=compiled,
            )
        self.computed: dict[str, int] = {}

    def open(self, *, static: bool = True, **options: bool) -> OracleTaps:
        views = [
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
            for name, layer in self.graph.layers.items()
        ]
        taps = OracleTaps(
            layers=self.graph.layers,
            views=views,
            runner=self.runner,
            block_size=BLOCK,
            rounding=float(torch.finfo(torch.bfloat16).eps) / 2,
            static=self.graph.tap if static else None,
            **options,
        )
        taps.install()
        return taps

    def step(self, rows: list[tuple[str, int]], taps: OracleTaps) -> None:
        """One step as the engine's worker runs it: the scheduler's output, the runner's step, the sampled tokens."""
        new, ids, requests = [], [], []
        gone = sorted(set(self.computed) - {name for name, _ in rows})
        for name in gone:
            del self.computed[name]
        starts = {}
        for name, count in rows:
            start = starts[name] = self.computed.get(name, 0)
            if name not in self.computed:
                new.append(
                    SimpleNamespace(
                        req_id=name,
                        prompt_token_ids=PROMPTS[name],
                        block_ids=[BLOCKS[name]],
                        num_computed_tokens=0,
                    )
                )
            tokens = PROMPTS[name] + SAMPLED[name]
            ids += tokens[start : start + count]
            self.computed[name] = start + count
            requests.append((BLOCKS[name], start + count, count))
        held = [name for name, _ in rows if name not in {it.req_id for it in new}]
        scheduled = SimpleNamespace(
            finished_req_ids=set(gone),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=held,
                resumed_req_ids=set(),
                new_block_ids=[None] * len(held),
                num_computed_tokens=[starts[name] for name in held],
            ),
            num_scheduled_tokens=dict(rows),
        )
        batch = Batch(requests, ids)
        if self.plant is not None:
            self.plant(batch, self.graph)
        taps.begin_step(scheduled)
        self._run(batch, [name for name, _ in rows], uniform=all(count == 1 for _, count in rows))
        sampled = [
            (PROMPTS[name] + SAMPLED[name])[self.computed[name]]
            for name, _ in rows
            if self.computed[name] >= len(PROMPTS[name])
        ]
        done = [name for name, _ in rows if self.computed[name] >= len(PROMPTS[name])]
        taps.end_step(SimpleNamespace(req_ids=done, sampled_token_ids=[[token] for token in sampled]))

    def _run(self, batch: Batch, order: list[str], *, uniform: bool) -> None:
        self.batch = batch
        if self.kind == "v1":
            self.runner.input_batch.req_ids = order
            self.runner.input_ids.gpu[: len(batch.ids)] = batch.ids
            mode = self.runner.cudagraph_dispatcher.dispatch(uniform)
            context = ForwardContext(
                no_compile_layers={}, attn_metadata={}, slot_mapping={}, cudagraph_runtime_mode=mode
            )
            with override_forward_context(context):
                self.runner._model_forward(mode)
            return
        self.runner.prepare_attn(SimpleNamespace(req_ids=order, input_ids=batch.ids))
        if uniform and self.runner.cudagraph_manager._graphs_captured:
            self.runner.cudagraph_manager.run_fullgraph("descriptor")
        else:
            self._layers(CUDAGraphMode.NONE)

    def _layers(self, mode: CUDAGraphMode) -> None:
        if mode == CUDAGraphMode.FULL:
            self._replay("descriptor")
            return
        self.eager += 1
        batch = self.batch
        metadata = SimpleNamespace(
            block_table=batch.table, seq_lens=batch.lengths, query_start_loc=batch.starts, slot_mapping=batch.slots
        )
        for name, layer in self.graph.layers.items():
            query, key, value = self.graph.rows(name, batch.ids)
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, batch.slots)
            layer.impl.forward(
                layer, query, key, value, layer.kv_cache, metadata, torch.zeros(TOKENS, HEADS * SIZE).bfloat16()
            )

    def _replay(self, descriptor: object) -> None:
        self.replays += 1
        self.graph.run(self.batch)


def _run(served: Served, taps: OracleTaps) -> dict[str, Any]:
    for rows in STEPS:
        served.step(rows, taps)
    return taps.finish()


def _red(record: dict[str, Any]) -> set[str]:
    return {name for name in SECTIONS if record[name]["findings_total"]}


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_steps_in_python_and_in_graphs_are_one_window(kind: Kind) -> None:
    """Prompts go through the Python taps, replays through the static ones; every row of both is checked, none wrong."""
    served = Served(kind)
    taps = served.open()
    record = _run(served, taps)
    assert (served.eager, served.replays) == (2, 3)
    assert _red(record) == set()
    rows = sum(count for step in STEPS for _, count in step)
    assert record["steps"] == len(STEPS)
    assert record["rows"]["scheduled"] == record["row_map"]["checked"] == rows
    assert record["routing"]["writes_checked"] == record["placement"]["rows_checked"] == 2 * rows
    assert record["conditions"]["replayed"] == 3
    assert record["row_map"]["self_test"] == record["shifted-outputs"]["self_test"] == "caught"


@pytest.mark.parametrize("kind", ["v1", "v2"])
@pytest.mark.parametrize("options", [{"probe": True}, {"fills": True}, {}])
def test_a_window_without_static_taps_runs_no_graph(kind: Kind, options: dict[str, bool]) -> None:
    """Where a layer must be called by itself, or a graph has no taps, every step of the window enters Python."""
    served = Served(kind)
    record = _run(served, served.open(static=False, **options))
    assert (served.eager, served.replays, record["conditions"]["replayed"]) == (len(STEPS), 0, 0)
    assert _red(record) == set()
    assert bool(record["replay"]["cells_filled"]) == bool(options.get("fills"))
    assert not record["replay"]["findings_total"]
    served.step([("z", 1)], served.open())
    assert served.replays == 1


def _stale(*names: str) -> Plant:
    """A step's maps are put where the graph does not read them: those of the step before stay in force."""

    def plant(batch: Batch, graph: GraphEngine) -> None:
        if batch.rows == batch.requests:
            for name in names:
                setattr(batch, name, graph.inputs[name].clone())

    return plant


def _slot_zero(batch: Batch, graph: GraphEngine) -> None:
    batch.slots[batch.rows :] = 0


@pytest.mark.parametrize("kind", ["v1", "v2"])
@pytest.mark.parametrize(
    ("plant", "claimed"),
    [
        (_stale("table"), "stale-maps"),
        (_stale("lengths"), "stale-maps"),
        (_stale("slots"), "routing"),
        (_slot_zero, "routing"),
    ],
    ids=["table", "lengths", "slots", "slot-zero"],
)
def test_a_fault_of_replays_is_found_in_the_window(kind: Kind, plant: Plant, claimed: str) -> None:
    """A stale or wrong map of a replayed step is a finding of the gate that claims it."""
    served = Served(kind)
    served.plant = plant
    assert claimed in _red(_run(served, served.open()))


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_a_graph_without_taps_is_no_evidence(kind: Kind) -> None:
    """A replay in a window that has no static taps and was to run none is refused, not passed over."""
    served = Served(kind)
    taps = served.open(static=False)
    if kind == "v1":
        served.runner.cudagraph_dispatcher.dispatch = lambda uniform: CUDAGraphMode.FULL
    else:
        served.runner.cudagraph_manager._graphs_captured = True
    with pytest.raises(WorkerError, match="found a full graph without taps in it"):
        served.step([("x", 1)], taps)


def test_fingerprints_and_fills_refuse_static_taps() -> None:
    """A window of fingerprints or fills cannot be fed from a graph, which runs each layer once."""
    for option in ("probe", "fills"):
        with pytest.raises(WorkerError, match="found static taps with fingerprints or fills"):
            Served("v2").open(**{option: True})


def test_static_buffers_know_their_size() -> None:
    """The memory that the taps take is what their buffers hold."""
    tap = Served("v2").graph.tap
    per_layer = TOKENS * (2 * KV_HEADS + 2 * HEADS) * SIZE * 2 + 8 * (
        TOKENS + REQUESTS * COLUMNS + REQUESTS + REQUESTS + 1
    )
    assert tap.bytes == 2 * per_layer
