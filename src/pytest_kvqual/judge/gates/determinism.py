"""Gate 6, determinism: the answers follow the requests, not their order, by the policy that the study froze.

The evidence of one arm is three files::

    determinism.jsonl         capture records, each with "run": original | rotated | original-again | natural
    determinism-inputs.json   {"schema": 1, "runs": {RUN: [RANK, ...]}}
    order-comparison.json     as in :mod:`pytest_kvqual.tasks.orders`
    RANK                      {"rank": 0, "steps": n, "digests": [sha256 per step]}

A digest is that of a step's graph inputs: tokens, block table, sequence lengths, query starts and slots. The rules:

1. The runs ``original``, ``rotated`` and ``original-again`` each have one record per request of the panel, answered
   under status 200, the prompt come back as sent. The run ``natural`` may be there, as whole; no other may.
2. ``original`` and ``original-again`` were sent in the panel's order, ``rotated`` in another one.
3. The policy. ``order-invariant``: the tokens of all three runs are equal. ``rotation-diagnostic``: those of
   ``original`` and ``original-again`` are equal; how ``rotated`` differs is reported. ``natural`` is reported only.
4. The graph inputs of each of the three runs are there for each rank, of as many ranks as
   ``engine.tensor_parallel_size``, in order, with one digest per step and at least 2 steps. Within a run not all
   digests are equal, and the digests of ``rotated`` are not those of ``original``.
5. The stored comparison is the one that follows from the records.
6. Null: the control's own evidence keeps rules 1 to 5.
7. Poison: the records captured under each planted fault, of any requests of the panel in all three runs, break rule 3.
   Every fault of ``faults`` was run.

A receipt of this gate that says ``FAIL`` stays, whatever is decided later under another policy: the caller names them,
and each verdict repeats the names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_kvqual._decode import Table
from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.judge.gates._conclude import Objections, complete_poison, conclude, null_check
from pytest_kvqual.judge.gates._records import Item, Panel, Record, by_item
from pytest_kvqual.judge.verdict import Outcome, Poison, Verdict
from pytest_kvqual.study.model import Study
from pytest_kvqual.tasks import orders
from pytest_kvqual.tasks.orders import AGAIN, NATURAL, ORIGINAL, REQUIRED, ROTATED, RUNS
from pytest_kvqual.tasks.parity import served_output

GATE = "determinism"
SCHEMA = 1
_DIGEST = re.compile(r"[0-9a-f]{64}")

Tokens = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One arm's evidence, as it was read; None where a file is missing."""

    records: object
    inputs: object
    comparison: object


def judge(
    study: Study,
    panel: Panel,
    *,
    candidate: Evidence | None,
    null: Evidence | None,
    poison: Mapping[str, Sequence[Record]],
    faults: Sequence[str] = (),
    earlier_failures: Sequence[str] = (),
) -> Verdict:
    """Judge the determinism of one arm.

    Args:
        study: The study; its policy and its ranks are what is expected.
        panel: The requests of each run, in the frozen order.
        candidate: The arm's evidence; None where it has none.
        null: The control's own; None where it has none.
        poison: The records captured under each planted fault, by its name.
        faults: The names of the faults that must be among them.
        earlier_failures: The names of this gate's receipts that say FAIL, of any policy. They stay what they are.
    """
    own, compared = _check(study, panel, candidate, origin="determinism")
    null_objections, check, null_compared = None, None, dict[str, object]()
    if null is not None:
        null_objections, null_compared = _check(study, panel, null, origin="null determinism")
        check = null_check(null_objections, _figure(null_compared))
    earlier = tuple(earlier_failures)
    after = f"; earlier FAIL: {', '.join(earlier)}" if earlier else ""
    verdict = conclude(
        GATE,
        figure=_figure(compared) + after,
        objections=own,
        null=check,
        null_objections=null_objections,
        poison=complete_poison([_poisoned(study, panel, *item) for item in poison.items()], faults),
        details={
            "policy": study.determinism,
            "comparison": compared,
            "null_comparison": null_compared,
            "earlier_failures": list(earlier),
        },
    )
    if verdict.outcome is Outcome.PASS or not earlier:
        return verdict
    return replace(verdict, findings=(*verdict.findings, f"earlier FAIL: {', '.join(earlier)}"))


