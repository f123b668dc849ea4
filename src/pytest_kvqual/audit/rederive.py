"""Each gate's verdict derived anew from the records, and held against its receipt (checks 7, 8 to 12, 14 and 15)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_kvqual.audit import captures, chained, figures, frozen, observed
from pytest_kvqual.audit.attempts import SERVER_LOG, Attempt
from pytest_kvqual.audit.captures import Responses
from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.frozen import GSM8K, SCORED, Frozen
from pytest_kvqual.audit.receipts import Receipt
from pytest_kvqual.audit.settings import IDENTITY, REFERENCE_CONFIG
from pytest_kvqual.audit.shapes import integer, items, shown, table, text
from pytest_kvqual.audit.workers import AFTER

QUALITY: Final = ("nll", *SCORED)
"""The gates that compare an arm's answers with every control's."""
REDERIVED: Final = ("parity", *QUALITY)
SUPERIORITY: Final = "superiority"
IDENTITY_POISON: Final = "identity-poison.json"
INSTALL: Final = "install.json"
"""The checkouts that an arm brought from an install; an arm without any has none."""
GSM8K_PANEL: Final = "gsm8k-panel.json"
#: Read of every attempt that a receipt names, where it is sealed, beside what the receipts name.
ALWAYS: Final = (IDENTITY, REFERENCE_CONFIG, SERVER_LOG, GSM8K_PANEL, *AFTER)
_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)/attempt-([1-9][0-9]{0,8})/([A-Za-z0-9][A-Za-z0-9._-]*)")
_RELATIVE: Final = 1e-12


@dataclass(kw_only=True, slots=True)
class GateResult:
    """What the audit says of one gate.

    ``stored`` and ``figure`` are the receipt's. ``derived`` is the outcome that follows from the records, empty where
    none follows. ``how``: ``re-derived``; ``chained`` and what of it was computed again; or why it is neither.
    """

    gate: str
    required: bool
    stored: str = ""
    figure: str = ""
    receipt: str = ""
    derived: str = ""
    derived_figure: str = ""
    how: str = ""

    @property
    def stands(self) -> bool:
        """Whether the receipt says PASS and nothing that was derived says otherwise."""
        return self.stored == "PASS" and self.derived in ("", "PASS")

    def line(self) -> str:
        """One line: outcome, how it was held against the records, figure."""
        if not self.stored:
            return f"{self.gate}: no receipt"
        same = not self.derived or (self.derived, self.derived_figure) == (self.stored, self.figure)
        derived = "" if same else f"; derived {self.derived}: {self.derived_figure}"
        return f"{self.gate}: {self.stored} ({self.how}): {self.figure}{derived}"


@dataclass(kw_only=True, slots=True)
class Records:
    """The attempts behind the newest receipts."""

    frozen: Frozen
    attempts: Mapping[str, Attempt]
    arm: str
    bundles: Mapping[str, str]
    """The folder of each arm's attempts."""
    responses: Responses = field(default_factory=Responses)
    checked: set[str] = field(default_factory=set)

    @property
    def null_arm(self) -> str:
        """The control that is the null."""
        return next(iter(self.frozen.controls), "")

    def own(self, attempt: Attempt) -> bool:
        """Whether an attempt is the arm's under qualification, not that of a control of the same name."""
        mine = attempt.bundle == self.bundles.get(self.arm)
        return mine and (self.arm not in self.frozen.controls or IDENTITY_POISON in attempt.sealed)


def wanted(newest: Mapping[str, Receipt]) -> dict[str, set[str]]:
    """The files to read of each attempt, by its folder below ``evidence``."""
    found: dict[str, set[str]] = {}
    for receipt in newest.values():
        for name in receipt.evidence:
            match = _NAME.fullmatch(name)
            if match is not None:
                files = found.setdefault(f"{match[1]}/attempt-{match[2]}", set(ALWAYS))
                # Every recording of a campaign at once is more than memory should hold: they are read one by one.
                if receipt.gate != SUPERIORITY or not match[3].endswith(".jsonl"):
                    files.add(match[3])
    return found


# -- check 7 ---------------------------------------------------------------------------------------------------------


