"""A timing panel that would time warm prompts, or too few, is refused before anything is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trial_records import PARITY, RULES

from pytest_kvqual.errors import StudyError
from pytest_kvqual.study.panels import Panel, PanelItem, _check_timing

BLOCK = 4


def panel(*, measured: int = 10, warm_up: int = 2, canaries: int = 2) -> Panel:
    """A panel of prompts that differ from their first token on; canaries have the parity panel's prompts."""
    items = [
        PanelItem(id=f"{grade}-{index}", prompt=(place, index, 0, 0, 0), targets=(), max_tokens=4, grade=grade)
        for place, (grade, count) in enumerate((("measured", measured), ("warm-up", warm_up)), start=100)
        for index in range(count)
    ]
    items += [
        PanelItem(id=it.id, prompt=it.prompt, targets=(), max_tokens=4, grade="canary", expected=f"q{index}")
        for index, it in enumerate(parity(canaries).items)
    ]
    return Panel(task="timing", length=None, items=tuple(items), sha256="0" * 64)


def parity(count: int) -> Panel:
    """The parity panel's items, each with a first block of its own."""
    items = [
        PanelItem(id=f"q{index}", prompt=(200, index, 0, 0, 0), targets=(), max_tokens=4) for index in range(count)
    ]
    return replace(PARITY, items=tuple(items))


def changed(found: Panel, place: int, **changes: object) -> Panel:
    """The panel with one item changed."""
    items = list(found.items)
    items[place] = replace(items[place], **changes)  # type: ignore[arg-type]
    return replace(found, items=tuple(items))


def test_a_panel_of_cold_prompts_is_accepted() -> None:
    """As many as the cells, the warm-up and the canaries of all cells need."""
    _check_timing(RULES, panel(), parity(2), BLOCK)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (panel(measured=9), "9 items of grade measured, expected at least 10"),
        (panel(warm_up=1), "1 items of grade warm-up, expected at least 2"),
        (panel(canaries=1), "1 items of grade canary, expected at least 2"),
        (changed(panel(), 1, prompt=panel().items[0].prompt), "first block of 'measured-0' in 'measured-1'"),
        (changed(panel(), 10, prompt=panel().items[0].prompt), "first block of 'measured-0' in 'warm-up-0'"),
        (changed(panel(), 10, prompt=(*panel().items[0].prompt[:BLOCK], 9)), "first block of 'measured-0'"),
        (changed(panel(), 12, prompt=(7, 7, 7, 7, 7)), "the canary 'q0' with another prompt than 'q0'"),
        (changed(panel(), 12, expected="q9"), "the canary 'q0' with another prompt than 'q9'"),
    ],
    ids=["measured", "warm-up", "canaries", "sent twice", "warmed up", "one prefix", "canary", "no reference"],
)  # fmt: skip
def test_a_panel_that_times_warm_prompts_is_one_line(found: Panel, words: str) -> None:
    """Too few prompts, a block that was seen before it is measured, or a canary without its reference."""
    with pytest.raises(StudyError) as caught:
        _check_timing(RULES, found, parity(2), BLOCK)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
