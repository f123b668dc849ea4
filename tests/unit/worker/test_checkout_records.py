"""The checkouts of an arm, as the worker reads them again."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pytest_kvqual.worker import identity
from pytest_kvqual.worker.wire import WorkerError, decode_config

CONFIG: dict[str, object] = {
    "arm": "candidate",
    "kv_format": "k16v8",
    "attention_backend": "X",
    "v_scales": None,
    "before_load": [],
    "after_init": [],
    "model_dir": "/m",
    "pythonpath": [],
    "distribution": "vllm",
}


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """``install.json`` of a checkout with one module."""
    root = tmp_path / "checkout"
    (root / "kvq_pkg").mkdir(parents=True)
    (root / "kvq_pkg" / "__init__.py").write_text("x = 1\n")
    modules = {"kvq_pkg/__init__.py": hashlib.sha256(b"x = 1\n").hexdigest()}
    path = tmp_path / "install.json"
    checkout = {"name": "kvq_pkg", "commit": "c" * 40, "path": str(root), "modules": modules}
    path.write_text(json.dumps({"schema": 1, "arm": "candidate", "checkouts": [checkout]}))
    return path


def test_an_unaltered_checkout_is_a_record_like_a_distributions(record: Path) -> None:
    """Each file has the digest that was taken before the boot."""
    records, modules, roots = identity.checkout_records(record)
    assert records == [
        {"name": "checkout kvq_pkg", "version": "c" * 40, "files": 1, "mismatched": [], "editable": True}
    ]
    assert modules == {"kvq_pkg": {str((record.parent / "checkout/kvq_pkg/__init__.py").resolve())}}
    assert roots == (record.parent / "checkout",)


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_an_altered_file_is_named(record: Path, damage: str) -> None:
    """A module that changed between the look at it and its import is told with both digests."""
    path = record.parent / "checkout/kvq_pkg/__init__.py"
    path.unlink() if damage == "gone" else path.write_text("x = 2\n")
    records, _, _ = identity.checkout_records(record)
    found = records[0]["mismatched"]
    assert isinstance(found, list)
    assert [line.startswith(f"{path}: found ") for line in found] == [True]


def test_a_package_of_a_checkout_is_traced_to_that_checkout_alone(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same package installed beside it does not count, even where its own record is whole."""
    _, checkouts, _ = identity.checkout_records(record)
    installed = tmp_path / "site" / "kvq_pkg" / "__init__.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    recorded = {str(installed.resolve())}
    for path, traced in ((record.parent / "checkout/kvq_pkg/__init__.py", 1), (installed, 0)):
        module = ModuleType("kvq_pkg")
        module.__file__ = str(path)
        module.__spec__ = object()  # type: ignore[assignment]  # that it has one is all that counts
        monkeypatch.setitem(sys.modules, "kvq_pkg", module)
        found = identity.trace_with_checkouts(("kvq_pkg",), recorded, checkouts)
        assert found["traced"] == traced
        assert found["untraced"] == ([] if traced else [f"kvq_pkg: {path}"])
    assert identity.trace_with_checkouts(("kvq_pkg",), recorded, {})["traced"] == 1


def test_no_other_package_comes_from_a_checkout_unrecorded(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that git ignores shadows an installed package: it is untraced, by its own place and through a link."""
    _, checkouts, roots = identity.checkout_records(record)
    shadow, elsewhere = roots[0] / "kvq_other" / "__init__.py", tmp_path / "site" / "kvq_other" / "__init__.py"
    for path in (shadow, elsewhere):
        path.parent.mkdir(parents=True)
        path.write_text("")
    (roots[0] / "link").symlink_to(elsewhere.parent)
    linked = roots[0] / "link" / "__init__.py"
    for path, expected in ((shadow, True), (linked, True), (elsewhere, False)):
        module = ModuleType("kvq_other")
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, "kvq_other", module)
        found = identity.trace_with_checkouts(("torch",), set(), checkouts, roots)["untraced"]
        assert isinstance(found, list)
        assert (f"kvq_other: {path}" in found) is expected
    # A file of the checkout that its record has is traced: the candidate's own module at the root, say.
    monkeypatch.setattr(module, "__file__", str(roots[0] / "kvq_pkg/__init__.py"))
    found = identity.trace_with_checkouts(("torch",), set(), checkouts, roots)["untraced"]
    assert not [line for line in found if line.startswith("kvq_")]  # type: ignore[attr-defined]


def test_kernel_packages_are_found_where_they_were_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the packages that bring kernels those count that this process has imported and that are installed."""
    monkeypatch.setattr(identity, "KERNELS", {"kvq_none": "kvq-none", "pytest": "pytest", "kvq_gone": "kvq-gone"})
    monkeypatch.setitem(sys.modules, "kvq_gone", ModuleType("kvq_gone"))
    assert identity.loaded_kernels() == {"pytest": "pytest"}


@pytest.mark.parametrize("text", ["", "{}", '{"checkouts": [{}]}', "[]"])
def test_a_record_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    """Without the digests the worker says so, and nothing is traced."""
    (tmp_path / "install.json").write_text(text)
    with pytest.raises(WorkerError, match="found no record of checkouts"):
        identity.checkout_records(tmp_path / "install.json")


def test_the_worker_is_told_of_checkouts_where_there_are_any() -> None:
    """The key may be left out, and is a path."""
    assert decode_config({"kvqual": CONFIG}).checkouts is None
    assert decode_config({"kvqual": {**CONFIG, "checkouts": "/e/install.json"}}).checkouts == Path("/e/install.json")
    with pytest.raises(WorkerError, match="checkouts is 3, expected a string"):
        decode_config({"kvqual": {**CONFIG, "checkouts": 3}})
