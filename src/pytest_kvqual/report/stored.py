"""The table of a run directory, from its receipts alone."""

from __future__ import annotations

from pathlib import Path

from pytest_kvqual.errors import ReceiptError
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.hooks import Decision
from pytest_kvqual.receipt.statement import Receipt
from pytest_kvqual.receipt.write import read_all
from pytest_kvqual.report import terminal


def lines(run_dir: Path, *, prefix: str = "") -> list[str]:
    """One table for each scope that has receipts: the latest one of each gate.

    It says what was decided, and checks of each receipt only that it is as it was written. Whether it still stands (the
    lock, the engine, the evidence, the receipts it rests on) is for a run or an audit to say.

    Raises:
        ReceiptError: There is no receipt, or one of them cannot be read.
    """
    found = read_all(run_dir, prefix=prefix)
    if not found.receipts and not found.damaged:
        raise ReceiptError(
            f"{run_dir}: found no receipt" + (f" under the prefix '{prefix}'" if prefix else "") + ", expected some",
            advice="name the --run-dir of a run, and its --prefix",
        )
    scopes: dict[Scope, dict[str, Receipt]] = {}
    for receipt in sorted(found.receipts, key=lambda receipt: (receipt.order, receipt.attempt)):
        scopes.setdefault(receipt.scope, {})[receipt.gate] = receipt
    out: list[str] = []
    for scope, receipts in scopes.items():
        out.append(
            f"{scope.arm} at length {scope.length}, {scope.cache_bytes} cache bytes, lock {scope.lock[:12]}, engine "
            f"{scope.engine[:12]}"
        )
        table = [
            terminal.Row(
                gate=gate,
                decision=Decision(verdict=receipt.verdict, receipt=run_dir / receipt.name),
                note="",
                receipt=receipt.name,
            )
            for gate, receipt in receipts.items()
        ]
        out += [f"  {line}" for line in terminal.table(table)]
    out += [f"damaged: {item.name}: {item.reason}" for item in found.damaged]
    return out
