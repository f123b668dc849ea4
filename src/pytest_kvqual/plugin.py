"""The pytest plugin: options, markers, and a session object that is registered only when a gate is collected.

This module and what it imports stay within the standard library and pytest: every run of pytest in an environment that
has the plugin pays for them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kvqual import _places
from pytest_kvqual.fixtures import arm, campaign, gate, kvqual_arm, pilot, study

if TYPE_CHECKING:
    from pytest_kvqual.hooks import Campaign, Options, Progress
    from pytest_kvqual.kv.geometry import Geometry

__all__ = ["arm", "campaign", "gate", "kvqual_arm", "pilot", "study"]

#: Where no --study is given: the study of the platform that -m names.
DEFAULT_STUDIES = {"cpu": "smollm2-cpu", "gpu": "qwen3-8b-awq"}
MARKERS = (
    "cpu: runs on a CPU study (gates are selected by -m cpu or -m gpu)",
    "gpu: runs on a GPU study",
    "timing: a timing gate; asked for by naming it: -m 'cpu and timing'",
    "pilot: an exploratory measurement, which decides nothing; asked for by naming it: -m 'cpu and pilot'",
    "gate(name): decides one gate of the study",
    "transfer: checks a backend on synthetic inputs, without a model or an engine; decides no gate",
    "controls: plants a fault and expects the gate that claims it to be the first to object",
    "live_controls: plants it in a served arm; asked for by naming it: -m live_controls",
    "from_start: the fault is there from the server's start (a boot for each); asked for by naming it: -m from_start",
)
_GATE_MODULE = re.compile(r"(?:^|/)qualification/test_\d\d_\w+\.py$")
#: Of an installed package the ids begin in its folder of gates.
_GATE_FILE = re.compile(r"test_\d\d_\w+\.py")


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", text):
        raise pytest.UsageError(f"found {text!r}, expected a name of letters, digits, '.', '_' and '-'")
    return text


def _prefix(text: str) -> str:
    if not re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)?", text):
        raise pytest.UsageError(
            f"--prefix: found {text!r}, expected letters, digits, '.', '_' and '-' that begin with a letter or digit"
        )
    if text.startswith("pilot-"):
        raise pytest.UsageError(f"--prefix: found {text!r}, expected another: so begin the folders of pilots")
    return text


def _positive(option: str, unit: str) -> type[int]:
    """A converter of ``option``: a positive decimal integer."""

    def convert(text: str) -> int:
        if not re.fullmatch(r"[1-9][0-9]*", text):
            raise pytest.UsageError(f"{option}: found {text!r}, expected a positive whole number of {unit}")
        return int(text)

    return convert  # type: ignore[return-value]  # argparse takes any callable; pytest's stub of `type` wants a class


def _arm_name(text: str) -> str:
    try:
        return _name(text)
    except pytest.UsageError as error:
        raise pytest.UsageError(f"--arm: {error}") from None


def _geometry(text: str) -> Geometry:
    from pytest_kvqual.errors import KvqualError, StudyError
    from pytest_kvqual.kv.geometry import parse_geometry

    try:
        geometry = parse_geometry(text)
        if geometry.query_heads < 2 or geometry.head_size % 2:
            raise StudyError(
                f"found {geometry.query_heads} query heads of size {geometry.head_size}, expected at least 2 (one head "
                "cannot be exchanged for another) of an even size"
            )
        return geometry
    except KvqualError as error:
        raise pytest.UsageError(f"--geometry: {error}") from None


def _study(text: str) -> str:
    if not text.strip():
        raise pytest.UsageError("--study: found an empty text, expected a name or a path")
    return text


def _install(text: str) -> Path:
    # Not Path.expanduser: it raises where nobody has that name.
    path = Path(os.path.expanduser(text)).absolute()  # noqa: PTH111
    if not text.strip() or not path.is_dir():
        raise pytest.UsageError(f"--install: found no folder '{text}', expected one with kvqual-install.toml")
    return path


def _folder(text: str) -> Path:
    if not text.strip():
        raise pytest.UsageError("--run-dir: found an empty text, expected a folder")
    return Path(text)


def _report(text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if not text.strip() or not path.name or path.is_dir():
        raise pytest.UsageError(f"--gate-report: found {text!r}, expected the name of a file without its suffix")
    return path


def _dataset(text: str) -> Path:
    path = Path(os.path.expanduser(text)).absolute()  # noqa: PTH111 (as in _install)
    if not path.is_file():
        raise pytest.UsageError(f"--gsm8k: found no file {path}, expected the GSM8K test set")
    return path


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvqual", "qualification of KV-cache changes")
    defaults = ", ".join(f"{name} with -m {platform}" for platform, name in DEFAULT_STUDIES.items())
    group.addoption("--study", metavar="NAME|PATH", type=_study, help=f"the study (default: {defaults})")
    group.addoption(
        "--format", metavar="NAME", help="the format of the model, where the study has several (default: its first)"
    )
    group.addoption(
        "--install",
        metavar="DIR",
        type=_install,
        help="the folder of kvqual-install.toml: interpreter and checkouts of each arm (default: none)",
    )
    group.addoption(
        "--arm",
        metavar="NAME",
        type=_arm_name,
        action="append",
        help="the arm under qualification; with -n once for each group (default: the study's candidate)",
    )
    group.addoption(
        "--length",
        metavar="N",
        type=_positive("--length", "tokens"),
        help="context length in tokens (default: the study's first)",
    )
    group.addoption(
        "--run-dir",
        metavar="DIR",
        type=_folder,
        help="where evidence and receipts go (default: .kvqual/STUDY or .kvqual/STUDY-FORMAT under the root folder)",
    )
    group.addoption(
        "--gate-report",
        metavar="PATH",
        type=_report,
        help="at the end, write the gate report of the run directory: PATH.html, and PATH.xml as JUnit",
    )
    group.addoption(
        "--cache-bytes",
        metavar="N",
        type=_positive("--cache-bytes", "bytes"),
        help="size of the KV pool in bytes (default: the study's)",
    )
    group.addoption(
        "--block",
        metavar="N",
        type=_positive("--block", "a block's number"),
        help="the block of the frozen timing plan that -m 'cpu and timing' times --arm in, once",
    )
    group.addoption("--cell", metavar="NAME", help="the load of -m 'cpu and pilot' (default: the plan's first)")
    group.addoption(
        "--geometry",
        metavar="G",
        type=_geometry,
        help="transfer tests: qwen3-8b, phi-4, smollm2 or hq=40,hkv=10,d=128,block=16 (default: drawn)",
    )
    group.addoption(
        "--backend",
        metavar="MODULE[:FORMAT]",
        help="transfer tests: a module with write and attend (default: both of ours)",
    )
    group.addoption(
        "--gsm8k",
        metavar="FILE",
        type=_dataset,
        help="the GSM8K test set as JSON lines or parquet (default: the study's revision on the Hugging Face hub)",
    )
    group.addoption(
        "--progress",
        choices=("auto", "always", "never"),
        default="auto",
        help="what a run of gates is at: auto shows it on a terminal outside of CI, always also as lines elsewhere "
        "(default: auto)",
    )
    group.addoption(
        "--prefix",
        metavar="P",
        type=_prefix,
        default="",
        help="prefix of the evidence and receipt folders, to keep several side by side",
    )


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    from pytest_kvqual import hooks

    pluginmanager.add_hookspecs(hooks)


def pytest_configure(config: pytest.Config) -> None:
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    distributed = config.getoption("numprocesses", None) or config.getoption("tx", None)
    if config.getoption("arm") and (distributed or hasattr(config, "workerinput")):
        from pytest_kvqual.distributed import configure

        configure(config)
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        if config.option.pyargs and not _places.installed():
            config.args[:] = map(_in_checkout, config.args)
        return
    # `pytest -m cpu` in a clone names the gates by their platform; plain `pytest` does not, and stays without them.
    folder = config.rootpath / "qualification"
    expression: str = config.getoption("markexpr", "")
    if re.search(r"\b(cpu|gpu)\b", expression) and folder.is_dir() and str(folder) not in config.args:
        config.args.append(str(folder))


def _in_checkout(argument: str) -> str:
    """``pytest_kvqual.qualification`` as a path: an editable install has the gates in its checkout, not in the package.

    So one command runs them everywhere. Any other argument, and one whose file is not there, is left to pytest.
    """
    module, separator, test = argument.partition("::")
    head, _, rest = module.partition(_places.GATES_MODULE)
    if head or (rest and not rest.startswith(".")):
        return argument
    path = _places.folder(_places.QUALIFICATION).joinpath(*rest.split("."))
    found = path if path.is_dir() else path.with_name(f"{path.name}.py")
    return f"{found}{separator}{test}" if found.exists() else argument


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """In a worker of ``-n`` each gate is there once for each arm, in the group of that arm."""
    arms = _arms_of_workers(metafunc.config)
    if arms and metafunc.definition.get_closest_marker("gate") is not None:
        groups = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in arms]
        metafunc.fixturenames.append("kvqual_arm")
        metafunc.parametrize("kvqual_arm", groups, ids=arms, indirect=True, scope="session")


def _arms_of_workers(config: pytest.Config) -> list[str]:
    """The arms whose gates this worker of ``-n`` may be given; none where the run is not distributed by arm."""
    return (config.getoption("arm") or []) if hasattr(config, "workerinput") else []


def _arm_of(item: pytest.Item) -> object:
    return item.callspec.params.get("kvqual_arm") if isinstance(item, pytest.Function) else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """See the gates before anything deselects them, and order what is left after everything did."""
    if config.getoption("backend") is not None:
        _check_backend(config.getoption("backend"), config.invocation_params.dir)
    gates = [item for item in items if item.get_closest_marker("gate") is not None]
    pilots = any(item.get_closest_marker("pilot") is not None for item in items)
    arms = _arms_of_workers(config)
    if not (gates or pilots) or (hasattr(config, "workerinput") and not arms):
        # In a worker without an arm there is no session: each gate fails, and the controller stops the run (see below).
        yield
        return
    from pytest_kvqual.session import QualificationSession

    transfer = any(item.get_closest_marker("transfer") is not None for item in items)
    sessions = [
        QualificationSession.register(
            session, [item for item in gates if _arm_of(item) == arm], wait=transfer, group=arm
        )
        for arm in arms
    ] or [QualificationSession.register(session, gates, wait=transfer)]
    try:
        yield
    finally:
        # Deselection hooks may raise; the session must know then that nothing was selected.
        for qualification in sessions:
            qualification.select(items)


def _check_backend(text: str, folder: Path) -> None:
    import sys

    from pytest_kvqual.errors import KvqualError
    from pytest_kvqual.transfer.check import find_backend

    # A module beside the tests is found as `python -m pytest` finds it; what is installed comes first.
    sys.path.append(str(folder))
    try:
        find_backend(text)
    except KvqualError as error:
        raise pytest.UsageError(f"--backend: {error}") from None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[object]) -> None:
    """Before the workers of ``-n`` start: where arms are named, one group of gates goes to each."""
    if config.getoption("arm"):
        from pytest_kvqual.distributed import Controller

        Controller.register(config, [str(getattr(spec, "id", "")) for spec in specs])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Stop a distributed run that holds gates and names no arm before its first test."""
    for nodeid in ids:
        path = nodeid.partition("::")[0]
        own = _GATE_FILE.fullmatch(path) and _places.installed() and (_places.folder("qualification") / path).is_file()
        if (own or _GATE_MODULE.search(path)) and not node.config.getoption("arm"):
            raise pytest.UsageError(
                f"found -n with the gate {nodeid}, expected one process, or an arm for each group: "
                "-n 2 --dist loadgroup --arm A --arm B"
            )


def pytest_kvqual_campaign(options: Options, progress: Progress) -> Campaign | None:
    from pytest_kvqual.campaign import open_campaign

    return open_campaign(options, progress)
