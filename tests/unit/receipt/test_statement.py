"""Receipts as in-toto statements: built, encoded, and read back strictly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvqual._canonical import digest, pretty_bytes, sha256_bytes
from pytest_kvqual.errors import ReceiptError
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict
from pytest_kvqual.receipt.statement import build, encode, parse

SCOPE = Scope(lock="1" * 64, arm="candidate", length=1024, cache_bytes=4096, engine="2" * 64)
EVIDENCE = {"candidate-1024-4096/attempt-2/nll.jsonl": "3" * 64, "native-1024-4096/attempt-1/nll.jsonl": "4" * 64}


def verdict(**changes: Any) -> Verdict:
    """A passed verdict, but for ``changes``."""
    values: dict[str, Any] = {
        "gate": "nll",
        "outcome": Outcome.PASS,
        "figure": "ΔNLL +0.000700",
        "null": Check(passed=True, figure="0 differ"),
        "poison": (Poison(fault="v-scale-dropped-on-read", caught=True, figure="+1.2"),),
        "details": {"margin": 0.01, "by_document": {"d0": 1e-17}},
        **changes,
    }
    return Verdict(**values)


def data(found: Verdict | None = None, *, attempt: int = 1, **changes: Any) -> bytes:
    """The bytes of a receipt."""
    options: dict[str, Any] = {
        "order": 8,
        "evidence": EVIDENCE,
        "requires": {"identity": "5" * 64},
        "implementation": "6" * 64,
        **changes,
    }
    return encode(build(found or verdict(), SCOPE, **options), attempt=attempt)


def resealed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A receipt whose statement was changed and whose content digest was made anew, as a forger would."""
    document = json.loads(data())
    change(document)
    predicate = {key: value for key, value in document["predicate"].items() if key != "content"}
    document["predicate"]["content"] = digest({**document, "predicate": predicate})
    return pretty_bytes(document)


def test_reads_back_what_was_built() -> None:
    """Verdict, scope, digests and number survive, and the receipt's digest is that of its bytes."""
    receipt = parse(data(attempt=3), name="here")
    assert receipt.verdict == verdict()
    assert (receipt.scope, receipt.order, receipt.attempt) == (SCOPE, 8, 3)
    assert (receipt.gate, receipt.outcome, receipt.figure) == ("nll", Outcome.PASS, "ΔNLL +0.000700")
    assert dict(receipt.evidence) == EVIDENCE
    assert dict(receipt.requires) == {"identity": "5" * 64}
    assert receipt.implementation == "6" * 64
    assert receipt.sha256 == sha256_bytes(data(attempt=3))
    assert receipt.name == "here"


def test_is_an_in_toto_statement() -> None:
    """Type, subject with a digest, predicate type and the fields of in-toto's test-result are there, by their names."""
    document = json.loads(data())
    assert set(document) == {"_type", "subject", "predicateType", "predicate"}
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"] == "urn:pytest-kvqual:gate-receipt:v1"
    assert document["subject"] == [{"name": "candidate", "digest": {"sha256": "2" * 64}}]
    predicate = document["predicate"]
    assert predicate["result"] == "PASSED"
    assert predicate["configuration"] == [{"name": "lock.json", "digest": {"sha256": "1" * 64}}]
    assert (predicate["passedTests"], predicate["warnedTests"], predicate["failedTests"]) == (["nll"], [], [])
    assert predicate["null"] == {"state": "passed", "figure": "0 differ"}
    assert (predicate["poison"]["seeded"], predicate["poison"]["caught"]) == (1, 1)


@pytest.mark.parametrize(
    "found",
    [
        verdict(outcome=Outcome.FAIL, findings=("rule 6: too much",)),
        verdict(outcome=Outcome.INCONCLUSIVE, null=None, poison=()),
        verdict(outcome=Outcome.INCONCLUSIVE, null=Check(passed=False, figure="3 differ")),
        verdict(outcome=Outcome.REFUSED, null=None, poison=(), details={}),
    ],
)
def test_every_outcome_reads_back(found: Verdict) -> None:
    """What is no PASS is FAILED in test-result's words, and reads back as it was; it may name no evidence."""
    receipt = parse(data(found, evidence={}, requires={}))
    assert receipt.verdict == found
    assert json.loads(receipt.data)["predicate"]["result"] == "FAILED"


def test_equal_verdicts_have_equal_bytes() -> None:
    """Neither the order of keys nor of evidence changes the bytes."""
    assert data(evidence=dict(reversed(EVIDENCE.items()))) == data()


def test_a_pass_needs_evidence() -> None:
    """A PASS that rests on no file is not built."""
    with pytest.raises(ReceiptError, match="names no evidence"):
        data(evidence={})


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), {1: 2}])
def test_details_must_fit_json(value: object) -> None:
    """A detail that JSON cannot hold is refused, by its place."""
    with pytest.raises(ReceiptError, match=r"nll: .*details"):
        data(verdict(details={"x": value}))


def test_an_unnumbered_statement_must_have_a_predicate() -> None:
    """Only what ``build`` made can be encoded."""
    with pytest.raises(ReceiptError, match="without a predicate"):
        encode({}, attempt=1)


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_one_changed_byte_is_noticed(source: st.DataObject) -> None:
    """Whichever byte is replaced by whichever other one, the receipt is refused and named."""
    original = data()
    place = source.draw(st.integers(0, len(original) - 1))
    byte = source.draw(st.integers(0, 255).filter(lambda value: value != original[place]))
    with pytest.raises(ReceiptError, match=r"^here"):
        parse(original[:place] + bytes([byte]) + original[place + 1 :], name="here")


