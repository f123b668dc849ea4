"""Faults of which implementation serves a layer; what it computes is right."""

from __future__ import annotations

from typing import Any

import torch

from pytest_kvqual.faults.planting import Call, wrap_attention


def _another_implementation(worker: Any, name: str, call: Call) -> None:
    """Attention of each request through the fused function of torch, over its gathered and decoded history."""
    codec, size = worker.kvqual_codec(name), worker.kvqual_block_size()
    for request, first, last, length in call.spans():
        position = torch.arange(length)
        slots = call.table[request, position // size].long() * size + position % size
        key, value = codec.decode(codec.read(call.cache, slots), float(call.layer._v_scale_float))
        rows = torch.arange(length - (last - first), length)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            call.asked[first:last].transpose(0, 1).float(),
            key.transpose(0, 1),
            value.transpose(0, 1),
            attn_mask=position[None, :] <= rows[:, None],
            scale=call.layer.impl.scale,
            enable_gqa=True,
        )
        call.rows[first:last] = mixed.transpose(0, 1).to(call.rows.dtype)
    call.rows[int(call.starts[-1]) :] = 0


def layer_served_by_another_kernel(worker: Any) -> None:
    """The last layer is served by another implementation, which is right."""
    name = list(worker.kvqual_layers())[-1]
    wrap_attention(worker, lambda call: _another_implementation(worker, name, call), only=-1)


def layer_falls_back_after_calls(worker: Any) -> None:
    """The last layer is served by another implementation from its fifth call on."""
    name, calls = list(worker.kvqual_layers())[-1], [0]

    def change(call: Call) -> None:
        calls[0] += 1
        if calls[0] > 4:
            _another_implementation(worker, name, call)
        else:
            call.run()

    wrap_attention(worker, change, only=-1)


def layer_has_another_implementation_class(worker: Any) -> None:
    """The implementation of the last layer is of another class, which does the same."""
    impl = list(worker.kvqual_layers().values())[-1].impl
    held = type(impl)
    impl.__class__ = type("FallbackImpl", (held,), {})
    worker.kvqual_undo.append(lambda: setattr(impl, "__class__", held))
