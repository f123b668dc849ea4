"""``--gate-report`` at the end of a run, and ``kvqual report --html --junit``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

# Before pytester remembers what is imported: what it forgets after a test is imported anew, which numpy warns of.
import numpy  # noqa: F401
import pytest
from audited_run import write_run

from pytest_kvqual.cli import main

if TYPE_CHECKING:
    from tests.plugin.conftest import Runner

pytest_plugins = ["pytester"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with receipts of two gates."""
    return write_run(tmp_path / "made").run_dir


def test_both_files_at_the_end_of_a_run(gates: Runner, run_dir: Path, tmp_path: Path) -> None:
    """One option writes the page and the JUnit file, and the summary names both."""
    path = tmp_path / "out" / "gate"
    result = gates.run("qualification", "-m", "cpu", f"--run-dir={run_dir}", f"--gate-report={path}")
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"gate report: {path}.html", f"gate report: {path}.xml"])
    assert "candidate" in path.with_suffix(".html").read_text(encoding="utf-8")
    assert path.with_suffix(".xml").read_bytes().startswith(b"<?xml")


def test_a_failing_run_is_reported_too(gates: Runner, run_dir: Path, tmp_path: Path) -> None:
    """The report of a run that failed is written, and the exit status stays that of the verdicts."""
    gates.verdicts(routing="FAIL")
    path = tmp_path / "gate.html"
    result = gates.run("qualification", "-m", "cpu", f"--run-dir={run_dir}", f"--gate-report={path}")
    assert result.ret == 1
    assert path.exists()


def test_a_report_that_cannot_be_written_fails_the_run(gates: Runner, tmp_path: Path) -> None:
    """Without a receipt of the real form there is nothing to report, and a run that asked for a report is not green."""
    result = gates.run("qualification", "-m", "cpu", f"--gate-report={tmp_path / 'gate'}")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["--gate-report: *found no receipt*"])


@pytest.mark.parametrize(("value", "line"), [("", "*--gate-report: found ''*"), (".", "*--gate-report: found '.'*")])
def test_a_folder_is_no_file(gates: Runner, value: str, line: str) -> None:
    """An empty text and a folder are usage errors before the first test."""
    result = gates.run("qualification", "-m", "cpu", f"--gate-report={value}")
    assert result.ret == 4
    result.stderr.fnmatch_lines([line])


def test_a_pilot_has_no_gate_report(gates: Runner, tmp_path: Path) -> None:
    """A pilot decides nothing, so asking for a report of its gates is a usage error."""
    result = gates.run("qualification", "-m", "cpu and pilot", f"--gate-report={tmp_path / 'gate'}")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*found --gate-report with pilot*"])


def test_the_command(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``kvqual report`` prints the table as before, writes what was asked for, and keeps its exit status."""
    html, junit = tmp_path / "report.html", tmp_path / "report.xml"
    assert main(["report", str(run_dir)]) == 0
    before = capsys.readouterr().out
    assert main(["report", str(run_dir), "--html", str(html), "--junit", str(junit)]) == 0
    assert capsys.readouterr().out == f"{before}gate report: {html}\ngate report: {junit}\n"
    assert html.read_bytes()
    assert junit.read_bytes()


def test_a_place_that_cannot_be_written_is_one_line(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file in the place of a folder is an error of one line, with exit status 2."""
    (tmp_path / "file").write_text("")
    assert main(["report", str(run_dir), "--html", str(tmp_path / "file" / "report.html")]) == 2
    assert "cannot write the report" in capsys.readouterr().err


def test_two_files_need_two_paths(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One path for the page and the JUnit file would leave the second alone: it is refused, and nothing is written."""
    path = tmp_path / "report"
    assert main(["report", str(run_dir), "--html", str(path), "--junit", f"{tmp_path}/./report"]) == 2
    assert "for the page and for the JUnit file, expected a path for each" in capsys.readouterr().err
    assert not path.exists()


def test_the_help_names_the_option(gates: Runner) -> None:
    """The help of pytest has the option."""
    gates.run("--help").stdout.fnmatch_lines(["*--gate-report=PATH*"])
