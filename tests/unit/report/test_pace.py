"""Rate and time left."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.progress import Boot, Event, Step, Timed
from pytest_kvqual.report.pace import Pace, clock, line, rate

SECOND = 1_000_000_000
TIMES = st.integers(-(10**12), 10**15)


@given(
    begun=st.integers(0, 10**12),
    told=st.lists(st.tuples(st.integers(-5, 50), st.none() | st.integers(-5, 50), TIMES), max_size=30),
    now=TIMES,
)
def test_whatever_it_is_told_it_neither_fails_nor_goes_back(
    begun: int, told: list[tuple[int, int | None, int]], now: int
) -> None:
    """Steps and time only grow, the share is of 0 to 1, and rate and time left are finite, or none."""
    pace, done, elapsed = Pace(begun), 0, 0.0
    for steps, total, at in told:
        pace.update(steps, total, at)
        assert pace.done >= done
        assert pace.elapsed_s(at) >= 0
        assert pace.elapsed_s(begun) >= elapsed
        done, elapsed = pace.done, pace.elapsed_s(begun)
        rates = pace.per_second
        assert rates is None or (math.isfinite(rates) and rates > 0)
        for moment in (now, at):
            left = pace.left_s(moment)
            assert left is None or (math.isfinite(left) and left >= 0)
            assert line(Step(arm="a", what="w", begun_ns=begun, done=steps, total=total), pace, moment)


@given(total=st.integers(2, 10_000), each=st.integers(1, 10**12), data=st.data())
def test_at_an_even_pace_the_time_left_is_that_of_the_steps_left(total: int, each: int, data: st.DataObject) -> None:
    """After n of N steps of one length each, N - n of them are left, and so is their time, less what passed since."""
    done = data.draw(st.integers(1, total - 1))
    waited = data.draw(st.integers(0, 2 * each))
    pace = Pace(0)
    pace.update(done, total, done * each)
    assert pace.per_second == pytest.approx(SECOND / each)
    assert pace.left_s(done * each) == pytest.approx((total - done) * each / SECOND)
    left = max(0.0, ((total - done) * each - waited) / SECOND)
    assert pace.left_s(done * each + waited) == pytest.approx(left, abs=1e-6 * each / SECOND)
    assert pace.share == pytest.approx(done / total)


@given(total=st.integers(1, 100), at=st.integers(1, 10**12))
def test_at_the_end_nothing_is_left(total: int, at: int) -> None:
    """The last step leaves no time and the whole share."""
    pace = Pace(0)
    pace.update(total, total, at)
    assert pace.left_s(at) == 0.0
    assert pace.share == 1.0


def test_steps_in_no_time_have_no_rate() -> None:
    """Where the clock stood still there is no rate, and no time left to tell."""
    pace = Pace(7)
    pace.update(3, 4, 7)
    assert pace.per_second is None
    assert pace.left_s(7) is None
    assert pace.elapsed_s(7) == 0.0


def test_a_series_of_no_steps_is_over() -> None:
    """Nothing of nothing is all of it."""
    pace = Pace(0)
    pace.update(0, 0, 5)
    assert pace.share == 1.0
    assert pace.left_s(5) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (7.9, "0:07"), (65, "1:05"), (3599.9, "59:59"), (3723, "1:02:03")]
)
def test_clock(seconds: float, text: str) -> None:
    """Whole seconds, rounded down; hours where there are any."""
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("per_second", "text"),
    [
        (371.4, "371/s"),
        (37, "37/s"),
        (9.96, "10/s"),
        (1.34, "1.3/s"),
        (0.42, "0.42/s"),
        (0.0517, "3.1/min"),
        (1e-3, "3.6/h"),
    ],
)
def test_rate(per_second: float, text: str) -> None:
    """Two digits in a unit that makes them readable."""
    assert rate(per_second) == text


STEP = Step(arm="candidate", what="nll", begun_ns=0, done=8, total=32)
CELL = Timed(arm="candidate", what="cell open", begun_ns=0, requests=120, done=120, total=480)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ("candidate: captured earlier", "candidate: captured earlier"),
        (Boot(arm="native", stage="starting", seconds=0.0), "native: starting"),
        (Boot(arm="native", stage="loading weights", seconds=12.3), "native: loading weights, 0:12"),
        (Boot(arm="native", stage="ready", seconds=41.4), "native: ready in 41 s"),
        (STEP, "candidate: nll: 8/32 requests, 0:10, 0.8/s, 0:30 left"),
        (
            Step(arm="a", what="oracle pass 1 of 4, model", begun_ns=0, done=8, total=8, over=True, detail="37 steps"),
            "a: oracle pass 1 of 4, model: 8/8 requests in 0:10, 37 steps",
        ),
        (
            CELL,
            "candidate: cell open: requests 121 to 240 of 480, timed: nothing is drawn until they end",
        ),
        (
            Timed(arm="candidate", what="cell open", begun_ns=0, requests=120, done=240, total=480, over=True),
            "candidate: cell open: 240/480 requests of the plan, 0:10, 24/s, 0:10 left",
        ),
        (
            Timed(arm="candidate", what="cell closed", begun_ns=0, requests=240, done=480, total=480, over=True),
            "candidate: cell closed: 480/480 requests of the plan in 0:10",
        ),
    ],
)
def test_lines(event: Event, text: str) -> None:
    """What is said of each event ten seconds after its series began."""
    pace = Pace(0)
    if not isinstance(event, str | Boot):
        pace.update(event.done, event.total, 10 * SECOND)
    assert line(event, pace, 10 * SECOND) == text
