"""Call a method of the workers, pause and resume the engine, through the server's development endpoints."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import cast

from pytest_kvqual.errors import ServerError

_SHOWN = 600


def call(base_url: str, method: str, *args: object, timeout_s: float = 600.0, **kwargs: object) -> list[object]:
    """Call ``method(*args, **kwargs)`` in every worker; one result per rank, in rank order.

    Arguments and results are JSON values. A result that is neither None, a mapping nor a list arrives as its ``str``.

    Raises:
        ServerError: No answer within ``timeout_s``, or an error; with the engine's text.
    """
    answer = post(
        base_url,
        "/collective_rpc",
        {"method": method, "args": list(args), "kwargs": kwargs},
        timeout_s=timeout_s,
        what=f"worker method {method!r}",
    )
    if not isinstance(answer, dict) or not isinstance(answer.get("results"), list):
        raise ServerError(
            f"worker method {method!r} answered {json.dumps(answer)[:_SHOWN]}, expected a list of results"
        )
    return cast("list[object]", answer["results"])


def pause(base_url: str, *, timeout_s: float = 60.0) -> None:
    """Stop scheduling and keep all requests; new ones are queued until :func:`resume`.

    Raises:
        ServerError: The engine did not confirm it.
    """
    # clear_cache=false: else vLLM 0.32 preempts what runs and empties the prefix cache, whatever the mode.
    post(base_url, "/pause?mode=keep&clear_cache=false", None, timeout_s=timeout_s, what="pause")


def resume(base_url: str, *, timeout_s: float = 60.0) -> None:
    """Schedule again, the queued requests first.

    Raises:
        ServerError: The engine did not confirm it.
    """
    post(base_url, "/resume", None, timeout_s=timeout_s, what="resume")


def post(base_url: str, path: str, body: object, *, timeout_s: float, what: str) -> object:
    """POST a JSON document (no body for None) and return the JSON answer (None for an empty one).

    Raises:
        ServerError: Transport failure, a status other than 200, or an answer that is not JSON.
    """
    data = b"" if body is None else json.dumps(body, allow_nan=False).encode()
    request = urllib.request.Request(
        urllib.parse.urljoin(base_url, path), data=data, headers={"Content-Type": "application/json"}, method="POST"
    )
    # The loopback address never goes through a proxy, whatever the environment says.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            raw = answer.read()
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        raise ServerError(f"{what} answered {error.code}, expected 200: {_one_line(text)}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ServerError(f"{what} got no answer from {base_url}: {type(reason).__name__}: {reason}") from error
    if not raw:
        return None
    try:
        return json.loads(raw)
    except ValueError as error:
        raise ServerError(f"{what} answered {_one_line(raw.decode(errors='replace'))}, expected JSON") from error


def _one_line(text: str) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= _SHOWN else f"{joined[:_SHOWN]}…"
