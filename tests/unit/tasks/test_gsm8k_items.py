"""GSM8K's prompts, expected answers and grades."""

from __future__ import annotations

import pytest

from pytest_kvqual.errors import StudyError
from pytest_kvqual.tasks.gsm8k import build_items, expected_answer, without_annotations

SHOT = {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4.\n#### 4"}
QUESTIONS = [
    {"question": "Ten pens at $145 each?", "answer": "They cost 10 * 145 = $<<10*145=1450>>1,450.\n#### 1,450"},
    {"question": "A and B?", "answer": "<<1+1=2>>2 <<2*3=6>>6 <<6/2=3>>3\n#### -3"},
    {"question": "None?", "answer": "#### 0"},
]


def characters(text: str) -> list[int]:
    """One token for each character."""
    return [ord(char) for char in text]


def test_a_prompt_is_the_shots_and_the_question() -> None:
    """Shots come without calculator annotations, each with an empty line behind; the question ends at its answer."""
    item = build_items(QUESTIONS, [SHOT, SHOT], characters, 7)[0]
    shot = "Question: Two and two?\nAnswer: 2 + 2 = 4.\n#### 4\n\n"
    assert "".join(map(chr, item.prompt)) == f"{shot}{shot}Question: Ten pens at $145 each?\nAnswer:"
    assert item.max_tokens == 7
    assert item.targets == ()


def test_items_are_numbered_and_graded() -> None:
    """Ids follow the set's order; the expected answer has no separators; the grade is the number of calculations."""
    items = build_items(QUESTIONS, [SHOT], characters, 7)
    assert [(item.id, item.expected, item.grade) for item in items] == [
        ("gsm8k-0000", "1450", "1 step"),
        ("gsm8k-0001", "-3", "3 steps"),
        ("gsm8k-0002", "0", "0 steps"),
    ]


@pytest.mark.parametrize("answer", ["12", "#### twelve", "#### ", "#### 12\n#### 1,2", "#### 12\nDone 5"])
def test_an_answer_without_its_number_is_refused(answer: str) -> None:
    """The number behind the last mark ends the answer, or the question is named."""
    with pytest.raises(StudyError, match=r"question 3: found an answer that ends .* expected '#### NUMBER'"):
        expected_answer(answer, where="question 3")


def test_annotations_are_dropped() -> None:
    """All of them, and nothing else."""
    assert without_annotations("a <<1+1=2>>2 < 3 << 4 <<5-1=4>>4") == "a 2 < 3 << 4 4"