def check_evidence(records: Records, receipt: Receipt, report: Report) -> None:
    """What one receipt names is sealed in attempts of the right arms, as named, and is what its gate needs."""
    named: dict[str, set[str]] = {}
    for name, digest in receipt.evidence.items():
        report.look(7)
        match = _NAME.fullmatch(name)
        attempt = records.attempts.get(f"{match[1]}/attempt-{match[2]}") if match is not None else None
        if match is None or match[1] not in records.bundles.values():
            report.find(7, receipt.name, f"evidence {name}: found another arm's, expected the arm's or a control's")
        elif attempt is None:
            report.find(7, receipt.name, f"evidence {name}: found no such attempt, expected it")
        elif match[3] not in attempt.sealed:
            report.find(7, receipt.name, f"evidence {name}: found no such sealed file, expected sha256 {digest}")
        elif attempt.sealed[match[3]] != digest:
            report.find(7, receipt.name, f"evidence {name}: found sha256 {attempt.sealed[match[3]]}, expected {digest}")
        elif match[3] not in attempt.intact:
            report.find(7, receipt.name, f"evidence {name}: found other bytes than were sealed")
        else:
            named.setdefault(attempt.name, set()).add(match[3])
    _scopes(records, receipt, named, report)
    if receipt.outcome == "PASS":
        _complete(records, receipt, named, report)


def _scopes(records: Records, receipt: Receipt, named: Mapping[str, set[str]], report: Report) -> None:
    seen: dict[str, str] = {}
    for name in named:
        attempt = records.attempts[name]
        bundle = f"{attempt.bundle}{' (arm)' if records.own(attempt) else ''}"
        if bundle in seen:
            report.find(7, receipt.name, f"evidence: found {seen[bundle]} and {name}, expected one attempt of each arm")
        seen[bundle] = name
        scope = attempt.scope
        if scope is None:
            continue
        report.look(5)
        for key in ("lock", "length", "cache_bytes"):
            found, expected = getattr(scope, key), getattr(receipt.scope, key)
            if found != expected:
                report.find(5, f"evidence/{name}", f"{key}: found {found}, expected {expected} of {receipt.name}")
        if scope.arm == receipt.scope.arm and scope.engine != receipt.scope.engine:
            report.find(
                5, f"evidence/{name}", f"engine: found {scope.engine}, expected {receipt.scope.engine} of "
                f"{receipt.name}",
            )  # fmt: skip


def _complete(records: Records, receipt: Receipt, named: Mapping[str, set[str]], report: Report) -> None:
    """Under PASS exactly the files that the gate needs are named, of the arm and of every control it needs."""
    named = {name: _without_install(records, receipt, name, files, report) for name, files in named.items()}
    own = {file for name, files in named.items() if records.own(records.attempts[name]) for file in files}
    for control, files in _needed_of_controls(records, receipt.gate).items():
        bundle = records.bundles[control]
        found = {
            file
            for name, there in named.items()
            if records.attempts[name].bundle == bundle and not records.own(records.attempts[name])
            for file in there
        }
        _same_files(receipt, found, files, f"of control {control!r}", report, 15 if not found else 7)
    _same_files(receipt, own, _needed(receipt.gate), "of the arm", report, 7)
    # A fault that was planted and missed must not be left out of what the gate says it was shown.
    head = f"{receipt.gate}-poison-"
    for attempt in (records.attempts[name] for name in named):
        for file in sorted(attempt.sealed) if records.own(attempt) else ():
            if file.startswith(head) and file not in own:
                report.find(
                    7, receipt.name, f"evidence of the arm: found {file} sealed in {attempt.name} and not named, "
                    "expected every planted fault",
                )  # fmt: skip


def _without_install(records: Records, receipt: Receipt, name: str, files: set[str], report: Report) -> set[str]:
    """The other files of an attempt; the record of the arm's checkouts is named wherever its identity is."""
    attempt = records.attempts[name]
    arm = next((arm for arm, bundle in records.bundles.items() if bundle == attempt.bundle), "")
    required = records.frozen.arms.get(arm, {}).get("installed") is True
    if IDENTITY in files and INSTALL not in files and (INSTALL in attempt.sealed or required):
        # An arm may come from an interpreter alone, and then has no checkout to record.
        if INSTALL in attempt.sealed:
            report.find(7, receipt.name, f"evidence: found no {INSTALL} of {name}, expected it: the arm brought code")
        else:
            report.note(f"evidence/{name}: arm {arm} comes from an install without checkouts")
    if INSTALL in files and receipt.gate == "identity":
        with report.reading(13, f"evidence/{name}/{INSTALL}"):
            _brought(arm, attempt, report)
    return files - {INSTALL}


