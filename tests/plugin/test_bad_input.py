"""Bad input to real campaigns: one line with what was found and expected; nothing boots, nothing is green."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_kvqual import campaign, models
from pytest_kvqual.server import install, process
from pytest_kvqual.study import freeze, load

if TYPE_CHECKING:
    from tests.plugin.conftest import Runner

pytest_plugins = ["pytester"]
USAGE = pytest.ExitCode.USAGE_ERROR


@pytest.fixture
def study(gates: Runner) -> Path:
    """A copy of the embedded study, under gates that have no campaign but the real one."""
    (gates.pytester.path / "conftest.py").write_text("")
    folder = gates.pytester.path / "smollm2-cpu"
    shutil.copytree(load.studies_folder() / "smollm2-cpu", folder)
    (folder / "lock.json").unlink(missing_ok=True)
    return folder


def edit(study: Path, old: str, new: str) -> None:
    """Change the study's declaration."""
    path = study / "study.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def refused(gates: Runner, study: Path, *args: str) -> str:
    """The one line of a run that is refused."""
    result = gates.run("qualification", "-m", "cpu", "--study", str(study), *args)
    assert result.ret == USAGE
    (line,) = [line for line in result.stderr.lines if line.startswith("ERROR")]
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert not list(gates.pytester.path.rglob("attempt-*"))
    return line


def test_unknown_arm(gates: Runner, study: Path) -> None:
    """The line names the arms that there are."""
    line = refused(gates, study, "--arm", "candidat")
    assert "found no arm 'candidat'" in line
    assert "expected one of native, reference, candidate" in line


def test_a_length_that_the_study_lacks(gates: Runner, study: Path) -> None:
    """The line names the lengths that there are."""
    assert "found no length 2048 in study smollm2-cpu, expected one of 1024, 8192" in refused(
        gates, study, "--length", "2048"
    )


def test_no_study(gates: Runner, study: Path) -> None:
    """The line names the studies that there are."""
    assert "found no study" in refused(gates, study / "nowhere")


def test_missing_panel(gates: Runner, study: Path) -> None:
    """The line names the file and what it is for."""
    (study / "panels" / "nll-1024.json").unlink()
    assert "nll-1024.json" in refused(gates, study)


def test_malformed_toml(gates: Runner, study: Path) -> None:
    """The line names the file and the line in it."""
    edit(study, "[model]", "[model")
    line = refused(gates, study)
    assert "study.toml" in line
    assert "line 9" in line


def test_unknown_key(gates: Runner, study: Path) -> None:
    """The line names the key and where it stands."""
    edit(study, "margin_nats", "margin_nat")
    assert "margin_nat" in refused(gates, study)


def test_no_lock(gates: Runner, study: Path) -> None:
    """The line says how to freeze."""
    line = refused(gates, study)
    assert "found no lock" in line
    assert "kvqual freeze" in line


def test_an_edited_threshold(gates: Runner, study: Path) -> None:
    """The line names the file and both digests."""
    freeze.freeze(load.load_study(str(study)))
    edit(study, "margin_nats = 0.01", "margin_nats = 0.05")
    line = refused(gates, study)
    assert "no longer matches: study.toml: found sha256" in line
    assert "expected" in line


@pytest.fixture
def frozen(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A frozen study, and a model folder that matches it as far as a test does not say otherwise."""
    freeze.freeze(load.load_study(str(study)))
    monkeypatch.setattr(models, "verify_model", lambda folder, files: None)
    monkeypatch.setattr(install, "engine_identity", lambda study, python: {"python": "3"})
    return study


def test_a_model_file_with_a_wrong_hash(gates: Runner, study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the file and both digests."""
    declared = load.load_study(str(study))
    freeze.freeze(declared)
    folder = gates.pytester.mkdir("model")
    for name in declared.model.files:
        (folder / name).write_text("another")
    monkeypatch.setenv("KVQUAL_MODEL_DIR", str(folder))
    line = refused(gates, study)
    assert str(folder) in line
    assert "found sha256" in line
    assert "kvqual model" in line


def test_no_disk_space(gates: Runner, frozen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the folder, and what is free and needed."""
    monkeypatch.setattr(campaign, "FREE_BYTES", 1 << 62)
    assert "bytes free, expected at least" in refused(gates, frozen)


def test_a_run_directory_that_cannot_be_made(gates: Runner, frozen: Path) -> None:
    """The line names the folder."""
    (gates.pytester.path / "file").write_text("")
    assert "cannot write" in refused(gates, frozen, "--run-dir", "file/below")


def test_a_busy_port(gates: Runner, frozen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that was taken since it was chosen is one line of a failed gate; later gates are refused."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = int(busy.getsockname()[1])
        monkeypatch.setattr(process, "free_port", lambda: port)
        result = gates.run("qualification", "-m", "cpu", "--study", str(frozen), "--run-dir", "runs")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            f"identity: INCONCLUSIVE: control native: found port {port} of 127.0.0.1 in use, expected it free*",
            "routing: REFUSED: no standing receipt of identity: failed*",
        ]
    )
    assert "Traceback" not in result.stdout.str()
