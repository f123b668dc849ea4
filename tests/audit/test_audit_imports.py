"""The audit stands apart: the standard library, and nothing of this project outside its own room."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOM = Path(__file__).resolve().parents[2] / "src" / "pytest_kvqual" / "audit"
OWN = "pytest_kvqual.audit"


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.name)
def test_every_import_statement_is_of_the_library_or_of_the_room(path: Path) -> None:
    """No statement of the room, inside functions too, imports anything else."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        for name in names:
            top = name.partition(".")[0]
            assert name == OWN or name.startswith(f"{OWN}.") or top in sys.stdlib_module_names, name


def test_a_bare_interpreter_runs_it(tmp_path: Path) -> None:
    """Isolated, without site packages, with the package's source alone on its path, it loads nothing beyond that."""
    source = ROOM.parents[1]
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(source)!r})\n"
        "from pytest_kvqual.audit.command import main\n"
        f"status = main([{str(tmp_path)!r}])\n"
        "top = {name.partition('.')[0] for name in sys.modules}\n"
        "print(status, sorted(top - set(sys.stdlib_module_names) - {'__main__'}),\n"
        "      sorted(name for name in sys.modules if name.startswith('pytest_kvqual')\n"
        "             and name != 'pytest_kvqual' and not name.startswith('pytest_kvqual.audit')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.split("\n")[0] == "2 ['pytest_kvqual'] []", done.stderr
    assert done.stderr.count("\n") == 1


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    """``python -m pytest_kvqual.audit`` is the command."""
    done = subprocess.run(
        [sys.executable, "-S", "-B", "-m", OWN, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=60, cwd=ROOM.parents[1], env={"PATH": ""},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("kvqual audit: ")
