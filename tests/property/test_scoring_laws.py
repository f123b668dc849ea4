"""Laws of scoring, for every record and every text."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from scored import item, record, rules

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.tasks.numbers import last_number, normal, parse_number, plain
from pytest_kvqual.tasks.outcome import READERS, Kind, Scored, score
from pytest_kvqual.tasks.segment import segment

EXPECTED = {"gsm8k": "12", "retrieval": "12", "recall": "12"}
THINK = ("<think>", "</think>")
RUN_ON = "\nQuestion:"

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
tasks = st.sampled_from(sorted(READERS))
finishes = st.sampled_from(["stop", "length"])
pieces = st.sampled_from(
    ["####", "#### ", "12", "-", "−", "$", "**", ",", "000", ".", "/", "0", "%", " ", "\n", "Question:", "<think>",
     "</think>", "eggs", "１２", "½", "\x00", "\ud83d", "(", '"', "The"]
)  # fmt: skip
texts = st.lists(pieces, max_size=10).map("".join) | st.text(st.characters(), max_size=30)
some_rules = st.builds(
    rules,
    stop=st.sampled_from([(), ("\n\n",), ("\n",)]),
    run_on=st.sampled_from([(), (RUN_ON,), ("Question:", "####")]),
    reasoning=st.sampled_from([None, THINK]),
)


def outcome(task: str, given_record: object, some: Any) -> Scored | None:
    """The outcome, None where the record is refused."""
    try:
        return score(task, given_record, item=item(EXPECTED[task]), rules=some, origin="x")
    except EvidenceError as error:
        refused = str(error)
    assert refused.isprintable()
    return None


@given(tasks, json_values, some_rules)
def test_any_json_is_scored_or_refused(task: str, value: object, some: Any) -> None:
    """A record that is any JSON gives an outcome or an EvidenceError of one line, never another exception."""
    outcome(task, value, some)


@given(tasks, st.data(), some_rules)
def test_a_record_spoiled_in_one_place_is_scored_or_refused(task: str, data: st.DataObject, some: Any) -> None:
    """So does a record of which one key, in the record, the body, the choice or the usage, holds any JSON."""
    whole = record("#### 12")
    body = json.loads(whole["body"])
    where = data.draw(st.sampled_from([whole, body, body["choices"][0], body["usage"]]))
    key = data.draw(st.sampled_from(sorted(where)))
    where[key] = data.draw(json_values)
    if where is not whole or key != "body":
        whole["body"] = json.dumps(body)
    outcome(task, whole, some)


@given(tasks, texts, finishes, some_rules)
@example("gsm8k", "#### " + "9" * 5000, "stop", rules())
@example("gsm8k", " " * 20000 + "#### **" + " " * 20000, "stop", rules())
@example("retrieval", "9" * 5000, "length", rules())
def test_every_text_has_one_kind(task: str, text: str, finish: str, some: Any) -> None:
    """The kinds partition the answers, and each has the property that names it."""
    found = outcome(task, record(text, finish), some)
    assert found is not None
    part = segment(text, stop=some.stop, run_on=some.run_on, reasoning=some.reasoning)
    blank = not part.text.strip()
    assert found.kind is not Kind.ERROR
    assert (found.kind is Kind.EMPTY) is (blank and not (part.unfinished and finish == "length"))
    if found.kind is Kind.TRUNCATED:
        assert finish == "length"
        assert not part.cut
    if found.kind is Kind.RIGHT:
        assert found.found == EXPECTED[task]
        assert found.lenient or task == "gsm8k"
    assert (found.reason == "") is (found.kind is Kind.RIGHT)
    assert (found.found or "").isprintable()
    assert found.reason.isprintable()


@given(tasks, texts, st.none() | st.integers(400, 599), st.text(min_size=1))
def test_a_failed_request_is_an_error_whatever_it_brought(task: str, text: str, status: int | None, error: str) -> None:
    """A record with an error is ERROR under every status and body."""
    found = outcome(task, record(text, status=status, error=error), rules())
    assert found is not None
    assert found.kind is Kind.ERROR
    assert found.token_ids == ()


@given(tasks, texts, texts)
def test_a_run_on_question_changes_nothing(task: str, text: str, more: str) -> None:
    """What follows a run-on marker has no part in the outcome of an answer that the model ended."""
    some = rules(run_on=(RUN_ON,))
    assert outcome(task, record(text), some) == outcome(task, record(f"{text}{RUN_ON}{more}"), some)


@given(tasks, texts, st.lists(pieces.filter(lambda piece: piece not in THINK), max_size=6).map("".join), finishes)
def test_reasoning_changes_nothing(task: str, text: str, thought: str, finish: str) -> None:
    """A reasoning part before the answer, whatever it recites, has no part in the outcome."""
    some = rules(reasoning=THINK, stop=("\n\n",), run_on=(RUN_ON,))
    plain_answer = text.replace("<think>", "").replace("</think>", "").lstrip()
    with_thought = record(f"<think>{thought}</think>\n\n{plain_answer}", finish)
    assert outcome(task, with_thought, some) == outcome(task, record(plain_answer, finish), some)


ZEROS = {"ASCII": "0", "fullwidth": "０", "Arabic-Indic": "٠", "Devanagari": "०", "mathematical": "𝟎"}


@given(
    st.data(),
    st.integers(0, 10**12),
    st.integers(0, 10**6),
    st.sampled_from(["integer", "decimals", "fraction"]),
    st.booleans(),
)
def test_a_number_written_in_any_accepted_way_is_read_back(
    data: st.DataObject, whole: int, other: int, form: str, negative: bool
) -> None:
    """Script, separators, sign, currency, Markdown, unit and period change no value."""

    def draw(*choices: str) -> str:
        return data.draw(st.sampled_from(choices))

    digits = f"{whole:,}" if data.draw(st.booleans()) else str(whole)
    value = Fraction(whole)
    if form == "decimals":
        digits += f".{other:07d}"
        value += Fraction(other, 10**7)
    elif form == "fraction":
        digits += f"/{other + 1}"
        value /= other + 1
    zero = ord(ZEROS[draw(*ZEROS)])
    written = "".join(chr(zero + int(char)) if char.isdecimal() else char for char in digits)
    sign = draw("-", "−", "－", "–") if negative else draw("", "+")
    currency = draw("", "$", "€", "£", "\\$", "＄", "$ ")
    before = f"{currency}{sign}" if data.draw(st.booleans()) else f"{sign}{currency}"
    bold = draw("", "**")
    tail = draw("", "%", " %", " dollars", " km per hour", " (in all)", "°")
    after = draw(f"{bold}{tail}", f"{tail}{bold}")
    text = f"{draw('', ' ', chr(160))}{bold}{before}{written}{after}{draw('', '.')}{draw('', ' ')}"
    expected = -value if negative else value
    assert parse_number(text) == expected, text
    assert last_number(text) == expected, text
    if form != "decimals":
        assert parse_number(normal(expected)) == expected


@given(st.text(st.characters(), max_size=40))
def test_plain_text_keeps_its_positions(text: str) -> None:
    """Each character becomes one."""
    assert len(plain(text)) == len(text)
