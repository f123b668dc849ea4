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
from pytest_kvqual.errors import EvidenceError, StudyError
from pytest_kvqual.study import plan as plans
from pytest_kvqual.study.load import STUDY_FILE, load_study, require_prepared
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
        arrivals: ``CELL=FILE`` for each cell of kind ``file``: one arrival a line, in whole nanoseconds.
        format: As :func:`pytest_kvqual.study.load.load_study` takes it, here and below.

    Raises:
        StudyError: The study has no timing plan, or one that cannot be made into traces; with ``check`` a trace that is
            missing or another one.
    """
    study = _timed(name_or_path, format)
    given = _given(study, arrivals)
    files = [file for length in study.timing for file in _traces(study, length, None if check else given)]
    return tuple(
        f"{_relative(study, file.path)}: {_settle(file, 'kvqual trace', check=check)}; {file.about}; sha256 "
        f"{sha256_bytes(file.data)}"
        for file in files
    )


def plan_command(name_or_path: str, *, check: bool, default: str, format: str | None = None) -> tuple[str, ...]:
    """What ``kvqual plan`` does; returns its lines: the blocks, the trials as commands, what the plan can show.

    Args:
        name_or_path: As :func:`pytest_kvqual.study.load.find_study` takes it.
        check: Write nothing; fail unless each plan is what would be written.
        default: The study that pytest takes without ``--study``.
        format: As for :func:`trace_command`.

    Raises:
        StudyError: The study has no timing plan, or one that is refused; a trace is missing or another one; with
            ``check`` a plan that is missing or another one.
    """
    study = _timed(name_or_path, format)
    lines: list[str] = []
    typed = "" if name_or_path == default else f" --study {name_or_path}"
    typed += "" if study.model.format is None else f" --format {study.model.format}"
    for length in study.timing:
        plan, file = _plan(study, length)
        said = _settle(file, "kvqual plan", check=check)
        lines += [
            f"{_relative(study, file.path)}: {said}; {file.about}; sha256 {sha256_bytes(file.data)}",
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
    for length in study.timing:
        _settle(_plan(study, length)[1], "kvqual plan", check=True)


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
    _settle(file, "kvqual plan", check=True)
    return tuple(f"{arm} {block}" for arm, block in plans.trials(plan))


def read_traces(study: Study, length: int) -> dict[str, bytes]:
    """The bytes of each cell's trace, by the cell's name.

    Raises:
        StudyError: One is missing.
    """
    return {cell.name: _read(cell.trace, "kvqual trace") for cell in study.timing[length].cells}


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
    found = build(rules.cells, panel.items, panel.sha256, arrivals=_frozen(rules) if given is None else given)
    return [_File(path=cell.trace, data=found[cell.name].to_bytes(), about=_about(found[cell.name]))
            for cell in rules.cells]  # fmt: skip


def _frozen(rules: TimingRules) -> dict[str, tuple[int, ...]]:
    """The arrivals of each cell of kind ``file``, from the trace that is there."""
    found = {}
    for cell in rules.cells:
        if cell.arrivals == "file":
            data = _read(cell.trace, "kvqual trace --arrivals")
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
    for file in files:
        _settle(file, "kvqual trace", check=True)
    plan = plans.build(study, length, {cell.name: it.data for cell, it in zip(rules.cells, files, strict=True)})
    count = len(plans.trials(plan))
    return plan, _File(path=rules.plan, data=plan.to_bytes(), about=f"{len(plan.blocks)} blocks, {count} trials")


def _settle(file: _File, command: str, *, check: bool) -> str:
    """Write a file, or check it; returns in one word what was found.

    Raises:
        StudyError: With ``check`` it is missing or another one; otherwise it cannot be written.
    """
    if check:
        if _read(file.path, command) != file.data:
            raise StudyError(
                f"{file.path}: found other bytes than `{command}` writes, expected sha256 {sha256_bytes(file.data)}",
                advice=f"run `{command}`, then what follows it: trace, plan, freeze",
            )
        return "matches"
    before = file.path.read_bytes() if file.path.is_file() else None
    if before == file.data:
        return "unchanged"
    # The process id keeps two commands from writing into each other's file.
    scratch = file.path.with_name(f".{file.path.name}.{os.getpid()}.tmp")
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(file.data)
        scratch.replace(file.path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        raise StudyError(f"cannot write {file.path}: {error.strerror or error}") from error
    return "written" if before is None else "written anew"


def _read(path: Path, command: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StudyError(f"found no file {path}, expected it", advice=f"run `{command}`") from None
    except OSError as error:
        raise StudyError(f"cannot read {path}: {error.strerror or error}") from None


def _given(study: Study, arrivals: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The arrivals that were given, by cell."""
    cells = {cell.name: cell for rules in study.timing.values() for cell in rules.cells if cell.arrivals == "file"}
    found: dict[str, tuple[int, ...]] = {}
    for text in arrivals:
        name, separator, file = text.partition("=")
        if not separator or not file:
            raise StudyError(f"--arrivals: found '{text}', expected CELL=FILE")
        if name not in cells:
            raise StudyError(
                f"--arrivals: found '{name}', expected a cell with arrivals = \"file\": {', '.join(cells) or 'none'}",
                advice=nearest(name, cells),
            )
        if name in found:
            raise StudyError(f"--arrivals: found '{name}' twice, expected each cell once")
        found[name] = _times(Path(file))
    return found


def _times(path: Path) -> tuple[int, ...]:
    found = []
    for number, line in enumerate(_read(path, "kvqual trace --arrivals CELL=FILE").splitlines(), start=1):
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
        f'pytest qualification/ -m "{study.platform} and timing"{argument} --arm {arm} --length {plan.length} '
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
