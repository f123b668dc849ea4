"""What a study of platform ``gpu`` needs of its host: device, driver, engine parts and data, one line each.

Nothing is imported that a host without a GPU lacks, nothing is set, and nothing raises: what cannot be read is a line.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_kvqual.errors import KvqualError

if TYPE_CHECKING:
    from pytest_kvqual.study.model import Study

_GIB = 1 << 30
_BUSY_BYTES = 2 * _GIB
"""More than a driver and an idle context take of a device."""

_HARDWARE = frozenset({"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One thing that was looked at. ``fix`` is empty where nothing is to be done.

    ``needed`` is False where the study runs all the same: the line is then a note.
    """

    what: str
    found: str
    fix: str = ""
    needed: bool = True


def look(
    study: Study, record: Mapping[str, Any], *, gsm8k: Path | None = None, chosen: str | None = None
) -> Iterator[Found]:
    """Everything that a GPU study needs beyond what every study does.

    Args:
        study: A study of platform ``gpu``.
        record: What :func:`pytest_kvqual.worker.device.read` returned.
        gsm8k: The GSM8K test set as a file; None for the hub's cache.
        chosen: ``CUDA_VISIBLE_DEVICES``; None where it is not set.
    """
    # What runs on a device that no arm gets is somebody else's.
    devices = visible(record["devices"], chosen)[: study.engine.tensor_parallel_size]
    yield from _devices(study, record, devices)
    yield _driver(record)
    yield from _parts(study, devices)
    if study.gsm8k_source is not None:
        yield _gsm8k(study, gsm8k)


def visible(devices: list[Mapping[str, Any]], chosen: str | None) -> list[Mapping[str, Any]]:
    """The devices that ``CUDA_VISIBLE_DEVICES`` leaves, in its order: up to the first name that is none of theirs."""
    if chosen is None:
        return devices
    found: list[Mapping[str, Any]] = []
    for word in (part.strip() for part in chosen.split(",")):
        same = [
            it
            for it in devices
            if it not in found and (str(it["index"]) == word or (word and str(it["uuid"]).startswith(word)))
        ]
        if len(same) != 1:
            break
        found += same
    return found


def _devices(study: Study, record: Mapping[str, Any], devices: list[Mapping[str, Any]]) -> Iterator[Found]:
    wanted = study.engine.tensor_parallel_size
    if len(devices) < wanted:
        reason = f": {record['reason']}" if record["reason"] else ""
        yield Found(
            what="device",
            found=f"found {len(devices)} NVIDIA GPUs that can be used, expected {wanted}{reason}",
            fix="run on a GPU host; where it is one, load its driver until nvidia-smi lists the GPU, and see what "
            "CUDA_VISIBLE_DEVICES names",
        )
    for device in devices:
        yield from _device(study, device, f"GPU {device['index']}")


def _device(study: Study, device: Mapping[str, Any], name: str) -> Iterator[Found]:
    settings, state, memory = device["settings"], device["state"], device["memory_bytes"]
    capability = device["compute_capability"]
    size = "unknown memory" if memory is None else f"{memory / _GIB:.1f} GiB"
    yield Found(what=name, found=f"{device['name']}, {size}, compute capability {capability or 'not told'}")
    pool = max((length.cache_bytes for length in study.lengths.values()), default=0)
    if memory is not None:
        # Weights and the engine's own buffers come on top, so a pool that just fits does not.
        fits = pool < memory
        yield Found(
            what=f"{name} memory",
            found=f"{size} for a pool of {pool / _GIB:.1f} GiB, the weights and the engine's buffers",
            fix="" if fits else "use a larger GPU, or ask for a smaller pool with --cache-bytes: another scope",
        )
    used, processes = state["memory_used_bytes"], state["processes"]
    if (processes or 0) > 0 or (used or 0) > _BUSY_BYTES:
        yield Found(
            what=f"{name} use",
            found=f"found {processes or 0} programs and {(used or 0) / _GIB:.1f} GiB in use, expected an idle device",
            fix="end them: nvidia-smi --query-compute-apps=pid,name --format=csv",
        )
    if settings["mig"]:
        yield Found(
            what=f"{name} MIG",
            found="found MIG enabled, expected the whole device",
            fix="let an administrator disable it: nvidia-smi -mig 0",
        )
    if state["ecc_uncorrected"]:
        yield Found(
            what=f"{name} memory errors",
            found=f"found {state['ecc_uncorrected']} uncorrected since the driver was loaded, expected none",
            fix="let an administrator reset or replace the device",
        )
    yield from _notes(settings, state, name)


