"""One timed interval: the requests of a frozen trace, and what the server counts before and after it.

Nothing here runs without a :class:`~pytest_kvqual.judge.permit.TimingPermit`, whose judgment goes into every recording.
The server's counters are read outside the interval; none of its clocks is subtracted from the client's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Final

import httpx

from pytest_kvqual._clock import monotonic_ns
from pytest_kvqual.capture.recorder import Load, Offered, replay
from pytest_kvqual.errors import CaptureError, ServerError

if TYPE_CHECKING:
    from pytest_kvqual.judge.permit import TimingPermit
    from pytest_kvqual.study.panels import PanelItem
    from pytest_kvqual.study.trace import Trace

GATES: Final = ("trial", "pilot")
"""What a permit for a timed interval is granted for."""

_READ_LIMIT_S = 10.0
_QUIET_LIMIT_S = 10.0
_COUNTED_S = 1.0
_POLL_S = 0.05
_COUNTERS: Final = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prefix_cache_queries": "vllm:prefix_cache_queries_total",
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
    "ttft_count": "vllm:time_to_first_token_seconds_count",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
}
_TTFT_SUM = "vllm:time_to_first_token_seconds_sum"
_SUCCESS = "vllm:request_success_total"
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,3})?")
_MOST: Final = 2**63
_REASON = re.compile(r'finished_reason="([^"]*)"')


def body_of(prompt: Sequence[int], *, model: str, request_id: str, max_tokens: int) -> bytes:
    """The body of a timed request: a greedy completion of exactly ``max_tokens`` tokens, streamed with token ids."""
    document = {
        "model": model,
        "request_id": request_id,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        # Every arm generates the same number of tokens, whatever it answers.
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def offered_of(trace: Trace, items: Mapping[str, PanelItem], *, model: str, tag: str) -> list[Offered]:
    """The requests of a trace, ready to send; ``tag`` makes their names unique on the server.

    Raises:
        CaptureError: The trace names a prompt that the panel lacks.
    """
    offered = []
    for line in trace.requests:
        if line.prompt not in items:
            raise CaptureError(f"trace of {trace.cell}: found the prompt '{line.prompt}', expected one of its panel")
        offered.append(
            Offered(
                request=line.request,
                prompt=line.prompt,
                max_tokens=line.max_tokens,
                intended_ns=line.intended_ns,
                body=body_of(
                    items[line.prompt].prompt,
                    model=model,
                    request_id=f"{tag}-{line.request}",
                    max_tokens=line.max_tokens,
                ),
            )
        )
    return offered


def warm_up_of(items: Sequence[PanelItem], *, model: str, tag: str, max_tokens: int) -> list[Offered]:
    """The requests of the warm-up: prompts that no cell sends."""
    return [
        Offered(
            request=f"warm-up-{index:04d}",
            prompt=item.id,
            max_tokens=max_tokens,
            intended_ns=None,
            body=body_of(item.prompt, model=model, request_id=f"{tag}-warm-up-{index:04d}", max_tokens=max_tokens),
        )
        for index, item in enumerate(items)
    ]


def interval(
    base_url: str,
    offered: Sequence[Offered],
    *,
    permit: TimingPermit,
    load: Load,
    cell: str,
    trace_sha256: str | None,
    about: Mapping[str, object],
    out: Path,
    timeout_s: float,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Replay one load and leave its recording in ``out``; returns how many requests completed.

    Raises:
        CaptureError: The permit is for another gate, or the recording cannot be written. A request that failed is in
            the recording and raises nothing.
    """
    if permit.gate not in GATES:
        raise CaptureError(f"found a permit for {permit.gate}, expected one for {' or '.join(GATES)}")
    header = {
        "cell": cell,
        "trace_sha256": trace_sha256,
        "judgment": permit.judgment,
        "exploratory": permit.gate == "pilot",
        "about": dict(about),
    }
    footer = replay(base_url, offered, load=load, header=header, out=out, timeout_s=timeout_s, progress=progress)
    completed = footer["completed"]
    return completed if isinstance(completed, int) else 0


