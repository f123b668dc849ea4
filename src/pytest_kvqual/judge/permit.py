"""The permit to time. It exists only where every gate above the timing gate has a standing PASS receipt.

A pilot, which explores and decides nothing, has a permit of its own kind (:func:`grant_pilot`).

``capture.timing`` takes a :class:`TimingPermit` and writes its ``judgment`` into each timing record; the audit computes
the judgment again. Calling the class raises, and so do copying, pickling and subclassing: the only way to one is
:func:`grant`. (A determined caller can still cheat in Python; the digest in the records then does not match.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, final

from pytest_kvqual._canonical import digest
from pytest_kvqual.errors import RefusedError
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.judge.sequence import DamagedView, EvidenceDigests, ReceiptView, standing
from pytest_kvqual.study.model import Study


class _NoPublicConstructor(type):
    """A class that only this module can instantiate; as trio's, because a permission must not be made by its holder."""

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"{cls.__name__} has no public constructor: a permit is granted by judge.permit.grant")

    def _create(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


@final
class TimingPermit(metaclass=_NoPublicConstructor):
    """Permission to enter one timing gate in one scope. Immutable.

    ``judgment`` is the SHA-256 of the canonical document ``{"gate", "receipts", "scope", "study"}``, ``receipts`` being
    gate -> SHA-256 of each receipt that the permit rests on.
    """

    __slots__ = ("_gate", "_judgment", "_receipts", "_scope")
    _gate: str
    _scope: Scope
    _receipts: Mapping[str, str]
    _judgment: str

    def __init__(self, *, gate: str, scope: Scope, receipts: Mapping[str, str], judgment: str) -> None:
        for name, value in (
            ("_gate", gate),
            ("_scope", scope),
            ("_receipts", MappingProxyType(dict(receipts))),
            ("_judgment", judgment),
        ):
            object.__setattr__(self, name, value)

    @property
    def gate(self) -> str:
        """The timing gate that may be entered."""
        return self._gate

    @property
    def scope(self) -> Scope:
        """The scope that was judged."""
        return self._scope

    @property
    def receipts(self) -> Mapping[str, str]:
        """The SHA-256 of each receipt that the permit rests on, by gate."""
        return self._receipts

    @property
    def judgment(self) -> str:
        """The SHA-256 of the judgment; goes into each timing record."""
        return self._judgment

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a permit cannot be changed: {name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a permit cannot be changed: {name}")

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("a permit cannot be subclassed")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a permit cannot be copied or pickled")

    def __repr__(self) -> str:
        return f"<TimingPermit {self._gate} {self._judgment[:12]}>"


PILOT = "pilot"
"""The name under which a permit for an exploratory measurement goes; no gate has it."""

_AFTER_PILOT = "nll"
"""A pilot rests on the gates above this one: all that say that the arm works, none that scores it."""


def judgment_of(study: Study, gate: str, scope: Scope, receipts: Mapping[str, str]) -> str:
    """The digest of a judgment; ``receipts`` maps each gate that ``gate`` rests on to its receipt's SHA-256."""
    return digest({"study": study.name, "gate": gate, "scope": scope.to_dict(), "receipts": dict(receipts)})


def grant(
    study: Study,
    gate: str,
    receipts: Sequence[ReceiptView],
    scope: Scope,
    *,
    implementation: str,
    digests: EvidenceDigests,
    damaged: Sequence[DamagedView] = (),
) -> TimingPermit:
    """The permit for a timing gate, after judging the receipts anew (:func:`~pytest_kvqual.judge.sequence.standing`).

    Raises:
        RefusedError: ``gate`` is unknown or no timing gate; or a receipt is missing, failed or stale: one line that
            names each and why.
    """
    found = standing(study, gate, receipts, scope, implementation=implementation, digests=digests, damaged=damaged)
    plan = next(plan for plan in study.gates if plan.name == gate)
    if not plan.timing:
        raise RefusedError(f"found the gate '{gate}', which times nothing, expected a timing gate")
    chain = found.requires()
    if not chain:
        raise RefusedError(f"{gate}: found no gate above it, expected at least one: nothing was qualified")
    permit: TimingPermit = TimingPermit._create(
        gate=gate, scope=scope, receipts=chain, judgment=judgment_of(study, gate, scope, chain)
    )
    return permit


def grant_pilot(
    study: Study,
    receipts: Sequence[ReceiptView],
    scope: Scope,
    *,
    implementation: str,
    digests: EvidenceDigests,
    damaged: Sequence[DamagedView] = (),
) -> TimingPermit:
    """The permit for an exploratory measurement, which no timing gate accepts: every gate through parity stands.

    Raises:
        RefusedError: A receipt of them is missing, failed or stale, or the study has none of them.
    """
    found = standing(
        study,
        _AFTER_PILOT,
        receipts,
        scope,
        implementation=implementation,
        digests=digests,
        damaged=damaged,
        whole=True,
    )
    chain = found.requires()
    if not chain:
        raise RefusedError("pilot: found no gate through parity, expected at least one: nothing was qualified")
    permit: TimingPermit = TimingPermit._create(
        gate=PILOT, scope=scope, receipts=chain, judgment=judgment_of(study, PILOT, scope, chain)
    )
    return permit
