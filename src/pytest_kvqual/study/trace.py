"""Arrival traces: which prompt is sent when, decided and hashed before anything is timed. Pure: same in, same bytes.

A trace is a file of canonical JSON lines: a header, then one line for each request in the order of sending. Arrivals
are nanoseconds after schedule zero. In a closed loop there are none: a request follows when one in flight has ended.

Poisson arrivals. Successive gaps are ``-ln(u) / rate``. ``u`` is (k + 1) / 2**64, ``k`` the first 8 bytes, big-endian,
of SHA-256(``SEED:INDEX``); ln is taken by :mod:`decimal` with 40 digits, whose result is correctly rounded, and the sum
of the gaps is rounded half-even to whole nanoseconds. No step depends on a platform's mathematics library.

History of the format: 1, the first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from pytest_kvqual._canonical import canonical_bytes
from pytest_kvqual._decode import Table, parse_json
from pytest_kvqual.errors import EvidenceError, StudyError

if TYPE_CHECKING:
    from pytest_kvqual.study.model import Cell
    from pytest_kvqual.study.panels import PanelItem

SCHEMA: Final = 1
GENERATORS: Final[Mapping[str | None, str]] = {
    "constant": "i / rate",
    "poisson": "cumulative -ln((SHA-256(seed:i)[:8] + 1) / 2**64) / rate, decimal of 40 digits",
    "file": "as given",
    None: "closed loop",
}
"""How the arrivals of each kind come about, as the header says it."""

_HEADER: Final = (
    "schema", "kind", "cell", "mode", "arrivals", "rate", "seed", "generator", "concurrency", "panel_sha256",
    "requests",
)  # fmt: skip
_REQUEST: Final = ("request", "intended_ns", "prompt", "max_tokens")
_CONTEXT: Final = Context(prec=40, rounding=ROUND_HALF_EVEN)
_SECOND: Final = 10**9
_LAST_NS: Final = 30 * 86_400 * _SECOND
"""The latest arrival of a trace: a month. What is later cannot be meant, and beyond 2**63 cannot be recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRequest:
    """One request: its name, intended arrival (None in a closed loop), the panel item that it sends, output limit."""

    request: str
    intended_ns: int | None
    prompt: str
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One trace. ``rate`` in requests/s, ``seed`` of Poisson arrivals, ``concurrency`` of a closed loop; else None."""

    cell: str
    mode: str
    arrivals: str | None
    rate: float | None
    seed: str | None
    concurrency: int | None
    panel_sha256: str
    requests: tuple[TraceRequest, ...]

    def to_bytes(self) -> bytes:
        """The trace as a file."""
        header = {
            "schema": SCHEMA,
            "kind": "trace",
            "cell": self.cell,
            "mode": self.mode,
            "arrivals": self.arrivals,
            "rate": self.rate,
            "seed": self.seed,
            "generator": GENERATORS[self.arrivals],
            "concurrency": self.concurrency,
            "panel_sha256": self.panel_sha256,
            "requests": len(self.requests),
        }
        lines = [header] + [
            {"request": it.request, "intended_ns": it.intended_ns, "prompt": it.prompt, "max_tokens": it.max_tokens}
            for it in self.requests
        ]
        return b"".join(canonical_bytes(line) + b"\n" for line in lines)


def constant_arrivals(rate: float, count: int) -> tuple[int, ...]:
    """Arrivals in ns at a constant rate in requests/s, the first at zero."""
    step = _CONTEXT.divide(Decimal(_SECOND), Decimal(repr(rate)))
    return tuple(_whole(_CONTEXT.multiply(step, Decimal(index))) for index in range(count))


def poisson_arrivals(rate: float, seed: str, count: int) -> tuple[int, ...]:
    """Arrivals in ns of a Poisson process of ``rate`` requests/s, by this module's generator."""
    scale, at, found = Decimal(repr(rate)), Decimal(0), []
    for index in range(count):
        drawn = int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8], "big")
        uniform = _CONTEXT.divide(Decimal(drawn + 1), Decimal(2**64))
        gap = _CONTEXT.divide(_CONTEXT.multiply(_CONTEXT.minus(_CONTEXT.ln(uniform)), Decimal(_SECOND)), scale)
        at = _CONTEXT.add(at, gap)
        found.append(_whole(at))
    return tuple(found)


def _whole(value: Decimal) -> int:
    return int(value.to_integral_value(rounding=ROUND_HALF_EVEN))


