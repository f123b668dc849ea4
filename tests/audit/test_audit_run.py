"""The audit of a small run directory: what it says of an honest one, and of one that is damaged in one place."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from audited_run import CACHE_BYTES, FAULT, IMPLEMENTATION, LENGTH, AuditedRun, write_arms_at_once, write_run

from pytest_kvqual import cli
from pytest_kvqual._canonical import canonical_bytes, digest, pretty_bytes, sha256_bytes, sha256_file
from pytest_kvqual.audit.auditor import Options, Result, UnusableError, audit, lines
from pytest_kvqual.audit.checks import CHECKS
from pytest_kvqual.audit.command import main
from pytest_kvqual.audit.statement import EXTENSION, build, encode
from pytest_kvqual.evidence.records import Scope, with_digest
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict
from pytest_kvqual.receipt.statement import build as receipt_of
from pytest_kvqual.receipt.write import write


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> AuditedRun:
    return write_run(tmp_path_factory.mktemp("whole"))


def _audit(run: AuditedRun, **options: object) -> Result:
    return audit(Options(run_dir=run.run_dir, **options))  # type: ignore[arg-type]


def _checks(result: Result) -> set[int]:
    return {found.check for found in result.report.findings}


def test_an_honest_run_passes_every_check(whole: AuditedRun) -> None:
    """An honest run has no finding, and its verdicts are derived from the records."""
    result = _audit(whole)
    assert result.report.findings == []
    assert result.passed
    assert [(gate.gate, gate.stored, gate.derived, gate.how) for gate in result.gates] == [
        ("parity", "PASS", "PASS", "re-derived"),
        ("nll", "PASS", "PASS", "re-derived"),
    ]
    for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15):
        assert result.report.seen.get(number, 0) > 0, CHECKS[number]


def test_two_arms_that_wrote_at_once(tmp_path: Path) -> None:
    """The audit of either of two arms that were decided at the same time in one run directory has no finding."""
    run_dir = write_arms_at_once(tmp_path, ("reference", "candidate"))
    for arm in ("reference", "candidate"):
        result = audit(Options(run_dir=run_dir, arm=arm))
        assert result.report.findings == []
        assert [(gate.gate, gate.derived) for gate in result.gates] == [("parity", "PASS"), ("nll", "PASS")]
    attempts = sorted(path.parent.name[:6] + path.name for path in run_dir.glob("evidence/*/attempt-*"))
    assert attempts == ["candidattempt-1", "nativeattempt-1", "nativeattempt-2", "refereattempt-1", "refereattempt-2"]


def test_an_honest_failure_has_consistent_records_and_establishes_nothing(tmp_path: Path) -> None:
    """A run whose gate says FAIL is consistent, and the audit fails it."""
    result = _audit(write_run(tmp_path, shift=0.05))
    assert result.report.findings == []
    assert not result.passed
    assert result.gates[1].derived == "FAIL"
    assert result.verdict() == (
        "FAILED: the records are consistent; preservation not established: nll FAIL; timing refused: the study times "
        "nothing"
    )


def test_one_line_per_check_and_per_gate_then_the_verdict(whole: AuditedRun) -> None:
    """The output has a line for each check, in order, one for each gate, and the verdict last."""
    printed = lines(_audit(whole))
    assert [line.split(":")[0].split(maxsplit=2)[1] for line in printed if line.startswith("check")] == [
        str(number) for number in CHECKS
    ]
    assert sum(line.startswith("gate ") for line in printed) == 2
    assert printed[-1].startswith("verdict: PASSED")
    assert all("\n" not in line for line in printed)


def test_the_statement_is_a_verification_summary(whole: AuditedRun) -> None:
    """The statement has the fields of a SLSA verification summary, the lock as its policy, the receipts as inputs."""
    statement = json.loads(encode(build(_audit(whole), time="2031-01-31T23:59:59Z")))
    predicate = statement["predicate"]
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/verification_summary/v1"
    assert statement["subject"] == [{"name": f"candidate-{LENGTH}-{CACHE_BYTES}", "digest": {"sha256": "e" * 64}}]
    assert predicate["verificationResult"] == "PASSED"
    assert predicate["policy"]["digest"] == {"sha256": whole.lock}
    assert predicate["timeVerified"] == "2031-01-31T23:59:59Z"
    assert len(predicate["inputAttestations"]) == 2
    # Of a study that requires no scored task.
    assert predicate["verifiedLevels"] == ["PYTEST_KVQUAL_GATES_PASSED"]
    assert [check["number"] for check in predicate[EXTENSION]["checks"]] == list(CHECKS)


def test_a_prefix_selects_its_folders(tmp_path: Path) -> None:
    """Folders of a prefix are audited with it, and hold nothing without it."""
    run = write_run(tmp_path, prefix="8k-")
    assert _audit(run, prefix="8k-").passed
    assert not _audit(run).passed


def test_the_command_prints_writes_and_exits_with_the_verdict(
    whole: AuditedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 0 for a run that passes; the statement is in the file that was asked for."""
    out = tmp_path / "audit.json"
    assert main([str(whole.run_dir), "--output", str(out)]) == 0
    assert "verdict: PASSED" in capsys.readouterr().out
    assert json.loads(out.read_bytes())["predicate"]["verificationResult"] == "PASSED"