def quiet_counters(base_url: str, *, finished: int = 0) -> dict[str, object]:
    """The server's counters once no request runs or waits.

    The engine counts an answer a moment after it was sent: as long as fewer than ``finished`` requests are counted as
    ended, and for a second at most, they are read again. Whether they agree is for the judge.

    Raises:
        ServerError: They cannot be read, or the server does not fall quiet.
    """
    begun = monotonic_ns()
    while True:
        found = counters(base_url)
        waited_s = (monotonic_ns() - begun) / 1e9
        quiet = found["running"] == 0 and found["waiting"] == 0
        if quiet and (ended(found) >= finished or waited_s > _COUNTED_S):
            return found
        if waited_s > _QUIET_LIMIT_S:
            raise ServerError(
                f"{base_url}: found {found['running']} requests running and {found['waiting']} waiting for "
                f"{_QUIET_LIMIT_S:g} s, expected none"
            )
        sleep(_POLL_S)


def ended(values: Mapping[str, object]) -> int:
    """How many requests the server counts as ended, whatever the reason."""
    success = values["success"]
    return sum(success.values()) if isinstance(success, dict) else 0


def counters(base_url: str) -> dict[str, object]:
    """What ``GET /metrics`` counts, summed over engines.

    Raises:
        ServerError: No answer, or a counter is missing.
    """
    try:
        with httpx.Client(trust_env=False, timeout=_READ_LIMIT_S) as http:
            answer = http.get(f"{base_url}/metrics")
    except httpx.HTTPError as error:
        raise ServerError(f"{base_url}/metrics got no answer: {type(error).__name__}: {error}") from error
    if answer.status_code != 200:
        raise ServerError(f"{base_url}/metrics answered {answer.status_code}, expected 200")
    return parse_counters(answer.text, origin=f"{base_url}/metrics")


def parse_counters(text: str, *, origin: str) -> dict[str, object]:
    """The counters in a page of the Prometheus text format.

    Raises:
        ServerError: One is missing, or is no number that a counter can have.
    """
    sums: dict[str, Fraction] = {}
    success: dict[str, int] = {}
    wanted = {*_COUNTERS.values(), _TTFT_SUM, _SUCCESS}
    for line in text.splitlines():
        sample = _SAMPLE.fullmatch(line) if not line.startswith("#") else None
        if sample is None or sample[1] not in wanted:
            continue
        name, labels = sample[1], sample[2] or ""
        value = _sample(name, sample[3], origin)
        sums[name] = sums.get(name, Fraction(0)) + value
        reason = _REASON.search(labels)
        if name == _SUCCESS and reason is not None:
            success[reason[1]] = success.get(reason[1], 0) + int(value)
    missing = [name for name in (*_COUNTERS.values(), _TTFT_SUM, _SUCCESS) if name not in sums]
    if missing:
        raise ServerError(
            f"{origin}: found no {missing[0]}, expected it", advice="do not disable the engine's statistics"
        )
    found: dict[str, object] = {key: int(sums[name]) for key, name in _COUNTERS.items()}
    return found | {"ttft_sum_s": float(sums[_TTFT_SUM]), "success": dict(sorted(success.items()))}


def _sample(name: str, text: str, origin: str) -> Fraction:
    """The value of one sample; only the sum of times may have a fraction.

    Raises:
        ServerError: It is no finite number of at least 0, or no whole one where things are counted.
    """
    whole = name != _TTFT_SUM
    # float() would also take '1_0' and digits of other scripts, and int() would cut a fraction off.
    value = Fraction(text) if _NUMBER.fullmatch(text) else None
    if value is None or value < 0 or value >= _MOST or (whole and value.denominator != 1):
        expected = "a count" if whole else "a number of seconds"
        raise ServerError(f"{origin}: {name}: found {text[:40]!r}, expected {expected} of at least 0")
    return value


def environment() -> dict[str, object]:
    """The client's machine: CPUs that this process may use, load average over one minute, and ``gpu`` where it has any.

    ``gpu`` is a record of :mod:`pytest_kvqual.worker.device`: clocks, power and throttle reasons at that moment. It is
    read outside of every timed interval.
    """
    found: dict[str, object] = {"cpus": len(os.sched_getaffinity(0)), "load_1min": os.getloadavg()[0]}
    if shutil.which("nvidia-smi") is not None:
        from pytest_kvqual.worker import device

        found["gpu"] = device.read(modules=("pynvml",))
    return found
