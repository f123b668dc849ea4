"""The definition of every figure, as the string that stands beside its value; ``docs/metrics.md`` has the same."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

QUANTILES: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {"p50": (1, 2), "p90": (9, 10), "p99": (99, 100), "max": (1, 1)}
)
"""The percentiles that are reported, as exact fractions."""

_QUANTITIES: Final = {
    "ttft_intended": "first_event_with_output_token_ids.read - intended_arrival",
    "ttft_send": "first_event_with_output_token_ids.read - send_start",
    "tpot": "(last_event_with_output_token_ids.read - first_event_with_output_token_ids.read) / (output_tokens - 1)",
    "e2e": "last_event_with_output_token_ids.read - intended_arrival",
    "lateness": "dispatch - intended_arrival",
}
QUANTITIES: Final = tuple(_QUANTITIES)

_POPULATION: Final = {
    "ttft_intended": "all offered requests, failed ones as +inf",
    "ttft_send": "all offered requests, failed ones as +inf",
    "tpot": "offered requests of two or more output tokens, failed ones as +inf",
    "e2e": "all offered requests, failed ones as +inf",
    "lateness": "all dispatched requests",
}
_RANK: Final = "nearest rank ceil(q * n)"
_STEADY: Final = "; closed loop: without the first N requests, which are burst_*"


def _all() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, formula in _QUANTITIES.items():
        for quantile in QUANTILES:
            what = f"{quantile} by {_RANK} of [{formula}] over {_POPULATION[name]}"
            found[f"{name}_{quantile}"] = what + _STEADY
            found[f"burst_{name}_{quantile}"] = what + "; closed loop: of the first N requests alone"
    found["mean_ttft_send"] = (
        f"mean of [{_QUANTITIES['ttft_send']}] over requests with a first token, failed ones included"
    )
    found["output_throughput"] = (
        "output_tokens of completed requests / (last end of a request - first intended_arrival), in seconds, with drain"
    )
    found["request_throughput"] = (
        "completed requests / (last end of a request - first intended_arrival), in seconds, with drain"
    )
    found["goodput_tokens"] = "output_tokens of completed requests"
    found["tokens_per_event_max"] = "the most output_tokens that one event brought"
    return found


FORMULAS: Final[Mapping[str, str]] = MappingProxyType(_all())
"""Formula string by figure."""

NANOSECONDS, PER_SECOND, TOKENS = "ns", "1/s", "tokens"


def unit_of(name: str) -> str:
    """The unit of a figure."""
    if name.endswith("_throughput"):
        return PER_SECOND
    return TOKENS if name in ("goodput_tokens", "tokens_per_event_max") else NANOSECONDS
