"""Reading receipts, and the order that they must stand in (checks 1, 3, 5 and 6)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.files import DamagedError, Tree, canonical, parse, pretty, sha256
from pytest_kvqual.audit.frozen import Gate
from pytest_kvqual.audit.shapes import NAME, digest, digests, get, integer, items, name, strings, table, text

FOLDER: Final = "receipts"
STATEMENT: Final = "https://in-toto.io/Statement/v1"
PREDICATE: Final = "urn:pytest-kvqual:gate-receipt:v1"
OUTCOMES: Final = ("PASS", "FAIL", "INCONCLUSIVE", "REFUSED")
_PREDICATE = (
    "result", "configuration", "passedTests", "warnedTests", "failedTests", "gate", "verdict", "null", "poison",
    "scope", "implementation", "evidence", "requires", "attempt", "details", "content",
)  # fmt: skip
_SCOPE = ("lock", "arm", "length", "cache_bytes", "engine")
#: The KV formats of which it is declared what a cell holds, and the gates that need to know it.
DECLARED: Final = (
    "k16v16", "k16v8", "k8v8", "cpu-attn-bf16", "cpu-attn-fp8-e4m3", "cpu-attn-fp8-e5m2",
    "cpu-attn-fp8-e4m3-toward-zero", "cpu-attn-fp8-e5m2-toward-zero",
)  # fmt: skip
NEED_DECLARATION: Final = ("identity", "routing", "shifted-outputs", "placement", "replay")
_FILE = re.compile(r"(\d{2,})-([A-Za-z0-9][A-Za-z0-9._-]*)-([1-9]\d{0,8})\.json")
_PLACE = re.compile(r"(?P<arm>.+)-(?P<length>[0-9]{1,18})-(?P<cache>[0-9]{1,18})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """What a receipt or an attempt is about."""

    lock: str
    arm: str
    length: int
    cache_bytes: int
    engine: str

    @property
    def stem(self) -> str:
        """The name of its folder, without a prefix."""
        return f"{self.arm}-{self.length}-{self.cache_bytes}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One receipt, as it says of itself. ``sha256`` is that of its bytes, ``name`` its path in the run directory."""

    name: str
    sha256: str
    gate: str
    order: int
    attempt: int
    outcome: str
    figure: str
    findings: tuple[str, ...]
    null_state: str
    null_figure: str
    poison: tuple[tuple[str, bool, str], ...]
    scope: Scope
    implementation: str
    evidence: Mapping[str, str]
    requires: Mapping[str, str]
    details: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """One folder of receipts: what its name says, and the receipts in it that could be read."""

    name: str
    receipts: tuple[Receipt, ...]
    numbers: Mapping[str, tuple[int, ...]]
    """The numbers of each gate's files, damaged ones included."""

    def newest(self) -> dict[str, Receipt]:
        """The receipt with the highest number of each gate, where that one could be read."""
        found: dict[str, Receipt] = {}
        for receipt in self.receipts:
            if receipt.attempt == max(self.numbers.get(receipt.gate, (0,))):
                found[receipt.gate] = receipt
        return found


def scope_of(value: object, where: str) -> Scope:
    """The scope in a document.

    Raises:
        DamagedError: It has another form.
    """
    outer = table(value, where, _SCOPE)
    return Scope(
        lock=digest(outer, "lock", where),
        arm=name(outer, "arm", where),
        length=integer(outer, "length", where, minimum=1),
        cache_bytes=integer(outer, "cache_bytes", where, minimum=1),
        engine=digest(outer, "engine", where),
    )


def place_of(folder: str, prefix: str) -> tuple[str, int, int] | None:
    """Arm, length and cache bytes in a folder's name; None where it has another form or another prefix."""
    match = _PLACE.fullmatch(folder.removeprefix(prefix)) if folder.startswith(prefix) else None
    if match is None or not NAME.fullmatch(match["arm"]):
        return None
    return match["arm"], int(match["length"]), int(match["cache"])


