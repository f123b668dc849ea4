"""The audit of one arm at one length in one run directory: every check, then the verdict.

Nothing that was stored decides: receipts say what is to be derived again, and are held against what comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_kvqual.audit import attempts as evidence
from pytest_kvqual.audit import frozen as study
from pytest_kvqual.audit import gsm8k, plans, rederive, settings, timing
from pytest_kvqual.audit import receipts as stored
from pytest_kvqual.audit.captures import Responses
from pytest_kvqual.audit.checks import CHECKS, Report
from pytest_kvqual.audit.files import DamagedError, Tree
from pytest_kvqual.audit.frozen import SCORED, Frozen
from pytest_kvqual.audit.receipts import Folder, Receipt, Scope
from pytest_kvqual.audit.rederive import QUALITY, GateResult, Records
from pytest_kvqual.audit.trials import Run

_UNTIMED = "every required gate that does not time"


class UnusableError(Exception):
    """There is nothing here that could be audited, or it is not said what. One line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to audit. ``gsm8k`` is the test set's file of JSON lines; None leaves it unread."""

    run_dir: Path
    prefix: str = ""
    arm: str | None = None
    length: int | None = None
    cache_bytes: int | None = None
    gsm8k: Path | None = None


@dataclass(kw_only=True, slots=True)
class Result:
    """What the audit came to. ``inputs`` maps the newest receipts' paths to their digests."""

    folder: str
    scope: Scope | None = None
    report: Report = field(default_factory=Report)
    gates: list[GateResult] = field(default_factory=list)
    timed: list[GateResult] = field(default_factory=list)
    """The gates that time."""
    inputs: dict[str, str] = field(default_factory=dict)
    timing: str = "refused"
    reached: bool = False
    """Whether there was a study to hold the rest against: without one the checks after it could not be made."""

    @property
    def may_time(self) -> bool:
        """Whether every check holds and every required gate that does not time stands."""
        required = [gate for gate in self.gates if gate.required]
        return self.reached and bool(required) and not self.report.findings and all(gate.stands for gate in required)

    @property
    def passed(self) -> bool:
        """Whether every check holds and every required gate stands; of those that time, each that has a receipt."""
        return self.may_time and all(gate.stands for gate in self._timed())

    def _timed(self) -> list[GateResult]:
        return [gate for gate in self.timed if gate.required and gate.stored]

    @property
    def qualifies(self) -> bool:
        """Whether it passed, and the study asked for losses and for one scored task: without them no quality was."""
        asked = {gate.gate for gate in self.gates if gate.required}
        return self.passed and "nll" in asked and any(gate in SCORED for gate in asked)

    def verdict(self) -> str:
        """The verdict in one line."""
        numbers = sorted({found.check for found in self.report.findings})
        if self.passed:
            asked = "" if self.qualifies else " (the study requires no nll and scored task: no quality was asked for)"
            timed = ", ".join(gate.gate for gate in self._timed())
            also = f", and of those that time {timed}" if timed else ""
            return "; ".join([f"PASSED: every check holds, {_UNTIMED} passes{asked}{also}", *self._timing()])
        parts = ["FAILED"]
        if numbers:
            checks = "check" if len(numbers) == 1 else "checks"
            parts.append(f"the records are not consistent: {checks} {', '.join(map(str, numbers))}")
        else:
            parts.append("the records are consistent")
        failed = [gate for gate in self.gates if gate.required and not gate.stands]
        quality = [gate for gate in failed if gate.gate in QUALITY]
        if quality:
            parts.append(f"preservation not established: {'; '.join(_short(gate) for gate in quality)}")
        others = [gate for gate in failed if gate not in quality]
        if others or not self.gates:
            parts.append(f"not qualified: {'; '.join(_short(gate) for gate in others) or 'no gate could be read'}")
        if not failed and not numbers:
            parts.append(f"{_UNTIMED} passes")
        return "; ".join([": ".join(parts[:2]), *parts[2:], *self._timing()])

    def _timing(self) -> list[str]:
        return [f"timing {self.timing}", *(_short(gate) for gate in self._timed() if not gate.stands)]


def _short(gate: GateResult) -> str:
    if not gate.stored:
        return f"{gate.gate}: no receipt"
    outcome = gate.stored if gate.stored != "PASS" else f"PASS, derived {gate.derived}"
    return f"{gate.gate} {outcome}"


def audit(options: Options) -> Result:
    """Audit a run directory.

    Raises:
        UnusableError: It cannot be read, holds no run, or holds several and it is not said which.
    """
    try:
        tree = Tree(options.run_dir)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnusableError(f"{options.run_dir}: cannot be read: {reason}, expected a run directory") from None
    try:
        return _audit(tree, options)
    finally:
        tree.close()


