"""The largest |V| that each layer hands to its cache, for ``kvqual prepare --calibrate``.

An arm brings :func:`watch` in ``after_init``. Nothing is captured, judged or timed in such a server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def watch(worker: Any) -> None:
    """Wraps each layer's cache update, and gives the worker the method ``kvqual_largest_v``.

    ``kvqual_largest_v(reset)`` returns ``[{"layer": name, "largest": number}, ...]`` in the order of the layers, over
    the rows that were written to a slot since the last reset, and begins anew where ``reset`` is true. A layer that
    wrote nothing has 0, one that wrote NaN or infinity has that, as text.
    """
    found: dict[str, torch.Tensor] = {}

    def noting(name: str, inner: Callable[..., object]) -> Callable[..., object]:
        def update(layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> object:
            rows = min(value.shape[0], slot_mapping.shape[0])
            # A padding row has no slot. Its largest counts as 0, without a copy to the host in every step.
            written = (slot_mapping[:rows] >= 0).reshape(rows, *[1] * (value.dim() - 1))
            if rows:
                largest = torch.where(written, value[:rows].abs(), torch.zeros_like(value[:rows])).max().float()
                found[name] = torch.maximum(found[name], largest) if name in found else largest
            return inner(layer, key, value, kv_cache, slot_mapping)

        return update

    layers = worker.kvqual_layers()
    for name, layer in layers.items():
        layer.impl.do_kv_cache_update = noting(name, layer.impl.do_kv_cache_update)

    def largest_v(reset: bool = False) -> list[dict[str, object]]:
        told: list[dict[str, object]] = []
        for name in layers:
            value = float(found[name]) if name in found else 0.0
            told.append({"layer": name, "largest": value if value < float("inf") else str(value)})
        if reset:
            found.clear()
        return told

    worker.kvqual_largest_v = largest_v
