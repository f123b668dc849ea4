"""The audit's own statement: an in-toto Statement v1 of the shape of a SLSA Verification Summary Attestation.

https://slsa.dev/verification_summary/v1 has the fields ``verifier``, ``timeVerified``, ``resourceUri``, ``policy``,
``inputAttestations``, ``verificationResult``, ``verifiedLevels`` and ``slsaVersion``. What this audit says beyond them
stands under the one key :data:`EXTENSION`. It is not signed: sign it with a tool that signs in-toto Statements.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Final

from pytest_kvqual.audit import VERSION
from pytest_kvqual.audit.auditor import Result
from pytest_kvqual.audit.checks import CHECKS

STATEMENT: Final = "https://in-toto.io/Statement/v1"
PREDICATE: Final = "https://slsa.dev/verification_summary/v1"
VERIFIER: Final = "urn:pytest-kvqual:audit"
EXTENSION: Final = "pytest_kvqual_audit"
SLSA_VERSION: Final = "1.1"
QUALIFIED: Final = "PYTEST_KVQUAL_QUALIFIED"
CONSISTENT: Final = "PYTEST_KVQUAL_GATES_PASSED"
"""The levels that a PASSED audit verifies, the second where the study asked for no quality; of no SLSA track."""


def build(result: Result, *, time: str | None = None) -> dict[str, object]:
    """The statement of an audit, JSON-ready. ``time`` is RFC 3339 in UTC; None for now."""
    scope, passed = result.scope, result.passed
    predicate: dict[str, object] = {
        "verifier": {"id": VERIFIER, "version": {"audit": VERSION, "python": sys.version.split()[0]}},
        "timeVerified": time or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "resourceUri": f"urn:pytest-kvqual:run:{result.folder}",
        "policy": {
            "uri": "urn:pytest-kvqual:lock",
            "digest": {} if scope is None else {"sha256": scope.lock},
        },
        "inputAttestations": [
            {"uri": name, "digest": {"sha256": digest}} for name, digest in sorted(result.inputs.items())
        ],
        "verificationResult": "PASSED" if passed else "FAILED",
        "verifiedLevels": [(QUALIFIED if result.qualifies else CONSISTENT) if passed else "FAILED"],
        "slsaVersion": SLSA_VERSION,
        EXTENSION: {
            "verdict": result.verdict(),
            "timing": result.timing,
            "scope": None
            if scope is None
            else {
                "lock": scope.lock,
                "arm": scope.arm,
                "length": scope.length,
                "cache_bytes": scope.cache_bytes,
                "engine": scope.engine,
            },
            "checks": [
                {
                    "number": number,
                    "name": name,
                    "looked_at": result.report.seen.get(number, 0),
                    "findings": len(result.report.of(number)),
                }
                for number, name in CHECKS.items()
            ],
            "findings": [
                {"check": found.check, "where": found.where, "text": found.text} for found in result.report.findings
            ],
            "gates": [
                {
                    "gate": gate.gate,
                    "required": gate.required,
                    "receipt": gate.receipt,
                    "stored": {"outcome": gate.stored, "figure": gate.figure},
                    "derived": {"outcome": gate.derived, "figure": gate.derived_figure},
                    "how": gate.how,
                    "stands": gate.stands,
                }
                for gate in (*result.gates, *(gate for gate in result.timed if gate.stored))
            ],
            "notes": list(result.report.notes),
        },
    }
    return {
        "_type": STATEMENT,
        "subject": []
        if scope is None
        else [{"name": f"{scope.arm}-{scope.length}-{scope.cache_bytes}", "digest": {"sha256": scope.engine}}],
        "predicateType": PREDICATE,
        "predicate": predicate,
    }


def encode(statement: dict[str, object]) -> bytes:
    """Its bytes: sorted keys, indented by 2, in ASCII, so that any text of a damaged record can be written."""
    return json.dumps(statement, sort_keys=True, ensure_ascii=True, allow_nan=False, indent=2).encode("ascii") + b"\n"
