"""The order of the gates: which receipts stand, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pytest

from pytest_kvqual.errors import RefusedError
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.judge.sequence import Refusal, own, required_before, standing
from pytest_kvqual.judge.verdict import Outcome

IMPLEMENTATION = "e" * 64
SCOPE = Scope(lock="1" * 64, arm="candidate", length=1024, cache_bytes=4096, engine="2" * 64)
EVIDENCE = {"candidate-1024-4096/attempt-1/identity.json": "3" * 64}


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """A receipt as the order sees it."""

    gate: str
    sha256: str
    outcome: Outcome = Outcome.PASS
    figure: str = "the figure"
    scope: Scope = SCOPE
    attempt: int = 1
    implementation: str = IMPLEMENTATION
    evidence: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(dict(EVIDENCE)))
    requires: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"receipts/x/{self.gate}-{self.attempt}.json"


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A receipt file that cannot be trusted, as the order sees it."""

    gate: str
    attempt: int
    arm: str = "candidate"
    length: int = 1024
    cache_bytes: int = 4096
    name: str = "receipts/x/bad.json"
    reason: str = "found content of sha256 1, expected 2"


def chain() -> list[Receipt]:
    """Receipts of identity, routing and parity that all stand."""
    identity = Receipt(gate="identity", sha256="a" * 64)
    routing = Receipt(gate="routing", sha256="b" * 64, requires={"identity": "a" * 64})
    parity = Receipt(gate="parity", sha256="c" * 64, requires={"identity": "a" * 64, "routing": "b" * 64})
    return [identity, routing, parity]


def settle(make: Any, receipts: list[Receipt], gate: str = "parity", **changes: Any) -> Any:
    """What ``gate`` may rest on."""
    options = {"implementation": IMPLEMENTATION, "digests": EVIDENCE.get, **changes}
    scope = options.pop("scope", SCOPE)
    return standing(make.study(), gate, receipts, scope, **options)


def test_required_before(make: Any) -> None:
    """A gate rests on the required gates above it; a timing gate on the planned ones too."""
    study = make.study()
    assert required_before(study, "identity") == ()
    assert required_before(study, "parity") == ("identity", "routing")
    assert required_before(study, "trial") == ("identity", "dispatch", "routing", "parity")
    with pytest.raises(RefusedError, match="found the gate 'nobody', expected one of identity, dispatch"):
        required_before(study, "nobody")


def test_a_whole_chain_stands(make: Any) -> None:
    """Receipts whose digests all match stand, and give the chain of the next receipt."""
    found = settle(make, chain())
    assert found.complete
    assert found.requires() == {"identity": "a" * 64, "routing": "b" * 64}


def test_a_planned_gate_refuses_timing(make: Any) -> None:
    """A timing gate is refused by a planned gate above it, by name."""
    found = settle(make, chain(), gate="trial")
    assert found.refusals == (
        Refusal(gate="dispatch", kind="planned", reason="the gate is declared and not there yet"),
    )
    with pytest.raises(RefusedError, match="trial: found 3 standing receipts, expected 4: dispatch: planned"):
        found.check()


def test_a_missing_receipt_is_named(make: Any) -> None:
    """Without a receipt the gate is missing, and what rests on it is stale."""
    found = settle(make, chain()[1:])
    assert [refusal.line() for refusal in found.refusals] == [
        "identity: missing: found no receipt, expected one of this scope",
        "routing: stale: receipts/x/routing-1.json rests on a receipt of 'identity', which does not stand",
    ]


@pytest.mark.parametrize(
    ("field_name", "value", "text"),
    [
        ("length", 8192, "length: found 1024, expected 8192"),
        ("cache_bytes", 1, "cache_bytes: found 4096, expected 1"),
        ("arm", "native", "arm: found candidate, expected native"),
        ("lock", "9" * 64, f"lock: found {'1' * 64}, expected {'9' * 64}"),
        ("engine", "9" * 64, f"engine: found {'2' * 64}, expected {'9' * 64}"),
    ],
)
def test_a_receipt_of_another_scope_is_stale(make: Any, field_name: str, value: Any, text: str) -> None:
    """Each field of the scope counts; the refusal names the one that differs, and both values."""
    found = settle(make, chain(), scope=replace(SCOPE, **{field_name: value}))
    assert [refusal.kind for refusal in found.refusals] == ["stale", "stale"]
    assert text in found.refusals[0].reason
    assert not found.receipts


