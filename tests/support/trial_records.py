"""The records of a good trial, made by hand: two cells and a warm-up, and a server whose counters agree."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recorded import MS, answer, encoded, lines, request

from pytest_kvqual._canonical import sha256_bytes
from pytest_kvqual.faults.trial import FAULTS
from pytest_kvqual.judge.gates import trial as gate
from pytest_kvqual.judge.verdict import Verdict
from pytest_kvqual.study.model import Cell, Comparison, TimingRules
from pytest_kvqual.study.panels import Panel, PanelItem
from pytest_kvqual.study.trace import build

PLAN, JUDGMENT, PANEL_SHA = "1" * 64, "2" * 64, "3" * 64
TTFT_NS, TPOT_NS = 100 * MS, 10 * MS
LOAD_NS = 60_000 * MS
PROMPT = 5
TOKENS = 4
SERIAL = [40, 41, 42, 43]


def _cell(name: str, **changes: Any) -> Cell:
    values: dict[str, Any] = {
        "name": name, "mode": "open", "arrivals": "constant", "rate": 2.0, "seed": None, "concurrency": None,
        "requests": 6, "canaries": 1, "max_tokens": TOKENS, "trace": Path(name), **changes,
    }  # fmt: skip
    return Cell(**values)


RULES = TimingRules(
    arms=("control", "candidate"), blocks=6, null_arm="control", null_pairs=1, warm_up=2, settle_s=0.0,
    cells=(_cell("open"), _cell("closed", mode="closed", arrivals=None, rate=None, concurrency=2)),
    comparisons=(Comparison(candidate="candidate", control="control", cell="open", metric="tpot_p50", better="lower"),),
    alpha=0.05, confidence=0.95, practical=0.05, lateness_fraction=0.2, server_ttft_ms=50.0, failed_share=0.4,
    cold=True, panel=Path("panel"), plan=Path("plan"),
)  # fmt: skip


def _item(name: str, grade: str, expected: str = "") -> PanelItem:
    return PanelItem(
        id=name, prompt=tuple(range(PROMPT)), targets=(), max_tokens=TOKENS, expected=expected, grade=grade
    )


def _panel(task: str, items: list[PanelItem]) -> Panel:
    return Panel(task=task, length=None, items=tuple(items), sha256=PANEL_SHA)


TIMED = _panel(
    "timing",
    [*(_item(f"m{index}", "measured") for index in range(10)), *(_item(f"w{index}", "warm-up") for index in range(2)),
     *(_item(f"c{index}", "canary", f"q{index}") for index in range(2))],
)  # fmt: skip
PARITY = _panel("parity", [_item(f"q{index}", "") for index in range(2)])
IDENTITY = [
    {
        key: f"{key} as qualified"
        for key in ("layers", "attention_backend", "attention_impl", "pool_bytes", "parameters", "scales", "settings")
    }
]
KERNELS = [{"layer": 0, "kernel": "paged"}]


@dataclass(kw_only=True)
class Records:
    """A trial's records as plain documents, to be changed and judged."""

    trial: dict[str, Any]
    identity: dict[str, Any]
    recordings: dict[str, list[dict[str, Any]]]
    expected: gate.Expected
    rules: TimingRules = RULES

    def evidence(self) -> gate.Evidence:
        """As the judge gets them."""
        return gate.Evidence(
            trial=self.trial,
            identity=self.identity,
            recordings={name: encoded(documents) for name, documents in self.recordings.items()},
        )

    def values(self, when: str) -> dict[str, Any]:
        """The counters read at that time."""
        found: dict[str, Any] = next(it["values"] for it in self.trial["counters"] if it["when"] == when)
        return found

    def from_on(self, when: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Changes the counters read at that time and at all later ones."""
        names = [it["when"] for it in self.trial["counters"]]
        for reading in self.trial["counters"][names.index(when) :]:
            change(reading["values"])

    def judge(self, faults: tuple[str, ...] = tuple(FAULTS)) -> Verdict:
        """The verdict."""
        return gate.judge(self.rules, TIMED, PARITY, evidence=self.evidence(), expected=self.expected, faults=faults)


def _load(name: str, rows: list[tuple[str, str, int]], **header: Any) -> list[dict[str, Any]]:
    requests = []
    for request_name, prompt, at in rows:
        ids = SERIAL if prompt.startswith("c") else [7] * TOKENS
        events = [
            (at + TTFT_NS + min(step, TOKENS - 1) * TPOT_NS, raw) for step, raw in enumerate(answer(ids, prompt=PROMPT))
        ]
        stamps = dict.fromkeys(
            (
                "intended_ns",
                "dispatch_ns",
                "admission_ns",
                "connected_ns",
                "send_start_ns",
                "send_end_ns",
                "headers_ns",
            ),
            at,
        )
        requests.append(request(events, name=request_name, prompt=prompt, max_tokens=TOKENS, **stamps))
    about = {"arm": "candidate", "block": 3, "plan_sha256": PLAN}
    return lines(requests, cell=name, judgment=JUDGMENT, about=about, **header)


def good() -> Records:
    """A trial that keeps every rule."""
    traces = build(RULES.cells, TIMED.items, PANEL_SHA)
    data = {name: found.to_bytes() for name, found in traces.items()}
    digests = {name: sha256_bytes(value) for name, value in data.items()}
    recordings = {}
    for cell in RULES.cells:
        rows = [
            (it.request, it.prompt, index // 2 * 200 * MS if it.intended_ns is None else it.intended_ns)
            for index, it in enumerate(traces[cell.name].requests)
        ]
        recordings[cell.name] = _load(
            cell.name, rows, mode=cell.mode, concurrency=cell.concurrency, trace_sha256=digests[cell.name]
        )
    recordings[gate.WARM_UP] = _load(
        gate.WARM_UP,
        [(f"warm-up-{index:04d}", f"w{index}", index) for index in range(2)],
        mode="closed",
        concurrency=2,
    )
    spans = {name: (place + 3) * LOAD_NS for place, name in enumerate((gate.WARM_UP, "open", "closed"))}
    for name, zero in spans.items():
        recordings[name][0]["zero_monotonic_ns"] = zero
    around = {"qualification": LOAD_NS, "profiling": 2 * LOAD_NS, **spans, "profiling again": 6 * LOAD_NS}
    intervals = [
        {
            "name": name.removesuffix(" again") if name not in ("open", "closed") else f"measurement {name}",
            "begin_ns": zero - MS,
            "end_ns": zero + LOAD_NS - 2 * MS,
        }
        for name, zero in around.items()
    ]
    counters: list[dict[str, Any]] = []
    ended = 0
    for name in (gate.WARM_UP, "open", "closed"):
        before = "before-warm-up" if name == gate.WARM_UP else f"before {name}"
        for when, more in ((before, 0), (f"after {name}", len(recordings[name]) - 2)):
            ended += more
            values = {
                "prompt_tokens": PROMPT * ended, "generation_tokens": TOKENS * ended, "prefix_cache_queries": 0,
                "prefix_cache_hits": 0, "preemptions": 0, "ttft_count": ended, "running": 0, "waiting": 0,
                "ttft_sum_s": ended * TTFT_NS / 1e9, "success": {"length": ended},
            }  # fmt: skip
            counters.append({"when": when, "values": values})
    rank = {"installed": False, "faults": 0, "held": 0}
    document = {
        "schema": 1, "arm": "candidate", "length": 1024, "block": 3, "plan_sha256": PLAN, "judgment": JUDGMENT,
        "exploratory": False, "counters": counters, "intervals": intervals,
        "taps": [{"when": it["when"], "ranks": [dict(rank)]} for it in counters],
        "dispatch": [{"when": when, "ranks": KERNELS} for when in ("before", "after")],
    }  # fmt: skip
    reference = [
        {"id": f"q{index}", "order": "forward", "index": index, "token_ids": SERIAL, "finish_reason": "length"}
        for index in range(2)
    ]
    expected = gate.Expected(
        arm="candidate", length=1024, block=3, plan_sha256=PLAN, judgment=JUDGMENT, traces=data, trace_sha256=digests,
        kernels=KERNELS, identity=IDENTITY, reference=reference,
    )  # fmt: skip
    copied: dict[str, Any] = json.loads(json.dumps(document))
    return Records(trial=copied, identity={"ranks": copy.deepcopy(IDENTITY)}, recordings=recordings, expected=expected)


def expecting(records: Records, **changes: Any) -> None:
    """Holds the trial against something else."""
    records.expected = replace(records.expected, **changes)
