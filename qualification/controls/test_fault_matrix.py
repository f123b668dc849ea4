"""Each seeded fault on the transfer engine: the gate that claims it objects, and no gate before it.

Differences that are no fault are met with silence.

No engine and no model: ``pytest qualification/controls``. What was caught of what was seeded is printed at the end, by
gate and by row of the catalogue of public reports.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_kvqual.faults import FAULTS, Fault

pytest.importorskip("torch")

from pytest_kvqual.faults import matrix
from pytest_kvqual.faults.scenarios import SCENARIOS

pytestmark = [pytest.mark.controls]

PLANTED = [fault for fault in FAULTS.values() if "transfer" in fault.where]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_gate_objects_to_a_healthy_engine(scenario: str) -> None:
    """Without a fault no gate has a finding."""
    assert matrix.run(None, SCENARIOS[scenario]) == {}


@pytest.mark.parametrize("fault", PLANTED, ids=[fault.name for fault in PLANTED])
def test_the_claiming_gate_is_the_first_to_object(fault: Fault, record_property: Callable[[str, object], None]) -> None:
    """The gates before the claiming one are silent, it is not; a benign difference is met with silence."""
    cell = matrix.Cell(fault=fault, findings=matrix.run(fault, SCENARIOS[fault.scenario]))
    record_property("fault", fault.name)
    record_property("first_gate", cell.first or "none")
    record_property("right", cell.right)
    assert cell.right, str(cell)