def _audit(tree: Tree, options: Options) -> Result:
    report = Report()
    kinds = {name: tree.kind(name) for name in (stored.FOLDER, evidence.FOLDER, study.FOLDER)}
    if kinds[stored.FOLDER] == kinds[evidence.FOLDER] == "none":
        raise UnusableError(f"{options.run_dir}: found neither receipts nor evidence, expected a run directory")
    for name, kind in kinds.items():
        report.look(1)
        if kind not in ("folder", "none"):
            report.find(1, name, f"found a {kind}, expected a folder")
    folder = _folder(tree, options, report)
    result = Result(folder=folder.name if folder is not None else "", report=report)
    if folder is None:
        return result
    newest = folder.newest()
    _newest_are_read(folder, newest, report)
    _earlier(folder, newest, report)
    scope = _scope(options, folder, newest, report)
    if scope is None:
        report.find(6, f"{stored.FOLDER}/{folder.name}", "found no receipt that can be read, expected one of each gate")
        return result
    result.scope = scope
    if options.length not in (None, scope.length) or options.cache_bytes not in (None, scope.cache_bytes):
        # Another run's evidence says nothing of this one's: what does not fit has been named, and nothing follows.
        return result
    result.inputs = {receipt.name: receipt.sha256 for receipt in newest.values()}
    frozen = study.read(tree, scope.lock, scope.length, report)
    if frozen is None:
        return result
    result.reached = True
    _against_the_lock(frozen, newest, report)
    stored.check_chain(frozen.gates, newest, frozen.arms.get(scope.arm, {}).get("kv_format"), report)
    records = _records(tree, options, frozen, scope, newest, report)
    named = rederive.wanted(newest)
    for attempt in records.attempts.values():
        if attempt.name not in named and attempt.outcome != "unfinished":
            report.note(f"evidence/{attempt.name}: ended as {attempt.outcome}; none of the newest receipts rests on it")
    result.gates = _gates(frozen, newest, records, report)
    _settings(records, newest, report)
    with report.reading(14, "gsm8k"):
        gsm8k.check(records, newest, options.gsm8k, report)
    _timed(tree, options, frozen, records, folder, result, scope)
    if all(gate.stands for gate in result.gates if gate.required):
        for attempt in _named(records, newest):
            if attempt.outcome != "complete":
                report.find(
                    2, f"evidence/{attempt.name}", f"found the outcome {attempt.outcome}, expected complete behind PASS"
                )
    if not result.may_time and result.timing == "allowed":
        result.timing = "refused"
    return result


def _timed(
    tree: Tree, options: Options, frozen: Frozen, records: Records, folder: Folder, result: Result, scope: Scope
) -> None:
    """Checks 16 to 19."""
    report = result.report
    timed = {plan.name for plan in frozen.gates if plan.timing}
    receipts = [receipt for receipt in folder.receipts if receipt.gate in timed]
    run = Run(
        tree=tree,
        frozen=frozen,
        scope=scope,
        prefix=options.prefix,
        attempts=records.attempts,
        folders={scope.arm: folder},
        plan=None,
        report=report,
    )
    with report.reading(16, stored.FOLDER):
        result.timing = timing.check(run, receipts, result.gates)
    if timed:
        run.plan = plans.read(tree, frozen, scope.length, report)
        with report.reading(19, stored.FOLDER):
            result.timed = timing.derive(run, receipts)


def _folder(tree: Tree, options: Options, report: Report) -> Folder | None:
    """The folder of receipts to audit.

    Raises:
        UnusableError: There are several, and it is not said which.
    """
    found: dict[str, Folder] = {}
    names: list[str] = []
    if tree.kind(stored.FOLDER) == "folder":
        with report.reading(1, stored.FOLDER):
            names = tree.names(stored.FOLDER)
    else:
        report.find(6, stored.FOLDER, "found no such folder, expected the receipts")
    mine = _Places(options)
    for name in names:
        kind = tree.kind(stored.FOLDER, name)
        if kind != "folder":
            report.find(1, f"{stored.FOLDER}/{name}", f"found a stray {kind}, expected folders of receipts alone")
        elif stored.place_of(name, "") is None:
            report.find(1, f"{stored.FOLDER}/{name}", "found a stray folder, expected ARM-LENGTH-CACHE_BYTES")
        elif stored.place_of(name, options.prefix) is None:
            report.note(f"{stored.FOLDER}/{name}: of another prefix; not audited")
        else:
            mine.add(name)
    chosen = mine.chosen()
    for name in chosen:
        # A scratch report: what is wrong in a folder that is not audited is not this audit's.
        scratch = Report()
        read = stored.read_folder(tree, name, scratch)
        if _of_another_prefix(read, options.prefix):
            report.note(f"{stored.FOLDER}/{name}: of another prefix; not audited")
        else:
            found[name] = read
    if len(found) > 1:
        found = _candidates(tree, found)
    if len(found) > 1:
        raise UnusableError(
            f"{options.run_dir}: found receipts of {', '.join(found)}, expected one: give --arm, --length or "
            "--cache-bytes"
        )
    for name in mine.names:
        if name not in found:
            report.note(f"{stored.FOLDER}/{name}: of another scope; not audited")
    if not found:
        if names:
            asked = [f"prefix {options.prefix!r}"] if options.prefix else ["no prefix"]
            asked += [f"arm {options.arm!r}"] if options.arm is not None else []
            report.find(
                6, stored.FOLDER, f"found receipts of {', '.join(names)}, expected some of {' and '.join(asked)}"
            )
        return None
    return stored.read_folder(tree, next(iter(found)), report)


