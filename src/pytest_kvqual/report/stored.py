"""The table of a run directory, from its receipts alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_kvqual.errors import ReceiptError
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.hooks import Decision
from pytest_kvqual.judge.verdict import Outcome
from pytest_kvqual.receipt.statement import Receipt
from pytest_kvqual.receipt.write import DamagedReceipt, read_all
from pytest_kvqual.report import terminal

UNCHECKED = "as written: evidence, lock, engine and the receipts that each rests on are not checked here"
"""What a reader of the table must know."""

# Arm, length, cache bytes and gate: receipts that share them share one count.
_Series = tuple[str, int, int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """What the receipts of a run directory say.

    ``passed`` is true when no receipt is damaged and the newest one of each gate (for one arm, length and pool size)
    says PASS. It does not say that the gates of a study are all there.
    """

    lines: tuple[str, ...]
    passed: bool


def stored(run_dir: Path, *, prefix: str = "") -> Stored:
    """One table for each scope that has receipts: the latest one of each gate.

    A gate whose newest receipt is damaged has no verdict in the table, whatever an older one says.

    It says what was decided, and checks of each receipt only that it is as it was written. Whether it still stands (the
    lock, the engine, the evidence, the receipts it rests on) is for a run or an audit to say.

    Raises:
        ReceiptError: There is no receipt, or their folder cannot be read.
    """
    found = read_all(run_dir, prefix=prefix)
    if not found.receipts and not found.damaged:
        raise ReceiptError(
            f"{run_dir}: found no receipt" + (f" under the prefix '{prefix}'" if prefix else "") + ", expected some",
            advice="name the --run-dir of a run, and its --prefix",
        )
    damaged: dict[_Series, DamagedReceipt] = {}
    for item in sorted(found.damaged, key=lambda item: item.attempt):
        damaged[item.arm, item.length, item.cache_bytes, item.gate] = item
    newest: dict[_Series, Receipt] = {}
    for receipt in sorted(found.receipts, key=lambda receipt: receipt.attempt):
        newest[_series(receipt)] = receipt
    scopes: dict[Scope, dict[str, Receipt]] = {}
    for receipt in sorted(found.receipts, key=lambda receipt: (receipt.order, receipt.attempt)):
        scopes.setdefault(receipt.scope, {})[receipt.gate] = receipt
    out: list[str] = [UNCHECKED]
    for scope, receipts in scopes.items():
        out.append(
            f"{scope.arm} at length {scope.length}, {scope.cache_bytes} cache bytes, lock {scope.lock[:12]}, engine "
            f"{scope.engine[:12]}"
        )
        table = [_row(run_dir, receipt, damaged.get(_series(receipt))) for receipt in receipts.values()]
        out += [f"  {line}" for line in terminal.table(table)]
    out += [f"damaged: {item.name}: {item.reason}" for item in found.damaged]
    passed = not found.damaged and all(receipt.verdict.outcome is Outcome.PASS for receipt in newest.values())
    return Stored(lines=tuple(out), passed=passed)


def _series(receipt: Receipt) -> _Series:
    scope = receipt.scope
    return scope.arm, scope.length, scope.cache_bytes, receipt.gate


def _row(run_dir: Path, receipt: Receipt, damaged: DamagedReceipt | None) -> terminal.Row:
    if damaged is not None and damaged.attempt > receipt.attempt:
        note = f"its newest receipt is damaged: {damaged.name}"
        return terminal.Row(gate=receipt.gate, decision=None, note=note, receipt=damaged.name)
    decision = Decision(verdict=receipt.verdict, receipt=run_dir / receipt.name)
    return terminal.Row(gate=receipt.gate, decision=decision, note="", receipt=receipt.name)
