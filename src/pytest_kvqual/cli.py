"""The command line ``kvqual``. Each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path

from pytest_kvqual import __version__
from pytest_kvqual.errors import KvqualError, StudyError

DEFAULT_STUDY = "smollm2-cpu"
"""As pytest's ``--study``; importing that module here would import pytest."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an error raised on purpose is one line on standard error and exit status 2."""
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        # As on standard error: a file's name may be no text, and another alphabet than the terminal's may be in one.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status: int = args.run(args)
    except KvqualError as error:
        print(f"kvqual {args.command}: {error.line()}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of our output has seen enough.
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    from pytest_kvqual.audit.command import add_arguments as add_audit_arguments
    from pytest_kvqual.audit.verify import add_arguments as add_verify_arguments

    parser = argparse.ArgumentParser(prog="kvqual", description="Qualification of KV-cache changes of vLLM.")
    parser.add_argument("--version", action="version", version=f"kvqual {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], text: str, *, zero: str = "done", one: str = ""
    ) -> argparse.ArgumentParser:
        """A command; ``zero`` and ``one`` say what those exit statuses mean, where ``one`` is there at all."""
        statuses = [
            f"0 {zero}",
            *([f"1 {one}"] if one else []),
            "2 wrong usage, or an error: one line on standard error",
        ]
        found = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"Exit status: {'; '.join(statuses)}.",
        )
        found.set_defaults(run=run)
        return found

    def study_of(found: argparse.ArgumentParser) -> None:
        found.add_argument(
            "study", nargs="?", default=DEFAULT_STUDY, metavar="STUDY", help="name or path (default: %(default)s)"
        )
        found.add_argument(
            "--format", metavar="NAME", help="the format of the model, where the study has several (default: its first)"
        )

    freeze = command("freeze", _freeze, "write the lock of a study")
    study_of(freeze)
    freeze.add_argument("--check", action="store_true", help="write nothing; fail unless the lock matches")
    copy = command("copy", _copy, "copy a study to a folder of your own, to be changed, prepared and frozen there")
    copy.add_argument("study", metavar="STUDY", help="name or path")
    copy.add_argument("folder", type=Path, metavar="FOLDER", help="the copy: nothing is there yet, or an empty folder")
    trace = command("trace", _trace, "write the traces that the timing plans of a study name, and print their digests")
    study_of(trace)
    trace.add_argument("--check", action="store_true", help="write nothing; fail unless they are what would be written")
    trace.add_argument(
        "--arrivals", action="append", default=[], metavar="[LENGTH:]CELL=FILE",
        help="the arrivals of a cell of kind file: one a line, in whole nanoseconds",
    )  # fmt: skip
    plan = command(
        "plan", _plan, "write the timing plans of a study, and print the trials in order and what they can show"
    )
    study_of(plan)
    plan.add_argument("--check", action="store_true", help="write nothing; fail unless they are what would be written")
    plan.add_argument(
        "--trials", metavar="LENGTH", help="write nothing; print ARM and BLOCK of each trial of a length, in order"
    )
    model = command("model", _model, "build or verify the model folder of a study, and print its path")
    study_of(model)
    model.add_argument("--rebuild", action="store_true", help="build again, and replace what is there")
    doctor = command(
        "doctor",
        _doctor,
        "say what this host has of what a study needs",
        zero="nothing must be mended",
        one="something must be mended",
    )
    study_of(doctor)
    doctor.add_argument("--gsm8k", type=Path, metavar="FILE", help="look at this test set; else at the hub's cache")
    init = command("init", _init, "write the study of a model in a folder, each line explained, and freeze it")
    _init_arguments(init)
    prepare = command(
        "prepare", _prepare, "write the files of a study that are made from its model's tokenizer and weights"
    )
    study_of(prepare)
    prepare.add_argument("--model", type=Path, required=True, metavar="DIR", help="the folder of the declared revision")
    prepare.add_argument("--bible", type=Path, metavar="FILE", help="the King James text (default: run `bible`)")
    prepare.add_argument(
        "--topics", type=Path, metavar="FILE", help="CPython 3.11.7's pydoc_data/topics.py (default: this Python's)"
    )
    prepare.add_argument("--text", type=Path, metavar="FILE", help="of a study that `init` wrote: the text given to it")
    prepare.add_argument(
        "--calibrate", action="store_true", help="write the V scales too: boots the study's first control"
    )
    checkout = command("checkout", _checkout, "print a checkout's tables for a kvqual-install.toml")
    checkout.add_argument("path", type=Path, metavar="PATH", help="the root of the checkout")
    checkout.add_argument(
        "--name", default="vllm", choices=("vllm", "flashinfer"), help="whose checkout it is (default: %(default)s)"
    )
    checkout.add_argument(
        "--arm", default="candidate", metavar="ARM", help="the arm that runs it (default: %(default)s)"
    )
    report = command(
        "report",
        _report,
        "print the verdicts of a run directory as written; fail unless the newest of each gate is PASS",
        zero="the newest receipt of each gate is an undamaged PASS",
        one="one is not",
    )
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run directory")
    report.add_argument("--prefix", default="", help="as given to the run")
    report.add_argument("--html", type=Path, metavar="FILE", help="write the gate report there, as one page")
    report.add_argument("--junit", type=Path, metavar="FILE", help="write it there as JUnit (xunit2), for CI")
    audit = command(
        "audit",
        _audit,
        "re-derive every verdict of a run directory from its raw records; fail unless it passes",
        zero="PASSED: all that the study requires holds",
        one="FAILED",
    )
    add_audit_arguments(audit)
    verify = command(
        "verify",
        _verify,
        "read recordings again, with code of its own; fail unless each is consistent",
        zero="verified",
        one="findings",
    )
    add_verify_arguments(verify)
    metrics = command("metrics", _metrics, "print the figures of a recording, each with its unit")
    metrics.add_argument("file", type=Path, metavar="RECORD", help="a cell-….jsonl of an attempt")
    metrics.add_argument("--formulas", action="store_true", help="print the definition under each figure")
    replay = command(
        "replay",
        _replay,
        "check the reproducer of a finding again; fail where the finding is reproduced",
        zero="the finding is not reproduced",
        one="the finding is reproduced",
    )
    replay.add_argument("file", type=Path, metavar="FILE", help="a reproducer-….npz of an attempt")

    def gate_of(found: argparse.ArgumentParser, total: str) -> None:
        found.add_argument("--total", required=True, metavar="N", help=total)
        found.add_argument(
            "--limit", required=True, metavar="L", help="the upper bound must be below it (0.02 is 2 %%)"
        )
        found.add_argument(
            "--confidence", default="0.95", metavar="C", help="of the one-sided bound (default: %(default)s)"
        )

    bound = command(
        "bound",
        _bound,
        "the upper bound of a loss probability against its limit; fail where it is not below",
        zero="the bound is below the limit",
        one="it is not",
    )
    bound.add_argument(
        "--lost", required=True, metavar="N", help="questions right in the control, not in the candidate"
    )
    gate_of(bound, "all paired questions")
    bound.add_argument("--gained", metavar="N", help="the reverse: print the net change with its interval too")
    power = command(
        "power", _power, "the probability that a number of questions passes, and the number that passes as wanted"
    )
    gate_of(power, "paired questions of the design")
    power.add_argument("--loss-rate", metavar="P", help="the candidate's true loss probability")
    power.add_argument("--null", type=Path, metavar="RECEIPT", help="take the loss rate from this receipt's null")
    power.add_argument("--null-lost", metavar="N", help="take it from a control captured twice: right, then not right")
    power.add_argument("--null-total", metavar="N", help="of so many questions")
    power.add_argument("--wanted", default="0.9", metavar="P", help="probability to pass (default: %(default)s)")
    return parser


