"""When the next request is due: an alarm on the event loop, and a process that does not pause to collect garbage."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Protocol

from pytest_kvqual._clock import monotonic_ns

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_SECOND = 1_000_000_000


class Alarm(Protocol):
    """Calls back once at a moment of the monotonic clock. It may ring early or late: whoever is called looks."""

    name: str

    def at(self, due_ns: int) -> None:
        """Ring at ``due_ns``; replaces what was set before."""

    def close(self) -> None:
        """Ring no more."""


class _Spec(ctypes.Structure):
    """``struct itimerspec``."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class TimerFd:
    """A Linux timer that the loop polls as a file: rings within the scheduler's delay, some 50 µs.

    An event loop's own timers are rounded up to the next millisecond of ``epoll_wait``.

    Raises:
        OSError: The kernel or the C library has no such timer.
    """

    name = "timerfd"

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        if sys.platform != "linux":
            raise OSError("no timerfd on this platform")
        library = ctypes.CDLL(None, use_errno=True)
        try:
            create, self._settime = library.timerfd_create, library.timerfd_settime
        except AttributeError:
            raise OSError("the C library has no timerfd") from None
        self._fd: int = create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._spec = _Spec(0, 0, 0, 0)
        self._pointer = ctypes.byref(self._spec)
        self._loop, self._callback = loop, callback
        loop.add_reader(self._fd, self._ring)

    def at(self, due_ns: int) -> None:
        """Ring at ``due_ns``."""
        # A value of zero would disarm it.
        seconds, nanoseconds = divmod(max(due_ns, 1), _SECOND)
        self._spec.value_s, self._spec.value_ns = seconds, nanoseconds
        if self._settime(self._fd, _TFD_TIMER_ABSTIME, self._pointer, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        """Ring no more."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._callback()


class CallAt:
    """The event loop's own timer: up to some 1 ms late, on uvloop also early."""

    name = "call_at"

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop, self._callback = loop, callback
        self._handle: asyncio.TimerHandle | None = None

    def at(self, due_ns: int) -> None:
        """Ring at ``due_ns``."""
        self.close()
        self._handle = self._loop.call_at(self._loop.time() + (due_ns - monotonic_ns()) / _SECOND, self._callback)

    def close(self) -> None:
        """Ring no more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def alarm(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> Alarm:
    """The most precise alarm that this platform has."""
    try:
        return TimerFd(loop, callback)
    except OSError:
        return CallAt(loop, callback)


def new_loop(kind: str | None = None) -> tuple[asyncio.AbstractEventLoop, str]:
    """A new event loop and its name: ``uvloop VERSION`` where it is installed, else ``asyncio``.

    Args:
        kind: ``uvloop`` or ``asyncio`` to have that one; None for the first that is there.
    """
    if kind != "asyncio":
        try:
            import uvloop
        except ImportError:
            if kind == "uvloop":
                raise
        else:
            return uvloop.new_event_loop(), f"uvloop {version('uvloop')}"
    return asyncio.new_event_loop(), "asyncio"


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside; what exists at the start is left out of any until the end."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
