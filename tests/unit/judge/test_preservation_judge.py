"""The judge of retrieval, recall and gsm8k: each numbered rule, its null, its poison, and the laws of its bound."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_kvqual.judge.gates import preservation
from pytest_kvqual.judge.verdict import Outcome, Verdict
from pytest_kvqual.stats.bounds import preservation_lower, preservation_upper

FAULT = "v-scale-dropped-on-read"
ALL_WRONG = dict.fromkeys(range(16), "wrong")
Kinds = Mapping[int, str]


def with_rules(study: Any, gate: str, **changes: Any) -> Any:
    """The study with other rules of one gate."""
    return replace(study, preservation={**study.preservation, gate: replace(study.preservation[gate], **changes)})


def decide(make: Any, gate: str = "retrieval", count: int = 100, kinds: Kinds | None = None, **changes: Any) -> Verdict:
    """The verdict over evidence in order but for ``changes``; ``kinds`` says what became of the candidate's answers."""
    panel = changes.pop("panel", make.scored_panel(gate, count))
    study = changes.pop("study", make.study())
    right = make.scored_records(panel)
    evidence: dict[str, Any] = {
        "gate": gate,
        "questions": count,
        "candidate": make.scored_records(panel, kinds),
        "controls": {"native": right, "reference": right},
        "null": (right, right),
        "poison": {FAULT: make.scored_records(panel, ALL_WRONG)[:16]},
        "faults": (FAULT,),
        **changes,
    }
    return preservation.judge(study, panel, **evidence)


def wrong(count: int, start: int = 0) -> dict[int, str]:
    """So many wrong answers, from one question on."""
    return dict.fromkeys(range(start, start + count), "wrong")


def details(verdict: Verdict, key: str) -> Any:
    """One entry of the details."""
    return verdict.details[key]


def altered(records: list[dict[str, Any]], place: int, change: Any) -> list[dict[str, Any]]:
    """The records with the one at ``place`` changed in its body."""
    body = json.loads(records[place]["body"])
    change(body)
    return [{**record, "body": json.dumps(body)} if at == place else record for at, record in enumerate(records)]


# -- the bound -------------------------------------------------------------------------------------------------------


def test_one_lost_and_one_gained_of_a_hundred_passes(make: Any) -> None:
    """91 of 100 on both sides, one lost and one gained: 4.656 % is below 5 %, and the figure says it in these words."""
    panel = make.scored_panel("retrieval", 100)
    control = make.scored_records(panel, wrong(9))
    verdict = decide(
        make,
        kinds=wrong(9, 1),
        controls={"native": control, "reference": control},
        null=(control, control),
        # The first nine questions show no loss: the control has them wrong.
        study=with_rules(make.study(), "retrieval", poison_questions=40),
        poison={FAULT: make.scored_records(panel, wrong(40))[:40]},
    )
    assert (verdict.outcome, verdict.findings) == (Outcome.PASS, ())
    assert verdict.figure == (
        "lost 1, gained 1 of 100 against 'native': 95 % upper bound 4.656 % < 5 % (1 lost would pass); "
        "net +0.000 points [-3.000, +3.000]"
    )
    assert details(verdict, "pairs")["reference"] == {
        "lost": ["q9"],
        "gained": ["q0"],
        "upper": preservation_upper(1, 100, 0.95),
        "net": 0,
        "net_lower": -3,
        "net_upper": 3,
        "tokens_differ": 2,
    }
    assert details(verdict, "answers")["native"] == {
        "right": 91, "wrong": 9, "empty": 0, "truncated": 0, "error": 0, "lenient": 91
    }  # fmt: skip
    grades = details(verdict, "by_grade")
    assert grades["candidate"] == {"even": [46, 50], "odd": [45, 50]}
    assert grades["native"] == grades["reference"] == {"even": [45, 50], "odd": [46, 50]}
    assert {key: details(verdict, key) for key in ("questions", "limit", "confidence", "floor", "most_lost")} == {
        "questions": 100, "limit": 0.05, "confidence": 0.95, "floor": 0.6, "most_lost": 1
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lost", "gained", "upper", "net"),
    [(20, 17, "2.196", "-0.227 points [-1.137, +0.682]"), (22, 15, "2.373", "-0.531 points [-1.440, +0.379]")],
)
def test_the_published_counts_fail(make: Any, lost: int, gained: int, upper: str, net: str) -> None:
    """The two published comparisons of 1,319 questions fail at 2 %, whatever was gained."""
    panel = make.scored_panel("gsm8k", 1319)
    control = make.scored_records(panel, wrong(gained, 100))
    verdict = decide(
        make, "gsm8k", 1319, wrong(lost, 200), controls={"native": control, "reference": make.scored_records(panel)}
    )
    assert verdict.outcome is Outcome.FAIL
    assert verdict.findings[0] == verdict.figure
    assert verdict.figure == (
        f"rule 6: lost {lost}, gained {gained} of 1319 against 'native': 95 % upper bound {upper} %, "
        f"expected below 2 % (17 lost would pass); net {net}"
    )
    assert len(details(verdict, "pairs")["native"]["lost"]) == lost
    assert len(details(verdict, "pairs")["native"]["gained"]) == gained