def _notes(settings: Mapping[str, Any], state: Mapping[str, Any], name: str) -> Iterator[Found]:
    """What a measurement should be read with; none of it is set here."""
    if settings["persistence"] is False:
        yield Found(
            what=f"{name} persistence",
            found="off: the driver unloads between servers, and each boot takes longer",
            fix="nvidia-smi -pm 1, as administrator",
            needed=False,
        )
    if settings["ecc"] is False:
        yield Found(what=f"{name} ECC", found="off; the receipt says so", fix="nvidia-smi -e 1", needed=False)
    limit, default = settings["power_limit_w"], settings["power_default_w"]
    if limit is not None and default is not None and limit < default:
        yield Found(
            what=f"{name} power",
            found=f"limited to {limit:g} W of {default:g} W; the receipt says so",
            fix=f"nvidia-smi -pl {default:g}, as administrator",
            needed=False,
        )
    clock, most = settings["sm_application_mhz"], settings["sm_max_mhz"]
    if clock is not None and most is not None and clock < most:
        yield Found(
            what=f"{name} clocks",
            found=f"application clock {clock} MHz of at most {most} MHz; the receipt says so",
            fix="nvidia-smi -rac, as administrator",
            needed=False,
        )
    throttled = state["throttled"]
    if throttled:
        hard = bool(_HARDWARE & set(throttled))
        yield Found(
            what=f"{name} clocks",
            found=f"held back now: {', '.join(throttled)}",
            fix="let it cool, and look at its power supply" if hard else "look again when it is idle",
            needed=hard,
        )


def _driver(record: Mapping[str, Any]) -> Found:
    driver, cuda = record["driver"], record["cuda"]
    if driver is None:
        reason = record["reason"] or "no driver answers"
        return Found(what="driver", found=f"found none: {reason}", fix="install the NVIDIA driver, or load it")
    wanted = torch_cuda()
    text = f"{driver}, for CUDA up to {cuda or 'not told'}"
    if wanted is None:
        return Found(what="driver", found=f"{text}; no torch for CUDA is installed here to compare it with")
    if cuda is not None and _major(cuda) < _major(wanted):
        return Found(
            what="driver",
            found=f"{text}, expected CUDA {wanted}, which torch was built for",
            fix="install a newer driver, or a torch and vLLM built for an older CUDA",
        )
    return Found(what="driver", found=f"{text}; torch was built for {wanted}")


def _parts(study: Study, devices: list[Mapping[str, Any]]) -> Iterator[Found]:
    backends = {arm.attention_backend for arm in study.arms.values()}
    yield _package("triton", "triton", "pip install triton", needed=any("TRITON" in name for name in backends))
    needed = any("FLASHINFER" in name for name in backends)
    yield _package("FlashInfer", "flashinfer-python", "pip install 'pytest-kvqual[gpu]'", needed=needed)
    needed = "FLASH_ATTN" in backends
    yield _fa3(devices, needed=needed)


def _package(what: str, distribution: str, fix: str, *, needed: bool) -> Found:
    version = version_of(distribution)
    if version is not None:
        return Found(what=what, found=f"{distribution} {version}")
    return Found(
        what=what,
        found=f"found no {distribution}, expected it for an arm of this study"
        if needed
        else "not installed, not needed",
        fix=fix if needed else "",
        needed=needed,
    )


def _fa3(devices: list[Mapping[str, Any]], *, needed: bool) -> Found:
    folder = package_folder("vllm")
    built = folder is not None and any((folder / "vllm_flash_attn").glob("_vllm_fa3_C*"))
    capability = devices[0]["compute_capability"] if devices else None
    hopper = capability is not None and str(capability).startswith("9.")
    if built and (hopper or not needed):
        return Found(what="FA3", found="built into vLLM" + (f", for compute capability {capability}" if hopper else ""))
    if not needed:
        return Found(what="FA3", found="not there, not needed")
    if not built:
        return Found(
            what="FA3",
            found="found no FA3 kernels in vLLM, expected them for the FLASH_ATTN arm",
            fix="install the CUDA wheel of vLLM: pip install 'pytest-kvqual[gpu]'",
        )
    return Found(
        what="FA3",
        found=f"found compute capability {capability or 'not told'}, expected 9.x: FA3 runs on Hopper alone",
        fix="run on a Hopper GPU; elsewhere the arm falls back to another FlashAttention, which dispatch refuses",
    )


def _gsm8k(study: Study, file: Path | None) -> Found:
    from pytest_kvqual.gsm8k import load_questions

    source = study.gsm8k_source
    if source is None:
        raise ValueError("the study has no GSM8K")
    fix = "give it with --gsm8k FILE, or install pytest-kvqual[gsm8k] and let the run fetch it"
    if file is None:
        file = _cached(source.repository, source.file, source.revision)
    if file is None:
        return Found(
            what="GSM8K",
            found=f"found no test set in the hub's cache, expected {source.repository} at {source.revision[:12]}",
            fix=fix,
        )
    try:
        questions = load_questions(source, file)
    except KvqualError as error:
        return Found(what="GSM8K", found=str(error), fix=error.advice or fix)
    return Found(what="GSM8K", found=f"{len(questions)} questions in {file}")


def _cached(repository: str, name: str, revision: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(repository, name, revision=revision, repo_type="dataset")
    return Path(found) if isinstance(found, str) else None


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_folder(name: str) -> Path | None:
    """The folder of a package of this interpreter, which is not imported; None where there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def torch_cuda() -> str | None:
    """The CUDA version that this interpreter's torch was built for, as its files say; None without one."""
    folder = package_folder("torch")
    if folder is None:
        return None
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    found = re.search(r"^cuda(?:\s*:[^=\n]+)?\s*=\s*['\"](\d+\.\d+)", text, re.MULTILINE)
    return found[1] if found else None


def _major(version: str) -> int:
    head = version.split(".")[0]
    return int(head) if head.isdigit() else 0
