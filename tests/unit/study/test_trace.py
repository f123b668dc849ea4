"""Arrival traces: golden bytes, places, and every refusal."""

from __future__ import annotations

import decimal
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_kvqual._canonical import canonical_bytes
from pytest_kvqual.errors import EvidenceError, StudyError
from pytest_kvqual.study.model import Cell
from pytest_kvqual.study.panels import PanelItem
from pytest_kvqual.study.trace import build, canary_places, parse_trace, poisson_arrivals

PANEL = "0" * 64


def cell(**changes: Any) -> Cell:
    """A cell of four Poisson arrivals."""
    values: dict[str, Any] = {
        "name": "open", "mode": "open", "arrivals": "poisson", "rate": 2.0, "seed": "s", "concurrency": None,
        "requests": 4, "canaries": 1, "max_tokens": 8, "trace": Path("t"), **changes,
    }  # fmt: skip
    return Cell(**values)


CONSTANT = {"name": "steady", "arrivals": "constant", "rate": 3.0, "seed": None}
CLOSED = {"name": "closed", "mode": "closed", "arrivals": None, "rate": None, "seed": None, "concurrency": 2}
FILE = {"arrivals": "file", "rate": None, "seed": None}


def items(measured: int = 20, canaries: int = 5) -> list[PanelItem]:
    """A timing panel."""
    return [
        PanelItem(id=f"{grade}{index}", prompt=(1,), targets=(), max_tokens=8, grade=grade)
        for grade, count in (("measured", measured), ("canary", canaries))
        for index in range(count)
    ]


def made(**changes: Any) -> bytes:
    """The bytes of one cell's trace."""
    (found,) = build([cell(**changes)], items(), PANEL).values()
    return found.to_bytes()


