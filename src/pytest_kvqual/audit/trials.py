"""Trials: their recordings verified (check 17), and what a trial's records say under the rules of its gate (check 19).

The rules have the numbers that the gate has. What cannot be seen here is chained: that no tap was in place, which
kernels ran and what the server counted stand as the worker and the server said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Final

from pytest_kvqual.audit import attempts as evidence
from pytest_kvqual.audit import receipts as stored
from pytest_kvqual.audit.attempts import Attempt
from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.files import DamagedError, Tree, canonical, parse, sha256
from pytest_kvqual.audit.frozen import Frozen
from pytest_kvqual.audit.plans import Plan, decimal
from pytest_kvqual.audit.receipts import Folder, Receipt, Scope, required_before
from pytest_kvqual.audit.recomputed import verify
from pytest_kvqual.audit.recorded import Verified
from pytest_kvqual.audit.shapes import integer, shown, table

TRIAL, TRIAL_IDENTITY, WARM_UP = "trial.json", "trial-identity.json", "warm-up"
RECORDING: Final = re.compile(r"cell-.+\.jsonl|warm-up\.jsonl|fidelity-.+\.jsonl")
POISON: Final = "fidelity-poison-"
"""Of the recordings that a planted fault of the recorder made, only the form is checked: they must not be in order."""
CLAIMS: Final = "claims"
_IDENTITY: Final = (
    "layers", "attention_backend", "attention_impl", "pool_bytes", "parameters", "scales", "settings",
)  # fmt: skip
_REFERENCE, _IDENTITY_FILE, _DISPATCH = "reference.jsonl", "identity.json", "dispatch.json"


@dataclass(kw_only=True, slots=True)
class Run:
    """What the timing checks read: the run directory, its study and plan, the attempts, and each arm's receipts."""

    tree: Tree
    frozen: Frozen
    scope: Scope
    prefix: str
    attempts: Mapping[str, Attempt]
    folders: dict[str, Folder]
    plan: Plan | None
    report: Report
    verified: dict[tuple[str, str], Verified] = field(default_factory=dict)

    def bundle(self, arm: str) -> str:
        """The folder of an arm's attempts and receipts."""
        return f"{self.prefix}{arm}-{self.scope.length}-{self.scope.cache_bytes}"

    def receipts(self, arm: str) -> Mapping[str, Receipt]:
        """The newest receipts of an arm."""
        return self.folder(arm).newest()

    def folder(self, arm: str) -> Folder:
        """Every receipt of an arm; another arm's are read without a word about what is wrong with them."""
        if arm not in self.folders:
            name = self.bundle(arm)
            there = self.tree.kind(stored.FOLDER, name) == "folder"
            nothing = Folder(name=name, receipts=(), numbers={})
            self.folders[arm] = stored.read_folder(self.tree, name, Report()) if there else nothing
        return self.folders[arm]

    def judgment(self, arm: str, gate: str) -> str | None:
        """The digest that a record of a timing gate must carry; None where the arm has no receipts here."""
        receipts = self.receipts(arm)
        if not receipts:
            return None
        scope = next(iter(receipts.values())).scope
        named = {key: getattr(scope, key) for key in ("lock", "arm", "length", "cache_bytes", "engine")}
        above = required_before(self.frozen.gates, gate)
        document = {
            "study": self.frozen.name,
            "gate": gate,
            "scope": named,
            "receipts": {name: receipts[name].sha256 for name in above if name in receipts},
        }
        return sha256(canonical(document))

    def document(self, attempt: Attempt, name: str) -> dict[str, object]:
        """A document of an attempt.

        Raises:
            DamagedError: It is not sealed, or no table.
        """
        if name not in attempt.intact:
            raise DamagedError(f"evidence/{attempt.name}/{name}: found no such sealed file, expected it")
        return table(parse(self.tree.read(*_path(attempt), name)), name)

    def recording(self, attempt: Attempt, name: str) -> Verified:
        """A recording of an attempt, verified once.

        Raises:
            DamagedError: It is not sealed, or no recording.
        """
        key = (attempt.name, name)
        if key not in self.verified:
            if name not in attempt.intact:
                raise DamagedError(f"evidence/{attempt.name}/{name}: found no such sealed file, expected it")
            with self.tree.open(*_path(attempt), name) as file:
                self.verified[key] = verify(iter(file), trace=self._trace(name))
        return self.verified[key]

    def _trace(self, name: str) -> bytes | None:
        cell = name.removeprefix("cell-").removesuffix(".jsonl") if name.startswith("cell-") else None
        return self.plan.traces.get(cell) if self.plan is not None and cell is not None else None


