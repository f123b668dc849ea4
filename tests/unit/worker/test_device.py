"""The state of a GPU: read from NVML or from nvidia-smi, in one form, and never an exception."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nvidia_smi
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.worker import device


def _only(record: dict[str, Any]) -> dict[str, Any]:
    """The one device of a record."""
    (found,) = record["devices"]
    return dict(found)


def test_a_newer_driver_is_read_whole() -> None:
    """Every setting and every figure of state has its value and its unit."""
    record = device.parse_smi(nvidia_smi.NEWER)
    assert (record["source"], record["driver"], record["cuda"], record["reason"]) == (
        "nvidia-smi",
        "580.65.06",
        "13.0",
        "",
    )
    gpu = _only(record)
    assert gpu == {
        "index": 0,
        "uuid": nvidia_smi.UUID,
        "name": "NVIDIA H100 80GB HBM3",
        "memory_bytes": 81559 << 20,
        "compute_capability": None,
        "settings": {
            "persistence": True,
            "mig": False,
            "ecc": True,
            "ecc_pending": True,
            "compute_mode": "Default",
            "power_limit_w": 700.0,
            "power_default_w": 700.0,
            "sm_max_mhz": 1980,
            "memory_max_mhz": 2619,
            "sm_application_mhz": 1980,
            "memory_application_mhz": 2619,
        },
        "state": {
            "sm_mhz": 1980,
            "memory_mhz": 2619,
            "power_w": 71.53,
            "temperature_c": 41,
            "performance": "P0",
            "throttled": [],
            "ecc_corrected": 3,
            "ecc_uncorrected": 0,
            "processes": 0,
            "memory_used_bytes": 4 << 20,
        },
    }
    assert tuple(gpu["settings"]) == device.SETTINGS
    assert tuple(gpu["state"]) == device.STATE


def test_an_older_drivers_names_are_known() -> None:
    """Elements that were renamed since are read under their old names; what it does not tell is None."""
    gpu = _only(device.parse_smi(nvidia_smi.OLDER))
    assert gpu["settings"]["power_limit_w"] == 300.0
    assert (gpu["settings"]["persistence"], gpu["settings"]["mig"], gpu["settings"]["ecc"]) == (False, True, False)
    assert gpu["state"]["throttled"] == ["hw_slowdown", "sw_power_cap"]
    assert (gpu["state"]["ecc_corrected"], gpu["state"]["ecc_uncorrected"]) == (0, 2)
    assert (gpu["state"]["temperature_c"], gpu["state"]["performance"]) == (None, None)
    assert gpu["state"]["processes"] == 1


@pytest.mark.parametrize("text", ["", "no XML at all", "<other/>", nvidia_smi.NEWER[:400]])
def test_another_document_is_refused_with_a_word(text: str) -> None:
    """Output that is not the document is a ValueError that says what was expected."""
    with pytest.raises(ValueError, match=r"nvidia-smi: found .*, expected"):
        device.parse_smi(text)


@given(st.integers(0, len(nvidia_smi.NEWER)), st.text(max_size=30))
def test_damaged_output_never_raises_anything_else(place: int, put: str) -> None:
    """Whatever stands in the output, it is a record or a ValueError."""
    text = nvidia_smi.NEWER[:place] + put + nvidia_smi.NEWER[place:]
    try:
        record = device.parse_smi(text)
    except ValueError:
        return
    assert record["source"] == "nvidia-smi"


@pytest.mark.parametrize("word", ["inf MHz", "nan MHz", "1e400 MHz", "x"])
def test_a_number_that_is_none_is_not_told(word: str) -> None:
    """What is no finite number stands as None, and no other error comes of it."""
    text = re.sub(r"(<(?:sm_clock|minor_number)>)[^<]*", rf"\g<1>{word}", nvidia_smi.NEWER)
    devices: Any = device.parse_smi(text)["devices"]
    assert devices[0]["index"] == 0
    assert devices[0]["state"]["sm_mhz"] is None
    assert devices[0]["settings"]["sm_max_mhz"] is None


def test_the_program_is_asked_for_what_its_document_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compute capability that is not in the document is asked for by name."""
    nvidia_smi.program(tmp_path, nvidia_smi.NEWER)
    monkeypatch.setenv("PATH", str(tmp_path))
    record = device.read(modules=())
    assert record["devices"][0]["compute_capability"] == "9.0"  # type: ignore[index]  # a list of mappings


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
            9,
            "exit status 9, expected 0",
        ),
        ("garbage", 0, "found no XML"),
    ],
)
def test_a_broken_program_is_a_reason(
    text: str, status: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that fails, or prints something else, leaves no device and says why in one line."""
    nvidia_smi.program(tmp_path, text, status=status)
    monkeypatch.setenv("PATH", str(tmp_path))
    record = device.read(modules=())
    assert (record["source"], record["devices"]) == ("none", [])
    assert reason in str(record["reason"])
    assert "\n" not in str(record["reason"])


def test_a_program_that_hangs_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that does not answer is ended after its limit."""
    path = nvidia_smi.program(tmp_path, "")
    path.write_text("#!/bin/sh\nwhile :; do :; done\n", encoding="utf-8")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(device, "_TIMEOUT_S", 0.2)
    assert "timed out" in str(device.read(modules=())["reason"])


def test_a_host_without_any_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a module and without a program the record names the program."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device.read(modules=("no_such_module",))["reason"] == "found no nvidia-smi on the PATH, expected one"


class _Nvml(SimpleNamespace):
    """The functions of pynvml that are asked, of one device; the rest is missing, as in an older module."""

    def __init__(self) -> None:
        super().__init__(shut=False)

    def nvmlInit(self) -> None: ...  # noqa: N802 - NVML's own name

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut = True

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return 13020

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"handle {index}"

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:  # noqa: N802
        return nvidia_smi.UUID.encode()

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=80 << 30, used=1 << 30)

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:  # noqa: N802
        return (9, 0)

    def nvmlDeviceGetEccMode(self, handle: str) -> list[int]:  # noqa: N802
        return [1, 0]

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        raise RuntimeError("Not Supported")

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return 71530

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        return {1: 1980, 2: 2619}[kind]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # noqa: N802
        return 0x1 | 0x4


