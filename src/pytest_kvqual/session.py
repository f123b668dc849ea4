"""What one pytest session that holds gates must do: order them, refuse what hides them, never exit green without them.

The object here is registered only when a gate is collected. It knows pytest and nothing of the domain: captures,
judging and receipts are the campaign's (:mod:`pytest_kvqual.hooks`).

What pytest can hide, and the answer to each:

1. An option that repeats, reorders by history, distributes or does not run gates: a usage error before the first test.
2. A gate that is deselected, not collected, or not reached: a receipt that says so, and a failed test of its name.
3. A gate test that is skipped, expected to fail, or passes without a verdict: its report becomes a failure.
4. Anything else: the exit status is set from the verdicts, not from the reports.
"""

from __future__ import annotations

import ast
import itertools
import re
import shutil
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from pytest_kvqual.errors import KvqualError
from pytest_kvqual.hooks import Options
from pytest_kvqual.judge.verdict import Outcome
from pytest_kvqual.report import junit, progress, terminal
from pytest_kvqual.study.load import GATES, WITH_BLOCK, WITHOUT_BLOCK

if TYPE_CHECKING:
    from pytest_kvqual.hooks import Campaign, Decision
    from pytest_kvqual.progress import Event
    from pytest_kvqual.study.model import GatePlan, Study

PLUGIN_NAME = "kvqual-session"
_session_key = pytest.StashKey["QualificationSession"]()

_ONE_ATTEMPT = "a gate has no second attempt in one run"

# (destination of the option, what the user typed, why not)
_HIDING_OPTIONS: tuple[tuple[str, str, str], ...] = (
    ("reruns", "--reruns", _ONE_ATTEMPT),
    ("force_reruns", "--force-reruns", _ONE_ATTEMPT),
    ("retries", "--retries", _ONE_ATTEMPT),
    ("force_flaky", "--force-flaky", _ONE_ATTEMPT),
    ("flake_finder_enable", "--flake-finder", "a gate is decided once in one run"),
    ("lf", "--lf", "gates run in the study's order, not by an earlier run's failures"),
    ("failedfirst", "--ff", "gates run in the study's order, not by an earlier run's failures"),
    ("newfirst", "--nf", "gates run in the study's order, not by file times"),
    ("stepwise", "--sw", "gates run in the study's order, not by an earlier run's failures"),
    # --setup-plan sets --setup-only too, and is to be named as typed.
    ("setupplan", "--setup-plan", "it shows fixtures and decides no gate"),
    ("setuponly", "--setup-only", "it shows fixtures and decides no gate"),
    ("keepduplicates", "--keep-duplicates", "a gate is decided once in one run"),
)
_RERUN_PLUGINS = frozenset({"rerunfailures", "pytest_rerunfailures", "pytest-rerunfailures", "flaky", "pytest_retry"})
_RERUN_MARKS = ("flaky", "repeat")


def session_of(config: pytest.Config) -> QualificationSession:
    """The session object of a run that holds gates.

    Raises:
        pytest.fail.Exception: this run has none, with the reason in one line.
    """
    session = config.stash.get(_session_key, None)
    if session is None:
        why = (
            "found a worker of -n, expected one process: run gates without -n"
            if hasattr(config, "workerinput")
            else "found no test with @pytest.mark.gate(NAME), expected one: fixtures of the campaign serve gates"
        )
        pytest.fail(why, pytrace=False)
    return session


def _value(expression: str, marks: frozenset[str]) -> bool:
    """Whether a test with exactly these marks is selected by a ``-m`` expression.

    A part that this reader does not know counts as not selected; pytest itself reports a malformed expression.
    """

    def value(node: ast.expr) -> bool:
        if isinstance(node, ast.BoolOp):
            return (all if isinstance(node.op, ast.And) else any)(value(part) for part in node.values)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not value(node.operand)
        if isinstance(node, ast.Call):
            return value(node.func)
        return isinstance(node, ast.Name) and node.id in marks

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        return False


