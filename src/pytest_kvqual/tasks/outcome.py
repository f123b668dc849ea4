"""What became of one question of a scored task: right, wrong, empty, truncated or an error, and nothing else.

What is no answer is no wrong answer: an empty text, one that the token limit cut, and a failed request are kinds of
their own, which a study bounds. Whatever is damaged in a record is no outcome at all and raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from pytest_kvqual.errors import EvidenceError, StudyError
from pytest_kvqual.tasks import gsm8k, recall, retrieval
from pytest_kvqual.tasks.completion import Answer, Failure, parse_outcome
from pytest_kvqual.tasks.nll import check_tokens
from pytest_kvqual.tasks.segment import Reading, Segment, segment
from pytest_kvqual.tasks.words import shown

if TYPE_CHECKING:
    from pytest_kvqual.study.model import PreservationRules


class Kind(str, Enum):
    """The five kinds of outcome. Each question of a capture has exactly one."""

    RIGHT = "right"
    WRONG = "wrong"
    EMPTY = "empty"
    TRUNCATED = "truncated"
    ERROR = "error"


class Item(Protocol):
    """What scoring needs of a panel item."""

    @property
    def id(self) -> str:
        """Its name within the panel."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids."""

    @property
    def max_tokens(self) -> int:
        """The output limit in tokens."""

    @property
    def expected(self) -> str:
        """The right answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One question's outcome.

    ``found``: the answer in normal form, or what stood in its place, printable and cut to a line; None where there is
    nothing. ``lenient``: the task's lenient rule finds the expected answer; reported, decides nothing. ``token_ids``:
    the generated tokens; empty for an error. ``reason``: why it is not right; empty where it is.
    """

    id: str
    kind: Kind
    found: str | None
    lenient: bool
    token_ids: tuple[int, ...]
    reason: str


READERS: Final[Mapping[str, Callable[[Segment, str], Reading]]] = MappingProxyType(
    {"retrieval": retrieval.read, "recall": recall.read, "gsm8k": gsm8k.read}
)
"""The strict parser of each scored task."""


def score(task: str, record: object, *, item: Item, rules: PreservationRules, origin: str) -> Scored:
    """The outcome of one capture record.

    Args:
        task: One of :data:`READERS`.
        record: As :func:`~pytest_kvqual.tasks.completion.parse_outcome` reads it.
        item: The panel item that was asked.
        rules: The study's rules of this task.
        origin: What errors name.

    Raises:
        EvidenceError: The record is damaged, or answers another question: another id or prompt, more tokens than
            ``item.max_tokens``, ``length`` with another number of them, or an unknown finish reason.
        StudyError: ``task`` is no scored task, or the item's expected answer is none of the task's.
    """
    if task not in READERS:
        raise StudyError(f"found the task {task!r}, expected one of {', '.join(READERS)}")
    answer = parse_outcome(record, origin=origin, text=True)
    if answer.id != item.id:
        raise EvidenceError(f"{origin}: found an answer to {shown(answer.id)!r}, expected one to {item.id!r}")
    if isinstance(answer, Failure):
        return Scored(
            id=item.id, kind=Kind.ERROR, found=None, lenient=False, token_ids=(), reason=answer.reason.lstrip(":, ")
        )
    where = f"{origin}, request '{item.id}'"
    check_tokens(f"{where}, prompt", answer.prompt_token_ids, item.prompt)
    _check_end(answer, item.max_tokens, where)
    kind, reading = _decide(task, answer, item.expected, rules)
    return Scored(
        id=item.id, kind=kind, found=None if reading.found is None else shown(reading.found), lenient=reading.lenient,
        token_ids=answer.token_ids, reason=reading.reason,
    )  # fmt: skip


def _check_end(answer: Answer, max_tokens: int, where: str) -> None:
    count = len(answer.token_ids)
    if answer.text and not count:
        raise EvidenceError(f"{where}: found a text and no token, expected the tokens that it was made of")
    if answer.finish_reason not in ("stop", "length"):
        raise EvidenceError(
            f"{where}: found finish_reason {shown(answer.finish_reason)!r}, expected 'stop' or 'length'"
        )
    if count > max_tokens or (answer.finish_reason == "length" and count != max_tokens):
        raise EvidenceError(
            f"{where}: found {count} tokens and finish_reason '{answer.finish_reason}', expected {max_tokens} with "
            f"'length' or at most {max_tokens} with 'stop'"
        )


def _decide(task: str, answer: Answer, expected: str, rules: PreservationRules) -> tuple[Kind, Reading]:
    part = segment(answer.text or "", stop=rules.stop, run_on=rules.run_on, reasoning=rules.reasoning)
    limited = answer.finish_reason == "length"
    reading = READERS[task](part, expected)
    if limited and part.unfinished:
        return Kind.TRUNCATED, _because(reading, "the token limit came inside the reasoning")
    if not part.text.strip():
        return Kind.EMPTY, _because(reading, "the reasoning never ended" if part.unfinished else "no text")
    if limited and not reading.complete:
        cut = "the token limit may have cut the answer"
        return Kind.TRUNCATED, _because(reading, f"{cut}: {reading.reason}" if reading.reason else cut)
    return (Kind.RIGHT if reading.right else Kind.WRONG), reading


def _because(reading: Reading, reason: str) -> Reading:
    return Reading(found=reading.found, right=False, complete=reading.complete, lenient=reading.lenient, reason=reason)
