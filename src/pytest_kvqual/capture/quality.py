"""Capture parity, NLL and scored answers of one arm, raw. What they mean is judged elsewhere, later.

Every request gives one record, failed ones included::

    {"id": str, "order": "forward" | "reverse", "index": int,
     "status": int | null, "body": str | null, "error": str | null}

``index`` is the position in the panel whatever the order. ``body`` is the answer's text as it came.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from pytest_kvqual.capture import http
from pytest_kvqual.errors import CaptureError, KvqualError
from pytest_kvqual.server import rpc

if TYPE_CHECKING:
    from pytest_kvqual.study.model import Schedule
    from pytest_kvqual.study.panels import Panel, PanelItem

Order = Literal["forward", "reverse"]
Progress = Callable[[int, int], None]

# Request ids must differ for the whole life of a server: its log tells requests apart by them.
_serial = itertools.count()


class Target(Protocol):
    """The part of a server that a capture needs."""

    @property
    def base_url(self) -> str:
        """``http://127.0.0.1:PORT``."""

    @property
    def log(self) -> Path:
        """The file that receives the server's output."""


class Writer(Protocol):
    """The part of an evidence stream that a capture needs."""

    def append(self, record: dict[str, object]) -> None:
        """Keep one record, flushed."""


def capture_parity(
    server: Target,
    panel: Panel,
    writer: Writer,
    *,
    model: str,
    order: Order = "forward",
    schedule: Schedule = "serial",
    wave_size: int = 1,
    timeout_s: float,
    progress: Progress | None = None,
) -> int:
    """Generate greedily from each prompt of the panel; returns the number of records.

    Args:
        server: The arm's server.
        panel: Prompts with an output limit each.
        writer: Receives one record per request, in the order sent.
        model: The served model's name.
        order: ``forward`` is the panel's order, ``reverse`` the opposite.
        schedule: How the requests reach the engine.
        wave_size: Requests per wave, or in flight for ``natural``; of no effect for ``serial``.
        timeout_s: Bound of one request in seconds.
        progress: Called with (done, total).

    Raises:
        CaptureError: A request failed; all records are written first.
    """
    items = list(enumerate(panel.items))
    if order == "reverse":
        items.reverse()
    requests = [request(model, "parity", index, item, item.max_tokens, ()) for index, item in items]
    return _run(server, requests, writer, order, schedule, wave_size, timeout_s, progress, f"parity ({order})")


