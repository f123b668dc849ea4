"""Fidelity derived again by the audit: on what the real recorder recorded of the server of known delays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_kvqual._canonical import canonical_bytes
from pytest_kvqual.audit import fidelity
from pytest_kvqual.audit.attempts import Attempt
from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.files import Tree
from pytest_kvqual.audit.recomputed import verify
from pytest_kvqual.audit.rederive import differences
from pytest_kvqual.audit.trials import Run, recordings
from pytest_kvqual.capture.fidelity import capture_fidelity
from pytest_kvqual.faults.recorder import RECORDER_FAULTS
from pytest_kvqual.judge.gates.fidelity import judge
from pytest_kvqual.judge.permit import TimingPermit
from pytest_kvqual.judge.verdict import Verdict
from pytest_kvqual.metrics.formulas import FORMULAS
from pytest_kvqual.metrics.recording import read_recording
from pytest_kvqual.metrics.summary import summarise
from pytest_kvqual.study.load import load_study
from pytest_kvqual.study.model import FidelityRules

# Servers and clients in real time: beside other tests they would measure those.
pytestmark = pytest.mark.alone

# Wide, for a machine that does other things as well.
RULES = FidelityRules(
    rate=400.0,
    concurrency=6,
    requests=24,
    tokens=6,
    lateness_p99_ms=19.0,
    ttft_error_p50_ms=10.0,
    ttft_error_p99_ms=19.0,
    tpot_error_p99_ms=5.0,
)
BUNDLE = "candidate-16-65536"


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gate's evidence, captured once, as an attempt."""
    root = tmp_path_factory.mktemp("fidelity")
    folder = root / "evidence" / BUNDLE / "attempt-1"
    folder.mkdir(parents=True)
    permit = cast(TimingPermit, SimpleNamespace(gate="fidelity", judgment="a" * 64))
    capture_fidelity(RULES, permit=permit, folder=folder, timeout_s=60, progress=lambda done, total: None)
    return root


def _judged(root: Path) -> Verdict:
    study = replace(load_study("smollm2-cpu"), fidelity=RULES)
    folder = root / "evidence" / BUNDLE / "attempt-1"
    found = {path.name.removeprefix("fidelity-"): path for path in folder.iterdir()}
    return judge(
        study,
        recordings={
            name.removesuffix(".jsonl"): path.read_bytes() for name, path in found.items() if name.endswith(".jsonl")
        },
        truths={
            name.removesuffix("-truth.json"): json.loads(path.read_bytes())
            for name, path in found.items()
            if name.endswith(".json")
        },
        faults=tuple(RECORDER_FAULTS),
    )


def _run(root: Path, tree: Tree) -> tuple[Run, Attempt]:
    attempt = Attempt(bundle=BUNDLE, number=1)
    attempt.intact = {path.name for path in (root / "evidence" / BUNDLE / "attempt-1").iterdir()}
    rules = {name: getattr(RULES, name) for name in RULES.__slots__}
    frozen: Any = SimpleNamespace(part=lambda *keys: rules)
    scope: Any = SimpleNamespace(length=16, cache_bytes=65536, lock="1" * 64)
    run = Run(
        tree=tree, frozen=frozen, scope=scope, prefix="", attempts={attempt.name: attempt}, folders={}, plan=None,
        report=Report(),
    )  # fmt: skip
    return run, attempt


@pytest.fixture
def tree(captured: Path) -> Iterator[Tree]:
    """The run directory."""
    found = Tree(captured)
    yield found
    found.close()


def test_recordings_of_the_real_recorder_are_verified(captured: Path, tree: Tree) -> None:
    """Check 17 has no finding: quirks and failures, an open and a closed loop, prompts of 100,000 tokens."""
    run, attempt = _run(captured, tree)
    recordings(run)
    assert [finding.line() for finding in run.report.findings] == []
    assert run.report.seen[17] == sum(name.endswith(".jsonl") for name in attempt.intact)


def test_figures_of_the_real_recorder_are_those_of_the_metrics(captured: Path) -> None:
    """Of each recording every figure, its unit and its number of requests, by other code and without rounding."""
    compared = 0
    for path in sorted((captured / "evidence" / BUNDLE / "attempt-1").glob("fidelity-*.jsonl")):
        if path.name.startswith("fidelity-poison-"):
            continue
        data = path.read_bytes()
        found, measured = verify(data), summarise(read_recording(data, origin=path.name))
        mine = {name: (figure.value, figure.unit, figure.of) for name, figure in found.figures.items()}
        theirs = {name: (figure.value, figure.unit, figure.of) for name, figure in measured.figures.items()}
        assert mine == theirs, path.name
        assert set(mine) == set(FORMULAS)
        assert found.failed == dict(measured.failed)
        compared += any(value[0] is not None for value in mine.values())
    assert compared >= 5


def test_what_is_derived_is_what_the_judge_says(captured: Path, tree: Tree) -> None:
    """Outcome, every number, and which planted faults were caught, by other code."""
    verdict = _judged(captured)
    run, attempt = _run(captured, tree)
    derived = fidelity.derive(run, attempt)
    missed = [fault for fault, caught in derived.caught.items() if not caught]
    assert derived.objections.outcome(missed=missed) == verdict.outcome.value
    stored = json.loads(canonical_bytes(verdict.details))["cases"]
    assert differences(stored, derived.details(), "cases", 0.0) == []
    assert derived.caught == {poison.fault: poison.caught for poison in verdict.poison}


def test_a_truth_that_contradicts_the_recording_is_an_objection(captured: Path, tmp_path: Path) -> None:
    """One request's outcome edited in the truth: rule 3."""
    for path in (captured / "evidence" / BUNDLE / "attempt-1").iterdir():
        place = tmp_path / "evidence" / BUNDLE / "attempt-1" / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path.read_bytes())
    place = tmp_path / "evidence" / BUNDLE / "attempt-1" / "fidelity-closed-truth.json"
    truth = json.loads(place.read_bytes())
    next(iter(truth["requests"].values()))["outcome"] = "transport"
    place.write_bytes(canonical_bytes(truth))
    tree = Tree(tmp_path)
    try:
        run, attempt = _run(tmp_path, tree)
        assert 3 in {rule for rule, _ in fidelity.derive(run, attempt).objections.found}
    finally:
        tree.close()
