"""What an attempt tells of itself: the events of a boot, a series, an oracle pass and a trial's intervals."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvqual.attempt import Activity, Attempt, _checked
from pytest_kvqual.capture import timing
from pytest_kvqual.errors import CaptureError
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.progress import Boot, Event, Step, Timed
from pytest_kvqual.report.live import THREAD_NAME, Live, VisibleCursor
from pytest_kvqual.report.progress import Display
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.trial import Loads, run_trial

Make = Callable[[Callable[[Event], None]], Attempt]
CELLS = [
    (SimpleNamespace(name=name, requests=count, mode="open", concurrency=None, max_tokens=8), object(), "d" * 64)
    for name, count in (("open", 3), ("closed", 5))
]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """An attempt of the embedded study's candidate, whose server and worker calls answer at once."""

    def start(command: object, *, log: Path, progress: Callable[[str, float], None], **_: object) -> object:
        log.write_text("up\n")
        for stage, seconds in (("starting", 0.0), ("loading weights", 1.0), ("warming up", 2.0), ("ready", 3.0)):
            progress(stage, seconds)
        return SimpleNamespace(
            boot_s=3.0, base_url="http://127.0.0.1:1", log=log, sockets=list, check=lambda: None, alive=lambda: False,
            stop=lambda: None,
        )  # fmt: skip

    monkeypatch.setattr("pytest_kvqual.server.process.Server.start", start)
    ranks = [{"installed": False, "faults": 0, "held": 0, "busy_ns": 1}]
    monkeypatch.setattr("pytest_kvqual.server.rpc.call", lambda *_, **__: ranks)
    monkeypatch.setattr("pytest_kvqual.capture.dispatch.read_dispatch", lambda *_, **__: [])

    def call(progress: Callable[[Event], None]) -> Attempt:
        selection = select(load_study("smollm2-cpu"), arm="candidate", length=1024, cache_bytes=None)
        scope = Scope(lock="a" * 64, arm="candidate", length=1024, cache_bytes=4096, engine="b" * 64)
        return Attempt(
            selection, scope, run_dir=tmp_path, prefix="", model=tmp_path, progress=progress, activity=Activity()
        )

    return call


def test_a_boot_is_told_by_stage(make: Make) -> None:
    """Each stage that the server reaches is an event of the arm."""
    said: list[Event] = []
    with make(said.append) as attempt:
        attempt.boot()
    stages = [(event.arm, event.stage, event.seconds) for event in said if isinstance(event, Boot)]
    assert stages == [
        ("candidate", "starting", 0.0), ("candidate", "loading weights", 1.0), ("candidate", "warming up", 2.0),
        ("candidate", "ready", 3.0),
    ]  # fmt: skip


def test_a_series_begins_before_its_first_step_and_ends_with_its_last(make: Make) -> None:
    """All events of a series have its beginning; only the last one says that it is over."""
    said: list[Event] = []
    tell = make(said.append).steps("nll", "documents")
    for done in (1, 2, 2, 3):
        tell(done, 3)
    series = [event for event in said if isinstance(event, Step)]
    assert [(it.done, it.total, it.over) for it in series] == [
        (0, None, False), (1, 3, False), (2, 3, False), (3, 3, True),
    ]  # fmt: skip
    assert len({(it.arm, it.what, it.unit, it.begun_ns) for it in series}) == 1