def test_the_nearest_receipt_is_named(make: Any) -> None:
    """Among receipts of other scopes the one that differs in the fewest fields explains the refusal."""
    far = Receipt(gate="identity", sha256="a" * 64, scope=replace(SCOPE, length=1, lock="9" * 64), attempt=7)
    near = Receipt(gate="identity", sha256="b" * 64, scope=replace(SCOPE, length=1))
    assert settle(make, [far, near], gate="routing").refusals[0].reason == (
        "receipts/x/identity-1.json is of another scope: length: found 1, expected 1024"
    )


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.INCONCLUSIVE, Outcome.REFUSED])
def test_the_latest_receipt_decides(make: Any, outcome: Outcome) -> None:
    """A later receipt that is no PASS refuses, whatever an earlier one said."""
    later = replace(chain()[0], outcome=outcome, attempt=2, sha256="f" * 64)
    found = settle(make, [later, *chain()])
    assert found.refusals[0].line() == f"identity: failed: receipts/x/identity-2.json says {outcome.value}: the figure"


def test_an_earlier_failure_does_not_count(make: Any) -> None:
    """A later PASS stands over an earlier failure of the same scope."""
    first = replace(chain()[0], outcome=Outcome.FAIL, sha256="f" * 64)
    again = replace(chain()[0], attempt=2)
    assert settle(make, [first, again, *chain()[1:]]).complete


def test_a_failure_of_another_scope_does_not_count(make: Any) -> None:
    """A failure under another lock, though numbered later, leaves this scope's receipt standing."""
    other = replace(chain()[0], outcome=Outcome.FAIL, attempt=2, scope=replace(SCOPE, lock="9" * 64), sha256="f" * 64)
    assert settle(make, [*chain(), other]).complete


def test_a_receipt_that_was_taken_away_is_noticed(make: Any) -> None:
    """A gap in the numbers refuses: an earlier pass must not come back because a later failure was removed."""
    found = settle(make, [replace(chain()[0], attempt=2), *chain()[1:]])
    assert found.refusals[0].line() == ("identity: damaged: receipt number 1 is gone, expected numbers without a gap")


def test_two_receipts_of_one_number_are_refused(make: Any) -> None:
    """One number is one receipt."""
    found = settle(make, [*chain(), replace(chain()[0], sha256="f" * 64)])
    assert "found two receipts number 1" in found.refusals[0].reason
    found = settle(make, chain(), damaged=[Damaged(gate="identity", attempt=1)])
    assert "found two receipts number 1" in found.refusals[0].reason


def test_a_damaged_latest_receipt_is_named(make: Any) -> None:
    """A changed byte in the deciding receipt refuses, with the file and what was found."""
    found = settle(make, chain(), damaged=[Damaged(gate="identity", attempt=2)])
    assert found.refusals[0].line() == ("identity: damaged: receipts/x/bad.json: found content of sha256 1, expected 2")
    assert settle(make, chain()[1:], damaged=[Damaged(gate="identity", attempt=1)]).refusals[0].kind == "damaged"


def test_a_damaged_receipt_elsewhere_does_not_refuse(make: Any) -> None:
    """A damaged receipt of another gate's, arm's, length's or pool's folder, or an earlier one, changes nothing."""
    later = [replace(chain()[0], attempt=2), *chain()[1:]]
    assert settle(make, later, damaged=[Damaged(gate="identity", attempt=1)]).complete
    for other in ({"arm": "native"}, {"length": 1}, {"cache_bytes": 1}, {"gate": "nll"}):
        damaged = Damaged(**{"gate": "identity", "attempt": 9, **other})  # type: ignore[arg-type]  # mixed by design
        assert settle(make, chain(), damaged=[damaged]).complete, other


def test_another_implementation_is_stale(make: Any) -> None:
    """A receipt that other source judged does not count; both digests are named."""
    found = settle(make, chain(), implementation="0" * 64)
    assert found.refusals[0].reason == (
        f"receipts/x/identity-1.json: found the implementation {IMPLEMENTATION}, expected {'0' * 64}"
    )


@pytest.mark.parametrize(("now", "text"), [(None, "found no such file"), ("4" * 64, f"found sha256 {'4' * 64}")])
def test_changed_evidence_is_stale(make: Any, now: str | None, text: str) -> None:
    """An evidence file that changed or is gone is named with both digests."""
    found = settle(make, chain(), digests=lambda name: now)
    assert "evidence candidate-1024-4096/attempt-1/identity.json: " + text in found.refusals[0].reason
    assert f"expected sha256 {'3' * 64}" in found.refusals[0].reason


