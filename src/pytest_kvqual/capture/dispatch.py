"""Read which kernels each layer runs, over one short request: a prefill step and a few decode steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_kvqual.capture import http
from pytest_kvqual.capture.quality import Target, request, send_all
from pytest_kvqual.errors import CaptureError
from pytest_kvqual.server import rpc

if TYPE_CHECKING:
    from pytest_kvqual.study.panels import PanelItem

TOKENS = 3
"""Output tokens of the request: the first comes from prefill, the others each from a decode step."""


def read_dispatch(server: Target, item: PanelItem, *, model: str, timeout_s: float) -> list[object]:
    """One reading of every rank: ``{"rank", "layers": {NAME: {"backend", "impl", "cache_dtype", "kernels"}}}``.

    Raises:
        CaptureError: The request failed.
        ServerError: A worker call failed.
    """
    responses: list[http.Response] = []
    rpc.call(server.base_url, "kvqual_dispatch_start", timeout_s=timeout_s)
    try:
        send_all(
            server,
            [request(model, "dispatch", 0, item, TOKENS, ())],
            schedule="serial",
            wave_size=1,
            timeout_s=timeout_s,
            on_response=responses.append,
        )
    finally:
        ranks = rpc.call(server.base_url, "kvqual_dispatch_finish", timeout_s=timeout_s)
    if len(responses) != 1 or responses[0].error is not None:
        trouble = responses[0].error if responses else "no answer"
        raise CaptureError(f"dispatch: the request failed: {trouble}", advice=f"see {server.log}")
    return ranks
