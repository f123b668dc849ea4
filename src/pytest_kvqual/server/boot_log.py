"""Which stage of its start an engine is in, by what it has logged so far."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pytest_kvqual.progress import BootStage

MARKS: Final[tuple[tuple[bytes, BootStage], ...]] = (
    (b"Starting to load model", "loading weights"),
    (b"Loading weights took", "warming up"),
    # The last one of a model without weights to load (random ones), and of a second set (a drafter's).
    (b"Model loading took", "warming up"),
)
"""What vLLM logs, and the stage that begins there."""

_LONGEST: Final = max(len(mark) for mark, _ in MARKS)


class BootLog:
    """Reads a log as it grows.

    Args:
        log: The file; it may be appended to.
        start: Where this start's output begins, in bytes.
    """

    def __init__(self, log: Path, *, start: int = 0) -> None:
        self._log = log
        self._place = start
        self._tail = b""
        self._stage: BootStage = "starting"

    def stage(self) -> BootStage:
        """The stage now; it never goes back. A log that cannot be read shows no further one."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._place)
                new = file.read()
        except OSError:
            return self._stage
        self._place += len(new)
        # A mark may have been half written at the last reading.
        text, self._tail = self._tail + new, (self._tail + new)[-_LONGEST:]
        order: tuple[BootStage, ...] = ("starting", "loading weights", "warming up")
        found = [stage for mark, stage in MARKS if mark in text]
        self._stage = max((self._stage, *found), key=order.index)
        return self._stage
