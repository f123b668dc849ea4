"""Which events become lines, what is shown while requests are timed, and what an error of the display does."""

from __future__ import annotations

import io
import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from terminal_screen import screen

from pytest_kvqual.progress import Boot, Event, Step, Timed
from pytest_kvqual.report.live import THREAD_NAME, Live, VisibleCursor
from pytest_kvqual.report.pace import Pace
from pytest_kvqual.report.progress import EVERY_S, Display, Lines, Mode, mode_of

SECOND = 1_000_000_000


class Clock:
    """A monotonic clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def at(self, seconds: float) -> None:
        self.now = round(seconds * SECOND)


def step(done: int, total: int | None = 40, *, what: str = "nll", over: bool = False, detail: str = "") -> Step:
    return Step(arm="candidate", what=what, begun_ns=0, done=done, total=total, over=over, detail=detail)


def timed(*, over: bool) -> Timed:
    return Timed(arm="candidate", what="cell open", begun_ns=0, requests=4, done=4 if over else 0, total=8, over=over)


# -- the mode ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, "live"),
        ({"alone": False}, "lines"),
        ({"ci": True}, "notes"),
        ({"terminal": False}, "notes"),
        ({"verbose": -1}, "off"),
        ({"verbose": 2}, "live"),
        ({"worker": True}, "off"),
        ({"choice": "never"}, "notes"),
        ({"choice": "never", "verbose": -1}, "off"),
        ({"choice": "always"}, "live"),
        ({"choice": "always", "ci": True}, "live"),
        ({"choice": "always", "terminal": False}, "lines"),
        ({"choice": "always", "alone": False}, "lines"),
        ({"choice": "always", "verbose": -1}, "off"),
        ({"choice": "always", "worker": True}, "off"),
    ],
)
def test_mode(changes: dict[str, object], mode: Mode) -> None:
    """What differs from a plain run on a terminal decides; quiet and workers above all."""
    plain = {"choice": "auto", "verbose": 0, "worker": False, "ci": False, "terminal": True, "alone": True}
    given_: dict[str, object] = {**plain, **changes}
    assert mode_of(**given_) == mode  # type: ignore[arg-type]  # the table's values have its parameters' types


# -- lines ------------------------------------------------------------------------------------------------------------


def lines(notes: bool = False) -> tuple[Display, Clock, list[str]]:
    now, written = Clock(), list[str]()
    return Display(Lines(written.append, now_ns=now, notes=notes), now_ns=now), now, written


def test_a_boot_has_a_line_for_each_stage() -> None:
    """However often a stage is told, it has one line."""
    display, _, written = lines()
    for stage, seconds in (("starting", 0), ("starting", 1), ("loading weights", 2), ("warming up", 3), ("ready", 4)):
        display.show(Boot(arm="native", stage=stage, seconds=float(seconds)))  # type: ignore[arg-type]  # the table's
    assert written == [
        "native: starting", "native: loading weights, 0:02", "native: warming up, 0:03", "native: ready in 4 s",
    ]  # fmt: skip


def test_a_series_has_a_line_every_ten_seconds_and_at_its_end() -> None:
    """Steps in between are not told; a new series begins anew."""
    display, now, written = lines()
    display.show(step(0, None))
    for second in range(1, 26):
        now.at(second)
        display.show(step(second))
    display.show(step(40, over=True))
    assert written == [
        "candidate: nll: 10/40 requests, 0:10, 1/s, 0:30 left",
        "candidate: nll: 20/40 requests, 0:20, 1/s, 0:20 left",
        "candidate: nll: 40/40 requests in 0:25",
    ]
    display.show(step(1, what="parity"))
    assert written[-1] == "candidate: parity: 1/40 requests, 0:25, 2.4/min, 16:15 left"


@given(
    times=st.lists(st.floats(0, 200), min_size=1, max_size=60).map(sorted),
    total=st.integers(60, 100),
)
def test_no_two_lines_of_a_series_are_closer_than_ten_seconds(times: list[float], total: int) -> None:
    """But for the last one, whatever the steps' times."""
    display, now, written = lines()
    said: list[float] = []
    for done, at in enumerate(times, start=1):
        now.at(at)
        before = len(written)
        display.show(step(done, total))
        said += [at] * (len(written) - before)
    assert all(later - earlier >= EVERY_S - 1e-6 for earlier, later in itertools.pairwise(said))
    assert len(said) <= times[-1] / EVERY_S + 1e-6


