"""The audit's own reading of a recording comes to what the metrics come to, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from recordings import DONE, MS, chunk, failure, request, to_bytes, usage, whole

from pytest_kvqual.audit.recomputed import verify
from pytest_kvqual.audit.recorded import read_stream
from pytest_kvqual.capture.fidelity import body, known_server
from pytest_kvqual.capture.recorder import Load, Offered, replay
from pytest_kvqual.metrics.recording import read_recording
from pytest_kvqual.metrics.requests import content_failure
from pytest_kvqual.metrics.summary import summarise

QUIRKS = (
    "plain", "error-object", "clean-end", "done-without-token", "role-first", "ping", "crlf", "cr", "split-anywhere",
    "tokens-per-event", "events-per-write", "late-usage", "no-usage", "wrong-usage", "early-eos", "dropped", "reset",
    "status-503", "stalls", "fields", "multi-line-data", "bom", "until-eof", "slow-headers",
)  # fmt: skip


def _data(text: str) -> bytes:
    return b"data: " + text.encode() + b"\n\n"


HEAD, TAIL = chunk([1]), [chunk([2], finish="stop"), usage(2), DONE]
STREAMS: dict[str, list[bytes]] = {
    "whole": [HEAD, *TAIL],
    "ids in a delta": [_data('{"choices":[{"index":0,"delta":{"token_ids":[1]}}]}'), *TAIL],
    "another choice": [HEAD, _data('{"choices":[{"index":1,"token_ids":[9],"finish_reason":"stop"}]}'), *TAIL],
    "aborted": [HEAD, chunk([2], finish="abort"), usage(2), DONE],
    "a finish reason of error": [HEAD, chunk([2], finish="error"), usage(2), DONE],
    "an empty finish reason": [HEAD, chunk([2], finish=""), usage(2), DONE],
    "an object of error": [HEAD, _data('{"object":"error","message":"no"}'), *TAIL],
    "an event of error": [HEAD, b'event: error\ndata: {"message":"no"}\n\n', *TAIL],
    "an event of error that is no JSON": [HEAD, b"event: error\ndata: no\n\n", *TAIL],
    "an event of error that says done": [HEAD, *TAIL[:2], b"event: error\ndata: [DONE]\n\n"],
    "a null error": [HEAD, _data('{"error":null}'), *TAIL],
    "NaN": [HEAD, _data('{"choices":[],"x":NaN}'), *TAIL],
    "a negative id": [chunk([-1]), *TAIL],
    "a negative usage": [HEAD, TAIL[0], usage(-2), DONE],
    "a key twice": [HEAD, _data('{"choices":[],"choices":[]}'), *TAIL],
    "an error, and its key again": [HEAD, _data('{"error":{"code":500},"error":null}'), *TAIL],
    "tokens after the end": [HEAD, *TAIL[:1], usage(3), DONE, chunk([3])],
    "no UTF-8": [HEAD, b"data: {\xff}\n\n", *TAIL],
    "a BOM": [b"\xef\xbb\xbf" + HEAD, *TAIL],
    "a BOM later": [HEAD, b"\xef\xbb\xbf" + TAIL[0], *TAIL[1:]],
}


@pytest.mark.parametrize("name", STREAMS)
def test_what_a_stream_came_to(name: str) -> None:
    """The kind of failure is the same from both, and so is every figure."""
    events = STREAMS[name]
    expected = content_failure(events, 4)
    assert read_stream([(0, raw) for raw in events], 4).failure == (None if expected is None else expected[0])
    timed = [(20 * MS + place * MS, raw) for place, raw in enumerate(events)]
    kind = None if expected is None else failure(expected[0])
    _agree(to_bytes(whole([request("open-0000", intended=0, events=timed, failure=kind)])))


def _agree(data: bytes) -> None:
    found, expected = verify(data).figures, summarise(read_recording(data, origin="recording")).figures
    assert {name: it.value for name, it in found.items()} == {name: it.value for name, it in expected.items()}


@pytest.mark.parametrize("limit", [None, 4])
def test_figures_of_what_the_recorder_wrote(limit: int | None, tmp_path: Path) -> None:
    """Of every quirk of a server, in an open and a closed loop: nothing to object to, and the same fractions."""
    mode = "closed" if limit else "open"
    offered = [
        Offered(
            request=f"{mode}-{place:04d}", prompt=f"item-{place}", max_tokens=7,
            intended_ns=None if limit else place * 5 * MS,
            body=body(
                f"{mode}-{quirk}", tokens=7, prompt_tokens=4,
                script={"first_ms": 10.0, "gap_ms": 3.0, "quirk": [] if quirk == "plain" else [quirk]},
            ),
        )
        for place, quirk in enumerate(QUIRKS)
    ]  # fmt: skip
    out = tmp_path / f"cell-{mode}.jsonl"
    load = Load(mode="closed" if limit else "open", concurrency=limit)
    with known_server(seconds=30) as port:
        replay(f"http://127.0.0.1:{port}", offered, load=load, header={"cell": mode}, out=out, timeout_s=0.4)
    data = out.read_bytes()
    # A slot may stay empty for longer where the machine is busy with something else.
    assert [it.line() for it in verify(data).findings if "slot became free" not in it.line()] == []
    _agree(data)
