"""Timing: none without every gate above it (check 16), and its verdicts derived anew (checks 17 to 19)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from pytest_kvqual.audit import fidelity, plans, superiority, trials
from pytest_kvqual.audit.files import DamagedError
from pytest_kvqual.audit.receipts import Receipt, required_before
from pytest_kvqual.audit.rederive import GateResult, differences
from pytest_kvqual.audit.trials import Run, Trial

_RECORDS: Final = re.compile(r"((timing|trial|superiority)([._-].*)?|cell-.+|warm-up|fidelity-.+)\.jsonl?")
"""The names of what a timing gate captures."""
_NAMED: Final = ("fidelity", "trial", "superiority")


def check(run: Run, receipts: Sequence[Receipt], gates: Sequence[GateResult]) -> str:
    """Hold timing receipts and timing records against the gates above; returns ``allowed``, or ``refused`` and why."""
    frozen, report = run.frozen, run.report
    newest = run.receipts(run.scope.arm)
    stands = {gate.gate: gate.stands for gate in gates}
    timed = [plan for plan in frozen.gates if plan.timing]
    if not timed:
        return "refused: the study times nothing"
    first = timed[0].name
    above = [name for name in required_before(frozen.gates, first) if name not in {plan.name for plan in timed}]
    open_gates = [name for name in above if not stands.get(name, False)]
    broken = [found for found in report.findings if found.check != 16]
    refused = bool(open_gates or broken)
    for plan in timed:
        receipt = newest.get(plan.name)
        report.look(16)
        if receipt is not None and receipt.outcome != "REFUSED" and refused:
            report.find(
                16, receipt.name, f"found {receipt.outcome} of the timing gate {plan.name!r}, expected none: "
                f"{_why(open_gates)}",
            )  # fmt: skip
    for attempt in run.attempts.values():
        for name in attempt.sealed:
            if _RECORDS.fullmatch(name) and refused:
                report.find(
                    16, f"evidence/{attempt.name}/{name}", f"found timing records, expected none: {_why(open_gates)}"
                )
    for receipt in receipts:
        if receipt.gate in ("fidelity", "trial"):
            _judgments(run, receipt)
    # Figures are measured by the first timing gate that is not the recorder's own: what it rests on must stand too.
    measured = next((plan.name for plan in timed if plan.name != "fidelity"), first)
    for name in required_before(frozen.gates, measured):
        receipt = newest.get(name)
        if name not in above and (receipt is None or receipt.outcome != "PASS"):
            open_gates.append(name)
    if open_gates:
        planned = {plan.name for plan in frozen.gates if plan.state != "required"}
        named = ", ".join(f"{name} ({'planned' if name in planned else 'does not stand'})" for name in open_gates)
        return f"refused: {named}"
    return "refused" if broken else "allowed"


def _why(open_gates: Sequence[str]) -> str:
    return f"{', '.join(open_gates)} above it does not stand" if open_gates else "the records above it do not hold"


def _judgments(run: Run, receipt: Receipt) -> None:
    """Each timing record carries the digest of the receipts that it was measured under."""
    expected = run.judgment(run.scope.arm, receipt.gate)
    for name in receipt.evidence:
        folder, _, file = name.rpartition("/")
        attempt = run.attempts.get(folder)
        kept = attempt.kept.get(file) if attempt is not None else None
        for number, record in enumerate(kept if isinstance(kept, list) else [], start=1):
            if isinstance(record, dict) and "judgment" in record and record["judgment"] != expected:
                run.report.find(
                    16,
                    f"evidence/{name}, record {number}",
                    f"judgment: found {record['judgment']!r}, expected {expected}",
                )
                break


# -- the verdicts ----------------------------------------------------------------------------------------------------


def derive(run: Run, receipts: Sequence[Receipt]) -> list[GateResult]:
    """Every recording verified, and the verdict of each timing receipt derived from the recordings (17 to 19).

    Args:
        run: What is read.
        receipts: Every receipt of the arm, the newest of each gate and those before it.
    """
    trials.recordings(run)
    newest = run.receipts(run.scope.arm)
    results = []
    for gate in (plan for plan in run.frozen.gates if plan.timing):
        result = GateResult(gate=gate.name, required=gate.state == "required")
        receipt = newest.get(gate.name)
        if receipt is not None:
            result.stored, result.figure, result.receipt = receipt.outcome, receipt.figure, receipt.name
            result.how = "refused: nothing was measured" if receipt.outcome == "REFUSED" else "chained"
        results.append(result)
    if not any(result.stored for result in results) and run.plan is None:
        return results
    found: dict[str, Trial] = {}
    for receipt in receipts:
        if receipt.outcome == "REFUSED" or receipt.gate not in _NAMED:
            continue
        scratch = GateResult(gate=receipt.gate, required=True)
        result = next((it for it in results if it.receipt == receipt.name), scratch)
        with run.report.reading(19, receipt.name):
            _evidence(run, receipt)
            if receipt.gate == "fidelity":
                _fidelity(run, receipt, result)
            elif receipt.gate == "trial":
                _trial(run, receipt, result, found)
            elif newest.get(receipt.gate) is receipt:
                _superiority(run, receipt, result)
    return results


def _evidence(run: Run, receipt: Receipt) -> None:
    """What a timing receipt names is sealed and intact, with the digest that is named (check 7)."""
    for name, digest in receipt.evidence.items():
        folder, _, file = name.rpartition("/")
        attempt = run.attempts.get(folder)
        run.report.look(7)
        if attempt is None or attempt.sealed.get(file) != digest or file not in attempt.intact:
            run.report.find(7, receipt.name, f"evidence {name}: found no such sealed file of sha256 {digest}")


def _attempt_with(run: Run, receipt: Receipt, file: str) -> str:
    names = sorted({name.rpartition("/")[0] for name in receipt.evidence if name.endswith(f"/{file}")})
    if len(names) != 1 or names[0] not in run.attempts:
        raise DamagedError(f"evidence: found {len(names)} attempts with {file}, expected one")
    return names[0]


def _counted(receipt: Receipt) -> dict[str, object]:
    """The details of superiority, of each comparison how many effects are missing in the place of why."""
    said = dict(receipt.details)
    family = said.get("family")
    if isinstance(family, list):
        said["family"] = [
            {**it, "missing": len(it["missing"])}
            if isinstance(it, dict) and isinstance(it.get("missing"), list)
            else it
            for it in family
        ]
    return said


def _compare(
    run: Run, receipt: Receipt, result: GateResult, outcome: str, why: str, details: object, said: object = None
) -> None:
    report = run.report
    report.look(19)
    result.how = "re-derived, seeded faults chained"
    result.derived, result.derived_figure = outcome, why or receipt.figure
    # What cannot be seen here may have made a gate more careful than it follows, never less.
    if receipt.gate == "fidelity" and (outcome, receipt.outcome) == ("PASS", "INCONCLUSIVE"):
        result.derived, result.how = "", "chained: what makes it inconclusive cannot be seen here"
    elif outcome != receipt.outcome:
        report.find(
            19, receipt.name, f"outcome: found {receipt.outcome}, expected {outcome}{f': {why}' if why else ''}"
        )
    for path, found, expected in differences(said or receipt.details, details, "details", 0.0):
        report.find(19, receipt.name, f"{path}: found {found}, expected {expected}, from the recordings")


def _missed(receipt: Receipt) -> list[str]:
    return [fault for fault, caught, _ in receipt.poison if not caught] or ([] if receipt.poison else ["none seeded"])


def _null(run: Run, receipt: Receipt, passed: bool) -> None:
    wanted = "passed" if passed else "failed"
    if receipt.null_state != wanted:
        run.report.find(19, receipt.name, f"null: found {receipt.null_state}, expected {wanted}, from the records")


def _fidelity(run: Run, receipt: Receipt, result: GateResult) -> None:
    attempt = run.attempts[_attempt_with(run, receipt, "fidelity-open.jsonl")]
    derived = fidelity.derive(run, attempt)
    said = {fault: caught for fault, caught, _ in receipt.poison}
    for fault in sorted({*said, *derived.caught}):
        if said.get(fault) != derived.caught.get(fault, False):
            run.report.find(
                19, receipt.name, f"poison {fault!r}: found {said.get(fault)}, expected {derived.caught.get(fault)}"
            )
    _null(run, receipt, not derived.objections.idle)
    missed = [fault for fault, caught in derived.caught.items() if not caught] or _missed(receipt)
    rules = run.frozen.part("fidelity")
    limits = {
        name: rules.get(f"{name}_ms") for name in ("lateness_p99", "ttft_error_p50", "ttft_error_p99", "tpot_error_p99")
    }
    details = {"unit": "ms", "limits": limits, "cases": derived.details()}
    outcome, why = derived.objections.outcome(missed=missed), derived.objections.first()
    _compare(run, receipt, result, outcome, why, details)
    if attempt.outcome != "complete" and receipt.outcome == "PASS":
        run.report.find(2, f"evidence/{attempt.name}", f"found the outcome {attempt.outcome}, expected complete")


def _trial(run: Run, receipt: Receipt, result: GateResult, found: dict[str, Trial]) -> None:
    name = _attempt_with(run, receipt, trials.TRIAL)
    block = receipt.details.get("block")
    if run.plan is None or type(block) is not int:
        raise DamagedError("found no plan or no block, expected them of a trial")
    if name in found:
        run.report.find(19, receipt.name, f"found another receipt of {name}, expected one")
    attempt = run.attempts[name]
    trial = found[name] = trials.judged(run, attempt, run.scope.arm, block)
    if run.scope.arm not in run.plan.blocks.get(block, []):
        run.report.find(19, receipt.name, f"block: found {block}, expected one in which the arm is timed")
    _null(run, receipt, not trial.objections.idle)
    outcome = trial.objections.outcome(missed=_missed(receipt))
    _compare(run, receipt, result, outcome, trial.objections.first(), trial.details(run.plan))


def _superiority(run: Run, receipt: Receipt, result: GateResult) -> None:
    plan = run.plan
    if plan is None:
        raise DamagedError("found no plan, expected one")
    every = {(arm, block): trials.of_block(run, arm, block) for arm, block in plans.trials(plan)}
    for arm in plan.arms:
        for one in run.folder(arm).receipts:
            # A gate that was blind in this block, as its receipt says, made nothing that may be used.
            block = one.details.get("block")
            trial = every.get((arm, block)) if one.gate == "trial" and type(block) is int else None
            if trial is not None and not trial.why and one.outcome != "PASS":
                trial.void = one.figure
    derived = superiority.derive(plan, run.scope.arm, every)
    _null(run, receipt, not derived.objections.idle)
    outcome = derived.objections.outcome(missed=_missed(receipt))
    _compare(run, receipt, result, outcome, derived.objections.first(), derived.details(plan), said=_counted(receipt))
    result.derived_figure = derived.figure(plan) if outcome == "PASS" else derived.objections.first()
    result.how = "re-derived from every trial's recordings, seeded faults chained"
    if outcome == receipt.outcome == "PASS" and receipt.figure.partition("; earlier FAIL: ")[0] != derived.figure(plan):
        run.report.find(19, receipt.name, f"figure: found {receipt.figure!r}, expected {derived.figure(plan)!r}")
