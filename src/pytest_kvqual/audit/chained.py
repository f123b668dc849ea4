"""Gates whose verdict does not follow from what was kept: the figure that decides is re-derived where it can be.

The oracles ran inside the engine's worker over tensors that left it as counts only, so their verdicts are chained: held
in their order, with their evidence, null and poison. What the counts themselves say is recomputed here and compared
with the receipt: findings on each rank of each pass, waived ones apart; findings under each planted fault; whether the
answers follow the order in which they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.files import DamagedError, parse
from pytest_kvqual.audit.frozen import Frozen
from pytest_kvqual.audit.receipts import Receipt
from pytest_kvqual.audit.shapes import integer, items, shown, strings, table, text

ORACLE_GATES: Final = ("stale-maps", "routing", "shifted-outputs", "placement", "replay")
ORACLE: Final = "oracle.json"
DETERMINISM: Final = "determinism"
_FILLS: Final = 3
_RUNS: Final = ("rotated", "original-again", "natural")
_REQUIRED: Final = ("original", "rotated", "original-again")


def oracle(
    gate: str, receipt: Receipt, frozen: Frozen, candidate: object, null: object, null_arm: str, report: Report
) -> None:
    """Hold a receipt of an oracle gate against the counts of ``oracle.json``."""
    where = receipt.name
    report.look(12)
    waived = frozen.waived(receipt.scope.arm, gate)
    sections = {
        "arm": _sections(gate, candidate, waived),
        "control": _sections(gate, null, frozen.waived(null_arm, gate)),
    }
    for name, document, kinds in (("arm", candidate, waived), ("control", null, frozen.waived(null_arm, gate))):
        for kind, count in _waived(gate, document, kinds).items():
            report.note(f"{where}: {count} findings of kind {kind} of the {name} are waived by the study")
    if receipt.outcome == "PASS":
        asked = frozen.part("oracle").get("passes")
        for name, found in sections.items():
            passes = sorted({place[0] for place in found})
            if not isinstance(asked, list) or passes != sorted(map(str, asked)):
                report.find(12, where, f"passes of the {name}: found {passes}, expected {asked} under PASS")
            total = sum(numbers["findings_total"] for numbers in found.values())
            if total:
                report.find(12, where, f"{gate}: found {total} findings of the {name}, expected none under PASS")
        for name, document in (("arm", candidate), ("control", null)):
            for line in _unmet(gate, document, frozen):
                report.find(12, where, f"{ORACLE} of the {name}: {line} under PASS")
        for what, stored, name in (("figure", receipt.figure, "arm"), ("null", receipt.null_figure, "control")):
            expected = _words(gate, list(sections[name].values()))
            if stored != expected:
                report.find(12, where, f"{what}: found {stored!r}, expected {expected!r}, from {ORACLE}")
    for key, name in (("ranks", "arm"), ("null_ranks", "control")):
        _stored_numbers(receipt, key, sections[name], report)
    _stored_poison(receipt, _seeded(gate, candidate, waived), report)


def _stored_numbers(
    receipt: Receipt, key: str, sections: Mapping[tuple[str, object], Mapping[str, Any]], report: Report
) -> None:
    stored = receipt.details.get(key)
    places = set()
    for entry in stored if isinstance(stored, list) else []:
        numbers = table(entry, f"details.{key}")
        place = (str(numbers.get("pass")), numbers.get("rank"))
        places.add(place)
        counted = sections.get(place, {})
        for name, value in numbers.items():
            if name in ("pass", "rank"):
                continue
            if name not in counted or counted[name] != value:
                report.find(
                    12, receipt.name, f"details.{key}, pass {place[0]}, rank {place[1]}, {name}: found {shown(value)}, "
                    f"expected {shown(counted.get(name))}, as in {ORACLE}",
                )  # fmt: skip
    if receipt.outcome == "PASS" and places != set(sections):
        report.find(12, receipt.name, f"details.{key}: found {len(places)} passes and ranks, expected {len(sections)}")


def _stored_poison(receipt: Receipt, seeded: Mapping[str, int], report: Report) -> None:
    said = {fault: caught for fault, caught, _ in receipt.poison}
    for fault in sorted(set(said) | set(seeded)):
        if fault not in said:
            report.find(12, receipt.name, f"poison: found no {fault!r}, expected it: {ORACLE} has it")
        elif fault not in seeded:
            if said[fault]:
                report.find(12, receipt.name, f"poison {fault!r}: found it caught, expected its records in {ORACLE}")
        elif said[fault] is not (seeded[fault] > 0):
            report.find(
                12, receipt.name, f"poison {fault!r}: found caught {said[fault]}, expected {seeded[fault] > 0}: its "
                f"records have {seeded[fault]} findings",
            )  # fmt: skip


def _words(gate: str, sections: list[dict[str, Any]]) -> str:
    """The figure of an oracle gate over all passes and ranks."""

    def total(key: str) -> int:
        return sum(one[key] for one in sections if isinstance(one.get(key), int))

    findings = total("findings_total")
    if gate == "stale-maps":
        compared, changed = total("tables_compared"), total("maps_changed")
        return f"{compared} maps compared, {changed} changed from the step before, {findings} findings"
    if gate == "routing":
        return f"{total('cells_checked')} cells checked, {findings} findings"
    if gate == "shifted-outputs":
        return f"{total('rows_checked')} rows checked, {findings} are another row's"
    if gate == "placement":
        ratios = [one["worst_ratio"] for one in sections if isinstance(one.get("worst_ratio"), int | float)]
        worst = f"{max(ratios):.3g}" if ratios and len(ratios) == len(sections) else "unknown"
        return f"{total('rows_checked')} rows checked, worst error {worst} of its tolerance"
    rows, cells = total("rows_compared"), total("cells_filled")
    return f"{rows} rows compared under {_FILLS} fills of {cells} cells, {findings} findings"


def _sections(gate: str, document: object, waived: set[str]) -> dict[tuple[str, object], dict[str, Any]]:
    """The numbers of a gate by pass and rank; ``findings_total`` without the waived ones."""
    found: dict[tuple[str, object], dict[str, Any]] = {}
    if document is None:
        return found
    outer = table(document, ORACLE)
    for value in items(outer, "passes", ORACLE):
        one = table(value, ORACLE)
        name = text(one, "name", ORACLE)
        for record in items(one, "records", f"{ORACLE}, pass {name}"):
            rank = table(record, f"{ORACLE}, pass {name}")
            at = f"{ORACLE}, pass {name}, rank {shown(rank.get('rank'))}"
            place = (name, integer(rank, "rank", at))
            if place in found:
                raise DamagedError(f"{at}: found it twice, expected once")
            steps = integer(rank, "steps", at, minimum=1)
            section = table(rank.get(gate), at)
            numbers: dict[str, Any] = {"steps": steps}
            numbers |= {key: it for key, it in section.items() if not isinstance(it, dict | list)}
            numbers["findings_total"] = _open(section, waived, at)
            if gate == "replay":
                rows = table(section.get("rows_compared"), at)
                numbers["rows_compared"] = min(integer(rows, fill, at) for fill in rows) if rows else 0
                numbers["fills"] = rank.get("fills")
            found[place] = numbers
    return found


def _unmet(gate: str, document: object, frozen: Frozen) -> list[str]:
    """What a healthy document lacks of what the study asks of every pass; the rows that requests need apart."""
    lines: list[str] = []
    rules = frozen.part("oracle")
    layers, tensor_parallel = frozen.part("model").get("layers"), frozen.part("engine").get("tensor_parallel_size", 1)
    met: dict[str, int] = dict.fromkeys(strings(rules, "conditions", "oracle"), 0)
    over: dict[object, dict[str, int]] = {}

    def expect(holds: bool, what: str, found: object, expected: object) -> None:
        if not holds:
            lines.append(f"{what}: found {shown(found)}, expected {expected}")

    for value in items(table(document, ORACLE), "passes", ORACLE) if document is not None else []:
        one = table(value, ORACLE)
        name, records = text(one, "name", ORACLE), items(one, "records", ORACLE)
        expect(len(records) == tensor_parallel, f"pass {name}, ranks", len(records), tensor_parallel)
        for record in records:
            rank = table(record, f"{ORACLE}, pass {name}")
            at = f"pass {name}, rank {shown(rank.get('rank'))}"
            expect(rank.get("probe") is (name == "probe"), f"{at}, probe", rank.get("probe"), name == "probe")
            expect(rank.get("layers") == layers, f"{at}, layers", rank.get("layers"), layers)
            scheduled = integer(table(rank.get("rows"), at), "scheduled", at, minimum=1)
            row_map = table(rank.get("row_map"), at)
            for key, wanted in (("checked", scheduled), ("self_test", "caught"), ("findings_total", 0)):
                expect(row_map.get(key) == wanted, f"{at}, row_map.{key}", row_map.get(key), wanted)
            for condition in met:
                met[condition] += integer(table(rank.get("conditions"), at), condition, at)
            section = table(rank.get(gate), at)
            counts = over.setdefault(rank.get("rank"), {})
            _section_unmet(gate, section, rank, scheduled, frozen, counts, at, expect)
    for condition, count in met.items():
        expect(count > 0, f"condition {condition}, times met", count, "at least 1")
    least = {"routing": ("cells_checked", "minimum_cells"), "placement": ("rows_checked", "minimum_rows")}.get(gate)
    minimums = {least[0]: integer(rules, least[1], "oracle")} if least is not None else {}
    if gate == "replay":
        minimums = {"rows_compared": 1, "cells_filled": 1}
    for place, summed in over.items():
        for key, minimum in minimums.items():
            expect(summed[key] >= minimum, f"rank {shown(place)}, {key} over all passes", summed[key], minimum)
    return lines


def _section_unmet(
    gate: str,
    section: Mapping[str, object],
    rank: Mapping[str, object],
    scheduled: int,
    frozen: Frozen,
    counts: dict[str, int],
    at: str,
    expect: Callable[[bool, str, object, object], None],
) -> None:
    """The same of one gate's numbers on one rank; ``counts`` adds up those that have a minimum over all passes."""
    layers = integer(frozen.part("model"), "layers", "model", minimum=1)
    rows = scheduled * layers

    def number(key: str, minimum: int = 0) -> int:
        found = integer(section, key, at)
        counts[key] = counts.get(key, 0) + found
        expect(found >= minimum, f"{at}, {key}", found, f"at least {minimum}")
        return found

    if gate == "stale-maps":
        number("tables_compared", integer(rank, "steps", at, minimum=1) * layers)
        number("maps_changed", 1)
    elif gate == "routing":
        for key in ("cells_checked", "history_cells", "blocks_compared"):
            number(key, 1)
        written = number("writes_checked")
        expect(written == rows, f"{at}, writes_checked", written, rows)
    elif gate in ("shifted-outputs", "placement"):
        checked = number("rows_checked")
        expect(checked == rows, f"{at}, rows_checked", checked, rows)
        expect(section.get("layers") == layers, f"{at}, {gate}.layers", section.get("layers"), layers)
        if gate == "shifted-outputs":
            expect(section.get("self_test") == "caught", f"{at}, self_test", section.get("self_test"), "caught")
            return
        ratio, share = section.get("worst_ratio"), frozen.part("oracle").get("ambiguous_rows")
        is_number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
        expect(is_number and 0 <= ratio <= 1, f"{at}, worst_ratio", ratio, "at most 1")  # type: ignore[operator]
        ambiguous = number("ambiguous_rows")
        holds = isinstance(share, int | float) and checked > 0 and ambiguous / checked <= share
        expect(holds, f"{at}, ambiguous_rows of {checked}", ambiguous, f"at most a share of {shown(share)}")
    else:
        under = table(section.get("rows_compared"), at)
        compared = [integer(under, fill, at) for fill in under]
        least = min(compared, default=0)
        counts["rows_compared"] = counts.get("rows_compared", 0) + least
        filled = number("cells_filled")
        expect(
            len(compared) == _FILLS and max(compared) == least, f"{at}, rows_compared", least, "as many in each fill"
        )
        if rank.get("fills") is True:
            expect(least == rows, f"{at}, rows_compared", least, rows)
            expect(filled > 0, f"{at}, cells_filled", filled, "at least 1")


