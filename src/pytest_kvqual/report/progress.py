"""Shows what a run is at, on the terminal, also while a test's output is captured.

Nothing that decides sees it, and no error of it reaches a test: the first one ends the display, and is named at the end
of the run. While requests are timed it does nothing at all (:class:`pytest_kvqual.progress.Timed`).

=========  =============================================================================================
``live``   one line that is drawn over, and a line for what is over; for a terminal that nothing else writes to
``lines``  whole lines: each stage, every ten seconds of a series, its end
``notes``  no progress; only notes, which a reader of a log wants too
``off``    nothing
=========  =============================================================================================
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Final, Literal, Protocol, TextIO

import pytest

from pytest_kvqual._clock import monotonic_ns
from pytest_kvqual.progress import Boot, Event, Step, Timed
from pytest_kvqual.report.pace import Pace, line

if TYPE_CHECKING:
    from pytest_kvqual.report.live import Live

Mode = Literal["live", "lines", "notes", "off"]
CHOICES: Final = ("auto", "always", "never")
EVERY_S: Final = 10.0
"""Least time between two lines about one series, in seconds."""

PLUGIN_NAME: Final = "kvqual-progress"
_key = pytest.StashKey["Display"]()


def mode_of(choice: str, *, verbose: int, worker: bool, ci: bool, terminal: bool, alone: bool) -> Mode:
    """What is shown.

    Args:
        choice: ``--progress``: ``auto``, ``always`` or ``never``.
        verbose: pytest's verbosity; below 0 for ``-q``.
        worker: Whether this is a worker of ``-n``, whose output nobody sees.
        ci: Whether the environment says that this is continuous integration.
        terminal: Whether standard output and standard error are a terminal that can be drawn on.
        alone: Whether nothing else writes to it meanwhile: output is captured at its descriptors, logs are not shown.
    """
    if worker or verbose < 0:
        return "off"
    if choice == "never" or (choice == "auto" and (ci or not terminal)):
        return "notes"
    # Whole lines: text that a test or a library prints may come at any time and in any column.
    return "live" if terminal and alone else "lines"


class Renderer(Protocol):
    """Shows events of any kind."""

    def show(self, event: Event, pace: Pace) -> None:
        """Show one."""

    def pause(self) -> None:
        """Leave the terminal as it is for others to write on, and run no thread."""


class Lines:
    """One line for each stage, for a series every ten seconds and at its end, for each note and timed interval.

    Args:
        write: Writes one line.
        now_ns: The monotonic clock.
        notes: Whether notes are all that is wanted.
    """

    def __init__(
        self, write: Callable[[str], None], *, now_ns: Callable[[], int] = monotonic_ns, notes: bool = False
    ) -> None:
        self._write = write
        self._now_ns = now_ns
        self._notes = notes
        self._stage: tuple[str, str] | None = None
        self._series: tuple[str, str, int] | None = None
        self._last_ns = 0

    def show(self, event: Event, pace: Pace) -> None:
        """Write it, where it is due."""
        now = self._now_ns()
        if isinstance(event, str) or (not self._notes and self._due(event, now)):
            self._write(line(event, pace, now))

    def pause(self) -> None:
        """Nothing is drawn."""

    def _due(self, event: Boot | Step | Timed, now: int) -> bool:
        if isinstance(event, Boot):
            stage = (event.arm, event.stage)
            changed, self._stage = stage != self._stage, stage
            return changed
        if isinstance(event, Timed):
            return True
        series = (event.arm, event.what, event.begun_ns)
        if series != self._series:
            self._series, self._last_ns = series, event.begun_ns
        if event.over:
            return True
        if event.done == 0 or now - self._last_ns < EVERY_S * 1e9:
            return False
        self._last_ns = now
        return True


class Display:
    """Takes events, and shows them where a renderer is given.

    Args:
        renderer: Shows them; None where nothing is shown.
        now_ns: The monotonic clock.
        close: Called once, at the end.
    """

    def __init__(
        self,
        renderer: Renderer | None,
        *,
        now_ns: Callable[[], int] = monotonic_ns,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._renderer = renderer
        self._now_ns = now_ns
        self._close = close
        self._series: tuple[str, str, int] | None = None
        self._pace = Pace(0)
        self._frozen = False
        self._held: list[str] = []
        self.failure = ""
        """The error that ended the display, in one line; empty where none did."""

    def show(self, event: Event) -> None:
        """Show an event. Never raises.

        From the beginning of a timed interval to its end nothing is shown and nothing is computed: every cycle of this
        process would be one that the recorder beside it may wait for. Notes of that time are shown afterwards.
        """
        if self._renderer is None:
            return
        if self._frozen and not (isinstance(event, Timed) and event.over):
            if isinstance(event, str):
                self._held.append(event)
            return
        try:
            self._show(self._renderer, event)
        except Exception as error:
            self._fail(error)

    def _show(self, renderer: Renderer, event: Event) -> None:
        if isinstance(event, Step | Timed):
            what = event.what if isinstance(event, Step) else "timed"
            series = (event.arm, what, event.begun_ns)
            if series != self._series:
                self._series, self._pace = series, Pace(event.begun_ns)
            self._pace.update(event.done, event.total, self._now_ns())
        if isinstance(event, Timed):
            renderer.pause()
        renderer.show(event, self._pace)
        if isinstance(event, Timed):
            self._frozen = not event.over
            held, self._held = ([], self._held) if self._frozen else (self._held, [])
            for note in held:
                renderer.show(note, self._pace)

    def pause(self) -> None:
        """Leave the terminal to others; the next event takes it again. Never raises."""
        self._frozen = False
        if self._renderer is None:
            return
        try:
            held, self._held = self._held, []
            for note in held:
                self._renderer.show(note, self._pace)
            self._renderer.pause()
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Show nothing more. Never raises."""
        self.pause()
        self._renderer = None
        with suppress(Exception):
            self._close()

    def _fail(self, error: Exception) -> None:
        renderer, self._renderer = self._renderer, None
        self.failure = f"progress: not shown any more: {type(error).__name__}: {error}".splitlines()[0]
        if renderer is not None:
            with suppress(Exception):
                renderer.pause()

    # -- pytest: before anyone else writes on the terminal, the line is off it -----------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self) -> None:
        """A phase of a test is over."""
        self.pause()

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self) -> None:
        """The run is cut short."""
        self.pause()

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self) -> None:
        """The run is cut short."""
        self.pause()

    @pytest.hookimpl(tryfirst=True)
    def pytest_enter_pdb(self) -> None:
        """A debugger takes the terminal."""
        self.pause()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name the error that ended the display."""
        if self.failure:
            terminalreporter.write_line(self.failure)

    def pytest_unconfigure(self) -> None:
        """The end."""
        self.close()


def display_of(config: pytest.Config) -> Display:
    """The display of this run, made and registered when it is first asked for."""
    display = config.stash.get(_key, None)
    if display is None:
        display = config.stash[_key] = _made(config)
        config.pluginmanager.register(display, PLUGIN_NAME)
    return display


def show(config: pytest.Config, event: Event) -> None:
    """Show an event on the terminal of this run."""
    display_of(config).show(event)


def _made(config: pytest.Config) -> Display:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return Display(None)
    try:
        with _uncaptured(config):
            mode = _mode(config, reporter)
            if mode == "live":
                return _live(config, reporter)
    except Exception as error:
        display = Display(None)
        display.failure = f"progress: not shown: {type(error).__name__}: {error}".splitlines()[0]
        return display
    if mode == "off":
        return Display(None)

    def write(text: str) -> None:
        with _uncaptured(config):
            reporter.ensure_newline()
            reporter.write_line(text)
            reporter.flush()

    return Display(Lines(write, notes=mode == "notes"))


def _mode(config: pytest.Config, reporter: pytest.TerminalReporter) -> Mode:
    """What this run shows; pytest's capture must be suspended, or it is that which is looked at."""
    shown = config.pluginmanager.has_plugin("logging-plugin") and (
        bool(config.getini("log_cli")) or config.getoption("log_cli_level") is not None
    )
    return mode_of(
        config.getoption("progress"),
        verbose=config.option.verbose,
        worker=hasattr(config, "workerinput"),
        ci=os.environ.get("CI", "").lower() not in ("", "0", "false"),
        terminal=_is_terminal(sys.stdout) and _is_terminal(sys.stderr) and bool(reporter.isatty)
        and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"),
        alone=config.pluginmanager.has_plugin("capturemanager") and config.getoption("capture") == "fd" and not shown,
    )  # fmt: skip


