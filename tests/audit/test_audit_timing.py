"""The audit of a timing campaign: what is in order is accepted, and each damage is rejected under its check."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from attacker import Attacker
from full_run import FullRun
from recordings import MS, Line, failure, to_bytes, to_lines
from timed_run import Made, TimedRun, write_timed_run

from pytest_kvqual._canonical import sha256_file
from pytest_kvqual.audit.auditor import Options, Result, audit, lines
from pytest_kvqual.audit.rederive import GateResult
from pytest_kvqual.audit.trials import body_of
from pytest_kvqual.capture.timing import offered_of, warm_up_of
from pytest_kvqual.judge.verdict import Outcome
from pytest_kvqual.study.panels import PanelItem
from pytest_kvqual.study.trace import Trace, TraceRequest

STEM = "candidate-16-65536"


class Campaign(Attacker):
    """A copy of a campaign, damaged by someone who makes every digest fit again."""

    def __init__(self, run: TimedRun, folder: Path) -> None:
        shutil.copytree(run.run_dir, folder)
        super().__init__(cast(FullRun, run), folder)
        self.timed = run

    def place(self, block: int = 3, arm: str = "candidate") -> Path:
        """The attempt of a trial."""
        return self.folder / self.timed.attempts[arm, block].relative_to(self.timed.run_dir)

    def trial(self, change: Callable[[Any], object], block: int = 3, arm: str = "candidate") -> None:
        """Edits trial.json."""
        self.document(self.place(block, arm) / "trial.json", change)

    def cell(self, change: Callable[[list[Line]], object], name: str = "cell-open", block: int = 3) -> None:
        """Edits a recording."""
        path = self.place(block) / f"{name}.jsonl"
        found = to_lines(path.read_bytes())
        change(found)
        path.write_bytes(to_bytes(found))

    def statement(self, name: str, change: Callable[[Any], object]) -> None:
        """Edits the predicate of a receipt."""
        path = self.folder / "receipts" / STEM / name
        self.document(path, lambda document: change(document["predicate"]))

    def seal(self) -> None:
        """Manifests, outcomes and receipts."""
        for attempt in sorted((self.folder / "evidence").glob("*/attempt-*")):
            self.seal_attempt(attempt)
        self.seal_receipts()

    def audited(self) -> Result:
        """What the audit says of it."""
        return _audit(self.folder)


def _audit(folder: Path) -> Result:
    return audit(Options(run_dir=folder, arm="candidate"))


@pytest.fixture(scope="session")
def timed(tmp_path_factory: pytest.TempPathFactory) -> TimedRun:
    """A campaign in which the candidate is faster."""
    return write_timed_run(tmp_path_factory.mktemp("timed"))


def test_a_campaign_in_order_is_accepted(timed: TimedRun) -> None:
    """No finding; trial and superiority are derived as the receipts have them, and timing is allowed."""
    result = _audit(timed.run_dir)
    assert [finding.line() for finding in result.report.findings] == []
    assert result.timing == "allowed"
    assert result.passed
    assert result.verdict().startswith("PASSED: every check holds, every required gate that does not time passes")
    assert result.verdict().endswith(", and of those that time trial, superiority; timing allowed")
    assert timed.superiority is not None
    assert [(gate.gate, gate.derived, gate.derived_figure) for gate in result.timed] == [
        ("trial", "PASS", timed.verdicts["candidate", 6].figure),
        ("superiority", "PASS", timed.superiority.figure),
    ]
    assert result.report.seen[17] == 3 * 20
    assert any(
        line.startswith("gate superiority: PASS (re-derived from every trial's recordings") for line in lines(result)
    )


def test_another_length_is_one_finding(timed: TimedRun) -> None:
    """A campaign that was timed at another length is refused once: no receipt of it is called unfounded for that."""
    found = audit(Options(run_dir=timed.run_dir, length=8192)).report.findings
    assert [finding.check for finding in found] == [5]


def _lost(arm: str, block: int, made: Made) -> None:
    """A request of the candidate's third trial was dropped."""
    if (arm, block) == ("candidate", 3):
        found = made.recordings["cell-open.jsonl"]
        found[2]["events"], found[2]["failure"] = found[2]["events"][:1], failure("transport")
        found[-1].update(completed=4, failed={"transport": 1})


