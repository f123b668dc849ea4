"""Seeded faults of the recorder itself, for gate fidelity: kinds that recur in public reports of timing clients.

Each is planted through the recorder's own seam (:class:`~pytest_kvqual.capture.recorder.Seams`), by setting its
attributes, so that the rest of the recorder runs as it is. Nothing of the recorder is imported here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

_LATE_NS = 20_000_000
_STEP_NS = 1_000_000_000
_STEP_AT_NS = 70_000_000
_CAP = 4
_STAMPS = (
    "intended_ns", "dispatch_ns", "admission_ns", "connected_ns", "send_start_ns", "send_end_ns", "headers_ns",
    "end_ns",
)  # fmt: skip

Record = dict[str, Any]


class Seams(Protocol):
    """The part of the recorder's seam that is used."""

    cap: int | None
    record: Callable[[Record], Record | None] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecorderFault:
    """One fault. ``plant`` sets it into the recorder's seam; ``mechanism`` is one line."""

    name: str
    mechanism: str
    plant: Callable[[Seams], None]


def _first_byte(record: Record) -> Record:
    # The time to the first byte taken for that to the first token.
    if record["events"] and record["headers_ns"] is not None:
        record["events"][0][0] = record["headers_ns"]
    return record


def _late(record: Record) -> Record:
    record["events"] = [[at + _LATE_NS, event] for at, event in record["events"]]
    if record["end_ns"] is not None:
        record["end_ns"] += _LATE_NS
    return record


def _capped_untold(record: Record) -> Record:
    if record["dispatch_ns"] is None:
        return record
    for stamp in ("dispatch_ns", "admission_ns", "connected_ns", "send_start_ns", "send_end_ns"):
        record[stamp] = record["intended_ns"]
    return record


def _drop_failure(record: Record) -> Record | None:
    return None if record["failure"] is not None else record


def _error_is_success(record: Record) -> Record:
    if record["failure"] is not None and record["failure"]["kind"] == "error-object":
        record["failure"] = None
    return record


def _stepped(record: Record) -> Record:
    def read(at: int | None) -> int | None:
        return at if at is None or at < _STEP_AT_NS else at - _STEP_NS

    for stamp in _STAMPS:
        # The schedule is the trace's; every stamp beside it is of the clock that was stepped.
        if stamp != "intended_ns":
            record[stamp] = read(record[stamp])
    record["events"] = [[read(at), event] for at, event in record["events"]]
    return record


def _one_per_event(record: Record) -> Record:
    counted = 0
    events = []
    for at, encoded in record["events"]:
        raw = base64.b64decode(encoded)
        if raw.startswith(b"data: {"):
            document = json.loads(raw[len(b"data: ") :])
            for choice in document.get("choices", ()):
                if choice.get("token_ids"):
                    choice["token_ids"] = choice["token_ids"][:1]
                    counted += 1
            if document.get("usage"):
                document["usage"]["completion_tokens"] = counted
            raw = b"data: " + json.dumps(document).encode() + b"\n\n"
        events.append([at, base64.b64encode(raw).decode("ascii")])
    record["events"] = events
    return record


def _records(change: Callable[[Record], Record | None], *, cap: int | None = None) -> Callable[[Seams], None]:
    def plant(seams: Seams) -> None:
        seams.record = change
        seams.cap = cap

    return plant


def _cap(seams: Seams) -> None:
    seams.cap = _CAP


RECORDER_FAULTS: Final[Mapping[str, RecorderFault]] = MappingProxyType(
    {
        name: RecorderFault(name=name, mechanism=mechanism, plant=plant)
        for name, mechanism, plant in (
            ("first-byte-is-first-token", "the header's time is taken for the first token's", _records(_first_byte)),
            ("late-stamp", "events are stamped 20 ms after the read", _records(_late)),
            ("hidden-cap", "at most 4 requests in flight in open loop, dispatch is stamped after the wait", _cap),
            (
                "hidden-cap-untold",
                "at most 4 requests in flight in open loop, each stamp up to the send says the intended arrival",
                _records(_capped_untold, cap=_CAP),
            ),
            ("failure-dropped", "a failed request is left out of the recording", _records(_drop_failure)),
            (
                "error-object-is-success",
                "an error object under status 200 counts as success",
                _records(_error_is_success),
            ),
            ("clock-wall", "stamps are of a wall clock that is set back by 1 s during the run", _records(_stepped)),
            ("token-per-event", "each event counts as one token, and usage is not believed", _records(_one_per_event)),
        )
    }
)
"""The seeded faults by name."""
