"""What a run directory holds, as plain records: scopes, gates, the newest receipt of each, the frozen study, the audit.

Reading is lenient where the rest of the project is strict: a study of an older form, a damaged receipt or a file that
is gone is said, and the rest is shown. Nothing here is a verdict; outcomes are those that receipts state.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pytest_kvqual._canonical import sha256_bytes
from pytest_kvqual.errors import ReceiptError
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.judge.verdict import Outcome
from pytest_kvqual.receipt.statement import Receipt
from pytest_kvqual.receipt.write import DamagedReceipt, read_all
from pytest_kvqual.report.gate.evidence import Evidence

Said = Literal["PASS", "FAIL", "INCONCLUSIVE", "REFUSED", "DAMAGED", "NO RECEIPT", "NOT ASKED", "PLANNED"]
"""What stands in the place of a gate's outcome: the receipt's word, or why there is none."""

TIMING: Final = ("fidelity", "trial", "superiority")
"""The gates of timing, for a run directory whose study cannot be read."""

_LARGEST: Final = 64 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedGate:
    """One gate of the frozen study."""

    name: str
    required: bool
    timing: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Frozen:
    """The copy of the frozen study in the run directory. ``why`` is one line where it cannot be read or was changed.

    ``format`` is the model's, empty where the study has one alone.
    """

    lock: str
    name: str
    format: str
    platform: str
    model: str
    engine: str
    schedule: str
    roles: Mapping[str, str]
    gates: tuple[PlannedGate, ...]
    tables: Mapping[str, object] = field(repr=False)
    folder: Path | None
    files: Mapping[str, str] = field(repr=False)
    why: str

    def table(self, *path: str) -> Mapping[str, object]:
        """A table of the declaration; empty where there is none."""
        found: object = self.tables
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def data(self, name: str) -> bytes | None:
        """A file of the study with the digest that the lock names; None where it is missing or changed."""
        if self.folder is None or name not in self.files:
            return None
        data = _bytes(self.folder / name)
        return data if data is not None and sha256_bytes(data) == self.files[name] else None


@dataclass(frozen=True, kw_only=True, slots=True)
class GateState:
    """One gate of one scope: its newest receipt, and what stands in the place of an outcome.

    ``receipts`` are all of this scope, oldest first; the last one is ``receipt`` unless a newer one is damaged.
    ``note`` is one line, empty where the receipt says all.
    """

    name: str
    order: int
    required: bool
    timing: bool
    said: Said
    receipt: Receipt | None
    receipts: tuple[Receipt, ...]
    damaged: tuple[DamagedReceipt, ...]
    note: str

    @property
    def figure(self) -> str:
        """The line that decided, or why there is none."""
        return self.receipt.figure if self.receipt is not None and not self._hidden else self.note

    @property
    def _hidden(self) -> bool:
        return self.said == "DAMAGED"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopeState:
    """One arm at one length and pool size: the scope of its newest receipts, and each gate of the study."""

    scope: Scope
    prefix: str
    role: str
    study: Frozen
    gates: tuple[GateState, ...]
    others: tuple[str, ...]

    @property
    def folder(self) -> str:
        """The name of its folders of evidence and receipts."""
        return folder_of(self.prefix, self.scope.arm, self.scope)

    @property
    def asked(self) -> tuple[GateState, ...]:
        """The gates that count for the headline: those required before timing, and any that has a receipt."""
        return tuple(it for it in self.gates if (it.required and not it.timing) or it.receipt or it.damaged)

    def gate(self, name: str) -> GateState | None:
        """A gate by name."""
        return next((it for it in self.gates if it.name == name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditState:
    """The statement of an audit that lies in the run directory, and whether it is of the receipts that lie there now.

    ``why`` is one line where it cannot be read. ``other`` names receipts that it read and that have changed since, or
    that are newer than it.
    """

    result: str
    verdict: str
    timing: str
    verified: str
    version: str
    arm: str
    length: int | None
    lock: str
    findings: tuple[str, ...]
    notes: tuple[str, ...]
    checks: tuple[tuple[int, str, int, int], ...]
    read: Mapping[str, str] = field(repr=False)
    other: tuple[str, ...]
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """A run directory."""

    name: str
    prefix: str
    scopes: tuple[ScopeState, ...]
    astray: tuple[DamagedReceipt, ...]
    audit: AuditState | None
    evidence: Evidence = field(repr=False)


def read_run(run_dir: Path, *, prefix: str = "") -> RunState:
    """What the run directory holds under a prefix.

    Raises:
        ReceiptError: There is no receipt, or their folder cannot be read.
    """
    found = read_all(run_dir, prefix=prefix)
    if not found.receipts and not found.damaged:
        raise ReceiptError(
            f"{run_dir}: found no receipt" + (f" under the prefix '{prefix}'" if prefix else "") + ", expected some",
            advice="name the --run-dir of a run, and its --prefix",
        )
    places: dict[tuple[str, int, int], list[Receipt]] = {}
    for receipt in found.receipts:
        scope = receipt.scope
        places.setdefault((scope.arm, scope.length, scope.cache_bytes), []).append(receipt)
    studies: dict[str, Frozen] = {}
    scopes = []
    for place, receipts in places.items():
        damaged = [it for it in found.damaged if (it.arm, it.length, it.cache_bytes) == place]
        scope = _newest(receipts)
        if scope.lock not in studies:
            studies[scope.lock] = read_frozen(run_dir, scope.lock)
        scopes.append(_scope(scope, prefix, studies[scope.lock], receipts, damaged))
    scopes.sort(key=lambda it: (it.role != "candidate", it.scope.length, it.scope.cache_bytes, it.scope.arm))
    return RunState(
        name=run_dir.absolute().name,
        prefix=prefix,
        scopes=tuple(scopes),
        astray=tuple(it for it in found.damaged if (it.arm, it.length, it.cache_bytes) not in places),
        audit=_audit(run_dir, found.receipts),
        evidence=Evidence(run_dir),
    )


def folder_of(prefix: str, arm: str, scope: Scope) -> str:
    """The name of an arm's folders at the length and pool size of a scope."""
    return f"{prefix}{arm}-{scope.length}-{scope.cache_bytes}"


