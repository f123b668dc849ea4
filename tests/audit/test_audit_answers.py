"""The auditor's reading of answers against the parsers of the tasks: two implementations agree on every text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvqual.audit import answers
from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.study.model import PreservationRules
from pytest_kvqual.study.panels import PanelItem
from pytest_kvqual.tasks.nll import document_losses
from pytest_kvqual.tasks.outcome import score
from pytest_kvqual.tasks.parity import reference_output, served_output

TRANSCRIPTS = Path(__file__).parents[1] / "golden" / "transcripts"
LIMIT = 8
PROMPT = [1, 2]
PLAIN: dict[str, Any] = {
    "limit": 0.05, "confidence": 0.95, "floor": 0.6, "max_tokens": LIMIT, "stop": [], "run_on": [], "reasoning": [],
    "empty_share": 0.0, "truncated_share": 0.0, "error_share": 0.0, "poison_questions": 1,
}  # fmt: skip


def judged(table: Mapping[str, Any]) -> PreservationRules:
    """The rules as the judges have them."""
    reasoning = tuple(table["reasoning"] or ()) or None
    return PreservationRules(
        **{**table, "stop": tuple(table["stop"]), "run_on": tuple(table["run_on"]), "reasoning": reasoning}
    )


def record(text: Any, finish: Any = "stop", **changes: Any) -> dict[str, Any]:
    """The capture record of an answer."""
    tokens = [5] * (LIMIT if finish == "length" else 3)
    body = {
        "choices": [{"text": text, "finish_reason": finish, "token_ids": tokens, "prompt_token_ids": PROMPT}],
        "usage": {"prompt_tokens": len(PROMPT), "completion_tokens": len(tokens)},
    }
    return {
        "id": "q", "order": "forward", "index": 0, "status": 200, "body": json.dumps(body), "error": None, **changes
    }  # fmt: skip


def both(task: str, given_record: object, expected: str, table: Mapping[str, Any]) -> tuple[Any, Any]:
    """What the auditor and what the task's parser make of one record: the outcome, or the words of the refusal."""
    item = PanelItem(id="q", prompt=tuple(PROMPT), targets=(), max_tokens=LIMIT, expected=expected)
    try:
        theirs = score(task, given_record, item=item, rules=judged(table), origin="x")
        other: Any = (theirs.kind.value, theirs.found, theirs.lenient, theirs.token_ids)
    except EvidenceError as error:
        other = str(error)
    asked = {"id": "q", "prompt": PROMPT, "max_tokens": LIMIT, "expected": expected}
    try:
        ours = answers.outcome(task, given_record, asked, table, "x")
        own: Any = (ours.kind, ours.found, ours.lenient, ours.tokens)
    except answers.RecordError as error:
        own = str(error)
    return own, other


def transcripts() -> list[Any]:
    """Every case of the golden transcripts."""
    return [
        pytest.param(case, id=f"{path.stem}: {case['name']}")
        for path in sorted(TRANSCRIPTS.glob("*.json"))
        for case in json.loads(path.read_bytes())
    ]


CASES = transcripts()


def test_the_transcripts_are_there() -> None:
    """The golden transcripts are read, so that none of them is left out unseen."""
    assert len(CASES) > 100


@pytest.mark.parametrize("case", CASES)
def test_transcript(case: dict[str, Any]) -> None:
    """The auditor's parsers come to the outcome that was written down."""
    given_record = record(case.get("text"), case.get("finish_reason"))
    if "record" in case:
        given_record = {"id": "q", "order": "forward", "index": 0, **case["record"]}
    table = {**PLAIN, **case["rules"]}
    table["reasoning"] = table["reasoning"] or []
    asked = {"id": "q", "prompt": PROMPT, "max_tokens": LIMIT, "expected": case["expected"]}
    if case["kind"] == "refused":
        with pytest.raises(answers.RecordError) as error:
            answers.outcome(case["task"], given_record, asked, table, "x")
        assert case["error"] in str(error.value)
        return
    found = answers.outcome(case["task"], given_record, asked, table, "x")
    assert (found.kind, found.lenient) == (case["kind"], case["lenient"]), case["why"]
    assert found.found == case["found"], case["why"]


# Pieces of which answers are made, so that separators, signs, marks and markers meet in every order.
PIECES = [
    "####", "#### ", "**", "$", "\\$", "€", "£", "+", "-", "−", "–", "－", ",", "，", ".", "．", "٫", "/", "⁄", "%",
    "％", "0", "1", "12", "3", "18", "007", "100", "000", "1,000", "12,345", "1.5", "1/2", "3/0", "½", "²", "万", "४",
    "１８", "٣", " ", "  ", "\u00a0", "\n", "\r", "\u2028", "\t", "(", ")", "[", "]", "{", "<", "“", "”", "'", '"',
    "`", "„", "«", ":", "=", "#", "_", "a", "dollars", "eggs.", "Question:", "\nQuestion:", "<think>", "</think>", "!",
    "°", "¥", "x", "é", "e5",
]  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=8).map(lambda pieces: "#### " + "".join(pieces)),
    st.text(max_size=30),
)
RULES = st.fixed_dictionaries(
    {
        "stop": st.sampled_from([[], ["\n"], ["\n\n", "x"]]),
        "run_on": st.sampled_from([[], ["\nQuestion:"], ["Question:", "#### 1"]]),
        "reasoning": st.sampled_from([[], ["<think>", "</think>"], ["(", ")"]]),
    }
)


