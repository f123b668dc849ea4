"""Faults planted one after the other in a served arm, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvqual.errors import CaptureError, ServerError
from pytest_kvqual.faults import FAULTS, Fault
from pytest_kvqual.faults.catalogue import GATES, LIVE_PASSES
from pytest_kvqual.faults.served import Planted, Served, hidden, objections, shown
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Selection

SECTIONS = ("row_map", "stale-maps", "routing", "shifted-outputs", "placement", "replay")


def selected(arm: str) -> Selection:
    """An arm of the embedded study."""
    return select(load_study("smollm2-cpu"), arm=arm, length=1024, cache_bytes=None)


def record(**found: dict[str, int]) -> dict[str, Any]:
    """A rank's record in which each named section has findings of these kinds; the others have none."""
    sections: dict[str, Any] = {}
    for name in SECTIONS:
        kinds = found.get(name.replace("-", "_"), {})
        lines = [f"{kind} {number}" for kind, count in kinds.items() for number in range(count)]
        sections[name] = {"findings": lines[:40], "findings_total": len(lines), "kinds": kinds, "self_test": "caught"}
    return {"rank": 0, **sections}


# -- which faults, which passes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_every_live_pass_is_known(fault: Fault) -> None:
    """A fault names a pass that there is, and one other than the default only where an oracle reads it live."""
    assert fault.live_pass in LIVE_PASSES
    if fault.live_pass != "probe":
        assert "live" in fault.where
        assert fault.claimed_by in ("stale-maps", "routing", "shifted-outputs", "placement")


@pytest.mark.parametrize(
    ("arm", "needs"), [("native", {""}), ("reference", {"", "ours"}), ("candidate", {"", "ours", "scales"})]
)
def test_an_arm_is_planted_with_what_it_can_show(arm: str, needs: set[str]) -> None:
    """Scales are altered where an arm declares them, and lengths where its backend takes any."""
    known = {fault.name for fault in FAULTS.values() if "live" in fault.where and fault.needs in needs}
    hiding = {"tail-of-v-times-zero", "page-behind-block-multiple-times-zero"} if arm == "native" else set()
    assert {fault.name for fault in shown(selected(arm))} == known - hiding


@pytest.mark.parametrize("arm", ["native", "reference", "candidate"])
def test_every_gate_is_shown_a_fault(arm: str) -> None:
    """In each arm some fault can be shown to each gate that claims faults, and some benign one."""
    faults = shown(selected(arm))
    assert {fault.claimed_by for fault in faults if not fault.benign} == set(GATES)
    assert any(fault.benign for fault in faults)


def test_what_an_arm_cannot_show_has_a_reason() -> None:
    """A fault that is left out says what the arm lacks, or what hides it."""
    native = selected("native")
    assert hidden(FAULTS["scale-copy-altered"], native) == "it needs scales"
    assert hidden(FAULTS["stale-lengths"], native) == "it needs ours"
    assert hidden(FAULTS["tail-of-v-times-zero"], native) == "its one finding, nan-fill, is waived for the arm"
    assert hidden(FAULTS["tail-of-v-times-zero"], selected("candidate")) is None


def test_a_fault_of_rotation_is_left_out_where_rotation_may_differ() -> None:
    """A policy that only reports a rotated order cannot show a fault that shows in one alone."""
    selection = selected("candidate")
    lenient = replace(selection, study=replace(selection.study, determinism="rotation-diagnostic"))
    names = {fault.name for fault in shown(lenient)}
    assert "output-depends-on-batch-index" not in names
    assert "output-depends-on-step-number" in names


# -- what a record says -----------------------------------------------------------------------------------------------


def test_a_silent_record_has_no_objection() -> None:
    """No section has a finding."""
    assert list(objections(record(), {})) == []


def test_the_row_map_speaks_for_the_first_oracle_gate() -> None:
    """A wrong row map is an objection of stale-maps, and one gate objects once."""
    found = dict(objections(record(row_map={"wrong-row": 1}, stale_maps={"stale-table": 2}, routing={"cell": 1}), {}))
    assert found == {"stale-maps": "wrong-row 0", "routing": "cell 0"}


def test_waived_kinds_do_not_count() -> None:
    """A finding of a waived kind is silence, and one of another kind beside it is an objection with its count."""
    waived = {"replay": ("nan-fill",)}
    assert list(objections(record(replay={"nan-fill": 3}), waived)) == []
    assert list(objections(record(replay={"nan-fill": 3, "large-fill": 2}), waived)) == [("replay", "2 large-fill")]
    assert list(objections(record(replay={"nan-fill": 3}), {})) == [("replay", "nan-fill 0")]


def test_a_count_without_a_kind_is_an_objection() -> None:
    """A total that the kinds do not add up to is not taken for silence."""
    odd = record()
    odd["routing"]["findings_total"] = 1
    odd["routing"]["findings"] = ["a cell"]
    assert [gate for gate, _ in objections(odd, {})] == ["routing"]


