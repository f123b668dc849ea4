"""Re-derived gates against the judges: the same outcome, words and numbers, over drawn and over damaged evidence."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvqual.audit import arithmetic, figures
from pytest_kvqual.judge.gates import nll, parity, preservation
from pytest_kvqual.judge.verdict import Verdict
from pytest_kvqual.study.model import NllRules, ParityRules, PreservationRules
from pytest_kvqual.study.panels import Panel, PanelItem

FAULT = "v-scale-dropped-on-read"
TOKENS = 8
Json = dict[str, Any]


def record(name: str, index: int, body: object, *, order: str = "forward") -> Json:
    """A capture record of an answered request."""
    text = json.dumps(body)
    return {"id": name, "order": order, "index": index, "status": 200, "body": text, "error": None}


def completion(prompt: Sequence[int], tokens: Sequence[int], finish: str, **more: object) -> Json:
    """A completion's body."""
    choice = {"prompt_token_ids": list(prompt), "token_ids": list(tokens), "finish_reason": finish, **more}
    return {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}}


def panel_of(task: str, table: Mapping[str, Any]) -> Panel:
    """The panel as the judges have it."""
    items = tuple(
        PanelItem(
            id=item["id"], prompt=tuple(item["prompt"]), targets=tuple(item.get("targets", ())),
            max_tokens=item.get("max_tokens", 1), expected=item.get("expected", ""), grade=item.get("grade", ""),
        )
        for item in table["items"]
    )  # fmt: skip
    return Panel(task=task, length=None, items=items, sha256="0" * 64)


def study_of(controls: Sequence[str], **more: Any) -> Any:
    """The parts of a study that a judge asks for."""
    return SimpleNamespace(controls=lambda: [SimpleNamespace(name=name) for name in controls], **more)


def same(found: Any, expected: Any, relative: float = 0.0) -> bool:
    """Whether two values are equal, keys in any order, floats to ``relative``."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(same(found[key], expected[key], relative) for key in found)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected, [relative] * len(found)))
    if isinstance(found, float) and isinstance(expected, float):
        return found == expected or math.isclose(found, expected, rel_tol=relative)
    return type(found) is type(expected) and bool(found == expected)


def agree(derived: figures.Derived, verdict: Verdict, relative: float = 0.0) -> None:
    """Every word and number of both is the same."""
    assert (derived.outcome, derived.findings) == (verdict.outcome.value, list(verdict.findings))
    assert derived.figure == verdict.figure
    state = "absent" if verdict.null is None else "passed" if verdict.null.passed else "failed"
    assert derived.null == {"state": state, "figure": "" if verdict.null is None else verdict.null.figure}
    assert derived.poison == [
        {"fault": fault.fault, "caught": fault.caught, "figure": fault.figure} for fault in verdict.poison
    ]
    assert same(derived.details, json.loads(json.dumps(verdict.details)), relative), (derived.details, verdict.details)


def _body(change: Callable[[Json, Json], object]) -> Callable[[list[Json]], Any]:
    """A damage of the first record's body: ``change`` gets the body and its only choice."""

    def damage(records: list[Json]) -> list[Json]:
        if not records or not isinstance(records[0].get("body"), str):
            return records
        body = json.loads(records[0]["body"])
        change(body, body["choices"][0])
        return [{**records[0], "body": json.dumps(body)}, *records[1:]]

    return damage


def _first(**changes: object) -> Callable[[list[Json]], Any]:
    return lambda records: [{**records[0], **changes}, *records[1:]] if records else records


