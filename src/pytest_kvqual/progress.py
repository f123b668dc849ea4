"""What a run is at: the events that the rooms emit, and nobody that decides sees.

They go one way, from what boots, captures and times to whoever shows them (:mod:`pytest_kvqual.report.progress`).
Where nobody does, they go to :func:`silent`, which is every constructor's default. Nothing is returned, and nothing
that is decided or recorded depends on one.

A text is an event too: a note, one line that is kept (a capture of an earlier run was used; a finding left a
reproducer), unlike progress, which is of no interest once it is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

BootStage = Literal["starting", "loading weights", "warming up", "ready"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Boot:
    """The stage that an arm's engine has reached, and the seconds since its start."""

    arm: str
    stage: BootStage
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """How far a series of equal steps is.

    Attributes:
        arm: Whose series.
        what: The series' name; with ``arm`` and ``begun_ns`` it tells one series from another.
        begun_ns: The monotonic clock when it began.
        done: How many steps are over; never less than in an earlier event of the series.
        total: How many there are; None where nobody knows, or not yet.
        unit: What one step is, in the plural: ``requests``.
        over: Whether this is the series' last event.
        detail: What the whole series came to, for its last event: ``37 steps, 1,234 rows``.
    """

    arm: str
    what: str
    begun_ns: int
    done: int = 0
    total: int | None = None
    unit: str = "requests"
    over: bool = False
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """An interval in which requests are timed: before its first one, and (``over``) after its last.

    In between, whoever shows progress does nothing: no thread of it runs, and no event is emitted.

    Attributes:
        arm: Whose interval.
        what: The interval's name.
        begun_ns: The monotonic clock when the first interval of the plan began.
        requests: How many requests this interval sends.
        done: How many of ``total`` were sent in the intervals before it; with ``over`` in this one too.
        total: How many requests all intervals of the plan send.
        over: Whether the interval has ended.
    """

    arm: str
    what: str
    begun_ns: int
    requests: int
    done: int
    total: int
    over: bool = False


Event = Boot | Step | Timed | str

Progress = Callable[[Event], None]
"""Takes events, at once and without raising."""


def silent(event: Event) -> None:
    """Shows nothing."""
