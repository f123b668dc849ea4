"""Gates retrieval, recall and gsm8k: what a control answers right, the candidate may lose with a bounded probability.

The unit is the question, asked of both sides with the same prompt. A question is lost where the control is right and
the candidate is not, whatever it is instead (wrong, empty, truncated, error); it is gained the other way round. The
hypothesis tested is that the probability of a loss is at or above ``limit``. It is rejected where the one-sided
Clopper-Pearson upper bound at ``confidence`` (:func:`~pytest_kvqual.stats.bounds.preservation_upper`), over all
questions, is below the limit. Gains are reported and cancel nothing: the net change and its interval decide nothing.
The rules:

1. The panel has as many questions as the study says, each of ``max_tokens`` tokens.
2. Every capture has one record per question, readable, with the prompt come back as sent.
3. In every capture the shares of empty, truncated and failed answers are at most the study's. More of them is an
   objection to the candidate; in a control it is a gap.
4. Every control of the study was captured (the arm under judgement itself apart), and there is at least one.
5. Each control's share of right answers is at least ``floor``: a control that answers little cannot show a loss.
6. Against every control the upper bound of the loss probability is below ``limit``; a bound at it is not.
7. Null: a control captured twice keeps rules 2, 3, 5 and 6, the last in both directions.
8. Poison: under each planted fault, over the first ``poison_questions`` questions, the one-sided lower bound of the
   loss probability at ``confidence`` is above ``limit`` against at least one control, and the share of failed requests
   is at most ``error_share`` (a request that failed says nothing of the cache). Every fault of ``faults`` was run.

References:
    C. J. Clopper and E. S. Pearson, "The use of confidence or fiducial limits illustrated in the case of the binomial",
    Biometrika 26 (1934), pp. 404-413.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytest_kvqual.judge.gates._conclude import Objections, complete_poison, conclude, null_check
from pytest_kvqual.judge.gates._records import Item, Panel, Record, by_item
from pytest_kvqual.judge.verdict import Check, Poison, Verdict
from pytest_kvqual.stats.bounds import most_lost, preservation_lower, preservation_upper
from pytest_kvqual.stats.net import NetInterval, net_interval
from pytest_kvqual.study.model import PreservationRules, Study
from pytest_kvqual.tasks.outcome import Kind, Scored, score

Answers = Mapping[str, Scored]
"""What became of each question, by its id, in the panel's order."""


