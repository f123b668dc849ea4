"""Foreign text, fit to print."""

from __future__ import annotations

import unicodedata
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.report.gate.words import bytes_of, milliseconds, number, one_line, visible

ANY = st.text(st.characters(exclude_categories=()), max_size=60)


@given(ANY)
def test_nothing_unseen_is_left(text: str) -> None:
    """No control but the line end and the tab, no format, private, unassigned or surrogate character comes through."""
    found = [it for it in visible(text) if it not in "\n\t"]
    assert not [it for it in found if unicodedata.category(it) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")]
    assert all(it == " " or unicodedata.category(it) != "Zs" for it in found)


@given(ANY)
def test_what_is_shown_can_be_written_as_xml(text: str) -> None:
    """What comes out survives UTF-8 and XML 1.0, but for the line ends that XML itself makes of others."""
    element = ElementTree.Element("a")
    element.text = visible(text)
    assert (ElementTree.fromstring(ElementTree.tostring(element, "utf-8")).text or "") == visible(text)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_printable_ascii_is_left_alone(text: str) -> None:
    """What everybody can see is not touched."""
    assert visible(text) == text


@given(ANY, st.integers(2, 40))
def test_one_line_is_one_line(text: str, size: int) -> None:
    """A line holds no line end and no more characters than asked for."""
    found = one_line(text, size)
    assert len(found.splitlines()) <= 1
    assert len(found) <= size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\x00b", "a⟨U+0000⟩b"),
        ("a\x1b[31mb", "a⟨U+001B⟩[31mb"),
        ("a\u202eb", "a⟨U+202E⟩b"),
        ("a\u2066b\u2069", "a⟨U+2066⟩b⟨U+2069⟩"),
        ("a\u200bb\ufeff", "a⟨U+200B⟩b⟨U+FEFF⟩"),
        ("a\ud800b", "a⟨U+D800⟩b"),
        ("a\u00a0b\u3000", "a⟨U+00A0⟩b⟨U+3000⟩"),
        ("a\u2028b", "a⟨U+2028⟩b"),
        ("a\ufe0fb", "a⟨U+FE0F⟩b"),
        ("a\U000e0041", "a⟨U+E0041⟩"),
        ("a\u3164b", "a⟨U+3164⟩b"),
        ("Grüße, 世界\n\tδ", "Grüße, 世界\n\tδ"),
    ],
)
def test_visible(text: str, expected: str) -> None:
    """Each kind of character that hides or acts on others has its code point, and letters stay letters."""
    assert visible(text) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (0.5, 0.5), ("127/252", 127 / 252), ("nan", None), ("inf", float("inf")), (True, None), (None, None),
     ("1/0", None), ("x", None), ([], None)],
)  # fmt: skip
def test_number(value: object, expected: float | None) -> None:
    """Numbers of details are read as they are spelled; what is none is none."""
    found = number(value)
    assert found == expected or (value == "nan" and found != found)


def test_units() -> None:
    """Sizes and times have the digits that tell something."""
    assert bytes_of(1 << 30) == "1 GiB"
    assert bytes_of(1_500_000) == "1.43 MiB"
    assert [milliseconds(it) for it in (0.00254, 12.34, 4321.0, float("inf"))] == [
        "0.003 ms", "12.3 ms", "4,321 ms", "inf",
    ]  # fmt: skip
