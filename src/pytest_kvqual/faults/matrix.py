"""Each fault on the transfer engine under all oracles: which gates object, and was it the one that claims it.

A fault is run twice through the oracle window of its scenario: with K, V and queries as they come, and with
fingerprints and fills. What no window sees is compared beside it: scales with the declared ones (identity), the kernels
and class of each layer with those of the healthy engine (dispatch), and outputs of the same requests in the same and
in another order of rows (determinism).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from pytest_kvqual.faults.catalogue import FAULTS, GATES, Fault
from pytest_kvqual.faults.planting import held_as
from pytest_kvqual.faults.scenarios import SCENARIOS, Scenario, Turn
from pytest_kvqual.transfer.engine import Backend, Impl, TransferEngine
from pytest_kvqual.worker.dispatch import DispatchReader
from pytest_kvqual.worker.wire import resolve

_KERNELS = frozenset({"aten::exp"})
"""What the exemplar's softmax runs in every attention call, and a fused attention does not."""
_READ_STEPS = (2, 8)

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
    """The gates that objected to an engine of ``scenario`` with ``fault`` planted, and the first objection of each.

    What can no longer change which gate is first is left out: see :func:`windows`; and determinism is the last.
    """
    found = windows(fault, scenario)
    engine = _planted(fault, scenario)
    log = _run(engine, scenario, _forward, dispatch=True)
    for gate, line in _dispatch(log.readings):
        found.setdefault(gate, line)
    if not found:
        for gate, line in _repeated(engine, scenario, log.rows):
            found.setdefault(gate, line)
    return {gate: found[gate] for gate in GATES if gate in found}


def windows(fault: Fault | None, scenario: Scenario, backend: Backend | None = None) -> dict[str, str]:
    """What identity and the oracle windows object to, and the first objection of each: the gates up to replay.

    Maps and slots are the same with fingerprints as without, so the second pass is for an engine to which neither
    stale-maps nor routing objected; its fills are for one to which no gate has.

    Args:
        fault: Planted first; None: a healthy engine.
        scenario: What the engine is and does.
        backend: Runs in the exemplar's place. A fault of one of the exemplar's parts then raises ``AttributeError``.
    """
    found = dict(_identity(_planted(fault, scenario, backend)))
    for probe in (False, True) if scenario.probe else (False,):
        engine = _planted(fault, scenario, backend)
        engine.open(probe=probe, fills=not found and probe is scenario.probe)
        scenario.drive(engine, _forward)
        for record in engine.close():
            for gate, line in objections(record):
                found.setdefault(gate, line)
        if "stale-maps" in found or "routing" in found:
            break
    return {gate: found[gate] for gate in GATES if gate in found}


def objections(record: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """(gate, first finding) of each section of a window's record that has findings."""
    for gate, sections in _SECTIONS.items():
        for section in sections:
            if record[section]["findings_total"]:
                yield gate, str(record[section]["findings"][0])


def _planted(fault: Fault | None, scenario: Scenario, backend: Backend | None = None) -> TransferEngine:
    engine = scenario.engine(backend)
    if fault is not None:
        plant(fault, engine)
    return engine


def plant(fault: Fault, engine: TransferEngine) -> None:
    """Plants a fault in an engine; ``engine.undo()`` takes it back."""
    resolve(fault.plant)(engine)


def _identity(engine: TransferEngine) -> Iterable[tuple[str, str]]:
    """Every copy of a scale is the declared one."""
    for name, layer in engine.kvqual_layers().items():
        for which in ("k", "v"):
            held, declared = getattr(layer, f"_{which}_scale_float"), getattr(layer, f"{which}_scale_declared")
            if held != declared:
                yield "identity", f"{name}: {which.upper()} scale is {held}, expected {declared}"


def _run(engine: TransferEngine, scenario: Scenario, turn: Turn, *, dispatch: bool = False) -> _Log:
    """Drives an engine without a window; every request is finished and every prefix forgotten after it."""
    with _Log(engine, dispatch=dispatch) as log:
        scenario.drive(engine, turn)
    for request in list(engine.requests):
        engine.finish(request)
    engine.forget_prefixes()
    engine.host_store.clear()
    return log


def _repeated(
    engine: TransferEngine, scenario: Scenario, original: Mapping[tuple[str, str, int], torch.Tensor]
) -> Iterable[tuple[str, str]]:
    """The same requests again, with the rows of each step in another order and as they were: the same bits."""
    for name, turn in (("rotated", _rotated), ("original-again", _forward)):
        repeated = _run(engine, scenario, turn).rows
        for key, output in original.items():
            other = repeated.get(key)
            if other is None or not torch.equal(output.view(torch.int16), other.view(torch.int16)):
                layer, request, start = key
                yield "determinism", f"{layer}: request {request} differs from position {start} on in run {name}"
                break


def _dispatch(readings: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    """Every layer ran the declared kernels and is of the declared class, in each reading."""
    for reading in readings:
        for name, layer in reading.items():
            if layer["kernels"] and not set(layer["kernels"]) >= _KERNELS:
                missing = ", ".join(sorted(_KERNELS - set(layer["kernels"])))
                yield "dispatch", f"{name}: {missing} did not run"
            if layer["impl"] != f"{Impl.__module__}.{Impl.__qualname__}":
                yield "dispatch", f"{name}: the implementation is {layer['impl']}"


class _Log:
    """Keeps what each request was given in each step; reads the kernels of some steps, early and late."""

    def __init__(self, engine: TransferEngine, *, dispatch: bool) -> None:
        self.rows: dict[tuple[str, str, int], torch.Tensor] = {}
        self.readings: list[Mapping[str, Any]] = []
        self._engine = engine
        self._dispatch = dispatch
        self._steps = 0
        self._order: list[tuple[str, int, int]] = []
        self._stack = ExitStack()

    def __enter__(self) -> _Log:
        engine = self._engine
        step, prepare = engine.step, engine.prepare

        def stepping(batch: Sequence[Any], **named: Any) -> Any:
            self._steps += 1
            reader = DispatchReader(engine.kvqual_layers()) if self._dispatch and self._steps in _READ_STEPS else None
            if reader is not None:
                reader.start()
            answered = step(batch, **named)
            if reader is not None:
                self.readings.append(reader.finish())
            first = 0
            for name, start, count in self._order:
                for layer, output in engine.outputs.items():
                    self.rows[layer, name, start] = output[first : first + count].clone()
                first += count
            return answered

        def preparing(schedule: Mapping[str, int], *args: Any) -> Any:
            self._order = [(name, engine.requests[name].computed, schedule[name]) for name in engine.runner.names]
            return prepare(schedule, *args)

        self._stack.enter_context(held_as(engine, step=stepping, prepare=preparing))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def cells(faults: Iterable[Fault] = tuple(FAULTS.values())) -> list[Cell]:
    """Runs each fault that can be planted in the transfer engine."""
    return [
        Cell(fault=fault, findings=run(fault, SCENARIOS[fault.scenario]))
        for fault in faults
        if "transfer" in fault.where
    ]
