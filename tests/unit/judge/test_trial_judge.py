"""The judge of a timed trial: a good one passes, and each rule broken alone is found under that rule."""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import MS, event, never_sent
from trial_records import PARITY, TIMED, Records, expecting, good

from pytest_kvqual._canonical import canonical_bytes
from pytest_kvqual.faults.trial import FAULTS, faults_of
from pytest_kvqual.judge.gates import trial
from pytest_kvqual.judge.verdict import Outcome, Verdict


def rules_of(verdict: Verdict) -> set[int]:
    """The rules in its findings, those of missed faults left out."""
    return {int(found[1]) for line in verdict.findings if (found := re.match(r"(?:null: )?rule (\d+):", line))}


def test_a_good_trial_passes_and_every_fault_is_caught() -> None:
    """No finding, the null passed, no fault missed; the figures are exact."""
    verdict = good().judge()
    assert (verdict.outcome, verdict.findings) == (Outcome.PASS, ())
    assert [it.fault for it in verdict.poison] == list(FAULTS)
    assert all(it.caught for it in verdict.poison)
    assert verdict.null is not None
    assert verdict.null.passed
    cells: Any = verdict.details["cells"]
    assert set(cells) == {"open", "closed"}
    assert cells["open"]["figures"]["tpot_p50"] == f"{10 * MS}/1"
    assert verdict.figure.startswith("block 3, open: 6 of 6 completed, TTFT p50 100.0 ms, TPOT p50 10.0 ms")
    assert canonical_bytes(verdict.details)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_by_its_own_rule(name: str) -> None:
    """The planted trial, judged as if it were the real one, fails under the rule that the fault names."""
    records = good()
    planted = FAULTS[name].plant(records.evidence())
    assert planted is not None
    verdict = trial.judge(
        records.rules, TIMED, PARITY, evidence=planted, expected=records.expected, faults=()
    )  # fmt: skip
    assert FAULTS[name].rule in rules_of(verdict)
    assert verdict.outcome is not Outcome.PASS


def fail(records: Records, cell: str, *places: int) -> None:
    """Requests of a cell that were refused, with totals that fit and a server that saw none of them."""
    document = records.recordings[cell]
    for place in places:
        line = document[1 + place]
        line.update(events=[], status=None, failure={"kind": "refused", "text": "refused"}, send_start_ns=None)
        document[-1]["completed"] -= 1
        document[-1]["failed"]["refused"] = document[-1]["failed"].get("refused", 0) + 1

    def less(values: dict[str, Any]) -> None:
        values["ttft_count"] -= len(places)
        values["ttft_sum_s"] -= len(places) * 0.1
        values["success"]["length"] -= len(places)
        values["generation_tokens"] -= len(places) * 4
        values["prompt_tokens"] -= len(places) * 5

    records.from_on(f"after {cell}", less)


