"""What the parsers make of an answer does not change unnoticed.

Each case of ``transcripts/*.json`` was written by hand, its outcome too: ``text`` and ``finish_reason`` (or a whole
``record``) of a ``task`` under ``rules``; ``kind`` (``refused``: no evidence, with ``error`` in the message), ``found``
and ``lenient``; ``why`` says what the case shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scored import item, record, rules

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.tasks.outcome import Kind, score

FILES = sorted((Path(__file__).parent / "transcripts").glob("*.json"))
CASES = [
    pytest.param(case, id=f"{path.stem}: {case['name']}") for path in FILES for case in json.loads(path.read_bytes())
]


@pytest.mark.parametrize("case", CASES)
def test_transcript(case: dict[str, Any]) -> None:
    """Kind, found answer and lenient match are those that were written down."""
    asked = item(case["expected"])
    if "record" in case:
        given = {"id": asked.id, "order": "forward", "index": 0, **case["record"]}
    else:
        given = record(case["text"], case["finish_reason"])
    if case["kind"] == "refused":
        with pytest.raises(EvidenceError) as error:
            score(case["task"], given, item=asked, rules=rules(**case["rules"]), origin="x")
        assert case["error"] in str(error.value)
        return
    found = score(case["task"], given, item=asked, rules=rules(**case["rules"]), origin="x")
    assert (found.kind, found.found, found.lenient) == (Kind(case["kind"]), case["found"], case["lenient"]), case["why"]
    assert (found.reason == "") is (found.kind is Kind.RIGHT)
    assert found.reason.isprintable()


def test_transcripts_cover_every_kind_of_every_task() -> None:
    """Each task has a case of each kind that a text can have; errors and refusals have theirs."""
    kinds = {(case.values[0]["task"], case.values[0]["kind"]) for case in CASES}  # type: ignore[index]
    assert {
        (task, kind) for task in ("gsm8k", "retrieval") for kind in ("right", "wrong", "empty", "truncated")
    } < kinds
    assert {("recall", "right"), ("recall", "wrong"), ("gsm8k", "error"), ("gsm8k", "refused")} < kinds


def test_the_documented_transcripts_are_the_golden_ones() -> None:
    """Each row of the table in docs/tasks.md is a case, with its text and its kind."""
    text = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and '| `"' in line]
    made = set()
    for path in FILES:
        for case in json.loads(path.read_bytes()):
            if "text" in case:
                shown = json.dumps(case["text"], ensure_ascii=False)
                leniently = "right" if case["lenient"] else "not right"
                made.add(
                    f"| {case['name']} | `{shown}` | {case['finish_reason']} | {case['expected']} | {case['kind']} | "
                    f"{leniently} | {case['why']} |"
                )
    assert len(rows) > 30
    assert not set(rows) - made
