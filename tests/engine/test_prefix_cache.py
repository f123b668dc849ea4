"""The prefix cache on the real engine: what a hit looks like to the worker, and that the oracles follow it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_kvqual.capture import http
from pytest_kvqual.capture.oracle import capture_oracle
from pytest_kvqual.capture.quality import send_all
from pytest_kvqual.models import model_folder
from pytest_kvqual.server import rpc
from pytest_kvqual.server.command import serve_command, worker_config
from pytest_kvqual.server.process import Server, Timeouts, free_port
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Selection
from pytest_kvqual.study.panels import Panel, PanelItem, load_panel, selected_scales

pytestmark = pytest.mark.engine

LIMIT_S = 300.0
SUPPORT = Path(__file__).parents[1] / "support"
BLOCK = 128
OFF = "--no-enable-prefix-caching"


@pytest.fixture(scope="module")
def selection() -> Selection:
    """The candidate of the embedded study with the prefix cache switched on."""
    selection = select(load_study("smollm2-cpu"), arm="candidate", length=1024, cache_bytes=None)
    engine = selection.study.engine
    assert OFF in engine.flags
    assert engine.block_size == BLOCK
    flags = tuple(flag for flag in engine.flags if flag != OFF)
    arm = replace(selection.arm, pythonpath=(SUPPORT,), after_init=("step_recorder:install",))
    return replace(selection, study=replace(selection.study, engine=replace(engine, flags=flags)), arm=arm)


@pytest.fixture(scope="module")
def server(selection: Selection, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests of this module."""
    model, port = model_folder(selection.study.model), free_port()
    command = serve_command(
        selection,
        model=model,
        port=port,
        worker_config=worker_config(selection, model=model, v_scales=selected_scales(selection)),
        python=Path(sys.executable),
        inherited=os.environ,
    )
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server.start(command, port=port, log=log, timeouts=Timeouts(boot_s=LIMIT_S)) as booted:
        yield booted


def reset(server: Server) -> None:
    """Empty the prefix cache."""
    answer = rpc.post(server.base_url, "/reset_prefix_cache", None, timeout_s=LIMIT_S, what="reset of the prefix cache")
    assert answer == {"success": True}


@pytest.fixture
def cold(server: Server) -> Server:
    """The server with an empty prefix cache and no steps recorded."""
    reset(server)
    rpc.call(server.base_url, "steps", timeout_s=LIMIT_S)
    return server


@pytest.fixture(scope="module")
def panel(selection: Selection) -> Panel:
    """Three waves of two: a cold one, then requests that share two blocks, one, or all but a token with it.

    ``shared`` ends in a tail of its own after two blocks of the cold request. ``whole`` is those two blocks and nothing
    else, ``more`` one token longer: the last token of a prompt is always computed, so the first hits one block, the
    second two. ``half`` shares one block.
    """
    length = selection.length
    found = load_panel(
        length.panels["oracle"], task="oracle", length=length.tokens, vocabulary=selection.study.model.vocabulary
    )
    longest, other = found.items[-1], next(item for item in found.items if item.id == "r05-200")
    text = longest.prompt
    assert len(text) >= 700
    prompts = {
        "cold": text[:296],
        "other": other.prompt,
        "shared": (*text[:256], *text[400:450]),
        "whole": text[:256],
        "more": text[:257],
        "half": (*text[:128], *text[500:560]),
    }
    items = tuple(replace(longest, id=name, prompt=tuple(prompt), max_tokens=4) for name, prompt in prompts.items())
    return replace(found, items=items)


_count = iter(range(1_000_000))


def recorded(server: Server) -> list[dict[str, Any]]:
    """What the worker was told in each step since the last call."""
    (steps,) = rpc.call(server.base_url, "steps", timeout_s=LIMIT_S)
    assert isinstance(steps, list)
    return steps