@pytest.mark.parametrize(("lost", "outcome"), [(17, Outcome.PASS), (18, Outcome.FAIL)])
def test_seventeen_of_1319_pass_and_eighteen_do_not(make: Any, lost: int, outcome: Outcome) -> None:
    """At 2 % of 1,319 questions 17 losses are the most that pass."""
    verdict = decide(make, "gsm8k", 1319, wrong(lost))
    assert verdict.outcome is outcome
    assert details(verdict, "most_lost") == 17


def test_a_bound_at_the_limit_fails(make: Any) -> None:
    """The bound must be below the limit: a limit of exactly the bound fails, and the next larger number passes."""
    upper = preservation_upper(1, 100, 0.95)
    kinds = {3: "wrong"}
    assert decide(make, kinds=kinds, study=with_rules(make.study(), "retrieval", limit=upper)).outcome is Outcome.FAIL
    above = with_rules(make.study(), "retrieval", limit=upper + 2**-40)
    assert decide(make, kinds=kinds, study=above).outcome is Outcome.PASS


def test_a_design_that_cannot_pass_says_so(make: Any) -> None:
    """Ten questions exclude no loss probability of 5 %: INCONCLUSIVE with nothing lost, and the findings say why."""
    study = with_rules(make.study(), "retrieval", poison_questions=10)
    panel = make.scored_panel("retrieval", 10)
    verdict = decide(make, count=10, study=study, poison={FAULT: make.scored_records(panel, wrong(10))})
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.figure == (
        "null: rule 7: lost 0, gained 0 of 10 against itself: 95 % upper bounds 25.887 % and 25.887 %, expected below "
        "5 %: 10 questions can prove nothing at this limit"
    )
    assert any("against 'native'" in line and "(no count would pass)" in line for line in verdict.findings)
    assert details(verdict, "most_lost") is None


@pytest.mark.parametrize("kind", ["wrong", "empty", "truncated", "error"])
def test_lost_is_whatever_is_not_right(make: Any, kind: str) -> None:
    """Empty, truncated and failed answers are lost as wrong ones are, where the shares allow them at all."""
    study = with_rules(make.study(), "retrieval", empty_share=0.1, truncated_share=0.1, error_share=0.1)
    assert decide(make, kinds={7: kind}, study=study).outcome is Outcome.PASS
    verdict = decide(make, kinds={7: kind, 8: kind}, study=study)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.figure.startswith("rule 6: lost 2, gained 0 of 100 against 'native'")
    assert details(verdict, "answers")["candidate"][kind] == 2


def test_fails_against_one_control_alone(make: Any) -> None:
    """A loss against one control fails, whatever it is against the others; the finding names the control."""
    panel = make.scored_panel("retrieval", 100)
    controls = {"native": make.scored_records(panel, wrong(5)), "reference": make.scored_records(panel)}
    verdict = decide(make, kinds=wrong(5), controls=controls)
    assert verdict.outcome is Outcome.FAIL
    assert [line for line in verdict.findings if "rule 6" in line] == [verdict.findings[0]]
    assert "against 'reference'" in verdict.findings[0]


def test_the_figure_names_the_worst_control(make: Any) -> None:
    """The deciding line of a PASS is the comparison with the highest bound."""
    panel = make.scored_panel("retrieval", 100)
    controls = {"native": make.scored_records(panel, {5: "wrong"}), "reference": make.scored_records(panel)}
    verdict = decide(make, kinds={5: "wrong"}, controls=controls)
    assert verdict.outcome is Outcome.PASS
    assert verdict.figure.startswith("lost 1, gained 0 of 100 against 'reference'")


# -- laws ------------------------------------------------------------------------------------------------------------

OUTCOMES = st.dictionaries(st.integers(0, 99), st.sampled_from(["wrong", "empty", "truncated", "error"]), max_size=4)
LAWS = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


