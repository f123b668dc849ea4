"""Run an oracle panel through an arm with the worker's oracles on: one pass, healthy or with a seeded fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from pytest_kvqual.capture import http
from pytest_kvqual.capture.quality import Progress, Target, bracket, record, request, send_all
from pytest_kvqual.errors import CaptureError

if TYPE_CHECKING:
    from pytest_kvqual.study.model import Schedule
    from pytest_kvqual.study.panels import Panel


def capture_oracle(
    server: Target,
    panel: Panel,
    *,
    fault: str | None = None,
    probe: bool = False,
    fills: bool = False,
    free_blocks: int | None = None,
    rotation: int = 0,
    lone: bool = False,
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
        lone: The panel's middle request is sent first, alone: its prompt is then a batch of its own.
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
    responses: list[http.Response] = []

    def keep(response: http.Response) -> None:
        responses.append(response)
        if progress is not None:
            progress(len(responses), len(requests))

    with ExitStack() as brackets:
        if free_blocks is not None:
            brackets.enter_context(_held(server, free_blocks, timeout_s=timeout_s))
        # Closed also after a failure: a fault left planted would poison what follows.
        options = {"fault": fault, "probe": probe, "fills": fills}
        window = bracket(server, "kvqual_oracle_start", "kvqual_oracle_finish", options, timeout_s=timeout_s)
        records = brackets.enter_context(window)
        middle = len(requests) // 2
        parts = [requests[middle : middle + 1], requests[:middle] + requests[middle + 1 :]] if lone else [requests]
        for part in parts:
            send_all(server, part, schedule=schedule, wave_size=wave_size, timeout_s=timeout_s, on_response=keep)
        failed = [response for response in responses if response.error is not None]
        if failed or len(responses) != len(requests):
            first = failed[0] if failed else None
            raise CaptureError(
                f"oracle pass (fault {fault}): found {len(requests) - len(responses) + len(failed)} of "
                f"{len(requests)} requests failed, expected none; first: {first and f'{first.id!r}: {first.error}'}",
                advice=f"see {server.log}",
            )
    if not records or not all(isinstance(rank, dict) for rank in records):
        raise CaptureError(
            f"oracle pass (fault {fault}): found records {records!r:.200}, expected one mapping per rank"
        )
    return {"fault": fault, "records": records, "responses": [record(response, "forward") for response in responses]}


@contextmanager
def _held(server: Target, free_blocks: int, *, timeout_s: float) -> Iterator[None]:
    """All but ``free_blocks`` blocks of the pool are held in the block.

    Raises:
        CaptureError: The worker cannot reach the scheduler's pool.
    """
    with bracket(server, "kvqual_hold_blocks", "kvqual_release_blocks", free_blocks, timeout_s=timeout_s) as released:
        yield
    if not any(isinstance(rank, dict) and rank.get("found") is True for rank in released):
        raise CaptureError(
            "found no block pool within reach of the worker, expected one: the pass held no block",
            advice="run the engine's worker in the core's process (--distributed-executor-backend=uni), or leave the "
            "pass 'pressure' out of the study",
        )
