"""The published result, from its reconstruction: the judges and the audit derive each number of the page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from attacker import Attacker
from full_run import CANDIDATE, CONTROLS, FULL, FullRun
from published import GAINED, LOST, QUESTIONS, RIGHT, build_published, gsm8k, joint, tables

from pytest_kvqual.audit.auditor import Options, audit
from pytest_kvqual.cli import main
from pytest_kvqual.errors import RefusedError
from pytest_kvqual.judge.permit import grant
from pytest_kvqual.judge.sequence import standing
from pytest_kvqual.judge.verdict import Outcome
from pytest_kvqual.receipt.write import disk_digests, read_all
from pytest_kvqual.stats.net import net_ways

PAGE = Path(__file__).resolve().parents[2] / "docs" / "published-result.md"
SHORT = replace(
    FULL, length=64, gsm8k_prompt=(8, 12), gsm8k_answer=(6, 14), gsm8k_max_tokens=40, prompts=3, parity_tokens=5
)
"""As many documents, steps and questions as were published, with short prompts and answers."""
UPPER = {"native-flashinfer": "2.196", "native-fa3": "2.373"}
NET = {"native-flashinfer": (-3, -15, 9), "native-fa3": (-7, -19, 5)}
"""In questions: observed, and the limits of the interval."""
POINTS = {"native-flashinfer": ("-0.227", "-1.137", "+0.682"), "native-fa3": ("-0.531", "-1.440", "+0.379")}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> FullRun:
    """The reconstruction, with short texts."""
    return build_published(tmp_path_factory.mktemp("published"), size=SHORT)


@pytest.fixture(scope="module")
def page() -> str:
    """The document that tells the result."""
    return PAGE.read_text(encoding="utf-8")


def details(run: FullRun, gate: str) -> Mapping[str, Any]:
    """The numbers of a receipt."""
    return run.receipts[gate].verdict.details


def points(questions: int) -> str:
    """A net change in percentage points, as the page prints it."""
    return f"{100 * questions / QUESTIONS:+.3f}"


def test_the_judge_derives_each_gsm8k_number(published: FullRun, page: str) -> None:
    """Right answers, losses, gains, bounds and intervals against both controls are the page's; the gate says FAIL."""
    found = details(published, "gsm8k")
    assert {name: counts["right"] for name, counts in found["answers"].items()} == RIGHT
    assert {name: counts["wrong"] for name, counts in found["answers"].items()} == {
        name: QUESTIONS - right for name, right in RIGHT.items()
    }
    for control in CONTROLS:
        pair = found["pairs"][control]
        assert (len(pair["lost"]), len(pair["gained"])) == (LOST[control], GAINED[control])
        assert f"{100 * pair['upper']:.3f}" == UPPER[control]
        assert (pair["net"], pair["net_lower"], pair["net_upper"]) == NET[control]
        assert tuple(map(points, NET[control])) == POINTS[control]
    assert found["most_lost"] == 17
    verdict = published.receipts["gsm8k"].verdict
    assert verdict.outcome is Outcome.FAIL
    assert [re.findall(r"upper bound (\S+) %, expected below 2 %", line) for line in verdict.findings] == [
        [UPPER[control]] for control in CONTROLS
    ]
    for number in (*RIGHT.values(), *LOST.values(), *GAINED.values()):
        assert f"| {number:,} " in page
    for control in CONTROLS:
        assert f"{UPPER[control]} %" in page
        net, lower, upper = POINTS[control]
        assert f"| {net} " in page
        assert f"[{lower}, {upper}]" in page


def test_the_judge_derives_each_retrieval_number(published: FullRun, page: str) -> None:
    """91 of 100 in each arm, one lost and one gained, 4.656 % below 5 %: the gate passes, and so does nll."""
    found = details(published, "retrieval")
    assert {name: counts["right"] for name, counts in found["answers"].items()} == dict.fromkeys(RIGHT, 91)
    for control in CONTROLS:
        pair = found["pairs"][control]
        assert (len(pair["lost"]), len(pair["gained"]), f"{100 * pair['upper']:.3f}") == (1, 1, "4.656")
    assert found["most_lost"] == 1
    assert published.receipts["retrieval"].outcome is Outcome.PASS
    assert published.receipts["nll"].outcome is Outcome.PASS
    delta = details(published, "nll")["delta"]
    assert {name: numbers["documents"] for name, numbers in delta.items()} == dict.fromkeys(CONTROLS, 32)
    assert "91 right" in page
    assert "4.656 %" in page


def test_the_audit_derives_the_same(published: FullRun) -> None:
    """The audit, which shares no code with the judges, derives every number and figure of theirs."""
    result = audit(Options(run_dir=published.run_dir))
    assert [finding.line() for finding in result.report.findings] == []
    for gate in result.gates:
        if gate.gate in ("parity", "nll", "retrieval", "gsm8k"):
            receipt = published.receipts[gate.gate]
            assert (gate.how, gate.derived) == ("re-derived", receipt.outcome.value)
            assert gate.derived_figure == receipt.figure
    assert not result.passed
    assert result.verdict() == (
        "FAILED: the records are consistent; preservation not established: gsm8k FAIL; "
        "timing refused: gsm8k (does not stand), fidelity (planned)"
    )


