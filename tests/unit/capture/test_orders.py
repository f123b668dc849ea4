"""The panel in several orders: what is sent in each run, what is kept, and the digests around each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_kvqual.capture.orders import capture_orders
from pytest_kvqual.errors import CaptureError, EvidenceError, ServerError
from pytest_kvqual.study.panels import Panel, PanelItem
from pytest_kvqual.tasks.orders import REQUIRED, RUNS

if TYPE_CHECKING:
    from tests.unit.capture.conftest import FakeEngine
else:
    FakeEngine = object

START, FINISH = "kvqual_inputs_start", "kvqual_inputs_finish"


class Kept(list[dict[str, object]]):
    """An evidence stream in memory."""


def panel(count: int) -> Panel:
    """``count`` prompts that differ in their last token."""
    items = tuple(PanelItem(id=f"p{n}", prompt=(1, 2, n), targets=(), max_tokens=4) for n in range(count))
    return Panel(task="parity", length=None, items=items, sha256="0" * 64)


def rank(number: int) -> dict[str, object]:
    """The inputs of one run."""
    return {"rank": 0, "steps": 2, "digests": [f"{number:x}" * 64, "f" * 64]}


def capture(engine: FakeEngine, writer: Any, count: int = 3, **options: Any) -> dict[str, list[object]]:
    """Runs of waves of two; each run has other inputs."""
    engine.rpc_results.setdefault(FINISH, [rank(number) for number in range(4)])
    return capture_orders(
        engine, panel(count), writer, model="m", wave_size=2, timeout_s=10, **{"runs": RUNS, "rotation": 1, **options}
    )


def runs_of(engine: FakeEngine) -> list[list[object]]:
    """What came between the start and the finish of each run's digests."""
    found: list[list[object]] = []
    for entry in engine.timeline:
        if entry == START:
            found.append([])
        elif entry != FINISH:
            found[-1].append(entry)
    return found


def test_each_run_is_sent_in_its_order(engine: FakeEngine) -> None:
    """Waves in the panel's order, rotated, in the panel's order again, and with so many in flight."""
    capture(engine, Kept())
    original, rotated, again, natural = runs_of(engine)
    assert original == ["pause", [1, 2, 0], [1, 2, 1], "resume", "pause", [1, 2, 2], "resume"]
    assert rotated == ["pause", [1, 2, 1], [1, 2, 2], "resume", "pause", [1, 2, 0], "resume"]
    assert again == original
    assert sorted(natural) == [[1, 2, 0], [1, 2, 1], [1, 2, 2]]  # type: ignore[type-var]  # lists of integers


def test_each_request_generates_greedily_up_to_the_panels_limit(engine: FakeEngine) -> None:
    """No target is forced, and no request id is used twice in the life of the server."""
    capture(engine, Kept())
    assert all((body["max_tokens"], body["temperature"]) == (4, 0) for body in engine.bodies)
    assert not any("vllm_xargs" in body for body in engine.bodies)
    assert len(set(engine.order)) == 12


def test_records_carry_their_run(engine: FakeEngine) -> None:
    """One record per request and run, in the order sent, under the panel's index."""
    kept = Kept()
    capture(engine, kept)
    assert [(it["run"], it["id"], it["index"]) for it in kept] == [
        *(("original", f"p{n}", n) for n in (0, 1, 2)),
        *(("rotated", f"p{n}", n) for n in (1, 2, 0)),
        *(("original-again", f"p{n}", n) for n in (0, 1, 2)),
        *(("natural", f"p{n}", n) for n in (0, 1, 2)),
    ]
    assert set(kept[0]) == {"id", "order", "index", "status", "body", "error", "run"}
    assert {it["order"] for it in kept} == {"forward"}


def test_inputs_are_digested_for_each_run(engine: FakeEngine) -> None:
    """The digests start before the first request of a run and end after its last."""
    inputs = capture(engine, Kept())
    assert inputs == {run: [rank(number)] for number, run in enumerate(RUNS)}
    assert [name for name, _ in engine.rpc] == [START, FINISH] * 4


def test_only_the_runs_asked_for_are_made(engine: FakeEngine) -> None:
    """A seeded fault needs no natural run."""
    kept = Kept()
    assert list(capture(engine, kept, runs=REQUIRED, rotation=2)) == list(REQUIRED)
    assert [it["id"] for it in kept if it["run"] == "rotated"] == ["p2", "p0", "p1"]
    assert "natural" not in {it["run"] for it in kept}


def test_progress_counts_over_all_runs(engine: FakeEngine) -> None:
    """A reader sees one number grow, not four."""
    steps: list[tuple[int, int]] = []
    capture(engine, Kept(), progress=lambda done, total: steps.append((done, total)))
    assert steps == [(n, 12) for n in range(1, 13)]


def test_a_failed_request_ends_the_capture_after_its_run(engine: FakeEngine) -> None:
    """Every request of the run is recorded, the digests end, and no further run is sent."""
    engine.statuses[4] = 503
    kept = Kept()
    with pytest.raises(
        CaptureError,
        match=r"orders \(rotated\): found 1 of 3 requests failed, expected none; first 'p2': HttpStatus: 503",
    ) as caught:
        capture(engine, kept)
    assert str(engine.log) in caught.value.advice
    assert [it["run"] for it in kept] == ["original"] * 3 + ["rotated"] * 3
    assert [it["status"] for it in kept] == [200, 200, 200, 200, 503, 200]
    assert [name for name, _ in engine.rpc] == [START, FINISH] * 2


def test_a_server_lost_in_a_run_leaves_a_record_of_every_request(engine: FakeEngine) -> None:
    """The failed requests are what is reported, not that the digests could not be fetched."""
    engine.die_at = 2
    kept = Kept()
    with pytest.raises(CaptureError, match=r"orders \(original\): found 4 of 4 requests failed"):
        capture(engine, kept, 4)
    assert [it["id"] for it in kept] == ["p0", "p1", "p2", "p3"]
    assert str(kept[3]["error"]).startswith("NotSent: ")


def test_evidence_that_cannot_be_kept_ends_the_digests(engine: FakeEngine) -> None:
    """A full disk is raised, and the worker digests nothing any more."""

    class Full:
        def append(self, record: dict[str, object]) -> None:
            raise EvidenceError("no space left")

    with pytest.raises(EvidenceError, match="no space left"):
        capture(engine, Full())
    assert [name for name, _ in engine.rpc] == [START, FINISH]


@pytest.mark.parametrize(("method", "sent"), [(START, 0), (FINISH, 3)])
def test_a_run_without_digests_fails(engine: FakeEngine, method: str, sent: int) -> None:
    """Answers without the inputs of their steps are no evidence."""
    engine.rpc_statuses = {method: 500}
    with pytest.raises(ServerError, match=f"'{method}' answered 500"):
        capture(engine, Kept())
    assert len(engine.order) == sent
