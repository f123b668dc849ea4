"""The three schedules against a server that queues, pauses, fails and dies."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from pytest_kvqual.capture import http
from pytest_kvqual.errors import CaptureError, EvidenceError

if TYPE_CHECKING:
    from tests.unit.capture.conftest import FakeEngine
else:
    FakeEngine = object


def requests(count: int) -> list[http.Request]:
    """``count`` small requests."""
    return [
        http.completion(id=f"r{n}", index=n, request_id=f"q{n}", model="m", prompt=[1, 2], max_tokens=3)
        for n in range(count)
    ]


def wave(
    engine: FakeEngine, asked: Sequence[http.Request], timeout_s: float = 15.0, **more: object
) -> list[http.Response]:
    """Send one wave."""
    return asyncio.run(
        http.send_wave(engine.base_url, asked, log=engine.log, timeout_s=timeout_s, **more)  # type: ignore[arg-type]
    )


def test_a_wave_is_queued_in_order_while_paused(engine: FakeEngine) -> None:
    """However the server delays, it gets the requests in the wave's order, all before the resume."""
    seen: list[str] = []
    responses = wave(engine, requests(12), on_response=lambda response: seen.append(response.id))
    assert engine.order == [f"q{n}" for n in range(12)]
    assert engine.calls == ["pause", "resume"]
    assert engine.most_in_flight == 12
    assert [response.id for response in responses] == seen == [f"r{n}" for n in range(12)]
    assert all(response.error is None and response.status == 200 for response in responses)


def test_a_wave_that_cannot_be_paused_sends_nothing(engine: FakeEngine) -> None:
    """Without a confirmed pause there is no wave."""
    engine.fail_paths["/pause?mode=keep&clear_cache=false"] = 500
    with pytest.raises(
        CaptureError, match=r"no paused engine for a wave of 3 requests: /pause.* answered 500: .*told to fail"
    ):
        wave(engine, requests(3))
    assert engine.order == []


def test_a_request_refused_in_the_queue_does_not_stop_the_wave(engine: FakeEngine) -> None:
    """One request answered with an error is one failure; the others are kept."""
    engine.statuses[1] = 400
    responses = wave(engine, requests(4))
    assert [response.error for response in responses] == [None, "HttpStatus: 400", None, None]
    assert responses[1].status == 400
    assert responses[1].body is not None


def test_a_server_killed_in_a_wave_fails_every_request_once(engine: FakeEngine) -> None:
    """After the server is gone each request has one typed failure, and nothing hangs."""
    engine.die_at = 4
    begun = time.monotonic()
    responses = wave(engine, requests(8))
    assert time.monotonic() - begun < 10
    assert [response.id for response in responses] == [f"r{n}" for n in range(8)]
    assert all(
        response.error and response.error.split(":")[0].endswith(("Error", "Protocol")) for response in responses
    )


