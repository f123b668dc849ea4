"""The token rate of ``ServingWorker``, its taps removed, against the stock worker class. A program, not a test.

Run it on an idle machine: ``python tests/benchmarks/worker.py``. The control arm ``native`` is served by each class in
turn (A B B A, ``--cycles`` times), one server at a time; in that of ``ServingWorker`` an oracle window is opened and
closed first. A round is 32 requests of 64 tokens in a closed loop of 32. Pairs are rounds of neighbouring servers.

Two servers of one class differ by some per cent, and so do two rounds of one server. ``--within`` therefore pairs steps
that follow each other in one server, of which one is the stock class's (:func:`alternating`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from served_arm import serving

from pytest_kvqual.attempt import load_task_panel
from pytest_kvqual.capture.recorder import Load, Offered, replay
from pytest_kvqual.capture.timing import body_of
from pytest_kvqual.metrics.recording import read_recording
from pytest_kvqual.metrics.summary import summarise
from pytest_kvqual.server import rpc
from pytest_kvqual.server.command import WORKER_CLASS
from pytest_kvqual.stats.blocks import median_interval
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Selection
from pytest_kvqual.worker.wire import WorkerError

STOCK = "vllm.v1.worker.cpu_worker.CPUWorker"
REQUESTS, TOKENS = 32, 64


def one_round(base_url: str, selection: Selection, folder: Path, name: str) -> float:
    """Output tokens per second of 32 requests in a closed loop of 32."""
    items = load_task_panel(selection, "parity").items
    out = folder / f"round-{name}.jsonl"
    offered = [
        Offered(
            request=f"r{name}-{index}",
            prompt=item.id,
            max_tokens=TOKENS,
            intended_ns=None,
            body=body_of(
                item.prompt, model=selection.study.model.name, request_id=f"r{name}-{index}", max_tokens=TOKENS
            ),
        )
        for index, item in enumerate(items)
    ]
    load = Load(mode="closed", concurrency=len(offered))
    replay(base_url, offered, load=load, header={"cell": "round"}, out=out, timeout_s=120.0)
    summary = summarise(read_recording(out.read_bytes(), origin=out.name))
    rate = summary.figures["output_throughput"].value
    assert summary.completed == len(offered)
    assert isinstance(rate, Fraction)
    out.unlink()
    return float(rate)


def untap(base_url: str) -> None:
    """Open and close an oracle window, so that taps were there and are gone."""
    rpc.call(base_url, "kvqual_oracle_start", {})
    rpc.call(base_url, "kvqual_oracle_finish")
    taps = rpc.call(base_url, "kvqual_taps")
    assert all(isinstance(rank, dict) and rank["installed"] is False for rank in taps), taps


def rounds(selection: Selection, worker_class: str, folder: Path, number: int) -> list[float]:
    """Output tokens per second of each of ``number`` rounds on a fresh server, after one round of warm-up."""
    with serving(selection, folder / "server.log", worker_class=worker_class) as server:
        if worker_class == WORKER_CLASS:
            untap(server.base_url)
        return [one_round(server.base_url, selection, folder, str(index)) for index in range(number + 1)][1:]


STEPS = "KVQUAL_BENCHMARK_STEPS"


def alternating(worker: Any) -> None:
    """Make every other step of this worker the stock class's, and time both. Runs inside the worker.

    Of two steps in a row one is that of ``ServingWorker`` and one the stock class's, in turn first. When this is taken
    back, ``[whose, tokens, ns]`` of each step is written to the file that :data:`STEPS` names.

    Raises:
        WorkerError: ``ServingWorker`` has no such method of its own: nothing would be compared.
    """
    own = next(cls for cls in type(worker).__mro__ if cls.__name__ == "ServingWorker")
    names = ("execute_model", "sample_tokens")
    if not all(name in vars(own) for name in names):
        raise WorkerError(f"found no {' or no '.join(names)} in ServingWorker, expected both, in {__name__}")
    calls = [
        {name: getattr(worker, name) for name in names},
        {name: getattr(super(own, worker), name) for name in names},
    ]
    steps: list[list[int]] = []

    def execute_model(scheduled: Any) -> Any:
        whose = (len(steps) + len(steps) // 2) % 2
        begun = time.monotonic_ns()
        output = calls[whose]["execute_model"](scheduled)
        steps.append([whose, scheduled.total_num_scheduled_tokens, time.monotonic_ns() - begun])
        return output

    def sample_tokens(*arguments: Any, **named: Any) -> Any:
        begun = time.monotonic_ns()
        output = calls[steps[-1][0]]["sample_tokens"](*arguments, **named)
        steps[-1][2] += time.monotonic_ns() - begun
        return output

    def undo() -> None:
        del worker.execute_model, worker.sample_tokens
        Path(os.environ[STEPS]).write_text(json.dumps(steps))

    worker.execute_model, worker.sample_tokens = execute_model, sample_tokens
    worker.kvqual_undo.append(undo)


def within(selection: Selection, folder: Path, number: int) -> list[float]:
    """Stock step time over that of ``ServingWorker``, of each two steps in a row that decode 32 requests."""
    here, arm = Path(__file__).resolve().parent, selection.arm
    arm = replace(
        arm,
        pythonpath=(*arm.pythonpath, here, here.parent / "support"),
        environment={**arm.environment, STEPS: str(folder / "steps.json")},
    )
    with serving(replace(selection, arm=arm), folder / "server.log") as server:
        untap(server.base_url)
        one_round(server.base_url, selection, folder, "warm-up")
        rpc.call(server.base_url, "kvqual_plant", f"{Path(__file__).stem}:alternating")
        for index in range(number):
            one_round(server.base_url, selection, folder, str(index))
        rpc.call(server.base_url, "kvqual_unplant")
    steps = json.loads((folder / "steps.json").read_text())
    ratios = []
    for pair in zip(steps[::2], steps[1::2], strict=False):
        times = {whose: ns for whose, tokens, ns in pair if tokens == REQUESTS}
        if len(times) == 2:
            ratios.append(times[1] / times[0])
    return ratios


def main() -> None:
    """Measure, and print each server's rounds and the ratio of each pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--within", action="store_true", help="pairs of steps in one server a cycle, --rounds rounds")
    options = parser.parse_args()
    selection = select(load_study("smollm2-cpu"), arm="native", length=1024, cache_bytes=None)
    # The stock class knows nothing of what an arm brings.
    selection = replace(selection, arm=replace(selection.arm, before_load=(), after_init=()))
    ratios: list[float] = []
    for _ in range(options.cycles):
        if options.within:
            with tempfile.TemporaryDirectory() as folder:
                ratios += within(selection, Path(folder), options.rounds)
            continue
        for pair in ((WORKER_CLASS, STOCK), (STOCK, WORKER_CLASS)):
            rates = {}
            for worker_class in pair:
                with tempfile.TemporaryDirectory() as folder:
                    rates[worker_class] = rounds(selection, worker_class, Path(folder), options.rounds)
                name = worker_class.rpartition(".")[2]
                print(f"{name}: {', '.join(f'{rate:.1f}' for rate in rates[worker_class])} tokens/s", flush=True)
            ratios += [one / other for one, other in zip(rates[WORKER_CLASS], rates[STOCK], strict=True)]
    middle = statistics.median(ratios)
    found = median_interval([Fraction(ratio) for ratio in ratios], confidence=0.95) if len(ratios) > 5 else None
    print(
        json.dumps(
            {
                "pairs": len(ratios),
                "median_ratio": middle,
                "interval": None if found is None else [float(found.lower), float(found.upper), float(found.coverage)],
                "low": min(ratios),
                "high": max(ratios),
            }
        )
    )
    print(f"ServingWorker without taps / stock class: {middle:.4f} of the token rate ({len(ratios)} pairs)")


if __name__ == "__main__":
    main()