def first_seen(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the worker was told of each request when it first saw it, in order."""
    return [new for step in steps for new in step["new"]]


def send(
    server: Server, selection: Selection, items: Sequence[PanelItem], *, wave_size: int = 2
) -> list[dict[str, Any]]:
    """Send waves; what the worker was told in each step."""
    requests = [
        http.completion(
            id=item.id,
            index=index,
            request_id=f"prefix-{next(_count)}",
            model=selection.study.model.name,
            prompt=item.prompt,
            max_tokens=item.max_tokens,
        )
        for index, item in enumerate(items)
    ]
    responses: list[http.Response] = []
    send_all(server, requests, schedule="waves", wave_size=wave_size, timeout_s=LIMIT_S, on_response=responses.append)
    assert [response.status for response in responses] == [200] * len(items)
    return recorded(server)


def test_what_a_hit_looks_like(cold: Server, selection: Selection, panel: Panel) -> None:
    """A hit is a new request whose leading blocks are another's, finished or live, and counted as computed."""
    told = first_seen(send(cold, selection, panel.items))
    assert [new["computed"] for new in told] == [0, 0, 256, 128, 256, 128]
    assert [new["prompt"] for new in told] == [296, 200, 306, 256, 257, 188]
    blocks = [new["blocks"][0] for new in told]
    shared = blocks[0][:2]
    assert [found[: new["computed"] // BLOCK] for found, new in zip(blocks, told, strict=True)] == [
        [], [], shared, shared[:1], shared, shared[:1],
    ]  # fmt: skip
    # The second block of `whole` holds the same tokens as a cached one, and is a block of its own.
    assert blocks[3][1] not in shared

    reset(cold)
    warm = [item for item in panel.items if item.id in ("shared", "half")]
    # Nothing is hit after a reset but what the first of the two computes in the very same step.
    assert [new["computed"] for new in first_seen(send(cold, selection, warm))] == [0, 128]


def test_a_resumed_request_hits_its_own_blocks(cold: Server, selection: Selection) -> None:
    """Preempted with the cache on, a request resumes behind those of its full blocks that nobody has taken since."""
    length = selection.length
    whole = load_panel(
        length.panels["oracle"], task="oracle", length=length.tokens, vocabulary=selection.study.model.vocabulary
    )
    items = [item for item in whole.items if item.id in ("r02-127", "r03-128", "r06-255", "r07-256")]
    rpc.call(cold.base_url, "hold", 6, timeout_s=LIMIT_S)
    try:
        steps = send(cold, selection, items, wave_size=4)
    finally:
        rpc.call(cold.base_url, "release", timeout_s=LIMIT_S)
    first = steps[0]["new"]
    resumed = [entry for step in steps for entry in step["cached"] if entry["resumed"]]
    assert [(entry["request"], entry["computed"], entry["all_tokens"]) for entry in resumed] == [
        # 255 of the prompt and the first generated token: two full blocks, still its own.
        (first[2]["request"], 256, 257),
        (first[3]["request"], 0, 257),
    ]
    assert resumed[0]["new_blocks"][0][:2] == first[2]["blocks"][0]
    assert len(resumed[0]["new_blocks"][0]) == 3


def test_the_oracles_follow_hits(cold: Server, selection: Selection, panel: Panel) -> None:
    """Warm and cold requests check without a finding, and each skipped position is counted as a prefix."""
    found = capture_oracle(
        cold,
        panel,
        fault=None,
        model=selection.study.model.name,
        schedule=selection.study.schedule,
        wave_size=2,
        timeout_s=LIMIT_S,
    )
    records: Any = found["records"]
    (record,) = records
    told = first_seen(recorded(cold))
    for part in ("routing", "stale-maps", "shifted-outputs", "placement", "row_map"):
        assert record[part]["findings_total"] == 0, record[part]["findings"]
    assert record["conditions"]["prefix-hit"] > 0
    skipped = sum(new["computed"] for new in told)
    assert record["rows"]["prefix"] == skipped == 768
    assert record["rows"]["recomputed"] == 0
    # The last generated token is never fed.
    scheduled = sum(len(item.prompt) + item.max_tokens - 1 for item in panel.items) - skipped
    assert record["rows"]["scheduled"] == record["row_map"]["checked"] == scheduled
    assert record["routing"]["writes_checked"] == scheduled * selection.study.model.layers
