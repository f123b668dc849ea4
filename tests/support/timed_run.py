"""A run directory with a whole timing campaign: plan, traces, 20 trials, the receipts of trial and superiority.

On top of :mod:`audited_run`. Recordings are made by :mod:`recordings`; plan, traces, judges, bundles and receipts are
the real ones. No engine ran, and nothing here is evidence about any.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Final
from unittest import mock

from audited_run import ARMS, CACHE_BYTES, IMPLEMENTATION, LENGTH, AuditedRun, write_run
from recordings import MS, Line, answer, request, to_bytes, whole
from timed_study import PANEL, PLAN, RULES, timed_study

from pytest_kvqual._canonical import digest, pretty_bytes, sha256_bytes, sha256_file
from pytest_kvqual.capture.timing import body_of
from pytest_kvqual.evidence.bundle import Bundle
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.faults.trial import FAULTS
from pytest_kvqual.judge.gates import superiority, trial
from pytest_kvqual.judge.permit import judgment_of
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict
from pytest_kvqual.receipt.statement import build as statement_of
from pytest_kvqual.receipt.write import write
from pytest_kvqual.study import plan as plans
from pytest_kvqual.study.load import load_study
from pytest_kvqual.study.model import Study
from pytest_kvqual.study.panels import Panel, load_panel
from pytest_kvqual.study.trace import Trace, build

GATES: Final = """
[gates.trial]
state = "required"
timing = true
[gates.superiority]
state = "required"
timing = true
"""
KERNELS: Final = [{"rank": 0, "layers": [{"name": "model.layers.0.attn", "kernels": ["cpu_attention"]}]}]


@dataclass(kw_only=True, slots=True)
class Made:
    """A trial before it is written: its recordings by file, and trial.json."""

    recordings: dict[str, list[Line]]
    trial: dict[str, Any]


Change = Callable[[str, int, Made], None]


@dataclass(kw_only=True, slots=True)
class TimedRun:
    """What was written; ``attempts`` maps (arm, block) to the trial's folder, ``trials`` those of the candidate."""

    run: AuditedRun
    plan: plans.Plan
    attempts: dict[tuple[str, int], Path] = field(default_factory=dict)
    verdicts: dict[tuple[str, int], Verdict] = field(default_factory=dict)
    superiority: Verdict | None = None

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.run.run_dir


def write_timed_run(folder: Path, *, change: Change = lambda arm, block, made: None, faster: bool = True) -> TimedRun:
    """Write the run to ``folder/run``.

    Args:
        folder: An empty folder.
        change: Changes a trial before it is written and judged.
        faster: Whether the candidate's first tokens come in half the time.
    """
    with mock.patch("os.fsync", return_value=None):
        return _Writer(folder).write(change, faster)


