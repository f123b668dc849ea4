"""Gate 3, routing: every K/V write went to the cell that the block table and the position dictate, and nowhere else.

The evidence is ``oracle.json`` of the arm (its form: :mod:`pytest_kvqual.judge.gates._oracle`). The rules:

1. The document is of schema 1, with one record per rank, the ranks 0 to n - 1 once each, and at least one step in each.
2. The row map was checked for every row of the pass and has no finding, and it caught its known permutation.
3. On every rank, every layer of the model was seen.
4. On every rank every write of the pass was compared in every layer, and at least ``oracle.minimum_cells`` cells; the
   histories of live requests and the blocks that nobody holds were compared too.
5. On every rank the oracle has no finding.
6. The counts agree with each other: as many findings were counted as are kept, or more.
7. Every request of the panel was answered in the healthy pass, under status 200, and no other.
8. Null: the control's document keeps rules 1 to 7.
9. Poison: the oracle has findings under each fault that this gate claims. Every fault of ``faults`` was run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_kvqual._decode import Table
from pytest_kvqual.judge.gates._conclude import Objections
from pytest_kvqual.judge.gates._oracle import complete, judge_oracle, objected
from pytest_kvqual.judge.verdict import Verdict
from pytest_kvqual.study.model import Study
from pytest_kvqual.study.panels import Panel

GATE = "routing"
_COUNTS = ("cells_checked", "writes_checked", "history_cells", "blocks_compared", "padding_rows")


def judge(
    study: Study,
    panel: Panel,
    *,
    candidate: Mapping[str, object] | None,
    null: Mapping[str, object] | None,
    faults: Sequence[str] = (),
) -> Verdict:
    """Judge the routing of one arm.

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
    counts: dict[str, object] = {"rank": rank.integer("rank"), "layers": rank.integer("layers", minimum=0)}
    if counts["layers"] != study.model.layers:
        result.gap(3, f"{where}: {counts['layers']} layers were seen, expected {study.model.layers}")
    with result.reading(4):
        section = rank.table(GATE, known=None)
        for name in _COUNTS:
            counts[name] = section.integer(name, minimum=0)
        for name, minimum in (
            ("cells_checked", study.oracle.minimum_cells),
            ("history_cells", 1),
            ("blocks_compared", 1),
        ):
            if not section.integer(name) >= minimum:
                result.gap(4, f"{where}: {name} is {counts[name]}, expected at least {minimum}")
        expected = None if pass_rows is None else pass_rows * study.model.layers
        complete(result, 4, section, "writes_checked", where, expected)
        if expected is not None and not section.integer("history_cells") >= expected:
            result.gap(4, f"{where}: history_cells is {counts['history_cells']}, expected at least {expected}")
        # Rule 6 is a contradiction within the record; it is read where the findings are.
        with result.reading(6):
            counts["findings_total"] = objected(result, 5, section, where)
    return counts


def _figure(ranks: Sequence[Mapping[str, object]]) -> str:
    cells = [rank.get("cells_checked", 0) for rank in ranks]
    findings = [rank.get("findings_total", 0) for rank in ranks]
    return f"{sum(_whole(cells))} cells checked, {sum(_whole(findings))} findings"


def _whole(values: Sequence[object]) -> list[int]:
    return [value for value in values if isinstance(value, int)]
