"""The window: all oracles over one run of steps, driven without an engine."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from window_driver import BLOCK, BLOCKS, HKV, HQ, SIZE, Driver, Maps, attention, findings, workload

from pytest_kvqual.kv.formats import Cells
from pytest_kvqual.oracles import fingerprints, reproducer
from pytest_kvqual.oracles import window as window_module
from pytest_kvqual.oracles.window import CONDITIONS, SECTIONS

FORMATS = (
    "k16v16", "k16v8", "cpu-attn-bf16", "k8v8", "k8v8-inline", "cpu-attn-fp8-e4m3", "cpu-attn-fp8-e5m2-toward-zero",
)  # fmt: skip
FIRST, SECOND = "layers.0.attn", "layers.1.attn"
ROWS = 25
"""Rows of the workload."""


def _run(driver: Driver) -> dict[str, Any]:
    workload(driver)
    return driver.finish()


def _once(change: Callable[[Any], None], *, layer: str = FIRST, step: int = 1) -> Callable[[Any], None]:
    """A change of the maps of one layer in one step, counted from 0."""
    calls = iter(range(10**6))

    def change_once(maps: Maps) -> None:
        if next(calls) // 2 == step and maps.layer == layer:
            change(maps)

    return change_once


# -- healthy runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("window", [None, 3, 5])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_healthy_run_has_no_findings(kv_format: str, window: int | None, probe: bool) -> None:
    """Every cell, row and map is checked and nothing is objected to, in every format, with and without a window."""
    record = _run(Driver(kv_format=kv_format, window=window, probe=probe, fills=True, seed=3))
    assert findings(record) == {}
    assert record["placement"]["worst_ratio"] < 1
    assert record["reproducers"] == []


def test_the_record_counts_what_was_checked() -> None:
    """Each count of the record, over a run whose numbers are known."""
    record = _run(Driver(fills=True))
    json.dumps(record)
    assert {key: record[key] for key in ("steps", "layers", "probe", "fills")} == {
        "steps": 4,
        "layers": 2,
        "probe": False,
        "fills": True,
    }
    assert record["rows"] == {"scheduled": ROWS, "prefix": 0, "recomputed": 0}
    # At-block: b's first step, a and b... counted by length: 4 and 8 are multiples of 4, and so on.
    assert record["conditions"] == {
        "mixed": 2,
        "chunked": 1,
        "below-block": 2,
        "at-block": 2,
        "above-block": 4,
        "reused-block": 2,
        "top-of-pool": 3,
        "shrinking-batch": 1,
        "prefix-hit": 0,
        "resumed": 0,
        "padding": 4,
    }
    assert tuple(record["conditions"]) == CONDITIONS
    nothing: dict[str, Any] = {"findings": [], "findings_total": 0, "kinds": {}}
    assert record["row_map"] == {"checked": ROWS, **nothing, "self_test": "caught"}
    assert record["stale-maps"] == {"tables_compared": 18, "maps_changed": 3, **nothing}
    # History: lengths 5, 4 | 5, 9, 3 | 4, 10 | 11, 5. Blocks held: 3, 6, 6, 6 (b's come back), and at the end 6.
    assert record["routing"] == {
        "cells_checked": 2 * (3 + 6 + 6 + 6 + 6) * BLOCK * HKV,
        "writes_checked": 2 * ROWS,
        "history_cells": 2 * (5 + 4 + 5 + 9 + 3 + 4 + 10 + 11 + 5),
        "padding_rows": 2 * (2 + 1),
        "blocks_compared": 2 * (BLOCKS - 6),
        **nothing,
    }
    assert record["shifted-outputs"] == {"rows_checked": 2 * ROWS, **nothing, "layers": 2, "self_test": "caught"}
    assert record["placement"] == {
        "rows_checked": 2 * ROWS,
        **nothing,
        "layers": 2,
        "ambiguous_rows": 0,
        "worst_ratio": record["placement"]["worst_ratio"],
        "worst_gain": 0.0,
    }
    assert 0 < record["placement"]["worst_ratio"] < 1
    every = {"nan": 2 * ROWS, "large": 2 * ROWS, "other-request": 2 * ROWS}
    assert record["replay"] == {"cells_filled": record["replay"]["cells_filled"], **nothing, "rows_compared": every}
    # Tails, the blocks behind, 0, the last and the one that the driver's tables lead to, where nobody holds them.
    assert record["replay"]["cells_filled"] == 2 * 68 * HKV


def test_sections_and_conditions_are_those_of_the_contract() -> None:
    """The sections of a record are the gates' names."""
    assert SECTIONS == ("row_map", "stale-maps", "routing", "shifted-outputs", "placement", "replay")
    driver = Driver()
    for section in SECTIONS:
        assert driver.oracle[section].findings_total == 0


def test_an_empty_window_has_checked_nothing() -> None:
    """A window without steps reports zero everywhere and self-tests that were not passed."""
    record = Driver(fills=True, probe=True).finish()
    assert (record["steps"], record["layers"], record["probe"], record["fills"]) == (0, 0, True, True)
    assert set(record["rows"].values()) == set(record["conditions"].values()) == {0}
    assert record["row_map"]["self_test"] == record["shifted-outputs"]["self_test"] == "missed"
    assert [record["routing"][name] for name in ("cells_checked", "writes_checked", "history_cells")] == [0, 0, 0]
    assert record["routing"]["padding_rows"] == 0
    assert record["routing"]["blocks_compared"] == 2 * BLOCKS
    assert [record["placement"][name] for name in ("rows_checked", "layers", "worst_ratio")] == [0, 0, 0.0]
    assert record["shifted-outputs"]["rows_checked"] == record["row_map"]["checked"] == 0
    assert record["stale-maps"]["tables_compared"] == record["stale-maps"]["maps_changed"] == 0
    assert record["replay"]["rows_compared"] == {"nan": 0, "large": 0, "other-request": 0}
    assert findings(record) == {}


def test_a_window_that_was_not_opened_compares_no_untouched_block() -> None:
    """Blocks that were not digested are not said to be unchanged."""
    driver = Driver()
    for layer in driver.oracle._layers.values():
        layer.initial = torch.empty(0)
    record = _run(driver)
    assert record["routing"]["blocks_compared"] == 0
    assert findings(record) == {}


def test_updates_that_were_not_seen_are_not_checked() -> None:
    """Without cache updates no write and no row counts, and attention over an unseen history is a finding."""
    record = _run(Driver(skip_update=True, fills=True))
    assert (record["layers"], record["routing"]["writes_checked"]) == (0, 0)
    assert record["placement"]["rows_checked"] == record["shifted-outputs"]["rows_checked"] == 0
    assert record["placement"]["layers"] == 0
    assert record["placement"]["kinds"] == {"unseen-history": 8}
    assert record["placement"]["findings"][0] == ("layers.0.attn: the ledger does not hold the history of every row")


def test_attention_that_was_not_seen_is_not_checked() -> None:
    """Without attention calls no row, map, history cell or fill counts."""
    record = _run(Driver(skip_attend=True, fills=True))
    assert (record["layers"], record["routing"]["writes_checked"]) == (2, 2 * ROWS)
    assert record["placement"]["rows_checked"] == record["shifted-outputs"]["rows_checked"] == 0
    assert record["placement"]["layers"] == record["shifted-outputs"]["layers"] == 0
    assert record["shifted-outputs"]["self_test"] == "missed"
    assert record["stale-maps"]["tables_compared"] == record["routing"]["history_cells"] == 0
    assert set(record["replay"]["rows_compared"].values()) == {0}
    assert findings(record) == {}


def test_one_layer_past_its_taps_is_missing() -> None:
    """A layer whose calls are not seen is missing from the layers that were updated and attended."""
    driver = Driver()
    driver.caches.pop(SECOND)
    record = _run(driver)
    assert (record["layers"], record["placement"]["layers"]) == (1, 1)
    assert record["routing"]["writes_checked"] == record["placement"]["rows_checked"] == ROWS


def test_outputs_reach_the_engine_unchanged() -> None:
    """What the backend put out without a probe is what it puts out alone, fills or none."""
    plain, filled = Driver(), Driver(fills=True)
    for driver in (plain, filled):
        workload(driver)
    assert len(plain.outputs) == len(filled.outputs) == 8
    for left, right in zip(plain.outputs, filled.outputs, strict=True):
        assert torch.equal(left.view(torch.int16), right.view(torch.int16))
    for name in plain.caches:
        assert torch.equal(plain.caches[name], filled.caches[name])


