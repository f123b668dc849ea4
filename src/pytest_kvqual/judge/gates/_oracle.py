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
from pytest_kvqual.study.panels import Panel
from pytest_kvqual.tasks.completion import parse_answer

SCHEMA = 1
_KNOWN = ("schema", "healthy", "wave", "poison")
GATES = ("routing", "placement")

Section = Callable[[Objections, Study, Table, str, int | None], dict[str, object]]
"""A gate's own rules over one rank's record, told how many rows the pass had (None: unknown); returns its numbers."""


def judge_oracle(
    gate: str,
    study: Study,
    panel: Panel,
    *,
    section: Section,
    figure: Callable[[Sequence[Mapping[str, object]]], str],
    candidate: Mapping[str, object] | None,
    null: Mapping[str, object] | None,
    faults: Sequence[str],
) -> Verdict:
    """The verdict of an oracle gate; ``section`` brings its rules, ``figure`` words the numbers of the ranks."""
    own, ranks = _healthy(study, panel, candidate, section, origin="oracle")
    if null is None:
        check, null_objections, null_ranks = None, None, list[dict[str, object]]()
    else:
        null_objections, null_ranks = _healthy(study, panel, null, section, origin="null oracle")
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
    study: Study, panel: Panel, document: object, section: Section, *, origin: str
) -> tuple[Objections, list[dict[str, object]]]:
    result, numbers = Objections(), list[dict[str, object]]()
    if document is None:
        result.gap(1, f"{origin}: the document is missing")
        return result, numbers
    with result.reading(1):
        outer = Table(document, origin=origin, error=EvidenceError, known=_KNOWN)
        if outer.integer("schema") != SCHEMA:
            outer.fail("schema", str(outer.integer("schema")), str(SCHEMA))
        rows: int | None = None
        with result.reading(7):
            rows = _wave(result, outer, panel, origin)
        for place, record in enumerate(_records(outer, "healthy")):
            with result.reading(1):
                where = f"{origin}, healthy[{place}]"
                rank = Table(record, origin=where, error=EvidenceError, known=None)
                if rank.integer("rank", minimum=0) != place:
                    rank.fail("rank", str(rank.integer("rank")), str(place))
                rank.integer("steps", minimum=1)
                with result.reading(2):
                    _row_map(result, rank, where, rows)
                with result.reading(3):
                    numbers.append(section(result, study, rank, where, rows))
    return result, numbers


def complete(result: Objections, rule: int, table: Table, key: str, where: str, expected: int | None) -> None:
    """Objects when a count is not the one that the pass's requests dictate; nothing is sampled."""
    found = table.integer(key, minimum=0)
    if expected is not None and found != expected:
        result.gap(rule, f"{where}: {key} is {found}, expected {expected}, as many as the requests of the pass need")


def _row_map(result: Objections, rank: Table, where: str, expected: int | None) -> None:
    rows = rank.table("row_map", known=None)
    complete(result, 2, rows, "checked", where, expected)
    if rows.choice("self_test", ("caught", "missed")) != "caught":
        result.gap(2, f"{where}: the row map missed its known permutation, expected 'caught'")
    objected(result, 2, rows, f"{where}: row map")


def _wave(result: Objections, outer: Table, panel: Panel, origin: str) -> int | None:
    """How many rows the pass had: each prompt token once, and each generated token that was fed again."""
    asked = {item.id: item for item in panel.items}
    seen: set[str] = set()
    rows, whole = 0, True
    for place, record in enumerate(_records(outer, "wave")):
        where = f"{origin}, wave[{place}]"
        read = False
        with result.reading(7):
            answer = parse_answer(record, origin=where, logprobs=False)
            read = True
            item = asked.get(answer.id)
            if answer.id in seen:
                result.gap(7, f"{where}: request '{answer.id}' appears twice")
            elif item is None or item.prompt != answer.prompt_token_ids:
                result.gap(7, f"{where}: request '{answer.id}' is not the panel's request of that name")
            seen.add(answer.id)
            rows += len(answer.prompt_token_ids) + len(answer.token_ids) - 1
        whole = whole and read
    missing = [name for name in asked if name not in seen]
    if missing and whole:
        result.gap(7, f"{origin}: {len(missing)} of {len(asked)} requests have no answer, first '{missing[0]}'")
    return rows if whole else None


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
