"""An attention-only engine whose step is captured once and replayed over static inputs, with the static taps inside.

K, V and queries of a token are fixed random functions of (layer, token), computed inside the step; outputs do not feed
the next layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from pytest_kvqual.kv.backends import masked, reference
from pytest_kvqual.oracles.window import Window
from pytest_kvqual.worker.graph import RecordedStep
from pytest_kvqual.worker.static_taps import StaticTap

BLOCK, BLOCKS, HEADS, KV_HEADS, SIZE = 4, 16, 6, 3, 16
TOKENS, REQUESTS, COLUMNS = 6, 4, 3
SCALE = SIZE**-0.5
INPUTS = ("ids", "slots", "table", "lengths", "starts")


class Impl:
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


class Batch:
    """One step padded to the captured size: requests with ``(blocks, length, rows)``, their last ``rows`` positions."""

    def __init__(self, requests: Sequence[tuple[Sequence[int], int, int]], ids: Sequence[int]) -> None:
        slots: list[int] = []
        starts = [0]
        self.table = torch.zeros(REQUESTS, COLUMNS, dtype=torch.int32)
        for row, (blocks, length, rows) in enumerate(requests):
            slots += [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(length - rows, length)]
            starts.append(starts[-1] + rows)
            self.table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        self.requests, self.rows = len(requests), starts[-1]
        pad, idle = TOKENS - self.rows, REQUESTS - self.requests
        self.ids = torch.tensor([*ids, *[0] * pad])
        self.slots = torch.tensor([*slots, *[-1] * pad])
        self.lengths = torch.tensor([length for _, length, _ in requests] + [0] * idle, dtype=torch.int32)
        self.starts = torch.tensor([*starts, *[self.rows] * idle], dtype=torch.int32)


class GraphEngine:
    """Two layers whose step is captured once over static inputs, with the taps on.

    The layers are called ``a`` and ``b``.
    """

    def __init__(self, first: Batch) -> None:
        random = torch.Generator().manual_seed(0)
        self.layers = {
            name: SimpleNamespace(
                impl=Impl(),
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

    def run(self, batch: Batch) -> None:
        """Copies the batch into the captured inputs and replays."""
        for name in INPUTS:
            self.inputs[name].copy_(getattr(batch, name))
        assert self.step is not None
        self.step.replay()

    def replay(self, batch: Batch) -> RecordingWindow:
        """Runs the batch and returns what the taps handed over."""
        self.run(batch)
        window = RecordingWindow()
        assert self.tap.feed(window) == ("a", "b")
        return window

    def objections(self, batch: Batch, window: RecordingWindow) -> set[str]:
        """Which of the tensors handed over are not those of ``batch``, by the healthy reference backend."""
        found = set()
        rows, requests = batch.rows, batch.requests
        for name in self.layers:
            query, key, value = self.rows(name, batch.ids)
            reference.write(key, value, self.ledger[name], batch.slots)
            expected = torch.zeros_like(query)
            reference.attend(
                query[:rows],
                self.ledger[name],
                batch.table[:requests],
                batch.lengths[:requests],
                batch.starts[: requests + 1],
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


class RecordingWindow(Window):
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
