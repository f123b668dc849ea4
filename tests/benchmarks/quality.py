"""The gates of quality of one arm, without the gates above them and without receipts. A program, not a test.

    python tests/benchmarks/quality.py --arm candidate --length 1024 --run-dir DIR
    python tests/benchmarks/quality.py --run-dir DIR --after-init pytest_kvqual.faults.degradations:v_two_bits

The second line measures the arm with more code in its worker, under a label of its own. Captures of the controls lie
in DIR and are used again by every run of the same frozen study, length and gates, so several degraded arms share one
capture. Prints each gate's verdict and where the time went. Exits with 0 when every gate says PASS, 1 when one does
not, 2 when nothing could be measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pytest_kvqual._clock import monotonic_ns
from pytest_kvqual.campaign import Campaign
from pytest_kvqual.errors import KvqualError, StudyError
from pytest_kvqual.judge.verdict import Outcome, Verdict
from pytest_kvqual.progress import Boot, Event, Step, Timed
from pytest_kvqual.report.pace import Pace, line, title
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Selection

GATES = "nll,retrieval,recall"
SHOWN = 5


class Clock:
    """Takes a campaign's events, prints what is over with the time since the start, and sums up what each took.

    The time between two events is that of what was being done before the second one.
    """

    def __init__(self) -> None:
        self._begun_ns = self._last_ns = monotonic_ns()
        self._doing = "start"
        self._paces: dict[tuple[str, int], Pace] = {}
        self.seconds: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        now, pace = monotonic_ns(), Pace(0)
        over = isinstance(event, str) or (event.stage == "ready" if isinstance(event, Boot) else event.over)
        if isinstance(event, Step | Timed):
            pace = self._paces.setdefault((title(event), event.begun_ns), Pace(event.begun_ns))
            pace.update(event.done, event.total, now)
        if not isinstance(event, str):
            what = f"{event.arm}: boot" if isinstance(event, Boot) else title(event)
            self._spent(what if over else self._doing)
            self._doing = what
        if over:
            print(f"  {self.total_s():7.1f} s  {line(event, pace, now)}", flush=True)

    def next(self, what: str) -> None:
        """What begins now, without a line of its own."""
        self._spent(self._doing)
        self._doing = what

    def total_s(self) -> float:
        """Wall seconds since the start."""
        return (monotonic_ns() - self._begun_ns) / 1e9

    def _spent(self, what: str) -> None:
        now = monotonic_ns()
        self.seconds[what] = self.seconds.get(what, 0.0) + (now - self._last_ns) / 1e9
        self._last_ns = now


def chosen(study: str, arm: str, length: int, after_init: Sequence[str], label: str | None) -> tuple[Selection, str]:
    """The selection with its arm's ``after_init`` extended, and the label that keeps its evidence apart.

    Raises:
        StudyError: The study lacks the arm or the length, or the label is an arm's although code was added: evidence of
            the arm as the study has it would be taken for this one's, and the other way round.
    """
    selection = select(load_study(study), arm=arm, length=length, cache_bytes=None)
    name = label or "-".join([arm, *(path.rpartition(":")[2].replace("_", "-") for path in after_init)])
    if (name != arm) is (not after_init) or (after_init and name in selection.study.arms):
        raise StudyError(
            f"--label: found {name!r} with {len(after_init)} --after-init, expected {arm!r} without any and a name "
            "that is no arm's with some"
        )
    extended = replace(selection.arm, after_init=(*selection.arm.after_init, *after_init))
    return replace(selection, arm=extended), name


def verdict_of(campaign: Campaign, gate: str) -> Verdict | KvqualError:
    """What a gate says of what was captured, or why it says nothing. The receipts of other gates are not asked for."""
    try:
        return campaign.verdict(gate)
    except KvqualError as error:
        return error


def show(gate: str, found: Verdict | KvqualError) -> None:
    """Print what decided, the null, the seeded faults and the first findings."""
    if isinstance(found, KvqualError):
        print(f"{gate}: no verdict: {found.line()}", flush=True)
        return
    print(f"{gate}: {found.outcome.value}: {found.figure}")
    if found.null is not None:
        print(f"  null {'passed' if found.null.passed else 'failed'}: {found.null.figure}")
    for poison in found.poison:
        print(f"  poison {poison.fault} {'caught' if poison.caught else 'missed'}: {poison.figure}")
    for finding in found.findings[:SHOWN]:
        print(f"  finding: {finding}")
    if len(found.findings) > SHOWN:
        print(f"  and {len(found.findings) - SHOWN} more findings")
    sys.stdout.flush()


def main() -> int:
    """Measure what the options name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", default="smollm2-cpu")
    parser.add_argument("--arm", default="candidate")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--gates", default=GATES)
    parser.add_argument("--after-init", action="append", default=[], metavar="MODULE:FUNCTION")
    parser.add_argument(
        "--label",
        help="the arm's name in evidence, for these functions only; default the arm's and the functions' names",
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    options = parser.parse_args()
    gates, clock = options.gates.split(","), Clock()
    passed = 0
    try:
        selection, label = chosen(options.study, options.arm, options.length, options.after_init, options.label)
        campaign = Campaign(selection, run_dir=options.run_dir.resolve(), progress=clock, label=label)
        print(f"{campaign.title}, after_init {list(selection.arm.after_init)}", flush=True)
        campaign.prepare(gates)
    except KvqualError as error:
        print(error.line())
        return 2
    try:
        for gate in gates:
            clock.next(f"{gate}: controls looked up")
            found = verdict_of(campaign, gate)
            show(gate, found)
            passed += isinstance(found, Verdict) and found.outcome is Outcome.PASS
    finally:
        clock.next("end")
        campaign.close()
        clock.next("")
    print("seconds:")
    for what, seconds in clock.seconds.items():
        if seconds >= 0.05:
            print(f"  {seconds:7.1f}  {what}")
    print(f"  {clock.total_s():7.1f}  in all")
    print(*campaign.summary(), sep="\n")
    return 0 if passed == len(gates) else 1


if __name__ == "__main__":
    sys.exit(main())
