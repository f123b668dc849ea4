"""Reproducers: one finding as a small ``.npz`` that can be checked again without the engine.

Each holds the arrays of one comparison, decoded to float32 where the encoding does not matter, and is checked by the
oracle that made the finding: ``kvqual replay FILE``.

=========== =============================================================================================
``cells``   ``found_k``, ``expected_k`` and the same of V, uint8 ``[n, Hkv, bytes]``; ``slots`` int64 ``[n]``
``maps``    ``found`` and ``expected`` block table, lengths and row starts of a step
``row``     ``query`` ``[Hq, D]``, ``key`` and ``value`` ``[L, Hkv, D]`` of the ledger, ``output`` ``[Hq, D]``
``shift``   the same as ``row``, and ``other_output``: the reference of the row whose output it is
``fill``    ``before`` and ``after``: the outputs of the two calls as bytes
=========== =============================================================================================
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.oracles import placement
from pytest_kvqual.oracles.findings import Tally
from pytest_kvqual.oracles.maps import check_maps
from pytest_kvqual.oracles.outputs import Step, check_shift
from pytest_kvqual.oracles.step import RowRequest, plan_step

SCHEMA = 1
LARGEST_FILE = 64 << 20
"""Bytes of a reproducer at most: a history of :data:`LONGEST` positions is far below."""

LONGEST = 1024
"""Positions of a history that a reproducer holds at most; a finding in a longer one has no reproducer."""

_ARRAYS: Mapping[str, tuple[str, ...]] = {
    "cells": ("found_k", "expected_k", "found_v", "expected_v", "slots"),
    "maps": ("block_table", "seq_lens", "query_start_loc", "starts", "scheduled", "blocks"),
    "row": ("query", "key", "value", "output"),
    "shift": ("query", "key", "value", "output", "other_output", "other_tolerance"),
    "fill": ("before", "after"),
}

_ALIKE = (
    ("found_k", "expected_k"),
    ("found_v", "expected_v"),
    ("output", "query"),
    ("other_output", "query"),
    ("other_tolerance", "query"),
    ("after", "before"),
)
"""Arrays of one shape: else they would be compared by broadcasting."""


def pack(what: str, text: str, arrays: Mapping[str, torch.Tensor], **numbers: float | int | str) -> bytes:
    """The bytes of a reproducer of kind ``what`` for the finding ``text``.

    ``arrays`` are those of the module's table; ``numbers`` what the check needs beside them (``layer``, ``request``,
    ``position``, ``scale``, ``rounding``, ``window``, ``block_size``).
    """
    import numpy as np

    held: dict[str, Any] = {name: array.detach().cpu().numpy() for name, array in arrays.items()}
    held |= {name: np.array(number) for name, number in numbers.items()}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, schema=np.array(SCHEMA), what=np.array(what), text=np.array(text), **held)
    return buffer.getvalue()


def check(path: Path) -> tuple[str, list[str]]:
    """Checks a reproducer again.

    Returns:
        The finding as it was recorded, and what the check finds now; nothing where it is not reproduced.

    Raises:
        EvidenceError: The file is missing, is no reproducer, or lacks an array.
    """
    import numpy as np

    if path.exists() and not (path.is_file() and path.stat().st_size <= LARGEST_FILE):
        raise EvidenceError(f"{path}: found no file of at most {LARGEST_FILE} bytes, expected a reproducer")
    try:
        # From memory: numpy leaves a damaged file open.
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
            held = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError) as error:
        reason = getattr(error, "strerror", None) or "it is no .npz archive"
        raise EvidenceError(f"{path}: cannot be read: {reason}, expected a reproducer") from error
    except Exception as error:  # zipfile and zlib raise types of their own for a damaged archive
        raise EvidenceError(f"{path}: cannot be read: {_one_line(error)}, expected a reproducer") from error
    what = str(held.get("what", ""))
    if what not in _ARRAYS or held.get("schema", np.array(0)).tolist() != SCHEMA:
        raise EvidenceError(f"{path}: found kind {what!r}, expected one of {', '.join(_ARRAYS)} of schema {SCHEMA}")
    missing = [name for name in _ARRAYS[what] if name not in held]
    if missing:
        raise EvidenceError(f"{path}: found no array {missing[0]!r}, expected {', '.join(_ARRAYS[what])}")
    for name, like in _ALIKE:
        if name in _ARRAYS[what] and held[name].shape != held[like].shape:
            raise EvidenceError(
                f"{path}: its arrays do not fit together: {name} is {held[name].shape}, expected {held[like].shape} as"
                f" {like}"
            )
    empty = [name for name in _ARRAYS[what] if held[name].size == 0]
    if empty:
        raise EvidenceError(f"{path}: its arrays do not fit together: {empty[0]} is empty, expected what was compared")
    try:
        return _one_line(held["text"]), _CHECKS[what](held)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise EvidenceError(f"{path}: its arrays do not fit together: {_one_line(error)}") from error


def _one_line(text: object) -> str:
    """One printable line: a file's text may hold anything."""
    return "".join(sign if sign.isprintable() else "?" for sign in " ".join(str(text).split()))


