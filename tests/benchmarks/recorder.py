"""The recorder against a bare socket reader (the floor) and vLLM's own benchmark (the peer). A program, not a test.

``python tests/benchmarks/recorder.py --tokenizer FOLDER`` on an idle machine, the server of known delays in a process
of its own and each client in a fresh one, interleaved in each repetition. Errors: the client's TTFT (send to first
token event) and TPOT minus the server's own durations, absolute. CPU: the client's process time from zero to the last
end, over the token events; for the recorder also with the conversion after the run. Lateness: dispatch after the
intended arrival; for the peer, whose zero is its own, after its earliest dispatch moved along the schedule.

``--in-flight 2000``: closed loop of so many. ``--soak SECONDS``: open loop at ``--rate``, resident memory every 10 s.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytest_kvqual.capture import recorder
from pytest_kvqual.capture._schedule import new_loop
from pytest_kvqual.capture.recorder import Load, Offered, replay

CLIENTS = ("recorder", "floor", "vllm")
# name: mode, rate or concurrency, output tokens
LOADS = {"open-50": ("open", 50, 64), "open-200": ("open", 200, 32), "closed-32": ("closed", 32, 32)}
FIRST_MS, GAP_MS = 20, 10
SCRIPT = {"first_ms": FIRST_MS, "gap_ms": GAP_MS}
TOKEN = b'"token_ids":['


def requests_of(mode: str, level: int, tokens: int, seconds: float) -> int:
    """How many requests take about so many seconds."""
    each = (FIRST_MS + GAP_MS * (tokens - 1)) / 1e3
    return max(level, round(level * seconds) if mode == "open" else round(level * seconds / each))


def trace(mode: str, level: int, tokens: int, number: int) -> list[Offered]:
    """The load as a trace."""
    return [
        Offered(
            request=f"q-{index}",
            prompt="p",
            max_tokens=tokens,
            intended_ns=index * 1_000_000_000 // level if mode == "open" else None,
            body=json.dumps(
                {
                    "model": "known",
                    "request_id": f"q-{index}",
                    "prompt": [1, 2, 3, 4],
                    "max_tokens": tokens,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "kvqual_script": SCRIPT,
                }
            ).encode(),
        )
        for index in range(number)
    ]


def peak_mb() -> float:
    """The process's peak resident memory so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_mb(pid: int | str = "self") -> float:
    """Resident memory now, MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


# The clients. Each prints {"cpu_s", "cpu_whole_s", "peak_mb", "late_ns", "rows": {request: [ttft_ns, tpot_ns]}, …}.


def client_recorder(url: str, mode: str, level: int, tokens: int, number: int, loop: str | None) -> dict[str, Any]:
    """The recorder."""
    marks: dict[str, float] = {}

    real = recorder._Run._keep_zero

    def zero(run: recorder._Run) -> None:
        marks["begin"] = time.process_time()
        real(run)

    def progress(done: int, of: int) -> None:
        if done == of:
            marks["end"], marks["peak"] = time.process_time(), peak_mb()

    recorder._Run._keep_zero = zero  # type: ignore[method-assign]
    offered = trace(mode, level, tokens, number)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "r.jsonl"
        footer = replay(
            url,
            offered,
            load=Load(mode="open") if mode == "open" else Load(mode="closed", concurrency=level),
            header={"cell": "bench"},
            out=out,
            timeout_s=60,
            progress=progress,
            loop=loop,  # type: ignore[arg-type]
        )
        whole = time.process_time()
        rows, late, head = {}, [], {}
        with out.open("rb") as file:
            for text in file:
                line = json.loads(text)
                if line["kind"] == "recording":
                    head = line
                elif line["kind"] == "request":
                    late.append(line["dispatch_ns"] - line["intended_ns"])
                    # The server sends one token an event, usage and [DONE] after them.
                    times = [at for at, _ in line["events"]][:tokens]
                    if line["failure"] is None and len(times) == tokens:
                        ttft = times[0] - line["send_start_ns"]
                        rows[line["request"]] = [ttft, (times[-1] - times[0]) / max(1, tokens - 1)]
    return {
        "cpu_s": marks["end"] - marks["begin"],
        "cpu_whole_s": whole - marks["begin"],
        "peak_mb": marks["peak"],
        "late_ns": late,
        "rows": rows,
        "footer": footer,
        "loop": head["loop"],
    }


class Bare(asyncio.Protocol):
    """The floor's reader of one request: a stamp for each read, and nothing parsed."""

    def __init__(self, ended: Any) -> None:
        self.reads: list[tuple[int, bytes]] = []
        self.ended, self.sent_ns, self.transport = ended, 0, None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Stamp and keep. The end of this one server's answers is known."""
        self.reads.append((time.monotonic_ns(), data))
        if data.endswith(b"0\r\n\r\n"):
            self.ended()


