"""A scope and a small attempt, for tests of what reads and writes evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pytest_kvqual.evidence.bundle import Bundle
from pytest_kvqual.evidence.records import Scope

SCOPE = Scope(lock="a" * 64, arm="candidate", length=1024, cache_bytes=4096, engine="b" * 64)
RECORDS: tuple[dict[str, object], ...] = tuple(
    {"id": f"doc-{index:02d}", "index": index, "body": f'{{"n": {index}, "text": "é\\n"}}'} for index in range(3)
)


def write_attempt(
    root: Path, *, scope: Scope = SCOPE, prefix: str = "", outcome: Literal["complete", "failed", "unfinished"]
) -> Path:
    """Write an attempt with two documents and two streams, one of them by another hand, and return its folder."""
    bundle = Bundle.create(root, scope, prefix=prefix)
    bundle.write("identity.json", {"rank": 0, "scales": [0.5, 0.25]})
    with bundle.stream("nll.jsonl") as stream:
        for record in RECORDS:
            stream.append(record)
    (bundle.path / "reference.jsonl").write_bytes(b'{"id": "r0", "token_ids": [1, 2]}\n')
    bundle.seal("reference.jsonl")
    bundle.write("oracle.json", {"healthy": []})
    if outcome == "complete":
        bundle.complete()
    elif outcome == "failed":
        bundle.fail("the server died")
    return bundle.path
