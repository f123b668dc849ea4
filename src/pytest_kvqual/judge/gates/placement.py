"""Gate 4, placement: every output row is the attention of its own request and position, and of no other row.

The evidence is ``oracle.json`` of the arm (its form: :mod:`pytest_kvqual.judge.gates._oracle`). The rules:

1. The document is of schema 1, with one record per rank, the ranks 0 to n - 1 once each, and at least one step in each.
2. The row map was checked for every row of the pass and has no finding, and it caught its known permutation.
3. On every rank, every layer of the model was seen.
4. On every rank every row of the pass was compared in every layer, and at least ``oracle.minimum_rows`` rows; the
   share of ambiguous rows is at most ``oracle.ambiguous_rows``; the worst ratio of error to tolerance is at most 1, and
   NaN is not.
5. On every rank the oracle has no finding.
6. The counts agree with each other: as many findings were counted as are kept, or more.
7. Every request of the panel was answered in the healthy pass, under status 200, and no other.
8. Null: the control's document keeps rules 1 to 7.
9. Poison: the oracle has findings under each fault that this gate claims. Every fault of ``faults`` was run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pytest_kvqual._decode import Table
from pytest_kvqual.judge.gates._conclude import Objections, spelled
from pytest_kvqual.judge.gates._oracle import complete, judge_oracle, objected
from pytest_kvqual.judge.verdict import Verdict
from pytest_kvqual.study.model import Study
from pytest_kvqual.study.panels import Panel

GATE = "placement"
_WORDS = {"nan": math.nan, "inf": math.inf}


def judge(
    study: Study,
    panel: Panel,
    *,
    candidate: Mapping[str, object] | None,
    null: Mapping[str, object] | None,
    faults: Sequence[str] = (),
) -> Verdict:
    """Judge the placement of one arm.

    Args:
        study: The study; its ``oracle`` rules and its number of layers are what is expected.
        panel: The oracle panel: the requests of the healthy pass, from which the number of rows follows.
        candidate: The arm's ``oracle.json``, poison included; None where it is missing.
        null: A control's ``oracle.json``; its healthy part is the null. None where it is missing.
        faults: The names of the faults claimed by this gate that must have been run.
    """
    return judge_oracle(
        GATE, study, panel, section=_section, figure=_figure, candidate=candidate, null=null, faults=faults
    )


def _section(result: Objections, study: Study, rank: Table, where: str, pass_rows: int | None) -> dict[str, object]:
    section = rank.table(GATE, known=None)
    counts: dict[str, object] = {"rank": rank.integer("rank"), "layers": section.integer("layers", minimum=0)}
    if counts["layers"] != study.model.layers:
        result.gap(3, f"{where}: {counts['layers']} layers were seen, expected {study.model.layers}")
    with result.reading(4):
        rows, ambiguous = section.integer("rows_checked", minimum=0), section.integer("ambiguous_rows", minimum=0)
        counts["rows_checked"], counts["ambiguous_rows"] = rows, ambiguous
        if not rows >= max(1, study.oracle.minimum_rows):
            result.gap(4, f"{where}: rows_checked is {rows}, expected at least {max(1, study.oracle.minimum_rows)}")
        expected = None if pass_rows is None else pass_rows * study.model.layers
        complete(result, 4, section, "rows_checked", where, expected)
        if ambiguous > rows:
            section.fail("ambiguous_rows", str(ambiguous), f"at most rows_checked, {rows}")
        if rows and not ambiguous / rows <= study.oracle.ambiguous_rows:
            result.gap(
                4,
                f"{where}: {ambiguous} of {rows} rows are ambiguous, expected at most a share of "
                f"{study.oracle.ambiguous_rows:g}",
            )
        with result.reading(4):
            ratio = _ratio(section)
            counts["worst_ratio"] = spelled(ratio)
            if not ratio <= 1.0:
                result.find(4, f"{where}: the worst error is {ratio:g} times its tolerance, expected at most 1")
        # Rule 6 is a contradiction within the record; it is read where the findings are.
        with result.reading(6):
            counts["findings_total"] = objected(result, 5, section, where)
    return counts


def _ratio(section: Table) -> float:
    raw = section.raw("worst_ratio")
    if isinstance(raw, str) and raw in _WORDS:
        return _WORDS[raw]
    if isinstance(raw, float) and not math.isfinite(raw):
        return raw
    return section.number("worst_ratio", minimum=0)


def _figure(ranks: Sequence[Mapping[str, object]]) -> str:
    rows = sum(value for rank in ranks if isinstance(value := rank.get("rows_checked"), int))
    ratios = [value for rank in ranks if isinstance(value := rank.get("worst_ratio"), int | float)]
    worst = f"{max(ratios):.3g}" if len(ratios) == len(ranks) and ratios else "unknown"
    return f"{rows} rows checked, worst error {worst} of its tolerance"