@dataclass(kw_only=False, slots=True)
class _Places:
    """The folders of one prefix, and which of them were asked for."""

    options: Options
    names: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        """One folder."""
        self.names.append(name)

    def chosen(self) -> list[str]:
        """Those of the arm, length and size that were given, as far as there are any; else all."""
        left = self.names
        for place, value in enumerate((self.options.arm, self.options.length, self.options.cache_bytes)):
            if value is None:
                continue
            fitting = [name for name in left if (stored.place_of(name, self.options.prefix) or ())[place] == value]
            # Of the wrong length or size alone: it is read, and refused by naming both.
            left = fitting or (left if place else [])
        return left


def _of_another_prefix(folder: Folder, prefix: str) -> bool:
    """Whether a folder's receipts say that a part of its name is a prefix that was not asked for."""
    stems = {receipt.scope.stem for receipt in folder.receipts}
    return bool(stems) and all(
        folder.name != f"{prefix}{stem}" and folder.name.removeprefix(prefix).endswith(stem) for stem in stems
    )


def _candidates(tree: Tree, found: dict[str, Folder]) -> dict[str, Folder]:
    """Of several arms the only candidate, where their study says so; else all."""
    roles: dict[str, object] = {}
    for name, folder in found.items():
        for receipt in folder.newest().values():
            frozen = study.read(tree, receipt.scope.lock, receipt.scope.length, Report())
            if frozen is not None:
                roles[name] = frozen.arms.get(receipt.scope.arm, {}).get("role")
            break
    candidates = {name: folder for name, folder in found.items() if roles.get(name) == "candidate"}
    return candidates or found


def _newest_are_read(folder: Folder, newest: Mapping[str, Receipt], report: Report) -> None:
    for gate, numbers in folder.numbers.items():
        if numbers and gate not in newest:
            report.find(
                6, f"{stored.FOLDER}/{folder.name}", f"found the newest receipt of {gate}, number {numbers[-1]}, "
                "damaged, expected it to decide",
            )  # fmt: skip


def _earlier(folder: Folder, newest: Mapping[str, Receipt], report: Report) -> None:
    """A failure that a later receipt replaced stays in sight: it is no objection, and the reader is told."""
    for receipt in folder.receipts:
        last = newest.get(receipt.gate)
        if last is not None and receipt is not last and receipt.outcome != "PASS":
            report.note(f"{receipt.name}: an earlier {receipt.outcome} of {receipt.gate}: {receipt.figure}")


def _scope(options: Options, folder: Folder, newest: Mapping[str, Receipt], report: Report) -> Scope | None:
    """The scope that most of the newest receipts have; each that has another is a finding of check 5."""
    scopes = [receipt.scope for receipt in newest.values()]
    if not scopes:
        return None
    scope = max(scopes, key=scopes.count)
    for receipt in newest.values():
        report.look(5)
        for key in ("lock", "arm", "length", "cache_bytes", "engine"):
            found, expected = getattr(receipt.scope, key), getattr(scope, key)
            if found != expected:
                report.find(5, receipt.name, f"{key}: found {found}, expected {expected}, the other receipts'")
    where = f"{stored.FOLDER}/{folder.name}"
    if folder.name != f"{options.prefix}{scope.stem}":
        report.find(6, where, f"found receipts of {scope.stem}, expected them in {options.prefix}{scope.stem}")
    for name, given, found in (
        ("--arm", options.arm, scope.arm),
        ("--length", options.length, scope.length),
        ("--cache-bytes", options.cache_bytes, scope.cache_bytes),
    ):
        if given is not None and given != found:
            report.find(5, where, f"{name}: found receipts of {found}, expected {given}, as given")
    return scope


