"""Reproducers: one finding as a file that can be checked again."""

from __future__ import annotations

import base64
import io
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from window_driver import HQ, SIZE, Driver, Maps, workload

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.oracles import reproducer
from pytest_kvqual.oracles.placement import attention, unit


def _misplace(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return key.roll(1, 0), value


def _stale(maps: Maps) -> None:
    maps.lengths[0] -= 1


def _roll(layer: str, output: torch.Tensor) -> None:
    output[:4] = output[:4].roll(1, 0)


def _scale(layer: str, output: torch.Tensor) -> None:
    output *= 1.5


def _leak() -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    calls = iter(range(10**6))
    return lambda key, value: (key, value + 0.001 * next(calls))


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "routing": ("cells", {"on_write": _misplace}),
    "stale-maps": ("maps", {"on_maps": _stale}),
    "shifted-outputs": ("shift", {"on_output": _roll}),
    "placement": ("row", {"on_output": _scale}),
    "replay": ("fill", {"fills": True, "read": _leak()}),
}


def _made(gate: str, tmp_path: Path, **more: Any) -> Path:
    """The reproducer that a window kept for a gate, as a file."""
    driver = Driver(**FAULTS[gate][1], **more)
    workload(driver)
    record = driver.finish()
    held = {entry["gate"]: entry["npz"] for entry in record["reproducers"]}
    assert len(held) == len(record["reproducers"])
    path = tmp_path / f"{gate}.npz"
    path.write_bytes(base64.b64decode(held[gate]))
    assert record[gate]["findings_total"] > 0
    return path


def _changed(path: Path, **changed: Any) -> Path:
    """The same file with some arrays replaced; None removes one."""
    with np.load(path, allow_pickle=False) as archive:
        held = {name: archive[name] for name in archive.files}
    held.update(changed)
    np.savez_compressed(path, **{name: value for name, value in held.items() if value is not None})
    return path


