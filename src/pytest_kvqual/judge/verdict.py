"""The verdict of one gate: what a judge returns.

``PASS`` is the only outcome that passes a test. ``INCONCLUSIVE``: the gate's own null or its seeded faults failed, or
its evidence is incomplete. ``REFUSED``: a prerequisite is missing, nothing was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Outcome(str, Enum):
    """What a gate concluded."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    REFUSED = "REFUSED"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The outcome of one part of a gate (its null, say), with the figure that decided it."""

    passed: bool
    figure: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Poison:
    """One seeded fault, and whether this gate's oracle objected to it."""

    fault: str
    caught: bool
    figure: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One gate's conclusion.

    ``figure`` is the one line that decided. ``findings`` are one line each, most important first. ``details`` is
    JSON-serialisable and holds every number the verdict rests on, unrounded.

    Raises:
        ValueError: A PASS without a passed null, with a missed fault, with findings, or without any seeded fault.
    """

    gate: str
    outcome: Outcome
    figure: str
    findings: tuple[str, ...] = ()
    null: Check | None = None
    poison: tuple[Poison, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.outcome is not Outcome.PASS:
            return
        if self.null is None or not self.null.passed:
            raise ValueError(f"{self.gate}: a PASS needs a passed null, found {self.null}")
        if not self.poison or not all(fault.caught for fault in self.poison):
            raise ValueError(f"{self.gate}: a PASS needs every seeded fault caught, found {self.poison}")
        if self.findings:
            raise ValueError(f"{self.gate}: a PASS has no findings, found {self.findings}")

    @property
    def faults_seeded(self) -> int:
        """How many faults were planted against this gate's oracle."""
        return len(self.poison)

    @property
    def faults_caught(self) -> int:
        """How many of them it objected to."""
        return sum(fault.caught for fault in self.poison)
