"""Send completion requests with token-id prompts and keep what came back, word for word.

Three schedules: :func:`send_serial` (one at a time), :func:`send_wave` (one batch, queued in a known order while the
engine is paused) and :func:`send_natural` (a client concurrency). None retries, none raises for a request that failed:
each request gives one :class:`Response`, so that offered = completed + failed always balances.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from pytest_kvqual.errors import CaptureError

_PATH = "/v1/completions"
_ACCEPT_POLL_S = 0.001
# From a request's dispatch until the engine's log shows it; a 8,000-token prompt takes some 20 ms.
_ACCEPT_LIMIT_S = 30.0
_CONTROL_LIMIT_S = 60.0
# Without clear_cache=false vLLM 0.32 preempts what runs and empties the prefix cache at each pause, and refuses to
# pause while some block of the pool is held (vllm/v1/engine/core.py, _finish_pause), although it documents otherwise.
_PAUSE = "/pause?mode=keep&clear_cache=false"
# After the server refused to resume, requests that it holds would wait for ever.
_ABANDON_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One completion to ask for.

    Attributes:
        id: Name within its panel.
        index: Position within its panel.
        request_id: Unique name on the server; its log uses it.
        body: The JSON body.
    """

    id: str
    index: int
    request_id: str
    body: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """What became of one request. ``error`` is None exactly for a complete answer.

    Attributes:
        id: The request's name.
        index: The request's position in its panel.
        status: The HTTP status, None when no answer arrived.
        body: The raw text of the answer, None when no complete one arrived.
        error: ``Kind: text`` of the failure.
    """

    id: str
    index: int
    status: int | None
    body: str | None
    error: str | None


OnResponse = Callable[[Response], None]


def completion(
    *,
    id: str,
    index: int,
    request_id: str,
    model: str,
    prompt: Sequence[int],
    max_tokens: int,
    targets: Sequence[int] = (),
    stop: Sequence[str] = (),
) -> Request:
    """A greedy completion of ``prompt`` (token ids).

    Args:
        id: Name within its panel.
        index: Position within its panel.
        request_id: Unique name on the server.
        model: The served model's name.
        prompt: Token ids.
        max_tokens: The output limit in tokens.
        targets: Token ids to force, one per output token; the answer then holds the raw log-probability of each. Empty
            for free generation.
        stop: Texts at which the answer ends; the answer does not hold the one that ended it.
    """
    body: dict[str, object] = {
        "model": model,
        "request_id": request_id,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": False,
        "return_token_ids": True,
    }
    if stop:
        body["stop"] = list(stop)
    if targets:
        # logprobs=0: no alternatives, only the chosen token's. The engine reports it from the distribution before any
        # logits processor (logprobs_mode=raw_logprobs), so forcing a token does not change its figure.
        body |= {"logprobs": 0, "ignore_eos": True, "vllm_xargs": {"kvqual_targets": list(targets)}}
    return Request(id=id, index=index, request_id=request_id, body=body)