GOLDEN: dict[str, tuple[dict[str, Any], str]] = {
    "poisson": (
        {},
        (
            '{"arrivals":"poisson","cell":"open","concurrency":null,'
            '"generator":"cumulative -ln((SHA-256(seed:i)[:8] + 1) / 2**64) / rate, decimal of 40 digits",'
            '"kind":"trace","mode":"open","panel_sha256":"'
            + PANEL
            + '","rate":2.0,"requests":4,"schema":1,"seed":"s"}\n'
            '{"intended_ns":1012147651,"max_tokens":8,"prompt":"measured0","request":"open-0000"}\n'
            '{"intended_ns":2134080126,"max_tokens":8,"prompt":"measured1","request":"open-0001"}\n'
            '{"intended_ns":2646378387,"max_tokens":8,"prompt":"canary0","request":"open-0002"}\n'
            '{"intended_ns":2747377449,"max_tokens":8,"prompt":"measured2","request":"open-0003"}\n'
        ),
    ),
    "constant": (
        CONSTANT,
        (
            '{"arrivals":"constant","cell":"steady","concurrency":null,"generator":"i / rate",'
            '"kind":"trace","mode":"open","panel_sha256":"'
            + PANEL
            + '","rate":3.0,"requests":4,"schema":1,"seed":null}\n'
            '{"intended_ns":0,"max_tokens":8,"prompt":"measured0","request":"steady-0000"}\n'
            '{"intended_ns":333333333,"max_tokens":8,"prompt":"measured1","request":"steady-0001"}\n'
            '{"intended_ns":666666667,"max_tokens":8,"prompt":"canary0","request":"steady-0002"}\n'
            '{"intended_ns":1000000000,"max_tokens":8,"prompt":"measured2","request":"steady-0003"}\n'
        ),
    ),
    "closed": (
        CLOSED,
        (
            '{"arrivals":null,"cell":"closed","concurrency":2,"generator":"closed loop",'
            '"kind":"trace","mode":"closed","panel_sha256":"'
            + PANEL
            + '","rate":null,"requests":4,"schema":1,"seed":null}\n'
            '{"intended_ns":null,"max_tokens":8,"prompt":"measured0","request":"closed-0000"}\n'
            '{"intended_ns":null,"max_tokens":8,"prompt":"measured1","request":"closed-0001"}\n'
            '{"intended_ns":null,"max_tokens":8,"prompt":"canary0","request":"closed-0002"}\n'
            '{"intended_ns":null,"max_tokens":8,"prompt":"measured2","request":"closed-0003"}\n'
        ),
    ),
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_bytes(kind: str) -> None:
    """The same cell has the same bytes on every platform and whatever the ambient decimal context is."""
    changes, text = GOLDEN[kind]
    with decimal.localcontext(prec=3, rounding=decimal.ROUND_UP):
        assert made(**changes).decode() == text
    assert parse_trace(text.encode(), origin="t").to_bytes().decode() == text


def test_poisson_gaps_by_another_way() -> None:
    """The arrivals agree with binary floating point, and their mean gap with the rate."""
    at, found = 0.0, poisson_arrivals(4.0, "seed", 2000)
    for index, arrival in enumerate(found):
        drawn = int.from_bytes(hashlib.sha256(f"seed:{index}".encode()).digest()[:8], "big")
        at -= math.log((drawn + 1) / 2**64) / 4.0
        assert arrival == pytest.approx(at * 1e9, abs=2e3)
    assert found[-1] / 2000 == pytest.approx(0.25e9, rel=0.1)


def test_prompts_are_sent_once_over_all_cells() -> None:
    """The second cell takes the next measured items and the next canaries."""
    found = build([cell(), cell(**CLOSED)], items(), PANEL)
    prompts = [[it.prompt for it in trace.requests] for trace in found.values()]
    assert prompts == [["measured0", "measured1", "canary0", "measured2"],
                       ["measured3", "measured4", "canary1", "measured5"]]  # fmt: skip
    assert [it.request for it in found["closed"].requests] == [f"closed-{index:04d}" for index in range(4)]


def test_canaries_are_spread_and_never_first() -> None:
    """As many places as canaries for every number of them."""
    for requests in range(1, 60):
        for canaries in range(requests):
            places = canary_places(requests, canaries)
            assert len(places) == canaries
            assert all(0 < place < requests for place in places)
    assert canary_places(12, 2) == {4, 8}


def test_arrivals_of_a_file() -> None:
    """They stand as given."""
    (found,) = build([cell(**FILE)], items(), PANEL, arrivals={"open": [0, 1, 1, 5]}).values()
    assert [it.intended_ns for it in found.requests] == [0, 1, 1, 5]


@pytest.mark.parametrize(
    ("changes", "panel", "given"),
    [
        ({}, items(2), None),
        ({}, items(20, 0), None),
        ({"canaries": 4}, items(), None),
        (FILE, items(), None),
        (FILE, items(), [1, 2]),
        (FILE, items(), [0, 2, 1, 3]),
        (FILE, items(), [-1, 2, 3, 4]),
    ],
    ids=["prompts", "canaries", "all canaries", "no file", "too few", "back", "before zero"],
)
def test_a_cell_without_what_it_needs_is_one_line(
    changes: dict[str, Any], panel: list[PanelItem], given: list[int] | None
) -> None:
    """A panel too small, or arrivals that do not fit."""
    with pytest.raises(StudyError, match=r"^cell open: found [^\n]*, expected"):
        build([cell(**changes)], panel, PANEL, arrivals=None if given is None else {"open": given})


Change = Callable[[list[dict[str, Any]]], object]
REFUSED: dict[str, tuple[dict[str, Any], Change]] = {
    "schema": ({}, lambda it: it[0].update(schema=2)),
    "kind": ({}, lambda it: it[0].update(kind="recording")),
    "mode": ({}, lambda it: it[0].update(mode="ajar")),
    "open as closed": ({}, lambda it: it[0].update(mode="closed", concurrency=2)),
    "closed as open": (CLOSED, lambda it: it[0].update(mode="open", concurrency=None)),
    "closed without concurrency": (CLOSED, lambda it: it[0].update(concurrency=None)),
    "open with concurrency": ({}, lambda it: it[0].update(concurrency=2)),
    "one request without arrival": ({}, lambda it: it[2].update(intended_ns=None)),
    "no arrivals in an open loop": ({}, lambda it: it[0].update(arrivals=None, seed=None, generator="closed loop")),
    "arrivals in a closed loop": (CLOSED, lambda it: it[0].update(arrivals="file", generator="as given")),
    "rate in a closed loop": (CLOSED, lambda it: it[0].update(rate=1.0)),
    "no seed": ({}, lambda it: it[0].update(seed=None)),
    "seed of constant arrivals": (CONSTANT, lambda it: it[0].update(seed="s")),
    "no rate": (CONSTANT, lambda it: it[0].update(rate=None)),
    "generator": ({}, lambda it: it[0].update(generator="other")),
    "panel": ({}, lambda it: it[0].update(panel_sha256="x")),
    "requests": ({}, lambda it: it[0].update(requests=3)),
    "none": ({}, lambda it: it.__setitem__(slice(0, None), [{**it[0], "requests": 0}])),
    "left out": ({}, lambda it: it.pop()),
    "back": ({}, lambda it: it[1].update(intended_ns=10**15)),
    "before zero": ({}, lambda it: it[1].update(intended_ns=-1)),
    "a boolean": ({}, lambda it: it[1].update(intended_ns=True)),
    "named twice": ({}, lambda it: it[1].update(request="open-0001")),
    "max_tokens": ({}, lambda it: it[1].update(max_tokens=0)),
    "unknown key": ({}, lambda it: it[1].update(more=1)),
    "missing key": ({}, lambda it: it[1].pop("prompt")),
    "missing header key": ({}, lambda it: it[0].pop("arrivals")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_trace_is_one_line(name: str) -> None:
    """Each defect is refused in a line that says where it is."""
    changes, change = REFUSED[name]
    documents = [json.loads(line) for line in made(**changes).splitlines()]
    change(documents)
    with pytest.raises(EvidenceError, match=r"^t[:,][^\n]+$"):
        parse_trace(b"".join(canonical_bytes(it) + b"\n" for it in documents), origin="t")


@pytest.mark.parametrize("data", [b"", b"\n", made()[:-1], b"[]\n", b"{\n", made().replace(b":", b": ", 1), b"\xff\n"])
def test_other_bytes_are_no_trace(data: bytes) -> None:
    """A file of another form, or cut, or not canonical."""
    with pytest.raises(EvidenceError, match=r"^t[:,][^\n]+$"):
        parse_trace(data, origin="t")
