"""The receipt of one gate's verdict: an in-toto Statement v1, built and parsed.

``docs/receipts.md`` describes the predicate field by field. A receipt's identity is the SHA-256 of its bytes; the bytes
are kept with the parsed view. It also carries the digest of its own content, so that a file of its own says whether a
byte of it was changed.

History of the predicate: v1, the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pytest_kvqual._canonical import digest, pretty_bytes, sha256_bytes
from pytest_kvqual._decode import Table, parse_json
from pytest_kvqual.errors import EvidenceError, ReceiptError
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:pytest-kvqual:gate-receipt:v1"

_STATEMENT = ("_type", "subject", "predicateType", "predicate")
_PREDICATE = (
    "result",
    "configuration",
    "passedTests",
    "warnedTests",
    "failedTests",
    "gate",
    "verdict",
    "null",
    "poison",
    "scope",
    "implementation",
    "evidence",
    "requires",
    "attempt",
    "details",
    "content",
)
_LOCK = "lock.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One receipt, as it was written.

    ``sha256`` is that of ``data``, its bytes. ``order`` is the gate's place in the study, from 1. ``evidence`` maps
    ``BUNDLE/attempt-N/FILE`` to its SHA-256, ``requires`` each gate that this one rests on to its receipt's SHA-256.
    ``name`` says where it lies.
    """

    name: str
    order: int
    verdict: Verdict
    scope: Scope
    implementation: str
    evidence: Mapping[str, str]
    requires: Mapping[str, str]
    attempt: int
    sha256: str
    data: bytes = field(repr=False)

    @property
    def gate(self) -> str:
        """The gate's name."""
        return self.verdict.gate

    @property
    def outcome(self) -> Outcome:
        """What the gate concluded."""
        return self.verdict.outcome

    @property
    def figure(self) -> str:
        """The one line that decided."""
        return self.verdict.figure


def build(
    verdict: Verdict,
    scope: Scope,
    *,
    order: int,
    evidence: Mapping[str, str],
    requires: Mapping[str, str],
    implementation: str,
) -> dict[str, object]:
    """The statement of a verdict, not numbered yet (:func:`pytest_kvqual.receipt.write.write` does that).

    Args:
        verdict: The verdict.
        scope: What it is about.
        order: The gate's place in the study, from 1.
        evidence: The SHA-256 of each evidence file it rests on, by ``BUNDLE/attempt-N/FILE``.
        requires: The SHA-256 of the receipt of each gate that it rests on, by gate.
        implementation: The SHA-256 of the implementation that judged.

    Raises:
        ReceiptError: A PASS without evidence; or a detail that JSON cannot hold (NaN, another type).
    """
    passed = verdict.outcome is Outcome.PASS
    if passed and not evidence:
        raise ReceiptError(f"{verdict.gate}: found a PASS that names no evidence, expected its files")
    predicate: dict[str, object] = {
        "result": "PASSED" if passed else "FAILED",
        "configuration": [_descriptor(_LOCK, scope.lock)],
        "passedTests": [verdict.gate] if passed else [],
        "warnedTests": [],
        "failedTests": [] if passed else [verdict.gate],
        "gate": {"name": verdict.gate, "order": order},
        "verdict": {
            "outcome": verdict.outcome.value,
            "figure": verdict.figure,
            "findings": list(verdict.findings),
        },
        "null": _null(verdict.null),
        "poison": {
            "seeded": verdict.faults_seeded,
            "caught": verdict.faults_caught,
            "faults": [
                {"fault": fault.fault, "caught": fault.caught, "figure": fault.figure} for fault in verdict.poison
            ],
        },
        "scope": scope.to_dict(),
        "implementation": {"sha256": implementation},
        "evidence": [_descriptor(name, evidence[name]) for name in sorted(evidence)],
        "requires": dict(requires),
        "details": verdict.details,
    }
    statement: dict[str, object] = {
        "_type": STATEMENT_TYPE,
        "subject": [_descriptor(scope.arm, scope.engine)],
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate,
    }
    try:
        pretty_bytes(statement)
    except EvidenceError as error:
        raise ReceiptError(f"{verdict.gate}: {error}") from error
    return statement


def encode(statement: Mapping[str, object], *, attempt: int) -> bytes:
    """The bytes of a numbered statement: sorted keys, indented by 2, UTF-8, a final newline."""
    predicate = statement.get("predicate")
    if not isinstance(predicate, Mapping):
        raise ReceiptError("found a statement without a predicate, expected one from receipt.statement.build")
    numbered = {**predicate, "attempt": attempt}
    content = digest({**statement, "predicate": numbered})
    return pretty_bytes({**statement, "predicate": {**numbered, "content": content}})