def client_floor(url: str, mode: str, level: int, tokens: int, number: int, loop: str | None) -> dict[str, Any]:
    """A bare reader: one connection per request, opened before zero, the loop's timer, no pool, no parser."""
    port = int(url.rpartition(":")[2])
    offered = trace(mode, level, tokens, number)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    event_loop, loop_name = new_loop(loop)
    late: list[int] = []
    marks: dict[str, float] = {}
    readers: list[Bare] = []

    async def main() -> None:
        done = event_loop.create_future()
        left = number
        following = level if mode == "closed" else number

        def ended() -> None:
            nonlocal left, following
            left -= 1
            if mode == "closed" and following < number:
                following += 1
                send(following - 1, time.monotonic_ns())
            if not left:
                done.set_result(None)

        def send(index: int, due: int) -> None:
            reader = readers[index]
            reader.sent_ns = time.monotonic_ns()
            late.append(reader.sent_ns - due)
            body = offered[index].body
            reader.transport.write(head % len(body) + body)  # type: ignore[attr-defined]

        for _ in range(number):
            opened = socket.create_connection(("127.0.0.1", port))
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.setblocking(False)
            readers.append((await event_loop.create_connection(lambda: Bare(ended), sock=opened))[1])
        gc.collect()
        gc.disable()
        marks["begin"] = time.process_time()
        zero, start = time.monotonic_ns() + 20_000_000, event_loop.time() + 0.02
        if mode == "open":
            for index, one in enumerate(offered):
                intended = one.intended_ns or 0
                event_loop.call_at(start + intended / 1e9, send, index, zero + intended)
        else:
            for index in range(level):
                send(index, time.monotonic_ns())
        await done
        marks["end"], marks["peak"] = time.process_time(), peak_mb()
        for reader in readers:
            reader.transport.abort()  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, number + 256)), hard))
    event_loop.run_until_complete(main())
    event_loop.close()
    rows = {}
    for index, reader in enumerate(readers):
        times, seen = [], b""
        for at, data in reader.reads:
            # An event may be split over reads.
            times += [at] * ((seen + data).count(TOKEN) - seen.count(TOKEN))
            seen += data
        if len(times) >= tokens:
            rows[f"q-{index}"] = [times[0] - reader.sent_ns, (times[tokens - 1] - times[0]) / max(1, tokens - 1)]
    cpu = marks["end"] - marks["begin"]
    return {
        "cpu_s": cpu,
        "cpu_whole_s": cpu,
        "peak_mb": marks["peak"],
        "late_ns": late,
        "rows": rows,
        "loop": loop_name,
    }