def capture_nll(
    server: Target,
    panel: Panel,
    writer: Writer,
    *,
    model: str,
    schedule: Schedule = "waves",
    wave_size: int,
    timeout_s: float,
    documents: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Force each document's targets token by token; returns the number of records.

    The answer's ``choices[0].logprobs.token_logprobs[i]`` is the raw log-probability (nats) of ``targets[i]``. The
    first comes from the prefill; it is recorded and excluded by the judge.

    Args:
        server: The arm's server.
        panel: Documents with targets.
        writer: Receives one record per document, in the panel's order.
        model: The served model's name.
        schedule: How the requests reach the engine.
        wave_size: Requests per wave, or in flight for ``natural``.
        timeout_s: Bound of one request in seconds.
        documents: Only the first so many documents; None for all.
        progress: Called with (done, total).

    Raises:
        CaptureError: A request failed; all records are written first.
    """
    items = list(enumerate(panel.items))[:documents]
    requests = [request(model, "nll", index, item, len(item.targets), item.targets) for index, item in items]
    return _run(server, requests, writer, "forward", schedule, wave_size, timeout_s, progress, "nll")


def capture_scored(
    server: Target,
    panel: Panel,
    writer: Writer,
    *,
    model: str,
    stop: Sequence[str] = (),
    schedule: Schedule = "waves",
    wave_size: int,
    timeout_s: float,
    questions: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Ask each question of a scored panel, and let the model finish; returns the number of records.

    A request that failed is a record like any other: its answer is of the kind ERROR, which the study bounds.

    Args:
        server: The arm's server.
        panel: Questions with an output limit each.
        writer: Receives one record per question: in the panel's order, or in that of the answers for ``natural``.
        model: The served model's name.
        stop: Texts at which an answer ends.
        schedule: How the requests reach the engine.
        wave_size: Requests per wave, or in flight for ``natural``.
        timeout_s: Bound of one request in seconds.
        questions: Only the first so many questions; None for all.
        progress: Called with (done, total).

    Raises:
        CaptureError: Every request failed; all records are written first.
    """
    items = list(enumerate(panel.items))[:questions]
    requests = [request(model, panel.task, index, item, item.max_tokens, (), stop) for index, item in items]
    total, failed = _send(server, requests, writer, "forward", schedule, wave_size, timeout_s, progress)
    if len(failed) == total:
        raise _failed(panel.task, failed, total, server)
    return total


@contextmanager
def bracket(server: Target, start: str, finish: str, *args: object, timeout_s: float) -> Iterator[list[object]]:
    """Call the worker method ``start`` with ``args`` before the block, and ``finish`` after it, whatever happens in it.

    Yields a list that holds what each rank's ``finish`` returned once the block has ended. Where the block raises, that
    is the error to report, and one of ``finish`` is not.

    Raises:
        ServerError: A worker call failed.
    """
    results: list[object] = []
    rpc.call(server.base_url, start, *args, timeout_s=timeout_s)
    try:
        yield results
    except BaseException:
        with suppress(KvqualError):
            rpc.call(server.base_url, finish, timeout_s=timeout_s)
        raise
    results.extend(rpc.call(server.base_url, finish, timeout_s=timeout_s))


def waves(requests: Sequence[http.Request], size: int) -> list[Sequence[http.Request]]:
    """Consecutive groups of ``size`` requests; the last may be smaller."""
    if size < 1:
        raise CaptureError(f"found a wave size of {size}, expected at least 1")
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def send_all(
    server: Target,
    requests: Sequence[http.Request],
    *,
    schedule: Schedule,
    wave_size: int,
    timeout_s: float,
    on_response: http.OnResponse,
) -> None:
    """Send requests by a schedule. After a wave that could not be paused the rest fails without being sent."""
    if schedule == "serial":
        asyncio.run(http.send_serial(server.base_url, requests, timeout_s=timeout_s, on_response=on_response))
        return
    if schedule == "natural":
        asyncio.run(
            http.send_natural(
                server.base_url, requests, concurrency=wave_size, timeout_s=timeout_s, on_response=on_response
            )
        )
        return
    trouble: str | None = None
    for wave in waves(requests, wave_size):
        if trouble is None:
            try:
                asyncio.run(
                    http.send_wave(server.base_url, wave, log=server.log, timeout_s=timeout_s, on_response=on_response)
                )
                continue
            except CaptureError as error:
                trouble = str(error)
        for request in wave:
            on_response(
                http.Response(id=request.id, index=request.index, status=None, body=None, error=f"NotSent: {trouble}")
            )


def record(response: http.Response, order: Order) -> dict[str, object]:
    """The evidence record of one response."""
    return {
        "id": response.id,
        "order": order,
        "index": response.index,
        "status": response.status,
        "body": response.body,
        "error": response.error,
    }


def request(
    model: str,
    task: str,
    index: int,
    item: PanelItem,
    max_tokens: int,
    targets: Sequence[int],
    stop: Sequence[str] = (),
) -> http.Request:
    """The request of one panel item; its request id is used once in the life of a server."""
    return http.completion(
        id=item.id,
        index=index,
        request_id=f"kvqual-{task}-{next(_serial)}",
        model=model,
        prompt=item.prompt,
        max_tokens=max_tokens,
        targets=targets,
        stop=stop,
    )


def _failed(what: str, failures: Sequence[http.Response], total: int, server: Target) -> CaptureError:
    first = failures[0]
    shown = f"; body: {' '.join(first.body.split())[:300]}" if first.body else ""
    return CaptureError(
        f"{what}: found {len(failures)} of {total} requests failed, expected none; "
        f"first {first.id!r}: {first.error}{shown}",
        advice=f"see {server.log}",
    )


def _run(
    server: Target,
    requests: Sequence[http.Request],
    writer: Writer,
    order: Order,
    schedule: Schedule,
    wave_size: int,
    timeout_s: float,
    progress: Progress | None,
    what: str,
) -> int:
    total, failed = _send(server, requests, writer, order, schedule, wave_size, timeout_s, progress)
    if failed:
        raise _failed(what, failed, total, server)
    return total


def _send(
    server: Target,
    requests: Sequence[http.Request],
    writer: Writer,
    order: Order,
    schedule: Schedule,
    wave_size: int,
    timeout_s: float,
    progress: Progress | None,
) -> tuple[int, list[http.Response]]:
    """Send them and keep a record of each; how many there are, and which failed."""
    done = 0
    failures: list[http.Response] = []

    def keep(response: http.Response) -> None:
        nonlocal done
        writer.append(record(response, order))
        done += 1
        if response.error is not None:
            failures.append(response)
        if progress is not None:
            progress(done, len(requests))

    send_all(server, requests, schedule=schedule, wave_size=wave_size, timeout_s=timeout_s, on_response=keep)
    return done, failures
