"""Each seeded fault, in the served arm from its start, turns the run red at the gate that claims it, and not before.

Opt-in: ``pytest qualification/controls -m live_controls``. Each faulty run gets its own folder, ``controls/FAULT``
below the run directory. The controls are captured once for all, or taken from an earlier run of the same scope.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_kvqual.faults import FAULTS
from pytest_kvqual.faults.catalogue import GATES, live
from pytest_kvqual.judge.verdict import Outcome

if TYPE_CHECKING:
    from qualification.controls.conftest import OpenCampaign

    from pytest_kvqual.campaign import Campaign
    from pytest_kvqual.faults import Fault

pytestmark = [pytest.mark.controls, pytest.mark.live_controls]


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


LIVE = [fault for fault in FAULTS.values() if "live" in fault.where]


@pytest.mark.parametrize("fault", LIVE, ids=[fault.name for fault in LIVE])
def test_the_gate_that_claims_the_fault_says_fail(fault: Fault, healthy: Campaign, open_campaign: OpenCampaign) -> None:
    """The gates before it pass, and it fails; under a difference that is no fault it passes too."""
    shown = healthy.selection.arm
    if fault not in live(scales=shown.scales is not None, ours=shown.attention_backend.startswith("KVQUAL_")):
        pytest.skip(f"arm {shown.name} cannot show {fault.name}: it needs {fault.needs}")
    run_dir = healthy.run_dir / "controls" / fault.name
    for control in healthy.study.controls():
        for folder in (healthy.run_dir / "evidence").glob(f"{control.name}-*"):
            # A run reads its evidence in its own run directory.
            shutil.copytree(folder, run_dir / "evidence" / folder.name, dirs_exist_ok=True)
    arm = replace(healthy.selection.arm, after_init=(*healthy.selection.arm.after_init, fault.plant))
    campaign = open_campaign(
        selection=replace(healthy.selection, arm=arm), run_dir=run_dir, label=f"{arm.name}-with-{fault.name}"
    )
    gates = gates_up_to(campaign, fault.claimed_by)
    try:
        campaign.prepare(gates)
        verdict = campaign.decide(gates[0]).verdict
        for gate in gates[1:]:
            if verdict.outcome is Outcome.PASS:
                verdict = campaign.decide(gate).verdict
    finally:
        campaign.close()
    expected = Outcome.PASS if fault.benign else Outcome.FAIL
    assert (verdict.gate, verdict.outcome) == (fault.claimed_by, expected), verdict.figure