def _open(section: Mapping[str, object], waived: set[str], where: str) -> int:
    kinds = table(section.get("kinds"), where)
    total = integer(section, "findings_total", where)
    if sum(integer(kinds, kind, where) for kind in kinds) != total:
        raise DamagedError(f"{where}: found findings_total {total}, expected the sum of its kinds")
    if len(items(section, "findings", where)) > total:
        raise DamagedError(f"{where}: found findings_total {total}, expected at least the findings that are listed")
    return sum(integer(kinds, kind, where) for kind in kinds if kind not in waived)


def _waived(gate: str, document: object, waived: set[str]) -> dict[str, int]:
    """How many findings of each waived kind the passes hold, of all ranks; kinds with none left out."""
    found: dict[str, int] = {}
    outer = table(document, ORACLE) if document is not None and waived else {}
    for value in items(outer, "passes", ORACLE) if outer else []:
        for record in items(table(value, ORACLE), "records", ORACLE):
            kinds = table(table(table(record, ORACLE).get(gate), ORACLE).get("kinds"), ORACLE)
            for kind in sorted(waived & set(kinds)):
                found[kind] = found.get(kind, 0) + integer(kinds, kind, ORACLE)
    return {kind: count for kind, count in found.items() if count}


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
            raise DamagedError(f"{where}: found it twice, expected once")
        found[fault] = sum(
            _open(table(table(record, where).get(gate), where), waived, where)
            for record in items(entry, "records", where)
        )
    return found


