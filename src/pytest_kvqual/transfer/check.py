"""One backend under the oracles, without a model: run a script, read the records, say what is wrong.

As a program it runs one script again, as a failed test prints it::

    python -m pytest_kvqual.transfer.check --geometry G --backend MODULE:FORMAT --script JSON
"""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_kvqual.errors import KvqualError, StudyError
from pytest_kvqual.kv.geometry import Geometry, parse_geometry
from pytest_kvqual.transfer.engine import Backend, TransferEngine
from pytest_kvqual.transfer.workload import Script, StepRecord

FORMATS = ("k16v16", "k16v8", "k8v8", "k8v8-inline")
SECTIONS = ("row_map", "stale-maps", "routing", "shifted-outputs", "placement", "replay")
OURS: Mapping[str, str] = {
    "pytest_kvqual.kv.backends.reference": "k16v16",
    "pytest_kvqual.kv.backends.k16v8": "k16v8",
    "pytest_kvqual.kv.backends.triton_k16v8": "k16v8",
}
"""Our own backends and what they store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A backend under check: ``module`` and ``kv_format`` as they are written on the command line."""

    module: str
    kv_format: str
    backend: Backend

    def __str__(self) -> str:
        return f"{self.module}:{self.kv_format}"


def find_backend(text: str) -> Subject:
    """The backend that ``MODULE[:FORMAT]`` names.

    A module offers ``write`` and ``attend``, or ``for_format(name)`` that returns an object with both. The format
    defaults to ``k16v16``, and to their own for our backends.

    Raises:
        StudyError: The module cannot be imported, lacks one of the functions, or the format is not known.
    """
    name, colon, kv_format = text.partition(":")
    kv_format = kv_format if colon else OURS.get(name, "k16v16")
    if kv_format not in FORMATS:
        raise StudyError(f"found format {kv_format!r}, expected one of {', '.join(FORMATS)}, in backend {text!r}")
    try:
        module: Any = importlib.import_module(name)
    except Exception as error:  # whatever a stranger's module raises is its own
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise StudyError(f"found backend module {name!r}, which cannot be imported: {reason}") from None
    except SystemExit as error:
        raise StudyError(f"found backend module {name!r}, which exits on import with {error.code!r}") from None
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # pytest.skip at module level
        raise StudyError(f"found backend module {name!r}, which cannot be imported: {type(error).__name__}") from None
    if callable(getattr(module, "for_format", None)):
        try:
            module = module.for_format(kv_format)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise StudyError(
                f"found backend module {name!r}, whose for_format({kv_format!r}) raises {reason}"
            ) from None
    missing = [function for function in ("write", "attend") if not callable(getattr(module, function, None))]
    if missing:
        raise StudyError(
            f"found backend module {name!r} without {' and '.join(missing)}, expected write and attend of "
            "pytest_kvqual.kv.backends.paged's signatures"
        )
    return Subject(module=name, kv_format=kv_format, backend=module)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The records of one run, one of each rank, and the steps that ran. ``died`` says what the backend raised."""

    records: Sequence[Mapping[str, Any]]
    steps: Sequence[StepRecord]
    died: str = ""

    def objections(self, sections: Sequence[str] = SECTIONS) -> list[str]:
        """What speaks against the backend in the given sections of the records; empty: nothing.

        A section that checked nothing objects, and so does a worst ratio that is not a number.
        """
        found = [self.died] if self.died else []
        for record in self.records:
            for section in sections:
                part = record[section]
                found += [f"{section}: {line}" for line in part["findings"]]
                found += _empty(record, section)
        if not self.records and not found:
            found.append("found no record, expected one of each rank")
        return found


def _empty(record: Mapping[str, Any], section: str) -> list[str]:
    part = record[section]
    counts = {
        "row_map": part.get("checked"),
        "stale-maps": part.get("tables_compared"),
        "routing": part.get("writes_checked"),
        "shifted-outputs": part.get("rows_checked"),
        "placement": part.get("rows_checked"),
        "replay": min(part["rows_compared"].values()) if section == "replay" else None,
    }
    found: list[str] = []
    if section == "replay" and not record["fills"]:
        return found
    if not counts[section]:
        found.append(f"{section}: found {counts[section]} checked, expected more than 0")
    if section == "placement" and not math.isfinite(float(part["worst_ratio"])):
        found.append(f"placement: found a worst ratio of {part['worst_ratio']}, expected a finite one")
    return found


def run(
    subject: Subject,
    geometry: Geometry,
    script: Script,
    *,
    probe: bool = False,
    fills: bool = False,
    plant: Callable[[TransferEngine], None] | None = None,
    **engine: Any,
) -> Outcome:
    """Runs a script on a fresh engine under one oracle window a rank.

    Args:
        subject: The backend.
        geometry: Head counts, head size and block size.
        script: What happens.
        probe: Fingerprints in place of K, V and query.
        fills: Each attention call again with unwritten cells filled.
        plant: Plants a fault in the engine before its windows open.
        engine: Arguments of ``TransferEngine``.
    """
    made = TransferEngine(geometry, subject.backend, kv_format=subject.kv_format, **engine)
    if plant is not None:
        plant(made)
    made.open(probe=probe, fills=fills)
    steps: list[StepRecord] = []
    died = ""
    try:
        steps = script.play(made)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        # A backend that raises is a finding, with the case that made it raise; one that calls pytest.skip or sys.exit,
        # which are no Exception, is one too.
        died = f"the run ended with {type(error).__name__}: {error}".splitlines()[0]
    return Outcome(records=made.close(), steps=steps, died=died)


def check(backend: Subject | str, geometry: Geometry | str, script: Script, **engine: Any) -> tuple[Outcome, Outcome]:
    """One run with K, V and queries of a model's kind, and a second with fingerprints and fills.

    Args:
        backend: A subject, or ``MODULE[:FORMAT]``.
        geometry: A geometry, or what ``kv.geometry.parse_geometry`` reads.
        script: What happens.
        engine: Arguments of ``TransferEngine``.
    """
    subject = find_backend(backend) if isinstance(backend, str) else backend
    sizes = parse_geometry(geometry) if isinstance(geometry, str) else geometry
    plain = run(subject, sizes, script, **engine)
    return plain, run(subject, sizes, script, probe=True, fills=True, **engine)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What one example ran: enough to run it again."""

    subject: Subject
    geometry: Geometry
    script: Script
    probe: bool = False
    fills: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)

    def run(self, plant: Callable[[TransferEngine], None] | None = None) -> Outcome:
        """Runs it."""
        return run(
            self.subject,
            self.geometry,
            self.script,
            probe=self.probe,
            fills=self.fills,
            plant=plant,
            **self.engine,
        )

    def command(self) -> str:
        """A shell command that runs the case again and prints what it finds."""
        words = [f"--geometry {self.geometry} --backend {self.subject} --script '{self.script}'"]
        words += [f"--{name}" for name in ("probe", "fills") if getattr(self, name)]
        if self.engine:
            words.append(f"--engine '{json.dumps(dict(self.engine), separators=(',', ':'))}'")
        return f"python -m pytest_kvqual.transfer.check {' '.join(words)}"

    def report(self, outcome: Outcome, objections: Sequence[str], folder: Path | None = None) -> str:
        """The failed case in a few lines: sizes, lengths, block tables, findings, command, the reproducer's path."""
        lines = [
            f"{self.subject} at {self.geometry}: {objections[0]}",
            *(f"  also: {line}" for line in objections[1:4]),
            f"  lengths: {', '.join(f'{name} {length}' for name, length in self.script.lengths().items())}",
            *(f"  step {number}: {step}" for number, step in enumerate(outcome.steps[:6])),
            f"  again: {self.command()}",
        ]
        if folder is not None:
            lines += [f"  reproducer: {path}" for path in keep(outcome, folder)]
        return "\n".join(lines)


