"""Transfer tests beside gates: alone they decide none and need nothing; with gates they run first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.plugin.conftest import Runner

pytest_plugins = ["pytester"]
REAL = Path(__file__).parents[2] / "qualification" / "test_transfer.py"
TEXT = """
import pytest
pytestmark = [pytest.mark.cpu, pytest.mark.transfer]
def test_transfer_one(): pass
def test_transfer_two(): assert {two}
"""
NONE = "qualification: only transfer tests were selected; no gate was decided"


def transfer(gates: Runner, two: str = "True") -> Runner:
    (gates.folder / "test_transfer.py").write_text(TEXT.format(two=two))
    return gates


def test_alone_they_decide_no_gate(gates: Runner) -> None:
    """No receipt, no failure for absent gates, and one line that says so, although the lock does not match."""
    gates.verdicts(prepare="lock")
    result = transfer(gates).run("qualification", "-m", "cpu", "-k", "transfer")
    assert result.ret == 0
    result.assert_outcomes(passed=2, deselected=4)
    assert result.stdout.str().count(NONE) == 1
    assert not gates.run_dir.exists()


def test_alone_they_need_no_platform(gates: Runner) -> None:
    """Nothing boots, so no platform has to be named, and a failure is a failure."""
    result = transfer(gates, "False").run("qualification", "-k", "transfer")
    assert result.ret == 1
    result.assert_outcomes(passed=1, failed=1, deselected=4)
    assert not gates.run_dir.exists()


def test_alone_they_may_be_run_again(gates: Runner) -> None:
    """The options that are refused for gates are not for them."""
    result = transfer(gates).run("qualification", "-m", "cpu", "-k", "transfer", "--ff")
    assert result.ret == 0


def test_with_gates_they_run_first(gates: Runner) -> None:
    """The gates follow in the study's order and every receipt is written."""
    result = transfer(gates).run("qualification", "-m", "cpu", "-v")
    assert result.ret == 0
    result.assert_outcomes(passed=5, deselected=1)
    ran = [line.partition("::")[2].split()[0] for line in result.stdout.lines if "PASSED" in line]
    assert ran == ["test_transfer_one", "test_transfer_two", "test_identity", "test_routing", "test_parity"]
    assert NONE not in result.stdout.str()
    assert set(gates.receipts()) >= {"identity", "routing", "parity"}


def test_a_failed_transfer_test_fails_a_run_whose_gates_pass(gates: Runner) -> None:
    """The gates are decided, and the exit status is 1."""
    result = transfer(gates, "False").run("qualification", "-m", "cpu")
    assert result.ret == 1
    assert gates.receipts()["identity"]["outcome"] == "PASS"


def test_one_gate_beside_them_is_a_run_of_gates(gates: Runner) -> None:
    """A selection with a gate needs the lock as ever."""
    gates.verdicts(prepare="lock")
    result = transfer(gates).run("qualification", "-m", "cpu", "-k", "transfer or identity")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *lock.json: found digest aa*"])


def test_a_selection_of_nothing_still_fails(gates: Runner) -> None:
    """Transfer tests that were deselected excuse no absent gate."""
    result = transfer(gates).run("qualification", "-m", "cpu", "-k", "nothing_of_this_name")
    assert result.ret == 1
    assert gates.receipts()["identity"]["outcome"] != "PASS"


def test_with_gates_the_hiding_options_are_refused(gates: Runner) -> None:
    """Transfer tests in the same folder do not open a way around."""
    result = transfer(gates).run("qualification", "-m", "cpu", "--lf")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: found --lf with gates*"])


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--geometry", "qwen9"], "--geometry: found 'qwen9', expected one of qwen3-8b, phi-4, smollm2, or hq=40,"),
        (["--geometry", "hq=7,hkv=2,d=8,block=4"], "--geometry: found 7 query heads over 2 KV heads"),
        (["--backend", "no.such"], "--backend: found backend module 'no.such', which cannot be imported: "),
        (["--backend", "json"], "--backend: found backend module 'json' without write and attend"),
        (["--backend", "json:k1"], "--backend: found format 'k1', expected one of k16v16"),
    ],
)
def test_wrong_options_are_one_line(gates: Runner, args: list[str], text: str) -> None:
    """A geometry that does not parse or a module that is no backend stops the run before the first test."""
    # A process of its own: what pytester imports it takes out again, and torch cannot be imported twice.
    run = transfer(gates).run
    result = run("qualification", "-m", "cpu", "-k", "transfer", *args, subprocess="--backend" in args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    errors = [line for line in result.stderr.lines if line.startswith("ERROR")]
    assert len(errors) == 1
    assert text in errors[0]


def test_a_broken_backend_fails_with_a_small_case(gates: Runner) -> None:
    """The real tests print sizes, lengths, block tables, the finding and the command, once each."""
    shutil.copy(REAL, gates.folder)
    (gates.pytester.path / "leaky.py").write_text(
        "from pytest_kvqual.kv.backends import reference\nwrite = reference.write\n"
        "def attend(query, *a, output, **k):\n"
        "    reference.attend(query, *a, output=output, **k)\n"
        "    output[:1] = 0\n"
    )
    result = gates.run(
        "qualification",
        "-k",
        "transfer_output_placement",
        "--backend",
        "leaky",
        "--geometry",
        "hq=2,hkv=1,d=8,block=4",
        subprocess=True,
    )
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "leaky:k16v16 at hq=2,hkv=1,d=8,block=4: placement: layers.0.attn: output of request r0 position 0*",
            "  lengths: r0 1",
            "  step 0: r0: positions 0 to 0, blocks [[]*[]]",
            "  again: python -m pytest_kvqual.transfer.check --geometry hq=2,hkv=1,d=8,block=4 --backend leaky:*",
            "  reproducer: *placement.npz",
        ]
    )
    failures, _, _ = result.stdout.str().partition("short test summary info")
    assert failures.count("  lengths: ") == 1