class _Writer:
    def __init__(self, folder: Path) -> None:
        scratch = timed_study(folder / "scratch")
        self.folder = folder
        self.study: Study = load_study(str(scratch.folder))
        self.rules = self.study.timing[LENGTH]
        self.panel = load_panel(self.rules.panel, task="timing", length=LENGTH, vocabulary=1000)
        parity = self.study.parity.panel
        self.parity: Panel = load_panel(parity, task="parity", length=None, vocabulary=1000)
        self.traces = build(self.rules.cells, self.panel.items, self.panel.sha256)
        data = {name: one.to_bytes() for name, one in self.traces.items()}
        self.plan = plans.build(self.study, LENGTH, data)
        self.data = data
        self.receipts: dict[str, dict[str, str]] = {}
        self._last = ""
        self._tag = ""

    def write(self, change: Change, faster: bool) -> TimedRun:
        files = {PANEL: self.rules.panel.read_bytes(), PLAN: self.plan.to_bytes()}
        files |= {cell.trace: self.data[cell.name] for cell in self.plan.cells}
        run = write_run(self.folder, gates=GATES + RULES, files=files, identity=_identity, more=self._more)
        found = TimedRun(run=run, plan=self.plan)
        self._receipts(run)
        number = dict.fromkeys(ARMS, 1)
        for arm, block in plans.trials(self.plan):
            number[arm] += 1
            self._tag = f"{arm}-{LENGTH}-{CACHE_BYTES}-attempt-{number[arm]}"
            made = self._made(run, arm, block, faster)
            change(arm, block, made)
            found.attempts[arm, block] = self._attempt(run, arm, block, made)
            found.verdicts[arm, block] = verdict = self._judge(run, found.attempts[arm, block], arm, block)
            if arm == "candidate":
                self._receipt(run, verdict, 3, found.attempts[arm, block])
        trials = {key: self._trial(found, key) for key in found.attempts}
        found.superiority = superiority.judge(self.study, self.plan, arm="candidate", trials=trials)
        self._receipt(run, found.superiority, 4, *found.attempts.values())
        return found

    def _scope(self, run: AuditedRun, arm: str) -> Scope:
        return Scope(lock=run.lock, arm=arm, length=LENGTH, cache_bytes=CACHE_BYTES, engine="e" * 64)

    def _more(self, arm: str, bundle: Bundle) -> None:
        bundle.write("dispatch.json", {"schema": 1, "arm": arm, "readings": [{"when": "after", "ranks": KERNELS}]})
        if arm != "candidate":
            lines = [
                {
                    "order": "forward",
                    "index": index,
                    "id": item.id,
                    "token_ids": [100 + 10 * index + step for step in range(item.max_tokens)],
                    "finish_reason": "length",
                }
                for index, item in enumerate(self.parity.items)
            ]
            (bundle.path / "reference.jsonl").write_bytes(to_bytes(lines))
            bundle.seal("reference.jsonl")

    def _receipts(self, run: AuditedRun) -> None:
        """The controls' receipts of parity and nll, which the audit of the candidate takes as they are."""
        self.receipts["candidate"] = {gate: sha256_file(run.receipt(gate)) for gate in ("parity", "nll")}
        for arm in ("native", "reference"):
            reference = run.attempt(arm) / "reference.jsonl"
            requires: dict[str, str] = {}
            for order, gate in enumerate(("parity", "nll"), start=1):
                verdict = Verdict(
                    gate=gate,
                    outcome=Outcome.PASS,
                    figure="as it should be",
                    null=Check(passed=True, figure="equal"),
                    poison=(Poison(fault="planted", caught=True, figure="seen"),),
                )
                evidence = {f"{arm}-{LENGTH}-{CACHE_BYTES}/attempt-1/reference.jsonl": sha256_file(reference)}
                statement = statement_of(
                    verdict, self._scope(run, arm), order=order, evidence=evidence, requires=requires,
                    implementation=digest(IMPLEMENTATION),
                )  # fmt: skip
                requires[gate] = sha256_file(write(run.run_dir, statement))
            self.receipts[arm] = requires

    def _judgment(self, run: AuditedRun, arm: str) -> str:
        return judgment_of(self.study, "trial", self._scope(run, arm), self.receipts[arm])

    def _made(self, run: AuditedRun, arm: str, block: int, faster: bool) -> Made:
        # No two trials are alike.
        first = (10 if faster and arm == "candidate" else 20) * MS + block * MS // 100 + ARMS.index(arm) * MS // 1000
        about: dict[str, object] = {
            "arm": arm,
            "length": LENGTH,
            "block": block,
            "plan_sha256": self.plan_sha256,
            "qualified": f"{arm}-{LENGTH}-{CACHE_BYTES}/attempt-1",
        }
        judgment = self._judgment(run, arm)
        warm = [item for item in self.panel.items if item.grade == "warm-up"]
        loads = {"warm-up.jsonl": _closed("warm-up", [(item.id, 5) for item in warm], 2, first, self._base)}
        for name, trace in self.traces.items():
            asked = [(line.prompt, line.max_tokens) for line in trace.requests]
            if trace.concurrency is not None:
                loads[f"cell-{name}.jsonl"] = _closed(name, asked, trace.concurrency, first, self._base)
            else:
                loads[f"cell-{name}.jsonl"] = _open(name, trace, first, self._base)
        for line in (line for requests in loads.values() for line in requests):
            prompt = next(item.prompt for item in self.panel.items if item.id == line["prompt"])
            body = body_of(
                prompt, model=self.study.model.name, request_id=f"{self._tag}-{line['request']}",
                max_tokens=line["max_tokens"],
            )  # fmt: skip
            line["body_sha256"] = sha256_bytes(body)
        recordings = {}
        # Each trial on a server of its own, the loads of one a minute apart.
        begin = block * 3_600_000 * MS
        for file, requests in loads.items():
            name = file.removesuffix(".jsonl").removeprefix("cell-")
            lines = whole(
                requests,
                cell=name,
                concurrency=2 if name == "warm-up" else self.traces[name].concurrency,
                trace=self.data.get(name),
                judgment=judgment,
                about=about,
            )
            lines[0]["zero_monotonic_ns"] = begin = begin + 60_000 * MS
            recordings[file] = lines
        return Made(
            recordings=recordings,
            trial={
                "schema": 1,
                **about,
                "judgment": judgment,
                "exploratory": False,
                **_read_around(recordings),
                "intervals": _intervals(recordings),
                "dispatch": [{"when": when, "ranks": KERNELS} for when in ("before", "after")],
                "environment": {"before": {"cpus": 2}, "after": {"cpus": 2}},
            },
        )

    @property
    def plan_sha256(self) -> str:
        """The plan's digest."""
        return sha256_bytes(self.plan.to_bytes())

    def _base(self, prompt: str) -> int:
        """The first token of an answer: a canary's is that of the parity panel's item."""
        canaries = {item.id: item.expected for item in self.panel.items if item.grade == "canary"}
        places = {item.id: index for index, item in enumerate(self.parity.items)}
        return 100 + 10 * places[str(canaries[prompt])] if prompt in canaries else 500

    def _attempt(self, run: AuditedRun, arm: str, block: int, made: Made) -> Path:
        bundle = Bundle.create(run.run_dir, self._scope(run, arm))
        identity = json.loads((run.attempt(arm) / "identity.json").read_bytes())
        bundle.write("trial-identity.json", identity)
        for name, lines in made.recordings.items():
            (bundle.path / name).write_bytes(to_bytes(lines))
            bundle.seal(name)
        bundle.write("trial.json", made.trial)
        bundle.complete()
        folder = run.run_dir / "claims" / f"{arm}-{LENGTH}-{CACHE_BYTES}"
        folder.mkdir(parents=True, exist_ok=True)
        mark = {"schema": 1, "block": block, "attempt": bundle.name}
        (folder / f"{run.lock[:16]}-block-{block}.json").write_bytes(pretty_bytes(mark))
        return bundle.path

    def _judge(self, run: AuditedRun, path: Path, arm: str, block: int) -> Verdict:
        base = run.attempt(arm)
        evidence = trial.Evidence(
            trial=json.loads((path / "trial.json").read_bytes()),
            identity=json.loads((path / "trial-identity.json").read_bytes()),
            recordings={
                file.stem.removeprefix("cell-"): file.read_bytes()
                for file in path.glob("*.jsonl")
                if file.name != "manifest.jsonl"
            },
        )
        expected = trial.Expected(
            arm=arm,
            length=LENGTH,
            block=block,
            plan_sha256=self.plan_sha256,
            judgment=self._judgment(run, arm),
            traces=self.data,
            trace_sha256={name: sha256_bytes(data) for name, data in self.data.items()},
            kernels=KERNELS,
            identity=json.loads((base / "identity.json").read_bytes())["ranks"],
            reference=[
                {"prompt_token_ids": list(self.parity.items[line["index"]].prompt), **line}
                for line in map(json.loads, (base / "reference.jsonl").read_bytes().splitlines())
            ],
        )
        return trial.judge(
            self.rules, self.panel, self.parity, evidence=evidence, expected=expected, faults=tuple(FAULTS)
        )

    def _trial(self, found: TimedRun, key: tuple[str, int]) -> superiority.Trial:
        verdict = found.verdicts[key]
        figures: dict[tuple[str, str], Fraction | float | None] = {}
        for cell in self.rules.cells:
            data = (found.attempts[key] / f"cell-{cell.name}.jsonl").read_bytes()
            for name, value in trial.cell_figures(data, origin=cell.name).items():
                figures[cell.name, name] = value
        valid = verdict.outcome is Outcome.PASS
        return superiority.Trial(valid=valid, why="" if valid else verdict.figure, figures=figures)

    def _receipt(self, run: AuditedRun, verdict: Verdict, order: int, *paths: Path) -> None:
        evidence: dict[str, str] = {}
        for path in paths:
            files = [path / "trial.json", path / "trial-identity.json", path / "warm-up.jsonl"]
            files += sorted(path.glob("cell-*.jsonl"))
            files += [
                path.parent / "attempt-1" / name for name in ("identity.json", "dispatch.json", "reference.jsonl")
            ]
            evidence |= {f"{it.parent.parent.name}/{it.parent.name}/{it.name}": sha256_file(it) for it in files}
        statement = statement_of(
            verdict, self._scope(run, "candidate"), order=order, evidence=evidence,
            requires={**self.receipts["candidate"], **({"trial": self._last} if order == 4 else {})},
            implementation=digest(IMPLEMENTATION),
        )  # fmt: skip
        self._last = sha256_file(write(run.run_dir, statement))