def _tensor(held: Mapping[str, Any], name: str) -> torch.Tensor:
    return torch.from_numpy(held[name])


def _check_cells(held: Mapping[str, Any]) -> list[str]:
    lines = []
    for what in ("k", "v"):
        found, expected = _tensor(held, f"found_{what}"), _tensor(held, f"expected_{what}")
        wrong = (found != expected).any(dim=-1)
        for place, head in torch.nonzero(wrong).tolist():
            at = int(torch.nonzero(found[place, head] != expected[place, head]).flatten()[0])
            lines.append(
                f"slot {int(held['slots'][place])}, {what.upper()} of KV head {head}: byte {at} is "
                f"0x{int(found[place, head, at]):02x}, expected 0x{int(expected[place, head, at]):02x}"
            )
    return lines


def _check_maps(held: Mapping[str, Any]) -> list[str]:
    blocks = held["blocks"].tolist()
    requests = [
        RowRequest(request=str(index), start=int(start), scheduled=int(count), blocks=tuple(row))
        for index, (start, count, row) in enumerate(
            zip(held["starts"].tolist(), held["scheduled"].tolist(), blocks, strict=True)
        )
    ]
    tally = Tally()
    check_maps(
        tally,
        plan_step(requests, int(held["block_size"])),
        layer=str(held["layer"]),
        block_table=_tensor(held, "block_table"),
        seq_lens=_tensor(held, "seq_lens"),
        query_start_loc=_tensor(held, "query_start_loc"),
    )
    return tally.findings


def _row_step(held: Mapping[str, Any]) -> Step:
    position = int(held["position"])
    key = _tensor(held, "key")
    window = int(held["window"])
    reference = placement.attention(
        _tensor(held, "query")[None],
        key,
        _tensor(held, "value"),
        start=position,
        scale=float(held["scale"]),
        rounding=float(held["rounding"]),
        window=window if window > 0 else None,
    )
    request = RowRequest(request=str(held["request"]), start=position, scheduled=1, blocks=())
    return Step(plan=plan_step([request], max(1, key.shape[0])), reference=reference)


def _check_row(held: Mapping[str, Any]) -> list[str]:
    step, tally = _row_step(held), Tally()
    placement.check_rows(
        tally, step.plan, layer=str(held["layer"]), output=_tensor(held, "output")[None], reference=step.reference
    )
    return tally.findings


def _check_shift(held: Mapping[str, Any]) -> list[str]:
    step, tally = _row_step(held), Tally()
    other = placement.Reference(_tensor(held, "other_output")[None], _tensor(held, "other_tolerance")[None])
    source = RowRequest(request=str(held["other"]), start=int(held["other_position"]), scheduled=1, blocks=())
    before = Step(plan=plan_step([source], step.plan.block_size), reference=other)
    check_shift(tally, step, layer=str(held["layer"]), output=_tensor(held, "output")[None], before=before)
    return tally.findings


def _check_fill(held: Mapping[str, Any]) -> list[str]:
    before, after = _tensor(held, "before"), _tensor(held, "after")
    count = int((before != after).sum())
    return [f"{count} of {before.numel()} bytes of the output changed with cells that nobody wrote"] if count else []


_CHECKS = {
    "cells": _check_cells,
    "maps": _check_maps,
    "row": _check_row,
    "shift": _check_shift,
    "fill": _check_fill,
}
