"""One fault of each gate, in the served arm from its start, turns the run red at the gate that claims it, not before.

The fault is there when the weights are loaded and every healthy reading is taken: no gate may lean on a comparison with
the time before it. Opt-in, ``pytest qualification/controls -m from_start``: each takes a boot and the gates up to its
own. Each faulty run gets its own folder, ``controls/FAULT`` below the run directory. The controls are captured once for
all, or taken from an earlier run of the same scope.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_kvqual.faults import FAULTS
from pytest_kvqual.faults.catalogue import GATES
from pytest_kvqual.faults.seeded import SEEDED
from pytest_kvqual.judge.verdict import Outcome

if TYPE_CHECKING:
    from pytest_kvqual.campaign import Campaign
    from qualification.controls.conftest import OpenCampaign

pytestmark = [pytest.mark.controls, pytest.mark.from_start]


def gates_up_to(campaign: Campaign, last: str) -> list[str]:
    """The gates that a run must pass before ``last``, and ``last``."""
    names = (*campaign.study.before(last), last)
    return [plan.name for plan in campaign.study.gates if plan.name in names and plan.state == "required"]


@pytest.fixture(scope="module")
def healthy(open_campaign: OpenCampaign) -> Campaign:
    """The campaign that the options name, closed again, with its controls captured."""
    campaign = open_campaign()
    try:
        campaign.prepare(gates_up_to(campaign, GATES[-1]))
        campaign.capture_controls()
    finally:
        campaign.close()
    return campaign


@pytest.mark.parametrize("gate", SEEDED)
def test_the_gate_that_claims_the_fault_says_fail(gate: str, healthy: Campaign, open_campaign: OpenCampaign) -> None:
    """The gates before it pass, and it fails."""
    from pytest_kvqual.faults.served import hidden, shown

    # What each run plants comes first; where the arm can show none of it, the first of the catalogue that it can.
    mine = (fault for fault in shown(healthy.selection) if fault.claimed_by == gate and not fault.benign)
    names = (*SEEDED[gate], *(fault.name for fault in mine))
    name = next(name for name in names if hidden(FAULTS[name], healthy.selection) is None)
    fault = FAULTS[name]
    run_dir = healthy.run_dir / "controls" / fault.name
    for control in healthy.study.controls():
        for folder in (healthy.run_dir / "evidence").glob(f"{control.name}-*"):
            # A run reads its evidence in its own run directory.
            shutil.copytree(folder, run_dir / "evidence" / folder.name, dirs_exist_ok=True)
    arm = replace(healthy.selection.arm, after_init=(*healthy.selection.arm.after_init, fault.plant))
    campaign = open_campaign(
        selection=replace(healthy.selection, arm=arm), run_dir=run_dir, label=f"{arm.name}-with-{fault.name}"
    )
    gates = gates_up_to(campaign, gate)
    try:
        campaign.prepare(gates)
        verdict = campaign.decide(gates[0]).verdict
        for following in gates[1:]:
            if verdict.outcome is Outcome.PASS:
                verdict = campaign.decide(following).verdict
    finally:
        campaign.close()
    assert (verdict.gate, verdict.outcome) == (gate, Outcome.FAIL), verdict.figure
