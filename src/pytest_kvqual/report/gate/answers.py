"""Lost and gained questions: both answers side by side, and the first token in which they differ.

Which questions were lost is what the receipt says. The answers are read from the captures that it names, and shown only
where these are intact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_kvqual.errors import KvqualError
from pytest_kvqual.report.gate.run import GateState, RunState, ScopeState, folder_of
from pytest_kvqual.study.model import PreservationRules
from pytest_kvqual.study.panels import PanelItem
from pytest_kvqual.tasks.completion import Failure, parse_outcome
from pytest_kvqual.tasks.outcome import score

TASKS: Final = ("retrieval", "recall", "gsm8k")
"""The gates whose receipts name lost and gained questions."""

SHOWN: Final = 40
"""Of how many questions lost, and of how many gained, against each control the answers are shown; the rest by id."""

ANSWER: Final = 1000
"""How many characters of an answer are shown: its beginning, the place of the first difference, and its end."""

_BEGIN, _AROUND, _END = 240, 360, 320
_ID = re.compile(rb'"id":("(?:[^"\\]|\\.)*"),"index":\d+,"order":"[^"]*","status":(?:\d+|null)\}$')
_TAIL: Final = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of an answer: ``kind`` is ``same`` up to the first difference, ``differs`` from it on, or ``gap``."""

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One arm's answer to one question.

    ``kind`` and ``read`` are what the task's parser makes of it (``right``, ``42``), empty where that cannot be told.
    ``why`` is one line where there is no answer to show.
    """

    pieces: tuple[Piece, ...]
    tokens: int
    end: str
    kind: str
    read: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One lost or gained question. ``at`` is the place of the first differing token, None where they do not differ."""

    id: str
    grade: str
    expected: str
    prompt_tokens: int | None
    control: Side
    candidate: Side
    at: int | None
    control_token: str
    candidate_token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """The questions lost and gained against one control. ``more_lost`` and ``more_gained`` are shown by id only."""

    control: str
    lost: tuple[Question, ...]
    gained: tuple[Question, ...]
    more_lost: tuple[str, ...]
    more_gained: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Capture:
    """The lines of one capture by id; ``why`` where it cannot be used."""

    name: str
    lines: Mapping[str, bytes]
    why: str


def changed(run: RunState, scope: ScopeState, gate: GateState) -> tuple[Changed, ...]:
    """The questions that the receipt of a scored gate names, by control."""
    receipt = gate.receipt
    pairs = receipt.verdict.details.get("pairs") if receipt is not None else None
    if receipt is None or not isinstance(pairs, Mapping):
        return ()
    items, panel_why = _items(run, scope, gate)
    rules = _rules(scope, gate.name)
    captures: dict[str, _Capture] = {}

    def capture(arm: str) -> _Capture:
        if arm not in captures:
            captures[arm] = _capture(run, scope, gate, arm)
        return captures[arm]

    found = []
    for control, pair in pairs.items():
        if not isinstance(pair, Mapping):
            continue
        lost, gained = _ids(pair.get("lost")), _ids(pair.get("gained"))
        if not lost and not gained:
            found.append(Changed(control=control, lost=(), gained=(), more_lost=(), more_gained=(), notes=()))
            continue
        sides = capture(control), capture(scope.scope.arm)
        notes = [it.why for it in sides if it.why] + ([panel_why] if panel_why else [])

        def questions(ids: Sequence[str], sides: tuple[_Capture, _Capture] = sides) -> tuple[Question, ...]:
            return tuple(_question(gate.name, name, items.get(name), rules, *sides) for name in ids[:SHOWN])

        found.append(
            Changed(
                control=control, lost=questions(lost), gained=questions(gained), more_lost=tuple(lost[SHOWN:]),
                more_gained=tuple(gained[SHOWN:]), notes=tuple(notes),
            )
        )  # fmt: skip
    return tuple(found)


def _ids(value: object) -> list[str]:
    return [it for it in value if isinstance(it, str)] if isinstance(value, list) else []


def _capture(run: RunState, scope: ScopeState, gate: GateState, arm: str) -> _Capture:
    prefix = f"{folder_of(scope.prefix, arm, scope.scope)}/"
    evidence = gate.receipt.evidence if gate.receipt is not None else {}
    name = next((it for it in evidence if it.startswith(prefix) and it.endswith(f"/{gate.name}.jsonl")), None)
    if name is None:
        return _Capture(name="", lines={}, why=f"the receipt names no capture of '{arm}': its answers cannot be shown")
    data = run.evidence.data(name, evidence[name])
    if data is None:
        why = run.evidence.why_not(name, evidence[name])
        return _Capture(name=name, lines={}, why=f"evidence/{name}: {why}: the answers of '{arm}' are not shown")
    lines: dict[str, bytes] = {}
    for line in data.split(b"\n"):
        identity = _identity(line)
        if identity is not None:
            lines[identity] = line
    return _Capture(name=name, lines=lines, why="")


