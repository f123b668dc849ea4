"""One attempt without an engine: which passes and faults it asks for, what it keeps, and what it reads again."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_kvqual.attempt import Activity, Attempt
from pytest_kvqual.errors import CaptureError, ServerError
from pytest_kvqual.evidence.reader import Reader
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.progress import Event
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Selection
from pytest_kvqual.tasks import orders

HEALTHY: list[object] = [{"rank": 0, "layers": {"layers.0": {"kernels": ["aten::bmm"]}}}]
FALLEN: list[object] = [{"rank": 0, "layers": {"layers.0": {"kernels": ["aten::mm"]}}}]
NPZ = b"PK\x03\x04 a reproducer"


class FakeServer:
    """A server that nothing is sent to."""

    base_url = "http://127.0.0.1:1"
    log = Path("server.log")

    def check(self) -> None:
        """It runs."""

    def alive(self) -> bool:
        """It answers nobody, so no activity is asked of it."""
        return False

    def stop(self) -> None:
        """It is gone."""


class World:
    """What the attempt asked for, and what it gets.

    ``events`` are the calls in order; ``readings`` are what the dispatch readings give in turn, the last one from then
    on; ``broken`` names a call that fails.
    """

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.readings: list[list[object]] = [HEALTHY]
        self.passes: list[dict[str, Any]] = []
        self.reproducers: list[dict[str, str]] = []
        self.tokens: Callable[[str, int], list[int]] = lambda run, index: [index, 1]
        self.broken = ""
        self.said: list[Event] = []

    def call(self, base_url: str, method: str, *args: object, timeout_s: float) -> list[object]:
        self.events.append((method, *args))
        if method == self.broken:
            raise ServerError(f"{method} failed")
        return [{"busy_ns": 5}]

    def read_dispatch(self, server: object, item: Any, **options: object) -> list[object]:
        self.events.append("reading")
        if self.broken == "reading":
            raise CaptureError("dispatch: the request failed")
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]

    def capture_oracle(self, server: object, panel: Any, **options: Any) -> dict[str, object]:
        asked = {key: options.get(key) for key in ("fault", "probe", "fills", "free_blocks", "rotation")}
        self.passes.append({"panel": panel, **{key: value for key, value in asked.items() if value}})
        self.events.append("pass")
        reproducers = self.reproducers if options.get("fault") is None else []
        return {"fault": options.get("fault"), "records": [{"rank": 0, "reproducers": reproducers}], "responses": []}

    def capture_task(self, server: object, panel: Any, writer: Any, **options: object) -> int:
        self.events.append("task")
        writer.append({"whole": True})
        return 1

    def capture_orders(self, server: object, panel: Any, writer: Any, **options: Any) -> dict[str, list[object]]:
        self.events.append(("orders", len(panel.items), tuple(options["runs"]), options["rotation"]))
        for run in options["runs"]:
            for index, item in enumerate(panel.items):
                writer.append(answer(run, item, index, self.tokens(run, index)))
        return {run: [{"rank": 0, "steps": 2, "digests": ["a" * 64, "b" * 64]}] for run in options["runs"]}


def answer(run: str, item: Any, index: int, tokens: list[int]) -> dict[str, object]:
    """A capture record of a run."""
    choice = {
        "finish_reason": "length",
        "prompt_token_ids": list(item.prompt),
        "token_ids": tokens,
    }
    usage = {"prompt_tokens": len(item.prompt), "completion_tokens": len(tokens)}
    body = json.dumps({"choices": [choice], "usage": usage})
    return {"id": item.id, "order": "forward", "index": index, "status": 200, "body": body, "error": None, "run": run}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """The captures and worker calls of a test."""
    made = World()
    monkeypatch.setattr("pytest_kvqual.server.rpc.call", made.call)
    monkeypatch.setattr("pytest_kvqual.capture.dispatch.read_dispatch", made.read_dispatch)
    monkeypatch.setattr("pytest_kvqual.capture.oracle.capture_oracle", made.capture_oracle)
    monkeypatch.setattr("pytest_kvqual.capture.orders.capture_orders", made.capture_orders)
    for task in ("parity", "nll"):
        monkeypatch.setattr(f"pytest_kvqual.capture.quality.capture_{task}", made.capture_task)
    return made


@pytest.fixture
def selection() -> Selection:
    """The candidate of the embedded study."""
    return select(load_study("smollm2-cpu"), arm="candidate", length=1024, cache_bytes=None)


@pytest.fixture
def attempt(world: World, selection: Selection, tmp_path: Path) -> Iterator[Attempt]:
    """An attempt whose server is up."""
    scope = Scope(lock="a" * 64, arm="candidate", length=1024, cache_bytes=4096, engine="b" * 64)
    made = Attempt(
        selection,
        scope,
        run_dir=tmp_path,
        prefix="",
        model=tmp_path,
        progress=world.said.append,
        activity=Activity(),
    )
    (made.path / "server.log").write_text("up\n")
    made._server = FakeServer()  # type: ignore[assignment]  # as much of a server as is used
    yield made
    made.fail(CaptureError("the test is over"))


def sealed(attempt: Attempt) -> Reader:
    """The attempt's evidence, verified."""
    return Reader.open(attempt.path)


