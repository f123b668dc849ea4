"""What ``kvqual trace`` and ``kvqual plan`` do: write the traces and plans that a study's timing rules give.

Both are made from the study alone, so that ``--check`` and ``kvqual freeze`` can tell whether a file is the one that
would be written. Arrivals from a file are the exception: they are kept in the trace itself, and read from there again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_kvqual._canonical import sha256_bytes
from pytest_kvqual.errors import EvidenceError, StudyError
from pytest_kvqual.study.load import load_study
from pytest_kvqual.study.model import Study
from pytest_kvqual.study.panels import load_panel
from pytest_kvqual.study.plan import Plan, build, check, reachable, trials
from pytest_kvqual.study.trace import build as build_traces
from pytest_kvqual.study.trace import parse_trace


def trace_command(name_or_path: str, *, check_only: bool, arrivals: Sequence[str] = ()) -> list[str]:
    """Write every trace of a study's timing plans; one line each.

    Args:
        name_or_path: The study.
        check_only: Write nothing.
        arrivals: ``LENGTH/CELL=FILE`` for each cell whose arrivals come from a file: one number of seconds a line.

    Raises:
        StudyError: The study times nothing; a panel is too small; a file of arrivals is missing or malformed; or, with
            ``check_only``, a trace is not what would be written.
    """
    study, given = _timed(name_or_path), dict(_given(arrivals))
    lines = []
    for length in study.timing:
        for cell, data in _traces(study, length, given).items():
            path = next(it.trace for it in study.timing[length].cells if it.name == cell)
            lines.append(_put(path, data, check_only, "kvqual trace"))
    return lines


def plan_command(name_or_path: str, *, check_only: bool) -> list[str]:
    """Write the plan of each length that a study times; lines for a person: order, trials, what can be reached.

    Raises:
        StudyError: The study times nothing; a trace is missing; the plan is refused; or, with ``check_only``, a plan is
            not what would be written.
    """
    study, lines = _timed(name_or_path), []
    for length, rules in study.timing.items():
        plan = build(study, length, read_traces(study, length))
        lines += [_put(rules.plan, plan.to_bytes(), check_only, "kvqual plan"), *_described(study, length, plan)]
    return lines


def trial_lines(name_or_path: str, length: int) -> list[str]:
    """``ARM BLOCK`` of each trial of a length's plan, in order, for a script.

    Raises:
        StudyError: The study has no plan at this length.
    """
    study = _timed(name_or_path)
    if length not in study.timing:
        raise StudyError(
            f"study {study.name}: found no timing plan at length {length}, expected one of "
            f"{', '.join(map(str, study.timing))}"
        )
    return [f"{arm} {block}" for arm, block in trials(build(study, length, read_traces(study, length)))]


def check_timing_files(study: Study) -> None:
    """Refuse a study whose traces or plans are not what its timing rules give.

    Raises:
        StudyError: One is missing, or another one.
    """
    for length, rules in study.timing.items():
        for cell, data in _traces(study, length, {}).items():
            path = next(it.trace for it in rules.cells if it.name == cell)
            _put(path, data, True, "kvqual trace")
        check(_read(rules.plan, "kvqual plan"), study, length, read_traces(study, length), origin=str(rules.plan))


def read_traces(study: Study, length: int) -> dict[str, bytes]:
    """The bytes of each cell's trace.

    Raises:
        StudyError: One is missing.
    """
    return {cell.name: _read(cell.trace, "kvqual trace") for cell in study.timing[length].cells}


def _timed(name_or_path: str) -> Study:
    study = load_study(name_or_path)
    if not study.timing:
        raise StudyError(f"study {study.name}: found no timing plan, expected [timing.LENGTH] in it")
    return study


def _traces(study: Study, length: int, given: Mapping[str, Path]) -> dict[str, bytes]:
    rules = study.timing[length]
    panel = load_panel(
        rules.panel,
        task="timing",
        length=length,
        vocabulary=study.model.vocabulary,
        tokenizer=study.model.files.get("tokenizer.json"),
    )
    arrivals: dict[str, Sequence[int]] = {}
    for cell in rules.cells:
        if cell.arrivals != "file":
            continue
        source = given.get(f"{length}/{cell.name}")
        if source is not None:
            arrivals[cell.name] = _seconds(source)
        elif cell.trace.is_file():
            arrivals[cell.name] = _kept(cell.trace)
    found = build_traces(rules.cells, panel.items, panel.sha256, arrivals=arrivals)
    return {name: trace.to_bytes() for name, trace in found.items()}


def _kept(path: Path) -> tuple[int, ...]:
    try:
        trace = parse_trace(_read(path, "kvqual trace"), origin=str(path))
    except EvidenceError as error:
        raise StudyError(str(error), advice="run `kvqual trace --arrivals LENGTH/CELL=FILE`") from error
    return tuple(it.intended_ns for it in trace.requests if it.intended_ns is not None)


def _given(arrivals: Sequence[str]) -> list[tuple[str, Path]]:
    found = []
    for text in arrivals:
        cell, equals, file = text.partition("=")
        if not equals or not re.fullmatch(r"[0-9]+/[a-z][a-z0-9-]*", cell):
            raise StudyError(f"--arrivals: found '{text}', expected LENGTH/CELL=FILE")
        found.append((cell, Path(file)))
    return found


def _seconds(path: Path) -> tuple[int, ...]:
    """Arrivals in ns from a file with one decimal number of seconds a line; exact."""
    from decimal import Decimal, InvalidOperation

    found = []
    for number, line in enumerate(_read(path, "").decode(errors="replace").splitlines(), start=1):
        try:
            value = Decimal(line.strip()) * 10**9
            found.append(int(value.to_integral_value()))
        except (InvalidOperation, ValueError, OverflowError):
            raise StudyError(f"{path}, line {number}: found '{line[:40]}', expected a number of seconds") from None
    return tuple(found)


def _read(path: Path, command: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StudyError(f"found no file {path}, expected it", advice=command and f"run `{command}`") from None
    except OSError as error:
        raise StudyError(f"cannot read {path}: {error.strerror}") from None


def _put(path: Path, data: bytes, check_only: bool, command: str) -> str:
    if check_only:
        found = _read(path, command)
        if found != data:
            raise StudyError(
                f"{path}: found sha256 {sha256_bytes(found)}, expected {sha256_bytes(data)} as the study gives",
                advice=f"run `{command}` and `kvqual freeze`",
            )
        return f"{sha256_bytes(data)}  {path} (matches)"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise StudyError(f"cannot write {path}: {error.strerror or error}") from error
    return f"{sha256_bytes(data)}  {path}"


def _described(study: Study, length: int, plan: Plan) -> list[str]:
    best = reachable(len(plan.measured), len(plan.comparisons), plan.alpha, plan.confidence)
    pairs = len(plan.null_pairs)
    title = f"length {length}: {len(plan.measured)} blocks of {', '.join(plan.arms)} in a Williams design, "
    title += f"{pairs} A/A pair{'s' if pairs > 1 else ''} of {plan.null_arm}, {len(trials(plan))} trials"
    lines = [title]
    lines += [f"  block {block.number} ({block.kind}): {', '.join(block.order)}" for block in plan.blocks]
    lines.append(
        f"  family of {len(plan.comparisons)}, Holm's smallest level {float(best.level):.4g}; reachable two-sided p "
        f"where all {len(plan.measured)} blocks agree: {float(best.p):.4g}"
    )
    lines.append(
        f"  interval of the median: {100 * float(best.coverage):.4g} % actual coverage, "
        f"{100 * plan.confidence:g} % asked"
    )
    lines += [
        f"  {it.metric} of {it.candidate} against {it.control} in {it.cell}: {it.better} is better, practical "
        f"{100 * plan.practical:g} %"
        for it in plan.comparisons
    ]
    lines.append("trials, in this order:")
    command = f'pytest qualification/ -m "{study.platform} and timing" --study {study.name}'
    return lines + [f"  {command} --arm {arm} --length {length} --block {block}" for arm, block in trials(plan)]
