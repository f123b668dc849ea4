"""The page in a headless Chromium. Where there is none these are skipped; test_gate_page.py reads the page without."""

from __future__ import annotations

import re
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest
from full_run import FullRun
from page_reader import Page

from pytest_kvqual.report.gate.page import render
from pytest_kvqual.report.gate.run import read_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="found no chromium: install one to look at the page in it")


@pytest.fixture(scope="module")
def page(passing_run: FullRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a passing run, alone in a folder, as from a mail."""
    path = tmp_path_factory.mktemp("mail") / "report.html"
    path.write_text(render(read_run(passing_run.run_dir)), encoding="utf-8")
    return path


def browse(page: Path, profile: Path, *options: str) -> str:
    """Open the page; returns what the browser printed."""
    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--hide-scrollbars", f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND", *options,
        page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout


def corner(path: Path) -> tuple[int, ...]:
    """The colour of the first pixel of a PNG, without a library for images."""
    data = path.read_bytes()
    chunks, place = b"", 8
    while place < len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        if data[place + 4 : place + 8] == b"IDAT":
            chunks += data[place + 8 : place + 8 + size]
        place += 12 + size
    return tuple(zlib.decompress(chunks)[1:4])


def test_light_and_dark(page: Path, tmp_path: Path) -> None:
    """The page follows the reader's colour scheme."""
    found = {}
    for name, scheme in (("light", 1), ("dark", 0)):
        path = tmp_path / f"{name}.png"
        browse(page, tmp_path, f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={path}")
        found[name] = sum(corner(path)) / 3
    assert found["light"] > 230
    assert found["dark"] < 40


def test_what_a_browser_sees(page: Path, tmp_path: Path) -> None:
    """The browser's own tree has the elements that the file has: nothing was repaired, and nothing ran."""
    seen = Page(browse(page, tmp_path, "--dump-dom"))
    made = Page(page.read_text(encoding="utf-8"))
    assert [it.tag for it in seen.elements] == [it.tag for it in made.elements]
    assert seen.one("h1").text == made.one("h1").text


def asked_for(page: Path, profile: Path) -> set[str]:
    """Every URL in the browser's log of its network while it opened a page, but those of files."""
    log = profile / "net.json"
    browse(page, profile, f"--log-net-log={log}", "--dump-dom", "--disable-background-networking")
    found = re.findall(r'"url":"([^"]+)"', log.read_text(encoding="utf-8", errors="replace"))
    # The browser asks its maker for updates and the time, whatever page is open.
    own = re.compile(r"https?://[^/]*\.(google|googleapis|gvt1)\.com/")
    return {url for url in found if not url.startswith(("file:", "data:")) and not own.match(url)}


def test_no_request_leaves(page: Path, tmp_path: Path) -> None:
    """Opening the page asks for nothing, even with an image in it: its policy holds. Without the policy it is seen."""
    html = page.read_text(encoding="utf-8")
    probe = html.replace("</main>", '<img src="http://probe.invalid/x.png" alt=""></main>')
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    for name, text in (("asks", policy.sub("", probe)), ("held", probe)):
        (tmp_path / f"{name}.html").write_text(text, encoding="utf-8")
    seen = {name: asked_for(tmp_path / f"{name}.html", tmp_path) for name in ("asks", "held")}
    assert [url for url in seen["asks"] if "probe.invalid" in url]
    assert seen["held"] == set()


def test_it_prints_with_everything_open(page: Path, tmp_path: Path) -> None:
    """On paper what is folded on the screen is open: the page has more sheets than the folded one would need."""
    whole, folded = tmp_path / "whole.pdf", tmp_path / "folded.pdf"
    browse(page, tmp_path, f"--print-to-pdf={whole}", "--no-pdf-header-footer")
    plain = tmp_path / "folded.html"
    plain.write_text(page.read_text(encoding="utf-8").replace("details::details-content", "details::nothing"))
    browse(plain, tmp_path, f"--print-to-pdf={folded}", "--no-pdf-header-footer")
    sheets = [len(re.findall(rb"/Type\s*/Page\b", path.read_bytes())) for path in (whole, folded)]
    assert sheets[0] > sheets[1] > 0