def _brought(arm: str, attempt: Attempt, report: Report) -> None:
    """The checkouts that were verified before the boot are those that the workers read again, unaltered."""
    where = f"evidence/{attempt.name}/{INSTALL}"
    document = table(attempt.kept.get(INSTALL), "install", ("schema", "arm", "checkouts"))
    report.look(13)
    if document["schema"] != 1:
        report.find(3, where, f"schema: found {shown(document['schema'])}, expected 1")
    if document["arm"] != arm:
        report.find(13, where, f"arm: found {shown(document['arm'])}, expected {arm!r}")
    verified = {}
    for value in items(document, "checkouts", "install"):
        checkout = table(value, "checkouts", ("name", "commit", "tree", "built", "path", "files", "modules"))
        verified[f"checkout {text(checkout, 'name', 'checkouts')}"] = text(checkout, "commit", "checkouts")
    identity = attempt.kept.get("identity.json")
    for place, value in enumerate(items(table(identity, "identity"), "ranks", "identity")):
        distributions = items(table(value, f"ranks[{place}]"), "distributions", f"ranks[{place}]")
        read = {str(it.get("name")): it.get("version") for it in distributions if isinstance(it, dict)}
        for name, commit in verified.items():
            if read.get(name) != commit:
                report.find(
                    13, where, f"{name}: found {shown(read.get(name))} on rank {place}, expected {commit} as verified"
                )


def _same_files(
    receipt: Receipt, found: set[str], needed: Sequence[str], whose: str, report: Report, check: int
) -> None:
    """``needed`` may hold one pattern, ``STEM-poison-*``, of which at least one file must be there."""
    patterns = [name for name in needed if "*" in name]
    plain = [name for name in needed if "*" not in name]
    for name in plain:
        if name not in found:
            report.find(check, receipt.name, f"evidence {whose}: found no {name}, expected it for {receipt.gate}")
    left = found - set(plain)
    for pattern in patterns:
        matching = {name for name in left if name.startswith(pattern.partition("*")[0])}
        if not matching:
            report.find(check, receipt.name, f"evidence {whose}: found no {pattern}, expected at least one")
        left -= matching
    for name in sorted(left):
        report.find(check, receipt.name, f"evidence {whose}: found {name}, expected only what {receipt.gate} needs")


def _needed(gate: str) -> list[str]:
    """The files of the arm that a gate rests on."""
    if gate == "identity":
        return [IDENTITY, IDENTITY_POISON]
    if gate in chained.ORACLE_GATES:
        return [chained.ORACLE]
    if gate == chained.DETERMINISM:
        return ["determinism.jsonl", "determinism-inputs.json", "order-comparison.json", "determinism-poison-*.jsonl"]
    if gate == "parity":
        return ["parity.jsonl", "reference.jsonl", "parity-poison-*.jsonl"]
    if gate in QUALITY:
        return [*([GSM8K_PANEL] if gate == GSM8K else []), f"{gate}.jsonl", f"{gate}-poison-*.jsonl"]
    return [f"{gate}.json"]


def _needed_of_controls(records: Records, gate: str) -> dict[str, list[str]]:
    """The files of each control that a gate rests on."""
    panel = [GSM8K_PANEL] if gate == GSM8K else []
    null = {
        "identity": [],
        **{name: [chained.ORACLE] for name in chained.ORACLE_GATES},
        chained.DETERMINISM: ["determinism.jsonl", "determinism-inputs.json", "order-comparison.json"],
        "parity": ["parity.jsonl", "parity-reverse.jsonl"],
        **{name: [f"{name}.jsonl", f"{name}-again.jsonl"] for name in QUALITY},
    }.get(gate, [f"{gate}.json"])
    found = {records.null_arm: [IDENTITY, *panel, *null]} if records.null_arm else {}
    if gate in QUALITY:
        for control in records.frozen.controls[1:]:
            if control != records.arm:
                found[control] = [IDENTITY, *panel, f"{gate}.jsonl"]
    return found


