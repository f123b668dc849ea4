"""Faults of what is loaded: weights and scales."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pytest_kvqual.faults.planting import replace
from pytest_kvqual.worker.scales import copies


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
    # Where no kernel packed a weight aside, as on a GPU, the packed weight is the parameter: one of its integers is
    # changed, or, of a model that is not quantised, one element of a projection.
    for module in worker.model_runner.get_model().modules():
        if hasattr(module, "cpu_linear"):
            original = module.cpu_linear

            def altered(x: Any, weight: Any, bias: Any, original: Any = original) -> Any:
                result = original(x, weight, bias).clone()
                result[..., 0] += x[..., 0]
                return result

            replace(worker, module, "cpu_linear", altered)
            return
    named = [
        (name, it)
        for name, it in worker.model_runner.get_model().named_parameters()
        if it.is_contiguous() and it.numel()
    ]
    chosen = next((it for _, it in named if not it.is_floating_point()), None)
    if chosen is None:
        chosen = next((it for name, it in named if name.endswith("proj.weight")), None)
    if chosen is None:
        raise RuntimeError("the model has no linear layer whose weight could be altered")
    first = chosen.data.view(-1)[:1]
    kept = first.clone()
    first.copy_(kept + 1)
    worker.kvqual_undo.append(lambda: first.copy_(kept))


def scale_copy_altered(worker: Any) -> None:
    """One layer's V scale differs between the copy that writes and the copy that reads."""
    layer = list(worker.kvqual_layers().values())[-1]
    replace(worker, layer, "_v_scale_float", float(layer._v_scale_float) * 2)


def scales_left_at_one(worker: Any) -> None:
    """No layer was given its scales: every copy of both is 1, so that writes and reads agree."""
    for layer in worker.kvqual_layers().values():
        for which in ("k_scale", "v_scale"):
            for name, held in copies(layer, which).items():
                holder = layer.impl if name.startswith("impl.") else layer
                attribute = name.removeprefix("impl.")
                if not attribute.startswith("_"):
                    continue  # what was declared, not a copy that a kernel reads
                if isinstance(held, torch.Tensor):
                    worker.kvqual_undo.append(partial(held.copy_, held.clone()))
                    held.fill_(1.0)
                else:
                    replace(worker, holder, attribute, 1.0)
