"""The check of one backend: what objects, what is printed, and what runs it again."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_kvqual.errors import StudyError
from pytest_kvqual.kv.backends.exemplar import Exemplar
from pytest_kvqual.oracles import reproducer
from pytest_kvqual.transfer import plants
from pytest_kvqual.transfer.check import Case, Outcome, Subject, find_backend, main, run
from pytest_kvqual.transfer.engine import DEFAULT_GEOMETRY, TransferEngine
from pytest_kvqual.transfer.workload import Script, short_workload

BLOCK = DEFAULT_GEOMETRY.block_size
SUBJECT = find_backend("pytest_kvqual.kv.backends.k16v8")
CASE = Case(subject=SUBJECT, geometry=DEFAULT_GEOMETRY, script=short_workload(BLOCK))


@pytest.mark.parametrize(
    ("plant", "section", "flags"),
    [
        (plants.write_before_block_start, "routing", {}),
        (plants.first_block_twice, "placement", {"probe": True}),
        (plants.heads_turned, "placement", {}),
        (plants.previous_lengths_and_table, "stale-maps", {}),
        (plants.rows_shifted, "shifted-outputs", {}),
        (plants.zero_times_unwritten, "replay", {"fills": True}),
    ],
)
def test_each_plant_is_seen_by_its_section(plant: Any, section: str, flags: dict[str, bool]) -> None:
    """A case that is clean objects once the fault is planted."""
    case = replace(CASE, **flags)
    assert case.run().objections([section]) == []
    assert case.run(plant).objections([section])


def test_an_empty_record_objects() -> None:
    """Zero checked writes, zero rows and no record are objections."""
    outcome = run(SUBJECT, DEFAULT_GEOMETRY, Script(()))
    found = outcome.objections()
    assert "routing: found 0 checked, expected more than 0" in found
    assert "placement: found 0 checked, expected more than 0" in found
    assert Outcome(records=[], steps=[]).objections() == ["found no record, expected one of each rank"]


def test_nan_outputs_object() -> None:
    """A worst ratio that is not a number is an objection."""

    class Broken(Exemplar):
        def weigh(self, weights: Any, value: Any) -> Any:
            return super().weigh(weights, value) * float("nan")

    subject = Subject(module="here", kv_format="k16v8", backend=Broken("k16v8"))
    found = run(subject, DEFAULT_GEOMETRY, short_workload(BLOCK)).objections(["placement"])
    assert "placement: found a worst ratio of nan, expected a finite one" in found


def test_a_backend_that_raises_objects() -> None:
    """The case that made a backend raise is a finding."""

    class Broken(Exemplar):
        def attend(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("no such kernel")

    subject = Subject(module="here", kv_format="k16v8", backend=Broken("k16v8"))
    found = run(subject, DEFAULT_GEOMETRY, short_workload(BLOCK)).objections()
    assert found[0] == "the run ended with ValueError: no such kernel"


def test_a_report_names_sizes_tables_and_a_reproducer(tmp_path: Path) -> None:
    """What is printed is enough to look at the case, and the reproducer checks."""
    outcome = CASE.run(plants.rows_shifted)
    text = CASE.report(outcome, outcome.objections(["shifted-outputs"]), tmp_path)
    assert "hq=6,hkv=3,d=16,block=8: shifted-outputs: layers.0.attn: row" in text
    assert f"lengths: left {BLOCK + 1}, right {2 * BLOCK - 1}, third {BLOCK}" in text
    assert f"step 0: left: positions 0 to {BLOCK}, blocks [" in text
    assert f"reproducer: {tmp_path}/shifted-outputs.npz" in text
    assert reproducer.check(tmp_path / "shifted-outputs.npz")[1]


def test_the_printed_command_runs_the_case(capsys: pytest.CaptureFixture[str]) -> None:
    """The command is one line that a shell reads, and it finds nothing in a healthy case."""
    case = replace(CASE, probe=True, fills=True, engine={"gap": 0, "static": (4, 40)})
    words = shlex.split(case.command())
    assert words[:3] == ["python", "-m", "pytest_kvqual.transfer.check"]
    assert main(words[3:]) == 0
    assert capsys.readouterr().out == "pytest_kvqual.kv.backends.k16v8:k16v8: nothing found\n"


def test_the_command_as_a_program(tmp_path: Path) -> None:
    """A broken backend of the caller's ends with 1 and the report, wrong arguments with 2 and one line."""
    (tmp_path / "mine.py").write_text(
        "from pytest_kvqual.kv.backends import reference\nwrite = reference.write\n"
        "def attend(*a, output, **k):\n    reference.attend(*a, output=output, **k)\n    output.neg_()\n"
    )
    words = [*shlex.split(CASE.command())[1:], "--backend", "mine"]
    result = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert "mine:k16v16 at hq=6,hkv=3,d=16,block=8: shifted-outputs" in result.stdout or "placement" in result.stdout
    assert main(["--geometry", "x", "--backend", "mine", "--script", "[]"]) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no.such.module", "which cannot be imported: ModuleNotFoundError: No module named 'no'"),
        ("json", "found backend module 'json' without write and attend, expected write and attend"),
        ("json:k4v4", "found format 'k4v4', expected one of k16v16, k16v8, k8v8, k8v8-inline"),
    ],
)
def test_find_backend_refuses(text: str, message: str) -> None:
    """Each wrong backend is one line."""
    with pytest.raises(StudyError, match=message):
        find_backend(text)


@pytest.mark.parametrize("text", ["{", "{}", '[["submit","a"]]', '[["jump"]]', '["x"]'])
def test_a_script_that_is_none_is_refused(text: str) -> None:
    """Text that is no list of operations is one line."""
    with pytest.raises(StudyError):
        Script.parse(text)


def test_a_step_beyond_the_static_buffers_is_a_finding() -> None:
    """The engine says which size it needs."""
    outcome = run(SUBJECT, DEFAULT_GEOMETRY, short_workload(BLOCK), static=(1, 4))
    assert "expected at most 1 and 4, in static buffers" in outcome.objections()[0]
    assert isinstance(TransferEngine().geometry, type(DEFAULT_GEOMETRY))