def named_platforms(expression: str) -> tuple[Literal["cpu", "gpu"], ...]:
    """The platforms that a ``-m`` expression names and selects (``"cpu and timing"`` names ``cpu``)."""
    words = frozenset(re.findall(r"[A-Za-z_]\w*", expression)) - {"and", "or", "not"}
    others = words - {"cpu", "gpu"}
    platforms: list[Literal["cpu", "gpu"]] = []
    for platform in ("cpu", "gpu"):
        if platform in words and any(_value(expression, extra | {platform}) for extra in _subsets(others)):
            platforms.append(platform)
    return tuple(platforms)


def names(expression: str, mark: str) -> bool:
    """Whether a ``-m`` expression asks for ``mark`` by name (``"cpu and not timing"`` does not ask for ``timing``)."""
    words = frozenset(re.findall(r"[A-Za-z_]\w*", expression)) - {"and", "or", "not"}
    return mark in words and any(_value(expression, extra | {mark}) for extra in _subsets(words - {mark}))


def _subsets(words: frozenset[str]) -> Iterable[frozenset[str]]:
    ordered = sorted(words)[:8]
    return (
        frozenset(chosen) for size in range(len(ordered), -1, -1) for chosen in itertools.combinations(ordered, size)
    )


def gpu_found() -> bool:
    """Whether this host shows a GPU, without importing a framework."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists() or shutil.which("nvidia-smi") is not None


def study_of(config: pytest.Config, platform: Literal["cpu", "gpu"]) -> str:
    """The study that was asked for, or the platform's default."""
    from pytest_kvqual.plugin import DEFAULT_STUDIES

    named: str | None = config.getoption("study")
    return DEFAULT_STUDIES[platform] if named is None else named


def arm_of(config: pytest.Config) -> str | None:
    """The arm of a run of one process.

    Raises:
        pytest.UsageError: Several were named.
    """
    named: list[str] = config.getoption("arm") or []
    if len(named) > 1:
        raise pytest.UsageError(
            f"found {len(named)} arms in one process, expected one: give each a worker, with -n {len(named)} "
            "--dist loadgroup"
        )
    return named[0] if named else None


def options_of(
    config: pytest.Config, *, platform: Literal["cpu", "gpu"], timing: bool, arm: str | None = None
) -> Options:
    """What the user typed; of several arms, ``arm``."""
    run_dir: Path | None = config.getoption("run_dir")
    return Options(
        study=study_of(config, platform),
        format=config.getoption("format"),
        install=config.getoption("install"),
        arm=arm if arm is not None else arm_of(config),
        length=config.getoption("length"),
        cache_bytes=config.getoption("cache_bytes"),
        prefix=config.getoption("prefix"),
        run_dir=None if run_dir is None else (config.invocation_params.dir / run_dir).absolute(),
        gsm8k=config.getoption("gsm8k"),
        block=config.getoption("block"),
        root=config.rootpath,
        platform=platform,
        timing=timing,
    )


class Gate:
    """One gate, for its test."""

    def __init__(self, session: QualificationSession, name: str) -> None:
        self._session = session
        self.name = name

    def decide(self) -> Decision:
        """Capture, judge and write the receipt; fail the test in one line on anything but PASS."""
        decision = self._session.decide(self.name)
        if decision.verdict.outcome is not Outcome.PASS:
            pytest.fail(terminal.failure_line(decision), pytrace=False)
        return decision


class Pilot:
    """An exploratory measurement, for its test."""

    def __init__(self, session: QualificationSession) -> None:
        self._session = session

    def measure(self) -> None:
        """Measure once; fail the test in one line where that is refused or fails. Decides nothing."""
        self._session.explore()


