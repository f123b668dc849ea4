"""The oracle on the real engine: green where nothing is wrong, red for a fault that a stranger brings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_kvqual.capture.oracle import capture_oracle
from pytest_kvqual.models import model_folder, verify_model
from pytest_kvqual.server import rpc
from pytest_kvqual.server.command import serve_command, worker_config
from pytest_kvqual.server.process import Server, Timeouts, free_port
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Selection
from pytest_kvqual.study.panels import load_panel, selected_scales

pytestmark = pytest.mark.engine

LIMIT_S = 300.0
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


@contextmanager
def serving(selection: Selection, log: Path) -> Iterator[Server]:
    """The selection's server."""
    model = model_folder(selection.study.model)
    verify_model(model, selection.study.model.files)
    port = free_port()
    command = serve_command(
        selection,
        model=model,
        port=port,
        worker_config=worker_config(selection, model=model, v_scales=selected_scales(selection)),
        python=Path(sys.executable),
        inherited=os.environ,
    )
    with Server.start(command, port=port, log=log, timeouts=Timeouts(boot_s=LIMIT_S)) as server:
        yield server


def oracle(server: Server, selection: Selection) -> dict[str, Any]:
    """The record of one healthy pass over the short requests of the oracle panel."""
    study, length = selection.study, selection.length
    panel = load_panel(length.panels["oracle"], task="oracle", length=length.tokens, vocabulary=study.model.vocabulary)
    short = tuple(item for item in panel.items if len(item.prompt) <= study.oracle.poison_prompt_tokens)
    found = capture_oracle(
        server,
        replace(panel, items=short),
        fault=None,
        model=study.model.name,
        schedule=study.schedule,
        wave_size=length.wave_size,
        timeout_s=LIMIT_S,
    )
    records = found["records"]
    assert isinstance(records, list)
    assert len(records) == 1
    return dict(records[0])


@pytest.mark.parametrize("arm", ["native", "candidate"])
def test_two_healthy_passes_have_no_findings(arm: str, tmp_path: Path) -> None:
    """Cells, history, rows and the row map are checked twice without a finding, and the taps are off afterwards."""
    selection = select(load_study("smollm2-cpu"), arm=arm, length=1024, cache_bytes=None)
    with serving(selection, tmp_path / "server.log") as server:
        for _ in range(2):
            record = oracle(server, selection)
            for part in ("routing", "placement", "row_map"):
                assert record[part]["findings_total"] == 0, record[part]["findings"]
            assert record["row_map"]["self_test"] == "caught"
            assert record["layers"] == selection.study.model.layers
            assert record["routing"]["cells_checked"] > selection.study.oracle.minimum_cells
            assert record["placement"]["rows_checked"] > selection.study.oracle.minimum_rows
        assert rpc.call(server.base_url, "kvqual_taps", timeout_s=10) == [{"installed": False, "faults": 0}]


def test_a_strangers_fault_is_found_where_it_is(tmp_path: Path) -> None:
    """A fault from a folder of the arm, in one layer only, is found in that layer and named with its block."""
    (tmp_path / "stranger.py").write_text(STRANGER)
    selection = select(load_study("smollm2-cpu"), arm="candidate", length=1024, cache_bytes=None)
    arm = replace(selection.arm, pythonpath=(tmp_path,), after_init=("stranger:plant",))
    selection = replace(selection, arm=arm)
    with serving(selection, tmp_path / "server.log") as server:
        record = oracle(server, selection)
    findings = record["routing"]["findings"]
    assert record["routing"]["findings_total"] > 0
    assert all("layers.7." in line for line in findings), findings
    assert "does not hold the declared encoding" in findings[0]
