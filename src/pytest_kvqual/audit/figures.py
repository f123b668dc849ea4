"""Re-derived gates: from raw records to the words and numbers of a receipt, without any code that judged.

Each function takes the study's table of its gate, the panel as its JSON says, and the records; it returns what the
receipt must say. A gate that cries wolf over its own null is ``INCONCLUSIVE``; an objection to the evidence is a
``FAIL``; a planted fault that was missed, or evidence with a gap, is ``INCONCLUSIVE``; the rest is a ``PASS``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pytest_kvqual.audit import answers, arithmetic
from pytest_kvqual.audit.answers import RecordError

Json = Mapping[str, Any]
Records = Sequence[object] | None
Reading = TypeVar("Reading")
Scores = Mapping[str, answers.Outcome]
Losses = Mapping[str, Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """What the receipt of one gate must say.

    ``outcome``, ``figure``, ``details`` and ``findings`` are the fields of its verdict. ``null``: its ``state``
    (``passed``, ``failed``, ``absent``) and ``figure``. ``poison``: for each planted fault ``fault``, ``caught`` and
    ``figure``.
    """

    outcome: str
    figure: str
    details: dict[str, Any]
    findings: list[str]
    null: dict[str, str]
    poison: list[dict[str, Any]]


def preservation(
    gate: str,
    rules: Json,
    panel: Json,
    questions: int,
    candidate: Records,
    controls: Mapping[str, Records],
    null: tuple[Records, Records] | None,
    poison: Mapping[str, Records],
    arm: str | None,
    faults: Sequence[str] = (),
) -> Derived:
    """The gate ``retrieval``, ``recall`` or ``gsm8k``.

    Args:
        gate: The gate's name.
        rules: The study's table of that name.
        panel: The panel's JSON.
        questions: The number of questions that the study says.
        candidate: The records of the arm under qualification; None where there are none.
        controls: Those of every control of the study, in its order.
        null: Two captures of one control.
        poison: Those under each planted fault.
        arm: The arm under qualification; a control of this name is left out.
        faults: The faults that must have been planted.
    """
    items = panel["items"]
    notes = _Notes()
    if questions < 1:
        notes.gap(1, f"found {questions} questions in the study, expected at least 1")
    if len(items) != questions:
        notes.gap(1, f"panel: found {len(items)} questions, expected {questions}")
    for item in items:
        if item["max_tokens"] != rules["max_tokens"]:
            notes.gap(1, f"panel '{item['id']}': found {item['max_tokens']} max_tokens, expected {rules['max_tokens']}")
    quiz = _Quiz(gate=gate, rules=rules, items=items, questions=questions)
    own = quiz.scores(notes, candidate, "candidate")
    quiz.check_kinds(notes.find, own, "candidate")
    others: dict[str, Scores] = {}
    named = [name for name in controls if name != arm]
    if not named:
        notes.gap(4, "the study has no control to compare with")
    for name in named:
        if controls[name] is None:
            notes.gap(4, f"control '{name}': found no capture, expected one")
        else:
            others[name] = quiz.control(notes, controls[name], f"control '{name}'")
    pairs: dict[str, dict[str, Any]] = {}
    for name, theirs in others.items():
        if quiz.comparable(notes, 6, questions, own, theirs, f"against '{name}'"):
            pairs[name] = pair = quiz.pair(own, theirs)
            if not pair["upper"] < rules["limit"]:
                notes.find(6, quiz.words(name, pair, "expected below"))
    null_notes, null_figure, null_details = quiz.null(null)
    seeded = [quiz.poisoned(fault, records, others) for fault, records in poison.items()]
    worst = max(pairs, key=lambda name: pairs[name]["upper"], default=None)
    read = {name: scores for name, scores in {"candidate": own, **others}.items() if scores}
    return _conclude(
        figure="no comparison" if worst is None else quiz.words(worst, pairs[worst], "<"),
        notes=notes,
        null=null_notes,
        null_figure=null_figure,
        poison=_complete(seeded, faults),
        details={
            "questions": questions,
            "limit": rules["limit"],
            "confidence": rules["confidence"],
            "floor": rules["floor"],
            "most_lost": quiz.most_lost(),
            "answers": {name: _kinds(scores) for name, scores in read.items()},
            "by_grade": {name: quiz.by_grade(scores) for name, scores in read.items()},
            "pairs": pairs,
            "null": null_details,
        },
    )


def nll(
    rules: Json,
    panel: Json,
    candidate: Records,
    controls: Mapping[str, Records],
    null: tuple[Records, Records] | None,
    poison: Mapping[str, Records],
    arm: str | None,
    waves: bool,
    faults: Sequence[str] = (),
) -> Derived:
    """The gate ``nll``; arguments as of :func:`preservation`. ``waves``: the study's schedule repeats exactly."""
    items = panel["items"]
    margin = rules["margin_nats"]
    notes = _Notes()
    if len(items) != rules["documents"]:
        notes.gap(1, f"panel: found {len(items)} documents, expected {rules['documents']}")
    for item in items:
        if len(item["targets"]) != rules["decode_steps"] + 1:
            notes.gap(
                1, f"panel '{item['id']}': found {len(item['targets'])} targets, expected {rules['decode_steps'] + 1}"
            )
    own = _losses(notes, items, candidate, "candidate")
    named = [name for name in controls if name != arm]
    if not named:
        notes.gap(5, "the study has no control to compare with")
    others = {name: _losses(notes, items, controls[name], f"control '{name}'") for name in named}
    means: dict[str, arithmetic.Mean] = {}
    differences: dict[str, dict[str, float]] = {}
    for name, theirs in others.items():
        mean = _paired(notes, 6, rules, own, theirs, f"against '{name}'")
        if mean is None:
            continue
        means[name] = mean
        differences[name] = {document: _per_token(own[document]) - _per_token(theirs[document]) for document in own}
        if not mean.upper < margin:
            notes.find(6, f"{_nats(mean, rules)}, expected below {margin:g} nats, against '{name}'")
    null_notes: _Notes | None = None
    null_figure = ""
    if null is not None:
        null_notes = _Notes()
        null_figure = _nll_null(null_notes, rules, items, null, waves)
    seeded = [_nll_poisoned(rules, items, fault, records, others) for fault, records in poison.items()]
    worst = max(means, key=lambda name: means[name].upper, default=None)
    return _conclude(
        figure="no comparison"
        if worst is None
        else f"{_nats(means[worst], rules)} < {margin:g} nats (against '{worst}')",
        notes=notes,
        null=null_notes,
        null_figure=null_figure,
        poison=_complete(seeded, faults),
        details={
            "unit": "nats per token",
            "margin": margin,
            "confidence": rules["confidence"],
            "mean_nll": {
                name: _number(math.fsum(map(_per_token, values.values())) / len(values))
                for name, values in {"candidate": own, **others}.items()
                if values
            },
            "delta": {
                name: {
                    "documents": mean.count,
                    "mean": mean.mean,
                    "deviation": mean.deviation,
                    "error": mean.error,
                    "quantile": mean.quantile,
                    "upper": mean.upper,
                    "by_document": differences[name],
                }
                for name, mean in means.items()
            },
        },
    )


