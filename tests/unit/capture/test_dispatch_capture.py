"""Reading the kernels: one request between the start and the finish of the profiler, whatever becomes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_kvqual.capture.dispatch import TOKENS, read_dispatch
from pytest_kvqual.errors import CaptureError, ServerError
from pytest_kvqual.study.panels import PanelItem

if TYPE_CHECKING:
    from tests.unit.capture.conftest import FakeEngine
else:
    FakeEngine = object

START, FINISH = "kvqual_dispatch_start", "kvqual_dispatch_finish"
ITEM = PanelItem(id="r0", prompt=(1, 2, 3), targets=(), max_tokens=40)
RANK = {
    "rank": 0,
    "layers": {"layers.0": {"backend": "B", "impl": "I", "cache_dtype": "torch.uint8", "kernels": ["a"]}},
}


def read(engine: FakeEngine) -> list[object]:
    """One reading."""
    engine.rpc_results.setdefault(FINISH, [RANK])
    return read_dispatch(engine, ITEM, model="m", timeout_s=10)


def test_one_request_prefills_and_decodes_under_the_profiler(engine: FakeEngine) -> None:
    """The reading is what each rank hands over after a prefill step and decode steps of one request."""
    assert read(engine) == [RANK]
    assert engine.timeline == [START, [1, 2, 3], FINISH]
    assert engine.bodies[0]["max_tokens"] == TOKENS == 3


def test_a_failed_request_ends_the_profiler(engine: FakeEngine) -> None:
    """The profiler must not run on in what follows; the request's failure is reported with the log."""
    engine.statuses[0] = 500
    with pytest.raises(CaptureError, match="dispatch: the request failed: HttpStatus: 500") as caught:
        read(engine)
    assert str(engine.log) in caught.value.advice
    assert engine.rpc[-1] == (FINISH, [])


def test_a_server_lost_is_the_requests_failure(engine: FakeEngine) -> None:
    """That the profiler's reading could not be fetched from a dead server says nothing."""
    engine.die_at = 1
    with pytest.raises(CaptureError, match="dispatch: the request failed: "):
        read(engine)


@pytest.mark.parametrize(("method", "sent"), [(START, 0), (FINISH, 1)])
def test_a_profiler_that_fails_is_the_servers_failure(engine: FakeEngine, method: str, sent: int) -> None:
    """Without a profiler nothing is sent, and a reading that cannot be fetched is none."""
    engine.rpc_statuses = {method: 500}
    with pytest.raises(ServerError, match=f"'{method}' answered 500"):
        read(engine)
    assert len(engine.order) == sent
