"""The order of the gates, and which receipts count: a pure state machine over what was read from a run directory.

A gate may be decided, and a timing gate entered, only when every gate that it rests on has a standing receipt. Gates
are taken in the study's order; each is settled before the next is looked at. A gate's receipt stands when all of these
hold:

1. The gate has an implementation. A planned gate has none and refuses the timing gates below it; a gate that is not
   timing does not rest on planned ones.
2. There is a receipt of the gate in exactly this scope: lock, arm, length, cache bytes and engine.
3. The receipts of the gate in the scope's folder are numbered from 1 without a gap: none was taken away.
4. The one with the highest number decides, and its bytes are as they were written. An earlier pass never counts.
5. It says PASS.
6. It was judged by this implementation.
7. Each evidence file that it names still has the digest that it names.
8. It rests on exactly the gates above it that are required, and on the receipts of them that stand now.

An arm whose KV format has no declaration cannot pass the gates that need one. The other gates do not rest on those, as
they do not on planned ones; the timing gates, and a pilot, do.

Nothing here reads a file. Receipts, damaged ones included, and the digests of evidence come from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, Protocol, TypeVar

from pytest_kvqual.errors import RefusedError
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.judge.verdict import Outcome
from pytest_kvqual.kv.declarations import NEED_DECLARATION, is_declared
from pytest_kvqual.study.model import GatePlan, Study

Kind = Literal["planned", "missing", "damaged", "failed", "stale"]

EvidenceDigests = Callable[[str], str | None]
"""The SHA-256 that an evidence file (``BUNDLE/attempt-N/FILE``) has now, or None where it is gone or cannot be read."""


class ReceiptView(Protocol):
    """What the order needs of a receipt."""

    @property
    def name(self) -> str:
        """Where it lies."""

    @property
    def gate(self) -> str:
        """The gate's name."""

    @property
    def outcome(self) -> Outcome:
        """What the gate concluded."""

    @property
    def figure(self) -> str:
        """The one line that decided."""

    @property
    def scope(self) -> Scope:
        """What it is about."""

    @property
    def attempt(self) -> int:
        """Its number among the gate's receipts in the folder, from 1."""

    @property
    def sha256(self) -> str:
        """The SHA-256 of its bytes."""

    @property
    def implementation(self) -> str:
        """The SHA-256 of the implementation that judged."""

    @property
    def evidence(self) -> Mapping[str, str]:
        """The SHA-256 of each evidence file it rests on, by ``BUNDLE/attempt-N/FILE``."""

    @property
    def requires(self) -> Mapping[str, str]:
        """The SHA-256 of each receipt it rests on, by gate."""


class DamagedView(Protocol):
    """A receipt file that cannot be trusted."""

    @property
    def name(self) -> str:
        """Where it lies."""

    @property
    def gate(self) -> str:
        """The gate's name."""

    @property
    def arm(self) -> str:
        """The arm in its folder's name."""

    @property
    def length(self) -> int:
        """The length in its folder's name."""

    @property
    def cache_bytes(self) -> int:
        """The cache bytes in its folder's name."""

    @property
    def attempt(self) -> int:
        """Its number among the gate's receipts in the folder, from 1."""

    @property
    def reason(self) -> str:
        """What is wrong with it, in one line."""


R = TypeVar("R", bound=ReceiptView)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why one gate's receipt does not count."""

    gate: str
    kind: Kind
    reason: str

    def line(self) -> str:
        """``gate: kind: reason``."""
        return f"{self.gate}: {self.kind}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What one gate may rest on: the receipts that stand, by gate, and a refusal for each that does not."""

    gate: str
    receipts: Mapping[str, ReceiptView]
    refusals: tuple[Refusal, ...]

    @property
    def complete(self) -> bool:
        """Whether every gate that is needed has a standing receipt."""
        return not self.refusals

    def requires(self) -> dict[str, str]:
        """The chain for a receipt of this gate: gate -> SHA-256 of the standing receipt.

        Raises:
            RefusedError: A receipt does not stand; the message names each.
        """
        self.check()
        return {name: receipt.sha256 for name, receipt in self.receipts.items()}

    def check(self) -> None:
        """Raise :class:`~pytest_kvqual.errors.RefusedError`, in one line that names each refusal, unless complete."""
        if self.refusals:
            lines = "; ".join(refusal.line() for refusal in self.refusals)
            needed = len(self.refusals) + len(self.receipts)
            raise RefusedError(
                f"{self.gate}: found {len(self.receipts)} standing receipts, expected {needed}: {lines}",
                advice="run the gates above it in this scope, in order",
            )


