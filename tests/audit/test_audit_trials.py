"""The audit of a timing campaign: what is in order is accepted, and each damage is rejected under its check."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from fractions import Fraction
from math import inf
from pathlib import Path
from typing import Any, cast

import pytest
from attacker import Attacker
from full_run import FullRun
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import MS, Line, failure, to_bytes, to_lines
from timed_run import Made, TimedRun, write_timed_run

from pytest_kvqual._canonical import sha256_file
from pytest_kvqual.audit.auditor import Options, Result, audit, lines
from pytest_kvqual.audit.trials import Trial
from pytest_kvqual.audit.trials import superiority as derive
from pytest_kvqual.faults.blocks import BLOCK_FAULTS
from pytest_kvqual.judge.gates import superiority
from pytest_kvqual.judge.gates.superiority import Trial as Figured
from pytest_kvqual.judge.verdict import Outcome
from pytest_kvqual.study import plan as plans
from pytest_kvqual.study.model import Comparison

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

    def lock(self) -> None:
        """The lock, and all that rests on it."""
        lock = self._lock()
        for attempt in sorted((self.folder / "evidence").glob("*/attempt-*")):
            self.seal_attempt(attempt, lock)
        self.seal_receipts(lock)

    def renumber(self, name: str) -> None:
        """A receipt's own digest alone."""
        path = self.folder / "receipts" / STEM / name
        self._number(path, json.loads(path.read_bytes()))

    def audited(self) -> Result:
        """What the audit says of it."""
        return _audit(self.folder)


def _audit(folder: Path) -> Result:
    return audit(Options(run_dir=folder, arm="candidate"))


@pytest.fixture(scope="session")
def timed(tmp_path_factory: pytest.TempPathFactory) -> TimedRun:
    """A campaign in which the candidate is faster."""
    return write_timed_run(tmp_path_factory.mktemp("timed"))


def texts(result: Result, check: int) -> list[str]:
    """What one check objects to."""
    return [finding.line() for finding in result.report.of(check)]


def test_a_campaign_in_order_is_accepted(timed: TimedRun) -> None:
    """No finding; every recording was verified, and timing is allowed."""
    result = _audit(timed.run_dir)
    assert [finding.line() for finding in result.report.findings] == []
    assert result.timing == "allowed"
    assert result.passed
    assert result.report.seen[17] == 3 * 20
    assert "check 18 trials and statistics: ok" in lines(result)


def _lost(arm: str, block: int, made: Made) -> None:
    """A request of the candidate's third trial was dropped."""
    if (arm, block) == ("candidate", 3):
        found = made.recordings["cell-open.jsonl"]
        found[3]["events"], found[3]["failure"] = found[3]["events"][:1], failure("transport")
        found[-1].update(completed=4, failed={"transport": 1})


def test_an_honest_failure_is_consistent(tmp_path: Path) -> None:
    """A void trial fails the comparison, and receipts that say so are no finding."""
    run = write_timed_run(tmp_path, change=_lost)
    assert run.superiority is not None
    assert run.superiority.outcome is not Outcome.PASS
    assert [finding.line() for finding in _audit(run.run_dir).report.findings] == []


def test_a_void_trial_that_is_counted_is_found(tmp_path: Path, timed: TimedRun) -> None:
    """The receipt of superiority says PASS, and one of its trials lost a request."""
    run = write_timed_run(tmp_path, change=_lost)
    campaign = Campaign(run, tmp_path / "copy")
    name = "04-superiority-1.json"
    for receipt in (timed.run_dir / "receipts" / STEM).glob(name):
        shutil.copy(receipt, campaign.folder / "receipts" / STEM / name)
    campaign.lock()
    assert any("expected no PASS: block 3 is not whole" in text for text in texts(campaign.audited(), 18))


def test_a_candidate_that_is_not_faster_does_not_pass(tmp_path: Path) -> None:
    """Equal arms: the judge says so, and the audit has nothing against it."""
    run = write_timed_run(tmp_path, faster=False)
    assert run.superiority is not None
    assert run.superiority.outcome is not Outcome.PASS
    assert [finding.line() for finding in _audit(run.run_dir).report.findings] == []


def _tap(trial: Any) -> None:
    trial["taps"][-1]["ranks"][0]["installed"] = True


def _no_taps(trial: Any) -> None:
    trial["taps"].pop()


def _counter(key: str, by: float) -> Callable[[Any], None]:
    def change(trial: Any) -> None:
        trial["counters"][-1]["values"][key] += by

    return change


def _counter_set(key: str, value: object) -> Callable[[Any], None]:
    def change(trial: Any) -> None:
        trial["counters"][-1]["values"][key] = value

    return change


def _between(trial: Any) -> None:
    """Something was sent between two loads."""
    for reading in trial["counters"][-2:]:
        reading["values"]["prompt_tokens"] += 7


