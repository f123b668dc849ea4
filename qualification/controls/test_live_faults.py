"""Each live fault, planted in one served arm: the gate that claims it is the first to object. Benign ones stay green.

Opt-in: ``pytest qualification/controls -m live_controls --arm candidate``. One server is booted for all; a healthy pass
of everything that is read comes first and last. What was caught of what was seeded is printed at the end, by gate.
Nothing here is evidence: no receipt is written and the lock is not asked. Logs are in ``live-controls/ARM`` below the
run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pytest_kvqual.faults import FAULTS, Fault

if TYPE_CHECKING:
    from pytest_kvqual.faults.served import Planted, Served
    from qualification.controls.conftest import OpenCampaign

pytestmark = [pytest.mark.controls, pytest.mark.live_controls]

LIVE = [fault for fault in FAULTS.values() if "live" in fault.where]


@pytest.fixture(scope="module")
def served(open_campaign: OpenCampaign, pytestconfig: pytest.Config) -> Iterator[Served]:
    """The arm that the options name, with every fault planted in the same server for as long as it lives."""
    from pytest_kvqual import models
    from pytest_kvqual.faults.served import Served
    from pytest_kvqual.report import progress

    campaign = open_campaign()
    model = models.model_folder(campaign.study.model)
    models.verify_model(model, campaign.study.model.files)
    folder = campaign.run_dir / "live-controls" / campaign.arm
    say = partial(progress.show, pytestconfig)
    with Served(campaign.selection, model=model, folder=folder, progress=say, install=campaign.install) as arm:
        yield arm


def _insist(found: Planted) -> None:
    """The line of what was found is the report: the comparison and the stack say no more."""
    if not found.right:
        pytest.fail(str(found), pytrace=False)


def test_no_gate_objects_to_the_healthy_arm(served: Served) -> None:
    """Before the first fault, no reading or pass that a fault may be given has a finding that counts for the arm."""
    _insist(served.healthy())


@pytest.mark.parametrize("fault", LIVE, ids=[fault.name for fault in LIVE])
def test_the_claiming_gate_is_the_first_to_object(
    fault: Fault, served: Served, record_property: Callable[[str, object], None]
) -> None:
    """The gates before the claiming one are silent, it is not; a benign difference is met with silence.

    The server outlives the fault, and without it is as before.
    """
    from pytest_kvqual.faults.served import hidden

    reason = hidden(fault, served.selection)
    if reason is not None:
        pytest.skip(f"arm {served.selection.arm.name} cannot show {fault.name}: {reason}")
    found = served.plant(fault)
    record_property("arm", served.selection.arm.name)
    record_property("fault", fault.name)
    record_property("first_gate", found.first or "none")
    record_property("right", found.right)
    record_property("seconds", f"{found.seconds:.1f}")
    _insist(found)


def test_no_gate_objects_to_the_arm_after_all_faults(served: Served) -> None:
    """After the last fault the readings are as silent as before the first, and so is the pass with fills."""
    _insist(served.healthy(["probe"]))