def test_without_progress_only_notes_are_written() -> None:
    """No boot, no step and no interval; what a reader of a log wants too."""
    display, now, written = lines(notes=True)
    now.at(60)
    for event in (Boot(arm="a", stage="ready", seconds=1.0), step(3), step(40, over=True), timed(over=False)):
        display.show(event)
    display.show(timed(over=True))
    display.show("candidate: captured earlier")
    assert written == ["candidate: captured earlier"]


# -- timed intervals ---------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """Notes how often it was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)


def live(*, width: int = 100, tick_s: float | None = None) -> tuple[Display, Clock, Terminal]:
    now, file = Clock(), Terminal()
    console = VisibleCursor(
        file=file, force_terminal=True, force_interactive=True, color_system=None, width=width, height=24, _environ={},
        markup=False, highlight=False, emoji=False,
    )  # fmt: skip
    return Display(Live(console, width=lambda: width, now_ns=now, tick_s=tick_s), now_ns=now), now, file


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def test_while_requests_are_timed_nothing_is_drawn_and_no_thread_runs() -> None:
    """One word before and one after: in between nothing is written, no thread is there, and no clock is read."""
    display, now, file = live(tick_s=0.002)
    display.show(step(3))
    assert len(threads()) == 1
    display.show(timed(over=False))
    assert threads() == []
    assert file.getvalue().rstrip().endswith("timed: nothing is drawn until they end")
    written = file.writes
    now.at(5)
    reads: list[int] = []
    display._now_ns = lambda: reads.append(1) or 0  # type: ignore[func-returns-value]  # counted
    for event in (step(4), Boot(arm="a", stage="starting", seconds=0.0), "a note", timed(over=False)):
        display.show(event)
    threading.Event().wait(0.02)
    assert (file.writes, reads, threads()) == (written, [], [])
    display._now_ns = now
    display.show(timed(over=True))
    after = file.getvalue().splitlines()[-2:]
    assert after == ["candidate: cell open: 4/8 requests of the plan, 0:05, 0.8/s, 0:05 left", "a note"]
    display.show(step(5))
    assert len(threads()) == 1
    display.close()
    assert threads() == []


def test_an_interval_that_was_cut_short_does_not_silence_the_next_test() -> None:
    """The end of a test's phase is the end of its interval; notes of it are not lost."""
    display, _, written = lines()
    display.show(timed(over=False))
    display.show("a note")
    assert len(written) == 1
    display.pytest_runtest_makereport()
    display.show(Boot(arm="a", stage="starting", seconds=0.0))
    assert written[1:] == ["a note", "a: starting"]


# -- errors of the display ---------------------------------------------------------------------------------------------


class Broken:
    """Fails at the n-th call."""

    def __init__(self, good: int) -> None:
        self.good = good
        self.calls = 0

    def _call(self) -> None:
        self.calls += 1
        if self.calls > self.good:
            raise OSError(5, "Input/output error")

    def show(self, event: Event, pace: Pace) -> None:
        self._call()

    def pause(self) -> None:
        self._call()


@given(good=st.integers(0, 12))
def test_an_error_of_the_display_ends_it_and_nothing_else(good: int) -> None:
    """Nobody who tells what is done sees it; nothing is tried again; the error is named."""
    broken = Broken(good)
    display = Display(broken)
    events: list[Event] = [step(1), timed(over=False), timed(over=True), step(2), "note", step(3, over=True)]
    for event in events:
        display.show(event)
        display.pause()
    display.close()
    if broken.calls > good:
        assert display.failure == "progress: not shown any more: OSError: [Errno 5] Input/output error"
        # What failed, and one try to leave the terminal.
        assert broken.calls <= good + 2
    else:
        assert display.failure == ""


