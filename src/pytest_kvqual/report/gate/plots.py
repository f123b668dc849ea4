"""Plots as SVG: few kinds, drawn for reading. Colours are classes of the page's style; shapes tell series apart too.

Each plot is an image with a title and a description, and its numbers stand beside it as a table: see
:class:`Figure`. Text is escaped, and what cannot be seen in it is shown, as everywhere on the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from markupsafe import Markup, escape

from pytest_kvqual.report.gate.words import one_line

WIDTH: Final = 760
SERIES: Final = 4
"""How many series have a look of their own; a fifth looks as the first."""

_LABEL: Final = 190
_GUTTER: Final = 132
_ROW: Final = 34
_CHARACTER: Final = 6.8
"""About how wide a character is, in the units of a plot."""
CURVE: Final = 160
"""The most points of one curve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One plot and its words.

    ``caption`` says what is shown and what decides. ``columns`` and ``rows`` are the same numbers as text, ``notes``
    one line for each thing that is missing from it.
    """

    key: str
    title: str
    caption: str
    svg: Markup
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """One mark at ``x`` (and ``y``, where a plot has one): of a series, solid or hollow, with a text on hovering."""

    x: float
    y: float = 0.0
    series: int = 0
    hollow: bool = False
    small: bool = False
    tip: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A line from ``start`` to ``end`` with bars at its ends; ``thick`` without bars."""

    start: float
    end: float
    series: int = 0
    thick: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row: its label (``under`` in a second line), what stands at the right, and what is drawn."""

    label: str
    under: str = ""
    value: str = ""
    marks: tuple[Mark, ...] = ()
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A reference line: ``limit`` (what must not be reached) or ``plain``."""

    at: float
    text: str
    limit: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One series of points."""

    name: str
    series: int
    points: tuple[tuple[float, float], ...]


@dataclass(slots=True)
class _Svg:
    """Elements, in order."""

    height: float = 0.0
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, look: str) -> None:
        self.parts.append(f'<line class="{look}" x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"/>')

    def text(self, x: float, y: float, text: str, look: str = "tick", anchor: str = "") -> None:
        where = f' text-anchor="{anchor}"' if anchor else ""
        self.parts.append(f'<text class="{look}" x="{_n(x)}" y="{_n(y)}"{where}>{escape(one_line(text))}</text>')

    def rect(self, x: float, y: float, width: float, height: float, look: str) -> None:
        self.parts.append(
            f'<rect class="{look}" x="{_n(x)}" y="{_n(y)}" width="{_n(max(0.0, width))}" '
            f'height="{_n(max(0.0, height))}"/>'
        )

    def path(self, points: Sequence[tuple[float, float]], look: str) -> None:
        steps = "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self.parts.append(f'<path class="{look}" d="M{steps}"/>')

    def mark(self, x: float, y: float, mark: Mark) -> None:
        look = f"m s{mark.series % SERIES}" + (" hollow" if mark.hollow else "")
        tip = f"<title>{escape(one_line(mark.tip))}</title>" if mark.tip else ""
        self.parts.append(
            f'<path class="{look}" d="{_shape(mark.series, x, y, 3.2 if mark.small else 4.6)}">{tip}</path>'
        )

    def done(self, key: str, title: str, description: str, width: float = WIDTH) -> Markup:
        head = (
            f'<svg class="plot" role="img" aria-labelledby="{key}-t {key}-d" viewBox="0 0 {_n(width)} '
            f'{_n(self.height)}" xmlns="http://www.w3.org/2000/svg">'
            f'<title id="{key}-t">{escape(one_line(title))}</title>'
            f'<desc id="{key}-d">{escape(one_line(description))}</desc>'
        )
        return Markup(head + "".join(self.parts) + "</svg>")  # every text in it was escaped above


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _shape(series: int, x: float, y: float, r: float) -> str:
    """Circle, square, triangle, diamond."""
    kind = series % SERIES
    if kind == 0:
        return f"M{_n(x - r)} {_n(y)}a{_n(r)} {_n(r)} 0 1 0 {_n(2 * r)} 0a{_n(r)} {_n(r)} 0 1 0 {_n(-2 * r)} 0z"
    if kind == 1:
        r *= 0.88
        return f"M{_n(x - r)} {_n(y - r)}h{_n(2 * r)}v{_n(2 * r)}h{_n(-2 * r)}z"
    if kind == 2:
        r *= 1.15
        return f"M{_n(x)} {_n(y - r)}L{_n(x + r)} {_n(y + 0.8 * r)}H{_n(x - r)}z"
    r *= 1.2
    return f"M{_n(x)} {_n(y - r)}L{_n(x + r)} {_n(y)}L{_n(x)} {_n(y + r)}L{_n(x - r)} {_n(y)}z"


# -- scales ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels; logarithmic where asked for. Values outside are drawn at the edge."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        if math.isnan(value):
            return self.start
        low, high = self._at(self.low), self._at(self.high)
        share = (self._at(min(max(value, self.low), self.high)) - low) / ((high - low) or 1.0)
        return self.start + share * (self.end - self.start)

    def _at(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def ticks(self, wanted: int = 6) -> list[float]:
        """Round values within it."""
        return _decades(self.low, self.high) if self.log else _round_ticks(self.low, self.high, wanted)


def scale(
    values: Iterable[float], start: float, end: float, *, log: bool = False, zero: bool = False, pad: float = 0.06
) -> Scale:
    """A scale that holds all finite values, with room at both ends; with ``zero`` it begins there."""
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = (min(finite), max(finite)) if finite else (0.1, 1.0)
    if log:
        room = max((high / low) ** pad, 1.15)
        return Scale(low / room, high * room, start, end, log=True)
    if low == high:
        low, high = low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5
    room = pad * (high - low)
    return Scale(0.0 if zero and low >= 0 else low - room, high + room, start, end)


def _round_ticks(low: float, high: float, wanted: int) -> list[float]:
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    raw = span / max(1, wanted)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next((size * it for it in (1, 2, 2.5, 5, 10) if size * it >= raw), size * 10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [0.0 if place == 0 else place * step for place in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1,) if last - first > 4 else (1, 3) if last - first > 1 else (1, 2, 5)
    return [
        10.0**power * factor
        for power in range(first, last + 1)
        for factor in factors
        if low <= 10.0**power * factor <= high
    ]


def plain(value: float) -> str:
    """A tick's text."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


