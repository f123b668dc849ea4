"""Every command in the documents is run, or is marked as one that a test cannot run and then parsed and looked up."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from documents import PAGES, PROGRAMS, REASONS, ROOT, Command, blocks, commands, prose, spans
from full_run import build_run
from recordings import request, to_bytes, whole

from pytest_kvqual import _places, cli, plugin
from pytest_kvqual.errors import KvqualError
from pytest_kvqual.oracles import reproducer
from pytest_kvqual.study.load import find_study, load_study, select

STUDIES = ("smollm2-cpu-fp8",)
PLACEHOLDER = re.compile(r"[A-Z][A-Z_-]*")


class WrongError(Exception):
    """What is wrong with a command."""


def words(text: str) -> tuple[dict[str, str], list[str]]:
    """The environment and the words of a command line, its comment left out."""
    found = shlex.split(text, comments=True)
    environment = {}
    while found and re.fullmatch(r"[A-Z_]+=.*", found[0]):
        name, _, environment[name] = found.pop(0).partition("=")
    return environment, found


def check(text: str, pytester: pytest.Pytester) -> None:
    """Parse a command with the parser of its program, and look up what it names.

    Raises:
        WrongError: It does not parse, or names what is not there.
    """
    _, found = words(text)
    if not found:
        return
    program, *arguments = found
    if program == "kvqual":
        _kvqual(arguments)
    elif program == "pytest":
        _pytest(arguments, pytester)
    elif program == "make":
        _make(arguments)
    elif program in ("python", "python3"):
        _python(arguments, pytester)
    elif program not in PROGRAMS:
        raise WrongError(f"found the program {program}, expected one of {', '.join(PROGRAMS)}")


def _kvqual(arguments: list[str]) -> None:
    def refuse(self: argparse.ArgumentParser, message: str) -> None:
        raise WrongError(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "error", refuse)
        try:
            parsed = cli._parser().parse_args(arguments)
        except SystemExit as end:
            if end.code:
                raise WrongError(f"ends with {end.code}") from None
            return
    study = getattr(parsed, "study", None)
    if study is not None and not PLACEHOLDER.fullmatch(study):
        _study(study, getattr(parsed, "format", None))


def _study(name: str, format: str | None) -> None:
    """A study of this repository; a path is one that the page makes."""
    if "/" in name or not (ROOT / "studies" / name).is_dir():
        if "/" not in name and name not in ("broken",):
            raise WrongError(f"found no study {name}")
        return
    try:
        find_study(name)
        load_study(name, format)
    except KvqualError as error:
        raise WrongError(error.line()) from None


def _pytest(arguments: list[str], pytester: pytest.Pytester) -> None:
    arguments = [*with_plugin(), *arguments]
    if "--help" in arguments:
        return
    # What a page's placeholders stand for need not be there.
    stands_for = {"DIR": str(pytester.path), "RUN_DIR": str(pytester.path), "G": "phi-4"}
    arguments = [stands_for.get(it, it) for it in arguments]
    try:
        config = pytester.parseconfig(*arguments)
    except (pytest.UsageError, SystemExit) as error:
        raise WrongError(str(error)) from None
    for name in config.option.file_or_dir:
        place = name.partition("::")[0]
        if config.option.pyargs:
            # What an installed package has in it, a checkout has at its root.
            _, package, rest = place.partition(_places.GATES_MODULE)
            place = f"qualification{rest.replace('.', '/')}" if package else place
        if not PLACEHOLDER.fullmatch(place) and not list(ROOT.glob(place.rstrip("/"))):
            raise WrongError(f"found no {place} in the repository")
    unknown = set(re.findall(r"[a-z_]\w*", config.option.markexpr)) - {"and", "or", "not"} - markers()
    if unknown:
        raise WrongError(f"found the markers {', '.join(sorted(unknown))} in -m {config.option.markexpr!r}")
    _selection(config)


def _selection(config: pytest.Config) -> None:
    """Arm, length and format are those of the study that the command names, or of its platform's default."""
    platform = next((it for it in ("cpu", "gpu") if re.search(rf"\b{it}\b", config.option.markexpr)), None)
    typed = config.option.study
    if platform is None or (typed is not None and (typed.startswith(("./", "studies/")) or typed.isupper())):
        return
    length = config.option.length
    try:
        study = load_study(typed or plugin.DEFAULT_STUDIES[platform], config.option.format)
        for arm in [it for it in config.option.arm or [] if not PLACEHOLDER.fullmatch(it)]:
            select(study, arm=arm, length=length or next(iter(study.lengths)), cache_bytes=None)
    except KvqualError as error:
        raise WrongError(error.line()) from None
    if study.platform != platform:
        raise WrongError(f"found -m {platform} with the study {study.name}")