@pytest.mark.parametrize(
    "change", [lambda raw: raw + b"\n", lambda raw: raw[:-1], lambda raw: raw[:-20], lambda raw: b""]
)
def test_added_or_lost_bytes_are_noticed(change: Callable[[bytes], bytes]) -> None:
    """A receipt that is longer or shorter than written is refused."""
    with pytest.raises(ReceiptError):
        parse(change(data()))


def test_another_layout_is_noticed() -> None:
    """The same content with other white space is not the receipt that was written."""
    with pytest.raises(ReceiptError, match="another form"):
        parse(json.dumps(json.loads(data())).encode())


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an unknown key at the top": (lambda it: it.update(more=1), "unknown key 'more'"),
    "an unknown key in the predicate": (lambda it: it["predicate"].update(more=1), "unknown key 'more'"),
    "an unknown key in the scope": (lambda it: it["predicate"]["scope"].update(more=1), "unknown key 'more'"),
    "another type": (lambda it: it.update(_type="https://in-toto.io/Statement/v0.1"), "_type"),
    "another predicate type": (
        lambda it: it.update(predicateType="urn:pytest-kvqual:gate-receipt:v2"),
        "predicateType",
    ),
    "no scope": (lambda it: it["predicate"].pop("scope"), "no key 'scope'"),
    "no null": (lambda it: it["predicate"].pop("null"), "no key 'null'"),
    "a length that is true": (lambda it: it["predicate"]["scope"].update(length=True), "predicate.scope.length"),
    "a digest in capitals": (lambda it: it["predicate"]["implementation"].update(sha256="A" * 64), "implementation"),
    "another outcome word": (lambda it: it["predicate"]["verdict"].update(outcome="OK"), "outcome"),
    "a result that contradicts": (lambda it: it["predicate"].update(result="FAILED"), "predicate.result"),
    "no passed test": (lambda it: it["predicate"].update(passedTests=[]), "passedTests"),
    "a warned test": (lambda it: it["predicate"].update(warnedTests=["x"]), "warnedTests"),
    "a pass with findings": (lambda it: it["predicate"]["verdict"].update(findings=["x"]), "no findings"),
    "a pass with a failed null": (lambda it: it["predicate"]["null"].update(state="failed"), "a passed null"),
    "a pass without a null": (lambda it: it["predicate"]["null"].update(state="absent"), "a passed null"),
    "a pass with a missed fault": (
        lambda it: (
            it["predicate"]["poison"]["faults"][0].update(caught=False),
            it["predicate"]["poison"].update(caught=0),
        ),
        "every seeded fault caught",
    ),
    "a count of caught faults that is not the list's": (
        lambda it: it["predicate"]["poison"].update(caught=2),
        "caught",
    ),
    "a count of seeded faults that is not the list's": (
        lambda it: it["predicate"]["poison"].update(seeded=2),
        "seeded",
    ),
    "a pass without evidence": (lambda it: it["predicate"].update(evidence=[]), "evidence"),
    "evidence twice": (lambda it: it["predicate"]["evidence"].append(it["predicate"]["evidence"][0]), "twice"),
    "another subject": (lambda it: it["subject"][0].update(name="native"), "subject"),
    "two subjects": (lambda it: it["subject"].append({"name": "x", "digest": {"sha256": "0" * 64}}), "subject"),
    "another lock": (lambda it: it["predicate"]["scope"].update(lock="7" * 64), "configuration"),
    "number zero": (lambda it: it["predicate"].update(attempt=0), "attempt"),
    "order zero": (lambda it: it["predicate"]["gate"].update(order=0), "order"),
    "details that are a list": (lambda it: it["predicate"].update(details=[]), "details"),
    "a chain with something else": (lambda it: it["predicate"].update(requires={"identity": "x"}), "requires.identity"),
}


@pytest.mark.parametrize(("change", "text"), FORGED.values(), ids=FORGED)
def test_contradictions_are_refused(change: Callable[[dict[str, Any]], object], text: str) -> None:
    """A statement sealed anew after a change that contradicts itself or the schema is refused, by its place."""
    with pytest.raises(ReceiptError, match=re.escape(text)):
        parse(resealed(change), name="here")


@pytest.mark.parametrize("raw", [b"[]", b"null", b"{", b'{"_type": 1}', b"\xff", b'{"a": NaN}', b'{"a": 1, "a": 1}'])
def test_what_is_no_receipt_is_refused(raw: bytes) -> None:
    """Bytes that are no receipt at all raise one line that names the file."""
    with pytest.raises(ReceiptError, match=r"^here") as error:
        parse(raw, name="here")
    assert "\n" not in error.value.line()


@pytest.mark.parametrize("predicate", [None, [], {"content": "0" * 64}])
def test_a_predicate_without_parts_is_refused(predicate: Any) -> None:
    """A predicate that is no table, or lacks everything but a content digest, is refused."""
    document = {**json.loads(data()), "predicate": predicate}
    with pytest.raises(ReceiptError, match=r"^here"):
        parse(pretty_bytes(document), name="here")
