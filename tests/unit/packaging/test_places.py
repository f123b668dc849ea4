"""A package with its gates and studies inside, as a wheel installs it, and the same in a checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_study import TinyStudy

from pytest_kvqual import _places
from pytest_kvqual.errors import LockError, StudyError
from pytest_kvqual.prepare import prepare
from pytest_kvqual.server.command import PACKAGE_ROOT
from pytest_kvqual.study.freeze import freeze, freeze_command, verify_lock
from pytest_kvqual.study.load import find_study, is_shipped, load_study, require_prepared, studies_folder
from pytest_kvqual.study.own import copy_study
from pytest_kvqual.study.timing_files import plan_command

ROOT = Path(__file__).resolve().parents[3]
SMALL = "smollm2-cpu-fp8"
IGNORED = shutil.ignore_patterns("__pycache__")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A ``site-packages`` that holds the package as a wheel lays it out, with two of the studies."""
    folder = tmp_path / "site"
    package = folder / "pytest_kvqual"
    shutil.copytree(ROOT / "src" / "pytest_kvqual", package, ignore=IGNORED)
    shutil.copytree(ROOT / "qualification", package / "qualification", ignore=IGNORED)
    for name in (SMALL, "phi-4"):
        shutil.copytree(ROOT / "studies" / name, package / "studies" / name, ignore=IGNORED)
    (package / "studies" / SMALL / "build.py").write_text("one = 1\n")
    (package / "docs" / "reproducers").mkdir(parents=True)
    (package / "docs" / "reproducers" / "finding.py").write_text("two = 2\n")
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of ``site``, taken for the one that runs."""
    monkeypatch.setattr(_places, "PACKAGE", site / "pytest_kvqual")
    return site / "pytest_kvqual"


@pytest.fixture
def frozen(installed: Path) -> Path:
    """The small study of the installed package, with the lock that fits this source; its folder."""
    folder = installed / "studies" / SMALL
    aside = installed.parent.parent / "aside" / SMALL
    shutil.copytree(folder, aside)
    freeze(load_study(str(aside)))
    shutil.copyfile(aside / "lock.json", folder / "lock.json")
    return folder


def test_a_checkout_has_gates_and_studies_at_its_root() -> None:
    """Run from a checkout, the package finds both beside ``src``, and says how to name the gates there."""
    assert not _places.installed()
    assert studies_folder() == ROOT / "studies"
    assert _places.folder("qualification") == ROOT / "qualification"
    assert _places.gates_argument() == "qualification/"


def test_an_installed_package_has_them_inside(installed: Path) -> None:
    """Run from an install, the package finds both in itself, and a study by its name alone."""
    assert _places.installed()
    assert studies_folder() == installed / "studies"
    assert _places.gates_argument() == "--pyargs pytest_kvqual.qualification"
    assert find_study(SMALL) == installed / "studies" / SMALL / "study.toml"
    assert is_shipped(load_study(SMALL))
    assert not is_shipped(load_study(str(ROOT / "studies" / SMALL)))


def test_one_study_has_one_lock_in_a_checkout_and_installed(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests of study, weights and implementation have the same names and values in both places."""
    mine = tmp_path / "mine" / SMALL
    shutil.copytree(ROOT / "studies" / SMALL, mine)
    here = freeze(load_study(str(mine))).read_bytes()
    assert "qualification/test_01_identity.py" in json.loads(here)["implementation"]
    monkeypatch.setattr(_places, "PACKAGE", site / "pytest_kvqual")
    assert freeze(load_study(str(mine))).read_bytes() == here
    shutil.copyfile(mine / "lock.json", site / "pytest_kvqual" / "studies" / SMALL / "lock.json")
    assert verify_lock(load_study(SMALL)).path == site / "pytest_kvqual" / "studies" / SMALL / "lock.json"


def test_a_folder_of_the_users_is_not_taken_for_the_installed_gates(installed: Path, tmp_path: Path) -> None:
    """A project with ``studies/mine`` and a folder ``qualification`` of its own locks the gates that are run."""
    mine = tmp_path / "project" / "studies" / "mine"
    shutil.copytree(ROOT / "studies" / SMALL, mine)
    (tmp_path / "project" / "qualification").mkdir()
    (tmp_path / "project" / "qualification" / "notes.py").write_text("")
    locked = json.loads(freeze(load_study(str(mine))).read_bytes())["implementation"]
    assert "qualification/test_01_identity.py" in locked
    assert "qualification/notes.py" not in locked
    gate = installed / "qualification" / "test_01_identity.py"
    gate.write_text(gate.read_text() + "\n")
    with pytest.raises(LockError, match=r": qualification/test_01_identity\.py: found sha256"):
        verify_lock(load_study(str(mine)))


def test_an_installed_gate_that_was_changed_breaks_the_lock(installed: Path, frozen: Path) -> None:
    """A gate's file in the package is named as in a checkout, and says to take a copy."""
    gate = installed / "qualification" / "test_01_identity.py"
    gate.write_text(gate.read_text() + "\n")
    with pytest.raises(LockError, match=r": qualification/test_01_identity\.py: found sha256") as caught:
        verify_lock(load_study(SMALL))
    assert f"`kvqual copy {SMALL} FOLDER`" in caught.value.advice


def test_a_gate_that_joins_the_installed_ones_breaks_the_lock(installed: Path, frozen: Path) -> None:
    """A file that is added to the package's gates, or to its code, is an addition."""
    (installed / "qualification" / "test_15_kind.py").write_text("")
    (installed / "judge" / "lenient.py").write_text("")
    with pytest.raises(LockError) as caught:
        verify_lock(load_study(SMALL))
    for name in ("qualification/test_15_kind.py", "pytest_kvqual/judge/lenient.py"):
        assert f"{name}: found sha256 " in str(caught.value)