class QualificationSession:
    """The hooks of a run that holds gates; in a worker of ``-n``, of one arm's gates.

    Such a group begins with its first test and ends with its last one, not with the session: a worker may be given
    another group then. What it came to goes to the controller (:mod:`pytest_kvqual.distributed`).
    """

    def __init__(self, session: pytest.Session, gates: dict[str, pytest.Item], group: str | None = None) -> None:
        self._session = session
        self._group = group
        self._begun = False
        self._ended = False
        self._all_passed = False
        self._refusal = ""
        # Failures that no test of this worker reports: the controller does.
        self._unheard: list[tuple[str, tuple[str, int | None, str], str]] = []
        self._config = session.config
        self._collected = gates
        self._selected: dict[str, pytest.Item] = {}
        self._campaign: Campaign | None = None
        self._decisions: dict[str, Decision] = {}
        self._reasons: dict[str, str] = {}
        self._notices: list[str] = []
        self._errors: list[str] = []
        self._started = False
        self._stopped = ""
        self._timing = False
        self._piloting = False
        self._explored: list[str] = []
        self._written: list[str] = []
        self._interrupted = ""
        # Opening waits for the selection where it may turn out that only transfer tests run.
        self._waiting = False
        self._only_transfer = False
        # Of a run that lists tests and does nothing else: whose gates they are.
        self._listed: Study | None = None
        self._notes: dict[str, str] = {}
        # The test that is running, and the tests whose outcome was reported: by node id.
        self._running: tuple[str, tuple[str, int | None, str]] | None = None
        self._reported: set[str] = set()

    # -- set-up ------------------------------------------------------------------------------------------------------

    @classmethod
    def register(
        cls, session: pytest.Session, items: Sequence[pytest.Item], *, wait: bool = False, group: str | None = None
    ) -> QualificationSession:
        """Check how the gates were asked for, build the campaign, and register the session's hooks.

        Args:
            session: pytest's.
            items: Every collected gate.
            wait: Whether ``select`` is to check and build, because transfer tests were collected too: where nothing
                else is selected, no gate is decided and nothing of a campaign is needed.
            group: The arm of these gates, in a worker of ``-n``.

        Raises:
            pytest.UsageError: one line; nothing has started yet.
        """
        config = session.config
        gates: dict[str, pytest.Item] = {}
        for item in items:
            name = _gate_name(item)
            if name in gates:
                raise pytest.UsageError(f"gate {name}: found {gates[name].nodeid} and {item.nodeid}, expected one test")
            gates[name] = item
        qualification = cls(session, gates, group)
        if config.option.collectonly:
            qualification._list()
        elif not (config.option.showfixtures or config.option.show_fixtures_per_test):
            qualification._waiting = wait
            if not wait:
                qualification._open()
        if config.pluginmanager.register(qualification, PLUGIN_NAME + (f"-{group}" if group else "")) is None:
            raise pytest.UsageError(f"found -p no:{PLUGIN_NAME}, expected none: gates do not run without it")
        config.stash[_session_key] = qualification
        return qualification

    def _list(self) -> None:
        """The study whose gates are listed, where nothing runs. What was typed must fit it all the same.

        Raises:
            pytest.UsageError: one line.
        """
        from pytest_kvqual.server.checkout import read_install
        from pytest_kvqual.study.load import load_study, select

        config = self._config
        platforms = named_platforms(config.getoption("markexpr", ""))
        if len(platforms) != 1:
            return
        arms: list[str] = config.getoption("arm") or []
        options = options_of(config, platform=platforms[0], timing=False, arm=next(iter(arms), None))
        typed = [options.arm, options.length, options.format, options.install, config.getoption("study")]
        try:
            study = load_study(options.study, options.format)
            length = options.length if options.length is not None else next(iter(study.lengths))
            for arm in arms or [next(iter(study.arms))]:
                select(study, arm=arm, length=length, cache_bytes=options.cache_bytes)
            if options.install is not None:
                read_install(options.install, study)
        except KvqualError as error:
            # A folder of gates may bring a campaign of its own, which knows its study by itself.
            if any(value is not None for value in typed):
                raise pytest.UsageError(error.line()) from None
            return
        self._refuse_platform(study, platforms[0])
        self._listed = study

    def _refuse_platform(self, study: Study, platform: str) -> None:
        if study.platform != platform:
            raise pytest.UsageError(
                f"-m {platform}: found the study {study.name!r} of platform {study.platform}, expected one of "
                f"{platform}: give --study, or -m {study.platform}"
            )

    def _open(self) -> None:
        config = self._config
        refuse_hiding(config, list(self._collected.values()))
        expression: str = config.getoption("markexpr", "")
        platforms = named_platforms(expression)
        if len(platforms) != 1:
            found = f"-m {expression!r}" if expression else "no -m"
            raise pytest.UsageError(
                f"gates boot real engines: found {found}, expected -m cpu or -m gpu (add 'and timing' for timing gates)"
            )
        (platform,) = platforms
        if platform == "gpu" and not gpu_found():
            raise pytest.UsageError(
                "-m gpu: found no GPU (no /dev/nvidia*, no /dev/kfd, no nvidia-smi), expected one: "
                "run on a GPU host, or -m cpu with a CPU study"
            )
        self._timing = names(expression, "timing")
        self._piloting = names(expression, "pilot")
        _check_block(config, timing=self._timing, piloting=self._piloting)
        options = options_of(config, platform=platform, timing=self._timing, arm=self._group)
        try:
            self._campaign = config.hook.pytest_kvqual_campaign(options=options, progress=self.progress)
        except KvqualError as error:
            raise pytest.UsageError(error.line()) from None
        study = self.campaign.study
        self._refuse_platform(study, platform)
        plans = {plan.name: plan for plan in study.gates}
        for name, item in self._collected.items():
            if name not in plans and name not in GATES:
                raise pytest.UsageError(
                    f"{item.nodeid}: found the gate {name!r}, expected one of the study's: {', '.join(plans)}"
                )

    @property
    def campaign(self) -> Campaign:
        """The campaign of this run."""
        if self._campaign is None:
            raise pytest.UsageError("found no campaign, expected one: pytest_kvqual_campaign returned None")
        return self._campaign

    def select(self, items: list[pytest.Item]) -> None:
        """Note what deselection left, order the gates as the study does, and leave out timing that nobody asked for."""
        transfer = [item for item in items if item.get_closest_marker("transfer") is not None]
        if self._waiting:
            self._waiting = False
            if transfer and len(transfer) == len(items):
                self._only_transfer = True
                return
            self._open()
        selected = set(items)
        self._selected = {name: item for name, item in self._collected.items() if item in selected}
        if self._campaign is None:
            self._in_the_listing(items)
            return
        plans = {plan.name: plan for plan in self.campaign.study.gates}
        # A gate that the study does not list is another study's (gsm8k where the model cannot do it).
        unasked = {item for name, item in self._selected.items() if name not in plans or not self._asked(plans[name])}
        if not self._piloting:
            unasked |= {item for item in items if item.get_closest_marker("pilot") is not None}
        if unasked:
            self._config.hook.pytest_deselected(items=list(unasked))
            self._selected = {name: item for name, item in self._selected.items() if item not in unasked}
        items[:] = [item for item in items if item not in unasked]
        gates = set(self._selected.values())
        places = [index for index, item in enumerate(items) if item in gates]
        for place, name in zip(places, self._in_order(), strict=True):
            items[place] = self._selected[name]
        # They take seconds, and what they find is found before an engine boots.
        items.sort(key=lambda item: item.get_closest_marker("transfer") is None)

    def _in_the_listing(self, items: list[pytest.Item]) -> None:
        """Every gate of the study in its order, those that time too; no gate of another study, and no pilot."""
        if self._listed is None:
            return
        order = {plan.name: place for place, plan in enumerate(self._listed.gates)}
        names = {item: name for name, item in self._selected.items()}
        out = [item for item, name in names.items() if name not in order]
        out += [item for item in items if item.get_closest_marker("pilot") is not None]
        if out:
            self._config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]
        items.sort(key=lambda item: order[names[item]] if item in names else -1)

    def _asked(self, plan: GatePlan) -> bool:
        """Whether this run decides the gate: timing where it is named, a trial with ``--block``, statistics without."""
        if not plan.timing:
            return not self._piloting
        other = WITH_BLOCK if self._config.getoption("block") is None else WITHOUT_BLOCK
        return self._timing and plan.name != other

    def _in_order(self) -> list[str]:
        """The selected gates in the study's order."""
        return [plan.name for plan in self.campaign.study.gates if plan.name in self._selected]

    # -- the run -----------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Check lock, model, engine and disk before the first test."""
        if self._campaign is None or self._group is not None:
            return
        self._begin()
        if self._refusal:
            raise pytest.UsageError(self._refusal)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """In a worker of ``-n``: begin with the first test of the group, end with its last one."""
        mine = set(self._selected.values()) if self._group is not None else set()
        if item in mine and not self._begun:
            self._config.stash[_session_key] = self
            self._begin()
        result = yield
        if item in mine and nextitem not in mine:
            self._end()
        return result

    def _begin(self) -> None:
        self._begun = True
        try:
            self._notices = list(self.campaign.prepare(self._in_order()))
            self._started = True
        except KvqualError as error:
            self._refusal = error.line()

    def gate(self, item: pytest.Item) -> Gate:
        """The gate of one test."""
        if item.get_closest_marker("gate") is None:
            pytest.fail(
                "found no @pytest.mark.gate(NAME) on this test, expected it: `gate` is for gates", pytrace=False
            )
        return Gate(self, _gate_name(item))

    def decide(self, name: str) -> Decision:
        """Decide one gate, once."""
        if self._refusal:
            # A group is prepared between the tests of its worker, where nothing can stop the run any more.
            pytest.fail(self._refusal, pytrace=False)
        if name in self._decisions:
            pytest.fail(f"gate {name}: found a second decision in this run, expected one", pytrace=False)
        # Failed outside the handler: pytest would print both, one as the cause of the other.
        failure = ""
        try:
            self._decisions[name] = self.campaign.decide(name)
        except KvqualError as error:
            # Its receipt could not be written: there is no verdict, whatever was judged.
            failure = error.line()
        if failure:
            pytest.fail(failure, pytrace=False)
        return self._decisions[name]

    def pilot(self) -> Pilot:
        """The exploratory measurement of this run."""
        return Pilot(self)

    def explore(self) -> None:
        """Measure the arm at one load, and keep what to say about it for the report."""
        refusal = ""
        try:
            self._explored += self.campaign.pilot(self._config.getoption("cell"))
        except KvqualError as error:
            refusal = error.line()
        if refusal:
            pytest.fail(refusal, pytrace=False)

    def progress(self, event: Event) -> None:
        """Show what the run is at, also while a test's output is captured."""
        progress.show(self._config, event)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A gate's report is its verdict: skipped, expected to fail, and passed without a verdict are failures."""
        report = yield
        name = next((name for name, gate in self._selected.items() if gate is item), None)
        if name is None or report.when == "teardown":
            return report
        decision = self._decisions.get(name)
        if report.outcome == "failed":
            if decision is None and call.excinfo is not None:
                self._reasons[name] = f"its test ended without a verdict: {call.excinfo.exconly().splitlines()[0]}"
            return report
        if report.when == "setup" and report.outcome == "passed":
            return report
        if decision is None:
            reason = "its test was skipped" if report.outcome == "skipped" else "its test passed without a decision"
            decision = self._absent(name, reason)
        if not _passed(decision):
            report.outcome = "failed"
            report.longrepr = self._errors[-1] if decision is None else terminal.failure_line(decision)
            if hasattr(report, "wasxfail"):
                del report.wasxfail
        return report

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """Note which test runs."""
        self._running = (nodeid, location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note which tests have an outcome."""
        if report.when == "call" or report.outcome != "passed":
            self._reported.add(report.nodeid)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note that the session is cut short: by Ctrl-C, ``pytest.exit`` or a plugin."""
        self._interrupted = f"interrupted: {excinfo.exconly().splitlines()[0]}"

    def pytest_internalerror(self, excrepr: object, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note that the session is cut short by a defect of pytest or of a plugin."""
        self._interrupted = f"internal error: {excinfo.exconly().splitlines()[0]}"

    def _expected(self) -> list[GatePlan]:
        """The gates that this run must pass."""
        return [plan for plan in self.campaign.study.gates if plan.state == "required" and self._asked(plan)]

    def _absent(self, name: str, reason: str) -> Decision | None:
        try:
            decision = self.campaign.absent(name, reason)
        except KvqualError as error:
            self._errors.append(f"{name}: {error.line()}")
            return None
        self._decisions[name] = decision
        return decision

    def _reason(self, name: str) -> str:
        if name in self._reasons:
            return self._reasons[name]
        if name not in self._collected:
            return "not collected in this run"
        if name not in self._selected:
            return "deselected in this run"
        if self._interrupted:
            return f"not run to its end: {self._interrupted}"
        return f"not run: {self._stopped}" if self._stopped else "not run: the session ended before its turn"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Account for every gate, and set the exit status from the verdicts."""
        if self._campaign is not None and (self._begun or self._group is None):
            self._end()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            if self._started or self._interrupted:
                self._account()
                if self._group is None:
                    self._write_report()
        finally:
            self.campaign.close()
            if self._group is not None:
                self._hand_over(self._group)

    def _hand_over(self, arm: str) -> None:
        """Leave to the controller of ``-n`` what only it can say."""
        from pytest_kvqual.distributed import Group, hand_over

        group = Group(
            arm=arm,
            passed=self._all_passed,
            title=self.campaign.title,
            lines=self._lines() if self._started else [self._refusal],
            properties=junit.properties(self.campaign.title, self._rows()) if self._started else [],
            failures=self._unheard,
        )
        hand_over(self._config, group)

    def _write_report(self) -> None:
        lines, error = write_gate_report(self._config, self.campaign.run_dir)
        self._written += lines
        if error:
            self._errors.append(error)
            if self._session.exitstatus == pytest.ExitCode.OK:
                self._session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _account(self) -> None:
        session = self._session
        # Read once: the failed reports that are sent below move pytest's own count on.
        stopped = session.shouldfail or session.shouldstop
        self._stopped = stopped if isinstance(stopped, str) else ""
        passed = True
        for plan in self._expected():
            decision = self._decisions.get(plan.name)
            if decision is None:
                decision = self._undecided(plan.name)
                # A gate whose own test ended without a verdict is reported as failed already.
                if plan.name not in self._reasons and not _passed(decision):
                    self._report_absent(plan.name, decision)
            passed = passed and _passed(decision)
        if self._interrupted and self._running is not None and self._running[0] not in self._reported:
            # Whatever test it was: JUnit's file has a nameless case for a test that began and has no outcome.
            self._report_failed(*self._running, f"not run to its end: {self._interrupted}")
            passed = False
        passed = passed and all(map(_passed, self._decisions.values()))
        self._all_passed = passed
        if not passed and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        junit.add_properties(self._config, junit.properties(self.campaign.title, self._rows()))

    def _undecided(self, name: str) -> Decision | None:
        """What counts for a gate that this run did not decide; None, and a note, where nothing does."""
        reason = self._reason(name)
        # Before the campaign is prepared it cannot tell which receipts stand.
        decision = self._absent(name, reason) if self._started else None
        # An earlier PASS answers for a gate that nobody asked for here, not for one that was begun or cut off.
        if decision is not None and decision.standing and (self._interrupted or name in self._reasons):
            del self._decisions[name]
            self._notes[name] = f"{reason} (an earlier run's receipt stands)"
            return None
        if decision is None:
            self._notes[name] = reason
        return decision

    def _report_absent(self, name: str, decision: Decision | None) -> None:
        """A failed test in the name of a gate that did not run, for the terminal's count and for JUnit."""
        item = self._collected.get(name)
        nodeid = item.nodeid if item is not None else f"qualification::{name}"
        location = item.location if item is not None else ("qualification", None, name)
        line = terminal.failure_line(decision) if decision is not None else f"{name}: {self._notes[name]}"
        # The terminal's percentage is of the tests collected.
        self._session.testscollected += item is None
        self._report_failed(nodeid, location, line)

    def _report_failed(self, nodeid: str, location: tuple[str, int | None, str], line: str) -> None:
        if self._group is None:
            report_failed(self._config, nodeid, location, line)
        else:
            self._unheard.append((nodeid, location, line))

    # -- the report --------------------------------------------------------------------------------------------------

    def _rows(self) -> list[terminal.Row]:
        return terminal.rows(
            self.campaign.study.gates,
            self._decisions,
            notes=self._notes,
            unasked={plan.name for plan in self.campaign.study.gates if plan.timing and not self._asked(plan)},
            run_dir=self.campaign.run_dir,
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The table of verdicts, the findings, and what the engines did with the time."""
        if self._only_transfer:
            terminalreporter.write_line("qualification: only transfer tests were selected; no gate was decided")
        if self._campaign is None or not self._started:
            return
        if self._piloting:
            terminalreporter.section(f"pilot of {self.campaign.title}")
            for line in [*self._explored, "no gate was decided"]:
                terminalreporter.write_line(line)
            return
        terminalreporter.section(f"qualification of {self.campaign.title}")
        for line in self._lines():
            terminalreporter.write_line(line)

    def _lines(self) -> list[str]:
        return terminal.lines(
            self._rows(),
            notices=[*self._notices, *self._errors],
            summary=[*self.campaign.summary(), *self._written],
            run_dir=self.campaign.run_dir,
        )


def report_failed(config: pytest.Config, nodeid: str, location: tuple[str, int | None, str], line: str) -> None:
    """Report a failed test that did not run: for the terminal's count, for JUnit and for the exit status."""
    report = pytest.TestReport(
        nodeid=nodeid, location=location, keywords={}, outcome="failed", longrepr=line, when="call", duration=0.0
    )
    config.hook.pytest_runtest_logreport(report=report)


def write_gate_report(config: pytest.Config, run_dir: Path) -> tuple[list[str], str]:
    """The gate report, where it was asked for: a line for each file, and why it could not be written.

    A run whose report could not be written does not pass.
    """
    path: Path | None = config.getoption("gate_report")
    if path is None:
        return [], ""
    from pytest_kvqual.report.gate.files import paths, write_report

    try:
        html, junit_file = paths(path)
        written = write_report(run_dir, html=html, junit=junit_file, prefix=config.getoption("prefix"))
    except KvqualError as error:
        return [], f"--gate-report: {error.line()}"
    return [f"gate report: {file}" for file in written], ""


def _passed(decision: Decision | None) -> bool:
    return decision is not None and decision.verdict.outcome is Outcome.PASS


def _gate_name(item: pytest.Item) -> str:
    mark = item.get_closest_marker("gate")
    if mark is None or len(mark.args) != 1 or mark.kwargs or not isinstance(mark.args[0], str):
        raise pytest.UsageError(f"{item.nodeid}: found {mark}, expected @pytest.mark.gate(NAME)")
    return mark.args[0]


def _check_block(config: pytest.Config, *, timing: bool, piloting: bool) -> None:
    """Refuse options that would have no effect, and a pilot together with gates that time.

    Raises:
        pytest.UsageError: one line.
    """
    if config.getoption("block") is not None and not timing:
        raise pytest.UsageError("found --block without timing in -m, expected -m 'cpu and timing' (or gpu)")
    if config.getoption("cell") is not None and not piloting:
        raise pytest.UsageError("found --cell without pilot in -m, expected -m 'cpu and pilot' (or gpu)")
    if config.getoption("gate_report") is not None and piloting:
        raise pytest.UsageError("found --gate-report with pilot in -m, expected none: a pilot decides nothing")
    if timing and piloting:
        raise pytest.UsageError("found both timing and pilot in -m, expected one: a pilot decides nothing")


def refuse_hiding(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Refuse the options that repeat, reorder by history, distribute or do not run gates.

    Raises:
        pytest.UsageError: one line that names the option.
    """
    for destination, typed, why in _HIDING_OPTIONS:
        if config.getoption(destination, None):
            raise pytest.UsageError(f"found {typed} with gates, expected none: {why}")
    for name in config.option.plugins:
        if name in _RERUN_PLUGINS:
            raise pytest.UsageError(f"found -p {name} with gates, expected none: {_ONE_ATTEMPT}")
    for name in ("reruns", "retries"):
        try:
            value = config.getini(name)
        except (KeyError, ValueError):
            continue
        if value and str(value) != "0":
            raise pytest.UsageError(f"found the setting {name} = {value} with gates, expected none: {_ONE_ATTEMPT}")
    for item in items:
        for mark in _RERUN_MARKS:
            if item.get_closest_marker(mark) is not None:
                raise pytest.UsageError(
                    f"{item.nodeid}: found the mark {mark!r} on a gate, expected none: {_ONE_ATTEMPT}"
                )
