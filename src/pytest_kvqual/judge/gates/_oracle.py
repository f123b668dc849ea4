"""What the oracle gates share: reading ``oracle.json``, and the rules that hold for each of them.

The document::

    {"schema": 2,
     "passes": [{"name": PASS, "records": [RANK, ...], "wave": [RECORD, ...]}, ...],
     "poison": [{"fault": NAME, "claimed_by": GATE, "records": [RANK, ...]}, ...]}

A pass is one healthy run of the oracle panel: ``records`` holds one oracle record per rank, ``wave`` the capture record
of each request in the order sent. Further keys beside ``records`` in a poison entry are kept for readers and not
judged. Each gate reads its own section of a rank's record, which counts what it checked and its findings by kind::

    {"findings": [LINE, ...], "findings_total": int, "kinds": {KIND: count}}

The rules of every oracle gate; rules 4 and 5 are the gate's own:

1. The document is of schema 2 and holds each pass of ``oracle.passes`` once and no other. Each pass has one record per
   rank, of as many ranks as ``engine.tensor_parallel_size``, in order, with at least one step. The pass ``probe`` was
   run with fingerprints, and no other was.
2. The row map was checked for every row of the pass and has no finding, and it caught its known permutation.
3. On every rank of every pass, every layer of the model was seen.
4. What the gate checked, in numbers.
5. The gate's oracle has no finding, but for those that the study waives for this arm.
6. The counts agree with each other: as many findings were counted as are kept, or more; those of each kind add up to
   the total.
7. In each pass every request of the panel was answered under status 200, and no other. The rows scheduled are those
   that the requests need: each prompt token and each generated token that was fed again, less those found in the prefix
   cache, and once more those computed again after a preemption. The pass ``rotated`` was sent in the panel's order,
   rotated by ``oracle.rotation`` requests, and that is another order.
8. Each condition of ``oracle.conditions`` was met, summed over passes and ranks.
9. Every waiver of this arm and gate was needed.
10. Null: the control's document keeps rules 1 to 9 as its own arm.
11. Poison: the oracle has findings, of a kind that is not waived, under each fault that the gate claims, in a record
    per rank of at least one step and one row. Every fault of ``faults`` was run.

Where the KV format of the arm, or of the null's, has no declaration, a gate that needs one
(:data:`pytest_kvqual.kv.declarations.NEED_DECLARATION`) is INCONCLUSIVE in one line, and looks at nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_kvqual._decode import Table
from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.judge.gates._conclude import Objections, complete_poison, conclude, null_check
from pytest_kvqual.judge.verdict import Outcome, Poison, Verdict
from pytest_kvqual.kv.declarations import NEED_DECLARATION, is_declared, not_established
from pytest_kvqual.study.model import Study
from pytest_kvqual.study.panels import Panel
from pytest_kvqual.tasks.completion import parse_answer

SCHEMA = 2
GATES = ("stale-maps", "routing", "shifted-outputs", "placement", "replay")
PROBE, ROTATED = "probe", "rotated"
_OPEN: Mapping[str, str] = {
    "routing": "what its cells must hold",
    "shifted-outputs": "the attention over its cells",
    "placement": "the attention over its cells",
    "replay": "what fills its unwritten cells",
}
_KNOWN = ("schema", "passes", "poison")
_PASS = ("name", "records", "wave")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One rank's record of one pass, under judgement.

    ``needed`` is how many rows the pass's requests need, ``scheduled`` how many this rank must have seen for them; None
    where the evidence cannot tell. ``waived`` counts the waived findings by kind, over all parts of one document.
    """

    study: Study
    name: str
    rank: Table
    where: str
    needed: int | None
    scheduled: int | None
    waived: dict[str, int]

    def per_layer(self, rows: int | None) -> int | None:
        """``rows`` times the layers of the model; None stays None."""
        return None if rows is None else rows * self.study.model.layers


Section = Callable[[Objections, Part], dict[str, object]]
"""A gate's own rules (3 to 6) over one part; returns its numbers."""


@dataclass(kw_only=True, slots=True)
class _Healthy:
    """What the passes of one document came to."""

    objections: Objections = field(default_factory=Objections)
    numbers: list[dict[str, object]] = field(default_factory=list)
    waived: dict[str, int] = field(default_factory=dict)
    conditions: Counter[str] = field(default_factory=Counter)


