"""No timing without every gate above it (check 16)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.files import canonical, sha256
from pytest_kvqual.audit.frozen import Frozen
from pytest_kvqual.audit.receipts import Receipt, Scope, required_before
from pytest_kvqual.audit.rederive import GateResult, Records

_RECORDS: Final = re.compile(r"(timing|trial|superiority|cell|warm-up|fidelity)([._-].*)?\.jsonl?")
"""The names of what a timing gate captures."""


def check(records: Records, newest: Mapping[str, Receipt], gates: Sequence[GateResult], report: Report) -> str:
    """Hold timing receipts and timing records against the gates above; returns ``allowed``, or ``refused`` and why."""
    frozen = records.frozen
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
        if receipt is None:
            continue
        if receipt.outcome != "REFUSED" and refused:
            report.find(
                16, receipt.name, f"found {receipt.outcome} of the timing gate {plan.name!r}, expected none: "
                f"{_why(open_gates)}",
            )  # fmt: skip
        # What superiority rests on was measured by trials, and is held against their judgments (check 18).
        if plan.name != "superiority":
            _judgments(records, plan.name, receipt, newest, report)
    for attempt in records.attempts.values():
        for name in attempt.sealed:
            if _RECORDS.fullmatch(name) and refused:
                report.find(
                    16, f"evidence/{attempt.name}/{name}", f"found timing records, expected none: {_why(open_gates)}"
                )
    if timed[0].state != "required":
        open_gates.append(first)
    if open_gates:
        planned = {plan.name for plan in frozen.gates if plan.state != "required"}
        named = ", ".join(f"{name} ({'planned' if name in planned else 'does not stand'})" for name in open_gates)
        return f"refused: {named}"
    return "refused" if broken else "allowed"


def _why(open_gates: Sequence[str]) -> str:
    return f"{', '.join(open_gates)} above it does not stand" if open_gates else "the records above it do not hold"


def judgment(frozen: Frozen, gate: str, scope: Scope, receipts: Mapping[str, str]) -> str:
    """The digest of the permit that an arm's receipts give, by their digests; of the required gates above alone."""
    document = {
        "study": frozen.name,
        "gate": gate,
        "scope": {
            "lock": scope.lock,
            "arm": scope.arm,
            "length": scope.length,
            "cache_bytes": scope.cache_bytes,
            "engine": scope.engine,
        },
        "receipts": {name: receipts[name] for name in required_before(frozen.gates, gate) if name in receipts},
    }
    return sha256(canonical(document))


def _judgments(records: Records, gate: str, receipt: Receipt, newest: Mapping[str, Receipt], report: Report) -> None:
    """Each timing record carries the digest of the receipts that it was measured under."""
    expected = judgment(records.frozen, gate, receipt.scope, {name: it.sha256 for name, it in newest.items()})
    for name in receipt.evidence:
        folder, _, file = name.rpartition("/")
        attempt = records.attempts.get(folder)
        kept = attempt.kept.get(file) if attempt is not None else None
        for number, record in enumerate(kept if isinstance(kept, list) else [], start=1):
            if isinstance(record, dict) and "judgment" in record and record["judgment"] != expected:
                report.find(
                    16,
                    f"evidence/{name}, record {number}",
                    f"judgment: found {record['judgment']!r}, expected {expected}",
                )
                break
