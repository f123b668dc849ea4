"""The documents of the repository, read as a reader of them would: pages, fenced blocks, and the commands in them.

A fenced block of ``bash`` or ``console`` holds commands. It may have a mark in a comment on the line before it:

    <!-- not run: REASON -->         its commands are parsed and looked up, and not run
    <!-- exit status: N -->          each of its commands ends so; ``any`` where that depends on the machine

In a ``console`` block a line that begins with ``$ `` is a command, and the lines below it are what it prints; a line
with an ellipsis (``…``) stands for the rest of its line, alone for any number of lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = (
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("tests/*.md")),
)
REASONS: Final = (
    "boots the engine",
    "needs a GPU",
    "needs the network",
    "needs files of yours",
    "takes minutes",
)
"""Why a command may not be run by a test."""
PROGRAMS: Final = ("kvqual", "pytest", "make", "python", "python3", "git", "cd", "source", "cp", "sed", "pip")
"""What a command may begin with, after any environment."""
LANGUAGES: Final = ("bash", "console", "json", "python", "text", "toml", "yaml")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block. ``line`` is its fence's, from 1; ``mark`` is the comment before it, without its brackets."""

    page: Path
    line: int
    language: str
    mark: str
    lines: tuple[str, ...] = field(repr=False)

    @property
    def place(self) -> str:
        """``PAGE:LINE``."""
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command. ``shown`` are the lines that it prints, None where the page does not say."""

    place: str
    text: str
    mark: str
    shown: tuple[str, ...] | None = None

    @property
    def runs(self) -> bool:
        """Whether a test is to run it."""
        return not self.mark.startswith("not run: ")

    def status(self, found: int) -> bool:
        """Whether it may end so."""
        _, stated, expected = self.mark.partition("exit status: ")
        return expected == "any" or found == (int(expected) if stated else 0)


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order.

    Raises:
        ValueError: A fence that is not closed.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    opened: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        mark = re.fullmatch(r"<!-- (.*) -->", lines[opened - 1]) if opened else None
        yield Block(
            page=page,
            line=opened + 1,
            language=lines[opened].removeprefix("```"),
            mark=mark[1] if mark is not None else "",
            lines=tuple(lines[opened + 1 : number]),
        )
        opened = None
    if opened is not None:
        raise ValueError(f"{page}:{opened + 1}: found a fence that is not closed")


def commands(page: Path) -> Iterator[Command]:
    """The commands of a page's blocks, in order."""
    for block in blocks(page):
        if block.language == "bash":
            for line in block.lines:
                yield Command(place=block.place, text=line, mark=block.mark)
        elif block.language == "console":
            starts = [place for place, line in enumerate(block.lines) if line.startswith("$ ")]
            for start, end in zip(starts, [*starts[1:], len(block.lines)], strict=True):
                text = block.lines[start].removeprefix("$ ")
                yield Command(place=block.place, text=text, mark=block.mark, shown=block.lines[start + 1 : end])


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a page outside its fenced blocks."""
    inside = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            yield number, line


def spans(page: Path) -> Iterator[tuple[int, str]]:
    """The code spans of a page outside its fenced blocks, each with its line; none of an indented block."""
    text = "\n".join("" if line.startswith("    ") else line for _, line in _blanked(page))
    for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
        yield text.count("\n", 0, match.start()) + 1, " ".join(match[1].split()).replace("\\|", "|")


def _blanked(page: Path) -> Iterator[tuple[int, str]]:
    """Every line of a page, empty inside fenced blocks."""
    outside = dict(prose(page))
    for number in range(1, len(page.read_text(encoding="utf-8").splitlines()) + 1):
        yield number, outside.get(number, "")


def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    names = set()
    for _, line in prose(page):
        heading = re.fullmatch(r"#{1,6} (.*)", line)
        if heading is None:
            continue
        name = re.sub(r"[^\w\- ]", "", heading[1].strip().lower()).replace(" ", "-")
        count = found.setdefault(name, 0)
        found[name] += 1
        names.add(name if count == 0 else f"{name}-{count}")
    return frozenset(names)


def links(page: Path) -> Iterator[tuple[int, str]]:
    """The targets of a page's links and images, each with its line."""
    for number, line in prose(page):
        # A code span may hold what looks like a link.
        for match in re.finditer(r"\]\(([^()\s]+)\)", re.sub(r"`[^`]*`", "``", line)):
            yield number, match[1]