def required_before(study: Study, gate: str, arm: str = "", *, whole: bool = False) -> tuple[str, ...]:
    """The gates that ``gate`` rests on, in the study's order: all above a timing gate, else the required ones above.

    Where the KV format of ``arm`` has no declaration, a gate that does not time rests on no gate that needs one, unless
    ``whole``.

    Raises:
        RefusedError: The study has no such gate.
    """
    plans = {plan.name: plan for plan in study.gates}
    if gate not in plans:
        raise RefusedError(f"found the gate '{gate}', expected one of {', '.join(plans)}")
    timing = plans[gate].timing
    closed = arm in study.arms and not is_declared(study.arms[arm].kv_format) and not whole
    return tuple(
        name
        for name in study.before(gate)
        if timing or (_settled(plans[name]) and not (closed and name in NEED_DECLARATION))
    )


def standing(
    study: Study,
    gate: str,
    receipts: Sequence[ReceiptView],
    scope: Scope,
    *,
    implementation: str,
    digests: EvidenceDigests,
    damaged: Sequence[DamagedView] = (),
    whole: bool = False,
) -> Standing:
    """The receipts that ``gate`` may rest on in this scope, by the rules in this module's docstring.

    To ask whether the receipt of ``gate`` itself still counts, see :func:`own`.

    Args:
        study: The study; its order of gates is the order.
        gate: The gate that is about to be decided or entered.
        receipts: All receipts of the run directory that could be read, of any scope.
        scope: The scope of this run.
        implementation: The SHA-256 of the implementation that would judge now.
        digests: What the evidence files are now.
        damaged: The receipt files that could not be trusted.
        whole: Ask for the gates that need a declaration too, where the arm's KV format has none.

    Raises:
        RefusedError: The study has no such gate.
    """
    plans = {plan.name: plan for plan in study.gates}
    accepted: dict[str, ReceiptView] = {}
    refusals: list[Refusal] = []
    for name in required_before(study, gate, scope.arm, whole=whole):
        found = _settle(
            study,
            plans[name],
            receipts,
            scope,
            accepted,
            implementation=implementation,
            digests=digests,
            damaged=damaged,
        )
        if isinstance(found, Refusal):
            refusals.append(found)
        else:
            accepted[name] = found
    return Standing(gate=gate, receipts=MappingProxyType(accepted), refusals=tuple(refusals))


def own(
    study: Study,
    gate: str,
    receipts: Sequence[R],
    scope: Scope,
    *,
    implementation: str,
    digests: EvidenceDigests,
    damaged: Sequence[DamagedView] = (),
) -> R | Refusal:
    """The standing receipt of ``gate`` itself, or why it has none.

    Raises:
        RefusedError: The study has no such gate.
    """
    above = standing(study, gate, receipts, scope, implementation=implementation, digests=digests, damaged=damaged)
    plan = next(plan for plan in study.gates if plan.name == gate)
    return _settle(
        study, plan, receipts, scope, above.receipts, implementation=implementation, digests=digests, damaged=damaged
    )


