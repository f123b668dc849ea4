"""The only reader of clocks.

Durations and deadlines come from :func:`monotonic_ns`. :func:`wall_utc` labels a record and enters no computation.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime


def monotonic_ns() -> int:
    """The client's monotonic clock, in nanoseconds since an arbitrary origin."""
    return time.monotonic_ns()


def wall_utc() -> str:
    """The wall time as a label: ISO 8601, UTC, whole seconds (``2031-01-31T23:59:59Z``)."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
