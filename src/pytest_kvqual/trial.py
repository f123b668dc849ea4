"""One trial: a fresh server of one arm, its warm-up, and each cell of the frozen plan once, in the plan's order.

The server is controlled through the development RPC, in intervals that do not overlap: *qualification* reads what the
server is, *profiling* which kernels it runs, *measurement* times. Before and after each measured load the taps are read
(none may be in place) and the server's counters.

Files of the attempt: ``trial-identity.json``, ``warm-up.jsonl``, ``cell-NAME.jsonl`` for each cell, ``trial.json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import sleep
from typing import TYPE_CHECKING, Final

from pytest_kvqual._clock import monotonic_ns

if TYPE_CHECKING:
    from pytest_kvqual.attempt import Attempt
    from pytest_kvqual.judge.permit import TimingPermit
    from pytest_kvqual.study.model import Cell
    from pytest_kvqual.study.panels import PanelItem
    from pytest_kvqual.study.trace import Trace

TRIAL, TRIAL_IDENTITY, WARM_UP = "trial.json", "trial-identity.json", "warm-up.jsonl"
PARTS: Final = ("layers", "parameters", "scales", "settings", "device")
"""What of a server's identity is read in a trial; its files were re-hashed when the arm was qualified."""


def cell_file(name: str) -> str:
    """The recording of a cell."""
    return f"cell-{name}.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loads:
    """What a trial sends: each cell with its trace and the trace's SHA-256, and the prompts by id.

    ``warm_up`` are prompts that no cell sends, ``settle_s`` the wait before each cell in seconds.
    """

    cells: Sequence[tuple[Cell, Trace, str]]
    items: Mapping[str, PanelItem]
    warm_up: Sequence[PanelItem]
    settle_s: float


def run_trial(
    attempt: Attempt, loads: Loads, *, permit: TimingPermit, about: Mapping[str, object], model: str, timeout_s: float
) -> None:
    """Boot the attempt's server, warm it up, replay every cell, and leave the records in the attempt.

    Args:
        attempt: A new attempt of the arm.
        loads: What to send.
        permit: For the gate ``trial``, or ``pilot``: its recordings are then marked exploratory.
        about: What goes into ``trial.json`` and each recording: the arm, length, block, the plan's digest, and the
            attempt that was qualified.
        model: The served model's name.
        timeout_s: Bound of each request.

    Raises:
        CaptureError: Something could not be captured, or the server changed while it was timed.
        ServerError: The server did not start, or ended.
    """
    from pytest_kvqual.capture.recorder import Load
    from pytest_kvqual.capture.timing import ended, environment, interval, offered_of, quiet_counters, warm_up_of

    attempt.boot()
    base_url = attempt.base_url
    taps: list[dict[str, object]] = []
    counts: list[dict[str, object]] = []
    intervals: list[dict[str, object]] = []
    kernels: list[dict[str, object]] = []
    before = environment()

    @contextmanager
    def within(name: str) -> Iterator[None]:
        begin = monotonic_ns()
        yield
        intervals.append({"name": name, "begin_ns": begin, "end_ns": monotonic_ns()})

    def read(when: str, finished: int = 0) -> int:
        found = quiet_counters(base_url, finished=finished)
        taps.append({"when": when, "ranks": attempt.call("kvqual_taps")})
        counts.append({"when": when, "values": found})
        return ended(found)

    with within("qualification"):
        attempt.trial_identity(TRIAL_IDENTITY, PARTS)
    with within("profiling"):
        kernels.append({"when": "before", "ranks": attempt.kernels()})
    tag = f"{attempt.name.replace('/', '-')}"
    done = read("before-warm-up")
    warm = warm_up_of(
        loads.warm_up, model=model, tag=tag, max_tokens=max(cell.max_tokens for cell, _, _ in loads.cells)
    )
    # Timed too, though nothing rests on it: it is what makes the server ready for what is.
    with (
        attempt.timed("warm-up", begun_ns=monotonic_ns(), requests=len(warm), done=0, total=len(warm)),
        within("warm-up"),
    ):
        completed = interval(
            base_url, warm, permit=permit, load=Load(mode="closed", concurrency=min(2, len(warm))), cell="warm-up",
            trace_sha256=None, about=about, out=attempt.path / WARM_UP, timeout_s=timeout_s,
        )  # fmt: skip
    attempt.seal(WARM_UP)
    done = read("after warm-up", done + completed)
    begun_ns, sent, planned = monotonic_ns(), 0, sum(cell.requests for cell, _, _ in loads.cells)
    for cell, trace, digest in loads.cells:
        # Said before the server settles, so that this process is at rest when the first request is due; the next word
        # comes after the last one was read. In between no progress is drawn and no thread of it runs.
        with attempt.timed(f"cell {cell.name}", begun_ns=begun_ns, requests=cell.requests, done=sent, total=planned):
            sleep(loads.settle_s)
            done = read(f"before {cell.name}")
            offered = offered_of(trace, loads.items, model=model, tag=tag)
            with within(f"measurement {cell.name}"):
                completed = interval(
                    base_url, offered, permit=permit, load=Load(mode=cell.mode, concurrency=cell.concurrency),
                    cell=cell.name, trace_sha256=digest, about=about, out=attempt.path / cell_file(cell.name),
                    timeout_s=timeout_s,
                )  # fmt: skip
            attempt.seal(cell_file(cell.name))
            done = read(f"after {cell.name}", done + completed)
        sent += cell.requests
    with within("profiling"):
        kernels.append({"when": "after", "ranks": attempt.kernels()})
    attempt.write(
        TRIAL,
        {
            "schema": 1,
            **about,
            "judgment": permit.judgment,
            "exploratory": permit.gate == "pilot",
            "taps": taps,
            "counters": counts,
            "dispatch": kernels,
            "intervals": intervals,
            "environment": {"before": before, "after": environment()},
        },
    )
