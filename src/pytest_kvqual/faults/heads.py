"""Faults of the map from query heads to KV heads."""

from __future__ import annotations

from typing import Any

import torch

from pytest_kvqual.faults.planting import Call, override, wrap_attention


def head_map_by_modulus(worker: Any) -> None:
    """Query head ``h`` reads KV head ``h % Hkv``."""

    def change(call: Call) -> None:
        heads, kv_heads = call.asked.shape[1], call.layer.impl.num_kv_heads
        # The kernel divides: at place p of this order it reads KV head p // group, which is the modulus of the head.
        order = torch.argsort(torch.arange(heads) % kv_heads, stable=True)
        mixed = torch.zeros_like(call.output)
        call.run(query=call.asked[:, order].reshape(call.query.shape), output=mixed)
        call.rows[:, order] = mixed.view(call.rows.shape)

    wrap_attention(worker, change)


def head_map_by_head_count(worker: Any) -> None:
    """Query head ``h`` reads KV head ``h // Hkv``."""
    override(worker, "kv_head", lambda kernel, original, h, hq, hkv: min(h // hkv, hkv - 1))


def head_map_by_head(worker: Any) -> None:
    """Query head ``h`` reads KV head ``h``, or the last."""
    override(worker, "kv_head", lambda kernel, original, h, hq, hkv: min(h, hkv - 1))


def heads_in_another_order(worker: Any) -> None:
    """The kernel works on the KV heads from the last to the first, with the query heads to match; nothing changes."""

    def change(call: Call) -> None:
        heads, kv_heads = call.asked.shape[1], call.layer.impl.num_kv_heads
        order = torch.arange(heads).view(kv_heads, -1).flip(0).flatten()
        mixed = torch.zeros_like(call.output)
        call.run(query=call.asked[:, order].reshape(call.query.shape), cache=call.cache.flip(1), output=mixed)
        call.rows[:, order] = mixed.view(call.rows.shape)

    wrap_attention(worker, change)
