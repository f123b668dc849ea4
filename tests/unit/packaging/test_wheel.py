"""The wheel and the sdist, built from this checkout: what is in them, and the gates run out of the wheel.

Takes what builds them from where pip is configured to look. ``make dist`` checks them in an empty environment.
"""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from pytest_kvqual.study.freeze import freeze
from pytest_kvqual.study.load import load_study

pytestmark = [pytest.mark.alone]

ROOT = Path(__file__).resolve().parents[3]
# What the wheel has of the checkout, and where.
MOVED = {
    "src/pytest_kvqual": "pytest_kvqual",
    "qualification": "pytest_kvqual/qualification",
    "studies": "pytest_kvqual/studies",
    "docs/reproducers": "pytest_kvqual/docs/reproducers",
}


class Built:
    """Both archives, and a folder in which the wheel is installed by itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "builder" / "bin" / "python"
        self.target = folder / "target"

    @property
    def wheel(self) -> Path:
        (found,) = (self.folder / "dist").glob("*.whl")
        return found

    @property
    def sdist(self) -> Path:
        (found,) = (self.folder / "dist").glob("*.tar.gz")
        return found

    def pip(self, *args: str) -> None:
        run(str(self.python), "-m", "pip", "--disable-pip-version-check", "--quiet", *args)


def run(*argv: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The archives of the checkout as it stands."""
    found = Built(tmp_path_factory.mktemp("built"))
    run(sys.executable, "-m", "venv", str(found.folder / "builder"))
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    found.pip("install", *requires)
    run(str(found.python), "-m", "hatchling", "build", "-d", str(found.folder / "dist"))
    found.pip("install", "--no-deps", "--target", str(found.target), str(found.wheel))
    return found


def names(built: Built) -> set[str]:
    with zipfile.ZipFile(built.wheel) as archive:
        return set(archive.namelist())


def metadata(built: Built, name: str) -> str:
    with zipfile.ZipFile(built.wheel) as archive:
        (path,) = (it for it in archive.namelist() if it.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


def test_the_wheel_holds_package_gates_studies_and_no_other_file(built: Built) -> None:
    """Each file of the package, each gate, each study's file and each reproducer; no test, no script, no picture."""
    expected = {"pytest_kvqual/docs/findings.md"}
    for source, target in MOVED.items():
        for path in (ROOT / source).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                expected.add(f"{target}/{path.relative_to(ROOT / source).as_posix()}")
    assert {name for name in names(built) if ".dist-info/" not in name} == expected
    assert not {name for name in expected if name.startswith("pytest_kvqual/tests")}
    with zipfile.ZipFile(built.wheel) as archive:
        for name in ("studies/smollm2-cpu/panels/nll-8192.json", "qualification/test_01_identity.py"):
            assert archive.read(f"pytest_kvqual/{name}") == (ROOT / name).read_bytes()


def test_the_wheel_says_what_it_is(built: Built) -> None:
    """Licence, Python, entry points of pytest, of vLLM and of the command line."""
    found: Message = Parser().parsestr(metadata(built, "METADATA"))
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.11"
    assert metadata(built, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    points = configparser.ConfigParser()
    points.read_string(metadata(built, "entry_points.txt"))
    assert {section: dict(points[section]) for section in points.sections()} == {
        "console_scripts": {"kvqual": "pytest_kvqual.cli:main"},
        "pytest11": {"kvqual": "pytest_kvqual.plugin"},
        "vllm.general_plugins": {"kvqual": "pytest_kvqual.kv.backends.vllm_plugin:register"},
    }


def test_the_sdist_holds_what_the_repository_does(built: Built) -> None:
    """Every file that is not ignored, so that an unpacked sdist can be tested and built as a checkout is."""
    if not (ROOT / ".git").exists():
        pytest.skip("found no repository, expected one: this test compares the sdist with it")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    expected = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    with tarfile.open(built.sdist) as archive:
        found = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert found == expected | {"PKG-INFO"}


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_checkout(built: Built) -> None:
    """Built from the unpacked sdist, the wheel has the same bytes."""
    again = built.folder / "again"
    built.pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(again), str(built.sdist))
    assert (again / built.wheel.name).read_bytes() == built.wheel.read_bytes()


def environment(built: Built) -> dict[str, str]:
    """Ours, in which the wheel's package comes before this checkout's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    return {**kept, "PYTHONPATH": str(built.target), "COLUMNS": "200"}


@pytest.mark.parametrize(("platform", "study"), [("cpu", "smollm2-cpu"), ("gpu", "qwen3-8b-awq")])
def test_the_gates_are_listed_out_of_the_wheel(built: Built, tmp_path: Path, platform: str, study: str) -> None:
    """From an empty folder, beside every package that the gates may import, in the order of the default study."""
    listed = run(
        sys.executable, "-m", "pytest", "--pyargs", "pytest_kvqual.qualification", "--collect-only", "-q",
        "-m", platform, "--strict-markers", cwd=tmp_path, env=environment(built),
    )  # fmt: skip
    found = [line.rpartition("::test_")[2] for line in listed.splitlines() if "::test_" in line]
    expected = [plan.name.replace("-", "_") for plan in load_study(study).gates]
    assert [name for name in found if not name.startswith("transfer_")] == expected


def test_the_lock_of_the_wheel_is_that_of_the_checkout(built: Built, tmp_path: Path) -> None:
    """A study frozen by the installed package and by this checkout gives the same bytes."""
    program = (
        "import sys, pytest_kvqual\n"
        "from pytest_kvqual.study.freeze import freeze\n"
        "from pytest_kvqual.study.load import load_study\n"
        "from pytest_kvqual.study.own import copy_study\n"
        "from pathlib import Path\n"
        "print(pytest_kvqual.__file__)\n"
        "freeze(load_study(str(copy_study('smollm2-cpu', Path(sys.argv[1])))))\n"
    )
    mine = tmp_path / "mine"
    said = run(sys.executable, "-c", program, str(mine), cwd=tmp_path, env=environment(built))
    assert said.strip() == str(built.target / "pytest_kvqual" / "__init__.py")
    there: dict[str, Any] = json.loads((mine / "lock.json").read_text())
    # The same copy, whose gates are this checkout's.
    here = json.loads(freeze(load_study(str(mine))).read_text())
    assert here == there
    assert {"pytest_kvqual/_places.py", "qualification/__init__.py"} <= here["implementation"].keys()