# -- values that are not numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kv_format", ["k16v16", "k16v8"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_values_that_are_not_finite_cannot_pass(which: int, kv_format: str, value: float) -> None:
    """NaN or infinity in a query, in K or in V of one token is a finding of placement, and of routing in K and V."""
    driver = Driver(kv_format=kv_format)
    driver.sources[FIRST][which][13, HKV - 1, 2] = value
    record = _run(driver)
    clamped = which == 2 and kv_format == "k16v8" and value == math.inf
    assert (record["placement"]["findings_total"] > 0) != clamped
    assert isinstance(record["placement"]["worst_ratio"], str) != clamped
    json.dumps(record, allow_nan=False)
    assert (record["routing"]["kinds"].get("not-finite", 0) > 0) == (which > 0)
    if which:
        assert record["routing"]["findings"][0] == ("layers.0.attn: K or V of request a position 4 is not finite")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_output_that_is_not_finite_cannot_pass(value: float) -> None:
    """One element of one output row that is not finite is a finding of placement and of shifted outputs."""

    def spoil(layer: str, output: torch.Tensor) -> None:
        if layer == SECOND:
            output[0, 3] = value

    record = _run(Driver(on_output=spoil))
    assert findings(record) == {"shifted-outputs": {"not-finite": 4}, "placement": {"wrong-row": 4}}
    assert record["placement"]["worst_ratio"] == str(value)


def test_the_worst_ratio_stays_nan() -> None:
    """Once a row was not a number, later rows do not repair the worst ratio."""
    calls = iter(range(100))

    def spoil(layer: str, output: torch.Tensor) -> None:
        if next(calls) == 1:
            output[0, 3] = math.nan

    assert _run(Driver(on_output=spoil))["placement"]["worst_ratio"] == "nan"


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("after", [0, 3, 7, 8])
@settings(max_examples=5, deadline=None)
@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_one_flipped_bit_anywhere_is_found(kv_format: str, after: int, at: int, bit: int) -> None:
    """A bit flipped anywhere in a layer's pool, by any of its updates or after the last, is a finding of routing."""
    driver = Driver(kv_format=kv_format)
    name = (FIRST, SECOND)[after % 2]
    calls = iter(range(10**6))

    def flip(*_: object) -> None:
        raw = driver.caches[name].view(torch.uint8).view(-1)
        raw[at % raw.numel()] ^= 1 << bit

    def count(layer: str, cache: torch.Tensor) -> None:
        if next(calls) == after:
            flip()

    driver.after_write = count
    workload(driver)
    if after == 8:
        flip()
    record = driver.finish()
    kinds = set(record["routing"]["kinds"])
    assert kinds
    assert kinds <= {"wrong-cell", "wrong-history", "changed-block"}


def test_a_block_that_changes_before_it_is_granted_is_found() -> None:
    """A write into a free block is found when the block is granted, although its new owner overwrites it."""
    driver = Driver()
    driver.admit("a", [1, 2, 3], [7])
    driver.step([("a", 0, 3)])
    driver.caches[SECOND][4] += 1
    driver.admit("b", [4, 5, 6], [4])
    driver.step([("b", 0, 3)])
    record = driver.finish()
    assert record["routing"]["findings"] == ["layers.1.attn: block 4 changed before any request held it"]
    assert record["routing"]["kinds"] == {"changed-block": 1}


def test_a_block_that_nobody_held_is_found_at_the_end() -> None:
    """Untouched blocks are compared by their sums at the end; every changed one counts."""
    driver = Driver()
    workload(driver)
    driver.caches[SECOND][0, 2, BLOCK - 1, 0] ^= 1
    driver.caches[SECOND][11] ^= 1
    record = driver.finish()
    assert record["routing"]["findings"] == ["layers.1.attn: block 0 changed and no request of the window holds it"]
    assert record["routing"]["kinds"] == {"changed-block": 2}


# -- routing -------------------------------------------------------------------------------------------------------


def test_a_wrong_slot_mapping_is_found_in_the_map_and_in_the_cells() -> None:
    """A mapping one slot late: the map is objected to, and the cells say whose values they hold, one slot late."""

    def late(maps: Maps) -> None:
        maps.slots += 1

    record = _run(Driver(on_maps=_once(late, step=0)))
    assert record["routing"]["kinds"]["wrong-slot"] == 9
    lines = record["routing"]["findings"]
    assert lines[0] == ("layers.0.attn: slot of request a position 0 is 29, expected 28: one slot late (9 of 9 rows)")
    assert lines[1].startswith(
        "layers.0.attn: block 2 offset 1 (slot 9, request a position 5, not written), K and V of KV head 0, 1, 2: holds"
        " K of request a position 4 (one slot late) (30 K and 30 V cells differ)"
    )


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda key, value: (key.roll(1, 0), value.roll(1, 0)), "holds K of request a position 0 (one slot late)"),
        (lambda key, value: (key, value.roll(-1, 0)), "holds V of request a position 1 (one slot early)"),
        (lambda key, value: (key[:, [0, 2, 1]], value), "K of KV head 1, 2: holds K of request "),
        (lambda key, value: (key[:, [2, 1, 0]], value), "position 0, KV head 2 (in its own slot)"),
    ],
)
def test_a_wrong_write_is_named(kv_format: str, change: Any, words: str) -> None:
    """Values of the next row, of V only, and of another KV head are named, in every format; the map is right."""
    record = _run(Driver(kv_format=kv_format, on_write=change))
    assert "wrong-slot" not in record["routing"]["kinds"]
    assert any(words in line for line in record["routing"]["findings"])
    assert findings(record)["routing"]["wrong-history"] > 0


def test_k_and_v_exchanged_are_named() -> None:
    """V where K belongs, in a format with as many bytes for both and in one without."""
    for kv_format, words in (("k16v16", "holds V of request"), ("k16v8", "holds V where K belongs")):
        record = _run(Driver(kv_format=kv_format, on_write=lambda key, value: (value, key)))
        assert words in record["routing"]["findings"][0]


def test_a_dropped_write_says_who_owns_the_slot() -> None:
    """A cell that was not written is wrong; an owner beyond what was computed is said not to have written."""
    driver = Driver(on_maps=_once(lambda maps: maps.slots.fill_(-1), step=0))
    record = _run(driver)
    assert record["routing"]["kinds"]["wrong-slot"] == 9
    assert any("(slot 28, request a position 0)" in line for line in record["routing"]["findings"])
    driver = Driver()
    driver.admit("a", [1, 2, 3], [7])
    driver.step([("a", 0, 2)])
    driver.caches[FIRST][7, 0, 3, 0] ^= 1
    record = driver.finish()
    assert "(slot 31, request a position 3, not written)" in record["routing"]["findings"][0]
    driver = Driver()
    driver.admit("a", [1, 2, 3], [7])
    driver.step([("a", 0, 3)])
    driver.oracle.release("a")
    driver.caches[FIRST][7, 0, 3, 0] ^= 1
    assert "(slot 31, held by nobody)" in driver.finish()["routing"]["findings"][0]


def test_where_a_write_went_is_said() -> None:
    """A write that went one block late, to a block that nobody holds, is pointed at."""
    driver = Driver(on_maps=_block_late, layers=1)
    driver.admit("a", [1, 2], [7])
    driver.step([("a", 0, 2)])
    record = driver.finish()
    line = record["routing"]["findings"][1]
    assert "block 7 offset 0 (slot 28, request a position 0), K and V of KV head 0, 1, 2" in line
    assert "; its own value lies in slot 32, one block late" in line


def test_one_wrong_cell_is_kept_as_a_reproducer(tmp_path: Path) -> None:
    """A single wrong cell is in the reproducer of routing, and found there again."""
    driver = Driver()
    driver.admit("a", [1, 2, 3], [7])
    driver.step([("a", 0, 3)])
    driver.caches[SECOND][7, 2, 1, 5] ^= 0x40
    record = driver.finish()
    (entry,) = record["reproducers"]
    path = tmp_path / "cell.npz"
    path.write_bytes(base64.b64decode(entry["npz"]))
    text, found = reproducer.check(path)
    assert text == record["routing"]["findings"][0]
    assert len(found) == 1
    assert found[0].startswith("slot 29, K of KV head 2: byte 5 is ")


