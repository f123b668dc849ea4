"""Evidence made to fit by someone who can write every file: what no PASS may rest on, and what the reader is told."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attacker import Attacker
from full_run import CANDIDATE, CONTROLS, SMALL, FullRun, all_right, build_run

from pytest_kvqual._canonical import canonical_bytes, digest, pretty_bytes
from pytest_kvqual.audit.auditor import Options, Result, audit
from pytest_kvqual.audit.command import main

FIRST, SECOND = CONTROLS


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> FullRun:
    """A run in order, in which every gate passes."""
    return build_run(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def attack(sound: FullRun, tmp_path: Path) -> Attacker:
    """A copy of it."""
    return Attacker.copy(sound, tmp_path / "run")


def audited(attack: Attacker) -> Result:
    """The audit of the damaged copy."""
    return audit(Options(run_dir=attack.folder))


def checks(result: Result) -> set[int]:
    """The checks that object."""
    return {finding.check for finding in result.report.findings}


def every_rank(change: Callable[[Any], object]) -> Callable[[Any], None]:
    """A change of each rank's record of each healthy pass."""

    def document(oracle: Any) -> None:
        for one in oracle["passes"]:
            for rank in one["records"]:
                change(rank)

    return document


@pytest.mark.parametrize(
    ("gate", "key", "value", "figure"),
    [
        ("placement", "worst_ratio", 5.0, (r"error 0\.5", "error 5")),
        ("placement", "ambiguous_rows", 48, ("", "")),
        ("placement", "rows_checked", 16, (r"^144", "48")),
        ("routing", "cells_checked", 0, (r"^1500", "0")),
        ("routing", "writes_checked", 16, ("", "")),
        ("shifted-outputs", "rows_checked", 0, (r"^144", "0")),
        ("shifted-outputs", "self_test", "missed", ("", "")),
        ("stale-maps", "maps_changed", 0, (r"24 changed", "0 changed")),
        ("replay", "cells_filled", 0, (r"of \d+ cells", "of 0 cells")),
    ],
)
def test_an_oracle_that_saw_too_little_or_too_much_does_not_pass(
    attack: Attacker, gate: str, key: str, value: Any, figure: tuple[str, str]
) -> None:
    """Counts that break a rule of the gate are found, though receipt and document agree on every one of them."""
    attack.document(attack.attempt(CANDIDATE) / "oracle.json", every_rank(lambda rank: rank[gate].update({key: value})))

    def fit(predicate: Any) -> None:
        for numbers in predicate["details"]["ranks"]:
            if key in numbers:
                numbers[key] = value
        predicate["verdict"]["figure"] = re.sub(*figure, predicate["verdict"]["figure"])

    attack.predicate(gate, fit)
    attack.seal()
    lines = [finding.text for finding in audited(attack).report.findings]
    assert lines
    assert all(f"{key}" in line and "under PASS" in line for line in lines), lines


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda rank: rank.update(layers=1), "layers"),
        (lambda rank: rank.update(conditions={"mixed": 0, "chunked": 0}), "condition mixed"),
        (lambda rank: rank.update(probe=True), "probe"),
        (lambda rank: rank["row_map"].update(self_test="missed"), "row_map.self_test"),
        (lambda rank: rank["row_map"].update(findings_total=3, kinds={"x": 3}), "row_map.findings_total"),
        (lambda rank: rank["row_map"].update(checked=1), "row_map.checked"),
    ],
)
def test_a_pass_of_the_oracle_is_whole(attack: Attacker, change: Callable[[Any], object], word: str) -> None:
    """Layers, conditions, fingerprints and the row map are what every oracle gate rests on."""
    attack.document(attack.attempt(CANDIDATE) / "oracle.json", every_rank(change))
    attack.seal()
    result = audited(attack)
    assert checks(result) == {12}
    assert any(word in finding.text for finding in result.report.findings)