def build(
    cells: Sequence[Cell],
    items: Sequence[PanelItem],
    panel_sha256: str,
    *,
    arrivals: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Trace]:
    """The traces of a timing plan's cells, by cell.

    Measured prompts are taken in the panel's order, and each once over all cells; canaries stand at evenly spaced
    places, never first, and each cell takes the next ones.

    Args:
        cells: The cells in order.
        items: The timing panel's items.
        panel_sha256: The digest of the panel.
        arrivals: For each cell of kind ``file``, its arrivals in ns.

    Raises:
        StudyError: The panel has too few items, or the arrivals of a file are not as many as the requests, or not in
            order, or an arrival is later than a month after the start.
    """
    measured = [item for item in items if item.grade == "measured"]
    canaries = [item for item in items if item.grade == "canary"]
    found: dict[str, Trace] = {}
    for cell in cells:
        if cell.canaries >= cell.requests:
            raise StudyError(
                f"cell {cell.name}: found {cell.canaries} canaries of {cell.requests} requests, expected fewer"
            )
        places = canary_places(cell.requests, cell.canaries)
        if len(measured) < cell.requests - len(places) or len(canaries) < len(places):
            raise StudyError(
                f"cell {cell.name}: found {len(measured)} measured prompts and {len(canaries)} canaries left, expected "
                f"{cell.requests - len(places)} and {len(places)}",
                advice="add items to the timing panel: no prompt is sent twice",
            )
        times = _arrivals(cell, (arrivals or {}).get(cell.name))
        if times and times[-1] > _LAST_NS:
            raise StudyError(
                f"cell {cell.name}: found an arrival {Decimal(times[-1]) / _SECOND:.6g} s after zero, expected all "
                f"within {_LAST_NS // _SECOND} s",
                advice="raise the rate or lower the requests",
            )
        requests = []
        for index in range(cell.requests):
            item = (canaries if index in places else measured).pop(0)
            requests.append(
                TraceRequest(
                    request=f"{cell.name}-{index:04d}",
                    intended_ns=None if times is None else times[index],
                    prompt=item.id,
                    max_tokens=cell.max_tokens,
                )
            )
        found[cell.name] = Trace(
            cell=cell.name,
            mode=cell.mode,
            arrivals=cell.arrivals,
            rate=None if cell.rate is None else float(cell.rate),
            seed=cell.seed,
            concurrency=cell.concurrency,
            panel_sha256=panel_sha256,
            requests=tuple(requests),
        )
    return found


def canary_places(requests: int, canaries: int) -> frozenset[int]:
    """Where the canaries, fewer than the requests, stand among them: evenly spaced, never first."""
    return frozenset((index + 1) * requests // (canaries + 1) for index in range(canaries))


def _arrivals(cell: Cell, given: Sequence[int] | None) -> tuple[int, ...] | None:
    if cell.arrivals is None:
        return None
    if cell.arrivals == "constant" and cell.rate is not None:
        return constant_arrivals(cell.rate, cell.requests)
    if cell.arrivals == "poisson" and cell.rate is not None and cell.seed is not None:
        return poisson_arrivals(cell.rate, cell.seed, cell.requests)
    if given is None:
        raise StudyError(f"cell {cell.name}: found no file of arrivals, expected one", advice="kvqual trace --arrivals")
    if len(given) != cell.requests:
        raise StudyError(
            f"cell {cell.name}: found {len(given)} arrivals, expected {cell.requests}, one for each request"
        )
    if any(after < before for before, after in pairwise(given)) or min(given) < 0:
        raise StudyError(f"cell {cell.name}: found arrivals that go back or are before zero, expected ascending ones")
    return tuple(given)


def parse_trace(data: bytes, *, origin: str) -> Trace:
    """The trace in the bytes of a file.

    Raises:
        EvidenceError: It is no trace, or not in the form that this module writes; names the line.
    """
    if not data.endswith(b"\n"):
        raise EvidenceError(f"{origin}: found no end of the last line, expected a whole trace")
    lines = data[:-1].split(b"\n")
    tables = [
        Table(
            parse_json(line, origin=f"{origin}, line {number}", error=EvidenceError),
            origin=f"{origin}, line {number}",
            error=EvidenceError,
            known=_HEADER if number == 1 else _REQUEST,
        )
        for number, line in enumerate(lines, start=1)
    ]
    head = tables[0]
    schema = head.integer("schema")
    if schema != SCHEMA:
        head.fail("schema", str(schema), str(SCHEMA))
    head.choice("kind", ("trace",))
    mode = head.choice("mode", ("open", "closed"))
    count = head.integer("requests", minimum=1)
    if len(tables) - 1 != count:
        head.fail("requests", str(count), f"{len(tables) - 1}, the lines that follow")
    requests = tuple(
        TraceRequest(
            request=table.string("request"),
            intended_ns=None if table.raw("intended_ns") is None else table.integer("intended_ns", minimum=0),
            prompt=table.string("prompt"),
            max_tokens=table.integer("max_tokens", minimum=1),
        )
        for table in tables[1:]
    )
    trace = Trace(
        cell=head.string("cell"),
        mode=mode,
        arrivals=None if head.raw("arrivals") is None else head.choice("arrivals", ("constant", "poisson", "file")),
        rate=None if head.raw("rate") is None else head.number("rate"),
        seed=None if head.raw("seed") is None else head.string("seed"),
        concurrency=None if head.raw("concurrency") is None else head.integer("concurrency", minimum=1),
        panel_sha256=head.sha256("panel_sha256"),
        requests=requests,
    )
    closed = mode == "closed"
    if any(closed != (it.intended_ns is None) for it in requests) or closed != (trace.concurrency is not None):
        head.fail("mode", f"'{mode}'", "arrivals exactly in an open loop, a concurrency exactly in a closed one")
    if (
        closed != (trace.arrivals is None)
        or (trace.seed is not None) != (trace.arrivals == "poisson")
        or (trace.rate is None and trace.arrivals in ("constant", "poisson"))
        or (closed and trace.rate is not None)
    ):
        head.fail(
            "arrivals", f"'{trace.arrivals}' with the rate {trace.rate} and the seed {trace.seed!r}",
            "a kind exactly in an open loop, a rate of constant and poisson arrivals, a seed of poisson ones",
        )  # fmt: skip
    times = [it.intended_ns for it in requests if it.intended_ns is not None]
    if times != sorted(times) or len({it.request for it in requests}) != len(requests):
        head.fail("requests", "arrivals that go back, or a request named twice", "ascending arrivals, each name once")
    if trace.to_bytes() != data:
        raise EvidenceError(f"{origin}: found other bytes than the canonical ones of this trace")
    return trace