def test_block_zero_is_a_block() -> None:
    """The first block of the pool may be held, shared, hit and restored like any other."""
    driver = Driver(fills=True)
    driver.admit("a", PREFIX, [0, 2])
    driver.step([("a", 0, 8)])
    driver.admit("b", [*PREFIX, 9], [0, 2, 4], cached=8)
    driver.step([("b", 8, 1)])
    assert findings(driver.finish()) == {}
    driver = Driver()
    driver.admit("a", PREFIX, [7, 2])
    driver.step([("a", 0, 8)])
    driver.oracle.release("a")
    _restored(driver, [0, 4])
    driver.caches[FIRST][0, 1, 0, 0] ^= 1
    record = _hit(driver, tokens=[*PREFIX, 9], blocks=[0, 4, 5], cached=8)
    assert record["routing"]["kinds"] == {"wrong-cell": 2, "wrong-history": 1}
    assert "(slot 0, request b position 0)" in record["routing"]["findings"][0]


@pytest.mark.parametrize("block", [0, 5])
def test_blocks_of_requests_that_wait_are_watched(block: int) -> None:
    """A block that is held and has no row yet is held: what changes in it is a wrong cell of its owner."""
    driver = Driver()
    driver.admit("a", [1, 2, 3], [7])
    driver.admit("b", [4, 5, 6], [block])
    driver.step([("a", 0, 3)])
    driver.caches[FIRST][block, 0, 1, 0] ^= 1
    record = driver.finish()
    assert record["routing"]["kinds"] == {"wrong-cell": 1}
    assert f"(slot {block * BLOCK + 1}, request b position 1, not written)" in record["routing"]["findings"][0]


def test_padding_rows_must_not_be_written() -> None:
    """A padding row that is mapped to a slot is a finding, and so is what it wrote."""
    driver = Driver()
    driver.admit("a", [1, 2, 3], [7])
    driver.step([("a", 0, 3)], padding=1, pad_slot=31)
    record = driver.finish()
    assert record["routing"]["kinds"]["padding-slot"] == 2
    assert record["routing"]["kinds"]["wrong-cell"] > 0
    assert record["routing"]["padding_rows"] == 2


def test_two_requests_in_one_block_are_a_finding() -> None:
    """One block granted to two live requests is named with both, at every step that it lasts."""
    driver = Driver()
    driver.admit("a", [1, 2, 3], [7])
    driver.admit("b", [1, 2, 3], [5, 7])
    driver.step([("a", 0, 3)])
    record = driver.finish()
    assert record["routing"]["findings"] == [
        "block 7 is held by request a block 0 and by request b block 1, expected one holder"
    ]


def test_history_is_gathered_through_the_table_that_the_kernel_uses() -> None:
    """A table that leads elsewhere is found in the map and in the cells that it leads to."""

    def swap(maps: Maps) -> None:
        maps.table[1, :2] = maps.table[1, [1, 0]]

    record = _run(Driver(on_maps=_once(swap)))
    assert record["stale-maps"]["kinds"] == {"block-table": 2}
    assert record["routing"]["kinds"].keys() == {"wrong-history"}
    assert record["placement"]["kinds"]["wrong-row"] > 0
    assert record["stale-maps"]["findings"] == [
        "layers.0.attn: block table of request a holds block 2 at logical block 0, expected block 7"
    ]


@pytest.mark.parametrize("value", [-1, BLOCKS, 10**6, -(10**6)])
def test_a_table_that_leads_out_of_the_pool_is_a_finding_and_no_error(value: int) -> None:
    """An entry outside the pool is named by the maps; the gather does not fail."""

    def wild(maps: Maps) -> None:
        maps.table[0, 0] = value

    record = _run(Driver(on_maps=_once(wild)))
    assert record["stale-maps"]["kinds"] == {"block-table": 1}
    assert record["routing"]["kinds"].keys() == {"wrong-history"}


def test_a_window_reads_the_history_in_sight_only() -> None:
    """Of a history longer than the window, the cells that the first row sees and what follows are gathered."""
    driver = Driver(window=3, layers=1)
    driver.admit("a", list(range(10)), [7, 2, 5])
    driver.step([("a", 0, 6)])
    driver.step([("a", 6, 3)])
    assert driver.finish()["routing"]["history_cells"] == 6 + (9 - 4)


# -- stale maps ----------------------------------------------------------------------------------------------------


def _block_late(maps: Maps) -> None:
    maps.slots += BLOCK


def _shorter(maps: Maps) -> None:
    maps.lengths[1] -= 1


def _later(maps: Maps) -> None:
    maps.starts[1] += 1


def _narrow(maps: Maps) -> None:
    maps.table = maps.table[:, :1]


def _one_short(maps: Maps) -> None:
    maps.table = maps.table[:, :2]


def _fewer(maps: Maps) -> None:
    maps.table, maps.lengths, maps.starts = maps.table[:2], maps.lengths[:2], maps.starts[:3]


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (_shorter, {"sequence-length": 1}),
        (_later, {"row-starts": 1}),
        (_narrow, {"block-table": 3}),
        (_one_short, {"block-table": 1}),
        (_fewer, {"row-starts": 1, "sequence-length": 1, "block-table": 1}),
    ],
)
def test_maps_that_are_not_of_this_step_are_found(change: Any, kinds: dict[str, int]) -> None:
    """A short length, late row starts, a table too narrow and one with too few rows: each is named, none raises."""
    record = _run(Driver(on_maps=_once(change)))
    assert record["stale-maps"]["kinds"] == kinds
    assert record["placement"]["findings_total"] > 0


def test_maps_of_each_layer_are_checked() -> None:
    """Stale maps in the second layer only are found there; what changes between steps is counted once a step."""
    record = _run(Driver(on_maps=_once(_shorter, layer=SECOND)))
    assert record["stale-maps"]["findings"][0].startswith("layers.1.attn: seq_len of request a is 8, expected 9")
    assert record["stale-maps"]["maps_changed"] == 3


def test_steps_with_equal_maps_have_not_changed() -> None:
    """A step whose maps are those of the step before is not counted as changed."""
    driver = Driver()
    driver.admit("a", [1, 2, 3], [7])
    for _ in range(3):
        driver.step([("a", 0, 3)])
    assert driver.finish()["stale-maps"]["maps_changed"] == 0


@pytest.mark.parametrize("name", ["slots", "table", "lengths", "starts"])
def test_each_map_counts_as_changed(name: str) -> None:
    """A change of any one map between two steps is a change of the maps."""

    def move(maps: Maps) -> None:
        getattr(maps, name)[-1] += 1

    driver = Driver(on_maps=_once(move))
    driver.admit("a", [1, 2, 3], [7])
    driver.step([("a", 0, 3)])
    driver.step([("a", 0, 3)])
    assert driver.finish()["stale-maps"]["maps_changed"] == 1


# -- the row map ---------------------------------------------------------------------------------------------------


def test_a_row_that_was_fed_another_token_is_found() -> None:
    """Rows of a permuted batch are found by their tokens; unknown tokens are not counted."""
    driver = Driver()
    driver.admit("a", [1, 2, 3], [7])
    driver.admit("b", [4, 5, 6], [5])
    driver.oracle.begin([("b", 0, 3), ("a", 0, 3)], torch.tensor([1, 2, 3, 4, 5, 6]))
    record = driver.finish()
    assert record["row_map"]["kinds"] == {"wrong-token": 6}
    assert record["row_map"]["findings"] == ["row 0 was not fed the token of request b position 0"]
    driver = Driver()
    driver.admit("a", [1, 2], [7])
    driver.step([("a", 0, 3)])
    record = driver.finish()
    assert (record["row_map"]["checked"], record["rows"]["scheduled"]) == (2, 3)


def test_the_self_tests_need_something_to_permute() -> None:
    """One request is no permutation, and equal tokens do not tell requests apart; one row is no shift."""
    driver = Driver()
    driver.admit("a", [1, 2, 3], [7])
    driver.step([("a", 0, 1)])
    record = driver.finish()
    assert record["row_map"]["self_test"] == record["shifted-outputs"]["self_test"] == "missed"
    driver.oracle.begin([("a", 1, 1)], torch.tensor([30]))
    record = driver.finish()
    assert record["row_map"]["kinds"] == {"wrong-token": 1}
    assert record["row_map"]["self_test"] == "missed"
    driver = Driver()
    for name, block in (("a", 7), ("b", 5)):
        driver.admit(name, [1, 1], [block])
    driver.step([("a", 0, 1), ("b", 0, 1)])
    record = driver.finish()
    assert record["row_map"]["self_test"] == record["shifted-outputs"]["self_test"] == "missed"
    assert record["placement"]["ambiguous_rows"] == 2
    driver.admit("c", [2], [3])
    driver.step([("a", 1, 1), ("c", 0, 1)])
    record = driver.finish()
    assert record["row_map"]["self_test"] == record["shifted-outputs"]["self_test"] == "caught"


# -- outputs -------------------------------------------------------------------------------------------------------


