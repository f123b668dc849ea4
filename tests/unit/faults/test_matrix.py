"""A small matrix: one fault of each gate, a benign one, and a healthy engine."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pytest_kvqual.faults import FAULTS, Fault, matrix  # noqa: E402 - torch may be absent
from pytest_kvqual.faults.scenarios import SCENARIOS  # noqa: E402

QUICK = (
    "scales-left-at-one",
    "layer-falls-back-after-calls",
    "stale-block-table",
    "slot-wrong-at-block-multiple",
    "outputs-rolled-by-one-row",
    "base-two-lse-merged",
    "tail-of-v-times-zero",
    "output-depends-on-batch-index",
    "stale-tail-in-table",
)


@pytest.mark.parametrize("name", QUICK)
def test_the_claiming_gate_is_the_first_to_object(name: str) -> None:
    """Each gate catches one of its faults, and the gates before it are silent."""
    fault = FAULTS[name]
    cell = matrix.Cell(fault=fault, findings=matrix.run(fault, SCENARIOS[fault.scenario]))
    assert cell.right, str(cell)


def test_a_healthy_engine_is_met_with_silence() -> None:
    """No gate objects to the scenario whose pool starts with NaN among its bytes."""
    assert matrix.run(None, SCENARIOS["garbage"]) == {}


def test_a_fault_that_no_gate_sees_is_wrong() -> None:
    """A cell without findings is right for a benign difference only."""
    fault, benign = FAULTS["slot-off-by-one"], FAULTS["heads-in-another-order"]
    assert not matrix.Cell(fault=fault, findings={}).right
    assert matrix.Cell(fault=benign, findings={}).right


def test_an_earlier_gate_takes_the_fault_from_the_one_that_claims_it() -> None:
    """A cell is wrong where a gate before the claiming one objects, and says what it objected to."""
    fault = FAULTS["slot-off-by-one"]
    cell = matrix.Cell(fault=fault, findings={"routing": "a cell", "stale-maps": "a table"})
    assert not cell.right
    assert "expected routing first, found" in str(cell)
    assert "stale-maps: a table" in str(cell)


def test_planted_faults_are_taken_back() -> None:
    """After ``undo`` an engine answers as one in which nothing was planted."""
    names = ("tail-position-dropped", "slot-off-by-one", "stale-lengths", "head-map-by-head", "maps-of-the-next-step")
    faults: list[Fault] = [FAULTS[name] for name in names]
    scenario = SCENARIOS["plain"]
    outputs = []
    for planted in ([], faults):
        engine = scenario.engine()
        for fault in planted:
            matrix.plant(fault, engine)
        engine.undo()
        scenario.drive(engine, list)
        outputs.append(engine.outputs)
    assert outputs[0].keys() == outputs[1].keys()
    assert all(torch.equal(outputs[0][name], outputs[1][name]) for name in outputs[0])
