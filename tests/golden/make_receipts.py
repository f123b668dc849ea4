"""Writes the golden receipts: ``python tests/golden/make_receipts.py``.

Their bytes are the wire format that others sign and audit. A change here is one of the predicate: raise its version.
"""

from __future__ import annotations

from pathlib import Path

from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict
from pytest_kvqual.receipt.statement import build, encode

FOLDER = Path(__file__).parent / "receipts"
SCOPE = Scope(lock="1" * 64, arm="candidate", length=1024, cache_bytes=1 << 30, engine="2" * 64)
EVIDENCE = {
    "native-1024-1073741824/attempt-1/nll.jsonl": "3" * 64,
    "candidate-1024-1073741824/attempt-2/nll.jsonl": "4" * 64,
}
NULL = Check(passed=True, figure="ΔNLL +0.000000, 95 % upper bound +0.000000")
POISON = (
    Poison(
        fault="v-scale-dropped-on-read",
        caught=True,
        figure="ΔNLL +1.203125, 95 % upper bound +1.312500 against 'native'",
    ),
)
FIGURE = "ΔNLL +0.000700, 95 % upper bound +0.001900 < 0.01 nats (against 'native')"
DETAILS: dict[str, object] = {
    "unit": "nats per token",
    "margin": 0.01,
    "mean_nll": {"candidate": 2.2202, "native": 2.2195},
    "delta": {"native": {"documents": 32, "mean": 0.0007, "upper": 0.0019, "by_document": {"doc-00": 1e-17}}},
}


def receipts() -> dict[str, bytes]:
    """Each golden file's name and bytes."""
    verdicts = {
        "pass.json": Verdict(
            gate="nll", outcome=Outcome.PASS, figure=FIGURE, null=NULL, poison=POISON, details=DETAILS
        ),
        "fail.json": Verdict(
            gate="nll",
            outcome=Outcome.FAIL,
            figure="rule 6: ΔNLL +0.012000, 95 % upper bound +0.014000, expected below 0.01 nats, against 'native'",
            findings=(
                "rule 6: ΔNLL +0.012000, 95 % upper bound +0.014000, expected below 0.01 nats, against 'native'",
            ),
            null=NULL,
            poison=POISON,
            details=DETAILS,
        ),
        "refused.json": Verdict(
            gate="nll",
            outcome=Outcome.REFUSED,
            figure="no standing receipt of parity",
            findings=("parity: missing: found no receipt, expected one of this scope",),
        ),
    }
    return {
        name: encode(
            build(
                verdict,
                SCOPE,
                order=8,
                evidence={} if verdict.outcome is Outcome.REFUSED else EVIDENCE,
                requires={} if verdict.outcome is Outcome.REFUSED else {"identity": "5" * 64, "parity": "6" * 64},
                implementation="7" * 64,
            ),
            attempt=1,
        )
        for name, verdict in verdicts.items()
    }


if __name__ == "__main__":
    for name, data in receipts().items():
        (FOLDER / name).write_bytes(data)
