"""One pass of the oracle panel: what the worker is told, in which order, and what is undone after a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_kvqual.capture.oracle import capture_oracle
from pytest_kvqual.errors import CaptureError, EvidenceError, ServerError
from pytest_kvqual.study.panels import Panel, PanelItem

if TYPE_CHECKING:
    from tests.unit.capture.conftest import FakeEngine
else:
    FakeEngine = object

START, FINISH = "kvqual_oracle_start", "kvqual_oracle_finish"
HOLD, RELEASE = "kvqual_hold_blocks", "kvqual_release_blocks"
RANK = {"rank": 0, "steps": 3}


def panel(count: int) -> Panel:
    """``count`` prompts that differ in their last token."""
    items = tuple(PanelItem(id=f"r{n}", prompt=(1, 2, n), targets=(), max_tokens=4) for n in range(count))
    return Panel(task="oracle", length=16, items=items, sha256="0" * 64)


def capture(engine: FakeEngine, count: int = 2, **options: Any) -> dict[str, Any]:
    """A pass of waves of two."""
    engine.rpc_results.setdefault(FINISH, [RANK])
    return capture_oracle(engine, panel(count), model="m", wave_size=2, timeout_s=10, **options)


def test_a_pass_brackets_its_waves(engine: FakeEngine) -> None:
    """The oracles start with the fault's name, see every wave, and hand over one record per rank."""
    steps: list[tuple[int, int]] = []
    found = capture(engine, 3, fault="slot-off-by-one", progress=lambda done, total: steps.append((done, total)))
    assert engine.timeline == [
        START, "pause", [1, 2, 0], [1, 2, 1], "resume", "pause", [1, 2, 2], "resume", FINISH,
    ]  # fmt: skip
    assert engine.rpc[0] == (START, [{"fault": "slot-off-by-one", "probe": False, "fills": False}])
    assert engine.rpc[-1] == (FINISH, [])
    assert (found["fault"], found["records"]) == ("slot-off-by-one", [RANK])
    assert [(record["id"], record["index"], record["order"]) for record in found["responses"]] == [
        (f"r{n}", n, "forward") for n in range(3)
    ]
    assert steps == [(n, 3) for n in range(1, 4)]


@pytest.mark.parametrize("options", [{"probe": True}, {"fills": True}, {"probe": True, "fills": True}])
def test_options_reach_the_window(engine: FakeEngine, options: dict[str, bool]) -> None:
    """Fingerprints and fills are the window's to make."""
    capture(engine, **options)
    assert engine.rpc[0] == (START, [{"fault": None, "probe": False, "fills": False, **options}])


def test_a_rotated_pass_is_sent_and_kept_in_its_order(engine: FakeEngine) -> None:
    """A rotation begins later in the panel; responses stand in the order sent, under their panel's index."""
    found = capture(engine, 5, rotation=2)
    assert [entry for entry in engine.timeline if isinstance(entry, list)] == [[1, 2, n] for n in (2, 3, 4, 0, 1)]
    assert [record["index"] for record in found["responses"]] == [2, 3, 4, 0, 1]


def test_a_scarce_pool_is_held_around_the_window(engine: FakeEngine) -> None:
    """All but so many blocks are held before the window opens, and released after it closed."""
    engine.rpc_results[RELEASE] = [{"found": True, "released": 3}]
    capture(engine, free_blocks=12)
    assert [name for name, _ in engine.rpc] == [HOLD, START, FINISH, RELEASE]
    assert engine.rpc[0] == (HOLD, [12])


def test_a_pool_out_of_reach_is_no_scarce_pool(engine: FakeEngine) -> None:
    """A pass whose blocks were not held is refused, not passed off as one of a scarce pool."""
    engine.rpc_results[RELEASE] = [{"found": False}]
    with pytest.raises(CaptureError, match="found no block pool within reach of the worker"):
        capture(engine, free_blocks=12)


def test_a_pool_that_is_left_alone_is_neither_held_nor_released(engine: FakeEngine) -> None:
    """Without a number of free blocks no block is taken from the engine."""
    capture(engine)
    assert [name for name, _ in engine.rpc] == [START, FINISH]


def test_a_failed_request_closes_the_window_and_releases_the_pool(engine: FakeEngine) -> None:
    """A fault left planted and blocks left held would spoil what follows; the failed request is what is reported."""
    engine.statuses[0] = 500
    with pytest.raises(CaptureError, match=r"oracle pass \(fault x\): found 1 of 2 requests failed.*HttpStatus: 500"):
        capture(engine, fault="x", free_blocks=12)
    assert [name for name, _ in engine.rpc] == [HOLD, START, FINISH, RELEASE]


def test_the_failed_request_is_reported_where_closing_fails_too(engine: FakeEngine) -> None:
    """Trouble of the clean-up does not hide why there was something to clean up."""
    engine.statuses[0] = 500
    engine.rpc_statuses = {FINISH: 500, RELEASE: 500}
    with pytest.raises(CaptureError, match="found 1 of 2 requests failed") as caught:
        capture(engine, free_blocks=12)
    assert str(engine.log) in caught.value.advice
    assert [name for name, _ in engine.rpc] == [HOLD, START, FINISH, RELEASE]


def test_a_server_lost_in_a_pass_is_the_requests_failure(engine: FakeEngine) -> None:
    """A fault may end the engine itself: every request is failed, and the log is named."""
    engine.die_at = 2
    with pytest.raises(CaptureError, match="found 4 of 4 requests failed, expected none; first: 'r0': "):
        capture(engine, 4, free_blocks=12)


def test_a_keeper_that_fails_ends_the_pass_and_closes_the_window(engine: FakeEngine) -> None:
    """An error in mid-pass that is no request's undoes all the same."""

    def progress(done: int, total: int) -> None:
        raise EvidenceError("no space left")

    with pytest.raises(EvidenceError, match="no space left"):
        capture(engine, free_blocks=12, progress=progress)
    assert [name for name, _ in engine.rpc] == [HOLD, START, FINISH, RELEASE]


def test_a_window_that_does_not_open_releases_the_pool(engine: FakeEngine) -> None:
    """Nothing is sent without a window, and nothing is finished that did not start."""
    engine.rpc_statuses = {START: 500}
    with pytest.raises(ServerError, match="'kvqual_oracle_start' answered 500"):
        capture(engine, free_blocks=12)
    assert engine.timeline == [HOLD, START, RELEASE]


def test_a_pool_that_cannot_be_held_ends_the_pass(engine: FakeEngine) -> None:
    """A pass that needs a scarce pool is not made without one."""
    engine.rpc_statuses = {HOLD: 500}
    with pytest.raises(ServerError, match="'kvqual_hold_blocks' answered 500"):
        capture(engine, free_blocks=12)
    assert engine.timeline == [HOLD]


@pytest.mark.parametrize("method", [FINISH, RELEASE])
def test_what_cannot_be_undone_fails_a_pass_in_order(engine: FakeEngine, method: str) -> None:
    """A pass whose window does not close, or whose blocks stay held, is no evidence."""
    engine.rpc_statuses = {method: 500}
    with pytest.raises(ServerError, match=f"'{method}' answered 500"):
        capture(engine, free_blocks=12)
    assert [name for name, _ in engine.rpc][-1] == RELEASE


@pytest.mark.parametrize("result", [None, [], "text"])
def test_a_pass_without_a_record_fails(engine: FakeEngine, result: object) -> None:
    """A rank that hands over nothing is missing evidence."""
    engine.rpc_results[FINISH] = [result]
    with pytest.raises(CaptureError, match="expected one mapping per rank"):
        capture(engine)
