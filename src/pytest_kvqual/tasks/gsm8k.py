"""GSM8K: grade-school problems, answered in free text that ends in ``#### NUMBER`` (Cobbe et al. 2021, section 2).

The prompt is ``Question: …``, a line ``Answer: …`` and an empty line for each worked question, then the question and
``Answer:``. The set's answers hold the calculator annotations ``<<16-3-4=9>>`` of that paper; no prompt shows them, and
their number is the question's grade.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pytest_kvqual.errors import StudyError
from pytest_kvqual.study.panels import PanelItem
from pytest_kvqual.tasks.numbers import last_number, normal, parse_number, read_number
from pytest_kvqual.tasks.segment import Reading, Segment
from pytest_kvqual.tasks.words import shown

MARK: Final = "####"

_ANNOTATION = re.compile(r"<<[^<>]*>>")
_LINE_END = re.compile(r"[\r\n]")


def read(segment: Segment, expected: str) -> Reading:
    """The answer in a segment: the one number behind its last ``####``, up to the line's end.

    It is right where it equals ``expected`` as a rational. Leniently, the segment's last number is.

    Raises:
        StudyError: ``expected`` is no number.
    """
    wanted = parse_number(expected)
    if wanted is None:
        raise StudyError(f"the expected answer: found {shown(expected)!r}, expected a number")
    text = segment.text
    lenient = last_number(text) == wanted
    mark = text.rfind(MARK)
    if mark < 0:
        return Reading(found=None, right=False, complete=segment.cut, lenient=lenient, reason=f"no '{MARK}'")
    rest = text[mark + len(MARK) :]
    end = _LINE_END.search(rest)
    line = rest if end is None else rest[: end.start()]
    closed = end is not None or segment.cut
    number = read_number(line)
    if number is None:
        what = shown(line.strip())
        return Reading(
            found=what or None, right=False, complete=closed, lenient=lenient,
            reason=f"found {what!r} behind '{MARK}', expected one number",
        )  # fmt: skip
    found = normal(number.value)
    right = number.value == wanted
    return Reading(
        found=found, right=right, complete=closed or number.end < len(line), lenient=lenient,
        reason="" if right else f"found {shown(found)}, expected {normal(wanted)}",
    )  # fmt: skip


def build_items(
    questions: Sequence[Mapping[str, str]],
    shots: Sequence[Mapping[str, str]],
    encode: Callable[[str], Sequence[int]],
    max_tokens: int,
) -> tuple[PanelItem, ...]:
    """One panel item for each question, in the order given.

    Args:
        questions: ``{"question", "answer"}``; each answer ends in ``#### NUMBER``.
        shots: The worked questions before each question, in the same form.
        encode: The token ids of a text, special tokens included.
        max_tokens: The output limit of each question, in tokens.

    Raises:
        StudyError: An answer does not end in ``#### NUMBER``; names the question by its place.
    """
    head = "".join(f"Question: {shot['question']}\nAnswer: {without_annotations(shot['answer'])}\n\n" for shot in shots)
    return tuple(
        PanelItem(
            id=f"gsm8k-{index:04d}",
            prompt=tuple(encode(f"{head}Question: {question['question']}\nAnswer:")),
            targets=(),
            max_tokens=max_tokens,
            expected=expected_answer(question["answer"], where=f"question {index}"),
            grade=_grade(question["answer"]),
        )
        for index, question in enumerate(questions)
    )


def expected_answer(answer: str, *, where: str) -> str:
    """The number behind the last ``####`` of a worked answer, in normal form (``1,450`` is ``1450``).

    Raises:
        StudyError: There is no ``####``, or something else than one number stands behind it.
    """
    _, mark, rest = answer.rpartition(MARK)
    value = parse_number(rest.strip()) if mark else None
    if value is None:
        raise StudyError(
            f"{where}: found an answer that ends {shown(answer[-40:])!r}, expected '{MARK} NUMBER' at its end"
        )
    return normal(value)


def without_annotations(answer: str) -> str:
    """A worked answer without its calculator annotations."""
    return _ANNOTATION.sub("", answer)


def _grade(answer: str) -> str:
    steps = len(_ANNOTATION.findall(answer))
    return f"{steps} step" if steps == 1 else f"{steps} steps"
