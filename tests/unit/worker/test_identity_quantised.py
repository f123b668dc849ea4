"""Quantised weights: what the files say, stacked as the parameter says, unchanged since the engine repacked them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from pytest_kvqual.worker import identity
from pytest_kvqual.worker.wire import WorkerError


class _Linear(torch.nn.Module):
    """A fused layer of packed integers with scales and zero points, stacked along its second axis."""

    def __init__(self, qweight: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__()
        for name, data in (("qweight", qweight), ("scales", scales)):
            parameter = torch.nn.Parameter(data, requires_grad=False)
            parameter.output_dim = 1  # type: ignore[attr-defined]  # as the engine's parameters say it
            self.register_parameter(name, parameter)


class _Model(torch.nn.Module):
    packed_modules_mapping: ClassVar = {"qkv": ["q", "k", "v"]}

    def __init__(self, files: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.attn = torch.nn.Module()
        stack = [torch.cat([files[f"attn.{part}.{what}"] for part in "qkv"], dim=1) for what in ("qweight", "scales")]
        self.attn.qkv = _Linear(stack[0], stack[1].to(torch.float16))
        self.norm = torch.nn.Parameter(files["norm"].to(torch.float16), requires_grad=False)


@pytest.fixture
def files() -> dict[str, torch.Tensor]:
    """What the checkpoint holds: int32 that no 16-bit type can hold, and scales in another type than they load as."""
    random = torch.Generator().manual_seed(1)
    found: dict[str, torch.Tensor] = {"norm": torch.ones(4)}
    for part, width in (("q", 4), ("k", 2), ("v", 2)):
        found[f"attn.{part}.qweight"] = torch.randint(-(2**31), 2**31, (6, width), generator=random).to(torch.int32)
        found[f"attn.{part}.scales"] = torch.rand(2, 8 * width, generator=random)
    return found


@pytest.fixture
def folder(files: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    """The checkpoint's folder."""
    save_file(files, str(tmp_path / "model.safetensors"))
    return tmp_path


def _repacked(model: _Model) -> None:
    """What an engine does after loading: other forms of the same weights, and one more that was not loaded."""
    layer: Any = model.attn.qkv
    packed = torch.nn.Parameter(layer.qweight.t().contiguous(), requires_grad=False)
    del layer.qweight
    layer.register_parameter("qweight", packed)
    layer.register_parameter("order", torch.nn.Parameter(torch.arange(6.0), requires_grad=False))


def test_packed_integers_are_expected_as_they_lie_in_the_files(files: dict[str, torch.Tensor], folder: Path) -> None:
    """Integers are not converted, scales are, and both are stacked along the parameter's own axis."""
    model = _Model(files)
    axes = identity.output_axes(model)
    assert axes == {"attn.qkv.qweight": 1, "attn.qkv.scales": 1, "norm": 0}
    loaded = identity.loaded_digests(model)
    assert identity.expected_digests(model, folder, torch.float16, axes=axes) == loaded


def test_a_changed_file_is_seen(files: dict[str, torch.Tensor], folder: Path) -> None:
    """One bit of one packed integer in the files is another digest."""
    model = _Model(files)
    axes = identity.output_axes(model)
    files["attn.v.qweight"][3, 1] ^= 1
    save_file(files, str(folder / "model.safetensors"))
    expected, loaded = (
        identity.expected_digests(model, folder, torch.float16, axes=axes),
        identity.loaded_digests(model),
    )
    assert {name for name in loaded if expected[name] != loaded[name]} == {"attn.qkv.qweight"}


def test_names_are_those_that_were_loaded(files: dict[str, torch.Tensor], folder: Path) -> None:
    """A parameter that the engine adds or renames after loading changes nothing of what is expected."""
    model = _Model(files)
    axes, loaded = identity.output_axes(model), identity.loaded_digests(model)
    _repacked(model)
    assert identity.expected_digests(model, folder, torch.float16, axes=axes) == loaded


def test_repacked_weights_stand_for_the_loaded_ones_while_they_are_unchanged(files: dict[str, torch.Tensor]) -> None:
    """After repacking each parameter has the digest that it was loaded with, and no other parameter appears."""
    model = _Model(files)
    loaded = identity.loaded_digests(model)
    _repacked(model)
    after = identity.held_digests(model)
    assert identity.served_digests(model, {}, loaded=loaded, after_load=after) == loaded


@pytest.mark.parametrize("name", ["qweight", "scales", "order"])
def test_a_change_after_repacking_is_seen(name: str, files: dict[str, torch.Tensor]) -> None:
    """One element of any parameter, one that was added too, is another digest or one more name."""
    model = _Model(files)
    loaded = identity.loaded_digests(model)
    _repacked(model)
    after = identity.held_digests(model)
    getattr(model.attn.qkv, name).data[1] += 1
    found = identity.served_digests(model, {}, loaded=loaded, after_load=after)
    assert {key for key in {*found, *loaded} if found.get(key) != loaded.get(key)} == {f"attn.qkv.{name}"}


def test_a_parameter_that_is_gone_is_seen(files: dict[str, torch.Tensor]) -> None:
    """One that was there after repacking and is no more has another digest; one that repacking took is as it was."""
    model = _Model(files)
    loaded = identity.loaded_digests(model)
    del model.attn.qkv.scales  # type: ignore[union-attr]  # a plain test module
    after = identity.held_digests(model)
    assert identity.served_digests(model, {}, loaded=loaded, after_load=after) == loaded
    del model.attn.qkv.qweight  # type: ignore[union-attr]  # the same
    found = identity.served_digests(model, {}, loaded=loaded, after_load=after)
    assert {key for key in loaded if found.get(key) != loaded[key]} == {"attn.qkv.qweight"}


def test_another_axis_over_several_ranks_is_refused(files: dict[str, torch.Tensor], folder: Path) -> None:
    """How a weight stacked along its second axis is divided is not restated, so it is not guessed."""
    model = _Model(files)
    with pytest.raises(WorkerError, match="stacked along axis 1 over 2 ranks, expected one rank"):
        identity.expected_digests(model, folder, torch.float16, size=2, axes=identity.output_axes(model))