# -- checks 8 to 15 --------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Evidence:
    """The attempts that one receipt rests on."""

    records: Records
    receipt: Receipt

    def attempt(self, arm: str, *, own: bool) -> Attempt | None:
        """The attempt of an arm that the receipt names; None where it names none."""
        for name in self.receipt.evidence:
            match = _NAME.fullmatch(name)
            attempt = self.records.attempts.get(f"{match[1]}/attempt-{match[2]}") if match is not None else None
            if attempt is None or attempt.bundle != self.records.bundles.get(arm):
                continue
            if self.records.own(attempt) is own:
                return attempt
        return None

    def kept(self, attempt: Attempt | None, name: str) -> object:
        """A file that the receipt names, as read; None where it names none."""
        if attempt is None or f"{attempt.name}/{name}" not in self.receipt.evidence:
            return None
        return attempt.kept.get(name)

    def capture(self, attempt: Attempt | None, name: str) -> list[object] | None:
        """A capture that the receipt names."""
        value = self.kept(attempt, name)
        return value if isinstance(value, list) else None

    def poison(self, attempt: Attempt | None, stem: str) -> dict[str, list[object]]:
        """The captures under each planted fault that the receipt names, in the order of the receipt's faults."""
        found: dict[str, list[object]] = {}
        head, tail = f"{stem}-poison-", ".jsonl"
        for file in attempt.kept if attempt is not None else ():
            if file.startswith(head) and file.endswith(tail):
                records = self.capture(attempt, file)
                if records is not None:
                    found[file[len(head) : -len(tail)]] = records
        order = [fault for fault, _, _ in self.receipt.poison]
        return dict(sorted(found.items(), key=lambda one: order.index(one[0]) if one[0] in order else len(order)))


def check_gate(records: Records, receipt: Receipt, result: GateResult, report: Report) -> None:
    """Derive one gate's verdict as far as the records allow, and hold the receipt against it."""
    evidence = _Evidence(records=records, receipt=receipt)
    if receipt.outcome == "REFUSED":
        result.how = "refused: nothing was measured"
        return
    result.how = "chained"
    own = evidence.attempt(records.arm, own=True)
    null = evidence.attempt(records.null_arm, own=False)
    with report.reading(12, receipt.name):
        if receipt.gate == "identity":
            observed.identity(
                receipt, records.frozen, evidence.kept(own, IDENTITY), evidence.kept(null, IDENTITY),
                evidence.kept(own, IDENTITY_POISON), records.null_arm, report,
            )  # fmt: skip
            result.how = "chained, weights and scales compared again"
        elif receipt.gate == "dispatch":
            observed.dispatch(
                receipt, records.frozen, evidence.kept(own, "dispatch.json"), evidence.kept(null, "dispatch.json"),
                records.null_arm, report,
            )  # fmt: skip
            result.how = "chained, kernels compared again"
        elif receipt.gate in chained.ORACLE_GATES:
            chained.oracle(
                receipt.gate, receipt, records.frozen, evidence.kept(own, chained.ORACLE),
                evidence.kept(null, chained.ORACLE), records.null_arm, report,
            )  # fmt: skip
            result.how = "chained, counts added up again"
        elif receipt.gate == chained.DETERMINISM:
            chained.determinism(
                receipt, records.frozen, evidence.capture(own, "determinism.jsonl"),
                evidence.capture(null, "determinism.jsonl"), evidence.poison(own, chained.DETERMINISM), report,
            )  # fmt: skip
            _orders(evidence, own, null, report)
            result.how = "chained, answers compared again"
        elif receipt.gate in REDERIVED:
            _rederive(evidence, own, null, result, report)