def read_folder(tree: Tree, folder: str, report: Report) -> Folder:
    """Every receipt of a folder; one that is not as it was written is a finding of check 6 (or 1, or 3)."""
    found: list[Receipt] = []
    numbers: dict[str, list[int]] = {}
    names: list[str] = []
    with report.reading(1, f"{FOLDER}/{folder}"):
        names = tree.names(FOLDER, folder)
    for file in names:
        where = f"{FOLDER}/{folder}/{file}"
        # What an interrupted write left behind never was a receipt.
        if file.startswith(".tmp-"):
            report.note(f"{where}: left by an interrupted write; not read")
            continue
        kind, match = tree.kind(FOLDER, folder, file), _FILE.fullmatch(file)
        if kind != "file":
            report.find(1, where, f"found a {kind}, expected receipts alone")
            continue
        if match is None:
            report.find(1, where, "found a stray file, expected receipts alone")
            continue
        numbers.setdefault(match[2], []).append(int(match[3]))
        report.look(6)
        with report.reading(6, where):
            receipt = read_receipt(tree.read(FOLDER, folder, file), where, report)
            expected = f"{receipt.order:02d}-{receipt.gate}-{receipt.attempt}.json"
            if file != expected:
                report.find(6, where, f"found the file name {file}, expected {expected}")
            found.append(receipt)
    for gate, of_gate in numbers.items():
        for expected_number, number in enumerate(sorted(of_gate), start=1):
            if number != expected_number:
                report.find(
                    6,
                    f"{FOLDER}/{folder}",
                    f"found receipt number {number} of {gate}, expected number {expected_number}: each number once "
                    "and without a gap",
                )
                break
    return Folder(name=folder, receipts=tuple(found), numbers={gate: tuple(sorted(of)) for gate, of in numbers.items()})


def read_receipt(data: bytes, where: str, report: Report) -> Receipt:
    """The receipt in ``data``; contradictions within it are findings.

    Raises:
        DamagedError: It has another form, or is not as it was written.
    """
    document = parse(data)
    outer = table(document, "statement", ("_type", "subject", "predicateType", "predicate"))
    for key, known in (("_type", STATEMENT), ("predicateType", PREDICATE)):
        if text(outer, key, "statement") != known:
            report.find(3, where, f"{key}: found {text(outer, key, 'statement')!r}, expected {known!r}")
    predicate = table(get(outer, "predicate", "statement"), "predicate", _PREDICATE)
    stated = digest(predicate, "content", "predicate")
    bare = {**outer, "predicate": {key: value for key, value in predicate.items() if key != "content"}}
    content = sha256(canonical(bare))
    if content != stated:
        raise DamagedError(f"found content of sha256 {content}, expected {stated}: it was changed after it was written")
    if pretty(document) != data:
        report.find(1, where, "found bytes in another form than receipts are written in")
    gate = table(get(predicate, "gate", "predicate"), "gate", ("name", "order"))
    verdict = table(get(predicate, "verdict", "predicate"), "verdict", ("outcome", "figure", "findings"))
    null = table(get(predicate, "null", "predicate"), "null", ("state", "figure"))
    poison = table(get(predicate, "poison", "predicate"), "poison", ("seeded", "caught", "faults"))
    implementation = table(get(predicate, "implementation", "predicate"), "implementation", ("sha256",))
    receipt = Receipt(
        name=where,
        sha256=sha256(data),
        gate=name(gate, "name", "gate"),
        order=integer(gate, "order", "gate", minimum=1),
        attempt=integer(predicate, "attempt", "predicate", minimum=1),
        outcome=text(verdict, "outcome", "verdict"),
        figure=text(verdict, "figure", "verdict"),
        findings=tuple(strings(verdict, "findings", "verdict")),
        null_state=text(null, "state", "null"),
        null_figure=text(null, "figure", "null"),
        poison=tuple(_fault(item) for item in items(poison, "faults", "poison")),
        scope=scope_of(get(predicate, "scope", "predicate"), "scope"),
        implementation=digest(implementation, "sha256", "implementation"),
        evidence=_descriptors(get(predicate, "evidence", "predicate"), "evidence"),
        requires=digests(get(predicate, "requires", "predicate"), "requires"),
        details=table(get(predicate, "details", "predicate"), "details"),
    )
    for line in _contradictions(receipt, outer, predicate, poison):
        report.find(6, where, line)
    return receipt


def _fault(value: object) -> tuple[str, bool, str]:
    outer = table(value, "poison.faults", ("fault", "caught", "figure"))
    caught = outer["caught"]
    if not isinstance(caught, bool):
        raise DamagedError(f"poison.faults.caught: found {caught!r}, expected a boolean")
    return text(outer, "fault", "poison.faults"), caught, text(outer, "figure", "poison.faults")


def _descriptors(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, list):
        raise DamagedError(f"{where}: found no list, expected one")
    found: dict[str, str] = {}
    for item in value:
        entry = table(item, where, ("name", "digest"))
        key = text(entry, "name", where)
        if key in found:
            raise DamagedError(f"{where}: found {key!r} twice, expected each name once")
        found[key] = digest(table(entry["digest"], where, ("sha256",)), "sha256", where)
    return found


