"""Counting what an oracle checked and what it objects to."""

from __future__ import annotations

from dataclasses import dataclass, field

KEPT_FINDINGS = 40
"""How many findings are kept in words. All are counted."""


@dataclass(slots=True)
class Tally:
    """Counts of one oracle over one window of steps.

    ``counts`` maps what was checked (``cells_checked``, ``rows_checked``) to how often. ``findings`` keeps the first
    :data:`KEPT_FINDINGS` objections in words; ``findings_total`` counts all of them, ``kinds`` by kind.
    """

    counts: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    findings_total: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    def checked(self, what: str, number: int) -> None:
        """Adds ``number`` to the count of ``what``."""
        self.counts[what] = self.counts.get(what, 0) + int(number)

    def find(self, kind: str, text: str, number: int = 1) -> None:
        """Records ``number`` objections of one kind (a stable word such as ``wrong-cell``) that one line describes."""
        if number <= 0:
            return
        self.findings_total += int(number)
        self.kinds[kind] = self.kinds.get(kind, 0) + int(number)
        if len(self.findings) < KEPT_FINDINGS:
            self.findings.append(text)

    def to_dict(self) -> dict[str, object]:
        """A JSON-ready mapping: the counts, ``findings``, ``findings_total`` and ``kinds``."""
        return {
            **self.counts,
            "findings": list(self.findings),
            "findings_total": self.findings_total,
            "kinds": dict(self.kinds),
        }