def _rederive(
    evidence: _Evidence, own: Attempt | None, null: Attempt | None, result: GateResult, report: Report
) -> None:
    records, gate = evidence.records, evidence.receipt.gate
    panel = _panel(evidence, own, report)
    if panel is None:
        result.how = "not re-derived: no panel"
        return
    if own is None or evidence.capture(own, f"{gate}.jsonl") is None:
        # A capture that failed leaves nothing to judge; under PASS check 7 has named what is missing.
        result.how = "not re-derived: no capture of the arm"
        if evidence.receipt.outcome == "PASS":
            result.derived, result.derived_figure = "INCONCLUSIVE", "no capture of the arm"
        return
    _look(evidence, own, null, panel, report)
    rules, poison = records.frozen.part(gate), evidence.poison(own, gate)
    candidate = evidence.capture(own, f"{gate}.jsonl")
    faults = list(poison)
    if gate == "parity":
        pair = _pair(evidence, null, "parity.jsonl", "parity-reverse.jsonl")
        reference = evidence.capture(own, "reference.jsonl")
        derived = figures.parity(rules, panel, candidate, reference, pair, poison, faults)
    else:
        pair = _pair(evidence, null, f"{gate}.jsonl", f"{gate}-again.jsonl")
        controls = {
            name: evidence.capture(evidence.attempt(name, own=False), f"{gate}.jsonl")
            for name in records.frozen.controls
            if name != records.arm
        }
        if gate == "nll":
            waves = records.frozen.waves
            derived = figures.nll(rules, panel, candidate, controls, pair, poison, records.arm, waves, faults)
        else:
            questions = integer(_table(records.frozen.length.get("questions")), gate, "questions", minimum=1)
            if questions != len(panel["items"]):  # type: ignore[arg-type]  # a list: the panel was read
                # No bound is worked out over questions that nobody asked, however many the study says.
                result.how = "not re-derived: another number of questions than the panel's"
                result.derived, result.derived_figure = "INCONCLUSIVE", result.how
                return
            derived = figures.preservation(
                gate, rules, panel, questions, candidate, controls, pair, poison, records.arm, faults
            )
    result.how = "re-derived"
    result.derived, result.derived_figure = derived.outcome, derived.figure
    _compare_receipt(evidence.receipt, derived, report)


