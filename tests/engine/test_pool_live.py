"""Held blocks on the real engine: requests live at the top of the pool, are preempted and resumed for real."""

from __future__ import annotations

import json
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
from pytest_kvqual.errors import ServerError
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
# Prompts of 127, 128, 255 and 256 tokens: six blocks of 128 to begin with, ten at the end.
WAVE = ("r02-127", "r03-128", "r06-255", "r07-256")
FREE = 6


@pytest.fixture(scope="module")
def selection() -> Selection:
    """The candidate of the embedded study, with the recorder of the scheduler's decisions."""
    selection = select(load_study("smollm2-cpu"), arm="candidate", length=1024, cache_bytes=None)
    return replace(selection, arm=replace(selection.arm, pythonpath=(SUPPORT,), after_init=("step_recorder:install",)))


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


@pytest.fixture(scope="module")
def panel(selection: Selection) -> Panel:
    """The wave's prompts."""
    length = selection.length
    whole = load_panel(
        length.panels["oracle"], task="oracle", length=length.tokens, vocabulary=selection.study.model.vocabulary
    )
    found = {item.id: item for item in whole.items}
    return replace(whole, items=tuple(found[name] for name in WAVE))


@pytest.fixture
def items(panel: Panel) -> Sequence[PanelItem]:
    """The wave's prompts, in order."""
    return panel.items


_count = iter(range(1_000_000))


def worker(server: Server, method: str, *args: object) -> Any:
    """The single rank's answer."""
    (answer,) = rpc.call(server.base_url, method, *args, timeout_s=LIMIT_S)
    return answer


def send(
    server: Server, selection: Selection, items: Sequence[PanelItem]
) -> tuple[dict[str, list[int]], list[dict[str, Any]]]:
    """One wave: the token ids by request, and the scheduler's decisions of each step, named by panel id."""
    named: dict[str, str] = {}
    requests = []
    for index, item in enumerate(items):
        request_id = f"pool-{next(_count)}"
        named[request_id] = item.id
        requests.append(
            http.completion(
                id=item.id,
                index=index,
                request_id=request_id,
                model=selection.study.model.name,
                prompt=item.prompt,
                max_tokens=item.max_tokens,
            )
        )
    worker(server, "steps")
    responses: list[http.Response] = []
    send_all(server, requests, schedule="waves", wave_size=len(items), timeout_s=LIMIT_S, on_response=responses.append)
    assert [response.status for response in responses] == [200] * len(items)
    tokens = {it.id: json.loads(it.body or "")["choices"][0]["token_ids"] for it in responses}
    text = json.dumps(worker(server, "steps"))
    for request_id, name in named.items():
        # The engine puts "cmpl-" before a request's name and "-0-" with eight hexadecimal digits behind it.
        while (start := text.find(f"cmpl-{request_id}-0-")) >= 0:
            text = text[:start] + name + text[start + len(f"cmpl-{request_id}-0-") + 8 :]
    return tokens, json.loads(text)


def test_preempted_and_resumed_at_the_top_of_the_pool(
    server: Server, selection: Selection, items: Sequence[PanelItem]
) -> None:
    """With six free blocks two of four requests are preempted and resume from position 0; no output changes."""
    plain, _ = send(server, selection, items)
    held = worker(server, "hold", FREE)
    blocks = held["blocks"]
    top = list(range(blocks - 1, blocks - 1 - FREE, -1))
    assert held == {"found": True, "blocks": blocks, "held": blocks - 1 - FREE, "free": top}
    pressed, steps = send(server, selection, items)
    assert worker(server, "release") == {
        "found": True, "blocks": blocks, "released": blocks - 1 - FREE, "free": blocks - 1, "whole": True,
    }  # fmt: skip
    assert pressed == plain
    assert [(new["request"], new["blocks"]) for new in steps[0]["new"]] == [
        ("r02-127", [top[:1]]),
        ("r03-128", [top[1:2]]),
        ("r06-255", [top[2:4]]),
        ("r07-256", [top[4:6]]),
    ]
    assert [(index, step["preempted"]) for index, step in enumerate(steps) if step["preempted"]] == [
        (1, ["r07-256"]),
        (2, ["r06-255"]),
    ]
    # A block of a preempted request is another's in the same step.
    first = {entry["request"]: entry for entry in steps[1]["cached"]}
    assert first["r03-128"]["new_blocks"] == [top[5:6]]
    resumed = {entry["request"]: entry for step in steps for entry in step["cached"] if entry["resumed"]}
    assert set(resumed) == {"r06-255", "r07-256"}
    for name, entry in resumed.items():
        done = entry["output_tokens"]
        prompt = next(len(item.prompt) for item in items if item.id == name)
        assert 0 < done < len(pressed[name])
        assert entry["computed"] == 0
        assert entry["all_tokens"] == prompt + done
        (granted,) = entry["new_blocks"]
        # All its blocks, not only further ones, for the prompt and every token that it had.
        assert len(granted) == -(-(prompt + done) // selection.study.engine.block_size)
        assert set(granted) <= set(top)
    used = {block for step in steps for new in step["new"] for block in new["blocks"][0]}
    assert used == set(top)


def test_the_oracles_follow_preemption(server: Server, selection: Selection, panel: Panel) -> None:
    """Preempted, resumed, at the top of the pool: no finding, and each position computed again is counted."""
    worker(server, "steps")
    worker(server, "hold", FREE)
    try:
        found = capture_oracle(
            server,
            panel,
            fault=None,
            model=selection.study.model.name,
            schedule="waves",
            wave_size=len(WAVE),
            timeout_s=LIMIT_S,
        )
    finally:
        worker(server, "release")
    records: Any = found["records"]
    (record,) = records
    for part in ("routing", "stale-maps", "shifted-outputs", "placement", "row_map"):
        assert record[part]["findings_total"] == 0, record[part]["findings"]
    for condition in ("resumed", "top-of-pool", "reused-block"):
        assert record["conditions"][condition] > 0, record["conditions"]
    scheduled = sum(sum(step["scheduled"].values()) for step in worker(server, "steps"))
    # The last generated token is never fed.
    once = sum(len(item.prompt) + item.max_tokens - 1 for item in panel.items)
    # Both requests had 256 positions when they were preempted.
    assert record["rows"] == {"scheduled": scheduled, "prefix": 0, "recomputed": 512}
    assert scheduled == once + 512 == record["row_map"]["checked"]


def test_a_released_pool_is_as_it_was(server: Server, selection: Selection, items: Sequence[PanelItem]) -> None:
    """After a hold and a release the first request gets block 1, as on a fresh server, and nothing is held."""
    blocks = worker(server, "hold", 1)["blocks"]
    assert worker(server, "release")["whole"] is True
    assert worker(server, "release") == {
        "found": True, "blocks": blocks, "released": 0, "free": blocks - 1, "whole": True,
    }  # fmt: skip
    _, steps = send(server, selection, items[:1])
    assert steps[0]["new"][0]["blocks"] == [[1]]


def test_what_cannot_be_held_is_refused(server: Server) -> None:
    """No free block, more than the pool has, and a second hold are one-line errors that change nothing."""
    blocks = worker(server, "release")["blocks"]
    for free in (0, blocks):
        with pytest.raises(ServerError, match=f"free_blocks is {free}, expected 1 to {blocks - 1}"):
            worker(server, "hold", free)
    worker(server, "hold", 3)
    with pytest.raises(ServerError, match=f"{blocks - 4} blocks of the pool are held already, expected none"):
        worker(server, "hold", 3)
    assert worker(server, "release")["whole"] is True