def _newest(receipts: Sequence[Receipt]) -> Scope:
    """The scope of the newest receipt of the first gate that has any: later gates of the same run are of the same."""
    first = min(receipt.order for receipt in receipts)
    return max((it for it in receipts if it.order == first), key=lambda it: it.attempt).scope


def _scope(
    scope: Scope, prefix: str, study: Frozen, receipts: Sequence[Receipt], damaged: Sequence[DamagedReceipt]
) -> ScopeState:
    own = [receipt for receipt in receipts if receipt.scope == scope]
    others = [receipt for receipt in receipts if receipt.scope != scope]
    planned = {gate.name: (place, gate) for place, gate in enumerate(study.gates, start=1)}
    names = dict.fromkeys([*planned, *(it.gate for it in sorted(own, key=lambda it: it.order))])
    names.update(dict.fromkeys(it.gate for it in damaged if it.gate))
    gates = []
    for name in names:
        place, plan = planned.get(name, (0, None))
        mine = sorted((it for it in own if it.gate == name), key=lambda it: it.attempt)
        broken = tuple(sorted((it for it in damaged if it.gate == name), key=lambda it: it.attempt))
        receipt = mine[-1] if mine else None
        timing = plan.timing if plan is not None else name in TIMING
        required = plan.required if plan is not None else not timing
        elsewhere = [it for it in others if it.gate == name]
        said, note = _said(receipt, broken, elsewhere, required=required, timing=timing)
        gates.append(
            GateState(
                name=name, order=receipt.order if receipt is not None else place, required=required, timing=timing,
                said=said, receipt=receipt, receipts=tuple(mine), damaged=broken, note=note,
            )
        )  # fmt: skip
    lines = [f"{it.name}: {' '.join(it.scope.difference(scope))}" for it in others]
    return ScopeState(
        scope=scope, prefix=prefix, role=study.roles.get(scope.arm, "unknown"), study=study, gates=tuple(gates),
        others=tuple(lines),
    )  # fmt: skip


def _said(
    receipt: Receipt | None,
    damaged: Sequence[DamagedReceipt],
    elsewhere: Sequence[Receipt],
    *,
    required: bool,
    timing: bool,
) -> tuple[Said, str]:
    newest = receipt.attempt if receipt is not None else 0
    broken = [it for it in damaged if it.attempt >= newest]
    if broken:
        return "DAMAGED", f"its newest receipt is damaged: {broken[-1].name}: {broken[-1].reason}"
    if receipt is not None:
        return receipt.outcome.value, ""
    if elsewhere:
        return "NO RECEIPT", f"no receipt in this scope; {elsewhere[-1].name} is of another"
    if not required:
        return "PLANNED", "declared, not built yet"
    return ("NOT ASKED", "not asked for in this run") if timing else ("NO RECEIPT", "found no receipt, expected one")


# -- the frozen study --------------------------------------------------------------------------------------------------


