"""A run directory to report on: everything that ``full_run`` writes, and a timing campaign of twenty trials on top.

Receipts and recordings of the timing gates have the real form and are written by the real writers. Superiority is
judged by its judge; the verdicts of fidelity and trial are put together here. No engine ran, and nothing here is
evidence about any.
"""

from __future__ import annotations

import base64
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest import mock

from full_run import ARMS, CANDIDATE, CONTROLS, FULL, SMALL, FullRun, Size, all_right, build_run
from recordings import DONE, MS, Line, chunk, to_bytes, usage, whole

from pytest_kvqual._canonical import sha256_file
from pytest_kvqual.evidence.bundle import Bundle
from pytest_kvqual.judge.gates import superiority
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict
from pytest_kvqual.receipt.statement import build as statement_of
from pytest_kvqual.receipt.write import write
from pytest_kvqual.report.gate.latencies import rank
from pytest_kvqual.study.model import Comparison, Study
from pytest_kvqual.study.plan import MEASURED, NULL, Block, Plan, Reachable

BLOCKS: Final = (1, 2, 3, 4, 5, 6)
PAIR: Final = (7, 8)
"""The A/A blocks of the first control."""
CELLS: Final = ("open", "closed")
CONCURRENCY: Final = 16
COMPARED: Final = (CONTROLS[0], "open", "ttft_intended_p50")
"""Control, cell and metric of the one comparison: six blocks are too few for Holm's correction over two."""
QUICK: Final = replace(SMALL, documents=32, gsm8k=400)
FEW_LOST: Final = (3, 41, 77)
"""Questions of retrieval or gsm8k that the candidate loses in a passing run: their places."""


def passing(size: Size) -> dict[str, dict[str, list[str]]]:
    """Every control right on nine of ten questions; the candidate loses a few of gsm8k and gains one."""
    found = all_right(size)
    for place in FEW_LOST:
        found["gsm8k"][CANDIDATE][place] = "wrong"
    found["gsm8k"][CANDIDATE][19] = "right"
    return found


def failing(size: Size) -> dict[str, dict[str, list[str]]]:
    """The candidate loses one question in twelve of gsm8k."""
    found = all_right(size)
    for place in range(0, size.gsm8k, 12):
        found["gsm8k"][CANDIDATE][place] = "wrong"
    return found


def write_report_run(
    folder: Path,
    *,
    size: Size = QUICK,
    passes: bool = True,
    requests: int = 12,
    tokens: int = 6,
    prompt: int = 40,
    seed: int = 5,
) -> FullRun:
    """Write the run to ``folder/run``; a passing one has a timing campaign too.

    Args:
        folder: An empty or missing folder.
        size: Of the quality gates.
        passes: Whether they all pass; otherwise gsm8k fails, and nothing is timed.
        requests: Of each cell of each trial.
        tokens: Of each answer in a trial.
        prompt: Tokens of each prompt there, which the first event of an answer repeats.
        seed: Of all that is drawn.
    """
    run = build_run(folder, size=size, outcomes=passing(size) if passes else failing(size), seed=seed)
    if passes:
        with mock.patch("os.fsync", return_value=None):
            _Timing(run, requests, tokens, prompt, random.Random(seed)).write()
    return run