def test_nvml_gives_the_same_form() -> None:
    """What the module tells has the form of nvidia-smi's record; what it does not tell or refuses is None."""
    nvml = _Nvml()
    record = device.from_nvml(nvml)
    assert (record["source"], record["driver"], record["cuda"]) == ("nvml", "580.65.06", "13.2")
    gpu = _only(record)
    assert (tuple(gpu["settings"]), tuple(gpu["state"])) == (device.SETTINGS, device.STATE)
    assert set(gpu) == set(_only(device.parse_smi(nvidia_smi.NEWER)))
    assert (gpu["uuid"], gpu["compute_capability"], gpu["memory_bytes"]) == (nvidia_smi.UUID, "9.0", 80 << 30)
    assert (gpu["settings"]["ecc"], gpu["settings"]["ecc_pending"], gpu["settings"]["mig"]) == (True, False, None)
    assert (gpu["state"]["power_w"], gpu["state"]["sm_mhz"], gpu["state"]["throttled"]) == (
        71.53,
        1980,
        ["sw_power_cap"],
    )
    assert nvml.shut


def test_a_module_without_a_driver_gives_way_to_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVML module whose library is missing is no end: the program is asked, and both reasons are kept."""
    monkeypatch.setenv("PATH", str(tmp_path))

    class Broken(_Nvml):
        def nvmlInit(self) -> None:  # noqa: N802
            raise OSError("libnvidia-ml.so.1 is missing")

    monkeypatch.setitem(__import__("sys").modules, "some_nvml", Broken())
    reason = str(device.read(modules=("some_nvml",))["reason"])
    assert reason == "some_nvml: libnvidia-ml.so.1 is missing; found no nvidia-smi on the PATH, expected one"


def test_nothing_is_ever_set() -> None:
    """The module names no function of NVML that sets anything, and no option of nvidia-smi but queries."""
    text = Path(str(device.__file__)).read_text(encoding="utf-8")
    assert "nvmlDeviceSet" not in text
    assert not any(f'"{option}"' in text for option in ("-pm", "-pl", "-lgc", "-ac", "-rac", "-e", "-mig", "-c", "-r"))


def _seen(uuid: str) -> dict[str, object]:
    return {"name": "NVIDIA H100 80GB HBM3", "uuid": uuid}


@pytest.mark.parametrize("uuid", [nvidia_smi.UUID, nvidia_smi.UUID.removeprefix("GPU-").upper(), ""])
def test_the_engines_own_device_is_found_by_its_uuid(uuid: str) -> None:
    """Of the driver's devices the one with torch's UUID is kept, or the only one where torch tells none."""
    record = device.one_of(device.parse_smi(nvidia_smi.NEWER), _seen(uuid))
    assert [gpu["uuid"] for gpu in record["devices"]] == [nvidia_smi.UUID]  # type: ignore[attr-defined]  # a list
    assert (record["reason"], record["torch"]) == ("", _seen(uuid))


def test_a_device_that_the_driver_does_not_show_is_a_reason() -> None:
    """A UUID that no device has leaves none, and the reason names it."""
    record = device.one_of(device.parse_smi(nvidia_smi.NEWER), _seen("GPU-other"))
    assert (record["devices"], "GPU-other" in str(record["reason"])) == ([], True)
    two = device.parse_smi(nvidia_smi.NEWER)
    two["devices"] = [*two["devices"], *two["devices"]]  # type: ignore[misc]  # a list
    assert device.one_of(two, _seen(""))["devices"] == []


def test_tensors_on_a_cpu_have_no_device_record() -> None:
    """On a CPU the record says so and names no device."""
    record: dict[str, Any] = device.of(torch.device("cpu"))
    assert (record["devices"], record["reason"], record["torch"]) == ([], "the engine's tensors are on cpu", None)