def _freeze(args: argparse.Namespace) -> int:
    from pytest_kvqual.study.freeze import freeze_command

    print(freeze_command(args.study, check=args.check, format=args.format))
    return 0


def _copy(args: argparse.Namespace) -> int:
    from pytest_kvqual.study.own import copy_study

    print(copy_study(args.study, args.folder))
    return 0


def _trace(args: argparse.Namespace) -> int:
    from pytest_kvqual.study.timing_files import trace_command

    for line in trace_command(args.study, check=args.check, arrivals=args.arrivals, format=args.format):
        print(line)
    return 0


def _plan(args: argparse.Namespace) -> int:
    from pytest_kvqual.study.timing_files import plan_command, trial_lines

    if args.trials is not None and args.check:
        raise StudyError(
            f"--trials: found --check beside '{args.trials}', expected one of them: --trials checks the plan of its "
            "length by itself"
        )
    if args.trials is not None:
        for line in trial_lines(args.study, args.trials, args.format):
            print(line)
        return 0
    for line in plan_command(args.study, check=args.check, default=DEFAULT_STUDY, format=args.format):
        print(line)
    return 0


def _model(args: argparse.Namespace) -> int:
    from pytest_kvqual.models import build_model
    from pytest_kvqual.study.load import load_study

    print(build_model(load_study(args.study, args.format).model, rebuild=args.rebuild))
    return 0


