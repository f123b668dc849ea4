"""The figures of a recording: the lines of ``kvqual metrics``."""

from __future__ import annotations

import math
from pathlib import Path

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.metrics.recording import read_recording
from pytest_kvqual.metrics.summary import Figure, summarise


def metrics(path: Path, *, formulas: bool = False) -> tuple[str, ...]:
    """One line for what was offered and what became of it, and one for each figure that is defined.

    Args:
        path: The recording.
        formulas: Whether each figure's formula stands under it.

    Raises:
        EvidenceError: The file cannot be read, or is no whole recording.
    """
    try:
        # A pipe or a device may have no end.
        if path.exists() and not path.is_file():
            raise EvidenceError(f"found {path}, which is no regular file, expected a recording")
        data = path.read_bytes()
    except OSError as error:
        raise EvidenceError(f"cannot read {path}: {error.strerror}") from None
    summary = summarise(read_recording(data, origin=str(path)))
    kinds = "".join(f", {count} {kind}" for kind, count in summary.failed.items())
    lines = [
        f"offered {summary.offered}, completed {summary.completed}, failed {sum(summary.failed.values())}{kinds}",
    ]
    for name, figure in summary.figures.items():
        if figure.value is None:
            continue
        lines.append(f"{name}: {_spelled(figure)} (of {figure.of})")
        if formulas:
            lines.append(f"    {figure.formula}")
    return tuple(lines)


def _spelled(figure: Figure) -> str:
    value = figure.value
    if value is None or value == math.inf:
        return "inf"
    if figure.unit == "ns":
        return f"{float(value) / 1e6:.3f} ms"
    return f"{float(value):.3f} {figure.unit}" if figure.unit == "1/s" else f"{value} {figure.unit}"
