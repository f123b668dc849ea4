"""Receipts and attempts of several processes in one run directory at the same time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_kvqual.evidence import layout
from pytest_kvqual.evidence.bundle import Bundle
from pytest_kvqual.evidence.reader import Reader
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict
from pytest_kvqual.receipt.statement import build
from pytest_kvqual.receipt.write import read_all, write

SCOPE = Scope(lock="1" * 64, arm="candidate", length=1024, cache_bytes=4096, engine="2" * 64)
EACH = 12
"""How many times each process writes."""


def at_once(work: Callable[[int], None], processes: int) -> None:
    """Run ``work(k)`` in ``processes`` processes that begin together; one that raises fails the test."""
    context = multiprocessing.get_context("fork")
    together = context.Barrier(processes)

    def begin(number: int) -> None:
        together.wait(20)
        work(number)

    running = [context.Process(target=begin, args=(number,)) for number in range(processes)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0] * processes


def statement(scope: Scope, figure: str) -> dict[str, Any]:
    verdict = Verdict(
        gate="identity",
        outcome=Outcome.PASS,
        figure=figure,
        null=Check(passed=True, figure="0"),
        poison=(Poison(fault="weights-altered", caught=True, figure="1"),),
    )
    name = f"{scope.arm}-1024-4096/attempt-1/identity.json"
    return build(verdict, scope, order=1, evidence={name: "3" * 64}, requires={}, implementation="6" * 64)


def test_receipts_of_two_arms(tmp_path: Path) -> None:
    """While two arms write, each reads its own receipts whole, in number and order, and none of all is damaged."""

    def work(number: int) -> None:
        scope = replace(SCOPE, arm=("native", "candidate")[number])
        for round_ in range(1, EACH + 1):
            write(tmp_path, statement(scope, f"{os.getpid()} {round_}"))
            found = read_all(tmp_path)
            own = [it for it in found.receipts if it.scope == scope]
            if found.damaged or {it.attempt for it in own} != set(range(1, round_ + 1)):
                raise ValueError(f"found {found.damaged} and {len(own)} receipts, expected none and {round_}")

    at_once(work, 2)
    assert len(read_all(tmp_path).receipts) == 2 * EACH


def test_receipts_of_one_gate(tmp_path: Path) -> None:
    """Writers of one gate's receipts get a number each, without a gap, and overwrite nothing."""

    def work(number: int) -> None:
        for round_ in range(EACH):
            write(tmp_path, statement(SCOPE, f"{number} {round_}"))

    at_once(work, 3)
    found = read_all(tmp_path)
    assert not found.damaged
    assert sorted(it.attempt for it in found.receipts) == list(range(1, 3 * EACH + 1))
    wanted = {f"{number} {round_}" for number in range(3) for round_ in range(EACH)}
    assert {it.verdict.figure for it in found.receipts} == wanted


def test_attempts_at_one_control(tmp_path: Path) -> None:
    """Two groups that capture one control get an attempt each; a reader meanwhile finds whole ones or none."""

    def work(number: int) -> None:
        for round_ in range(EACH):
            bundle = Bundle.create(tmp_path, SCOPE)
            bundle.write("identity.json", {"by": number, "round": round_})
            found = Reader.latest(tmp_path, SCOPE, names=("identity.json",))
            if found is not None:
                found.document("identity.json")
            bundle.complete()

    at_once(work, 2)
    paths = layout.attempts(tmp_path, SCOPE.arm, SCOPE.length, SCOPE.cache_bytes)
    assert len(paths) == 2 * EACH
    written = [Reader.open(path).document("identity.json") for path in paths]
    assert sorted((it["by"], it["round"]) for it in written) == [(by, it) for by in range(2) for it in range(EACH)]
