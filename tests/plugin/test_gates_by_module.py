"""The gates named as a module, ``--pyargs pytest_kvqual.qualification``, where the package has them and where not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_kvqual import _places, plugin

ROOT = Path(__file__).resolve().parents[2]
GATES = ROOT / "qualification"


@pytest.mark.parametrize(
    ("argument", "path"),
    [
        ("pytest_kvqual.qualification", f"{GATES}"),
        ("pytest_kvqual.qualification.test_01_identity", f"{GATES}/test_01_identity.py"),
        ("pytest_kvqual.qualification.controls.test_fault_matrix", f"{GATES}/controls/test_fault_matrix.py"),
        ("pytest_kvqual.qualification.test_08_nll::test_nll", f"{GATES}/test_08_nll.py::test_nll"),
        ("pytest_kvqual.qualification.controls", f"{GATES}/controls"),
        ("pytest_kvqual.qualification.test_99", "pytest_kvqual.qualification.test_99"),
        ("pytest_kvqual.qualifications", "pytest_kvqual.qualifications"),
        ("my.pytest_kvqual.qualification", "my.pytest_kvqual.qualification"),
        ("pytest_kvqual.study", "pytest_kvqual.study"),
    ],
)
def test_in_a_checkout_a_gate_named_as_a_module_is_its_file(argument: str, path: str) -> None:
    """The names of gates become paths of the checkout; every other argument stays pytest's."""
    assert plugin._in_checkout(argument) == path


def test_an_editable_install_runs_the_gates_by_module_from_anywhere(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an empty folder ``--pyargs`` finds a gate, with no settings but strict markers and warnings as errors."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    result = pytester.runpytest_subprocess(
        "-p", "pytest_kvqual.plugin", "--pyargs", "pytest_kvqual.qualification.test_02_dispatch",
        "--collect-only", "-q", "-m", "gpu", "--strict-markers", "-W", "error",
    )  # fmt: skip
    assert result.ret == 0
    # A file outside of the root folder that is named alone has no path in its id.
    assert [line.rpartition("::")[2] for line in result.outlines if "::" in line] == ["test_dispatch"]


def test_without_pyargs_a_module_is_pytests_matter(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name alone is a file that is not there."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    result = pytester.runpytest_inprocess("-p", "pytest_kvqual.plugin", "pytest_kvqual.qualification")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert any("not found: pytest_kvqual.qualification" in line for line in result.errlines)


def test_installed_gates_are_not_distributed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed gate's id begins with its file's name, and stops a run with ``-n`` as a checkout's does."""
    folder = tmp_path / "pytest_kvqual" / "qualification"
    folder.mkdir(parents=True)
    (folder / "test_01_identity.py").write_text("")
    monkeypatch.setattr(_places, "PACKAGE", folder.parent)
    stop = plugin.pytest_xdist_node_collection_finished
    node = SimpleNamespace(config=SimpleNamespace(getoption=lambda name: None))
    stop(node, ["test_02_mine.py::test_mine", "tests/test_01_identity.py::test_mine"])
    for nodeid in ("test_01_identity.py::test_identity", "qualification/test_02_dispatch.py::test_dispatch"):
        with pytest.raises(pytest.UsageError, match="found -n with the gate"):
            stop(node, [nodeid])
