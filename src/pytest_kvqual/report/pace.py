"""How fast a series of steps goes, how long it will take, and what is said of it: pure functions of numbers."""

from __future__ import annotations

from pytest_kvqual.progress import Boot, Event, Step, Timed

_SECOND = 1_000_000_000


class Pace:
    """The arithmetic of one series. Neither steps nor time go back, whatever it is told.

    Args:
        begun_ns: The monotonic clock when the series began.
    """

    def __init__(self, begun_ns: int) -> None:
        self._begun_ns = begun_ns
        self._last_ns = begun_ns
        self.done = 0
        self.total: int | None = None

    def update(self, done: int, total: int | None, now_ns: int) -> None:
        """Note that ``done`` of ``total`` steps are over at ``now_ns``; fewer than told before count for nothing."""
        if total is not None:
            self.total = max(0, total)
        done = max(self.done, done if self.total is None else min(done, self.total))
        if done > self.done:
            self.done = done
            self._last_ns = max(self._last_ns, now_ns)

    def elapsed_s(self, now_ns: int) -> float:
        """Seconds since the beginning: never negative, never less than at the last step."""
        return (max(now_ns, self._last_ns) - self._begun_ns) / _SECOND

    @property
    def per_second(self) -> float | None:
        """Steps per second up to the last step; None where none is over, or no time has passed."""
        spent = self._last_ns - self._begun_ns
        return self.done * _SECOND / spent if self.done > 0 and spent > 0 else None

    def left_s(self, now_ns: int) -> float | None:
        """Seconds left at the rate so far, counted from the last step; None where rate or total is not known.

        Zero once they are over, whether or not the steps are.
        """
        rate = self.per_second
        if rate is None or self.total is None:
            return None
        waited = max(0, now_ns - self._last_ns) / _SECOND
        return max(0.0, (self.total - self.done) / rate - waited)

    @property
    def share(self) -> float | None:
        """The part that is over, from 0 to 1; None where the total is not known. A series of no steps is over."""
        if self.total is None:
            return None
        return self.done / self.total if self.total else 1.0


def clock(seconds: float) -> str:
    """``0:07``, ``12:34``, ``1:02:03``: whole seconds, rounded down."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def rate(per_second: float) -> str:
    """Two significant digits or a whole number, by the second, minute or hour: ``37/s``, ``0.42/s``, ``3.1/min``."""
    factor, unit = next((it for it in ((1, "s"), (60, "min")) if per_second * it[0] >= 0.1), (3600, "h"))
    value = per_second * factor
    return f"{value:.0f}/{unit}" if value >= 9.95 else f"{value:.2g}/{unit}"


def figures(pace: Pace, now_ns: int) -> str:
    """Time, rate and time left of a series that runs, as far as they are known: ``0:12, 1.3/s, 0:15 left``."""
    words = [clock(pace.elapsed_s(now_ns))]
    per_second, left_s = pace.per_second, pace.left_s(now_ns)
    if per_second is not None:
        words.append(rate(per_second))
    # An estimate that was wrong is not shown as "now".
    if left_s is not None and left_s > 0:
        words.append(f"{clock(left_s + 0.5)} left")
    return ", ".join(words)


def count(event: Step | Timed) -> str:
    """``5/8 requests``."""
    unit = event.unit if isinstance(event, Step) else "requests of the plan"
    return f"{event.done} {unit}" if event.total is None else f"{event.done}/{event.total} {unit}"


def title(event: Event) -> str:
    """Whose and which."""
    if isinstance(event, str):
        return event
    return f"{event.arm}: {event.stage if isinstance(event, Boot) else event.what}"


def line(event: Event, pace: Pace, now_ns: int) -> str:
    """The event in one line, for where nothing is drawn over."""
    if isinstance(event, str):
        return event
    if isinstance(event, Boot):
        return f"{title(event)}{_boot_time(event)}"
    if isinstance(event, Timed) and not event.over:
        first = event.done + 1
        return (
            f"{title(event)}: requests {first} to {event.done + event.requests} of {event.total}, timed: nothing is "
            "drawn until they end"
        )
    if event.over and (isinstance(event, Step) or event.done >= event.total):
        detail = f", {event.detail}" if isinstance(event, Step) and event.detail else ""
        return f"{title(event)}: {count(event)} in {clock(pace.elapsed_s(now_ns))}{detail}"
    return f"{title(event)}: {count(event)}, {figures(pace, now_ns)}"


def _boot_time(event: Boot) -> str:
    if event.stage == "starting":
        return ""
    return f" in {event.seconds:.0f} s" if event.stage == "ready" else f", {clock(event.seconds)}"