def _fallback(trial: Any) -> None:
    trial["dispatch"][1]["ranks"] = []


def _set(key: str, value: object) -> Callable[[Any], None]:
    return lambda trial: trial.update({key: value})


def _other_kernels(trial: Any) -> None:
    trial["dispatch"][1]["ranks"][0]["layers"][0]["kernels"] = ["another"]


TRIALS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "another plan": ("not of the frozen plan", _set("plan_sha256", "0" * 64)),
    "another arm": ("found 0 trials of block 6", _set("arm", "native")),
    "another judgment": ("another permit", _set("judgment", "0" * 64)),
    "exploratory": ("not of the frozen plan", _set("exploratory", True)),
    "another block": ("found 0 trials of block 6", _set("block", 2)),
    "another qualified attempt": ("no qualified attempt", _set("qualified", "native-16-65536/attempt-1")),
    "a tap left on": ("a tap, fault or held block", _tap),
    "taps not read": ("taps or counters were not read", _no_taps),
    "no kernels": ("other kernels after", _fallback),
    "other kernels": ("other kernels after", _other_kernels),
    "tokens of others": ("generation_tokens on the server", _counter("generation_tokens", 5)),
    "prompts of others": ("prompt_tokens on the server", _counter("prompt_tokens", 7)),
    "a warm prefix": ("prefix cache", _counter("prefix_cache_hits", 16)),
    "a preemption": ("preemptions", _counter("preemptions", 1)),
    "a slow client": ("ms at the server", _counter("ttft_sum_s", -0.09)),
    "first tokens of others": ("first tokens on the server", _counter("ttft_count", 1)),
    "requests between loads": ("while nothing was sent", _between),
    "a counter that is no number": ("expected an integer", _counter_set("preemptions", "none")),
}


@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_that_breaks_a_rule_cannot_be_counted(name: str, timed: TimedRun, tmp_path: Path) -> None:
    """Every digest fits, and the receipt of superiority says PASS: the trial is void, and check 18 objects."""
    text, change = TRIALS[name]
    campaign = Campaign(timed, tmp_path / "run")
    campaign.trial(change, block=6)
    campaign.seal()
    result = campaign.audited()
    assert any(text in line for line in texts(result, 18)), texts(result, 18)
    assert any("block 6 is not whole" in line for line in texts(result, 18)), texts(result, 18)
    assert not result.passed


def _shifted(lines: list[Line]) -> None:
    lines[1]["events"][0][0] = lines[1]["send_start_ns"] - 1


def _early(lines: list[Line]) -> None:
    """The first tokens come ten milliseconds earlier: consistent, and not what was measured."""
    for line in lines[1:-1]:
        line["events"][0][0] -= 5 * MS
        line["headers_ns"] -= 4 * MS


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


def _left_out(lines: list[Line]) -> None:
    """The last request is gone, and all totals fit."""
    gone = lines.pop(-2)
    lines[0]["requests"] -= 1
    lines[-1].update(offered=4, completed=4, end_ns=max(line["end_ns"] for line in lines[1:-1]))
    assert gone["request"] == "open-0004"


CELLS: dict[str, tuple[int, Callable[[list[Line]], None]]] = {
    "an event before sending": (17, _shifted),
    "[DONE] removed": (17, _unsuccessful),
    "two prompts exchanged": (17, _other_prompt),
    "first tokens earlier": (18, _early),
    "another answer to a canary": (18, _other_answer),
    "dispatched later": (18, _late),
    "exploratory": (18, lambda lines: lines[0].update(exploratory=True)),
    "another permit": (18, lambda lines: lines[0].update(judgment="0" * 64)),
    "another block": (18, lambda lines: lines[0]["about"].update(block=4)),
    "another cell": (17, lambda lines: lines[0].update(cell="closed")),
    "a request left out": (17, _left_out),
}


@pytest.mark.parametrize("name", CELLS)
def test_a_damaged_recording_is_found(name: str, timed: TimedRun, tmp_path: Path) -> None:
    """With every digest made to fit: the recording contradicts itself or its trace, or the receipts' figures."""
    check, change = CELLS[name]
    campaign = Campaign(timed, tmp_path / "run")
    campaign.cell(change)
    campaign.seal()
    assert check in {finding.check for finding in campaign.audited().report.findings}


def _figure(predicate: Any) -> None:
    predicate["verdict"]["figure"] = predicate["verdict"]["figure"].replace("0.5046", "0.4046")


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
    "the A/A difference": _detail("null", 0, "difference", value="0"),
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
    assert 18 in {finding.check for finding in found}
    # Timing receipts above records that do not hold are a finding of their own.
    assert {finding.check for finding in found} <= {16, 18}