def test_rows_that_change_places_are_shifted() -> None:
    """Rows handed out one further are shifts of this step, and wrong rows of placement; routing is green."""

    def roll(layer: str, output: torch.Tensor) -> None:
        if layer == SECOND:
            output[:4] = output[:4].roll(1, 0)

    driver = Driver(on_output=roll)
    driver.admit("a", [1, 2, 3, 4], [7])
    driver.step([("a", 0, 4)])
    record = driver.finish()
    assert findings(record) == {"shifted-outputs": {"shifted-row": 4}, "placement": {"wrong-row": 4}}
    assert record["shifted-outputs"]["findings"][0].startswith("layers.1.attn: row 0 must be the output of request a")


def test_outputs_of_the_step_before_are_stale() -> None:
    """The rows of the step before, once more: each layer is compared with its own last step."""
    held: dict[str, torch.Tensor] = {}

    def stale(layer: str, output: torch.Tensor) -> None:
        fresh = output.clone()
        if layer in held:
            output[:1] = held[layer][:1]
        held[layer] = fresh

    driver = Driver(on_output=stale)
    driver.admit("a", [1, 2, 3, 4], [7])
    driver.step([("a", 0, 2)])
    driver.step([("a", 2, 1)])
    record = driver.finish()
    assert findings(record) == {"shifted-outputs": {"stale-row": 2}, "placement": {"wrong-row": 2}}
    assert record["shifted-outputs"]["findings"][0] == (
        "layers.0.attn: row 0 must be the output of request a position 2 and is that of request a position 0 of the"
        " step before (1 of 1 rows of this step)"
    )