def _arrays(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


@pytest.mark.parametrize("gate", list(FAULTS))
def test_a_kept_finding_is_reproduced(gate: str, tmp_path: Path) -> None:
    """The reproducer of each kind holds its finding's words, and its check objects again."""
    path = _made(gate, tmp_path)
    text, found = reproducer.check(path)
    held = _arrays(path)
    assert str(held["what"]) == FAULTS[gate][0]
    assert int(held["schema"]) == reproducer.SCHEMA == 1
    assert text.startswith("layers.0.attn: ")
    assert found
    if gate in ("placement", "shifted-outputs"):
        assert found[0].split(" and is that of")[0].split(" is ")[0].split("output of")[-1] in text


@pytest.mark.parametrize("gate", list(FAULTS))
def test_a_repaired_output_is_not_reproduced(gate: str, tmp_path: Path) -> None:
    """With what the engine should have given in place of what it gave, the check finds nothing."""
    path = _made(gate, tmp_path)
    held = _arrays(path)
    if gate == "routing":
        _changed(path, found_k=held["expected_k"], found_v=held["expected_v"])
    elif gate == "stale-maps":
        _changed(path, seq_lens=(held["starts"] + held["scheduled"]).astype(np.int32))
    elif gate == "replay":
        _changed(path, after=held["before"])
    else:
        right = attention(
            torch.from_numpy(held["query"])[None],
            torch.from_numpy(held["key"]),
            torch.from_numpy(held["value"]),
            start=int(held["position"]),
            scale=float(held["scale"]),
            rounding=float(held["rounding"]),
        )
        _changed(path, output=right.output[0].numpy())
    text, found = reproducer.check(path)
    assert text
    assert found == []


def test_a_row_within_a_window_is_reproduced_within_it(tmp_path: Path) -> None:
    """The sliding window of the layer travels with the row."""
    path = _made("placement", tmp_path, window=3)
    assert int(_arrays(path)["window"]) == 3
    assert reproducer.check(path)[1]
    assert int(_arrays(_made("placement", tmp_path))["window"]) == 0


def test_a_row_carries_its_history_and_no_more(tmp_path: Path) -> None:
    """A wrong row at position 3 is kept with the four positions that it sees, and is reproduced from them."""

    def spoil(layer: str, output: torch.Tensor) -> None:
        output[3:4] += 1

    driver = Driver(on_output=spoil)
    driver.admit("a", [1, 2, 3, 4, 5, 6], [7, 2])
    driver.step([("a", 0, 6)])
    (entry,) = driver.finish()["reproducers"]
    path = tmp_path / "row.npz"
    path.write_bytes(base64.b64decode(entry["npz"]))
    held = _arrays(path)
    assert held["key"].shape == held["value"].shape == (4, 3, SIZE)
    assert int(held["position"]) == 3
    text, found = reproducer.check(path)
    assert text.startswith("layers.0.attn: output of request a position 3 is ")
    assert len(found) == 1
    assert "output of request a position 3 is " in found[0]


def _row(window: int, position: int = 6) -> bytes:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(HQ, SIZE, generator=generator)
    key, value = (torch.randn(position + 1, 3, SIZE, generator=generator) for _ in range(2))
    right = attention(
        query[None], key, value, start=position, scale=0.3, rounding=unit(torch.bfloat16), window=window or None
    )
    return reproducer.pack(
        "row",
        "a finding",
        {"query": query, "key": key, "value": value, "output": right.output[0]},
        layer="L",
        request="a",
        position=position,
        scale=0.3,
        rounding=unit(torch.bfloat16),
        window=window,
    )


@pytest.mark.parametrize(
    ("packed", "checked", "lines"), [(0, 0, 0), (3, 3, 0), (3, 0, 1), (0, 3, 1), (1, 1, 0), (1, 2, 1)]
)
def test_the_window_decides_what_a_row_sees(packed: int, checked: int, lines: int, tmp_path: Path) -> None:
    """A row computed under one window is wrong under another; 0 stands for none."""
    path = tmp_path / "row.npz"
    path.write_bytes(_row(packed))
    text, found = reproducer.check(_changed(path, window=np.array(checked)))
    assert text == "a finding"
    assert len(found) == lines
    assert all(line.startswith("L: output of request a position 6 is ") for line in found)


def test_a_row_of_nan_is_reproduced(tmp_path: Path) -> None:
    """An output, query, K or V that is not a number is objected to again."""
    path = tmp_path / "row.npz"
    for name in ("output", "query", "key", "value"):
        path.write_bytes(_row(0))
        held = _arrays(path)[name].copy()
        held.flat[0] = math.nan
        assert reproducer.check(_changed(path, **{name: held}))[1]


def test_cells_are_shown_byte_by_byte(tmp_path: Path) -> None:
    """Each (slot, head) that differs is a line, in K and then in V."""
    zeros = torch.zeros(2, 3, 4, dtype=torch.uint8)
    k, v = zeros.clone(), zeros.clone()
    k[1, 2, 3], v[0, 1, 0] = 0xAB, 1
    path = tmp_path / "cells.npz"
    arrays = {"found_k": k, "expected_k": zeros, "found_v": zeros, "expected_v": v, "slots": torch.tensor([40, 7])}
    path.write_bytes(reproducer.pack("cells", "text", arrays, layer="L", block_size=4))
    assert reproducer.check(path) == (
        "text",
        [
            "slot 7, K of KV head 2: byte 3 is 0xab, expected 0x00",
            "slot 40, V of KV head 1: byte 0 is 0x00, expected 0x01",
        ],
    )


def test_a_fill_counts_the_bytes(tmp_path: Path) -> None:
    """The check of a fill says how many bytes of how many changed."""
    before = torch.zeros(6, dtype=torch.uint8)
    after = before.clone()
    after[[1, 4]] = 3
    path = tmp_path / "fill.npz"
    path.write_bytes(reproducer.pack("fill", "text", {"before": before, "after": after}, layer="L"))
    assert reproducer.check(path)[1] == ["2 of 6 bytes of the output changed with cells that nobody wrote"]


def test_a_shift_names_the_other_row(tmp_path: Path) -> None:
    """The check of a shift says whose output the row is."""
    found = reproducer.check(_made("shifted-outputs", tmp_path))[1]
    assert len(found) == 1
    assert "must be the output of request a position 0 and is that of request a position 3" in found[0]


# -- damage --------------------------------------------------------------------------------------------------------


def _refused(path: Path) -> str:
    with pytest.raises(EvidenceError) as caught:
        reproducer.check(path)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def test_no_file(tmp_path: Path) -> None:
    """A missing file and a folder are refused with the reason."""
    assert "No such file" in _refused(tmp_path / "none.npz")
    assert "expected a reproducer" in _refused(tmp_path)


def _plain(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not an archive",
        b"PK\x03\x04 but not a zip",
        _npy(np.zeros(3)),
        _plain(what=np.array([{"a": 1}], dtype=object)),
    ],
)
def test_a_file_that_is_no_archive_is_refused(data: bytes, tmp_path: Path) -> None:
    """Other bytes, a bare array and pickled objects are no reproducer."""
    path = tmp_path / "x.npz"
    path.write_bytes(data)
    assert "expected a reproducer" in _refused(path)


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.integers(0, 10**6), st.integers(1, 255))
def test_a_truncated_or_damaged_file_is_refused_or_reads_the_same(cut: bool, at: int, flip: int) -> None:
    """Cut or flipped anywhere: an error of one line, or the reproducer is what it was."""
    whole = _row(0)
    at %= len(whole)
    outcome = _outcome(whole[:at] if cut else whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
    assert outcome.count("\n") == 0
    assert outcome.startswith("refused: ") or (not cut and outcome == "a finding")


def _outcome(data: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npz"
        path.write_bytes(data)
        try:
            return reproducer.check(path)[0]
        except EvidenceError as error:
            return f"refused: {error}"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"what": np.array("other")}, "found kind 'other', expected one of cells, maps, row, shift, fill of schema 1"),
        ({"what": None}, "found kind ''"),
        ({"schema": np.array(2)}, "found kind 'row', expected one of"),
        ({"schema": None}, "of schema 1"),
        ({"schema": np.array([1, 2])}, "of schema 1"),
        ({"schema": np.array("one")}, "of schema 1"),
        ({"key": None}, "found no array 'key', expected query, key, value, output"),
        ({"output": None}, "found no array 'output'"),
        ({"position": None}, "do not fit together"),
        ({"text": None}, "do not fit together"),
        ({"key": np.zeros((3, 3), np.float32)}, "do not fit together"),
        ({"key": np.zeros((7, 3, SIZE + 1), np.float32)}, "do not fit together"),
        ({"query": np.zeros((HQ + 1, SIZE), np.float32)}, "do not fit together"),
        ({"value": np.array(["x"])}, "do not fit together"),
        ({"position": np.array(math.inf)}, "do not fit together"),
        ({"position": np.array(9)}, "do not fit together"),
        ({"scale": np.array("x")}, "do not fit together"),
        ({"output": np.zeros((1, SIZE), np.float32)}, f"output is (1, {SIZE}), expected ({HQ}, {SIZE}) as query"),
    ],
)
def test_arrays_that_are_wrong_are_refused(changed: dict[str, Any], expected: str, tmp_path: Path) -> None:
    """Another kind or schema, a missing array and arrays that do not fit are named in one line."""
    path = tmp_path / "row.npz"
    path.write_bytes(_row(0))
    assert expected in _refused(_changed(path, **changed))