def test_an_honest_failure_is_consistent(tmp_path: Path) -> None:
    """A comparison with a void trial cannot pass, and a receipt that says so is no finding."""
    run = write_timed_run(tmp_path, change=_lost)
    assert run.superiority is not None
    assert run.superiority.outcome is Outcome.INCONCLUSIVE
    result = _audit(run.run_dir)
    assert [finding.line() for finding in result.report.findings] == []
    assert {gate.gate: gate.derived for gate in result.timed} == {"trial": "PASS", "superiority": "INCONCLUSIVE"}


def test_a_candidate_that_is_not_faster_does_not_pass(tmp_path: Path) -> None:
    """Equal arms: the audit derives FAIL, as the judge does."""
    run = write_timed_run(tmp_path, faster=False)
    result = _audit(run.run_dir)
    assert [finding.line() for finding in result.report.findings] == []
    assert {gate.gate: gate.derived for gate in result.timed}["superiority"] == "FAIL"
    assert not result.passed
    assert result.verdict() == (
        "FAILED: the records are consistent; every required gate that does not time passes; timing allowed; "
        "superiority FAIL"
    )


@pytest.mark.parametrize(
    ("outcome", "passed", "words"),
    [
        ("", True, "PASSED: every check holds, every required gate that does not time passes"),
        (
            "PASS",
            True,
            "PASSED: every check holds, every required gate that does not time passes, and of those that time trial",
        ),
        ("FAIL", False, "FAILED: the records are consistent; every required gate that does not time passes"),
    ],
)
def test_a_gate_that_times_counts_from_its_first_receipt_on(outcome: str, passed: bool, words: str) -> None:
    """An arm without a trial may pass, one whose trial is FAIL may not, and both may be timed."""
    gates = [GateResult(gate=name, required=True, stored="PASS") for name in ("nll", "recall")]
    trial = GateResult(gate="trial", required=True, stored=outcome)
    result = Result(folder="candidate-16-1", gates=gates, timed=[trial], timing="allowed", reached=True)
    assert (result.may_time, result.passed) == (True, passed)
    assert result.verdict() == f"{words}; timing allowed{'; trial FAIL' * (not passed)}"


def _tap(trial: Any) -> None:
    trial["taps"][-1]["ranks"][0]["installed"] = True


def _no_taps(trial: Any) -> None:
    trial["taps"].pop()


def _counter(key: str, by: float) -> Callable[[Any], None]:
    def change(trial: Any) -> None:
        trial["counters"][-1]["values"][key] += by

    return change


def _between(trial: Any) -> None:
    """Something was sent between two loads."""
    for reading in trial["counters"][-2:]:
        reading["values"]["prompt_tokens"] += 7


def _running(trial: Any) -> None:
    """Something ran all the time."""
    for reading in trial["counters"]:
        reading["values"]["running"] = 1


def _overlapping(trial: Any) -> None:
    trial["intervals"][1]["end_ns"] += 60_000 * MS


def _fallback(trial: Any) -> None:
    trial["dispatch"][1]["ranks"] = []


def _set(key: str, value: object) -> Callable[[Any], None]:
    return lambda trial: trial.update({key: value})


TRIALS: dict[str, tuple[int, Callable[[Any], None]]] = {
    "another plan": (1, _set("plan_sha256", "0" * 64)),
    "another arm": (1, _set("arm", "native")),
    "another judgment": (1, _set("judgment", "0" * 64)),
    "exploratory": (1, _set("exploratory", True)),
    "another qualified attempt": (1, _set("qualified", "native-16-65536/attempt-1")),
    "a tap left on": (2, _tap),
    "taps not read": (2, _no_taps),
    "no intervals": (3, _set("intervals", [])),
    "intervals that overlap": (3, _overlapping),
    "a fallback": (5, _fallback),
    "a request that runs throughout": (7, _running),
    "counters read once more": (7, lambda trial: trial["counters"].append(trial["counters"][-1])),
    "tokens of others": (7, _counter("generation_tokens", 5)),
    "a warm prefix": (7, _counter("prefix_cache_hits", 16)),
    "a preemption": (7, _counter("preemptions", 1)),
    "a slow client": (10, _counter("ttft_sum_s", -0.09)),
    "first tokens of others": (10, _counter("ttft_count", 1)),
    "requests between loads": (11, _between),
}