DAMAGES: dict[str, Callable[[list[Json]], Any]] = {
    "a record missing": lambda records: records[1:],
    "a record twice": lambda records: [*records, *records[:1]],
    "a record three times": lambda records: [*records[:1], *records, *records[:1]],
    "records reversed": lambda records: records[::-1],
    "no records": lambda records: [],
    "nothing": lambda records: None,
    "no list": lambda records: {"records": records},
    "a number for a record": lambda records: [*records, 5],
    "another id": _first(id="zz"),
    "no id": _first(id=None),
    "status 500": _first(status=500),
    "a failed request": _first(status=None, body=None, error="ReadTimeout: 30 s"),
    "an error that is no text": _first(error=5),
    "an unknown key": _first(more=1),
    "another order": _first(order="reverse"),
    "another index": _first(index=7),
    "no JSON": _first(body="{"),
    "NaN": _first(body='{"x": NaN}'),
    "an error object": _first(body='{"error": {"message": "x"}}'),
    "another prompt": _body(lambda body, choice: choice["prompt_token_ids"].__setitem__(0, 99)),
    "a prompt too long": _body(lambda body, choice: choice["prompt_token_ids"].append(1)),
    "another token": _body(lambda body, choice: choice["token_ids"].__setitem__(slice(0, 1), [99])),
    "usage that disagrees": _body(lambda body, choice: body["usage"].update(completion_tokens=77)),
    "another finish reason": _body(lambda body, choice: choice.update(finish_reason="abort")),
    "stop": _body(lambda body, choice: choice.update(finish_reason="stop")),
    "length": _body(lambda body, choice: choice.update(finish_reason="length")),
    "no text": _body(lambda body, choice: choice.update(text=None)),
    "no log-probabilities": _body(lambda body, choice: choice.update(logprobs=None)),
    "a positive log-probability": _body(
        lambda body, choice: (choice.get("logprobs") or {"token_logprobs": [0]})["token_logprobs"].__setitem__(0, 0.5)
    ),
    "the engine's clamp": _body(
        lambda body, choice: (choice.get("logprobs") or {"token_logprobs": [0]})["token_logprobs"].__setitem__(
            -1, -9999
        )
    ),
}
DAMAGE = st.one_of(st.none(), st.none(), st.sampled_from(sorted(DAMAGES)))


def hurt(data: Any, records: list[Json]) -> Any:
    """The records as they are, or damaged."""
    damage = data.draw(DAMAGE)
    return records if damage is None else DAMAGES[damage](records)


# ---- nll

NLL: Json = {"documents": 4, "decode_steps": 3, "margin_nats": 0.01, "confidence": 0.95, "poison_documents": 2}
DOCUMENTS: Json = {
    "items": [{"id": f"d{index}", "prompt": [index + 1], "targets": [5, 6, 7, 8 + index]} for index in range(4)]
}


def nll_records(shifts: Sequence[float], documents: int = 4) -> list[Json]:
    """A teacher-forced capture, with each document's losses shifted."""
    return [
        record(
            item["id"], index,
            completion(
                item["prompt"], item["targets"], "length",
                logprobs={"token_logprobs": [-9.0, *(-(loss + shifts[index]) for loss in (2.0, 1.0, 1.5))]},
            ),
        )
        for index, item in enumerate(DOCUMENTS["items"][:documents])
    ]  # fmt: skip


def nll_both(
    candidate: Any, controls: Mapping[str, Any], null: Any, poison: Mapping[str, Any], waves: bool = True, **more: Any
) -> tuple[figures.Derived, Verdict]:
    """The gate re-derived, and as its judge has it."""
    rules = {**NLL, **more.get("rules", {})}
    arm, faults = more.get("arm"), more.get("faults", (FAULT,))
    study = study_of(list(controls), nll=NllRules(**rules), schedule="waves" if waves else "natural")
    verdict = nll.judge(
        study, panel_of("nll", DOCUMENTS), candidate=candidate, controls=controls, null=null, poison=poison, arm=arm,
        faults=faults,
    )  # fmt: skip
    return figures.nll(rules, DOCUMENTS, candidate, controls, null, poison, arm, waves, faults), verdict


