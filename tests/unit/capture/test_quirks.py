"""The quirk matrix: each quirk of the deterministic server, through the recorder, with what must come of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest

from pytest_kvqual.capture.fidelity import ask, body, known_server
from pytest_kvqual.capture.recorder import Load, Offered, replay
from pytest_kvqual.metrics.recording import Recording, read_recording
from pytest_kvqual.metrics.requests import RequestFigures, figures
from pytest_kvqual.metrics.sse import data_of
from pytest_kvqual.testing.script import QUIRKS

# Servers and clients in real time: beside other tests they would measure those.
pytestmark = pytest.mark.alone

TOKENS = 11
FIRST_MS, GAP_MS = 60.0, 20.0
# A process that is not scheduled for a while is late; a fault of the recorder is a gap (20 ms) or more at once, and the
# time is of one request. The gate itself has narrower limits, over many requests.
TOLERANCE_MS = 15.0
TIMEOUT_S = 0.8

ONES = (1,) * TOKENS
MATRIX: dict[str, tuple[str, tuple[int, ...], str]] = {
    # quirk: (outcome, tokens of each event, a part of the failure's text)
    "plain": ("completed", ONES, ""),
    "error-object": ("error-object", (1, 1), "planted by the script"),
    "error-object-at-once": ("error-object", (), "planted by the script"),
    "clean-end": ("incomplete", ONES, "[DONE]"),
    "done-without-token": ("no-tokens", (), "token"),
    "role-first": ("completed", ONES, ""),
    "invisible-first": ("completed", ONES, ""),
    "ping": ("completed", ONES, ""),
    "crlf": ("completed", ONES, ""),
    "cr": ("completed", ONES, ""),
    "no-space": ("completed", ONES, ""),
    "split-anywhere": ("completed", ONES, ""),
    "tokens-per-event": ("completed", (2, 3, 4, 2), ""),
    "events-per-write": ("completed", ONES, ""),
    "late-usage": ("completed", ONES, ""),
    "usage-after-done": ("completed", ONES, ""),
    "no-usage": ("count", ONES, "usage"),
    "wrong-usage": ("count", ONES, "12"),
    "early-eos": ("completed", ONES[:5], ""),
    "dropped": ("transport", (1, 1), "closed"),
    "dropped-at-once": ("transport", (), "closed"),
    "reset": ("transport", (1, 1), "reset"),
    "status-503": ("status", (), "503"),
    "status-400": ("status", (), "400"),
    "never-answers": ("timeout", (), "no end within 0.8 s"),
    "stalls": ("timeout", (1, 1), "no end within 0.8 s"),
    "big-event": ("completed", ONES, ""),
    "fields": ("completed", ONES, ""),
    "multi-line-data": ("completed", ONES, ""),
    "bom": ("completed", ONES, ""),
    "eof-after-done": ("completed", ONES, ""),
    "until-eof": ("completed", ONES, ""),
    "huge-prompt": ("completed", ONES, ""),
    "slow-headers": ("completed", ONES, ""),
    "idle-close": ("completed", ONES, ""),
    "split-anywhere+crlf": ("completed", ONES, ""),
    "split-anywhere+cr+ping": ("completed", ONES, ""),
    "split-anywhere+tokens-per-event+no-space": ("completed", (2, 3, 4, 2), ""),
    "crlf+bom+fields+multi-line-data": ("completed", ONES, ""),
    "tokens-per-event+events-per-write+usage-after-done": ("completed", (2, 3, 4, 2), ""),
    "ping+error-object+crlf": ("error-object", (1, 1), "planted by the script"),
    "slow-headers+dropped": ("transport", (1, 1), "closed"),
}


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Mapping[str, Any]]:
    """Every row of the matrix in one replay, 20 ms apart, and the server's truth."""
    out = tmp_path_factory.mktemp("quirks") / "cell-quirks.jsonl"
    offered = []
    for index, name in enumerate(MATRIX):
        quirks = [] if name == "plain" else name.split("+")
        script = {"first_ms": FIRST_MS, "gap_ms": GAP_MS, "quirk": quirks}
        long = 20_000 if name == "huge-prompt" else 4
        offered.append(
            Offered(
                request=name,
                prompt=f"item-{index}",
                max_tokens=TOKENS,
                intended_ns=index * 20_000_000,
                body=body(name, tokens=TOKENS, script=script, prompt_tokens=long),
            )
        )
    with known_server(seconds=30) as port:
        replay(
            f"http://127.0.0.1:{port}",
            offered,
            load=Load(mode="open"),
            header={"cell": "quirks"},
            out=out,
            timeout_s=TIMEOUT_S,
        )
        truth = ask(port, "GET", "/truth")
    return read_recording(out.read_bytes(), origin=out.name), truth