class _Timing:
    def __init__(self, run: FullRun, requests: int, tokens: int, prompt: int, numbers: random.Random) -> None:
        self.run, self.requests, self.tokens, self.numbers = run, requests, tokens, numbers
        ids = numbers.choices(range(16, 151_000), k=prompt)
        head = {"choices": [{"index": 0, "text": "x", "prompt_token_ids": ids, "token_ids": [17]}]}
        self.first = base64.b64encode(b"data: " + json.dumps(head, separators=(",", ":")).encode() + b"\n\n").decode()
        self.middle = base64.b64encode(chunk([18])).decode()
        self.end = [base64.b64encode(it).decode() for it in (chunk([7], finish="length"), usage(tokens), DONE)]
        self.receipts = {gate: receipt.sha256 for gate, receipt in run.receipts.items()}
        self.clock = 1_000 * MS
        self._last = ""

    def write(self) -> None:
        order = len(self.run.receipts)
        self._receipt(_fidelity(), order + 1, [self.run.attempt(CANDIDATE) / "identity.json"])
        trials: dict[tuple[str, int], superiority.Trial | None] = {}
        folders: list[Path] = []
        schedule = [(arm, block) for block in BLOCKS for arm in ARMS] + [(CONTROLS[0], block) for block in PAIR]
        for arm, block in schedule:
            path, figures = self._trial(arm, block)
            folders.append(path)
            trials[arm, block] = superiority.Trial(
                valid=True,
                why="",
                figures={(cell, name): Fraction(int(value)) for (cell, name), value in figures.items()},
            )
            if arm == CANDIDATE:
                self._receipt(_judged(block, figures, self.requests), order + 2, _files(path))
        plan = _plan(self.run)
        declared = SimpleNamespace(comparisons=plan.comparisons)
        study = SimpleNamespace(name=self.run.study.name, timing={plan.length: declared})
        verdict = superiority.judge(cast(Study, study), plan, arm=CANDIDATE, trials=trials)
        self.receipts["trial"] = self._last
        self._receipt(verdict, order + 3, [file for path in folders for file in _files(path)])

    def _trial(self, arm: str, block: int) -> tuple[Path, dict[tuple[str, str], float]]:
        bundle = Bundle.create(self.run.run_dir, self.run.scope(arm))
        bundle.write("trial.json", {"schema": 1, "arm": arm, "block": block})
        figures: dict[tuple[str, str], float] = {}
        level = {CANDIDATE: 0.72}.get(arm, 1.0) * self.numbers.gauss(1.0, 0.01)
        for cell in CELLS:
            lines, numbers = self._load(arm, block, cell, level)
            (bundle.path / f"cell-{cell}.jsonl").write_bytes(to_bytes(lines))
            bundle.seal(f"cell-{cell}.jsonl")
            figures |= {(cell, name): value for name, value in numbers.items()}
        bundle.complete()
        return bundle.path, figures

    def _load(self, arm: str, block: int, cell: str, level: float) -> tuple[list[Line], dict[str, float]]:
        found, ttft, tpot, late = [], [], [], []
        burst = min(CONCURRENCY, self.requests // 2) if cell == "closed" else 0
        spread = self._spread(burst) + self._spread(self.requests - burst)
        for place in range(self.requests):
            intended = 0 if place < burst else place * 20 * MS
            dispatch = intended + int(self.numbers.lognormvariate(11.2, 0.5))
            first = dispatch + int(level * math.exp(0.25 * spread[place]) * 180 * MS)
            gap = int(level * (1 + 0.06 * spread[-1 - place]) * 11 * MS)
            last = first + gap * (self.tokens - 1)
            times = [first + gap * step for step in range(1, self.tokens - 1)]
            events = [[first, self.first], *([at, self.middle] for at in times)]
            events += [[last, self.end[0]], [last, self.end[1]], [last + MS // 10, self.end[2]]]
            found.append(_request(f"{cell}-{place:04d}", intended, dispatch, events, self.tokens))
            if place >= burst:
                ttft.append(first - intended)
                tpot.append(gap)
                late.append(dispatch - intended)
        lines = whole(
            found, cell=cell, concurrency=CONCURRENCY if burst == CONCURRENCY else burst or None,
            about={"arm": arm, "block": block},
        )  # fmt: skip
        lines[0]["zero_monotonic_ns"] = self.clock
        self.clock += 60_000 * MS
        return lines, {
            "ttft_intended_p50": rank(ttft, 0.5),
            "tpot_p50": rank(tpot, 0.5),
            "lateness_p99": rank(late, 0.99),
        }

    def _spread(self, count: int) -> list[float]:
        """Standard normal quantiles in a random order: so few requests drawn freely would differ from run to run."""
        found = [NormalDist().inv_cdf((place + 0.5) / count) for place in range(count)]
        self.numbers.shuffle(found)
        return found

    def _receipt(self, verdict: Verdict, order: int, files: Sequence[Path]) -> None:
        evidence = {f"{it.parent.parent.name}/{it.parent.name}/{it.name}": sha256_file(it) for it in files}
        statement = statement_of(
            verdict, self.run.scope(), order=order, evidence=evidence, requires=dict(self.receipts),
            implementation=self.run.implementation,
        )  # fmt: skip
        path = write(self.run.run_dir, statement)
        if verdict.gate != "trial":
            self.receipts[verdict.gate] = sha256_file(path)
        else:
            self._last = sha256_file(path)


def _files(path: Path) -> list[Path]:
    return [path / "trial.json", *sorted(path.glob("cell-*.jsonl"))]


def _request(name: str, intended: int, dispatch: int, events: list[list[Any]], tokens: int) -> Line:
    return {
        "kind": "request", "request": name, "prompt": name, "max_tokens": tokens, "intended_ns": intended,
        "dispatch_ns": dispatch, "admission_ns": dispatch, "connected_ns": dispatch + 20_000,
        "send_start_ns": dispatch + 100_000, "send_end_ns": dispatch + 120_000, "status": 200,
        "headers_ns": dispatch + 5 * MS, "headers": [["content-type", "text/event-stream"]], "body_sha256": "0" * 64,
        "events": events, "rest": "", "end_ns": events[-1][0], "failure": None,
    }  # fmt: skip


def _passed(gate: str, figure: str, faults: Sequence[str], details: dict[str, object]) -> Verdict:
    return Verdict(
        gate=gate, outcome=Outcome.PASS, figure=figure, null=Check(passed=True, figure="as it should be"),
        poison=tuple(Poison(fault=fault, caught=True, figure="seen") for fault in faults), details=details,
    )  # fmt: skip


def _fidelity() -> Verdict:
    def numbers(p50: float, p99: float, largest: float) -> dict[str, object]:
        return {"n": 150, "p50": p50, "p99": p99, "max": largest}

    cases = {
        case: {
            "ttft_error": numbers(0.14 + place / 50, 0.6 + place / 5, 1.2 + place),
            "tpot_error": numbers(0.002, 0.05 + place / 30, 0.2 + place / 20),
            "lateness": numbers(0.06, 0.21 + place / 9, 0.4 + place / 3),
        }
        for place, case in enumerate(("open", "closed", "failures", "quirks"))
    }
    limits = {"lateness_p99": 5.0, "tpot_error_p99": 1.0, "ttft_error_p50": 1.0, "ttft_error_p99": 5.0}
    details: dict[str, object] = {"cases": cases, "limits": limits, "unit": "ms"}
    return _passed(
        "fidelity", "TTFT error p99 1.200 ms; 450 outcomes as expected", ("late-stamp", "hidden-cap"), details
    )


def _judged(block: int, figures: dict[tuple[str, str], float], requests: int) -> Verdict:
    cells = {
        cell: {
            "offered": requests, "completed": requests, "failed": {},
            "figures": {name: f"{int(value)}/1" for (where, name), value in figures.items() if where == cell},
        }
        for cell in CELLS
    }  # fmt: skip
    figure = f"block {block}, " + "; ".join(
        f"{cell}: {requests} of {requests} completed, TTFT p50 {figures[cell, 'ttft_intended_p50'] / MS:.1f} ms"
        for cell in CELLS
    )
    return _passed("trial", figure, ("tap-left-on", "foreign-traffic"), {"block": block, "cells": cells})


def _plan(run: FullRun) -> Plan:
    control, cell, metric = COMPARED
    comparison = Comparison(candidate=CANDIDATE, control=control, cell=cell, metric=metric, better="lower")
    blocks = [Block(block=block, kind=MEASURED, order=ARMS) for block in BLOCKS]
    blocks += [Block(block=block, kind=NULL, order=CONTROLS[:1]) for block in PAIR]
    return Plan(
        study=run.study.name, length=next(iter(run.study.lengths)), arms=ARMS, blocks=tuple(blocks), null_pairs=(PAIR,),
        warm_up=4, settle_s=1.0, cells=(), comparisons=(comparison,), alpha=0.05, confidence=0.95, practical=0.05,
        lateness_fraction=0.1, server_ttft_ms=5.0, failed_share=0.0, cold=True, panel_sha256="0" * 64,
        reachable=Reachable(p=1 / 32, holm_alpha=0.05, coverage=31 / 32),
    )  # fmt: skip


def full(folder: Path, *, passes: bool = True) -> FullRun:
    """A run of full size: 1,319 and 100 questions, 32 documents, 20 trials of two loads."""
    return write_report_run(folder, size=FULL, passes=passes, requests=96, tokens=96, prompt=8192)
