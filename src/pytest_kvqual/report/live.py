"""One line that is drawn over while something runs, and the lines that stay, above it. Needs rich.

It is drawn when an event comes, and by a thread twice a second so that the time goes on between two answers. The thread
lives from the first event to :meth:`Live.pause`, which waits for its end: while requests are timed there is none.

The cursor is never hidden, so that no way to end the process leaves it so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.live import Live as RichLive
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pytest_kvqual._clock import monotonic_ns
from pytest_kvqual.progress import Boot, Event, Step
from pytest_kvqual.report.pace import Pace, clock, count, figures, line, title

TICK_S = 0.5
"""Time between two drawings without an event, in seconds."""
THREAD_NAME = "kvqual-progress"
_BAR = 24
_FIGURES = 40
"""Columns that the figures of a series rarely exceed: a bar is drawn where it leaves so many."""


class VisibleCursor(Console):
    """A console that leaves the cursor alone."""

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing."""
        return False


class Live:
    """Draws events on a console.

    Args:
        console: A terminal's; its width is asked for before each drawing.
        width: The terminal's columns now.
        now_ns: The monotonic clock.
        tick_s: Seconds between two drawings without an event; None for none.
    """

    def __init__(
        self,
        console: Console,
        *,
        width: Callable[[], int],
        now_ns: Callable[[], int] = monotonic_ns,
        tick_s: float | None = TICK_S,
    ) -> None:
        self._console = console
        self._width = width
        self._now_ns = now_ns
        self._tick_s = tick_s
        self._event: Boot | Step | None = None
        self._pace = Pace(0)
        self._boot_ns = 0
        self._live: RichLive | None = None
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def show(self, event: Event, pace: Pace) -> None:
        """Draw it; what is over stays as a line of its own."""
        if isinstance(event, Boot):
            over = event.stage == "ready"
        elif isinstance(event, Step):
            over = event.over
        else:
            # A note: what is drawn goes on below it. An interval: the display has paused already.
            self._keep(event, pace)
            return
        if over:
            self.pause()
            self._keep(event, pace)
            return
        # One assignment each; the thread reads them, and a line of the event before is drawn over at once.
        self._pace = pace
        if isinstance(event, Boot):
            self._boot_ns = self._now_ns() - round(event.seconds * 1e9)
        self._event = event
        if self._live is None:
            self._start()
        self._draw()

    def _keep(self, event: Event, pace: Pace) -> None:
        self._console.width = self._width()
        self._console.print(Text(line(event, pace, self._now_ns())), soft_wrap=True)

    def pause(self) -> None:
        """Take the line off the screen and end the thread; idempotent. The next event draws again."""
        live, self._live = self._live, None
        thread, self._thread = self._thread, None
        self._end.set()
        if thread is not None:
            thread.join()
        self._event = None
        if live is not None:
            live.stop()

    def _start(self) -> None:
        self._live = RichLive(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False,
            get_renderable=self._line,
        )  # fmt: skip
        self._live.start()
        if self._tick_s is not None:
            self._end = threading.Event()
            self._thread = threading.Thread(
                target=self._tick, args=(self._end, self._tick_s), name=THREAD_NAME, daemon=True
            )
            self._thread.start()

    def _tick(self, end: threading.Event, tick_s: float) -> None:
        while not end.wait(tick_s):
            try:
                self._draw()
            except Exception:
                # A terminal that is gone; the next event will meet it in the main thread.
                return

    def _draw(self) -> None:
        live = self._live
        if live is not None:
            self._console.width = self._width()
            live.refresh()

    def _line(self) -> RenderableType:
        event, now = self._event, self._now_ns()
        if event is None:
            return ""
        if isinstance(event, Boot):
            words = clock(max(0.0, (now - self._boot_ns) / 1e9))
        else:
            told = f"{count(event)}, " if event.total is not None or event.done else ""
            words = told + figures(self._pace, now)
        row = Table.grid(padding=(0, 2), expand=False)
        row.add_column(no_wrap=True, overflow="ellipsis")
        cells: list[RenderableType] = [Text(title(event))]
        share = self._pace.share if isinstance(event, Step) else None
        if share is not None and self._console.width >= len(title(event)) + _BAR + _FIGURES + 4:
            row.add_column(width=_BAR)
            cells.append(ProgressBar(total=1.0, completed=share, width=_BAR))
        # The figures are the point: of a narrow terminal they get what they need first.
        row.add_column(no_wrap=True, overflow="ellipsis", min_width=min(len(words), max(1, self._console.width - 12)))
        cells.append(Text(words))
        row.add_row(*cells)
        return row
