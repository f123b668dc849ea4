"""Gate 5, replay: outputs are bitwise unchanged whatever the cells hold that nobody wrote.

The evidence is ``oracle.json`` of the arm. Its form and the rules that all oracle gates share (1 to 3 and 5 to 11) are
those of :mod:`pytest_kvqual.judge.gates._oracle`. This gate's own:

4. Every attention call of at least one pass was repeated with the unwritten cells filled with NaN, with a large finite
   value and with another request's cells. On every rank of such a pass every row was compared in every layer under
   each of the three fills, and at least one cell was filled. A pass without fills compared none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_kvqual.judge.gates._conclude import Objections
from pytest_kvqual.judge.gates._oracle import Part, judge_oracle, objected, total
from pytest_kvqual.judge.verdict import Verdict
from pytest_kvqual.study.model import Study
from pytest_kvqual.study.panels import Panel

GATE = "replay"
FILLS = ("nan", "large", "other-request")


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
    """Judge the replay of one arm.

    The arguments are those of :func:`~pytest_kvqual.judge.gates._oracle.judge_oracle`.
    """
    return judge_oracle(
        GATE,
        study,
        panel,
        section=_section,
        minimums={"rows_compared": 1, "cells_filled": 1},
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
        compared = section.table("rows_compared", known=FILLS)
        rows = {fill: compared.integer(fill, minimum=0) for fill in FILLS}
        filled, fills = section.integer("cells_filled", minimum=0), part.rank.boolean("fills")
        least = min(rows.values())
        counts |= {"fills": fills, "rows_compared": least, "cells_filled": filled}
        most = part.per_layer(part.scheduled)
        if len(set(rows.values())) != 1:
            shown = ", ".join(f"{fill} {count}" for fill, count in rows.items())
            result.gap(4, f"{where}: rows_compared is {shown}, expected as many under each fill")
        if most is not None and max(rows.values()) > most:
            compared.fail("", f"{max(rows.values())} rows", f"at most {most}, the rows of the pass in all layers")
        if fills and most is not None and 0 < least < most:
            result.gap(4, f"{where}: {least} rows were compared, expected {most}, the rows of the pass in all layers")
        if fills and not (least > 0 and filled > 0):
            result.gap(
                4, f"{where}: {least} rows were compared with {filled} cells filled, expected at least 1 of each"
            )
        if not fills and (max(rows.values()) or filled):
            section.fail(
                "rows_compared", f"{max(rows.values())} rows and {filled} cells", "none in a pass without fills"
            )
    # Rule 6 is a contradiction within the record; it is read where the findings are.
    with result.reading(6):
        counts["findings_total"] = objected(result, 5, section, where, part.waived)
    return counts


def _figure(numbers: Sequence[Mapping[str, object]]) -> str:
    return (
        f"{total(numbers, 'rows_compared')} rows compared under {len(FILLS)} fills of "
        f"{total(numbers, 'cells_filled')} cells, {total(numbers, 'findings_total')} findings"
    )
