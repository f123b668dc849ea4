"""Captures write one record per request, whatever becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_kvqual.capture.quality import capture_nll, capture_parity, capture_scored, waves
from pytest_kvqual.errors import CaptureError
from pytest_kvqual.study.panels import Panel, PanelItem

if TYPE_CHECKING:
    from tests.unit.capture.conftest import FakeEngine
else:
    FakeEngine = object


class Kept(list[dict[str, object]]):
    """An evidence stream in memory."""


def panel(count: int, targets: tuple[int, ...] = (), task: str = "parity") -> Panel:
    """``count`` items."""
    items = tuple(
        PanelItem(id=f"r{n}", prompt=(1, 2, n), targets=targets, max_tokens=len(targets) or 4) for n in range(count)
    )
    return Panel(task=task, length=None, items=items, sha256="0" * 64)


def test_parity_is_recorded_in_the_order_sent(engine: FakeEngine) -> None:
    """Records have the panel's index in either order, and name the order."""
    kept = Kept()
    assert capture_parity(engine, panel(3), kept, model="m", order="reverse", timeout_s=10) == 3
    assert [(it["id"], it["index"], it["order"]) for it in kept] == [
        ("r2", 2, "reverse"),
        ("r1", 1, "reverse"),
        ("r0", 0, "reverse"),
    ]
    assert set(kept[0]) == {"id", "order", "index", "status", "body", "error"}
    assert "pause" not in engine.calls


def test_nll_goes_in_waves_with_its_targets(engine: FakeEngine) -> None:
    """Each wave is paused, filled and resumed; every request forces its targets."""
    kept, steps = Kept(), []
    count = capture_nll(
        engine,
        panel(5, (7, 8), "nll"),
        kept,
        model="m",
        wave_size=2,
        timeout_s=10,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert count == 5
    assert engine.calls == ["pause", "resume"] * 3
    assert [it["id"] for it in kept] == [f"r{n}" for n in range(5)]
    assert all(body["vllm_xargs"] == {"kvqual_targets": [7, 8]} and body["max_tokens"] == 2 for body in engine.bodies)
    assert steps == [(n, 5) for n in range(1, 6)]


def test_only_the_first_documents_are_captured_when_asked(engine: FakeEngine) -> None:
    """``documents`` limits the capture to the panel's beginning."""
    kept = Kept()
    assert capture_nll(engine, panel(5, (7,), "nll"), kept, model="m", wave_size=8, timeout_s=10, documents=2) == 2
    assert [it["id"] for it in kept] == ["r0", "r1"]


def test_request_ids_never_repeat_on_a_server(engine: FakeEngine) -> None:
    """Two captures of one panel use different names, by which the server's log tells them apart."""
    for _ in range(2):
        capture_parity(engine, panel(2), Kept(), model="m", timeout_s=10)
    assert len(set(engine.order)) == 4


def test_a_server_lost_in_a_wave_leaves_a_record_of_every_request(engine: FakeEngine) -> None:
    """All planned requests are recorded, later waves as not sent, and then the capture fails."""
    engine.die_at = 3
    kept = Kept()
    with pytest.raises(CaptureError, match=r"nll: found 6 of 6 requests failed, expected none; first 'r0': ") as caught:
        capture_nll(engine, panel(6, (7,), "nll"), kept, model="m", wave_size=4, timeout_s=10)
    assert [it["id"] for it in kept] == [f"r{n}" for n in range(6)]
    assert all(it["body"] is None and it["error"] for it in kept)
    assert str(kept[5]["error"]).startswith("NotSent: ")
    assert str(engine.log) in caught.value.advice


def test_one_failed_request_fails_the_capture_after_the_others(engine: FakeEngine) -> None:
    """The failure's status and body are in the record; nothing is retried."""
    engine.statuses[1] = 503
    kept = Kept()
    with pytest.raises(CaptureError, match=r"1 of 3 requests failed.*HttpStatus: 503"):
        capture_parity(engine, panel(3), kept, model="m", timeout_s=10)
    assert [it["status"] for it in kept] == [200, 503, 200]
    assert len(engine.order) == 3


def test_questions_go_in_waves_with_their_stops_and_limit(engine: FakeEngine) -> None:
    """A scored capture sends the study's stops and the item's limit, forces nothing, and asks for token ids."""
    kept = Kept()
    found = capture_scored(engine, panel(3, task="recall"), kept, model="m", stop=["\n"], wave_size=2, timeout_s=10)
    assert found == 3
    assert engine.calls == ["pause", "resume"] * 2
    assert all(body["stop"] == ["\n"] and body["max_tokens"] == 4 for body in engine.bodies)
    assert all(body["return_token_ids"] is True and "vllm_xargs" not in body for body in engine.bodies)
    assert all(str(body["request_id"]).startswith("kvqual-recall-") for body in engine.bodies)


def test_a_question_without_stops_sends_none(engine: FakeEngine) -> None:
    """No stop in the study is no stop in the request, and only the first questions are asked when told so."""
    capture_scored(engine, panel(3, task="gsm8k"), Kept(), model="m", wave_size=4, timeout_s=10, questions=1)
    assert len(engine.bodies) == 1
    assert "stop" not in engine.bodies[0]


def test_natural_concurrency_asks_every_question_without_a_pause(engine: FakeEngine) -> None:
    """Under the natural schedule as many requests are in flight as the wave is large, and each leaves its record."""
    kept = Kept()
    capture_scored(engine, panel(7, task="recall"), kept, model="m", schedule="natural", wave_size=3, timeout_s=10)
    assert sorted(str(it["id"]) for it in kept) == [f"r{n}" for n in range(7)]
    assert engine.calls == []
    assert engine.most_in_flight <= 3


def test_a_failed_question_is_a_record_and_the_others_go_on(engine: FakeEngine) -> None:
    """A request that fails is kept with its status; the capture of the other questions is whole."""
    engine.statuses[1] = 400
    kept = Kept()
    assert capture_scored(engine, panel(4, task="recall"), kept, model="m", wave_size=4, timeout_s=10) == 4
    assert sorted(str(it["status"]) for it in kept) == ["200", "200", "200", "400"]
    assert [it["error"] is None for it in kept].count(False) == 1


def test_a_capture_in_which_every_question_failed_raises_after_its_records(engine: FakeEngine) -> None:
    """A server that answers nothing at all is no capture; every record is written first."""
    engine.statuses = dict.fromkeys(range(3), 500)
    kept = Kept()
    with pytest.raises(CaptureError, match=r"recall: found 3 of 3 requests failed"):
        capture_scored(engine, panel(3, task="recall"), kept, model="m", wave_size=4, timeout_s=10)
    assert len(kept) == 3


def test_a_wave_has_at_least_one_request() -> None:
    """A wave size below one is refused."""
    with pytest.raises(CaptureError, match="wave size of 0"):
        waves([], 0)


def test_the_fake_is_a_target(engine: FakeEngine, tmp_path: Path) -> None:
    """The fake offers what a capture needs of a server."""
    assert engine.base_url.startswith("http://127.0.0.1:")
    assert engine.log.parent == tmp_path