def test_kvqual_audit_is_the_same_command(whole: AuditedRun, capsys: pytest.CaptureFixture[str]) -> None:
    """``kvqual audit`` takes the same arguments and comes to the same lines."""
    assert cli.main(["audit", str(whole.run_dir), "--length", str(LENGTH)]) == 0
    printed = capsys.readouterr().out
    assert main([str(whole.run_dir), "--length", str(LENGTH)]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="no-folder"),
        pytest.param(["missing"], id="missing"),
        pytest.param(["{}", "--length", "x"], id="length-no-number"),
        pytest.param(["{}", "--prefix", "../x"], id="prefix-a-path"),
        pytest.param(["{}", "--gsm8k", "missing"], id="test-set-missing"),
        pytest.param(["{}", "--output", "missing/folder/x"], id="output-unwritable"),
    ],
)
def test_usage_is_one_line_and_status_2(
    arguments: list[str], whole: AuditedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be audited is refused in one line."""
    assert main([word.format(whole.run_dir) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    """A folder with neither receipts nor evidence is no run directory."""
    with pytest.raises(UnusableError, match="neither receipts nor evidence"):
        audit(Options(run_dir=tmp_path))


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [("length", 8192, (LENGTH, 8192)), ("cache_bytes", 34359738368, (CACHE_BYTES, 34359738368))],
)
def test_another_length_or_size_is_refused_naming_both(
    option: str, value: int, named: tuple[int, int], whole: AuditedRun
) -> None:
    """A length or pool size that the receipts are not of is one finding of check 5 with both numbers, and no other."""
    result = _audit(whole, **{option: value})
    assert [finding.check for finding in result.report.findings] == [5]
    assert all(str(number) in result.report.of(5)[0].text for number in named)


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [("arm", "candidat", "no prefix and arm 'candidat'"), ("prefix", "8k-", "prefix '8k-'")],
)
def test_another_arm_or_prefix_is_refused_naming_what_is_there(
    option: str, value: str, named: str, whole: AuditedRun
) -> None:
    """An arm or a prefix without receipts is a finding of check 6 with what was asked for and what was found."""
    result = _audit(whole, **{option: value})
    assert _checks(result) == {6}
    assert (
        result.report.of(6)[0].text == f"found receipts of candidate-{LENGTH}-{CACHE_BYTES}, expected some of {named}"
    )


# -- damage ------------------------------------------------------------------------------------------------------------


def _link_to_a_file(run: AuditedRun) -> None:
    place = run.attempt("candidate") / "nll.jsonl"
    target = run.run_dir.parent / "outside.jsonl"
    place.rename(target)
    place.symlink_to(target)


def _link_to_a_folder(run: AuditedRun) -> None:
    place = run.run_dir / "evidence"
    place.rename(run.run_dir.parent / "outside")
    place.symlink_to(run.run_dir.parent / "outside")


def _pipe_for_a_file(run: AuditedRun) -> None:
    place = run.attempt("native") / "nll.jsonl"
    place.unlink()
    os.mkfifo(place)


def _stray_file_among_receipts(run: AuditedRun) -> None:
    (run.receipt("nll").parent / "notes.txt").write_text("x")


def _stray_file_in_the_study(run: AuditedRun) -> None:
    (run.study_copy / "panels" / "more.json").write_text("{}")


def _byte_of_a_capture(run: AuditedRun) -> None:
    place = run.attempt("candidate") / "nll.jsonl"
    place.write_bytes(place.read_bytes().replace(b"-1.125", b"-1.126", 1))


def _manifest_line_gone(run: AuditedRun) -> None:
    place = run.attempt("native") / "manifest.jsonl"
    place.write_bytes(b"".join(place.read_bytes().splitlines(keepends=True)[1:]))


def _outcome_gone(run: AuditedRun) -> None:
    (run.attempt("reference") / "outcome.json").unlink()


def _attempt_gone(run: AuditedRun) -> None:
    folder = run.attempt("native")
    folder.rename(folder.with_name("attempt-2"))


def _panel_changed(run: AuditedRun) -> None:
    place = run.study_copy / "panels" / f"nll-{LENGTH}.json"
    place.write_bytes(place.read_bytes().replace(b"doc-01", b"doc-91"))


def _study_gone(run: AuditedRun) -> None:
    run.study_copy.rename(run.study_copy.with_name("0" * 64))


def _byte_of_a_receipt(run: AuditedRun) -> None:
    place = run.receipt("nll")
    place.write_bytes(place.read_bytes().replace(b'"outcome": "PASS"', b'"outcome": "FAIL"'))


def _receipt_rewritten(run: AuditedRun, how: Callable[[dict[str, object]], None]) -> None:
    """A receipt that was edited by somebody who knows how its digest is made."""
    place = run.receipt("nll")
    statement = json.loads(place.read_bytes())
    how(statement["predicate"])
    del statement["predicate"]["content"]
    statement["predicate"]["content"] = digest(statement)
    place.write_bytes(pretty_bytes(statement))


def _figure_rewritten(run: AuditedRun) -> None:
    _receipt_rewritten(run, lambda predicate: predicate["verdict"].update(figure="ΔNLL -1.000000"))  # type: ignore[attr-defined]


def _chain_rewritten(run: AuditedRun) -> None:
    _receipt_rewritten(run, lambda predicate: predicate.update(requires={"parity": "0" * 64}))


def _lower_receipt_gone(run: AuditedRun) -> None:
    run.receipt("parity").unlink()


def _number_with_a_gap(run: AuditedRun) -> None:
    place = run.receipt("nll")
    _receipt_rewritten(run, lambda predicate: predicate.update(attempt=3))
    place.rename(place.with_name("02-nll-3.json"))


def _schema_of_a_later_version(run: AuditedRun) -> None:
    place = run.receipt("nll")
    text = place.read_text().replace("gate-receipt:v1", "gate-receipt:v2")
    place.write_text(text)
    _receipt_rewritten(run, lambda predicate: None)


def _control_left_out(run: AuditedRun) -> None:
    def drop(predicate: dict[str, object]) -> None:
        evidence = predicate["evidence"]
        assert isinstance(evidence, list)
        predicate["evidence"] = [entry for entry in evidence if not entry["name"].startswith("reference-")]

    _receipt_rewritten(run, drop)


def _nothing_but_noise(run: AuditedRun) -> None:
    run.receipt("nll").write_bytes(b"\xff\xfe\x00{" * 40)


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        (_link_to_a_file, 1),
        (_link_to_a_folder, 1),
        (_pipe_for_a_file, 1),
        (_stray_file_among_receipts, 1),
        (_stray_file_in_the_study, 1),
        (_byte_of_a_capture, 2),
        (_manifest_line_gone, 2),
        (_outcome_gone, 2),
        (_attempt_gone, 2),
        (_schema_of_a_later_version, 3),
        (_panel_changed, 4),
        (_study_gone, 4),
        (_byte_of_a_receipt, 6),
        (_nothing_but_noise, 6),
        (_chain_rewritten, 6),
        (_lower_receipt_gone, 6),
        (_number_with_a_gap, 6),
        (_figure_rewritten, 12),
        (_control_left_out, 15),
    ],
    ids=lambda value: value.__name__.strip("_").replace("_", "-") if callable(value) else str(value),
)
def test_damage_is_a_finding_of_its_check(
    damage: Callable[[AuditedRun], None], check: int, whole: AuditedRun, tmp_path: Path
) -> None:
    """Each damaged run directory fails under the number of the check that the damage breaks."""
    run = whole.copy(tmp_path / "run")
    damage(run)
    result = _audit(run)
    assert check in _checks(result), result.report.findings
    assert not result.passed
    assert json.loads(encode(build(result)))["predicate"]["verificationResult"] == "FAILED"


def test_a_check_that_could_not_be_made_does_not_say_ok(whole: AuditedRun, tmp_path: Path) -> None:
    """Without the study the checks that need it are not reached, and the run does not pass."""
    run = whole.copy(tmp_path / "run")
    _study_gone(run)
    result = _audit(run)
    assert not result.passed
    assert sum(line.endswith(": not reached") for line in lines(result)) >= 8
    assert not any(line.startswith(("check  8", "check 12")) and ": ok" in line for line in lines(result))


def test_nothing_outside_the_run_directory_is_read_through_a_link(whole: AuditedRun, tmp_path: Path) -> None:
    """A capture behind a link counts as not there, however right its bytes are."""
    run = whole.copy(tmp_path / "run")
    _link_to_a_file(run)
    result = _audit(run)
    assert {1, 2, 7} <= _checks(result)


@pytest.mark.parametrize("arm", ["candidate", "native", "reference"])
def test_a_setting_that_the_study_does_not_name_is_a_finding(arm: str, tmp_path: Path) -> None:
    """An argument of one server alone is a difference between the arms that the study does not explain."""

    def quantised(name: str, arguments: dict[str, object]) -> None:
        if name == arm:
            arguments["quantization"] = "fp8"

    assert 13 in _checks(_audit(write_run(tmp_path, settings=quantised)))


def test_a_pool_of_another_size_in_the_reference_is_named(tmp_path: Path) -> None:
    """A server whose pool is not that of the scope, and so not the reference's, is a finding of check 5."""

    def smaller(name: str, arguments: dict[str, object]) -> None:
        if name == "candidate":
            arguments["kv_cache_memory_bytes"] = CACHE_BYTES // 2

    found = _audit(write_run(tmp_path, settings=smaller)).report.of(5)
    assert any(str(CACHE_BYTES // 2) in one.text and str(CACHE_BYTES) in one.text for one in found)


def test_a_backend_that_the_worker_did_not_run_is_a_finding(tmp_path: Path) -> None:
    """What a worker observed of itself is held against the study."""

    def other(name: str, rank: dict[str, object]) -> None:
        if name == "candidate":
            rank["attention_backend"] = {"model.layers.0.attn": "CPU_ATTN", "model.layers.1.attn": "CPU_ATTN"}

    assert 13 in _checks(_audit(write_run(tmp_path, identity=other)))


def test_a_copied_capture_is_named(tmp_path: Path) -> None:
    """One capture written over the other, sealed and stated again, is found by its response ids."""
    run = write_run(tmp_path)
    place = run.attempt("native")
    copied = (place / "nll.jsonl").read_bytes()
    (place / "nll-again.jsonl").write_bytes(copied)
    _seal_again(place)
    findings = _audit(run).report.of(15)
    assert any("copy of another" in found.text for found in findings)


def _seal_again(attempt: Path) -> None:
    """The manifest and the outcome that fit what is in the folder now."""
    previous = sha256_bytes((attempt / "attempt.json").read_bytes())
    manifest = b""
    for line in (attempt / "manifest.jsonl").read_bytes().splitlines():
        entry = json.loads(line)
        path = attempt / entry["name"]
        entry |= {"bytes": path.stat().st_size, "sha256": sha256_file(path), "previous": previous}
        sealed = canonical_bytes(entry)
        previous = sha256_bytes(sealed)
        manifest += sealed + b"\n"
    (attempt / "manifest.jsonl").write_bytes(manifest)
    outcome = json.loads((attempt / "outcome.json").read_bytes())
    del outcome["sha256"]
    outcome["files"] = manifest.count(b"\n")
    outcome["manifest"] = sha256_bytes(manifest)
    (attempt / "outcome.json").write_bytes(with_digest(outcome))


TRIAL = '[gates.trial]\nstate = "required"\ntiming = true\n'
PLANNED = '[gates.fidelity]\nstate = "planned"\ntiming = true\n'


def _trial(run: AuditedRun, outcome: Outcome, order: int = 3) -> None:
    """A receipt of the timing gate, whoever wrote it."""
    requires = {gate: sha256_file(run.receipt(gate)) for gate in ("parity", "nll")}
    scope = Scope(lock=run.lock, arm="candidate", length=LENGTH, cache_bytes=CACHE_BYTES, engine="e" * 64)
    passed = outcome is Outcome.PASS
    verdict = Verdict(
        gate="trial",
        outcome=outcome,
        figure="faster",
        null=Check(passed=True, figure="equal") if passed else None,
        poison=(Poison(fault="slower", caught=True, figure="slower"),) if passed else (),
    )
    nll = run.attempt("candidate") / "nll.jsonl"
    evidence = {f"{nll.parent.parent.name}/attempt-1/nll.jsonl": sha256_file(nll)} if passed else {}
    statement = receipt_of(
        verdict, scope, order=order, evidence=evidence, requires=requires, implementation=digest(IMPLEMENTATION)
    )
    write(run.run_dir, statement)


def test_timing_is_allowed_where_every_gate_above_it_stands(tmp_path: Path) -> None:
    """Below gates that all derive as PASS a timing receipt may be there; without recordings it does not stand."""
    run = write_run(tmp_path, gates=TRIAL)
    _trial(run, Outcome.PASS)
    assert _checks(_audit(run)) == {19}


@pytest.mark.parametrize(
    ("gates", "shift", "order"), [(PLANNED + TRIAL, 0.0, 4), (TRIAL, 0.05, 3)], ids=["below-planned", "below-failed"]
)
def test_timing_without_a_gate_above_it_is_a_finding(gates: str, shift: float, order: int, tmp_path: Path) -> None:
    """A timing receipt below a gate that is only planned, or that failed, is a finding of check 16."""
    run = write_run(tmp_path, gates=gates, shift=shift)
    _trial(run, Outcome.PASS, order)
    result = _audit(run)
    assert 16 in _checks(result)
    assert result.timing.startswith("refused")


def test_a_refused_timing_receipt_is_no_finding(tmp_path: Path) -> None:
    """That timing was refused is what an honest run says."""
    run = write_run(tmp_path, gates=TRIAL, shift=0.05)
    _trial(run, Outcome.REFUSED)
    assert _audit(run).report.of(16) == []


def test_timing_records_under_a_failed_gate_are_a_finding(tmp_path: Path) -> None:
    """What a timing gate would have captured may not be there at all."""
    run = write_run(tmp_path, gates=TRIAL, shift=0.05)
    place = run.attempt("candidate")
    (place / "trial.jsonl").write_bytes(b"{}\n")
    with (place / "manifest.jsonl").open("ab") as file:
        file.write(
            canonical_bytes({"name": "trial.jsonl", "bytes": 0, "sha256": "0" * 64, "previous": "0" * 64}) + b"\n"
        )
    _seal_again(place)
    assert 16 in _checks(_audit(run))


def test_no_damage_whatever_ends_in_a_traceback(
    whole: AuditedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes changed, cut and added in every file end in a verdict or in one line, never in a traceback."""
    numbers = random.Random(4)
    files = sorted(path.relative_to(whole.run_dir) for path in whole.run_dir.rglob("*") if path.is_file())
    for round_number in range(2):
        for index, name in enumerate(files):
            run = whole.copy(tmp_path / f"run-{round_number}-{index}")
            data = bytearray((run.run_dir / name).read_bytes())
            at = numbers.randrange(len(data))
            change = numbers.choice(("flip", "cut", "insert", "empty"))
            if change == "flip":
                data[at] ^= 1 << numbers.randrange(8)
            elif change == "cut":
                del data[at:]
            elif change == "insert":
                data[at:at] = numbers.choice((b"[" * 100_000, b"\x00", b"NaN", b'"\\ud800"', b"1e999", b"9" * 5000))
            else:
                data.clear()
            (run.run_dir / name).write_bytes(data)
            assert main([str(run.run_dir)]) in (1, 2), (name, change, at)
            printed = capsys.readouterr()
            assert "Traceback" not in printed.out + printed.err
            assert "cannot be audited" not in printed.err, (name, change, at, printed.err)


def test_the_fault_of_the_run_is_named(whole: AuditedRun) -> None:
    """Poison is derived from the captures that were made under the fault, by its name."""
    statement = json.loads(whole.receipt("nll").read_bytes())
    assert [fault["fault"] for fault in statement["predicate"]["poison"]["faults"]] == [FAULT]