def test_in_a_checkout_a_folder_named_studies_is_code(
    tiny_study: TinyStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only in an install are such folders of the package not its own code."""
    copy = tmp_path / "project" / "src" / "pytest_kvqual"
    shutil.copytree(ROOT / "src" / "pytest_kvqual", copy, ignore=IGNORED)
    monkeypatch.setattr(_places, "PACKAGE", copy)
    freeze(load_study(str(tiny_study.folder)))
    (copy / "studies").mkdir()
    (copy / "studies" / "lenient.py").write_text("")
    with pytest.raises(LockError, match=r"pytest_kvqual/studies/lenient\.py: found sha256 .* \(added\)"):
        verify_lock(load_study(str(tiny_study.folder)))


def test_the_lock_of_an_installed_study_is_left_as_it_is(frozen: Path) -> None:
    """Freezing what is frozen writes nothing; a lock that would be another one is refused."""
    before = (frozen / "lock.json").stat()
    assert ": unchanged: " in freeze_command(SMALL, check=False)
    assert (frozen / "lock.json").stat().st_mtime_ns == before.st_mtime_ns
    (frozen / "study.toml").write_text((frozen / "study.toml").read_text() + "# mine\n")
    with pytest.raises(StudyError, match="in the installed package at") as caught:
        freeze_command(SMALL, check=False)
    assert caught.value.advice == f"run `kvqual copy {SMALL} FOLDER` and give FOLDER for the study"


def test_nothing_is_prepared_in_the_installed_package(installed: Path, tmp_path: Path) -> None:
    """A study that needs its model's files is prepared in a copy, and each refusal says so."""
    with pytest.raises(StudyError, match="in the installed package at"):
        list(prepare("phi-4", format=None, model=tmp_path))
    with pytest.raises(StudyError) as caught:
        require_prepared(load_study("phi-4"))
    assert "run `kvqual copy phi-4 FOLDER`, then `kvqual prepare FOLDER --model DIR`" in caught.value.advice


def test_plans_of_an_installed_study_are_printed_and_not_changed(installed: Path) -> None:
    """A plan that is there already is printed, with the gates as they are named there; another one is not written."""
    shutil.copytree(ROOT / "studies" / "smollm2-cpu", installed / "studies" / "smollm2-cpu", ignore=IGNORED)
    lines = plan_command("smollm2-cpu", check=False, default="smollm2-cpu")
    assert any(line.startswith('pytest --pyargs pytest_kvqual.qualification -m "cpu and timing"') for line in lines)
    plan = installed / "studies" / "smollm2-cpu" / "plans" / "1024.json"
    plan.write_text("{}")
    with pytest.raises(StudyError, match="in the installed package at"):
        plan_command("smollm2-cpu", check=False, default="smollm2-cpu")
    assert plan.read_text() == "{}"


def test_a_copy_is_frozen_outside_the_package(frozen: Path, tmp_path: Path) -> None:
    """The copy has the lock that matches, may be changed, and is then frozen where it is."""
    (frozen / "study.toml").chmod(0o444)
    mine = copy_study(SMALL, tmp_path / "mine")
    assert ": unchanged: " in freeze_command(str(mine), check=False)
    text = (mine / "study.toml").read_text()
    (mine / "study.toml").write_text(text + "# mine\n")
    assert f": frozen anew: {mine / 'lock.json'}" in freeze_command(str(mine), check=False)
    assert (frozen / "study.toml").read_text() == text


@pytest.mark.parametrize("there", ["file", "folder"])
def test_a_copy_replaces_nothing(tiny_study: TinyStudy, tmp_path: Path, there: str) -> None:
    """What is at the copy's place stays, and nothing is left beside it."""
    target = tmp_path / "place" / "mine"
    if there == "file":
        target.parent.mkdir()
        target.write_text("mine")
    else:
        target.mkdir(parents=True)
        (target / "notes").write_text("mine")
    with pytest.raises(StudyError, match=r"found something at .*mine, expected nothing there"):
        copy_study(str(tiny_study.folder), target)
    assert [path.name for path in target.parent.iterdir()] == ["mine"]


def test_a_copy_goes_into_an_empty_folder_but_not_into_the_study(tiny_study: TinyStudy, tmp_path: Path) -> None:
    """An empty folder is taken; the study's own folder, or one in it, is not."""
    (tmp_path / "empty").mkdir()
    assert load_study(str(copy_study(str(tiny_study.folder), tmp_path / "empty"))).name == "tiny"
    with pytest.raises(StudyError, match="outside of the study's own"):
        copy_study(str(tiny_study.folder), tiny_study.folder / "copy")


def test_an_arms_processes_find_this_package_and_none_beside_it(site: Path) -> None:
    """The folder on a server's path gives the package and its modules; a neighbour of the package is not seen."""
    (site / "neighbour.py").write_text("")
    place = site / "pytest_kvqual" / PACKAGE_ROOT.relative_to(ROOT / "src" / "pytest_kvqual")
    assert [path.name for path in place.iterdir()] == ["pytest_kvqual"]
    program = (
        "import importlib.util, pytest_kvqual, pytest_kvqual.worker.wire as wire\n"
        "from pytest_kvqual import __version__\n"
        "print(pytest_kvqual.__file__, wire.__file__, importlib.util.find_spec('neighbour'), sep='\\n')"
    )

    def found(path: Path) -> list[str]:
        return subprocess.run(
            [sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(path)}, cwd=site.parent,
        ).stdout.splitlines()  # fmt: skip

    package = site / "pytest_kvqual"
    assert found(place) == [str(package / "__init__.py"), str(package / "worker" / "wire.py"), "None"]
    assert found(site)[2] != "None"
