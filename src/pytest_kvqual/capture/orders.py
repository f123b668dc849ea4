"""Send one panel in several orders, with a digest of every step's graph inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_kvqual.capture import http
from pytest_kvqual.capture.quality import Progress, Target, Writer, bracket, record, request, send_all
from pytest_kvqual.errors import CaptureError
from pytest_kvqual.tasks.orders import NATURAL, ROTATED

if TYPE_CHECKING:
    from pytest_kvqual.study.panels import Panel


def capture_orders(
    server: Target,
    panel: Panel,
    writer: Writer,
    *,
    runs: Sequence[str],
    rotation: int,
    model: str,
    wave_size: int,
    timeout_s: float,
    progress: Progress | None = None,
) -> dict[str, list[object]]:
    """Generate greedily from each prompt of the panel, once per run.

    Every run is sent in waves, in the panel's order; ``rotated`` in that order rotated by ``rotation`` requests;
    ``natural`` not in waves but with ``wave_size`` requests in flight.

    Args:
        server: The arm's server.
        panel: Prompts with an output limit each.
        writer: Receives one record per request with its ``run``, in the order sent.
        runs: The names of the runs, in the order in which they are made.
        rotation: Requests by which the rotated run begins later in the panel.
        model: The served model's name.
        wave_size: Requests per wave, or in flight.
        timeout_s: Bound of one request, and of each worker call, in seconds.
        progress: Called with (done, total) over all runs.

    Returns:
        For each run the ranks' ``{"rank", "steps", "digests"}``.

    Raises:
        CaptureError: A request failed; all records are written first.
        ServerError: A worker call failed.
    """
    inputs: dict[str, list[object]] = {}
    done, failed = 0, list[http.Response]()
    for run in runs:
        items = list(enumerate(panel.items))
        if run == ROTATED:
            items = [*items[rotation:], *items[:rotation]]
        requests = [request(model, "orders", index, item, item.max_tokens, ()) for index, item in items]

        def keep(response: http.Response, run: str = run) -> None:
            nonlocal done
            writer.append({**record(response, "forward"), "run": run})
            done += 1
            if response.error is not None:
                failed.append(response)
            if progress is not None:
                progress(done, len(runs) * len(panel.items))

        with bracket(server, "kvqual_inputs_start", "kvqual_inputs_finish", timeout_s=timeout_s) as inputs[run]:
            send_all(
                server,
                requests,
                schedule="natural" if run == NATURAL else "waves",
                wave_size=wave_size,
                timeout_s=timeout_s,
                on_response=keep,
            )
            if failed:
                raise CaptureError(
                    f"orders ({run}): found {len(failed)} of {len(requests)} requests failed, expected none; "
                    f"first {failed[0].id!r}: {failed[0].error}",
                    advice=f"see {server.log}",
                )
    return inputs