def judge_oracle(
    gate: str,
    study: Study,
    panel: Panel,
    *,
    section: Section,
    minimums: Mapping[str, int],
    figure: Callable[[Sequence[Mapping[str, object]]], str],
    arm: str,
    null_arm: str,
    candidate: Mapping[str, object] | None,
    null: Mapping[str, object] | None,
    faults: Sequence[str],
    panels: Mapping[str, Panel] | None,
) -> Verdict:
    """The verdict of an oracle gate.

    Args:
        gate: The gate.
        study: The study; its ``oracle`` rules, its layers, its ranks and its waivers are what is expected.
        panel: The oracle panel: the requests of each pass, from which the number of rows follows.
        section: The gate's own rules over one rank's record.
        minimums: The least that the gate's numbers come to on each rank, over all passes.
        figure: Words the numbers of all passes and ranks.
        arm: The arm under qualification, whose waivers apply.
        null_arm: The control of ``null``.
        candidate: The arm's ``oracle.json``, poison included; None where it is missing.
        null: A control's ``oracle.json``; its passes are the null. None where it is missing.
        faults: The names of the faults claimed by this gate that must have been run.
        panels: The requests of a pass, by its name, where they are not ``panel``.
    """
    for name in (arm, null_arm):
        if gate in NEED_DECLARATION and name in study.arms and not is_declared(study.arms[name].kv_format):
            line = f"arm '{name}': {not_established(study.arms[name].kv_format, _OPEN[gate])}"
            return Verdict(gate=gate, outcome=Outcome.INCONCLUSIVE, figure=line, findings=(line,))
    asked = dict(panels or {})
    own = _healthy(gate, study, panel, asked, candidate, section, minimums, arm=arm, origin="oracle")
    if null is None:
        check, control = None, _Healthy()
    else:
        control = _healthy(gate, study, panel, asked, null, section, minimums, arm=null_arm, origin="null oracle")
        check = null_check(control.objections, figure(control.numbers))
    return conclude(
        gate,
        figure=figure(own.numbers),
        objections=own.objections,
        null=check,
        null_objections=None if check is None else control.objections,
        poison=complete_poison(_poison(gate, study, candidate, study.waived(arm, gate)), faults),
        details={
            "ranks": own.numbers,
            "conditions": dict(own.conditions),
            "waived": own.waived,
            "null_ranks": control.numbers,
            "null_waived": control.waived,
        },
    )


def _healthy(
    gate: str,
    study: Study,
    panel: Panel,
    panels: Mapping[str, Panel],
    document: object,
    section: Section,
    minimums: Mapping[str, int],
    *,
    arm: str,
    origin: str,
) -> _Healthy:
    """Rules 1 to 9 over one document."""
    state = _Healthy(waived=dict.fromkeys(study.waived(arm, gate), 0))
    result = state.objections
    if document is None:
        result.gap(1, f"{origin}: the document is missing")
        return state
    seen: set[str] = set()
    with result.reading(1):
        outer = Table(document, origin=origin, error=EvidenceError, known=_KNOWN)
        if outer.integer("schema") != SCHEMA:
            outer.fail("schema", str(outer.integer("schema")), str(SCHEMA))
        for place, value in enumerate(_records(outer, "passes")):
            with result.reading(1):
                one = Table(value, origin=f"{origin}, passes[{place}]", error=EvidenceError, known=_PASS)
                name = one.choice("name", study.oracle.passes)
                if name in seen:
                    one.fail("name", f"'{name}' a second time", "each pass once")
                seen.add(name)
                _pass(state, study, panels.get(name, panel), one, section, name=name, where=f"{origin}, pass {name}")
    for name in study.oracle.passes:
        if name not in seen:
            result.gap(1, f"{origin}: no pass '{name}', expected {', '.join(study.oracle.passes)}")
    for name in study.oracle.conditions:
        if not state.conditions[name] > 0:
            result.gap(8, f"{origin}: the condition '{name}' was met 0 times, expected at least once")
    for rank in range(study.engine.tensor_parallel_size):
        for key, minimum in minimums.items():
            total = sum(_whole(numbers.get(key)) for numbers in state.numbers if numbers.get("rank") == rank)
            if not total >= minimum:
                result.gap(4, f"{origin}, rank {rank}: {key} is {total} over all passes, expected at least {minimum}")
    # Where evidence is missing nobody knows whether the waiver would have been needed.
    if not result.missing:
        for kind, count in state.waived.items():
            if count == 0:
                result.find(9, f"{origin}: the waiver of '{kind}' for '{arm}' was not needed, expected its finding")
    return state


