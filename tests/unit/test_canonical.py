"""Canonical bytes and digests."""

from __future__ import annotations

import hashlib
from enum import Enum
from pathlib import Path

import pytest

from pytest_kvqual._canonical import canonical_bytes, digest, pretty_bytes, sha256_bytes, sha256_file, tree_digest
from pytest_kvqual.errors import EvidenceError


class _Colour(str, Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"b": 1, "a": [True, None, "x"]}, b'{"a":[true,null,"x"],"b":1}'),
        ({"é": "\u2028"}, '{"é":"\u2028"}'.encode()),
        ((1, 1.0), b"[1,1.0]"),
        ({"colour": _Colour.RED}, b'{"colour":"red"}'),
        (0.1 + 0.2, b"0.30000000000000004"),
        ({}, b"{}"),
    ],
)
def test_equal_values_have_one_form(value: object, expected: bytes) -> None:
    """Keys are sorted, text is UTF-8 as it stands, white space is absent, 1 and 1.0 stay different."""
    assert canonical_bytes(value) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [0.0, float("nan")]}, "found nan, expected a finite number, in 'a[1]'"),
        ({"a": float("inf")}, "found inf"),
        (-float("inf"), "found -inf, expected a finite number, at the top"),
        ({"a": {1: "x"}}, "found the key 1, expected a string, in 'a'"),
        ({True: "x"}, "found the key True"),
        ({"a": b"x"}, "found bytes"),
        ({"a": {"x"}}, "found set"),
        ({"a": Path("x")}, "found PosixPath"),
        ("\ud800", "lone surrogate"),
        ({"\udfff": 1}, "lone surrogate"),
    ],
)
def test_what_has_no_form_is_refused_with_its_place(value: object, words: str) -> None:
    """NaN, infinities, keys that are no strings, other types and lone surrogates are refused, never coerced."""
    with pytest.raises(EvidenceError) as caught:
        canonical_bytes(value)
    assert words in str(caught.value)
    assert "\n" not in caught.value.line()


def test_nesting_beyond_the_limit_is_refused() -> None:
    """A value nested deeper than the interpreter follows is an error of the project, not the interpreter's."""
    value: object = 0
    for _ in range(5_000):
        value = [value]
    with pytest.raises(EvidenceError, match="nesting beyond"):
        canonical_bytes(value)


def test_pretty_bytes_hold_the_same_content() -> None:
    """The form for people is indented, sorted and ends with a newline."""
    assert pretty_bytes({"b": 1, "a": ["é"]}) == '{\n  "a": [\n    "é"\n  ],\n  "b": 1\n}\n'.encode()


def test_digests_are_those_of_hashlib(tmp_path: Path) -> None:
    """A file, its bytes and a value have the SHA-256 that hashlib gives, across the read's chunks."""
    data = b"x" * (2 * (1 << 20) + 7)
    path = tmp_path / "file"
    path.write_bytes(data)
    assert sha256_file(path) == sha256_bytes(data) == hashlib.sha256(data).hexdigest()
    assert digest({"b": 1, "a": 2}) == hashlib.sha256(b'{"a":2,"b":1}').hexdigest()


def test_a_tree_digest_ignores_order_and_sees_names() -> None:
    """The digest of a tree does not depend on the order of its files, and changes with a name or a digest."""
    one = tree_digest({"a": "0" * 64, "b": "1" * 64})
    assert one == tree_digest({"b": "1" * 64, "a": "0" * 64})
    assert one != tree_digest({"a": "0" * 64, "c": "1" * 64})
    assert one != tree_digest({"a": "0" * 64, "b": "2" * 64})