def read_frozen(run_dir: Path, lock: str) -> Frozen:
    """The study that a lock names, from its copy in the run directory; what cannot be read is left empty, and said."""
    folder = run_dir / "study" / lock
    data = _bytes(folder / "lock.json")
    if data is None:
        return _unknown(lock, f"found no study/{lock[:12]}…/lock.json: gates and thresholds are those of the receipts")
    if sha256_bytes(data) != lock:
        return _unknown(lock, f"study/{lock[:12]}…/lock.json was changed: found sha256 {sha256_bytes(data)}")
    locked = _mapping(_json(data))
    files = _mapping(locked.get("files"))
    digests = {name: value for name, value in files.items() if isinstance(value, str)}
    text = _bytes(folder / "study.toml")
    if text is None or sha256_bytes(text) != digests.get("study.toml"):
        return _unknown(lock, f"study/{lock[:12]}…/study.toml is missing or was changed")
    try:
        tables = tomllib.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return _unknown(lock, f"study/{lock[:12]}…/study.toml cannot be read: {error}")
    engine = _mapping(tables.get("engine"))
    gates = [
        PlannedGate(
            name=name,
            required=_mapping(table).get("state") == "required",
            timing=_mapping(table).get("timing") is True or name in TIMING,
        )
        for name, table in _mapping(tables.get("gates")).items()
    ]
    return Frozen(
        lock=lock,
        name=_text(tables.get("name")),
        format=_text(locked.get("format")),
        platform=_text(tables.get("platform")),
        model=_text(_mapping(tables.get("model")).get("name")),
        engine=f"{_text(engine.get('distribution'))} {_text(engine.get('version'))}".strip(),
        schedule=_text(tables.get("schedule")),
        roles={name: _text(_mapping(arm).get("role")) for name, arm in _mapping(tables.get("arms")).items()},
        gates=tuple(gates),
        tables=tables,
        folder=folder,
        files=digests,
        why="",
    )


def _unknown(lock: str, why: str) -> Frozen:
    return Frozen(
        lock=lock, name="", format="", platform="", model="", engine="", schedule="", roles={}, gates=(), tables={},
        folder=None, files={}, why=why,
    )  # fmt: skip


# -- the audit ---------------------------------------------------------------------------------------------------------


def _audit(run_dir: Path, receipts: Sequence[Receipt]) -> AuditState | None:
    path = run_dir / "audit.json"
    if not path.exists() and not path.is_symlink():
        return None
    data = _bytes(path)
    predicate = _mapping(_mapping(_json(data)).get("predicate")) if data is not None else {}
    own = _mapping(predicate.get("pytest_kvqual_audit"))
    if not own or not isinstance(predicate.get("verificationResult"), str):
        return _no_audit("audit.json cannot be read as the statement of an audit")
    read = {
        _text(_mapping(it).get("uri")): _text(_mapping(_mapping(it).get("digest")).get("sha256"))
        for it in _sequence(predicate.get("inputAttestations"))
    }
    scope = _mapping(own.get("scope"))
    length = scope.get("length")
    policy = _text(_mapping(_mapping(predicate.get("policy")).get("digest")).get("sha256"))
    now = {receipt.name: receipt.sha256 for receipt in receipts}
    changed = [f"{name} is missing or has changed since" for name, sha256 in read.items() if now.get(name) != sha256]
    gates = {(it.scope, it.gate) for it in receipts if it.name in read}
    newest: dict[tuple[Scope, str], Receipt] = {}
    for receipt in sorted(receipts, key=lambda it: it.attempt):
        newest[receipt.scope, receipt.gate] = receipt
    audited = {scope for scope, _ in gates}
    changed += [
        f"{it.name} was not read by it" for it in newest.values() if it.scope in audited and it.name not in read
    ]
    return AuditState(
        result=_text(predicate.get("verificationResult")),
        verdict=_text(own.get("verdict")),
        timing=_text(own.get("timing")),
        verified=_text(predicate.get("timeVerified")),
        version=_text(_mapping(_mapping(predicate.get("verifier")).get("version")).get("audit")),
        arm=_text(scope.get("arm")),
        length=length if isinstance(length, int) else None,
        lock=policy,
        findings=tuple(_finding(it) for it in _sequence(own.get("findings"))),
        notes=tuple(_text(it) for it in _sequence(own.get("notes"))),
        checks=tuple(_check(_mapping(it)) for it in _sequence(own.get("checks"))),
        read=read,
        other=tuple(changed),
        why="",
    )


def _no_audit(why: str) -> AuditState:
    return AuditState(
        result="", verdict="", timing="", verified="", version="", arm="", length=None, lock="", findings=(), notes=(),
        checks=(), read={}, other=(), why=why,
    )  # fmt: skip


def _finding(value: object) -> str:
    table = _mapping(value)
    if not table:
        return _text(value)
    return f"check {table.get('check')}: {_text(table.get('where'))}: {_text(table.get('text'))}"


def _check(table: Mapping[str, object]) -> tuple[int, str, int, int]:
    return (
        _whole(table.get("number")),
        _text(table.get("name")),
        _whole(table.get("looked_at")),
        _whole(table.get("findings")),
    )


# -- plain values ------------------------------------------------------------------------------------------------------


def _bytes(path: Path) -> bytes | None:
    """The bytes of a plain file of moderate size; None of anything else."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        return path.read_bytes()
    except OSError:
        return None


def _json(data: bytes) -> object:
    try:
        found: object = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def passes(gate: GateState) -> bool:
    """Whether its receipt, as written, says PASS."""
    return gate.said == Outcome.PASS.value