@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_that_breaks_a_rule_cannot_be_said_to_pass(name: str, timed: TimedRun, tmp_path: Path) -> None:
    """The receipt says PASS, every digest fits: the audit derives the outcome from trial.json and objects."""
    rule, change = TRIALS[name]
    campaign = Campaign(timed, tmp_path / "run")
    campaign.trial(change)
    campaign.seal()
    result = campaign.audited()
    texts = [finding.text for finding in result.report.of(19)]
    assert any(f"rule {rule}: " in text and text.startswith("outcome: found PASS") for text in texts), texts
    assert not result.passed


def _shifted(lines: list[Line]) -> None:
    lines[1]["events"][0][0] = lines[1]["send_start_ns"] - 1


def _early(lines: list[Line]) -> None:
    """The first tokens come ten milliseconds earlier: consistent, and not what was measured."""
    for line in lines[1:-1]:
        line["events"][0][0] -= 5 * MS
        line["headers_ns"] -= 4 * MS


def _before_the_warm_up(lines: list[Line]) -> None:
    lines[0]["zero_monotonic_ns"] = 5


def _not_settled(lines: list[Line]) -> None:
    """As soon as the warm-up had ended, whose interval is widened in nothing."""
    lines[0]["zero_monotonic_ns"] -= 59_800 * MS


def _unsuccessful(lines: list[Line]) -> None:
    lines[2]["events"].pop()


def _other_prompt(lines: list[Line]) -> None:
    lines[1]["prompt"], lines[2]["prompt"] = lines[2]["prompt"], lines[1]["prompt"]


def _other_answer(lines: list[Line]) -> None:
    """The canary's first token is another one."""
    line = next(line for line in lines[1:-1] if line["prompt"].startswith("canary"))
    data = base64.b64decode(line["events"][0][1]).replace(b'"token_ids":[1', b'"token_ids":[2')
    line["events"][0][1] = base64.b64encode(data).decode()


def _late(lines: list[Line]) -> None:
    for line in lines[1:-1]:
        for key in ("dispatch_ns", "admission_ns", "connected_ns"):
            line[key] += MS // 12


def _other_prompt_tokens(lines: list[Line]) -> None:
    """The server counted another number of prompt tokens of two requests, and their sum is the same."""
    for line, count in ((lines[1], b'"prompt_tokens": 6'), (lines[2], b'"prompt_tokens": 8')):
        for event in line["events"]:
            data = base64.b64decode(event[1]).replace(b'"prompt_tokens": 7', count)
            event[1] = base64.b64encode(data).decode()


def _error_at_the_end(lines: list[Line]) -> None:
    """An error after every token of a request that was counted as completed."""
    error = base64.b64encode(b'data: {"error":{"message":"out of memory"}}\n\n').decode()
    lines[1]["events"].append([lines[1]["events"][-1][0], error])


def _other_body(lines: list[Line]) -> None:
    """The body of one request was that of the next one."""
    lines[1]["body_sha256"] = lines[2]["body_sha256"]


CELLS: dict[str, tuple[int, Callable[[list[Line]], None]]] = {
    "an event before sending": (17, _shifted),
    "another body": (19, _other_body),
    "before the warm-up": (19, _before_the_warm_up),
    "not settled": (19, _not_settled),
    "[DONE] removed": (17, _unsuccessful),
    "two prompts exchanged": (17, _other_prompt),
    "first tokens earlier": (19, _early),
    "another answer": (19, _other_answer),
    "dispatched later": (19, _late),
    "prompts of another length": (19, _other_prompt_tokens),
    "an error after the last token": (19, _error_at_the_end),
}


@pytest.mark.parametrize("name", CELLS)
def test_a_damaged_recording_is_found(name: str, timed: TimedRun, tmp_path: Path) -> None:
    """With every digest made to fit: the recording contradicts itself or its trace, or the receipts' figures."""
    check, change = CELLS[name]
    campaign = Campaign(timed, tmp_path / "run")
    campaign.cell(change)
    campaign.seal()
    assert check in {finding.check for finding in campaign.audited().report.findings}