@pytest.mark.parametrize(
    ("gate", "changed"),
    [
        ("stale-maps", {"block_size": np.array(0)}),
        ("stale-maps", {"blocks": np.array(3)}),
        ("stale-maps", {"starts": np.array([1])}),
        ("stale-maps", {"block_table": np.array(["x"])}),
        ("stale-maps", {"layer": None}),
        ("routing", {"slots": np.array([], dtype=np.int64)}),
        ("routing", {"found_k": np.zeros((1, 9, 2), np.uint8)}),
        ("replay", {"before": np.zeros(1, np.uint8)}),
        ("routing", {"expected_v": np.zeros((1, 1, 1), np.uint8)}),
        ("shifted-outputs", {"other_tolerance": np.zeros((1, 1), np.float32)}),
        ("shifted-outputs", {"other_output": np.zeros((1, 1), np.float32)}),
        ("shifted-outputs", {"other": None}),
    ],
)
def test_every_kind_refuses_what_does_not_fit(gate: str, changed: dict[str, Any], tmp_path: Path) -> None:
    """No kind of reproducer raises anything but an error of the evidence."""
    assert "do not fit together" in _refused(_changed(_made(gate, tmp_path), **changed))


@pytest.mark.parametrize("gate", list(FAULTS))
def test_every_array_of_a_kind_is_required(gate: str, tmp_path: Path) -> None:
    """Each array of the table is missed by name."""
    path = _made(gate, tmp_path)
    whole = path.read_bytes()
    for name in set(_arrays(path)) - {
        "what", "schema", "text", "layer", "request", "position", "scale", "rounding", "window", "block_size", "fill",
        "other", "other_position",
    }:  # fmt: skip
        path.write_bytes(whole)
        assert f"found no array '{name}'" in _refused(_changed(path, **{name: None}))