def test_a_pass_without_evidence_is_refused(make: Any) -> None:
    """A receipt that names no evidence cannot be checked, so it does not stand."""
    receipts = [replace(chain()[0], evidence={}), *chain()[1:]]
    assert "names no evidence" in settle(make, receipts).refusals[0].reason


@pytest.mark.parametrize(
    ("requires", "text"),
    [
        ({}, "rests on no receipt of 'identity', expected the standing one"),
        ({"identity": "0" * 64}, f"rests on the receipt {'0' * 64} of 'identity', expected {'a' * 64}"),
        ({"identity": "a" * 64, "nll": "1" * 64}, "rests on a receipt of 'nll', which is not among the gates it needs"),
    ],
)
def test_the_chain_must_match(make: Any, requires: dict[str, str], text: str) -> None:
    """A receipt rests on exactly the standing receipts of the gates above it."""
    first, second, _ = chain()
    found = settle(make, [first, replace(second, requires=requires)])
    assert text in found.refusals[0].reason


def test_a_gate_decided_again_makes_those_below_it_stale(make: Any) -> None:
    """Receipts that rest on a superseded receipt do not stand."""
    again = replace(chain()[0], attempt=2, sha256="d" * 64)
    found = settle(make, [*chain(), again])
    assert [refusal.line() for refusal in found.refusals] == [
        (
            "routing: stale: receipts/x/routing-1.json rests on the receipt "
            f"{'a' * 64} of 'identity', expected {'d' * 64}, the one that stands"
        )
    ]


def test_own_receipt(make: Any) -> None:
    """A gate's own receipt stands by the same rules as those above it."""
    options: dict[str, Any] = {"implementation": IMPLEMENTATION, "digests": EVIDENCE.get}
    found = own(make.study(), "parity", chain(), SCOPE, **options)
    assert found == chain()[2]
    assert isinstance(own(make.study(), "parity", chain()[:2], SCOPE, **options), Refusal)
    assert isinstance(own(make.study(), "parity", chain()[1:], SCOPE, **options), Refusal)


def test_no_receipts_at_all(make: Any) -> None:
    """An empty run directory refuses each required gate by name; the first gate needs nothing."""
    assert [refusal.kind for refusal in settle(make, [], gate="trial").refusals] == [
        "missing",
        "planned",
        "missing",
        "missing",
    ]
    assert settle(make, [], gate="identity").complete


# -- formats without a declaration -----------------------------------------------------------------------------------


def undeclared(make: Any) -> Any:
    """The study with a candidate of a format of which nothing is declared."""
    study = make.study()
    arm = replace(study.arms["candidate"], kv_format="int8_per_token_head")
    return replace(study, arms={**study.arms, "candidate": arm})


def test_a_gate_does_not_rest_on_what_a_format_without_a_declaration_cannot_pass(make: Any) -> None:
    """Identity and routing need a declaration; parity is decided without them, a timing gate and a pilot are not."""
    study = undeclared(make)
    assert required_before(study, "parity", "candidate") == ()
    assert required_before(study, "parity", "candidate", whole=True) == ("identity", "routing")
    assert required_before(study, "parity", "native") == ("identity", "routing")
    assert required_before(study, "parity", "candidate-with-a-fault") == ("identity", "routing")
    assert required_before(study, "trial", "candidate") == ("identity", "dispatch", "routing", "parity")


def test_an_inconclusive_gate_of_such_an_arm_refuses_timing_alone(make: Any) -> None:
    """Parity stands beside an inconclusive routing; what times, or asks for the whole chain, is refused by it."""
    study, options = undeclared(make), {"implementation": IMPLEMENTATION, "digests": EVIDENCE.get}
    open_gates = [
        Receipt(gate=gate, sha256=letter * 64, outcome=Outcome.INCONCLUSIVE)
        for gate, letter in (("identity", "a"), ("routing", "b"))
    ]
    receipts = [*open_gates, Receipt(gate="parity", sha256="c" * 64)]
    assert standing(study, "parity", receipts, SCOPE, **options).complete  # type: ignore[arg-type]  # of a test
    assert own(study, "parity", receipts, SCOPE, **options) is receipts[2]  # type: ignore[arg-type]  # of a test
    for gate, whole in (("trial", False), ("parity", True)):
        found = standing(study, gate, receipts, SCOPE, whole=whole, **options)  # type: ignore[arg-type]  # of a test
        assert {(it.gate, it.kind) for it in found.refusals} >= {("identity", "failed"), ("routing", "failed")}
    # The same receipts of a declared arm refuse parity too.
    assert not standing(make.study(), "parity", receipts, SCOPE, **options).complete  # type: ignore[arg-type]  # of a test
