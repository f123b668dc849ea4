"""A run of several arms at once, ``-n N --dist loadgroup --arm A --arm B``: what its controller does.

xdist gives the gates of one arm, a group, to one worker. A worker has devices of its own, decides the groups that it is
given one after the other, and hands over what each came to. The controller collects no test: it refuses what cannot be
distributed before a worker starts, gives out the devices, and at the end answers for every arm that was named.

No group has a second attempt. A worker that is killed is not replaced, and what it had is given to no other: the next
run takes up what it left.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_kvqual.errors import KvqualError
from pytest_kvqual.report import junit
from pytest_kvqual.server import devices
from pytest_kvqual.session import (
    gpu_found,
    named_platforms,
    names,
    options_of,
    refuse_hiding,
    report_failed,
    write_gate_report,
)

if TYPE_CHECKING:
    from pytest_kvqual.hooks import Campaign

PLUGIN_NAME: Final = "kvqual-controller"
_KEY: Final = "kvqual"
"""Of what goes to a worker, its part of the environment; of what comes back, its groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """What one arm's gates came to in a worker: plain values, because they cross a process."""

    arm: str
    passed: bool
    title: str
    lines: list[str]
    properties: list[tuple[str, str]]
    failures: list[tuple[str, tuple[str, int | None, str], str]]
    """Node id, location and line of each failure that is no test's of the worker."""


def configure(config: pytest.Config) -> None:
    """Before a run by arms: a worker takes its devices; in the controller, no worker is replaced."""
    if hasattr(config, "workerinput"):
        devices.take(config.workerinput.get(_KEY, {}))
    elif config.option.maxworkerrestart is None:
        config.option.maxworkerrestart = "0"


def hand_over(config: pytest.Config, group: Group) -> None:
    """Keep what a group came to for the controller."""
    output: dict[str, Any] = config.workeroutput  # type: ignore[attr-defined]  # xdist's, in each worker
    output.setdefault(_KEY, []).append(asdict(group))