def test_a_terminal_that_is_gone_ends_the_thread_too() -> None:
    """An error in the thread stays in it, and the next event ends the display."""

    class Gone(Terminal):
        gone = False

        def write(self, text: str) -> int:
            if self.gone:
                raise OSError(5, "Input/output error")
            return super().write(text)

    file = Gone()
    console = VisibleCursor(file=file, force_terminal=True, force_interactive=True, width=80, height=24, _environ={})
    display = Display(Live(console, width=lambda: 80, tick_s=0.001))
    display.show(step(1))
    (thread,) = threads()
    file.gone = True
    thread.join(5)
    assert not thread.is_alive()
    display.show(step(2))
    assert display.failure.startswith("progress: not shown any more: OSError")
    display.close()
    assert threads() == []


# -- drawn on a terminal -----------------------------------------------------------------------------------------------


def test_one_line_is_drawn_over_and_what_is_over_stays() -> None:
    """The screen after each event: finished series above, the running one below them, nothing twice."""
    display, now, file = live()
    display.show(Boot(arm="native", stage="starting", seconds=0.0))
    now.at(3)
    display.show(Boot(arm="native", stage="loading weights", seconds=3.0))
    assert screen(file.getvalue(), 100) == ["native: loading weights  0:03"]
    display.show(Boot(arm="native", stage="ready", seconds=3.0))
    assert screen(file.getvalue(), 100) == ["native: ready in 3 s", ""]
    now.at(10)
    display.show(step(10))
    done, running = screen(file.getvalue(), 100)
    assert done == "native: ready in 3 s"
    assert running.startswith("candidate: nll  ━━━━━━")
    assert running.endswith("10/40 requests, 0:10, 1/s, 0:30 left")
    display.show("candidate: a note")
    assert screen(file.getvalue(), 100)[:2] == ["native: ready in 3 s", "candidate: a note"]
    now.at(40)
    display.show(step(40, over=True, detail="37 steps"))
    assert screen(file.getvalue(), 100) == [
        "native: ready in 3 s", "candidate: a note", "candidate: nll: 40/40 requests in 0:40, 37 steps", "",
    ]  # fmt: skip
    display.close()
    assert "\x1b[?25" not in file.getvalue()


@given(width=st.integers(20, 140), done=st.integers(0, 40), what=st.text("abc é", min_size=1, max_size=90))
def test_the_drawn_line_never_wraps(width: int, done: int, what: str) -> None:
    """Whatever the width and the names, it is one line: a wrapped one could not be drawn over."""
    display, now, file = live(width=width)
    for seconds in (1, 61, 4000):
        now.at(seconds)
        display.show(step(done, what=what))
    display.pause()
    assert screen(file.getvalue(), width)[-1] == ""
    assert len([line for line in screen(file.getvalue(), width) if line]) == 0


def test_the_figures_of_a_long_name_are_whole() -> None:
    """Where a bar leaves no room for them, it is the bar that is not drawn."""
    display, now, file = live(width=80)
    now.at(300)
    display.show(step(10, what="oracle pass 2 of 4, pressure"))
    (drawn,) = screen(file.getvalue(), 80)
    assert drawn == "candidate: oracle pass 2 of 4, pressure  10/40 requests, 5:00, 2/min, 15:00 left"[:80]
    display.close()


def test_the_thread_draws_between_two_events() -> None:
    """The time goes on although no answer comes."""
    display, now, file = live(tick_s=0.002)
    display.show(step(10))
    now.at(12)
    for _ in range(500):
        if "0:12" in file.getvalue():
            break
        threading.Event().wait(0.01)
    display.pause()
    assert "0:12" in file.getvalue()
    assert not any(screen(file.getvalue(), 100))


def test_a_display_without_a_renderer_shows_nothing() -> None:
    """It takes whatever comes."""
    display = Display(None)
    for event in (step(1), timed(over=False), "note"):
        display.show(event)
    display.pause()
    display.close()
    assert display.failure == ""
    assert isinstance(VisibleCursor(file=io.StringIO(), force_terminal=True), Console)