Format = Callable[[float], str]


# -- kinds of plots ----------------------------------------------------------------------------------------------------


def rows(
    key: str,
    title: str,
    description: str,
    entries: Sequence[Row],
    *,
    axis: str,
    lines: Sequence[Line] = (),
    form: Format = plain,
    log: bool = False,
    zero: bool = False,
    legend: Sequence[tuple[str, int, bool]] = (),
    label: int = _LABEL,
    gutter: int = _GUTTER,
) -> Markup:
    """One row for each entry, all over one axis: points, spans, and reference lines through all rows."""
    values = [mark.x for row in entries for mark in row.marks]
    values += [end for row in entries for span in row.spans for end in (span.start, span.end)]
    values += [line.at for line in lines]
    across = scale(values, label, WIDTH - gutter, log=log, zero=zero)
    svg = _Svg()
    top = _legend(svg, legend, label) + 20.0 + 13 * max(0, len(lines) - 1)
    bottom = top + _ROW * len(entries)
    for tick in across.ticks():
        svg.line(across(tick), top, across(tick), bottom, "grid")
        svg.text(across(tick), bottom + 16, form(tick), anchor="middle")
    for place, row in enumerate(entries):
        y = top + _ROW * (place + 0.5)
        if place:
            svg.line(0, y - _ROW / 2, WIDTH, y - _ROW / 2, "rule")
        svg.text(0, y + (-3 if row.under else 4), _fit(row.label, label - 12), "lab")
        if row.under:
            svg.text(0, y + 11, _fit(row.under, label - 12))
        for span in row.spans:
            look = f"span s{span.series % SERIES}" + (" thick" if span.thick else "")
            svg.line(across(span.start), y, across(span.end), y, look)
            if not span.thick:
                for end in (span.start, span.end):
                    svg.line(across(end), y - 5, across(end), y + 5, f"span s{span.series % SERIES}")
        for mark in row.marks:
            svg.mark(across(mark.x), y + mark.y, mark)
        svg.text(WIDTH, y + 4, row.value, "val", anchor="end")
    taken: list[tuple[float, float, float]] = []
    for line in lines:
        x, y = across(line.at), top - 8
        svg.line(x, top - 6, x, bottom, "limit" if line.limit else "zero")
        edge = "end" if x > (label + WIDTH - gutter) / 2 else "start"
        size = _CHARACTER * len(line.text)
        left = x - 3 - size if edge == "end" else x + 3
        while any(left < end and begin < left + size and y == at for begin, end, at in taken):
            y -= 13
        taken.append((left, left + size, y))
        svg.text(x + (-3 if edge == "end" else 3), y, line.text, "limtext" if line.limit else "tick", anchor=edge)
    svg.text((label + WIDTH - gutter) / 2, bottom + 34, axis, "axis", anchor="middle")
    svg.height = bottom + 42
    return svg.done(key, title, description)