def parse(data: bytes, *, name: str = "receipt") -> Receipt:
    """The receipt in ``data``.

    Raises:
        ReceiptError: The bytes are not those that were written (the digest of the content, or the form, differs), or
            are no JSON; a key is missing, unknown or mistyped; the type or predicate type is another; parts contradict
            each other. The message names the place, after ``name``.
    """
    document = parse_json(data, origin=name, error=ReceiptError)
    outer = Table(document, origin=name, error=ReceiptError, known=_STATEMENT)
    for key, expected in (("_type", STATEMENT_TYPE), ("predicateType", PREDICATE_TYPE)):
        if outer.string(key) != expected:
            outer.fail(key, f"'{outer.string(key)}'", f"'{expected}'")
    table = outer.table("predicate", known=_PREDICATE)
    _check_content(document, table, data, name)
    scope = Scope.from_table(table.table("scope", known=("lock", "arm", "length", "cache_bytes", "engine")))
    verdict = _verdict(table)
    passed = verdict.outcome is Outcome.PASS
    if table.string("result") != ("PASSED" if passed else "FAILED"):
        table.fail("result", f"'{table.string('result')}'", f"the word for {verdict.outcome.value}")
    for key, expected_names in (
        ("passedTests", (verdict.gate,) if passed else ()),
        ("warnedTests", ()),
        ("failedTests", () if passed else (verdict.gate,)),
    ):
        if table.strings(key) != expected_names:
            table.fail(key, str(list(table.strings(key))), str(list(expected_names)))
    if _descriptors(outer, "subject") != {scope.arm: scope.engine}:
        outer.fail("subject", "another subject", f"'{scope.arm}' with the engine's digest of the scope")
    if _descriptors(table, "configuration") != {_LOCK: scope.lock}:
        table.fail("configuration", "another configuration", f"'{_LOCK}' with the lock's digest of the scope")
    evidence = _descriptors(table, "evidence")
    if passed and not evidence:
        table.fail("evidence", "no file", "the files that a PASS rests on")
    return Receipt(
        name=name,
        order=table.table("gate", known=("name", "order")).integer("order", minimum=1),
        verdict=verdict,
        scope=scope,
        implementation=table.table("implementation", known=("sha256",)).sha256("sha256"),
        evidence=MappingProxyType(evidence),
        requires=MappingProxyType(table.sha256_map("requires")),
        attempt=table.integer("attempt", minimum=1),
        sha256=sha256_bytes(data),
        data=data,
    )


def _check_content(document: object, table: Table, data: bytes, name: str) -> None:
    stated = table.sha256("content")
    outer = dict(document) if isinstance(document, dict) else {}
    predicate = {key: value for key, value in outer["predicate"].items() if key != "content"}
    found = digest({**outer, "predicate": predicate})
    advice = "the receipt was changed after it was written: run its gate again"
    if found != stated:
        raise ReceiptError(f"{name}: found content of sha256 {found}, expected {stated}", advice=advice)
    # The digest above is of the content; a changed space or order of keys shows only in the bytes.
    if pretty_bytes(document) != data:
        raise ReceiptError(f"{name}: found bytes in another form than they are written in", advice=advice)


def _verdict(table: Table) -> Verdict:
    gate = table.table("gate", known=("name", "order")).string("name")
    verdict = table.table("verdict", known=("outcome", "figure", "findings"))
    poison = table.table("poison", known=("seeded", "caught", "faults"))
    faults = tuple(
        Poison(fault=entry.string("fault"), caught=entry.boolean("caught"), figure=entry.text("figure"))
        for entry in poison.tables("faults", known=("fault", "caught", "figure"))
    )
    for key, expected in (("seeded", len(faults)), ("caught", sum(fault.caught for fault in faults))):
        if poison.integer(key) != expected:
            poison.fail(key, str(poison.integer(key)), f"{expected}, as listed")
    details = table.raw("details")
    if not isinstance(details, Mapping):
        table.fail("details", type(details).__name__, "a table")
    try:
        return Verdict(
            gate=gate,
            outcome=Outcome(verdict.choice("outcome", tuple(outcome.value for outcome in Outcome))),
            figure=verdict.text("figure"),
            findings=verdict.strings("findings"),
            null=_parsed_null(table),
            poison=faults,
            details=details,
        )
    except ValueError as error:
        table.fail("verdict", str(error), "a verdict that its null and its poison allow")


def _parsed_null(table: Table) -> Check | None:
    null = table.table("null", known=("state", "figure"))
    state, figure = null.choice("state", ("passed", "failed", "absent")), null.text("figure")
    return None if state == "absent" else Check(passed=state == "passed", figure=figure)


def _null(check: Check | None) -> dict[str, object]:
    if check is None:
        return {"state": "absent", "figure": ""}
    return {"state": "passed" if check.passed else "failed", "figure": check.figure}


def _descriptor(name: str, sha256: str) -> dict[str, object]:
    """An in-toto ResourceDescriptor."""
    return {"name": name, "digest": {"sha256": sha256}}


def _descriptors(table: Table, key: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in table.tables(key, known=("name", "digest")):
        name = entry.string("name")
        if name in found:
            entry.fail("name", f"'{name}' twice", "each name once")
        found[name] = entry.table("digest", known=("sha256",)).sha256("sha256")
    return found
