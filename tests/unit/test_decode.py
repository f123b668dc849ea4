"""Strict decoding."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from pytest_kvqual._decode import Table, describe, nearest, parse_json
from pytest_kvqual.errors import EvidenceError, StudyError


def _table(value: object, *known: str) -> Table:
    return Table(value, origin="FILE", error=StudyError, known=known or None)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda t: t.integer("a"), "in 'a': found true (a boolean), expected an integer"),
        (lambda t: t.integer("f"), "in 'f': found 1.5 (a number), expected an integer"),
        (lambda t: t.integer("i", minimum=8), "in 'i': found 7 (an integer), expected an integer of at least 8"),
        (lambda t: t.integer("i", maximum=6), "of at most 6"),
        (
            lambda t: t.integers("l", minimum=0, maximum=2),
            "in 'l[1]': found 3 (an integer), expected an integer from 0",
        ),
        (lambda t: t.integers("m"), "in 'm[0]': found true (a boolean), expected an integer"),
        (lambda t: t.number("a"), "in 'a': found true (a boolean), expected a finite number"),
        (lambda t: t.number("nan"), "in 'nan': found nan (a number), expected a finite number"),
        (lambda t: t.number("f", maximum=1.0), "expected a finite number of at most 1.0"),
        (lambda t: t.numbers("l2"), "in 'l2[0]': found \"x\" (a string), expected a finite number"),
        (lambda t: t.string("i"), "in 'i': found 7 (an integer), expected a string that is not empty"),
        (lambda t: t.string("empty"), "in 'empty': found \"\" (a string), expected a string that is not empty"),
        (lambda t: t.strings("l"), "in 'l[0]': found 1 (an integer), expected a string"),
        (lambda t: t.strings("s"), "in 's': found \"text\" (a string), expected a list of strings"),
        (lambda t: t.boolean("i"), "in 'i': found 7 (an integer), expected true or false"),
        (lambda t: t.choice("s", ("x", "y")), "in 's': found \"text\" (a string), expected one of x, y"),
        (lambda t: t.choice("l", ("x",)), "in 'l': found a list of 2, expected one of x"),
        (lambda t: t.sha256("s"), "expected a SHA-256 of 64 lower-case hex digits"),
        (lambda t: t.table("i", known=()), "in 'i': found 7 (an integer), expected a table"),
        (lambda t: t.table("t", known=("y",)), "in 't': found the unknown key 'x', expected only y"),
        (lambda t: t.table("t", known=("x",)).integer("x"), "in 't.x': found a table of 1, expected an integer"),
        (lambda t: t.table("t", known=None).table("x", known=None).string("k"), "in 't.x.k': found null, expected a"),
        (lambda t: t.tables("l", known=()), "in 'l[0]': found 1 (an integer), expected a table"),
        (lambda t: t.string_map("t"), "in 't.x': found a table of 1, expected a string"),
        (lambda t: t.text("i"), "in 'i': found 7 (an integer), expected a string"),
        (lambda t: t.raw("gone"), "FILE: found no key 'gone', expected a value"),
        (lambda t: t.integer("gone"), "FILE: found no key 'gone', expected an integer"),
        (lambda t: t.table("t", known=None).string("gone"), "FILE: in 't': found no key 'gone', expected a string"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(read: Callable[[Table], object], words: str) -> None:
    """Each error says the file, the path in it, what was found and what was expected, in one line."""
    value = {
        "a": True, "i": 7, "f": 1.5, "nan": float("nan"), "s": "text", "empty": "", "l": [1, 3], "l2": ["x"],
        "m": [True], "t": {"x": {"k": None}},
    }  # fmt: skip
    with pytest.raises(StudyError) as caught:
        read(_table(value))
    assert str(caught.value).startswith("FILE")
    assert words in str(caught.value)
    assert "\n" not in caught.value.line()


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    """A misspelt key is refused, and the advice is the key that was meant."""
    with pytest.raises(
        StudyError, match=r"found the unknown key 'wave_sise', expected only wave_size, panels"
    ) as caught:
        _table({"wave_sise": 1}, "wave_size", "panels")
    assert caught.value.advice == "did you mean 'wave_size'?"


def test_an_unknown_key_without_a_likeness_is_to_be_removed() -> None:
    """A key that resembles none gets no guess."""
    with pytest.raises(StudyError) as caught:
        _table({"zzz": 1}, "wave_size")
    assert caught.value.advice == "remove it"


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_a_document_that_is_no_table_is_refused(value: object) -> None:
    """The top of a document must be a table."""
    with pytest.raises(StudyError, match=r"FILE: found .*, expected a table"):
        _table(value)


def test_values_come_back_in_their_types() -> None:
    """What is right is returned, an integer where a number is asked for as a float, lists as tuples."""
    table = _table({"i": 7, "f": 1, "s": "x", "b": False, "l": [1, 2], "n": [1, 2.5], "m": {"k": "v"}, "d": {"x": {}}})
    assert (table.integer("i"), table.string("s"), table.boolean("b")) == (7, "x", False)
    assert isinstance(table.number("f"), float)
    assert (table.integers("l"), table.numbers("n"), table.string_map("m")) == ((1, 2), (1.0, 2.5), {"k": "v"})
    assert list(table.named_tables("d", known=())) == ["x"]
    assert (table.has("i"), table.has("j"), table.optional_string("j")) == (True, False, None)
    assert table.strings("j", ("x",)) == ("x",)
    assert table.string("j", "y") == "y"
    assert table.boolean("j", True) is True
    assert table.string_map("j", {}) == {}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a": 1,\n "a": 2}', "FILE: found the key 'a' twice"),
        (b'{"a": NaN}', "FILE: found NaN, expected a finite number"),
        (b'{"a": -Infinity}', "FILE: found -Infinity"),
        (b'{"a": 1e999}', "FILE: found 1e999, expected a number that float64 can hold"),
        (b'{"a":\n\n oops}', "FILE, line 3, column 2: found 'Expecting value', expected JSON"),
        (b'{"a": "\xff"}', "FILE at byte 7: found the byte 0xff, expected JSON in UTF-8"),
        (b"[" * 100_000, "FILE: found nesting beyond the parser's limit"),
        (b"1" * 5000, "expected an integer of at most 300 digits"),
        (b"", "FILE, line 1, column 1"),
    ],
)
def test_json_beyond_the_strict_form_is_refused(data: bytes, words: str) -> None:
    """A key given twice, NaN, overflow, broken syntax, broken UTF-8 and endless nesting are each one line."""
    with pytest.raises(EvidenceError) as caught:
        parse_json(data, origin="FILE", error=EvidenceError)
    assert words in str(caught.value)
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize("key", ["a\nb", "a\u2028b", "\x1b[31m", "\ud800"])
def test_a_key_with_a_line_end_in_it_stays_one_printable_line(key: str) -> None:
    """What a file brings into a message cannot break its line, colour a terminal or fail to be printed."""
    twice = json.dumps(key)
    reads: list[Callable[[], object]] = [
        lambda: _table({key: 1}, "known"),
        lambda: _table({key: {}}).string(key),
        lambda: _table({"x": key}).choice("x", ("y",)),
        lambda: parse_json(f"{{{twice}: 1, {twice}: 1}}".encode(), origin="FILE", error=StudyError),
    ]
    for read in reads:
        with pytest.raises(StudyError) as caught:
            read()
        assert caught.value.line().isprintable()


def test_helpers_for_messages() -> None:
    """A long value is cut, and a near name is found."""
    assert describe("x" * 100) == '"' + "x" * 56 + "... (a string)"
    assert describe({}) == "a table that is empty"
    assert nearest("candidat", ("native", "candidate")) == "did you mean 'candidate'?"
    assert nearest("zzz", ("native",)) == ""


@pytest.mark.parametrize("read", [lambda t: t.number("n"), lambda t: t.numbers("many")])
def test_an_integer_beyond_float64_is_refused(read: Callable[[Table], object]) -> None:
    """An integer that no float64 holds is no finite number, and no traceback."""
    table = Table({"n": 10**400, "many": [10**400]}, origin="FILE", error=StudyError, known=("n", "many"))
    with pytest.raises(StudyError, match="expected a finite number"):
        read(table)