def _path(attempt: Attempt) -> tuple[str, str, str]:
    return evidence.FOLDER, attempt.bundle, f"attempt-{attempt.number}"


def recordings(run: Run) -> None:
    """Check 17: every sealed recording of the attempts, those of planted faults by their form alone."""
    for attempt in run.attempts.values():
        for name in sorted(attempt.intact):
            if not RECORDING.fullmatch(name):
                continue
            where = f"evidence/{attempt.name}/{name}"
            run.report.look(17)
            try:
                found = run.recording(attempt, name)
            except (DamagedError, OSError) as error:
                run.report.find(17, where, str(error))
                continue
            for one in () if name.startswith(POISON) else found.findings:
                run.report.find(17, where, one.line())
            expected = name.removesuffix(".jsonl").partition("-")[2] if name != f"{WARM_UP}.jsonl" else WARM_UP
            if found.header.get("cell") != expected:
                run.report.find(17, where, f"cell: found {shown(found.header.get('cell'))}, expected {expected!r}")


# -- one trial -------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Objections:
    """What objects to a gate's records, by rule: what they show, what they lack, and what the null found."""

    found: list[tuple[int, str]] = field(default_factory=list)
    missing: list[tuple[int, str]] = field(default_factory=list)
    idle: list[tuple[int, str]] = field(default_factory=list)

    def find(self, rule: int, text: str) -> None:
        """A rule is broken."""
        self.found.append((rule, text))

    def gap(self, rule: int, text: str) -> None:
        """Whether a rule holds cannot be said."""
        self.missing.append((rule, text))

    @contextmanager
    def reading(self, rule: int, *, null: bool = False) -> Iterator[None]:
        """Turn what cannot be read into a gap."""
        try:
            yield
        except (DamagedError, OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            (self.idle if null else self.missing).append((rule, f"{type(error).__name__}: {error}"))

    def outcome(self, *, missed: Sequence[str] = ()) -> str:
        """The outcome that follows; ``missed`` are seeded faults that the receipt itself says were not caught."""
        if self.idle:
            return "INCONCLUSIVE"
        if self.found:
            return "FAIL"
        return "INCONCLUSIVE" if self.missing or missed else "PASS"

    def first(self) -> str:
        """The line that decides."""
        for rule, words in (*self.idle, *self.found, *self.missing):
            return f"rule {rule}: {words}"
        return ""


@dataclass(kw_only=True, slots=True)
class Trial:
    """One trial as it was found: what objects to it, and its cells' recordings."""

    arm: str
    block: int
    name: str
    objections: Objections
    cells: dict[str, Verified] = field(default_factory=dict)
    void: str = ""

    @property
    def why(self) -> str:
        """Why the trial may not be used; empty where it may."""
        return self.void or (self.objections.first() if self.objections.outcome() != "PASS" else "")

    def details(self, plan: Plan) -> dict[str, object]:
        """What a receipt states of the trial."""
        return {
            "block": self.block,
            "plan_sha256": plan.sha256,
            "cells": {
                name: {
                    "offered": len(cell.requests),
                    "completed": len(cell.requests) - sum(cell.failed.values()),
                    "failed": cell.failed,
                    "figures": {key: figure.exact() for key, figure in cell.figures.items()},
                }
                for name, cell in self.cells.items()
                if name != WARM_UP
            },
        }


def of_block(run: Run, arm: str, block: int) -> Trial | None:
    """The one trial of an arm in a block; None where none was begun."""
    names = []
    claimed = _claimed(run, arm, block)
    for attempt in run.attempts.values():
        if attempt.bundle != run.bundle(arm) or (attempt.scope is not None and attempt.scope.lock != run.scope.lock):
            continue
        if attempt.name == claimed or _block_of(run, attempt) == block:
            names.append(attempt.name)
    if claimed is not None and claimed not in names:
        # The mark is there and the attempt is not: something was timed, and is gone.
        return Trial(arm=arm, block=block, name=claimed, objections=Objections(), void=f"found no attempt {claimed}")
    if not names:
        return None
    if claimed is None:
        run.report.find(19, f"evidence/{names[0]}", f"found a trial of block {block} of {arm} without its mark")
    if len(names) > 1:
        run.report.find(
            19, f"evidence/{names[1]}", f"found another trial of block {block} of {arm}, expected {names[0]} alone"
        )
        void = f"found {len(names)} attempts ({', '.join(names)}), expected one"
        return Trial(arm=arm, block=block, name=names[0], objections=Objections(), void=void)
    attempt = run.attempts[names[0]]
    if attempt.outcome != "complete":
        void = f"{attempt.name} is {attempt.outcome}"
        return Trial(arm=arm, block=block, name=attempt.name, objections=Objections(), void=void)
    return judged(run, attempt, arm, block)


def _claimed(run: Run, arm: str, block: int) -> str | None:
    """The attempt that the mark of a block names; None where there is no mark."""
    parts = (CLAIMS, run.bundle(arm), f"{run.scope.lock[:16]}-block-{block}.json")
    if run.tree.kind(*parts) != "file":
        return None
    with run.report.reading(19, "/".join(parts)):
        document = table(parse(run.tree.read(*parts)), "mark")
        if document.get("block") != block:
            run.report.find(19, "/".join(parts), f"block: found {shown(document.get('block'))}, expected {block}")
        return str(document.get("attempt"))
    return None


def _block_of(run: Run, attempt: Attempt) -> object:
    if TRIAL not in attempt.intact:
        return None
    with run.report.reading(19, f"evidence/{attempt.name}/{TRIAL}"):
        return run.document(attempt, TRIAL).get("block")
    return None


def judged(run: Run, attempt: Attempt, arm: str, block: int) -> Trial:
    """What the records of one trial say under the gate's rules 1 to 11."""
    own = Objections()
    found = Trial(arm=arm, block=block, name=attempt.name, objections=own)
    plan = run.plan
    if plan is None:
        own.gap(1, "found no plan")
        return found
    with own.reading(1):
        trial = run.document(attempt, TRIAL)
        _declared(run, own, plan, trial, arm, block)
        _taps(own, plan, trial)
        _recordings(run, own, plan, attempt, found)
        with own.reading(3):
            _apart(own, plan, trial, found)
        _qualified(run, own, plan, attempt, trial, found)
        _counted(own, plan, trial, found)
        for name in plan.cells:
            if name in found.cells:
                _late(own, plan, name, found.cells[name])
                with own.reading(10):
                    _server(own, plan, trial, name, found.cells[name])
        with own.reading(11, null=True):
            _idle(own, plan, trial)
    return found


def _declared(run: Run, own: Objections, plan: Plan, trial: Mapping[str, object], arm: str, block: int) -> None:
    expected: dict[str, object] = {
        "schema": 1,
        "arm": arm,
        "length": run.scope.length,
        "block": block,
        "plan_sha256": plan.sha256,
        "exploratory": False,
    }
    judgment = run.judgment(arm, "trial")
    if judgment is not None:
        expected["judgment"] = judgment
    for key, value in expected.items():
        if type(trial.get(key)) is not type(value) or trial.get(key) != value:
            own.find(1, f"{TRIAL}: {key}: found {shown(trial.get(key))}, expected {shown(value)}")


def _loads(plan: Plan) -> list[str]:
    return [WARM_UP, *plan.cells]


def _before(name: str) -> str:
    return f"before-{name}" if name == WARM_UP else f"before {name}"


def _readings(trial: Mapping[str, object], key: str) -> dict[str, Mapping[str, object]]:
    """The readings of a kind by when they were made, in order; of two of one name the first."""
    values = trial.get(key)
    found: dict[str, Mapping[str, object]] = {}
    for place, value in enumerate(values if isinstance(values, list) else []):
        reading = table(value, f"{TRIAL}: {key}[{place}]")
        when = str(reading.get("when"))
        found[when if when not in found else f"{when} again"] = reading
    return found


def _taps(own: Objections, plan: Plan, trial: Mapping[str, object]) -> None:
    readings = _readings(trial, "taps")
    wanted = [when for name in _loads(plan) for when in (_before(name), f"after {name}")]
    if list(readings) != wanted:
        own.gap(2, f"taps: found readings {list(readings)}, expected {wanted}")
        return
    for when, reading in readings.items():
        ranks = reading.get("ranks")
        clean = [
            isinstance(rank, dict) and (rank.get("installed"), rank.get("faults"), rank.get("held")) == (False, 0, 0)
            for rank in (ranks if isinstance(ranks, list) else [])
        ]
        if not clean or not all(clean):
            own.find(2, f"taps {when}: found some in place, expected none on any rank")


def _recordings(run: Run, own: Objections, plan: Plan, attempt: Attempt, found: Trial) -> None:
    sent: set[str] = set()
    judgment = run.judgment(found.arm, "trial")
    for name in [*plan.cells, WARM_UP]:
        with own.reading(3):
            one = run.recording(attempt, f"{WARM_UP}.jsonl" if name == WARM_UP else f"cell-{name}.jsonl")
            found.cells[name] = one
            about = one.header.get("about")
            about = about if isinstance(about, dict) else {}
            expected: dict[str, object] = {"cell": name, "exploratory": False}
            if judgment is not None:
                expected["judgment"] = judgment
            of = {"arm": found.arm, "block": found.block, "plan_sha256": plan.sha256}
            for outer, keys in ((one.header, expected), (about, of)):
                for key, value in keys.items():
                    if outer.get(key) != value:
                        own.find(1, f"{name}: {key}: found {shown(outer.get(key))}, expected {shown(value)}")
            for finding in one.findings:
                if finding.check in (4, 5, 6, 11):
                    own.find(3, f"{name}: {finding.line()}")
            for request in one.requests:
                if request.lateness is not None and request.lateness < 0:
                    own.find(3, f"{name}, {request.name}: found it dispatched before its intended arrival")
                if request.failure is None and request.stream.failure is not None:
                    own.find(3, f"{name}, {request.name}: found completed, expected {request.stream.failure}")
            _bodies(run, own, plan, attempt, name)
            prompts = [request.prompt for request in one.requests]
            if name != WARM_UP:
                sent |= set(prompts)
            elif len(prompts) != plan.rules.get("warm_up") or sent & set(prompts):
                own.find(3, f"{name}: found {len(prompts)} requests, {len(sent & set(prompts))} with a cell's prompt")
            failed, allowed = sum(one.failed.values()), Fraction(0) if name == WARM_UP else plan.share("failed_share")
            if failed > allowed * len(prompts):
                own.find(4, f"{name}: found {failed} of {len(prompts)} requests failed, expected {allowed} of them")


def body_of(prompt: Sequence[object], *, model: object, request_id: str, max_tokens: object) -> bytes:
    """What a timed request sends: a greedy completion of exactly so many tokens, streamed with token ids and usage."""
    document = {
        "model": model,
        "request_id": request_id,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _bodies(run: Run, own: Objections, plan: Plan, attempt: Attempt, name: str) -> None:
    """Rule 3: what was sent is what the panel has under the prompt's name, as a request of this attempt."""
    model, stem = run.frozen.part("model").get("name"), attempt.name.replace("/", "-")
    file = f"{WARM_UP}.jsonl" if name == WARM_UP else f"cell-{name}.jsonl"
    with run.tree.open(*_path(attempt), file) as source:
        for line in source:
            document = table(parse(line), file)
            if document.get("kind") != "request":
                continue
            request, prompt = str(document.get("request")), plan.prompts.get(str(document.get("prompt")))
            body = None if prompt is None else body_of(
                prompt, model=model, request_id=f"{stem}-{request}", max_tokens=document.get("max_tokens")
            )  # fmt: skip
            if body is None or document.get("body_sha256") != sha256(body):
                own.find(3, f"{name}, {request}: body_sha256: found that of another body than its prompt makes here")


def _apart(own: Objections, plan: Plan, trial: Mapping[str, object], found: Trial) -> None:
    """Rule 3: intervals one after the other, each load within its own, each cell settled before."""
    of = {name if name == WARM_UP else f"measurement {name}": name for name in _loads(plan)}
    wanted = ["qualification", "profiling", *of, "profiling"]
    values = trial.get("intervals")
    spans = [table(value, "intervals") for value in (values if isinstance(values, list) else [])]
    if [span.get("name") for span in spans] != wanted:
        own.gap(3, f"intervals: found others than {', '.join(wanted)}")
        return
    moments = [integer(span, key, "intervals") for span in spans for key in ("begin_ns", "end_ns")]
    if moments != sorted(moments):
        own.find(3, "intervals: found some that overlap or go back")
    before: int | None = None
    for span in spans:
        name = of.get(str(span.get("name")))
        if name is None:
            continue
        if name not in found.cells:
            before = None
            continue
        zero = integer(found.cells[name].header, "zero_monotonic_ns", name)
        end = zero + integer(found.cells[name].footer, "end_ns", name)
        if sorted(around := [integer(span, "begin_ns", name), zero, end, integer(span, "end_ns", name)]) != around:
            own.find(3, f"{name}: found a load outside its interval")
        if before is not None and zero - before < plan.share("settle_s") * 10**9:
            own.find(3, f"{name}: found it begun {zero - before} ns after the load before it")
        before = end


def _qualified(
    run: Run, own: Objections, plan: Plan, attempt: Attempt, trial: Mapping[str, object], found: Trial
) -> None:
    """Rules 5, 6 and 8: held against the attempt that the arm's receipts rest on."""
    parity = run.receipts(found.arm).get("parity")
    names = [name for name in (parity.evidence if parity is not None else ()) if name.endswith(f"/{_REFERENCE}")]
    if len(names) != 1:
        own.gap(5, f"found {len(names)} attempts that qualified '{found.arm}', expected that of its receipt of parity")
        return
    base = run.attempts.get(names[0].rpartition("/")[0])
    if base is None:
        own.gap(5, f"found no attempt {names[0]}")
        return
    if trial.get("qualified") != base.name:
        own.find(1, f"{TRIAL}: qualified: found {shown(trial.get('qualified'))}, expected {base.name!r}")
    with own.reading(5):
        readings = run.document(base, _DISPATCH).get("readings")
        first = table(readings[0], "readings[0]") if isinstance(readings, list) and readings else {}
        kernels = _readings(trial, "dispatch")
        if list(kernels) != ["before", "after"]:
            own.gap(5, f"dispatch: found readings {list(kernels)}, expected before and after")
        for when, reading in kernels.items():
            if not first.get("ranks") or reading.get("ranks") != first.get("ranks"):
                own.find(5, f"dispatch {when}: found other kernels than were qualified")
    with own.reading(6):
        theirs, ours = (run.document(it, name).get("ranks") for it, name in (
            (base, _IDENTITY_FILE), (attempt, TRIAL_IDENTITY)
        ))  # fmt: skip
        _same_identity(own, ours, theirs)
    with own.reading(8):
        _canaries(run, own, plan, base, found)


def _same_identity(own: Objections, ours: object, theirs: object) -> None:
    if not isinstance(ours, list) or not isinstance(theirs, list) or not ours or len(ours) != len(theirs):
        own.gap(6, "identity: found another number of ranks than was qualified")
        return
    for place, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
        one, other = table(found, f"rank {place}"), table(wanted, f"rank {place}")
        for key in _IDENTITY:
            if key not in one or key not in other or _shared(one[key]) != _shared(other[key]):
                own.find(6, f"identity: rank {place}: found other {key} than were qualified")


def _shared(value: object) -> object:
    """Layers with the address of their storage replaced by the first of them that has it: each process has others."""
    if not isinstance(value, list):
        return value
    addresses = [it.get("storage_id") if isinstance(it, dict) else None for it in value]
    return [{**it, "storage_id": addresses.index(it.get("storage_id"))} if isinstance(it, dict) else it for it in value]


def _canaries(run: Run, own: Objections, plan: Plan, base: Attempt, found: Trial) -> None:
    serial: dict[str, list[object]] = {}
    if _REFERENCE not in base.intact:
        raise DamagedError(f"evidence/{base.name}/{_REFERENCE}: found no such sealed file, expected it")
    with run.tree.open(*_path(base), _REFERENCE) as file:
        for line in file:
            record = table(parse(line), _REFERENCE)
            tokens = record.get("token_ids")
            if record.get("order") == "forward" and isinstance(tokens, list):
                serial[str(record.get("id"))] = tokens
    declared = plan.rules.get("cells")
    wanted = {str(it.get("name")): it.get("canaries") for it in (declared if isinstance(declared, list) else [])}
    for name in plan.cells:
        asked = [it for it in (found.cells[name].requests if name in found.cells else ()) if it.prompt in plan.canaries]
        for request in asked:
            expected, tokens = serial.get(plan.canaries[request.prompt]), list(request.stream.tokens)
            shared = min(len(tokens), len(expected or []))
            if expected is None:
                own.gap(8, f"{name}: found no serial reference of {plan.canaries[request.prompt]}")
            elif not shared or tokens[:shared] != expected[:shared]:
                own.find(8, f"{name}, {request.name}: found other tokens of the canary than serially")
        if name in found.cells and len(asked) != wanted.get(name):
            own.gap(8, f"{name}: found {len(asked)} canaries, expected {shown(wanted.get(name))}")


def _values(trial: Mapping[str, object], when: str) -> dict[str, object]:
    readings = _readings(trial, "counters")
    if when not in readings:
        raise DamagedError(f"{TRIAL}: found no counters {when}, expected them")
    return table(readings[when].get("values"), f"counters {when}")


def _moved(trial: Mapping[str, object], name: str, key: str) -> int:
    before, after = _values(trial, _before(name)), _values(trial, f"after {name}")
    if key != "success":
        return integer(after, key, "counters", minimum=-(2**63)) - integer(before, key, "counters", minimum=-(2**63))
    totals = []
    for values in (before, after):
        reasons = table(values.get(key), f"counters.{key}")
        totals.append(sum(integer(reasons, reason, key) for reason in reasons))
    return totals[1] - totals[0]


def _counted(own: Objections, plan: Plan, trial: Mapping[str, object], found: Trial) -> None:
    with own.reading(7):
        times = [when for name in _loads(plan) for when in (_before(name), f"after {name}")]
        readings = _readings(trial, "counters")
        if list(readings) != times:
            own.gap(7, f"counters: found readings {list(readings)}, expected {times}")
        for when in readings:
            values = _values(trial, when)
            for key in ("running", "waiting"):
                if integer(values, key, f"counters {when}", minimum=-(2**63)):
                    own.find(7, f"counters {when}: found requests {key}, expected none")
    for name in _loads(plan):
        if name not in found.cells:
            continue
        one = found.cells[name]
        with own.reading(7):
            lost = sum(one.failed.values())
            completed, ended = len(one.requests) - lost, _moved(trial, name, "success")
            if ended < completed or (not lost and ended != completed):
                own.find(7, f"{name}: found {ended} requests ended on the server, expected {completed} as completed")
            for request in one.requests:
                counted, asked = request.stream.prompt_tokens, len(plan.prompts.get(request.prompt, ()))
                if request.failure is None and counted != asked:
                    own.find(7, f"{name}, {request.name}: found {counted} prompt tokens, expected {asked} of the panel")
            wanted = {
                "prompt_tokens": sum(it.stream.prompt_tokens or 0 for it in one.requests),
                "generation_tokens": sum(len(it.stream.tokens) for it in one.requests),
            }
            for key, count in wanted.items():
                moved = _moved(trial, name, key)
                # What a failed request cost the server is not known to the client.
                if moved < count or (not lost and moved != count):
                    own.find(7, f"{name}: found {moved} {key} on the server, expected {count} as received")
            if _moved(trial, name, "preemptions"):
                own.find(7, f"{name}: found preemptions, expected none")
            if plan.rules.get("cold") is not False and _moved(trial, name, "prefix_cache_hits"):
                own.find(7, f"{name}: found prompt tokens in the prefix cache, expected none: the plan says cold")


def _late(own: Objections, plan: Plan, name: str, cell: Verified) -> None:
    late, ttft = cell.figures["lateness_p99"].value, cell.figures["ttft_intended_p50"].value
    if not isinstance(late, Fraction) or not isinstance(ttft, Fraction):
        own.find(9, f"{name}: found no median TTFT to hold the dispatch lateness against")
        return
    limit = plan.share("lateness_fraction") * plan.share("practical") * ttft
    if late > limit:
        own.find(9, f"{name}: found a lateness p99 of {float(late):.0f} ns, expected at most {float(limit):.0f}")


def _server(own: Objections, plan: Plan, trial: Mapping[str, object], name: str, cell: Verified) -> None:
    mean, count = cell.figures["mean_ttft_send"], _moved(trial, name, "ttft_count")
    if count <= 0 or count != mean.of or not isinstance(mean.value, Fraction):
        own.find(10, f"{name}: found {count} first tokens on the server, expected {mean.of} as received")
        return
    first, last = (decimal(_values(trial, when), "ttft_sum_s", "counters") for when in (_before(name), f"after {name}"))
    apart = abs(mean.value / 10**6 - (last - first) * 1000 / count)
    if apart > plan.share("server_ttft_ms"):
        own.find(10, f"{name}: found a mean TTFT {float(apart):.1f} ms apart from the server's own")


def _idle(own: Objections, plan: Plan, trial: Mapping[str, object]) -> None:
    for one, other in pairwise(_loads(plan)):
        before, after = _values(trial, f"after {one}"), _values(trial, _before(other))
        if before != after:
            keys = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
            own.idle.append((11, f"between {one} and {other}: found other {', '.join(keys)}, expected no request"))