def _identity(arm: str, rank: dict[str, object]) -> None:
    rank |= {
        "layers": [{"name": f"model.layers.{index}.attn", "storage_id": 1 + index} for index in range(2)],
        "attention_impl": {"model.layers.0.attn": "CPUAttentionBackendImpl"},
        "parameters": {"model.embed_tokens.weight": "a" * 64},
        "scales": [],
    }


def _stream(sent: int, tokens: int, first: int, base: int) -> list[tuple[int, bytes]]:
    return answer(sent, tokens, first=first, base=base)


def _open(name: str, trace: Trace, first: int, base: Callable[[str], int]) -> list[Line]:
    found = []
    for line in trace.requests:
        at = line.intended_ns or 0
        sent = at + MS // 20 + MS // 10
        found.append(
            request(
                line.request, intended=at, prompt=line.prompt, max_tokens=line.max_tokens,
                events=_stream(sent, line.max_tokens, first, base(line.prompt)),
            )
        )  # fmt: skip
    return found


def _closed(
    name: str, asked: Sequence[tuple[str, int]], slots: int, first: int, base: Callable[[str], int]
) -> list[Line]:
    free, found = [0] * slots, []
    for place, (prompt, tokens) in enumerate(asked):
        at = free.pop(0)
        sent = at + MS // 20 + MS // 10
        line = request(
            f"{name}-{place:04d}", intended=at, prompt=prompt, max_tokens=tokens,
            events=_stream(sent, tokens, first + place * MS // 50, base(prompt)),
        )  # fmt: skip
        free = sorted([*free, line["end_ns"]])
        found.append(line)
    return found


def _intervals(recordings: Mapping[str, Sequence[Line]]) -> list[dict[str, object]]:
    """What the trial did when: each load within an interval of its own."""
    spans = {
        file.removesuffix(".jsonl").replace("cell-", "measurement "): (
            lines[0]["zero_monotonic_ns"],
            lines[0]["zero_monotonic_ns"] + lines[-1]["end_ns"],
        )
        for file, lines in recordings.items()
    }
    first, last = min(begin for begin, _ in spans.values()), max(end for _, end in spans.values())
    around = [
        ("qualification", (first - 40 * MS, first - 30 * MS)),
        ("profiling", (first - 20 * MS, first - 10 * MS)),
        *spans.items(),
        ("profiling", (last + 20 * MS, last + 30 * MS)),
    ]
    return [{"name": name, "begin_ns": begin - MS, "end_ns": end + MS} for name, (begin, end) in around]


def _read_around(recordings: Mapping[str, Sequence[Line]]) -> dict[str, object]:
    """Taps and counters before and after each load."""
    taps, counters = [], []
    totals = dict.fromkeys(
        (
            "prompt_tokens",
            "generation_tokens",
            "prefix_cache_queries",
            "prefix_cache_hits",
            "preemptions",
            "ttft_count",
        ),
        0,
    )
    ended, waited = 0, 0.0
    for file, lines in recordings.items():
        name = file.removesuffix(".jsonl").removeprefix("cell-")
        for when in (f"before-{name}" if name == "warm-up" else f"before {name}", f"after {name}"):
            if when.startswith("after"):
                for line in lines[1:-1]:
                    # So many does each answer of `recordings` count, and so long is each prompt of the panel.
                    totals["prompt_tokens"] += 7
                    totals["generation_tokens"] += line["max_tokens"]
                    totals["ttft_count"] += 1
                    waited += (line["events"][0][0] - line["send_start_ns"]) / 1e9 - 0.001
                    ended += 1
            taps.append({"when": when, "ranks": [{"installed": False, "faults": 0, "held": 0}]})
            values = {**totals, "ttft_sum_s": waited, "success": {"length": ended}, "running": 0, "waiting": 0}
            counters.append({"when": when, "values": values})
    return {"taps": taps, "counters": counters}
