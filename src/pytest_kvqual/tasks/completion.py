"""One raw response of ``POST /v1/completions``, and the capture record that keeps it, read strictly.

A body has keys that vary with the engine's version, so unknown ones are left alone; each key that is used must be there
and have its type. Text is never used: token ids are what the model said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_kvqual._decode import Table, parse_json
from pytest_kvqual.errors import EvidenceError

_RECORD = ("id", "order", "index", "status", "body", "error")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one request brought back.

    ``finish_reason`` is the engine's word (``length``, ``stop``). ``logprobs`` are nats, one per generated token, or
    None where none were asked for.
    """

    id: str
    order: str
    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[float, ...] | None


def parse_answer(record: object, *, origin: str, logprobs: bool) -> Answer:
    """The answer in one capture record ``{"id", "order", "index", "status", "body", "error"}``.

    Raises:
        EvidenceError: A key is missing, unknown or mistyped; the request failed, was answered with another status than
            200 or with an error object; the body has not exactly one choice; the token ids disagree with ``usage``; a
            log-probability is missing or not finite. The message names the place, after ``origin``.
    """
    table = Table(record, origin=origin, error=EvidenceError, known=_RECORD)
    identity = table.string("id")
    where = f"{origin}, request '{identity}'"
    order, index = table.string("order"), table.integer("index", minimum=0)
    error = table.raw("error")
    if error is not None:
        raise EvidenceError(f"{where}: found the error {error!r}, expected an answer")
    status = table.integer("status")
    if status != 200:
        raise EvidenceError(f"{where}: found status {status}, expected 200; the body begins {_head(record)}")
    body = parse_json(table.text("body").encode("utf-8", "surrogatepass"), origin=f"{where}, body", error=EvidenceError)
    outer = Table(body, origin=f"{where}, body", error=EvidenceError, known=None)
    if outer.has("error") and outer.raw("error") is not None:
        raise EvidenceError(f"{where}, body: found an error object under status 200, expected an answer")
    choices = outer.raw("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        outer.fail("choices", f"{len(choices) if isinstance(choices, list) else 'no list'} choices", "exactly 1")
    choice = Table(choices[0], origin=f"{where}, body", error=EvidenceError, known=None, path="choices[0]")
    prompt = choice.integers("prompt_token_ids", minimum=0)
    tokens = choice.integers("token_ids", minimum=0)
    usage = outer.table("usage", known=None)
    for key, ids in (("prompt_tokens", prompt), ("completion_tokens", tokens)):
        if usage.integer(key) != len(ids):
            usage.fail(key, f"{usage.integer(key)}", f"{len(ids)}, the number of token ids in the choice")
    return Answer(
        id=identity,
        order=order,
        index=index,
        prompt_token_ids=prompt,
        token_ids=tokens,
        finish_reason=choice.string("finish_reason"),
        logprobs=_logprobs(choice, len(tokens)) if logprobs else None,
    )


def _logprobs(choice: Table, expected: int) -> tuple[float, ...]:
    inner = choice.table("logprobs", known=None)
    values = inner.numbers("token_logprobs")
    if len(values) != expected:
        inner.fail("token_logprobs", f"{len(values)} values", f"{expected}, one per token id")
    return values


def _head(record: object) -> str:
    body = record.get("body") if isinstance(record, Mapping) else None
    return repr(body[:80]) if isinstance(body, str) else "with no text"
