"""The frozen V scales: installed in every copy that the engine keeps, and read back from every copy.

vLLM keeps a layer's scale as a float32 tensor (``_v_scale``), as a Python float (``_v_scale_float``) and as a host
tensor (``_v_scale_cpu``); a kernel may read any of them. Values are reported as C hexadecimal floats, which are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pytest_kvqual.worker.wire import WorkerError

_NAMES = ("k_scale", "v_scale")


def _holders(layer: object) -> list[tuple[str, object]]:
    impl = getattr(layer, "impl", None)
    return [("", layer)] + ([("impl.", impl)] if impl is not None else [])


def copies(layer: object, which: str) -> dict[str, object]:
    """Every attribute of a layer or its impl whose name contains ``which`` and that holds a number or tensor."""
    found: dict[str, object] = {}
    for prefix, holder in _holders(layer):
        names = set(vars(holder)) | set(getattr(holder, "_buffers", {}) or {})
        for name in sorted(names):
            if which not in name:
                continue
            value = getattr(holder, name)
            if isinstance(value, torch.Tensor | float | int) and not isinstance(value, bool):
                found[prefix + name] = value
    return found


def _hex(value: object) -> list[str]:
    if isinstance(value, torch.Tensor):
        return [float(item).hex() for item in value.detach().reshape(-1).to("cpu", torch.float64).tolist()]
    return [float(value).hex()]  # type: ignore[arg-type]  # copies() returns tensors, floats and ints only


def install(layers: Mapping[str, object], v_scales: Sequence[float] | None) -> None:
    """Writes each layer's V scale into every copy of it. None leaves the engine's own scales.

    Raises:
        WorkerError: The number of scales is not the number of layers, or a layer keeps no scale.
    """
    if v_scales is None:
        return
    if len(v_scales) != len(layers):
        raise WorkerError(f"{len(v_scales)} V scales for {len(layers)} attention layers, expected one per layer")
    for (name, layer), scale in zip(layers.items(), v_scales, strict=True):
        found = copies(layer, "v_scale")
        if not found:
            raise WorkerError(f"layer {name} keeps no V scale")
        for attribute, value in found.items():
            holder = dict(_holders(layer))["impl."] if attribute.startswith("impl.") else layer
            if isinstance(value, torch.Tensor):
                value.fill_(scale)
            else:
                setattr(holder, attribute.removeprefix("impl."), float(scale))


def snapshot(layers: Mapping[str, object]) -> list[dict[str, object]]:
    """Every copy of every scale: one mapping per layer with ``layer``, ``k`` and ``v`` (attribute -> hex floats)."""
    return [
        {
            "layer": name,
            **{
                which[0]: {attribute: _hex(value) for attribute, value in copies(layer, which).items()}
                for which in _NAMES
            },
        }
        for name, layer in layers.items()
    ]
