"""Read which kernels each layer runs, over one short request: a prefill step and a few decode steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_kvqual.capture import http
from pytest_kvqual.capture.quality import Target, bracket, request, send_all
from pytest_kvqual.errors import CaptureError

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
    with bracket(server, "kvqual_dispatch_start", "kvqual_dispatch_finish", timeout_s=timeout_s) as ranks:
        send_all(
            server,
            [request(model, "dispatch", 0, item, TOKENS, ())],
            schedule="serial",
            wave_size=1,
            timeout_s=timeout_s,
            on_response=responses.append,
        )
        if len(responses) != 1 or responses[0].error is not None:
            trouble = responses[0].error if responses else "no answer"
            raise CaptureError(f"dispatch: the request failed: {trouble}", advice=f"see {server.log}")
    return ranks