def judge(
    study: Study,
    panel: Panel,
    *,
    gate: str,
    questions: int,
    candidate: Sequence[Record] | None,
    controls: Mapping[str, Sequence[Record]],
    null: tuple[Sequence[Record], Sequence[Record]] | None,
    poison: Mapping[str, Sequence[Record]],
    arm: str | None = None,
    faults: Sequence[str] = (),
) -> Verdict:
    """Judge the answers of one arm against every control's.

    Args:
        study: The study; its rules of this gate and its controls are what is expected.
        panel: The frozen panel of this gate.
        gate: The gate's name, under which the study has its rules; also the task whose parser reads the answers.
        questions: The number of questions that the study says.
        candidate: The capture records of the arm under judgement.
        controls: The capture records of each control, by arm name.
        null: Two captures of one control.
        poison: The arm's capture records by planted fault, over the panel's first ``poison_questions`` questions.
        arm: The name of the arm under judgement; a control is not compared with itself.
        faults: The names of the faults that must be among ``poison``.

    Raises:
        KeyError: The study has no rules of this gate.
        StudyError: The panel's expected answer is none that the task knows. Evidence raises nothing, whatever it is.
    """
    rules = study.preservation[gate]
    most = most_lost(questions, rules.limit, rules.confidence) if questions >= 1 else None
    task = _Task(gate=gate, rules=rules, questions=questions, most=most)
    own = Objections()
    _panel(own, task, panel)
    found = _answers(own, task, panel.items, candidate, origin="candidate")
    _shares(own.find, task, found, origin="candidate")
    required = [control.name for control in study.controls() if control.name != arm]
    if not required:
        own.gap(4, "the study has no control to compare with")
    answers: dict[str, Answers] = {}
    for name in dict.fromkeys((*required, *controls)):
        if name == arm:
            continue
        if controls.get(name) is None:
            own.gap(4, f"control '{name}': found no capture, expected one")
            continue
        answers[name] = _control(own, task, panel, controls[name], origin=f"control '{name}'")
    pairs: dict[str, _Pair] = {}
    for name, expected in answers.items():
        pair = _compare(own, 6, task, found, expected, f"against '{name}'")
        if pair is not None:
            pairs[name] = pair
            if not pair.upper < rules.limit:
                own.find(6, _words(task, name, pair, passed=False))
    null_objections, check, null_numbers = _null(task, panel, null)
    seeded = [_poisoned(task, panel, fault, records, answers) for fault, records in poison.items()]
    read = {name: values for name, values in {"candidate": found, **answers}.items() if values}
    return conclude(
        gate,
        figure=_figure(task, pairs),
        objections=own,
        null=check,
        null_objections=null_objections,
        poison=complete_poison(seeded, faults),
        details={
            "questions": questions,
            "limit": rules.limit,
            "confidence": rules.confidence,
            "floor": rules.floor,
            "most_lost": most,
            "answers": {name: _counts(values) for name, values in read.items()},
            "by_grade": {name: _by_grade(panel.items, values) for name, values in read.items()},
            "pairs": {name: _numbers(pair) for name, pair in pairs.items()},
            "null": null_numbers,
        },
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """What is expected of every capture of one gate. ``most`` losses would still pass; None where no count would."""

    gate: str
    rules: PreservationRules
    questions: int
    most: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """A comparison over all questions. ``upper`` is the bound of the loss probability, ``net`` the reported interval.

    ``tokens_differ`` counts the questions whose answers are not token for token the same.
    """

    lost: tuple[str, ...]
    gained: tuple[str, ...]
    total: int
    upper: float
    net: NetInterval
    tokens_differ: int


def _panel(result: Objections, task: _Task, panel: Panel) -> None:
    if task.questions < 1:
        result.gap(1, f"found {task.questions} questions in the study, expected at least 1")
    if len(panel.items) != task.questions:
        result.gap(1, f"panel: found {len(panel.items)} questions, expected {task.questions}")
    for item in panel.items:
        if item.max_tokens != task.rules.max_tokens:
            result.gap(1, f"panel '{item.id}': found {item.max_tokens} max_tokens, expected {task.rules.max_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Items:
    """Some questions of a panel."""

    items: Sequence[Item]


def _answers(result: Objections, task: _Task, items: Sequence[Item], records: object, *, origin: str) -> Answers:
    """What became of each question that can be read, in the panel's order; what cannot be read is a gap."""
    scored: dict[str, Scored] = {}
    for item, record, where in by_item(result, 2, _Items(items=items), records, origin=origin):
        with result.reading(2):
            scored[item.id] = score(task.gate, record, item=item, rules=task.rules, origin=where)
    return {item.id: scored[item.id] for item in items if item.id in scored}


def _control(result: Objections, task: _Task, panel: Panel, records: object, *, origin: str) -> Answers:
    """The answers of a control, which must be fit to show a loss."""
    answers = _answers(result, task, panel.items, records, origin=origin)
    _shares(result.gap, task, answers, origin=origin)
    right = len(_right(answers))
    if len(answers) == task.questions and answers and not right / task.questions >= task.rules.floor:
        result.gap(
            5,
            f"{origin}: found {right} of {task.questions} answers right, expected at least {_percent(task.rules.floor)}"
            ": it cannot show a loss",
        )
    return answers


def _shares(object_to: Callable[[int, str], None], task: _Task, answers: Answers, *, origin: str) -> None:
    # A capture that is not whole has its gap under rule 2, and no shares.
    if len(answers) != task.questions:
        return
    limits = (
        (Kind.EMPTY, task.rules.empty_share),
        (Kind.TRUNCATED, task.rules.truncated_share),
        (Kind.ERROR, task.rules.error_share),
    )
    for kind, share in limits:
        ids = [name for name, answer in answers.items() if answer.kind is kind]
        if ids and not len(ids) / task.questions <= share:
            object_to(
                3,
                f"{origin}: found {len(ids)} of {task.questions} answers {kind.value}, first '{ids[0]}', "
                f"expected at most {_percent(share)}",
            )


def _right(answers: Answers) -> list[str]:
    return [name for name, answer in answers.items() if answer.kind is Kind.RIGHT]


def _lost(found: Answers, expected: Answers) -> tuple[str, ...]:
    """The questions that ``expected`` has right and ``found`` has not."""
    return tuple(name for name in _right(expected) if found[name].kind is not Kind.RIGHT)


def _whole(result: Objections, rule: int, total: int, found: Answers, expected: Answers, against: str) -> bool:
    """Whether both sides have all ``total`` questions; a gap unless they have."""
    if total >= 1 and len(found) == len(expected) == total and set(found) == set(expected):
        return True
    result.gap(rule, f"{against}: found {len(found)} and {len(expected)} questions, expected the same {total}")
    return False


def _compare(
    result: Objections, rule: int, task: _Task, found: Answers, expected: Answers, against: str
) -> _Pair | None:
    if not _whole(result, rule, task.questions, found, expected, against):
        return None
    lost, gained = _lost(found, expected), _lost(expected, found)
    confidence = task.rules.confidence
    return _Pair(
        lost=lost,
        gained=gained,
        total=task.questions,
        upper=preservation_upper(len(lost), task.questions, confidence),
        net=net_interval(len(lost), len(gained), task.questions, confidence),
        tokens_differ=_tokens_differ(found, expected),
    )


def _tokens_differ(found: Answers, expected: Answers) -> int:
    return sum(found[name].token_ids != answer.token_ids for name, answer in expected.items())


def _null(
    task: _Task, panel: Panel, null: tuple[Sequence[Record], Sequence[Record]] | None
) -> tuple[Objections | None, Check | None, dict[str, object]]:
    if null is None:
        return None, None, {}
    result, rules = Objections(), task.rules
    first, second = (
        _control(result, task, panel, records, origin=f"null[{place}]") for place, records in enumerate(null)
    )
    if not _whole(result, 7, task.questions, second, first, "null"):
        return result, null_check(result, ""), {}
    lost, gained = _lost(second, first), _lost(first, second)
    upper, back = (preservation_upper(len(ids), task.questions, rules.confidence) for ids in (lost, gained))
    words = (
        f"lost {len(lost)}, gained {len(gained)} of {task.questions} against itself: "
        f"{_percent(rules.confidence)} upper bounds {_exact(upper)} and {_exact(back)}"
    )
    if not (upper < rules.limit and back < rules.limit):
        which = (
            f"{task.questions} questions" if task.most is None else "a run whose control differs from itself this much"
        )
        result.find(7, f"{words}, expected below {_percent(rules.limit)}: {which} can prove nothing at this limit")
    numbers: dict[str, object] = {
        "lost": list(lost),
        "gained": list(gained),
        "upper": upper,
        "upper_back": back,
        "tokens_differ": _tokens_differ(second, first),
    }
    return result, null_check(result, f"{words} < {_percent(rules.limit)}"), numbers


def _poisoned(
    task: _Task, panel: Panel, fault: str, records: Sequence[Record], controls: Mapping[str, Answers]
) -> Poison:
    rules, total = task.rules, task.rules.poison_questions
    scratch = Objections()
    found = _answers(scratch, task, panel.items[:total], records, origin=f"poison '{fault}'")
    failed = sum(answer.kind is Kind.ERROR for answer in found.values())
    if failed and not failed / total <= rules.error_share:
        scratch.gap(
            8,
            f"poison '{fault}': found {failed} of {total} requests failed, expected at most "
            f"{_percent(rules.error_share)}",
        )
    lines = []
    caught = ""
    for name, answers in controls.items():
        part = {question: answers[question] for question in found if question in answers}
        if not _whole(scratch, 8, total, found, part, f"poison '{fault}' against '{name}'"):
            continue
        lost = len(_lost(found, part))
        lower = preservation_lower(lost, total, rules.confidence)
        words = f"lost {lost} of {total} against '{name}': {_percent(rules.confidence)} lower bound {_exact(lower)}"
        if lower > rules.limit:
            caught = caught or f"{words} > {_percent(rules.limit)}"
        lines.append(f"{words}, expected above {_percent(rules.limit)}")
    if scratch:
        return Poison(fault=fault, caught=False, figure=scratch.first())
    if caught:
        return Poison(fault=fault, caught=True, figure=caught)
    return Poison(fault=fault, caught=False, figure="; ".join(lines) or "no control to compare with")


def _counts(answers: Answers) -> dict[str, int]:
    kinds = Counter(answer.kind for answer in answers.values())
    lenient = sum(answer.lenient for answer in answers.values())
    return {**{kind.value: kinds[kind] for kind in Kind}, "lenient": lenient}


def _by_grade(items: Sequence[Item], answers: Answers) -> dict[str, list[int]]:
    """By grade: how many answers are right, and how many there are."""
    grades: dict[str, list[int]] = {}
    for item in items:
        if item.id in answers:
            numbers = grades.setdefault(item.grade, [0, 0])
            numbers[0] += answers[item.id].kind is Kind.RIGHT
            numbers[1] += 1
    return grades


def _numbers(pair: _Pair) -> dict[str, object]:
    return {
        "lost": list(pair.lost),
        "gained": list(pair.gained),
        "upper": pair.upper,
        "net": len(pair.gained) - len(pair.lost),
        "net_lower": pair.net.lower,
        "net_upper": pair.net.upper,
        "tokens_differ": pair.tokens_differ,
    }


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _exact(share: float) -> str:
    return f"{100 * share:.3f} %"


def _words(task: _Task, name: str, pair: _Pair, *, passed: bool) -> str:
    def points(count: int) -> str:
        return f"{100 * count / pair.total:+.3f}"

    rules, most = task.rules, task.most
    return (
        f"lost {len(pair.lost)}, gained {len(pair.gained)} of {pair.total} against '{name}': "
        f"{_percent(rules.confidence)} upper bound {_exact(pair.upper)}"
        f"{' <' if passed else ', expected below'} {_percent(rules.limit)} "
        f"({'no count' if most is None else f'{most} lost'} would pass); "
        f"net {points(len(pair.gained) - len(pair.lost))} points [{points(pair.net.lower)}, {points(pair.net.upper)}]"
    )


def _figure(task: _Task, pairs: Mapping[str, _Pair]) -> str:
    if not pairs:
        return "no comparison"
    name, pair = max(pairs.items(), key=lambda item: item[1].upper)
    return _words(task, name, pair, passed=True)