def client_vllm(url: str, mode: str, level: int, tokens: int, number: int, tokenizer: str) -> dict[str, Any]:
    """``vllm bench serve`` in this process, so that its process time over the load alone can be taken."""
    from vllm.benchmarks import serve

    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    marks: dict[str, float] = {}
    real = serve.benchmark

    async def measured(*arguments: Any, **options: Any) -> Any:
        marks["begin"] = time.process_time()
        try:
            return await real(*arguments, **options)
        finally:
            marks["end"] = time.process_time()

    serve.benchmark = measured
    with tempfile.TemporaryDirectory() as folder:
        words = ["--backend", "vllm", "--base-url", url, "--endpoint", "/v1/completions", "--model", "known"]
        words += ["--tokenizer", tokenizer, "--dataset-name", "random", "--random-input-len", "4"]
        words += ["--random-output-len", str(tokens), "--num-prompts", str(number), "--ignore-eos", "--disable-tqdm"]
        words += ["--extra-body", json.dumps({"kvqual_script": SCRIPT}), "--ready-check-timeout-sec", "0"]
        words += ["--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "r.json"]
        if mode == "open":
            # Gaps of a gamma distribution with so large a shape are constant.
            words += ["--request-rate", str(level), "--burstiness", "1e9"]
        else:
            words += ["--max-concurrency", str(level)]
        serve.main(parser.parse_args(words))
        found = json.loads((Path(folder) / "r.json").read_text())
    starts = found["start_times"]
    order = sorted(range(number), key=lambda index: float(starts[index]))
    schedule = [starts[index] - place / level for place, index in enumerate(order)] if mode == "open" else [0.0]
    rows = {}
    for place, index in enumerate(order):
        gaps = found["itls"][index]
        if not found["errors"][index]:
            rows[f"#{place}"] = [found["ttfts"][index] * 1e9, sum(gaps) * 1e9 / max(1, tokens - 1)]
    cpu = marks["end"] - marks["begin"]
    return {
        "cpu_s": cpu,
        "cpu_whole_s": cpu,
        "peak_mb": peak_mb(),
        "late_ns": [round((one - min(schedule)) * 1e9) for one in schedule],
        "rows": rows,
        "loop": "",
    }


# The server, and what its truth says of a client.


@contextmanager
def serving(seconds: float) -> Iterator[tuple[str, int]]:
    """The server of known delays in its own process: its URL and process id."""
    command = [sys.executable, "-m", "pytest_kvqual.testing.server", "--port", "0", "--seconds", str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}", process.pid
        finally:
            process.stdin.close()
            process.terminate()


def truth_of(url: str) -> dict[str, dict[str, Any]]:
    """The server's truth by request; ``#N`` by order of arrival."""
    with urllib.request.urlopen(f"{url}/truth") as answer:
        found = json.load(answer)
    found = found.get("requests", found)
    ordered = sorted(found.values(), key=lambda one: one["received_ns"])
    return found | {f"#{place}": one for place, one in enumerate(ordered)}


def reset(url: str) -> None:
    """Forget what was served."""
    urllib.request.urlopen(urllib.request.Request(f"{url}/reset", method="POST")).close()


def rank(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)] if ordered else float("nan")


