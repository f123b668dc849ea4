"""No evidence, however malformed, makes a judge raise or pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvqual.judge.gates import (
    determinism,
    dispatch,
    identity,
    nll,
    parity,
    placement,
    preservation,
    replay,
    routing,
    shifted_outputs,
    stale_maps,
)
from pytest_kvqual.judge.verdict import Outcome, Verdict

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["nan", "0x1p-1", "{}", "schema", "id"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


ORACLE: dict[str, Any] = {
    "stale-maps": stale_maps,
    "routing": routing,
    "shifted-outputs": shifted_outputs,
    "placement": placement,
    "replay": replay,
}
SCORED = ("retrieval", "recall", "gsm8k")
GATES = ("identity", "dispatch", *ORACLE, "determinism", "parity", "nll", *SCORED)


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The path of every value in a document."""
    found = [path]
    if isinstance(value, dict):
        for key, item in value.items():
            found.extend(places(item, (*path, key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found.extend(places(item, (*path, index)))
    return found


def replaced(document: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy with the value at ``path`` replaced."""
    if not path:
        return value
    result = copy.deepcopy(document)
    holder = result
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    return result


def oracle(make: Any, gate: str) -> tuple[Any, Callable[[Any], Verdict]]:
    """Healthy evidence of an oracle gate, and its verdict over one; the control's, so that a waiver is needed."""

    def judge(evidence: Any) -> Verdict:
        verdict: Verdict = ORACLE[gate].judge(
            make.study(),
            make.oracle_panel(),
            arm="native",
            null_arm="native",
            candidate=evidence,
            null=make.oracle("native"),
        )
        return verdict

    return make.oracle("native"), judge


def judge_orders(make: Any, evidence: Any) -> Verdict:
    """The verdict of determinism over the three files of one arm, or over what stands in their place."""
    prompts = make.parity_panel()
    records = make.orders_records(prompts)
    whole = determinism.Evidence(
        records=records, inputs=make.orders_inputs(), comparison=make.comparison("order-invariant", records)
    )
    parts = evidence if isinstance(evidence, dict) else {}
    return determinism.judge(
        make.study(),
        prompts,
        candidate=determinism.Evidence(**{name: parts.get(name) for name in ("records", "inputs", "comparison")}),
        null=whole,
        poison={"f": make.orders_records(prompts, {"rotated": lambda index: [1, 2, 3, 4]})},
    )


def scored(make: Any, gate: str) -> tuple[Any, Callable[[Any], Verdict]]:
    """Healthy evidence of a scored task, eight questions of which one is wrong, and its verdict over one."""
    study = make.study()
    rules = replace(study.preservation[gate], limit=0.5, floor=0.5, poison_questions=8)
    study = replace(study, preservation={gate: rules})
    panel = make.scored_panel(gate, 8)
    healthy = make.scored_records(panel, {1: "wrong"})

    def judge(evidence: Any) -> Verdict:
        return preservation.judge(
            study,
            panel,
            gate=gate,
            questions=8,
            candidate=evidence,
            controls=dict.fromkeys(("native", "reference"), make.scored_records(panel)),
            null=(make.scored_records(panel), make.scored_records(panel)),
            poison={"f": make.scored_records(panel, dict.fromkeys(range(8), "wrong"))},
        )

    return healthy, judge


def judges(make: Any) -> dict[str, tuple[Any, Callable[[Any], Verdict]]]:
    """For each gate its healthy evidence, and its verdict over one."""
    study = make.study()
    poison = [
        {
            "fault": "weights-altered",
            "identity": replaced(
                make.identity(study, "candidate"), ("ranks", 0, "parameters", "now", "norm.weight"), "d" * 64
            ),
        }
    ]
    prompts, documents = make.parity_panel(), make.nll_panel()
    records = make.orders_records(prompts)
    ordered = {
        "records": records,
        "inputs": make.orders_inputs(),
        "comparison": make.comparison("order-invariant", records),
    }
    return {
        "identity": (
            make.identity(study, "candidate"),
            lambda evidence: identity.judge(
                study,
                "candidate",
                cache_bytes=4096,
                scales=make.scales,
                candidate=evidence,
                null=make.identity(study, "native"),
                poison=poison,
            ),
        ),
        "dispatch": (
            make.dispatch(study, "candidate"),
            lambda evidence: dispatch.judge(
                study,
                arm="candidate",
                null_arm="native",
                candidate=evidence,
                null=make.dispatch(study, "native"),
                after=("boot", "oracle"),
            ),
        ),
        **{gate: oracle(make, gate) for gate in ORACLE},
        "determinism": (ordered, lambda evidence: judge_orders(make, evidence)),
        "parity": (
            make.parity_records(prompts, "forward"),
            lambda evidence: parity.judge(
                study,
                prompts,
                http=evidence,
                reference=make.parity_reference(prompts),
                null=(make.parity_records(prompts, "forward"), make.parity_records(prompts, "reverse")),
                poison={"f": [make.record("p0", 0, make.body((1, 2), [1, 2, 3, 4]))]},
            ),
        ),
        "nll": (
            make.nll_records(documents),
            lambda evidence: nll.judge(
                study,
                documents,
                candidate=evidence,
                controls=dict.fromkeys(("native", "reference"), make.nll_records(documents)),
                null=(make.nll_records(documents), make.nll_records(documents)),
                poison={"f": make.nll_records(documents, shift=1.0, documents=2)},
            ),
        ),
        **{gate: scored(make, gate) for gate in SCORED},
    }


@pytest.mark.parametrize("gate", GATES)
@given(data=st.data())
@settings(deadline=None, max_examples=50)
def test_a_replaced_value_never_raises(make: Any, gate: str, data: st.DataObject) -> None:
    """Junk in the place of any one value of healthy evidence gives a verdict; junk for the whole never passes."""
    healthy, judge = judges(make)[gate]
    path = data.draw(st.sampled_from(places(healthy)))
    junk = data.draw(JUNK)
    verdict = judge(replaced(healthy, path, junk))
    assert verdict.gate == gate
    if not path:
        assert verdict.outcome is not Outcome.PASS


@given(junk=JUNK)
@settings(deadline=None, max_examples=40)
def test_junk_in_the_place_of_poison_or_null_never_passes(make: Any, junk: Any) -> None:
    """Junk for the control's document or for a fault's records leaves every gate without a PASS."""
    study, panel, prompts = make.study(), make.oracle_panel(), make.parity_panel()
    arms = {"arm": "candidate", "null_arm": "native"}
    poisoned = {**make.oracle(), "poison": junk}
    for module in ORACLE.values():
        for parts in ((make.oracle(), junk), (poisoned, make.oracle("native"))):
            verdict = module.judge(study, panel, **arms, candidate=parts[0], null=parts[1])
            assert verdict.outcome is Outcome.INCONCLUSIVE
    document, control = make.dispatch(study, "candidate"), make.dispatch(study, "native")
    for candidate, null in ((document, junk), ({**document, "poison": junk}, control)):
        assert dispatch.judge(study, **arms, candidate=candidate, null=null).outcome is Outcome.INCONCLUSIVE
    records = make.orders_records(prompts)
    whole = determinism.Evidence(
        records=records, inputs=make.orders_inputs(), comparison=make.comparison("order-invariant", records)
    )
    verdict = determinism.judge(study, prompts, candidate=whole, null=whole, poison={"f": junk})
    assert verdict.outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("gate", GATES)
def test_a_removed_value_never_passes_unnoticed(make: Any, gate: str) -> None:
    """Removing any one key of healthy evidence that is judged makes the gate no PASS."""
    healthy, judge = judges(make)[gate]
    assert judge(healthy).outcome is Outcome.PASS
    ignored = {"storage_offset", "bound", "samples", "responses", "claimed_by", "fault", "poison", "reproducers"}
    for path in places(healthy):
        if not path or isinstance(path[-1], int) or path[-1] in ignored or "poison" in path:
            continue
        # Another oracle's section, and a condition that the study does not ask for, are not judged here.
        if any(step in ORACLE and step != gate for step in path) or path[-1] == "padding":
            continue
        if gate != "replay" and path[-1] == "fills":
            continue
        holder = healthy
        for step in path[:-1]:
            holder = holder[step]
        damaged = replaced(healthy, path[:-1], {key: value for key, value in holder.items() if key != path[-1]})
        assert judge(damaged).outcome is not Outcome.PASS, path