def _identity(line: bytes) -> str | None:
    """The id of a record, from its end where it is canonical: a body may be long, and few of them are shown."""
    match = _ID.search(line, max(0, len(line) - _TAIL))
    try:
        found: object = json.loads(match[1]) if match else json.loads(line).get("id")
    except (ValueError, AttributeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _question(
    task: str, name: str, item: PanelItem | None, rules: PreservationRules | None, control: _Capture, own: _Capture
) -> Question:
    left, right = _read(task, name, item, rules, control), _read(task, name, item, rules, own)
    text, other = left.text, right.text
    same = _common(text, other)
    at = _common(left.token_ids, right.token_ids)
    differ = at < max(len(left.token_ids), len(right.token_ids))
    usable = not left.why and not right.why
    return Question(
        id=name,
        grade=item.grade if item is not None else "",
        expected=item.expected if item is not None else "",
        prompt_tokens=len(item.prompt) if item is not None else left.prompt_tokens,
        control=_side(left, same),
        candidate=_side(right, same),
        at=at if usable and differ else None,
        control_token=_token(left.token_ids, at) if usable and differ else "",
        candidate_token=_token(right.token_ids, at) if usable and differ else "",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    text: str = ""
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    end: str = ""
    kind: str = ""
    found: str = ""
    why: str = ""


def _read(task: str, name: str, item: PanelItem | None, rules: PreservationRules | None, capture: _Capture) -> _Read:
    if capture.why:
        return _Read(why="not shown: see above")
    line = capture.lines.get(name)
    if line is None:
        return _Read(why=f"no record of '{name}' in evidence/{capture.name}")
    try:
        record = json.loads(line)
        answer = parse_outcome(record, origin=capture.name, text=True)
    except (ValueError, RecursionError, KvqualError) as error:
        return _Read(why=f"its record cannot be read: {error}")
    if isinstance(answer, Failure):
        return _Read(kind="error", why=answer.reason.lstrip(":, "))
    kind, found = "", ""
    if item is not None and rules is not None:
        try:
            scored = score(task, record, item=item, rules=rules, origin=capture.name)
            kind, found = scored.kind.value, scored.found or ""
        except KvqualError:
            # It is shown as it is; what the judge made of it stands in the receipt.
            kind = ""
    return _Read(
        text=answer.text or "",
        token_ids=answer.token_ids,
        prompt_tokens=len(answer.prompt_token_ids),
        end=answer.finish_reason,
        kind=kind,
        found=found,
    )


def _common(left: Sequence[object], right: Sequence[object]) -> int:
    return next(
        (place for place, (one, other) in enumerate(zip(left, right, strict=False)) if one != other),
        min(len(left), len(right)),
    )


def _token(ids: Sequence[int], at: int) -> str:
    return str(ids[at]) if at < len(ids) else "end"


def _side(read: _Read, same: int) -> Side:
    return Side(
        pieces=_pieces(read.text, same), tokens=len(read.token_ids), end=read.end, kind=read.kind, read=read.found,
        why=read.why,
    )  # fmt: skip


def _pieces(text: str, same: int) -> tuple[Piece, ...]:
    """The parts of a text that are shown; what is left out is counted in its place."""
    if len(text) <= ANSWER:
        spans = [(0, len(text))]
    else:
        around = (max(0, same - _AROUND // 3), min(len(text), same + 2 * _AROUND // 3))
        spans = _merged([(0, _BEGIN), around, (len(text) - _END, len(text))])
    pieces: list[Piece] = []
    end = 0
    for begin, stop in spans:
        if begin > end:
            pieces.append(Piece(kind="gap", text=f"{begin - end:,} characters not shown"))
        for kind, left, right in (("same", begin, min(stop, same)), ("differs", max(begin, same), stop)):
            if left < right:
                pieces.append(Piece(kind=kind, text=text[left:right]))
        end = stop
    return tuple(pieces)


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


# -- what was asked ----------------------------------------------------------------------------------------------------


def _items(run: RunState, scope: ScopeState, gate: GateState) -> tuple[dict[str, PanelItem], str]:
    """The panel's items by id; and a line where it cannot be read."""
    if gate.name == "gsm8k":
        evidence = gate.receipt.evidence if gate.receipt is not None else {}
        name = next((it for it in evidence if it.endswith("/gsm8k-panel.json")), None)
        data = run.evidence.data(name, evidence[name]) if name is not None else None
        what = f"evidence/{name}" if name is not None else "gsm8k-panel.json"
    else:
        panels = scope.study.table("lengths", str(scope.scope.length), "panels")
        path = panels.get(gate.name)
        data = scope.study.data(path) if isinstance(path, str) else None
        what = f"the panel {path}" if isinstance(path, str) else f"the panel of {gate.name}"
    if data is None:
        return {}, f"{what} is missing or was changed: expected answers and grades are not shown"
    try:
        items = {
            item["id"]: PanelItem(
                id=_str(item["id"]), prompt=tuple(item["prompt"]), targets=(), max_tokens=item["max_tokens"],
                expected=_str(item.get("expected", "")), grade=_str(item.get("grade", "")),
            )
            for item in json.loads(data)["items"]
        }  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, f"{what} cannot be read: expected answers and grades are not shown"
    return items, ""


def _rules(scope: ScopeState, task: str) -> PreservationRules | None:
    table = dict(scope.study.table(task))
    names = PreservationRules.__dataclass_fields__
    try:
        values = {name: table[name] for name in names}
        for name in ("stop", "run_on"):
            values[name] = _strings(table[name])
        if len(markers := _strings(table["reasoning"])) not in (0, 2):
            return None
        values["reasoning"] = markers or None
        if not isinstance(values["max_tokens"], int):
            return None
        return PreservationRules(**values)  # type: ignore[arg-type]  # what they are is used in a view alone
    except (KeyError, TypeError):
        return None


def _str(value: object) -> str:
    """A text of a file.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(value, str):
        raise TypeError(f"found {type(value).__name__}, expected a text")
    return value


def _strings(value: object) -> tuple[str, ...]:
    """A list of texts of a file.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(value, list):
        raise TypeError(f"found {type(value).__name__}, expected a list of texts")
    return tuple(map(_str, value))
