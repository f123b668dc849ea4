"""Losses of quality that happen before the cache update: every oracle stays silent, and answers get worse.

The oracles compare what the cache holds with the K and V that the update was given, and outputs with what the cache
holds. A K or V that was wrong before is written, read and checked like any other, so only the gates of quality (nll,
retrieval, recall) can object. Each function here is an arm's ``after_init``, or is planted by RPC as
``module:function``; it is called as ``function(worker)`` on each rank and undoes itself through ``worker.kvqual_undo``.

It replaces ``forward`` of each attention layer: the engine's module, called as ``layer(query, key, value)``, hands K
and V to the cache update and to the attention. ``key`` and ``value`` come as ``[T, Hkv * D]`` or ``[T, Hkv, D]`` of
this rank's heads, often as views of one projection's output; the caller's tensors are not altered, and what replaces
them is dense, of the same shape and dtype. Query and output stay as they are. None, of a layer that reads another's
cache, stays None. Only an eager engine calls ``forward`` at each step; a compiled one may have inlined the original
before.

Not in the catalogue of faults: no gate that a fault can be claimed by has to see these.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pytest_kvqual.faults.planting import replace
from pytest_kvqual.kv.formats import e4m3_values, encode_e4m3
from pytest_kvqual.worker.wire import WorkerError

Change = Callable[[torch.Tensor], torch.Tensor]
"""Takes float32 ``[T, Hkv, D]`` and returns the same shape; may not write to what it takes."""

_TAKES = ["query", "key", "value"]


def v_two_bits(worker: Any) -> None:
    """V is rounded to 2 bits; see :func:`rounded_to_levels`."""
    degrade(worker, value=partial(rounded_to_levels, bits=2))


def v_three_bits(worker: Any) -> None:
    """V is rounded to 3 bits; see :func:`rounded_to_levels`."""
    degrade(worker, value=partial(rounded_to_levels, bits=3))


def v_four_bits(worker: Any) -> None:
    """V is rounded to 4 bits; see :func:`rounded_to_levels`."""
    degrade(worker, value=partial(rounded_to_levels, bits=4))


def k_two_bits(worker: Any) -> None:
    """K is rounded to 2 bits; see :func:`rounded_to_levels`."""
    degrade(worker, key=partial(rounded_to_levels, bits=2))


def v_times_four(worker: Any) -> None:
    """V is 4 times what it should be, as where one side divides by a scale that the other does not multiply by.

    Exact in a 16-bit type as long as 4 V is finite there.
    """
    degrade(worker, value=times_four)


def k_e4m3_unscaled(worker: Any) -> None:
    """K is rounded through E4M3 without a scale; see :func:`through_e4m3`."""
    degrade(worker, key=through_e4m3)


# -- what is done to K or V -------------------------------------------------------------------------------------------


def rounded_to_levels(values: torch.Tensor, *, bits: int) -> torch.Tensor:
    """The nearest of ``2 ** bits`` evenly spaced levels from the least to the largest element of each vector.

    A vector is one token of one KV head. Both ends are levels, so they keep their bits, a constant vector stays as it
    is, and rounding twice gives what rounding once gave. Levels symmetric around zero would leave a vector whose
    elements lie on one side half of its levels; this is the asymmetric rounding per token that KIVI (arXiv:2402.02750)
    gives V, with the head as the group.

    Args:
        values: Finite float32 ``[..., D]``.
        bits: At least 1.
    """
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    intervals = 2**bits - 1
    # A constant vector has the code 0 everywhere, and not 0 / 0.
    span = (high - low).clamp(min=torch.finfo(values.dtype).tiny)
    part = torch.round((values - low) / span * intervals) / intervals
    # Of two products and not `low + part * span`: that would miss the largest element by a rounding.
    levels: torch.Tensor = low * (1 - part) + high * part
    return levels


def times_four(values: torch.Tensor) -> torch.Tensor:
    """4 times the values."""
    return values * 4.0


def through_e4m3(values: torch.Tensor) -> torch.Tensor:
    """The nearest E4M3 numbers (OCP OFP8 1.0, section 5.2), ties to even, saturating at +-448; NaN stays NaN.

    Without a scale the four exponent bits lie where the format has them and not where the values are: below 2**-6 the
    steps are 2**-9, and up to 2**-10 everything is 0. Every E4M3 number is exact in bfloat16 and in float16, so
    rounding twice gives what rounding once gave.
    """
    return e4m3_values().to(values.device)[encode_e4m3(values).long()]


# -- how it gets in ---------------------------------------------------------------------------------------------------


def degrade(worker: Any, *, key: Change | None = None, value: Change | None = None) -> None:
    """Changes K by ``key`` and V by ``value`` before each attention layer's cache update and attention.

    Several degradations add up: the one planted last comes first.

    Raises:
        WorkerError: There is no attention layer, or one whose ``forward`` does not take query, key and value (one that
            takes a latent in their place, say): nothing is replaced then.
    """
    layers = worker.kvqual_layers()
    if not layers:
        raise WorkerError("found no attention layer, expected at least one whose K or V can be degraded")
    for name, layer in layers.items():
        takes = list(inspect.signature(layer.forward).parameters)[:3] if hasattr(layer, "forward") else []
        if takes != _TAKES:
            raise WorkerError(f"layer {name}: found a forward that takes {takes}, expected {_TAKES} first")
    for layer in layers.values():
        replace(worker, layer, "forward", _degraded(layer.forward, layer.impl.num_kv_heads, key, value))


def _degraded(
    original: Callable[..., object], heads: int, change_key: Change | None, change_value: Change | None
) -> Callable[..., object]:
    def forward(query: Any, key: Any, value: Any, *args: Any, **named: Any) -> object:
        return original(query, _changed(key, heads, change_key), _changed(value, heads, change_value), *args, **named)

    return forward


def _changed(tensor: torch.Tensor | None, heads: int, change: Change | None) -> torch.Tensor | None:
    if tensor is None or change is None:
        return tensor
    vectors = tensor.reshape(tensor.shape[0], heads, math.prod(tensor.shape[1:]) // heads)
    # Rounded in float32: a 16-bit type would put its own rounding errors between the levels.
    return change(vectors.float()).to(tensor.dtype).reshape(tensor.shape).contiguous()