@pytest.mark.parametrize(("section", "gate"), [("row_map", "stale-maps"), ("shifted-outputs", "shifted-outputs")])
def test_a_blind_oracle_is_not_silent(section: str, gate: str) -> None:
    """An oracle that missed what it was shown on purpose is an objection."""
    blind = record()
    blind[section]["self_test"] = "missed"
    assert [name for name, _ in objections(blind, {})] == [gate]


# -- what counts as caught --------------------------------------------------------------------------------------------


def test_only_the_claiming_gate_first_is_right() -> None:
    """Another gate before it, silence, or an engine in trouble is no catch."""
    fault = FAULTS["slot-off-by-one"]
    caught = Planted(fault=fault, findings={"routing": "a cell"}, seconds=1.0)
    assert caught.right
    assert not replace(caught, findings={"stale-maps": "a table", "routing": "a cell"}).right
    assert not replace(caught, findings={}).right
    dead = replace(caught, trouble="the engine failed under it: signal 11")
    assert not dead.right
    assert str(dead) == (
        "slot-off-by-one: expected routing first, found routing: a cell; the engine failed under it: signal 11"
    )


def test_silence_is_right_for_a_benign_fault_and_for_none() -> None:
    """What is no fault must be met with silence."""
    for fault in (FAULTS["heads-in-another-order"], None):
        assert Planted(fault=fault, findings={}, seconds=1.0).right
        assert not Planted(fault=fault, findings={"placement": "a row"}, seconds=1.0).right


# -- one after the other ----------------------------------------------------------------------------------------------


class Engine:
    """A served arm's worker, pass and answers: one fault is seen, one kills it, one cannot be taken back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
        self.log = log
        self.log.write_text("OSError: an old one\n")
        self.alive = True
        self.spoilt = False
        self.passes: list[tuple[str, str | None, bool]] = []
        monkeypatch.setattr("pytest_kvqual.server.rpc.call", self.call)

    def boot(self) -> Any:
        self.alive, self.spoilt = True, False
        return SimpleNamespace(base_url="", log=self.log, check=self.check, stop=lambda: None)

    def check(self) -> None:
        if not self.alive:
            raise ServerError("found the server ended with signal 11")

    def call(self, url: str, method: str, *args: object, timeout_s: float) -> list[object]:
        self.check()
        return [{"installed": False, "faults": 0, "held": 0}] if method == "kvqual_taps" else [{}]

    def answered(self) -> tuple[int, ...]:
        self.check()
        return (1, 2) if self.spoilt else (1, 1)

    def run(self, name: str, *, fault: str | None = None, fills: bool = False) -> Iterator[tuple[str, str]]:
        self.passes.append((name, fault, fills))
        if fault == "slot-off-by-one":
            yield "placement", "a row"
            yield "routing", "a cell"
        if fault == "key-value-swapped":
            self.alive = False
            with self.log.open("a") as log:
                log.write("ERROR RuntimeError: expected Int\nERROR EngineDeadError: gone\n")
            raise CaptureError("found 1 of 1 requests failed")
        if fault == "other-layer-cache":
            self.spoilt = True
            yield "placement", "a row"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    """The engine that the arm of the next fixture runs."""
    return Engine(monkeypatch, tmp_path / "server.log")


@pytest.fixture
def arm(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    """A served arm on that engine."""
    with Served(selected("candidate"), model=tmp_path, folder=tmp_path, progress=lambda line: None) as served_arm:
        monkeypatch.setattr(served_arm, "_boot", engine.boot)
        monkeypatch.setattr(served_arm, "_answered", engine.answered)
        monkeypatch.setattr(served_arm, "_pass", engine.run)
        yield served_arm


def test_a_fault_is_read_in_its_pass_and_gates_are_in_order(arm: Served, engine: Engine) -> None:
    """The pass is the fault's own, with fills for replay alone; findings come in the order of the gates."""
    found = arm.plant(FAULTS["slot-off-by-one"])
    assert list(found.findings) == ["routing", "placement"]
    assert found.right
    arm.plant(FAULTS["chunk-sees-only-itself"])
    arm.plant(FAULTS["tail-of-v-times-zero"])
    assert engine.passes == [
        ("probe", "slot-off-by-one", False),
        ("whole", "chunk-sees-only-itself", False),
        ("probe", "tail-of-v-times-zero", True),
    ]
    assert arm.boots == 1


def test_an_engine_that_dies_is_reported_and_booted_again(arm: Served) -> None:
    """A fault that kills the engine is no catch and says how it ended; the next fault has a new server."""
    dead = arm.plant(FAULTS["key-value-swapped"])
    assert dead.trouble == (
        "the engine failed under it: found the server ended with signal 11; it logged RuntimeError: expected Int"
    )
    assert not dead.right
    assert arm.plant(FAULTS["slot-off-by-one"]).right
    assert arm.boots == 2


def test_a_fault_that_stays_is_reported_and_does_not_reach_the_next(arm: Served) -> None:
    """Where the arm answers otherwise after a fault, it is no catch and the server is another one afterwards."""
    spoilt = arm.plant(FAULTS["other-layer-cache"])
    assert spoilt.trouble == "found the answer (1, 2) after it was taken back, expected (1, 1) as before"
    assert not spoilt.right
    assert arm.plant(FAULTS["slot-off-by-one"]).right
    assert arm.boots == 2
