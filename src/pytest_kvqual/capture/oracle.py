"""Run an oracle panel through an arm with the worker's oracles switched on: one pass, healthy or with a seeded fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pytest_kvqual.capture import http
from pytest_kvqual.capture.quality import Progress, Target, record, request, send_all
from pytest_kvqual.errors import CaptureError, KvqualError
from pytest_kvqual.server import rpc

if TYPE_CHECKING:
    from pytest_kvqual.study.model import Schedule
    from pytest_kvqual.study.panels import Panel

Call = Callable[..., list[object]]


def capture_oracle(
    server: Target,
    panel: Panel,
    *,
    fault: str | None = None,
    probe: bool = False,
    fills: bool = False,
    free_blocks: int | None = None,
    rotation: int = 0,
    model: str,
    schedule: Schedule = "waves",
    wave_size: int,
    timeout_s: float,
    progress: Progress | None = None,
) -> dict[str, object]:
    """The ranks' oracle records over one pass of the panel.

    Args:
        server: The arm's server.
        panel: Prompts, each with an output limit or with targets.
        fault: The fault that the worker seeds for this pass and withdraws after it; None for a healthy pass.
        probe: K, V and queries are replaced by fingerprints (:mod:`pytest_kvqual.oracles.fingerprints`).
        fills: Every attention call is made again with unwritten cells filled (:mod:`pytest_kvqual.oracles.fills`).
        free_blocks: All but the last so many blocks of the pool are held during the pass, so that requests live at its
            top, use blocks again, and are preempted and resumed. None leaves the pool alone.
        rotation: The requests are sent in the panel's order, rotated by so many.
        model: The served model's name.
        schedule: How the requests reach the engine.
        wave_size: Requests per wave, or in flight for ``natural``.
        timeout_s: Bound of one request, and of each worker call, in seconds.
        progress: Called with (done, total).

    Returns:
        ``{"fault": str | null, "records": [one per rank], "responses": [as in quality.py]}``.

    Raises:
        CaptureError: A request failed or a rank's record is missing. A fault may make the engine itself fail; the
            caller decides what that means.
        ServerError: A worker call failed.
    """
    requests = [
        request(model, "oracle", index, item, item.max_tokens or len(item.targets), item.targets)
        for index, item in enumerate(panel.items)
    ]
    requests = [*requests[rotation:], *requests[:rotation]]
    if free_blocks is not None:
        rpc.call(server.base_url, "kvqual_pool_hold", free_blocks, timeout_s=timeout_s)
    try:
        return _windowed(server, requests, fault, probe, fills, schedule, wave_size, timeout_s, progress)
    finally:
        if free_blocks is not None:
            rpc.call(server.base_url, "kvqual_pool_release", timeout_s=timeout_s)


def _windowed(
    server: Target,
    requests: Sequence[http.Request],
    fault: str | None,
    probe: bool,
    fills: bool,
    schedule: Schedule,
    wave_size: int,
    timeout_s: float,
    progress: Progress | None,
) -> dict[str, object]:
    options = {"fault": fault, "probe": probe, "fills": fills}
    rpc.call(server.base_url, "kvqual_oracle_start", options, timeout_s=timeout_s)
    responses: list[http.Response] = []

    def keep(response: http.Response) -> None:
        responses.append(response)
        if progress is not None:
            progress(len(responses), len(requests))

    finished = False
    try:
        send_all(server, requests, schedule=schedule, wave_size=wave_size, timeout_s=timeout_s, on_response=keep)
        finished = True
    finally:
        try:
            # Also after a failure: a fault left planted would poison what follows.
            records = rpc.call(server.base_url, "kvqual_oracle_finish", timeout_s=timeout_s)
        except KvqualError:
            if finished:
                raise
            records = []
    failed = [response for response in responses if response.error is not None]
    if failed or len(responses) != len(requests):
        first = failed[0] if failed else None
        raise CaptureError(
            f"oracle pass (fault {fault}): found {len(requests) - len(responses) + len(failed)} of {len(requests)} "
            f"requests failed, expected none; first: {first and f'{first.id!r}: {first.error}'}",
            advice=f"see {server.log}",
        )
    if not records or not all(isinstance(rank, dict) for rank in records):
        raise CaptureError(
            f"oracle pass (fault {fault}): found records {records!r:.200}, expected one mapping per rank"
        )
    return {"fault": fault, "records": records, "responses": [record(response, "forward") for response in responses]}
