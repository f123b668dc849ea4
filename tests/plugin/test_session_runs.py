"""What a session that holds gates does with them: order, refusal, receipts, exit status, report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.plugin.conftest import Runner

pytest_plugins = ["pytester"]


def test_all_pass(gates: Runner) -> None:
    """Five-of-five is exit 0, in the study's order, with planned and unasked gates named in the table."""
    result = gates.run("qualification", "-m", "cpu", "-v")
    assert result.ret == 0
    result.assert_outcomes(passed=3, deselected=1)
    result.stdout.fnmatch_lines(
        [
            "*test_identity PASSED*",
            "*test_routing PASSED*",
            "*test_parity PASSED*",
            "*qualification of candidate at length 1024*",
            "gate *verdict *figure *null *faults *receipt",
            "identity *PASS *0 of 10 wrong *passed *1/1 *receipts/00-identity.json",
            "dispatch *-*planned, not there yet*",
            "routing *PASS*",
            "parity *PASS*",
            "trial *-*not asked*",
            "superiority *-*planned, not there yet*",
            "nll: earlier receipt of another scope: length: found 8192, expected 1024",
            "engine busy 75 %, idle 25 %",
        ]
    )
    assert list(gates.receipts()) == ["identity", "routing", "parity"]
    assert (gates.run_dir / "closed").exists()


def test_progress_is_shown_while_output_is_captured(gates: Runner) -> None:
    """A long step writes its line although the test's own output is captured."""
    result = gates.run("qualification", "-m", "cpu")
    result.stdout.fnmatch_lines(["candidate: identity 1/2", "candidate: routing 1/2", "candidate: parity 1/2"])
    assert "1/2" not in gates.run("qualification", "-m", "cpu", "-q").stdout.str()


def test_a_failed_gate_is_one_line_and_refuses_the_later_ones(gates: Runner) -> None:
    """A FAIL names its figure without a traceback; later gates get REFUSED receipts; exit status 1."""
    gates.verdicts(routing="FAIL")
    result = gates.run("qualification", "-m", "cpu")
    assert result.ret == 1
    result.assert_outcomes(passed=1, failed=2, deselected=1)
    result.stdout.fnmatch_lines(
        [
            "routing: FAIL: 3 of 10 wrong: cell 0 [[]*01-routing.json[]]",
            "parity: REFUSED: needs PASS of routing [[]*02-parity.json[]]",
            "routing: cell 4",
            "routing: 3 more findings in receipts/01-routing.json",
        ]
    )
    assert "Traceback" not in result.stdout.str()
    assert "conftest.py:" not in result.stdout.str()
    assert gates.receipts()["parity"]["outcome"] == "REFUSED"


@pytest.mark.parametrize("outcome", ["INCONCLUSIVE", "REFUSED"])
def test_only_pass_passes(gates: Runner, outcome: str) -> None:
    """INCONCLUSIVE and REFUSED fail the test like FAIL does."""
    gates.verdicts(parity=outcome)
    result = gates.run("qualification", "-m", "cpu")
    assert result.ret == 1
    result.assert_outcomes(passed=2, failed=1, deselected=1)


@pytest.mark.parametrize(
    ("args", "gate", "reason"),
    [
        (["-k", "not routing"], "routing", "deselected in this run"),
        (["--deselect", "qualification/test_01_routing.py"], "routing", "deselected in this run"),
        (["--ignore", "qualification/test_01_routing.py"], "routing", "not collected in this run"),
        (["-k", "nothing_at_all"], "identity", "deselected in this run"),
    ],
)
def test_a_gate_that_did_not_run_is_a_failure_with_a_receipt(
    gates: Runner, args: list[str], gate: str, reason: str
) -> None:
    """Deselected and uncollected gates get a REFUSED receipt, a failed test, and a red run."""
    result = gates.run("qualification", "-m", "cpu", *args)
    assert result.ret == 1
    assert gates.receipts()[gate] == {"gate": gate, "outcome": "REFUSED", "figure": reason}
    result.stdout.fnmatch_lines([f"{gate}: REFUSED: {reason} [[]*"])


def test_stopped_by_x(gates: Runner) -> None:
    """A gate that -x did not reach gets a receipt that says so."""
    gates.verdicts(identity="FAIL")
    result = gates.run("qualification", "-m", "cpu", "-x")
    assert result.ret == 1
    assert gates.receipts()["parity"]["figure"] == "not run: stopping after 1 failures"


