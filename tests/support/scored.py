"""One question of a scored task, its rules and its capture record, for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pytest_kvqual.study.model import PreservationRules
from pytest_kvqual.study.panels import PanelItem

LIMIT = 8
PROMPT = (1, 2)


def item(expected: str) -> PanelItem:
    """The question ``q``, of two prompt tokens and at most eight generated ones."""
    return PanelItem(id="q", prompt=PROMPT, targets=(), max_tokens=LIMIT, expected=expected)


def rules(
    *, stop: Sequence[str] = (), run_on: Sequence[str] = (), reasoning: Sequence[str] | None = None
) -> PreservationRules:
    """Rules of which the parser reads these three."""
    return PreservationRules(
        limit=0.05,
        confidence=0.95,
        floor=0.6,
        max_tokens=LIMIT,
        stop=tuple(stop),
        run_on=tuple(run_on),
        reasoning=None if reasoning is None else (reasoning[0], reasoning[1]),
        empty_share=0.0,
        truncated_share=0.0,
        error_share=0.0,
        poison_questions=1,
    )


def record(text: str, finish_reason: str = "stop", **changes: Any) -> dict[str, Any]:
    """The capture record of an answer to :func:`item`."""
    tokens = [5] * (LIMIT if finish_reason == "length" else 3)
    body = {
        "id": "cmpl-1",
        "choices": [
            {"index": 0, "text": text, "finish_reason": finish_reason, "token_ids": tokens, "prompt_token_ids": PROMPT}
        ],
        "usage": {"prompt_tokens": len(PROMPT), "completion_tokens": len(tokens)},
    }
    return {
        "id": "q",
        "order": "forward",
        "index": 0,
        "status": 200,
        "body": json.dumps(body),
        "error": None,
        **changes,
    }
