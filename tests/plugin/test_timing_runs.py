"""Which timing gates a run decides, and what a pilot is to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.plugin.conftest import Runner

pytest_plugins = ["pytester"]
SUPERIORITY = """
import pytest
pytestmark = [pytest.mark.cpu, pytest.mark.gpu, pytest.mark.timing]
@pytest.mark.gate("superiority")
def test_superiority(gate):
    gate.decide()
"""
PILOT = """
import pytest
pytestmark = [pytest.mark.cpu, pytest.mark.gpu, pytest.mark.pilot]
def test_pilot(pilot):
    pilot.measure()
"""
QUALITY = ["identity", "routing", "parity"]
STANDING = dict.fromkeys(QUALITY, "standing")


@pytest.fixture
def timing(gates: Runner) -> Runner:
    """The fake study with superiority required, and a pilot."""
    gates.module(13, "superiority", SUPERIORITY)
    gates.module(14, "pilot", PILOT)
    gates.verdicts(superiority="PASS", **STANDING)
    return gates


def refused(gates: Runner, *args: str) -> str:
    """The one line with which a run is refused before anything started."""
    result = gates.run("qualification", *args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    errors = [line for line in result.stderr.lines if line.startswith("ERROR")]
    assert len(errors) == 1
    assert not gates.run_dir.joinpath("receipts").exists()
    return errors[0]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["-m", "cpu", "--block", "1"], "found --block without timing in -m, expected -m 'cpu and timing'"),
        (["-m", "cpu and not timing", "--block", "1"], "found --block without timing in -m"),
        (["-m", "cpu and pilot", "--block", "1"], "found --block without timing in -m"),
        (["-m", "cpu", "--cell", "open"], "found --cell without pilot in -m, expected -m 'cpu and pilot'"),
        (["-m", "cpu and timing", "--cell", "open"], "found --cell without pilot in -m"),
        (["-m", "cpu and timing and pilot"], "found both timing and pilot in -m, expected one"),
        (["-m", "cpu and (timing or pilot)"], "found both timing and pilot in -m, expected one"),
        (["-m", "cpu and timing", "--block", "0"], "--block: found '0', expected"),
        (["-m", "cpu and timing", "--block", "first"], "--block: found 'first', expected"),
    ],
)
def test_options_without_effect_are_refused(timing: Runner, args: list[str], text: str) -> None:
    """--block belongs to timing and --cell to a pilot; a pilot and gates that time are never one run."""
    assert text in refused(timing, *args)


def test_a_run_with_a_block_decides_a_trial(timing: Runner) -> None:
    """With --block the trial is decided, and superiority is none of this run's gates."""
    result = timing.run("qualification", "-m", "cpu and timing", "--block", "2")
    assert set(timing.receipts()) == {*QUALITY, "trial"}
    assert result.ret == 0
    result.stdout.fnmatch_lines(["trial *PASS*", "superiority *- *not asked*"])


def test_a_run_without_a_block_decides_superiority(timing: Runner) -> None:
    """Without --block the statistics are decided, and no trial is made."""
    result = timing.run("qualification", "-m", "cpu and timing")
    assert set(timing.receipts()) == {*QUALITY, "superiority"}
    assert result.ret == 0
    result.stdout.fnmatch_lines(["trial *- *not asked*", "superiority *PASS*"])


@pytest.mark.parametrize("more", [[], ["--block", "1"]])
def test_a_timing_gate_that_fails_fails_the_run(timing: Runner, more: list[str]) -> None:
    """A FAIL of the gate that this run decides is exit status 1."""
    timing.verdicts(superiority="FAIL", trial="FAIL", **STANDING)
    result = timing.run("qualification", "-m", "cpu and timing", *more)
    assert result.ret == 1
    decided = "trial" if more else "superiority"
    assert timing.receipts()[decided]["outcome"] == "FAIL"
    assert ("superiority" if more else "trial") not in timing.receipts()


def test_an_ordinary_run_has_neither_timing_nor_pilot(timing: Runner) -> None:
    """What nobody named is deselected."""
    timing.verdicts(superiority="PASS")
    result = timing.run("qualification", "-m", "cpu")
    assert result.ret == 0
    result.assert_outcomes(passed=3, deselected=3)
    assert list(timing.receipts()) == QUALITY
    assert "exploratory" not in result.stdout.str()


def test_a_pilot_decides_no_gate(timing: Runner) -> None:
    """A pilot measures the cell that was asked for, says so in its own section, and writes no receipt."""
    result = timing.run("qualification", "-m", "cpu and pilot", "--cell", "closed")
    assert result.ret == 0
    result.assert_outcomes(passed=1, deselected=5)
    result.stdout.fnmatch_lines(["*pilot of candidate at length 1024*", "exploratory: candidate, cell closed"])
    assert timing.receipts() == {}
    result = timing.run("qualification", "-m", "cpu and pilot")
    result.stdout.fnmatch_lines(["exploratory: candidate, cell first"])


def test_a_pilot_that_is_refused_is_one_line(timing: Runner) -> None:
    """A pilot without the receipts that it rests on fails its test in one line."""
    timing.verdicts(superiority="PASS", pilot="refused")
    result = timing.run("qualification", "-m", "cpu and pilot")
    assert result.ret == 1
    result.assert_outcomes(failed=1, deselected=5)
    assert "pilot: found no receipt of parity, expected it (run the gates above it)" in result.stdout.str()
    assert "Traceback" not in result.stdout.str()
    assert "During handling" not in result.stdout.str()
    assert timing.receipts() == {}


def test_a_pilot_is_asked_for_by_its_file_too(timing: Runner) -> None:
    """The module of the pilot alone, without one gate collected, measures as the whole folder does."""
    result = timing.run("qualification/test_14_pilot.py", "-m", "cpu and pilot")
    assert result.ret == 0
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["exploratory: candidate, cell first"])
