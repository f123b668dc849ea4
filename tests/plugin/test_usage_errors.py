"""Each wrong use of gates is one line, exit status 4, and nothing started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.plugin.conftest import Runner

pytest_plugins = ["pytester"]
USAGE = pytest.ExitCode.USAGE_ERROR


def expect(gates: Runner, args: list[str], text: str) -> None:
    """The run is refused in one line with ``text`` in it, and left no receipt."""
    result = gates.run(*args)
    assert result.ret == USAGE
    errors = [line for line in result.stderr.lines if line.startswith("ERROR")]
    assert len(errors) == 1
    assert text in errors[0]
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert not (gates.run_dir / "receipts").exists()


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "found no -m, expected -m cpu or -m gpu"),
        (["-m", "cpu or gpu"], "found -m 'cpu or gpu', expected -m cpu or -m gpu"),
        (["-m", "not gpu"], "expected -m cpu or -m gpu"),
        (["-m", "cpu", "--arm", "nobody"], "--arm: found 'nobody', expected one of native, candidate"),
        (["-m", "cpu", "--lf"], "found --lf with gates, expected none"),
        (["-m", "cpu", "--ff"], "found --ff with gates, expected none"),
        (["-m", "cpu", "--nf"], "found --nf with gates, expected none"),
        (["-m", "cpu", "--sw"], "found --sw with gates, expected none"),
        (["-m", "cpu", "--setup-only"], "found --setup-only with gates, expected none: it shows fixtures"),
        (["-m", "cpu", "--setup-plan"], "found --setup-plan with gates, expected none: it shows fixtures"),
        (["-m", "cpu", "-p", "no:kvqual-session"], "found -p no:kvqual-session, expected none"),
        (["-m", "cpu", "-p", "pytest_rerunfailures", "--reruns", "2"], "found --reruns with gates, expected none"),
        (["-m", "cpu", "-p", "pytest_rerunfailures"], "found -p pytest_rerunfailures with gates, expected none"),
    ],
)
def test_refused(gates: Runner, args: list[str], text: str) -> None:
    """The line says what was found and what was expected."""
    if "pytest_rerunfailures" in args:
        pytest.importorskip("pytest_rerunfailures")
    expect(gates, ["qualification", *args], text)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--length", "1k"], "--length: found '1k', expected a positive whole number of tokens"),
        (["--length", "0"], "--length: found '0', expected a positive whole number of tokens"),
        (["--cache-bytes", "1.5e9"], "--cache-bytes: found '1.5e9', expected a positive whole number of bytes"),
        (["--prefix", "pilot-a"], "--prefix: found 'pilot-a', expected another: so begin the folders of pilots"),
        (["--prefix", "../x"], "--prefix: found '../x', expected letters, digits, '.', '_' and '-'"),
        (["--arm", ""], "--arm: found '', expected a name of letters"),
        (["--run-dir", ""], "--run-dir: found an empty text, expected a folder"),
    ],
)
def test_options_check_themselves(gates: Runner, args: list[str], text: str) -> None:
    """An option's text is checked where it is read."""
    expect(gates, ["qualification", "-m", "cpu", *args], text)


def test_no_gpu(gates: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """-m gpu on a host without a GPU is one line."""
    if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists():
        pytest.fail("this host has a GPU: deselect this test here")
    monkeypatch.setenv("PATH", str(gates.pytester.path))
    expect(gates, ["qualification", "-m", "gpu"], "-m gpu: found no GPU")


def test_platform_of_the_study(gates: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU study under -m gpu is refused by name."""
    smi = gates.pytester.path / "nvidia-smi"
    smi.write_text("#!/bin/sh\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(gates.pytester.path))
    expect(gates, ["qualification", "-m", "gpu"], "-m gpu: found the study 'fake' of platform cpu")


def test_lock(gates: Runner) -> None:
    """An error of the lock stops the run before the first test."""
    gates.verdicts(prepare="lock")
    expect(gates, ["qualification", "-m", "cpu"], "lock.json: found digest aa, expected bb (run kvqual freeze)")


def test_unknown_gate(gates: Runner) -> None:
    """A gate that the study does not declare is refused by name."""
    gates.module(2, "speed", "import pytest\n@pytest.mark.cpu\n@pytest.mark.gate('speed')\ndef test_s(gate): pass\n")
    expect(gates, ["qualification", "-m", "cpu"], "found the gate 'speed', expected one of the study's: identity")


def test_gate_twice(gates: Runner) -> None:
    """Two tests of one gate are refused."""
    gates.module(2, "again", "import pytest\n@pytest.mark.gate('parity')\ndef test_s(gate): pass\n")
    expect(gates, ["qualification", "-m", "cpu"], "gate parity: found ")


def test_gate_mark_without_a_name(gates: Runner) -> None:
    """The mark needs the gate's name."""
    gates.module(2, "again", "import pytest\n@pytest.mark.gate\ndef test_s(gate): pass\n")
    expect(gates, ["qualification", "-m", "cpu"], "expected @pytest.mark.gate(NAME)")


def test_flaky_mark(gates: Runner) -> None:
    """A rerun mark on a gate is refused."""
    text = "import pytest\n@pytest.mark.flaky(reruns=3)\n@pytest.mark.gate('parity')\ndef test_s(gate): pass\n"
    gates.module(7, "parity", text)
    (gates.pytester.path / "pytest.ini").write_text("[pytest]\nmarkers = flaky\n")
    expect(gates, ["qualification", "-m", "cpu"], "found the mark 'flaky' on a gate")


def test_xdist(gates: Runner) -> None:
    """-n with gates stops in one line before the first test."""
    pytest.importorskip("xdist")
    result = gates.run("qualification", "-m", "cpu", "-p", "xdist", "-n", "2", subprocess=True)
    assert result.ret == USAGE
    result.stderr.fnmatch_lines(["ERROR: found -n with the gate qualification/test_01_routing.py::test_routing, *"])
    assert not (gates.run_dir / "receipts").exists()


def test_xdist_elsewhere(gates: Runner) -> None:
    """A gate in a folder of another name fails in each worker, in one line."""
    pytest.importorskip("xdist")
    gates.folder.rename(gates.pytester.path / "mine")
    result = gates.run("mine", "-m", "cpu", "-p", "xdist", "-n", "1", subprocess=True)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*found a worker of -n, expected one process*"])


def test_gate_fixture_without_a_gate(gates: Runner) -> None:
    """The fixture in an ordinary test says what it is for."""
    gates.pytester.makepyfile("def test_a(gate): pass")
    result = gates.run("test_gate_fixture_without_a_gate.py")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*found no test with @pytest.mark.gate(NAME), expected one*"])
