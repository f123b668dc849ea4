"""Gate fidelity: captured once with small rules, judged as it is and damaged."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recorded import never_sent

from pytest_kvqual._canonical import canonical_bytes
from pytest_kvqual.capture.fidelity import capture_fidelity, cases
from pytest_kvqual.errors import CaptureError
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.faults.recorder import RECORDER_FAULTS
from pytest_kvqual.judge.gates.fidelity import CASES, SEEN_BY, judge, spread
from pytest_kvqual.judge.permit import TimingPermit, grant
from pytest_kvqual.judge.verdict import Outcome, Verdict
from pytest_kvqual.study.model import FidelityRules, GatePlan

# What is captured is judged by its times.
pytestmark = pytest.mark.alone

# The stamp that is planted late is so by 20 ms.
RULES = FidelityRules(
    rate=400.0,
    concurrency=6,
    requests=24,
    tokens=6,
    lateness_p99_ms=19.0,
    ttft_error_p50_ms=10.0,
    ttft_error_p99_ms=19.0,
    tpot_error_p99_ms=5.0,
)
FAULTS = tuple(RECORDER_FAULTS)
Evidence = tuple[dict[str, bytes], dict[str, Any]]


def permit(study: Any) -> TimingPermit:
    """A permit for the trial of a study whose one gate above it stands."""
    scope = Scope(lock="1" * 64, arm="candidate", length=1024, cache_bytes=4096, engine="2" * 64)
    plans = (
        GatePlan(name="identity", state="required", timing=False),
        GatePlan(name="trial", state="required", timing=True),
    )
    evidence = {"b/attempt-1/x.json": "3" * 64}

    receipt: Any = SimpleNamespace(
        name="identity.json",
        gate="identity",
        outcome=Outcome.PASS,
        figure="",
        scope=scope,
        attempt=1,
        sha256="a" * 64,
        implementation="e" * 64,
        evidence=evidence,
        requires={},
    )
    return grant(replace(study, gates=plans), "trial", [receipt], scope, implementation="e" * 64, digests=evidence.get)


@pytest.fixture(scope="module")
def captured(make: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Evidence]:
    """The whole gate's evidence, captured once."""
    study = replace(make.study(), fidelity=RULES)
    folder = tmp_path_factory.mktemp("fidelity")
    done: list[tuple[int, int]] = []
    files = capture_fidelity(
        RULES, permit=permit(study), folder=folder, timeout_s=60, progress=lambda *state: done.append(state)
    )
    names = [case.name for case in cases(RULES)]
    assert done == [(index + 1, len(names)) for index in range(len(names))]
    assert [file.name for file in files] == [
        f"fidelity-{name}{end}" for name in names for end in (".jsonl", "-truth.json")
    ]
    recordings = {name: (folder / f"fidelity-{name}.jsonl").read_bytes() for name in names}
    truths = {name: json.loads((folder / f"fidelity-{name}-truth.json").read_bytes()) for name in names}
    return study, (recordings, truths)


def verdict_of(study: Any, evidence: Evidence) -> Verdict:
    """What the judge says."""
    return judge(study, recordings=evidence[0], truths=evidence[1], faults=FAULTS)


def test_passes(captured: tuple[Any, Evidence]) -> None:
    """The recorder is within the limits, its null passes, and each seeded fault is caught by the rule that must."""
    verdict = verdict_of(*captured)
    assert verdict.outcome is Outcome.PASS, verdict.findings
    assert (verdict.faults_caught, verdict.faults_seeded) == (len(FAULTS), len(FAULTS))
    assert set(verdict.details["cases"]) == set(CASES)  # type: ignore[call-overload]
    assert set(SEEN_BY) == set(FAULTS)


def test_recordings_carry_the_judgment(captured: tuple[Any, Evidence]) -> None:
    """Each recording names the judgment of the permit, its case and the planted fault."""
    study, (recordings, _) = captured
    for name, data in recordings.items():
        header = json.loads(data.splitlines()[0])
        assert header["judgment"] == permit(study).judgment
        assert header["cell"] == name
        assert header["about"]["fault"] == (name.removeprefix("poison-") if name.startswith("poison-") else None)


def damaged(evidence: Evidence, case: str, change: Callable[[list[Any], dict[str, Any]], None]) -> Evidence:
    """The evidence with one case's lines and truth changed."""
    recordings, truths = evidence
    lines = [json.loads(line) for line in recordings[case].splitlines()]
    truth = json.loads(json.dumps(truths[case]))
    change(lines, truth)
    data = b"".join(canonical_bytes(line) + b"\n" for line in lines)
    return {**recordings, case: data}, {**truths, case: truth}


def shifted(line: dict[str, Any], by_ns: int, *, events_from: int = 0) -> None:
    """The line's events, from one on, and its end moved."""
    line["events"] = [
        [at + by_ns if index >= events_from else at, event] for index, (at, event) in enumerate(line["events"])
    ]
    line["end_ns"] += by_ns


