"""What this host has of what a study needs, one line each, with the fix."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_kvqual.errors import KvqualError

if TYPE_CHECKING:
    from pytest_kvqual.study.model import Study

_UNFIT = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One thing that was looked at. ``noted``: it does not stand in the way, and a reader should know it."""

    what: str
    passed: bool
    found: str
    noted: bool = False

    def line(self) -> str:
        """``ok    what: found``, or ``note`` or ``FIX`` in the first place."""
        word = "FIX" if not self.passed else "note" if self.noted else "ok"
        return f"{word:4} {self.what}: {' '.join(self.found.split())}"


def checks(study: str, format: str | None = None, *, gsm8k: Path | None = None) -> Iterator[Line]:
    """Look at everything that a study needs before it boots; each line as soon as it is known.

    Raises:
        StudyError: The study itself cannot be read; nothing else can be looked at then.
    """
    from pytest_kvqual.study.load import load_study

    declared = load_study(study, format)
    yield Line(what="study", passed=True, found=f"{declared.name} in {declared.directory}")
    for what, look in _LOOKS:
        try:
            yield Line(what=what, passed=True, found=look(declared))
        except KvqualError as error:
            yield Line(what=what, passed=False, found=error.line())
    if declared.platform == "gpu":
        yield from _gpu(declared, gsm8k)
    else:
        yield Line(what="device", passed=True, found="none needed")


def _gpu(study: Study, gsm8k: Path | None) -> Iterator[Line]:
    from pytest_kvqual.gpu_host import look
    from pytest_kvqual.worker import device

    # vLLM's own copy of NVML would import the engine.
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    for found in look(study, device.read(modules=("pynvml",)), gsm8k=gsm8k, chosen=chosen):
        text = f"{found.found} ({found.fix})" if found.fix else found.found
        failed = bool(found.fix) and found.needed
        yield Line(what=found.what, passed=not failed, found=text, noted=bool(found.fix))


def _python(study: Study) -> str:
    return f"{sys.version.split()[0]} at {sys.executable}"


def _engine(study: Study) -> str:
    engine = study.engine
    try:
        found = importlib.metadata.version(engine.distribution)
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != engine.version:
        extra = "cpu" if study.platform == "cpu" else "gpu"
        raise KvqualError(
            f"found {engine.distribution} {found}, expected {engine.version}",
            advice=f"pip install 'pytest-kvqual[{extra}]'; an arm with an interpreter of its own does without",
        )
    unfit = [name for name in _UNFIT if study.platform == "cpu" and _installed(name)]
    if unfit:
        raise KvqualError(
            f"found {', '.join(unfit)} beside {engine.distribution}, expected none: they do not fit the CPU torch",
            advice=f"pip uninstall {' '.join(unfit)}",
        )
    return f"{engine.distribution} {found}"


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _model(study: Study) -> str:
    from pytest_kvqual.models import check_model, model_folder

    folder = model_folder(study.model)
    check_model(study.model, folder)
    return f"{len(study.model.files)} files in {folder}"


def _lock(study: Study) -> str:
    from pytest_kvqual.study.freeze import verify_lock

    lock = verify_lock(study)
    return f"{lock.path} matches (sha256 {lock.sha256[:12]})"


def _disk(study: Study) -> str:
    from pytest_kvqual.campaign import FREE_BYTES

    free = shutil.disk_usage(Path.cwd()).free
    if free < FREE_BYTES:
        raise KvqualError(
            f"found {free >> 20} MiB free at {Path.cwd()}, expected {FREE_BYTES >> 20}",
            advice="free space, or run with --run-dir elsewhere",
        )
    return f"{free >> 20} MiB free at {Path.cwd()}"


def _port(study: Study) -> str:
    from pytest_kvqual.server.process import free_port

    try:
        return f"{free_port()} of 127.0.0.1 can be had"
    except OSError as error:
        raise KvqualError(f"found no port of 127.0.0.1: {error.strerror}", advice="bring interface lo up") from error


def _prepared(study: Study) -> str:
    from pytest_kvqual.study.load import require_prepared

    require_prepared(study)
    return "panels, scales and digests are there"


_LOOKS: tuple[tuple[str, Callable[[Study], str]], ...] = (
    ("prepared", _prepared),
    ("python", _python),
    ("engine", _engine),
    ("model", _model),
    ("lock", _lock),
    ("disk", _disk),
    ("port", _port),
)