def _check(
    study: Study, panel: Panel, evidence: Evidence | None, *, origin: str
) -> tuple[Objections, dict[str, object]]:
    """Rules 1 to 5 over one arm's evidence, and the comparison that follows from its records."""
    result = Objections()
    if evidence is None:
        result.gap(1, f"{origin}: the evidence is missing")
        return result, {}
    if not panel.items:
        result.gap(1, f"{origin}: the panel has no request, expected at least 1")
    runs = _runs(result, panel, evidence.records, origin=origin)
    compared = orders.comparison(study.determinism, runs)
    _policy(result, study, runs, origin)
    with result.reading(4):
        _inputs(result, study, evidence.inputs, origin)
    if evidence.comparison is None:
        result.gap(5, f"{origin}: the stored comparison is missing")
    elif not _same(evidence.comparison, compared):
        # Over records that are not whole nobody can say what it should be.
        object_to = result.gap if result.missing else result.find
        object_to(5, f"{origin}: the stored comparison is not the one that follows from the records")
    return result, compared


def _runs(result: Objections, panel: Panel, records: object, *, origin: str, part: bool = False) -> dict[str, Tokens]:
    """The tokens of each run that is there (rules 1 and 2); ``part``: of the same requests in each, whichever."""
    if not isinstance(records, list | tuple):
        result.gap(1, f"{origin}: {'the records are missing' if records is None else 'found no list of records'}")
        return {}
    split: dict[str, list[Record]] = {}
    for place, record in enumerate(records):
        run = record.get("run") if isinstance(record, Mapping) else None
        if not isinstance(run, str) or run not in RUNS:
            result.gap(1, f"{origin}[{place}]: found no known run, expected one of {', '.join(RUNS)}")
            continue
        split.setdefault(run, []).append({key: value for key, value in record.items() if key != "run"})
    found: dict[str, Tokens] = {}
    for run in RUNS:
        if run in split:
            found[run] = _run(result, panel, split[run], run, origin=f"{origin} {run}", part=part)
        elif run != NATURAL:
            result.gap(1, f"{origin}: no record of the run '{run}'")
    if part and len({frozenset(tokens) for tokens in found.values()}) > 1:
        result.gap(1, f"{origin}: found runs of different requests, expected the same in each")
    return found


def _run(result: Objections, panel: Panel, records: Sequence[Record], run: str, *, origin: str, part: bool) -> Tokens:
    tokens: Tokens = {}
    places = {item.id: place for place, item in enumerate(panel.items)}
    entries = by_item(result, 1, panel, records, origin=origin, only=len(records) if part else None)
    for item, record, where in entries:
        with result.reading(1):
            tokens[item.id] = _output(item, record, where, places[item.id])
    sent = [item.id for item, _, _ in entries]
    frozen = sorted(sent, key=places.__getitem__)
    if run in (ORIGINAL, AGAIN) and sent != frozen:
        result.gap(2, f"{origin}: the requests were sent in another order than the panel's")
    # One request has one order only.
    if run == ROTATED and sent == frozen and entries:
        result.gap(2, f"{origin}: the requests were sent in the panel's order, expected another")
    return tokens


def _output(item: Item, record: Record, where: str, place: int) -> tuple[int, ...]:
    output = served_output(record, origin=where, prompt=item.prompt, max_tokens=item.max_tokens)
    if output.index != place:
        raise EvidenceError(f"{where}: found the index {output.index}, expected {place}, its panel's")
    return output.token_ids


def _policy(result: Objections, study: Study, runs: Mapping[str, Tokens], origin: str) -> None:
    """Rule 3; a run that is not whole is compared in what it has, and its lack is rule 1's."""
    equal = REQUIRED[1:] if study.determinism == "order-invariant" else (AGAIN,)
    for name in equal:
        if ORIGINAL not in runs or name not in runs:
            continue
        shared = [request for request in runs[ORIGINAL] if request in runs[name]]
        if not shared:
            result.gap(3, f"{origin}: 0 requests to compare between {ORIGINAL} and {name}, expected at least 1")
        differing = [request for request in shared if runs[ORIGINAL][request] != runs[name][request]]
        if differing:
            one, other = runs[ORIGINAL][differing[0]], runs[name][differing[0]]
            result.find(
                3,
                f"{origin}: {len(differing)} of {len(shared)} requests answered otherwise in {name}, first "
                f"'{differing[0]}': {_difference(other, one)}",
            )


