"""The planted faults of the transfer tests: each must be seen by the section that it is for, at whatever backend.

They sit between the engine and the backend and use nothing of the backend's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_kvqual.transfer.engine import TransferEngine


def _around_forward(engine: TransferEngine, change: Callable[..., None]) -> None:
    """Replaces each layer's attention by ``change(call, layer, query, kv_cache, metadata, output)``."""
    for layer in engine.kvqual_layers().values():
        original = layer.impl.forward

        def forward(
            layer: Any,
            query: Any,
            key: Any,
            value: Any,
            kv_cache: Any,
            metadata: Any,
            output: Any,
            *,
            original: Any = original,
        ) -> Any:
            def call(given: Any) -> None:
                original(layer, query, key, value, kv_cache, given, output)

            change(call, layer, query, kv_cache, metadata, output)
            return output

        layer.impl.forward = forward


def write_before_block_start(engine: TransferEngine) -> None:
    """The write of a position that starts a block goes to the slot before it."""
    for layer in engine.kvqual_layers().values():
        original = layer.impl.do_kv_cache_update

        def update(
            layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any, *, original: Any = original
        ) -> None:
            first = (slot_mapping > 0) & (slot_mapping % engine.block_size == 0)
            original(layer, key, value, kv_cache, torch.where(first, slot_mapping - 1, slot_mapping))

        layer.impl.do_kv_cache_update = update


def first_block_twice(engine: TransferEngine) -> None:
    """The kernel reads each request's first block where its second one should be."""

    def change(call: Any, layer: Any, query: Any, kv_cache: Any, metadata: Any, output: Any) -> None:
        table = metadata.block_table.clone()
        table[:, 1] = table[:, 0]
        call(type(metadata)(**{**vars(metadata), "block_table": table}))

    _around_forward(engine, change)


def heads_turned(engine: TransferEngine) -> None:
    """Each query head's output lies where the next one's should be."""

    def change(call: Any, layer: Any, query: Any, kv_cache: Any, metadata: Any, output: Any) -> None:
        call(metadata)
        heads = output.view(output.shape[0], -1, layer.impl.head_size)
        heads.copy_(heads.roll(1, 1))

    _around_forward(engine, change)


def previous_lengths_and_table(engine: TransferEngine) -> None:
    """The attention metadata carries lengths and block table of the step before, where the batch has as many rows."""
    original = engine.builder.build
    kept: dict[str, torch.Tensor] = {}

    def build(inputs: Any) -> Any:
        metadata = original(inputs)
        now = {name: getattr(metadata, name).clone() for name in ("block_table", "seq_lens")}
        for name, tensor in kept.items():
            if tensor.shape == now[name].shape:
                setattr(metadata, name, tensor)
        kept.update(now)
        return metadata

    engine.builder.build = build  # type: ignore[method-assign]  # a seam


def rows_shifted(engine: TransferEngine) -> None:
    """Each row holds the output of the row before it."""

    def change(call: Any, layer: Any, query: Any, kv_cache: Any, metadata: Any, output: Any) -> None:
        call(metadata)
        rows = int(metadata.query_start_loc[-1])
        output[:rows] = output[:rows].roll(1, 0)

    _around_forward(engine, change)


def zero_times_unwritten(engine: TransferEngine) -> None:
    """Each request's rows get zero times the first cell behind its last position: nothing, unless it is NaN."""

    def change(call: Any, layer: Any, query: Any, kv_cache: Any, metadata: Any, output: Any) -> None:
        call(metadata)
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for row, length in enumerate(lengths):
            if length % engine.block_size and starts[row + 1] > starts[row]:
                block = int(metadata.block_table[row, length // engine.block_size])
                slot = torch.tensor([block * engine.block_size + length % engine.block_size])
                cells = layer.codec.read(kv_cache, slot)
                value = layer.codec.decode(cells, layer._v_scale_float)[1]
                output[starts[row] : starts[row + 1]] += (0.0 * value.sum()).to(output.dtype)

    _around_forward(engine, change)
