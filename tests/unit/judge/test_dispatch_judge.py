"""The dispatch judge: each numbered rule, its null and its poison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_kvqual.judge.gates import dispatch
from pytest_kvqual.judge.verdict import Outcome, Verdict

FAULT = "falls-back"
LAYER = "model.layers.2.self_attn.attn"
FIRST = ("readings", 0, "ranks", 0, "layers", LAYER)
LATER = ("readings", 1, "ranks", 0, "layers", LAYER)


def decide(make: Any, **changes: Any) -> Verdict:
    """The verdict over evidence in order but for ``changes``."""
    study = changes.pop("study", make.study())
    evidence = {
        "arm": "candidate",
        "null_arm": "native",
        "candidate": make.dispatch(study, "candidate"),
        "null": make.dispatch(study, "native"),
        "faults": (FAULT,),
        "after": ("boot", "oracle"),
        **changes,
    }
    return dispatch.judge(study, **evidence)


def damaged(make: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A dispatch document in order but for one value."""
    return make.damage(make.dispatch(make.study(), "candidate"), path, value)


def everywhere(make: Any, key: str, value: Any) -> Any:
    """A dispatch document in which one layer's value is another in every reading."""
    return make.damage(damaged(make, (*FIRST, key), value), (*LATER, key), value)


def test_passes_what_is_in_order(make: Any) -> None:
    """Every layer as declared in every reading passes; the details say what ran."""
    verdict = decide(make)
    assert (verdict.outcome, verdict.findings, verdict.gate) == (Outcome.PASS, (), "dispatch")
    assert verdict.figure == "6 layers read as declared, after boot, oracle"
    assert verdict.details["kernels"] == ["paged_attention", "write_cache"]
    assert (verdict.details["layers"], verdict.details["readings"]) == ([3], ["boot", "oracle"])


def test_a_control_under_qualification_is_judged_by_its_own_declaration(make: Any) -> None:
    """The arm's name chooses the declaration, for the arm and for the null."""
    native = make.dispatch(make.study(), "native")
    assert decide(make, arm="native", candidate=native).outcome is Outcome.PASS
    assert decide(make, arm="reference", candidate=native).outcome is Outcome.INCONCLUSIVE
    assert decide(make, null_arm="reference").outcome is Outcome.INCONCLUSIVE


BROKEN = {
    "another backend": ("backend", "FLASH_ATTN", 3, "found the backend 'FLASH_ATTN', expected 'KVQUAL_K16V8'"),
    "another dtype": ("cache_dtype", "torch.bfloat16", 4, "found the cache dtype torch.bfloat16, expected torch.uint8"),
    "a kernel missing": (
        "kernels",
        ["paged_attention"],
        5,
        "found no kernel '*cache*' among paged_attention, expected",
    ),
    "a kernel that must not run": (
        "kernels",
        ["flash_attention", "paged_attention", "write_cache"],
        5,
        "found the kernel 'flash_attention', expected none of '*flash*'",
    ),
}


@pytest.mark.parametrize(("key", "value", "rule", "text"), BROKEN.values(), ids=BROKEN)
def test_fails_a_layer_that_runs_something_else(make: Any, key: str, value: Any, rule: int, text: str) -> None:
    """One layer of one rank that runs something else fails the arm, with the layer and both sides."""
    verdict = decide(make, candidate=everywhere(make, key, value))
    assert verdict.outcome is Outcome.FAIL
    line = f"rule {rule}: dispatch, after boot, rank 0, layer '{LAYER}': {text}"
    assert any(found.startswith(line) for found in verdict.findings), verdict.findings
    null = make.damage(make.dispatch(make.study(), "native"), (*FIRST, key), value if rule != 4 else "torch.uint8")
    verdict = decide(make, null=null)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert all(found.startswith("null: ") for found in verdict.findings), verdict.findings


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        (
            "kernels",
            ["other_attention", "write_cache"],
            "found kernels other_attention, write_cache, expected paged_attention, write_cache as at first",
        ),
    ],
)
def test_fails_a_later_reading_that_differs(make: Any, key: str, value: Any, text: str) -> None:
    """What the declaration allows must still be what ran at first."""
    verdict = decide(make, candidate=damaged(make, (*LATER, key), value))
    assert verdict.outcome is Outcome.FAIL
    assert verdict.findings == (f"rule 6: dispatch, after oracle, rank 0, layer '{LAYER}': {text}",)


