"""One raw response of ``POST /v1/completions``, and the capture record that keeps it, read strictly.

A body has keys that vary with the engine's version, so unknown ones are left alone; each key that is used must be there
and have its type. Token ids are what the model said; text is read only where an answer is scored by its words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_kvqual._decode import Table, one_line, parse_json
from pytest_kvqual.errors import EvidenceError

_RECORD = ("id", "order", "index", "status", "body", "error")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one request brought back.

    ``finish_reason`` is the engine's word (``length``, ``stop``). ``logprobs`` are nats, one per generated token, and
    ``text`` is the generated text: each None where it was not asked for.
    """

    id: str
    order: str
    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[float, ...] | None
    text: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A request that brought back no answer, and why: ``found the error 'ReadTimeout'``."""

    id: str
    order: str
    index: int
    reason: str


def parse_answer(record: object, *, origin: str, logprobs: bool) -> Answer:
    """The answer in one capture record ``{"id", "order", "index", "status", "body", "error"}``.

    Raises:
        EvidenceError: As :func:`parse_outcome`; or the request failed. The message names the place, after ``origin``.
    """
    outcome = parse_outcome(record, origin=origin, logprobs=logprobs)
    if isinstance(outcome, Failure):
        raise EvidenceError(f"{origin}, request '{one_line(outcome.id)}'{outcome.reason}")
    return outcome


def parse_outcome(record: object, *, origin: str, logprobs: bool = False, text: bool = False) -> Answer | Failure:
    """What one capture record ``{"id", "order", "index", "status", "body", "error"}`` says became of its request.

    A :class:`Failure` is a record with an error, with another status than 200, or with an error object under 200.

    Args:
        record: The record.
        origin: What errors name.
        logprobs: Whether the log-probabilities are wanted.
        text: Whether the text is wanted.

    Raises:
        EvidenceError: A key is missing, unknown or mistyped; the body has not exactly one choice; the token ids
            disagree with ``usage``; a log-probability is missing or not finite. Names the place, after ``origin``.
    """
    table = Table(record, origin=origin, error=EvidenceError, known=_RECORD)
    identity = table.string("id")
    where = f"{origin}, request '{one_line(identity)}'"
    order, index = table.string("order"), table.integer("index", minimum=0)

    def failure(reason: str) -> Failure:
        return Failure(id=identity, order=order, index=index, reason=reason)

    if table.raw("error") is not None:
        return failure(f": found the error {table.string('error')!r}, expected an answer")
    status = table.integer("status")
    if status != 200:
        return failure(f": found status {status}, expected 200; the body begins {_head(record)}")
    body = parse_json(table.text("body").encode("utf-8", "surrogatepass"), origin=f"{where}, body", error=EvidenceError)
    outer = Table(body, origin=f"{where}, body", error=EvidenceError, known=None)
    if outer.has("error") and outer.raw("error") is not None:
        return failure(", body: found an error object under status 200, expected an answer")
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
        text=choice.text("text") if text else None,
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
