"""The oracles on the real engine: green where nothing is wrong, red for a fault that a stranger brings."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from served_arm import serving

from pytest_kvqual import cli
from pytest_kvqual.attempt import pass_panels
from pytest_kvqual.capture.oracle import capture_oracle
from pytest_kvqual.server import rpc
from pytest_kvqual.server.process import Server
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Selection
from pytest_kvqual.study.panels import Panel

pytestmark = pytest.mark.engine

LIMIT_S = 300.0
CONDITIONS = ("mixed", "chunked", "reused-block", "top-of-pool", "resumed", "shrinking-batch")
STRANGER = '''
def plant(worker):
    """One layer's last cell of each write is dropped."""
    layer = list(worker.kvqual_layers().values())[7]
    original = layer.impl.do_kv_cache_update

    def update(layer, key, value, kv_cache, slot_mapping):
        slots = slot_mapping.clone()
        slots[-1] = -1
        original(layer, key, value, kv_cache, slots)

    layer.impl.do_kv_cache_update = update
'''


def oracle(server: Server, selection: Selection, panel: Panel, **options: Any) -> dict[str, Any]:
    """The record of one pass over a panel, in which every request was answered and every row was seen."""
    study = selection.study
    found = capture_oracle(
        server,
        panel,
        **options,
        model=study.model.name,
        schedule=study.schedule,
        wave_size=selection.length.wave_size,
        timeout_s=LIMIT_S,
    )
    records: Any = found["records"]
    assert len(records) == 1
    record: dict[str, Any] = records[0]
    responses: Any = found["responses"]
    assert sorted(response["index"] for response in responses) == list(range(len(panel.items)))
    needed = 0
    for response in responses:
        (choice,) = json.loads(response["body"])["choices"]
        needed += len(choice["prompt_token_ids"]) + len(choice["token_ids"]) - 1
    rows = record["rows"]
    assert rows["scheduled"] == needed - rows["prefix"] + rows["recomputed"] == record["row_map"]["checked"]
    assert record["routing"]["writes_checked"] == rows["scheduled"] * study.model.layers
    for section in ("shifted-outputs", "placement"):
        assert record[section]["rows_checked"] == rows["scheduled"] * study.model.layers
        assert record[section]["layers"] == study.model.layers
    return record


def replay(
    record: dict[str, Any], gate: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[str]]:
    """The exit status of ``kvqual replay`` on the reproducer of a gate's finding, and the lines that it prints."""
    (data,) = [entry["npz"] for entry in record["reproducers"] if entry["gate"] == gate]
    path = folder / f"{gate}.npz"
    path.write_bytes(base64.b64decode(data))
    capsys.readouterr()
    status = cli.main(["replay", str(path)])
    return status, capsys.readouterr().out.splitlines()


# The candidate goes through every oracle in test_degradations_live.py.
@pytest.mark.parametrize(("study", "arm", "kinds"), [("smollm2-cpu", "native", {"nan-fill"})])
def test_healthy_passes(
    study: str, arm: str, kinds: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No oracle objects to the model's own pass, to fingerprints or to a scarce pool, but for the arm's known fills.

    The conditions that the study insists on are met over the three passes, and the taps are off afterwards.
    """
    selection = select(load_study(study), arm=arm, length=1024, cache_bytes=None)
    rules, panels = selection.study.oracle, pass_panels(selection)
    with serving(selection, tmp_path / "server.log") as server:
        records = {
            "model": oracle(server, selection, panels["model"]),
            "probe": oracle(server, selection, panels["probe"], probe=True, fills=True),
            "pressure": oracle(server, selection, panels["pressure"], free_blocks=rules.free_blocks),
        }
        assert rpc.call(server.base_url, "kvqual_taps", timeout_s=10) == [{"installed": False, "faults": 0, "held": 0}]
    for name, record in records.items():
        for section in ("row_map", "stale-maps", "routing", "shifted-outputs", "placement"):
            assert record[section]["findings_total"] == 0, (name, section, record[section]["findings"])
        assert (record["probe"], record["fills"]) == (name == "probe", name == "probe")
        assert record["row_map"]["self_test"] == record["shifted-outputs"]["self_test"] == "caught"
        assert record["layers"] == selection.study.model.layers
        assert record["stale-maps"]["tables_compared"] >= record["steps"] * record["layers"]
        assert 0 < record["stale-maps"]["maps_changed"] <= record["steps"]
        assert record["routing"]["cells_checked"] > rules.minimum_cells
        assert record["routing"]["history_cells"] > 0
        assert record["routing"]["blocks_compared"] > 0
        assert record["placement"]["rows_checked"] > rules.minimum_rows
        assert 0 < record["placement"]["worst_ratio"] <= 1
        assert record["placement"]["ambiguous_rows"] <= rules.ambiguous_rows * record["placement"]["rows_checked"]
        compared = record["replay"]["rows_compared"]
        rows = record["placement"]["rows_checked"] if name == "probe" else 0
        assert compared == {"nan": rows, "large": rows, "other-request": rows}
        assert (record["replay"]["cells_filled"] > 0) is (name == "probe")
        assert set(record["replay"]["kinds"]) == (kinds if name == "probe" else set())
        assert [entry["gate"] for entry in record["reproducers"]] == (["replay"] if kinds and name == "probe" else [])
    assert records["pressure"]["rows"]["recomputed"] > 0
    for condition in CONDITIONS:
        assert sum(record["conditions"][condition] for record in records.values()) > 0, condition
    if kinds:
        status, lines = replay(records["probe"], "replay", tmp_path, capsys)
        assert status == 1
        assert lines[0] == f"recorded: {records['probe']['replay']['findings'][0]}"
        assert "bytes of the output changed with cells that nobody wrote" in lines[1]


def test_of_an_undeclared_format_nothing_is_said_of_cells(tmp_path: Path) -> None:
    """A stock 8-bit cache without a declaration: maps and slots are compared, and no cell is called right or wrong."""
    selection = select(load_study("smollm2-cpu-fp8"), arm="fp8-e4m3", length=1024, cache_bytes=None)
    panel = pass_panels(selection)["pressure"]
    open_arm = replace(selection, arm=replace(selection.arm, kv_format="a-stock-format"))
    with serving(open_arm, tmp_path / "open.log") as server:
        identity: Any = rpc.call(server.base_url, "kvqual_identity", {"parts": ["layers"]}, timeout_s=60)[0]
        found: Any = capture_oracle(
            server,
            panel,
            probe=True,
            fills=True,
            model=selection.study.model.name,
            schedule="waves",
            wave_size=selection.length.wave_size,
            timeout_s=LIMIT_S,
        )["records"]
    assert identity["kv_format"] == "a-stock-format"
    assert {layer["k_bytes_per_element"] for layer in identity["layers"]} == {1}
    assert found[0]["stale-maps"]["tables_compared"] >= found[0]["steps"] * found[0]["layers"]
    assert all(found[0][name]["findings_total"] == 0 for name in ("row_map", "stale-maps", "routing", "placement"))
    assert found[0]["routing"]["cells_checked"] == found[0]["placement"]["rows_checked"] == 0


def test_a_strangers_fault_is_found_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fault from a folder of the arm, in one layer only, is named with its layer, block, slot, request and position.

    The reproducer that the record brings shows the same cell without the engine.
    """
    (tmp_path / "stranger.py").write_text(STRANGER)
    selection = select(load_study("smollm2-cpu"), arm="candidate", length=1024, cache_bytes=None)
    arm = replace(selection.arm, pythonpath=(tmp_path,), after_init=("stranger:plant",))
    selection = replace(selection, arm=arm)
    panel = pass_panels(selection)["pressure"]
    with serving(selection, tmp_path / "server.log") as server:
        record = oracle(server, selection, panel)
    findings = record["routing"]["findings"]
    assert record["routing"]["findings_total"] > 0
    assert "wrong-cell" in record["routing"]["kinds"]
    for section in ("routing", "shifted-outputs", "placement"):
        assert all("layers.7." in line for line in record[section]["findings"]), record[section]["findings"]
    match = re.match(
        r"\S*layers\.7\.\S*: block (\d+) offset (\d+) \(slot (\d+), request \S+ position \d+\), "
        r"K and V of KV head 0, 1, 2: ",
        findings[0],
    )
    assert match is not None, findings[0]
    block, offset, slot = (int(number) for number in match.groups())
    assert slot == block * selection.study.engine.block_size + offset
    status, lines = replay(record, "routing", tmp_path, capsys)
    assert status == 1
    assert lines[0] == f"recorded: {findings[0]}"
    assert any(re.match(rf"found:    slot {slot}, [KV] of KV head \d: byte \d+ is 0x", line) for line in lines), lines
