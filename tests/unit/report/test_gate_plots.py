"""Plots: scales, steps, and what text becomes in them."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pytest_kvqual.report.gate import plots
from pytest_kvqual.report.gate.plots import Curve, Line, Mark, Row, Span

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False)
POSITIVE = st.floats(1e-6, 1e6)


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.booleans())
def test_every_value_is_inside_its_scale(values: list[float], zero: bool) -> None:
    """Each value is drawn within the plot, and a larger one not to the left of a smaller one."""
    scale = plots.scale(values, 10, 110, zero=zero)
    drawn = [scale(value) for value in sorted(values)]
    assert all(10 <= it <= 110 for it in drawn)
    assert drawn == sorted(drawn)


@given(st.lists(POSITIVE, min_size=1, max_size=20))
def test_a_logarithmic_scale_holds_every_value(values: list[float]) -> None:
    """The same on a logarithmic axis, whose ticks are within it too."""
    scale = plots.scale(values, 10, 110, log=True)
    assert all(10 <= scale(value) <= 110 for value in values)
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks())


@given(NUMBERS, NUMBERS)
def test_ticks_are_few_and_within(one: float, other: float) -> None:
    """There is a handful of ticks, evenly apart, none of them outside."""
    assume(abs(one - other) > 1e-3)
    scale = plots.scale([one, other], 0, 100)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 14
    slack = 1e-6 * (scale.high - scale.low)
    assert all(scale.low - slack <= tick <= scale.high + slack for tick in ticks)


@given(st.lists(st.one_of(st.floats(0.1, 1e4), st.just(math.inf)), min_size=1, max_size=400))
def test_the_steps_are_the_distribution(values: list[float]) -> None:
    """Each drawn step is at a value of the sample, at its share of all of them, failed ones counted; it never falls."""
    points = plots._steps(values)
    assert all(math.isfinite(x) for x, _ in points)
    assert [y for _, y in points] == sorted(y for _, y in points)
    ranked = sorted(values)
    for x, y in points[1::2]:
        assert sum(value <= x for value in ranked) / len(ranked) >= y - 1e-12
    if points:
        assert points[-1][1] <= sum(map(math.isfinite, values)) / len(values) + 1e-12
    if all(map(math.isfinite, values)):
        assert points[-1] == (max(values), 1.0)
    assert len(points) <= 2 * plots.CURVE


TEXT = '<script>alert("1")</script>\u202e\x00'


@pytest.mark.parametrize(
    "svg",
    [
        plots.rows(
            "k", TEXT, TEXT, [Row(label=TEXT, under=TEXT, value=TEXT, marks=(Mark(x=1, tip=TEXT),),
                                  spans=(Span(start=0, end=1), Span(start=0, end=2, thick=True)))],
            axis=TEXT, lines=(Line(at=1.0, text=TEXT), Line(at=1.001, text=TEXT)), legend=((TEXT, 0, True),),
        ),
        plots.stems("k", TEXT, TEXT, [(TEXT, [(TEXT, 0.1), (TEXT, -0.2)], 0.0, 0.1)], margin=0.01, unit=TEXT),
        plots.groups("k", TEXT, TEXT, [(TEXT, [TEXT], [Curve(name=TEXT, series=0, points=((0, 0.5),))])],
                     names=[(TEXT, 0, False)], axis=TEXT),
        plots.distributions("k", TEXT, TEXT, [(TEXT, TEXT, [(TEXT, 0, [1.0, 2.0, math.inf])])],
                            names=[(TEXT, 0, False)]),
        plots.record("k", TEXT, TEXT, [(TEXT, [Mark(x=0, y=1.0, tip=TEXT)])], names=[(TEXT, 0, False)],
                     limit=Line(at=5.0, text=TEXT), axis=TEXT),
    ],
    ids=["rows", "stems", "groups", "distributions", "record"],
)  # fmt: skip
def test_text_stays_text(svg: str) -> None:
    """Every plot is well-formed, and what is written in it is text with nothing unseen."""
    root = ElementTree.fromstring(svg)
    assert {it.tag.partition("}")[2] for it in root.iter()} <= {"svg", "title", "desc", "line", "path", "rect", "text"}
    assert "\u202e" not in svg
    assert "\x00" not in svg


def test_labels_of_lines_do_not_overlap() -> None:
    """Two reference lines side by side have their labels at different heights."""
    svg = plots.rows(
        "k", "t", "d", [Row(label="a", marks=(Mark(x=0.9), Mark(x=1.1)))], axis="x",
        lines=(Line(at=1.01, text="no effect"), Line(at=1.011, text="5 % lower")),
    )  # fmt: skip
    root = ElementTree.fromstring(svg)
    heights = {it.attrib["y"] for it in root.iter() if it.text in ("no effect", "5 % lower")}
    assert len(heights) == 2


def test_nothing_finite_is_still_a_plot() -> None:
    """Numbers that are none do not break a plot."""
    nan = math.nan
    svg = plots.stems("k", "t", "d", [("c", [("a", nan)], nan, nan)], margin=0.01, unit="nats")
    assert "nan" not in svg.partition("<line")[2].partition("d=")[0]
    ElementTree.fromstring(svg)
