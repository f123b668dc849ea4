"""What state a GPU is in: read, and never set.

Clocks, a power limit, ECC and a shared device decide what a measurement says, so they stand beside it. They are read
through NVML where its Python module is at hand (``pynvml``; vLLM carries a copy), else from ``nvidia-smi -q -x``. Where
neither answers, the record says why.

One record, JSON-ready; what a driver does not tell is None::

    {"source": "nvml" | "nvidia-smi" | "none", "reason": "", "driver": "580.65.06", "cuda": "13.0",
     "devices": [{"index": 0, "uuid": "GPU-…", "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85520809984,
                  "compute_capability": "9.0", "settings": {…}, "state": {…}}]}

``settings`` is what an administrator decides and a load does not change: ``persistence``, ``mig``, ``ecc``,
``ecc_pending``, ``compute_mode``, ``power_limit_w``, ``power_default_w``, ``sm_max_mhz``, ``memory_max_mhz``,
``sm_application_mhz``, ``memory_application_mhz``. ``state`` is what it was at the moment of reading: ``sm_mhz``,
``memory_mhz``, ``power_w``, ``temperature_c``, ``performance``, ``throttled`` (the active reasons), ``ecc_corrected``
and ``ecc_uncorrected`` (since the driver was loaded), ``processes`` (how many compute), ``memory_used_bytes``.

Only the standard library is imported here, so that ``kvqual doctor`` can use it on any host.
"""

from __future__ import annotations

import importlib
import math
import shutil
import subprocess
from collections.abc import Callable
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

SETTINGS = (
    "persistence",
    "mig",
    "ecc",
    "ecc_pending",
    "compute_mode",
    "power_limit_w",
    "power_default_w",
    "sm_max_mhz",
    "memory_max_mhz",
    "sm_application_mhz",
    "memory_application_mhz",
)
STATE = (
    "sm_mhz",
    "memory_mhz",
    "power_w",
    "temperature_c",
    "performance",
    "throttled",
    "ecc_corrected",
    "ecc_uncorrected",
    "processes",
    "memory_used_bytes",
)

_TIMEOUT_S = 20.0
_MODULES = ("pynvml", "vllm.third_party.pynvml")
_ABSENT = frozenset(
    {
        "",
        "N/A",
        "[N/A]",
        "Not Supported",
        "[Not Supported]",
        "Unknown Error",
        "Requested functionality has been deprecated",
    }
)
# What is active all the time on an idle device is no throttling.
_IDLE = "gpu_idle"


def nothing(reason: str) -> dict[str, object]:
    """The record of a host whose devices could not be read."""
    return {"source": "none", "reason": " ".join(reason.split()), "driver": None, "cuda": None, "devices": []}


def read(*, modules: tuple[str, ...] = _MODULES) -> dict[str, object]:
    """The record of every device that the driver shows. Never raises.

    Args:
        modules: Names under which an NVML module is looked for; none to use ``nvidia-smi`` alone.
    """
    reasons = []
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        try:
            return from_nvml(module)
        except Exception as error:  # the module's own errors have no common base that is known before it is imported
            reasons.append(f"{name}: {error}")
    try:
        return from_smi()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reasons.append(str(error))
    return nothing("; ".join(reasons))


def of(place: Any, *, record: dict[str, object] | None = None) -> dict[str, object]:
    """The record of the one device that tensors of ``place`` (a ``torch.device``) lie on.

    Beside the driver's view stands torch's: ``{"torch": {"name", "compute_capability", "memory_bytes", "uuid",
    "cuda"}}``. Which of the driver's devices it is, is decided by its UUID; where none has it, ``devices`` is empty and
    ``reason`` says so.
    """
    if place.type != "cuda":
        return {**nothing(f"the engine's tensors are on {place.type}"), "torch": None}
    import torch

    properties = torch.cuda.get_device_properties(place)
    seen = {
        "name": str(properties.name),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": int(properties.total_memory),
        "uuid": str(getattr(properties, "uuid", "")),
        "cuda": str(torch.version.cuda),
    }
    return one_of(read() if record is None else record, seen)


