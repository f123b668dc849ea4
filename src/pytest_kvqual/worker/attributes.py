"""Instance attributes that are replaced for a while, and put back as they were found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def replace(undo: list[Callable[[], None]], holder: Any, name: str, value: object) -> None:
    """Sets ``holder.name``, and appends to ``undo`` what puts back the very object that was found, or its absence."""
    held = vars(holder)
    if name in held:
        old = held[name]
        undo.append(lambda: setattr(holder, name, old))
    else:
        undo.append(lambda: delattr(holder, name))
    setattr(holder, name, value)


class Attributes:
    """Replaced attributes of any holders. True while there is one."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, holder: Any, name: str, value: object) -> None:
        """Sets ``holder.name`` until :meth:`restore`."""
        replace(self._undo, holder, name, value)

    def restore(self) -> None:
        """Puts everything back, last first."""
        while self._undo:
            self._undo.pop()()

    def __bool__(self) -> bool:
        return bool(self._undo)
