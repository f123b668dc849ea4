"""The page of the gate report."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock
from xml.etree import ElementTree

import full_run
import pytest
from full_run import CANDIDATE, CONTROLS, FULL, FullRun
from hypothesis import given, settings
from hypothesis import strategies as st
from page_reader import Page
from report_run import FEW_LOST, write_report_run

from pytest_kvqual._canonical import sha256_bytes
from pytest_kvqual.audit.command import main as audit
from pytest_kvqual.errors import ReceiptError
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict
from pytest_kvqual.receipt.statement import build
from pytest_kvqual.receipt.write import read_all, write
from pytest_kvqual.report.gate import answers, evidence
from pytest_kvqual.report.gate.figures import figures
from pytest_kvqual.report.gate.page import _limit, headline, render
from pytest_kvqual.report.gate.run import RunState, read_run

HOSTILE = (
    "<script>alert(1)</script>",
    "</blockquote></td><img src=x onerror=alert(1)>",
    "&lt;b&gt;",
    "{{7*7}}{%raw%}",
    "a\x00b\x1b[2J",
    "\u202egnp.exe\u2066",
    "\u200b\ufeff",
    "]]>--><!--",
    "'\"` javascript:alert(1)",
    "\U000e0041\ufe0f",
)
SHORT = replace(
    FULL, length=64, gsm8k_prompt=(8, 12), gsm8k_answer=(60, 120), gsm8k_max_tokens=200, prompts=3, parity_tokens=5
)
"""As many questions, documents and steps as a full study, with short prompts."""


def rendered(run_dir: Path) -> str:
    """The page of a run directory."""
    return render(read_run(run_dir))


@pytest.fixture(scope="module")
def good(passing_run: FullRun) -> Page:
    """The page of the passing run."""
    return Page(rendered(passing_run.run_dir))


@pytest.fixture(scope="module")
def bad(failing_run: FullRun) -> Page:
    """The page of the failing run."""
    return Page(rendered(failing_run.run_dir))


# -- what the first screen says ----------------------------------------------------------------------------------------


def test_the_verdict_of_a_passing_run(good: Page) -> None:
    """The heading is the verdict in one sentence, and no other heading is of its rank."""
    assert good.one("h1").text == (
        "candidate passes all 12 gates before timing at length 32, and is faster than its controls in every comparison "
        "that was declared."
    )


def test_the_verdict_of_a_failing_run(bad: Page) -> None:
    """A failing run names the first gate that fails, by number and name."""
    assert bad.one("h1").text == "candidate does not qualify at length 32: gate 12, gsm8k, fails."


def test_the_ladder_says_what_the_receipts_say(good: Page, passing_run: FullRun) -> None:
    """Outcome, figure, null and faults of each gate are those of its newest receipt, digit for digit."""
    (ladder,) = [it for it in good.all("table") if it.attributes.get("class") == "ladder"]
    newest = {receipt.gate: receipt for receipt in read_all(passing_run.run_dir).receipts}
    (rows,) = [it.children for it in ladder.children if it.tag == "tbody"]
    for name, receipt in newest.items():
        (row,) = [it for it in rows if [cell.text for cell in it.children if cell.tag == "th"] == [name]]
        cells = [cell.text.strip() for cell in row.children]
        assert cells[0] == str(receipt.order)
        assert cells[2] == f"✓ {receipt.outcome.value}"
        assert receipt.figure in cells[3]
        assert cells[5] == "passed"
        assert cells[6] == f"{receipt.verdict.faults_caught} of {receipt.verdict.faults_seeded}"


def test_scope_and_claims(good: Page, bad: Page) -> None:
    """The first screen says what of what was tested, what is claimed, and what is not."""
    about = good.one("aside").text
    for words in ("Qwen3-8B-AWQ", "32 tokens", "48 GiB", "vllm 0.32.0", "native-flashinfer, native-fa3"):
        assert words in about
    assert "fewer than 2\xa0% are lost against each control (95\xa0% confidence)" in about
    assert "Who wrote the files" in about
    assert "of gsm8k" not in bad.one("aside").text
    assert "Anything about speed" in bad.one("aside").text


# -- what stands below -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "title",
    [
        "Worst error of any output row", "ΔNLL of each document", "Questions lost, and the bound that decides",
        "Right answers by grade", "Error of the time to the first token", "TTFT and TPOT by arm", "Dispatch lateness",
        "Block effects",
    ],
)  # fmt: skip
def test_each_plot_is_there_with_its_numbers(good: Page, title: str) -> None:
    """Each gate has the plot that decides it, and a table with the same numbers."""
    found = [it for it in good.all("figure") if it.children[0].text.startswith(f"{title}.")]
    assert found
    for figure in found:
        below = [it for it in good.elements if it.tag in ("svg", "table")]
        assert any(it.tag == "svg" for it in below)
        assert "The numbers of this plot" in figure.text


def test_numbers_of_the_nll_plot(good: Page, passing_run: FullRun) -> None:
    """The table of the plot has each document's difference, mean and bound as the receipt has them."""
    details = passing_run.receipts["nll"].verdict.details
    delta = details["delta"]
    assert isinstance(delta, Mapping)
    text = good.by_id("s1-10-documents").text
    for control in CONTROLS:
        for value in (*delta[control]["by_document"].values(), delta[control]["mean"], delta[control]["upper"]):
            assert f"{value:+.6f}" in text