# -- dispatch ---------------------------------------------------------------------------------------------------------


def test_dispatch_is_read_healthy_and_under_each_fault(world: World, attempt: Attempt) -> None:
    """The document holds the reading after the boot and one per fault, each planted alone."""
    world.readings = [HEALTHY, FALLEN, HEALTHY]
    attempt.dispatch(("one", "two"))
    assert world.events == [
        "reading",
        ("kvqual_plant", "one"), "reading", ("kvqual_unplant",),
        ("kvqual_plant", "two"), "reading", ("kvqual_unplant",),
    ]  # fmt: skip
    assert sealed(attempt).document("dispatch.json") == {
        "schema": 1,
        "arm": "candidate",
        "readings": [{"after": "boot", "ranks": HEALTHY}],
        "poison": [{"fault": "one", "ranks": FALLEN}, {"fault": "two", "ranks": HEALTHY}],
    }


def test_a_fault_is_taken_back_after_a_failed_reading(world: World, attempt: Attempt) -> None:
    """What was planted does not stay in the server, and the failed reading is what is reported."""
    attempt.dispatch(())
    world.events.clear()
    world.broken = "reading"
    with pytest.raises(CaptureError, match="dispatch: the request failed"), attempt._planted("one"):
        attempt.kernels()
    assert world.events == [("kvqual_plant", "one"), "reading", ("kvqual_unplant",)]


CAPTURES: dict[str, tuple[Callable[[Attempt], None], str]] = {
    "oracle": (lambda attempt: attempt.oracle(()), "oracle.json"),
    "determinism": (lambda attempt: attempt.determinism(()), "order-comparison.json"),
    "parity": (lambda attempt: attempt.parity("parity.jsonl", "forward"), "parity.jsonl"),
    "nll-again": (lambda attempt: attempt.nll("nll-again.jsonl"), "nll-again.jsonl"),
}


@pytest.mark.parametrize("capture", CAPTURES)
def test_dispatch_is_read_again_after_a_capture(world: World, attempt: Attempt, capture: str) -> None:
    """Where nothing changed, every reading is kept when the server stops."""
    attempt.dispatch(())
    CAPTURES[capture][0](attempt)
    assert world.events[-1] == "reading"
    attempt.complete()
    assert sealed(attempt).document("dispatch-after.json") == {
        "schema": 1,
        "arm": "candidate",
        "readings": [{"after": "boot", "ranks": HEALTHY}, {"after": capture, "ranks": HEALTHY}],
    }
    assert sealed(attempt).outcome == "complete"