@asynccontextmanager
async def client(base_url: str, *, timeout_s: float) -> AsyncIterator[httpx.AsyncClient]:
    """One client: no connection limit, no retries, no proxy; ``timeout_s`` bounds each wait for the server."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    transport = httpx.AsyncHTTPTransport(retries=0, limits=limits)
    timeout = httpx.Timeout(timeout_s, connect=10.0, pool=None)
    async with httpx.AsyncClient(
        base_url=base_url, transport=transport, timeout=timeout, trust_env=False, follow_redirects=False
    ) as opened:
        yield opened


async def send(http: httpx.AsyncClient, request: Request, *, timeout_s: float) -> Response:
    """Send one request and return what became of it. Only cancellation raises.

    ``timeout_s`` bounds the whole exchange, not only each read.
    """
    status: int | None = None
    try:
        async with asyncio.timeout(timeout_s):
            answer = await http.post(_PATH, json=dict(request.body))
            status, body = answer.status_code, answer.text
    except (httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError) as error:
        text = " ".join(str(error).split()) or (
            f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else ""
        )
        return _failed(request, status, f"{type(error).__name__}: {text}")
    return Response(id=request.id, index=request.index, status=status, body=body, error=_fault(status, body))


async def send_serial(
    base_url: str, requests: Sequence[Request], *, timeout_s: float, on_response: OnResponse | None = None
) -> list[Response]:
    """Send one request after the other, each after the answer to the one before it.

    After a request that got no answer at all the rest are failures that were not sent: a server that is gone or hangs
    costs one time limit, not one for each request.
    """
    emit = _InOrder(len(requests), on_response)
    trouble: str | None = None
    async with client(base_url, timeout_s=timeout_s) as http:
        for position, request in enumerate(requests):
            if trouble is not None:
                emit.put(position, _failed(request, None, f"NotSent: {trouble}"))
                continue
            response = await send(http, request, timeout_s=timeout_s)
            if response.status is None:
                trouble = f"{request.id!r} got no answer"
            emit.put(position, response)
    return emit.all()


async def send_natural(
    base_url: str,
    requests: Sequence[Request],
    *,
    concurrency: int,
    timeout_s: float,
    on_response: OnResponse | None = None,
) -> list[Response]:
    """Keep ``concurrency`` requests in flight, dispatched in order; responses in the order of the requests.

    After a request that got no answer at all no further one is sent, as in :func:`send_serial`.
    """
    emit = _InOrder(len(requests), on_response)
    gate = asyncio.Semaphore(concurrency)
    trouble: str | None = None
    async with client(base_url, timeout_s=timeout_s) as http:

        async def one(position: int, request: Request) -> None:
            nonlocal trouble
            async with gate:
                if emit.broken:
                    return
                if trouble is not None:
                    response = _failed(request, None, f"NotSent: {trouble}")
                else:
                    response = await send(http, request, timeout_s=timeout_s)
                    if response.status is None:
                        trouble = f"{request.id!r} got no answer"
                emit.put(position, response)

        await _all([asyncio.create_task(one(position, request)) for position, request in enumerate(requests)])
    return emit.all()


async def send_wave(
    base_url: str,
    requests: Sequence[Request],
    *,
    log: Path,
    timeout_s: float,
    on_response: OnResponse | None = None,
) -> list[Response]:
    """Queue all requests in order in a paused engine, resume it, and gather.

    The first step after the resume then sees the whole wave, in the order of ``requests``, however fast the client is:
    the batch's composition, on which greedy outputs depend, is the same each time.

    How the order is known. HTTP gives no sign that the engine has a request before the answer comes, and a paused
    engine makes no step, so that its gauges stand still. With ``--enable-log-requests`` the server prints ``Added
    request ID`` straight after it has handed the request to the engine's socket, whose messages arrive in order
    (vllm/v1/engine/async_llm.py, ``_add_request``). So each request is sent only after the line of the one before it,
    and the resume, which takes the same socket, after the line of the last.

    Args:
        base_url: The server.
        requests: The wave, in the order in which the engine is to see it.
        log: The file that receives the server's output.
        timeout_s: Bound of each request, from its dispatch to its answer.
        on_response: Called with each response, in the order of the requests, as soon as those before it are there.

    Raises:
        CaptureError: The engine could not be paused, so nothing was sent. Later trouble is in the responses.
    """
    emit = _InOrder(len(requests), on_response)
    async with client(base_url, timeout_s=timeout_s) as http:
        trouble = await _control(http, _PAUSE)
        if trouble is not None:
            raise CaptureError(f"found no paused engine for a wave of {len(requests)} requests: {trouble}")
        follower = _LogFollower(log)
        tasks: list[asyncio.Task[None]] = []

        async def one(position: int, request: Request) -> None:
            emit.put(position, await send(http, request, timeout_s=timeout_s))

        refusals: dict[int, str] = {}
        try:
            for position, request in enumerate(requests):
                task = asyncio.create_task(one(position, request))
                tasks.append(task)
                accepted = await follower.wait_for(f"Added request cmpl-{request.request_id}-", task)
                if not accepted and not task.done():
                    # Its place in the queue is unknown: the wave is not the declared one, and ends here.
                    refusals[position] = (
                        f"NotAccepted: the engine's log shows no such request after {_ACCEPT_LIMIT_S:g} s"
                    )
                    task.cancel()
                    break
            trouble = await _control(http, "/resume")
            if trouble is not None and tasks:
                await asyncio.wait(tasks, timeout=_ABANDON_S)
                for position, task in enumerate(tasks):
                    if not task.done():
                        refusals[position] = f"NotResumed: {trouble}"
                        task.cancel()
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        finally:
            await _all(tasks)
        for position, request in enumerate(requests):
            if not emit.has(position):
                emit.put(position, _failed(request, None, refusals.get(position, "NotSent: one before was refused")))
    return emit.all()


async def _all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait until every task has ended, cancelled ones included, and raise the first error.

    No request makes a task raise. What keeping a response raises does: evidence that cannot be written ends a capture.
    """
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, BaseException) and not isinstance(ended, asyncio.CancelledError):
            raise ended