def each(records: Records, cell: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes each request of a cell."""
    for line in records.recordings[cell][1:-1]:
        change(line)


def late(line: dict[str, Any]) -> None:
    """A dispatch 2 ms after the intended arrival: twice what the rules allow of a TTFT of 100 ms."""
    for key in ("dispatch_ns", "admission_ns", "connected_ns", "send_start_ns", "send_end_ns", "headers_ns"):
        line[key] += 2 * MS


def with_error(records: Records) -> None:
    """A completed request with an error among its events."""
    events = records.recordings["open"][1]["events"]
    events.append([events[-1][0], base64.b64encode(event({"error": "x"})).decode()])


def other_token(records: Records) -> None:
    """The canary's second token is another one."""
    line = next(it for it in records.recordings["open"][1:-1] if it["prompt"] == "c0")
    raw = base64.b64decode(line["events"][1][1]).replace(b"41", b"44")
    line["events"][1][1] = base64.b64encode(raw).decode()


def other_prompt_tokens(records: Records) -> None:
    """The server counts one prompt token more of each request than the panel has, in its usage and its counters."""
    for name, document in records.recordings.items():
        for line in document[1:-1]:
            at, raw = line["events"][-2]
            changed = base64.b64decode(raw).replace(b'"prompt_tokens": 5', b'"prompt_tokens": 6')
            line["events"][-2] = [at, base64.b64encode(changed).decode()]
        counter(f"after {name}", "prompt_tokens", len(document) - 2)(records)


def counter(when: str, key: str, more: float) -> Callable[[Records], None]:
    """A counter that moved by so much more in an interval."""
    return lambda it: it.from_on(when, lambda values: values.update({key: values[key] + more}))


def header(cell: str, key: str, value: object) -> Callable[[Records], None]:
    """Another value in a recording's header."""
    return lambda it: it.recordings[cell][0].update({key: value})


def about(key: str, value: object) -> Callable[[Records], None]:
    """Another value in what a recording is about."""
    return lambda it: it.recordings["closed"][0]["about"].update({key: value})


def line(cell: str, place: int, key: str, value: object) -> Callable[[Records], None]:
    """Another value in a request's line."""
    return lambda it: it.recordings[cell][place].update({key: value})


def counters(change: Callable[[dict[str, Any]], object]) -> Callable[[Records], None]:
    """Every reading of the counters changed alike, so that none of them moved."""
    return lambda it: it.from_on("before-warm-up", change)  # type: ignore[arg-type] # what it returns is not looked at


def unlike(key: str) -> Callable[[Records], None]:
    """Another value of the server's identity."""
    return lambda it: it.identity["ranks"][0].update({key: "other"})


BROKEN: dict[str, tuple[int, Callable[[Records], object]]] = {
    "another arm": (1, lambda it: it.trial.update(arm="control")),
    "another length": (1, lambda it: it.trial.update(length=2048)),
    "another block": (1, lambda it: it.trial.update(block=4)),
    "a block of another type": (1, lambda it: it.trial.update(block=3.0)),
    "another plan": (1, lambda it: it.trial.update(plan_sha256="0" * 64)),
    "another judgment": (1, lambda it: it.trial.update(judgment="0" * 64)),
    "exploratory": (1, lambda it: it.trial.update(exploratory=True)),
    "an exploratory recording": (1, header("open", "exploratory", True)),
    "a recording under another permit": (1, header("warm-up", "judgment", "0" * 64)),
    "a recording of another cell": (1, header("open", "cell", "closed")),
    "a recording of another arm": (1, about("arm", "control")),
    "a recording of another block": (1, about("block", 4)),
    "a recording of another plan": (1, about("plan_sha256", "0" * 64)),
    "a tap": (2, lambda it: it.trial["taps"][3]["ranks"][0].update(installed=True)),
    "a fault in place": (2, lambda it: it.trial["taps"][0]["ranks"][0].update(faults=1)),
    "a held block": (2, lambda it: it.trial["taps"][5]["ranks"][0].update(held=1)),
    "a tap of the second rank": (2, lambda it: it.trial["taps"][5]["ranks"].append({"installed": True})),
    "no rank": (2, lambda it: it.trial["taps"][5].update(ranks=[])),
    "a reading of taps left out": (2, lambda it: it.trial["taps"].pop(2)),
    "another trace": (3, header("open", "trace_sha256", "0" * 64)),
    "another concurrency": (3, header("closed", "concurrency", 3)),
    "another arrival": (3, line("open", 2, "intended_ns", 499 * MS)),
    "another prompt": (3, line("closed", 2, "prompt", "m0")),
    "another limit": (3, line("open", 2, "max_tokens", 5)),
    "an error as a success": (3, with_error),
    "sent after its answer": (3, line("open", 1, "send_start_ns", 101 * MS)),
    "connected before its dispatch": (3, line("closed", 2, "connected_ns", -1)),
    "a header after its event": (3, line("open", 1, "headers_ns", 101 * MS)),
    "ended before its last event": (3, line("open", 1, "end_ns", 0)),
    "events that go back": (3, lambda it: it.recordings["warm-up"][1]["events"][1].__setitem__(0, 99 * MS)),
    "no intervals": (3, lambda it: it.trial.pop("intervals")),
    "an interval left out": (3, lambda it: it.trial["intervals"].pop(1)),
    "an interval without an end": (3, lambda it: it.trial["intervals"][1].pop("end_ns")),
    "intervals that overlap": (3, lambda it: it.trial["intervals"][1].update(end_ns=180_000 * MS)),
    "a load before its interval": (3, header("open", "zero_monotonic_ns", 5)),
    "a load after its interval": (3, header("closed", "zero_monotonic_ns", 10**15)),
    "a cell that did not settle": (3, lambda it: setattr(it, "rules", replace(it.rules, settle_s=60.0))),
    "a cell's prompt in the warm-up": (3, lambda it: it.recordings["warm-up"][1].update(prompt="m1")),
    "half of the requests failed": (4, lambda it: fail(it, "open", 0, 1, 5)),
    "a warm-up request failed": (4, lambda it: fail(it, "warm-up", 0)),
    "other kernels": (5, lambda it: it.trial["dispatch"][1].update(ranks=[{"layer": 0, "kernel": "other"}])),
    "kernels read once": (5, lambda it: it.trial["dispatch"].pop()),
    "no kernels qualified": (5, lambda it: expecting(it, kernels=[])),
    **{
        f"other {key}": (6, unlike(key))
        for key in ("layers", "attention_backend", "attention_impl", "pool_bytes", "parameters", "scales", "settings")
    },
    "a rank less": (6, lambda it: it.identity["ranks"].pop()),
    "a foreign request": (7, lambda it: it.from_on("after open", lambda v: v["success"].update(stop=1))),
    "foreign tokens": (7, counter("after warm-up", "generation_tokens", 1)),
    "foreign prompts": (7, counter("after closed", "prompt_tokens", 9)),
    "a preemption": (7, counter("after open", "preemptions", 1)),
    "a warm prefix": (7, counter("after open", "prefix_cache_hits", 16)),
    "a request that runs throughout": (7, counters(lambda values: values.update(running=1))),
    "a request that waits throughout": (7, counters(lambda values: values.update(waiting=2))),
    "no word of what runs": (7, counters(lambda values: values.pop("running"))),
    "counters read once more": (7, lambda it: it.trial["counters"].append(dict(it.trial["counters"][-1]))),
    "another tokenizer": (7, other_prompt_tokens),
    "another answer": (8, other_token),
    "no serial reference": (8, lambda it: expecting(it, reference=[])),
    "late": (9, lambda it: each(it, "open", late)),
    "a server faster than its client": (10, counter("after open", "ttft_sum_s", -0.5)),
    "a server slower than its client": (10, counter("after closed", "ttft_sum_s", 0.5)),
    "other first tokens": (10, counter("after closed", "ttft_count", 1)),
    "traffic while idle": (11, counter("before closed", "prefix_cache_queries", 1)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_broken_alone_is_found_under_that_rule(name: str) -> None:
    """A finding under exactly this rule, and no PASS."""
    rule, break_it = BROKEN[name]
    records = good()
    break_it(records)
    verdict = records.judge(faults=("trial-of-another-plan",))
    assert rules_of(verdict) == {rule}
    assert verdict.outcome is not Outcome.PASS


@pytest.mark.parametrize(
    ("failed", "share", "offered", "found"),
    [(29, 0.29, 100, False), (30, 0.29, 100, True), (0, 0.0, 7, False), (1, 0.0, 7, True), (57, 0.57, 100, False),
     (7, 0.07, 100, False), (8, 0.07, 100, True), (5, 1.0, 5, False)],
)  # fmt: skip
def test_a_share_is_the_decimal_that_it_prints_as(failed: int, share: float, offered: int, found: bool) -> None:
    """29 of 100 requests are 0.29 of them, though 0.29 * 100 is less than 29 in float64."""
    assert trial.too_many(failed, share, offered) is found


def test_failures_within_the_share_pass() -> None:
    """Two of six may fail, and are in the figures."""
    records = good()
    fail(records, "open", 0, 1)
    verdict = records.judge()
    assert (verdict.outcome, verdict.findings) == (Outcome.PASS, ())
    cells: Any = verdict.details["cells"]
    assert cells["open"]["failed"] == {"refused": 2}
    assert cells["open"]["figures"]["ttft_intended_p90"] == "inf"


def test_a_warm_plan_may_find_prefixes() -> None:
    """Only a cold plan forbids them; of the seeded faults, that of a warm prefix is then none."""
    records = good()
    records.rules = replace(records.rules, cold=False)
    counter("after open", "prefix_cache_hits", 16)(records)
    verdict = records.judge(faults=faults_of(cold=False))
    assert (verdict.outcome, verdict.findings) == (Outcome.PASS, ())
    assert set(faults_of(cold=True)) - set(faults_of(cold=False)) == {"warm-prefix"}
    assert faults_of(cold=True) == tuple(FAULTS)


def test_a_difference_at_the_limit_is_not_above_it() -> None:
    """The server's mean is 150 ms, the client's 100 ms and the limit 50 ms; in float64 they are further apart."""
    records = good()
    counter("after open", "ttft_sum_s", 0.3)(records)
    before, after = (records.values(when)["ttft_sum_s"] for when in ("before open", "after open"))
    assert abs((after - before) * 1e3 / 6 - 100) > 50
    verdict = records.judge()
    assert (verdict.outcome, verdict.findings) == (Outcome.PASS, ())


@pytest.mark.parametrize("value", [[], {}, [[1]], None])
def test_addresses_of_any_kind_are_compared_by_which_layers_share_one(value: object) -> None:
    """Another process has other addresses; what they are made of does not matter."""
    records = good()
    shared = {"name": "a", "storage_id": 5}
    expecting(records, identity=[{**records.identity["ranks"][0], "layers": [shared, shared]}])
    records.identity["ranks"][0]["layers"] = [{"name": "a", "storage_id": value}] * 2
    assert records.judge().outcome is Outcome.PASS
    records.identity["ranks"][0]["layers"] = [{"name": "a", "storage_id": it} for it in (value, 6)]
    assert rules_of(records.judge()) == {6}


@pytest.mark.parametrize("faults", [(), ("no-such-fault",)])
def test_without_a_caught_fault_nothing_passes(faults: tuple[str, ...]) -> None:
    """No fault, or an unknown one: the instrument may be blind."""
    assert good().judge(faults=faults).outcome is Outcome.INCONCLUSIVE


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


GOOD = good()
WHOLE: dict[str, Any] = {"trial": GOOD.trial, "identity": GOOD.identity, "open": GOOD.recordings["open"]}
JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 1.5, float("nan"), float("inf"), 10**400, 2**70, "", "x", [], {}, [[]], [{}], {"a": 1}, [None]]
)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([place for place in places(WHOLE) if len(place) > 1]), JUNK, st.booleans())
def test_malformed_evidence_never_raises(place: tuple[Any, ...], junk: Any, remove: bool) -> None:
    """NaN, another type or a missing part anywhere is a verdict, and its faults are judged too."""
    whole = copy.deepcopy(WHOLE)
    holder: Any = whole
    for step in place[:-1]:
        holder = holder[step]
    if remove:
        del holder[place[-1]]
    else:
        holder[place[-1]] = junk
    data = b"".join(json.dumps(it, sort_keys=True, separators=(",", ":")).encode() + b"\n" for it in whole["open"])
    evidence = GOOD.evidence()
    evidence = trial.Evidence(
        trial=whole["trial"], identity=whole["identity"], recordings={**evidence.recordings, "open": data}
    )
    verdict = trial.judge(
        GOOD.rules, TIMED, PARITY, evidence=evidence, expected=GOOD.expected, faults=tuple(FAULTS)
    )  # fmt: skip
    assert isinstance(verdict, Verdict)