def test_a_candidate_gets_no_waiver(attack: Attacker) -> None:
    """A waiver for the arm under qualification, frozen anew, waives nothing and is found."""
    waiver = '[[waivers]]\narm = "candidate"\ngate = "routing"\nfinding = "x"\nreproducer = "x"\nreason = "x"\n\n'
    attack.text(attack.study / "study.toml", "[gates.identity]", f"{waiver}[gates.identity]")
    attack.document(
        attack.attempt(CANDIDATE) / "oracle.json",
        every_rank(lambda rank: rank["routing"].update(findings_total=4, kinds={"x": 4})),
    )
    attack.predicate("routing", lambda predicate: predicate["details"].update(waived={"x": 12}))
    attack.seal()
    assert checks(audited(attack)) == {4, 12}


def test_what_is_waived_of_a_control_is_counted(attack: Attacker) -> None:
    """A waiver of a control that is frozen with the study is no objection, and the audit says how much it waives."""
    waiver = f'[[waivers]]\narm = "{CONTROLS[0]}"\ngate = "routing"\nfinding = "x"\nreproducer = "x"\nreason = "x"\n\n'
    attack.text(attack.study / "study.toml", "[gates.identity]", f"{waiver}[gates.identity]")
    attack.document(
        attack.attempt(CONTROLS[0]) / "oracle.json",
        every_rank(lambda rank: rank["routing"].update(findings_total=4, kinds={"x": 4})),
    )
    attack.predicate("routing", lambda predicate: predicate["details"].update(null_waived={"x": 12}))
    attack.seal()
    notes = [
        note for note in audited(attack).report.notes if "of kind x of the control are waived by the study" in note
    ]
    assert len(notes) == 1
    assert "04-routing-1.json: " in notes[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("error_share = 0.0", "error_share = inf"),
        ("empty_share = 0.02", "empty_share = 1.5"),
        ("floor = 0.85", "floor = -1.0"),
        ("margin_nats = 0.01", "margin_nats = inf"),
        ("confidence = 0.95", "confidence = 0.4"),
        ("limit = 0.05", "limit = true"),
        ('schedule = "waves"', 'schedule = "any"'),
    ],
)
def test_a_threshold_beyond_its_range_is_found(attack: Attacker, old: str, new: str) -> None:
    """A rule that nothing could break is no rule, though lock, scopes and receipts were written anew around it."""
    attack.text(attack.study / "study.toml", old, new)
    attack.seal()
    assert 4 in checks(audited(attack))


def test_more_questions_than_memory_are_refused_at_once(attack: Attacker) -> None:
    """No bound is worked out over a number of questions that no panel has."""
    attack.text(attack.study / "study.toml", "retrieval = 60", "retrieval = 1000000000")
    attack.seal()
    start = time.monotonic()
    result = audited(attack)
    assert time.monotonic() - start < 20
    assert 4 in checks(result)
    assert not result.passed


def test_a_question_asked_under_two_names_is_found(attack: Attacker) -> None:
    """The bound counts questions; the same one twice is one."""

    def again(panel: Any) -> None:
        panel["items"][1] |= {key: panel["items"][0][key] for key in ("prompt", "expected")}

    attack.document(attack.study / "panels" / "retrieval.json", again)
    attack.seal()
    found = [finding for finding in audited(attack).report.findings if "each question once" in finding.text]
    assert [finding.check for finding in found] == [4]


def test_a_planted_fault_that_is_left_out_is_found(attack: Attacker) -> None:
    """A poison capture that is sealed and not named may be the one that was missed."""
    folder = attack.attempt(CANDIDATE)
    name = "gsm8k-poison-other.jsonl"
    healthy = (folder / "gsm8k.jsonl").read_bytes().splitlines(keepends=True)[: SMALL.poison_questions]
    (folder / name).write_bytes(b"".join(healthy))
    with (folder / "manifest.jsonl").open("ab") as manifest:
        manifest.write(canonical_bytes({"name": name, "bytes": 0, "sha256": "0" * 64, "previous": "0" * 64}) + b"\n")
    attack.seal()
    result = audited(attack)
    assert checks(result) == {7}
    assert name in result.report.findings[0].text


