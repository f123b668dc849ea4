"""``kvqual trace``, ``kvqual plan`` and what ``kvqual freeze`` asks of their files."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
from timed_study import add_length, timed_study
from tiny_study import TinyStudy

from pytest_kvqual import cli
from pytest_kvqual._canonical import sha256_file
from pytest_kvqual.errors import StudyError
from pytest_kvqual.study.freeze import freeze
from pytest_kvqual.study.load import find_study, load_study
from pytest_kvqual.study.timing_files import check_timing_files, plan_command, trace_command

SMOLLM2 = find_study("smollm2-cpu")
OPEN, CLOSED, PLAN = "traces/1024-open.jsonl", "traces/1024-closed.jsonl", "plans/1024.json"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The embedded study's folder without its timing files."""
    folder = tmp_path / "smollm2-cpu"
    source = SMOLLM2 if SMOLLM2.is_dir() else SMOLLM2.parent
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("traces", "plans", "__pycache__", "lock.json"))
    return folder


def run(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], str]:
    """Exit status, lines of standard output, standard error."""
    status = cli.main(list(argv))
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def change(folder: Path, old: str, new: str) -> None:
    """Replace a text that must be in study.toml."""
    path = folder / "study.toml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_embedded_study_s_files_are_what_the_commands_write(capsys: pytest.CaptureFixture[str]) -> None:
    """``--check`` passes on what is committed, and prints each digest."""
    status, lines, _ = run("trace", "--check", capsys=capsys)
    assert status == 0
    assert [line.partition(":")[0] for line in lines] == [OPEN, CLOSED]
    folder = load_study("smollm2-cpu").directory
    assert [line.rpartition(" ")[2] for line in lines] == [sha256_file(folder / name) for name in (OPEN, CLOSED)]
    status, lines, _ = run("plan", "--check", capsys=capsys)
    assert status == 0
    assert lines[0].startswith(f"{PLAN}: matches; 8 blocks, 20 trials; sha256 ")
    assert lines[1:8] == [
        "block 1: native, reference, candidate",
        "block 2: reference, candidate, native",
        "block 3: candidate, native, reference",
        "block 4: candidate, reference, native",
        "block 5: native, candidate, reference",
        "block 6: reference, native, candidate",
        "blocks 7 and 8: A/A of native",
    ]
    assert lines[8] == 'pytest qualification/ -m "cpu and timing" --arm native --length 1024 --block 1'
    assert len([line for line in lines if line.startswith("pytest ")]) == 20
    assert lines[-3:] == [
        "sign test: p = 0.03125 if all 6 blocks agree; Holm's levels for 1 comparison at 0.05: 0.05",
        "interval of the median: effects 1 to 6 of 6, which cover it with 96.875 %, at least 95 %",
        "practical effect: 5 %; A/A pairs must stay below it",
    ]


