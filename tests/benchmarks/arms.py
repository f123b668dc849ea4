"""Output tokens per second of each arm under one load, and healthy oracle passes. A program, not a test.

Run it on an idle machine: ``python tests/benchmarks/arms.py --arms native,reference,candidate --passes 10``. The ratio
is to the first arm of the same run. The load: 32 requests at client concurrency 32, the nll panel's prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from pytest_kvqual.capture import http
from pytest_kvqual.capture.oracle import capture_oracle
from pytest_kvqual.capture.quality import send_all
from pytest_kvqual.models import model_folder, verify_model
from pytest_kvqual.server.command import serve_command, worker_config
from pytest_kvqual.server.process import Server, Timeouts, free_port
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Selection
from pytest_kvqual.study.panels import load_panel, selected_scales

LIMIT_S = 600.0


def serving(selection: Selection, folder: Path) -> Server:
    """The selection's server."""
    model = model_folder(selection.study.model)
    verify_model(model, selection.study.model.files)
    port = free_port()
    command = serve_command(
        selection,
        model=model,
        port=port,
        worker_config=worker_config(selection, model=model, v_scales=selected_scales(selection)),
        python=Path(sys.executable),
        inherited=os.environ,
    )
    log = folder / f"{selection.arm.name}.log"
    return Server.start(command, port=port, log=log, timeouts=Timeouts(boot_s=selection.study.engine.boot_timeout_s))


def rate(server: Server, selection: Selection, tokens: int) -> float:
    """Output tokens per second over the whole load."""
    study, length = selection.study, selection.length
    panel = load_panel(length.panels["nll"], task="nll", length=length.tokens, vocabulary=study.model.vocabulary)
    requests = [
        http.completion(
            id=item.id,
            index=index,
            request_id=f"bench-{index}",
            model=study.model.name,
            prompt=item.prompt,
            max_tokens=tokens,
        )
        for index, item in enumerate(panel.items)
    ]
    answers: list[http.Response] = []
    begun = time.monotonic()
    send_all(server, requests, schedule="natural", wave_size=32, timeout_s=LIMIT_S, on_response=answers.append)
    wall = time.monotonic() - begun
    return sum(len(json.loads(str(it.body))["choices"][0]["token_ids"]) for it in answers) / wall


def passes(server: Server, selection: Selection, number: int) -> None:
    """Healthy passes of the whole oracle panel; prints the findings of each."""
    study, length = selection.study, selection.length
    panel = load_panel(length.panels["oracle"], task="oracle", length=length.tokens, vocabulary=study.model.vocabulary)
    for count in range(number):
        begun = time.monotonic()
        found = capture_oracle(
            server,
            panel,
            fault=None,
            model=study.model.name,
            schedule=study.schedule,
            wave_size=length.wave_size,
            timeout_s=LIMIT_S,
        )["records"]
        for record in found if isinstance(found, list) else []:
            totals = {part: record[part]["findings_total"] for part in ("routing", "placement", "row_map")}
            print(f"  pass {count + 1}: findings {totals}, {time.monotonic() - begun:.1f} s", flush=True)


def main() -> None:
    """Measure what the options name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", default="native,reference,candidate")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=65)
    parser.add_argument("--passes", type=int, default=0)
    options = parser.parse_args()
    study, first = load_study("smollm2-cpu"), 0.0
    with tempfile.TemporaryDirectory() as folder:
        for arm in options.arms.split(","):
            selection = select(study, arm=arm, length=options.length, cache_bytes=None)
            with serving(selection, Path(folder)) as server:
                found = rate(server, selection, options.tokens)
                first = first or found
                print(f"{arm}: boot {server.boot_s:.1f} s, {found:.1f} tokens/s, {found / first:.2f}", flush=True)
                passes(server, selection, options.passes)


if __name__ == "__main__":
    main()