@pytest.mark.parametrize("capture", CAPTURES)
def test_another_kernel_after_a_capture_fails_the_attempt(world: World, attempt: Attempt, capture: str) -> None:
    """A layer that fell back in mid-capture is a failure that names both files, and both readings are kept."""
    world.readings = [HEALTHY, FALLEN]
    attempt.dispatch(())
    text = f"candidate: found other kernels after {capture} than at the start, expected the same"
    with pytest.raises(CaptureError, match=text) as caught, attempt.failing():
        CAPTURES[capture][0](attempt)
    assert "dispatch.json with " in caught.value.advice
    assert attempt.failure is caught.value
    reader = sealed(attempt)
    assert (reader.outcome, reader.reason.startswith(text)) == ("failed", True)
    readings: Any = reader.document("dispatch-after.json")["readings"]
    assert [(reading["after"], reading["ranks"]) for reading in readings] == [("boot", HEALTHY), (capture, FALLEN)]
    assert reader.has(CAPTURES[capture][1])


def test_dispatch_is_not_read_after_a_planted_fault(world: World, attempt: Attempt) -> None:
    """What runs under a seeded fault is the fault's affair."""
    attempt.dispatch(())
    attempt.parity("parity-poison-one.jsonl", "forward", fault="one", prompts=4)
    attempt.nll("nll-poison-one.jsonl", fault="one", documents=8)
    assert world.events.count("reading") == 1


def test_a_lost_server_leaves_the_readings_that_there_were(world: World, attempt: Attempt) -> None:
    """A reading that fails in the end does not take away the one at the start."""
    attempt.dispatch(())
    world.broken = "reading"
    with pytest.raises(CaptureError, match="the request failed"), attempt.failing():
        attempt.oracle(())
    readings: Any = sealed(attempt).document("dispatch-after.json")["readings"]
    assert [reading["after"] for reading in readings] == ["boot"]


def test_an_attempt_without_dispatch_reads_no_kernels(world: World, attempt: Attempt) -> None:
    """Where nothing was read at the start there is nothing to compare with."""
    attempt.oracle(())
    attempt.complete()
    assert "reading" not in world.events
    assert not sealed(attempt).has("dispatch-after.json")


