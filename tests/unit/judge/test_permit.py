"""The permit to time: who can make one, and when."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvqual._canonical import digest
from pytest_kvqual.errors import RefusedError
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.judge.permit import TimingPermit, grant, judgment_of
from pytest_kvqual.judge.verdict import Outcome
from pytest_kvqual.study.model import GatePlan

SCOPE = Scope(lock="1" * 64, arm="candidate", length=1024, cache_bytes=4096, engine="2" * 64)
EVIDENCE = {"b/attempt-1/x.json": "3" * 64}


def study(make: Any) -> Any:
    """Two gates and a timing gate, none planned."""
    plans = [("identity", False), ("nll", False), ("trial", True)]
    return replace(
        make.study(), gates=tuple(GatePlan(name=name, state="required", timing=timing) for name, timing in plans)
    )


def receipt(gate: str, sha256: str, requires: dict[str, str], **changes: Any) -> Any:
    """A receipt that stands, but for ``changes``."""
    values = {
        "name": f"{gate}.json",
        "gate": gate,
        "outcome": Outcome.PASS,
        "figure": "",
        "scope": SCOPE,
        "attempt": 1,
        "sha256": sha256,
        "implementation": "e" * 64,
        "evidence": EVIDENCE,
        "requires": requires,
    }
    return SimpleNamespace(**{**values, **changes})


def granted(make: Any, *receipts: Any) -> TimingPermit:
    """What is granted for the timing gate."""
    return grant(study(make), "trial", receipts, SCOPE, implementation="e" * 64, digests=EVIDENCE.get)


def both() -> list[Any]:
    """Both receipts, standing."""
    return [receipt("identity", "a" * 64, {}), receipt("nll", "b" * 64, {"identity": "a" * 64})]


def test_granted_where_every_gate_stands(make: Any) -> None:
    """The permit carries the digest of the judgment: study, gate, scope and each receipt that it rests on."""
    permit = granted(make, *both())
    assert (permit.gate, permit.scope) == ("trial", SCOPE)
    assert permit.receipts == {"identity": "a" * 64, "nll": "b" * 64}
    assert permit.judgment == digest(
        {"study": "small", "gate": "trial", "scope": SCOPE.to_dict(), "receipts": dict(permit.receipts)}
    )
    assert permit.judgment == judgment_of(study(make), "trial", SCOPE, permit.receipts)


def test_another_receipt_is_another_judgment(make: Any) -> None:
    """The judgment's digest depends on the digest of each receipt."""
    first = granted(make, *both())
    second = granted(make, both()[0], receipt("nll", "c" * 64, {"identity": "a" * 64}))
    assert first.judgment != second.judgment


def test_refused_with_each_reason(make: Any) -> None:
    """One line names each missing, failed or stale receipt and why."""
    failed = receipt("identity", "a" * 64, {}, outcome=Outcome.FAIL, figure="layer 3 is missing")
    with pytest.raises(RefusedError) as refusal:
        granted(make, failed)
    assert str(refusal.value) == (
        "trial: found 0 standing receipts, expected 2: identity: failed: identity.json says FAIL: layer 3 is missing; "
        "nll: missing: found no receipt, expected one of this scope"
    )
    assert "\n" not in refusal.value.line()


def test_refused_for_a_gate_that_does_not_time(make: Any) -> None:
    """There is no permit for a gate that times nothing, nor for one that rests on nothing."""
    with pytest.raises(RefusedError, match="which times nothing"):
        grant(study(make), "nll", both(), SCOPE, implementation="e" * 64, digests=EVIDENCE.get)
    alone = replace(study(make), gates=(GatePlan(name="trial", state="required", timing=True),))
    with pytest.raises(RefusedError, match="nothing was qualified"):
        grant(alone, "trial", [], SCOPE, implementation="e" * 64, digests=EVIDENCE.get)


def test_nobody_else_can_make_one(make: Any) -> None:
    """Calling the class, copying, pickling, subclassing and changing all raise."""
    permit = granted(make, *both())
    with pytest.raises(TypeError, match="no public constructor"):
        TimingPermit(gate="trial", scope=SCOPE, receipts={}, judgment="0" * 64)
    for attempt in (lambda: copy.copy(permit), lambda: copy.deepcopy(permit), lambda: pickle.dumps(permit)):
        with pytest.raises(TypeError, match="copied or pickled"):
            attempt()
    with pytest.raises(TypeError, match="subclassed"):
        type("Mine", (TimingPermit,), {})
    with pytest.raises(AttributeError, match="cannot be changed"):
        setattr(permit, "judgment", "0")  # noqa: B010  # an assignment would not type-check
    with pytest.raises(AttributeError, match="cannot be changed"):
        delattr(permit, "_judgment")
    with pytest.raises(TypeError):
        permit.receipts["identity"] = "0"  # type: ignore[index]  # what a caller might try