def _pass(state: _Healthy, study: Study, panel: Panel, one: Table, section: Section, *, name: str, where: str) -> None:
    result = state.objections
    needed: int | None = None
    with result.reading(7):
        needed = _wave(result, one, panel, where, rotation=study.oracle.rotation if name == ROTATED else None)
    records = _records(one, "records")
    expected = study.engine.tensor_parallel_size
    if len(records) != expected:
        result.gap(1, f"{where}: found {len(records)} records, expected {expected}, one per rank")
    for place, record in enumerate(records):
        with result.reading(1):
            spot = f"{where}, rank {place}"
            rank = Table(record, origin=spot, error=EvidenceError, known=None)
            if rank.integer("rank", minimum=0) != place:
                rank.fail("rank", str(rank.integer("rank")), str(place))
            rank.integer("steps", minimum=1)
            if rank.boolean("probe") is not (name == PROBE):
                rank.fail("probe", str(rank.boolean("probe")).lower(), f"{str(name == PROBE).lower()} in pass {name}")
            scheduled: int | None = None
            with result.reading(7):
                scheduled = _scheduled(result, rank, spot, needed)
            with result.reading(2):
                _row_map(result, rank, spot, scheduled)
            with result.reading(8):
                conditions = rank.table("conditions", known=None)
                for condition in study.oracle.conditions:
                    state.conditions[condition] += conditions.integer(condition, minimum=0)
            with result.reading(3):
                if rank.integer("layers", minimum=0) != study.model.layers:
                    result.gap(3, f"{spot}: {rank.integer('layers')} layers were seen, expected {study.model.layers}")
                part = Part(
                    study=study,
                    name=name,
                    rank=rank,
                    where=spot,
                    needed=needed,
                    scheduled=scheduled,
                    waived=state.waived,
                )
                state.numbers.append({"pass": name, "rank": place, **section(result, part)})


def _scheduled(result: Objections, rank: Table, where: str, needed: int | None) -> int | None:
    """How many rows this rank must have seen; objects where it says another number."""
    rows = rank.table("rows", known=None)
    prefix, recomputed = rows.integer("prefix", minimum=0), rows.integer("recomputed", minimum=0)
    if needed is None:
        rows.integer("scheduled", minimum=1)
        return None
    expected = needed - prefix + recomputed
    if expected < 1:
        rows.fail("prefix", str(prefix), f"fewer than the {needed} rows that the requests need")
    complete(result, 7, rows, "scheduled", where, expected)
    return expected


def complete(result: Objections, rule: int, table: Table, key: str, where: str, expected: int | None) -> None:
    """Objects when a count is not the one that the pass's requests dictate; nothing is sampled, and 0 is nothing."""
    found = table.integer(key, minimum=0)
    if expected is not None and found != expected:
        result.gap(rule, f"{where}: {key} is {found}, expected {expected}, as many as the requests of the pass need")
    elif found < 1:
        result.gap(rule, f"{where}: {key} is {found}, expected at least 1")


def every_layer(result: Objections, part: Part, section: Table) -> None:
    """Rule 3 for a section that counts layers itself."""
    layers = section.integer("layers", minimum=0)
    if layers != part.study.model.layers:
        result.gap(3, f"{part.where}: {layers} layers were seen, expected {part.study.model.layers}")


def self_tested(result: Objections, rule: int, section: Table, where: str, what: str) -> None:
    """Objects when an oracle missed the case that it was shown to prove that it sees."""
    if section.choice("self_test", ("caught", "missed")) != "caught":
        result.gap(rule, f"{where}: {what}, expected 'caught'")


def _row_map(result: Objections, rank: Table, where: str, expected: int | None) -> None:
    rows = rank.table("row_map", known=None)
    complete(result, 2, rows, "checked", where, expected)
    self_tested(result, 2, rows, where, "the row map missed its known permutation")
    objected(result, 2, rows, f"{where}: row map")