def _table(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _pair(
    evidence: _Evidence, null: Attempt | None, first: str, second: str
) -> tuple[list[object] | None, list[object] | None] | None:
    return None if null is None else (evidence.capture(null, first), evidence.capture(null, second))


def _panel(evidence: _Evidence, own: Attempt | None, report: Report) -> dict[str, object] | None:
    records, gate = evidence.records, evidence.receipt.gate
    if gate != GSM8K:
        return records.frozen.panels.get(gate)
    value = evidence.kept(own, GSM8K_PANEL)
    if value is None or own is None:
        return None
    where = f"evidence/{own.name}/{GSM8K_PANEL}"
    with report.reading(14, where):
        return frozen.panel(value, GSM8K, records.frozen, evidence.receipt.scope.length, where, report)
    return None


def _look(evidence: _Evidence, own: Attempt, null: Attempt | None, panel: dict[str, object], report: Report) -> None:
    """Checks 8, 9, 11 and 15 over every capture that the receipt rests on."""
    gate, records = evidence.receipt.gate, evidence.records
    rules = records.frozen.part(gate)
    limit = rules.get("poison_documents" if gate == "nll" else "poison_questions")
    attempts = [own, null, *(evidence.attempt(name, own=False) for name in records.frozen.controls)]
    for attempt in dict.fromkeys(found.name for found in attempts if found is not None):
        there = records.attempts[attempt]
        for file in list(there.kept):
            capture = evidence.capture(there, file)
            path = f"{attempt}/{file}"
            if capture is None or path in records.checked or not file.startswith(gate):
                continue
            records.checked.add(path)
            poisoned = file.startswith(f"{gate}-poison-")
            only = limit if poisoned and type(limit) is int else None
            if poisoned and gate == "parity":
                # Under a fault any of its prompts may be asked, at least one.
                only = len(capture) or None
            with report.reading(11, f"evidence/{path}"):
                captures.check(
                    gate, capture, panel, only=only, order="reverse" if file == "parity-reverse.jsonl" else "forward",
                    attempt=attempt, where=f"evidence/{path}", responses=records.responses, report=report,
                )  # fmt: skip


def _orders(evidence: _Evidence, own: Attempt | None, null: Attempt | None, report: Report) -> None:
    """Checks 8, 11 and 15 over the captures of determinism: each run asks the whole parity panel.

    Under a planted fault it asks the panel's first prompts, as many in each run as in the first.
    """
    records = evidence.records
    panel = records.frozen.panels.get("parity")
    for attempt in (own, null):
        for file in list(attempt.kept) if attempt is not None and panel is not None else ():
            capture = evidence.capture(attempt, file)
            if attempt is None or panel is None or capture is None or not file.startswith(chained.DETERMINISM):
                continue
            path = f"evidence/{attempt.name}/{file}"
            runs: dict[str, list[object]] = {}
            for record in capture:
                outer = _table(record)
                bare = {key: value for key, value in outer.items() if key != "run"}
                runs.setdefault(str(outer.get("run")), []).append(bare)
            asked = None if file == f"{chained.DETERMINISM}.jsonl" else len(next(iter(runs.values()), ())) or None
            for run, of_run in runs.items():
                with report.reading(11, f"{path}, run {run}"):
                    captures.check(
                        chained.DETERMINISM, of_run, panel, only=asked, order="forward", attempt=attempt.name,
                        where=f"{path}, run {run}", responses=records.responses, report=report,
                    )  # fmt: skip


def _compare_receipt(receipt: Receipt, derived: figures.Derived, report: Report) -> None:
    where = receipt.name
    report.look(12)
    pairs: list[tuple[str, object, object]] = [
        ("outcome", receipt.outcome, derived.outcome),
        ("figure", receipt.figure, derived.figure),
        ("null.state", receipt.null_state, derived.null["state"]),
        ("null.figure", receipt.null_figure, derived.null["figure"]),
    ]
    for what, found, expected in pairs:
        if found != expected:
            report.find(12, where, f"{what}: found {found!r}, expected {expected!r}, from the records")
    said = {fault: (caught, figure) for fault, caught, figure in receipt.poison}
    follows = {str(one["fault"]): (one["caught"], one["figure"]) for one in derived.poison}
    for fault in sorted(set(said) | set(follows)):
        if said.get(fault) != follows.get(fault):
            report.find(
                12, where, f"poison {fault!r}: found {said.get(fault)}, expected {follows.get(fault)}, from the records"
            )
    if derived.outcome == receipt.outcome and list(receipt.findings) != list(derived.findings):
        report.find(
            12, where, f"findings: found {len(receipt.findings)}, expected {len(derived.findings)} in these words: "
            f"{derived.findings[:1]}",
        )  # fmt: skip
    relative = _RELATIVE if receipt.gate == "nll" else 0.0
    for path, found, expected in differences(receipt.details, derived.details, "details", relative):
        decision = path.rpartition(".")[2] in ("lost", "gained") or path.startswith(
            ("details.answers", "details.by_grade")
        )
        report.find(10 if decision else 12, where, f"{path}: found {found}, expected {expected}, from the records")
    if receipt.gate in SCORED:
        report.look(10)


def differences(found: object, expected: Any, path: str, relative: float) -> list[tuple[str, str, str]]:
    """Each place where two JSON values differ; numbers may by ``relative``, floats alone."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        lines = []
        for key in [*expected, *(key for key in found if key not in expected)]:
            if key not in found or key not in expected:
                lines.append((f"{path}.{key}", "it" if key in found else "none", "none" if key in found else "it"))
            else:
                lines += differences(found[key], expected[key], f"{path}.{key}", relative)
        return lines
    if isinstance(expected, list | tuple) and isinstance(found, list):
        if list(expected) == found:
            return []
        return [(path, _list(found), _list(expected))]
    if isinstance(expected, float) and isinstance(found, float):
        same = found == expected or abs(found - expected) <= relative * max(abs(found), abs(expected), 1.0)
        return [] if same else [(path, repr(found), repr(expected))]
    same = type(found) is type(expected) and found == expected
    # A number that is whole may be written as an integer by the one and as a float by the other.
    number = isinstance(found, int | float) and isinstance(expected, int | float) and not isinstance(found, bool)
    same = same or (number and not isinstance(expected, bool) and found == expected)
    return [] if same else [(path, shown(found), shown(expected))]


def _list(values: Sequence[object]) -> str:
    return f"{len(values)} entries {[shown(value) for value in values[:5]]}"
