"""Gate 4, placement: every output row is the attention of its own request and position, and of no other row.

The evidence is ``oracle.json`` of the arm. Its form and the rules that all oracle gates share (1 to 3 and 5 to 11) are
those of :mod:`pytest_kvqual.judge.gates._oracle`. This gate's own:

4. On every rank of every pass every row was compared in every layer; the share of ambiguous rows is at most
   ``oracle.ambiguous_rows``; the worst ratio of error to tolerance is at most 1, and NaN is not. Over all passes at
   least ``oracle.minimum_rows`` rows were compared. A waiver covers findings, never the worst ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pytest_kvqual._decode import Table
from pytest_kvqual.judge.gates._conclude import Objections, spelled
from pytest_kvqual.judge.gates._oracle import Part, complete, every_layer, judge_oracle, objected, total
from pytest_kvqual.judge.verdict import Verdict
from pytest_kvqual.study.model import Study
from pytest_kvqual.study.panels import Panel

GATE = "placement"
_WORDS = {"nan": math.nan, "inf": math.inf}


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
    """Judge the placement of one arm.

    The arguments are those of :func:`~pytest_kvqual.judge.gates._oracle.judge_oracle`.
    """
    return judge_oracle(
        GATE,
        study,
        panel,
        section=_section,
        minimums={"rows_checked": study.oracle.minimum_rows},
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
        rows, ambiguous = section.integer("rows_checked", minimum=0), section.integer("ambiguous_rows", minimum=0)
        counts |= {"rows_checked": rows, "ambiguous_rows": ambiguous}
        complete(result, 4, section, "rows_checked", where, part.per_layer(part.scheduled))
        limit = part.study.oracle.ambiguous_rows
        if ambiguous > rows:
            section.fail("ambiguous_rows", str(ambiguous), f"at most rows_checked, {rows}")
        if rows and not ambiguous / rows <= limit:
            result.gap(4, f"{where}: {ambiguous} of {rows} rows are ambiguous, expected at most a share of {limit:g}")
    with result.reading(4):
        ratio = _ratio(section)
        counts["worst_ratio"] = spelled(ratio)
        if not ratio <= 1.0:
            result.find(4, f"{where}: the worst error is {ratio:g} times its tolerance, expected at most 1")
    # Rule 6 is a contradiction within the record; it is read where the findings are.
    with result.reading(6):
        counts["findings_total"] = objected(result, 5, section, where, part.waived)
    return counts


def _ratio(section: Table) -> float:
    raw = section.raw("worst_ratio")
    if isinstance(raw, str) and raw in _WORDS:
        return _WORDS[raw]
    if isinstance(raw, float) and not math.isfinite(raw):
        return raw
    return section.number("worst_ratio", minimum=0)


def _figure(numbers: Sequence[Mapping[str, object]]) -> str:
    ratios = [value for one in numbers if isinstance(value := one.get("worst_ratio"), int | float)]
    worst = f"{max(ratios):.3g}" if len(ratios) == len(numbers) and ratios else "unknown"
    return f"{total(numbers, 'rows_checked')} rows checked, worst error {worst} of its tolerance"
