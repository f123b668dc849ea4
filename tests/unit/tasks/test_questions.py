"""Losses and outputs, taken from raw answers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.tasks.nll import check_tokens, document_losses
from pytest_kvqual.tasks.parity import reference_output, served_output


def record(tokens: list[int], *, finish: str = "length", logprobs: list[float] | None = None) -> dict[str, Any]:
    """A capture record of prompt (1, 2)."""
    choice = {
        "prompt_token_ids": [1, 2],
        "token_ids": tokens,
        "finish_reason": finish,
        "logprobs": {"token_logprobs": logprobs},
    }
    body = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": len(tokens)}})
    return {"id": "a", "order": "forward", "index": 0, "status": 200, "body": body, "error": None}


def test_losses_leave_step_zero_out() -> None:
    """Losses are the negated log-probabilities of targets 1 and on; the prefill's is dropped."""
    _, document = document_losses(
        record([7, 8, 9], logprobs=[-9.0, -0.25, 0.0]), origin="x", prompt=(1, 2), targets=(7, 8, 9)
    )
    assert document.losses == (0.25, 0.0)


@pytest.mark.parametrize("value", [5e-324, 0.5, -9999.0, -10000.0])
def test_a_log_probability_that_is_none_is_refused(value: float) -> None:
    """Above 0, however little, and at or below the engine's clamp a value is no measured log-probability."""
    with pytest.raises(EvidenceError, match="step 1: found"):
        document_losses(record([7, 8], logprobs=[-1.0, value]), origin="x", prompt=(1, 2), targets=(7, 8))


def test_the_value_next_to_the_clamp_is_measured() -> None:
    """The first value above the clamp counts."""
    value = math.nextafter(-9999.0, 0)
    _, document = document_losses(record([7, 8], logprobs=[-1.0, value]), origin="x", prompt=(1, 2), targets=(7, 8))
    assert document.losses == (-value,)


def test_the_teacher_must_have_been_registered() -> None:
    """A token that is not its target shows that nothing was forced."""
    with pytest.raises(EvidenceError, match="targets: found token 8 at position 1, expected 9"):
        document_losses(record([7, 8], logprobs=[-1.0, -1.0]), origin="x", prompt=(1, 2), targets=(7, 9))


@pytest.mark.parametrize(
    ("found", "expected", "text"),
    [
        ((1, 2), (1, 2, 3), "found 2 tokens, expected 3"),
        ((), (1,), "found 0 tokens, expected 1"),
        ((2, 2, 105), (2, 105, 105), "found token 2 at position 1, expected 105"),
    ],
)
def test_token_lists_differ_by_place(found: tuple[int, ...], expected: tuple[int, ...], text: str) -> None:
    """Length first, then the first position that differs."""
    check_tokens("x", expected, expected)
    with pytest.raises(EvidenceError, match=text):
        check_tokens("x", found, expected)


@pytest.mark.parametrize(("tokens", "finish"), [([5, 6, 7], "length"), ([5], "stop"), ([5, 6, 7], "stop")])
def test_an_output_fits_its_finish_reason(tokens: list[int], finish: str) -> None:
    """All tokens with ``length``; one or more, up to all, with ``stop``; over HTTP and in process alike."""
    served = served_output(record(tokens, finish=finish), origin="x", prompt=(1, 2), max_tokens=3)
    given = {"order": "forward", "index": 0, "id": "a", "token_ids": tokens, "finish_reason": finish}
    assert served == reference_output(given, origin="x", prompt=(1, 2), max_tokens=3)


@pytest.mark.parametrize(
    ("tokens", "finish"), [([5], "length"), ([], "stop"), ([5, 6, 7, 8], "stop"), ([5, 6, 7], "abort")]
)
def test_an_output_that_does_not_fit_is_refused(tokens: list[int], finish: str) -> None:
    """Too few tokens, none, too many, or another finish reason is no output."""
    with pytest.raises(EvidenceError, match=f"finish_reason '{finish}'"):
        served_output(record(tokens, finish=finish), origin="x", prompt=(1, 2), max_tokens=3)


def test_a_reference_may_keep_its_prompt() -> None:
    """Where the reference kept the prompt it must be the panel's."""
    given = {"order": "forward", "index": 0, "id": "a", "token_ids": [5], "finish_reason": "stop"}
    reference_output({**given, "prompt_token_ids": [1, 2]}, origin="x", prompt=(1, 2), max_tokens=3)
    with pytest.raises(EvidenceError, match="prompt 'a': found token 3 at position 1, expected 2"):
        reference_output({**given, "prompt_token_ids": [1, 3]}, origin="x", prompt=(1, 2), max_tokens=3)
