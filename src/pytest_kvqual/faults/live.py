"""The live faults: functions of the engine's worker, planted beneath the oracle's taps.

Each takes the :class:`~pytest_kvqual.worker.serving_worker.ServingWorker` and undoes itself through
``worker.kvqual_undo``, a list of functions called in reverse order. They know the engine only through the objects that
the worker hands out: attention layers with ``impl.do_kv_cache_update`` and ``impl.forward``, and metadata builders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _replace(worker: Any, holder: Any, name: str, value: object) -> None:
    """Sets an instance attribute and remembers how to take it back."""
    held = vars(holder)
    if name in held:
        old = held[name]
        worker.kvqual_undo.append(lambda: setattr(holder, name, old))
    else:
        worker.kvqual_undo.append(lambda: delattr(holder, name))
    setattr(holder, name, value)


def _wrap_updates(worker: Any, change: Callable[..., None]) -> None:
    """Replaces each layer's cache update by ``change(original, layer, key, value, kv_cache, slot_mapping)``."""
    for layer in worker.kvqual_layers().values():
        original = layer.impl.do_kv_cache_update

        def update(
            layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any, *, original: Any = original
        ) -> None:
            change(original, layer, key, value, kv_cache, slot_mapping)

        _replace(worker, layer.impl, "do_kv_cache_update", update)


def slot_off_by_one(worker: Any) -> None:
    """Every write goes one slot too far."""

    def change(original: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        last = kv_cache.shape[0] * worker.kvqual_block_size() - 1
        original(layer, key, value, kv_cache, torch.where(slots >= 0, (slots + 1).clamp(max=last), slots))

    _wrap_updates(worker, change)


def slot_wrong_at_block_multiple(worker: Any) -> None:
    """The write of a position that starts a block goes to the slot before it."""

    def change(original: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        first = (slots > 0) & (slots % worker.kvqual_block_size() == 0)
        original(layer, key, value, kv_cache, torch.where(first, slots - 1, slots))

    _wrap_updates(worker, change)


def key_value_swapped(worker: Any) -> None:
    """The cache update takes K for V and V for K."""

    def change(original: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        original(layer, value, key, kv_cache, slots)

    _wrap_updates(worker, change)


def padding_writes_slot_zero(worker: Any) -> None:
    """A padding row writes its K and V to slot 0."""

    def change(original: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        original(layer, key, value, kv_cache, slots)
        original(layer, key[:1] + 1, value[:1] + 1, kv_cache, torch.zeros_like(slots[:1]))

    _wrap_updates(worker, change)


def stale_block_table(worker: Any) -> None:
    """Attention metadata carries the block table of the previous step."""
    previous: dict[int, torch.Tensor] = {}
    for number, builder in enumerate(worker.kvqual_metadata_builders()):
        original = builder.build

        def build(*args: Any, number: int = number, original: Any = original, **kwargs: Any) -> Any:
            metadata = original(*args, **kwargs)
            table = metadata.block_table
            current = table.clone()
            stale = previous.get(number)
            if stale is not None:
                rows = min(stale.shape[0], table.shape[0])
                columns = min(stale.shape[1], table.shape[1])
                mixed = table.clone()
                mixed[:rows, :columns] = stale[:rows, :columns]
                metadata.block_table = mixed
            previous[number] = current
            return metadata

        _replace(worker, builder, "build", build)


def v_scale_dropped_on_read(worker: Any) -> None:
    """The read takes V as stored, without its scale."""
    for layer in worker.kvqual_layers().values():
        original = layer.impl.forward

        def forward(layer: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            kept = layer._v_scale_float
            layer._v_scale_float = 1.0
            try:
                return original(layer, *args, **kwargs)
            finally:
                layer._v_scale_float = kept

        _replace(worker, layer.impl, "forward", forward)


def other_layer_cache(worker: Any) -> None:
    """Attention reads the cache of the next layer."""
    layers = list(worker.kvqual_layers().values())
    for number, layer in enumerate(layers):
        original = layer.impl.forward
        neighbour = layers[(number + 1) % len(layers)]

        def forward(
            layer: Any,
            query: Any,
            key: Any,
            value: Any,
            kv_cache: Any,
            *args: Any,
            original: Any = original,
            neighbour: Any = neighbour,
            **kwargs: Any,
        ) -> Any:
            return original(layer, query, key, value, neighbour.kv_cache, *args, **kwargs)

        _replace(worker, layer.impl, "forward", forward)


def weights_altered(worker: Any) -> None:
    """One element of one norm weight of the loaded model is changed."""
    for name, parameter in worker.model_runner.get_model().named_parameters():
        if name.endswith("norm.weight") and parameter.numel():
            kept = parameter.data[0].clone()
            parameter.data[0] = kept * 2 + 1

            def undo(parameter: Any = parameter, kept: Any = kept) -> None:
                parameter.data[0] = kept

            worker.kvqual_undo.append(undo)
            return
    raise RuntimeError("the model has no norm weight to alter")


def packed_weights_altered(worker: Any) -> None:
    """One projection multiplies with a weight of which one element is changed; the parameter itself is untouched."""
    for module in worker.model_runner.get_model().modules():
        if hasattr(module, "cpu_linear"):
            original = module.cpu_linear

            def altered(x: Any, weight: Any, bias: Any, original: Any = original) -> Any:
                result = original(x, weight, bias).clone()
                result[..., 0] += x[..., 0]
                return result

            _replace(worker, module, "cpu_linear", altered)
            return
    raise RuntimeError("the model has no linear layer whose weight its kernel packed")


def scale_copy_altered(worker: Any) -> None:
    """One layer's V scale differs between the copy that writes and the copy that reads."""
    layer = list(worker.kvqual_layers().values())[-1]
    _replace(worker, layer, "_v_scale_float", float(layer._v_scale_float) * 2)