def _settle(
    study: Study,
    plan: GatePlan,
    receipts: Sequence[R],
    scope: Scope,
    accepted: Mapping[str, ReceiptView],
    *,
    implementation: str,
    digests: EvidenceDigests,
    damaged: Sequence[DamagedView],
) -> R | Refusal:
    """Rules 1 to 8 for one gate; ``accepted`` holds the standing receipts of the gates above it."""
    gate = plan.name
    # 1.
    if plan.state == "planned":
        return Refusal(gate=gate, kind="planned", reason="the gate is declared and not there yet")
    of_gate = [receipt for receipt in receipts if receipt.gate == gate]
    broken = [item for item in damaged if item.gate == gate and _place(item) == _place(scope)]
    within = [receipt for receipt in of_gate if receipt.scope == scope]
    # 2.
    if not within and not broken:
        return _none_here(gate, of_gate, scope)
    # 3.
    numbers = sorted(
        [receipt.attempt for receipt in of_gate if _place(receipt.scope) == _place(scope)]
        + [item.attempt for item in broken]
    )
    gone = sorted(set(range(1, numbers[-1] + 1)) - set(numbers))
    if gone:
        return Refusal(
            gate=gate, kind="damaged", reason=f"receipt number {gone[0]} is gone, expected numbers without a gap"
        )
    twice = next((number for number, following in pairwise(numbers) if number == following), None)
    if twice is not None:
        return Refusal(gate=gate, kind="damaged", reason=f"found two receipts number {twice}, expected one")
    # 4.
    last_broken = max((item.attempt for item in broken), default=0)
    newer = [receipt for receipt in within if receipt.attempt > last_broken]
    if not newer:
        worst = max(broken, key=lambda item: item.attempt)
        return Refusal(gate=gate, kind="damaged", reason=f"{worst.name}: {worst.reason}")
    latest = max(newer, key=lambda receipt: receipt.attempt)
    # 5.
    if latest.outcome is not Outcome.PASS:
        return Refusal(gate=gate, kind="failed", reason=f"{latest.name} says {latest.outcome.value}: {latest.figure}")
    # 6.
    if latest.implementation != implementation:
        return Refusal(
            gate=gate,
            kind="stale",
            reason=f"{latest.name}: found the implementation {latest.implementation}, expected {implementation}",
        )
    # 7.
    if not latest.evidence:
        return Refusal(gate=gate, kind="damaged", reason=f"{latest.name} names no evidence, expected its files")
    for name, expected in latest.evidence.items():
        now = digests(name)
        if now != expected:
            shown = "no such file" if now is None else f"sha256 {now}"
            return Refusal(
                gate=gate,
                kind="stale",
                reason=f"{latest.name}: evidence {name}: found {shown}, expected sha256 {expected}",
            )
    # 8.
    return _chained(latest, required_before(study, gate, scope.arm), accepted) or latest


def _chained(receipt: ReceiptView, above: Iterable[str], accepted: Mapping[str, ReceiptView]) -> Refusal | None:
    names = tuple(above)
    for name in (*names, *(name for name in receipt.requires if name not in names)):
        rests_on, stands = receipt.requires.get(name), accepted.get(name)
        if name not in names:
            reason = f"rests on a receipt of '{name}', which is not among the gates it needs"
        elif rests_on is None:
            reason = f"rests on no receipt of '{name}', expected the standing one"
        elif stands is None:
            reason = f"rests on a receipt of '{name}', which does not stand"
        elif rests_on != stands.sha256:
            reason = f"rests on the receipt {rests_on} of '{name}', expected {stands.sha256}, the one that stands"
        else:
            continue
        return Refusal(gate=receipt.gate, kind="stale", reason=f"{receipt.name} {reason}")
    return None


def _none_here(gate: str, receipts: Sequence[ReceiptView], scope: Scope) -> Refusal:
    """No receipt of this scope: missing, or stale where there is one of another scope; names what differs."""
    if not receipts:
        return Refusal(gate=gate, kind="missing", reason="found no receipt, expected one of this scope")
    nearest = min(receipts, key=lambda receipt: (len(scope.difference(receipt.scope)), -receipt.attempt))
    return Refusal(
        gate=gate,
        kind="stale",
        reason=f"{nearest.name} is of another scope: {', '.join(scope.difference(nearest.scope))}",
    )


def _place(item: Scope | DamagedView) -> tuple[str, int, int]:
    return (item.arm, item.length, item.cache_bytes)


def _settled(plan: GatePlan) -> bool:
    return plan.state == "required" and not plan.timing