def _difference(found: Sequence[int], expected: Sequence[int]) -> str:
    for position, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            return f"found token {one} at position {position}, expected {other}"
    return f"found {len(found)} tokens, expected {len(expected)}"


def _inputs(result: Objections, study: Study, document: object, origin: str) -> None:
    """Rule 4."""
    if document is None:
        raise EvidenceError(f"{origin}: the graph inputs are missing")
    outer = Table(document, origin=f"{origin} inputs", error=EvidenceError, known=("schema", "runs"))
    if outer.integer("schema") != SCHEMA:
        outer.fail("schema", str(outer.integer("schema")), str(SCHEMA))
    runs = outer.table("runs", known=RUNS)
    digests = {}
    for name in REQUIRED:
        with result.reading(4):
            digests[name] = _digests(result, study, runs, name, f"{origin} inputs")
    for rank, (one, other) in enumerate(zip(digests.get(ORIGINAL, ()), digests.get(ROTATED, ()), strict=False)):
        if one and one == other:
            result.find(4, f"{origin} inputs, rank {rank}: the rotated order did not change the graph inputs")


def _digests(result: Objections, study: Study, runs: Table, name: str, origin: str) -> list[tuple[str, ...]]:
    values, expected = runs.raw(name), study.engine.tensor_parallel_size
    if not isinstance(values, list) or len(values) != expected:
        count = len(values) if isinstance(values, list) else "no list of"
        runs.fail(name, f"{count} ranks", str(expected))
    ranks: list[tuple[str, ...]] = []
    for place, value in enumerate(values):
        where = f"{origin}, {name}, rank {place}"
        digests: tuple[str, ...] = ()
        with result.reading(4):
            rank = Table(value, origin=where, error=EvidenceError, known=("rank", "steps", "digests"))
            if rank.integer("rank", minimum=0) != place:
                rank.fail("rank", str(rank.integer("rank")), str(place))
            steps = rank.integer("steps", minimum=2)
            digests = rank.strings("digests", pattern=_DIGEST.pattern, form="a SHA-256 of 64 lower-case hex digits")
            if len(digests) != steps:
                rank.fail("digests", f"{len(digests)} digests", f"{steps}, one per step")
            if len(set(digests)) == 1:
                result.find(4, f"{where}: the graph inputs of all {steps} steps are equal, expected them to change")
        ranks.append(digests)
    return ranks


def _poisoned(study: Study, panel: Panel, fault: str, records: object) -> Poison:
    """Rule 7: records that cannot be read show nothing."""
    scratch = Objections()
    runs = _runs(scratch, panel, records, origin=f"poison '{fault}'", part=True)
    if scratch:
        return Poison(fault=fault, caught=False, figure=scratch.first())
    _policy(scratch, study, runs, f"poison '{fault}'")
    line = next((text for rule, text in scratch.found if rule == 3), None)
    if line is not None:
        return Poison(fault=fault, caught=True, figure=line)
    count = len(runs.get(ORIGINAL, ()))
    return Poison(fault=fault, caught=False, figure=f"found 0 of {count} requests that break {study.determinism}")


def _same(stored: object, expected: object) -> bool:
    """Equal, and of the same types throughout: ``True`` is not 1 and 1.0 is not 1."""
    if isinstance(expected, dict):
        return (
            isinstance(stored, Mapping)
            and set(stored) == set(expected)
            and all(_same(stored[key], value) for key, value in expected.items())
        )
    if isinstance(expected, list):
        return (
            isinstance(stored, list)
            and len(stored) == len(expected)
            and all(_same(one, other) for one, other in zip(stored, expected, strict=True))
        )
    return type(stored) is type(expected) and stored == expected


def _figure(compared: Mapping[str, object]) -> str:
    pairs = compared.get("pairs")
    words = [
        f"{pair['right']} {pair['differ']} of {pair['of']}"
        for pair in (pairs if isinstance(pairs, list) else [])
        if isinstance(pair, Mapping)
    ]
    return f"requests that differ from the original: {', '.join(words) or 'none compared'}"
