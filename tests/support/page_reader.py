"""Reads a page as a browser's parser would, strictly, for tests: elements, text, references."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Final

VOID: Final = {"meta", "br", "img", "link", "input", "hr", "wbr", "source", "area", "base", "col", "embed", "track"}


@dataclass(slots=True)
class Element:
    """One element; ``path`` are the tags above it."""

    tag: str
    attributes: dict[str, str]
    path: tuple[str, ...]
    children: list[Element] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text in it."""
        return "".join(self.texts)


class Page(HTMLParser):
    """The elements of a page in order.

    Raises:
        AssertionError: An end tag closes another element than the innermost open one, or none is left open.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(html)
        self.close()
        assert not self._open, [it.tag for it in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), (tag, names)
        found = Element(tag, {name: value or "" for name, value in attrs}, tuple(it.tag for it in self._open))
        if self._open:
            self._open[-1].children.append(found)
        self.elements.append(found)
        if tag not in VOID:
            self._open.append(found)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"found </{tag}>, expected it opened"
        assert self._open[-1].tag == tag, f"found </{tag}>, expected </{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.texts.append(data)

    def all(self, *tags: str) -> list[Element]:
        """The elements with one of these tags."""
        return [it for it in self.elements if it.tag in tags]

    def one(self, tag: str) -> Element:
        """The only element with a tag."""
        (found,) = self.all(tag)
        return found

    def by_id(self, name: str) -> Element:
        """The element with an id."""
        (found,) = [it for it in self.elements if it.attributes.get("id") == name]
        return found

    def references(self) -> Iterator[tuple[Element, str, str]]:
        """Every attribute that could load or call something."""
        for element in self.elements:
            for name, value in element.attributes.items():
                if name in ("href", "src", "srcset", "action", "data", "poster", "background", "xlink:href"):
                    yield element, name, value
