"""Scopes, and documents that carry their own digest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attempt import SCOPE

from pytest_kvqual.errors import EvidenceError, ReceiptError
from pytest_kvqual.evidence.records import Scope, read_with_digest, with_digest


def test_a_scope_comes_back_from_its_mapping() -> None:
    """Writing and reading a scope gives the same scope."""
    assert Scope.from_dict(SCOPE.to_dict(), origin="FILE") == SCOPE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lock": "A" * 64}, "FILE: in 'lock': found"),
        ({"engine": None}, "FILE: in 'engine': found null, expected a SHA-256"),
        ({"length": True}, "FILE: in 'length': found true (a boolean), expected an integer"),
        ({"length": 0}, "FILE: in 'length': found 0"),
        ({"cache_bytes": 1.0}, "FILE: in 'cache_bytes': found 1.0 (a number)"),
        ({"arm": "../x"}, "FILE: in 'arm': found"),
        ({"prefix": ""}, "FILE: found the unknown key 'prefix'"),
    ],
)
def test_a_mapping_that_is_no_scope_is_refused(change: dict[str, object], words: str) -> None:
    """Each field is decoded strictly, with the error class of the caller."""
    with pytest.raises(ReceiptError) as caught:
        Scope.from_dict({**SCOPE.to_dict(), **change}, origin="FILE", error=ReceiptError)
    assert words in str(caught.value)


def test_a_difference_names_each_field() -> None:
    """The fields in which another scope differs are named with both values."""
    other = replace(SCOPE, length=8192, engine="c" * 64)
    assert SCOPE.difference(other) == (
        "length: found 8192, expected 1024",
        f"engine: found {'c' * 64}, expected {'b' * 64}",
    )
    assert SCOPE.difference(SCOPE) == ()


def test_a_document_with_its_digest_comes_back() -> None:
    """What was written is read, and an added blank, another value and another key are each refused."""
    data = with_digest({"a": 1, "b": "x"})
    assert read_with_digest(data, origin="FILE", known=("a", "b")).integer("a") == 1
    for changed, words in (
        (data.replace(b'"a":1', b'"a":2'), "found content of sha256"),
        (data.replace(b'"a":1', b'"a": 1'), "not the canonical form"),
        (data + b"\n", "not the canonical form"),
        (data.replace(b'"b"', b'"c"'), "found the unknown key 'c'"),
        (b"[]\n", "found a list that is empty, expected a table"),
    ):
        with pytest.raises(EvidenceError) as caught:
            read_with_digest(changed, origin="FILE", known=("a", "b"))
        assert words in str(caught.value)
