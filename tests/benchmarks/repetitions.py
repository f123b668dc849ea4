"""Healthy passes of the oracles on one served arm, each over requests of its own seed; any finding is a false alarm.

    python tests/benchmarks/repetitions.py --arm candidate --repetitions 50

A seed draws the number of requests, their tokens, their lengths (half of them beside a block multiple), their output
limits and how many blocks stay free. Passes take turns: as the model computes, with fingerprints and fills, and in a
pool too small for the requests. Exits with 1 when a pass has a finding that is not waived for the arm.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_kvqual.capture.oracle import capture_oracle
from pytest_kvqual.models import model_folder, verify_model
from pytest_kvqual.server.command import serve_command, worker_config
from pytest_kvqual.server.process import Server, Timeouts, free_port
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Study
from pytest_kvqual.study.panels import Panel, PanelItem, load_panel, selected_scales

SECTIONS = ("row_map", "stale-maps", "routing", "shifted-outputs", "placement", "replay")
LONGEST = 400


def drawn(panel: Panel, seed: int, *, vocabulary: int, block_size: int) -> tuple[Panel, int]:
    """A panel of one seed, and how many blocks its scarce pass leaves free."""
    source = random.Random(seed)
    items = []
    for number in range(source.randint(4, 10)):
        if source.random() < 0.5:
            length = source.randint(1, LONGEST // block_size) * block_size + source.choice((-1, 0, 1))
        else:
            length = source.randint(1, LONGEST)
        prompt = tuple(source.randrange(vocabulary) for _ in range(length))
        items.append(PanelItem(id=f"r{number}", prompt=prompt, targets=(), max_tokens=source.randint(1, 12)))
    widest = max(-(-(len(item.prompt) + item.max_tokens) // block_size) for item in items)
    return replace(panel, items=tuple(items)), widest + source.randint(2, 8)


def waived(study: Study, arm: str, section: str) -> frozenset[str]:
    """The kinds of finding that the study waives."""
    return frozenset(study.waived(arm, section))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", default="candidate")
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    selection = select(load_study("smollm2-cpu"), arm=options.arm, length=1024, cache_bytes=None)
    study, model = selection.study, model_folder(selection.study.model)
    verify_model(model, study.model.files)
    port = free_port()
    command = serve_command(
        selection,
        model=model,
        port=port,
        worker_config=worker_config(selection, model=model, v_scales=selected_scales(selection)),
        python=Path(sys.executable),
        inherited=os.environ,
    )
    panel = load_panel(selection.length.panels["oracle"], task="oracle", length=1024, vocabulary=study.model.vocabulary)
    alarms, rows, cells, begun = 0, 0, 0, time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        Server.start(command, port=port, log=Path(folder) / "server.log", timeouts=Timeouts(boot_s=240)) as server,
    ):
        for seed in range(options.first_seed, options.first_seed + options.repetitions):
            requests, free = drawn(panel, seed, vocabulary=study.model.vocabulary, block_size=study.engine.block_size)
            way: dict[str, Any] = ({}, {"probe": True, "fills": True}, {"free_blocks": free})[seed % 3]
            found = capture_oracle(
                server,
                requests,
                **way,
                model=study.model.name,
                schedule="natural" if seed % 7 == 6 else "waves",
                wave_size=selection.length.wave_size,
                timeout_s=300,
            )
            record: Any = found["records"][0]  # type: ignore[index]  # one rank
            findings = []
            for section in SECTIONS:
                unknown = set(record[section]["kinds"]) - waived(study, options.arm, section)
                findings += [f"{section}: {record[section]['findings'][:1]}"] if unknown else []
            alarms += bool(findings)
            rows += record["placement"]["rows_checked"]
            cells += record["routing"]["cells_checked"]
            print(
                f"seed {seed}: {len(requests.items)} requests, {record['steps']} steps, {way or 'model'}, worst "
                f"{record['placement']['worst_ratio']:.3f}, resumed {record['conditions']['resumed']}: "
                f"{findings or 'no finding'}",
                flush=True,
            )
    print(
        f"{options.arm}: {options.repetitions} passes, {alarms} with a finding, {rows} rows, {cells} cells, "
        f"{time.monotonic() - begun:.0f} s with the boot"
    )
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