def test_a_cell_that_did_not_settle_is_found(timed: TimedRun, tmp_path: Path) -> None:
    """A load that begins as its interval does, right after the one before it, breaks rule 3 although none overlaps."""
    campaign = Campaign(timed, tmp_path / "run")
    warm_up = to_lines((campaign.place() / "warm-up.jsonl").read_bytes())
    end = warm_up[0]["zero_monotonic_ns"] + warm_up[-1]["end_ns"]

    def adjacent(trial: Any) -> None:
        spans = {span["name"]: span for span in trial["intervals"]}
        spans["warm-up"]["end_ns"] = spans["measurement open"]["begin_ns"] = end

    campaign.trial(adjacent)
    campaign.cell(lambda lines: lines[0].update(zero_monotonic_ns=end + 1))
    campaign.seal()
    texts = [finding.text for finding in campaign.audited().report.of(19)]
    assert any("found it begun 1 ns after the load before it" in text for text in texts), texts


def test_a_recording_of_another_trial_is_found(timed: TimedRun, tmp_path: Path) -> None:
    """The recording of an earlier block, made to name this one: its requests were those of another attempt."""
    campaign = Campaign(timed, tmp_path / "run")
    earlier = to_lines((campaign.place(1) / "cell-open.jsonl").read_bytes())

    def copied(lines: list[Line]) -> None:
        lines[1:] = earlier[1:]

    campaign.cell(copied)
    campaign.seal()
    texts = [finding.text for finding in campaign.audited().report.of(19)]
    assert any("rule 3: open, open-0000: body_sha256" in text for text in texts), texts


def test_the_audit_knows_what_a_timed_request_sends() -> None:
    """Its body of a request, of a cell or of the warm-up, has the bytes that the recorder sends."""
    items = [
        PanelItem(id=f"m{place}", prompt=(7, place, 49_151), targets=(), max_tokens=3, grade="measured")
        for place in range(3)
    ]
    of = {item.id: item for item in items}
    trace = Trace(
        cell="open", mode="closed", arrivals=None, rate=None, seed=None, concurrency=1, panel_sha256="0" * 64,
        requests=tuple(
            TraceRequest(request=f"open-{place:04d}", intended_ns=None, prompt=item.id, max_tokens=3)
            for place, item in enumerate(items)
        ),
    )  # fmt: skip
    for offered in (
        *offered_of(trace, of, model="a/b \u00e9", tag="candidate-16-65536-attempt-2"),
        *warm_up_of(items, model="a/b \u00e9", tag="candidate-16-65536-attempt-2", max_tokens=5),
    ):
        assert offered.body == body_of(
            list(of[offered.prompt].prompt), model="a/b \u00e9", max_tokens=offered.max_tokens,
            request_id=f"{'candidate-16-65536/attempt-2'.replace('/', '-')}-{offered.request}",
        )  # fmt: skip


PILOT = f"pilot-{STEM}"


def _pilot(campaign: Campaign, block: int = 3) -> None:
    """A pilot beside the campaign: a trial's files in an attempt of its prefix, each marked exploratory."""
    place = campaign.folder / "evidence" / PILOT / "attempt-1"
    shutil.copytree(campaign.place(block), place)
    campaign.document(place / "attempt.json", lambda attempt: attempt.update(prefix="pilot-", number=1))
    campaign.document(place / "trial.json", lambda trial: trial.update(exploratory=True, block=None))
    campaign.seal()


def test_a_pilot_beside_a_campaign_is_no_finding_and_counts_for_nothing(timed: TimedRun, tmp_path: Path) -> None:
    """Exploratory records of another prefix are named in a note; every verdict is what it was."""
    campaign = Campaign(timed, tmp_path / "run")
    _pilot(campaign)
    result = campaign.audited()
    assert [finding.line() for finding in result.report.findings] == []
    assert any(PILOT in note for note in result.report.notes)
    assert result.passed


