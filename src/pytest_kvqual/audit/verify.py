"""``kvqual verify RECORD …``: read a recording again, with code of its own, and recompute every figure.

Standard library only: ``python -m pytest_kvqual.audit.verify RECORD`` runs on a bare Python 3.11. What is checked,
under numbers that are never given to another meaning:

 1. Bytes: each line is the canonical JSON of its content.
 2. Header: cell, mode and concurrency, digests, clocks and time limit are of the form that they must have.
 3. Footer: it ends at the last end of a request, and names failures that there are.
 4. Requests: as many as the header says, each named once, in the order of their numbers.
 5. Accounting: offered = completed + failed, in all and of each kind of failure.
 6. Times: each request's moments follow each other on one clock, and the time limit was kept.
 7. Framing: base64 is canonical; events and rest, put together and split again, give the same events.
 8. Outcome: completed or the kind of failure follow from status, bytes and times; token ids, usage and limit agree.
 9. Concurrency: in a closed loop never more than N requests are in flight.
10. Schedule: nothing is dispatched before it is intended, or out of order; in a closed loop a request is intended when
    a slot became free, and no slot stays empty for long.
11. Trace: with ``--trace``, the recording is that of the trace.

Exit status 0: verified. 1: findings. 2: a file that cannot be read as a recording; one line on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, Final, NoReturn

from pytest_kvqual.audit.files import DOCUMENT_LIMIT, LINE_LIMIT, DamagedError, one_line
from pytest_kvqual.audit.recomputed import verify
from pytest_kvqual.audit.recorded import Figure, UnreadableError, Verified

PROGRAM: Final = "kvqual verify"


def add_arguments(found: argparse.ArgumentParser) -> None:
    """Declare the arguments, here and for ``kvqual verify``."""
    found.add_argument("records", nargs="+", type=Path, metavar="RECORD", help="a recording, cell-NAME.jsonl")
    found.add_argument("--trace", type=Path, metavar="FILE", help="the trace that the (one) recording must be of")
    found.add_argument("--json", action="store_true", help="print JSON, figures as exact fractions")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, and status 2."""
        raise UnreadableError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = _Parser(prog=PROGRAM, description="Verify recordings of a timed load, and recompute their figures.")
    add_arguments(parser)
    try:
        status = run(parser.parse_args(argv))
        sys.stdout.flush()
        return status
    except UnreadableError as error:
        _say(f"{PROGRAM}: {error}", sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has seen enough; what was flushed is lost with the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run(arguments: argparse.Namespace) -> int:
    """Verify, print; the exit status."""
    status, shown_as_json = 0, []
    try:
        if arguments.trace is not None and len(arguments.records) != 1:
            raise UnreadableError(f"--trace: found {len(arguments.records)} recordings, expected the one of the trace")
        trace = None
        if arguments.trace is not None:
            with _opened(arguments.trace) as file:
                trace = file.read(DOCUMENT_LIMIT)
    except (OSError, ValueError, UnreadableError) as error:
        _say(f"{PROGRAM}: {_reason(error)}", sys.stderr)
        return 2
    for path in arguments.records:
        try:
            with _opened(path) as file:
                result = verify(_limited(file), trace=trace)
        except Exception as error:
            # Whatever bytes are there, the reader of the output gets a line and not a traceback.
            _say(f"{PROGRAM}: {path}: {_reason(error)}", sys.stderr)
            status = 2
            continue
        status = max(status, 1 if result.findings else 0)
        if arguments.json:
            shown_as_json.append(as_json(result, str(path)))
        else:
            for line in lines(result, str(path)):
                _say(line, sys.stdout)
    if arguments.json:
        document = {"schema": 1, "kind": "verified", "recordings": shown_as_json}
        _say(json.dumps(document, sort_keys=True, ensure_ascii=True, indent=2), sys.stdout)
    return status


def _opened(path: Path) -> BinaryIO:
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise UnreadableError("found no regular file, expected a recording")
    return path.open("rb")


def _limited(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(LINE_LIMIT + 1):
        if len(line) > LINE_LIMIT:
            raise UnreadableError(f"found a line of more than {LINE_LIMIT} bytes, expected a request")
        yield line


def _reason(error: BaseException) -> str:
    if isinstance(error, DamagedError):
        return str(error)
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or type(error).__name__}"
    return f"cannot be read: {type(error).__name__}: {error}"


def lines(result: Verified, name: str) -> list[str]:
    """What the command prints of one recording: its totals, each finding, notes, each figure."""
    failed = result.failed
    kinds = f" ({', '.join(f'{count} {it}' for it, count in failed.items())})" if failed else ""
    load = f"closed loop of {result.concurrency}" if result.concurrency is not None else "open loop"
    many = "finding" if len(result.findings) == 1 else "findings"
    verdict = f"{len(result.findings)} {many}" if result.findings else "verified"
    offered, lost = len(result.requests), sum(failed.values())
    found = [f"{name}: {verdict}; {load}, {offered} offered, {offered - lost} completed, {lost} failed{kinds}"]
    found += [finding.line() for finding in result.findings]
    found += [f"note {note}" for note in result.notes]
    found += [f"{key} = {_words(figure)}" for key, figure in result.figures.items()]
    return found


def _words(figure: Figure) -> str:
    exact = figure.exact()
    if exact is None:
        return f"none of {figure.of}"
    scale = 1e6 if figure.unit == "ns" else 1.0
    unit = "ms" if figure.unit == "ns" else figure.unit
    near = f" ({float(figure.value) / scale:.6g} {unit})" if isinstance(figure.value, Fraction) else ""
    return f"{exact} {figure.unit}{near} of {figure.of}"


def as_json(result: Verified, name: str) -> dict[str, object]:
    """The result of one recording, JSON-ready; figures as ``N/D``, ``inf`` or null."""
    failed = result.failed
    return {
        "file": name,
        "verified": not result.findings,
        "offered": len(result.requests),
        "completed": len(result.requests) - sum(failed.values()),
        "failed": failed,
        "findings": [{"check": it.check, "where": it.where, "text": it.text} for it in result.findings],
        "notes": list(result.notes),
        "figures": {
            key: {"value": figure.exact(), "unit": figure.unit, "of": figure.of}
            for key, figure in result.figures.items()
        },
    }


def _say(line: str, to: object) -> None:
    encoding = getattr(to, "encoding", None) or "ascii"
    text = line if "\n" in line else one_line(line)
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=to)  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.exit(main())