def parity(
    rules: Json,
    panel: Json,
    http: Records,
    reference: Records,
    null: tuple[Records, Records] | None,
    poison: Mapping[str, Records],
    faults: Sequence[str] = (),
) -> Derived:
    """The gate ``parity``.

    Args:
        rules: The study's table of that name.
        panel: The panel's JSON.
        http: The arm's records, in the panel's order.
        reference: Those of the in-process reference, forward and reversed.
        null: The control's own captures, forward and reversed.
        poison: The arm's records under each planted fault.
        faults: The faults that must have been planted.
    """
    items = panel["items"]
    notes = _Notes()
    if len(items) != rules["prompts"]:
        notes.gap(1, f"panel: found {len(items)} prompts, expected {rules['prompts']}")
    for item in items:
        if item["max_tokens"] != rules["max_tokens"]:
            notes.gap(1, f"panel '{item['id']}': found {item['max_tokens']} tokens, expected {rules['max_tokens']}")
    served = _serial(notes, 2, items, http, "http", "forward")
    references = {order: _reference(notes, items, reference, order) for order in ("forward", "reverse")}
    differing = {order: _differ(notes, 4, items, served, references[order], order) for order in references}
    null_notes: _Notes | None = None
    null_figure = ""
    if null is not None:
        null_notes = _Notes()
        forward = _serial(null_notes, 5, items, null[0], "null forward", "forward")
        reverse = _serial(null_notes, 5, items, null[1], "null reverse", "reverse")
        changed = _differ(null_notes, 5, items, reverse, forward, "the control's forward capture")
        null_figure = f"{len(items)} prompts, {changed} differ"
    seeded = [_parity_poisoned(items, fault, records, references["forward"]) for fault, records in poison.items()]
    return _conclude(
        figure=f"{len(served)} prompts, 0 differ in both orders",
        notes=notes,
        null=null_notes,
        null_figure=null_figure,
        poison=[*_complete(seeded, faults), *_damaged_copies(items, references["forward"])],
        details={
            "prompts": len(items),
            "served": len(served),
            "tokens": sum(len(answer.tokens) for answer in served.values()),
            "differing": differing,
        },
    )


