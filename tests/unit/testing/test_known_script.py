"""What the deterministic server does with one request, without a socket."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvqual.judge.gates.fidelity import SEEN_BY
from pytest_kvqual.testing.script import (
    FINISH,
    GO_ON,
    QUIRKS,
    Answer,
    ScriptError,
    event_sizes,
    read_script,
    steps,
)

ANSWER = Answer(request="a", model="m", created=1, prompt_tokens=3, prompt=b"[1,2,3]")


def plan(**script: Any) -> list[Any]:
    """The steps of a request of 5 tokens."""
    return list(steps(read_script({"max_tokens": 5, "kvqual_script": script}), ANSWER))


def test_default() -> None:
    """The first token is due 20 ms after the request, the others 10 ms apart; the header is sent at once."""
    found = plan()
    assert [(step.at_ns // 1_000_000, step.tokens) for step in found] == [
        (0, 0), (20, 1), (30, 1), (40, 1), (50, 1), (60, 1), (60, 0),
    ]  # fmt: skip
    assert [step.action for step in found] == [GO_ON] * 6 + [FINISH]
    assert found[-1].data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("name", QUIRKS)
def test_sent_is_what_the_script_says(name: str) -> None:
    """The tokens of all writes are those that the truth will state, and exactly the last step ends the answer."""
    script = read_script({"max_tokens": 11, "kvqual_script": {"quirk": name}})
    found = list(steps(script, ANSWER))
    assert sum(step.tokens for step in found) == sum(script.sent)
    assert [step.action == GO_ON for step in found] == [True] * (len(found) - 1) + [False]
    assert script.outcome == QUIRKS[name][0]


@given(st.integers(1, 200), st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple))
@settings(max_examples=50, deadline=None)
def test_event_sizes(tokens: int, sizes: tuple[int, ...]) -> None:
    """Every token is in one event, and no event but the last is smaller than asked."""
    found = event_sizes(tokens, sizes)
    assert sum(found) == tokens
    assert all(size == sizes[index % len(sizes)] for index, size in enumerate(found[:-1]))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"first": 1}, "unknown key 'first'"),
        ({"quirk": "sideways"}, "unknown quirk 'sideways'"),
        ({"quirk": ["dropped", "status-503"]}, "different failures"),
        ({"first_ms": -1}, "first_ms -1"),
        ({"first_ms": float("nan")}, "first_ms nan"),
        ({"gap_ms": True}, "gap_ms True"),
        ({"tokens": 0}, "0 tokens"),
        ({"per_event": 0}, "per_event 0"),
        ({"per_event": []}, "per_event"),
    ],
)
def test_refused(script: dict[str, Any], message: str) -> None:
    """A script that is not as described is refused in one line."""
    with pytest.raises(ScriptError, match=message):
        read_script({"kvqual_script": script})


def test_document_names_every_quirk_and_fault() -> None:
    """The tables of docs/fidelity.md have each quirk under its outcome, and each seeded fault with its rule."""
    text = (Path(__file__).parents[3] / "docs" / "fidelity.md").read_text(encoding="utf-8")
    rows = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    quirks = {name: row[0] for row in rows if len(row) == 2 for name in re.findall("`([a-z0-9-]+)`", row[1])}
    assert {name: quirks.get(name) for name in QUIRKS} == {name: outcome for name, (outcome, _) in QUIRKS.items()}
    faults = {
        row[0].strip("`"): frozenset(map(int, row[2].split(", ")))
        for row in rows
        if len(row) == 3 and row[2][0].isdigit()
    }
    assert faults == dict(SEEN_BY)
