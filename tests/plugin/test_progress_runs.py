"""What a run of gates shows while it runs: on a terminal and elsewhere, captured or not, quiet, distributed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from terminal_screen import on_terminal, screen

if TYPE_CHECKING:
    from tests.plugin.conftest import Runner

pytest_plugins = ["pytester"]

COLUMNS = 110
OnTerminal = Callable[..., tuple[int, str]]
TIMED = "candidate: load: requests 1 to 2 of 2, timed: nothing is drawn until they end"
KEPT = [
    "candidate: ready in 2 s",
    TIMED,
    "candidate: load: 2/2 requests of the plan in 0:00",
    "candidate: identity 1/2",
]
"""What stays of one gate's events on a terminal."""
ERASE = "\x1b[2K"
HIDE_CURSOR = "\x1b[?25l"


@pytest.fixture
def terminal(gates: Runner) -> OnTerminal:
    """Runs pytest on the fake study's identity gate, on a terminal; its exit status and its output."""
    gates.verdicts(events="yes")

    def call(*args: str, **changes: str) -> tuple[int, str]:
        environment = {key: value for key, value in os.environ.items() if key not in ("CI", "COLUMNS", "NO_COLOR")}
        argv = [sys.executable, "-m", "pytest", "-p", "pytest_kvqual.plugin", "-p", "no:cacheprovider", "-m", "cpu"]
        return on_terminal(
            [*argv, *(args or ("qualification",))],
            folder=gates.pytester.path,
            environment={**environment, "TERM": "xterm-256color", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **changes},
            columns=COLUMNS,
        )

    return call


def test_on_a_terminal_one_line_is_drawn_over_and_gone_at_the_end(terminal: OnTerminal) -> None:
    """Drawn while output is captured; what was over and notes stay; pytest's own lines are whole; the cursor stays."""
    status, text = terminal()
    assert status == 0
    assert "candidate: loading weights" in text
    assert "candidate: routing" in text
    assert ERASE in text
    assert HIDE_CURSOR not in text
    shown = screen(text, COLUMNS)
    place = shown.index(KEPT[0])
    assert shown[place : place + len(KEPT)] == KEPT
    assert not [line for line in shown if "loading weights" in line or "4/5" in line or "printed by the test" in line]
    # Pytest goes on below, in a line of its own.
    assert shown[place + len(KEPT)].lstrip().startswith(".")
    assert any(line.split()[:2] == ["identity", "PASS"] for line in shown)


def test_uncaptured_output_is_not_garbled(terminal: OnTerminal) -> None:
    """With -s nothing is drawn over: each line of progress and each printed line is whole, and all are there."""
    status, text = terminal("-s", "qualification")
    assert status == 0
    assert ERASE not in text
    shown = [line for line in screen(text, COLUMNS) if line]
    place = next(place for place, line in enumerate(shown) if line.endswith("printed by the test"))
    assert shown[place + 1 : place + 12] == [
        "candidate: starting",
        "candidate: loading weights, 0:01",
        "candidate: ready in 2 s",
        "and again",
        "candidate: identity: 1/5 requests, 0:20, 3/min, 1:20 left",
        "and again",
        "and again",
        "and again",
        TIMED,
        "candidate: load: 2/2 requests of the plan in 0:00",
        "candidate: identity 1/2",
    ]


@pytest.mark.parametrize("options", [("-o", "log_cli=true"), ("--capture", "tee-sys"), ("-p", "no:capture")])
def test_where_others_write_too_nothing_is_drawn_over(terminal: OnTerminal, options: tuple[str, ...]) -> None:
    """Live logs, and output that is shown while it is captured, or not captured at all: whole lines."""
    status, text = terminal("qualification", *options)
    assert status == 0
    assert ERASE not in text
    assert "candidate: loading weights, 0:01\r\n" in text


