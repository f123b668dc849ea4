"""The JUnit file of the gate report, against its schema and read back by a consumer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import junitparser
import pytest
from full_run import FullRun
from lxml import etree

from pytest_kvqual.judge.verdict import Outcome, Verdict
from pytest_kvqual.receipt.statement import build
from pytest_kvqual.receipt.write import read_all, write
from pytest_kvqual.report.gate.files import paths, write_report
from pytest_kvqual.report.gate.run import read_run
from pytest_kvqual.report.gate.xunit import render

SCHEMA = Path(__file__).resolve().parents[2] / "plugin" / "schema" / "junit-10.xsd"


def read(run_dir: Path, tmp_path: Path) -> Any:
    """The file of a run directory, after the schema accepted it, as junitparser reads it."""
    path = tmp_path / "report.xml"
    path.write_bytes(render(read_run(run_dir)))
    etree.XMLSchema(etree.parse(str(SCHEMA))).assertValid(etree.parse(str(path)))
    return junitparser.JUnitXml.fromfile(str(path))


def properties(suite: Any) -> dict[str, str]:
    """A suite's properties by name."""
    return {it.name: it.value for it in suite.properties()}


def test_a_passing_run_reads_back(passing_run: FullRun, tmp_path: Path) -> None:
    """One suite, one case for each gate, none with a result, and the digest of each receipt twice."""
    xml = read(passing_run.run_dir, tmp_path)
    (suite,) = list(xml)
    newest = {receipt.gate: receipt for receipt in read_all(passing_run.run_dir).receipts}
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (15, 0, 0, 0)
    assert [case.name for case in suite] == list(newest)
    facts = properties(suite)
    assert facts["arm"] == "candidate"
    assert facts["lock"] == passing_run.lock
    for case in suite:
        receipt = newest[case.name]
        assert case.is_passed
        assert facts[f"{case.name}.receipt.sha256"] == receipt.sha256
        assert f"receipt.sha256: {receipt.sha256}" in case.system_out
        assert facts[f"{case.name}.figure"] == receipt.figure


def test_a_failing_run_reads_back(failing_run: FullRun, tmp_path: Path) -> None:
    """A FAIL is a failure with its findings; timing that was not asked for is skipped or planned, never passed."""
    (suite,) = list(read(failing_run.run_dir, tmp_path))
    cases = {case.name: case for case in suite}
    (result,) = cases["gsm8k"].result
    assert isinstance(result, junitparser.Failure)
    assert result.type == "FAIL"
    assert result.message == failing_run.receipts["gsm8k"].figure
    assert result.text == "\n".join(failing_run.receipts["gsm8k"].verdict.findings)
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (14, 1, 0, 2)
    assert all(isinstance(it, junitparser.Skipped) for name in ("fidelity", "trial") for it in cases[name].result)


@pytest.mark.parametrize("outcome", [Outcome.INCONCLUSIVE, Outcome.REFUSED])
def test_what_shows_nothing_is_an_error(outcome: Outcome, tmp_path: Path, passing_run: FullRun) -> None:
    """INCONCLUSIVE and REFUSED are errors: the gate did not fail, and did not pass."""
    verdict = Verdict(gate="identity", outcome=outcome, figure="no null\x00<&>\u202e", findings=("one", "two"))
    statement = build(
        verdict, passing_run.scope(), order=1, evidence={}, requires={}, implementation=passing_run.implementation
    )
    write(tmp_path, statement)
    (suite,) = list(read(tmp_path, tmp_path))
    (result,) = next(iter(suite)).result
    assert isinstance(result, junitparser.Error)
    assert (result.type, result.message) == (outcome.value, "no null⟨U+0000⟩<&>⟨U+202E⟩")
    assert result.text == "one\ntwo"
    assert (suite.tests, suite.failures, suite.errors) == (1, 0, 1)


def test_a_damaged_and_a_missing_receipt_are_errors(
    copied: Callable[[], Path], passing_run: FullRun, tmp_path: Path
) -> None:
    """Neither has a digest to show; both turn the suite red."""
    run_dir = copied()
    (run_dir / passing_run.receipts["routing"].name).unlink()
    path = run_dir / passing_run.receipts["nll"].name
    path.write_bytes(path.read_bytes()[:-2])
    (suite,) = list(read(run_dir, tmp_path))
    cases = {case.name: case for case in suite}
    assert [cases[name].result[0].type for name in ("routing", "nll")] == ["NO RECEIPT", "DAMAGED"]
    assert (suite.errors, suite.failures) == (2, 0)
    assert not {"routing.receipt.sha256", "nll.receipt.sha256"} & set(properties(suite))


def test_a_suite_for_each_arm_and_length(tmp_path: Path, passing_run: FullRun) -> None:
    """Receipts of several arms make several suites, and the file's counts are their sums."""
    for arm, outcome in (("candidate", Outcome.FAIL), ("native-fa3", Outcome.REFUSED)):
        verdict = Verdict(gate="identity", outcome=outcome, figure="x", findings=("x",))
        statement = build(verdict, passing_run.scope(arm), order=1, evidence={}, requires={}, implementation="1" * 64)
        write(tmp_path, statement)
    xml = read(tmp_path, tmp_path)
    assert [suite.name for suite in xml] == [f"kvqual.{arm}.32.{48 << 30}" for arm in ("candidate", "native-fa3")]
    assert (xml.tests, xml.failures, xml.errors) == (2, 1, 1)


def test_both_files_and_nothing_else(passing_run: FullRun, tmp_path: Path) -> None:
    """The two files are written whole, and no temporary file stays."""
    html, junit = paths(tmp_path / "out" / "gate.html")
    assert write_report(passing_run.run_dir, html=html, junit=junit) == (html, junit)
    assert sorted(it.name for it in (tmp_path / "out").iterdir()) == ["gate.html", "gate.xml"]
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("report", ("report.html", "report.xml")),
        ("report.html", ("report.html", "report.xml")),
        ("report.XML", ("report.html", "report.xml")),
        ("run-1.2", ("run-1.2.html", "run-1.2.xml")),
    ],
)
def test_paths(given: str, names: tuple[str, str], tmp_path: Path) -> None:
    """The suffix of either file goes, any other stays."""
    assert tuple(it.name for it in paths(tmp_path / given)) == names
