"""The identity judge on a study of a GPU: each rank's device is named, and the control's is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import nvidia_smi
import pytest

from pytest_kvqual.judge.gates import identity
from pytest_kvqual.judge.verdict import Outcome, Verdict
from pytest_kvqual.worker import device

FAULTS = ("weights-altered",)


def _record() -> dict[str, Any]:
    seen: dict[str, object] = {"name": "NVIDIA H100 80GB HBM3", "uuid": nvidia_smi.UUID}
    return device.one_of(device.parse_smi(nvidia_smi.NEWER), seen)


def _decide(make: Any, *, candidate: object = None, null: object = None, platform: str = "gpu") -> Verdict:
    study = replace(make.study(), platform=platform)
    documents = {}
    for name, arm, record in (("candidate", "candidate", candidate), ("null", "native", null)):
        documents[name] = make.identity(study, arm)
        documents[name]["ranks"][0]["device"] = _record() if record is None else record
    altered = make.damage(documents["candidate"], ("ranks", 0, "parameters", "now", "norm.weight"), "d" * 64)
    return identity.judge(
        study,
        "candidate",
        cache_bytes=4096,
        scales=make.scales,
        candidate=documents["candidate"],
        null=documents["null"],
        poison=[{"fault": FAULTS[0], "identity": altered}],
        faults=FAULTS,
    )


def test_the_device_and_its_settings_are_in_the_details(make: Any) -> None:
    """A run on one device passes, and its driver, settings and state at that moment stand in the receipt."""
    verdict = _decide(make)
    assert verdict.outcome is Outcome.PASS
    devices: Any = verdict.details["devices"]
    (found,) = devices
    assert found["driver"] == "580.65.06"
    assert found["uuid"] == nvidia_smi.UUID
    assert (found["ecc"], found["power_limit_w"], found["sm_application_mhz"]) == (True, 700.0, 1980)
    assert found["state"]["power_w"] == 71.53


def _no_device(record: dict[str, Any]) -> None:
    record["devices"], record["reason"] = [], "no driver answers"


def _unnamed(record: dict[str, Any]) -> None:
    record["devices"][0]["uuid"] = ""


def _no_settings(record: dict[str, Any]) -> None:
    record["devices"][0]["settings"] = {}


def _silent_settings(record: dict[str, Any]) -> None:
    record["devices"][0]["settings"] = dict.fromkeys(device.SETTINGS)


def _no_driver(record: dict[str, Any]) -> None:
    record["driver"] = None


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (_no_device, "found 0 devices, expected one: no driver answers"),
        (_unnamed, "found the device's uuid '', expected a word"),
        (_no_settings, "found no settings of the device"),
        (_silent_settings, "found no settings of the device"),
        (_no_driver, "found the driver None, expected its version"),
    ],
)
def test_a_device_that_is_not_told_is_a_gap(damage: Any, word: str, make: Any) -> None:
    """Evidence that does not say what it ran on passes for nobody."""
    record = _record()
    damage(record)
    verdict = _decide(make, candidate=record)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any(word in line for line in verdict.findings)


def test_a_record_without_a_device_part_is_a_gap(make: Any) -> None:
    """A worker that reported no device at all is a gap, not an error."""
    assert _decide(make, candidate="nothing").outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("key", ["driver", "uuid", "power_limit_w", "ecc", "sm_application_mhz"])
def test_the_control_must_have_run_on_the_same_device(key: str, make: Any) -> None:
    """Another device, driver or setting under the control is no null for this arm."""
    record = _record()
    holder = record if key in record else record["devices"][0]
    holder = holder if key in holder else holder["settings"]
    holder[key] = "GPU-other" if key == "uuid" else 7
    verdict = _decide(make, null=record)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.null is not None
    assert not verdict.null.passed


def test_the_state_of_the_moment_decides_nothing(make: Any) -> None:
    """A warmer control with other clocks passes: it is the same device."""
    record = _record()
    record["devices"][0]["state"] |= {"temperature_c": 70, "sm_mhz": 210, "power_w": 300.0}
    assert _decide(make, null=record).outcome is Outcome.PASS


def test_a_cpu_study_asks_for_no_device(make: Any) -> None:
    """On a CPU no device is expected, and the details have none."""
    nothing = device.nothing("the engine's tensors are on cpu")
    verdict = _decide(make, candidate=nothing, null=nothing, platform="cpu")
    assert verdict.outcome is Outcome.PASS
    assert "devices" not in verdict.details
