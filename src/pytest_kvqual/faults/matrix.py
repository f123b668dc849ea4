"""Each fault on the transfer engine under all oracles: which gates object, and was it the one that claims it.

A fault is run twice through the oracle window of its scenario: with K, V and queries as they come, and with
fingerprints and fills. What no window sees is compared beside it: scales with the declared ones (identity), the kernels
and class of each layer with those of the healthy engine (dispatch), and outputs of the same requests in the same and
in another order of rows (determinism).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pytest_kvqual.faults.catalogue import GATES, Fault
from pytest_kvqual.faults.scenarios import Scenario
from pytest_kvqual.transfer.engine import TransferEngine
from pytest_kvqual.worker.wire import resolve

_SECTIONS: Mapping[str, tuple[str, ...]] = {
    # Each oracle gate objects to a wrong row map, so the first of them does.
    "stale-maps": ("row_map", "stale-maps"),
    "routing": ("routing",),
    "shifted-outputs": ("shifted-outputs",),
    "placement": ("placement",),
    "replay": ("replay",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What the gates said of one fault. ``findings`` maps each gate that objected to its first objection."""

    fault: Fault
    findings: Mapping[str, str]

    @property
    def first(self) -> str | None:
        """The first gate in the order of the study that objected."""
        return next((gate for gate in GATES if gate in self.findings), None)

    @property
    def right(self) -> bool:
        """Whether the gate that claims the fault was the first to object; for a benign one, whether none did."""
        return self.first == (None if self.fault.benign else self.fault.claimed_by)

    def __str__(self) -> str:
        found = "; ".join(f"{gate}: {line}" for gate, line in self.findings.items()) or "no gate objected"
        expected = "no gate" if self.fault.benign else self.fault.claimed_by
        return f"{self.fault.name}: expected {expected} first, found {found}"


def _forward(rows: Sequence[Any]) -> list[Any]:
    return list(rows)


def _rotated(rows: Sequence[Any]) -> list[Any]:
    return [*rows[1:], *rows[:1]]


def run(fault: Fault | None, scenario: Scenario) -> dict[str, str]:
    """The gates that objected to an engine of ``scenario`` with ``fault`` planted, and the first objection of each."""
    found: dict[str, str] = {}

    def object_to(gate: str, line: str) -> None:
        found.setdefault(gate, line)

    engine = None
    for probe in (False, True) if scenario.probe else (False,):
        engine = _planted(fault, scenario)
        for gate, line in _identity(engine):
            object_to(gate, line)
        engine.open(probe=probe, fills=True)
        scenario.drive(engine, _forward)
        for record in engine.close():
            for gate, sections in _SECTIONS.items():
                for section in sections:
                    part = record[section]
                    assert_ = part["findings"]  # type: ignore[index]  # a section is a mapping
                    if assert_:
                        object_to(gate, assert_[0])
    for gate, line in [*_dispatch(fault, scenario), *_determinism(fault, scenario)]:
        object_to(gate, line)
    return {gate: found[gate] for gate in GATES if gate in found}


def _planted(fault: Fault | None, scenario: Scenario) -> TransferEngine:
    engine = scenario.engine()
    if fault is not None:
        resolve(fault.plant)(engine)
    return engine


def _identity(engine: TransferEngine) -> Iterable[tuple[str, str]]:
    for name, layer in engine.kvqual_layers().items():
        for which in ("k", "v"):
            held, declared = getattr(layer, f"_{which}_scale_float"), getattr(layer, f"{which}_scale_declared")
            if not held == declared:
                yield "identity", f"{name}: {which.upper()} scale is {held}, expected {declared}"


class _Log:
    """What each attention call of an engine returned, by (step, layer, request)."""

    def __init__(self, engine: TransferEngine) -> None:
        self.rows: dict[tuple[int, str, str], torch.Tensor] = {}
        step = engine.step

        def logged(batch: Sequence[Any], **named: Any) -> Any:
            computed = step(batch, **named)
            first = 0
            for name, start, count in self.order:
                for layer, output in engine.outputs.items():
                    self.rows[start, layer, name] = output[first : first + count].clone()
                first += count
            return computed

        prepare = engine.prepare

        def seen(schedule: Any, *args: Any) -> Any:
            self.order = [(name, engine.requests[name].computed, schedule[name]) for name in engine.runner.names]
            return prepare(schedule, *args)

        self.order: list[tuple[str, int, int]] = []
        engine.step, engine.prepare = logged, seen  # type: ignore[method-assign]  # seams
