"""Facts of the package that no other test would notice when they break."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import pytest_kvqual

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "pytest_kvqual"


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_versions_agree() -> None:
    """The package states the version of pyproject.toml."""
    assert pytest_kvqual.__version__ == project()["project"]["version"]


def test_every_constraint_is_a_plain_pin() -> None:
    """Each line of constraints.txt is name==version: no path, no URL."""
    for name, version in pins().items():
        assert re.fullmatch(r"[A-Za-z0-9._-]+", name)
        assert re.fullmatch(r"[A-Za-z0-9.+!]+", version)


def test_every_dependency_is_pinned() -> None:
    """What pyproject.toml asks for (but the GPU extra) stands in constraints.txt, and exact pins agree."""
    metadata = project()["project"]
    extras = metadata["optional-dependencies"]
    found = {name.lower().replace("_", "-"): version for name, version in pins().items()}
    for requirement in [*metadata["dependencies"], *extras["cpu"], *extras["model"], *extras["dev"]]:
        name, _, exact = requirement.partition("==")
        name = re.split(r"[<>=!~\[; ]", name)[0].lower()
        assert name in found
        assert not exact or found[name] == exact


def test_the_pinned_torch_is_the_cpu_build() -> None:
    """The Makefile reads torch's pin from constraints.txt and falls back to the CPU index in one variable."""
    assert pins()["torch"].endswith("+cpu")
    makefile = (ROOT / "Makefile").read_text()
    assert makefile.count("download.pytorch.org") == 1


def test_no_bare_assert_in_the_source() -> None:
    """Typed errors only: `python -O` removes an assertion, and pytest rewrites it in files of its choice."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def imported(path: Path) -> set[str]:
    """The top-level names that a file imports, wherever in the file; a relative import is ours."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("pytest_kvqual" if node.level else (node.module or "").partition(".")[0])
    return names


def foreign_to_audit(path: Path) -> set[str]:
    """Imports that an independent reader must not have: anything outside the standard library and its own package."""
    own = {
        node.module
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pytest_kvqual.audit")
    }
    others = imported(path) - set(sys.stdlib_module_names)
    return others - {"pytest_kvqual"} if own and others == {"pytest_kvqual"} else others


def test_the_audit_stands_alone() -> None:
    """Every file under audit/ imports the standard library only (there may be none yet)."""
    found = {str(path): foreign_to_audit(path) for path in SOURCE.glob("audit/**/*.py")}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("line", "foreign"),
    [
        ("import json", set()),
        ("import numpy", {"numpy"}),
        ("from pytest_kvqual.judge import verdict", {"pytest_kvqual"}),
        ("def f():\n    from ..judge import verdict", {"pytest_kvqual"}),
        ("from pytest_kvqual.audit.digest import sha", set()),
    ],
)
def test_the_audits_check_sees_a_foreign_import(tmp_path: Path, line: str, foreign: set[str]) -> None:
    """The negative control of the test above: an import of another room or package is seen."""
    path = tmp_path / "reader.py"
    path.write_text(line)
    assert foreign_to_audit(path) == foreign


def test_every_ignored_rule_has_its_reason() -> None:
    """Each ruff ignore has its reason on its line."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    begin, end = lines.index("ignore = ["), lines.index("[tool.importlinter]")
    bare = [line for line in lines[begin:end] if re.match(r'\s+"[A-Z]+\d+",', line) and "#" not in line]
    assert bare == []


def test_ci_runs_the_tests() -> None:
    """The CI entry is executable, strict and calls `make test`."""
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash")
    assert "set -euo pipefail" in text
    assert "make test" in text
