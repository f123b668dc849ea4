"""The clocks."""

from __future__ import annotations

import re

from pytest_kvqual import _clock


def test_the_monotonic_clock_does_not_go_back() -> None:
    """Successive readings are integers that do not decrease."""
    readings = [_clock.monotonic_ns() for _ in range(100)]
    assert all(isinstance(reading, int) for reading in readings)
    assert readings == sorted(readings)


def test_the_wall_time_is_an_iso_8601_label_in_utc() -> None:
    """The label has whole seconds and ends in Z."""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", _clock.wall_utc())