@pytest.mark.parametrize(("kept", "expected"), [(1, 0), (2, 2), (3, 2)])
def test_the_first_rows_of_a_step_are_kept(kept: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long step so many rows are kept for the next one; the others are not looked up."""
    monkeypatch.setattr(window_module, "_KEPT_ROWS", kept)
    held: dict[str, torch.Tensor] = {}

    def stale(layer: str, output: torch.Tensor) -> None:
        if layer in held:
            output[:1] = held[layer][1:2]
        held[layer] = output.clone()

    driver = Driver(on_output=stale)
    driver.admit("a", [1, 2, 3, 4], [7])
    driver.step([("a", 0, 2)])
    driver.step([("a", 2, 1)])
    assert driver.finish()["shifted-outputs"]["kinds"].get("stale-row", 0) == expected


@pytest.mark.parametrize("window", [None, 3])
def test_a_kernel_that_sees_one_position_too_few_is_found_by_the_probe(window: int | None) -> None:
    """With fingerprints, a kernel that leaves out a boundary key of any row is a finding of placement alone."""
    for gone in range(9):

        def drop(key: torch.Tensor, value: torch.Tensor, gone: int = gone) -> tuple[torch.Tensor, torch.Tensor]:
            key = key.clone()
            if key.shape[0] > gone:
                key[gone] = 0
            return key, value

        driver = Driver(probe=True, read=drop, window=window)
        driver.admit("a", list(range(10)), [7, 2, 5])
        driver.step([("a", 0, 5)])
        for position in range(5, 10):
            driver.step([("a", position, 1)])
        record = driver.finish()
        assert findings(record).keys() <= {"placement", "shifted-outputs"}
        assert record["placement"]["findings_total"] > 0


@pytest.mark.parametrize("delta", [-1, 1])
def test_a_window_off_by_one_is_found_by_the_probe(delta: int) -> None:
    """With fingerprints, a window one too wide or one too narrow in the kernel is found in a run of decodes."""
    driver = Driver(probe=True, window=4)
    driver.admit("a", list(range(12)), [7, 2, 5])
    driver.step([("a", 0, 6)])
    driver.window = 4 + delta
    for position in range(6, 12):
        driver.step([("a", position, 1)])
    assert findings(driver.finish()).keys() <= {"placement", "shifted-outputs"}
    assert driver.finish()["placement"]["findings_total"] > 0


# -- the probe -----------------------------------------------------------------------------------------------------


def test_the_probe_replaces_what_the_backend_gets() -> None:
    """K and V are the fingerprints of (request, position), and padding rows stay as they are."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((key.clone(), value.clone()))
        return key, value

    driver = Driver(probe=True, on_write=keep)
    driver.admit("a", [1, 1, 1], [7])
    driver.admit("b", [1, 1, 1], [5])
    before = [source.clone() for source in driver.sources[SECOND]]
    driver.step([("b", 0, 3), ("a", 0, 2)], padding=1)
    key, value = seen[1]
    expected = fingerprints.keys_values(
        torch.tensor([2, 2, 2, 1, 1]),
        torch.tensor([0, 1, 2, 0, 1]),
        layer=1,
        heads=HKV,
        size=SIZE,
        v_scale=0.02,
        dtype=torch.bfloat16,
    )
    assert torch.equal(key[:5], expected[0])
    assert torch.equal(value[:5], expected[1])
    assert torch.equal(key[5], driver.sources[SECOND][1][0])
    for source, was in zip(driver.sources[SECOND], before, strict=True):
        assert torch.equal(source, was)
    assert findings(driver.finish()) == {}


def test_a_request_keeps_its_fingerprints_when_it_resumes() -> None:
    """After a preemption a request's K and V are those of before; a new request has its own."""
    seen: list[torch.Tensor] = []

    def keep(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(key.clone())
        return key, value

    driver = Driver(probe=True, on_write=keep, layers=1)
    driver.admit("a", [1, 2, 3], [7])
    driver.step([("a", 0, 3)])
    driver.oracle.release("a")
    driver.admit("b", [1, 2, 3], [7])
    driver.step([("b", 0, 3)])
    driver.admit("a", [1, 2, 3], [5])
    driver.step([("a", 0, 3)])
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    assert findings(driver.finish()) == {}


# -- prefixes ------------------------------------------------------------------------------------------------------

PREFIX = [1, 2, 3, 4, 5, 6, 7, 8]


def _hit(driver: Driver, *, tokens: list[int], blocks: list[int], cached: int, identity: str = "") -> dict[str, Any]:
    driver.admit("b", tokens, blocks, cached=cached, identity=identity)
    driver.step([("b", cached, len(tokens) - cached)])
    return driver.finish()


@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("alive", [False, True])
@pytest.mark.parametrize("cached", [4, 8])
def test_a_prefix_hit_is_right(cached: int, alive: bool, probe: bool) -> None:
    """Blocks of a live or finished request with the same tokens are taken over, and not computed again."""
    driver = Driver(probe=probe, fills=True)
    driver.admit("a", [*PREFIX, 9], [7, 2, 4])
    driver.step([("a", 0, 9)])
    if not alive:
        driver.oracle.release("a")
    record = _hit(
        driver, tokens=[*PREFIX, 10, 11], blocks=[7, 2, 5][: cached // 4] + [6, 3, 1][cached // 4 :], cached=cached
    )
    assert findings(record) == {}
    assert record["rows"] == {"scheduled": 9 + 10 - cached, "prefix": cached, "recomputed": 0}
    assert record["conditions"]["prefix-hit"] == 1
    assert record["conditions"]["resumed"] == 0


def test_a_prefix_made_of_several_requests_blocks() -> None:
    """The first block from a finished request, the second from a live one."""
    driver = Driver()
    driver.admit("x", PREFIX[:4], [7])
    driver.step([("x", 0, 4)])
    driver.oracle.release("x")
    driver.admit("a", [*PREFIX, 9], [6, 2, 4])
    driver.step([("a", 0, 9)])
    driver.tokens["a"][:] = driver.tokens["a"][:8]
    record = _hit(driver, tokens=[*PREFIX, 10], blocks=[7, 2, 5], cached=8)
    assert findings(record) == {}


def test_a_prefix_hit_in_the_wrong_block_is_found() -> None:
    """The second block is that of another prefix: its cells are not those of the tokens."""
    driver = Driver()
    driver.admit("a", PREFIX, [7, 2])
    driver.admit("c", [20, 21, 22, 23, 24], [6, 4])
    driver.step([("a", 0, 8), ("c", 0, 5)])
    driver.oracle.release("a")
    driver.oracle.release("c")
    record = _hit(driver, tokens=[*PREFIX, 9], blocks=[7, 6, 5], cached=8)
    assert record["routing"]["kinds"]["wrong-cell"] > 0
    assert "(slot 24, request b position 4)" in record["routing"]["findings"][0]
    assert record["placement"]["findings_total"] > 0


def test_a_prefix_hit_in_a_live_requests_block_with_other_content_is_found() -> None:
    """A block that a live request holds with other tokens: its cells are not the prefix's, and it is not shared."""
    driver = Driver()
    driver.admit("a", PREFIX, [7, 2])
    driver.admit("c", [20, 21, 22, 23, 24], [6, 4])
    driver.step([("a", 0, 8), ("c", 0, 5)])
    record = _hit(driver, tokens=[*PREFIX, 9], blocks=[7, 6, 5], cached=8)
    assert record["routing"]["kinds"]["wrong-prefix"] == 2 * BLOCK * HKV
    assert record["routing"]["kinds"]["shared-block"] == 1
    prefix = [line for line in record["routing"]["findings"] if "slot 24" in line]
    assert prefix


@pytest.mark.parametrize("alive", [False, True])
@pytest.mark.parametrize(
    ("tokens", "identity", "cached"),
    [
        ([1, 2, 3, 30, 5, 6, 7, 8, 9], "", 8),
        ([1, 2, 3, 4, 5, 6, 30, 8, 9], "", 8),
        ([30, 2, 3, 4, 5, 6, 7, 8, 9], "", 4),
        ([*PREFIX, 9], "an adapter", 8),
        ([*PREFIX, 9], "", 9),
        ([1, 2, 3], "", 4),
    ],
)
def test_a_prefix_that_nobody_wrote_is_a_finding(tokens: list[int], identity: str, cached: int, alive: bool) -> None:
    """Other tokens, another identity, more positions than were written or are known: nobody wrote such a prefix."""
    driver = Driver()
    driver.admit("a", PREFIX, [7, 2])
    driver.step([("a", 0, 8)])
    if not alive:
        driver.oracle.release("a")
    driver.admit("b", tokens, [7, 2, 5], cached=cached, identity=identity)
    driver.step([("b", cached, 1)])
    record = driver.finish()
    assert record["routing"]["kinds"]["unknown-prefix"] == cached
    assert record["routing"]["findings"][0] == (
        f"request b: {cached} positions are taken from the cache, and no request of this window wrote their tokens"
    )
    assert record["routing"]["kinds"]["unseen-history"] == 2
    assert record["placement"]["kinds"] == {"unseen-history": 2}
    assert record["placement"]["rows_checked"] == 16


def test_a_claim_without_cells_does_not_stand_in_the_way_of_who_wrote_them() -> None:
    """A request that claimed a prefix nobody had written leaves nothing to hit; who wrote it later does."""
    driver = Driver()
    driver.admit("x", [*PREFIX, 9], [6, 3, 4], cached=8)
    driver.oracle.release("x")
    driver.admit("a", PREFIX, [7, 2])
    driver.step([("a", 0, 8)])
    driver.oracle.release("a")
    record = _hit(driver, tokens=[*PREFIX, 9], blocks=[7, 2, 5], cached=8)
    assert findings(record) == {"routing": {"unknown-prefix": 8}}


def test_a_window_probes_and_fills_when_told() -> None:
    """Without being told, K, V and queries are the engine's own and each attention call is made once."""
    driver = Driver()
    views = [layer.view for layer in driver.oracle._layers.values()]
    record: Any = window_module.Window(views, block_size=BLOCK, rounding=2.0**-8).finish()
    assert (record["probe"], record["fills"]) == (False, False)


def test_identities_are_kept_apart() -> None:
    """The same tokens under two identities are two prefixes, each hit by its own."""
    driver = Driver()
    driver.admit("a", PREFIX, [7, 2], identity="one")
    driver.step([("a", 0, 8)])
    driver.oracle.release("a")
    record = _hit(driver, tokens=[*PREFIX, 9], blocks=[7, 2, 5], cached=8, identity="one")
    assert findings(record) == {}


def _restored(driver: Driver, blocks: list[int]) -> None:
    """Copies what blocks 7 and 2 hold to ``blocks``, as a restore does before the first step of its request."""
    for cache in driver.caches.values():
        cache[blocks] = cache[[7, 2]].clone()


@pytest.mark.parametrize("recycled", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_a_prefix_restored_into_other_blocks(recycled: bool, right: bool) -> None:
    """A restore writes to fresh or recycled blocks before the step: right cells pass, wrong ones are found."""
    driver = Driver()
    driver.admit("a", PREFIX, [7, 2])
    driver.step([("a", 0, 8)])
    if recycled:
        driver.admit("c", [20, 21, 22, 23, 24, 25], [9, 4])
        driver.step([("c", 0, 6)])
        driver.oracle.release("c")
    driver.oracle.release("a")
    _restored(driver, [9, 4] if right else [4, 9])
    record = _hit(driver, tokens=[*PREFIX, 30], blocks=[9, 4, 5], cached=8)
    assert (findings(record) == {}) == right
    assert right or record["routing"]["kinds"].keys() == {"wrong-cell", "wrong-history"}
    assert record["conditions"]["reused-block"] == (2 if recycled else 0)


def test_a_block_beside_a_restored_one_may_not_change() -> None:
    """A restore that writes one block too many is found where the block is not claimed."""
    driver = Driver()
    driver.admit("a", PREFIX, [7, 2])
    driver.step([("a", 0, 8)])
    driver.oracle.release("a")
    _restored(driver, [9, 4])
    driver.caches[FIRST][5] += 1
    record = _hit(driver, tokens=[*PREFIX, 30], blocks=[9, 4, 5], cached=8)
    assert record["routing"]["findings"] == ["layers.0.attn: block 5 changed before any request held it"]


def test_a_shared_partial_block_with_a_second_writer_is_found() -> None:
    """A fork that shares a block which is not complete, and writes to it: the block is not shared by declaration."""
    driver = Driver()
    driver.admit("a", PREFIX[:6], [7, 2])
    driver.step([("a", 0, 6)])
    driver.admit("b", [*PREFIX[:6], 30], [7, 2], cached=6)
    driver.step([("b", 6, 1)])
    record = driver.finish()
    assert record["routing"]["findings"] == [
        "block 2 is held by request a block 1 and by request b block 1, expected one holder"
    ]
    driver = Driver()
    driver.admit("a", PREFIX[:6], [7, 2])
    driver.step([("a", 0, 6)])
    for cache in driver.caches.values():
        cache[5] = cache[2]
    driver.admit("b", [*PREFIX[:6], 30], [7, 5], cached=6)
    driver.step([("b", 6, 1)])
    assert findings(driver.finish()) == {}


def test_a_block_may_be_shared_once_it_is_complete() -> None:
    """A request that still writes to a block may not share it, whoever else declares it."""
    driver = Driver()
    driver.admit("a", PREFIX, [7, 2])
    driver.step([("a", 0, 8)])
    driver.admit("b", PREFIX, [7, 2], cached=7)
    driver.step([("b", 7, 1)])
    record = driver.finish()
    assert record["routing"]["kinds"] == {"shared-block": 1}
    driver = Driver()
    driver.admit("a", PREFIX, [7, 2])
    driver.step([("a", 0, 8)])
    driver.admit("b", [*PREFIX, 9], [7, 2, 4], cached=8)
    driver.step([("b", 8, 1)])
    driver.step([("a", 7, 1)])
    assert driver.finish()["routing"]["kinds"] == {"shared-block": 1}


def test_two_requests_that_hit_one_prefix_in_one_step() -> None:
    """Both take the blocks of a finished request; what is not the prefix's is found for either."""
    for spoiled in (False, True):
        driver = Driver()
        driver.admit("a", PREFIX, [7, 2])
        driver.step([("a", 0, 8)])
        driver.oracle.release("a")
        if spoiled:
            driver.caches[FIRST][2, 1, 1, 0] ^= 1
        for name, block in (("b", 5), ("c", 4)):
            driver.admit(name, [*PREFIX, 9], [7, 2, block], cached=8)
        driver.step([("b", 8, 1), ("c", 8, 1)])
        record = driver.finish()
        assert (findings(record) == {}) != spoiled
        assert record["rows"]["prefix"] == 16


def test_a_prefix_claim_ends_with_its_request() -> None:
    """A request that is taken back before its first step, and admitted again without a prefix, claims nothing."""
    driver = Driver()
    driver.admit("a", PREFIX, [7, 2])
    driver.step([("a", 0, 8)])
    driver.admit("b", [*PREFIX, 9], [7, 2, 5], cached=8)
    driver.oracle.release("b")
    driver.admit("b", [*PREFIX, 9], [6, 3, 5])
    driver.step([("b", 0, 9)])
    assert findings(driver.finish()) == {}


# -- preemption, rejection, eviction -------------------------------------------------------------------------------


@pytest.mark.parametrize(("cached", "blocks"), [(0, [4, 9]), (4, [7, 9]), (4, [7, 2])])
def test_a_preempted_request_resumes(cached: int, blocks: list[int]) -> None:
    """A preempted request starts again, or behind what is still cached; what it computes twice is counted."""
    driver = Driver(fills=True)
    tokens = [*PREFIX[:6]]
    driver.admit("a", tokens, [7, 2])
    driver.step([("a", 0, 6)])
    driver.sampled("a", [11])
    driver.oracle.release("a")
    assert driver.oracle.tokens("a") == (*tokens, 11)
    driver.admit("a", list(driver.oracle.tokens("a")), blocks, cached=cached)
    driver.step([("a", cached, 7 - cached)])
    record = driver.finish()
    assert findings(record) == {}
    assert record["rows"] == {"scheduled": 6 + 7 - cached, "prefix": 0, "recomputed": 6 - cached}
    assert record["conditions"]["resumed"] == 1
    assert record["conditions"]["prefix-hit"] == (cached > 0)


def test_positions_beyond_the_furthest_are_a_prefix_of_a_resumed_request() -> None:
    """A resumed request that hits more than it ever computed skips the difference."""
    driver = Driver()
    driver.admit("a", PREFIX, [7, 2])
    driver.step([("a", 0, 2)])
    driver.oracle.release("a")
    driver.admit("b", PREFIX, [4, 9])
    driver.step([("b", 0, 8)])
    driver.admit("a", [*PREFIX, 9], [4, 9, 5], cached=8)
    driver.step([("a", 8, 1)])
    record = driver.finish()
    assert findings(record) == {}
    assert record["rows"] == {"scheduled": 11, "prefix": 6, "recomputed": 0}


def test_a_request_that_is_admitted_again_is_released_first() -> None:
    """Admitting a live request again is a preemption and a return."""
    driver = Driver()
    driver.admit("a", PREFIX[:3], [7])
    driver.step([("a", 0, 3)])
    driver.admit("a", PREFIX[:3], [4])
    driver.step([("a", 0, 3)])
    record = driver.finish()
    assert findings(record) == {}
    assert record["rows"]["recomputed"] == 3
    assert record["conditions"]["resumed"] == 1


def test_rejected_drafts_are_written_again() -> None:
    """A start below what was written forgets the later positions; they are written and checked again."""
    driver = Driver(fills=True)
    driver.admit("a", [1, 2, 3, 4, 5, 6], [7, 2])
    driver.step([("a", 0, 6)])
    driver.tokens["a"][4:] = [30, 31]
    driver.oracle._requests["a"].tokens[4:] = [30, 31]
    driver.step([("a", 4, 1)])
    driver.step([("a", 5, 1)])
    record = driver.finish()
    assert findings(record) == {}
    assert record["rows"] == {"scheduled": 8, "prefix": 0, "recomputed": 2}


def test_a_rejected_draft_may_not_reach_a_later_row() -> None:
    """A kernel whose length still counts the rejected positions is found."""
    driver = Driver()
    driver.admit("a", [1, 2, 3, 4, 5, 6], [7, 2])
    driver.step([("a", 0, 6)])

    def longer(maps: Maps) -> None:
        maps.lengths[0] += 1

    driver.on_maps = longer
    driver.step([("a", 4, 1)])
    record = driver.finish()
    assert findings(record) == {
        "stale-maps": {"sequence-length": 2},
        "placement": {"wrong-row": 2},
        "shifted-outputs": record["shifted-outputs"]["kinds"],
    } or findings(record) == {"stale-maps": {"sequence-length": 2}, "placement": {"wrong-row": 2}}


@pytest.mark.parametrize("probe", [False, True])
def test_blocks_before_a_window_are_taken_back(probe: bool) -> None:
    """Evicted blocks go to another request; the row that no longer sees them stays right."""
    driver = Driver(window=3, fills=True, probe=probe)
    driver.admit("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 2])
    driver.step([("a", 0, 7)])
    driver.oracle.evict("a", [0])
    driver.admit("b", [20, 21, 22, 23], [7])
    driver.grant("a", [4])
    driver.step([("a", 7, 2), ("b", 0, 4)])
    record = driver.finish()
    assert findings(record) == {}
    assert record["conditions"]["reused-block"] == 1
    assert record["routing"]["history_cells"] == 2 * (7 + 4 + 4)


def test_an_eviction_within_sight_is_found() -> None:
    """A block that is taken back while rows still see it: what its new owner writes is in their history."""
    driver = Driver(window=6)
    driver.admit("a", [1, 2, 3, 4, 5, 6, 7, 8], [7, 2])
    driver.step([("a", 0, 7)])
    driver.oracle.evict("a", [0, 40])
    driver.oracle.evict("nobody", [0])
    driver.admit("b", [20, 21, 22, 23], [7])
    driver.step([("b", 0, 4), ("a", 7, 1)])
    record = driver.finish()
    assert record["routing"]["kinds"].keys() == {"wrong-history"}
    assert record["placement"]["findings_total"] > 0


# -- what no scheduler would do ------------------------------------------------------------------------------------


def test_unknown_requests_are_findings() -> None:
    """Granting to, scheduling, releasing and sampling for a request that was never admitted raises nothing."""
    driver = Driver(probe=True, fills=True)
    driver.oracle.grant("ghost", [3])
    driver.oracle.release("ghost")
    driver.oracle.sampled("ghost", [3])
    assert driver.oracle.tokens("ghost") == ()
    driver.step([("ghost", 0, 2)])
    record = driver.finish()
    assert record["routing"]["kinds"]["unknown-request"] == 2
    assert record["routing"]["kinds"]["no-block"] == 2
    assert record["routing"]["findings"][:2] == [
        "request ghost is granted blocks and was never admitted",
        "request ghost is scheduled and was never admitted",
    ]
    assert record["routing"]["findings"][2] == "request ghost position 0 has no block"


@pytest.mark.parametrize("block", [BLOCKS, -2, 10**9])
def test_blocks_outside_the_pool_are_findings(block: int) -> None:
    """A block that is not in the pool is named, and nothing is read or written there."""
    driver = Driver(fills=True)
    driver.admit("a", [1, 2, 3, 4, 5], [7, block])
    driver.blocks["a"] = [7]
    driver.step([("a", 0, 5)])
    driver.oracle.release("a")
    driver.admit("b", [1, 2], [4])
    driver.step([("b", 0, 2)])
    record = driver.finish()
    assert record["routing"]["findings"][0] == f"request a holds block {block}, expected 0 to {BLOCKS - 1}"
    assert record["routing"]["findings"][1] == "request a position 4 has no block"


def test_a_position_without_a_block_is_a_finding() -> None:
    """A request that outgrew its blocks is named, and its other rows are checked."""
    driver = Driver(fills=True)
    driver.admit("a", [1, 2, 3, 4, 5, 6], [7])
    driver.step([("a", 0, 6)])
    record = driver.finish()
    assert record["routing"]["kinds"]["no-block"] == 2
    assert record["routing"]["findings"][0] == "request a position 4 has no block"


def test_a_start_beyond_the_history_is_a_finding() -> None:
    """A request that starts behind what the ledger has seen is named; its rows are not called checked."""
    driver = Driver(fills=True)
    driver.admit("a", [1, 2, 3, 4, 5, 6], [7, 2])
    driver.admit("b", [1, 2, 3], [4])
    driver.step([("a", 3, 2), ("b", 0, 2)])
    record = driver.finish()
    assert record["routing"]["kinds"]["unseen-history"] == 2
    assert record["routing"]["findings"][0] == (
        "layers.0.attn: request a starts at position 3, and the ledger has not seen what is before it"
    )
    assert record["placement"]["kinds"] == {"unseen-history": 2}
    assert record["placement"]["rows_checked"] == 0


def test_calls_without_a_step_or_of_another_layer_are_findings() -> None:
    """Calls before any step, of a layer nobody declared, or of too few rows are objected to and passed on."""
    driver = Driver()
    calls: list[str] = []
    key = torch.zeros(2, HKV, SIZE).bfloat16()
    query = torch.zeros(2, HQ, SIZE).bfloat16()

    def call(layer: str, rows: int) -> None:
        driver.oracle.update(
            layer, key[:rows], key[:rows], torch.tensor([28, 29]), write=lambda *_: calls.append("write")
        )
        driver.oracle.attend(
            layer,
            query[:rows],
            key,
            key,
            block_table=torch.tensor([[7]]),
            seq_lens=torch.tensor([2]),
            query_start_loc=torch.tensor([0, 2]),
            output=torch.zeros(2, HQ, SIZE).bfloat16(),
            run=lambda *_: calls.append("run"),
        )

    call(FIRST, 2)
    driver.admit("a", [1, 2], [7])
    driver.oracle.begin([("a", 0, 2)], torch.tensor([1, 2]))
    call("layers.9.attn", 2)
    call(FIRST, 1)
    driver.oracle.begin([], torch.tensor([1, 2]))
    call(FIRST, 2)
    driver.oracle.begin([("a", 0, 0)], torch.tensor([1, 2]))
    call(FIRST, 0)
    record = driver.finish()
    assert calls == ["write", "run"] * 5
    assert findings(record) == {"routing": {"no-step": 5}, "placement": {"no-step": 5}}
    assert record["routing"]["findings"][1] == (
        "layers.9.attn: found a cache update of 2 rows, expected those of a step of a known layer"
    )
    assert record["placement"]["findings"][2] == (
        "layers.0.attn: found an attention call of 1 rows, expected those of a step of a known layer"
    )
    assert (record["layers"], record["routing"]["writes_checked"]) == (0, 0)


def test_a_request_without_rows_beside_one_with_rows() -> None:
    """A request that contributes no row to a step is no error."""
    for probe in (False, True):
        driver = Driver(probe=probe, fills=True)
        driver.admit("a", [1, 2, 3], [7])
        driver.admit("b", [4, 5, 6], [5])
        driver.step([("a", 0, 3), ("b", 0, 0)])
        driver.step([("b", 0, 2), ("a", 3, 0)])
        assert findings(driver.finish()) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (torch.zeros(3, HKV, SIZE + 1).bfloat16(), torch.zeros(3, HKV, SIZE + 1).bfloat16()),
        (torch.zeros(3, HKV, SIZE).bfloat16(), torch.zeros(3, HKV, SIZE + 1).bfloat16()),
        (torch.zeros(3, HKV, SIZE).bfloat16(), torch.zeros(2, HKV, SIZE).bfloat16()),
        (torch.zeros(3, HKV, SIZE), torch.zeros(3, HKV, SIZE)),
        (torch.zeros(3, HKV, SIZE).bfloat16(), torch.zeros(3, HKV, SIZE).half()),
    ],
)
def test_tensors_of_another_shape_or_type_are_findings(key: torch.Tensor, value: torch.Tensor) -> None:
    """K and V that the format cannot encode are objected to, and the backend still gets them."""
    driver = Driver()
    driver.admit("a", [1, 2, 3], [7])
    driver.oracle.begin([("a", 0, 3)], torch.tensor([1, 2, 3]))
    calls: list[torch.Tensor] = []
    driver.oracle.update(FIRST, key, value, torch.tensor([28, 29, 30]), write=lambda key, value: calls.append(key))
    record = driver.finish()
    assert len(calls) == 1
    assert record["routing"]["kinds"] == {"wrong-shape": 3}
    assert record["routing"]["writes_checked"] == record["layers"] == 0


def test_flat_tensors_are_taken_as_they_are() -> None:
    """K and V ``[T, Hkv * D]`` and an output ``[T, Hq, D]`` are the same rows."""
    driver = Driver(layers=1, fills=True)
    driver.admit("a", [1, 2, 3], [7])
    driver.oracle.begin([("a", 0, 3)], torch.tensor([1, 2, 3]))
    query, key, value = (source[[1, 2, 3]] for source in driver.sources[FIRST])
    slots = torch.tensor([28, 29, 30])

    def write(key: torch.Tensor, value: torch.Tensor) -> None:
        assert key.shape == (3, HKV, SIZE)
        driver.codec.place(driver.caches[FIRST], slots, driver.codec.encode(key, value, 0.01))

    driver.oracle.update(FIRST, key.flatten(1), value.flatten(1), slots, write=write)
    output = torch.zeros(3, HQ, SIZE).bfloat16()
    maps = Maps(FIRST, slots, torch.tensor([[7]]), torch.tensor([3]), torch.tensor([0, 3]))
    flat = output.view(3, -1)
    driver.oracle.attend(
        FIRST,
        query.flatten(1),
        key,
        value,
        block_table=maps.table,
        seq_lens=maps.lengths,
        query_start_loc=maps.starts,
        output=output,
        run=lambda query, key, value: driver._attend(FIRST, query.view(3, HQ, SIZE), maps, flat),
    )
    assert findings(driver.finish()) == {}


def test_an_output_with_too_few_rows_is_a_finding() -> None:
    """An output buffer shorter than the step is objected to; nothing of it counts as checked."""
    driver = Driver(fills=True)
    driver.admit("a", [1, 2, 3], [7])
    driver.admit("b", [1, 2], [5])
    driver.step([("a", 0, 3), ("b", 0, 1)])
    driver.skip_attend = True
    driver.step([("a", 2, 1), ("b", 1, 1)])
    query = torch.zeros(2, HQ, SIZE).bfloat16()
    driver.oracle.attend(
        FIRST,
        query,
        query,
        query,
        block_table=torch.tensor([[7], [5]]),
        seq_lens=torch.tensor([3, 2]),
        query_start_loc=torch.tensor([0, 1, 2]),
        output=torch.zeros(1, HQ, SIZE).bfloat16(),
        run=lambda *_: None,
    )
    record = driver.finish()
    assert record["placement"]["kinds"] == {"no-rows": 2}
    assert record["placement"]["findings"] == ["layers.0.attn: found 1 output rows for a step of 2 rows"]
    assert record["placement"]["rows_checked"] == 8


def test_a_backend_that_writes_to_its_inputs_does_not_reach_the_ledger() -> None:
    """K and V are encoded before the backend is called."""

    def spoil(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key += 1
        value *= 2
        return key, value

    assert findings(_run(Driver(on_write=spoil)))["routing"]["wrong-cell"] > 0


# -- fills ---------------------------------------------------------------------------------------------------------


class Leaky(Driver):
    """A backend that adds a share of the cell behind each request's last one to its outputs."""

    weight = 0.0
    column = 0

    def _attend(self, name: str, query: torch.Tensor, maps: Maps, output: torch.Tensor) -> None:
        super()._attend(name, query, maps, output)
        for row in range(maps.table.shape[0]):
            first, last, length = int(maps.starts[row]), int(maps.starts[row + 1]), int(maps.lengths[row])
            block = int(maps.table[row, (length // BLOCK) + self.column])
            slot = torch.tensor([block * BLOCK + (length % BLOCK if not self.column else 0)])
            _, value = self.codec.decode(self.codec.read(self.caches[name], slot), self.scales[name])
            leak = value[0].repeat_interleave(HQ // HKV, dim=0).reshape(1, -1) * self.weight
            output[first:last] = (output[first:last].float() + leak).to(output.dtype)


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("kv_format", ["k16v16", "k16v8", "cpu-attn-bf16"])
def test_a_weight_of_zero_times_nan_is_found(kv_format: str, column: int) -> None:
    """A kernel that multiplies an unwritten cell by zero lets NaN through, and nothing else."""
    driver = Leaky(kv_format=kv_format, fills=True)
    driver.weight, driver.column = 0.0, column
    for cache in driver.caches.values():
        cache.zero_()
    driver.oracle.open()
    record = _run(driver)
    assert findings(record).keys() == {"replay"}
    assert record["replay"]["kinds"].keys() == {"nan-fill"}
    assert "changed when cells that nobody wrote were filled with NaN" in record["replay"]["findings"][0]
    assert {name: set(part) for name, part in [("gates", {it["gate"] for it in record["reproducers"]})]} == {
        "gates": {"replay"}
    }


def test_any_weight_of_an_unwritten_cell_is_found_by_all_fills() -> None:
    """A kernel that adds a little of an unwritten cell changes under each of the three fills."""
    driver = Leaky(kv_format="k16v16", fills=True)
    driver.weight = 2.0**-6
    for cache in driver.caches.values():
        cache.zero_()
    driver.oracle.open()
    record = _run(driver)
    assert record["replay"]["kinds"].keys() == {"nan-fill", "large-fill", "other-request-fill"}


def test_fills_restore_every_byte_of_the_cache() -> None:
    """After each attention call the cache and the output are what they were, whatever the fills did to them."""
    for kv_format in FORMATS:
        driver = Leaky(kv_format=kv_format, fills=True)
        driver.weight = 0.5
        images: list[torch.Tensor] = []

        driver.after_write = lambda layer, cache, images=images: images.append(cache.clone())  # type: ignore[misc]
        driver.after_attend = lambda layer, cache, images=images: images.append(cache.clone())  # type: ignore[misc]
        workload(driver)
        assert len(images) == 16
        for before, after in zip(images[::2], images[1::2], strict=True):
            assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def test_a_backend_that_fails_on_a_fill_leaves_the_cache_as_it_was() -> None:
    """An exception out of the backend is passed on, and no filled cell stays behind."""
    driver = Driver(fills=True)
    driver.admit("a", [1, 2], [7])
    before: dict[str, torch.Tensor] = {}
    calls = iter(range(100))

    def fail(layer: str, output: torch.Tensor) -> None:
        if next(calls) == 2:
            raise RuntimeError("a kernel that refuses 1e4")
        before.setdefault(layer, driver.caches[layer].clone())

    driver.on_output = fail
    with pytest.raises(RuntimeError, match="refuses 1e4"):
        driver.step([("a", 0, 2)])
    assert torch.equal(driver.caches[FIRST].view(torch.uint8), before[FIRST].view(torch.uint8))


def test_fills_without_a_history_still_run() -> None:
    """A step whose K and V were not seen is filled with what there is, in float16 too."""
    for dtype in (torch.bfloat16, torch.float16):
        driver = Driver(fills=True, skip_update=True, dtype=dtype)
        driver.admit("a", [1, 2], [7])
        driver.step([("a", 0, 2)])
        record = driver.finish()
        assert set(record["replay"]["rows_compared"].values()) == {4}
        assert record["placement"]["kinds"] == {"unseen-history": 2}


def test_float16_runs_are_healthy() -> None:
    """The tolerance follows the rounding of the engine's type."""
    record = _run(Driver(dtype=torch.float16, fills=True, probe=True, kv_format="k16v16"))
    assert findings(record) == {}
    assert 0 < record["placement"]["worst_ratio"] < 1


# -- what is kept --------------------------------------------------------------------------------------------------


def test_at_most_one_reproducer_a_gate() -> None:
    """However many findings, each gate keeps its first one."""

    def spoil(layer: str, output: torch.Tensor) -> None:
        output[:2] = output[:2].roll(1, 0)

    record = _run(Driver(on_maps=_shorter_first, on_output=spoil, on_write=lambda key, value: (key.roll(1, 0), value)))
    gates = [entry["gate"] for entry in record["reproducers"]]
    assert sorted(gates) == ["placement", "routing", "shifted-outputs", "stale-maps"]
    for entry in record["reproducers"]:
        assert base64.b64decode(entry["npz"])[:2] == b"PK"


def _shorter_first(maps: Maps) -> None:
    maps.lengths[0] -= 1


def test_a_history_that_is_too_long_has_no_reproducer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong row behind so many positions is found and not kept."""
    for longest, kept in ((5, 1), (4, 0)):
        monkeypatch.setattr(reproducer, "LONGEST", longest)

        def spoil(layer: str, output: torch.Tensor) -> None:
            output[4:5] += 1

        driver = Driver(on_output=spoil)
        driver.admit("a", [1, 2, 3, 4, 5], [7, 2])
        driver.step([("a", 0, 5)])
        record = driver.finish()
        assert record["placement"]["findings_total"] == 2
        assert len(record["reproducers"]) == kept


@pytest.mark.parametrize("kv_format", ["k16v16", "k16v8"])
def test_a_decoded_row_is_kept_whole(kv_format: str) -> None:
    """The first short decode of the first layer is kept with its cells, query and output."""
    driver = Driver(kv_format=kv_format)
    record = _run(driver)
    sample = record["samples"]
    json.dumps(sample)
    assert {key: sample[key] for key in ("layer", "kv_format", "position")} == {
        "layer": FIRST,
        "kv_format": kv_format,
        "position": 4,
    }
    assert sample["v_scale"] == driver.scales[FIRST]
    assert sample["scale"] == SIZE**-0.5
    raw = torch.frombuffer(bytearray(base64.b64decode(sample["cells"])), dtype=torch.uint8).view(sample["cells_shape"])
    assert raw.shape == (5, HKV, (4 if kv_format == "k16v16" else 3) * SIZE)
    key, value = driver.codec.decode(Cells(k=raw[..., : 2 * SIZE], v=raw[..., 2 * SIZE :]), sample["v_scale"])
    assert torch.equal(key[4], driver.sources[FIRST][1][3].float())
    query, output = torch.tensor(sample["query"]), torch.tensor(sample["output"])
    assert query.shape == output.shape == (HQ, SIZE)
    made = attention(query[None], key, value, first=4, window=None)[0].float()
    assert torch.allclose(made, output, atol=0.05)
    assert torch.equal(output.flatten(), driver.outputs[2][0].float())


def test_a_prompt_is_no_sample() -> None:
    """A row of a chunk, the first position and a long decode are not kept."""
    driver = Driver()
    driver.admit("a", [1, 2, 3], [7])
    driver.admit("b", [5], [4])
    driver.step([("a", 0, 3), ("b", 0, 1)])
    assert driver.finish()["samples"] == {}


def test_conditions_are_counted_where_they_hold() -> None:
    """Single decodes, a chunk, lengths around a block, the top of the pool, a shrinking batch and padding."""
    driver = Driver(layers=1)
    driver.admit("a", list(range(9)), [7, 2, 4])
    driver.admit("b", [1, 2], [5])
    before = dict(driver.oracle._conditions)
    assert set(before.values()) == {0}
    expected = []
    for rows, padding in (
        ([("a", 0, 3)], 0),
        ([("a", 3, 1), ("b", 0, 2)], 0),
        ([("a", 4, 2)], 1),
        ([("a", 6, 1)], 0),
    ):
        driver.step(rows, padding=padding)
        now = dict(driver.oracle._conditions)
        expected.append({name: now[name] - before[name] for name in now if now[name] != before[name]})
        before = now
    assert expected == [
        {"below-block": 1},
        {"mixed": 1, "at-block": 1},
        {"chunked": 1, "shrinking-batch": 1, "padding": 1},
        {"below-block": 1},
    ]


@pytest.mark.parametrize(("factor", "found"), [(1.0, False), (1.01, True), (0.99, True), (math.nan, True)])
def test_a_gain_within_every_tolerance_is_found_over_many_rows(factor: float, found: bool) -> None:
    """One per cent is within the tolerance of each row; over many rows it is no rounding."""

    def scale(layer: str, output: torch.Tensor) -> None:
        output *= factor

    driver = Driver(on_output=scale)
    driver.admit("a", [token % 30 for token in range(44)], list(range(1, 12)))
    for start in range(0, 44, 4):
        driver.step([("a", start, 4)])
    record = driver.finish()
    assert ("gain" in record["placement"]["kinds"]) == found, record["placement"]
    assert math.isnan(factor) or (record["placement"]["worst_gain"] > 2**-7) == found


def test_a_call_that_does_not_repeat_says_so_and_not_that_a_fill_did_it() -> None:
    """Outputs that differ from one call to the next are named as such, and nothing is said of fills."""
    calls = iter(range(10**6))
    driver = Driver(fills=True, read=lambda key, value: (key, value + 0.001 * next(calls)))
    driver.admit("a", [1, 2, 3, 4, 5], [1, 2])
    driver.step([("a", 0, 5)])
    record = driver.finish()
    assert set(record["replay"]["kinds"]) == {"not-repeatable"}
    assert record["replay"]["rows_compared"] == {"nan": 0, "large": 0, "other-request": 0}


# -- formats without a declaration -----------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", [False, True])
def test_without_a_declaration_maps_slots_and_rows_are_checked(probe: bool) -> None:
    """Nothing is said of cells, outputs and fills; rows, maps and slots are checked as ever."""
    record = _run(Driver(declared=False, probe=probe, fills=True))
    assert findings(record) == {}
    assert record["row_map"]["checked"] == ROWS
    assert record["stale-maps"]["tables_compared"] > 0
    assert record["layers"] == 2
    for section, count in (("routing", "cells_checked"), ("routing", "writes_checked"), ("placement", "rows_checked")):
        assert record[section][count] == 0
    assert record["replay"]["cells_filled"] == 0


def test_without_a_declaration_a_wrong_map_or_slot_is_found() -> None:
    """A stale block table and a wrong slot need no declaration to be seen."""

    def stale(maps: Maps) -> None:
        maps.table[0, 0] += 1

    assert set(findings(_run(Driver(declared=False, on_maps=_once(stale))))) == {"stale-maps"}

    def moved(maps: Maps) -> None:
        maps.slots[0] += 1

    assert set(findings(_run(Driver(declared=False, on_maps=_once(moved))))) == {"routing"}
