"""The numbered checks of the audit. The numbers are stable: one is never given to another meaning.

 1. Run directory and JSON form: plain files and folders only where evidence, receipts and study are read, none astray,
    and every document in the canonical, strict form in which it was written.
 2. Manifests: each attempt's manifest is chained, every sealed file has the digest and the size of its line, and the
    attempts are numbered without a gap.
 3. Schema versions: every document is of a version that is known here.
 4. Lock and fixtures: the lock is the one that the receipts name, every study file in it has its digest, and each panel
    has the task, length, tokenizer and number of items that the study declares.
 5. Scope: receipts and attempts are of one lock, length and pool size, and per arm of one engine; the in-process
    reference ran with the served arm's settings.
 6. Receipts: own digest, form, numbers without a gap, agreement with themselves, order and chain.
 7. Evidence: what the newest receipts name is sealed in attempts of the right arms with the digest that is named, and
    is what the gate needs.
 8. Teacher registration: every returned token of a forced document is its target; every prompt came back as sent.
 9. Targets and cached decode steps: all are there, with finite log-probabilities, at most 0 and above the clamp.
10. Parser decisions: the audit's own parser comes to the same answers, question by question.
11. Records: each item of a capture once, in order, nothing twice, missing or extra.
12. Bounds and figures: outcome, figure, null, poison and every number of a receipt are what follows from the records.
13. Effective settings: the arms differ only where the study says.
14. GSM8K: the same panel in all arms, made of the test set that the study names.
15. Controls and null: the study's controls, the null captured twice, and no capture copied from another.
16. Timing: none without every gate above it.
17. Recordings: each recording of a timed load is consistent in itself and with its trace (``audit/verify.py``).
18. Timing plan: the frozen plan follows from the study's rules and traces, is balanced, and can be significant.
19. Timing verdicts: fidelity, each trial and superiority follow from the recordings.

What check 13 can see: what each worker observed of itself (``identity.json``: backend and KV format of each layer,
block size, pool, scales, versions of distributions, the settings after every default), what was read again after the
captures (``identity-after.json``, ``dispatch-after.json``), the engine's arguments as the server printed them (the line
``non-default args`` of ``server.log``) and as the in-process reference was given them (``reference-config.json``). What
it cannot see: environment variables, which no record holds; settings that no worker lists; code that an arm
brings, beyond the names of its functions. Whoever writes the records can make them agree; the audit shows that the
records, the receipts and the figures fit together, not who wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from pytest_kvqual.audit.files import DamagedError, one_line

CHECKS: Final[Mapping[int, str]] = MappingProxyType(
    {
        1: "run directory and JSON form",
        2: "manifests and digests",
        3: "schema versions",
        4: "lock and fixtures",
        5: "scope",
        6: "receipts and their chain",
        7: "evidence named by receipts",
        8: "teacher registration",
        9: "targets and decode steps",
        10: "parser decisions",
        11: "counts, duplicates, extras",
        12: "bounds and figures",
        13: "effective settings",
        14: "gsm8k panel and test set",
        15: "controls, null and copies",
        16: "timing",
        17: "recordings",
        18: "timing plan",
        19: "timing verdicts",
    }
)
"""Each check's number and its meaning in a few words; this module's docstring says it in full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One objection: the number of its check, the file or place, and one line of what was found and expected."""

    check: int
    where: str
    text: str

    def line(self) -> str:
        """``WHERE: TEXT`` in one line."""
        return f"{self.where}: {self.text}" if self.where else self.text


@dataclass(kw_only=True, slots=True)
class Report:
    """What the checks found, in the order in which they found it, and what they could not look at.

    ``seen`` counts what each check looked at: a check that looked at nothing says so.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)
    _known: set[Finding] = field(default_factory=set)

    def find(self, check: int, where: str, text: str) -> None:
        """The check objects; the same objection is kept once."""
        found = Finding(check=check, where=one_line(where), text=one_line(text))
        if found not in self._known:
            self._known.add(found)
            self.findings.append(found)

    def look(self, check: int, count: int = 1) -> None:
        """The check looked at so many things."""
        self.seen[check] = self.seen.get(check, 0) + count

    def note(self, text: str) -> None:
        """Something for the reader that is no objection."""
        line = one_line(text)
        if line not in self.notes:
            self.notes.append(line)

    def of(self, check: int) -> list[Finding]:
        """The findings of one check."""
        return [found for found in self.findings if found.check == check]

    @contextmanager
    def reading(self, check: int, where: str) -> Iterator[None]:
        """Turn whatever damaged content does to the reader into a finding: the audit never ends in a traceback."""
        try:
            yield
        except DamagedError as error:
            self.find(check, where, str(error))
        except OSError as error:
            self.find(check, where, f"cannot be read: {error.strerror or type(error).__name__}")
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # Content of a kind that no check has thought of; the check that met it did not hold.
            self.find(check, where, f"cannot be checked: {type(error).__name__}: {error}")
        except MemoryError:
            self.find(check, where, "cannot be checked: found more than fits into memory")