@pytest.mark.parametrize("reading", ["first", "later"])
def test_fails_one_layer_of_another_implementation(make: Any, reading: str) -> None:
    """Every layer is of one implementation, from the first reading on."""
    path = LATER if reading == "later" else (LATER[0], 0, *LATER[2:])
    verdict = decide(make, candidate=damaged(make, (*path, "impl"), "OtherImpl"))
    assert verdict.outcome is Outcome.FAIL
    assert "found the implementation OtherImpl, expected PagedImpl, as in the first layer" in verdict.findings[0]


def test_fails_layers_under_other_names(make: Any) -> None:
    """As many layers under another name are not the layers that were read at first."""
    document = damaged(make, LATER[:-1], lambda layers: {name + "x": layer for name, layer in layers.items()})
    verdict = decide(make, candidate=document)
    assert verdict.outcome is Outcome.FAIL
    assert "found the layer 'model.layers.0.self_attn.attnx', which was not there at first" in verdict.findings[0]


GAPS: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "another schema": (("schema",), 2, "schema"),
    "another arm": (("arm",), "native", "found 'native', expected 'candidate'"),
    "an unknown key": (("more",), 1, "more"),
    "no reading": (("readings",), [], "no reading"),
    "one reading of two": (("readings",), lambda readings: readings[:1], "no reading after oracle, expected one"),
    "a moment twice": (("readings", 1, "after"), "boot", "found 'boot' a second time"),
    "no reading after boot": (("readings", 0, "after"), "nll", "found 'nll' first, expected 'boot'"),
    "no rank": (("readings", 1, "ranks"), [], "no rank"),
    "a rank too many": (
        ("readings", 1, "ranks"),
        lambda ranks: [*ranks, {**ranks[0], "rank": 1}],
        "found 2 ranks, expected 1",
    ),
    "a rank out of order": (("readings", 1, "ranks", 0, "rank"), 1, "rank"),
    "no layers": (("readings", 1, "ranks", 0, "layers"), {}, "found 0 layers, expected 3"),
    "a layer missing": (LATER, "DELETE", "found 2 layers, expected 3"),
    "no kernel": ((*LATER, "kernels"), [], "no kernel was seen, expected at least one"),
    "no list of kernels": ((*LATER, "kernels"), "paged_attention", "kernels"),
    "an implementation without a name": ((*LATER, "impl"), "", "impl"),
    "a dtype without a name": ((*LATER, "cache_dtype"), "", "cache_dtype"),
    "no backend": ((*LATER, "backend"), None, "backend"),
}


@pytest.mark.parametrize(("path", "value", "text"), GAPS.values(), ids=GAPS)
def test_is_inconclusive_when_evidence_is_incomplete(
    make: Any, path: tuple[str | int, ...], value: Any, text: str
) -> None:
    """Missing or malformed evidence concludes nothing, and the finding names the place."""
    verdict = decide(make, candidate=damaged(make, path, make.delete if value == "DELETE" else value))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any(text in line for line in verdict.findings), verdict.findings


@pytest.mark.parametrize("value", [None, {}, [], {"schema": 1}])
def test_is_inconclusive_without_a_document(make: Any, value: Any) -> None:
    """No document, or an empty one, concludes nothing; neither does a control's."""
    assert decide(make, candidate=value).outcome is Outcome.INCONCLUSIVE
    verdict = decide(make, null=value)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert (verdict.null is None) == (value is None)


