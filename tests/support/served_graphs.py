"""The engine of :mod:`graph_engine` behind a model runner of either kind, as the engine's worker drives it.

Steps of one row a request replay the captured graph, all others call each layer from Python.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import torch
from graph_engine import BLOCK, HEADS, KV_HEADS, SCALE, SIZE, TOKENS, Batch, GraphEngine
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context

from pytest_kvqual.kv import formats
from pytest_kvqual.oracles.window import LayerView
from pytest_kvqual.worker.taps import OracleTaps

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
ROWS = sum(count for step in STEPS for _, count in step)
SECTIONS = ("row_map", "stale-maps", "routing", "shifted-outputs", "placement")


class Builder:
    """Makes a step's metadata, as the engine asks for it before every step."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> SimpleNamespace:
        return SimpleNamespace(**vars(common_attn_metadata))


class Served:
    """An engine of two layers behind a model runner of one kind."""

    def __init__(self, kind: Kind, *, captured: bool = True) -> None:
        self.graph = GraphEngine(Batch([([3, 9], 5, 1), ([7], 2, 1), ([12], 4, 1), ([1], 1, 1)], [4, 9, 11, 30]))
        if captured:
            self.graph.capture()
        self.kind = kind
        self.plant: Plant | None = None
        self.eager = 0
        self.replays = 0
        self.computed: dict[str, int] = {}
        self._rows: list[tuple[str, int]] = []
        self.builder = Builder()
        groups = [[SimpleNamespace(metadata_builders=[self.builder])]]
        compiled = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)
        if kind == "v1":
            self.runner: Any = SimpleNamespace(
                input_batch=SimpleNamespace(
                    req_ids=[],
                    num_reqs=0,
                    block_table=[SimpleNamespace(get_device_tensor=lambda rows: self.graph.inputs["table"][:rows])],
                ),
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
                attn_groups=groups,
            )
        else:
            self.runner = SimpleNamespace(
                req_states=SimpleNamespace(req_id_to_index={}),
                block_tables=SimpleNamespace(input_block_tables=[self.graph.inputs["table"]]),
                prepare_attn=lambda batch: None,
                cudagraph_manager=SimpleNamespace(run_fullgraph=self._replay, _graphs_captured=True),
                compilation_config=compiled,
                attn_groups=groups,
            )
        self.runner.execute_model = lambda scheduled, tensors=None: self.execute()

    def open(self, *, static: bool = True, **options: bool) -> OracleTaps:
        """Opens an oracle window over this engine."""
        taps = OracleTaps(
            layers=self.graph.layers,
            views=[
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
            ],
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
        taps.begin_step(self.scheduled(rows))
        self.execute()
        taps.end_step(self.output())

    def scheduled(self, rows: list[tuple[str, int]]) -> SimpleNamespace:
        """What the scheduler says of a step of these rows, which is then the one to execute."""
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
                        req_id=name, prompt_token_ids=PROMPTS[name], block_ids=[BLOCKS[name]], num_computed_tokens=0
                    )
                )
            ids += (PROMPTS[name] + SAMPLED[name])[start : start + count]
            self.computed[name] = start + count
            requests.append((BLOCKS[name], start + count, count))
        held = [name for name, _ in rows if name not in {it.req_id for it in new}]
        self.batch = Batch(requests, ids)
        if self.plant is not None:
            self.plant(self.batch, self.graph)
        self._rows = rows
        return SimpleNamespace(
            finished_req_ids=set(gone),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=held,
                resumed_req_ids=set(),
                new_block_ids=[None] * len(held),
                num_computed_tokens=[starts[name] for name in held],
            ),
            num_scheduled_tokens=dict(rows),
            total_num_scheduled_tokens=len(ids),
        )

    def execute(self) -> None:
        """Runs the step, through the calls by which the kind of runner enters the layers."""
        batch, order = self.batch, [name for name, _ in self._rows]
        uniform = all(count == 1 for _, count in self._rows)
        common = SimpleNamespace(
            block_table=batch.table, seq_lens=batch.lengths, query_start_loc=batch.starts, slot_mapping=batch.slots
        )
        self.metadata = self.builder.build(0, common)
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

    def output(self) -> Any:
        """The tokens that the step sampled."""
        done = [name for name, _ in self._rows if self.computed[name] >= len(PROMPTS[name])]
        return SimpleNamespace(
            req_ids=done,
            sampled_token_ids=[[(PROMPTS[name] + SAMPLED[name])[self.computed[name]]] for name in done],
        )

    def _layers(self, mode: CUDAGraphMode) -> None:
        if mode == CUDAGraphMode.FULL:
            self._replay("descriptor")
            return
        self.eager += 1
        batch = self.batch
        for name, layer in self.graph.layers.items():
            query, key, value = self.graph.rows(name, batch.ids)
            output = torch.zeros(TOKENS, HEADS * SIZE, dtype=torch.bfloat16)
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, batch.slots)
            layer.impl.forward(layer, query, key, value, layer.kv_cache, self.metadata, output)

    def _replay(self, descriptor: object) -> None:
        self.replays += 1
        self.graph.run(self.batch)


def objected(record: dict[str, Any]) -> set[str]:
    """The sections of a window's record that have a finding."""
    return {name for name in SECTIONS if record[name]["findings_total"]}
