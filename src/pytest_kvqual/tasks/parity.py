"""Serial parity: the tokens of one prompt, from the served model and from the same engine in process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_kvqual._decode import Table
from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.tasks.completion import parse_answer
from pytest_kvqual.tasks.nll import check_tokens

_REFERENCE = ("order", "index", "id", "token_ids", "finish_reason", "prompt_token_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """One prompt's greedy tokens. ``index`` is its place in the panel, from 0, whatever the order."""

    id: str
    order: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: str


def served_output(record: object, *, origin: str, prompt: Sequence[int], max_tokens: int) -> Output:
    """The output in one HTTP capture record.

    Raises:
        EvidenceError: As :func:`~pytest_kvqual.tasks.completion.parse_answer`; or the prompt came back changed; or the
            tokens do not fit the finish reason.
    """
    answer = parse_answer(record, origin=origin, logprobs=False)
    check_tokens(f"{origin}, prompt '{answer.id}'", answer.prompt_token_ids, prompt)
    return _checked(
        Output(
            id=answer.id,
            order=answer.order,
            index=answer.index,
            token_ids=answer.token_ids,
            finish_reason=answer.finish_reason,
        ),
        origin,
        max_tokens,
    )


def reference_output(record: object, *, origin: str, prompt: Sequence[int], max_tokens: int) -> Output:
    """The output in one record of the in-process reference ``{"order", "index", "id", "token_ids", "finish_reason"}``.

    Raises:
        EvidenceError: A key is missing, unknown or mistyped; the prompt, where it is kept, differs; or the tokens do
            not fit the finish reason.
    """
    table = Table(record, origin=origin, error=EvidenceError, known=_REFERENCE)
    output = Output(
        id=table.string("id"),
        order=table.string("order"),
        index=table.integer("index", minimum=0),
        token_ids=table.integers("token_ids", minimum=0),
        finish_reason=table.string("finish_reason"),
    )
    if table.has("prompt_token_ids"):
        check_tokens(f"{origin}, prompt '{output.id}'", table.integers("prompt_token_ids", minimum=0), prompt)
    return _checked(output, origin, max_tokens)


def _checked(output: Output, origin: str, max_tokens: int) -> Output:
    where = f"{origin}, prompt '{output.id}'"
    count = len(output.token_ids)
    if output.finish_reason == "length" and count == max_tokens:
        return output
    if output.finish_reason == "stop" and 1 <= count <= max_tokens:
        return output
    raise EvidenceError(
        f"{where}: found {count} tokens and finish_reason '{output.finish_reason}', expected {max_tokens} with "
        f"'length' or 1 to {max_tokens} with 'stop'"
    )
