"""What all judges share: collecting objections under numbered rules, and drawing one conclusion from them.

1. The gate's null did not pass: ``INCONCLUSIVE``. The instrument may cry wolf, so its objections do not count.
2. Otherwise an objection to the evidence: ``FAIL``.
3. Otherwise a seeded fault was missed, or none was seeded: ``INCONCLUSIVE``. The instrument may be blind, so its
   silence does not count.
4. Otherwise a gap in the evidence (missing, malformed, of an unknown schema): ``INCONCLUSIVE``.
5. Otherwise ``PASS``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict


@dataclass(kw_only=True, slots=True)
class Objections:
    """Objections (``found``) and gaps (``missing``) of one body of evidence, as (rule number, one line)."""

    found: list[tuple[int, str]] = field(default_factory=list)
    missing: list[tuple[int, str]] = field(default_factory=list)

    def find(self, rule: int, text: str) -> None:
        """The evidence shows that the rule is broken."""
        self.found.append((rule, text))

    def gap(self, rule: int, text: str) -> None:
        """The evidence cannot show whether the rule holds."""
        self.missing.append((rule, text))

    @contextmanager
    def reading(self, rule: int) -> Iterator[None]:
        """Turn evidence that cannot be read into a gap; a judge never raises on what it is given."""
        try:
            yield
        except EvidenceError as error:
            self.gap(rule, str(error))
        except OverflowError as error:
            # An integer beyond float64 is no measurement either.
            self.gap(rule, f"a number out of range: {error}")

    def add(self, other: Objections) -> None:
        """Take over everything that ``other`` holds."""
        self.found.extend(other.found)
        self.missing.extend(other.missing)

    def rules(self) -> frozenset[int]:
        """The rules with an objection."""
        return frozenset(rule for rule, _ in self.found)

    def __bool__(self) -> bool:
        return bool(self.found or self.missing)

    def lines(self) -> tuple[str, ...]:
        """One line each, objections first: ``rule N: ...``."""
        return tuple(f"rule {rule}: {text}" for rule, text in (*self.found, *self.missing))

    def first(self) -> str:
        """The most important line; empty when there is none."""
        return next(iter(self.lines()), "")


def null_check(objections: Objections, figure: str) -> Check:
    """The gate's null: passed when nothing was objected to and nothing is missing."""
    return Check(passed=not objections, figure=objections.first() or figure)


def conclude(
    gate: str,
    *,
    figure: str,
    objections: Objections,
    null: Check | None,
    poison: Sequence[Poison],
    details: Mapping[str, object],
    null_objections: Objections | None = None,
) -> Verdict:
    """The verdict of a gate by the rules in this module's docstring.

    ``figure`` is the deciding line of a gate whose own evidence is in order; otherwise the first finding decides.
    """
    lines = list(objections.lines())
    alarm: list[str] = []
    if null is None:
        alarm.append("null: no evidence of the control against itself")
    elif not null.passed:
        alarm.extend(f"null: {line}" for line in (null_objections.lines() if null_objections else (null.figure,)))
    blind: list[str] = []
    if not poison:
        blind.append("poison: no seeded fault was run against this gate")
    blind.extend(f"poison: '{fault.fault}' was not caught: {fault.figure}" for fault in poison if not fault.caught)
    # The null says that the gate does not cry wolf, the poison that it sees. A finding needs the first alone: a planted
    # fault can cancel the very fault that the arm has (K and V swapped twice).
    if alarm:
        outcome, findings = Outcome.INCONCLUSIVE, (*alarm, *blind, *lines)
    elif objections.found:
        outcome, findings = Outcome.FAIL, (*lines, *blind)
    elif blind or objections.missing:
        outcome, findings = Outcome.INCONCLUSIVE, (*blind, *lines)
    else:
        outcome, findings = Outcome.PASS, ()
    return Verdict(
        gate=gate,
        outcome=outcome,
        figure=figure if outcome is Outcome.PASS or not findings else findings[0],
        findings=findings,
        null=null,
        poison=tuple(poison),
        details=details,
    )


def complete_poison(poison: Sequence[Poison], faults: Sequence[str]) -> tuple[Poison, ...]:
    """The seeded faults that were run, and each of ``faults`` that was not, as a miss; a fault run twice is a miss."""
    counts = Counter(fault.fault for fault in poison)
    seen: set[str] = set()
    result = []
    for fault in poison:
        if fault.fault in seen:
            continue
        seen.add(fault.fault)
        twice = counts[fault.fault] > 1
        result.append(
            Poison(fault=fault.fault, caught=False, figure=f"found {counts[fault.fault]} records, expected 1")
            if twice
            else fault
        )
    result.extend(
        Poison(fault=name, caught=False, figure="it was not run") for name in dict.fromkeys(faults) if name not in seen
    )
    return tuple(result)


def spelled(value: float) -> float | str:
    """A number for a record: itself when finite, else the word (``nan``, ``inf``, ``-inf``); JSON has none of them."""
    return value if math.isfinite(value) else str(value)