class _InOrder:
    """Collects responses by position and hands each on once all before it are there.

    ``broken`` is set once handing on has failed; nothing is handed on after that.
    """

    def __init__(self, total: int, on_response: OnResponse | None) -> None:
        self._slots: list[Response | None] = [None] * total
        self._next = 0
        self._on_response = on_response
        self.broken = False

    def has(self, position: int) -> bool:
        return self._slots[position] is not None

    def put(self, position: int, response: Response) -> None:
        self._slots[position] = response
        while self._next < len(self._slots) and (ready := self._slots[self._next]) is not None:
            self._next += 1
            if self._on_response is not None and not self.broken:
                self.broken = True
                self._on_response(ready)
                self.broken = False

    def all(self) -> list[Response]:
        return [response for response in self._slots if response is not None]


class _LogFollower:
    """Waits for a text to appear in a growing file, from its present end on."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._position = log.stat().st_size if log.exists() else 0
        self._rest = b""

    async def wait_for(self, text: str, task: asyncio.Task[None]) -> bool:
        """True once ``text`` has appeared; False when ``task`` ended first or the limit has passed."""
        wanted = text.encode()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _ACCEPT_LIMIT_S
        while True:
            ended = task.done()
            self._read()
            found = self._rest.find(wanted)
            if found >= 0:
                self._rest = self._rest[found + len(wanted) :]
                return True
            if ended or loop.time() > deadline:
                return False
            # The tail may be the first half of the text.
            self._rest = self._rest[-len(wanted) :]
            await asyncio.sleep(_ACCEPT_POLL_S)

    def _read(self) -> None:
        try:
            with self._log.open("rb") as file:
                file.seek(self._position)
                new = file.read()
        except OSError:
            return
        self._position += len(new)
        self._rest += new


async def _control(http: httpx.AsyncClient, path: str) -> str | None:
    """POST to a control endpoint; None when it answered 200, else what happened."""
    try:
        async with asyncio.timeout(_CONTROL_LIMIT_S):
            answer = await http.post(path)
    except (httpx.HTTPError, OSError, TimeoutError) as error:
        return f"{path} failed with {type(error).__name__}: {' '.join(str(error).split())}"
    if answer.status_code != 200:
        return f"{path} answered {answer.status_code}: {' '.join(answer.text.split())[:300]}"
    return None


def _failed(request: Request, status: int | None, error: str) -> Response:
    return Response(id=request.id, index=request.index, status=status, body=None, error=error)


def _fault(status: int, body: str) -> str | None:
    """Why an answer is no completion, or None. A server may send an error object under status 200."""
    if status != 200:
        return f"HttpStatus: {status}"
    try:
        document = json.loads(body)
    except ValueError:
        return "NotJson: the body is not a JSON document"
    choices = document.get("choices") if isinstance(document, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return "NotACompletion: the body has no single choice"
    if not isinstance(choices[0].get("token_ids"), list):
        return "NotACompletion: the choice has no token ids"
    return None