def stems(
    key: str,
    title: str,
    description: str,
    panels: Sequence[tuple[str, Sequence[tuple[str, float]], float, float]],
    *,
    margin: float,
    unit: str,
) -> Markup:
    """One panel for each control: a stem for each document, the mean, its upper bound, and the margin.

    Args:
        key: Of the ids within the image.
        title: Of the image.
        description: What it shows, in a sentence.
        panels: Control, (document, difference) in order, mean, upper bound.
        margin: What the upper bound must be below.
        unit: Of all of them.
    """
    svg = _Svg()
    left, right, height, y0 = 62.0, WIDTH - 128.0, 168.0, 6.0
    for control, documents, mean, upper in panels:
        values = [value for _, value in documents] + [0.0, margin, mean, upper]
        down = scale(values, y0 + height - 8, y0 + 24)
        svg.text(0, y0 + 12, f"against {control}", "lab")
        for tick in down.ticks(5):
            svg.line(left, down(tick), right, down(tick), "grid")
            svg.text(left - 8, down(tick) + 4, plain(tick), anchor="end")
        if math.isfinite(mean) and math.isfinite(upper):
            svg.rect(left, min(down(mean), down(upper)), right - left, abs(down(upper) - down(mean)), "band")
            svg.line(left, down(mean), right, down(mean), "mean")
            svg.line(left, down(upper), right, down(upper), "upper")
        svg.line(left, down(0.0), right, down(0.0), "zero")
        svg.line(left, down(margin), right, down(margin), "limit")
        step = (right - left) / max(1, len(documents))
        for place, (name, value) in enumerate(documents):
            x = left + step * (place + 0.5)
            svg.line(x, down(0.0), x, down(value), "stem")
            svg.mark(x, down(value), Mark(x=x, small=True, tip=f"{name}: {value:+.6f} {unit}"))
            if place == 0 or (place + 1) % 8 == 0:
                svg.text(x, y0 + height + 8, str(place + 1), anchor="middle")
        ends = [(down(margin), f"margin {margin:g}", "limtext"), (down(upper), f"bound {upper:+.4f}", "tick"),
                (down(mean), f"mean {mean:+.4f}", "tick")]  # fmt: skip
        for y, text, look in _apart(ends):
            svg.text(right + 8, y + 4, text, look)
        y0 += height + 26
    svg.text(
        (left + right) / 2, y0 + 2, f"document, in the order of the panel; ΔNLL in {unit}", "axis", anchor="middle"
    )
    svg.height = y0 + 10
    return svg.done(key, title, description)


