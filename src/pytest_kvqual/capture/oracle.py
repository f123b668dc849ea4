"""Run the oracle panel through an arm with the worker's oracles switched on, once healthy or with one seeded fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_kvqual.capture import http
from pytest_kvqual.capture.quality import Progress, Target, _request, record, send_all
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
    fault: str | None,
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
        _request(model, "oracle", index, item, item.max_tokens or len(item.targets), item.targets)
        for index, item in enumerate(panel.items)
    ]
    rpc.call(server.base_url, "kvqual_oracle_start", {"fault": fault}, timeout_s=timeout_s)
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
