"""What an interpreter has installed."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pytest_kvqual.errors import InstallError
from pytest_kvqual.server.install import engine_identity
from pytest_kvqual.study.model import Study


def study(distribution: str, wanted: str) -> Study:
    """The part of a study that names its engine."""
    return cast(Study, SimpleNamespace(engine=SimpleNamespace(distribution=distribution, version=wanted)))


def test_an_installation_is_named_by_its_records() -> None:
    """Each installed distribution has its version and the digest of its RECORD, the same each time."""
    python = Path(sys.executable)
    found = engine_identity(study("pytest", version("pytest")), python)
    assert found == engine_identity(study("pytest", version("pytest")), python)
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    entries = cast(list[dict[str, str]], found["distributions"])
    assert entries[0]["name"] == "pytest"
    assert len(entries[0]["record_sha256"]) == 64


def test_how_a_wheel_was_installed_is_no_part_of_its_name(tmp_path: Path) -> None:
    """Scripts with the interpreter's path, byte code and pip's own notes do not count; a changed file does."""

    def digest(record: str) -> object:
        site = tmp_path / "site"
        info = site / "engine-1.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine\nVersion: 1\n")
        (info / "RECORD").write_text(record)
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        found = engine_identity(study("engine", "1"), python)
        return cast(list[dict[str, str]], found["distributions"])[0]["record_sha256"]

    plain = "engine.py,sha256=abc,10\nengine-1.dist-info/METADATA,sha256=d,20\n"
    noise = "../../../bin/engine,sha256=x,1\n__pycache__/engine.pyc,,\nengine-1.dist-info/REQUESTED,sha256=y,0\n"
    assert digest(plain) == digest(noise + plain)
    assert digest(plain) != digest(plain.replace("abc", "abd"))


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [("pytest", "0.1", "found pytest .*, expected 0.1"), ("no-such-engine", "1", "no-such-engine not installed")],
)
def test_another_engine_is_refused(name: str, wanted: str, message: str) -> None:
    """A missing engine and another version are named, with what to install."""
    with pytest.raises(InstallError, match=message) as caught:
        engine_identity(study(name, wanted), Path(sys.executable))
    assert f"{name}=={wanted}" in caught.value.advice


def test_an_interpreter_that_does_not_run_is_refused(tmp_path: Path) -> None:
    """A missing interpreter, and one that fails, are named."""
    with pytest.raises(InstallError, match="cannot run the interpreter"):
        engine_identity(study("pytest", "1"), tmp_path / "none")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no libpython >&2\nexit 7\n")
    broken.chmod(0o755)
    with pytest.raises(InstallError, match="ended with 7: no libpython"):
        engine_identity(study("pytest", "1"), broken)


def test_the_callers_path_does_not_answer_for_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution on PYTHONPATH is not the interpreter's."""
    (tmp_path / "fake_engine-9.dist-info").mkdir()
    (tmp_path / "fake_engine-9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fake-engine\nVersion: 9\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InstallError, match="fake-engine not installed"):
        engine_identity(study("fake-engine", "9"), Path(sys.executable))
