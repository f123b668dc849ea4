"""The command line: what it lists, and that an error raised on purpose is one line and exit status 2."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytest_kvqual import cli, plugin
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict
from pytest_kvqual.oracles import reproducer
from pytest_kvqual.receipt.statement import build
from pytest_kvqual.receipt.write import write

SCOPE = Scope(lock="a" * 64, arm="candidate", length=1024, cache_bytes=4096, engine="b" * 64)


def test_the_default_study_is_the_plugins() -> None:
    """``kvqual`` and ``pytest --study`` default to the same study."""
    assert plugin.DEFAULT_STUDIES["cpu"] == cli.DEFAULT_STUDY


def test_help_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Commands that are there are listed."""
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    there = (
        "freeze",
        "trace",
        "plan",
        "model",
        "doctor",
        "init",
        "prepare",
        "checkout",
        "report",
        "replay",
        "audit",
        "verify",
        "metrics",
        "bound",
        "power",
    )
    assert [name for name in there if f"    {name} " not in out] == []


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["freeze", "nothing"], "kvqual freeze: found no study 'nothing', expected"),
        (["model", "nothing"], "kvqual model: found no study 'nothing', expected"),
        (["doctor", "nothing"], "kvqual doctor: found no study 'nothing', expected"),
        (["prepare", "nothing", "--model", "m"], "kvqual prepare: found no study 'nothing', expected"),
        (
            ["prepare", "smollm2-cpu", "--model", "m"],
            "kvqual prepare: study smollm2-cpu: found no file of digests",
        ),
        (["checkout", "nowhere"], "kvqual checkout: "),
        (["report", "nowhere"], "kvqual report: nowhere: found no receipt, expected some"),
        (
            ["replay", "nowhere.npz"],
            "kvqual replay: nowhere.npz: cannot be read: No such file or directory, expected a",
        ),
    ],
)
def test_an_error_is_one_line(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line goes to standard error and says what was found and expected; nothing goes to standard output."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(text)
    assert err.count("\n") == 1


def receipt(run_dir: Path, gate: str, order: int, outcome: Outcome) -> Path:
    """A receipt on disk."""
    passed = outcome is Outcome.PASS
    verdict = Verdict(
        gate=gate,
        outcome=outcome,
        figure=f"figure of {gate}",
        findings=() if passed else ("one cell",),
        null=Check(passed=True, figure="0") if passed else None,
        poison=(Poison(fault="slot-off-by-one", caught=True, figure="1 of 1"),) if passed else (),
    )
    evidence = {"candidate/attempt-1/identity.json": "d" * 64}
    statement = build(verdict, SCOPE, order=order, evidence=evidence, requires={}, implementation="c" * 64)
    return write(run_dir, statement, prefix="")


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has the latest receipt of each gate, in order, under its scope."""
    receipt(tmp_path, "routing", 3, Outcome.FAIL)
    receipt(tmp_path, "identity", 1, Outcome.FAIL)
    receipt(tmp_path, "routing", 3, Outcome.INCONCLUSIVE)
    assert cli.main(["report", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop(0).startswith("as written: evidence, lock, engine and the receipts that each rests on are not")
    assert lines[0].startswith("candidate at length 1024, 4096 cache bytes, lock aaaaaaaaaaaa, engine bbbbbbbbbbbb")
    assert [line.split()[:2] for line in lines[2:]] == [["identity", "FAIL"], ["routing", "INCONCLUSIVE"]]


def test_report_names_damaged_receipts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A receipt of which one byte was changed is no verdict, and is named."""
    path = receipt(tmp_path, "identity", 1, Outcome.FAIL)
    document = json.loads(path.read_text())
    document["predicate"]["verdict"]["figure"] = "another"
    path.write_text(json.dumps(document))
    assert cli.main(["report", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "damaged: receipts/candidate-1024-4096/01-identity-1.json: " in out


def test_report_of_newest_receipts_that_pass(tmp_path: Path) -> None:
    """Exit status 0 where the newest receipt of each gate is PASS, and 1 once a newer one is not."""
    receipt(tmp_path, "identity", 1, Outcome.FAIL)
    receipt(tmp_path, "identity", 1, Outcome.PASS)
    receipt(tmp_path, "routing", 3, Outcome.PASS)
    assert cli.main(["report", str(tmp_path)]) == 0
    receipt(tmp_path, "routing", 3, Outcome.REFUSED)
    assert cli.main(["report", str(tmp_path)]) == 1


def test_report_does_not_fall_back_to_an_older_receipt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gate whose newest receipt is damaged has no verdict, although an older one says PASS."""
    receipt(tmp_path, "identity", 1, Outcome.PASS)
    receipt(tmp_path, "identity", 1, Outcome.FAIL).write_text("{}")
    assert cli.main(["report", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "PASS" not in out.partition("\n")[2]
    assert "identity  -" in out
    assert "its newest receipt is damaged: receipts/candidate-1024-4096/01-identity-2.json" in out


def cells(path: Path, *, found: int) -> Path:
    """A reproducer of one cell that must hold 7 in its last byte of V."""
    good = torch.full((1, 2, 3), 7, dtype=torch.uint8)
    held = good.clone()
    held[0, 1, 2] = found
    path.write_bytes(
        reproducer.pack(
            "cells",
            "layers.7: slot 300 does not hold the declared encoding",
            {
                "found_k": good,
                "expected_k": good,
                "found_v": held,
                "expected_v": good,
                "slots": torch.tensor([300]),
            },
            layer="layers.7",
            block_size=128,
        )
    )
    return path


def test_replay_of_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was recorded and what is found now are printed; a finding that is reproduced is exit status 1."""
    assert cli.main(["replay", str(cells(tmp_path / "r.npz", found=9))]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "recorded: layers.7: slot 300 does not hold the declared encoding",
        "found:    slot 300, V of KV head 1: byte 2 is 0x09, expected 0x07",
    ]
    assert err == ""


def test_replay_that_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finding that is not reproduced is exit status 0, and the output says that nothing was found."""
    assert cli.main(["replay", str(cells(tmp_path / "r.npz", found=7))]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["found:    nothing"]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data[: len(data) // 2], "cannot be read: "),
        (lambda data: data.replace(b"slots.npy", b"slits.npy"), "found no array 'slots', expected found_k, "),
        (lambda data: b"{}", "cannot be read: it is no .npz archive, expected a reproducer"),
        (lambda data: b"", "cannot be read: "),
    ],
    ids=["cut", "an array is missing", "no archive", "empty"],
)
def test_replay_of_a_damaged_file(
    damage: Callable[[bytes], bytes], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that cannot be checked is one line that names it and exit status 2, never a reproduced finding."""
    path = cells(tmp_path / "r.npz", found=9)
    path.write_bytes(damage(path.read_bytes()))
    assert cli.main(["replay", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvqual replay: {path}: {text}")
    assert err.count("\n") == 1


def test_a_name_that_is_no_text_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file among the receipts whose name cannot be encoded is reported as damaged, like any other."""
    folder = tmp_path / "receipts" / "candidate-1024-4096"
    folder.mkdir(parents=True)
    (folder / os.fsdecode(b"01-identity-\xff.json")).write_bytes(b"{}")
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8", write_through=True))
    assert cli.main(["report", str(tmp_path)]) == 1
    assert b"damaged: receipts/candidate-1024-4096/01-identity-\\udcff.json" in out.getvalue()
