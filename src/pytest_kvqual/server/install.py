"""What is installed where an arm runs: the engine's identity, as far as its packaging tells.

This names an installation quickly. Whether the files are still what the names say is another question, which the worker
answers: it hashes each file of these distributions again.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_kvqual.errors import InstallError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_kvqual.server.checkout import Found
    from pytest_kvqual.study.model import Study

# Beside the engine itself: what computes, loads weights or turns text into tokens. This project is not among them; the
# lock holds each of its source files.
DISTRIBUTIONS = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "flashinfer-python")

_LIMIT_S = 60.0
_PROBE = """
import hashlib, importlib.metadata, json, platform, sys
found = []
for name in sys.argv[1:]:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        continue
    record = distribution.read_text("RECORD")
    digest = None
    if record is not None:
        # What the wheel holds, not how it was installed: scripts name their interpreter, byte code its path, and pip
        # notes who asked for the distribution.
        lines = sorted(
            line
            for line in record.splitlines()
            if not line.startswith("..") and ".pyc," not in line
            and line.split(",")[0].rpartition("/")[2] not in ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")
        )
        digest = hashlib.sha256(repr(lines).encode()).hexdigest()
    found.append({"name": name, "version": distribution.version, "record_sha256": digest})
json.dump({"python": platform.python_version(), "machine": platform.machine(), "distributions": found}, sys.stdout)
"""


def engine_identity(study: Study, python: Path, checkouts: Sequence[Found] = ()) -> dict[str, object]:
    """The engine's distributions in an interpreter, JSON-ready; its digest is ``Scope.engine``.

    Args:
        study: Whose engine it is.
        python: The interpreter.
        checkouts: The verified source trees that are put before what is installed there.

    Returns:
        ``{"schema": 1, "python": version, "machine": name, "distributions": [{"name", "version", "record_sha256"}]}``
        in a fixed order. A distribution that is not installed is left out; ``record_sha256`` is the SHA-256 of what
        its ``RECORD`` says of the wheel's own files, the same in every environment, None where it has no ``RECORD``.
        With checkouts also ``"checkouts": [{"name", "commit", "tree", "built"}]``.

    Raises:
        InstallError: The interpreter does not run, or the study's engine is missing or of another version.
    """
    names = (study.engine.distribution, *DISTRIBUTIONS)
    try:
        # Isolated: neither the caller's PYTHONPATH nor its working directory may answer for the interpreter.
        done = subprocess.run(
            [str(python), "-I", "-c", _PROBE, *names], capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(
            f"cannot run the interpreter {python}: {error}", advice="check the arm's interpreter"
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InstallError(
            f"the interpreter {python} ended with {done.returncode}: {last}", advice="repair the installation"
        )
    try:
        answer = json.loads(done.stdout)
        installed = {entry["name"]: entry["version"] for entry in answer["distributions"]}
    except (ValueError, KeyError, TypeError) as error:
        raise InstallError(
            f"the interpreter {python} answered {done.stdout[:200]!r}, expected a JSON document"
        ) from error
    found = installed.get(study.engine.distribution)
    if found != study.engine.version:
        raise InstallError(
            f"found {study.engine.distribution} {found or 'not installed'} in {python}, "
            f"expected {study.engine.version}",
            advice=f"install {study.engine.distribution}=={study.engine.version} there",
        )
    return {"schema": 1, **answer, **({"checkouts": [it.identity() for it in checkouts]} if checkouts else {})}
