"""JUnit through pytest's own --junitxml, against the xunit2 schema."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.plugin.conftest import Runner

pytest_plugins = ["pytester"]
SCHEMA = Path(__file__).parent / "schema" / "junit-10.xsd"


def run(gates: Runner, *args: str, subprocess: bool = False) -> tuple[Any, dict[str, str]]:
    """The suite's element and its properties, of a file that the schema accepts."""
    etree = pytest.importorskip("lxml.etree")
    junit = ("--junitxml=junit.xml", "-o", "junit_family=xunit2")
    gates.run("qualification", "-m", "cpu", *junit, *args, subprocess=subprocess)
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


@pytest.mark.parametrize("routing", ["interrupt", "standing, interrupt"])
def test_an_interrupted_run(gates: Runner, routing: str) -> None:
    """Ctrl-C in a gate leaves it and those after it as failed cases, whatever receipts stand from earlier runs."""
    gates.verdicts(routing=routing, parity="standing")
    suite, properties = run(gates, subprocess=True)
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "2", "0")
    failed = {case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None}
    assert failed == {"test_routing", "test_parity"}
    assert properties["kvqual.identity.verdict"] == "PASS"
    assert properties["kvqual.parity.verdict"] == (
        "not run to its end: interrupted: KeyboardInterrupt (an earlier run's receipt stands)"
    )
    assert properties["kvqual.routing.verdict"] != "PASS"


def test_an_interrupt_after_the_verdict(gates: Runner) -> None:
    """A gate test that is cut off after its gate was decided is a failed case with a name."""
    text = "import pytest\n@pytest.mark.cpu\n@pytest.mark.gate('parity')\n"
    gates.module(7, "parity", text + "def test_parity(gate):\n    gate.decide()\n    raise KeyboardInterrupt\n")
    suite, _ = run(gates, subprocess=True)
    assert (suite.get("tests"), suite.get("failures")) == ("3", "1")


def test_an_interrupt_in_another_test(gates: Runner) -> None:
    """An ordinary test that is cut off is a failed case too, and so is each gate behind it."""
    text = "import pytest\n@pytest.mark.cpu\ndef test_first():\n    raise KeyboardInterrupt\n"
    gates.module(0, "first", text)
    suite, _ = run(gates, subprocess=True)
    failed = {case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None}
    assert failed == {"test_first", "test_identity", "test_routing", "test_parity"}


def test_an_exit_that_asks_for_green(gates: Runner) -> None:
    """``pytest.exit`` with status 0 before a gate ran is a red run."""
    gates.verdicts(parity="standing")
    text = "import pytest\n@pytest.mark.cpu\n@pytest.mark.gate('routing')\n"
    gates.module(1, "routing", text + "def test_routing(gate):\n    pytest.exit('enough', returncode=0)\n")
    assert gates.run("qualification", "-m", "cpu").ret == 1


def test_an_interrupt_before_the_first_test(gates: Runner) -> None:
    """Ctrl-C while lock, model and disk are checked leaves each gate as a failed case."""
    gates.verdicts(prepare="interrupt")
    suite, properties = run(gates, subprocess=True)
    assert (suite.get("tests"), suite.get("failures")) == ("3", "3")
    assert properties["kvqual.routing.verdict"] == "not run to its end: interrupted: KeyboardInterrupt"


def test_no_junit(gates: Runner) -> None:
    """Without the plugin that writes JUnit the run is as red or green as with it."""
    assert gates.run("qualification", "-m", "cpu", "-p", "no:junitxml").ret == 0


def test_no_terminal(gates: Runner) -> None:
    """Without a terminal reporter the exit status still tells."""
    gates.verdicts(routing="FAIL")
    assert gates.run("qualification", "-m", "cpu", "-p", "no:terminal").ret == 1
