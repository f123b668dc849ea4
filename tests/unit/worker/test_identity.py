"""What the worker is made of."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.worker import identity


class _Packed(torch.nn.Module):
    """A linear layer whose kernel took the weight away, as the CPU engine does."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
        held = weight.clone()
        self.cpu_linear = lambda x, _weight, _bias: torch.nn.functional.linear(x, held)
        self.held = held


class _Model(torch.nn.Module):
    packed_modules_mapping: ClassVar = {"qkv": ["q", "k", "v"]}

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.attn = torch.nn.Module()
        self.attn.qkv = _Packed(weight)
        self.norm = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False)


def _weight() -> torch.Tensor:
    return torch.randn(12, 4, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)


def _shapes() -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {"attn.qkv.weight": ((12, 4), torch.bfloat16), "norm": ((4,), torch.bfloat16)}


def test_a_packed_weight_is_read_back_exactly() -> None:
    """The digest of a weight that only the kernel holds equals the digest of the weight."""
    found = identity.served_digests(_Model(_weight()), _shapes())
    assert found["attn.qkv.weight"] == identity.tensor_digest(_weight())


def test_one_changed_element_of_a_packed_weight_changes_its_digest() -> None:
    """A kernel that multiplies with another weight is seen although the parameter is untouched."""
    model = _Model(_weight())
    model.attn.qkv.held[7, 2] += 1  # type: ignore[union-attr,operator,index]  # a plain test module
    found = identity.served_digests(model, _shapes())
    assert found["attn.qkv.weight"] != identity.tensor_digest(_weight())


def test_expected_digests_come_from_the_files(tmp_path: Path) -> None:
    """The fused parameter is rebuilt from the file's tensors in the model's declared order; others are left out."""
    safetensors = pytest.importorskip("safetensors.torch")
    q, k, v = _weight().view(3, 4, 4).unbind()
    safetensors.save_file(
        {"attn.q.weight": q.contiguous(), "attn.k.weight": k.contiguous(), "attn.v.weight": v.contiguous()},
        str(tmp_path / "model.safetensors"),
    )
    found = identity.expected_digests(_Model(_weight()), tmp_path, torch.bfloat16)
    assert found == {"attn.qkv.weight": identity.tensor_digest(_weight())}


@given(st.integers(0, 47), st.sampled_from([torch.bfloat16, torch.float32, torch.int32]))
def test_any_changed_element_changes_a_digest(where: int, dtype: torch.dtype) -> None:
    """One changed element changes the digest, in every dtype."""
    tensor = torch.arange(48).to(dtype)
    changed = tensor.clone()
    changed[where] += 1
    assert identity.tensor_digest(tensor) != identity.tensor_digest(changed)


def test_shape_and_dtype_are_part_of_a_digest() -> None:
    """The same bytes in another shape or dtype have another digest; the sign of zero has none."""
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    assert identity.tensor_digest(tensor) != identity.tensor_digest(tensor.view(2, 2))
    assert identity.tensor_digest(tensor) != identity.tensor_digest(tensor.to(torch.float16))
    assert identity.tensor_digest(tensor) == identity.tensor_digest(-tensor)


class _Distribution:
    version = "1.2"

    def __init__(self, root: Path) -> None:
        self._root = root

    def locate_file(self, path: str) -> Path:
        return self._root / path

    def read_text(self, name: str) -> str | None:
        return (self._root / name).read_text() if (self._root / name).exists() else None


def _install(root: Path) -> None:
    (root / "engine.py").write_text("VALUE = 1\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"VALUE = 1\n").digest()).rstrip(b"=").decode()
    (root / "RECORD").write_text(f"engine.py,sha256={digest},10\nRECORD,,\n")


def test_a_distribution_is_rehashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An untouched file matches its RECORD; an edited or a missing one is named with both digests or the error."""
    _install(tmp_path)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: _Distribution(tmp_path))
    record, modules = identity.distribution_record("engine")
    assert record == {"name": "engine", "version": "1.2", "files": 1, "mismatched": [], "editable": False}
    assert modules == {str((tmp_path / "engine.py").resolve())}
    (tmp_path / "engine.py").write_text("VALUE = 2\n")
    mismatched: Any = identity.distribution_record("engine")[0]["mismatched"]
    assert len(mismatched) == 1
    assert "engine.py: found sha256=" in mismatched[0]
    assert ", expected sha256=" in mismatched[0]
    (tmp_path / "engine.py").unlink()
    mismatched = identity.distribution_record("engine")[0]["mismatched"]
    assert "No such file" in mismatched[0]


def test_a_module_from_elsewhere_is_untraced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded module of the engine's package that no RECORD lists is named with its path."""
    inside, outside = ModuleType("engine_pkg"), ModuleType("engine_pkg.patched")
    for module, path in ((inside, tmp_path / "a.py"), (outside, tmp_path / "b.py")):
        module.__file__ = str(path)
        module.__spec__ = sys.__spec__
        monkeypatch.setitem(sys.modules, module.__name__, module)
    found = identity.trace_modules(["engine_pkg"], {str((tmp_path / "a.py").resolve())})
    assert found == {"traced": 1, "untraced": [f"engine_pkg.patched: {tmp_path / 'b.py'}"]}


def test_a_kernels_copy_must_agree_with_the_parameter_beside_it() -> None:
    """Where the engine keeps both, a copy that differs from its parameter shows in the digest."""
    model = _Model(_weight())
    model.attn.qkv.weight = torch.nn.Parameter(_weight(), requires_grad=False)  # type: ignore[union-attr]  # a test module
    agreed = identity.served_digests(model, _shapes())
    assert agreed["attn.qkv.weight"] == identity.tensor_digest(_weight())
    model.attn.qkv.held[0, 0] += 1  # type: ignore[union-attr,operator,index]  # a test module
    differing = identity.served_digests(model, _shapes())["attn.qkv.weight"]
    assert differing not in (agreed["attn.qkv.weight"], identity.tensor_digest(model.attn.qkv.held))  # type: ignore[union-attr,arg-type]  # a test module
    assert len(differing) == 64