def _late_dispatch(lines: list[Any], truth: dict[str, Any]) -> None:
    # Two of 24: p99 by nearest rank is the latest of all.
    record = lines[-2]
    for stamp in ("dispatch_ns", "admission_ns", "connected_ns", "send_start_ns", "send_end_ns"):
        record[stamp] += 19_000_000


def _late_at_server(lines: list[Any], truth: dict[str, Any]) -> None:
    one = truth["requests"][lines[-2]["request"]]
    for stamp in ("arrived_ns", "received_ns", "first_token_ns", "last_token_ns", "end_ns"):
        one[stamp] += 60_000_000


def _early_dispatch(lines: list[Any], truth: dict[str, Any]) -> None:
    lines[5]["dispatch_ns"] = lines[5]["admission_ns"] = lines[5]["intended_ns"] - 1


def _late_tokens(lines: list[Any], truth: dict[str, Any]) -> None:
    shifted(lines[3], 25_000_000)


def _slow_tokens(lines: list[Any], truth: dict[str, Any]) -> None:
    shifted(lines[3], 26_000_000, events_from=5)


def _other_outcome(lines: list[Any], truth: dict[str, Any]) -> None:
    next(iter(truth["requests"].values()))["outcome"] = "timeout"


def _sent_twice(lines: list[Any], truth: dict[str, Any]) -> None:
    next(iter(truth["requests"].values()))["times"] = 2


def _never_sent(lines: list[Any], truth: dict[str, Any]) -> None:
    truth["requests"].pop(lines[3]["request"])


def _fewer_tokens(lines: list[Any], truth: dict[str, Any]) -> None:
    next(iter(truth["requests"].values()))["tokens"] -= 1


def _other_events(lines: list[Any], truth: dict[str, Any]) -> None:
    next(iter(truth["requests"].values()))["per_event"] = [2, 1, 1, 1, 1]


def _other_prompt(lines: list[Any], truth: dict[str, Any]) -> None:
    next(iter(truth["requests"].values()))["prompt_tokens"] += 1


def _more_at_server(lines: list[Any], truth: dict[str, Any]) -> None:
    truth["peak"] += 1


@pytest.mark.parametrize(
    ("case", "change", "rule"),
    [
        ("failures", _sent_twice, 2),
        ("failures", _never_sent, 2),
        ("failures", _other_outcome, 3),
        ("quirks", _other_outcome, 3),
        ("closed", _fewer_tokens, 4),
        ("closed", _other_events, 4),
        ("large-prompt", _other_prompt, 4),
        ("quirks", _late_dispatch, 5),
        ("quirks", _early_dispatch, 5),
        ("quirks", _late_at_server, 6),
        ("closed", _late_tokens, 7),
        ("closed", _slow_tokens, 8),
        ("closed", _more_at_server, 9),
    ],
)
def test_each_rule_objects(captured: tuple[Any, Evidence], case: str, change: Any, rule: int) -> None:
    """Evidence that breaks one rule fails with that rule's line."""
    study, evidence = captured
    verdict = verdict_of(study, damaged(evidence, case, change))
    assert verdict.outcome is Outcome.FAIL
    assert any(line.startswith(f"rule {rule}: case '{case}'") for line in verdict.findings), verdict.findings


def test_a_null_that_differs_is_inconclusive(captured: tuple[Any, Evidence]) -> None:
    """The open load, repeated with another token, concludes nothing."""

    def other_token(lines: list[Any], truth: dict[str, Any]) -> None:
        at, event = lines[1]["events"][0]
        changed = base64.b64decode(event).replace(b'"token_ids":[1000]', b'"token_ids":[1999]')
        lines[1]["events"][0] = [at, base64.b64encode(changed).decode()]

    study, evidence = captured
    verdict = verdict_of(study, damaged(evidence, "open-again", other_token))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "rule 10" in verdict.findings[0]


@pytest.mark.parametrize("limit", ["lateness_p99_ms", "ttft_error_p50_ms", "ttft_error_p99_ms", "tpot_error_p99_ms"])
def test_each_limit_counts(captured: tuple[Any, Evidence], limit: str) -> None:
    """Nothing is below a limit of NaN: the null fails first, so nothing is concluded."""
    study, evidence = captured
    change: dict[str, Any] = {limit: math.nan}
    verdict = verdict_of(replace(study, fidelity=replace(RULES, **change)), evidence)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.null is not None
    assert not verdict.null.passed


@pytest.mark.parametrize("case", ["closed", "quirks", "poison-late-stamp"])
@pytest.mark.parametrize("kind", [0, 1])
def test_missing_evidence(captured: tuple[Any, Evidence], case: str, kind: int) -> None:
    """A case without its recording or its truth is no pass."""
    study, evidence = captured
    kept = [dict(part) for part in evidence]
    del kept[kind][case]
    assert verdict_of(study, (kept[0], kept[1])).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("case", ["closed", "quirks", "poison-late-stamp"])