class Controller:
    """The hooks of the process that started the workers.

    Args:
        config: pytest's.
        campaigns: Of each arm, opened and not prepared: nothing of theirs runs here.
        environments: What each worker adds to its environment, by the worker's name.
    """

    def __init__(
        self, config: pytest.Config, campaigns: Mapping[str, Campaign], environments: Mapping[str, dict[str, str]]
    ) -> None:
        self._config = config
        self._campaigns = campaigns
        self._environments = environments
        self._groups: dict[str, Group] = {}
        self._collected: dict[str, None] = {}
        self._heard: set[str] = set()
        self._lost: dict[str, str] = {}
        self._lines: list[str] = []

    @classmethod
    def register(cls, config: pytest.Config, workers: Sequence[str]) -> None:
        """Check what was asked for, give out the devices, and register the controller's hooks.

        Raises:
            pytest.UsageError: one line; no worker has started.
        """
        arms: list[str] = config.getoption("arm")
        expression: str = config.getoption("markexpr", "")
        platforms = named_platforms(expression)
        if twice := {arm for arm in arms if arms.count(arm) > 1}:
            raise pytest.UsageError(f"--arm: found {', '.join(sorted(twice))} twice, expected each arm once")
        if len(platforms) != 1:
            raise pytest.UsageError(f"-n with --arm: found -m {expression!r}, expected -m cpu or -m gpu")
        for mark in ("timing", "pilot"):
            if names(expression, mark):
                raise pytest.UsageError(
                    f"found -n with {mark} in -m, expected one process: an arm is timed with nothing else on its host"
                )
        if config.option.dist != "loadgroup":
            raise pytest.UsageError(
                f"found --dist {config.option.dist} with gates, expected --dist loadgroup: the gates of an arm share "
                "one server"
            )
        if config.option.maxworkerrestart not in (None, "0"):
            raise pytest.UsageError(
                "found --max-worker-restart with gates, expected none: a gate has no second attempt in one run"
            )
        refuse_hiding(config, [])
        (platform,) = platforms
        if platform == "gpu" and not gpu_found():
            raise pytest.UsageError("-m gpu: found no GPU, expected one for each worker: run on a GPU host, or -m cpu")
        try:
            campaigns = {
                arm: config.hook.pytest_kvqual_campaign(
                    options=options_of(config, platform=platform, timing=False, arm=arm), progress=lambda line: None
                )
                for arm in arms
            }
            study = next(iter(campaigns.values())).study
            if study.platform != platform:
                raise pytest.UsageError(
                    f"-m {platform}: found the study {study.name!r} of platform {study.platform}, expected one of "
                    f"{platform}: give --study, or -m {study.platform}"
                )
            fixed = [arm.name for arm in study.arms.values() if devices.VISIBLE in arm.environment]
            if fixed or devices.VISIBLE in study.engine.environment:
                raise pytest.UsageError(
                    f"study {study.name}: found {devices.VISIBLE} in the environment of "
                    f"{', '.join(fixed) or 'the engine'}, expected none: -n gives each worker its devices"
                )
            assigned = devices.assign(
                os.environ,
                platform=platform,
                workers=len(workers),
                each=study.engine.tensor_parallel_size,
                host=devices.devices_of_host() if platform == "gpu" else (),
                cpus=sorted(os.sched_getaffinity(0)),
            )
        except KvqualError as error:
            raise pytest.UsageError(error.line()) from None
        config.pluginmanager.register(cls(config, campaigns, dict(zip(workers, assigned, strict=True))), PLUGIN_NAME)

    # -- xdist's hooks -----------------------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker which devices are its own."""
        node.workerinput[_KEY] = self._environments[node.gateway.id]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Groups as ``--dist loadgroup`` makes them, none of them ever given out twice."""
        from xdist.scheduler import LoadGroupScheduling

        arm_of = self._arm_of

        class OneAttempt(LoadGroupScheduling):
            def _split_scope(self, nodeid: str) -> str:
                # xdist 3.8 writes the group's name into the node id, and pytest 9.2 does not keep what it writes.
                return arm_of(nodeid) or str(super()._split_scope(nodeid))

            def remove_node(self, node: Any) -> str | None:
                groups = self.assigned_work.pop(node).values()
                return next((nodeid for group in groups for nodeid, done in group.items() if not done), None)

        return OneAttempt(config, log)

    def _arm_of(self, nodeid: str) -> str:
        """The arm of a gate's node id, ``…::test_identity[native]``; empty for another test's."""
        found = re.search(r"\[([A-Za-z0-9_.-]+)\](@\S*)?$", nodeid)
        return found[1] if found and found[1] in self._campaigns else ""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """Note which tests there are."""
        self._collected |= dict.fromkeys(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take what a worker's groups came to, or note that it ended without a word."""
        for plain in getattr(node, "workeroutput", {}).get(_KEY, []):
            group = Group(**plain)
            self._groups[group.arm] = group
        if error is not None:
            self._lost[node.gateway.id] = " ".join(str(error).split()) or "it ended"

    # -- pytest's hooks ----------------------------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note which tests have an outcome."""
        if report.when == "call" or report.outcome != "passed":
            self._heard.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Answer for every arm, and set the exit status from what the workers decided."""
        for arm in self._campaigns:
            group = self._groups.get(arm)
            if group is None:
                self._report_lost(arm)
                continue
            for nodeid, location, line in group.failures:
                # One that xdist reported already is told once; the table has the reason.
                if nodeid not in self._heard:
                    # The terminal's percentage is of the tests collected.
                    session.testscollected += nodeid not in self._collected
                    report_failed(self._config, nodeid, location, f"{arm}: {line}")
            named = [(name.replace("kvqual.", f"kvqual.{arm}.", 1), value) for name, value in group.properties]
            junit.add_properties(self._config, named)
        self._lines, error = write_gate_report(self._config, next(iter(self._campaigns.values())).run_dir)
        passed = all(arm in self._groups and self._groups[arm].passed for arm in self._campaigns)
        if error:
            self._lines.append(error)
        if (error or not passed) and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _report_lost(self, arm: str) -> None:
        """A failed test for each gate of an arm whose worker said nothing of it at the end."""
        for nodeid in self._collected:
            if self._arm_of(nodeid) == arm and nodeid not in self._heard:
                file, _, name = nodeid.partition("::")
                report_failed(self._config, nodeid, (file, None, name), f"{arm}: no verdict: {self._why()}")

    def _why(self) -> str:
        lost = ", ".join(f"worker {name} ended: {error}" for name, error in self._lost.items())
        return lost or "the run was cut short, or no worker was given its gates"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Each arm's table, in the order of the command line."""
        for arm in self._campaigns:
            group = self._groups.get(arm)
            terminalreporter.section(f"qualification of {arm if group is None else group.title}")
            for line in [f"no verdict: {self._why()}"] if group is None else group.lines:
                terminalreporter.write_line(line)
        for line in self._lines:
            terminalreporter.write_line(line)