def _is_terminal(stream: TextIO) -> bool:
    try:
        return os.isatty(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False


def _live(config: pytest.Config, reporter: pytest.TerminalReporter) -> Display:
    """A display on a copy of standard output's descriptor: capture replaces what the original one leads to."""
    from pytest_kvqual.report.live import Live, VisibleCursor

    file = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding=sys.stdout.encoding, errors="replace")
    plain = config.getoption("color") == "no"
    console = VisibleCursor(
        file=file, force_terminal=True, force_interactive=True, force_jupyter=False, markup=False, highlight=False,
        emoji=False, no_color=plain or None, width=_columns(file), height=24,
    )  # fmt: skip
    live = Live(console, width=lambda: _columns(file))
    return Display(_OwnLine(live, config, reporter), close=file.close)


def _columns(file: TextIO) -> int:
    # A terminal may say 0, and a last column that is written to wraps on some.
    try:
        found = os.get_terminal_size(file.fileno()).columns
    except (OSError, ValueError):
        found = 0
    return max(20, (found or 80) - 1)


class _OwnLine:
    """Begins a line of its own before it draws: the reporter may be in the middle of one."""

    def __init__(self, live: Live, config: pytest.Config, reporter: pytest.TerminalReporter) -> None:
        self._live = live
        self._config = config
        self._reporter = reporter
        self._fresh = False

    def show(self, event: Event, pace: Pace) -> None:
        if not self._fresh:
            self._fresh = True
            with _uncaptured(self._config):
                self._reporter.ensure_newline()
                self._reporter.flush()
        self._live.show(event, pace)

    def pause(self) -> None:
        self._fresh = False
        self._live.pause()


def _uncaptured(config: pytest.Config) -> AbstractContextManager[None]:
    """Inside the block nothing is captured."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    if capture is None:
        return nullcontext()
    suspended: AbstractContextManager[None] = capture.global_and_fixture_disabled()
    return suspended