def test_crash(gates: Runner) -> None:
    """A gate that raised has a receipt with the exception, and its traceback is kept for whoever mends it."""
    gates.verdicts(routing="crash")
    result = gates.run("qualification", "-m", "cpu")
    assert result.ret == 1
    assert gates.receipts()["routing"]["outcome"] == "REFUSED"
    assert gates.receipts()["routing"]["figure"] == (
        "its test ended without a verdict: RuntimeError: a defect of the judge"
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("@pytest.mark.skip(reason='busy')\n@pytest.mark.gate('routing')\ndef test_r(gate): gate.decide()", "skipped"),
        ("@pytest.mark.gate('routing')\ndef test_r(gate): pytest.skip('busy')", "skipped"),
        ("@pytest.mark.gate('routing')\ndef test_r(gate): pass", "passed without a decision"),
        ("@pytest.mark.xfail\n@pytest.mark.gate('routing')\ndef test_r(gate): raise OSError('x')", "skipped"),
        ("@pytest.mark.xfail(run=False)\n@pytest.mark.gate('routing')\ndef test_r(gate): gate.decide()", "skipped"),
    ],
)
def test_a_gate_without_a_decision_is_a_failure(gates: Runner, body: str, reason: str) -> None:
    """Skip, xfail and an empty body do not turn a gate green or grey."""
    gates.module(1, "routing", f"import pytest\npytestmark = [pytest.mark.cpu]\n{body}\n")
    result = gates.run("qualification", "-m", "cpu")
    assert result.ret == 1
    assert reason in gates.receipts()["routing"]["figure"]
    outcomes = result.parseoutcomes()
    assert outcomes.get("skipped", 0) == outcomes.get("xfailed", 0) == 0


def test_xfail_does_not_hide_a_failed_verdict(gates: Runner) -> None:
    """A FAIL under xfail is a failure."""
    gates.verdicts(routing="FAIL")
    text = "import pytest\n@pytest.mark.cpu\n@pytest.mark.xfail\n@pytest.mark.gate('routing')\n"
    gates.module(1, "routing", text + "def test_r(gate): gate.decide()\n")
    result = gates.run("qualification", "-m", "cpu")
    assert result.ret == 1
    result.assert_outcomes(passed=1, failed=2, deselected=1)


def test_standing_receipt_counts(gates: Runner) -> None:
    """A standing PASS receipt counts for a gate that was not run, and the table says whose it is."""
    gates.verdicts(routing="standing", parity="standing")
    result = gates.run("qualification/test_03_identity.py", "-m", "cpu")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["routing *PASS *0 of 10 wrong (standing: an earlier run's receipt)*"])


def test_timing_is_asked_for_by_name(gates: Runner) -> None:
    """With timing named in -m the timing gate runs, and its absence is a failure too."""
    result = gates.run("qualification", "-m", "cpu and timing", "--block", "1", "-v")
    assert result.ret == 1  # -m 'cpu and timing' leaves out the gates that carry no timing mark
    assert gates.receipts()["identity"]["figure"] == "deselected in this run"
    result.stdout.fnmatch_lines(["*test_trial PASSED*"])


def test_timing_negated_is_not_asked(gates: Runner) -> None:
    """``cpu and not timing`` does not ask for timing."""
    assert gates.run("qualification", "-m", "cpu and not timing").ret == 0


def test_receipts_that_cannot_be_written_are_a_red_run(gates: Runner) -> None:
    """When even the receipt of an absent gate cannot be written, the run is red and says why."""
    gates.verdicts(absent="error")
    result = gates.run("qualification", "-m", "cpu", "-k", "not routing")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["routing: receipts: found no space, expected 1 MiB"])


@pytest.mark.parametrize("absent", ["", "error"])
def test_a_receipt_that_cannot_be_written_is_one_line(gates: Runner, absent: str) -> None:
    """A gate whose receipt cannot be written fails in one line without a traceback, and is never PASS."""
    gates.verdicts(routing="unwritable", absent=absent)
    result = gates.run("qualification", "-m", "cpu")
    assert result.ret == 1
    outcomes = result.parseoutcomes()
    assert outcomes["failed"] >= 1
    line = "receipts: cannot write the receipt: Not a directory (give another --run-dir)"
    assert line in result.stdout.lines
    text = result.stdout.str()
    assert "Traceback" not in text
    assert "conftest.py:" not in text
    assert "session.py:" not in text
    result.stdout.no_fnmatch_line("routing *PASS *")


@pytest.mark.parametrize("option", ["--fixtures", "--fixtures-per-test"])
def test_listing_fixtures_decides_nothing(gates: Runner, option: str) -> None:
    """The lists of fixtures work with gates, need no -m, and write nothing."""
    result = gates.run("qualification", option)
    assert result.ret == 0
    assert not gates.run_dir.exists()


def test_collect_only_lists_gates_and_decides_nothing(gates: Runner) -> None:
    """--collect-only works for a platform that this host lacks, writes nothing and boots nothing."""
    result = gates.run("qualification", "-m", "gpu", "--collect-only", "-q")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*test_identity", "*test_parity"])
    assert not gates.run_dir.exists()