@pytest.mark.parametrize(
    ("args", "changes", "notes"),
    [
        ((), {"CI": "true"}, True),
        ((), {"TERM": "dumb"}, True),
        (("--progress", "never"), {}, True),
        (("-q",), {}, False),
    ],
    ids=["CI", "dumb", "never", "-q"],
)
def test_quiet(terminal: OnTerminal, args: tuple[str, ...], changes: dict[str, str], notes: bool) -> None:
    """Under CI, on a terminal that cannot be drawn on and where it is not wanted there is no progress, only notes."""
    status, text = terminal("qualification", *args, **changes)
    assert status == 0
    for word in ("starting", "loading weights", "ready in", "timed", ERASE, HIDE_CURSOR, "printed by the test"):
        assert word not in text
    assert ("candidate: identity 1/2" in text) == notes


def test_an_interrupt_leaves_the_terminal_as_it_was(terminal: OnTerminal, gates: Runner) -> None:
    """Ctrl-C while a line is drawn: the line is gone, the cursor was never hidden, and the gate has no verdict."""
    gates.verdicts(events="yes", identity="interrupt")
    status, text = terminal()
    assert status == pytest.ExitCode.INTERRUPTED
    assert "4/5 requests" in text
    assert HIDE_CURSOR not in text
    assert not [line for line in screen(text, COLUMNS) if "4/5" in line]


def test_a_log_gets_lines_where_they_are_asked_for(gates: Runner) -> None:
    """Away from a terminal `always` means lines: stages, a series every ten seconds, intervals."""
    gates.verdicts(events="yes")
    result = gates.run("qualification", "-m", "cpu", "--progress", "always")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "candidate: starting",
            "candidate: loading weights, 0:01",
            "candidate: ready in 2 s",
            "candidate: identity: 1/5 requests, 0:20, 3/min, 1:20 left",
            TIMED,
            "candidate: load: 2/2 requests of the plan in 0:00",
            "candidate: identity 1/2",
        ]
    )
    result.stdout.no_fnmatch_line("*printed by the test*")
    # Told while the interval was on: by then nothing is shown.
    result.stdout.no_fnmatch_line("candidate: identity: 5/5*")


def test_a_log_gets_no_progress_by_itself(gates: Runner) -> None:
    """Away from a terminal there are notes alone, and nothing that moves a cursor."""
    gates.verdicts(events="yes")
    text = gates.run("qualification", "-m", "cpu").stdout.str()
    assert "candidate: identity 1/2" in text
    assert "ready in" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize("where", ["report.progress.line", "report.live.line"])
def test_an_error_of_the_display_changes_no_verdict(terminal: OnTerminal, gates: Runner, where: str) -> None:
    """Every gate passes as it would have, and the error is named once."""
    module, _, name = where.rpartition(".")
    (gates.folder / "conftest.py").write_text(
        f"from pytest_kvqual.{module.rpartition('.')[0]} import {module.rpartition('.')[2]} as module\n"
        "def broken(*_):\n"
        "    raise ValueError('a defect of the display')\n"
        f"module.{name} = broken\n"
    )
    options = ("-s",) if module == "report.progress" else ()
    status, text = terminal("qualification", *options)
    assert status == 0
    assert "3 passed" in text
    assert text.count("progress: not shown any more: ValueError: a defect of the display") == 1
    assert text.count("a defect of the display") == 1


def test_workers_are_silent(terminal: OnTerminal, gates: Runner) -> None:
    """Under -n what a worker is at is shown by nobody, and nothing fails for it."""
    (gates.pytester.path / "test_worker.py").write_text(
        "import pytest\n"
        "from pytest_kvqual.progress import Boot\n"
        "from pytest_kvqual.report import progress\n"
        "@pytest.mark.cpu\n"
        "@pytest.mark.parametrize('n', range(4))\n"
        "def test_it(pytestconfig, n):\n"
        "    progress.show(pytestconfig, Boot(arm='native', stage='starting', seconds=0.0))\n"
        "    assert hasattr(pytestconfig, 'workerinput')\n"
    )
    status, text = terminal("test_worker.py", "-p", "xdist.plugin", "-n", "2", "--progress", "always")
    assert status == 0
    assert "4 passed" in text
    assert "native" not in text
    assert HIDE_CURSOR not in text