def with_plugin() -> list[str]:
    """What loads the plugin; nothing where it is installed, which loads it by itself."""
    installed = any(it.name == "kvqual" for it in entry_points(group="pytest11"))
    return [] if installed else ["-p", "pytest_kvqual.plugin"]


def markers() -> set[str]:
    """The markers of the repository, and of the plugin."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    return {re.split(r"[:(]", line)[0] for line in (*lines, *plugin.MARKERS)}


def _make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in arguments:
        name, equals, _ = word.partition("=")
        pattern = rf"^{re.escape(name)} \?=" if equals else rf"^{re.escape(name)}:"
        if not re.search(pattern, makefile, re.MULTILINE):
            raise WrongError(f"found no {'variable' if equals else 'target'} {name} in the Makefile")


def _python(arguments: list[str], pytester: pytest.Pytester) -> None:
    while arguments and arguments[0] in ("-I", "-S"):
        arguments = arguments[1:]
    if arguments[0] == "-c":
        compile(arguments[1], "-c", "exec")
        return
    if arguments[0] == "-m":
        module, options = arguments[1], arguments[2:]
        if module == "pytest":
            _pytest(options, pytester)
            return
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise WrongError(f"found no module {module}")
        source = Path(spec.origin)
    else:
        source, options = ROOT / arguments[0], arguments[1:]
        if not source.is_file():
            raise WrongError(f"found no file {arguments[0]}")
    text = source.read_text(encoding="utf-8")
    for option in options:
        name = option.partition("=")[0]
        # The program's own parser is not built: some import the engine first.
        if name.startswith("--") and f'"{name}"' not in text:
            raise WrongError(f"found no option {name} in {source.name}")


def pages_with_commands() -> list[Path]:
    return [page for page in PAGES if any(True for _ in commands(page))]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def in_text(page: Path) -> Iterator[tuple[int, str]]:
    """The commands with an argument in the sentences and tables of a page, each with its line."""
    for line, text in spans(page):
        if re.match(r"(kvqual|pytest|make|python) (?![A-Z]+ )\S", text) and not ("…" in text or "[" in text):
            yield line, text


# -- what stands there -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_stand_in_named_blocks(page: Path) -> None:
    """No indented block begins with a command: it would be neither run nor looked up."""
    begins = re.compile(rf" {{4,}}(\$ )?([A-Z_]+=\S+ )*({'|'.join(PROGRAMS)})( |$)")
    assert [f"{named(page)}:{number}" for number, line in prose(page) if begins.match(line)] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_marks_are_known(page: Path) -> None:
    """A mark is a reason of the list, or an exit status; and stands before a block of commands."""
    known = re.compile(rf"not run: ({'|'.join(REASONS)})|exit status: (\d|any)")
    marks = [block for block in blocks(page) if block.mark and not block.mark.startswith("Written by")]
    assert [block.place for block in marks if not known.fullmatch(block.mark)] == []
    assert [block.place for block in marks if block.language not in ("bash", "console")] == []
    stray = [line for _, line in prose(page) if re.match(r"<!-- (not run|exit status)", line)]
    assert len(stray) == len(marks)


@pytest.mark.parametrize("page", pages_with_commands(), ids=named)
def test_commands_parse(page: Path, pytester: pytest.Pytester) -> None:
    """Each command is taken by its program's own parser; each study, arm, marker and file that it names is there."""
    wrong = []
    for command in commands(page):
        try:
            check(command.text, pytester)
        except WrongError as error:
            wrong.append(f"{command.place}: {command.text}: {error}")
    assert wrong == []


@pytest.mark.parametrize("page", [page for page in PAGES if any(in_text(page))], ids=named)
def test_commands_in_running_text_parse(page: Path, pytester: pytest.Pytester) -> None:
    """So is each command with an argument that stands in a sentence or a table; it may leave arguments out."""
    wrong = []
    for line, text in in_text(page):
        try:
            check(text, pytester)
        except WrongError as error:
            if not re.match(r"the following arguments are required|.*expected one argument$", str(error)):
                wrong.append(f"{named(page)}:{line}: {text}: {error}")
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("kvqual reprot RUN_DIR", "invalid choice"),
        ("kvqual report RUN_DIR --htlm x", "unrecognized arguments"),
        ("kvqual freeze nothing", "found no study nothing"),
        ("kvqual plan qwen3-8b-awq --format fp4", "expected one of awq, bf16"),
        ("pytest qualification/ -m cpu --arms candidate", "--arms"),
        ("pytest qualification/ -m cpu --length long", "--length"),
        ("pytest qualification/ -m cpu --arm candidat", "found no arm 'candidat'"),
        ("pytest qualification/ -m gpu --study smollm2-cpu", "-m gpu with the study smollm2-cpu"),
        ("pytest nowhere -m cpu", "found no nowhere"),
        ("pytest --pyargs pytest_kvqual.qualifications -m cpu", "found no qualifications"),
        ("pytest --pyargs pytest_kvqual.qualification.nothing -m cpu", "found no qualification/nothing"),
        ("pytest --pyargs pytest_kvqual.qualification -m cpu --arms x", "--arms"),
        ("pytest qualification/ -m 'cpu and timings'", "markers timings"),
        ("make qualifi", "no target qualifi"),
        ("make qualify ARMS=x", "no variable ARMS"),
        ("python tests/benchmarks/nothing.py", "no file"),
        ("python tests/benchmarks/arms.py --nothing", "no option --nothing"),
        ("python -m pytest_kvqual.nothing", "no module"),
        ("rm -rf x", "the program rm"),
    ],
)
def test_the_check_sees_a_wrong_command(text: str, what: str, pytester: pytest.Pytester) -> None:
    """The negative control of the tests above: a wrong word of each kind is seen."""
    with pytest.raises(WrongError, match=re.escape(what)):
        check(text, pytester)


