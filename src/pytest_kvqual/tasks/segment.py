"""The part of a generated text that is the answer: reasoning dropped, cut where the model goes on to something else.

The text is read once from its start. Reasoning runs from an opening marker to the next closing one; a closing marker
without an opening one ends reasoning that the prompt began, so what stands before it is reasoning too. White space
right behind a closing marker belongs to the reasoning. Outside reasoning the answer ends at the first run-on marker,
or (only where reasoning markers are given: otherwise the server applied them) at the first stop string. A stop string
or a run-on marker inside reasoning ends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The answer's text.

    ``cut``: a marker ended it, so that whatever ended the whole text did not cut the answer. ``unfinished``: the text
    ends inside reasoning.
    """

    text: str
    cut: bool = False
    unfinished: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a task's strict parser makes of a segment.

    ``found``: the answer in normal form, or the text that stood in its place; None where there is none. ``complete``:
    a limit on the tokens at the segment's end cannot have cut it. ``lenient``: the task's lenient rule finds the
    expected answer; it decides nothing.
    """

    found: str | None
    right: bool
    complete: bool
    lenient: bool
    reason: str


def segment(
    text: str, *, stop: Sequence[str] = (), run_on: Sequence[str] = (), reasoning: tuple[str, str] | None = None
) -> Segment:
    """The answer in ``text``, by this module's rules.

    Args:
        text: The generated text.
        stop: Strings at which the answer ends; used only with ``reasoning``.
        run_on: Strings at which the model asks itself a further question.
        reasoning: The opening and the closing marker of reasoning; None where the model does none.

    Raises:
        TypeError: ``stop`` or ``run_on`` is one string: its characters would each be a marker.
    """
    for name, markers in (("stop", stop), ("run_on", run_on)):
        if isinstance(markers, str):
            raise TypeError(f"{name}: found the string {markers!r}, expected a list of strings")
    ends = tuple(run_on) if reasoning is None else (*run_on, *stop)
    if reasoning is None:
        found = [place for place in map(text.find, ends) if place >= 0]
        return Segment(text=text[: min(found)], cut=True) if found else Segment(text=text)
    opening, closing = reasoning
    kept: list[str] = []
    at = 0
    ahead: dict[str, int] = {}

    def find(marker: str, start: int) -> int:
        """As ``text.find``, for starts that only grow: what lies ahead, or nowhere, is not searched for again."""
        place = ahead.get(marker, 0)
        if marker not in ahead or 0 <= place < start:
            place = ahead[marker] = text.find(marker, start)
        return place

    opened, closed = find(opening, 0), find(closing, 0)
    if closed >= 0 and not 0 <= opened < closed:
        at = _behind(text, closed, closing)
    while True:
        # The earliest marker decides; of two in one place the opening one, then the closing one.
        opened, closed = find(opening, at), find(closing, at)
        places = [place for place in (opened, closed, *(find(end, at) for end in ends)) if place >= 0]
        if not places:
            return Segment(text="".join((*kept, text[at:])))
        place = min(places)
        if place == opened:
            kept.append(text[at:opened])
            closed = find(closing, opened + len(opening))
            if closed < 0:
                return Segment(text="".join(kept), unfinished=True)
            at = _behind(text, closed, closing)
        elif place == closed:
            kept.clear()
            at = _behind(text, closed, closing)
        else:
            return Segment(text="".join((*kept, text[at:place])), cut=True)


def _behind(text: str, closed: int, closing: str) -> int:
    at = closed + len(closing)
    while at < len(text) and text[at].isspace():
        at += 1
    return at
