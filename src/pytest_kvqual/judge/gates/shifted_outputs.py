"""Gate 4, shifted-outputs: no output row is the attention of another row, of this step or of the one before.

The evidence is ``oracle.json`` of the arm. Its form and the rules that all oracle gates share (1 to 3 and 5 to 11) are
those of :mod:`pytest_kvqual.judge.gates._oracle`. This gate's own:

4. On every rank of every pass every row was compared with the others in every layer, and the oracle caught the shifted
   rows that it was shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_kvqual.judge.gates._conclude import Objections
from pytest_kvqual.judge.gates._oracle import Part, complete, every_layer, judge_oracle, objected, self_tested, total
from pytest_kvqual.judge.verdict import Verdict
from pytest_kvqual.study.model import Study
from pytest_kvqual.study.panels import Panel

GATE = "shifted-outputs"


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
    """Judge the order of the output rows of one arm.

    The arguments are those of :func:`~pytest_kvqual.judge.gates._oracle.judge_oracle`.
    """
    return judge_oracle(
        GATE,
        study,
        panel,
        section=_section,
        minimums={"rows_checked": 1},
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
    with result.reading(3):
        every_layer(result, part, section)
    with result.reading(4):
        counts["rows_checked"] = section.integer("rows_checked", minimum=0)
        complete(result, 4, section, "rows_checked", where, part.per_layer(part.scheduled))
        self_tested(result, 4, section, where, "the oracle missed its known shifted rows")
    # Rule 6 is a contradiction within the record; it is read where the findings are.
    with result.reading(6):
        counts["findings_total"] = objected(result, 5, section, where, part.waived)
    return counts


def _figure(numbers: Sequence[Mapping[str, object]]) -> str:
    return f"{total(numbers, 'rows_checked')} rows checked, {total(numbers, 'findings_total')} are another row's"