def keep(outcome: Outcome, folder: Path) -> list[Path]:
    """Writes the reproducers of a run, one ``.npz`` a gate, and returns their paths."""
    kept = []
    for record in outcome.records:
        for item in record["reproducers"]:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{item['gate']}.npz"
            path.write_bytes(base64.b64decode(item["npz"]))
            kept.append(path)
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one case and prints what it finds; 1 where anything is found, 2 where the arguments are wrong."""
    parser = argparse.ArgumentParser(prog="python -m pytest_kvqual.transfer.check", description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", required=True, help="qwen3-8b, phi-4, smollm2 or hq=..,hkv=..,d=..,block=..")
    parser.add_argument("--backend", required=True, help="MODULE[:FORMAT]")
    parser.add_argument("--script", required=True, help="the operations as JSON")
    parser.add_argument("--engine", default="{}", help="arguments of TransferEngine as JSON")
    parser.add_argument("--probe", action="store_true", help="fingerprints in place of K, V and query")
    parser.add_argument("--fills", action="store_true", help="each attention call again with unwritten cells filled")
    given = parser.parse_args(arguments)
    try:
        case = Case(
            subject=find_backend(given.backend),
            geometry=parse_geometry(given.geometry),
            script=Script.parse(given.script),
            probe=given.probe,
            fills=given.fills,
            engine=json.loads(given.engine),
        )
        outcome = case.run()
    except (KvqualError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    objections = outcome.objections()
    sys.stdout.write((case.report(outcome, objections) if objections else f"{case.subject}: nothing found") + "\n")
    return 1 if objections else 0


if __name__ == "__main__":
    sys.exit(main())