# ---- what all gates share


@dataclass(kw_only=True, slots=True)
class _Notes:
    """Objections to the evidence and gaps in it, each a line that begins with its rule."""

    objections: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)

    def find(self, rule: int, text: str) -> None:
        self.objections.append(f"rule {rule}: {text}")

    def gap(self, rule: int, text: str) -> None:
        self.gaps.append(f"rule {rule}: {text}")

    def lines(self) -> list[str]:
        return self.objections + self.gaps


def _conclude(
    *,
    figure: str,
    notes: _Notes,
    null: _Notes | None,
    null_figure: str,
    poison: list[dict[str, Any]],
    details: dict[str, Any],
) -> Derived:
    lines = notes.lines()
    if null is None:
        broken = ["null: no evidence of the control against itself"]
        null_field = {"state": "absent", "figure": ""}
    else:
        broken = [f"null: {line}" for line in null.lines()]
        null_field = {
            "state": "failed" if broken else "passed",
            "figure": null.lines()[0] if broken else null_figure,
        }
    missed = [
        f"poison: '{fault['fault']}' was not caught: {fault['figure']}" for fault in poison if not fault["caught"]
    ]
    if not poison:
        missed = ["poison: no seeded fault was run against this gate"]
    if broken:
        outcome, findings = "INCONCLUSIVE", broken + missed + lines
    elif notes.objections:
        outcome, findings = "FAIL", lines + missed
    elif missed or lines:
        outcome, findings = "INCONCLUSIVE", missed + lines
    else:
        outcome, findings = "PASS", []
    return Derived(
        outcome=outcome,
        figure=findings[0] if findings else figure,
        details=details,
        findings=findings,
        null=null_field,
        poison=poison,
    )


def _complete(seeded: Sequence[dict[str, Any]], faults: Sequence[str]) -> list[dict[str, Any]]:
    there = {fault["fault"] for fault in seeded}
    absent = [name for name in Counter(faults) if name not in there]
    return [*seeded, *(_fault(name, False, "it was not run") for name in absent)]


def _fault(name: str, caught: bool, figure: str) -> dict[str, Any]:
    return {"fault": name, "caught": caught, "figure": figure}


def _matched(
    notes: _Notes, rule: int, items: Sequence[Json], records: object, origin: str, only: int | None = None
) -> Iterator[tuple[Json, object, str]]:
    """Each item with exactly one record, in the records' order; everything else is a gap. ``only``: so many suffice."""
    if records is None:
        notes.gap(rule, f"{origin}: the records are missing")
        return
    if not isinstance(records, list | tuple):
        notes.gap(rule, f"{origin}: found {type(records).__name__}, expected a list of records")
        return
    known = {item["id"]: item for item in items}
    names = [record.get("id") if isinstance(record, Mapping) else None for record in records]
    counts = Counter(name for name in names if isinstance(name, str) and name in known)
    seen: set[str] = set()
    for place, name in enumerate(names):
        where = f"{origin}[{place}]"
        if not isinstance(name, str):
            notes.gap(rule, f"{where}: found no id, expected one of the panel")
        elif name not in known:
            notes.gap(rule, f"{where}: found the id '{name}', expected one of the panel's {len(known)}")
        elif name in seen:
            notes.gap(rule, f"{where}: found '{name}' twice, expected once")
        else:
            seen.add(name)
    if only is None:
        for item in items:
            if item["id"] not in seen:
                notes.gap(rule, f"{origin}: no record of '{item['id']}'")
    elif len(counts) != only:
        notes.gap(rule, f"{origin}: found {len(counts)} records, expected {only}")
    for place, name in enumerate(names):
        if isinstance(name, str) and counts[name] == 1:
            yield known[name], records[place], f"{origin}[{place}]"