def row(recording: Recording, name: str) -> tuple[Mapping[str, Any], RequestFigures]:
    """The line and the figures of one row."""
    record = next(record for record in recording.requests if record["request"] == name)
    return record, figures(record)


def test_every_quirk_has_a_row() -> None:
    """The matrix has each quirk that the server knows, with the outcome that the server expects of a client."""
    assert {name for name in MATRIX if "+" not in name} - {"plain"} == set(QUIRKS)
    assert {name: MATRIX[name][0] for name in QUIRKS} == {name: outcome for name, (outcome, _) in QUIRKS.items()}


@pytest.mark.parametrize("name", MATRIX)
def test_outcome(replayed: tuple[Recording, Mapping[str, Any]], name: str) -> None:
    """The request's outcome and the failure's text are those of the quirk."""
    record, found = row(replayed[0], name)
    outcome, _, text = MATRIX[name]
    failure = record["failure"]
    assert (failure["kind"] if failure else "completed") == outcome, failure
    assert found.completed == (outcome == "completed")
    if failure:
        assert text.lower() in failure["text"].lower()
        assert "\n" not in failure["text"]


@pytest.mark.parametrize("name", MATRIX)
def test_tokens(replayed: tuple[Recording, Mapping[str, Any]], name: str) -> None:
    """Every token that was sent is in the record, with its ID and in its event; completed requests count them."""
    record, found = row(replayed[0], name)
    outcome, per_event, _ = MATRIX[name]
    choices = [
        choice
        for _, event in record["events"]
        for data in [data_of(base64.b64decode(event))]
        if data is not None and data.startswith(b"{")
        for choice in json.loads(data).get("choices", ())
    ]
    ids = [choice["token_ids"] for choice in choices if choice["token_ids"]]
    assert tuple(map(len, ids)) == per_event
    assert [token for event in ids for token in event] == [1000 + place for place in range(sum(per_event))]
    if outcome == "completed":
        assert found.per_event == per_event
        assert found.tokens == sum(per_event)
        assert found.token_ids == tuple(1000 + place for place in range(sum(per_event)))
        assert found.prompt_tokens == (20_000 if name == "huge-prompt" else 4)


@pytest.mark.parametrize("name", [name for name, (outcome, _, _) in MATRIX.items() if outcome == "completed"])
def test_times(replayed: tuple[Recording, Mapping[str, Any]], name: str) -> None:
    """The first token's time and the time per token are the server's, within the tolerance."""
    _, found = row(replayed[0], name)
    truth = replayed[1]["requests"][name]
    assert truth["times"] == 1
    served_ms = (truth["first_token_ns"] - truth["arrived_ns"]) / 1e6
    # Two more events wait with the first one.
    planned_ms = FIRST_MS + (2 * GAP_MS if "events-per-write" in name else 0)
    assert abs(served_ms - planned_ms) < TOLERANCE_MS
    assert found.ttft_send_ns is not None
    assert abs(found.ttft_send_ns / 1e6 - served_ms) < TOLERANCE_MS
    assert found.tpot_ns is not None
    served = (truth["last_token_ns"] - truth["first_token_ns"]) / (truth["tokens"] - 1)
    assert abs(float(found.tpot_ns) - served) / 1e6 < TOLERANCE_MS / 4


def test_balance(replayed: tuple[Recording, Mapping[str, Any]]) -> None:
    """Offered = completed + failed, and the server was sent each request once."""
    footer: Mapping[str, Any] = replayed[0].footer
    assert footer["offered"] == len(MATRIX) == replayed[1]["served"]
    assert footer["completed"] + sum(footer["failed"].values()) == len(MATRIX)
    expected: dict[str, int] = {}
    for outcome, _, _ in MATRIX.values():
        if outcome != "completed":
            expected[outcome] = expected.get(outcome, 0) + 1
    assert footer["failed"] == expected
