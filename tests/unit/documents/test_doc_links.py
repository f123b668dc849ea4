"""Links and pictures of the documents lead somewhere, and the figures that README claims are measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import LANGUAGES, PAGES, ROOT, anchors, blocks, links, prose

#: Pages that are linked and not written yet; each goes from here when it is.
PENDING: tuple[str, ...] = ()


def broken(page: Path, root: Path = ROOT) -> Iterator[str]:
    """What is wrong with each link of a page that leads nowhere."""
    for line, target in links(page):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        where = f"{page.name}:{line}: {target}"
        if not path.is_relative_to(root):
            yield f"{where}: leads out of the repository"
        elif path.relative_to(root).as_posix() in PENDING and not path.exists():
            continue
        elif not path.is_file():
            yield f"{where}: no such file"
        elif anchor and anchor not in anchors(path):
            yield f"{where}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """Each relative link and picture is a file of the repository, and each anchor a heading of it."""
    assert list(broken(page)) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[a](nowhere.md)", "no such file"),
        ("[a](page.md#no-heading)", "no such heading"),
        ("[a](#no-heading)", "no such heading"),
        ("![a](picture.png)", "no such file"),
        ("[a](../../out.md)", "leads out of the repository"),
        ("[a](page.md#a-heading) [a](https://example.org/x) `[a](b.md)`", ""),
    ],
)
def test_the_check_sees_a_broken_link(text: str, what: str, tmp_path: Path) -> None:
    """The negative control of the test above: each kind of broken link is named, and a whole one is not."""
    page = tmp_path / "page.md"
    page.write_text(f"# A heading\n\n{text}\n", encoding="utf-8")
    found = list(broken(page, tmp_path))
    assert [it.rpartition(": ")[2] for it in found] == ([what] if what else [])


def test_pages_that_are_written_are_not_pending() -> None:
    """A page that is there has no exemption from the test of its links."""
    assert [name for name in PENDING if (ROOT / name).exists()] == []


def test_every_page_is_in_the_index() -> None:
    """Each page of docs/ is linked from docs/README.md."""
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for _, target in links(index)}
    pages = {page for page in PAGES if page.is_relative_to(ROOT / "docs") and page != index}
    assert sorted(str(page.relative_to(ROOT)) for page in pages - linked) == []


def figures(page: Path) -> set[str]:
    """The figures of a page's prose: times, sizes, shares, and counts such as ``3 / 3``."""
    text = " ".join(re.sub(r"\]\([^)]*\)", "]", line) for _, line in prose(page))
    units = r"(?:s|ms|min|h|%|[KMG]i?B|nats|points)\b|%"
    return set(re.findall(rf"\d[\d,.]*(?: min \d+)? ?(?:{units})|\d+ / \d+", text))


def unmeasured(page: Path) -> list[str]:
    """The figures of a page that docs/measured.md lacks; a count may be written in words there."""
    measured = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    return sorted(
        it for it in figures(page) if not (_stands(it, measured) or _stands(it.replace(" / ", " of "), measured))
    )


def _stands(figure: str, text: str) -> bool:
    """Whether a text has the figure, and not as a part of another one."""
    return re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\w)", text) is not None


def test_figures_of_the_readme_are_measured() -> None:
    """Each figure with a unit in README.md, and each count of faults, stands in docs/measured.md."""
    assert len(figures(ROOT / "README.md")) > 10
    assert unmeasured(ROOT / "README.md") == []


def test_the_check_sees_an_unmeasured_figure(tmp_path: Path) -> None:
    """The negative control of the test above: a time, a share and a count that nobody measured."""
    page = tmp_path / "page.md"
    page.write_text("| in 3 h 17 s | 99.97 % | 71 / 72 | 1,386 s | 11 / 11 |\n", encoding="utf-8")
    assert unmeasured(page) == ["17 s", "3 h", "71 / 72", "99.97 %"]


def test_fences_are_closed_and_named() -> None:
    """Every fenced block is closed and says what it holds."""
    assert [block.place for page in PAGES for block in blocks(page) if block.language not in LANGUAGES] == []
