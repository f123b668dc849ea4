"""Gate 3, routing: every K/V write went to the cell that block table and position dictate, and nowhere else.

The evidence is ``oracle.json`` of the arm. Its form and the rules that all oracle gates share (1 to 3 and 5 to 11) are
those of :mod:`pytest_kvqual.judge.gates._oracle`. This gate's own:

4. On every rank of every pass every write was compared in every layer, the histories of live requests at least once
   over, and the blocks that nobody holds too. Over all passes at least ``oracle.minimum_cells`` cells were compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_kvqual.judge.gates._conclude import Objections
from pytest_kvqual.judge.gates._oracle import Part, complete, judge_oracle, objected, total
from pytest_kvqual.judge.verdict import Verdict
from pytest_kvqual.study.model import Study
from pytest_kvqual.study.panels import Panel

GATE = "routing"
_COUNTS = ("cells_checked", "writes_checked", "history_cells", "blocks_compared", "padding_rows")


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
    """Judge the routing of one arm.

    The arguments are those of :func:`~pytest_kvqual.judge.gates._oracle.judge_oracle`.
    """
    return judge_oracle(
        GATE,
        study,
        panel,
        section=_section,
        minimums={"cells_checked": study.oracle.minimum_cells},
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
        for name in _COUNTS:
            counts[name] = section.integer(name, minimum=0)
        for name in ("cells_checked", "history_cells", "blocks_compared"):
            if not section.integer(name) >= 1:
                result.gap(4, f"{where}: {name} is {counts[name]}, expected at least 1")
        complete(result, 4, section, "writes_checked", where, part.per_layer(part.scheduled))
        needed = part.per_layer(part.needed)
        if needed is not None and not section.integer("history_cells") >= needed:
            result.gap(4, f"{where}: history_cells is {counts['history_cells']}, expected at least {needed}")
    # Rule 6 is a contradiction within the record; it is read where the findings are.
    with result.reading(6):
        counts["findings_total"] = objected(result, 5, section, where, part.waived)
    return counts


def _figure(numbers: Sequence[Mapping[str, object]]) -> str:
    return f"{total(numbers, 'cells_checked')} cells checked, {total(numbers, 'findings_total')} findings"
