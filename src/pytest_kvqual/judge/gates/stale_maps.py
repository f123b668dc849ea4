"""Gate 3, stale-maps: block table, sequence lengths and query starts of each step are those of this step.

The evidence is ``oracle.json`` of the arm. Its form and the rules that all oracle gates share (1 to 3 and 5 to 11) are
those of :mod:`pytest_kvqual.judge.gates._oracle`. This gate's own:

4. On every rank of every pass the maps were compared at least once per step and layer, and they changed between steps:
   maps that never change cannot be seen to be stale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_kvqual.judge.gates._conclude import Objections
from pytest_kvqual.judge.gates._oracle import Part, judge_oracle, objected, total
from pytest_kvqual.judge.verdict import Verdict
from pytest_kvqual.study.model import Study
from pytest_kvqual.study.panels import Panel

GATE = "stale-maps"


def judge(
    study: Study,
    panel: Panel,
    *,
    arm: str,
    null_arm: str,
    candidate: Mapping[str, object] | None,
    null: Mapping[str, object] | None,
    faults: Sequence[str] = (),
    panels: Mapping[str, Panel] | None = None,
) -> Verdict:
    """Judge the maps of one arm.

    The arguments are those of :func:`~pytest_kvqual.judge.gates._oracle.judge_oracle`.
    """
    return judge_oracle(
        GATE,
        study,
        panel,
        section=_section,
        minimums={"tables_compared": 1, "maps_changed": 1},
        figure=_figure,
        arm=arm,
        null_arm=null_arm,
        candidate=candidate,
        null=null,
        faults=faults,
        panels=panels,
    )


def _section(result: Objections, part: Part) -> dict[str, object]:
    section, where = part.rank.table(GATE, known=None), part.where
    counts: dict[str, object] = {}
    with result.reading(4):
        steps = part.rank.integer("steps", minimum=1)
        compared, changed = section.integer("tables_compared", minimum=0), section.integer("maps_changed", minimum=0)
        counts |= {"steps": steps, "tables_compared": compared, "maps_changed": changed}
        expected = steps * part.study.model.layers
        if not compared >= expected:
            result.gap(
                4, f"{where}: tables_compared is {compared}, expected at least {expected}, one per step and layer"
            )
        if changed > steps:
            section.fail("maps_changed", str(changed), f"at most the {steps} steps")
        if not changed > 0:
            result.gap(4, f"{where}: maps_changed is {changed}, expected at least 1")
    # Rule 6 is a contradiction within the record; it is read where the findings are.
    with result.reading(6):
        counts["findings_total"] = objected(result, 5, section, where, part.waived)
    return counts


def _figure(numbers: Sequence[Mapping[str, object]]) -> str:
    return (
        f"{total(numbers, 'tables_compared')} maps compared, {total(numbers, 'maps_changed')} changed from the step "
        f"before, {total(numbers, 'findings_total')} findings"
    )