def groups(
    key: str,
    title: str,
    description: str,
    panels: Sequence[tuple[str, Sequence[str], Sequence[Curve]]],
    *,
    names: Sequence[tuple[str, int, bool]],
    axis: str,
    columns: int = 2,
) -> Markup:
    """Shares by category: a panel for each group, a marked line for each series.

    Args:
        key: Of the ids within the image.
        title: Of the image.
        description: What it shows, in a sentence.
        panels: Title, categories, and curves whose x is a category's place and whose y a share.
        names: The legend.
        axis: What the categories are.
        columns: How many panels stand side by side.
    """
    svg = _Svg()
    top = _legend(svg, names, 0) + 10.0
    columns = max(1, min(columns, len(panels)))
    wide, height = WIDTH / columns, 150.0
    for place, (name, categories, curves) in enumerate(panels):
        x0, y0 = wide * (place % columns) + 44, top + (height + 62) * (place // columns)
        x1 = wide * (place % columns + 1) - 14
        down = Scale(0.0, 1.0, y0 + height + 18, y0 + 24)
        svg.text(x0 - 44, y0 + 12, _fit(name, wide - 20), "lab")
        for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
            svg.line(x0, down(tick), x1, down(tick), "grid")
            svg.text(x0 - 8, down(tick) + 4, f"{100 * tick:.0f} %", anchor="end")
        step = (x1 - x0) / max(1, len(categories))
        for spot, category in enumerate(categories):
            svg.text(x0 + step * (spot + 0.5), y0 + height + 36, _fit(category, step + 8), anchor="middle")
        for number, curve in enumerate(curves):
            shift = (number - (len(curves) - 1) / 2) * min(7.0, step / 8)
            points = [(x0 + step * (x + 0.5) + shift, down(y)) for x, y in curve.points]
            if len(points) > 1:
                svg.path(points, f"curve thin s{curve.series % SERIES}")
            for (x, y), (_, share) in zip(points, curve.points, strict=True):
                svg.mark(x, y, Mark(x=x, series=curve.series, tip=f"{curve.name}: {100 * share:.1f} %"))
    deep = (len(panels) + columns - 1) // columns
    svg.text(WIDTH / 2, top + (height + 62) * deep - 2, axis, "axis", anchor="middle")
    svg.height = top + (height + 62) * deep + 6
    return svg.done(key, title, description)


def distributions(
    key: str,
    title: str,
    description: str,
    panels: Sequence[tuple[str, str, Sequence[tuple[str, int, Sequence[float]]]]],
    *,
    names: Sequence[tuple[str, int, bool]],
) -> Markup:
    """Empirical distribution functions: panels two by two, a stepped curve for each arm, a mark at its median.

    A request that failed is infinite: its arm's curve ends below 100 %.

    Args:
        key: Of the ids within the image.
        title: Of the image.
        description: What it shows, in a sentence.
        panels: Title, the axis' text, and (arm, series, values).
        names: The legend.
    """
    svg = _Svg()
    top = _legend(svg, names, 0) + 10.0
    columns = min(2, max(1, len(panels)))
    wide, height = WIDTH / columns, 170.0
    for place, (name, axis, series) in enumerate(panels):
        x0, y0 = wide * (place % columns) + 44, top + (height + 66) * (place // columns)
        x1 = wide * (place % columns + 1) - 18
        finite = [value for _, _, values in series for value in values if math.isfinite(value) and value > 0]
        log = bool(finite) and max(finite) > 12 * min(finite)
        across = scale(finite, x0, x1, log=log, pad=0.03)
        down = Scale(0.0, 1.0, y0 + height + 18, y0 + 24)
        svg.text(x0 - 44, y0 + 12, name, "lab")
        for tick in (0.0, 0.5, 0.9, 1.0):
            svg.line(x0, down(tick), x1, down(tick), "grid")
            if tick != 1.0:
                svg.text(x0 - 8, down(tick) + 4, f"{100 * tick:.0f} %", anchor="end")
        svg.text(x0 - 8, down(1.0) + 1, "100 %", anchor="end")
        for tick in across.ticks(5):
            svg.line(across(tick), down(0.0), across(tick), down(0.0) + 4, "zero")
            svg.text(across(tick), y0 + height + 34, plain(tick), anchor="middle")
        svg.text((x0 + x1) / 2, y0 + height + 50, axis + (" (log scale)" if log else ""), "axis", anchor="middle")
        for arm, number, values in series:
            points = _steps(values)
            if points:
                svg.path([(across(x), down(y)) for x, y in points], f"curve s{number % SERIES}")
            ranked = sorted(values)
            middle = ranked[(len(ranked) + 1) // 2 - 1] if ranked else math.nan
            if math.isfinite(middle):
                tip = f"{arm}: median {middle:.3f} ms"
                svg.mark(across(middle), down(0.5), Mark(x=middle, series=number, tip=tip))
    deep = (len(panels) + columns - 1) // columns
    svg.height = top + (height + 66) * deep
    return svg.done(key, title, description)


def record(
    key: str,
    title: str,
    description: str,
    trials: Sequence[tuple[str, Sequence[Mark]]],
    *,
    names: Sequence[tuple[str, int, bool]],
    limit: Line | None,
    axis: str,
) -> Markup:
    """Marks over trials in order, on a logarithmic axis of milliseconds, with a limit.

    Args:
        key: Of the ids within the image.
        title: Of the image.
        description: What it shows, in a sentence.
        trials: A short label and its marks; their ``y`` is in milliseconds.
        names: The legend.
        limit: What must not be reached.
        axis: What the trials are.
    """
    svg = _Svg()
    top = _legend(svg, names, 0) + 12.0
    left, right, height = 62.0, WIDTH - 110.0, 190.0
    values = [mark.y for _, marks in trials for mark in marks] + ([limit.at] if limit else [])
    down = scale(values, top + height, top + 8, log=True)
    for tick in down.ticks():
        svg.line(left, down(tick), right, down(tick), "grid")
        svg.text(left - 8, down(tick) + 4, f"{tick:g} ms", anchor="end")
    step = (right - left) / max(1, len(trials))
    every = max(1, math.ceil(len(trials) / 24))
    for place, (name, marks) in enumerate(trials):
        x = left + step * (place + 0.5)
        real = [mark.y for mark in marks if math.isfinite(mark.y) and mark.y > 0]
        if len(real) > 1:
            svg.line(x, down(min(real)), x, down(max(real)), "stem")
        for mark in marks:
            svg.mark(x, down(mark.y), mark)
        if place % every == 0:
            svg.text(x, top + height + 18, name, anchor="middle")
    if limit is not None:
        svg.line(left, down(limit.at), right, down(limit.at), "limit")
        svg.text(right + 8, down(limit.at) + 4, limit.text, "limtext")
    svg.text((left + right) / 2, top + height + 36, axis, "axis", anchor="middle")
    svg.height = top + height + 44
    return svg.done(key, title, description)


def _steps(values: Sequence[float]) -> list[tuple[float, float]]:
    """The steps of a distribution function; of more values than :data:`CURVE`, at that many even shares."""
    ranked = sorted(values)
    total = len(ranked)
    places = range(total) if total <= CURVE else sorted({round(it * (total - 1) / (CURVE - 1)) for it in range(CURVE)})
    points: list[tuple[float, float]] = []
    before = 0.0
    for place in places:
        value, share = ranked[place], (place + 1) / total
        if not math.isfinite(value):
            break
        points += [(value, before), (value, share)]
        before = share
    return points


def _legend(svg: _Svg, names: Sequence[tuple[str, int, bool]], x: float) -> float:
    """Marks and names in a line above a plot, over as many lines as they take; returns the height used."""
    if not names:
        return 0.0
    at, y = float(x), 12.0
    for name, series, hollow in names:
        wide = 22 + _CHARACTER * len(one_line(name))
        if at + wide > WIDTH and at > x:
            at, y = float(x), y + 18
        svg.mark(at + 6, y - 4, Mark(x=at, series=series, hollow=hollow))
        svg.text(at + 16, y, name, "tick")
        at += wide + 12
    return y + 4


def _apart(texts: Sequence[tuple[float, str, str]], room: float = 14.0) -> list[tuple[float, str, str]]:
    """Texts at the right of a plot, moved down where they would overlap."""
    found: list[tuple[float, str, str]] = []
    for y, text, look in sorted(texts):
        found.append((max(y, found[-1][0] + room) if found else y, text, look))
    return found


def _fit(text: str, width: float) -> str:
    size = max(3, int(width / 6.6))
    shown = one_line(text)
    return shown if len(shown) <= size else f"{shown[: size - 1]}…"