def _wave(result: Objections, one: Table, panel: Panel, origin: str, *, rotation: int | None) -> int | None:
    """How many rows the pass needs: each prompt token once, and each generated token that was fed again."""
    asked = {item.id: item for item in panel.items}
    seen: list[str] = []
    rows, whole = 0, True
    for place, record in enumerate(_records(one, "wave")):
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
            elif not answer.token_ids:
                result.gap(7, f"{where}: request '{answer.id}' generated no token, expected at least 1")
            seen.append(answer.id)
            rows += len(answer.prompt_token_ids) + len(answer.token_ids) - 1
        whole = whole and read
    missing = [name for name in asked if name not in seen]
    if missing and whole:
        result.gap(7, f"{origin}: {len(missing)} of {len(asked)} requests have no answer, first '{missing[0]}'")
    if rotation is not None:
        order = list(asked)
        if seen == order:
            result.gap(7, f"{origin}: the requests were sent in the panel's order, expected another")
        elif whole and not missing and seen != [*order[rotation:], *order[:rotation]]:
            result.gap(7, f"{origin}: the requests were sent in another order than the panel's rotated by {rotation}")
    return rows if whole else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Findings:
    lines: tuple[str, ...]
    total: int
    kinds: Mapping[str, int]


def _findings(section: Table) -> _Findings:
    """What an oracle counted, where its counts agree with each other."""
    total, lines = section.integer("findings_total", minimum=0), section.strings("findings")
    if len(lines) > total:
        section.fail("findings_total", str(total), f"at least {len(lines)}, the findings kept")
    inner = section.table("kinds", known=None)
    kinds = {kind: inner.integer(kind, minimum=0) for kind in inner.names()}
    if sum(kinds.values()) != total:
        section.fail("kinds", f"{sum(kinds.values())} findings by kind", f"{total}, the total")
    return _Findings(lines=lines, total=total, kinds=kinds)


def objected(result: Objections, rule: int, section: Table, where: str, waived: dict[str, int] | None = None) -> int:
    """Turn what an oracle counted into objections, but for the waived kinds, which are counted into ``waived``.

    Without a waived finding these are the kept lines, and the total when more were counted than kept. A kept line does
    not say its kind, so beside waived findings each other kind is one objection with its count. Returns the number of
    findings that are not waived.
    """
    found = _findings(section)
    counts = {} if waived is None else waived
    for kind in counts:
        counts[kind] += found.kinds.get(kind, 0)
    left = {kind: count for kind, count in found.kinds.items() if count and kind not in counts}
    open_findings = sum(left.values())
    if open_findings == found.total:
        for line in found.lines:
            result.find(rule, f"{where}: {line}")
        if found.total > len(found.lines):
            result.find(rule, f"{where}: {found.total} findings, of which {len(found.lines)} are kept in words")
        return open_findings
    for kind, count in left.items():
        line = next((f"; {text}" for text in found.lines if kind in text), "")
        result.find(rule, f"{where}: {count} findings of kind '{kind}', which is not waived{line}")
    return open_findings


def _poison(gate: str, study: Study, document: object, waived: Sequence[str]) -> list[Poison]:
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
            result.append(_poisoned(gate, study, fault, table, origin, waived))
    return result


def _poisoned(gate: str, study: Study, fault: str, entry: Table, origin: str, waived: Sequence[str]) -> Poison:
    total, line = 0, ""
    try:
        records, expected = _records(entry, "records"), study.engine.tensor_parallel_size
        if len(records) != expected:
            entry.fail("records", f"{len(records)} records", f"{expected}, one per rank")
        for place, record in enumerate(records):
            where = f"{origin} '{fault}', records[{place}]"
            rank = Table(record, origin=where, error=EvidenceError, known=None)
            if rank.integer("rank", minimum=0) != place:
                rank.fail("rank", str(rank.integer("rank")), str(place))
            # A record of no step shows nothing of the fault.
            rank.integer("steps", minimum=1)
            rank.table("rows", known=None).integer("scheduled", minimum=1)
            scratch = Objections()
            # A kind that the healthy arm shows too is no sign of the fault.
            total += objected(scratch, 0, rank.table(gate, known=None), where, dict.fromkeys(waived, 0))
            line = line or next((text for _, text in scratch.found), "")
    except (EvidenceError, OverflowError) as error:
        return Poison(fault=fault, caught=False, figure=str(error))
    if total > 0:
        return Poison(fault=fault, caught=True, figure=f"{total} findings; {line}")
    return Poison(fault=fault, caught=False, figure=f"found 0 findings of {gate}, expected at least 1")


def total(numbers: Sequence[Mapping[str, object]], key: str) -> int:
    """The sum of one of the gate's numbers over all passes and ranks."""
    return sum(_whole(one.get(key)) for one in numbers)


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _records(table: Table, key: str) -> list[object]:
    value = table.raw(key)
    if not isinstance(value, list) or not value:
        table.fail(key, "no record", "at least one")
    return value
