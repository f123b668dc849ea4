"""The server's counters: summed over engines, and nothing but numbers that a counter can have."""

from __future__ import annotations

import pytest

from pytest_kvqual.capture.timing import parse_counters
from pytest_kvqual.errors import ServerError

COUNTED = (
    "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
    "num_preemptions_total", "time_to_first_token_seconds_count", "num_requests_running", "num_requests_waiting",
)  # fmt: skip
SUM, SUCCESS = "time_to_first_token_seconds_sum", "request_success_total"


def page(**changed: str) -> str:
    """A page of two engines, with the values of some samples of the second changed."""
    lines = ["# HELP vllm:prompt_tokens_total of prompts", "# TYPE vllm:prompt_tokens_total counter"]
    for engine in (0, 1):
        values = dict.fromkeys(COUNTED, "3.0") | {SUM: "1.5"} | (changed if engine else {})
        lines += [
            f'vllm:{name}{{engine="{engine}",model_name="a}}b"}} {value}'
            for name, value in values.items()
            if name != SUCCESS
        ]
        lines += [
            f'vllm:{SUCCESS}{{engine="{engine}",finished_reason="{reason}"}} {values.get(SUCCESS, "2.0")}'
            for reason in ("length", "stop")
        ]
    return "\n".join([*lines, 'other_gauge{le="+Inf"} NaN', "another abc"]) + "\n"


def test_counters_are_summed_over_engines() -> None:
    """Each counter is a whole number, the sum of times in seconds, ends by reason; other samples are passed over."""
    found = parse_counters(page(), origin="page")
    assert found["prompt_tokens"] == found["ttft_count"] == found["running"] == 6
    assert found["ttft_sum_s"] == 3.0
    assert found["success"] == {"length": 4, "stop": 4}
    assert parse_counters(page(**{SUM: "1.5e-05", COUNTED[0]: "1.2e+06"}), origin="page")["prompt_tokens"] == 1_200_003


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "abc", "-1", "1e400", "1e20", "0x10", "1_0", "１"])
@pytest.mark.parametrize("name", [COUNTED[0], COUNTED[6], SUM, SUCCESS])
def test_what_is_no_count_is_refused_in_one_line(name: str, value: str) -> None:
    """A sample that no counter can have is named with its value, and never rounded, wrapped or raised as is."""
    with pytest.raises(ServerError, match=name) as caught:
        parse_counters(page(**{name: value}), origin="page")
    assert "\n" not in caught.value.line()


def test_a_fraction_of_a_request_is_refused() -> None:
    """A count is never cut to a whole number; a sum of seconds has a fraction."""
    with pytest.raises(ServerError, match=r"found '1\.5', expected a count"):
        parse_counters(page(**{COUNTED[1]: "1.5"}), origin="page")


@pytest.mark.parametrize("name", [*COUNTED, SUM, SUCCESS])
def test_a_counter_that_is_missing(name: str) -> None:
    """A page without one of the counters is refused, and names it."""
    text = "\n".join(line for line in page().splitlines() if f"{name}{{" not in line)
    with pytest.raises(ServerError, match=name):
        parse_counters(text, origin="page")
