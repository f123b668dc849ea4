"""``kvqual metrics``, and the document that defines what it prints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from recorded import MS, answer, failed, recorded, request

from pytest_kvqual import cli
from pytest_kvqual.metrics.formulas import FORMULAS
from pytest_kvqual.metrics.recording import END, FAILURES, HEADER, REQUEST

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """One request that completed, one that did not."""
    path = tmp_path / "cell-open.jsonl"
    done = request([(20 * MS * place, raw) for place, raw in enumerate(answer([1, 2]), 1)], name="a")
    path.write_bytes(recorded([done, failed("timeout", end_ns=100 * MS, name="b", status=None)]))
    return path


def test_each_figure_with_its_unit(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Attempted, completed and failed first; an infinite percentile is said."""
    assert cli.main(["metrics", str(record)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "offered 2, completed 1, failed 1, 1 timeout"
    assert "ttft_intended_p50: 20.000 ms (of 2)" in lines
    assert "ttft_intended_p99: inf (of 2)" in lines
    assert "output_throughput: 20.000 1/s (of 1)" in lines
    assert "goodput_tokens: 2 tokens (of 1)" in lines
    assert not any(line.startswith("burst_") for line in lines)


def test_formulas_on_request(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The definition stands under its figure."""
    assert cli.main(["metrics", str(record), "--formulas"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("goodput_tokens: 2 tokens (of 1)") + 1] == f"    {FORMULAS['goodput_tokens']}"


@pytest.mark.parametrize("data", [None, b"", b"{}\n"])
def test_what_is_no_recording_is_one_line(
    data: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2 and one line on standard error."""
    path = tmp_path / "x.jsonl"
    if data is not None:
        path.write_bytes(data)
    assert cli.main(["metrics", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvqual metrics: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_not_waited_for(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe that nobody writes to, or a folder, is one line at once."""
    path = tmp_path / "x.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert cli.main(["metrics", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_document_has_every_definition() -> None:
    """Each formula string stands in it letter for letter, and each field and failure by name."""
    text = DOCUMENT.read_text()
    wanted = [
        FORMULAS[name]
        for name in FORMULAS
        if not name.startswith("burst_") and not name.endswith(("_p50", "_p90", "_p99"))
    ]
    assert len(wanted) == 10
    assert [formula for formula in wanted if f"`{formula}`" not in text] == []
    assert [name for name in (*HEADER, *REQUEST, *END, *FAILURES) if f"`{name}`" not in text] == []