def test_a_server_that_ended_by_itself_leaves_its_log(
    world: World, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure that comes up while the server is stopped keeps log and readings like any other."""

    def check(server: FakeServer) -> None:
        raise ServerError("the server ended")

    attempt.dispatch(())
    monkeypatch.setattr(FakeServer, "check", check)
    with pytest.raises(ServerError, match="the server ended"), attempt.failing():
        attempt.complete()
    reader = sealed(attempt)
    assert reader.outcome == "failed"
    assert reader.data("server.log") == b"up\n"
    assert reader.has("dispatch-after.json")


# -- oracle -----------------------------------------------------------------------------------------------------------


def test_the_passes_of_the_oracle(world: World, attempt: Attempt, selection: Selection) -> None:
    """Each pass has its options and its requests: the short ones where the pool is scarce and the order another."""
    rules = selection.study.oracle
    attempt.oracle(())
    model, probe, pressure, rotated = world.passes
    assert {key: value for key, value in model.items() if key != "panel"} == {}
    assert {key: value for key, value in probe.items() if key != "panel"} == {"probe": True, "fills": True}
    assert {key: value for key, value in pressure.items() if key != "panel"} == {"free_blocks": rules.free_blocks}
    assert {key: value for key, value in rotated.items() if key != "panel"} == {"rotation": rules.rotation}
    assert model["panel"] == probe["panel"]
    assert pressure["panel"] == rotated["panel"]
    longest = [max(len(item.prompt) for item in entry["panel"].items) for entry in (model, pressure)]
    assert longest[1] <= rules.short_prompt_tokens < longest[0]
    document: Any = sealed(attempt).document("oracle.json")
    assert (document["schema"], document["poison"]) == (2, [])
    assert [entry["name"] for entry in document["passes"]] == ["model", "probe", "pressure", "rotated"]
    assert all(set(entry) == {"name", "records", "wave"} for entry in document["passes"])


def test_faults_are_shown_to_fingerprints_and_to_fills_where_they_claim_them(
    world: World, attempt: Attempt, selection: Selection
) -> None:
    """Each fault gets a pass of its own over the shortest prompts; fills are made for the gate that needs them."""
    attempt.oracle([("slot-off-by-one", "routing"), ("tail-of-v-times-zero", "replay")])
    one, two = world.passes[4:]
    panel = one.pop("panel")
    assert panel.items
    assert all(len(item.prompt) <= selection.study.oracle.poison_prompt_tokens for item in panel.items)
    assert two.pop("panel") == panel
    assert one == {"fault": "slot-off-by-one", "probe": True}
    assert two == {"fault": "tail-of-v-times-zero", "probe": True, "fills": True}
    document: Any = sealed(attempt).document("oracle.json")
    assert [(entry["fault"], entry["claimed_by"]) for entry in document["poison"]] == [
        ("slot-off-by-one", "routing"),
        ("tail-of-v-times-zero", "replay"),
    ]
    assert all(set(entry) == {"fault", "claimed_by", "records", "responses"} for entry in document["poison"])


def test_reproducers_are_sealed_as_files(world: World, attempt: Attempt) -> None:
    """A finding of a healthy pass leaves its reproducer as a file, and the command that checks it is said."""
    world.reproducers = [{"gate": gate, "npz": base64.b64encode(NPZ).decode()} for gate in ("replay", "stale-maps")]
    attempt.oracle([("slot-off-by-one", "routing")])
    reader = sealed(attempt)
    names = [name for name in reader.digests if name.startswith("reproducer-")]
    assert names == [
        f"reproducer-{name}-{gate}-rank0.npz"
        for name in ("model", "probe", "pressure", "rotated")
        for gate in ("replay", "stale-maps")
    ]
    assert all(reader.data(name) == NPZ for name in names)
    said = f"candidate: a finding of replay: kvqual replay {attempt.path / 'reproducer-model-replay-rank0.npz'}"
    assert said in world.said


# -- determinism ------------------------------------------------------------------------------------------------------


def test_determinism_keeps_records_inputs_and_comparison(world: World, attempt: Attempt, selection: Selection) -> None:
    """The comparison that is sealed is the one that follows from the records of all four runs."""
    world.tokens = lambda run, index: [index, 2 if run == "rotated" and index == 3 else 1]
    attempt.determinism(())
    prompts = selection.study.parity.prompts
    assert world.events == [("orders", prompts, orders.RUNS, selection.study.oracle.rotation)]
    reader = sealed(attempt)
    assert len(reader.records("determinism.jsonl")) == 4 * prompts
    inputs: Any = reader.document("determinism-inputs.json")
    assert (inputs["schema"], list(inputs["runs"])) == (1, sorted(orders.RUNS))
    comparison: Any = reader.document("order-comparison.json")
    assert comparison["policy"] == "order-invariant"
    assert {pair["right"]: (pair["differ"], pair["of"]) for pair in comparison["pairs"]} == {
        "rotated": (1, prompts),
        "original-again": (0, prompts),
        "natural": (0, prompts),
    }
    assert comparison["pairs"][0]["first"] == [
        {"id": reader.records("determinism.jsonl")[3]["id"], "index": 1, "left": 1, "right": 2}
    ]


def test_faults_of_determinism_are_shown_in_the_runs_that_decide(
    world: World, attempt: Attempt, selection: Selection
) -> None:
    """Each fault has records of its own over the first prompts; they are no part of the arm's comparison."""
    world.tokens = lambda run, index: [index, len(world.events)]
    attempt.determinism(("one",))
    assert world.events[1:] == [
        ("kvqual_plant", "one"),
        ("orders", 8, orders.REQUIRED, selection.study.oracle.rotation),
        ("kvqual_unplant",),
    ]
    reader = sealed(attempt)
    assert {record["run"] for record in reader.records("determinism-poison-one.jsonl")} == set(orders.REQUIRED)
    comparison: Any = reader.document("order-comparison.json")
    assert [pair["differ"] for pair in comparison["pairs"]] == [0, 0, 0]


def test_an_answer_that_cannot_be_read_is_left_to_the_judge(world: World, attempt: Attempt) -> None:
    """A record without whole token ids is kept, and its request counts as one that the run lacks."""
    world.tokens = lambda run, index: [-1] if run == "natural" and index == 0 else [1]
    attempt.determinism(())
    comparison: Any = sealed(attempt).document("order-comparison.json")
    assert [pair["differ"] for pair in comparison["pairs"]] == [0, 0, 1]
    assert comparison["pairs"][2]["first"][0]["right"] is None
