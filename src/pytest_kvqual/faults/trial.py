"""Faults of a timed trial, planted in a copy of its records: what a harness that fools itself would have written.

Each takes the evidence and gives a damaged copy, or None where the evidence has nothing to plant it in.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pytest_kvqual._canonical import canonical_bytes

if TYPE_CHECKING:
    from pytest_kvqual.judge.gates.trial import Evidence

_WARM_UP: Final = "warm-up"
_FIRST_ID: Final = re.compile(rb'("token_ids":\s*\[\s*)(\d+)')
# Beyond any limit of a timing plan.
_LATE_NS: Final = 1_000_000_000_000
_FROM_DISPATCH: Final = (
    "dispatch_ns", "admission_ns", "connected_ns", "send_start_ns", "send_end_ns", "headers_ns", "end_ns",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialFault:
    """One fault: the rule of the trial judge that must object, and how it is planted.

    ``cold``: it is one only where the plan says that no prefix may be found in the cache.
    """

    rule: int
    plant: Callable[[Evidence], Evidence | None]
    cold: bool = False


def _copy(evidence: Evidence) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(canonical_bytes(evidence.trial))
    return document


def _cell(evidence: Evidence) -> str | None:
    return next((name for name in evidence.recordings if name != _WARM_UP), None)


def _lines(evidence: Evidence, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in evidence.recordings[name].splitlines()]


def _written(evidence: Evidence, name: str, lines: list[dict[str, Any]]) -> Evidence:
    data = b"".join(canonical_bytes(line) + b"\n" for line in lines)
    return replace(evidence, recordings={**evidence.recordings, name: data})


def _tap_left_on(evidence: Evidence) -> Evidence | None:
    trial = _copy(evidence)
    trial["taps"][-1]["ranks"][0]["installed"] = True
    return replace(evidence, trial=trial)


def _fallback_after(evidence: Evidence) -> Evidence | None:
    trial = _copy(evidence)
    trial["dispatch"][-1]["ranks"] = []
    return replace(evidence, trial=trial)


def _request_left_out(evidence: Evidence) -> Evidence | None:
    """A request that was offered is not in the recording, whose totals are made to fit."""
    name = _cell(evidence)
    if name is None:
        return None
    lines = _lines(evidence, name)
    gone = lines.pop(-2)
    lines[0]["requests"] -= 1
    lines[-1]["offered"] -= 1
    if gone["failure"] is None:
        lines[-1]["completed"] -= 1
    else:
        kind = gone["failure"]["kind"]
        lines[-1]["failed"][kind] -= 1
        if not lines[-1]["failed"][kind]:
            del lines[-1]["failed"][kind]
    lines[-1]["end_ns"] = max((line["end_ns"] or 0 for line in lines[1:-1]), default=0)
    return _written(evidence, name, lines)


def _foreign_traffic(evidence: Evidence) -> Evidence | None:
    trial = _copy(evidence)
    trial["counters"][-1]["values"]["generation_tokens"] += 24
    return replace(evidence, trial=trial)


def _warm_prefix(evidence: Evidence) -> Evidence | None:
    trial = _copy(evidence)
    trial["counters"][-1]["values"]["prefix_cache_hits"] += 896
    return replace(evidence, trial=trial)


def _preempted(evidence: Evidence) -> Evidence | None:
    trial = _copy(evidence)
    trial["counters"][-1]["values"]["preemptions"] += 1
    return replace(evidence, trial=trial)


def _answer_changed(evidence: Evidence) -> Evidence | None:
    """The first token of every answer is another one, as from a corrupted cache."""
    damaged, planted = evidence, False
    for name in evidence.recordings:
        if name == _WARM_UP:
            continue
        lines = _lines(evidence, name)
        for line in lines[1:-1]:
            for event in line["events"]:
                raw, count = _FIRST_ID.subn(_next_id, base64.b64decode(event[1]), count=1)
                if count:
                    event[1] = base64.b64encode(raw).decode()
                    planted = True
                    break
        damaged = _written(damaged, name, lines)
    return damaged if planted else None


def _next_id(found: re.Match[bytes]) -> bytes:
    return found[1] + str(int(found[2]) + 1).encode()


def _late_dispatch(evidence: Evidence) -> Evidence | None:
    """Every request was sent late, and its answer came as long after its send as before."""
    return _delayed(evidence, *_FROM_DISPATCH)


def _slow_client(evidence: Evidence) -> Evidence | None:
    """The client read every event of a cell long after the server had sent it."""
    return _delayed(evidence, "end_ns")


def _delayed(evidence: Evidence, *stamps: str) -> Evidence | None:
    """These stamps and every event of a cell are later; a stamp that there is not stays so."""
    name = _cell(evidence)
    if name is None:
        return None
    lines = _lines(evidence, name)
    for line in lines[1:-1]:
        for key in stamps:
            if line[key] is not None:
                line[key] += _LATE_NS
        for event in line["events"]:
            event[0] += _LATE_NS
    lines[-1]["end_ns"] += _LATE_NS
    return _written(evidence, name, lines)


def _other_plan(evidence: Evidence) -> Evidence | None:
    return replace(evidence, trial={**evidence.trial, "plan_sha256": "0" * 64})


def _error_as_success(evidence: Evidence) -> Evidence | None:
    """The server answered with an error after its tokens, and the recorder counted the request as completed."""
    name = _cell(evidence)
    if name is None:
        return None
    lines = _lines(evidence, name)
    line = next((it for it in lines[1:-1] if it["failure"] is None), None)
    if line is None:
        return None
    error = b'data: {"error":{"message":"planted","code":500}}\n\n'
    line["events"].append([line["events"][-1][0], base64.b64encode(error).decode()])
    return _written(evidence, name, lines)


FAULTS: Final[Mapping[str, TrialFault]] = MappingProxyType(
    {
        "trial-of-another-plan": TrialFault(rule=1, plant=_other_plan),
        "tap-left-on": TrialFault(rule=2, plant=_tap_left_on),
        "error-as-success": TrialFault(rule=3, plant=_error_as_success),
        "request-left-out": TrialFault(rule=3, plant=_request_left_out),
        "fallback-after-the-interval": TrialFault(rule=5, plant=_fallback_after),
        "foreign-traffic": TrialFault(rule=7, plant=_foreign_traffic),
        "warm-prefix": TrialFault(rule=7, plant=_warm_prefix, cold=True),
        "preempted": TrialFault(rule=7, plant=_preempted),
        "answer-changed": TrialFault(rule=8, plant=_answer_changed),
        "late-dispatch": TrialFault(rule=9, plant=_late_dispatch),
        "slow-client": TrialFault(rule=10, plant=_slow_client),
    }
)
"""The seeded faults of the gate, by name."""


def faults_of(*, cold: bool) -> tuple[str, ...]:
    """The faults that are to be planted in the trials of a plan that is ``cold``, or is not."""
    return tuple(name for name, fault in FAULTS.items() if cold or not fault.cold)