def run_client(name: str, load: str, url: str, options: argparse.Namespace) -> dict[str, float]:
    """One client in a process of its own, against the truth."""
    reset(url)
    command = [
        sys.executable,
        __file__,
        "--client",
        name,
        "--load",
        load,
        "--url",
        url,
        "--seconds",
        str(options.seconds),
    ]
    command += ["--tokenizer", options.tokenizer or ""] + (["--loop", options.loop] if options.loop else [])
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode != 0:
        sys.exit(f"{name}, {load}: {done.stderr[-2_000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    mode, level, tokens = LOADS[load]
    number = requests_of(mode, level, tokens, options.seconds)
    truth = truth_of(url)
    ttft, tpot = [], []
    for request, (first, per_token) in found["rows"].items():
        known = truth[request]
        ttft.append(abs(first - (known["first_token_ns"] - known["received_ns"])) / 1e6)
        tpot.append(abs(per_token - (known["last_token_ns"] - known["first_token_ns"]) / (tokens - 1)) / 1e6)
    late = [one / 1e6 for one in found["late_ns"]]
    return {
        "late_p50": rank(late, 0.5),
        "late_p99": rank(late, 0.99),
        "late_max": max(late),
        "ttft_p50": rank(ttft, 0.5),
        "ttft_p99": rank(ttft, 0.99),
        "tpot_p50": rank(tpot, 0.5),
        "tpot_p99": rank(tpot, 0.99),
        "cpu_us": found["cpu_s"] * 1e6 / (number * tokens),
        "whole_us": found["cpu_whole_s"] * 1e6 / (number * tokens),
        "peak_mb": found["peak_mb"],
        "lost": number - len(found["rows"]),
    }


def compare(options: argparse.Namespace) -> None:
    """Every load, every client, interleaved; medians over the repetitions and ratios to the floor."""
    clients = [name for name in options.clients.split(",") if name != "vllm" or options.tokenizer]
    for load in options.loads.split(","):
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
        with serving(1_200) as (url, _):
            for _ in range(options.repetitions):
                for name in clients:
                    runs[name].append(run_client(name, load, url, options))
        middle = {
            name: {key: statistics.median(run[key] for run in found) for key in found[0]}
            for name, found in runs.items()
        }
        for name, figures in middle.items():
            text = "  ".join(f"{key} {value:.3f}" for key, value in figures.items())
            ratios = [
                one["cpu_us"] / floor["cpu_us"]
                for one, floor in zip(runs[name], runs.get("floor", runs[name]), strict=True)
            ]
            print(f"{load} {name}: {text}  cpu/floor {' '.join(f'{one:.2f}' for one in ratios)}", flush=True)


def soak(options: argparse.Namespace) -> None:
    """An open loop for a long time; resident memory of the client every 10 s."""
    samples: list[float] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(10):
            samples.append(resident_mb())
            print(f"{len(samples) * 10} s: {samples[-1]:.1f} MB", flush=True)

    body = trace("open", options.rate, 32, 1)[0].body.replace(b'"request_id": "q-0", ', b"")
    number = round(options.soak * options.rate)
    offered = [
        Offered(request=f"q-{n}", prompt="p", max_tokens=32, intended_ns=n * 1_000_000_000 // options.rate, body=body)
        for n in range(number)
    ]
    with serving(options.soak + 120) as (url, _), tempfile.TemporaryDirectory() as folder:
        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        out = Path(folder) / "r.jsonl"
        try:
            footer = replay(url, offered, load=Load(mode="open"), header={"cell": "soak"}, out=out, timeout_s=60)
        finally:
            stop.set()
        late = [
            line["dispatch_ns"] - line["intended_ns"]
            for line in map(json.loads, out.open())
            if line["kind"] == "request"
        ]
    print(json.dumps(footer), f"lateness p99 {rank(late, 0.99) / 1e6:.3f} ms, peak {peak_mb():.1f} MB")


def in_flight(options: argparse.Namespace) -> None:
    """A closed loop of many."""
    LOADS["many"] = ("closed", options.in_flight, 8)
    with serving(300) as (url, _):
        number = 3 * options.in_flight
        begun = time.monotonic()
        found = client_recorder(url, "closed", options.in_flight, 8, number, options.loop)
    print(json.dumps(found["footer"]))
    print(
        f"{options.in_flight} in flight, {number} requests of 8 tokens: {time.monotonic() - begun:.1f} s, completed "
        f"{len(found['rows'])}, CPU {found['cpu_s'] * 1e6 / (8 * number):.1f} us/event, peak {found['peak_mb']:.1f} MB"
    )


def main() -> None:
    """Measure what the options name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--clients", default=",".join(CLIENTS))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tokenizer", help="a folder with the peer's tokenizer; without it the peer is left out")
    parser.add_argument("--loop", choices=["uvloop", "asyncio"])
    parser.add_argument("--in-flight", type=int)
    parser.add_argument("--soak", type=float)
    parser.add_argument("--rate", type=int, default=50)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        mode, level, tokens = LOADS[options.load]
        number = requests_of(mode, level, tokens, options.seconds)
        arguments = (options.url, mode, level, tokens, number)
        if options.client == "vllm":
            found = client_vllm(*arguments, options.tokenizer)
        else:
            found = (client_recorder if options.client == "recorder" else client_floor)(*arguments, options.loop)
        print(json.dumps(found))
    elif options.soak:
        soak(options)
    elif options.in_flight:
        in_flight(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