def test_a_request_that_the_log_does_not_show_ends_the_wave(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose place in the queue is unknown does not count as answered, and no further one is sent."""
    monkeypatch.setattr(http, "_ACCEPT_LIMIT_S", 0.3)
    engine.mute = {1}
    responses = wave(engine, requests(3))
    assert responses[0].error is None
    assert responses[1].error is not None
    assert responses[1].error.startswith("NotAccepted: ")
    assert responses[2].error is not None
    assert responses[2].error.startswith("NotSent: ")
    assert engine.order == ["q0", "q1"]


def test_an_engine_that_does_not_resume_fails_the_wave(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests held for ever by an engine that refuses to resume are ended and named."""
    monkeypatch.setattr(http, "_ABANDON_S", 0.2)
    engine.fail_paths["/resume"] = 500
    begun = time.monotonic()
    responses = wave(engine, requests(3))
    assert time.monotonic() - begun < 5
    assert all((response.error or "").startswith("NotResumed: /resume answered 500") for response in responses)


def test_a_request_has_a_total_time_limit(engine: FakeEngine) -> None:
    """A server that never answers costs the limit, once."""
    engine.running.clear()
    begun = time.monotonic()
    (response,) = asyncio.run(http.send_serial(engine.base_url, requests(1), timeout_s=0.4))
    assert time.monotonic() - begun < 3
    assert response.error is not None
    assert "Timeout" in response.error
    assert response.body is None


@pytest.mark.parametrize("schedule", ["serial", "natural"])
def test_a_server_that_hangs_costs_one_time_limit(engine: FakeEngine, schedule: str) -> None:
    """After a request without any answer the rest are failures that were not sent."""
    engine.running.clear()
    begun = time.monotonic()
    if schedule == "serial":
        responses = asyncio.run(http.send_serial(engine.base_url, requests(20), timeout_s=0.4))
    else:
        responses = asyncio.run(http.send_natural(engine.base_url, requests(20), concurrency=2, timeout_s=0.4))
    assert time.monotonic() - begun < 3
    assert len(responses) == 20
    assert all(response.error for response in responses)
    assert sum("NotSent: " in str(response.error) for response in responses) >= 18
    assert len(engine.order) <= 2


@pytest.mark.parametrize("schedule", ["serial", "natural", "wave"])
def test_evidence_that_cannot_be_kept_ends_the_capture(engine: FakeEngine, schedule: str) -> None:
    """An error from the keeper of responses is raised, once, and nothing is handed over after it."""
    kept: list[str] = []

    def keep(response: http.Response) -> None:
        kept.append(response.id)
        if response.id == "r1":
            raise EvidenceError("no space left")

    def capture() -> None:
        asked = requests(6)
        if schedule == "serial":
            asyncio.run(http.send_serial(engine.base_url, asked, timeout_s=10, on_response=keep))
        elif schedule == "natural":
            asyncio.run(http.send_natural(engine.base_url, asked, concurrency=2, timeout_s=10, on_response=keep))
        else:
            wave(engine, asked, on_response=keep)

    with pytest.raises(EvidenceError, match="no space left"):
        capture()
    assert kept == ["r0", "r1"]


def test_serial_sends_one_at_a_time_in_order(engine: FakeEngine) -> None:
    """The next request leaves after the answer to the one before it."""
    responses = asyncio.run(http.send_serial(engine.base_url, requests(5), timeout_s=10))
    assert engine.most_in_flight == 1
    assert engine.order == [f"q{n}" for n in range(5)]
    assert [response.error for response in responses] == [None] * 5


def test_natural_keeps_to_its_concurrency(engine: FakeEngine) -> None:
    """No more than the declared number is in flight, and responses come in the order asked."""

    def let_run() -> None:
        """The engine answers nobody before as many are in flight as may be, and some time for one more."""
        deadline = time.monotonic() + 5
        while engine.in_flight < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.1)
        engine.running.set()

    engine.running.clear()
    waiting = threading.Thread(target=let_run)
    waiting.start()
    responses = asyncio.run(http.send_natural(engine.base_url, requests(9), concurrency=3, timeout_s=10))
    waiting.join()
    assert engine.most_in_flight == 3
    assert [response.index for response in responses] == list(range(9))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"error": {"message": "no"}}', "NotACompletion"),
        ('{"choices": []}', "NotACompletion"),
        ('{"choices": [{"text": "no ids"}]}', "NotACompletion"),
        ("[]", "NotACompletion"),
        ("<html>", "NotJson"),
    ],
)
def test_an_answer_that_is_no_completion_is_a_failure_under_status_200(
    engine: FakeEngine, body: str, error: str
) -> None:
    """Status 200 alone makes no answer; the raw body is kept."""
    engine.answers[0] = body
    (response,) = asyncio.run(http.send_serial(engine.base_url, requests(1), timeout_s=10))
    assert response.status == 200
    assert response.body == body
    assert response.error is not None
    assert response.error.startswith(error)


def test_a_refused_connection_is_a_typed_failure(engine: FakeEngine) -> None:
    """A server that is gone gives a failure with the kind of error, not an exception."""
    engine.close()
    (response,) = asyncio.run(http.send_serial(engine.base_url, requests(1), timeout_s=5))
    assert response.status is None
    assert response.error is not None
    assert response.error.startswith("ConnectError: ")


def test_forced_targets_ask_for_the_raw_loss() -> None:
    """A request with targets asks for their log-probabilities, no alternatives, and no early end."""
    body = http.completion(id="d", index=0, request_id="q", model="m", prompt=[1], max_tokens=2, targets=[5, 6]).body
    assert body["vllm_xargs"] == {"kvqual_targets": [5, 6]}
    assert (body["logprobs"], body["ignore_eos"], body["temperature"]) == (0, True, 0)
    assert body["return_token_ids"] is True
