"""The doctor on a host with a GPU, without one, and with an nvidia-smi that is broken in one way or another."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import nvidia_smi
import pytest

from pytest_kvqual import cli, doctor, gpu_host
from pytest_kvqual._canonical import sha256_bytes
from pytest_kvqual.study.load import load_study
from pytest_kvqual.study.model import Gsm8kSource, Study
from pytest_kvqual.worker import device


def _gpu_study(*, backends: tuple[str, ...] = ("KVQUAL_TRITON_K16V8", "FLASHINFER"), pool: int = 48 << 30) -> Study:
    """The embedded study as one of a GPU, with one arm a backend."""
    study = load_study("smollm2-cpu")
    arm = next(iter(study.arms.values()))
    return replace(
        study,
        platform="gpu",
        arms={name.lower(): replace(arm, name=name.lower(), attention_backend=name) for name in backends},
        lengths={tokens: replace(length, cache_bytes=pool) for tokens, length in study.lengths.items()},
        gsm8k_source=None,
    )


def _healthy(**changes: dict[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = device.parse_smi(nvidia_smi.NEWER)
    gpu = record["devices"][0]
    gpu["compute_capability"] = "9.0"
    for part, values in changes.items():
        gpu[part] |= values
    return record


def _look(study: Study, record: dict[str, Any], **options: Any) -> dict[str, gpu_host.Found]:
    return {found.what: found for found in gpu_host.look(study, record, **options)}


def _fixes(found: dict[str, gpu_host.Found]) -> set[str]:
    return {name for name, one in found.items() if one.fix and one.needed}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host that has every part of a GPU study but the device; returns the folder of its vLLM."""
    monkeypatch.setattr(gpu_host, "version_of", lambda name: "1.0")
    monkeypatch.setattr(gpu_host, "torch_cuda", lambda: "13.0")
    (tmp_path / "vllm_flash_attn").mkdir()
    (tmp_path / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so").touch()
    monkeypatch.setattr(gpu_host, "package_folder", lambda name: tmp_path)
    return tmp_path


def test_a_host_that_can_run_it_has_nothing_to_fix(host: Path) -> None:
    """An idle Hopper GPU with its driver and every part is all lines of ok, and no note."""
    found = _look(_gpu_study(backends=("FLASHINFER", "FLASH_ATTN")), _healthy())
    assert [one for one in found.values() if one.fix] == []
    assert found["GPU 0"].found == "NVIDIA H100 80GB HBM3, 79.6 GiB, compute capability 9.0"
    assert found["driver"].found == "580.65.06, for CUDA up to 13.0; torch was built for 13.0"
    assert set(found) == {"GPU 0", "GPU 0 memory", "driver", "triton", "FlashInfer", "FA3"}


@pytest.mark.parametrize(
    ("changes", "what", "word"),
    [
        ({"state": {"processes": 2}}, "GPU 0 use", "found 2 programs"),
        ({"state": {"memory_used_bytes": 5 << 30}}, "GPU 0 use", "5.0 GiB in use"),
        ({"settings": {"mig": True}}, "GPU 0 MIG", "found MIG enabled"),
        ({"state": {"ecc_uncorrected": 1}}, "GPU 0 memory errors", "found 1 uncorrected"),
        ({"state": {"throttled": ["hw_thermal_slowdown"]}}, "GPU 0 clocks", "hw_thermal_slowdown"),
    ],
)
def test_what_would_spoil_a_run_is_to_be_fixed(changes: dict[str, Any], what: str, word: str, host: Path) -> None:
    """A shared, divided, failing or held back device is a FIX with what was found."""
    found = _look(_gpu_study(), _healthy(**changes))
    assert _fixes(found) == {what}
    assert word in found[what].found


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"settings": {"persistence": False}}, "GPU 0 persistence"),
        ({"settings": {"ecc": False}}, "GPU 0 ECC"),
        ({"settings": {"power_limit_w": 350.0}}, "GPU 0 power"),
        ({"settings": {"sm_application_mhz": 1000}}, "GPU 0 clocks"),
        ({"state": {"throttled": ["sw_power_cap"]}}, "GPU 0 clocks"),
    ],
)
def test_a_setting_is_a_note_with_its_command(changes: dict[str, Any], what: str, host: Path) -> None:
    """Persistence, ECC, power and clocks are notes: they are an administrator's to set."""
    found = _look(_gpu_study(), _healthy(**changes))
    assert _fixes(found) == set()
    assert found[what].fix
    assert not found[what].needed