def test_an_arm_without_declared_kernels_concludes_nothing(make: Any) -> None:
    """A gate that was told no kernel cannot see a fallback; an arm that the study lacks has no declaration either."""
    study = make.study()
    study = replace(study, arms={**study.arms, "candidate": replace(study.arms["candidate"], kernels=())})
    verdict = decide(make, study=study)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any("declares no kernels for 'candidate', expected at least one pattern" in f for f in verdict.findings)
    assert decide(make, arm="another").outcome is Outcome.INCONCLUSIVE


def test_a_dtype_that_the_study_does_not_declare_is_not_judged(make: Any) -> None:
    """Without a declared dtype any will do, as long as every reading names the same."""
    study = make.study()
    study = replace(study, arms={**study.arms, "candidate": replace(study.arms["candidate"], cache_dtype=None)})
    document = everywhere(make, "cache_dtype", "torch.float16")
    assert decide(make, study=study, candidate=document).outcome is Outcome.PASS
    assert decide(make, study=study, candidate=make.damage(document, (*LATER, "cache_dtype"), "torch.int8")).findings


def test_every_rank_is_judged(make: Any) -> None:
    """With two ranks, the second one's layers count too."""
    study = make.study()
    study = replace(study, engine=replace(study.engine, tensor_parallel_size=2))
    assert decide(make, study=study).outcome is Outcome.PASS
    document = make.damage(
        make.dispatch(study, "candidate"), ("readings", 1, "ranks", 1, "layers", LAYER, "backend"), "FLASH_ATTN"
    )
    verdict = decide(make, study=study, candidate=document)
    assert verdict.outcome is Outcome.FAIL
    assert "after oracle, rank 1, layer" in verdict.findings[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda entry: {"fault": entry["fault"]}, "ranks"),
        (lambda entry: {**entry, "ranks": []}, "no rank"),
        (lambda entry: {**entry, "ranks": [5]}, "a table"),
        (lambda entry: {**entry, "ranks": [{"rank": 0, "layers": {}}]}, "found 0 layers"),
        (lambda entry: {**entry, "fault": ""}, "fault"),
        (lambda entry: 5, "a table"),
    ],
)
def test_poison_that_cannot_be_read_is_a_miss(make: Any, change: Any, text: str) -> None:
    """A fault without a readable reading was not caught."""
    verdict = decide(make, candidate=damaged(make, ("poison", 0), change))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any(text in fault.figure for fault in verdict.poison if not fault.caught), verdict.poison


def test_a_missed_fault_is_inconclusive(make: Any) -> None:
    """A fault under which everything ran as declared, or that was not run, was not caught."""
    document = make.dispatch(make.study(), "candidate")
    document["poison"][0]["ranks"] = make.dispatch(make.study(), "candidate")["readings"][0]["ranks"]
    verdict = decide(make, candidate=document)
    assert verdict.findings == (
        f"poison: '{FAULT}' was not caught: found no objection, expected one under rules 3 to 6",
    )
    unseen = make.damage(document, ("poison", 0, "ranks", 0, "layers", LAYER, "kernels"), [])
    verdict = decide(make, candidate=unseen)
    assert (verdict.outcome, verdict.poison[0].caught) == (Outcome.INCONCLUSIVE, False)
    verdict = decide(make, candidate=damaged(make, ("poison",), []))
    assert verdict.findings == (f"poison: '{FAULT}' was not caught: it was not run",)
    verdict = decide(make, candidate=damaged(make, ("poison",), None), faults=())
    assert verdict.findings == ("poison: no seeded fault was run against this gate",)


def test_a_change_of_the_implementation_is_a_catch(make: Any) -> None:
    """A fault that the declaration allows is caught by what ran at first."""
    document = damaged(
        make,
        ("poison", 0, "ranks", 0, "layers", "model.layers.1.self_attn.attn", "kernels"),
        ["an_attention", "write_cache"],
    )
    verdict = decide(make, candidate=document)
    assert verdict.outcome is Outcome.PASS
    assert "as at first" in verdict.poison[0].figure
