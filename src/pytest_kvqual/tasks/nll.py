"""Teacher-forced negative log-likelihood: the losses of one document from its raw response body.

A document's prompt is its first ``length - 1`` tokens, its targets the next 129. Target 0 comes from the prefill (step
zero) and is excluded; targets 1 to 128 are decode steps over the cache. The engine returns the raw log-probability of
each forced target, so a loss is read and not derived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.tasks.completion import Answer, parse_answer

CLAMP = -9999.0
"""vLLM writes each log-probability at or below this, minus infinity included, as this value: no measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentLoss:
    """One document's losses: ``losses`` in nats, one per decode step, step zero excluded."""

    id: str
    losses: tuple[float, ...]


def document_losses(
    record: object, *, origin: str, prompt: Sequence[int], targets: Sequence[int]
) -> tuple[Answer, DocumentLoss]:
    """The answer in a capture record and the losses that it holds, with the teacher's registration checked.

    The teacher is registered for this document when the prompt came back as sent and every returned token is its
    target.

    Raises:
        EvidenceError: As :func:`~pytest_kvqual.tasks.completion.parse_answer`; or the prompt or a target differs; a
            log-probability is above 0, or at the engine's clamp.
    """
    answer = parse_answer(record, origin=origin, logprobs=True)
    where = f"{origin}, document '{answer.id}'"
    check_tokens(f"{where}, prompt", answer.prompt_token_ids, prompt)
    check_tokens(f"{where}, targets", answer.token_ids, targets)
    if answer.finish_reason != "length":
        raise EvidenceError(f"{where}: found finish_reason '{answer.finish_reason}', expected 'length'")
    values = answer.logprobs or ()
    for step, value in enumerate(values):
        if not value <= 0.0:
            raise EvidenceError(f"{where}, step {step}: found a log-probability of {value!r}, expected at most 0")
        if not value > CLAMP:
            raise EvidenceError(f"{where}, step {step}: found {value!r}, the engine's clamp, expected a measured value")
    return answer, DocumentLoss(id=answer.id, losses=tuple(-value for value in values[1:]))


def check_tokens(where: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Raise :class:`EvidenceError` at the first position where two token lists differ, lengths included."""
    if len(found) != len(expected):
        raise EvidenceError(f"{where}: found {len(found)} tokens, expected {len(expected)}")
    for position, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one != other:
            raise EvidenceError(f"{where}: found token {one} at position {position}, expected {other}")
