"""Faults of scales and of the eight-bit encoding."""

from __future__ import annotations

from typing import Any

import torch

from pytest_kvqual.faults.planting import Call, Step, held_as, override, scaled, wrap_attention, wrap_updates

_INLINE = 8
"""Bytes of the two float32 scales at the end of a cell with inline scales."""


def decode_writes_unscaled(worker: Any) -> None:
    """Rows of requests with one query row are cast without their scales; the read multiplies as ever."""
    step = Step(worker)

    def change(original: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        decode = step.places(slots.shape[0])[2] == 1
        original(layer, key, value, cache, torch.where(decode, -1, slots))
        with scaled(layer, k=1.0, v=1.0):
            original(layer, key, value, cache, torch.where(decode, slots, -1))

    wrap_updates(worker, change)


def whole_prompt_ignores_scales(worker: Any) -> None:
    """A request whose rows are all its positions takes K and V as stored; one with cached context takes its scales."""

    def change(call: Call) -> None:
        call.run()
        plain = torch.empty_like(call.output)
        with scaled(call.layer, k=1.0, v=1.0):
            call.run(output=plain)
        for _, first, last, length in call.spans():
            if length == last - first:
                call.output[first:last] = plain[first:last]

    wrap_attention(worker, change)


def scales_dropped_for_eight_bit_query(worker: Any) -> None:
    """A query that eight bits hold exactly needs no cast, and the early return skips the scales too."""

    def change(kernel: Any, original: Any, query: Any, *args: Any, **named: Any) -> object:
        if torch.equal(query.to(torch.float8_e4m3fn).to(query.dtype), query):
            named = {**named, "k_scale": 1.0, "v_scale": 1.0}
        return original(query, *args, **named)

    override(worker, "attend", change)


def _read_with(worker: Any, k: Any, v: Any) -> None:
    """Attention runs with other scales: ``k(k_scale, v_scale)`` and ``v(k_scale, v_scale)``."""

    def change(call: Call) -> None:
        k_scale = float(getattr(call.layer, "_k_scale_float", 1.0))
        v_scale = float(call.layer._v_scale_float)
        with scaled(call.layer, k=k(k_scale, v_scale), v=v(k_scale, v_scale)):
            call.run()

    wrap_attention(worker, change)


def v_scale_dropped_on_read(worker: Any) -> None:
    """The read takes V as stored, without its scale."""
    _read_with(worker, lambda k, v: k, lambda k, v: 1.0)


def v_scale_twice_on_read(worker: Any) -> None:
    """The read multiplies V by its scale twice."""
    _read_with(worker, lambda k, v: k, lambda k, v: v * v)


def k_scale_dropped_on_read(worker: Any) -> None:
    """The read takes K as stored, without its scale."""
    _read_with(worker, lambda k, v: 1.0, lambda k, v: v)


def k_scale_twice_on_read(worker: Any) -> None:
    """The read multiplies K by its scale twice."""
    _read_with(worker, lambda k, v: k * k, lambda k, v: v)


def scales_swapped_on_read(worker: Any) -> None:
    """The read multiplies K by the scale of V and V by the scale of K."""
    _read_with(worker, lambda k, v: v, lambda k, v: k)


def head_scales_reversed_on_read(worker: Any) -> None:
    """The factor of a head is looked up from the other end of the per-head scales."""

    def change(kernel: Any, original: Any, *args: Any) -> object:
        k, v = original(*args)
        return k.flip(0), v.flip(0)

    override(worker, "factors", change)


def v_inline_scales_swizzled(worker: Any) -> None:
    """The V scales of a block are stored in another order than the reader's; K is right."""

    def change(kernel: Any, original: Any, cache: Any, cells: Any, block: Any, offset: Any) -> None:
        raw = cache.view(torch.uint8)
        for head in range(raw.shape[1]):
            raw[block, head, offset, :-4] = cells[:, head, :-4]
            raw[block, head, offset ^ 1, -4:] = cells[:, head, -4:]

    override(worker, "store", change)


def _viewed_as(dtype: torch.dtype) -> Any:
    return lambda cells: cells.contiguous().view(dtype).float()


def cache_viewed_as_fnuz(worker: Any) -> None:
    """Bytes written as E4M3FN are read as E4M3FNUZ: half the value, and -0.0 is NaN."""
    override(worker, "uncast", lambda kernel, original, cells: _viewed_as(torch.float8_e4m3fnuz)(cells))


def v_viewed_as_e5m2(worker: Any) -> None:
    """V bytes written as E4M3 are read as E5M2; K is right."""

    def change(kernel: Any, original: Any, *args: Any) -> object:
        k, _ = original(*args)
        with held_as(kernel, uncast=_viewed_as(torch.float8_e5m2)):
            return k, original(*args)[1]

    override(worker, "decode", change)


def cast_without_clamp(worker: Any) -> None:
    """The cast to E4M3 does not clamp first: what lies beyond 464 becomes the byte of NaN."""

    def change(kernel: Any, original: Any, values: Any) -> object:
        # Written out: whether torch saturates in this cast depends on its version.
        return torch.where(values.abs() > 464.0, 0x7F, original(values)).to(torch.uint8)

    override(worker, "cast", change)


def weights_cast_to_e4m3(worker: Any) -> None:
    """Softmax weights are cast to E4M3 as they are; their sum stays in float32."""

    def change(kernel: Any, original: Any, weights: Any, value: Any) -> object:
        return original(weights.to(torch.float8_e4m3fn).float(), value)

    override(worker, "weigh", change)


def sums_in_sixteen_bits(worker: Any) -> None:
    """Weighted V is summed over tiles of positions in bfloat16."""

    def change(kernel: Any, original: Any, weights: Any, value: Any) -> object:
        total = torch.zeros(weights.shape[0], value.shape[1], dtype=torch.bfloat16)
        for first in range(0, weights.shape[1], 4):
            total += original(weights[:, first : first + 4], value[first : first + 4]).to(torch.bfloat16)
        return total.float()

    override(worker, "weigh", change)


def _page(cache: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """A copy of the pool as bytes, the bytes of a page, and those of a page without its inline scales."""
    pool = cache.view(torch.uint8).reshape(-1)
    cells = cache.shape[1] * cache.shape[2]
    content = cache.view(torch.uint8).shape[3]
    return pool, cells * content, cells * (content - _INLINE)


def page_stride_without_scales_on_read(worker: Any) -> None:
    """The read finds a block as if a page had no bytes for inline scales."""

    def change(kernel: Any, original: Any, cache: Any, blocks: Any) -> object:
        pool, page, short = _page(cache)
        pages = torch.stack([pool[block * short : block * short + page] for block in blocks.tolist()])
        return original(pages.view(len(blocks), *cache.shape[1:]), torch.arange(len(blocks)))

    override(worker, "gather", change)


def page_stride_without_scales_on_write(worker: Any) -> None:
    """The write finds a block as if a page had no bytes for inline scales."""

    def change(kernel: Any, original: Any, cache: Any, cells: Any, block: Any, offset: Any) -> None:
        pool, page, short = _page(cache)
        for row, (number, where) in enumerate(zip(block.tolist(), offset.tolist(), strict=True)):
            found = pool[number * short : number * short + page].view(cache.shape[1:])
            found[:, where] = cells[row]
        cache.view(torch.uint8).copy_(pool.view(cache.shape))

    override(worker, "store", change)


def inline_scales_of_first_layer_on_read(worker: Any) -> None:
    """Every layer reads the inline scales of the first layer's cells."""
    first = next(iter(worker.kvqual_layers().values()))

    def change(call: Call) -> None:
        mixed = call.cache.clone()
        mixed[..., -_INLINE:] = first.kv_cache[..., -_INLINE:]
        call.run(cache=mixed)

    wrap_attention(worker, change)


def inline_scales_of_first_layer_on_write(worker: Any) -> None:
    """Every layer writes its inline scales into the first layer's cells."""
    first = next(iter(worker.kvqual_layers().values()))

    def change(original: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        kept = cache[..., -_INLINE:].clone()
        original(layer, key, value, cache, slots)
        written = cache[..., -_INLINE:].clone()
        cache[..., -_INLINE:] = kept
        first.kv_cache[..., -_INLINE:] = torch.where(written != kept, written, first.kv_cache[..., -_INLINE:])

    wrap_updates(worker, change)


def inline_scales_indexed_heads_major(worker: Any) -> None:
    """The read takes the scale at ``head * slots + slot`` of a buffer that is laid out slot by slot."""

    def change(call: Call) -> None:
        blocks, heads, size, _ = call.cache.shape
        flat = call.cache[..., -_INLINE:].transpose(1, 2).reshape(-1, _INLINE)
        mixed = call.cache.clone()
        mixed[..., -_INLINE:] = flat.view(heads, blocks, size, _INLINE).transpose(0, 1)
        call.run(cache=mixed)

    wrap_attention(worker, change)
