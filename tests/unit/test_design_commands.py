"""``kvqual bound`` and ``kvqual power``: what they print, and how they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_kvqual import cli
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.judge.verdict import Outcome, Verdict
from pytest_kvqual.receipt.statement import build, encode
from pytest_kvqual.report import design

BOUND = ["bound", "--lost", "20", "--total", "1319", "--limit", "0.02"]
POWER = ["power", "--total", "1319", "--limit", "0.02"]


def receipt(path: Path, gate: str, details: dict[str, object]) -> Path:
    """A receipt with these details."""
    verdict = Verdict(gate=gate, outcome=Outcome.FAIL, figure="figure", findings=("finding",), details=details)
    scope = Scope(lock="a" * 64, arm="candidate", length=1024, cache_bytes=4096, engine="b" * 64)
    statement = build(verdict, scope, order=9, evidence={}, requires={}, implementation="c" * 64)
    path.write_bytes(encode(statement, attempt=1))
    return path


def test_bound_not_below_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """The published case: the bound, what would have passed, the net change; exit status 1."""
    assert cli.main([*BOUND, "--gained", "17"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "20 lost of 1319: 95 % upper bound 2.196 %, not below 2 %",
        "up to 17 lost would pass",
        "17 gained: net -3 of 1319, -0.227 points [-1.137, +0.682] at 95 %; decides nothing",
    ]


def test_bound_below_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """Below the limit the exit status is 0; without --gained nothing is said of a net change."""
    assert cli.main(["bound", "--lost", "1", "--total", "100", "--limit", "0.05"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 lost of 100: 95 % upper bound 4.656 %, below 5 %",
        "up to 1 lost would pass",
    ]


def test_bound_that_no_count_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    """Too few questions: no count passes, and the fewest that can are named."""
    assert cli.main(["bound", "--lost", "0", "--total", "148", "--limit", "0.02"]) == 1
    assert capsys.readouterr().out.splitlines()[1] == "no count would pass: 149 questions are the fewest that can"


def test_power_at_a_loss_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """The probability to pass and the total from which on it is as wanted."""
    assert cli.main([*POWER, "--loss-rate", "0.01"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1319 questions, 95 % upper bound below 2 %: up to 17 lost pass; 149 questions are the fewest that can pass",
        "at a loss rate of 1.000 %: passes with probability 0.880830; from 1390 questions on it is at least 0.9",
    ]


NULL = [
    "null: 12 lost of 1319 where the control was captured twice: 0.910 %, 95 % upper bound 1.470 %",
    "at a loss rate of 0.910 %: passes with probability 0.937908; from 1151 questions on it is at least 0.9",
    "at a loss rate of 1.470 %: passes with probability 0.344141; from 5516 questions on it is at least 0.9",
]


def test_power_at_the_rate_of_a_null(capsys: pytest.CaptureFixture[str]) -> None:
    """Two rates: what the null showed, and its upper bound."""
    assert cli.main([*POWER, "--null-lost", "12", "--null-total", "1319"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == NULL


@pytest.mark.parametrize("gate", design.GATES)
def test_power_at_the_rate_of_a_receipts_null(gate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same counts read from a gate's receipt are the same lines."""
    lost = [f"q-{index}" for index in range(12)]
    path = receipt(tmp_path / "r.json", gate, {"questions": 1319, "null": {"lost": lost, "gained": []}})
    assert cli.main([*POWER, "--null", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == NULL


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        ("0.03", "passes with probability 0.000036; no total makes that 0.9, for the rate is not below 2 %"),
        ("0.0199", "it is so close to 2 % that no total was found at which that is at least 0.9"),
        ("0", "passes with probability 1.000000; from 149 questions on"),
        ("0.003", "passes with probability above 0.999999; from "),
        ("0.1", "passes with probability below 0.000001; no total"),
        ("1", "passes with probability 0.000000; no total"),
    ],
)
def test_power_at_the_edges(rate: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A rate at or above the limit, one too close to it, and probabilities that rounding would hide."""
    assert cli.main([*POWER, "--loss-rate", rate]) == 0
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["power", "--total", "148", "--limit", "0.02", "--loss-rate", "0.01"],
            "total: found 148 questions, expected at least 149: ",
        ),
        (
            ["power", "--total", "58", "--limit", "0.05", "--null-lost", "0", "--null-total", "9"],
            "total: found 58 questions, expected at least 59: ",
        ),
        ([*POWER], "expected one of --loss-rate, --null, and --null-lost with --null-total"),
        ([*POWER, "--null-lost", "3"], "expected one of --loss-rate"),
        ([*POWER, "--null-total", "3"], "expected one of --loss-rate"),
        ([*POWER, "--loss-rate", "0.01", "--null-lost", "1", "--null-total", "3"], "expected one of --loss-rate"),
        ([*POWER, "--null-lost", "4", "--null-total", "3"], "null lost: found 4, expected 0 to 3"),
        ([*POWER, "--null-lost", "0", "--null-total", "0"], "null total: found 0, expected 1 to 20000 questions"),
        ([*POWER, "--loss-rate", "nan"], "loss_rate: found nan, expected a number from 0 to 1"),
        ([*POWER, "--loss-rate", "1 %"], "loss rate: found '1 %', expected a number"),
        ([*POWER, "--loss-rate", "0.01", "--wanted", "1"], "wanted: found 1.0, expected a number between 0 and 1"),
        ([*POWER, "--null", "nowhere.json"], "nowhere.json: cannot be read: No such file or directory, expected "),
        (["bound", "--lost", "21", "--total", "20", "--limit", "0.02"], "lost: found 21, expected 0 to 20"),
        (["bound", "--lost", "-1", "--total", "20", "--limit", "0.02"], "lost: found -1, expected 0 to 20"),
        (["bound", "--lost", "1.5", "--total", "20", "--limit", "0.02"], "lost: found '1.5', expected an integer"),
        (["bound", "--lost", "1", "--total", "20001", "--limit", "0.02"], "total: found 20001, expected 1 to 20000"),
        (["bound", "--lost", "1", "--total", "20", "--limit", "2"], "limit: found 2.0, expected a number between"),
        ([*BOUND, "--confidence", "95"], "confidence: found 95.0, expected a number between 0 and 1 (95 % is 0.95)"),
        ([*BOUND, "--gained", "1300"], "lost + gained: found 1320, expected at most 1319"),
    ],
)
def test_bad_input_of_a_design_is_one_line(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Designs that cannot pass, and what is no number or no count: one line on standard error, exit status 2."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvqual {argv[0]}: {text}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("gate", "details", "text"),
    [
        ("nll", {}, "found a receipt of 'nll', expected one of retrieval, recall, gsm8k"),
        ("recall", {}, "predicate.details.questions: found none, expected one"),
        ("recall", {"questions": 160, "null": None}, "predicate.details.null: found none, expected one"),
        (
            "recall",
            {"questions": 0, "null": {"lost": []}},
            "questions': found 0 (an integer), expected an integer of at least 1",
        ),
        ("recall", {"questions": 160, "null": {"gained": []}}, "'predicate.details.null': found no key 'lost'"),
        ("recall", {"questions": 160, "null": {"lost": 3}}, "'predicate.details.null.lost': "),
        ("recall", {"questions": 160, "null": {"lost": ["a", "a"]}}, "null.lost': found 2 ids, 1 of them different"),
        ("recall", {"questions": 1, "null": {"lost": ["a", "b"]}}, "null.lost': found 2 ids, 2 of them different"),
    ],
)
def test_a_receipt_without_a_null(
    gate: str, details: dict[str, object], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A receipt of another gate, or without a null that can be counted, is one line and exit status 2."""
    path = receipt(tmp_path / "r.json", gate, details)
    assert cli.main([*POWER, "--null", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert text in err


def test_a_changed_receipt_is_no_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A receipt that was edited after it was written is refused."""
    path = receipt(tmp_path / "r.json", "recall", {"questions": 160, "null": {"lost": []}})
    path.write_text(path.read_text().replace("160", "999"))
    assert cli.main([*POWER, "--null", str(path)]) == 2
    assert "expected " in capsys.readouterr().err
