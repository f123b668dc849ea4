"""Gate 8, nll: teacher-forced over the cache, the candidate's loss is not above a control's by the margin.

The unit is the document: its figure is the mean loss in nats per token over its cached decode steps, and the statistic
is the mean over documents of the paired difference, candidate minus control, with a one-sided upper Student t bound
(:func:`~pytest_kvqual.stats.paired.paired_mean`). The rules:

1. The panel has ``nll.documents`` items of ``nll.decode_steps`` + 1 targets each.
2. Every capture has one record per document, answered under status 200, with the prompt come back as sent.
3. The teacher was registered: every returned token is its target; every log-probability is finite, at most 0, and above
   the engine's clamp.
4. Step zero comes from the prefill and is excluded.
5. Every control of the study was captured (the arm under judgement itself apart), and there is at least one.
6. Against every control the upper bound at ``nll.confidence`` is below ``nll.margin_nats``; a bound at it is not.
7. Null: the control against itself keeps rules 2, 3 and 6 in both directions; captured in waves, every loss is equal.
8. Poison: under each planted fault, over ``nll.poison_documents`` documents, neither the mean difference nor its bound
   is below the margin, against at least one control (the mean too, because fewer documents widen the bound of a
   healthy arm as well). Every fault of ``faults`` was run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pytest_kvqual.judge.gates._conclude import Objections, complete_poison, conclude, null_check, spelled
from pytest_kvqual.judge.gates._records import Panel, Record, by_item
from pytest_kvqual.judge.verdict import Check, Poison, Verdict
from pytest_kvqual.stats.paired import PairedMean, paired_mean
from pytest_kvqual.study.model import NllRules, Study
from pytest_kvqual.tasks.nll import document_losses

GATE = "nll"
Losses = Mapping[str, tuple[float, ...]]
"""Losses in nats by document, step zero excluded."""


def judge(
    study: Study,
    panel: Panel,
    *,
    candidate: Sequence[Record] | None,
    controls: Mapping[str, Sequence[Record]],
    null: tuple[Sequence[Record], Sequence[Record]] | None,
    poison: Mapping[str, Sequence[Record]],
    arm: str | None = None,
    faults: Sequence[str] = (),
) -> Verdict:
    """Judge the loss of one arm against every control.

    Args:
        study: The study; its ``nll`` rules, controls and schedule are what is expected.
        panel: The frozen NLL panel of this length.
        candidate: The capture records of the arm under judgement.
        controls: The capture records of each control, by arm name.
        null: Two captures of one control.
        poison: The arm's capture records by planted fault, over ``nll.poison_documents`` documents.
        arm: The name of the arm under judgement; a control is not compared with itself.
        faults: The names of the faults that must be among ``poison``.
    """
    rules = study.nll
    own = Objections()
    _panel(own, rules, panel)
    found = _losses(own, panel, candidate, origin="candidate")
    required = [control.name for control in study.controls() if control.name != arm]
    if not required:
        own.gap(5, "the study has no control to compare with")
    losses = {
        name: _losses(own, panel, controls.get(name), origin=f"control '{name}'")
        for name in dict.fromkeys((*required, *controls))
        if name != arm
    }
    compared: dict[str, PairedMean] = {}
    for name, expected in losses.items():
        bound = _compare(own, 6, rules, found, expected, f"against '{name}'")
        if bound is not None:
            compared[name] = bound
            if not bound.upper < rules.margin_nats:
                own.find(6, f"{_words(bound, rules)}, expected below {rules.margin_nats:g} nats, against '{name}'")
    null_objections, check = _null(study, panel, null)
    seeded = [_poisoned(rules, panel, fault, records, losses) for fault, records in poison.items()]
    return conclude(
        GATE,
        figure=_figure(rules, compared),
        objections=own,
        null=check,
        null_objections=null_objections,
        poison=complete_poison(seeded, faults),
        details={
            "unit": "nats per token",
            "margin": rules.margin_nats,
            "confidence": rules.confidence,
            "mean_nll": {name: _mean(values) for name, values in {"candidate": found, **losses}.items() if values},
            "delta": {name: _numbers(bound, list(found)) for name, bound in compared.items()},
        },
    )


def _panel(result: Objections, rules: NllRules, panel: Panel) -> None:
    if len(panel.items) != rules.documents:
        result.gap(1, f"panel: found {len(panel.items)} documents, expected {rules.documents}")
    for item in panel.items:
        if len(item.targets) != rules.decode_steps + 1:
            result.gap(1, f"panel '{item.id}': found {len(item.targets)} targets, expected {rules.decode_steps + 1}")


def _losses(
    result: Objections, panel: Panel, records: Sequence[Record] | None, *, origin: str, only: int | None = None
) -> dict[str, tuple[float, ...]]:
    """The losses of each document that can be read, in the panel's order; what cannot be read is a gap."""
    losses: dict[str, tuple[float, ...]] = {}
    for item, record, where in by_item(result, 2, panel, records, origin=origin, only=only):
        with result.reading(3):
            _, document = document_losses(record, origin=where, prompt=item.prompt, targets=item.targets)
            losses[item.id] = document.losses
    return {item.id: losses[item.id] for item in panel.items if item.id in losses}