FIGURES: dict[str, Callable[[Any], None]] = {
    "a figure": _detail("cells", "open", "figures", "tpot_p50", value="1/1"),
    "a figure left out": lambda predicate: predicate["details"]["cells"]["open"]["figures"].pop("tpot_p50"),
    "a cell left out": lambda predicate: predicate["details"]["cells"].pop("closed"),
    "completed": _detail("cells", "open", "completed", value=4),
    "the block": _detail("block", value=5),
    "the line": lambda predicate: predicate["verdict"].update(figure="block 6, open: 5 of 5 completed"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_an_edited_figure_of_a_trial_is_found(name: str, timed: TimedRun, tmp_path: Path) -> None:
    """Each figure of the newest receipt of trial follows from its recordings."""
    campaign = Campaign(timed, tmp_path / "run")
    campaign.statement("03-trial-6.json", FIGURES[name])
    campaign.seal()
    assert 18 in {finding.check for finding in campaign.audited().report.findings}


def test_an_edited_digest_of_evidence_is_found(timed: TimedRun, tmp_path: Path) -> None:
    """A receipt that names another recording than the one that is sealed."""
    campaign = Campaign(timed, tmp_path / "run")

    def change(predicate: Any) -> None:
        entry = next(it for it in predicate["evidence"] if it["name"].endswith("attempt-7/cell-open.jsonl"))
        entry["digest"]["sha256"] = "0" * 64

    campaign.statement("04-superiority-1.json", change)
    campaign.renumber("04-superiority-1.json")
    assert any("attempt-7/cell-open.jsonl" in text for text in texts(campaign.audited(), 7))


def test_recordings_swapped_between_blocks_are_found(timed: TimedRun, tmp_path: Path) -> None:
    """Two trials' recordings of a cell in each other's place, with every digest made to fit."""
    campaign = Campaign(timed, tmp_path / "run")
    one, other = (campaign.place(block) / "cell-open.jsonl" for block in (2, 3))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    campaign.seal()
    found = texts(campaign.audited(), 18)
    assert any("block 2 is not whole; block 3 is not whole" in text for text in found), found


def test_a_trial_of_another_arm_counts(timed: TimedRun, tmp_path: Path) -> None:
    """A control's trial that breaks a rule voids the block, though the control's receipts are not audited."""
    campaign = Campaign(timed, tmp_path / "run")
    campaign.trial(_tap, block=2, arm="native")
    campaign.seal()
    assert any("block 2 is not whole" in text for text in texts(campaign.audited(), 18))


def test_a_trial_that_is_gone_is_found(timed: TimedRun, tmp_path: Path) -> None:
    """A block that was timed and whose records were removed is no pass."""
    campaign = Campaign(timed, tmp_path / "run")
    shutil.rmtree(campaign.place(block=8, arm="native"))
    campaign.seal()
    result = campaign.audited()
    assert any("A/A blocks [7, 8] are not whole" in text for text in texts(result, 18))
    assert texts(result, 7)


def test_a_campaign_without_its_trials_is_found(timed: TimedRun, tmp_path: Path) -> None:
    """Every trial is gone, and the receipts that say PASS are left."""
    campaign = Campaign(timed, tmp_path / "run")
    for attempt in (campaign.folder / "evidence").glob("*/attempt-*"):
        if (attempt / "trial.json").exists():
            shutil.rmtree(attempt)
    campaign.seal()
    found = texts(campaign.audited(), 18)
    assert any("expected no PASS: block 1 is not whole" in text for text in found), found


def test_a_failed_attempt_at_a_block_voids_it(timed: TimedRun, tmp_path: Path) -> None:
    """A first attempt at a block that failed after a recording, and a second one that is complete."""
    campaign = Campaign(timed, tmp_path / "run")
    last = campaign.place(block=6)
    again = last.with_name("attempt-8")
    shutil.copytree(last, again)
    campaign.document(again / "attempt.json", lambda document: document.update(number=8))
    campaign.document(again / "outcome.json", lambda document: document.update(outcome="failed", reason="the end"))
    campaign.seal()
    assert any("block 6 is not whole" in text for text in texts(campaign.audited(), 18))


def _order(plan: Any) -> None:
    plan["blocks"][0]["order"].reverse()


PLANS: dict[str, Callable[[Any], object]] = {
    "alpha": _set("alpha", 0.2),
    "the order of a block": _order,
    "a block left out": lambda plan: plan["blocks"].pop(2),
    "the digest of a trace": lambda plan: plan["cells"][0].update(trace_sha256="0" * 64),
    "a comparison": lambda plan: plan["comparisons"][0].update(metric="e2e_p50"),
    "the A/A pair": _set("null_pairs", []),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_does_not_follow_from_the_study_is_found(name: str, timed: TimedRun, tmp_path: Path) -> None:
    """The plan was edited, and the lock made to fit: it is not the study's, and no trial is of it."""
    campaign = Campaign(timed, tmp_path / "run")
    campaign.document(campaign.study / "plans" / "16.json", PLANS[name])
    campaign.lock()
    found = texts(campaign.audited(), 18)
    assert any(": plan: " in text for text in found), found
    assert any("block 1 is not whole" in text or "expected no PASS" in text for text in found), found


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
        assert found or key in ("environment", "length", "schema", "intervals"), key
    assert sha256_file(path) != ""


# -- the statistics, against the judge's -----------------------------------------------------------------------------


BLOCKS = (1, 2, 3, 4, 5, 6)
KEYS = (("open", "ttft_intended_p50", "lower"), ("open", "output_throughput", "higher"))
RATIOS = st.sampled_from(
    [Fraction(value) for value in ("1/2", "9/10", "19/20", "951/1000", "1", "1", "21/20", "2", "10001/10000")]
)


@st.composite
def campaigns(draw: st.DrawFn) -> tuple[plans.Plan, dict[tuple[str, int], Figured | None]]:
    """A plan of one or two comparisons, and its trials: ties, infinite and missing figures, void and missing trials."""
    keys = KEYS[: draw(st.integers(1, 2))]
    blocks = [plans.Block(number=number, kind="measured", order=("candidate", "native")) for number in BLOCKS]
    blocks += [plans.Block(number=number, kind="null", order=("native",)) for number in (7, 8)]
    plan = plans.Plan(
        arms=("candidate", "native"),
        blocks=tuple(blocks),
        null_arm="native",
        null_pairs=((7, 8),),
        comparisons=tuple(
            Comparison(candidate="candidate", control="native", cell=cell, metric=metric, better=cast(Any, better))
            for cell, metric, better in keys
        ),
        alpha=draw(st.sampled_from([0.05, 0.2])),
        confidence=0.95,
        practical=0.05,
        data=b"",
    )
    broken = draw(st.booleans())
    trials: dict[tuple[str, int], Figured | None] = {}
    for block in plan.blocks:
        for arm in block.order:
            kind = draw(st.sampled_from(["whole"] * 30 + ["void", "none", "infinite", "zero"])) if broken else "whole"
            value = 10 * (draw(RATIOS) if arm == "candidate" else 1 + Fraction(draw(st.integers(0, 60)), 1000))
            broken_figures: dict[str, Fraction | float] = {"infinite": inf, "zero": Fraction(0)}
            figures: dict[tuple[str, str], Fraction | float | None] = {
                (cell, metric): broken_figures.get(kind, value if better == "lower" else 1 / value)
                for cell, metric, better in keys
            }
            why = "found a tap" if kind == "void" else ""
            trials[arm, block.number] = (
                None if kind == "none" else Figured(valid=kind != "void", why=why, figures=figures)
            )
    return plan, trials


@given(campaigns())
@settings(max_examples=60, deadline=None)
def test_statistics_are_the_judges(campaign: tuple[plans.Plan, dict[tuple[str, int], Figured | None]]) -> None:
    """Effects, interval, p, Holm, screen, claim, A/A and the outcome are the same from both, in exact fractions."""
    plan, trials = campaign
    verdict = superiority.judge(plan, arm="candidate", trials=trials, faults=tuple(BLOCK_FAULTS))
    document = {
        "blocks": [{"block": it.number, "kind": it.kind, "order": list(it.order)} for it in plan.blocks],
        "comparisons": [
            {key: getattr(it, key) for key in ("candidate", "control", "cell", "metric", "better")}
            for it in plan.comparisons
        ],
        "null_arm": "native",
        "null_pairs": [[7, 8]],
        "alpha": plan.alpha,
        "confidence": plan.confidence,
        "practical": plan.practical,
    }
    found = derive(
        document,
        "candidate",
        [
            Trial(
                name="", arm=arm, block=block, objections=[it.why] if it.why else [], figures=dict(it.figures)
            )
            for (arm, block), it in trials.items()
            if it is not None
        ],
    )  # fmt: skip
    assert found.family == verdict.details["family"]
    assert found.noise == verdict.details["null"]
    assert found.passed == (verdict.outcome is Outcome.PASS)
    if found.passed:
        assert verdict.null is not None
        assert (found.figure, found.null) == (verdict.figure, verdict.null.figure)


def test_the_statistics_of_an_arm_that_the_plan_does_not_compare() -> None:
    """No comparison is no pass."""
    document = {"blocks": [], "comparisons": [], "null_pairs": [], "alpha": 0.05, "confidence": 0.95, "practical": 0.05}
    found = derive(document, "candidate", [])
    assert not found.passed
    assert found.why == ["the plan does not compare the arm", "the plan has no A/A pair"]
