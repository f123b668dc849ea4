"""What a calibration notes of each layer's V."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.worker.calibration import watch


class Impl:
    """A layer's backend that counts its updates."""

    def __init__(self) -> None:
        self.updates = 0

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        self.updates += 1


def watched(layers: int = 2) -> Any:
    """A worker with so many layers, watched."""
    made = {f"layers.{index}": SimpleNamespace(impl=Impl()) for index in range(layers)}
    worker = SimpleNamespace(kvqual_layers=lambda: made)
    watch(worker)
    return worker


def hand(worker: Any, layer: int, values: torch.Tensor, slots: list[int]) -> None:
    """Hand V of ``[rows, heads, size]`` to one layer's cache."""
    held = worker.kvqual_layers()[f"layers.{layer}"]
    held.impl.do_kv_cache_update(held, values, values, None, torch.tensor(slots))


@given(
    st.lists(
        st.lists(st.integers(-300, 300), min_size=1, max_size=6).flatmap(
            lambda rows: st.tuples(st.just(rows), st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
        ),
        max_size=4,
    )
)
def test_the_largest_is_over_the_rows_that_were_written(steps: list[tuple[list[int], list[bool]]]) -> None:
    """Rows without a slot and rows behind the last slot do not count; every other does, whatever its sign."""
    worker, expected = watched(), 0.0
    for rows, written in steps:
        values = torch.tensor(rows, dtype=torch.float16).reshape(-1, 1, 1)
        padded = torch.cat([values, torch.full((2, 1, 1), 999.0, dtype=torch.float16)])
        hand(worker, 1, padded, [index if is_written else -1 for index, is_written in enumerate(written)])
        expected = max([expected, *(abs(row) for row, is_written in zip(rows, written, strict=True) if is_written)])
    assert worker.kvqual_largest_v() == [
        {"layer": "layers.0", "largest": 0.0},
        {"layer": "layers.1", "largest": expected},
    ]
    assert worker.kvqual_layers()["layers.1"].impl.updates == len(steps)


def test_a_reset_begins_anew() -> None:
    """What the warm-up wrote does not count."""
    worker = watched()
    hand(worker, 0, torch.full((1, 1, 2), 9.0), [0])
    assert worker.kvqual_largest_v(True)[0]["largest"] == 9.0
    hand(worker, 0, torch.full((1, 1, 2), 2.0), [0])
    assert worker.kvqual_largest_v()[0]["largest"] == 2.0


def test_what_is_no_number_is_told_as_text() -> None:
    """NaN stays NaN whatever comes after it, and JSON can carry it."""
    worker = watched(1)
    hand(worker, 0, torch.tensor([[[math.nan]]]), [0])
    hand(worker, 0, torch.tensor([[[4.0]]]), [0])
    assert worker.kvqual_largest_v() == [{"layer": "layers.0", "largest": "nan"}]
