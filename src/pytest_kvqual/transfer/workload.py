"""Scripts for the transfer engine: what a client and a scheduler do, as data that can be printed and read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pytest_kvqual.errors import StudyError
from pytest_kvqual.transfer.engine import VOCABULARY, TransferEngine

_OPS = {"submit": 4, "step": 5, "finish": 2, "preempt": 2, "fork": 4, "offload": 2, "forget": 1}
"""The operations and how many elements each has, its name included."""


def stream(seed: int, count: int) -> list[int]:
    """The first ``count`` tokens of a fixed random sequence; a shorter count gives a prefix of a longer one."""
    return [hashlib.sha256(f"{seed}:{index}".encode()).digest()[0] % VOCABULARY for index in range(count)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step as it ran: rows of each request in row order, its blocks, and each layer's output of those rows."""

    rows: tuple[tuple[str, int, int], ...]
    blocks: dict[str, tuple[int, ...]]
    outputs: dict[str, torch.Tensor]

    def __str__(self) -> str:
        return "; ".join(
            f"{name}: positions {start} to {start + count - 1}, blocks {list(self.blocks[name])}"
            for name, start, count in self.rows
        )


@dataclass(frozen=True, slots=True)
class Script:
    """Operations in order.

    * ``("submit", name, ((seed, count), ...), identity)``: the prompt is the streams one after the other;
    * ``("step", ((name, count or None), ...), padding, {name: drafts}, {name: accepted})``;
    * ``("finish", name)``, ``("preempt", name)``, ``("fork", parent, child, token)``, ``("offload", name)``,
      ``("forget",)`` (empties the prefix cache).
    """

    ops: tuple[tuple[Any, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Script:
        """Reads what ``str`` gives.

        Raises:
            StudyError: It is not a JSON list of known operations.
        """
        try:
            ops = json.loads(text)
        except ValueError as error:
            raise StudyError(f"found a script that is not JSON ({error}), expected a list of operations") from None
        for op in ops if isinstance(ops, list) else [ops]:
            if not isinstance(op, list) or not op or _OPS.get(op[0]) != len(op):
                raise StudyError(f"found {op!r} in a script, expected one of {', '.join(_OPS)} with its arguments")
        return cls(tuple(tuple(op) for op in ops))

    def __str__(self) -> str:
        return json.dumps(self.ops, separators=(",", ":"))

    def lengths(self) -> dict[str, int]:
        """The prompt length of each request."""
        return {op[1]: sum(count for _, count in op[2]) for op in self.ops if op[0] == "submit"}

    def play(self, engine: TransferEngine) -> list[StepRecord]:
        """Runs the operations and returns one record a step."""
        records = []
        for op, *arguments in self.ops:
            if op == "submit":
                name, segments, identity = arguments
                tokens = [token for seed, count in segments for token in stream(seed, count)]
                engine.submit(name, tokens, identity=identity)
            elif op == "step":
                batch, padding, drafts, accept = arguments
                records.append(_step(engine, batch, padding, drafts, accept))
            elif op == "forget":
                engine.forget_prefixes()
            else:
                getattr(engine, op)(*arguments)
        return records


def _step(engine: TransferEngine, batch: Any, padding: int, drafts: Any, accept: Any) -> StepRecord:
    seen: list[tuple[str, int, int]] = []
    held: dict[str, tuple[int, ...]] = {}
    original = engine.row_order

    def row_order(schedule: Any) -> list[tuple[str, int, int]]:
        order = original(schedule)
        seen.extend(order)
        held.update({name: tuple(engine.requests[name].blocks) for name, _, _ in order})
        return order

    engine.row_order = row_order  # type: ignore[method-assign]  # a seam, set back below
    try:
        engine.step([(name, count) for name, count in batch], padding=padding, drafts=drafts, accept=accept)
    finally:
        engine.row_order = original  # type: ignore[method-assign]  # as found
    rows = sum(count for _, _, count in seen)
    outputs = {name: output[:rows].clone() for name, output in engine.outputs.items()}
    return StepRecord(rows=tuple(seen), blocks=held, outputs=outputs)


def _decode(*names: str, padding: int = 0) -> tuple[Any, ...]:
    return ("step", tuple((name, 1) for name in names), padding, {}, {})


def _compute(*batch: tuple[str, int | None], padding: int = 0) -> tuple[Any, ...]:
    return ("step", batch, padding, {}, {})


def workload(block_size: int, *, window: int | None = None) -> Script:
    """Every condition once, on blocks of ``block_size`` positions.

    Lengths b-1, b, b+1, 2b-1, 2b, 2b+1; chunks of b, and of b+1 over cached context; W-1, W and W+1 with a window;
    mixed prefill and decode; a shrinking batch; block reuse; a prefix hit; fork; preemption and resume; offload and
    restore;
    rejected and accepted drafts; padding rows. The pool's topmost block is granted in the first step.
    """
    b = block_size
    ops: list[tuple[Any, ...]] = [
        ("submit", "under", ((1, b - 1 or 1),), ""),
        ("submit", "exact", ((2, b),), ""),
        ("submit", "over", ((3, b + 1),), ""),
        ("submit", "long", ((4, 3 * b + max(1, b // 2)),), ""),
        _compute(("under", None), ("exact", None), ("long", b), ("over", None)),
        ("submit", "under2", ((5, 2 * b - 1),), ""),
        _compute(("over", 1), ("under", 1), ("long", b + 1), ("exact", 1), ("under2", None), padding=3),
        ("submit", "exact2", ((6, 2 * b),), ""),
        ("submit", "over2", ((7, 2 * b + 1),), ""),
        _compute(("exact2", None), ("exact", 1), ("over2", None), ("long", None)),
        ("fork", "long", "twin", 11),
        _decode("long", "twin", "under", "under2", "exact2", "over2"),
        ("finish", "exact"),
        ("finish", "exact2"),
        ("submit", "hit", ((4, 2 * b), (8, 3)), ""),
        ("submit", "other", ((4, 2 * b), (8, 3)), "adapter"),
        _compute(("twin", 1), ("hit", None), ("long", 1), ("other", None)),
        ("preempt", "over2"),
        ("finish", "other"),
        ("submit", "reuse", ((9, b + 1),), ""),
        _compute(("reuse", None), ("hit", 1), ("under", 1), padding=1),
        _compute(("reuse", 1), ("over2", None)),
        _decode("over2", "hit"),
        ("offload", "long"),
        *(("finish", name) for name in ("long", "twin", "over", "under2", "reuse", "under")),
        ("forget",),
        ("submit", "back", ((4, 3 * b), (10, 2)), ""),
        _compute(("back", None), ("over2", 1), padding=2),
        ("step", (("back", 3), ("hit", 4)), 0, {"back": [1, 2], "hit": [3, 4, 5]}, {"back": 2, "hit": 1}),
        _decode("hit", "back"),
        _decode("back"),
        *(("finish", name) for name in ("back", "hit", "over2")),
    ]
    if window is not None:
        edges = [(f"window{offset:+d}", max(1, window + offset)) for offset in (-1, 0, 1)]
        ops += [("submit", name, ((20 + number, length),), "") for number, (name, length) in enumerate(edges)]
        ops.append(_compute(*((name, None) for name, _ in edges)))
        ops += [_decode(*(name for name, _ in edges)), _decode(*(name for name, _ in reversed(edges)))]
        ops.append(("submit", "past", ((30, 2 * window + 1),), ""))
        ops.append(_compute(("past", window), (edges[0][0], 1)))
        ops.append(_compute(("past", None), (edges[1][0], 1)))
        ops += [("finish", name) for name in ("past", *(name for name, _ in edges))]
    return Script(tuple(ops))


def short_workload(block_size: int) -> Script:
    """Two requests around a block multiple, and a third that takes over a freed block."""
    b = block_size
    return Script(
        (
            ("submit", "left", ((1, b + 1),), ""),
            ("submit", "right", ((2, 2 * b - 1),), ""),
            _compute(("left", None), ("right", None)),
            _decode("right", "left", padding=1),
            _decode("right", "left"),
            ("finish", "left"),
            ("submit", "third", ((3, b),), ""),
            _compute(("third", None), ("right", 1)),
            _decode("third", "right"),
        )
    )


LONG = (1, 64, 100, 129, 256, 257, 384, 513, 640)
"""Prompt lengths of :func:`long_workload`: what a limit at 128, 256 or 512 positions would show at."""

LONG_SLOTS = 1 << 16
"""Slots of its pool at least, so that a slot number needs more than sixteen bits."""


def long_workload() -> Script:
    """Nine requests up to 640 positions, the longest in chunks, nine rows decoding for ten steps, then two and one."""
    rows = [f"r{length}" for length in LONG]
    ops: list[tuple[Any, ...]] = [
        ("submit", name, ((40 + number, length),), "")
        for number, (name, length) in enumerate(zip(rows, LONG, strict=True))
    ]
    ops.append(_compute(*((name, None) for name in rows[:-1]), (rows[-1], 256)))
    ops.append(_compute(*((name, 1) for name in rows[:-1]), (rows[-1], None)))
    ops += [_decode(*rows[turn:], *rows[:turn]) for turn in range(9)]
    ops += [("finish", name) for name in rows[:-2]]
    ops += [_decode(*rows[-2:]), ("finish", rows[-2]), _decode(rows[-1]), ("finish", rows[-1])]
    return Script(tuple(ops))


def names(script: Script) -> Sequence[str]:
    """The requests of a script in order of appearance."""
    return [op[2] if op[0] == "fork" else op[1] for op in script.ops if op[0] in ("submit", "fork")]