@settings(max_examples=1500, deadline=None)
@given(
    task=st.sampled_from(["gsm8k", "gsm8k", "recall", "retrieval"]),
    text=TEXTS,
    finish=st.sampled_from(["stop", "length"]),
    expected=st.sampled_from(["18", "12", "-3", "1/2", "1000", "1", "3", "100"]),
    table=RULES,
)
def test_every_text_has_the_same_outcome(task: str, text: str, finish: str, expected: str, table: Any) -> None:
    """Kind, the answer found, lenient match and tokens are those of the task's parser."""
    own, other = both(task, record(text, finish), expected, {**PLAIN, **table})
    assert own == other


@pytest.mark.parametrize(
    "text",
    [
        "a-18", "é-18", "_-18", ")-18", "]-18", ".-18", "(-18", "--18", "-+18", "+-18", "-$-18", "-$ 18", "$-18",
        "- 18", "5-$18", "-\\$18", "\\$-18", "$\n-18", "$\n18", "-€18", "18-", "1 - 18", "18.", "18..", "..18", ".5",
        "-.5", "1/2/2", "1/0", "1/2.", "0/18", "1,000", "1,0000", "01,000", "1,000,0", "1000,000", ",000", "”18", "»18",
        "‚18", "<18", ">18", "（18", "18）", "#18", "$18", "€18", "= 18", "18\u2028x", "18\x00", "1８", "-１８", "−18",
        "9" * 600, "9" * 601, "1/" + "9" * 599, "1/" + "9" * 600, "1." + "0" * 600, "18%", "18 %%", "18**", "**18**",
        "**18.**", "** 18 **.", "18 (x)", "18 °", "18 ,", "18;", "18/", "18 ½", "18²", "18万",
    ],
)  # fmt: skip
def test_texts_at_the_edges_have_the_same_outcome(text: str) -> None:
    """Signs, separators, brackets and units at the edges of a number are read alike, behind the mark and without it."""
    for task in ("gsm8k", "recall"):
        for shown in (text, f"#### {text}"):
            for finish in ("stop", "length"):
                for expected in ("18", "-18", "1/2", "1000", "0"):
                    own, other = both(task, record(shown, finish), expected, PLAIN)
                    assert own == other, (task, shown, finish, expected)


@dataclass(frozen=True)
class Change:
    """One damage of a record: the value at a path of the record or of its body."""

    path: tuple[Any, ...]
    value: Any = None
    remove: bool = False
    body: bool = True


VALUES: list[Any] = [
    None, True, 0, -1, 1.0, 3, "", "x", "stop", "length", [], [1], [1, 2], [1, True], [1, 2.0], [-1, 2], [1, None],
    [5] * LIMIT, [5] * 9, {}, {"a": 1}, 10**30, "line\nbreak",
]  # fmt: skip
PATHS: list[tuple[bool, tuple[Any, ...]]] = [
    (False, ("id",)), (False, ("order",)), (False, ("index",)), (False, ("status",)), (False, ("body",)),
    (False, ("error",)), (False, ("more",)), (True, ("choices",)), (True, ("choices", 0)), (True, ("usage",)),
    (True, ("error",)), (True, ("choices", 0, "text")), (True, ("choices", 0, "finish_reason")),
    (True, ("choices", 0, "token_ids")), (True, ("choices", 0, "prompt_token_ids")),
    (True, ("choices", 0, "logprobs")), (True, ("choices", 0, "logprobs", "token_logprobs")),
    (True, ("choices", 0, "logprobs", "token_logprobs", 1)), (True, ("usage", "prompt_tokens")),
    (True, ("usage", "completion_tokens")),
]  # fmt: skip
CHANGES = st.builds(
    lambda place, value, remove: Change(path=place[1], value=value, remove=remove, body=place[0]),
    st.sampled_from(PATHS),
    st.sampled_from(VALUES),
    st.sampled_from([False, False, False, True]),
)


def damaged(good: dict[str, Any], change: Change) -> dict[str, Any]:
    """The record with one change."""
    result = dict(good)
    holder: Any = json.loads(result["body"]) if change.body else result
    top = holder
    for step in change.path[:-1]:
        try:
            holder = holder[step]
        except (KeyError, IndexError, TypeError):
            return result
    try:
        if change.remove:
            del holder[change.path[-1]]
        else:
            holder[change.path[-1]] = change.value
    except (KeyError, IndexError, TypeError):
        return result
    if change.body:
        result["body"] = json.dumps(top)
    return result