def test_values_that_no_driver_tells_are_passed_over(host: Path) -> None:
    """A device whose settings and state are unknown gives no line about them, and no error."""
    record = _healthy()
    gpu = record["devices"][0]
    gpu["settings"] = dict.fromkeys(device.SETTINGS)
    gpu["state"] = dict.fromkeys(device.STATE) | {"throttled": []}
    gpu["memory_bytes"] = gpu["compute_capability"] = None
    assert _fixes(_look(_gpu_study(), record)) == set()


@pytest.mark.parametrize("pool", [79 << 30, 80 << 30])
def test_a_pool_must_fit_the_device(pool: int, host: Path) -> None:
    """A pool beyond the device's memory is to be fixed."""
    assert _fixes(_look(_gpu_study(pool=pool), _healthy())) == ({"GPU 0 memory"} if pool == 80 << 30 else set())


def test_a_driver_older_than_torch_is_to_be_fixed(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver whose CUDA has a lower major version than torch's cannot run it; a lower minor one can."""
    monkeypatch.setattr(gpu_host, "torch_cuda", lambda: "13.2")
    assert _fixes(_look(_gpu_study(), _healthy())) == set()
    assert _fixes(_look(_gpu_study(), {**_healthy(), "cuda": "12.9"})) == {"driver"}
    monkeypatch.setattr(gpu_host, "torch_cuda", lambda: None)
    assert _fixes(_look(_gpu_study(), {**_healthy(), "cuda": "12.9"})) == set()


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        (("KVQUAL_TRITON_K16V8",), {"triton"}),
        (("FLASHINFER",), {"FlashInfer"}),
        (("FLASH_ATTN",), {"FA3"}),
        (("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN"), {"triton", "FlashInfer", "FA3"}),
    ],
)
def test_only_what_an_arm_needs_is_to_be_fixed(
    backends: tuple[str, ...], expected: set[str], host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing part is a FIX where an arm of the study runs on it, and a plain line elsewhere."""
    monkeypatch.setattr(gpu_host, "version_of", lambda name: None)
    monkeypatch.setattr(gpu_host, "package_folder", lambda name: None)
    assert _fixes(_look(_gpu_study(backends=backends), _healthy())) == expected


def test_fa3_needs_hopper(host: Path) -> None:
    """Kernels that are built and a device that cannot run them are told apart."""
    record = _healthy()
    record["devices"][0]["compute_capability"] = "8.0"
    found = _look(_gpu_study(backends=("FLASH_ATTN",)), record)
    assert (_fixes(found), "found compute capability 8.0, expected 9.x" in found["FA3"].found) == ({"FA3"}, True)


def test_the_test_set_is_held_against_the_study(host: Path, tmp_path: Path) -> None:
    """A file of GSM8K is verified by its digest; without one the hub's cache is looked at, and nothing is fetched."""
    line = json.dumps({"question": "1 + 1?", "answer": "2\n#### 2"}).encode() + b"\n"
    file = tmp_path / "test.jsonl"
    file.write_bytes(line)
    source = Gsm8kSource(
        sha256=sha256_bytes(line),
        repository="o/g",
        revision="0" * 40,
        file="test.parquet",
        shots=tmp_path / "shots.json",
    )
    study = replace(_gpu_study(), gsm8k_source=source)
    assert _look(study, _healthy(), gsm8k=file)["GSM8K"].found == f"1 questions in {file}"
    other = _look(replace(study, gsm8k_source=replace(source, sha256="0" * 64)), _healthy(), gsm8k=file)["GSM8K"]
    assert other.found.startswith(f"{file}: found sha256 ")
    assert other.fix == "another set is another study"
    absent = _look(study, _healthy())["GSM8K"]
    assert "found no test set in the hub's cache, expected o/g" in absent.found
    assert "--gsm8k FILE" in absent.fix


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(host: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """``kvqual doctor`` over a GPU study, with only ``nvidia-smi`` of the returned folder on the PATH."""
    study = _gpu_study()
    monkeypatch.setattr("pytest_kvqual.study.load.load_study", lambda name, form=None: study)
    monkeypatch.setattr(doctor, "_LOOKS", ())
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    return folder


def _doctor(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = cli.main(["doctor", "any"])
    out, err = capsys.readouterr()
    assert err == ""
    return status, out


def test_the_command_reads_a_working_driver(command: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a driver that answers, every line is ok and the exit status 0."""
    nvidia_smi.program(command, nvidia_smi.NEWER)
    status, out = _doctor(capsys)
    assert (status, "FIX" in out, "note" in out) == (0, False, False)
    assert "ok   GPU 0: NVIDIA H100 80GB HBM3, 79.6 GiB, compute capability 9.0\n" in out


def test_the_command_says_what_to_do_about_a_shared_old_gpu(command: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each fault of a device is a line with its command, notes are told apart, and the exit status is 1."""
    nvidia_smi.program(command, nvidia_smi.OLDER)
    status, out = _doctor(capsys)
    lines = {line[5:].split(":")[0]: line[:4].strip() for line in out.splitlines()}
    assert status == 1
    assert {name for name, word in lines.items() if word == "FIX"} == {
        "GPU 3 memory",
        "GPU 3 use",
        "GPU 3 MIG",
        "GPU 3 memory errors",
        "GPU 3 clocks",
        "driver",
    }
    assert {name for name, word in lines.items() if word == "note"} >= {"GPU 3 persistence", "GPU 3 ECC", "GPU 3 power"}
    assert "nvidia-smi -pl 400, as administrator" in out


@pytest.mark.parametrize(
    ("printed", "status", "reason"),
    [
        (None, 0, "found no nvidia-smi on the PATH"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, "exit status 9"),
        ("", 0, "found no XML"),
        ("<html/>", 0, "found the element html"),
        ("<nvidia_smi_log><gpu/></nvidia_smi_log>", 0, ""),
        ("<nvidia_smi_log></nvidia_smi_log>", 0, "found 0 NVIDIA GPUs"),
    ],
)
def test_a_broken_host_is_lines_and_no_traceback(
    printed: str | None, status: int, reason: str, command: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever nvidia-smi does, the doctor prints its lines, each with a fix, and exits with 1."""
    if printed is not None:
        nvidia_smi.program(command, printed, status=status)
    found, out = _doctor(capsys)
    assert found == 1
    assert reason in out
    assert all(line[:4].strip() in ("ok", "note", "FIX") for line in out.splitlines())
    assert all(line.endswith(")") for line in out.splitlines() if line.startswith("FIX"))


def test_a_cpu_study_needs_no_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a CPU study no line speaks of a GPU."""
    monkeypatch.setattr(doctor, "_LOOKS", ())
    assert cli.main(["doctor"]) == 0
    assert "ok   device: none needed\n" in capsys.readouterr().out


def test_torchs_cuda_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that torch was built for is that of its files; a CPU build has none."""
    monkeypatch.setattr(gpu_host, "package_folder", lambda name: tmp_path)
    assert gpu_host.torch_cuda() is None
    for text, expected in (
        ("cuda: Optional[str] = '13.0'\n", "13.0"),
        ("__version__ = '2'\ncuda = '12.8'\n", "12.8"),
        ("cuda: Optional[str] = None\n", None),
    ):
        (tmp_path / "version.py").write_text(text, encoding="utf-8")
        assert gpu_host.torch_cuda() == expected


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [(None, {"GPU 0"}), ("0", {"GPU 0"}), ("1", {"GPU 1"}), ("GPU-other", {"GPU 1"}), ("", set()), ("7,0", set())],
)
def test_only_the_devices_that_an_arm_gets_are_looked_at(chosen: str | None, expected: set[str], host: Path) -> None:
    """Another device of the host may be busy: its programs are somebody else's, and nothing is to be ended."""
    record = _healthy()
    busy = copy.deepcopy(record["devices"][0])
    busy |= {"index": 1, "uuid": "GPU-other"}
    busy["state"] |= {"processes": 3, "memory_used_bytes": 60 << 30}
    record["devices"].append(busy)
    found = _look(_gpu_study(), record, chosen=chosen)
    assert {name for name in found if name in ("GPU 0", "GPU 1")} == expected
    assert ("GPU 1 use" in found) is ("GPU 1" in expected)
    assert ("device" in found) is (not expected)
