"""A paged-attention engine without a model: the worker's taps see what they would see in vLLM, in milliseconds.

K, V and query of a token are fixed random functions of (layer, token); outputs do not feed the next layer, so a fault
in one layer stays there. The scheduler grants blocks in a shuffled order and batches requests as told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from pytest_kvqual.kv import formats
from pytest_kvqual.kv.backends import k16v8, reference
from pytest_kvqual.oracles.window import LayerView
from pytest_kvqual.worker.taps import OracleTaps

QUERY_HEADS, KV_HEADS, SIZE, BLOCK = 6, 3, 16, 8
VOCABULARY = 97
BACKENDS = {"k16v16": reference, "k16v8": k16v8}


class _Impl:
    def __init__(self, kv_format: str) -> None:
        self.num_heads, self.num_kv_heads, self.head_size = QUERY_HEADS, KV_HEADS, SIZE
        self.scale = SIZE**-0.5
        self._functions = BACKENDS[kv_format]

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        self._functions.write(key, value, kv_cache, slot_mapping, k_scale=1.0, v_scale=layer._v_scale_float)

    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, output: Any) -> Any:
        return self._functions.attend(
            query,
            kv_cache,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            scale=self.scale,
            v_scale=layer._v_scale_float,
            output=output,
        )


class Builder:
    """Makes the step's metadata; a fault may wrap ``build``."""

    def build(self, table: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(block_table=table, seq_lens=lengths, query_start_loc=starts)


@dataclass
class _Request:
    name: str
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class SyntheticEngine:
    """``layers`` layers over a pool of ``blocks`` blocks. Doubles as the worker that faults are planted in."""

    def __init__(self, kv_format: str = "k16v8", *, layers: int = 2, blocks: int = 40, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        content = 2 * SIZE if kv_format == "k16v16" else 3 * SIZE
        dtype = torch.bfloat16 if kv_format == "k16v16" else torch.uint8
        self.kvqual_undo: list[Callable[[], None]] = []
        self._layers: dict[str, Any] = {}
        self._tables: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        for index in range(layers):
            name = f"layers.{index}.attn"
            cache = torch.zeros(blocks, KV_HEADS, BLOCK, content, dtype=dtype)
            if dtype == torch.bfloat16:
                cache.normal_(generator=self.generator)
            else:
                cache.random_(0, 256, generator=self.generator)
            scale = 1.0 if kv_format == "k16v16" else 0.004 * (1 + index)
            self._layers[name] = SimpleNamespace(
                impl=_Impl(kv_format), kv_cache=cache, _v_scale_float=scale, scale_declared=scale
            )
            self._tables[name] = tuple(  # type: ignore[assignment]  # three tensors
                torch.randn(VOCABULARY, heads * SIZE, generator=self.generator).to(torch.bfloat16)
                for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)
            )
        free = torch.randperm(blocks - 1, generator=self.generator) + 1
        self._free = free.tolist()
        self._builder = Builder()
        self.model_runner = SimpleNamespace(
            input_batch=SimpleNamespace(req_ids=[]), input_ids=SimpleNamespace(gpu=None)
        )
        self._format = formats.declared(kv_format)
        self._requests: dict[str, _Request] = {}
        self._finished: set[str] = set()
        self.window: OracleTaps | None = None

    # what faults use of a worker

    def kvqual_layers(self) -> dict[str, Any]:
        return self._layers

    def kvqual_block_size(self) -> int:
        return BLOCK

    def kvqual_codec(self, layer: str) -> formats.Format:
        return self._format

    def kvqual_metadata_builders(self) -> list[Builder]:
        return [self._builder]

    # life

    def open(self, *, probe: bool = False, fills: bool = False) -> OracleTaps:
        """Opens an oracle window over this engine."""
        self.window = OracleTaps(
            layers=self._layers,
            views=[
                LayerView(
                    name=name,
                    cache=layer.kv_cache,
                    codec=self._format,
                    v_scale=layer.scale_declared,
                    query_heads=QUERY_HEADS,
                    kv_heads=KV_HEADS,
                    head_size=SIZE,
                    softmax_scale=SIZE**-0.5,
                )
                for name, layer in self._layers.items()
            ],
            runner=self.model_runner,
            block_size=BLOCK,
            rounding=float(torch.finfo(torch.bfloat16).eps) / 2,
            probe=probe,
            fills=fills,
        )
        self.window.install()
        return self.window

    def step(
        self, batch: Sequence[tuple[str, int]], *, new: dict[str, list[int]] | None = None, padding: int = 0
    ) -> Any:
        """Runs one step: ``batch`` lists requests in row order with token counts, ``new`` the prompts of new ones."""
        fresh = []
        for name, prompt in (new or {}).items():
            self._requests[name] = _Request(name, list(prompt))
        cached_ids, granted, computed = [], [], []
        for name, count in batch:
            request = self._requests[name]
            needed = -(-(request.computed + count) // BLOCK)
            blocks = [self._free.pop() for _ in range(needed - len(request.blocks))]
            request.blocks += blocks
            if name in (new or {}):
                fresh.append(
                    SimpleNamespace(
                        req_id=name,
                        block_ids=(list(request.blocks),),
                        prompt_token_ids=list(request.tokens),
                        num_computed_tokens=0,
                    )
                )
            else:
                cached_ids.append(name)
                granted.append((blocks,) if blocks else None)
                computed.append(request.computed)
        scheduled = SimpleNamespace(
            finished_req_ids=set(self._finished),
            scheduled_new_reqs=fresh,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached_ids, new_block_ids=granted, num_computed_tokens=computed, resumed_req_ids=set()
            ),
            num_scheduled_tokens=dict(batch),
            total_num_scheduled_tokens=sum(count for _, count in batch),
        )
        self._finished.clear()
        if self.window is not None:
            self.window.begin_step(scheduled)
        self._forward(batch, padding)
        sampled: list[list[int]] = []
        for name, count in batch:
            request = self._requests[name]
            request.computed += count
            sampled.append([])
            if request.computed == len(request.tokens):
                token = int(torch.randint(0, VOCABULARY, (1,), generator=self.generator))
                request.tokens.append(token)
                sampled[-1].append(token)
        output = SimpleNamespace(req_ids=[name for name, _ in batch], sampled_token_ids=sampled)
        if self.window is not None:
            self.window.end_step(output)
        return output

    def finish(self, name: str) -> None:
        """Ends a request; its blocks are granted again first."""
        self._free += self._requests.pop(name).blocks
        self._finished.add(name)

    def _forward(self, batch: Sequence[tuple[str, int]], padding: int) -> None:
        tokens, slots, starts, lengths = [], [], [0], []
        width = max(len(self._requests[name].blocks) for name, _ in batch) + 1
        table = torch.zeros(len(batch), width, dtype=torch.int32)
        for row, (name, count) in enumerate(batch):
            request = self._requests[name]
            positions = range(request.computed, request.computed + count)
            tokens += [request.tokens[position] for position in positions]
            slots += [request.blocks[position // BLOCK] * BLOCK + position % BLOCK for position in positions]
            starts.append(starts[-1] + count)
            lengths.append(request.computed + count)
            table[row, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        fed = torch.tensor(tokens + [0] * padding)
        mapping = torch.tensor(slots + [-1] * padding)
        self.model_runner.input_batch.req_ids = [name for name, _ in batch]
        self.model_runner.input_ids.gpu = fed
        metadata = self._builder.build(table, torch.tensor(lengths), torch.tensor(starts))
        for name, layer in self._layers.items():
            query, key, value = (source[fed].view(len(fed), -1, SIZE) for source in self._tables[name])
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, mapping)
            output = torch.zeros(len(fed), QUERY_HEADS, SIZE, dtype=torch.bfloat16)
            layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, output)


def workload(engine: SyntheticEngine, *, seed: int = 1) -> None:
    """Mixed prefill and decode, chunked prefill, boundary lengths, a shrinking batch, reuse of freed blocks."""
    random = torch.Generator().manual_seed(seed)

    def prompt(length: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (length,), generator=random).tolist()

    engine.step(
        [("a", BLOCK - 1), ("b", BLOCK), ("c", 5)], new={"a": prompt(BLOCK - 1), "b": prompt(BLOCK), "c": prompt(21)}
    )
    engine.step([("a", 1), ("b", 1), ("c", 16), ("d", 1)], new={"d": prompt(1)}, padding=2)
    engine.step([("b", 1), ("a", 1), ("d", 1), ("c", 1)])
    engine.finish("b")
    engine.step([("a", 1), ("c", 1), ("d", 1), ("e", 2 * BLOCK + 1)], new={"e": prompt(2 * BLOCK + 1)})
    engine.finish("a")
    engine.finish("d")
    for _ in range(BLOCK):
        engine.step([("e", 1), ("c", 1)], padding=1)