def test_a_receipt_that_rests_on_a_pilot_is_found(timed: TimedRun, tmp_path: Path) -> None:
    """Its evidence is of another prefix: no attempt of the campaign has it."""
    campaign = Campaign(timed, tmp_path / "run")
    _pilot(campaign)
    mine = f"{campaign.place().parent.name}/{campaign.place().name}/"

    def rests(predicate: Any) -> None:
        named = [entry for entry in predicate["evidence"] if entry["name"].startswith(mine)]
        assert named
        for entry in named:
            entry["name"] = entry["name"].replace(mine, f"{PILOT}/attempt-1/")

    campaign.statement("03-trial-3.json", rests)
    campaign.seal()
    found = campaign.audited().report
    assert any(PILOT in finding.text for finding in found.of(7))
    assert found.of(19)


def test_a_recording_of_a_pilot_in_a_trial_is_found(timed: TimedRun, tmp_path: Path) -> None:
    """An exploratory recording in the attempt of a trial: rule 1."""
    campaign = Campaign(timed, tmp_path / "run")
    campaign.cell(lambda lines: lines[0].update(exploratory=True))
    campaign.seal()
    texts = [finding.text for finding in campaign.audited().report.of(19)]
    assert any("rule 1: open: exploratory" in text for text in texts), texts


def _figure(predicate: Any) -> None:
    predicate["verdict"]["figure"] = predicate["verdict"]["figure"].replace("median ratio 0.", "median ratio 1.")


def _detail(*path: Any, value: object) -> Callable[[Any], None]:
    def change(predicate: Any) -> None:
        place = predicate["details"]
        for key in path[:-1]:
            place = place[key]
        assert place[path[-1]] != value
        place[path[-1]] = value

    return change


SUPERIORITY: dict[str, Callable[[Any], None]] = {
    "an effect": _detail("family", 0, "effects", "3", value="1/3"),
    "the p-value": _detail("family", 0, "p", value="1/64"),
    "the corrected p-value": _detail("family", 0, "p_holm", value="1/64"),
    "the interval": _detail("family", 0, "upper", value="1/2"),
    "the coverage": _detail("family", 0, "coverage", value="1"),
    "the claim": _detail("family", 0, "claim", value=False),
    "the screen": _detail("family", 0, "screen", value=False),
    "the A/A difference": _detail("null", 0, "effect", value="1/1"),
    "alpha": _detail("alpha", value=0.1),
    "the blocks": _detail("blocks", value=[1, 2, 3]),
    "the figure": _figure,
}


@pytest.mark.parametrize("name", SUPERIORITY)
def test_an_edited_statistic_is_found(name: str, timed: TimedRun, tmp_path: Path) -> None:
    """Each number of the receipt of superiority follows from the recordings."""
    campaign = Campaign(timed, tmp_path / "run")
    campaign.statement("04-superiority-1.json", SUPERIORITY[name])
    campaign.seal()
    found = campaign.audited().report.findings
    assert {finding.check for finding in found} == {19}


def test_an_edited_figure_of_a_trial_is_found(timed: TimedRun, tmp_path: Path) -> None:
    """Each figure of an earlier receipt of trial as well."""
    campaign = Campaign(timed, tmp_path / "run")
    change = _detail("cells", "open", "figures", "tpot_p50", value="1/1")
    campaign.statement("03-trial-2.json", change)
    campaign.seal()
    assert {finding.check for finding in campaign.audited().report.findings} == {19}


def test_a_trial_of_another_arm_counts(timed: TimedRun, tmp_path: Path) -> None:
    """A control's trial that breaks a rule voids the block, though the control's receipts are not audited."""
    campaign = Campaign(timed, tmp_path / "run")
    campaign.trial(_tap, block=2, arm="native")
    campaign.seal()
    texts = [finding.text for finding in campaign.audited().report.of(19)]
    assert any("block 2 of 'native' is void: rule 2: " in text for text in texts)


def test_a_trial_that_is_gone_is_found(timed: TimedRun, tmp_path: Path) -> None:
    """A block that was timed and whose records were removed is no pass."""
    campaign = Campaign(timed, tmp_path / "run")
    shutil.rmtree(campaign.place(block=8, arm="native"))
    campaign.seal()
    assert 19 in {finding.check for finding in campaign.audited().report.findings}


