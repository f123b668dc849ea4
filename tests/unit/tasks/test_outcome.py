"""Outcomes: what a record must be, and what the study gives."""

from __future__ import annotations

import json
import time

import pytest
from scored import LIMIT, item, record, rules

from pytest_kvqual.audit.answers import RecordError, outcome
from pytest_kvqual.errors import EvidenceError, StudyError
from pytest_kvqual.tasks.completion import Failure, parse_outcome
from pytest_kvqual.tasks.outcome import READERS, Kind, score
from pytest_kvqual.tasks.segment import segment


def test_a_scored_answer_keeps_its_tokens() -> None:
    """Tokens come from the record, as many as there are."""
    found = score("gsm8k", record("#### 12", "length"), item=item("12"), rules=rules(), origin="x")
    assert (found.id, found.token_ids) == ("q", (5,) * LIMIT)
    assert found.kind is Kind.TRUNCATED
    assert found.reason == "the token limit may have cut the answer"


def test_a_wrong_answer_says_what_was_found() -> None:
    """Found and expected stand in the reason."""
    found = score("gsm8k", record("#### 1,000.50"), item=item("12"), rules=rules(), origin="x")
    assert (found.kind, found.reason) == (Kind.WRONG, "found 2001/2, expected 12")
    found = score("recall", record(" Bergen"), item=item("Oslo"), rules=rules(), origin="x")
    assert (found.kind, found.reason) == (Kind.WRONG, "found Bergen, expected Oslo")


def test_an_answer_to_another_question_is_refused() -> None:
    """Also where the request failed: the record is another question's."""
    for given in (record("12", id="p"), record("12", id="p", error="ReadTimeout")):
        with pytest.raises(EvidenceError, match="found an answer to 'p', expected one to 'q'"):
            score("recall", given, item=item("12"), rules=rules(), origin="x")


def test_a_text_without_a_token_is_damage() -> None:
    """What a model says is made of tokens: a text beside none was written by another hand."""
    given = record("#### 12")
    body = json.loads(given["body"])
    body["choices"][0]["token_ids"] = []
    body["usage"]["completion_tokens"] = 0
    given["body"] = json.dumps(body)
    with pytest.raises(EvidenceError, match="found a text and no token"):
        score("gsm8k", given, item=item("12"), rules=rules(), origin="x")
    with pytest.raises(RecordError, match="found a text and no token"):
        outcome("gsm8k", given, {"prompt": body["choices"][0]["prompt_token_ids"], "max_tokens": LIMIT}, {}, "x")


def test_a_failure_says_why() -> None:
    """Its reason is one line of what was found."""
    for given, text in (
        (record("12", error="TimeoutError: no answer within 60 s"), "found the error 'TimeoutError: no answer within"),
        (
            record("12", status=503, body="busy\nlater"),
            "found status 503, expected 200; the body begins 'busy\\nlater'",
        ),
        (record("12", body='{"error": {"message": "x"}}'), "body: found an error object under status 200"),
    ):
        found = score("recall", given, item=item("12"), rules=rules(), origin="x")
        assert found.kind is Kind.ERROR
        assert found.reason.startswith(text)
        assert isinstance(parse_outcome(given, origin="x"), Failure)


@pytest.mark.parametrize("error", ["", 5, {}, False])
def test_an_error_that_is_no_text_is_damage(error: object) -> None:
    """An error is a text; anything else in its place is no outcome."""
    with pytest.raises(EvidenceError, match="'error'"):
        score("recall", record("12", error=error), item=item("12"), rules=rules(), origin="x")


def test_what_the_study_gives_must_be_of_the_task() -> None:
    """An unknown task, and a GSM8K question whose expected answer is no number, are the study's fault."""
    with pytest.raises(StudyError, match="expected one of retrieval, recall, gsm8k"):
        score("nll", record("12"), item=item("12"), rules=rules(), origin="x")
    with pytest.raises(StudyError, match="found 'twelve', expected a number"):
        score("gsm8k", record("12"), item=item("twelve"), rules=rules(), origin="x")


@pytest.mark.parametrize("task", ["retrieval", "recall"])
def test_an_empty_expected_answer_is_never_right(task: str) -> None:
    """Neither strictly nor leniently."""
    found = score(task, record("12"), item=item(""), rules=rules(), origin="x")
    assert (found.kind, found.lenient) == (Kind.WRONG, False)


def test_text_is_read_only_where_it_is_asked_for() -> None:
    """An answer read for its tokens needs no text and has none."""
    outcome = parse_outcome(record("12"), origin="x")
    assert not isinstance(outcome, Failure)
    assert outcome.text is None
    outcome = parse_outcome(record("12"), origin="x", text=True)
    assert not isinstance(outcome, Failure)
    assert outcome.text == "12"


@pytest.mark.parametrize("name", ["stop", "run_on"])
def test_one_string_is_no_list_of_markers(name: str) -> None:
    """A string would be taken apart into characters, each of them a marker."""
    with pytest.raises(TypeError, match=f"{name}: found the string 'Question:', expected a list of strings"):
        segment("a Q", **{name: "Question:"})  # type: ignore[arg-type]


def test_each_scored_task_has_a_parser() -> None:
    """The tasks are those that a study can list."""
    assert set(READERS) == {"retrieval", "recall", "gsm8k"}


@pytest.mark.parametrize("text", ["<think></think>", "</think>", "x<think>y</think>", " </think> "])
def test_a_text_of_markers_is_read_in_one_pass(text: str) -> None:
    """A model that repeats its markers to the end of the limit holds nothing up: each marker is searched for once."""
    start = time.monotonic()
    segment(text * 60_000, stop=["\n\n"], run_on=["\nQ:"], reasoning=("<think>", "</think>"))
    assert time.monotonic() - start < 2
