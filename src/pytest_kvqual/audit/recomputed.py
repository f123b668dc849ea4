"""What a recording's lines must say together, and every figure of it, computed anew with exact arithmetic.

:func:`verify` reads a recording and looks at each of the numbered checks of :mod:`pytest_kvqual.audit.verify`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from pytest_kvqual.audit.files import one_line
from pytest_kvqual.audit.files import sha256 as digest_of
from pytest_kvqual.audit.recorded import (
    CONTENT,
    FAILURES,
    Figure,
    Number,
    Request,
    Value,
    Verified,
    read,
    trace_lines,
)
from pytest_kvqual.audit.shapes import shown

QUANTITIES: Final = ("ttft_intended", "ttft_send", "tpot", "e2e", "lateness")
QUANTILES: Final[Mapping[str, Fraction]] = MappingProxyType(
    {"p50": Fraction(1, 2), "p90": Fraction(9, 10), "p99": Fraction(99, 100), "max": Fraction(1)}
)

EMPTY_SLOT_NS: Final = 50_000_000
"""How long a slot of a closed loop may stay empty while requests are left."""
_BURST_NS: Final = 100_000
"""What each of the first N requests of a closed loop may cost beyond that: all are due at once."""
_OVERRUN_NS: Final = 1_000_000_000
"""How long after its time limit a request may be ended: the client looks at its limits now and then."""
_BILLION: Final = 10**9
_SHOWN: Final = 40
_NUMBERED = re.compile(r"(.+)-([0-9]{4,18})")


def verify(source: bytes | Iterable[bytes], *, trace: bytes | None = None) -> Verified:
    """Check a recording and compute its figures.

    Args:
        source: The bytes of the file, or its lines, each with its end.
        trace: The bytes of the trace that it must be of.

    Raises:
        UnreadableError: It is no recording, as of :func:`~pytest_kvqual.audit.recorded.read`, or ``trace`` is no trace.
    """
    result = read(source)
    # The header, the requests, the footer.
    footer_at = f"line {len(result.requests) + 2}"
    _requests(result)
    _accounting(result, footer_at)
    _in_time(result, footer_at)
    for request in result.requests:
        _outcome(result, request)
    _cancelled(result)
    _concurrency(result)
    _schedule(result)
    if trace is not None:
        _traced(result, trace)
    result.figures = figures(result.requests, result.concurrency or 0)
    unseen = sum(it.failure == "transport" and it.status == 200 and it.stream.failure is None for it in result.requests)
    if unseen:
        result.notes.append(f"{unseen} requests failed in transport after a whole answer: no byte shows why")
    return result


# -- the checks ------------------------------------------------------------------------------------------------------


def _requests(result: Verified) -> None:
    """Check 4."""
    declared, found = result.header["requests"], len(result.requests)
    if declared != found:
        result.find(4, "line 1", f"requests: found {declared}, expected {found}, as many as there are")
    first: dict[str, str] = {}
    for request in result.requests:
        if request.name in first:
            result.find(4, request.where, f"found the name of {first[request.name]} again, expected each once")
        first.setdefault(request.name, request.where)
    numbered = [_NUMBERED.fullmatch(request.name) for request in result.requests]
    stems = {match[1] for match in numbered if match is not None}
    if None in numbered and stems:
        result.find(4, "requests", "found names with and without a number, expected all numbered")
    elif len(stems) == 1:
        for expected, (request, match) in enumerate(zip(result.requests, numbered, strict=True)):
            if match is not None and int(match[2]) != expected:
                result.find(4, request.where, f"found the number {int(match[2])}, expected {expected}: one was left "
                            "out, added or moved")  # fmt: skip
                break
    elif stems:
        result.find(4, "requests", one_line(f"found names of {', '.join(sorted(stems))[:200]}, expected one cell's"))


def _accounting(result: Verified, where: str) -> None:
    """Checks 3 and 5."""
    footer, failed = result.footer, result.failed
    stated = footer["failed"] if isinstance(footer["failed"], dict) else {}
    for name, count in stated.items():
        if name not in FAILURES or type(count) is not int or count < 1:
            result.find(
                3, where, f"failed: found {name[:_SHOWN]!r}: {shown(count)}, expected kinds of failure that there are"
            )
    expected: dict[str, object] = {
        "offered": len(result.requests),
        "completed": len(result.requests) - sum(failed.values()),
    }
    for key, value in expected.items():
        if footer[key] != value:
            result.find(5, where, f"{key}: found {footer[key]}, expected {value}, as recorded")
    for name in sorted({*failed, *stated}):
        if failed.get(name) != stated.get(name):
            result.find(
                5, where, f"failed.{name[:_SHOWN]}: found {shown(stated.get(name))}, expected "
                f"{shown(failed.get(name))}, as recorded",
            )  # fmt: skip
    counts = (footer["completed"], *stated.values())
    if footer["offered"] != sum(count for count in counts if type(count) is int):
        result.find(5, where, f"offered: found {footer['offered']}, expected completed + failed")
    last = max((request.end for request in result.requests if request.end is not None), default=0)
    if footer["end_ns"] != last:
        result.find(3, where, f"end_ns: found {footer['end_ns']}, expected {last}, the last end of a request")


def _in_time(result: Verified, footer_at: str) -> None:
    """Check 6."""
    limit, end = result.header["timeout_ns"], result.footer["end_ns"]
    for request in result.requests:
        if request.dispatch is None or request.end is None:
            _never_sent(result, request)
            continue
        where = request.where
        chain: list[tuple[str, int | None]] = [
            ("dispatch_ns", request.dispatch),
            ("admission_ns", request.admission),
            ("connected_ns", request.connected),
            ("send_start_ns", request.send_start),
            ("send_end_ns", request.send_end),
        ]
        # What answers may come before all was sent: a request that is too large is refused while it is read.
        received = [("headers_ns", request.headers), ("events", request.first_event)]
        ends = [("end_ns", request.end)]
        _ascending(result, where, chain)
        _ascending(result, where, [*chain[:4], *received, *ends])
        _ascending(result, where, [chain[-1], *ends])
        _ascending(result, where, [("the last event", request.last_event), *ends])
        for before, (key, value) in pairwise(chain):
            if value is not None and before[1] is None:
                result.find(6, where, f"{before[0]}: found null before {key}, expected a time")
        if request.admission is None:
            result.find(6, where, "admission_ns: found null, expected a time of a request that was sent")
        if request.intended is None:
            result.find(6, where, "intended_ns: found null, expected a time of a request that was sent")
        elif request.intended < 0:
            result.find(6, where, f"intended_ns: found {request.intended}, expected none before zero")
        if result.header["mode"] == "open" and request.admission != request.dispatch:
            result.find(
                6,
                where,
                f"admission_ns: found {request.admission}, expected {request.dispatch}, its dispatch",
            )
        if request.send_start is None and (request.status is not None or request.received):
            result.find(6, where, "send_start_ns: found null, expected a time of a request that was answered")
        if request.headers is None and request.received:
            result.find(6, where, "headers_ns: found null, expected a time of a request that was answered")
        if request.failure is None and None in (request.connected, request.send_start, request.send_end):
            result.find(6, where, "found a completed request without a time of its sending, expected all of them")
        if isinstance(end, int) and request.end > end:
            result.find(6, where, f"end_ns: found {request.end}, expected at most {end}, the end of {footer_at}")
        if isinstance(limit, int) and request.end - request.dispatch > limit + _OVERRUN_NS:
            result.find(
                6, where, f"end_ns: found {request.end - request.dispatch} after dispatch, expected at most {limit}, "
                "the time limit",
            )  # fmt: skip


def _never_sent(result: Verified, request: Request) -> None:
    moments = (
        request.dispatch, request.admission, request.connected, request.send_start, request.send_end, request.headers,
        request.end,
    )  # fmt: skip
    if request.failure != "cancelled" or any(it is not None for it in moments) or request.received:
        result.find(
            6,
            request.where,
            "dispatch_ns: found null, expected a time, but of a cancelled request without any",
        )
    # The trace of an open loop says when it was due; a slot of a closed loop never became free for it.
    if (request.intended is None) != (result.header["mode"] == "closed") or (request.intended or 0) < 0:
        result.find(
            6, request.where, f"intended_ns: found {shown(request.intended)} of a request that was never sent, "
            "expected the trace's time in an open loop, null in a closed one",
        )  # fmt: skip


def _ascending(result: Verified, where: str, moments: Sequence[tuple[str, int | None]]) -> None:
    known = [(key, value) for key, value in moments if value is not None]
    for (first, before), (second, after) in pairwise(known):
        if after < before:
            result.find(6, where, f"{second}: found {after}, expected at least {before} of {first}")


def _outcome(result: Verified, request: Request) -> None:
    """Check 8."""
    failure, status, where = request.failure, request.status, request.where
    followed: str | None
    if status is not None and status != 200:
        followed, why = "status", f"status {status}"
    elif status == 200:
        followed, why = request.stream.failure, request.stream.why
    else:
        followed, why = "none that has an answer", "no status"
    if failure is None or failure == "status" or failure in CONTENT:
        if failure != followed:
            result.find(
                8, where, f"found {failure or 'completed'}, expected {followed or 'completed'}"
                f"{f' ({why})' if why else ''}, from its bytes",
            )  # fmt: skip
    elif failure == "refused":
        if request.connected is not None or request.send_start is not None or status is not None or request.received:
            result.find(8, where, "found refused of a request that had a connection, expected none")
    elif failure == "timeout":
        limit = result.header["timeout_ns"]
        took = None if request.dispatch is None or request.end is None else request.end - request.dispatch
        if took is not None and isinstance(limit, int) and took < limit:
            result.find(8, where, f"found timeout {took} ns after dispatch, expected at least {limit}")
    elif failure == "transport" and request.connected is None:
        result.find(8, where, "found transport of a request without a connection, expected refused")


def _cancelled(result: Verified) -> None:
    """Check 8: an interrupt ends everything; nothing is sent after it."""
    sent = [it for it in result.requests if it.dispatch is not None]
    cut = [it.end for it in sent if it.failure == "cancelled" and it.end is not None]
    for request in sent if cut else ():
        if request.dispatch is not None and request.dispatch > min(cut):
            result.find(
                8, request.where, f"found dispatch at {request.dispatch}, expected none after {min(cut)}, when another "
                "was cancelled: an interrupt ends the run",
            )  # fmt: skip
    before: Request | None = None
    for request in result.requests:
        if before is not None and request.dispatch is not None:
            result.find(8, before.where, "found a request not sent before one that was, expected the last ones")
            break
        before = request if request.dispatch is None else before


def _concurrency(result: Verified) -> None:
    """Check 9."""
    most = result.concurrency
    if most is None:
        return
    marks: list[tuple[int, int, str]] = []
    for request in result.requests:
        if request.dispatch is not None and request.end is not None:
            # At one moment an end makes room for a dispatch.
            marks += [(request.dispatch, 1, request.where), (request.end, -1, request.where)]
    flying = 0
    for _, change, where in sorted(marks):
        flying += change
        if flying > most:
            result.find(9, where, f"found {flying} requests in flight at its dispatch, expected at most {most}")
            return


def _schedule(result: Verified) -> None:
    """Check 10."""
    most = result.concurrency
    sent = [it for it in result.requests if it.dispatch is not None and it.intended is not None]
    freed = sorted(it.end for it in sent if it.end is not None)
    last_intended = last_dispatch = None
    for place, request in enumerate(sent):
        intended, dispatch, where = request.intended, request.dispatch, request.where
        if intended is None or dispatch is None:
            continue
        if dispatch < intended:
            result.find(10, where, f"dispatch_ns: found {dispatch}, expected at least {intended}, the intended arrival")
        if last_dispatch is not None and dispatch < last_dispatch:
            result.find(10, where, f"dispatch_ns: found {dispatch}, expected at least {last_dispatch}, the last one")
        if last_intended is not None and intended < last_intended:
            result.find(10, where, f"intended_ns: found {intended}, expected at least {last_intended}, the last one")
        last_intended, last_dispatch = intended, dispatch
        if most is None:
            continue
        expected = 0 if place < most else freed[place - most]
        if intended != expected:
            why = "the first N begin at zero" if place < most else f"when slot {place - most + 1} became free"
            result.find(10, where, f"intended_ns: found {intended}, expected {expected}: {why}")
        allowed = EMPTY_SLOT_NS + (_BURST_NS * most if place < most else 0)
        if dispatch - intended > allowed:
            result.find(
                10, where, f"dispatch_ns: found {dispatch - intended} after a slot became free, expected at most "
                f"{allowed}: fewer than {most} were in flight",
            )  # fmt: skip


def _traced(result: Verified, data: bytes) -> None:
    """Check 11."""
    found = result.header["trace_sha256"]
    if found != digest_of(data):
        result.find(11, "line 1", f"trace_sha256: found {shown(found)}, expected {digest_of(data)}, the trace's")
    lines = trace_lines(data)
    header, asked = lines[0], lines[1:]
    for key in ("cell", "mode", "concurrency", "requests"):
        if result.header[key] != header.get(key):
            result.find(11, "line 1", f"{key}: found {shown(result.header[key])}, expected {shown(header.get(key))}")
    if len(asked) != len(result.requests):
        result.find(11, "requests", f"found {len(result.requests)}, expected {len(asked)}, the trace's")
    for request, line in zip(result.requests, asked, strict=False):
        expected: dict[str, object] = {
            "request": request.name,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
        }
        if line.get("intended_ns") is not None or result.header["mode"] == "open":
            expected["intended_ns"] = request.intended
        for key, value in expected.items():
            if line.get(key) != value:
                result.find(11, request.where, f"{key}: found {shown(value)}, expected {shown(line.get(key))}")


# -- figures ---------------------------------------------------------------------------------------------------------


def figures(requests: Sequence[Request], burst: int) -> dict[str, Figure]:
    """Every figure of a recording by name; ``burst`` is N of a closed loop, 0 of an open one."""
    found: dict[str, Figure] = {}
    for prefix, part in (("", requests[burst:]), ("burst_", requests[:burst])):
        for name in QUANTITIES:
            values = sorted(_values(name, part))
            for label, share in QUANTILES.items():
                found[f"{prefix}{name}_{label}"] = Figure(value=nearest(values, share), unit="ns", of=len(values))
    sent = [value for it in requests if (value := it.since(it.send_start, 0)) is not None]
    found["mean_ttft_send"] = Figure(value=Fraction(sum(sent), len(sent)) if sent else None, unit="ns", of=len(sent))
    whole = [it for it in requests if it.failure is None]
    tokens = sum(len(it.stream.tokens) for it in whole)
    begins = [it.intended for it in requests if it.intended is not None]
    ends = [it.end for it in requests if it.end is not None]
    span = max(ends) - min(begins) if begins and ends else 0
    for name, count in (("output_throughput", tokens), ("request_throughput", len(whole))):
        rate = Fraction(count * _BILLION, span) if span else None
        found[name] = Figure(value=rate, unit="1/s", of=len(whole))
    found["goodput_tokens"] = Figure(value=Fraction(tokens), unit="tokens", of=len(whole))
    most = [max(count for _, count in it.stream.arrivals) for it in requests if it.stream.arrivals]
    found["tokens_per_event_max"] = Figure(value=Fraction(max(most)) if most else None, unit="tokens", of=len(most))
    return found


def nearest(ranked: Sequence[Number], share: Fraction) -> Value:
    """The value of the nearest rank in ascending values: the smallest one that ``share`` of them do not exceed."""
    if not ranked:
        return None
    # The smallest rank r with r / n >= share, in integers.
    rank = -(-share.numerator * len(ranked) // share.denominator)
    return ranked[max(rank, 1) - 1]


def _values(name: str, requests: Sequence[Request]) -> Iterator[Number]:
    for request in requests:
        value: Value = None
        if name == "lateness":
            if request.lateness is not None:
                yield Fraction(request.lateness)
            continue
        if name == "tpot":
            if request.failure is None and len(request.stream.tokens) < 2:
                continue
            value = per_token(request)
        else:
            begin = request.send_start if name == "ttft_send" else request.intended
            since = request.since(begin, -1 if name == "e2e" else 0)
            value = None if since is None else Fraction(since)
        yield math.inf if value is None or request.failure is not None else value


def per_token(request: Request) -> Fraction | None:
    """The time per output token after the first event with any, in ns; None below two tokens."""
    arrivals, tokens = request.stream.arrivals, len(request.stream.tokens)
    return Fraction(arrivals[-1][0] - arrivals[0][0], tokens - 1) if tokens > 1 else None
