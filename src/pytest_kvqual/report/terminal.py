"""The table at the end of a run, as lines of text. Pure functions over decisions."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_kvqual.judge.verdict import Outcome, Verdict

if TYPE_CHECKING:
    from pytest_kvqual.hooks import Decision
    from pytest_kvqual.study.model import GatePlan

FINDINGS_SHOWN = 5
"""How many findings of one gate the terminal shows; the receipt holds all."""

FIGURE_SHOWN = 96
"""How many characters of a figure the table shows; the line of a failed gate has all of them."""

LINE_SHOWN = 400
"""How many characters of a finding the terminal shows; the receipt holds all."""

_HEADER = ("gate", "verdict", "figure", "null", "faults", "receipt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One gate in the table. ``decision`` is None for a gate that nobody decided; ``note`` says why."""

    gate: str
    decision: Decision | None
    note: str
    receipt: str


def failure_line(decision: Decision) -> str:
    """One line for a failed gate: verdict, figure, first finding, receipt."""
    verdict = decision.verdict
    first = next(iter(verdict.findings), verdict.figure)
    # A refusal's figure names each receipt; its findings say the same at length.
    more = first != verdict.figure and verdict.outcome is not Outcome.REFUSED
    finding = f": {_one_line(first)}" if more else ""
    receipt = min(str(decision.receipt), os.path.relpath(decision.receipt), key=len)
    return f"{verdict.gate}: {verdict.outcome.value}: {_one_line(verdict.figure)}{finding} [{receipt}]"


def rows(
    plans: Iterable[GatePlan],
    decisions: Mapping[str, Decision],
    *,
    notes: Mapping[str, str],
    unasked: Collection[str],
    run_dir: Path,
) -> list[Row]:
    """One row for each gate of the study, in its order.

    ``notes`` says why a gate has no decision, where known; ``unasked`` are the gates that this run was not to decide.
    """
    found = []
    for plan in plans:
        decision = decisions.get(plan.name)
        if decision is not None:
            note = "standing: an earlier run's receipt" if decision.standing else ""
        elif plan.name in notes:
            note = notes[plan.name]
        elif plan.state == "planned":
            note = "planned, not there yet"
        elif plan.name in unasked:
            note = "not asked"
        else:
            note = "no receipt"
        receipt = "" if decision is None else os.path.relpath(decision.receipt, run_dir)
        found.append(Row(gate=plan.name, decision=decision, note=note, receipt=receipt))
    return found


def table(entries: Sequence[Row]) -> list[str]:
    """The table alone."""
    return _aligned([_HEADER, *(_cells(row) for row in entries)])


def lines(entries: Sequence[Row], *, notices: Sequence[str], summary: Sequence[str], run_dir: Path) -> list[str]:
    """The whole section: the table, one line for each finding, notices, and the summary."""
    out = table(entries)
    for row in entries:
        if row.decision is None:
            continue
        findings = row.decision.verdict.findings
        if row.decision.verdict.outcome is Outcome.REFUSED:
            continue
        out += [f"{row.gate}: {_cut(_one_line(finding), LINE_SHOWN)}" for finding in findings[:FINDINGS_SHOWN]]
        if len(findings) > FINDINGS_SHOWN:
            out.append(f"{row.gate}: {len(findings) - FINDINGS_SHOWN} more findings in {row.receipt}")
    out += [_one_line(notice) for notice in notices]
    out += [_one_line(line) for line in summary]
    out.append(f"receipts and evidence: {run_dir}")
    return out


def _cells(row: Row) -> tuple[str, ...]:
    if row.decision is None:
        return (row.gate, "-", _cut(_one_line(row.note), FIGURE_SHOWN), "-", "-", "-")
    verdict = row.decision.verdict
    figure = _cut(_one_line(verdict.figure), FIGURE_SHOWN) + (f" ({row.note})" if row.note else "")
    null = "-" if verdict.null is None else "FAILED" if not verdict.null.passed else null_word(verdict)
    faults = f"{verdict.faults_caught}/{verdict.faults_seeded}" if verdict.poison else "-"
    return (row.gate, verdict.outcome.value, figure, null, faults, row.receipt)


def null_word(verdict: Verdict) -> str:
    """What to call a null that passed: ``passed``, or ``passed, waived`` where findings of it did not count."""
    counts = verdict.details.get("null_waived")
    waived = isinstance(counts, Mapping) and any(isinstance(count, int) and count > 0 for count in counts.values())
    return "passed, waived" if waived else "passed"


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 1]}…"


def _one_line(text: str) -> str:
    return " ".join(text.split())
