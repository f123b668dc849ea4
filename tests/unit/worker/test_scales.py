"""Frozen scales in every copy that the engine keeps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pytest_kvqual.worker import scales
from pytest_kvqual.worker.wire import WorkerError


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_k_scale", torch.tensor(1.0))
        self.register_buffer("_v_scale", torch.tensor(1.0))
        self._k_scale_float = 1.0
        self._v_scale_float = 1.0
        self._v_scale_cpu = torch.tensor(1.0)
        self.impl = SimpleNamespace(v_scale=1.0, head_size=64)


def test_every_copy_is_written_and_read_back() -> None:
    """Tensor, float, host copy and the impl's own copy all hold the frozen scale; K is left alone."""
    layers = {"a": _Layer(), "b": _Layer()}
    scales.install(layers, [0.5, 0.3])
    found = scales.snapshot(layers)
    third = float(torch.tensor(0.3))
    assert found[0]["v"] == {
        name: [(0.5).hex()] for name in ("_v_scale", "_v_scale_cpu", "_v_scale_float", "impl.v_scale")
    }
    assert found[1]["v"]["_v_scale"] == [third.hex()]  # type: ignore[index]  # JSON-like mapping
    assert found[0]["k"] == {"_k_scale": [(1.0).hex()], "_k_scale_float": [(1.0).hex()]}


@pytest.mark.parametrize("copy", ["_v_scale", "_v_scale_cpu", "_v_scale_float"])
def test_one_altered_copy_shows(copy: str) -> None:
    """Changing one copy of one layer changes the snapshot there and nowhere else."""
    layers = {"a": _Layer(), "b": _Layer()}
    before = scales.snapshot(layers)
    value = getattr(layers["b"], copy)
    setattr(layers["b"], copy, value * 2)
    after = scales.snapshot(layers)
    assert after[0] == before[0]
    assert {name for name in after[1]["v"] if after[1]["v"][name] != before[1]["v"][name]} == {copy}  # type: ignore[attr-defined,index]


def test_none_leaves_the_engines_scales() -> None:
    """An arm without frozen scales keeps what the engine set."""
    layers = {"a": _Layer()}
    before = scales.snapshot(layers)
    scales.install(layers, None)
    assert scales.snapshot(layers) == before


def test_a_wrong_number_of_scales_is_refused() -> None:
    """One scale too few is an error, not a partial installation."""
    layers = {"a": _Layer(), "b": _Layer()}
    with pytest.raises(WorkerError, match="1 V scales for 2 attention layers"):
        scales.install(layers, [0.5])
    assert layers["a"]._v_scale_float == 1.0


def test_a_layer_without_a_scale_is_refused() -> None:
    """A layer that keeps no V scale cannot be given one silently."""
    with pytest.raises(WorkerError, match="keeps no V scale"):
        scales.install({"a": SimpleNamespace(impl=SimpleNamespace())}, [0.5])