def test_lost_questions_side_by_side(good: Page, passing_run: FullRun) -> None:
    """Each lost question has the expected answer, both answers, how they were read, and the first differing token."""
    names = [f"gsm8k-{place:04d}" for place in FEW_LOST]
    section = good.by_id("s1-12").text
    records = {}
    for arm in (CANDIDATE, CONTROLS[0]):
        lines = (passing_run.attempt(arm) / "gsm8k.jsonl").read_text().splitlines()
        records[arm] = {it["id"]: json.loads(it["body"])["choices"][0] for it in map(json.loads, lines)}
    rows = [
        it for it in good.all("tr") if any(child.tag == "blockquote" for cell in it.children for child in cell.children)
    ]
    for name in names:
        row = next(it for it in rows if it.children[0].text.startswith(name))
        control, own = records[CONTROLS[0]][name], records[CANDIDATE][name]
        assert own["text"] in row.children[2].text
        assert "wrong" in row.children[2].text
        assert "right" in row.children[1].text
        both = enumerate(zip(control["token_ids"], own["token_ids"], strict=False))
        at = next(place for place, (one, other) in both if one != other)
        assert f"({control['token_ids'][at]} / {own['token_ids'][at]})" in section


def test_receipts_with_digests_and_commands(good: Page, passing_run: FullRun) -> None:
    """The digest of each receipt, of the lock, and of each evidence file stands in full, and how to run it again."""
    text = good.one("main").text
    for receipt in read_all(passing_run.run_dir).receipts:
        assert receipt.sha256 in text or receipt.gate == "trial"
        for name, sha256 in receipt.evidence.items():
            assert name in text
            assert sha256 in text
    assert passing_run.lock in text
    commands = [it.text for it in good.all("pre")]
    assert "pytest qualification/ -m gpu --study synthetic --arm candidate --length 32" in commands
    assert "kvqual audit RUN_DIR --arm candidate --length 32" in commands


@pytest.mark.parametrize(
    ("key", "value", "begins"),
    [
        ("format", "bf16", "kvqual freeze synthetic --format bf16 --check"),
        ("name", "x; rm -rf ~ #", "kvqual freeze 'x; rm -rf ~ #' --check"),
        ("platform", "gpu; rm -rf ~ #", "kvqual freeze synthetic --check"),
    ],
)
def test_commands_are_of_the_study_and_nothing_else(passing_run: FullRun, key: str, value: str, begins: str) -> None:
    """The format of a study that has several is named; what a hostile study calls itself is one word of a shell."""
    run = read_run(passing_run.run_dir)
    run = replace(
        run, scopes=tuple(replace(it, study=replace(it.study, **cast(Any, {key: value}))) for it in run.scopes)
    )
    commands = [it.text for it in Page(render(run)).all("pre")]
    assert begins in commands
    assert not any("rm" in shlex.split(it) for it in commands if it.startswith(("kvqual", "pytest")))
    gates = next(it for it in commands if it.startswith("pytest"))
    assert ("--format bf16" in gates) is (key == "format")