def _reading(notes: _Notes, rule: int, read: Callable[[], Reading]) -> Reading | None:
    """What ``read`` gives; None, and a gap, where the record cannot be read."""
    try:
        return read()
    except RecordError as error:
        notes.gap(rule, str(error))
    return None


def _in_order(items: Sequence[Json], values: Mapping[str, Reading]) -> dict[str, Reading]:
    return {item["id"]: values[item["id"]] for item in items if item["id"] in values}


# ---- nll


def _losses(notes: _Notes, items: Sequence[Json], records: object, origin: str, only: int | None = None) -> Losses:
    found: dict[str, Sequence[float]] = {}
    for item, record, where in _matched(notes, 2, items, records, origin, only):
        losses = _reading(notes, 3, lambda item=item, record=record, where=where: answers.losses(record, item, where))  # type: ignore[misc]  # the loop's own values
        if losses is not None:
            found[item["id"]] = losses
    return _in_order(items, found)


def _per_token(losses: Sequence[float]) -> float:
    return math.fsum(losses) / len(losses) if losses else math.nan


def _paired(
    notes: _Notes, rule: int, rules: Json, found: Losses, expected: Losses, against: str
) -> arithmetic.Mean | None:
    if not found or found.keys() != expected.keys():
        notes.gap(rule, f"{against}: found {len(found)} and {len(expected)} documents, expected the same ones")
        return None
    differences = [_per_token(losses) - _per_token(expected[document]) for document, losses in found.items()]
    try:
        return arithmetic.paired_mean(differences, rules["confidence"])
    except ValueError as error:
        notes.gap(rule, f"{against}: {error}")
        return None


def _nats(mean: arithmetic.Mean, rules: Json) -> str:
    return f"ΔNLL {mean.mean:+.6f}, {100 * rules['confidence']:g} % upper bound {mean.upper:+.6f}"


def _nll_null(notes: _Notes, rules: Json, items: Sequence[Json], null: tuple[Records, Records], waves: bool) -> str:
    margin = rules["margin_nats"]
    first, second = (_losses(notes, items, records, f"null[{place}]") for place, records in enumerate(null))
    both = [_paired(notes, 7, rules, one, other, "null") for one, other in ((first, second), (second, first))]
    for mean in both:
        if mean is not None and not mean.upper < margin:
            notes.find(7, f"{_nats(mean, rules)}, expected below {margin:g} nats")
    for document in first if waves else ():
        if document in second and first[document] != second[document]:
            pairs = zip(first[document], second[document], strict=False)
            step = next((place for place, (one, other) in enumerate(pairs, 1) if one != other), 1)
            notes.find(7, f"document '{document}': the losses of two waves differ, first at decode step {step}")
    return next((_nats(mean, rules) for mean in both if mean is not None), "")


def _nll_poisoned(
    rules: Json, items: Sequence[Json], fault: str, records: object, others: Mapping[str, Losses]
) -> dict[str, Any]:
    notes = _Notes()
    found = _losses(notes, items, records, f"poison '{fault}'", rules["poison_documents"])
    caught, lines = "", []
    for name, losses in others.items():
        part = {document: losses[document] for document in found if document in losses}
        mean = _paired(notes, 8, rules, found, part, f"poison '{fault}' against '{name}'")
        if mean is None:
            continue
        lines.append(f"{_nats(mean, rules)} against '{name}'")
        if not (mean.upper < rules["margin_nats"] or mean.mean < rules["margin_nats"]):
            caught = caught or lines[-1]
    if notes.lines():
        return _fault(fault, False, notes.lines()[0])
    return _fault(fault, bool(caught), caught or "; ".join(lines) or "no control to compare with")


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


# ---- parity