def _against_the_lock(frozen: Frozen, newest: Mapping[str, Receipt], report: Report) -> None:
    for receipt in newest.values():
        report.look(4)
        if receipt.implementation != frozen.implementation:
            report.find(
                4, receipt.name, f"implementation: found {receipt.implementation}, expected {frozen.implementation}, "
                "the lock's",
            )  # fmt: skip
        if receipt.scope.arm not in frozen.arms:
            report.find(5, receipt.name, f"arm: found {receipt.scope.arm!r}, expected one of {', '.join(frozen.arms)}")


def _records(
    tree: Tree, options: Options, frozen: Frozen, scope: Scope, newest: Mapping[str, Receipt], report: Report
) -> Records:
    # Superiority rests on the trials of every arm of the plan.
    planned = plans.rules_of(frozen, scope.length).get("arms")
    others = [arm for arm in (planned if isinstance(planned, list) else []) if arm in frozen.arms]
    arms = list(dict.fromkeys((scope.arm, *frozen.controls, *others)))
    stem = f"-{scope.length}-{scope.cache_bytes}"
    found: dict[str, evidence.Attempt] = {}
    if tree.kind(evidence.FOLDER) == "folder":
        found = evidence.read_all(
            tree,
            options.prefix,
            arms=arms,
            place=(scope.length, scope.cache_bytes),
            wanted=rederive.wanted(newest),
            report=report,
        )
    else:
        report.find(2, evidence.FOLDER, "found no such folder, expected the evidence")
    return Records(
        frozen=frozen,
        attempts=found,
        arm=scope.arm,
        bundles={arm: f"{options.prefix}{arm}{stem}" for arm in arms},
        responses=Responses(model=frozen.part("model").get("name")),
    )


def _gates(frozen: Frozen, newest: Mapping[str, Receipt], records: Records, report: Report) -> list[GateResult]:
    results = []
    for plan in frozen.gates:
        if plan.timing or (plan.state != "required" and plan.name not in newest):
            continue
        result = GateResult(gate=plan.name, required=plan.state == "required")
        receipt = newest.get(plan.name)
        if receipt is not None:
            result.stored, result.figure, result.receipt = receipt.outcome, receipt.figure, receipt.name
            with report.reading(7, receipt.name):
                rederive.check_evidence(records, receipt, report)
            rederive.check_gate(records, receipt, result, report)
        results.append(result)
    return results


def _named(records: Records, newest: Mapping[str, Receipt]) -> list[evidence.Attempt]:
    """The attempts that the newest receipts of the gates that do not time name."""
    timed = {plan.name for plan in records.frozen.gates if plan.timing}
    named = rederive.wanted({gate: receipt for gate, receipt in newest.items() if gate not in timed})
    return [records.attempts[name] for name in named if name in records.attempts]


def _settings(records: Records, newest: Mapping[str, Receipt], report: Report) -> None:
    named = _named(records, newest)
    own = [attempt for attempt in named if records.own(attempt)]
    controls = [attempt for attempt in named if not records.own(attempt)]
    with report.reading(13, evidence.FOLDER):
        settings.check(records.frozen, own, controls, report)
    engines: dict[str, str] = {}
    for attempt in named:
        if attempt.scope is not None:
            known = engines.setdefault(attempt.scope.arm, attempt.scope.engine)
            if known != attempt.scope.engine:
                report.find(
                    5, f"evidence/{attempt.name}", f"engine: found {attempt.scope.engine}, expected {known}, that of "
                    f"the other attempts of {attempt.scope.arm}",
                )  # fmt: skip


def lines(result: Result) -> Sequence[str]:
    """What the audit prints: one line per check, one per gate, the verdict."""
    found = [f"audit of {result.folder or 'a run directory without receipts'}"]
    if result.scope is not None:
        found.append(f"lock {result.scope.lock}")
    for number, name in CHECKS.items():
        findings = result.report.of(number)
        if findings:
            found.append(f"check {number:2d} {name}: FAILED {len(findings)}: {findings[0].line()}")
        elif not result.report.seen.get(number):
            found.append(f"check {number:2d} {name}: {'ok, nothing to look at' if result.reached else 'not reached'}")
        else:
            found.append(f"check {number:2d} {name}: ok")
    found += [f"gate {gate.line()}" for gate in result.gates]
    found += [f"gate {gate.line()}" for gate in result.timed if gate.stored]
    found += [f"note {note}" for note in result.report.notes]
    found.append(f"verdict: {result.verdict()}")
    return found


__all__ = ["DamagedError", "Options", "Result", "UnusableError", "audit", "lines"]