def determinism(
    receipt: Receipt, frozen: Frozen, candidate: object, null: object, poison: Mapping[str, object], report: Report
) -> None:
    """Hold a receipt of determinism against the answers that were kept."""
    where = receipt.name
    runs = _answers(candidate)
    control = _answers(null)
    report.look(12)
    figure = _figure(runs)
    if receipt.outcome == "PASS":
        stored = receipt.figure.partition("; earlier FAIL: ")[0]
        if stored != figure:
            report.find(12, where, f"figure: found {stored!r}, expected {figure!r}")
        for name, found in (("arm", runs), ("control", control)):
            lacking = [run for run in _REQUIRED if not found.get(run)]
            if lacking:
                report.find(12, where, f"runs of the {name}: found none of {lacking}, expected {list(_REQUIRED)}")
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
    for fault in said:
        if fault not in poison:
            report.find(12, where, f"poison {fault!r}: found it in the receipt alone, expected its records")


def _answers(records: object) -> dict[str, dict[str, list[object]]]:
    """The tokens of each request, by run; empty where the records are none of this task."""
    found: dict[str, dict[str, list[object]]] = {}
    for place, record in enumerate(records if isinstance(records, list) else []):
        where = f"determinism, record {place + 1}"
        outer = table(record, where)
        run, name = text(outer, "run", where), text(outer, "id", where)
        choices = items(table(parse(text(outer, "body", where)), where), "choices", where)
        if len(choices) != 1:
            raise DamagedError(f"{where}: found {len(choices)} choices, expected 1")
        answers = found.setdefault(run, {})
        if name in answers:
            raise DamagedError(f"{where}: found {name!r} twice in the run {run}, expected once")
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
