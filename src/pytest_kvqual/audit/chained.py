"""Gates whose verdict does not follow from what was kept: the figure that decides is re-derived where it can be.

The oracles ran inside the engine's worker over tensors that left it as counts only, so their verdicts are chained: held
in their order, with their evidence, null and poison. What the counts themselves say is recomputed here and compared
with the receipt: findings on each rank of each pass, waived ones apart; findings under each planted fault; whether the
answers follow the order in which they were asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.files import Damaged, parse
from pytest_kvqual.audit.frozen import Frozen
from pytest_kvqual.audit.receipts import Receipt
from pytest_kvqual.audit.shapes import integer, items, shown, table, text

ORACLE_GATES: Final = ("stale-maps", "routing", "shifted-outputs", "placement", "replay")
ORACLE: Final = "oracle.json"
DETERMINISM: Final = "determinism"
_RUNS: Final = ("rotated", "original-again", "natural")


def oracle(
    gate: str, receipt: Receipt, frozen: Frozen, candidate: object, null: object, null_arm: str, report: Report
) -> bool:
    """Hold a receipt of an oracle gate against the counts of ``oracle.json``; False where it holds none."""
    where = receipt.name
    counted = _findings(gate, candidate, frozen.waived(receipt.scope.arm, gate), f"{ORACLE} of the arm", report)
    control = _findings(gate, null, frozen.waived(null_arm, gate), f"{ORACLE} of {null_arm}", report)
    seeded = _seeded(gate, candidate, frozen.waived(receipt.scope.arm, gate))
    if not counted and not control and not seeded:
        return False
    passed = receipt.outcome == "PASS"
    report.look(12)
    expected_passes = frozen.part("oracle").get("passes")
    for name, found in (("arm", counted), ("control", control)):
        passes = list(dict.fromkeys(place[0] for place in found))
        if passed and isinstance(expected_passes, list) and sorted(passes) != sorted(map(str, expected_passes)):
            report.find(12, where, f"passes of the {name}: found {passes}, expected {expected_passes} under PASS")
        total = sum(found.values())
        if passed and total:
            report.find(12, where, f"{gate}: found {total} findings of the {name}, expected none under PASS")
    stored = receipt.details.get("ranks")
    for entry in stored if isinstance(stored, list) else []:
        if isinstance(entry, dict) and "findings_total" in entry:
            place = (str(entry.get("pass")), entry.get("rank"))
            if counted.get(place) != entry["findings_total"]:
                report.find(
                    12, where, f"details.ranks, pass {place[0]}, rank {place[1]}: found "
                    f"{shown(entry['findings_total'])} findings, expected {counted.get(place)}, as in {ORACLE}",
                )  # fmt: skip
    said = {fault: caught for fault, caught, _ in receipt.poison}
    for fault, count in seeded.items():
        if fault not in said:
            report.find(12, where, f"poison: found no {fault!r}, expected it: {ORACLE} has it")
        elif said[fault] is not (count > 0):
            report.find(
                12, where, f"poison {fault!r}: found caught {said[fault]}, expected {count > 0} with {count} findings"
            )
    for fault, caught in said.items():
        if caught and fault not in seeded:
            report.find(12, where, f"poison {fault!r}: found it caught, expected its records in {ORACLE}")
    return True


def _findings(
    gate: str, document: object, waived: set[str], where: str, report: Report
) -> dict[tuple[str, object], int]:
    """The findings that are not waived, by pass and rank."""
    found: dict[tuple[str, object], int] = {}
    if document is None:
        return found
    outer = table(document, where)
    for value in items(outer, "passes", where):
        one = table(value, where)
        name = text(one, "name", where)
        for record in items(one, "records", f"{where}, pass {name}"):
            rank = table(record, f"{where}, pass {name}")
            at = f"{where}, pass {name}, rank {shown(rank.get('rank'))}"
            found[(name, rank.get("rank"))] = _open(table(rank.get(gate), at), waived, at)
            if integer(rank, "steps", at) < 1:
                report.find(12, where, f"{at}: found no step, expected at least one")
    return found


def _open(section: Mapping[str, object], waived: set[str], where: str) -> int:
    kinds = table(section.get("kinds"), where)
    total = integer(section, "findings_total", where)
    if sum(integer(kinds, kind, where) for kind in kinds) != total:
        raise Damaged(f"{where}: found findings_total {total}, expected the sum of its kinds")
    if len(items(section, "findings", where)) > total:
        raise Damaged(f"{where}: found findings_total {total}, expected at least the findings that are listed")
    return sum(integer(kinds, kind, where) for kind in kinds if kind not in waived)


def _seeded(gate: str, document: object, waived: set[str]) -> dict[str, int]:
    """The findings under each planted fault that this gate claims."""
    found: dict[str, int] = {}
    outer = table(document, ORACLE) if document is not None else {}
    for value in items(outer, "poison", ORACLE) if outer else []:
        entry = table(value, f"{ORACLE}, poison")
        if entry.get("claimed_by") != gate:
            continue
        fault = text(entry, "fault", f"{ORACLE}, poison")
        where = f"{ORACLE}, poison {fault!r}"
        if fault in found:
            raise Damaged(f"{where}: found it twice, expected once")
        found[fault] = sum(
            _open(table(table(record, where).get(gate), where), waived, where)
            for record in items(entry, "records", where)
        )
    return found


def determinism(
    receipt: Receipt, frozen: Frozen, candidate: object, null: object, poison: Mapping[str, object], report: Report
) -> bool:
    """Hold a receipt of determinism against the answers that were kept; False where there are none."""
    where = receipt.name
    runs = _answers(candidate)
    control = _answers(null)
    if not runs and not control:
        return False
    report.look(12)
    figure = _figure(runs)
    if receipt.outcome == "PASS":
        stored = receipt.figure.partition("; earlier FAIL: ")[0]
        if stored != figure:
            report.find(12, where, f"figure: found {stored!r}, expected {figure!r}")
        for name, found in (("arm", runs), ("control", control)):
            differ = _breaks(frozen, found)
            if differ:
                report.find(12, where, f"the {name}'s answers: found {differ}, expected none under PASS")
        if receipt.null_figure != _figure(control):
            report.find(12, where, f"null: found {receipt.null_figure!r}, expected {_figure(control)!r}")
    said = {fault: caught for fault, caught, _ in receipt.poison}
    for fault, records in poison.items():
        caught = bool(_breaks(frozen, _answers(records)))
        if said.get(fault) is not caught:
            report.find(12, where, f"poison {fault!r}: found caught {said.get(fault)}, expected {caught}")
    return True


def _answers(records: object) -> dict[str, dict[str, list[object]]]:
    """The tokens of each request, by run; empty where the records are none of this task."""
    found: dict[str, dict[str, list[object]]] = {}
    for place, record in enumerate(records if isinstance(records, list) else []):
        where = f"determinism, record {place + 1}"
        outer = table(record, where)
        if "run" not in outer:
            return {}
        run, name = text(outer, "run", where), text(outer, "id", where)
        choices = items(table(parse(text(outer, "body", where)), where), "choices", where)
        if len(choices) != 1:
            raise Damaged(f"{where}: found {len(choices)} choices, expected 1")
        answers = found.setdefault(run, {})
        if name in answers:
            raise Damaged(f"{where}: found {name!r} twice in the run {run}, expected once")
        answers[name] = items(table(choices[0], where), "token_ids", where)
    return found


def _figure(runs: Mapping[str, Mapping[str, list[object]]]) -> str:
    original = runs.get("original", {})
    words = []
    for name in _RUNS if "original" in runs else ():
        if name in runs:
            names = list(dict.fromkeys((*original, *runs[name])))
            differ = sum(original.get(one) != runs[name].get(one) for one in names)
            words.append(f"{name} {differ} of {len(names)}")
    return f"requests that differ from the original: {', '.join(words) or 'none compared'}"


def _breaks(frozen: Frozen, runs: Mapping[str, Mapping[str, list[object]]]) -> str:
    """In words what breaks the study's policy; empty where nothing does."""
    original = runs.get("original", {})
    invariant = frozen.study.get("determinism") == "order-invariant"
    for name in ("rotated", "original-again") if invariant else ("original-again",):
        other = runs.get(name, {})
        shared = [one for one in original if one in other]
        differ = [one for one in shared if original[one] != other[one]]
        if differ:
            return f"{len(differ)} of {len(shared)} answered otherwise in {name}"
    return ""