def test_the_files_are_written_once_and_the_same(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Traces, then the plan, then again without a change; the bytes are those of the embedded study."""
    status, _, err = run("plan", str(copy), capsys=capsys)
    assert (status, err.count("\n")) == (2, 1)
    assert err == f"kvqual plan: found no file {copy / OPEN}, expected it (run `kvqual trace`)\n"
    assert "written;" in run("trace", str(copy), capsys=capsys)[1][0]
    assert "written;" in run("plan", str(copy), capsys=capsys)[1][0]
    assert "unchanged;" in run("trace", str(copy), capsys=capsys)[1][1]
    status, lines, _ = run("plan", str(copy), capsys=capsys)
    assert "unchanged;" in lines[0]
    assert f"--study {copy} --arm native" in lines[8]
    for name in (OPEN, CLOSED, PLAN):
        assert (copy / name).read_bytes() == (load_study("smollm2-cpu").directory / name).read_bytes()
    assert not [path for path in copy.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.parametrize("name", [OPEN, CLOSED, PLAN])
@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_other_files_are_refused_by_check_and_freeze(copy: Path, name: str, damage: str) -> None:
    """A file that is missing, or has another byte, is named by the checks and by freeze, which writes no lock."""
    trace_command(str(copy), check=False)
    plan_command(str(copy), check=False, default="smollm2-cpu")
    study = load_study(str(copy))
    check_timing_files(study)
    if damage == "missing":
        (copy / name).unlink()
    else:
        (copy / name).write_bytes((copy / name).read_bytes().replace(b"24", b"25", 1))
    for command in (
        lambda: freeze(study),
        lambda: check_timing_files(study),
        lambda: plan_command(str(copy), check=True, default="smollm2-cpu"),
    ):
        with pytest.raises(StudyError, match=f"{copy / name}.*expected") as error:
            command()
        assert "\n" not in error.value.line()
    assert not (copy / "lock.json").exists()


def test_a_changed_study_makes_its_files_stale(copy: Path) -> None:
    """A seed, a number of blocks or a threshold that is changed asks for the command that writes what follows."""
    trace_command(str(copy), check=False)
    plan_command(str(copy), check=False, default="smollm2-cpu")
    change(copy, "practical = 0.05", "practical = 0.04")
    with pytest.raises(StudyError, match=r"1024\.json: found other bytes than `kvqual plan` writes"):
        check_timing_files(load_study(str(copy)))
    assert "written anew" in plan_command(str(copy), check=False, default="smollm2-cpu")[0]
    change(copy, 'seed = "smollm2-cpu 1024 open"', 'seed = "another"')
    with pytest.raises(StudyError, match=r"1024-open\.jsonl: found other bytes than `kvqual trace` writes"):
        plan_command(str(copy), check=False, default="smollm2-cpu")


def test_a_plan_that_cannot_show_anything_is_not_written(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second comparison makes six blocks too few: refused in one line that names the number that would do."""
    change(copy, "[[timing.1024.comparisons]]", (
        '[[timing.1024.comparisons]]\ncandidate = "candidate"\ncontrol = "reference"\ncell = "open"\n'
        'metric = "ttft_intended_p50"\nbetter = "lower"\n\n[[timing.1024.comparisons]]'
    ))  # fmt: skip
    trace_command(str(copy), check=False)
    status, lines, err = run("plan", str(copy), capsys=capsys)
    assert (status, lines, err.count("\n")) == (2, [], 1)
    assert "expected at most 0.025" in err
    assert "12 blocks are the fewest that would do" in err
    assert not (copy / PLAN).exists()


def arrivals_from_a_file(copy: Path) -> None:
    """Make the open cell one whose arrivals are given."""
    change(
        copy, 'arrivals = "poisson"\nrate = 0.4\nseed = "smollm2-cpu 1024 open"', 'arrivals = "file"'
    )  # fmt: skip


def test_arrivals_may_come_from_a_file(copy: Path, tmp_path: Path) -> None:
    """They are needed to write the trace, and the trace alone to check it."""
    arrivals_from_a_file(copy)
    with pytest.raises(StudyError, match="cell open: found no file of arrivals"):
        trace_command(str(copy), check=False)
    times = tmp_path / "times.txt"
    times.write_text("".join(f"{index * 10**9}\n" for index in range(10)))
    lines = trace_command(str(copy), check=False, arrivals=[f"open={times}"])
    assert "10 requests, open loop, file" in lines[0]
    assert "matches" in trace_command(str(copy), check=True)[0]
    plan_command(str(copy), check=False, default="smollm2-cpu")
    check_timing_files(load_study(str(copy)))


@pytest.mark.parametrize(
    ("given", "content", "text"),
    [
        ("open", "", "--arrivals: found 'open', expected CELL=FILE, or LENGTH:CELL=FILE"),
        ("1025:open={}", "", "--arrivals: found '1025:open', expected a cell with arrivals = \"file\": open"),
        ("open=/dev/zero", "", "found /dev/zero, expected a plain file there"),
        ("opne={}", "", "--arrivals: found 'opne', expected a cell with arrivals = \"file\": open"),
        ("closed={}", "", "--arrivals: found 'closed', expected a cell with"),
        ("open={}", "0\n1.5\n", "line 2: found b'1.5', expected one arrival in whole nanoseconds"),
        ("open={}", "0\n-1\n", "line 2: found b'-1', expected one arrival"),
        ("open={}", "5\n4\n" + "6\n" * 8, "cell open: found arrivals that go back"),
        ("open={}", "0\n1\n", "cell open: found 2 arrivals, expected 10"),
        ("open={}x", "", "found no file"),
    ],
)
def test_arrivals_that_do_not_fit_are_one_line(copy: Path, tmp_path: Path, given: str, content: str, text: str) -> None:
    """An unknown cell, one that draws its arrivals, and a malformed file are named."""
    arrivals_from_a_file(copy)
    times = tmp_path / "times.txt"
    times.write_text(content)
    with pytest.raises(StudyError) as error:
        trace_command(str(copy), check=False, arrivals=[given.format(times)])
    assert text in error.value.line()
    assert "\n" not in error.value.line()


@pytest.mark.parametrize("again", ["open", "1024:open"])
def test_arrivals_of_a_cell_are_given_once(copy: Path, tmp_path: Path, again: str) -> None:
    """Twice is refused, whichever is meant, and however the cell is named."""
    arrivals_from_a_file(copy)
    (tmp_path / "t").write_text("0\n" * 10)
    with pytest.raises(StudyError, match=f"--arrivals: found '{again}' twice"):
        trace_command(str(copy), check=False, arrivals=[f"open={tmp_path / 't'}", f"{again}={tmp_path / 't'}"])


def test_arrivals_beside_check_are_refused(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--check`` takes the arrivals from the traces that are there; others are not passed over in silence."""
    status, out, err = run("trace", str(copy), "--check", "--arrivals", "open=t", capsys=capsys)
    assert (status, out, err.count("\n")) == (2, [], 1)
    assert "--arrivals: found 'open=t' with --check, expected none" in err


# -- several lengths ---------------------------------------------------------------------------------------------------


@pytest.fixture
def both(tmp_path: Path) -> TinyStudy:
    """A study that times two lengths by the same rules, so that each cell is there twice."""
    tiny = timed_study(tmp_path / "studies" / "tiny")
    add_length(tiny, 32)
    return tiny


def files(tiny: TinyStudy) -> dict[str, bytes]:
    """Every file of the study."""
    return {str(path.relative_to(tiny.folder)): path.read_bytes() for path in tiny.folder.rglob("*") if path.is_file()}


def test_each_length_has_its_arrivals(both: TinyStudy, tmp_path: Path) -> None:
    """``LENGTH:CELL=FILE`` names a cell that two lengths have; each trace has the arrivals of its own file."""
    for _ in range(2):
        both.replace('arrivals = "constant"\nrate = 20.0\n', 'arrivals = "file"\n')
    for length in (16, 32):
        (tmp_path / str(length)).write_text("".join(f"{length * place}\n" for place in range(5)))
    given = [f"{length}:open={tmp_path / str(length)}" for length in (32, 16)]
    trace_command(str(both.folder), check=False, arrivals=given)
    for length in (16, 32):
        trace = (both.folder / f"traces/{length}-open.jsonl").read_bytes().splitlines()
        assert [json.loads(line)["intended_ns"] for line in trace[1:]] == [length * place for place in range(5)]
    before = files(both)
    for wrong, text in (
        (["open=t"], "--arrivals: found 'open', a cell of the lengths 16, 32, expected one of 16:open, 32:open"),
        (["64:open=t"], "--arrivals: found '64:open', expected a cell with arrivals = \"file\": 16:open, 32:open"),
        (["016:open=t"], "found '016:open', expected a cell with"),
        (given[:1], "timing.16: cell open: found no file of arrivals, expected one"),
    ):
        with pytest.raises(StudyError) as error:
            trace_command(str(both.folder), check=False, arrivals=wrong)
        assert text in error.value.line()
        assert "\n" not in error.value.line()
    assert files(both) == before


def test_no_trace_is_written_where_a_later_length_is_refused(both: TinyStudy) -> None:
    """A panel that is too small for the second length leaves the first one's traces unwritten too."""
    both.change("panels/timing-32.json", lambda it: it.update(items=it["items"][1:]))
    before = files(both)
    with pytest.raises(StudyError, match=r"timing\.32: cell closed: found 3 measured prompts"):
        trace_command(str(both.folder), check=False)
    assert files(both) == before


def test_no_plan_is_written_where_a_later_length_is_refused(both: TinyStudy) -> None:
    """A number of blocks that is refused at the second length leaves the first one's plan unwritten too."""
    trace_command(str(both.folder), check=False)
    both.toml.write_text("blocks = 5".join(both.toml.read_text().rsplit("blocks = 6", 1)))
    before = files(both)
    with pytest.raises(StudyError, match=r"timing\.32: blocks: found 5"):
        plan_command(str(both.folder), check=False, default="")
    assert files(both) == before


@pytest.mark.parametrize("fault", ["a folder", "no space"])
def test_no_plan_is_written_where_a_later_one_cannot_be(
    both: TinyStudy, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be written is one line, and leaves those before it as they were, without a scrap."""
    trace_command(str(both.folder), check=False)
    plan_command(str(both.folder), check=False, default="")
    for _ in range(2):
        both.replace("practical = 0.05", "practical = 0.04")
    last = list(load_study(str(both.folder)).timing.values())[-1].plan
    if fault == "a folder":
        last.unlink()
        last.mkdir()
    else:
        whole = Path.write_bytes

        def write_bytes(self: Path, data: bytes) -> int:
            if last.name in self.name:
                raise OSError(errno.ENOSPC, "No space left on device")
            return whole(self, data)

        monkeypatch.setattr(Path, "write_bytes", write_bytes)
    before = files(both)
    with pytest.raises(StudyError, match=f"cannot write {last}: ") as error:
        plan_command(str(both.folder), check=False, default="")
    assert "\n" not in error.value.line()
    assert files(both) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('plan = "plans/16.json"', 'plan = "study.toml"'),
        ('plan = "plans/16.json"', 'plan = "traces/16-open.jsonl"'),
        ('plan = "plans/16.json"', 'plan = "panels/timing-16.json"'),
        ('trace = "traces/16-open.jsonl"', 'trace = "lock.json"'),
        ('trace = "traces/16-closed.jsonl"', 'trace = "panels/parity.json"'),
        ('trace = "traces/16-closed.jsonl"', 'trace = "scales/candidate-v.json"'),
    ],
)
def test_no_file_of_the_study_is_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    """A trace or plan that is named like another file of the study is refused, and no file changes."""
    tiny = timed_study(tmp_path / "studies" / "tiny")
    tiny.replace(old, new)
    before = {path: path.read_bytes() for path in tiny.folder.rglob("*") if path.is_file()}
    for command in ("trace", "plan", "freeze"):
        status, out, err = run(command, str(tiny.folder), capsys=capsys)
        assert (status, out) == (2, [])
        assert "expected a file of its own" in err
    assert {path: path.read_bytes() for path in tiny.folder.rglob("*") if path.is_file()} == before


def test_trials_for_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``plan --trials`` prints ARM BLOCK in the plan's order; another length is refused, and so is a missing plan."""
    folder = str(timed_study(tmp_path / "studies" / "tiny").folder)
    assert run("trace", folder, capsys=capsys)[0] == 0
    assert "run `kvqual plan`" in run("plan", folder, "--trials", "16", capsys=capsys)[2]
    assert run("plan", folder, capsys=capsys)[0] == 0
    status, lines, _ = run("plan", folder, "--trials", "16", capsys=capsys)
    assert status == 0
    assert lines[:3] == ["native 1", "reference 1", "candidate 1"]
    assert lines[-2:] == ["native 7", "native 8"]
    assert len(set(lines)) == len(lines) == 20
    status, lines, err = run("plan", folder, "--trials", "16", "--check", capsys=capsys)
    assert (status, lines, err.count("\n")) == (2, [], 1)
    assert "--trials: found --check beside '16', expected one of them" in err
    for length in ("32", "016", "x"):
        status, lines, err = run("plan", folder, "--trials", length, capsys=capsys)
        assert (status, lines) == (2, [])
        assert f"--trials: found '{length}', expected a length with a timing plan: 16" in err


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("null_pairs = 1", "null_pairs = 1000000", "null_pairs': found 1000000"),
        ("blocks = 6", "blocks = 60000", "blocks': found 60000"),
        ("warm_up = 4", "warm_up = 9223372036854775808", "warm_up': found 9223372036854775808"),
        ("settle_s = 1.0", "settle_s = 1e300", "settle_s': found 1e+300"),
        (
            "canaries = 2\nmax_tokens = 24",
            "canaries = 2\nmax_tokens = 9223372036854775808",
            "max_tokens': found 9223372036854775808",
        ),
        ('plan = "plans/1024.json"', 'plan = "a\\u0000b"', "plan': found 'a\\x00b'"),
        ('trace = "traces/1024-open.jsonl"', 'trace = "a\\u0000b"', "trace': found 'a\\x00b'"),
        ('name = "closed"', 'name = "warm-up"', "name': found 'warm-up', expected another name"),
        ("concurrency = 4\nrequests = 12", "concurrency = 12\nrequests = 12", "concurrency': found 12"),
        ("server_ttft_ms = 25.0", "server_ttft_ms = 1e9", "server_ttft_ms': found 1e+09, expected at most 60000 ms"),
        ("rate = 0.4", "rate = 1e-12", "cell open: found an arrival"),
        ("rate = 0.4", "rate = 1e-300", "cell open: found an arrival"),
    ],
)
def test_what_nobody_can_run_is_refused_at_once(
    copy: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, text: str
) -> None:
    """A slip of the pen in a timing plan is one line before anything is written, not a hang or a void trial."""
    change(copy, old, new)
    status, lines, err = run("trace", str(copy), capsys=capsys)
    assert (status, lines, err.count("\n")) == (2, [], 1)
    assert text in err
    assert not (copy / "traces").exists()


def test_a_plan_without_a_canary_is_refused(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its trials could not show that their answers are right: no seeded fault of an answer would be caught."""
    path = copy / "study.toml"
    path.write_text(path.read_text(encoding="utf-8").replace("canaries = 2", "canaries = 0"), encoding="utf-8")
    status, lines, err = run("trace", str(copy), capsys=capsys)
    assert (status, lines, err.count("\n")) == (2, [], 1)
    assert "in 'timing.1024.cells': found no canary in any cell, expected at least one" in err
