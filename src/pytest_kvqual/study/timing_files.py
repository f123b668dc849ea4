"""The files that a study's timing plans name and a command writes: the traces, the plans.

``kvqual trace`` and ``kvqual plan`` write them, or with ``--check`` hold them against what they would write;
``kvqual freeze`` does the latter too. Same study, same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_kvqual._canonical import sha256_bytes
from pytest_kvqual._decode import nearest
from pytest_kvqual._places import gates_argument
from pytest_kvqual.errors import EvidenceError, StudyError
from pytest_kvqual.study import plan as plans
from pytest_kvqual.study.load import STUDY_FILE, load_study, require_own, require_prepared
from pytest_kvqual.study.panels import load_panel
from pytest_kvqual.study.trace import Trace, build, parse_trace

if TYPE_CHECKING:
    from pytest_kvqual.study.model import Study, TimingRules

__all__ = ["check_timing_files", "plan_command", "trace_command"]

_SHOWN = 12
#: Of an arrival in nanoseconds; more would be beyond thirty years.
_DIGITS = 18


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """A file as it has to be, and what its bytes are about."""

    path: Path
    data: bytes
    about: str


def trace_command(
    name_or_path: str, *, check: bool, arrivals: Sequence[str] = (), format: str | None = None
) -> tuple[str, ...]:
    """What ``kvqual trace`` does; returns one line for each trace, with its SHA-256.

    Args:
        name_or_path: As :func:`pytest_kvqual.study.load.find_study` takes it.
        check: Write nothing; fail unless each trace is what would be written. The arrivals of a cell of kind ``file``
            are then those of the trace that is there.
        arrivals: ``CELL=FILE`` for each cell of kind ``file``, ``LENGTH:CELL=FILE`` where several lengths have a cell
            of that name: one arrival a line, in whole nanoseconds.
        format: As :func:`pytest_kvqual.study.load.load_study` takes it, here and below.

    Raises:
        StudyError: The study has no timing plan, or one that cannot be made into traces: then nothing is written; with
            ``check`` a trace that is missing or another one, or any ``arrivals``.
    """
    study = _timed(name_or_path, format)
    if check and arrivals:
        raise StudyError(
            f"--arrivals: found '{arrivals[0]}' with --check, expected none: the arrivals are those of the traces that "
            "are there"
        )
    given = _given(study, arrivals)
    files = [
        file for length in study.timing for file in _traces(study, length, None if check else given.get(length, {}))
    ]
    said = _check(files, "kvqual trace") if check else _write(study, files)
    return tuple(_line(study, file, word) for file, word in zip(files, said, strict=True))


def plan_command(name_or_path: str, *, check: bool, default: str, format: str | None = None) -> tuple[str, ...]:
    """What ``kvqual plan`` does; returns its lines: the blocks, the trials as commands, what the plan can show.

    Args:
        name_or_path: As :func:`pytest_kvqual.study.load.find_study` takes it.
        check: Write nothing; fail unless each plan is what would be written.
        default: The study that pytest takes without ``--study``.
        format: As for :func:`trace_command`.

    Raises:
        StudyError: The study has no timing plan, or one that is refused, or a trace is missing or another one: then
            nothing is written; with ``check`` a plan that is missing or another one.
    """
    study = _timed(name_or_path, format)
    found = [_plan(study, length) for length in study.timing]
    files = [file for _, file in found]
    said = _check(files, "kvqual plan") if check else _write(study, files)
    lines: list[str] = []
    typed = "" if name_or_path == default else f" --study {name_or_path}"
    typed += "" if study.model.format is None else f" --format {study.model.format}"
    for (plan, file), word in zip(found, said, strict=True):
        lines += [
            _line(study, file, word),
            *_blocks(plan),
            *_commands(study, plan, typed),
            *_reach(plan),
        ]
    return tuple(lines)


def check_timing_files(study: Study) -> None:
    """Hold every trace and plan of a study against what ``kvqual trace`` and ``kvqual plan`` write.

    Raises:
        StudyError: One is missing or another one, or the declaration is refused.
    """
    _check_places(study)
    _check([_plan(study, length)[1] for length in study.timing], "kvqual plan")


def trial_lines(name_or_path: str, length: str, format: str | None = None) -> tuple[str, ...]:
    """What ``kvqual plan --trials LENGTH`` prints, for a script: ``ARM BLOCK`` of each trial, in order.

    Raises:
        StudyError: The study has no timing plan of this length; or as :func:`plan_command` with ``check``.
    """
    study = _timed(name_or_path, format)
    if length not in map(str, study.timing):
        raise StudyError(
            f"--trials: found '{length}', expected a length with a timing plan: {', '.join(map(str, study.timing))}"
        )
    plan, file = _plan(study, int(length))
    _check([file], "kvqual plan")
    return tuple(f"{arm} {block}" for arm, block in plans.trials(plan))


def read_traces(study: Study, length: int) -> dict[str, bytes]:
    """The bytes of each cell's trace, by the cell's name.

    Raises:
        StudyError: One is missing.
    """
    return {cell.name: read_file(cell.trace, "run `kvqual trace`") for cell in study.timing[length].cells}


def _timed(name_or_path: str, format: str | None) -> Study:
    study = load_study(name_or_path, format)
    require_prepared(study)
    if not study.timing:
        raise StudyError(
            f"study {study.name}: found no timing plan, expected one", advice="declare [timing.LENGTH] in study.toml"
        )
    _check_places(study)
    return study


def _check_places(study: Study) -> None:
    """Refuse a trace or plan that would be written over another one, or over a file that the study is made of."""
    locks = [f"lock-{name}.json" for name in study.model.formats] or ["lock.json"]
    taken = {study.directory / name for name in (STUDY_FILE, *locks)} | {study.parity.panel}
    taken |= {study.model.files_path} if study.model.files_path is not None else set()
    taken |= {path for length in study.lengths.values() for path in length.panels.values()}
    taken |= {arm.scales for arm in study.arms.values() if arm.scales is not None}
    taken |= {study.gsm8k_source.shots} if study.gsm8k_source is not None else set()
    taken |= {rules.panel for rules in study.timing.values()}
    for length, rules in study.timing.items():
        for path in (rules.plan, *(cell.trace for cell in rules.cells)):
            if path in taken:
                raise StudyError(
                    f"timing.{length}: found {path} for a trace or plan, expected a file of its own: another file of "
                    "the study is there"
                )
            taken.add(path)


def _traces(study: Study, length: int, given: Mapping[str, tuple[int, ...]] | None) -> list[_File]:
    """The traces of a length as they have to be; without ``given`` the arrivals of a file are those frozen already."""
    rules = study.timing[length]
    panel = load_panel(
        rules.panel,
        task="timing",
        length=length,
        vocabulary=study.model.vocabulary,
        tokenizer=study.model.files.get("tokenizer.json"),
    )
    arrivals = _frozen(rules) if given is None else given
    try:
        found = build(rules.cells, panel.items, panel.sha256, arrivals=arrivals)
    except StudyError as error:
        # Another length may have a cell of the same name.
        raise StudyError(f"timing.{length}: {error}", advice=error.advice) from error
    return [_File(path=cell.trace, data=found[cell.name].to_bytes(), about=_about(found[cell.name]))
            for cell in rules.cells]  # fmt: skip


def _frozen(rules: TimingRules) -> dict[str, tuple[int, ...]]:
    """The arrivals of each cell of kind ``file``, from the trace that is there."""
    found = {}
    for cell in rules.cells:
        if cell.arrivals == "file":
            data = read_file(cell.trace, "run `kvqual trace --arrivals`")
            try:
                trace = parse_trace(data, origin=str(cell.trace))
            except EvidenceError as error:
                raise StudyError(str(error), advice="run `kvqual trace --arrivals`") from error
            found[cell.name] = tuple(it.intended_ns or 0 for it in trace.requests)
    return found


def _about(trace: Trace) -> str:
    load = f"closed loop, {trace.concurrency} in flight" if trace.mode == "closed" else f"open loop, {trace.arrivals}"
    rate = f" at {trace.rate:g} requests/s" if trace.rate is not None else ""
    return f"{len(trace.requests)} requests, {load}{rate}"


def _plan(study: Study, length: int) -> tuple[plans.Plan, _File]:
    rules = study.timing[length]
    files = _traces(study, length, None)
    _check(files, "kvqual trace")
    plan = plans.build(study, length, {cell.name: it.data for cell, it in zip(rules.cells, files, strict=True)})
    count = len(plans.trials(plan))
    return plan, _File(path=rules.plan, data=plan.to_bytes(), about=f"{len(plan.blocks)} blocks, {count} trials")


def _check(files: Sequence[_File], command: str) -> list[str]:
    """Hold files against what is there; returns for each, in one word, what was found.

    Raises:
        StudyError: One is missing or another one.
    """
    for file in files:
        if read_file(file.path, f"run `{command}`") != file.data:
            raise StudyError(
                f"{file.path}: found other bytes than `{command}` writes, expected sha256 {sha256_bytes(file.data)}",
                advice=f"run `{command}`, then what follows it: trace, plan, freeze",
            )
    return ["matches"] * len(files)


def _write(study: Study, files: Sequence[_File]) -> list[str]:
    """Write files of a study, or none of them; returns for each, in a word or two, what was done.

    Each is written beside its place before the first one is moved there.

    Raises:
        StudyError: One cannot be written, or would change a study of the installed package.
    """
    said: list[str] = []
    staged: list[tuple[Path, Path]] = []
    path = Path()
    try:
        for file in files:
            path = file.path
            if path.exists() and not path.is_file():
                raise StudyError(f"cannot write {path}: found no regular file there, expected one or nothing")
            before = path.read_bytes() if path.exists() else None
            if before == file.data:
                said.append("unchanged")
                continue
            require_own(study)
            said.append("written" if before is None else "written anew")
            path.parent.mkdir(parents=True, exist_ok=True)
            # The process id keeps two commands from writing into each other's file.
            scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            staged.append((scratch, path))
            scratch.write_bytes(file.data)
        for scratch, path in staged:
            scratch.replace(path)
    except OSError as error:
        raise StudyError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        for scratch, _ in staged:
            with suppress(OSError):
                scratch.unlink()
    return said


def _line(study: Study, file: _File, said: str) -> str:
    return f"{_relative(study, file.path)}: {said}; {file.about}; sha256 {sha256_bytes(file.data)}"


def read_file(path: Path, advice: str) -> bytes:
    """The bytes of a file that has to be there.

    Raises:
        StudyError: It is missing or no plain file, with ``advice``, or cannot be read.
    """
    if path.exists() and not path.is_file():
        # A pipe or a device may have no end.
        raise StudyError(f"found {path}, expected a plain file there", advice=advice)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StudyError(f"found no file {path}, expected it", advice=advice) from None
    except OSError as error:
        raise StudyError(f"cannot read {path}: {error.strerror or error}") from None


def _given(study: Study, arrivals: Sequence[str]) -> dict[int, dict[str, tuple[int, ...]]]:
    """The arrivals that were given, by length and cell."""
    lengths: dict[str, list[int]] = {}
    for length, rules in study.timing.items():
        for cell in rules.cells:
            if cell.arrivals == "file":
                lengths.setdefault(cell.name, []).append(length)
    # As each has to be named: by its length too only where several lengths have a cell of this name.
    names = [name if len(several) == 1 else f"{it}:{name}" for name, several in lengths.items() for it in several]
    found: dict[int, dict[str, tuple[int, ...]]] = {}
    for text in arrivals:
        place, separator, file = text.partition("=")
        if not separator or not file:
            raise StudyError(f"--arrivals: found '{text}', expected CELL=FILE, or LENGTH:CELL=FILE")
        before, colon, after = place.partition(":")
        name = after if colon else before
        several = [it for it in lengths.get(name, ()) if not colon or str(it) == before]
        if not several:
            raise StudyError(
                f"--arrivals: found '{place}', expected a cell with arrivals = \"file\": {', '.join(names) or 'none'}",
                advice=nearest(place, names),
            )
        if len(several) > 1:
            raise StudyError(
                f"--arrivals: found '{name}', a cell of the lengths {', '.join(map(str, several))}, expected one of "
                f"{', '.join(f'{it}:{name}' for it in several)}"
            )
        of_length = found.setdefault(several[0], {})
        if name in of_length:
            raise StudyError(f"--arrivals: found '{place}' twice, expected each cell once")
        of_length[name] = _times(Path(file))
    return found


def _times(path: Path) -> tuple[int, ...]:
    found = []
    for number, line in enumerate(
        read_file(path, "give `kvqual trace --arrivals` a file that is there").splitlines(), start=1
    ):
        # int() would also take '1_000' and Unicode digits.
        if not line.isdigit() or len(line) > _DIGITS:
            raise StudyError(
                f"{path}, line {number}: found {line[:40]!r}, expected one arrival in whole nanoseconds after zero"
            )
        found.append(int(line))
    return tuple(found)


def _relative(study: Study, path: Path) -> str:
    return path.relative_to(study.directory).as_posix()


def _blocks(plan: plans.Plan) -> list[str]:
    lines = [f"block {it.block}: {', '.join(it.order)}" for it in plan.blocks if it.kind == plans.MEASURED]
    return lines + [f"blocks {one} and {other}: A/A of {plan.null_arm}" for one, other in plan.null_pairs]


def _commands(study: Study, plan: plans.Plan, argument: str) -> list[str]:
    return [
        f'pytest {gates_argument()} -m "{study.platform} and timing"{argument} --arm {arm} --length {plan.length} '
        f"--block {block}"
        for arm, block in plans.trials(plan)
    ]


def _reach(plan: plans.Plan) -> list[str]:
    """What so many blocks can show, each number against what it has to reach."""
    count, family = len(plan.measured), len(plan.comparisons)
    alpha = Fraction(repr(plan.alpha))
    levels = ", ".join(f"{float(alpha / (family - rank)):.6g}" for rank in range(min(family, _SHOWN)))
    order = plans.largest_order(count, Fraction(repr(plan.confidence))) or 0
    return [
        (
            f"sign test: p = {plan.reachable.p:.6g} if all {count} blocks agree; Holm's levels for {family} "
            f"comparison{'s' if family > 1 else ''} at {plan.alpha:g}: {levels}{', …' if family > _SHOWN else ''}"
        ),
        (
            f"interval of the median: effects {order} to {count + 1 - order} of {count}, which cover it with "
            f"{100 * plan.reachable.coverage:.6g} %, at least {100 * plan.confidence:g} %"
        ),
        f"practical effect: {100 * plan.practical:g} %; A/A pairs must stay below it",
    ]