@pytest.mark.parametrize(
    ("gate", "place"),
    [
        ("gsm8k", ("pairs", control, key))
        for control in CONTROLS
        for key in ("upper", "net", "net_lower", "net_upper", "lost", "gained")
    ]
    + [("gsm8k", ("answers", name, "right")) for name in (CANDIDATE, *CONTROLS)]
    + [("retrieval", ("pairs", control, "upper")) for control in CONTROLS]
    + [("retrieval", ("answers", name, "right")) for name in (CANDIDATE, *CONTROLS)],
)
def test_the_audit_holds_each_number_against_its_own(
    published: FullRun, short_copy: Path, gate: str, place: tuple[str, ...]
) -> None:
    """A receipt with another value in one of the page's numbers is not what the audit derives."""
    attack = Attacker(published, short_copy)
    kept = {path: path.read_bytes() for path in attack.receipts}

    def change(predicate: Any) -> None:
        inner = predicate["details"]
        for step in place[:-1]:
            inner = inner[step]
        value = inner[place[-1]]
        inner[place[-1]] = value[:-1] if isinstance(value, list) else value + (1 if isinstance(value, int) else 1e-15)

    try:
        attack.predicate(gate, change)
        attack.seal_receipts()
        assert {finding.check for finding in audit(Options(run_dir=attack.folder)).report.findings} <= {10, 12}
    finally:
        for path, data in kept.items():
            path.write_bytes(data)


@pytest.fixture(scope="module")
def short_copy(published: FullRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run directory, whose receipts a test may change and must restore."""
    return Attacker.copy(published, tmp_path_factory.mktemp("copy") / "run").folder


def test_timing_is_refused(published: FullRun, page: str) -> None:
    """No permit to time: the sequence names gsm8k's FAIL, and the gate that is not there yet."""
    study, receipts = published.study, read_all(published.run_dir)
    given: dict[str, Any] = {
        "implementation": published.implementation,
        "digests": disk_digests(published.run_dir),
        "damaged": receipts.damaged,
    }
    found = standing(study, "trial", receipts.receipts, published.scope(), **given)
    assert [(refusal.gate, refusal.kind) for refusal in found.refusals] == [
        ("gsm8k", "failed"),
        ("fidelity", "planned"),
    ]
    assert "says FAIL: rule 6: lost 20" in found.refusals[0].reason
    with pytest.raises(RefusedError, match=r"trial: found 11 standing receipts, expected 13: gsm8k: failed: "):
        grant(study, "trial", receipts.receipts, published.scope(), **given)
    assert "**preservation not established**" in page
    assert "| trial | refused |" in page


def test_the_limit_that_differs_from_the_page_is_exact(page: str) -> None:
    """P(net <= 9) is 0.980370, above 0.975, and at 8 it is below: the limit is 9 of 1,319, not the published 10."""
    ways, total, at = 0, QUESTIONS**QUESTIONS, dict[int, Fraction]()
    for net, count in net_ways(LOST["native-flashinfer"], GAINED["native-flashinfer"], QUESTIONS):
        ways += count
        at[net] = Fraction(ways, total)
        if net == 10:
            break
    assert at[8] < Fraction(975, 1000) <= at[9]
    for net, shown in ((8, "+0.607"), (9, "+0.682"), (10, "+0.758")):
        assert points(net) == shown
        assert f"| {net} | {shown} | {float(at[net]):.6f} |" in page
    assert at[9] - Fraction(980370, 10**6) < Fraction(1, 10**6)


def test_every_table_with_the_published_counts_leads_to_the_same_figures(page: str) -> None:
    """The page leaves two counts open; all 336 tables have its right answers, losses and gains."""
    found = list(tables())
    assert len(found) == 336
    assert f"All {len(found)} tables" in page
    for table in (found[0], joint(10, 7), found[-1]):
        kinds = gsm8k(table)
        assert {arm: values.count("right") for arm, values in kinds.items()} == RIGHT
        for control in CONTROLS:
            pairs = list(zip(kinds[control], kinds[CANDIDATE], strict=True))
            assert pairs.count(("right", "wrong")) == LOST[control]
            assert pairs.count(("wrong", "right")) == GAINED[control]
    with pytest.raises(ValueError, match="expected a count"):
        joint(21, 7)


@pytest.mark.parametrize(
    ("given", "percent", "passes"),
    [
        (("20", "17", "1319", "0.02"), "2.196", False),
        (("22", "15", "1319", "0.02"), "2.373", False),
        (("1", "1", "100", "0.05"), "4.656", True),
    ],
)
def test_the_commands_of_the_page_say_so(
    given: tuple[str, str, str, str], percent: str, passes: bool, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kvqual bound` prints the bound, and exits 1 where it is not below the limit."""
    lost, gained, total, limit = given
    words = ["bound", "--lost", lost, "--gained", gained, "--total", total, "--limit", limit]
    assert main(words) == (0 if passes else 1)
    assert percent in capsys.readouterr().out
    (line,) = [line for line in page.splitlines() if f"kvqual {' '.join(words)} " in line]
    assert line.endswith(f"# {percent} %")


def test_the_files_of_the_reconstruction_say_what_it_is(published: FullRun) -> None:
    """Where a reader looks for the engine, the files say that none ran."""
    log = (published.attempt(CANDIDATE) / "server.log").read_text(encoding="utf-8")
    assert log.startswith("generated: no server ran")
    assert json.loads((published.study_copy / "panels" / "nll.json").read_bytes())["sources"] == ["generated"]
    assert (published.study_copy / "study.toml").read_text(encoding="utf-8").startswith("# Generated: no engine ran")