def _serial(
    notes: _Notes,
    rule: int,
    items: Sequence[Json],
    records: object,
    origin: str,
    order: str,
    *,
    reference: bool = False,
) -> dict[str, answers.Serial]:
    places = {item["id"]: place for place, item in enumerate(items)}
    matched = list(_matched(notes, rule, items, records, origin))
    asked = [places[item["id"]] for item, _, _ in matched]
    wanted = list(range(len(items)))
    if sorted(asked) == wanted and asked != (wanted if order == "forward" else wanted[::-1]):
        notes.gap(rule, f"{origin}: found the records in another order than the panel's ({order})")
    found: dict[str, answers.Serial] = {}
    for item, record, where in matched:
        answer = _reading(
            notes,
            rule,
            lambda item=item, record=record, where=where: answers.serial(record, item, where, reference=reference),  # type: ignore[misc]  # the loop's own values
        )
        if answer is None:
            continue
        place = places[item["id"]]
        if answer.order != order:
            notes.gap(rule, f"{where}: found the order '{answer.order}', expected '{order}'")
        elif answer.index != place:
            notes.gap(rule, f"{where}: found the index {answer.index}, expected {place}, its panel's")
        else:
            found[item["id"]] = answer
    return found


def _reference(notes: _Notes, items: Sequence[Json], records: object, order: str) -> dict[str, answers.Serial]:
    if not isinstance(records, list | tuple):
        notes.gap(3, f"reference {order}: {'the records are missing' if records is None else 'found no list'}")
        return {}
    orders = [record.get("order") if isinstance(record, Mapping) else None for record in records]
    if order == "forward":
        for place, stated in enumerate(orders):
            if stated not in ("forward", "reverse"):
                notes.gap(3, f"reference[{place}]: found no known order, expected one of forward, reverse")
    chosen = [record for record, stated in zip(records, orders, strict=True) if stated == order]
    return _serial(notes, 3, items, chosen, f"reference {order}", order, reference=True)


def _differ(
    notes: _Notes,
    rule: int,
    items: Sequence[Json],
    found: Mapping[str, answers.Serial],
    expected: Mapping[str, answers.Serial],
    against: str,
) -> int:
    """How many prompts differ, or have no answer on one side; a line for each."""
    count = 0
    for name in (item["id"] for item in items):
        one, other = found.get(name), expected.get(name)
        if one is None or other is None:
            notes.gap(rule, f"prompt '{name}': no answer to compare ({against})")
        elif one.tokens != other.tokens:
            notes.find(rule, f"prompt '{name}': {_where_differ(one.tokens, other.tokens)} ({against})")
        elif one.finish != other.finish:
            notes.find(
                rule, f"prompt '{name}': found finish_reason '{one.finish}', expected '{other.finish}' ({against})"
            )
        else:
            continue
        count += 1
    return count


def _where_differ(found: Sequence[int], expected: Sequence[int]) -> str:
    shorter = min(len(found), len(expected))
    place = next((place for place in range(shorter) if found[place] != expected[place]), None)
    if place is None:
        return f"found {len(found)} tokens, expected {len(expected)}"
    return f"found token {found[place]} at position {place}, expected {expected[place]}"


def _parity_poisoned(
    items: Sequence[Json], fault: str, records: object, reference: Mapping[str, answers.Serial]
) -> dict[str, Any]:
    notes = _Notes()
    only = len(records) if isinstance(records, list | tuple) else 1
    matched = list(_matched(notes, 6, items, records, f"poison '{fault}'", only))
    lines = []
    for item, record, where in matched:
        answer = _reading(
            notes,
            6,
            lambda item=item, record=record, where=where: answers.serial(record, item, where),  # type: ignore[misc]  # the loop's own values
        )
        if answer is None:
            continue
        expected = reference.get(item["id"])
        if expected is None:
            notes.gap(6, f"{where}: no reference for '{item['id']}'")
        elif answer.tokens != expected.tokens:
            lines.append(f"'{item['id']}': {_where_differ(answer.tokens, expected.tokens)}")
    if notes.lines() or not matched:
        return _fault(fault, False, next(iter(notes.lines()), "found no record"))
    if lines:
        return _fault(fault, True, f"{len(lines)} of {len(matched)} prompts differ; {lines[0]}")
    return _fault(fault, False, f"found 0 of {len(matched)} prompts that differ")