def test_the_page_is_a_function_of_the_run_directory(passing_run: FullRun) -> None:
    """Rendered twice it is the same to the byte, and nothing in the run directory has changed."""
    before = {path: path.stat().st_mtime_ns for path in passing_run.run_dir.rglob("*")}
    assert rendered(passing_run.run_dir) == rendered(passing_run.run_dir)
    assert before == {path: path.stat().st_mtime_ns for path in passing_run.run_dir.rglob("*")}


# -- self-contained, and readable by everybody -------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["good", "bad"])
def test_nothing_is_loaded(which: str, request: pytest.FixtureRequest) -> None:
    """No script, no reference but to a place of the same page, no import in the style; a policy forbids the rest."""
    page: Page = request.getfixturevalue(which)
    assert page.all("script", "link", "iframe", "object", "embed", "img", "base", "form", "image", "use") == []
    assert all(name == "href" and value.startswith("#") for _, name, value in page.references())
    assert not [name for it in page.elements for name in it.attributes if name.startswith("on") or name == "style"]
    style = page.one("style").text
    assert not re.search(r"@import|url\(|expression|https?:", style)
    policy = next(it for it in page.all("meta") if it.attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy.attributes["content"] == "default-src 'none'; style-src 'unsafe-inline'"


@pytest.mark.parametrize("which", ["good", "bad"])
def test_structure(which: str, request: pytest.FixtureRequest) -> None:
    """Landmarks, headings without a gap, unique ids, links that lead somewhere, tables with captions and headers."""
    page: Page = request.getfixturevalue(which)
    assert page.one("html").attributes["lang"] == "en"
    assert [len(page.all(tag)) for tag in ("main", "nav", "footer", "h1")] == [1, 1, 1, 1]
    assert [it.text.strip() != "" for it in page.all("title") if it.path == ("html", "head")] == [True]
    ids = [it.attributes["id"] for it in page.elements if "id" in it.attributes]
    assert len(set(ids)) == len(ids)
    for element in page.elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert set(element.attributes.get(name, "").split()) <= set(ids)
    assert {value[1:] for _, _, value in page.references()} <= set(ids)
    assert page.all("a")[0].attributes["href"] == "#content"
    level = 0
    for heading in page.all("h1", "h2", "h3", "h4", "h5", "h6"):
        assert int(heading.tag[1]) <= level + 1, heading.text
        level = int(heading.tag[1])
    for table in page.all("table"):
        assert table.children[0].tag == "caption"
        assert table.children[0].text.strip()
    assert {it.attributes["scope"] for it in page.all("th")} == {"col", "row"}


@pytest.mark.parametrize("which", ["good", "bad"])
def test_plots_have_words(which: str, request: pytest.FixtureRequest) -> None:
    """Each image has a title and a description that its label names, and stands where the keyboard reaches it."""
    page: Page = request.getfixturevalue(which)
    assert page.all("svg")
    for svg in page.all("svg"):
        assert svg.attributes["role"] == "img"
        names = svg.attributes["aria-labelledby"].split()
        assert [page.by_id(name).tag for name in names] == ["title", "desc"]
        assert all(page.by_id(name).text.strip() for name in names)
    scrolls = [it for it in page.elements if it.attributes.get("class") == "scroll"]
    assert all(it.attributes["tabindex"] == "0" and it.attributes["aria-label"] for it in scrolls)
    assert not [it for it in page.elements if int(it.attributes.get("tabindex", "0")) > 0]


def test_outcomes_are_words_and_not_colours(bad: Page) -> None:
    """A badge without its colour still says its outcome."""
    badges = [it for it in bad.all("span") if it.attributes.get("class", "").startswith("badge")]
    assert badges
    assert all(re.search(r"[A-Za-z]", it.text) for it in badges)


def _palette(style: str, dark: bool) -> dict[str, str]:
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    found: dict[str, str] = {}
    for block in blocks[: 2 if dark else 1]:
        found |= dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})(?=;)", block))
    return found


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_contrast(good: Page, dark: bool) -> None:
    """Text has a contrast of at least 4.5 and what is drawn of at least 3, in both schemes (WCAG 2.2, level AA)."""
    colours = _palette(good.one("style").text, dark)
    grounds = ("bg", "panel")
    texts = [
        (name, ground) for name in ("ink", "muted", "link", "pass", "fail", "unsure", "refused") for ground in grounds
    ]
    texts += [(name, f"{name}-soft") for name in ("pass", "fail", "unsure", "refused", "none")]
    texts += [("ink", name) for name in ("soft", "fail-soft", "unsure-soft")]
    texts += [("muted", name) for name in ("soft", "fail-soft", "unsure-soft")] + [
        ("mark-ink", "mark"),
        ("fail", "fail-soft"),
    ]
    texts += [("link", "fail-soft"), ("link", "unsure-soft")]
    assert {pair: round(_contrast(*map(colours.__getitem__, pair)), 2) for pair in texts
            if _contrast(*map(colours.__getitem__, pair)) < 4.5} == {}  # fmt: skip
    drawn = [(name, ground) for name in ("s0", "s1", "s2", "s3", "fail") for ground in grounds]
    assert all(_contrast(*map(colours.__getitem__, pair)) >= 3 for pair in drawn)


