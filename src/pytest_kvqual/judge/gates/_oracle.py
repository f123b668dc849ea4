"""What the routing and the placement judge share: reading ``oracle.json``, and the rules that hold for both.

The document::

    {"schema": 1, "healthy": [RANK, ...], "wave": [RECORD, ...],
     "poison": [{"fault": NAME, "claimed_by": GATE, "records": [RANK, ...]}, ...]}

``healthy`` holds one oracle record per rank, ``wave`` the capture record of each request of the
healthy pass. Further
keys beside ``records`` in a poison entry are kept for readers and not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pytest_kvqual._decode import Table
from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.judge.gates._conclude import Objections, complete_poison, conclude, null_check
from pytest_kvqual.judge.verdict import Poison, Verdict
from pytest_kvqual.study.model import Study
from pytest_kvqual.tasks.completion import parse_answer

SCHEMA = 1
_KNOWN = ("schema", "healthy", "wave", "poison")
GATES = ("routing", "placement")

Section = Callable[[Objections, Study, Table, str], dict[str, object]]
"""A gate's own rules over one rank's record; returns its numbers."""


def judge_oracle(
    gate: str,
    study: Study,
    *,
    section: Section,
    figure: Callable[[Sequence[Mapping[str, object]]], str],
    candidate: Mapping[str, object] | None,
    null: Mapping[str, object] | None,
    faults: Sequence[str],
) -> Verdict:
    """The verdict of an oracle gate; ``section`` brings its rules, ``figure`` words the numbers of the ranks."""
    own, ranks = _healthy(gate, study, candidate, section, origin="oracle")
    if null is None:
        check, null_objections, null_ranks = None, None, list[dict[str, object]]()
    else:
        null_objections, null_ranks = _healthy(gate, study, null, section, origin="null oracle")
        check = null_check(null_objections, figure(null_ranks))
    return conclude(
        gate,
        figure=figure(ranks),
        objections=own,
        null=check,
        null_objections=null_objections,
        poison=complete_poison(_poison(gate, candidate), faults),
        details={"ranks": ranks, "null_ranks": null_ranks},
    )


def _healthy(
    gate: str, study: Study, document: object, section: Section, *, origin: str
) -> tuple[Objections, list[dict[str, object]]]:
    result, numbers = Objections(), list[dict[str, object]]()
    if document is None:
        result.gap(1, f"{origin}: the document is missing")
        return result, numbers
    with result.reading(1):
        outer = Table(document, origin=origin, error=EvidenceError, known=_KNOWN)
        if outer.integer("schema") != SCHEMA:
            outer.fail("schema", str(outer.integer("schema")), str(SCHEMA))
        for place, record in enumerate(_records(outer, "healthy")):
            with result.reading(1):
                where = f"{origin}, healthy[{place}]"
                rank = Table(record, origin=where, error=EvidenceError, known=None)
                if rank.integer("rank", minimum=0) != place:
                    rank.fail("rank", str(rank.integer("rank")), str(place))
                rank.integer("steps", minimum=1)
                with result.reading(2):
                    _row_map(result, rank, where)
                with result.reading(3):
                    numbers.append(section(result, study, rank, where))
        with result.reading(7):
            _wave(result, outer, origin)
    return result, numbers


def _row_map(result: Objections, rank: Table, where: str) -> None:
    rows = rank.table("row_map", known=None)
    if rows.choice("self_test", ("caught", "missed")) != "caught":
        result.gap(2, f"{where}: the row map missed its known permutation, expected 'caught'")
    rows.integer("checked", minimum=1)
    objected(result, 2, rows, f"{where}: row map")


def _wave(result: Objections, outer: Table, origin: str) -> None:
    seen: set[str] = set()
    for place, record in enumerate(_records(outer, "wave")):
        with result.reading(7):
            answer = parse_answer(record, origin=f"{origin}, wave[{place}]", logprobs=False)
            if answer.id in seen:
                result.gap(7, f"{origin}, wave[{place}]: request '{answer.id}' appears twice")
            seen.add(answer.id)


def objected(result: Objections, rule: int, section: Table, where: str) -> int:
    """Turn what an oracle counted into objections: its kept lines, and the total when more were counted than kept."""
    total = section.integer("findings_total", minimum=0)
    lines = section.strings("findings")
    if len(lines) > total:
        section.fail("findings_total", str(total), f"at least {len(lines)}, the findings kept")
    for line in lines:
        result.find(rule, f"{where}: {line}")
    if total > len(lines):
        result.find(rule, f"{where}: {total} findings, of which {len(lines)} are kept in words")
    return total


def _poison(gate: str, document: object) -> list[Poison]:
    entries = document.get("poison") if isinstance(document, Mapping) else None
    if not isinstance(entries, list):
        return []
    result = []
    for place, entry in enumerate(entries):
        origin = f"poison[{place}]"
        try:
            table = Table(entry, origin=origin, error=EvidenceError, known=None)
            fault, claimed_by = table.string("fault"), table.choice("claimed_by", GATES)
        except EvidenceError as error:
            # An entry that cannot be read may be anybody's: no gate may count it as run.
            result.append(Poison(fault=origin, caught=False, figure=str(error)))
            continue
        if claimed_by == gate:
            result.append(_poisoned(gate, fault, table, origin))
    return result


def _poisoned(gate: str, fault: str, entry: Table, origin: str) -> Poison:
    total, line = 0, ""
    try:
        for place, record in enumerate(_records(entry, "records")):
            where = f"{origin} '{fault}', records[{place}]"
            rank = Table(record, origin=where, error=EvidenceError, known=None)
            section = rank.table(gate, known=None)
            scratch = Objections()
            total += objected(scratch, 0, section, where)
            line = line or next((text for _, text in scratch.found), "")
    except (EvidenceError, OverflowError) as error:
        return Poison(fault=fault, caught=False, figure=str(error))
    if total > 0:
        return Poison(fault=fault, caught=True, figure=f"{total} findings; {line}")
    return Poison(fault=fault, caught=False, figure=f"found 0 findings of {gate}, expected at least 1")


def _records(table: Table, key: str) -> list[object]:
    value = table.raw(key)
    if not isinstance(value, list) or not value:
        table.fail(key, "no record", "at least one")
    return value