# -- what is run -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run directory that passes, of a generated study."""
    return build_run(tmp_path_factory.mktemp("generated")).run_dir


@pytest.fixture
def stage(run_dir: Path, tmp_path: Path) -> Path:
    """A folder like a clone with a finished run: what the pages' commands find there."""
    folder = tmp_path / "clone"
    (folder / "studies").mkdir(parents=True)
    for name in ("qualification", "src", "docs", "tests", "scripts", "pyproject.toml", "conftest.py"):
        (folder / name).symlink_to(ROOT / name)
    for name in STUDIES:
        # Never a link: the pages copy and freeze it.
        shutil.copytree(ROOT / "studies" / name, folder / "studies" / name)
    shutil.copytree(run_dir, folder / ".kvqual")
    (folder / "RUN_DIR").symlink_to(".kvqual")
    (folder / "cell-open.jsonl").write_bytes(to_bytes(whole([request("open-0000", intended=0)])))
    cells = torch.full((1, 2, 3), 7, dtype=torch.uint8)
    arrays = {"found_k": cells, "expected_k": cells, "found_v": cells, "expected_v": cells, "slots": torch.tensor([3])}
    found = reproducer.pack("cells", "layers.7: slot 3", arrays, layer="layers.7", block_size=128)
    (folder / "reproducer.npz").write_bytes(found)
    return folder


def run(command: Command, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run one command in the current folder; its exit status and what it printed."""
    environment, found = words(command.text)
    if found[0] == "kvqual" and not environment:
        capsys.readouterr()
        try:
            status = cli.main(found[1:])
        except SystemExit as end:
            status = int(end.code or 0)
        out, err = capsys.readouterr()
        return status, out + err
    text = command.text
    if found[0] == "pytest":
        text = text.replace("pytest ", f"python -m pytest {' '.join(with_plugin())} -p no:cacheprovider ", 1)
    # A module that a page runs from the source is found there as elsewhere.
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": "src"}
    done = subprocess.run(
        ["bash", "-c", text], env=os.environ | path, capture_output=True, text=True, timeout=100, check=False
    )
    return done.returncode, done.stdout + done.stderr


def as_shown(printed: str, shown: tuple[str, ...]) -> bool:
    """Whether lines are those of a page, where an ellipsis stands for what it leaves out."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == "…" else re.escape(line).replace("…", ".*") + r"\n" for line in shown
    )  # fmt: skip
    return re.fullmatch(pattern, printed) is not None


def runnable() -> Iterator[Path]:
    for page in pages_with_commands():
        if any(command.runs for command in commands(page)):
            yield page


@pytest.mark.parametrize("page", list(runnable()), ids=named)
def test_commands_run(
    page: Path, stage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command of a page that is not marked ends as it says, and prints what is shown; in order, in one folder."""
    monkeypatch.chdir(stage)
    wrong = []
    for command in commands(page):
        if not command.runs:
            continue
        status, printed = run(command, capsys)
        if not command.status(status):
            wrong.append(f"{command.place}: {command.text}: ended with {status}: {printed[-400:]}")
        elif command.shown is not None and not as_shown(printed, command.shown):
            wrong.append(f"{command.place}: {command.text}: printed\n{printed}")
    assert wrong == []


@pytest.mark.parametrize(
    ("printed", "shown", "same"),
    [
        ("a\nb\n", ("a", "b"), True),
        ("a\nb\n", ("a",), False),
        ("a\nb\nc\n", ("a", "…", "c"), True),
        ("a: 1.5\n", ("a: …",), True),
        ("a: 1x5\n", ("a: 1.5",), False),
    ],
)
def test_what_is_shown_is_compared(printed: str, shown: tuple[str, ...], same: bool) -> None:
    """Lines are compared whole and as text; an ellipsis stands for the rest of a line, or for lines."""
    assert as_shown(printed, shown) is same
