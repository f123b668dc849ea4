"""Which plots belong to which gate. Every number is a receipt's, or of a recording that a receipt names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pytest_kvqual.report.gate import plots
from pytest_kvqual.report.gate.answers import TASKS
from pytest_kvqual.report.gate.latencies import Load, loads, rank
from pytest_kvqual.report.gate.plots import Curve, Figure, Line, Mark, Row, Span
from pytest_kvqual.report.gate.run import GateState, RunState, ScopeState
from pytest_kvqual.report.gate.words import milliseconds, number, percent

_DEPTH = re.compile(r"(?P<group>.+), at (?P<depth>0?\.\d+|[01])")
_QUANTILES: Final = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))


def figures(run: RunState, scope: ScopeState, gate: GateState, key: str) -> tuple[Figure, ...]:
    """The plots of one gate of one scope; none where the receipt has nothing to plot.

    Args:
        run: The run directory.
        scope: The scope.
        gate: The gate.
        key: The beginning of every id in them.
    """
    make = _GATES.get(gate.name)
    if make is None or gate.receipt is None or gate.said == "DAMAGED":
        return ()
    return make(run, scope, gate, key)


def _details(gate: GateState) -> Mapping[str, object]:
    return gate.receipt.verdict.details if gate.receipt is not None else {}


def _table(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else []


def _float(value: object) -> float:
    found = number(value)
    return math.nan if found is None else found


# -- placement ---------------------------------------------------------------------------------------------------------


def _placement(run: RunState, scope: ScopeState, gate: GateState, key: str) -> tuple[Figure, ...]:
    worst: dict[str, dict[int, float]] = {}
    for series, name in ((0, "ranks"), (1, "null_ranks")):
        for it in map(_table, _list(_details(gate).get(name))):
            place, value = str(it.get("pass")), _float(it.get("worst_ratio"))
            if not math.isnan(value):
                known = worst.setdefault(place, {})
                known[series] = max(value, known.get(series, 0.0))
    if not worst:
        return ()
    entries = [
        Row(
            label=f"pass {place}",
            value=f"{values.get(0, math.nan):.3f}" if 0 in values else "",
            marks=tuple(
                Mark(x=value, series=series, hollow=series == 1, tip=f"{place}: {value:.4f}")
                for series, value in values.items()
            ),
        )
        for place, values in worst.items()
    ]
    largest = max(it.get(0, 0.0) for it in worst.values())
    svg = plots.rows(
        f"{key}-worst",
        "Worst error of any output row, as a share of its tolerance",
        f"By pass; the largest of the arm is {largest:.3f}; 1 must not be exceeded.",
        entries,
        axis="worst error of a row / its derived tolerance",
        lines=(Line(at=1.0, text="tolerance"),),
        zero=True,
        legend=((scope.scope.arm, 0, False), ("control (null)", 1, True)),
    )
    table = tuple(
        (place, *(f"{values[it]:.6f}" if it in values else "-" for it in (0, 1))) for place, values in worst.items()
    )
    return (
        Figure(
            key=f"{key}-worst", title="Worst error of any output row", svg=svg,
            caption="Each output is compared with attention over the ledger; the tolerance of each element is derived "
            "from the roundings that an implementation may make.",
            columns=("pass", scope.scope.arm, "control (null)"), rows=table,
        ),
    )  # fmt: skip


# -- nll ---------------------------------------------------------------------------------------------------------------


def _nll(run: RunState, scope: ScopeState, gate: GateState, key: str) -> tuple[Figure, ...]:
    details = _details(gate)
    unit, margin = str(details.get("unit", "nats")), _float(details.get("margin"))
    panels: list[tuple[str, Sequence[tuple[str, float]], float, float]] = []
    table: list[tuple[str, ...]] = []
    for control, pair in _table(details.get("delta")).items():
        pair = _table(pair)
        documents = [(name, _float(value)) for name, value in _table(pair.get("by_document")).items()]
        panels.append((control, documents, _float(pair.get("mean")), _float(pair.get("upper"))))
    names = list(dict.fromkeys(name for _, documents, _, _ in panels for name, _ in documents))
    if not names or math.isnan(margin):
        return ()
    known = [dict(documents) for _, documents, _, _ in panels]
    table = [(name, *(f"{it[name]:+.6f}" if name in it else "-" for it in known)) for name in names]
    table.append(("mean", *(f"{mean:+.6f}" for _, _, mean, _ in panels)))
    table.append(("upper bound", *(f"{upper:+.6f}" for _, _, _, upper in panels)))
    worst = max((upper for _, _, _, upper in panels), key=lambda it: (math.isnan(it), it))
    confidence = _float(details.get("confidence"))
    share = f"{100 * confidence:g} % " if not math.isnan(confidence) else ""
    svg = plots.stems(
        f"{key}-documents", "ΔNLL of each document against each control",
        f"{len(names)} documents; the largest upper bound of the mean is {worst:+.6f} {unit}, the margin {margin:g}.",
        panels, margin=margin, unit=unit,
    )  # fmt: skip
    return (
        Figure(
            key=f"{key}-documents", title="ΔNLL of each document", svg=svg,
            caption=f"Each stem is a document: the loss of '{scope.scope.arm}' less that of the control, mean over its "
            f"cached decode steps. The gate decides on the {share}upper bound of the mean (upper edge of the band), "
            f"which must be below the margin of {margin:g} {unit}.",
            columns=("document", *(f"against {control}" for control, _, _, _ in panels)), rows=tuple(table),
        ),
    )  # fmt: skip


# -- preservation ------------------------------------------------------------------------------------------------------


def _preservation(run: RunState, scope: ScopeState, gate: GateState, key: str) -> tuple[Figure, ...]:
    found = [_bounds(scope, gate, key), _grades(run, scope, gate, key)]
    return tuple(it for it in found if it is not None)


def _bounds(scope: ScopeState, gate: GateState, key: str) -> Figure | None:
    details = _details(gate)
    total, limit = _float(details.get("questions")), _float(details.get("limit"))
    if not total > 0 or math.isnan(limit):
        return None
    entries: list[Row] = []
    table: list[tuple[str, ...]] = []

    def add(label: str, lost: float, gained: str, upper: float, net: str, *, null: bool) -> None:
        if math.isnan(upper):
            return
        entries.append(
            Row(
                label=label,
                value=f"{lost:.0f} lost, {percent(upper, 2)}",
                marks=(Mark(x=100 * lost / total, hollow=null, series=1 if null else 0,
                            tip=f"{lost:.0f} of {total:.0f} lost"),),
                spans=(Span(start=100 * lost / total, end=100 * upper, series=1 if null else 0),),
            )
        )  # fmt: skip
        table.append((label, f"{lost:.0f}", gained, percent(upper), net))

    for control, pair in _table(details.get("pairs")).items():
        pair = _table(pair)
        gained = len(_list(pair.get("gained")))
        lower, upper = _float(pair.get("net_lower")), _float(pair.get("net_upper"))
        net = f"{_float(pair.get('net')):+.0f} [{lower:+.0f}, {upper:+.0f}]" if not math.isnan(lower) else "-"
        add(f"against {control}", len(_list(pair.get("lost"))), str(gained), _float(pair.get("upper")), net, null=False)
    null = _table(details.get("null"))
    if null:
        lost, gained = len(_list(null.get("lost"))), len(_list(null.get("gained")))
        add("null: control again", lost, str(gained), _float(null.get("upper")), "-", null=True)
        add("null: the other way", gained, str(lost), _float(null.get("upper_back")), "-", null=True)
    if not entries:
        return None
    confidence = _float(details.get("confidence"))
    svg = plots.rows(
        f"{key}-bounds", "Share of questions lost, and its upper bound, against the limit",
        "; ".join(f"{row.label}: {row.value}" for row in entries) + f"; the limit is {percent(limit, 1)}.",
        entries, axis="questions lost, % of all questions", zero=True,
        lines=(Line(at=100 * limit, text=f"limit {100 * limit:g} %"),), form=lambda value: f"{value:g} %",
    )  # fmt: skip
    most = details.get("most_lost")
    floor = _float(details.get("floor"))
    return Figure(
        key=f"{key}-bounds", title="Questions lost, and the bound that decides", svg=svg,
        caption=f"Lost: right in the control, not right in '{scope.scope.arm}'; of all {total:.0f} questions. The mark "
        f"is the share observed, the bar ends at the one-sided {100 * confidence:g} % upper bound of the loss "
        "probability, which must be below the limit against every control"
        + (f"; {most} lost would still pass" if isinstance(most, int) else "")
        + (f". Each control must answer at least {100 * floor:g} % right" if not math.isnan(floor) else "")
        + ". Gains cancel nothing; the net change decides nothing.",
        columns=("comparison", "lost", "gained", "upper bound", "net [interval], questions"), rows=tuple(table),
    )  # fmt: skip


Group = dict[str, dict[str, dict[str, tuple[int, int]]]]
"""Panel, then arm, then category: answers right, and in all."""


def _grades(run: RunState, scope: ScopeState, gate: GateState, key: str) -> Figure | None:
    lengths = [
        (other, other.gate(gate.name))
        for other in run.scopes
        if other.scope.arm == scope.scope.arm and other.scope.cache_bytes and other.study.name == scope.study.name
    ]
    panels: Group = {}
    by_depth = False
    several = len({other.scope.length for other, _ in lengths}) > 1
    for other, its in sorted(lengths, key=lambda it: it[0].scope.length):
        if its is None or its.said == "DAMAGED" or (gate.name != "retrieval" and other is not scope):
            continue
        for arm, grades in _table(_details(its).get("by_grade")).items():
            arm = scope.scope.arm if arm == "candidate" else arm
            for grade, counts in _table(grades).items():
                pair = _list(counts)
                if len(pair) != 2 or not all(type(it) is int for it in pair):
                    continue
                match = _DEPTH.fullmatch(grade)
                by_depth = by_depth or match is not None
                panel = (match["group"] if match else "by grade") + (
                    f", length {other.scope.length:,}" if several else ""
                )
                category = f"{100 * float(match['depth']):g} %" if match else grade
                right, total = (it for it in pair if isinstance(it, int))
                panels.setdefault(panel, {}).setdefault(arm, {})[category] = right, total
    if not panels:
        return None
    arms = list(dict.fromkeys(arm for panel in panels.values() for arm in panel))
    drawn, table = [], []
    for name, panel in panels.items():
        categories = sorted({it for grades in panel.values() for it in grades}, key=_natural)
        curves = [
            Curve(
                name=arm, series=arms.index(arm),
                points=tuple(
                    (float(place), panel[arm][it][0] / panel[arm][it][1])
                    for place, it in enumerate(categories)
                    if it in panel[arm] and panel[arm][it][1]
                ),
            )
            for arm in panel
        ]  # fmt: skip
        drawn.append((name, categories, curves))
        for it in categories:
            cells = tuple(
                f"{panel[arm][it][0]} of {panel[arm][it][1]}" if it in panel.get(arm, {}) else "-" for arm in arms
            )
            table.append((name, it, *cells))
    what = "depth of the needle in the text" if by_depth else "grade of the question"
    title = "Right answers by depth and length" if by_depth else "Right answers by grade"
    svg = plots.groups(
        f"{key}-grades", title, f"Share of answers right by {what}, for {', '.join(arms)}; a table has the numbers.",
        drawn, names=[(arm, place, False) for place, arm in enumerate(arms)], axis=what,
        columns=1 if len(drawn) == 1 else 2,
    )  # fmt: skip
    return Figure(
        key=f"{key}-grades", title=title, svg=svg,
        caption=f"Share of answers right, by {what}, as the receipt counts them. It decides nothing: the bound above "
        "is over all questions.",
        columns=("questions", "depth" if by_depth else "grade", *arms), rows=tuple(table),
    )  # fmt: skip


def _natural(text: str) -> tuple[object, ...]:
    """A key by which numbers within a text sort as numbers."""
    return tuple(int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", text)))


# -- timing ------------------------------------------------------------------------------------------------------------


def _fidelity(run: RunState, scope: ScopeState, gate: GateState, key: str) -> tuple[Figure, ...]:
    details = _details(gate)
    limits = _table(details.get("limits"))
    found = []
    for name, title, bars in (
        ("ttft_error", "Error of the time to the first token", ("p50", "p99")),
        ("tpot_error", "Error of the time per output token", ("p99",)),
        ("lateness", "Dispatch after the intended arrival", ("p99",)),
    ):
        entries, table = [], []
        for case, numbers in _table(details.get("cases")).items():
            values = {it: _float(_table(_table(numbers).get(name)).get(it)) for it in ("p50", "p99", "max")}
            if any(math.isnan(it) for it in values.values()):
                continue
            marks = tuple(
                Mark(x=max(value, 1e-4), series=place, tip=f"{case}: {it} {milliseconds(value)}")
                for place, (it, value) in enumerate(values.items())
            )
            span = Span(start=max(values["p50"], 1e-4), end=max(values["max"], 1e-4), series=0, thick=True)
            entries.append(Row(label=case, value=f"p99 {milliseconds(values['p99'])}", marks=marks, spans=(span,)))
            table.append((case, *(f"{value:.6f}" for value in values.values())))
        lines = [
            Line(at=_float(limits.get(f"{name}_{bar}")), text=f"{bar} limit {_float(limits.get(f'{name}_{bar}')):g} ms")
            for bar in bars
            if not math.isnan(_float(limits.get(f"{name}_{bar}")))
        ]
        if not entries:
            continue
        svg = plots.rows(
            f"{key}-{name}", title, "; ".join(f"{row.label}: {row.value}" for row in entries), entries,
            axis="milliseconds (log scale)", lines=lines, log=True, form=lambda value: f"{value:g}",
            legend=(("median", 0, False), ("p99", 1, False), ("largest", 2, False)),
        )  # fmt: skip
        found.append(
            Figure(
                key=f"{key}-{name}", title=title, svg=svg,
                caption="The recorder against a local server of known delays, by case; each quantile must be below its "
                "limit.",
                columns=("case", "p50, ms", "p99, ms", "max, ms"), rows=tuple(table),
            )
        )  # fmt: skip
    return tuple(found)


def _trial(run: RunState, scope: ScopeState, gate: GateState, key: str) -> tuple[Figure, ...]:
    found, notes = loads(run, scope)
    if not found:
        if not notes:
            return ()
        empty = plots.rows(f"{key}-none", "No recording", "No recording can be shown.", (), axis="")
        return (
            Figure(
                key=f"{key}-none", title="Distributions of TTFT and TPOT", svg=empty, columns=(), rows=(), notes=notes,
                caption="No recording that the receipts name can be read.",
            ),
        )  # fmt: skip
    arms = list(dict.fromkeys([scope.scope.arm, *sorted({it.arm for it in found})]))
    arms = [arm for arm in arms if any(it.arm == arm for it in found)]
    measured = _measured(run, scope)
    return (
        _distributions(found, arms, measured, notes, key),
        _lateness(scope, found, arms, notes, key),
    )


def _measured(run: RunState, scope: ScopeState) -> frozenset[int] | None:
    """The blocks that are compared, of the superiority receipt of any arm; None where there is none."""
    for other in run.scopes:
        gate = other.gate("superiority")
        if other.scope.lock == scope.scope.lock and other.scope.length == scope.scope.length and gate is not None:
            blocks = [it for it in _list(_details(gate).get("blocks")) if isinstance(it, int)]
            if blocks:
                return frozenset(blocks)
    return None


def _distributions(
    found: Sequence[Load], arms: Sequence[str], measured: frozenset[int] | None, notes: Sequence[str], key: str
) -> Figure:
    kept = [it for it in found if measured is None or it.block in measured]
    cells = list(dict.fromkeys(it.cell for it in kept))
    panels, table = [], []
    for cell in cells:
        for name, axis, take in (
            ("TTFT", "time to first token, ms", _ttft),
            ("TPOT", "time per output token, ms", _tpot),
        ):
            series = []
            for place, arm in enumerate(arms):
                values = [value for it in kept if (it.arm, it.cell) == (arm, cell) for value in take(it)]
                if not values:
                    continue
                series.append((arm, place, values))
                shares = tuple(milliseconds(rank(values, quantile)) for _, quantile in _QUANTILES)
                failed = sum(math.isinf(value) for value in values)
                table.append((cell, name, arm, str(len(values)), *shares, str(failed)))
            panels.append((f"{name}, {cell}", axis, series))
    trials = {(it.arm, it.block, it.file.rpartition("/")[0]) for it in kept}
    svg = plots.distributions(
        f"{key}-distributions", "Distributions of TTFT and TPOT by arm",
        f"Empirical distribution functions over {len(trials)} trials; medians and tails follow as a table.",
        panels, names=[(arm, place, False) for place, arm in enumerate(arms)],
    )  # fmt: skip
    return Figure(
        key=f"{key}-distributions", title="TTFT and TPOT by arm", svg=svg, notes=tuple(notes),
        caption="Share of requests that took at most so long, over the measured blocks together. The mark is the "
        "median. A failed request counts as infinite, and of a closed loop the first burst is left out, as in the "
        f"figures. A curve has at most {plots.CURVE} steps. What is compared are the blocks, below.",
        columns=("cell", "quantity", "arm", "requests", *(name for name, _ in _QUANTILES), "failed"), rows=tuple(table),
    )  # fmt: skip


def _ttft(load: Load) -> Sequence[float]:
    return load.ttft[load.burst :]


def _tpot(load: Load) -> Sequence[float]:
    return load.tpot[load.burst :]


def _lateness(scope: ScopeState, found: Sequence[Load], arms: Sequence[str], notes: Sequence[str], key: str) -> Figure:
    limit = number(scope.study.table("fidelity").get("lateness_p99_ms"))
    trials: list[tuple[str, list[Mark]]] = []
    table = []
    for load in found:
        values = load.lateness[load.burst :] or load.lateness
        marks = []
        for name, quantile, small in (("p50", 0.5, True), ("p99", 0.99, False)):
            value = rank(values, quantile)
            if not math.isnan(value):
                marks.append(
                    Mark(
                        x=0.0, y=max(value, 1e-4), series=arms.index(load.arm), small=small, hollow=small,
                        tip=f"{load.arm}, block {load.block}, {load.cell}: {name} {milliseconds(value)}",
                    )
                )  # fmt: skip
        trials.append((str(load.block if load.block is not None else "?"), marks))
        table.append(
            (
                load.arm, str(load.block), load.cell, str(load.offered), str(load.failed),
                *(milliseconds(rank(values, quantile)) for _, quantile in _QUANTILES),
            )
        )  # fmt: skip
    worst = max((rank(it.lateness, 1.0) for it in found if it.lateness), default=math.nan)
    svg = plots.record(
        f"{key}-lateness", "Dispatch lateness of each load",
        f"{len(found)} loads in the order in which they ran; the largest lateness is {milliseconds(worst)}.",
        trials, names=[(arm, place, False) for place, arm in enumerate(arms)],
        limit=None if limit is None else Line(at=limit, text=f"{limit:g} ms"),
        axis="block of each load, in order of time",
    )  # fmt: skip
    return Figure(
        key=f"{key}-lateness", title="Dispatch lateness", svg=svg, notes=tuple(notes),
        caption="How long after its intended arrival each request was dispatched, by load: the hollow mark is the "
        "median, the solid one p99. A client that is late measures itself."
        + (" The line is the limit of the gate fidelity; that of a trial follows from its own TTFT." if limit else ""),
        columns=("arm", "block", "cell", "offered", "failed", *(name for name, _ in _QUANTILES)), rows=tuple(table),
    )  # fmt: skip


def _superiority(run: RunState, scope: ScopeState, gate: GateState, key: str) -> tuple[Figure, ...]:
    details = _details(gate)
    practical = _float(details.get("practical"))
    noise = [_table(it) for it in _list(details.get("null"))]
    entries: list[Row] = []
    table: list[tuple[str, ...]] = []
    seen: set[tuple[object, object]] = set()
    lower_better: set[bool] = set()
    for it in map(_table, _list(details.get("family"))):
        effects = {block: _float(value) for block, value in _table(it.get("effects")).items()}
        what = f"{it.get('metric')}, {it.get('cell')}"
        label = f"{it.get('candidate')} / {it.get('control')}"
        lower_better.add(it.get("better") != "higher")
        low, middle, high = (_float(it.get(name)) for name in ("lower", "median", "upper"))
        known = not math.isnan(middle)
        count = max(1, len(effects))
        marks = [
            Mark(x=value, y=(place - (count - 1) / 2) * min(4.0, 20 / count), small=True, hollow=True,
                 tip=f"block {block}: {value:.4f}")
            for place, (block, value) in enumerate(effects.items())
            if math.isfinite(value)
        ]  # fmt: skip
        spans = (Span(start=low, end=high, series=0, thick=True),) if known else ()
        if known:
            marks.append(Mark(x=middle, series=3, tip=f"median {middle:.4f}"))
        value = f"{middle:.3f}" if known else "incomplete"
        entries.append(Row(label=label, under=what, value=value, marks=tuple(marks), spans=spans))
        coverage, p, holm = (_float(it.get(name)) for name in ("coverage", "p", "p_holm"))
        table.append(
            (
                f"{label}: {what}", f"{middle:.4f}" if known else "-",
                f"[{low:.4f}, {high:.4f}] at {100 * coverage:.1f} %" if known else "-",
                f"{p:.4g}" if not math.isnan(p) else "-", f"{holm:.4g}" if not math.isnan(holm) else "-",
                _met(it.get("screen")), _met(it.get("claim")),
                ", ".join(f"{block}: {value:.4f}" for block, value in effects.items()) or "-",
            )
        )  # fmt: skip
        pair = it.get("cell"), it.get("metric")
        if pair in seen:
            continue
        seen.add(pair)
        for null in noise:
            if (null.get("cell"), null.get("metric")) != pair:
                continue
            apart = _float(null.get("effect"))
            blocks = " and ".join(str(block) for block in _list(null.get("pair")))
            if math.isfinite(apart):
                label = f"A/A, blocks {blocks}"
                marks = [Mark(x=apart, series=1, hollow=True, tip=f"{label}: {apart:.4f}")]
                entries.append(Row(label=label, under=what, value=f"{apart:.3f}", marks=tuple(marks)))
                table.append((f"{label}: {what}", f"{apart:.4f}", "-", "-", "-", "-", "-", "-"))
    if not any(row.marks for row in entries):
        return ()
    lines = [Line(at=1.0, text="no effect", limit=False)]
    if not math.isnan(practical):
        lines += [Line(at=1 - practical, text=f"{100 * practical:g} % lower")] if True in lower_better else []
        lines += [Line(at=1 + practical, text=f"{100 * practical:g} % higher")] if False in lower_better else []
    svg = plots.rows(
        f"{key}-effects", "Effect of each block, median and interval",
        "; ".join(f"{row.label}, {row.under}: {row.value}" for row in entries) + "; 1 is no effect.",
        entries, axis="ratio, candidate / control of the same block (A/A: second block / first)", lines=lines,
        label=230, gutter=90, form=lambda value: f"{value:.4g}",
        legend=(("a block", 0, True), ("median, with its interval", 3, False), ("A/A", 1, True)),
    )  # fmt: skip
    return (
        Figure(
            key=f"{key}-effects", title="Block effects", svg=svg,
            caption="One mark is one block: the candidate's figure over the control's in the same block. The gate "
            "decides on the exact sign test over blocks, Holm-adjusted over the declared family, and on the practical "
            "screen of the median; the interval is of the median, by order statistics.",
            columns=("comparison", "median", "interval", "p", "Holm", "screen", "claim", "by block"), rows=tuple(table),
        ),
    )  # fmt: skip


def _met(value: object) -> str:
    return "met" if value is True else "not met" if value is False else "-"


_Make = Callable[[RunState, ScopeState, GateState, str], tuple[Figure, ...]]
_GATES: Final[Mapping[str, _Make]] = {
    "placement": _placement,
    "nll": _nll,
    **dict.fromkeys(TASKS, _preservation),
    "fidelity": _fidelity,
    "trial": _trial,
    "superiority": _superiority,
}