def test_a_second_attempt_at_a_block_is_found(timed: TimedRun, tmp_path: Path) -> None:
    """Two trials of one block, the second renumbered: the better one cannot be chosen."""
    campaign = Campaign(timed, tmp_path / "run")
    campaign.trial(lambda trial: trial.update(block=2))
    campaign.seal()
    texts = [finding.text for finding in campaign.audited().report.of(19)]
    assert any("another trial of block 2 of candidate" in text for text in texts)


def test_a_trial_without_its_mark_is_found(timed: TimedRun, tmp_path: Path) -> None:
    """The mark of a block's one attempt was removed."""
    campaign = Campaign(timed, tmp_path / "run")
    next((campaign.folder / "claims" / STEM).glob("*-block-3.json")).unlink()
    texts = [finding.text for finding in campaign.audited().report.of(19)]
    assert any("without its mark" in text for text in texts)


def _order(plan: Any) -> None:
    plan["blocks"][0]["order"].reverse()


PLANS: dict[str, Callable[[Any], object]] = {
    "alpha": _set("alpha", 0.2),
    "the order of a block": _order,
    "a block left out": lambda plan: plan["blocks"].pop(2),
    "the digest of a trace": lambda plan: plan["cells"][0].update(trace_sha256="0" * 64),
    "a comparison": lambda plan: plan["comparisons"][0].update(metric="e2e_p50"),
    "what can be reached": lambda plan: plan["reachable"].update(p=0.01),
    "the A/A pair": _set("null_pairs", []),
    "the digest of the panel": _set("panel_sha256", "0" * 64),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_does_not_follow_from_the_study_is_found(name: str, timed: TimedRun, tmp_path: Path) -> None:
    """The plan was edited, and the lock made to fit."""
    campaign = Campaign(timed, tmp_path / "run")
    campaign.document(campaign.study / "plans" / "16.json", PLANS[name])
    lock = campaign._lock()
    for attempt in sorted((campaign.folder / "evidence").glob("*/attempt-*")):
        campaign.seal_attempt(attempt, lock)
    campaign.seal_receipts(lock)
    assert 18 in {finding.check for finding in campaign.audited().report.findings}


@pytest.mark.parametrize("metric", ["ttft_send_p50", "mean_ttft_send", "lateness_p99", "burst_e2e_max"])
def test_a_study_that_compares_what_it_must_not_is_found(metric: str, timed: TimedRun, tmp_path: Path) -> None:
    """Declared and planned alike: in an open loop none of these is a primary comparison."""
    campaign = Campaign(timed, tmp_path / "run")
    toml = campaign.study / "study.toml"
    toml.write_text(toml.read_text().replace('"ttft_intended_p50"', f'"{metric}"'))
    campaign.document(campaign.study / "plans" / "16.json", lambda plan: plan["comparisons"][0].update(metric=metric))
    lock = campaign._lock()
    for attempt in sorted((campaign.folder / "evidence").glob("*/attempt-*")):
        campaign.seal_attempt(attempt, lock)
    campaign.seal_receipts(lock)
    text = (
        f"comparisons: found {metric} of candidate against 'native' in open, expected a figure of every offered "
        "request, in an open loop from its intended arrival"
    )
    assert [finding.text for finding in campaign.audited().report.of(18)] == [text]


def test_damage_never_ends_in_a_traceback(timed: TimedRun, tmp_path: Path) -> None:
    """Whatever a document of timing holds, the audit comes to an end with findings."""
    values: list[object] = [None, [], {}, "x", -1, 10**30, True, [None], {"when": []}]
    campaign = Campaign(timed, tmp_path / "run")
    path = campaign.place() / "trial.json"
    whole = path.read_bytes()
    keys = list(json.loads(whole))
    for index, key in enumerate(keys):
        document = json.loads(whole)
        document[key] = values[index % len(values)]
        path.write_bytes(to_bytes([document]))
        campaign.seal_attempt(path.parent)
        campaign.seal_receipts()
        found = campaign.audited().report.findings
        assert all("cannot be audited" not in finding.text for finding in found)
        assert found or key in ("environment", "length"), key
    assert sha256_file(path) != ""