def test_dark_and_print_change_every_colour(good: Page) -> None:
    """The dark scheme and print set each colour that the light one sets."""
    blocks = re.findall(r":root \{(.*?)\}", good.one("style").text, re.DOTALL)
    names = [set(re.findall(r"--([a-z0-9-]+):", block)) for block in blocks]
    assert len(names) == 3
    assert names[0] == names[1] == names[2]


# -- hostile text ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run whose answers are made of markup, controls and characters that turn text around."""
    with mock.patch.object(full_run, "_WORDS", HOSTILE):
        run = write_report_run(tmp_path_factory.mktemp("hostile"), passes=False)
    return rendered(run.run_dir)


def test_hostile_answers_stay_text(hostile: str, bad: Page) -> None:
    """Answers bring no element and no attribute into the page, whatever they hold."""
    page = Page(hostile)
    assert page.all("script", "img") == []
    assert {it.tag for it in page.elements} == {it.tag for it in bad.elements}
    assert {name for it in page.elements for name in it.attributes} == {
        name for it in bad.elements for name in it.attributes
    }
    quoted = "".join(it.text for it in page.all("blockquote"))
    assert "<script>alert(1)</script>" in quoted
    assert "</blockquote></td><img src=x onerror=alert(1)>" in quoted
    assert "{{7*7}}" in quoted
    assert "&lt;b&gt;" in quoted


def test_hostile_characters_are_shown(hostile: str) -> None:
    """A character that cannot be seen, or that turns text around, stands there by its code point."""
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\U000e0041\ufe0f]", hostile
    )
    for name in ("0000", "001B", "202E", "2066", "200B", "FEFF", "E0041", "FE0F"):
        assert f"⟨U+{name}⟩" in hostile


def test_hostile_findings_and_figures(tmp_path: Path, passing_run: FullRun) -> None:
    """What a receipt says of a model's answer is text too: in the heading, the ladder, findings, faults and plots."""
    text = "".join(HOSTILE)
    verdict = Verdict(
        gate="identity", outcome=Outcome.FAIL, figure=text, findings=(text,), null=Check(passed=False, figure=text),
        poison=(Poison(fault=text, caught=False, figure=text),), details={text: text},
    )  # fmt: skip
    put(tmp_path, passing_run, verdict)
    html = rendered(tmp_path)
    page = Page(html)
    assert page.all("script", "img") == []
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 6
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", html)


# -- what is missing, damaged, or not a pass ---------------------------------------------------------------------------


def put(
    run_dir: Path, run: FullRun, verdict: Verdict, *, order: int = 1, requires: Mapping[str, str] | None = None
) -> Path:
    """Write one receipt of the run's scope."""
    evidence = {"candidate-32-1/attempt-1/x.json": "0" * 64} if verdict.outcome is Outcome.PASS else {}
    statement = build(
        verdict, run.scope(), order=order, evidence=evidence, requires=requires or {}, implementation="1" * 64
    )
    return write(run_dir, statement)