SHIFTS = st.lists(st.one_of(st.floats(-0.02, 0.02), st.sampled_from([0.0, 0.5, 1e-12, -0.9])), min_size=4, max_size=4)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_nll_is_derived_as_judged(data: Any) -> None:
    """Drawn losses, damaged or not, on every side give the judge's words and its numbers to 1e-12."""
    controls = {
        name: hurt(data, nll_records(data.draw(SHIFTS)))
        for name in ("native", "reference")[: data.draw(st.integers(0, 2))]
    }
    first = data.draw(SHIFTS)
    second = data.draw(st.one_of(st.just(first), SHIFTS))
    null = data.draw(st.sampled_from([True, True, True, False]))
    derived, verdict = nll_both(
        hurt(data, nll_records(data.draw(SHIFTS))),
        controls,
        (hurt(data, nll_records(first)), hurt(data, nll_records(second))) if null else None,
        {FAULT: hurt(data, nll_records(data.draw(st.one_of(SHIFTS, st.just([0.5] * 4))), 2))},
        data.draw(st.booleans()),
        arm=data.draw(st.sampled_from([None, "native"])),
        faults=data.draw(st.sampled_from([(FAULT,), (), (FAULT, "other")])),
        rules=data.draw(st.sampled_from([{}, {"documents": 5}, {"decode_steps": 2}, {"poison_documents": 3}])),
    )
    agree(derived, verdict, 1e-12)


def test_nll_passes_and_fails_in_the_judges_words() -> None:
    """A PASS names the control with the highest bound; a bound at or above the margin is the first finding."""
    same_losses = nll_records([0.0] * 4)
    null = (same_losses, same_losses)
    poison = {FAULT: nll_records([0.5] * 4, 2)}
    controls = {"native": same_losses, "reference": nll_records([0.0005] * 4)}
    derived, verdict = nll_both(nll_records([0.001] * 4), controls, null, poison)
    agree(derived, verdict, 1e-12)
    assert derived.figure == "ΔNLL +0.001000, 95 % upper bound +0.001000 < 0.01 nats (against 'native')"
    assert (derived.outcome, derived.findings) == ("PASS", [])
    derived, verdict = nll_both(nll_records([0.02, 0.01, 0.0, 0.0]), controls, null, poison)
    agree(derived, verdict, 1e-12)
    assert derived.outcome == "FAIL"
    assert derived.figure.startswith("rule 6: ΔNLL +0.007500, 95 % upper bound")


# ---- parity

PARITY: Json = {"prompts": 3, "max_tokens": 4}
PROMPTS: Json = {"items": [{"id": f"p{index}", "prompt": [index + 1, 2], "max_tokens": 4} for index in range(3)]}
ANSWERS = st.lists(
    st.sampled_from([([10, 11, 12, 13], "length"), ([10, 11, 12, 14], "length"), ([10, 11], "stop"), ([], "stop"),
                     ([10, 11, 12, 13], "stop")]),
    min_size=3, max_size=3,
)  # fmt: skip
Answer = tuple[list[int], str]


def served(given_answers: Sequence[Answer], order: str = "forward", count: int = 3) -> list[Json]:
    """An HTTP capture of the prompts."""
    records = [
        record(item["id"], index, completion(item["prompt"], *given_answers[index]), order=order)
        for index, item in enumerate(PROMPTS["items"][:count])
    ]
    return records if order == "forward" else records[::-1]


def reference(given_answers: Mapping[str, Sequence[Answer]]) -> list[Json]:
    """The in-process reference in both orders."""
    return [
        {"order": order, "index": index, "id": f"p{index}", "token_ids": tokens, "finish_reason": finish}
        for order, step in (("forward", 1), ("reverse", -1))
        for index, (tokens, finish) in list(enumerate(given_answers[order]))[::step]
    ]