@settings(max_examples=800, deadline=None)
@given(first=CHANGES, second=st.one_of(st.none(), CHANGES), finish=st.sampled_from(["stop", "length"]))
def test_every_damaged_record_is_refused_in_the_same_words(first: Change, second: Change | None, finish: str) -> None:
    """A record with a missing, unknown or mistyped value is an error or is refused, as the task's parser does."""
    given_record = damaged(record(" 18", finish), first)
    if second is not None and isinstance(given_record.get("body"), str) and given_record["body"][:1] == "{":
        given_record = damaged(given_record, second)
    own, other = both("recall", given_record, "18", PLAIN)
    if isinstance(other, str) and "found an answer to" in other:
        # The auditor looks an item up by the record's own id, so that another id is another question there.
        return
    assert own == other


BODIES = [
    "", "{", "[]", "null", "3", '{"a": NaN}', '{"a": Infinity}', '{"a": 1e999}', '{"a": 1, "a": 2}', "{}" * 2, "\ud800",
    '{"choices": [{"a": 1, "a": 2}]}', "[" * 20000, '{"error": {}}', '{"error": null}', '{"choices": [1]}', "\ufeff{}",
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_every_damaged_body_is_refused_in_the_same_words(body: str) -> None:
    """Text that is no JSON, NaN, numbers beyond float64 and keys given twice are refused alike."""
    own, other = both("recall", record("", body=body), "18", PLAIN)
    assert own == other


def teacher(logprobs: list[Any], tokens: list[int] | None = None) -> dict[str, Any]:
    """A teacher-forced record of three targets."""
    forced = [5, 6, 7] if tokens is None else tokens
    body = {
        "choices": [
            {
                "finish_reason": "length", "token_ids": forced, "prompt_token_ids": PROMPT,
                "logprobs": {"token_logprobs": logprobs},
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": len(forced)},
    }  # fmt: skip
    return {**record(""), "body": json.dumps(body)}


@settings(max_examples=500, deadline=None)
@given(
    logprobs=st.lists(
        st.one_of(st.floats(-20, 0), st.sampled_from([-9999.0, -9998.5, 0.5, 0, -1, None, True, "x"])),
        min_size=2, max_size=4,
    ),
    tokens=st.sampled_from([None, [5, 6], [5, 6, 8], [5, 6, 7, 8]]),
    change=st.one_of(st.none(), CHANGES),
)  # fmt: skip
def test_losses_are_those_of_the_task(logprobs: list[Any], tokens: list[int] | None, change: Change | None) -> None:
    """Each loss is the same float64, step zero left out, and each refusal has the same words."""
    given_record: object = teacher(logprobs, tokens)
    if change is not None:
        given_record = damaged(teacher(logprobs, tokens), change)
    other: Any
    own: Any
    try:
        _, document = document_losses(given_record, origin="x", prompt=(1, 2), targets=(5, 6, 7))
        other = list(document.losses)
    except EvidenceError as error:
        other = str(error)
    try:
        own = answers.losses(given_record, {"prompt": PROMPT, "targets": [5, 6, 7]}, "x")
    except answers.RecordError as error:
        own = str(error)
    assert own == other


@settings(max_examples=500, deadline=None)
@given(
    table=st.one_of(
        st.sampled_from(VALUES),
        st.fixed_dictionaries(
            {
                "order": st.sampled_from(["forward", "reverse", "", 3]), "index": st.sampled_from([0, 1, -1, True]),
                "id": st.sampled_from(["q", "", None]), "token_ids": st.sampled_from(VALUES),
                "finish_reason": st.sampled_from(["stop", "length", "x", None]),
            },
            optional={"prompt_token_ids": st.sampled_from(VALUES), "more": st.just(1)},
        ),
    )
)  # fmt: skip
def test_reference_records_are_read_alike(table: Any) -> None:
    """A record of the in-process reference gives the same tokens, or is refused in the same words."""
    other: Any
    own: Any
    try:
        output = reference_output(table, origin="x", prompt=(1, 2), max_tokens=LIMIT)
        other = (output.id, output.order, output.index, output.token_ids, output.finish_reason)
    except EvidenceError as error:
        other = str(error)
    try:
        serial = answers.serial(table, {"prompt": PROMPT, "max_tokens": LIMIT}, "x", reference=True)
        own = (serial.id, serial.order, serial.index, serial.tokens, serial.finish)
    except answers.RecordError as error:
        own = str(error)
    assert own == other


@settings(max_examples=300, deadline=None)
@given(change=CHANGES, finish=st.sampled_from(["stop", "length"]))
def test_served_records_are_read_alike(change: Change, finish: str) -> None:
    """An HTTP record of the parity gate gives the same tokens, or is refused in the same words."""
    given_record = damaged(record(" 18", finish), change)
    other: Any
    own: Any
    try:
        output = served_output(given_record, origin="x", prompt=(1, 2), max_tokens=LIMIT)
        other = (output.id, output.order, output.index, output.token_ids, output.finish_reason)
    except EvidenceError as error:
        other = str(error)
    try:
        serial = answers.serial(given_record, {"prompt": PROMPT, "max_tokens": LIMIT}, "x")
        own = (serial.id, serial.order, serial.index, serial.tokens, serial.finish)
    except answers.RecordError as error:
        own = str(error)
    assert own == other
