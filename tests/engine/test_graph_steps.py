"""Oracle windows over steps of which some replay a captured graph, through both model runners' ways into a step."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from graph_engine import COLUMNS, HEADS, KV_HEADS, REQUESTS, SIZE, TOKENS, Batch, GraphEngine  # noqa: E402
from served_graphs import ROWS, STEPS, Kind, Plant, Served, objected  # noqa: E402 - the engine may be absent
from vllm.config import CUDAGraphMode  # noqa: E402

from pytest_kvqual.worker.taps import OracleTaps  # noqa: E402
from pytest_kvqual.worker.wire import WorkerError  # noqa: E402

pytestmark = pytest.mark.engine


def _run(served: Served, taps: OracleTaps) -> dict[str, Any]:
    for rows in STEPS:
        served.step(rows, taps)
    return taps.finish()


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_steps_in_python_and_in_graphs_are_one_window(kind: Kind) -> None:
    """Prompts go through the Python taps, replays through the static ones; every row of both is checked, none wrong."""
    served = Served(kind)
    taps = served.open()
    record = _run(served, taps)
    assert (served.eager, served.replays) == (2, 3)
    assert objected(record) == set()
    assert record["steps"] == len(STEPS)
    assert record["rows"]["scheduled"] == record["row_map"]["checked"] == ROWS
    assert record["routing"]["writes_checked"] == record["placement"]["rows_checked"] == 2 * ROWS
    assert record["conditions"]["replayed"] == 3
    assert record["row_map"]["self_test"] == record["shifted-outputs"]["self_test"] == "caught"


@pytest.mark.parametrize("kind", ["v1", "v2"])
@pytest.mark.parametrize("options", [{"probe": True}, {"fills": True}, {}])
def test_a_window_without_static_taps_runs_no_graph(kind: Kind, options: dict[str, bool]) -> None:
    """Where a layer must be called by itself, or a graph has no taps, every step of the window enters Python."""
    served = Served(kind)
    record = _run(served, served.open(static=False, **options))
    assert (served.eager, served.replays, record["conditions"]["replayed"]) == (len(STEPS), 0, 0)
    assert objected(record) == set()
    assert bool(record["replay"]["cells_filled"]) == bool(options.get("fills"))
    assert not record["replay"]["findings_total"]
    served.step([("z", 1)], served.open())
    assert served.replays == 1


def _stale(*names: str) -> Plant:
    """A step's maps are put where the graph does not read them: those of the step before stay in force."""

    def plant(batch: Batch, graph: GraphEngine) -> None:
        if batch.rows == batch.requests:
            for name in names:
                setattr(batch, name, graph.inputs[name].clone())

    return plant


def _slot_zero(batch: Batch, graph: GraphEngine) -> None:
    batch.slots[batch.rows :] = 0


@pytest.mark.parametrize("kind", ["v1", "v2"])
@pytest.mark.parametrize(
    ("plant", "claimed"),
    [
        (_stale("table"), "stale-maps"),
        (_stale("lengths"), "stale-maps"),
        (_stale("slots"), "routing"),
        (_slot_zero, "routing"),
    ],
    ids=["table", "lengths", "slots", "slot-zero"],
)
def test_a_fault_of_replays_is_found_in_the_window(kind: Kind, plant: Plant, claimed: str) -> None:
    """A stale or wrong map of a replayed step is a finding of the gate that claims it."""
    served = Served(kind)
    served.plant = plant
    assert claimed in objected(_run(served, served.open()))


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_a_graph_without_taps_is_no_evidence(kind: Kind) -> None:
    """A replay in a window that has no static taps and was to run none is refused, not passed over."""
    served = Served(kind)
    taps = served.open(static=False)
    if kind == "v1":
        served.runner.cudagraph_dispatcher.dispatch = lambda uniform: CUDAGraphMode.FULL
    else:
        served.runner.cudagraph_manager._graphs_captured = True
    with pytest.raises(WorkerError, match="found a full graph without taps in it"):
        served.step([("x", 1)], taps)


def test_fingerprints_and_fills_refuse_static_taps() -> None:
    """A window of fingerprints or fills cannot be fed from a graph, which runs each layer once."""
    for option in ("probe", "fills"):
        with pytest.raises(WorkerError, match="found static taps with fingerprints or fills"):
            Served("v2").open(**{option: True})


def test_static_buffers_know_their_size() -> None:
    """The memory that the taps take is what their buffers hold."""
    tap = Served("v2").graph.tap
    per_layer = TOKENS * (2 * KV_HEADS + 2 * HEADS) * SIZE * 2 + 8 * (
        TOKENS + REQUESTS * COLUMNS + REQUESTS + REQUESTS + 1
    )
    assert tap.bytes == 2 * per_layer