def _compare(
    result: Objections, rule: int, rules: NllRules, found: Losses, expected: Losses, against: str
) -> PairedMean | None:
    """The paired mean over the documents of both sides; None, and a gap, unless both have the same ones."""
    if not found or set(found) != set(expected):
        result.gap(rule, f"{against}: found {len(found)} and {len(expected)} documents, expected the same ones")
        return None
    try:
        return paired_mean(
            [document_mean(found[name]) - document_mean(expected[name]) for name in found],
            confidence=rules.confidence,
        )
    except ValueError as error:
        result.gap(rule, f"{against}: {error}")
        return None


def document_mean(losses: Sequence[float]) -> float:
    """The mean loss of one document in nats per token; NaN for a document without losses."""
    return math.fsum(losses) / len(losses) if losses else math.nan


def _null(
    study: Study, panel: Panel, null: tuple[Sequence[Record], Sequence[Record]] | None
) -> tuple[Objections | None, Check | None]:
    if null is None:
        return None, None
    result = Objections()
    first, second = (_losses(result, panel, records, origin=f"null[{place}]") for place, records in enumerate(null))
    figure = ""
    for one, other in ((first, second), (second, first)):
        bound = _compare(result, 7, study.nll, one, other, "null")
        if bound is not None:
            figure = figure or _words(bound, study.nll)
            if not bound.upper < study.nll.margin_nats:
                result.find(7, f"{_words(bound, study.nll)}, expected below {study.nll.margin_nats:g} nats")
    if study.schedule == "waves":
        for name in first:
            if name in second and first[name] != second[name]:
                step = next(
                    (at for at, pair in enumerate(zip(first[name], second[name], strict=False)) if pair[0] != pair[1]),
                    0,
                )
                result.find(7, f"document '{name}': the losses of two waves differ, first at decode step {step + 1}")
    return result, null_check(result, figure)


def _poisoned(
    rules: NllRules, panel: Panel, fault: str, records: Sequence[Record], controls: Mapping[str, Losses]
) -> Poison:
    scratch = Objections()
    found = _losses(scratch, panel, records, origin=f"poison '{fault}'", only=rules.poison_documents)
    lines = []
    caught = ""
    for name, losses in controls.items():
        part = {document: losses[document] for document in found if document in losses}
        bound = _compare(scratch, 8, rules, found, part, f"poison '{fault}' against '{name}'")
        if bound is None:
            continue
        lines.append(f"{_words(bound, rules)} against '{name}'")
        if not bound.upper < rules.margin_nats and not bound.mean < rules.margin_nats:
            caught = caught or lines[-1]
    if scratch:
        return Poison(fault=fault, caught=False, figure=scratch.first())
    if caught:
        return Poison(fault=fault, caught=True, figure=caught)
    return Poison(fault=fault, caught=False, figure="; ".join(lines) or "no control to compare with")


def _mean(losses: Losses) -> float | str:
    return spelled(math.fsum(document_mean(values) for values in losses.values()) / len(losses))


def _numbers(bound: PairedMean, documents: Sequence[str]) -> dict[str, object]:
    return {
        "documents": bound.count,
        "mean": bound.mean,
        "deviation": bound.deviation,
        "error": bound.error,
        "quantile": bound.quantile,
        "upper": bound.upper,
        "by_document": dict(zip(documents, bound.differences, strict=True)),
    }


def _words(bound: PairedMean, rules: NllRules) -> str:
    return f"ΔNLL {bound.mean:+.6f}, {100 * rules.confidence:g} % upper bound {bound.upper:+.6f}"


def _figure(rules: NllRules, compared: Mapping[str, PairedMean]) -> str:
    if not compared:
        return "no comparison"
    name, bound = max(compared.items(), key=lambda item: item[1].upper)
    return f"{_words(bound, rules)} < {rules.margin_nats:g} nats (against '{name}')"