def _damaged_copies(items: Sequence[Json], reference: Mapping[str, answers.Serial]) -> list[dict[str, Any]]:
    """The comparison over three damaged copies of the reference, each of which it must object to."""
    whole = _Notes()
    _differ(whole, 7, items, reference, reference, "itself")
    names = list(reference)
    altered, swapped = dict(reference), dict(reference)
    if names:
        first = reference[names[0]]
        altered[names[0]] = answers.Serial(
            first.id, first.order, first.index, (*first.tokens[:-1], first.tokens[-1] + 1), first.finish
        )
        other = next((name for name in names if reference[name].tokens != first.tokens), None)
        if other is not None:
            swapped[names[0]], swapped[other] = reference[other], first
    copies = {
        "record-one-token-altered": altered,
        "record-two-prompts-swapped": swapped,
        "record-missing": {name: reference[name] for name in names[1:]},
    }
    result = []
    for fault, copy in copies.items():
        notes = _Notes()
        _differ(notes, 7, items, copy, reference, "damaged")
        if whole.lines():
            result.append(_fault(fault, False, whole.lines()[0]))
        elif notes.lines():
            result.append(_fault(fault, True, notes.lines()[0]))
        else:
            result.append(_fault(fault, False, "found no difference, expected one"))
    return result


# ---- preservation