def test_an_oracle_pass_is_over_when_the_ranks_are_done(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last answer is not the end: that comes with the ranks' records, and says how much they looked at."""
    said: list[Event] = []
    over: list[bool] = []

    def capture(server: object, panel: Any, *, progress: Callable[[int, int], None], **_: object) -> dict[str, object]:
        for done in range(1, len(panel.items) + 1):
            progress(done, len(panel.items))
        over.append(any(event.over for event in said[-len(panel.items) :] if isinstance(event, Step)))
        record = {"rank": 0, "steps": 20, "placement": {"rows_checked": 600}, "reproducers": []}
        return {"fault": None, "records": [record, record], "responses": []}

    monkeypatch.setattr("pytest_kvqual.capture.oracle.capture_oracle", capture)
    with make(said.append) as attempt:
        attempt.boot()
        attempt.oracle([("slot-off-by-one", "routing")])
    # The fifth is under a fault, which is a step of a series of its own.
    assert over[:4] == [False] * 4
    ends = [event for event in said if isinstance(event, Step) and event.over]
    assert [event.what for event in ends] == [
        "oracle pass 1 of 4, model", "oracle pass 2 of 4, probe", "oracle pass 3 of 4, pressure",
        "oracle pass 4 of 4, rotated", "oracle under seeded faults",
    ]  # fmt: skip
    assert [event.detail for event in ends] == ["40 steps, 1,200 rows checked"] * 4 + [""]
    assert [event.unit for event in ends] == ["requests"] * 4 + ["faults"]
    assert all(event.done == event.total for event in ends)


@pytest.mark.parametrize(
    "records", [None, [], ["x"], [{}], [{"steps": "3", "placement": 4}], [{"placement": {"rows_checked": None}}]]
)
def test_what_a_pass_looked_at_is_told_of_any_record(records: object) -> None:
    """A record that is malformed is the judge's to object to: telling what was done does not fail on it."""
    assert _checked(records) == "0 steps, 0 rows checked"


def trial(attempt: Attempt, monkeypatch: pytest.MonkeyPatch, interval: Callable[..., int]) -> None:
    """Run a trial of two cells of 3 and 5 requests, whose intervals are ``interval``."""
    monkeypatch.setattr(timing, "interval", interval)
    monkeypatch.setattr(timing, "quiet_counters", lambda *_, **__: {"success": {}})
    monkeypatch.setattr(timing, "offered_of", lambda *_, **__: [])
    monkeypatch.setattr(timing, "environment", dict)
    warm: Sequence[Any] = [SimpleNamespace(id="w", prompt=(1, 2))]
    loads: Any = Loads(cells=CELLS, items={}, warm_up=warm, settle_s=0.01)  # type: ignore[arg-type]  # as much as is used
    permit: Any = SimpleNamespace(judgment="j" * 64, gate="trial")
    run_trial(attempt, loads, permit=permit, about={}, model="m", timeout_s=1.0)


def test_a_trial_tells_the_requests_of_its_plan(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after each interval one event, with the requests of the whole plan; in between none."""
    said: list[Event] = []

    def interval(*_: object, out: Path, **__: object) -> int:
        assert isinstance(said[-1], Timed)
        assert not said[-1].over
        said.append("requests")
        out.write_text("{}\n")
        return 0

    with make(said.append) as attempt:
        trial(attempt, monkeypatch, interval)
    told = [
        (it.what, it.requests, it.done, it.total, it.over) if isinstance(it, Timed) else it
        for it in said
        if not isinstance(it, Boot)
    ]
    assert told == [
        ("warm-up", 1, 0, 1, False), "requests", ("warm-up", 1, 1, 1, True),
        ("cell open", 3, 0, 8, False), "requests", ("cell open", 3, 3, 8, True),
        ("cell closed", 5, 3, 8, False), "requests", ("cell closed", 5, 8, 8, True),
    ]  # fmt: skip


def test_while_a_trial_is_timed_the_terminal_is_left_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the drawn display on: no write and no thread of it from before the first request until after the last."""
    file = io.StringIO()
    console = VisibleCursor(file=file, force_terminal=True, force_interactive=True, width=100, height=24, _environ={})
    display = Display(Live(console, width=lambda: 100, tick_s=0.001))
    quiet: list[tuple[bool, int]] = []

    def interval(*_: object, out: Path, **__: object) -> int:
        before = file.getvalue()
        threading.Event().wait(0.02)
        threads = sum(thread.name == THREAD_NAME for thread in threading.enumerate())
        quiet.append((file.getvalue() == before, threads))
        out.write_text("{}\n")
        return 0

    with make(display.show) as attempt:
        # A series that nobody ended: its line and its thread are there when the first interval begins.
        attempt.steps("left over")
        trial(attempt, monkeypatch, interval)
    display.close()
    assert quiet == [(True, 0)] * 3
    assert display.failure == ""
    assert "cell closed: 8/8 requests of the plan in 0:00" in file.getvalue()


def test_an_interval_that_fails_is_not_told_as_over(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the interval is the one that is reported."""
    said: list[Event] = []

    def interval(*_: object, **__: object) -> int:
        raise CaptureError("the recorder stopped")

    with pytest.raises(CaptureError, match="the recorder stopped"), make(said.append) as attempt:
        trial(attempt, monkeypatch, interval)
    assert isinstance(said[-1], Timed)
    assert not said[-1].over