def _init_arguments(init: argparse.ArgumentParser) -> None:
    init.add_argument("model", type=Path, metavar="MODEL_DIR", help="config.json, tokenizer and safetensors")
    init.add_argument(
        "--candidate", "--kv-cache-dtype", default="k16v8", metavar="NAME",
        help="k16v8, k16v16 (this project's backends), fp8_e4m3 or fp8, fp8_e5m2 (default: %(default)s)",
    )  # fmt: skip
    init.add_argument(
        "--platform", choices=("cpu", "gpu"), default="cpu", help="which runs the gates (default: %(default)s)"
    )
    init.add_argument("--length", type=int, default=1024, metavar="N", help="in tokens (default: %(default)s)")
    init.add_argument(
        "--text", type=Path, metavar="FILE", help="cut the panels from it (default: the topics of this Python)"
    )
    init.add_argument(
        "--without", action="append", default=[], choices=("nll", "retrieval", "recall"), metavar="GATE",
        help="leave out one that the model cannot take: nll, retrieval or recall; may be repeated",
    )  # fmt: skip
    init.add_argument("--output", type=Path, metavar="DIR", help="the study's folder (default: ./MODEL-CANDIDATE)")
    init.add_argument(
        "--no-calibrate", dest="calibrate", action="store_false",
        help="make no V scales: boot nothing, and say how they are made",
    )  # fmt: skip


def _init(args: argparse.Namespace) -> int:
    from pytest_kvqual.init import init

    lines = init(
        args.model,
        output=args.output,
        candidate=args.candidate,
        platform=args.platform,
        length=args.length,
        text=args.text,
        without=args.without,
        calibrate=args.calibrate,
    )
    for line in lines:
        print(line, flush=True)
    return 0


def _prepare(args: argparse.Namespace) -> int:
    from pytest_kvqual.prepare import prepare

    lines = prepare(
        args.study,
        format=args.format,
        model=args.model.absolute(),
        bible=args.bible,
        topics=args.topics,
        text=args.text,
        calibrate=args.calibrate,
    )
    for line in lines:
        print(line, flush=True)
    return 0


def _checkout(args: argparse.Namespace) -> int:
    from pytest_kvqual.server.checkout import checkout_lines

    for line in checkout_lines(args.path, args.name, args.arm):
        print(line)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from pytest_kvqual.doctor import checks

    failed = False
    for check in checks(args.study, args.format, gsm8k=args.gsm8k):
        failed = failed or not check.passed
        print(check.line())
    return 1 if failed else 0


def _report(args: argparse.Namespace) -> int:
    from pytest_kvqual.report.stored import stored

    found = stored(args.run_dir, prefix=args.prefix)
    for line in found.lines:
        print(line)
    if args.html is not None or args.junit is not None:
        from pytest_kvqual.report.gate.files import write_report

        for path in write_report(args.run_dir, html=args.html, junit=args.junit, prefix=args.prefix):
            print(f"gate report: {path}")
    return 0 if found.passed else 1


def _audit(args: argparse.Namespace) -> int:
    from pytest_kvqual.audit.command import run

    return run(args)


def _verify(args: argparse.Namespace) -> int:
    from pytest_kvqual.audit.verify import run

    return run(args)


def _metrics(args: argparse.Namespace) -> int:
    from pytest_kvqual.report.metrics import metrics

    for line in metrics(args.file, formulas=args.formulas):
        print(line)
    return 0


def _replay(args: argparse.Namespace) -> int:
    from pytest_kvqual.oracles.reproducer import check

    recorded, found = check(args.file)
    print(f"recorded: {recorded}")
    for line in found:
        print(f"found:    {line}")
    if not found:
        print("found:    nothing")
    return 1 if found else 0


def _bound(args: argparse.Namespace) -> int:
    from pytest_kvqual.report.design import bound

    try:
        found = bound(
            lost=_count("lost", args.lost),
            total=_count("total", args.total),
            limit=_number("limit", args.limit),
            confidence=_number("confidence", args.confidence),
            gained=None if args.gained is None else _count("gained", args.gained),
        )
    except ValueError as error:
        raise StudyError(str(error)) from error
    for line in found.lines:
        print(line)
    return 0 if found.passed else 1


def _power(args: argparse.Namespace) -> int:
    from pytest_kvqual.report.design import Null, null_of, power

    given = [args.loss_rate, args.null, args.null_lost]
    if sum(value is not None for value in given) != 1 or (args.null_lost is None) != (args.null_total is None):
        raise StudyError("expected one of --loss-rate, --null, and --null-lost with --null-total")
    try:
        null = None if args.null is None else null_of(args.null)
        if args.null_lost is not None:
            null = Null(lost=_count("null lost", args.null_lost), total=_count("null total", args.null_total))
        lines = power(
            total=_count("total", args.total),
            limit=_number("limit", args.limit),
            confidence=_number("confidence", args.confidence),
            wanted=_number("wanted", args.wanted),
            loss_rate=None if args.loss_rate is None else _number("loss rate", args.loss_rate),
            null=null,
        )
    except ValueError as error:
        raise StudyError(str(error)) from error
    for line in lines:
        print(line)
    return 0


def _count(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}: found {text!r}, expected an integer") from None


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: found {text!r}, expected a number") from None


if __name__ == "__main__":
    sys.exit(main())