def passed(gate: str) -> Verdict:
    """A PASS."""
    return Verdict(
        gate=gate, outcome=Outcome.PASS, figure="fine", null=Check(passed=True, figure="fine"),
        poison=(Poison(fault="planted", caught=True, figure="seen"),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [
        ("FAIL", "candidate does not qualify at length 32: gate 1, identity, fails."),
        ("INCONCLUSIVE", "Nothing is shown about candidate at length 32: gate 1, identity, is inconclusive."),
        ("REFUSED", "candidate is not qualified at length 32: gate 1, identity, was refused."),
    ],
)
def test_each_outcome_has_its_sentence(outcome: str, sentence: str, tmp_path: Path, passing_run: FullRun) -> None:
    """The sentence is that of the receipt's own word."""
    put(tmp_path, passing_run, Verdict(gate="identity", outcome=Outcome(outcome), figure="because", findings=("it",)))
    page = Page(rendered(tmp_path))
    # There is no study beside the receipt.
    assert page.one("h1").text == f"As written: {sentence}"
    assert outcome in page.by_id("s1-1").text


def test_a_gate_without_a_receipt_is_no_pass(copied: Callable[[], Path], passing_run: FullRun) -> None:
    """With one receipt taken away the headline is not that of a passing run."""
    run_dir = copied()
    (run_dir / passing_run.receipts["routing"].name).unlink()
    page = Page(rendered(run_dir))
    assert (
        page.one("h1").text == "As written: candidate is not qualified at length 32: gate 4, routing, has no receipt."
    )
    assert "rests on a receipt of routing" in page.by_id("s1-5").text


def test_missing_evidence_is_said_in_its_place(copied: Callable[[], Path], passing_run: FullRun) -> None:
    """With a capture gone the page says so at the top, in the ladder, and where the answers would stand."""
    run_dir = copied()
    name = f"{passing_run.stem}/attempt-1/gsm8k.jsonl"
    (run_dir / "evidence" / name).unlink()
    page = Page(rendered(run_dir))
    assert page.one("h1").text.startswith("As written: candidate passes all 12 gates")
    assert page.all("header")[0].attributes["class"] == "verdict unsure"
    (box,) = [it for it in page.elements if it.attributes.get("class") == "warnbox"]
    assert box.text.startswith(
        "The verdict is as written, and 1 thing is not as the receipts say. Check it with kvqual audit"
    )
    assert f"evidence/{name}: found no such file" in box.text
    total = len(passing_run.receipts["gsm8k"].evidence)
    assert f"1 of {total} evidence files not as named" in page.all("table")[0].text
    section = page.by_id("s1-12").text
    assert f"evidence/{name}: found no such file: the answers of 'candidate' are not shown" in section
    assert page.all("blockquote")  # those of the control are intact, and shown
    assert "✓ PASS" in page.all("table")[0].text


def test_changed_evidence_is_not_shown(copied: Callable[[], Path], passing_run: FullRun) -> None:
    """With one byte of a capture changed none of its answers is shown, and the digest that was found is."""
    run_dir = copied()
    path = run_dir / "evidence" / passing_run.stem / "attempt-1" / "gsm8k.jsonl"
    data = path.read_bytes().replace(b" is ", b" si ", 1)
    path.write_bytes(data)
    html = rendered(run_dir)
    assert f"found sha256 {sha256_bytes(data)}, expected" in html
    assert "the answers of 'candidate' are not shown" in Page(html).by_id("s1-12").text


@pytest.mark.parametrize("kind", ["link", "folder", "link above"])
def test_no_link_is_followed(kind: str, copied: Callable[[], Path], passing_run: FullRun, tmp_path: Path) -> None:
    """A link or a folder in the place of a capture is not read, wherever it leads."""
    run_dir = copied()
    path = run_dir / "evidence" / passing_run.stem / "attempt-1" / "gsm8k.jsonl"
    if kind == "link above":
        path.parent.rename(tmp_path / "elsewhere")
        path.parent.symlink_to(tmp_path / "elsewhere")
    else:
        data = path.read_bytes()
        path.unlink()
        (tmp_path / "same").write_bytes(data)
        path.mkdir() if kind == "folder" else path.symlink_to(tmp_path / "same")
    assert "cannot be read" in Page(rendered(run_dir)).by_id("s1-12").text


def test_a_missing_recording_is_left_out_and_named(copied: Callable[[], Path], passing_run: FullRun) -> None:
    """The plots of latencies say which recording is not in them."""
    run_dir = copied()
    name = f"{passing_run.folder(CONTROLS[0])}/attempt-2/cell-open.jsonl"
    (run_dir / "evidence" / name).unlink()
    page = Page(rendered(run_dir))
    for key in ("s1-14-distributions", "s1-14-lateness"):
        assert f"evidence/{name}: found no such file: left out of the plots" in page.by_id(key).text


def test_a_damaged_receipt_has_no_verdict(copied: Callable[[], Path], passing_run: FullRun) -> None:
    """A receipt with a changed byte shows no outcome of its own, and the headline says so."""
    run_dir = copied()
    path = run_dir / passing_run.receipts["nll"].name
    path.write_bytes(path.read_bytes().replace(b"PASS", b"FAIL", 1))
    page = Page(rendered(run_dir))
    assert (
        page.one("h1").text
        == "As written: candidate is not qualified at length 32: gate 10, nll, has a damaged receipt."
    )
    assert "DAMAGED" in page.by_id("s1-10").text
    assert [it for it in page.all("figure") if it.attributes["id"].startswith("s1-10-")] == []


@pytest.mark.parametrize("what", ["gone", "lock", "study"])
def test_without_the_study_the_receipts_are_shown(what: str, copied: Callable[[], Path], passing_run: FullRun) -> None:
    """Where the frozen study is gone or changed the page says so, and shows what receipts say."""
    run_dir = copied()
    folder = run_dir / "study" / passing_run.lock
    if what == "gone":
        folder.rename(run_dir / "study" / "other")
    else:
        path = folder / {"lock": "lock.json", "study": "study.toml"}[what]
        path.write_bytes(path.read_bytes() + b"\n")
    page = Page(rendered(run_dir))
    (box,) = [it for it in page.elements if it.attributes.get("class") == "warnbox"]
    assert "study/" in box.text
    assert len([it for it in page.all("section") if it.attributes.get("class", "").startswith("gate")]) == 15


def test_no_receipt_is_an_error(tmp_path: Path) -> None:
    """An empty folder is no run directory."""
    with pytest.raises(ReceiptError, match="found no receipt"):
        read_run(tmp_path)


def test_another_scope_counts_for_nothing(tmp_path: Path, passing_run: FullRun) -> None:
    """Receipts of an earlier lock are counted apart and give no outcome to the newer one's gates."""
    old = replace(passing_run, lock="9" * 64)
    put(tmp_path, old, passed("identity"))
    put(tmp_path, old, passed("dispatch"), order=2)
    put(tmp_path, passing_run, passed("identity"))
    found = read_run(tmp_path)
    (scope,) = found.scopes
    assert scope.scope == passing_run.scope()
    assert [(it.name, it.said) for it in scope.gates] == [("identity", "PASS")]
    assert len(scope.others) == 2


def test_a_failed_trial_below_a_newer_one_is_counted(tmp_path: Path, passing_run: FullRun) -> None:
    """Trials of several blocks are counted: a later PASS does not hide an earlier trial that was void."""
    put(tmp_path, passing_run, Verdict(gate="trial", outcome=Outcome.FAIL, figure="void", findings=("void",)))
    put(tmp_path, passing_run, passed("trial"))
    assert "1 of 2 trials PASS; the newest: fine" in Page(rendered(tmp_path)).by_id("s1-1").text


# -- the audit's word --------------------------------------------------------------------------------------------------


def test_an_audit_is_shown_while_it_is_of_these_receipts(failing_run: FullRun, tmp_path: Path) -> None:
    """audit.json is shown with its own words; once a receipt is newer than it, the page says to audit again."""
    run_dir = tmp_path / "run"
    shutil.copytree(failing_run.run_dir, run_dir)
    assert audit([str(run_dir), "--output", str(run_dir / "audit.json")]) == 1
    statement = json.loads((run_dir / "audit.json").read_text())["predicate"]["pytest_kvqual_audit"]
    page = Page(rendered(run_dir))
    assert statement["verdict"] in page.by_id("audit").text
    assert "audit again" not in page.one("main").text
    put(run_dir, failing_run, passed("identity"))
    assert "audit again" in Page(rendered(run_dir)).one("main").text


def test_an_audit_is_not_green_over_evidence_that_changed(failing_run: FullRun, tmp_path: Path) -> None:
    """An audit that passed is no tick beside a file that is not as the receipts say: the page says to audit again."""
    run_dir = tmp_path / "run"
    shutil.copytree(failing_run.run_dir, run_dir)
    audit([str(run_dir), "--output", str(run_dir / "audit.json")])
    statement = run_dir / "audit.json"
    statement.write_text(statement.read_text().replace('"FAILED"', '"PASSED"'))

    def badges() -> list[str]:
        page = Page(rendered(run_dir))
        return [it.attributes["class"] or "" for it in page.elements if "AUDIT PASSED" in it.text and it.tag == "span"]

    assert badges() == ["badge pass"]
    (run_dir / "evidence" / f"{failing_run.stem}/attempt-1/nll.jsonl").unlink()
    assert badges() == ["badge unsure"]
    assert "But not everything is as it read it: audit again." in Page(rendered(run_dir)).one("main").text


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b'{"predicate":{"pytest_kvqual_audit":{}}}'])
def test_an_audit_that_cannot_be_read(data: bytes, tmp_path: Path, passing_run: FullRun) -> None:
    """A file that is no statement of an audit is no audit, and the page says so."""
    put(tmp_path, passing_run, passed("identity"))
    (tmp_path / "audit.json").write_bytes(data)
    assert "audit.json cannot be read" in Page(rendered(tmp_path)).by_id("audit").text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.floats() | st.sampled_from(["nan", "inf", "1/0", "", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def _replaced(value: object, path: list[int], other: object) -> object:
    """``value`` with what a path of places leads to replaced."""
    if not path:
        return other
    if isinstance(value, Mapping) and value:
        key = sorted(value)[path[0] % len(value)]
        return {**value, key: _replaced(value[key], path[1:], other)}
    if isinstance(value, list) and value:
        place = path[0] % len(value)
        return [*value[:place], _replaced(value[place], path[1:], other), *value[place + 1 :]]
    return other


@pytest.fixture(scope="module")
def state(passing_run: FullRun) -> RunState:
    """What the passing run's directory holds."""
    return read_run(passing_run.run_dir)


@settings(max_examples=50)
@given(data=st.data())
def test_whatever_the_details_hold_the_page_is_made(data: st.DataObject, state: RunState) -> None:
    """A receipt whose details are not of the form that its gate writes loses plots, and never the page."""
    run = state
    (scope,) = run.scopes
    drawn = ("placement", "nll", "retrieval", "gsm8k", "fidelity", "superiority")
    gate = data.draw(st.sampled_from([it for it in scope.gates if it.name in drawn]))
    assert gate.receipt is not None
    path = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    details = _replaced(gate.receipt.verdict.details, path, data.draw(JSON))
    verdict = replace(gate.receipt.verdict, details=details if isinstance(details, Mapping) else {})
    changed = replace(gate, receipt=replace(gate.receipt, verdict=verdict))
    for figure in figures(run, scope, changed, "k"):
        ElementTree.fromstring(figure.svg)
        assert all(len(row) == len(figure.columns) for row in figure.rows)
    answers.changed(run, scope, changed)
    _limit(scope, changed)


def _retrieval(grades: Mapping[str, list[int]], passing_run: FullRun, length: int) -> Verdict:
    details = {**passing_run.receipts["retrieval"].verdict.details, "by_grade": {"candidate": grades, "native": grades}}
    return replace(passing_run.receipts["retrieval"].verdict, details=details)


def test_retrieval_by_depth_and_length(tmp_path: Path, passing_run: FullRun) -> None:
    """Depths stand in their order, one panel for each group of questions and each length of the run directory."""
    depths = ("0.05", "0.2", "0.4", "0.95")
    grades = {
        f"{others} other names, at {depth}": [others + place, 8]
        for others in (0, 1)
        for place, depth in enumerate(depths)
    }
    for length in (1024, 8192):
        statement = build(
            _retrieval(grades, passing_run, length), replace(passing_run.scope(), length=length), order=1,
            evidence={"a-1-1/attempt-1/x.json": "0" * 64}, requires={}, implementation="1" * 64,
        )  # fmt: skip
        write(tmp_path, statement)
    page = Page(rendered(tmp_path))
    (table,) = page.by_id("s1-1-grades").children[-1].children[-1].children
    (body,) = [it for it in table.children if it.tag == "tbody"]
    rows = [[cell.text for cell in row.children] for row in body.children]
    assert [row[:3] for row in rows[:4]] == [
        ["0 other names, length 1,024", depth, f"{place} of 8"]
        for place, depth in enumerate(("5 %", "20 %", "40 %", "95 %"))
    ]
    assert {row[0] for row in rows} == {f"{it} other names, length {n}" for it in (0, 1) for n in ("1,024", "8,192")}


# -- of full size ------------------------------------------------------------------------------------------------------


def test_a_study_of_full_size(tmp_path: Path) -> None:
    """1,319 and 100 questions, 32 documents and 20 trials: below 3 MB, and in less than 2 s of processor time."""
    run = write_report_run(tmp_path, size=SHORT, requests=32, tokens=32)
    begun = time.process_time()
    html = rendered(run.run_dir)
    spent = time.process_time() - begun
    assert len(html.encode()) < 3_000_000
    assert spent < 2


def test_what_is_not_shown_is_counted(monkeypatch: pytest.MonkeyPatch, failing_run: FullRun) -> None:
    """Beyond so many lost questions the others stand by id, none is left out."""
    monkeypatch.setattr(answers, "SHOWN", 5)
    pairs = failing_run.receipts["gsm8k"].verdict.details["pairs"]
    assert isinstance(pairs, Mapping)
    lost = pairs[CONTROLS[0]]["lost"]
    text = Page(rendered(failing_run.run_dir)).by_id("s1-12").text
    assert f"{len(lost) - 5} more by id, their answers are in the evidence" in text
    assert all(name in text for name in lost)


def test_a_long_answer_is_cut_around_the_difference(monkeypatch: pytest.MonkeyPatch, failing_run: FullRun) -> None:
    """Of a long answer the beginning, the place of the difference and the end are shown, and the rest is counted."""
    text = "a" * 3000 + "b" * 3000 + "c" * 3000
    pieces = answers._pieces(text, 4500)
    gaps = [it.text for it in pieces if it.kind == "gap"]
    shown = "".join(it.text for it in pieces if it.kind != "gap")
    assert sum(int(it.split()[0].replace(",", "")) for it in gaps) + len(shown) == len(text)
    assert len(shown) <= answers.ANSWER
    assert text[4500:4510] in "".join(it.text for it in pieces if it.kind == "differs")


def test_the_headline_decides_nothing(passing_run: FullRun, failing_run: FullRun) -> None:
    """It is a function of what receipts say: the same words, the same sentence."""
    for run in (passing_run, failing_run):
        (scope,) = read_run(run.run_dir).scopes
        assert headline(scope) == headline(scope)
        assert headline(scope).word == next((it.said for it in scope.asked if it.said != "PASS"), "PASS")


def test_what_is_too_large_to_hold_is_digested_and_not_shown(
    failing_run: FullRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture beyond the bound stays intact evidence; its answers are left out, with the reason."""
    monkeypatch.setattr(evidence, "LARGEST", 1000)
    page = Page(rendered(failing_run.run_dir))
    assert "it has more than 1,000 bytes: the answers of" in page.one("main").text
    assert page.all("blockquote") == []
    assert "are here with the digests that they name" in page.one("header").text


@pytest.mark.parametrize(
    ("key", "value"),
    [("run_on", [{}]), ("run_on", "x"), ("stop", [None]), ("reasoning", ["a", "b", "c"]), ("max_tokens", "x")],
)
def test_rules_of_another_form_leave_the_answers_there(failing_run: FullRun, key: str, value: object) -> None:
    """A frozen study whose rules cannot be used shows both answers, without what a parser would make of them."""
    run = read_run(failing_run.run_dir)
    tables = {**run.scopes[0].study.tables}
    tables["gsm8k"] = {**cast(dict[str, Any], tables["gsm8k"]), key: value}
    run = replace(run, scopes=tuple(replace(it, study=replace(it.study, tables=tables)) for it in run.scopes))
    text = render(run)
    assert Page(text).all("blockquote")
    assert "read as <code>" in rendered(failing_run.run_dir)
    assert "read as <code>" not in text


@pytest.mark.parametrize("damage", [{"expected": 42}, {"grade": None}, {"id": ["x"]}])
def test_a_panel_of_another_form_is_said(failing_run: FullRun, damage: dict[str, object]) -> None:
    """A panel whose expected answers are no texts has none to show."""
    run = read_run(failing_run.run_dir)
    item = {"id": "gsm8k-0000", "prompt": [1], "max_tokens": 3, "expected": "1", "grade": "2 steps", **damage}
    with mock.patch.object(evidence.Evidence, "data", return_value=json.dumps({"items": [item]}).encode()):
        text = Page(render(run)).one("main").text
    assert "cannot be read: expected answers and grades are not shown" in text
