"""The audit's own list of declared KV formats, and the order of receipts where a format has no declaration."""

from __future__ import annotations

import pytest

from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.frozen import Gate
from pytest_kvqual.audit.receipts import DECLARED, NEED_DECLARATION, Receipt, Scope, check_chain, required_before
from pytest_kvqual.kv import declarations

SCOPE = Scope(lock="1" * 64, arm="candidate", length=1024, cache_bytes=4096, engine="2" * 64)
GATES = (
    *(Gate(name=name, state="required", timing=False) for name in ("identity", "dispatch", "routing", "nll")),
    Gate(name="trial", state="required", timing=True),
)


def receipt(order: int, outcome: str, requires: dict[str, str]) -> Receipt:
    """A receipt of the gate at that place."""
    gate = GATES[order - 1].name
    return Receipt(
        name=f"receipts/x/{order:02d}-{gate}-1.json",
        sha256=str(order) * 64,
        gate=gate,
        order=order,
        attempt=1,
        outcome=outcome,
        figure="the figure",
        findings=(),
        null_state="passed",
        null_figure="",
        poison=(),
        scope=SCOPE,
        implementation="e" * 64,
        evidence={},
        requires=requires,
        details={},
    )


def lines(receipts: list[Receipt], kv_format: str) -> list[str]:
    """What the chain of receipts has against it."""
    report = Report()
    check_chain(GATES, {it.gate: it for it in receipts}, kv_format, report)
    return [finding.text for finding in report.findings]


def test_both_readers_know_the_same_formats() -> None:
    """The audit restates which formats are declared and which gates need it; the two lists agree."""
    assert set(DECLARED) == set(declarations.DECLARED)
    assert NEED_DECLARATION == declarations.NEED_DECLARATION


def test_what_rests_on_what() -> None:
    """Without a declaration a gate does not rest on those that need one; a timing gate rests on all."""
    assert required_before(GATES, "nll") == ["identity", "dispatch", "routing"]
    assert required_before(GATES, "nll", "int8_per_token_head") == ["dispatch"]
    assert required_before(GATES, "trial", "int8_per_token_head") == ["identity", "dispatch", "routing", "nll"]


def test_receipts_of_a_format_without_a_declaration() -> None:
    """Receipts in that order are in order; of a declared format the same ones are not."""
    found = [
        receipt(1, "INCONCLUSIVE", {}),
        receipt(2, "PASS", {}),
        receipt(3, "INCONCLUSIVE", {"dispatch": "2" * 64}),
        receipt(4, "PASS", {"dispatch": "2" * 64}),
    ]
    assert lines(found, "int8_per_token_head") == []
    assert any("found no receipt of 'identity'" in line for line in lines(found, "k16v8"))


@pytest.mark.parametrize("order", [1, 3])
def test_no_gate_that_needs_a_declaration_passes_without_one(order: int) -> None:
    """A PASS of identity or routing under a format without a declaration is a finding."""
    found = [receipt(order, "PASS", {"dispatch": "2" * 64} if order == 3 else {}), receipt(2, "PASS", {})]
    assert any("has no declaration" in line for line in lines(found, "int8_per_token_head"))
    assert not any("has no declaration" in line for line in lines(found, "k16v16"))
