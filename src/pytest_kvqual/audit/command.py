"""The command: ``python -m pytest_kvqual.audit RUN_DIR [--output audit.json] …``; ``kvqual audit`` is the same.

Exit status 0: PASSED. 1: FAILED. 2: usage, or nothing that could be audited; one line on standard error.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from pytest_kvqual.audit import attempts, frozen, receipts
from pytest_kvqual.audit.auditor import Options, UnusableError, audit, lines
from pytest_kvqual.audit.files import one_line
from pytest_kvqual.audit.statement import build, encode

PROGRAM: Final = "kvqual audit"
_PREFIX: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)?")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, and status 2."""
        raise UnusableError(message)


def parser() -> argparse.ArgumentParser:
    """The command line's arguments."""
    found = _Parser(
        prog=PROGRAM,
        description="Re-derive every verdict of a run directory from its raw records. Needs no engine, no GPU and no "
        "other package.",
    )
    add_arguments(found)
    return found


def add_arguments(found: argparse.ArgumentParser) -> None:
    """Declare the arguments, here and for ``kvqual audit``."""
    found.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run directory")
    found.add_argument("--output", type=Path, metavar="FILE", help="write the audit's statement to this file")
    found.add_argument("--prefix", default="", help="as given to the run")
    found.add_argument("--arm", help="the arm under qualification (default: the only one, or the only candidate)")
    found.add_argument("--length", type=int, help="the context length that it must be")
    found.add_argument("--cache-bytes", type=int, help="the pool's size in bytes that it must be")
    found.add_argument("--gsm8k", type=Path, metavar="FILE", help="the GSM8K test set as JSON lines, to read it again")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    try:
        return run(parser().parse_args(argv))
    except UnusableError as error:
        return _refused(str(error))


def run(arguments: argparse.Namespace) -> int:
    """Audit, print, write the statement; the exit status."""
    try:
        if not _PREFIX.fullmatch(arguments.prefix):
            raise UnusableError(f"--prefix: found {arguments.prefix!r}, expected letters, digits, '.', '_' and '-'")
        if arguments.gsm8k is not None and not arguments.gsm8k.is_file():
            raise UnusableError(f"--gsm8k: found no file {arguments.gsm8k}, expected the test set as JSON lines")
        if arguments.output is not None:
            _keep_off(arguments.output, arguments.run_dir)
        result = audit(
            Options(
                run_dir=arguments.run_dir,
                prefix=arguments.prefix,
                arm=arguments.arm,
                length=arguments.length,
                cache_bytes=arguments.cache_bytes,
                gsm8k=arguments.gsm8k,
            )
        )
        if arguments.output is not None:
            _write(arguments.output, encode(build(result)))
    except UnusableError as error:
        return _refused(str(error))
    except Exception as error:
        # Whatever bytes are there, the reader of the output gets a line and not a traceback.
        return _refused(f"{arguments.run_dir}: cannot be audited: {type(error).__name__}: {error}")
    try:
        for line in lines(result):
            _say(line, sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough; what was flushed is lost with the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if result.passed else 1


def _refused(text: str) -> int:
    _say(f"{PROGRAM}: {one_line(text)}", sys.stderr)
    return 2


def _say(text: str, to: object) -> None:
    encoding = getattr(to, "encoding", None) or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=to)  # type: ignore[call-overload]


def _keep_off(output: Path, run_dir: Path) -> None:
    """Refuse to write among what is audited, or over what is no plain file: a device would be replaced by one."""
    if not output.name or (output.exists() and not output.is_file()):
        raise UnusableError(f"--output: found '{output}', expected a plain file, or a new one")
    place, root = output.resolve(), run_dir.resolve()
    for name in (receipts.FOLDER, attempts.FOLDER, frozen.FOLDER):
        if place.is_relative_to(root / name):
            raise UnusableError(
                f"--output: found {output} inside {root / name}, expected a place apart from the records"
            )


def _write(path: Path, data: bytes) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_bytes(data)
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise UnusableError(f"--output: cannot write {path}: {error.strerror or error}") from None