def test_incomplete_recording(captured: tuple[Any, Evidence], case: str) -> None:
    """A recording without its end is no pass, and a poison whose recording is so was not caught."""
    study, (recordings, truths) = captured
    cut = recordings[case].rstrip(b"\n").rpartition(b"\n")[0] + b"\n"
    assert verdict_of(study, ({**recordings, case: cut}, truths)).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("data", [b"", b"\xff", b"{}\n", b"[1]\n[2]\n[3]\n", b"null\n"])
def test_no_recording_raises(captured: tuple[Any, Evidence], data: bytes) -> None:
    """Bytes that are no recording are a gap, in the gate's own evidence as in a poison."""
    study, (recordings, truths) = captured
    for case in ("open", "failures", "poison-late-stamp"):
        assert verdict_of(study, ({**recordings, case: data}, truths)).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("key", [None, "schema", "peak", "requests"])
@pytest.mark.parametrize(
    "junk", [None, True, -1, pytest.param(10**400, id="huge"), float("nan"), "x", [], {}, {"closed-0000": None}]
)
def test_no_truth_raises(captured: tuple[Any, Evidence], key: str | None, junk: Any) -> None:
    """Whatever stands for the truth, the judge says so and does not pass."""
    study, (recordings, truths) = captured
    changed = junk if key is None else {**truths["closed"], key: junk}
    only = {name: recordings[name] for name in ("closed",)}
    assert judge(study, recordings=only, truths={"closed": changed}).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("junk", [None, True, -1, pytest.param(10**400, id="huge"), float("nan"), "x", [], [0]])
def test_no_truth_of_a_request_raises(captured: tuple[Any, Evidence], junk: Any) -> None:
    """Whatever stands for one value of the truth of a request, the judge does not raise or pass."""
    study, (recordings, truths) = captured
    first = truths["closed"]["requests"]["closed-0000"]
    for key in first:
        requests = {**truths["closed"]["requests"], "closed-0000": {**first, key: junk}}
        found = judge(study, recordings=recordings, truths={"closed": {**truths["closed"], "requests": requests}})
        assert found.outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("case", ["open", "closed", "poison-late-stamp"])
def test_an_interrupted_load_is_judged(captured: tuple[Any, Evidence], case: str) -> None:
    """A request that was never sent has no times, and no rule stumbles over that."""

    def interrupted(lines: list[Any], truth: dict[str, Any]) -> None:
        mine = never_sent(lines[-2]["request"], intended_ns=lines[-2]["intended_ns"])
        if lines[0]["mode"] == "closed":
            mine["intended_ns"] = None
        lines[-2] = {**mine, "prompt": lines[-2]["prompt"], "max_tokens": lines[-2]["max_tokens"]}
        lines[-1]["completed"] -= 1
        lines[-1]["failed"]["cancelled"] = 1
        lines[-1]["end_ns"] = max(line["end_ns"] or 0 for line in lines[1:-1])

    study, evidence = captured
    verdict = verdict_of(study, damaged(evidence, case, interrupted))
    assert all("Error" not in line for line in verdict.findings), verdict.findings
    if not case.startswith("poison"):
        assert f"rule 3: case '{case}'" in "".join(verdict.findings)


def test_other_load(captured: tuple[Any, Evidence]) -> None:
    """Another load than the study's is no pass."""
    study, evidence = captured
    changes: tuple[dict[str, Any], ...] = ({"requests": 25}, {"tokens": 7}, {"concurrency": 7})
    for change in changes:
        other = replace(study, fidelity=replace(RULES, **change))
        assert verdict_of(other, evidence).outcome is not Outcome.PASS


def test_no_rules(captured: tuple[Any, Evidence]) -> None:
    """A study without rules of fidelity concludes nothing."""
    study, evidence = captured
    assert verdict_of(replace(study, fidelity=None), evidence).outcome is Outcome.INCONCLUSIVE


def test_healthy_poison_is_not_caught(captured: tuple[Any, Evidence]) -> None:
    """A poison recording in which nothing is wrong counts as missed."""
    study, (recordings, truths) = captured
    swapped = {**recordings, "poison-late-stamp": recordings["quirks"]}
    verdict = verdict_of(study, (swapped, {**truths, "poison-late-stamp": truths["quirks"]}))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert [poison.fault for poison in verdict.poison if not poison.caught] == ["late-stamp"]


def test_spread() -> None:
    """Percentiles are nearest rank: of 100 values the p99 is the 99th, of 3 the largest; of none they are NaN."""
    hundred = spread([index * 1_000_000 for index in range(1, 101)])
    assert hundred == {"n": 100, "p50": 50.0, "p99": 99.0, "max": 100.0}
    assert spread([3_000_000, 1_000_000, 2_000_000])["p99"] == 3.0
    assert not spread([])["p99"] < 1e9


def test_time_is_bounded(tmp_path: Path, make: Any) -> None:
    """A capture that is past its time stops with the number of cases that it has."""
    with pytest.raises(CaptureError, match="0 of 14 cases within 0 s"):
        capture_fidelity(RULES, permit=permit(make.study()), folder=tmp_path, timeout_s=0)
