"""A degradation ahead of the cache update, in the real engine: every oracle is silent, and the answers are others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from served_arm import serving

from pytest_kvqual.attempt import pass_panels
from pytest_kvqual.capture.oracle import capture_oracle
from pytest_kvqual.server import rpc
from pytest_kvqual.server.process import Server
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Selection
from pytest_kvqual.study.panels import Panel

pytestmark = pytest.mark.engine

LIMIT_S = 300.0
LIFTER = '''
def lift(worker):
    """Gives each attention layer the forward of its class back, for as long as this is planted."""
    for layer in worker.kvqual_layers().values():
        degraded = vars(layer)["forward"]
        del layer.forward
        worker.kvqual_undo.append(lambda layer=layer, degraded=degraded: setattr(layer, "forward", degraded))
'''


def oracle(
    server: Server, selection: Selection, panel: Panel, fault: str | None = None
) -> tuple[dict[str, Any], list[list[int]]]:
    """The record of one pass over the model's own K, V and queries, and the answers' tokens in the panel's order."""
    found = capture_oracle(
        server,
        panel,
        fault=fault,
        model=selection.study.model.name,
        schedule=selection.study.schedule,
        wave_size=selection.length.wave_size,
        timeout_s=LIMIT_S,
    )
    records: Any = found["records"]
    responses: Any = found["responses"]
    (record,) = records
    tokens = {it["index"]: json.loads(it["body"])["choices"][0]["token_ids"] for it in responses}
    return record, [tokens[index] for index in range(len(panel.items))]


def test_oracles_are_silent_where_v_has_two_bits(tmp_path: Path) -> None:
    """With V rounded to 2 bits from the server's start no oracle objects, and greedy answers are not the candidate's.

    The candidate's answers come from the same server, with the rounding lifted for one pass; afterwards the degraded
    ones come back.
    """
    (tmp_path / "lifter.py").write_text(LIFTER)
    selection = select(load_study("smollm2-cpu"), arm="candidate", length=1024, cache_bytes=None)
    arm = replace(
        selection.arm,
        pythonpath=(*selection.arm.pythonpath, tmp_path),
        after_init=(*selection.arm.after_init, "pytest_kvqual.faults.degradations:v_two_bits"),
    )
    selection = replace(selection, arm=arm)
    rules, panels = selection.study.oracle, pass_panels(selection)
    whole, short = panels["model"], panels["pressure"]
    with serving(selection, tmp_path / "server.log") as server:
        degraded, answers = oracle(server, selection, whole)
        lifted, healthy = oracle(server, selection, short, fault="lifter:lift")
        again, repeated = oracle(server, selection, short)
        assert rpc.call(server.base_url, "kvqual_taps", timeout_s=10) == [{"installed": False, "faults": 0, "held": 0}]
    for name, record in {"degraded": degraded, "lifted": lifted, "again": again}.items():
        for section in ("row_map", "stale-maps", "routing", "shifted-outputs", "placement"):
            assert record[section]["findings_total"] == 0, (name, section, record[section]["findings"])
        for section in ("shifted-outputs", "placement"):
            assert record[section]["rows_checked"] == record["rows"]["scheduled"] * record["layers"] > 0
        assert 0 < record["placement"]["worst_ratio"] <= 1
    assert degraded["routing"]["cells_checked"] > rules.minimum_cells
    assert degraded["placement"]["rows_checked"] > rules.minimum_rows
    assert degraded["placement"]["ambiguous_rows"] <= rules.ambiguous_rows * degraded["placement"]["rows_checked"]
    by_id = {item.id: tokens for item, tokens in zip(whole.items, answers, strict=True)}
    assert repeated == [by_id[item.id] for item in short.items]
    differ = [item.id for item, tokens in zip(short.items, healthy, strict=True) if tokens != by_id[item.id]]
    assert len(differ) > len(short.items) // 2, differ