@given(kinds=OUTCOMES, control=OUTCOMES, extra=st.integers(0, 99), shares=st.sampled_from([0.0, 0.02, 1.0]))
@LAWS
def test_a_further_loss_never_helps(make: Any, kinds: Kinds, control: Kinds, extra: int, shares: float) -> None:
    """A right answer that becomes wrong never turns another outcome into a PASS."""
    panel = make.scored_panel("retrieval", 100)
    study = with_rules(
        make.study(), "retrieval", empty_share=shares, truncated_share=shares, error_share=shares, poison_questions=16
    )
    records = make.scored_records(panel, control)
    given_: dict[str, Any] = {"study": study, "controls": {"native": records, "reference": make.scored_records(panel)}}
    before = decide(make, kinds=kinds, **given_)
    if kinds.get(extra, "right") == "right" and before.outcome is not Outcome.PASS:
        assert decide(make, kinds={**kinds, extra: "wrong"}, **given_).outcome is not Outcome.PASS


@given(gains=st.sets(st.integers(50, 99), max_size=30), losses=st.sets(st.integers(0, 49), max_size=4))
@LAWS
def test_gains_change_no_bound(make: Any, gains: set[int], losses: set[int]) -> None:
    """With any number of gains the bound, the most losses and the outcome are those without them."""
    panel = make.scored_panel("retrieval", 100)
    weaker = make.scored_records(panel, dict.fromkeys(gains, "wrong"))
    kinds = dict.fromkeys(losses, "wrong")
    plain, gained = (
        decide(make, kinds=kinds),
        decide(make, kinds=kinds, controls=dict.fromkeys(("native", "reference"), weaker)),
    )
    assert gained.outcome is plain.outcome
    assert details(gained, "most_lost") == details(plain, "most_lost")
    pair = details(gained, "pairs")["native"]
    assert (pair["upper"], pair["lost"]) == (
        details(plain, "pairs")["native"]["upper"],
        sorted(pair["lost"], key=lambda name: int(name[1:])),
    )
    assert len(pair["gained"]) == len(gains)


