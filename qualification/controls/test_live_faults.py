"""Each seeded fault, in the served arm from its start, turns the run red at the gate that claims it, and not before.

Opt-in: ``pytest qualification/controls -m controls``. The controls' captures are taken from ``--run-dir`` where an
earlier run of the same scope left them there, and each faulty run gets a folder of its own below it.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_kvqual.faults import FAULTS
from pytest_kvqual.judge.verdict import Outcome

if TYPE_CHECKING:
    from qualification.controls.conftest import OpenCampaign

    from pytest_kvqual.campaign import Campaign
    from pytest_kvqual.faults import Fault

pytestmark = [pytest.mark.controls]


def give_controls(healthy: Campaign, run_dir: Path) -> None:
    """Copy the controls' attempts: a run reads its evidence in its own run directory."""
    for control in healthy.study.controls():
        for folder in (healthy.run_dir / "evidence").glob(f"{control.name}-*"):
            shutil.copytree(folder, run_dir / "evidence" / folder.name, dirs_exist_ok=True)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_the_gate_that_claims_the_fault_says_fail(fault: Fault, open_campaign: OpenCampaign) -> None:
    """The gates before it pass, and it fails."""
    healthy = open_campaign()
    run_dir = healthy.run_dir / "controls" / fault.name
    give_controls(healthy, run_dir)
    arm = replace(healthy.selection.arm, after_init=(*healthy.selection.arm.after_init, fault.plant))
    campaign = open_campaign(
        selection=replace(healthy.selection, arm=arm), run_dir=run_dir, label=f"{arm.name}-with-{fault.name}"
    )
    gates = [plan.name for plan in campaign.study.gates if plan.state == "required" and not plan.timing]
    try:
        campaign.prepare(gates)
        decisions = []
        for gate in gates:
            decisions.append(campaign.decide(gate))
            if decisions[-1].verdict.outcome is not Outcome.PASS:
                break
    finally:
        campaign.close()
    verdict = decisions[-1].verdict
    assert (verdict.gate, verdict.outcome) == (fault.claimed_by, Outcome.FAIL), verdict.figure
