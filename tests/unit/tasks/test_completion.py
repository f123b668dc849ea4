"""Raw completions, read strictly."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.tasks.completion import parse_answer

BODY = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "text": "…",
            "finish_reason": "length",
            "prompt_token_ids": [1, 2, 3],
            "token_ids": [7, 8],
            "logprobs": {"token_logprobs": [-0.5, 0.0], "tokens": [], "top_logprobs": [], "text_offset": []},
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}


def record(body: Any = BODY, **changes: Any) -> dict[str, Any]:
    """A capture record."""
    text = body if isinstance(body, str) else json.dumps(body)
    return {"id": "a", "order": "forward", "index": 4, "status": 200, "body": text, "error": None, **changes}


def changed(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """A record whose body has another value at ``path``."""
    body: Any = copy.deepcopy(BODY)
    holder = body
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    return record(body)


def test_reads_what_the_engine_says() -> None:
    """Ids, finish reason and log-probabilities come from the body; keys that are not used may be there."""
    answer = parse_answer(record(), origin="x", logprobs=True)
    assert (answer.id, answer.order, answer.index) == ("a", "forward", 4)
    assert answer.prompt_token_ids == (1, 2, 3)
    assert answer.token_ids == (7, 8)
    assert answer.finish_reason == "length"
    assert answer.logprobs == (-0.5, 0.0)
    assert parse_answer(record(), origin="x", logprobs=False).logprobs is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (record(status=400), "x, request 'a': found status 400, expected 200; the body begins '{\"id\": "),
        (record(error="ReadTimeout"), "found the error 'ReadTimeout'"),
        (record(status=None, body=None, error=None), "status"),
        (record(index=True), "index"),
        (record(id=""), "id"),
        (record(more=1), "unknown key 'more'"),
        ({"id": "a"}, "no key 'order'"),
        (5, "a table"),
        (record("not json"), "expected JSON"),
        (record('{"a": 1, "a": 2}'), "'a' twice"),
        (record('{"a": Infinity}'), "Infinity"),
        (record("\ud800"), "UTF-8"),
        (record("[]"), "a table"),
        (record({"error": {"message": "boom"}}), "an error object under status 200"),
        (record({**BODY, "error": {"message": "boom"}}), "an error object under status 200"),
        (changed(("choices",), []), "found 0 choices, expected exactly 1"),
        (changed(("choices",), [BODY, BODY]), "found 2 choices"),
        (changed(("choices",), "x"), "found no list choices"),
        (changed(("choices", 0, "token_ids"), None), "choices[0].token_ids"),
        (changed(("choices", 0, "token_ids"), [7, "8"]), "choices[0].token_ids[1]"),
        (changed(("choices", 0, "prompt_token_ids"), [1, 2]), "usage.prompt_tokens"),
        (changed(("usage", "completion_tokens"), 3), "found 3, expected 2, the number of token ids"),
        (changed(("choices", 0, "finish_reason"), None), "finish_reason"),
        (changed(("choices", 0, "logprobs"), None), "logprobs"),
        (changed(("choices", 0, "logprobs", "token_logprobs"), [-1.0]), "found 1 values, expected 2"),
        (changed(("choices", 0, "logprobs", "token_logprobs"), [-1.0, None]), "token_logprobs[1]"),
    ],
)
def test_refuses_what_is_no_answer(given: Any, text: str) -> None:
    """Each way in which a record is no answer raises one line that names the place."""
    with pytest.raises(EvidenceError) as error:
        parse_answer(given, origin="x", logprobs=True)
    assert text in str(error.value)
    assert "\n" not in str(error.value)