def _contradictions(
    receipt: Receipt, outer: Mapping[str, object], predicate: Mapping[str, object], poison: Mapping[str, object]
) -> list[str]:
    lines: list[str] = []
    passed = receipt.outcome == "PASS"
    if receipt.outcome not in OUTCOMES:
        lines.append(f"outcome: found {receipt.outcome!r}, expected one of {', '.join(OUTCOMES)}")
    expected: dict[str, object] = {
        "result": "PASSED" if passed else "FAILED",
        "passedTests": [receipt.gate] if passed else [],
        "warnedTests": [],
        "failedTests": [] if passed else [receipt.gate],
    }
    lines += [
        f"{key}: found {predicate[key]!r}, expected {value!r} with the outcome {receipt.outcome}"
        for key, value in expected.items()
        if predicate[key] != value
    ]
    for key, value, named in (
        ("subject", outer["subject"], {receipt.scope.arm: receipt.scope.engine}),
        ("configuration", predicate["configuration"], {"lock.json": receipt.scope.lock}),
    ):
        if _descriptors(value, key) != named:
            lines.append(f"{key}: found another than the scope's, expected {named!r}")
    if receipt.null_state not in ("passed", "failed", "absent"):
        lines.append(f"null.state: found {receipt.null_state!r}, expected passed, failed or absent")
    caught = sum(was_caught for _, was_caught, _ in receipt.poison)
    for key, count in (("seeded", len(receipt.poison)), ("caught", caught)):
        if integer(poison, key, "poison") != count:
            lines.append(f"poison.{key}: found {poison[key]}, expected {count}, as listed")
    if passed:
        if receipt.null_state != "passed":
            lines.append(f"found PASS with the null {receipt.null_state}, expected it passed")
        if not receipt.poison:
            lines.append("found PASS without a seeded fault, expected at least one")
        lines += [f"found PASS with the seeded fault {fault!r} missed" for fault, was, _ in receipt.poison if not was]
        if receipt.findings:
            lines.append(f"found PASS with {len(receipt.findings)} findings, expected none")
        if not receipt.evidence:
            lines.append("found PASS without evidence, expected its files")
    return lines


def required_before(gates: Sequence[Gate], gate: str, kv_format: object = DECLARED[0]) -> list[str]:
    """The gates that ``gate`` rests on: all above a timing gate, else the required ones above that do not time.

    Under a KV format without a declaration these are without the gates that need one.
    """
    names = [plan.name for plan in gates]
    timing = next(plan.timing for plan in gates if plan.name == gate)
    above = gates[: names.index(gate)]
    if timing:
        return [plan.name for plan in above]
    without = () if kv_format in DECLARED else NEED_DECLARATION
    return [plan.name for plan in above if plan.state == "required" and not plan.timing and plan.name not in without]


def check_chain(gates: Sequence[Gate], newest: Mapping[str, Receipt], kv_format: object, report: Report) -> None:
    """Order and chain of the newest receipts (check 6), and that none passes for want of a declaration."""
    order = {plan.name: place for place, plan in enumerate(gates, start=1)}
    for receipt in newest.values():
        if receipt.gate not in order:
            report.find(6, receipt.name, f"found a receipt of {receipt.gate!r}, expected a gate of the study")
            continue
        if receipt.order != order[receipt.gate]:
            report.find(6, receipt.name, f"order: found {receipt.order}, expected {order[receipt.gate]}, the study's")
        plan = gates[order[receipt.gate] - 1]
        if plan.state != "required" and receipt.outcome == "PASS":
            report.find(6, receipt.name, f"found PASS of {receipt.gate!r}, which the study only plans")
        if receipt.outcome == "PASS" and receipt.gate in NEED_DECLARATION and kv_format not in DECLARED:
            report.find(
                6, receipt.name, f"found PASS of {receipt.gate!r}, expected none: the KV format {kv_format!r} has no "
                "declaration",
            )  # fmt: skip
        needed = required_before(gates, receipt.gate, kv_format)
        for gate in receipt.requires:
            if gate not in needed:
                report.find(6, receipt.name, f"requires: found {gate!r}, expected only {', '.join(needed) or 'none'}")
        for gate in needed:
            _rests_on(receipt, gate, newest.get(gate), report)


def _rests_on(receipt: Receipt, gate: str, above: Receipt | None, report: Report) -> None:
    rests_on = receipt.requires.get(gate)
    if rests_on is None:
        # A refused receipt lacks what refused it.
        if receipt.outcome != "REFUSED":
            report.find(6, receipt.name, f"requires: found no receipt of {gate!r}, expected the one that stands")
    elif above is None:
        report.find(6, receipt.name, f"requires: found the receipt {rests_on} of {gate!r}, expected it here")
    elif rests_on != above.sha256:
        report.find(6, receipt.name, f"requires: found {rests_on} of {gate!r}, expected {above.sha256} of {above.name}")
    elif above.outcome != "PASS":
        report.find(6, receipt.name, f"requires: found {above.name}, which says {above.outcome}, expected PASS")