REFERENCE_DAMAGES: dict[str, Callable[[list[Json]], Any]] = {
    "nothing": lambda records: None,
    "no list": lambda records: 5,
    "an unknown order": _first(order="sideways"),
    "a number": lambda records: [5, *records],
    "a missing record": lambda records: records[1:],
    "another prompt": _first(prompt_token_ids=[9]),
    "an unknown key": _first(more=1),
    "another index": _first(index=2),
    "too many tokens": _first(token_ids=[1] * 9),
}


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_parity_is_derived_as_judged(data: Any) -> None:
    """Drawn tokens, damaged or not, on every side give the judge's words and numbers."""
    usual = data.draw(st.one_of(st.just([([10 + place, 11, 12, 13], "length") for place in range(3)]), ANSWERS))

    def drawn() -> list[Answer]:
        chosen: list[Answer] = data.draw(st.one_of(st.just(usual), st.just(usual), ANSWERS))
        return chosen

    inner: Any = reference({"forward": drawn(), "reverse": drawn()})
    damage = data.draw(st.one_of(st.none(), st.none(), st.sampled_from(sorted(REFERENCE_DAMAGES))))
    inner = inner if damage is None else REFERENCE_DAMAGES[damage](inner)
    http = hurt(data, served(drawn()))
    null = (hurt(data, served(drawn())), hurt(data, served(drawn(), "reverse")))
    given_null = null if data.draw(st.sampled_from([True, True, True, False])) else None
    poison = {FAULT: hurt(data, served(drawn(), count=data.draw(st.integers(0, 3))))}
    rules = {**PARITY, **data.draw(st.sampled_from([{}, {}, {"prompts": 4}, {"max_tokens": 5}]))}
    faults = data.draw(st.sampled_from([(FAULT,), (FAULT, "other")]))
    study = study_of([], parity=ParityRules(panel=None, **rules))  # type: ignore[arg-type]  # the judge reads no file
    verdict = parity.judge(
        study, panel_of("parity", PROMPTS), http=http, reference=inner, null=given_null, poison=poison, faults=faults
    )
    agree(figures.parity(rules, PROMPTS, http, inner, given_null, poison, faults), verdict)


# ---- preservation

RULES: Json = {
    "limit": 0.05, "confidence": 0.95, "floor": 0.6, "max_tokens": TOKENS, "stop": ["\n"], "run_on": [],
    "reasoning": [], "empty_share": 0.0, "truncated_share": 0.0, "error_share": 0.0, "poison_questions": 16,
}  # fmt: skip


def questions(count: int) -> Json:
    """So many questions in two grades."""
    return {
        "items": [
            {"id": f"q{index}", "prompt": [index + 1, 7], "max_tokens": TOKENS, "expected": str(10000 + index),
             "grade": "odd" if index % 2 else "even"}
            for index in range(count)
        ]
    }  # fmt: skip


def scored(task: str, table: Json, kinds: Mapping[int, str], count: int | None = None) -> list[Json]:
    """A scored capture: answers right but those that ``kinds`` says otherwise of."""
    return [
        scored_record(task, item, index, kinds.get(index, "right")) for index, item in enumerate(table["items"][:count])
    ]


def scored_record(task: str, item: Json, index: int, kind: str) -> Json:
    """One record of a kind."""
    if kind == "error":
        return {**record(item["id"], index, None), "status": None, "body": None, "error": "ReadTimeout: 30 s"}
    text = {"right": item["expected"], "wrong": "77777", "wrong but there": f"x {item['expected']}", "empty": " "}
    answer = text.get(kind, item["expected"][:2])
    mark = "It is\n#### " if task == "gsm8k" and kind != "empty" else " "
    truncated = kind == "truncated"
    tokens = [len(kind), *range(TOKENS - 1)] if truncated else [len(kind), 2]
    return record(
        item["id"], index,
        completion(item["prompt"], tokens, "length" if truncated else "stop", text=mark + answer, logprobs=None),
    )  # fmt: skip


def scored_both(
    task: str, table: Json, rules: Json, count: int, candidate: Any, controls: Any, null: Any, poison: Any, **more: Any
) -> tuple[figures.Derived, Verdict]:
    """The gate re-derived, and as its judge has it."""
    arm, faults = more.get("arm"), more.get("faults", (FAULT,))
    reasoning = tuple(rules["reasoning"]) or None
    judged = PreservationRules(
        **{**rules, "stop": tuple(rules["stop"]), "run_on": tuple(rules["run_on"]), "reasoning": reasoning}
    )
    verdict = preservation.judge(
        study_of(list(controls), preservation={task: judged}), panel_of(task, table), gate=task, questions=count,
        candidate=candidate, controls=controls, null=null, poison=poison, arm=arm, faults=faults,
    )  # fmt: skip
    return figures.preservation(task, rules, table, count, candidate, controls, null, poison, arm, faults), verdict