@pytest.mark.parametrize("missing", ["open", "closed", "warm-up"])
@pytest.mark.parametrize("data", [None, b"", b"[]\n"])
def test_a_recording_that_is_missing_or_broken_is_a_gap(missing: str, data: bytes | None) -> None:
    """No recording, no verdict."""
    records = good()
    evidence = records.evidence()
    recordings = {name: it for name, it in evidence.recordings.items() if name != missing}
    if data is not None:
        recordings[missing] = data
    damaged = trial.Evidence(trial=records.trial, identity=records.identity, recordings=recordings)
    verdict = trial.judge(
        records.rules, TIMED, PARITY, evidence=damaged, expected=records.expected, faults=tuple(FAULTS)
    )  # fmt: skip
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert 3 in rules_of(verdict)


@pytest.mark.parametrize("cell", ["open", "closed", "warm-up"])
def test_a_load_that_was_interrupted_is_judged(cell: str) -> None:
    """Its last request was never sent: a failure without times, at which neither a rule nor a fault stumbles."""
    records = good()
    document = records.recordings[cell]
    last = document[-2]
    never = never_sent(last["request"], intended_ns=last["intended_ns"] if cell == "open" else None)
    document[-2] = {**never, **{key: last[key] for key in ("prompt", "max_tokens", "body_sha256")}}
    document[-1]["completed"] -= 1
    document[-1]["failed"]["cancelled"] = 1
    document[-1]["end_ns"] = max(line["end_ns"] for line in document[1:-2])
    verdict = records.judge()
    assert verdict.outcome is not Outcome.PASS
    assert not any("rule 3" in line for line in verdict.findings), verdict.findings
    assert all("Error" not in line for line in verdict.findings), verdict.findings