@dataclass(frozen=True, kw_only=True, slots=True)
class _Quiz:
    """The questions of one scored task and what is expected of every capture of them."""

    gate: str
    rules: Json
    items: Sequence[Json]
    questions: int

    def scores(self, notes: _Notes, records: object, origin: str, items: Sequence[Json] | None = None) -> Scores:
        """What became of each question that can be read, in the panel's order."""
        asked = self.items if items is None else items
        found: dict[str, answers.Outcome] = {}
        for item, record, where in _matched(notes, 2, asked, records, origin):
            try:
                found[item["id"]] = answers.outcome(self.gate, record, item, self.rules, where)
            except RecordError as error:
                notes.gap(2, str(error))
        return _in_order(asked, found)

    def check_kinds(self, objection: Callable[[int, str], None], scores: Scores, origin: str) -> None:
        """Rule 3, over a whole capture: how many answers may be empty, truncated or failed."""
        if len(scores) != self.questions:
            return
        for kind in (answers.EMPTY, answers.TRUNCATED, answers.ERROR):
            share = self.rules[f"{kind}_share"]
            names = [name for name, score in scores.items() if score.kind == kind]
            if names and not len(names) / self.questions <= share:
                objection(
                    3,
                    f"{origin}: found {len(names)} of {self.questions} answers {kind}, first '{names[0]}', expected at "
                    f"most {_percent(share)}",
                )

    def control(self, notes: _Notes, records: object, origin: str) -> Scores:
        """The answers of a control, under rules 3 and 5."""
        scores = self.scores(notes, records, origin)
        self.check_kinds(notes.gap, scores, origin)
        right = _kinds(scores)["right"]
        floor = self.rules["floor"]
        if scores and len(scores) == self.questions and not right / self.questions >= floor:
            notes.gap(
                5,
                f"{origin}: found {right} of {self.questions} answers right, expected at least {_percent(floor)}: it "
                "cannot show a loss",
            )
        return scores

    def comparable(self, notes: _Notes, rule: int, total: int, one: Scores, other: Scores, against: str) -> bool:
        """Whether both sides have all of the same questions; a gap where they have not."""
        if total >= 1 and len(one) == total and one.keys() == other.keys():
            return True
        notes.gap(rule, f"{against}: found {len(one)} and {len(other)} questions, expected the same {total}")
        return False

    def pair(self, own: Scores, theirs: Scores) -> dict[str, Any]:
        """The numbers of one comparison over all questions."""
        lost, gained = _lost(own, theirs), _lost(theirs, own)
        lower, upper = arithmetic.net_interval(len(lost), len(gained), self.questions, self.rules["confidence"])
        return {
            "lost": lost,
            "gained": gained,
            "upper": arithmetic.loss_upper(len(lost), self.questions, self.rules["confidence"]),
            "net": len(gained) - len(lost),
            "net_lower": lower,
            "net_upper": upper,
            "tokens_differ": _tokens_differ(own, theirs),
        }

    def words(self, name: str, pair: Json, relation: str) -> str:
        """The line of one comparison; ``relation`` to the limit is ``<`` or ``expected below``."""
        most = self.most_lost()
        net, lower, upper = (f"{100 * pair[key] / self.questions:+.3f}" for key in ("net", "net_lower", "net_upper"))
        return (
            f"lost {len(pair['lost'])}, gained {len(pair['gained'])} of {self.questions} against '{name}': "
            f"{_percent(self.rules['confidence'])} upper bound {_exactly(pair['upper'])}"
            f"{', ' if relation[0].isalpha() else ' '}{relation} {_percent(self.rules['limit'])} "
            f"({'no count' if most is None else f'{most} lost'} would pass); net {net} points [{lower}, {upper}]"
        )

    def most_lost(self) -> int | None:
        """The largest number of losses that would pass."""
        if self.questions < 1:
            return None
        return arithmetic.most_lost(self.questions, self.rules["limit"], self.rules["confidence"])

    def by_grade(self, scores: Scores) -> dict[str, list[int]]:
        """Of each grade: right answers, and answers."""
        asked = [(item.get("grade", ""), scores[item["id"]].kind) for item in self.items if item["id"] in scores]
        total = Counter(grade for grade, _ in asked)
        right = Counter(grade for grade, kind in asked if kind == answers.RIGHT)
        return {grade: [right[grade], count] for grade, count in total.items()}

    def null(self, null: tuple[Records, Records] | None) -> tuple[_Notes | None, str, dict[str, Any]]:
        """Rule 7: a control against itself."""
        if null is None:
            return None, "", {}
        notes = _Notes()
        first, second = (self.control(notes, records, f"null[{place}]") for place, records in enumerate(null))
        if not self.comparable(notes, 7, self.questions, second, first, "null"):
            return notes, "", {}
        lost, gained = _lost(second, first), _lost(first, second)
        confidence, limit = self.rules["confidence"], self.rules["limit"]
        upper, back = (arithmetic.loss_upper(len(names), self.questions, confidence) for names in (lost, gained))
        words = (
            f"lost {len(lost)}, gained {len(gained)} of {self.questions} against itself: {_percent(confidence)} upper "
            f"bounds {_exactly(upper)} and {_exactly(back)}"
        )
        if not max(upper, back) < limit:
            subject = "a run whose control differs from itself this much"
            if self.most_lost() is None:
                subject = f"{self.questions} questions"
            notes.find(7, f"{words}, expected below {_percent(limit)}: {subject} can prove nothing at this limit")
        details = {
            "lost": lost,
            "gained": gained,
            "upper": upper,
            "upper_back": back,
            "tokens_differ": _tokens_differ(second, first),
        }
        return notes, f"{words} < {_percent(limit)}", details

    def poisoned(self, fault: str, records: object, others: Mapping[str, Scores]) -> dict[str, Any]:
        """Rule 8: a planted fault must lose more than the limit, by the lower bound."""
        total, limit = self.rules["poison_questions"], self.rules["limit"]
        notes = _Notes()
        origin = f"poison '{fault}'"
        scores = self.scores(notes, records, origin, self.items[:total])
        failed = _kinds(scores)["error"]
        if failed and not failed / total <= self.rules["error_share"]:
            notes.gap(
                8,
                f"{origin}: found {failed} of {total} requests failed, expected at most "
                f"{_percent(self.rules['error_share'])}",
            )
        caught, lines = "", []
        for name, theirs in others.items():
            part = {question: theirs[question] for question in scores if question in theirs}
            if not self.comparable(notes, 8, total, scores, part, f"{origin} against '{name}'"):
                continue
            lost = len(_lost(scores, part))
            lower = arithmetic.loss_lower(lost, total, self.rules["confidence"])
            words = (
                f"lost {lost} of {total} against '{name}': {_percent(self.rules['confidence'])} lower bound "
                f"{_exactly(lower)}"
            )
            if lower > limit:
                caught = caught or f"{words} > {_percent(limit)}"
            lines.append(f"{words}, expected above {_percent(limit)}")
        if notes.lines():
            return _fault(fault, False, notes.lines()[0])
        return _fault(fault, bool(caught), caught or "; ".join(lines) or "no control to compare with")


def _lost(own: Scores, theirs: Scores) -> list[str]:
    """The questions that ``theirs`` has right and ``own`` has not, in the order of ``theirs``."""
    return [name for name, score in theirs.items() if score.kind == answers.RIGHT and own[name].kind != answers.RIGHT]


def _tokens_differ(one: Scores, other: Scores) -> int:
    return sum(score.tokens != other[name].tokens for name, score in one.items())


def _kinds(scores: Scores) -> dict[str, int]:
    counts = Counter(score.kind for score in scores.values())
    return {
        **{kind: counts[kind] for kind in answers.KINDS},
        "lenient": sum(score.lenient for score in scores.values()),
    }


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _exactly(share: float) -> str:
    return f"{100 * share:.3f} %"