KINDS = st.dictionaries(
    st.integers(0, 99),
    st.sampled_from(["wrong", "wrong", "wrong but there", "empty", "truncated", "error"]),
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_scored_gates_are_derived_as_judged(data: Any) -> None:
    """Drawn answers of every kind, damaged or not, on every side give the judge's words and numbers."""
    task = data.draw(st.sampled_from(["retrieval", "recall", "gsm8k"]))
    size = data.draw(st.sampled_from([5, 60, 100]))
    table = questions(size)
    many = st.dictionaries(st.integers(0, size - 1), st.just("wrong"), min_size=min(5, size), max_size=size)
    kinds: st.SearchStrategy[dict[int, str]] = st.one_of(KINDS, KINDS, many, st.just({}))

    def capture(count: int | None = None) -> Any:
        return hurt(data, scored(task, table, data.draw(kinds), count))

    controls = {name: capture() for name in ("native", "reference")[: data.draw(st.integers(0, 2))]}
    rules = {
        **RULES,
        **data.draw(st.sampled_from([{}, {"floor": 0.99}, {"limit": 0.1, "error_share": 0.05}, {"max_tokens": 9}])),
        "empty_share": data.draw(st.sampled_from([0.0, 0.02, 1.0])),
        "truncated_share": data.draw(st.sampled_from([0.0, 0.02, 1.0])),
        "poison_questions": min(16, size),
    }
    wrong = scored(task, table, dict.fromkeys(range(16), "wrong"), rules["poison_questions"])
    derived, verdict = scored_both(
        task, table, rules, data.draw(st.sampled_from([size, size, size, size + 1, 0])), capture(), controls,
        (capture(), capture()) if data.draw(st.sampled_from([True, True, True, False])) else None,
        {FAULT: hurt(data, wrong) if data.draw(st.booleans()) else capture(rules["poison_questions"])},
        arm=data.draw(st.sampled_from([None, "native"])), faults=data.draw(st.sampled_from([(FAULT,), (), ("other",)])),
    )  # fmt: skip
    agree(derived, verdict)


@pytest.mark.parametrize(
    ("kinds", "rules", "outcome", "figure"),
    [
        (
            {0: "wrong"}, {}, "PASS",
            ("lost 1, gained 1 of 100 against 'native': 95 % upper bound 4.656 % < 5 % (1 lost would pass); "
             "net +0.000 points [-3.000, +3.000]"),
        ),
        (
            {0: "wrong", 1: "wrong"}, {}, "FAIL",
            ("rule 6: lost 2, gained 1 of 100 against 'native': 95 % upper bound 6.162 %, expected below 5 % "
             "(1 lost would pass); net -1.000 points [-5.000, +2.000]"),
        ),
        ({0: "empty"}, {}, "FAIL", "rule 3: candidate: found 1 of 100 answers empty, first 'q0', expected at most 0 %"),
        (
            {0: "wrong"}, {"floor": 0.995}, "INCONCLUSIVE",
            "null: rule 5: null[0]: found 99 of 100 answers right, expected at least 99.5 %: it cannot show a loss",
        ),
        (
            {0: "wrong"}, {"limit": 0.9}, "INCONCLUSIVE",
            ("poison: 'v-scale-dropped-on-read' was not caught: lost 16 of 16 against 'native': 95 % lower bound "
             "82.925 %, expected above 90 %"),
        ),
    ],
    ids=["bound met", "bound not met", "share exceeded", "floor missed", "poison missed"],
)  # fmt: skip
def test_the_deciding_lines(kinds: dict[int, str], rules: Json, outcome: str, figure: str) -> None:
    """Each kind of conclusion has the words that a receipt has, in both implementations."""
    table = questions(100)
    control = scored("retrieval", table, {50: "wrong"})
    derived, verdict = scored_both(
        "retrieval", table, {**RULES, **rules}, 100, scored("retrieval", table, kinds), {"native": control},
        (control, control), {FAULT: scored("retrieval", table, dict.fromkeys(range(16), "wrong"), 16)},
    )  # fmt: skip
    agree(derived, verdict)
    assert (derived.outcome, derived.figure) == (outcome, figure)


@pytest.mark.parametrize("above", [False, True])
def test_a_bound_at_the_limit_does_not_pass(above: bool) -> None:
    """A limit, or a margin, that equals the bound fails in both implementations; the next larger number passes."""
    table = questions(100)
    right = scored("retrieval", table, {})
    poison = {FAULT: scored("retrieval", table, dict.fromkeys(range(16), "wrong"), 16)}
    candidate = scored("retrieval", table, {0: "wrong"})
    limit = arithmetic.loss_upper(1, 100, 0.95)
    rules = {**RULES, "limit": math.nextafter(limit, 1) if above else limit}
    derived, verdict = scored_both("retrieval", table, rules, 100, candidate, {"native": right}, (right, right), poison)
    agree(derived, verdict)
    assert derived.outcome == ("PASS" if above else "FAIL")
    losses, healthy = nll_records([0.001, 0.002, 0.0, 0.0]), nll_records([0.0] * 4)
    faulty = {FAULT: nll_records([0.5] * 4, 2)}
    derived, _ = nll_both(losses, {"native": healthy}, (healthy, healthy), faulty)
    margin = derived.details["delta"]["native"]["upper"]
    margin = math.nextafter(margin, 1) if above else margin
    derived, _ = nll_both(losses, {"native": healthy}, (healthy, healthy), faulty, rules={"margin_nats": margin})
    assert derived.outcome == ("PASS" if above else "FAIL")


def test_a_null_that_breaks_the_bound_concludes_nothing() -> None:
    """A control that differs from itself in 91 and 86 of 1,319 answers can prove nothing at 2 %."""
    table = questions(1319)
    rules = {**RULES, "limit": 0.02}
    first = scored("gsm8k", table, dict.fromkeys(range(86), "wrong"))
    second = scored("gsm8k", table, dict.fromkeys(range(100, 191), "wrong"))
    derived, verdict = scored_both(
        "gsm8k", table, rules, 1319, first, {"native": first}, (first, second),
        {FAULT: scored("gsm8k", table, dict.fromkeys(range(16), "wrong"), 16)},
    )  # fmt: skip
    agree(derived, verdict)
    assert derived.outcome == "INCONCLUSIVE"
    assert derived.figure.startswith("null: rule 7: lost 91, gained 86 of 1319 against itself: 95 % upper bounds 8.1")


def test_a_full_set_takes_seconds_at_most() -> None:
    """Five captures of 1,319 questions with bodies of real size are read and derived within 10 s of processor time."""
    table: Json = {
        "items": [
            {"id": f"q{index}", "prompt": list(range(900)), "max_tokens": 2048, "expected": "18", "grade": ""}
            for index in range(1319)
        ]
    }
    text = "She has 16 - 3 - 4 = 9 eggs and sells them for 9 * 2 = 18 dollars. " * 15 + "\n#### 18"
    capture = [
        record(item["id"], index, completion(item["prompt"], list(range(300)), "stop", text=text, logprobs=None))
        for index, item in enumerate(table["items"])
    ]
    rules = {**RULES, "limit": 0.02, "max_tokens": 2048}
    start = time.process_time()
    derived = figures.preservation(
        "gsm8k", rules, table, 1319, capture, {"native": capture, "other": capture}, (capture, capture), {}, None
    )
    spent = time.process_time() - start
    assert derived.details["answers"]["candidate"]["right"] == 1319
    assert spent < 10, f"{spent:.1f} s"