@given(kinds=OUTCOMES, seed=st.integers(0, 2**32))
@LAWS
def test_the_order_of_records_does_not_matter(make: Any, kinds: Kinds, seed: int) -> None:
    """Records in any order give the same outcome, figure and details."""
    panel = make.scored_panel("retrieval", 100)
    source = random.Random(seed)

    def shuffled(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return source.sample(records, len(records))

    right = make.scored_records(panel)
    verdict = decide(
        make,
        candidate=shuffled(make.scored_records(panel, kinds)),
        controls={"native": shuffled(right), "reference": shuffled(right)},
        null=(shuffled(right), shuffled(right)),
        poison={FAULT: shuffled(make.scored_records(panel, ALL_WRONG)[:16])},
    )
    assert verdict == decide(make, kinds=kinds)


@given(kinds=OUTCOMES, seed=st.integers(0, 2**32))
@LAWS
def test_the_names_of_questions_do_not_matter(make: Any, kinds: Kinds, seed: int) -> None:
    """Other ids give the same outcome and figures, under the other names."""
    panel = make.scored_panel("retrieval", 100)
    places = random.Random(seed).sample(range(100), 100)
    names = {item.id: f"other-{place}" for item, place in zip(panel.items, places, strict=True)}
    renamed = replace(panel, items=tuple(replace(item, id=names[item.id]) for item in panel.items))
    one, other = decide(make, kinds=kinds), decide(make, kinds=kinds, panel=renamed)
    assert (other.outcome, other.null, other.poison) == (one.outcome, one.null, one.poison)
    for name, pair in details(one, "pairs").items():
        expected = {
            key: [names[item] for item in value] if isinstance(value, list) else value for key, value in pair.items()
        }
        assert details(other, "pairs")[name] == expected


# -- what is expected of a capture -----------------------------------------------------------------------------------

GAPS: dict[str, tuple[Any, str]] = {
    "a missing question": (lambda records: records[1:], "no record of 'q0'"),
    "a question twice": (lambda records: [*records, records[0]], "found 'q0' twice, expected once"),
    "a further question": (lambda records: [*records, {**records[0], "id": "q100"}], "found the id 'q100'"),
    "another question's answer": (
        lambda records: [{**records[1], "id": "q0"}, *records[1:]],
        "prompt: found token 2 at position 0, expected 1",
    ),
    "another prompt": (
        lambda records: altered(records, 0, lambda body: body["choices"][0]["prompt_token_ids"].__setitem__(1, 8)),
        "prompt: found token 8 at position 1, expected 7",
    ),
    "usage that disagrees": (
        lambda records: altered(records, 0, lambda body: body["usage"].__setitem__("completion_tokens", 3)),
        "usage.completion_tokens",
    ),
    "an unknown finish reason": (
        lambda records: altered(records, 0, lambda body: body["choices"][0].__setitem__("finish_reason", "abort")),
        "finish_reason",
    ),
    "not a number": (lambda records: [{**records[0], "index": float("nan")}, *records[1:]], "index"),
    "no table": (lambda records: ["q0", *records[1:]], "found no id, expected one of the panel"),
    "no list": (lambda records: {"records": records}, "found dict, expected a list of records"),
    "an empty list": (lambda records: [], "no record of 'q0'"),
}  # fmt: skip


@pytest.mark.parametrize("side", ["candidate", "control 'native'", "null[0]", "null[1]", f"poison '{FAULT}'"])
@pytest.mark.parametrize("case", GAPS)
def test_damage_concludes_nothing(make: Any, case: str, side: str) -> None:
    """A capture that is damaged in one place, whichever it is of, ends INCONCLUSIVE in one line that names it."""
    damaged, words = GAPS[case]
    panel = make.scored_panel("retrieval", 100)
    right = make.scored_records(panel)
    if side == "candidate":
        changes: dict[str, Any] = {"candidate": damaged(right)}
    elif side.startswith("control"):
        changes = {"controls": {"native": damaged(right), "reference": right}}
    elif side.startswith("null"):
        changes = {"null": (damaged(right), right) if side == "null[0]" else (right, damaged(right))}
    else:
        changes = {"poison": {FAULT: damaged(make.scored_records(panel, ALL_WRONG)[:16])}}
    verdict = decide(make, **changes)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    line = next(line for line in verdict.findings if words in line)
    assert side in line
    assert "\n" not in line


def test_a_missing_capture_concludes_nothing(make: Any) -> None:
    """No records of the candidate, or of one control, end INCONCLUSIVE; so does a study without a control."""
    panel = make.scored_panel("retrieval", 100)
    right = make.scored_records(panel)
    verdict = decide(make, candidate=None)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "rule 2: candidate: the records are missing" in verdict.findings
    for controls in ({"native": right}, {"native": right, "reference": None}):
        verdict = decide(make, controls=controls)
        assert verdict.outcome is Outcome.INCONCLUSIVE
        assert verdict.findings == ("rule 4: control 'reference': found no capture, expected one",)
    study = make.study()
    alone = replace(study, arms={"candidate": study.arms["candidate"]})
    assert "rule 4: the study has no control to compare with" in decide(make, study=alone, controls={}).findings


def test_a_control_under_judgement_is_not_compared_with_itself(make: Any) -> None:
    """With ``arm`` given, only the other controls are needed, and its own capture among them counts for nothing."""
    panel = make.scored_panel("retrieval", 100)
    verdict = decide(make, arm="reference", controls={"native": make.scored_records(panel), "reference": None})
    assert verdict.outcome is Outcome.PASS
    assert list(details(verdict, "pairs")) == ["native"]


def test_a_control_that_the_study_lacks_is_compared_too(make: Any) -> None:
    """A loss against a further control fails like one against the study's own."""
    panel = make.scored_panel("retrieval", 100)
    right, weak = make.scored_records(panel), make.scored_records(panel, wrong(5))
    verdict = decide(make, kinds=wrong(5), controls={"native": weak, "reference": weak, "other": right})
    assert verdict.outcome is Outcome.FAIL
    assert "against 'other'" in verdict.figure


def test_a_control_below_the_floor_concludes_nothing(make: Any) -> None:
    """A control with fewer right answers than the floor cannot show a loss; one at the floor can."""
    panel = make.scored_panel("retrieval", 100)
    for right, outcome in ((59, Outcome.INCONCLUSIVE), (60, Outcome.PASS)):
        weak = make.scored_records(panel, wrong(100 - right, right))
        verdict = decide(make, controls={"native": make.scored_records(panel), "reference": weak})
        assert verdict.outcome is outcome
    weak = make.scored_records(panel, wrong(41, 59))
    verdict = decide(make, controls={"native": make.scored_records(panel), "reference": weak})
    assert verdict.findings == (
        "rule 5: control 'reference': found 59 of 100 answers right, expected at least 60 %: it cannot show a loss",
    )


@pytest.mark.parametrize("kind", ["empty", "truncated", "error"])
def test_shares_are_bounded_on_each_side(make: Any, kind: str) -> None:
    """More empty, truncated or failed answers than allowed: FAIL of the candidate, INCONCLUSIVE of a control."""
    study = with_rules(make.study(), "retrieval", limit=0.2, **{f"{kind}_share": 0.02})
    panel = make.scored_panel("retrieval", 100)
    some, more = dict.fromkeys(range(40, 42), kind), dict.fromkeys(range(40, 43), kind)
    right = make.scored_records(panel)
    assert decide(make, kinds=some, study=study).outcome is Outcome.PASS
    verdict = decide(make, kinds=more, study=study)
    assert verdict.outcome is Outcome.FAIL
    words = f"found 3 of 100 answers {kind}, first 'q40', expected at most 2 %"
    assert verdict.findings == (f"rule 3: candidate: {words}",)
    for controls, outcome in (
        ({"native": right, "reference": make.scored_records(panel, some)}, Outcome.PASS),
        ({"native": right, "reference": make.scored_records(panel, more)}, Outcome.INCONCLUSIVE),
    ):
        assert decide(make, controls=controls, study=study).outcome is outcome
    verdict = decide(make, null=(right, make.scored_records(panel, more)), study=study)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.findings == (f"null: rule 3: null[1]: {words}",)


def test_every_answer_failed_is_no_accuracy_of_zero(make: Any) -> None:
    """All requests refused: INCONCLUSIVE where they are a control's, FAIL where the candidate's; the line says so."""
    panel = make.scored_panel("retrieval", 100)
    failed = make.scored_records(panel, dict.fromkeys(range(100), "error"))
    verdict = decide(make, controls={"native": failed, "reference": make.scored_records(panel)})
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any("control 'native': found 100 of 100 answers error" in line for line in verdict.findings)
    verdict = decide(make, candidate=failed)
    assert verdict.outcome is Outcome.FAIL
    assert "candidate: found 100 of 100 answers error" in verdict.findings[0]


def test_the_panel_must_be_the_declared_one(make: Any) -> None:
    """Another number of questions, or of tokens, than the study declares concludes nothing."""
    verdict = decide(make, questions=1319)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "rule 1: panel: found 100 questions, expected 1319" in verdict.findings
    verdict = decide(make, study=with_rules(make.study(), "retrieval", max_tokens=2048))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "rule 1: panel 'q0': found 8 max_tokens, expected 2048" in verdict.findings
    panel = make.scored_panel("retrieval", 100)
    empty = decide(
        make, panel=replace(panel, items=()), questions=0, candidate=[], controls={"native": [], "reference": []}
    )
    assert empty.outcome is Outcome.INCONCLUSIVE
    assert "rule 1: found 0 questions in the study, expected at least 1" in empty.findings


# -- the null --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swapped", [False, True])
def test_a_control_that_differs_from_itself_proves_nothing(make: Any, swapped: bool) -> None:
    """A bf16 rerun with 91 and 86 discordant answers of 1,319: INCONCLUSIVE with its bounds, whatever the candidate."""
    panel = make.scored_panel("gsm8k", 1319)
    one, other = make.scored_records(panel, wrong(86, 300)), make.scored_records(panel, wrong(91, 500))
    null = (other, one) if swapped else (one, other)
    bounds = [f"{100 * preservation_upper(count, 1319, 0.95):.3f} %" for count in ((86, 91) if swapped else (91, 86))]
    lost, gained = (86, 91) if swapped else (91, 86)
    for kinds in (wrong(0), wrong(30)):
        verdict = decide(make, "gsm8k", 1319, kinds, null=null)
        assert verdict.outcome is Outcome.INCONCLUSIVE
        assert verdict.figure == verdict.findings[0] == (
            f"null: rule 7: lost {lost}, gained {gained} of 1319 against itself: 95 % upper bounds {bounds[0]} and "
            f"{bounds[1]}, expected below 2 %: a run whose control differs from itself this much can prove nothing at "
            "this limit"
        )  # fmt: skip
    numbers = details(verdict, "null")
    assert (len(numbers["lost"]), len(numbers["gained"]), numbers["tokens_differ"]) == (lost, gained, 177)
    assert numbers["upper"] == preservation_upper(lost, 1319, 0.95)
    assert numbers["upper_back"] == preservation_upper(gained, 1319, 0.95)


@pytest.mark.parametrize("place", [0, 1])
def test_the_null_holds_in_both_directions(make: Any, place: int) -> None:
    """A control that answers worse once, whichever time, fails its null; within the limit it does not."""
    panel = make.scored_panel("retrieval", 100)
    for lost, outcome in ((1, Outcome.PASS), (2, Outcome.INCONCLUSIVE)):
        null = [make.scored_records(panel), make.scored_records(panel)]
        null[place] = make.scored_records(panel, wrong(lost, 20))
        verdict = decide(make, null=tuple(null))
        assert verdict.outcome is outcome
        assert verdict.null is not None
        assert verdict.null.passed is (outcome is Outcome.PASS)


def test_a_null_is_needed_and_needs_a_control_at_its_floor(make: Any) -> None:
    """No null, and a null of a control below the floor, end INCONCLUSIVE."""
    verdict = decide(make, null=None)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.findings == ("null: no evidence of the control against itself",)
    assert details(verdict, "null") == {}
    weak = make.scored_records(make.scored_panel("retrieval", 100), wrong(50))
    verdict = decide(make, null=(weak, weak))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert all(line.startswith("null: rule 5: null[") for line in verdict.findings)


def test_the_figure_of_a_null_has_both_bounds(make: Any) -> None:
    """A passed null says what differed, and the bounds of both directions."""
    assert decide(make).null is not None
    null = decide(make).null
    assert null is not None
    assert null.figure == "lost 0, gained 0 of 100 against itself: 95 % upper bounds 2.951 % and 2.951 % < 5 %"


# -- the poison ------------------------------------------------------------------------------------------------------


def test_a_fault_is_caught_by_its_lower_bound(make: Any) -> None:
    """A planted fault is caught where the lower bound of its loss is above the limit; below that it is not."""
    panel = make.scored_panel("retrieval", 100)
    assert preservation_lower(3, 16, 0.95) > 0.05 > preservation_lower(2, 16, 0.95)
    verdict = decide(make, poison={FAULT: make.scored_records(panel, wrong(3))[:16]})
    assert verdict.outcome is Outcome.PASS
    lower = f"{100 * preservation_lower(3, 16, 0.95):.3f} %"
    assert verdict.poison[0].figure == f"lost 3 of 16 against 'native': 95 % lower bound {lower} > 5 %"
    at = with_rules(make.study(), "retrieval", limit=preservation_lower(3, 16, 0.95))
    assert decide(make, study=at, poison={FAULT: make.scored_records(panel, wrong(3))[:16]}).faults_caught == 0
    verdict = decide(make, poison={FAULT: make.scored_records(panel, wrong(2))[:16]})
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert (verdict.faults_caught, verdict.faults_seeded) == (0, 1)
    assert "against 'native': 95 % lower bound 2.268 %, expected above 5 %; lost 2 of 16 against 'reference'" in (
        verdict.poison[0].figure
    )


def test_a_fault_need_show_against_one_control_alone(make: Any) -> None:
    """A control that has the first questions wrong cannot show the fault there; another that can suffices."""
    panel = make.scored_panel("retrieval", 100)
    controls = {"native": make.scored_records(panel, wrong(16)), "reference": make.scored_records(panel)}
    verdict = decide(make, controls=controls)
    assert verdict.outcome is Outcome.PASS
    assert "against 'reference'" in verdict.poison[0].figure


def test_a_fault_that_was_not_run_is_missed(make: Any) -> None:
    """No planted fault at all, or not the declared one, ends INCONCLUSIVE."""
    assert "poison: no seeded fault was run against this gate" in decide(make, poison={}, faults=()).findings
    verdict = decide(make, poison={})
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.findings == (f"poison: '{FAULT}' was not caught: it was not run",)


def test_the_first_questions_are_asked_under_a_fault(make: Any) -> None:
    """Other questions than the panel's first, or fewer, are no poison."""
    records = make.scored_records(make.scored_panel("retrieval", 100), wrong(100))
    for chosen in (records[1:17], records[:15], records[:17]):
        verdict = decide(make, poison={FAULT: chosen})
        assert verdict.outcome is Outcome.INCONCLUSIVE
        assert verdict.faults_caught == 0


def test_requests_that_failed_catch_no_fault(make: Any) -> None:
    """Under a planted fault that every request failed under nothing was seen of the cache."""
    records = make.scored_records(make.scored_panel("retrieval", 100), dict.fromkeys(range(16), "error"))[:16]
    verdict = decide(make, poison={FAULT: records})
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "found 16 of 16 requests failed, expected at most 0 %" in verdict.poison[0].figure
