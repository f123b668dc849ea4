"""JUnit through pytest's own --junitxml, against the xunit2 schema."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.plugin.conftest import Runner

pytest_plugins = ["pytester"]
SCHEMA = Path(__file__).parent / "schema" / "junit-10.xsd"


def run(gates: Runner, *args: str) -> tuple[Any, dict[str, str]]:
    """The suite's element and its properties, of a file that the schema accepts."""
    etree = pytest.importorskip("lxml.etree")
    gates.run("qualification", "-m", "cpu", "--junitxml=junit.xml", "-o", "junit_family=xunit2", *args)
    document = etree.parse(str(gates.pytester.path / "junit.xml"))
    etree.XMLSchema(etree.parse(str(SCHEMA))).assertValid(document)
    suite = document.getroot().find("testsuite")
    properties = {node.get("name"): node.get("value") for node in suite.find("properties")}
    return suite, properties


def test_a_passing_run(gates: Runner) -> None:
    """The suite's properties hold each gate's verdict, figure, null, faults and receipt."""
    suite, properties = run(gates)
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "0", "0")
    assert properties["kvqual.scope"] == "candidate at length 1024"
    assert properties["kvqual.routing.verdict"] == "PASS"
    assert properties["kvqual.routing.figure"] == "0 of 10 wrong"
    assert properties["kvqual.routing.null"] == "passed: 0 of 10"
    assert properties["kvqual.routing.faults"] == "1/1"
    assert properties["kvqual.routing.receipt"] == "receipts/01-routing.json"
    assert properties["kvqual.dispatch.verdict"] == "planned, not there yet"
    assert properties["kvqual.trial.verdict"] == "not asked"


def test_a_failing_run(gates: Runner) -> None:
    """FAIL and REFUSED are failures of their test cases, with the line as message."""
    gates.verdicts(routing="FAIL")
    suite, properties = run(gates)
    assert (suite.get("tests"), suite.get("failures")) == ("3", "2")
    assert properties["kvqual.parity.verdict"] == "REFUSED"
    messages = [node.get("message") for node in suite.iter("failure")]
    assert any("routing: FAIL: 3 of 10 wrong" in message for message in messages)


def test_a_gate_that_did_not_run(gates: Runner) -> None:
    """A deselected and an uncollected gate are failed test cases, so that a reader of the file sees a red suite."""
    suite, properties = run(gates, "-k", "not routing", "--ignore=qualification/test_07_parity.py")
    assert (suite.get("tests"), suite.get("failures")) == ("3", "2")
    assert properties["kvqual.routing.figure"] == "deselected in this run"
    assert properties["kvqual.parity.figure"] == "not collected in this run"


def test_no_junit(gates: Runner) -> None:
    """Without the plugin that writes JUnit the run is as red or green as with it."""
    assert gates.run("qualification", "-m", "cpu", "-p", "no:junitxml").ret == 0


def test_no_terminal(gates: Runner) -> None:
    """Without a terminal reporter the exit status still tells."""
    gates.verdicts(routing="FAIL")
    assert gates.run("qualification", "-m", "cpu", "-p", "no:terminal").ret == 1