def one_of(record: dict[str, object], seen: dict[str, object]) -> dict[str, object]:
    """The record with the device of ``seen`` alone: that of its UUID, or the only one there is."""
    devices: Any = record["devices"]
    wanted = str(seen["uuid"]).removeprefix("GPU-").lower()
    same = [it for it in devices if wanted and str(it["uuid"]).removeprefix("GPU-").lower() == wanted]
    if not same and not wanted and len(devices) == 1:
        same = list(devices)
    reason = record["reason"]
    if not same and not reason:
        reason = (
            f"found {len(devices)} devices, none of them with the UUID {seen['uuid'] or 'that torch does not tell'}"
        )
    return {**record, "reason": reason, "devices": same, "torch": seen}


# -- nvidia-smi -------------------------------------------------------------------------------------------------------


def from_smi() -> dict[str, object]:
    """Runs ``nvidia-smi -q -x`` and parses what it prints.

    Raises:
        OSError: There is no such program, or it cannot be run.
        ValueError: It failed, or printed something else.
        subprocess.SubprocessError: It did not end in time.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise OSError("found no nvidia-smi on the PATH, expected one")
    record = parse_smi(_run(program, "-q", "-x"))
    devices: Any = record["devices"]
    if any(device["compute_capability"] is None for device in devices):
        # Some drivers leave it out of the document and tell it when asked by name.
        try:
            told = _run(program, "--query-gpu=uuid,compute_cap", "--format=csv,noheader")
        except (OSError, ValueError, subprocess.SubprocessError):
            told = ""
        known = dict(line.replace(" ", "").split(",", 1) for line in told.splitlines() if "," in line)
        for device in devices:
            device["compute_capability"] = device["compute_capability"] or known.get(device["uuid"])
    return record


def _run(program: str, *arguments: str) -> str:
    run = subprocess.run([program, *arguments], capture_output=True, timeout=_TIMEOUT_S, check=False)
    text = run.stdout.decode(errors="replace")
    if run.returncode != 0:
        said = (text.strip() or run.stderr.decode(errors="replace").strip()).splitlines()
        raise ValueError(
            f"nvidia-smi: found exit status {run.returncode}, expected 0: {said[0] if said else 'no word'}"
        )
    return text


def parse_smi(text: str) -> dict[str, object]:
    """The record from what ``nvidia-smi -q -x`` printed.

    Raises:
        ValueError: It is no such document.
    """
    # The document names a DTD on the disk of the host; nothing of it is needed, and it is not read.
    try:
        log = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"nvidia-smi: found no XML ({error}), expected the output of -q -x") from error
    if log.tag != "nvidia_smi_log":
        raise ValueError(f"nvidia-smi: found the element {log.tag}, expected nvidia_smi_log")
    return {
        "source": "nvidia-smi",
        "reason": "",
        "driver": _word(log, "driver_version"),
        "cuda": _word(log, "cuda_version"),
        "devices": [_parse_device(index, gpu) for index, gpu in enumerate(log.findall("gpu"))],
    }


def _parse_device(index: int, gpu: ElementTree.Element) -> dict[str, object]:
    # Names of elements changed between drivers: the newer first.
    power = next((held for held in map(gpu.find, ("gpu_power_readings", "power_readings")) if held is not None), gpu)
    reasons = next(
        (held for held in map(gpu.find, ("clocks_event_reasons", "clocks_throttle_reasons")) if held is not None), None
    )
    volatile = gpu.find("ecc_errors/volatile")
    major = _word(gpu, "cuda_compute_capability") or _word(gpu, "compute_cap")
    return {
        "index": index if (minor := _whole(gpu, "minor_number")) is None else minor,
        "uuid": _word(gpu, "uuid") or "",
        "name": _word(gpu, "product_name") or "",
        "memory_bytes": _bytes(gpu, "fb_memory_usage/total"),
        "compute_capability": major,
        "settings": {
            "persistence": _on(_word(gpu, "persistence_mode")),
            "mig": _on(_word(gpu, "mig_mode/current_mig")),
            "ecc": _on(_word(gpu, "ecc_mode/current_ecc")),
            "ecc_pending": _on(_word(gpu, "ecc_mode/pending_ecc")),
            "compute_mode": _word(gpu, "compute_mode"),
            "power_limit_w": _number(power, "current_power_limit", "power_limit", "enforced_power_limit"),
            "power_default_w": _number(power, "default_power_limit"),
            "sm_max_mhz": _whole(gpu, "max_clocks/sm_clock"),
            "memory_max_mhz": _whole(gpu, "max_clocks/mem_clock"),
            "sm_application_mhz": _whole(gpu, "applications_clocks/graphics_clock"),
            "memory_application_mhz": _whole(gpu, "applications_clocks/mem_clock"),
        },
        "state": {
            "sm_mhz": _whole(gpu, "clocks/sm_clock"),
            "memory_mhz": _whole(gpu, "clocks/mem_clock"),
            "power_w": _number(power, "instant_power_draw", "power_draw", "average_power_draw"),
            "temperature_c": _whole(gpu, "temperature/gpu_temp"),
            "performance": _word(gpu, "performance_state"),
            "throttled": _active(reasons),
            "ecc_corrected": _sum(volatile, "correctable", "single_bit/total"),
            "ecc_uncorrected": _sum(volatile, "uncorrectable", "double_bit/total"),
            "processes": len([it for it in gpu.findall("processes/process_info") if "C" in (_word(it, "type") or "")]),
            "memory_used_bytes": _bytes(gpu, "fb_memory_usage/used"),
        },
    }


def _word(element: ElementTree.Element, path: str) -> str | None:
    found = element.find(path)
    text = (found.text or "").strip() if found is not None else ""
    return None if text in _ABSENT else text


def _number(element: ElementTree.Element, *paths: str) -> float | None:
    for path in paths:
        word = _word(element, path)
        if word is not None:
            try:
                number = float(word.split()[0])
            except ValueError:
                continue
            if math.isfinite(number):
                return number
    return None


def _whole(element: ElementTree.Element, path: str) -> int | None:
    found = _number(element, path)
    return None if found is None else int(found)


def _bytes(element: ElementTree.Element, path: str) -> int | None:
    found = _whole(element, path)
    return None if found is None else found << 20


def _on(word: str | None) -> bool | None:
    return {"Enabled": True, "Disabled": False}.get(word or "")


def _active(reasons: ElementTree.Element | None) -> list[str]:
    if reasons is None:
        return []
    names = (
        item.tag.removeprefix("clocks_event_reason_").removeprefix("clocks_throttle_reason_")
        for item in reasons
        if (item.text or "").strip() == "Active"
    )
    return sorted(name for name in names if name != _IDLE)


def _sum(volatile: ElementTree.Element | None, words: str, old: str) -> int | None:
    """Newer drivers count by kind of memory (``dram_correctable``), older ones have a total."""
    if volatile is None:
        return None
    total = _whole(volatile, old)
    if total is not None:
        return total
    counts = [
        _whole(volatile, item.tag)
        for item in volatile
        if item.tag.endswith(f"_{words}")
        or item.tag.endswith(f"_{words}_parity")
        or item.tag.endswith(f"_{words}_secded")
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


# -- NVML -------------------------------------------------------------------------------------------------------------

_REASONS = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clocks_setting",
}
_COMPUTE = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")
_SM, _MEMORY, _CORRECTED, _UNCORRECTED, _VOLATILE = 1, 2, 0, 1, 0


def from_nvml(nvml: ModuleType | Any) -> dict[str, object]:
    """The record, through a module with the functions of ``pynvml``.

    Raises:
        Exception: The module's own error, where the library or the driver cannot be reached. A value that a device does
            not tell is None and no error.
    """
    nvml.nvmlInit()
    try:
        version = _asked(nvml.nvmlSystemGetCudaDriverVersion_v2) or _asked(nvml.nvmlSystemGetCudaDriverVersion)
        return {
            "source": "nvml",
            "reason": "",
            "driver": _text(nvml.nvmlSystemGetDriverVersion()),
            "cuda": f"{version // 1000}.{version % 1000 // 10}" if isinstance(version, int) else None,
            "devices": [_ask_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())],
        }
    finally:
        nvml.nvmlShutdown()


def _ask_device(nvml: Any, index: int) -> dict[str, object]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *args: object) -> Any:
        function = getattr(nvml, name, None)
        return None if function is None else _asked(lambda: function(handle, *args))

    def pick(value: Any, place: int) -> Any:
        return None if value is None else value[place]

    memory, capability = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetCudaComputeCapability")
    ecc, compute, mask = ask("nvmlDeviceGetEccMode"), ask("nvmlDeviceGetComputeMode"), _mask(ask)
    performance = ask("nvmlDeviceGetPerformanceState")
    processes = ask("nvmlDeviceGetComputeRunningProcesses")
    return {
        "index": index,
        "uuid": _text(ask("nvmlDeviceGetUUID") or ""),
        "name": _text(ask("nvmlDeviceGetName") or ""),
        "memory_bytes": int(memory.total) if memory is not None else None,
        "compute_capability": ".".join(map(str, capability)) if capability is not None else None,
        "settings": {
            "persistence": _flag(ask("nvmlDeviceGetPersistenceMode")),
            "mig": _flag(pick(ask("nvmlDeviceGetMigMode"), 0)),
            "ecc": _flag(pick(ecc, 0)),
            "ecc_pending": _flag(pick(ecc, 1)),
            "compute_mode": _COMPUTE[compute] if isinstance(compute, int) and 0 <= compute < len(_COMPUTE) else None,
            "power_limit_w": _watts(ask("nvmlDeviceGetPowerManagementLimit")),
            "power_default_w": _watts(ask("nvmlDeviceGetPowerManagementDefaultLimit")),
            "sm_max_mhz": ask("nvmlDeviceGetMaxClockInfo", _SM),
            "memory_max_mhz": ask("nvmlDeviceGetMaxClockInfo", _MEMORY),
            "sm_application_mhz": ask("nvmlDeviceGetApplicationsClock", _SM),
            "memory_application_mhz": ask("nvmlDeviceGetApplicationsClock", _MEMORY),
        },
        "state": {
            "sm_mhz": ask("nvmlDeviceGetClockInfo", _SM),
            "memory_mhz": ask("nvmlDeviceGetClockInfo", _MEMORY),
            "power_w": _watts(ask("nvmlDeviceGetPowerUsage")),
            "temperature_c": ask("nvmlDeviceGetTemperature", 0),
            "performance": f"P{performance}" if isinstance(performance, int) and performance < 16 else None,
            "throttled": sorted(name for bit, name in _REASONS.items() if mask & bit),
            "ecc_corrected": ask("nvmlDeviceGetTotalEccErrors", _CORRECTED, _VOLATILE),
            "ecc_uncorrected": ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
            "processes": None if processes is None else len(processes),
            "memory_used_bytes": int(memory.used) if memory is not None else None,
        },
    }


def _mask(ask: Callable[..., Any]) -> int:
    found = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if found is None:
        found = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    return int(found or 0)


def _asked(question: Callable[[], Any]) -> Any:
    """The answer, or None where the device has none: every value is optional, and its error types are the module's."""
    try:
        return question()
    except Exception:
        return None


def _text(value: Any) -> str:
    # Older modules return bytes.
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _watts(value: Any) -> float | None:
    return None if value is None else value / 1000