def test_a_run_of_determinism_copied_from_another_is_found(attack: Attacker) -> None:
    """The repeated original is what the gate rests on; its responses are its own."""

    def copy(records: Any) -> None:
        first = {record["id"]: record["body"] for record in records if record["run"] == "original"}
        for record in records:
            if record["run"] == "original-again":
                record["body"] = first[record["id"]]

    attack.records(CANDIDATE, "determinism.jsonl", copy)
    attack.seal()
    assert checks(audited(attack)) == {15}


def without_one_prompt(records: list[Any]) -> None:
    """Drop the first prompt from every run."""
    first = records[0]["id"]
    records[:] = [record for record in records if record["id"] != first]


def test_a_run_of_determinism_asks_every_prompt(attack: Attacker) -> None:
    """A rotation of one prompt is none: what was not asked cannot differ."""
    for arm in (CANDIDATE, FIRST):
        attack.records(arm, "determinism.jsonl", without_one_prompt)

    def fit(predicate: Any) -> None:
        for key in ("verdict", "null"):
            predicate[key]["figure"] = predicate[key]["figure"].replace("of 3", "of 2")

    attack.predicate("determinism", fit)
    attack.seal()
    assert checks(audited(attack)) == {11}


def test_a_text_edited_without_its_tokens_is_found(tmp_path: Path) -> None:
    """The same tokens of the same question read as the same text in every capture: here a fault gave the same ones."""
    outcomes = all_right(SMALL)
    outcomes["gsm8k"][CANDIDATE][0] = "wrong"
    attack = Attacker.copy(build_run(tmp_path / "lost", outcomes=outcomes), tmp_path / "run")
    expected = json.loads((attack.attempt(CANDIDATE) / "gsm8k-panel.json").read_bytes())["items"][0]["expected"]
    attack.body(CANDIDATE, "gsm8k.jsonl", 0, lambda body: body["choices"][0].update(text=f"#### {expected}"))
    attack.seal()
    found = [finding for finding in audited(attack).report.findings if "the same tokens" in finding.text]
    assert [finding.check for finding in found] == [10]


def test_an_earlier_failure_and_an_unused_attempt_are_told(attack: Attacker) -> None:
    """A second try that passed is no objection; that there was a first, and another attempt, stands in the notes."""
    first = attack.receipt("gsm8k")
    second = first.with_name(first.name.replace("-1.json", "-2.json"))
    failed = json.loads(first.read_bytes())
    passed = json.loads(first.read_bytes())
    passed["predicate"]["attempt"] = 2
    failed["predicate"]["verdict"] |= {"outcome": "FAIL", "findings": ["rule 6: x"], "figure": "rule 6: x"}
    failed["predicate"] |= {"result": "FAILED", "passedTests": [], "failedTests": ["gsm8k"]}
    for path, statement in ((first, failed), (second, passed)):
        statement["predicate"].pop("content")
        statement["predicate"]["content"] = digest(statement)
        path.write_bytes(pretty_bytes(statement))
    spare = attack.attempt(CANDIDATE).with_name("attempt-2")
    spare.mkdir()
    for file in attack.attempt(CANDIDATE).iterdir():
        (spare / file.name).write_bytes(file.read_bytes())
    attack.document(spare / "attempt.json", lambda head: head.update(number=2))
    attack.seal_attempt(spare)
    result = audited(attack)
    assert [finding.line() for finding in result.report.findings] == []
    assert any("an earlier FAIL of gsm8k: rule 6: x" in note for note in result.report.notes)
    assert any("attempt-2: ended as complete; none of the newest receipts" in note for note in result.report.notes)


def test_the_statement_is_not_written_among_the_records(
    attack: Attacker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evidence, receipts and study are not written to, nor is a device replaced by a file."""
    manifest = attack.attempt(FIRST) / "manifest.jsonl"
    before = manifest.read_bytes()
    # A socket or a device cannot be made everywhere; a pipe is as little a plain file.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (manifest, attack.receipt("gsm8k"), attack.study / "audit.json", pipe, Path()):
        assert main([str(attack.folder), "--output", str(place)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert manifest.read_bytes() == before
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert main([str(attack.folder), "--output", str(attack.folder / "audit.json")]) == 0
