"""The token rate of ``ServingWorker``, its taps removed, against the stock worker class. A program, not a test.

Run it on an idle machine: ``python tests/benchmarks/worker.py``. The control arm ``native`` is served by each class in
turn (A B B A, ``--cycles`` times), one server at a time; in that of ``ServingWorker`` an oracle window is opened and
closed first. A round is 32 requests of 64 tokens in a closed loop of 32. Pairs are rounds of neighbouring servers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from served_arm import serving

from pytest_kvqual.attempt import load_task_panel
from pytest_kvqual.capture.recorder import Load, Offered, replay
from pytest_kvqual.capture.timing import body_of
from pytest_kvqual.metrics.recording import read_recording
from pytest_kvqual.metrics.summary import summarise
from pytest_kvqual.server import rpc
from pytest_kvqual.server.command import WORKER_CLASS
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Selection

STOCK = "vllm.v1.worker.cpu_worker.CPUWorker"
TOKENS = 64


def rounds(selection: Selection, worker_class: str, folder: Path, number: int) -> list[float]:
    """Output tokens per second of each of ``number`` rounds on a fresh server, after one round of warm-up."""
    items = load_task_panel(selection, "parity").items
    model = selection.study.model.name
    found = []
    with serving(selection, folder / "server.log", worker_class=worker_class) as server:
        if worker_class == WORKER_CLASS:
            rpc.call(server.base_url, "kvqual_oracle_start", {})
            rpc.call(server.base_url, "kvqual_oracle_finish")
            taps = rpc.call(server.base_url, "kvqual_taps")
            assert all(isinstance(rank, dict) and rank["installed"] is False for rank in taps), taps
        for number_of in range(number + 1):
            out = folder / f"round-{number_of}.jsonl"
            offered = [
                Offered(
                    request=f"r{number_of}-{index}",
                    prompt=item.id,
                    max_tokens=TOKENS,
                    intended_ns=None,
                    body=body_of(item.prompt, model=model, request_id=f"r{number_of}-{index}", max_tokens=TOKENS),
                )
                for index, item in enumerate(items)
            ]
            load = Load(mode="closed", concurrency=len(offered))
            replay(server.base_url, offered, load=load, header={"cell": "round"}, out=out, timeout_s=120.0)
            summary = summarise(read_recording(out.read_bytes(), origin=out.name))
            rate = summary.figures["output_throughput"].value
            assert summary.completed == len(offered)
            assert isinstance(rate, Fraction)
            out.unlink()
            found.append(float(rate))
    return found[1:]


def main() -> None:
    """Measure, and print each server's rounds and the ratio of each pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    selection = select(load_study("smollm2-cpu"), arm="native", length=1024, cache_bytes=None)
    # The stock class knows nothing of what an arm brings.
    selection = replace(selection, arm=replace(selection.arm, before_load=(), after_init=()))
    ratios, servers = [], []
    for _ in range(options.cycles):
        for pair in ((WORKER_CLASS, STOCK), (STOCK, WORKER_CLASS)):
            rates = {}
            for worker_class in pair:
                with tempfile.TemporaryDirectory() as folder:
                    rates[worker_class] = rounds(selection, worker_class, Path(folder), options.rounds)
                name = worker_class.rpartition(".")[2]
                print(f"{name}: {', '.join(f'{rate:.1f}' for rate in rates[worker_class])} tokens/s", flush=True)
                servers.append((name, statistics.median(rates[worker_class])))
            ratios += [one / other for one, other in zip(rates[WORKER_CLASS], rates[STOCK], strict=True)]
    middle = statistics.median(ratios)
    print(json.dumps({"pairs": len(ratios), "median_ratio": middle, "low": min(ratios), "high": max(ratios)}))
    print(f"ServingWorker without taps / stock class: {middle:.4f} of the token rate ({len(ratios)} pairs)")


if __name__ == "__main__":
    main()
