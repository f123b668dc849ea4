"""One attempt of one arm: a bundle of evidence, the server it comes from, and what is captured from it.

What is captured, under which names; nothing here knows a gate's rule. A failed attempt is closed as failed and stays.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, TypedDict

from pytest_kvqual._clock import monotonic_ns
from pytest_kvqual.errors import CaptureError, EvidenceError, KvqualError, ServerError
from pytest_kvqual.progress import Boot, BootStage, Step, Timed, silent

if TYPE_CHECKING:
    from pytest_kvqual.capture.quality import Writer
    from pytest_kvqual.evidence.bundle import Bundle
    from pytest_kvqual.evidence.records import Scope
    from pytest_kvqual.progress import Progress
    from pytest_kvqual.server.checkout import Install
    from pytest_kvqual.server.process import Server
    from pytest_kvqual.study.model import Arm, Selection
    from pytest_kvqual.study.panels import Panel

IDENTITY, IDENTITY_POISON, IDENTITY_AFTER = "identity.json", "identity-poison.json", "identity-after.json"
IDENTITY_BEFORE_TAPS, IDENTITY_TAPS = "identity-before-taps.json", "identity-taps.json"
DISPATCH, DISPATCH_AFTER = "dispatch.json", "dispatch-after.json"
ORACLE = "oracle.json"
ORDERS, ORDER_INPUTS = "determinism.jsonl", "determinism-inputs.json"
ORDER_COMPARISON = "order-comparison.json"
PARITY, PARITY_REVERSE, REFERENCE = "parity.jsonl", "parity-reverse.jsonl", "reference.jsonl"
NLL = "nll.jsonl"
GSM8K_PANEL = "gsm8k-panel.json"
#: The checkouts that the arm brought, as they were found before each boot.
INSTALL = "install.json"
SERVER_LOG, REFERENCE_LOG, REFERENCE_CONFIG = "server.log", "reference.log", "reference-config.json"
TAPS_LOG, SERVER_AGAIN_LOG = "server-taps.log", "server-again.log"

ORDER_POISON_PROMPTS: Final = 8
"""How many prompts are sent in each order under a planted fault: one that differs shows it."""


def poisoned(name: str, fault: str) -> str:
    """The file of a capture under a planted fault: ``nll.jsonl`` -> ``nll-poison-FAULT.jsonl``."""
    stem, dot, suffix = name.partition(".")
    return f"{stem}-poison-{fault}{dot}{suffix}"


def scored(task: str) -> str:
    """The file of a scored task's answers."""
    return f"{task}.jsonl"


def again(name: str) -> str:
    """The file of a capture that is made a second time for the null: ``nll.jsonl`` -> ``nll-again.jsonl``."""
    stem, dot, suffix = name.partition(".")
    return f"{stem}-again{dot}{suffix}"


def _stem(name: str) -> str:
    return name.partition(".")[0]


_ALTERABLE: Final = ("parameters", "scales")
"""The parts of a worker's identity that a change in the running process can alter."""

_OF_EACH_SERVER: Final = (*_ALTERABLE, "settings")
"""The parts that two servers of one attempt have in common."""


def _part(rank: object, name: str) -> object:
    return rank.get(name) if isinstance(rank, dict) else None


def python_of(arm: Arm) -> Path:
    """The arm's interpreter: its own, or the one that runs pytest."""
    return arm.interpreter if arm.interpreter is not None else Path(sys.executable)


def load_task_panel(selection: Selection, task: str) -> Panel:
    """The panel of a task: that of the selection's length where the task has one for each.

    Raises:
        StudyError: The panel is missing, malformed or another's.
    """
    from pytest_kvqual.study.panels import has_length, load_panel

    model, length = selection.study.model, selection.length
    return load_panel(
        selection.study.parity.panel if task == "parity" else length.panels[task],
        task=task,
        length=length.tokens if has_length(task) else None,
        vocabulary=model.vocabulary,
        tokenizer=model.files.get("tokenizer.json"),
    )


def pass_panels(selection: Selection) -> dict[str, Panel]:
    """The requests of each pass of the oracle panel, by the pass's name.

    Raises:
        StudyError: The panel is missing, malformed or another's.
    """
    rules, whole = selection.study.oracle, load_task_panel(selection, "oracle")
    short = _up_to(whole, rules.short_prompt_tokens)
    return {name: short if name in ("pressure", "rotated") else whole for name in rules.passes}


def _up_to(panel: Panel, tokens: int) -> Panel:
    return replace(panel, items=tuple(item for item in panel.items if len(item.prompt) <= tokens))


class Observed(TypedDict):
    """``identity.json``."""

    schema: int
    arm: str
    ranks: list[object]
    sockets: list[list[object]]


@dataclass(kw_only=True, slots=True)
class Activity:
    """What the engines did with the time of a run: (arm, seconds to boot), and nanoseconds in engine steps."""

    begun_ns: int = field(default_factory=monotonic_ns)
    busy_ns: int = 0
    boots: list[tuple[str, float]] = field(default_factory=list)


class _Answers:
    """A writer that notes the tokens of each answer by run and request, beside keeping the record."""

    def __init__(self, writer: Writer, answers: dict[str, dict[str, tuple[int, ...]]]) -> None:
        self._writer = writer
        self._answers = answers

    def append(self, record: dict[str, object]) -> None:
        """Keep one record."""
        from pytest_kvqual.errors import EvidenceError
        from pytest_kvqual.tasks.completion import parse_answer

        self._writer.append(record)
        # An answer that cannot be read is the judge's to object to.
        with suppress(EvidenceError):
            known = {key: value for key, value in record.items() if key != "run"}
            answer = parse_answer(known, origin="determinism", logprobs=False)
            self._answers.setdefault(str(record["run"]), {})[answer.id] = answer.token_ids


class Attempt:
    """One attempt, from its first file to its outcome. A context manager: an exception inside closes it as failed.

    Args:
        selection: The arm at one length.
        scope: What the evidence is about.
        run_dir: The run directory.
        prefix: Prefix of the bundle's folder.
        model: The verified model folder.
        progress: Takes what the attempt is at.
        activity: Receives boot and busy times.
        install: Where interpreter and checkouts of arms come from; None where all are the study's.
    """

    def __init__(
        self,
        selection: Selection,
        scope: Scope,
        *,
        run_dir: Path,
        prefix: str,
        model: Path,
        progress: Progress = silent,
        activity: Activity,
        install: Install | None = None,
    ) -> None:
        from pytest_kvqual.evidence.bundle import Bundle

        self._selection = selection
        self._model = model
        self._progress = progress
        self._activity = activity
        self._install = install
        self._label = scope.arm
        self._server: Server | None = None
        self._closed = False
        self._identity: list[object] | None = None
        self._dispatch: list[dict[str, object]] = []
        self._log = SERVER_LOG
        self.failure: KvqualError | None = None
        self._bundle: Bundle = Bundle.create(run_dir, scope, prefix=prefix)

    @property
    def path(self) -> Path:
        """The attempt's folder."""
        return self._bundle.path

    @property
    def name(self) -> str:
        """The attempt's folder below ``evidence``."""
        return self._bundle.name

    def has(self, name: str) -> bool:
        """Whether a file of that name is sealed."""
        return name in self._bundle.digests

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        else:
            self.complete()

    # -- the life of the server --------------------------------------------------------------------------------------

    def boot(self, *, log: str = SERVER_LOG, taps: bool = False) -> None:
        """Start the arm's server.

        Args:
            log: The file of the attempt that gets what it prints.
            taps: With the oracles' taps in its graphs; it is then one for the oracle passes alone.

        Raises:
            ServerError: It did not start, or can be reached from another host.
        """
        from pytest_kvqual.server.command import serve_command
        from pytest_kvqual.server.process import Server, Timeouts, free_port

        selection, engine = self._selection, self._selection.study.engine
        self._installed()
        port = free_port()
        command = serve_command(
            selection,
            model=self._model,
            port=port,
            worker_config=self._worker_config(taps=taps),
            python=python_of(selection.arm),
            inherited=os.environ,
        )
        self._log = log
        self._server = Server.start(
            command,
            port=port,
            log=self.path / log,
            timeouts=Timeouts(boot_s=engine.boot_timeout_s),
            progress=partial(self._booting, self._label),
        )
        self._activity.boots.append((self._label, self._server.boot_s))

    def _worker_config(self, *, taps: bool = False) -> dict[str, object]:
        from pytest_kvqual.server.command import worker_config
        from pytest_kvqual.study.panels import selected_scales

        return worker_config(
            self._selection,
            model=self._model,
            v_scales=selected_scales(self._selection),
            taps=taps,
            checkouts=self.path / INSTALL if self._selection.arm.checkouts else None,
        )

    def _installed(self) -> None:
        """Look at the arm's checkouts, immediately before they are imported from: ``install.json``.

        Raises:
            InstallError: One is not the declared one, or not what it was at an earlier boot of this attempt.
        """
        from pytest_kvqual.server.checkout import verify

        arm = self._selection.arm
        if self._install is None or not arm.checkouts:
            return
        found = verify(self._install, arm.name)
        document = {"schema": 1, "arm": arm.name, "checkouts": [it.record() for it in found]}
        # Verified against the same declaration: a second boot of an attempt finds what the first one found.
        if not self.has(INSTALL):
            self._bundle.write(INSTALL, document)

    def stop(self, *, gone: bool = False) -> None:
        """End the server, and seal its log. Idempotent.

        Args:
            gone: A server that ended by itself is known already, and no error.

        Raises:
            ServerError: The server had ended by itself before, or a process of it is still there.
        """
        server, self._server = self._server, None
        if server is None:
            return
        try:
            if not gone:
                server.check()
                self._unchanged(server)
                self._keep_dispatch()
            if server.alive():
                self._count_activity(server)
        finally:
            server.stop()
        self._bundle.seal(self._log)

    def _end(self, server: Server) -> None:
        """End a server that another one follows, and seal its log."""
        try:
            self._count_activity(server)
        finally:
            self._server = None
            server.stop()
        self._bundle.seal(self._log)

    @contextmanager
    def _tapped(self) -> Iterator[None]:
        """Inside the block the server is one whose layers the oracles can see, whatever the engine runs as a graph.

        Where the engine captures graphs, that is a server of its own, with taps in them; before and after it runs one
        without. That the three are the same but for the taps is read and compared.

        Raises:
            CaptureError: A server is not the same, or its taps are not as it was told.
        """
        from pytest_kvqual.server.command import captures_graphs

        if not captures_graphs(self._selection):
            yield
            return
        self._compare(IDENTITY_BEFORE_TAPS, _ALTERABLE, tapped=False)
        self._end(self._live())
        self.boot(log=TAPS_LOG, taps=True)
        yield
        self._compare(IDENTITY_TAPS, _OF_EACH_SERVER, tapped=True)
        self._end(self._live())
        self.boot(log=SERVER_AGAIN_LOG)
        # Settings too, of this one: what follows is captured from it.
        self._same_as_first(self.call("kvqual_identity", {"parts": list(_OF_EACH_SERVER)}), _OF_EACH_SERVER, IDENTITY)

    def complete(self) -> None:
        """Stop the server and close the attempt: all that was planned was captured."""
        if self._closed:
            return
        self.stop()
        self._closed = True
        self._bundle.complete()

    def fail(self, error: BaseException) -> None:
        """Stop the server and close the attempt as failed. Never raises: the failure at hand is the one to report."""
        if self._closed:
            return
        self._closed = True
        if isinstance(error, KvqualError):
            self.failure = error
        else:
            self.failure = CaptureError(f"interrupted by {type(error).__name__}: {error}")
        with suppress(KvqualError):
            if self._server is not None:
                server, self._server = self._server, None
                with suppress(KvqualError):
                    self._count_activity(server)
                server.stop()
        with suppress(KvqualError):
            # Also where the failure came up while the server was stopped.
            for log in (SERVER_LOG, TAPS_LOG, SERVER_AGAIN_LOG):
                if (self.path / log).exists() and not self.has(log):
                    self._bundle.seal(log)
        with suppress(KvqualError):
            self._keep_dispatch()
        with suppress(KvqualError):
            self._bundle.fail(self.failure.line())

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Close the attempt as failed when the block raises."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def _unchanged(self, server: Server) -> None:
        """Read weights, scales, taps and faults once more: what was captured came from the server of ``identity.json``.

        Raises:
            CaptureError: One of them is not what it was at the start.
        """
        if self._identity is not None:
            self._compare(IDENTITY_AFTER, _ALTERABLE, tapped=False, server=server)

    def _compare(self, name: str, parts: Sequence[str], *, tapped: bool, server: Server | None = None) -> None:
        """Read these parts, the taps and the faults, keep them under ``name``, and compare them with the first reading.

        Raises:
            CaptureError: One of them is not what it was, or taps, faults or held blocks are not as expected.
        """
        from pytest_kvqual.server import rpc

        base_url, timeout_s = (server or self._live()).base_url, self._selection.study.engine.request_timeout_s
        ranks = rpc.call(base_url, "kvqual_identity", {"parts": list(parts)}, timeout_s=timeout_s)
        taps = rpc.call(base_url, "kvqual_taps", timeout_s=timeout_s)
        self._bundle.write(name, {"schema": 1, "arm": self._selection.arm.name, "ranks": ranks, "taps": taps})
        self._same_as_first(ranks, parts, name)
        # A server told to put taps into its graphs may run none of them as a full graph, and then has none to put.
        if any(
            (not tapped and _part(rank, "installed") is not False)
            or _part(rank, "faults") != 0
            or _part(rank, "held") != 0
            for rank in taps
        ):
            raise CaptureError(
                f"{self._label}: found taps, faults or held blocks after the captures, expected none: {taps}"
            )

    def _same_as_first(self, ranks: Sequence[object], parts: Sequence[str], name: str) -> None:
        if self._identity is None:
            return
        for part in parts:
            for rank, (before, after) in enumerate(zip(self._identity, ranks, strict=True)):
                if _part(before, part) != _part(after, part):
                    raise CaptureError(
                        f"{self._label}: found other {part} on rank {rank} than at the start, expected the same: what "
                        f"was captured is not of the server in {IDENTITY}",
                        advice=f"compare it with {self.path / name}",
                    )

    def _keep_dispatch(self) -> None:
        if self._dispatch and not self.has(DISPATCH_AFTER):
            self._bundle.write(
                DISPATCH_AFTER, {"schema": 1, "arm": self._selection.arm.name, "readings": self._dispatch}
            )

    def _count_activity(self, server: Server) -> None:
        from pytest_kvqual.server import rpc

        ranks = rpc.call(server.base_url, "kvqual_activity", timeout_s=10.0)
        busy = [rank.get("busy_ns") for rank in ranks if isinstance(rank, dict)]
        # Ranks step together: the busiest one is the engine.
        self._activity.busy_ns += max((value for value in busy if isinstance(value, int)), default=0)

    def _live(self) -> Server:
        if self._server is None:
            raise CaptureError(f"{self._label}: found no running server, expected one: the attempt is over")
        return self._server

    def call(self, method: str, *args: object) -> list[object]:
        """Call a method of the workers; one result per rank."""
        from pytest_kvqual.server import rpc

        timeout_s = self._selection.study.engine.request_timeout_s
        return rpc.call(self._live().base_url, method, *args, timeout_s=timeout_s)

    # -- what a trial needs --------------------------------------------------------------------------------------------

    @property
    def base_url(self) -> str:
        """Where the server answers."""
        return self._live().base_url

    def trial_identity(self, name: str, parts: Sequence[str]) -> None:
        """These parts of what the server is, which must be the same when it is stopped."""
        ranks = self.call("kvqual_identity", {"parts": list(parts)})
        sockets = [[it.address, it.port] for it in self._live().sockets()]
        self._bundle.write(name, {"schema": 1, "arm": self._selection.arm.name, "ranks": ranks, "sockets": sockets})
        self._identity = ranks

    def seal(self, name: str) -> None:
        """Seal a file that a recorder wrote."""
        self._bundle.seal(name)

    def write(self, name: str, document: Mapping[str, object]) -> None:
        """Write and seal a document."""
        self._bundle.write(name, document)

    # -- captures ----------------------------------------------------------------------------------------------------

    def identity(self) -> None:
        """What the server is, as its workers and the operating system see it: ``identity.json``."""
        self._at("identity")
        observed = self._observed()
        self._bundle.write(IDENTITY, observed)
        self._identity = observed["ranks"]

    def identity_poison(self, faults: Sequence[str]) -> None:
        """The reading of ``identity.json`` under each planted fault: ``identity-poison.json``.

        Only weights and scales are read again: a live fault cannot alter files, and hashing 18,000 of them for each
        fault would be most of the gate's time.
        """
        if self._identity is None:
            raise CaptureError(f"{self._label}: found no healthy identity, expected one before its seeded faults")
        entries, tell = [], self.steps("identity under seeded faults", "faults")
        for number, fault in enumerate(faults, start=1):
            with self._planted(fault):
                ranks = self.call("kvqual_identity", {"parts": list(_ALTERABLE)})
            observed: list[object] = []
            for before, after in zip(self._identity, ranks, strict=True):
                if not isinstance(before, dict) or not isinstance(after, dict):
                    raise CaptureError(f"{self._label}: found {after!r:.100} from a rank, expected a mapping")
                observed.append({**before, **after})
            identity = {
                "schema": 1,
                "arm": self._selection.arm.name,
                "ranks": observed,
                "sockets": [[it.address, it.port] for it in self._live().sockets()],
            }
            entries.append({"fault": fault, "identity": identity})
            tell(number, len(faults))
        self._bundle.write(IDENTITY_POISON, {"schema": 1, "poison": entries})

    def _observed(self) -> Observed:
        return {
            "schema": 1,
            "arm": self._selection.arm.name,
            "ranks": self.call("kvqual_identity"),
            "sockets": [[it.address, it.port] for it in self._live().sockets()],
        }

    def dispatch(self, faults: Sequence[str]) -> None:
        """Which kernels each layer runs, healthy and under each planted fault: ``dispatch.json``."""
        self._at("dispatch")
        first = self.kernels()
        poison, tell = [], self.steps("dispatch under seeded faults", "faults")
        for number, fault in enumerate(faults, start=1):
            with self._planted(fault):
                poison.append({"fault": fault, "ranks": self.kernels()})
            tell(number, len(faults))
        self._bundle.write(
            DISPATCH,
            {
                "schema": 1,
                "arm": self._selection.arm.name,
                "readings": [{"after": "boot", "ranks": first}],
                "poison": poison,
            },
        )
        self._dispatch = [{"after": "boot", "ranks": first}]

    def kernels(self) -> list[object]:
        """Which kernels each layer runs now, by rank."""
        from pytest_kvqual.capture.dispatch import read_dispatch

        study = self._selection.study
        # The second prompt: the first may be a single token.
        item = load_task_panel(self._selection, "oracle").items[:2][-1]
        return read_dispatch(self._live(), item, model=study.model.name, timeout_s=study.engine.request_timeout_s)

    def _dispatched_again(self, after: str) -> None:
        """Read the kernels once more: what was just captured ran on those of ``dispatch.json``.

        Raises:
            CaptureError: A layer runs something else than at the start.
        """
        if not self._dispatch:
            return
        ranks = self.kernels()
        self._dispatch.append({"after": after, "ranks": ranks})
        if ranks != self._dispatch[0]["ranks"]:
            raise CaptureError(
                f"{self._label}: found other kernels after {after} than at the start, expected the same: a layer fell "
                "back to another implementation",
                advice=f"compare {self.path / DISPATCH} with {self.path / DISPATCH_AFTER}",
            )

    def oracle(self, faults: Sequence[tuple[str, str]]) -> None:
        """The passes of the oracle panel, healthy; then its shortest prompts under each fault (name, claiming gate)."""
        from pytest_kvqual.capture.oracle import capture_oracle

        study, rules = self._selection.study, self._selection.study.oracle

        def one(panel: Panel, tell: Callable[[int, int], None], **options: object) -> dict[str, object]:
            return capture_oracle(
                self._live(),
                panel,
                **options,  # type: ignore[arg-type]  # those of the table below
                model=study.model.name,
                schedule=study.schedule,
                wave_size=self._selection.length.wave_size,
                timeout_s=study.engine.request_timeout_s,
                progress=tell,
            )

        def healthy(panel: Panel, what: str, **options: object) -> dict[str, object]:
            step = Step(arm=self._label, what=what, begun_ns=monotonic_ns(), total=len(panel.items))
            self._progress(step)
            found = one(panel, lambda done, total: self._progress(replace(step, done=done, total=total)), **options)
            # Not with the last answer: the ranks compare the whole pool after it.
            self._progress(replace(step, done=len(panel.items), over=True, detail=_checked(found["records"])))
            return found

        options: dict[str, dict[str, object]] = {
            "model": {"lone": True},
            "probe": {"probe": True, "fills": True},
            "pressure": {"free_blocks": rules.free_blocks},
            "rotated": {"rotation": rules.rotation},
        }
        with self._tapped():
            passes, panels = [], pass_panels(self._selection)
            for number, (name, panel) in enumerate(panels.items(), start=1):
                found = healthy(panel, f"oracle pass {number} of {len(panels)}, {name}", **options[name])
                passes.append({"name": name, "records": found["records"], "wave": found["responses"]})
                self._keep_reproducers(name, found["records"])
            entries, tell = [], self.steps("oracle under seeded faults", "faults")
            brief = _up_to(load_task_panel(self._selection, "oracle"), rules.poison_prompt_tokens)
            for number, (fault, gate) in enumerate(faults, start=1):
                try:
                    found = one(
                        brief,
                        # A pass takes seconds, and all have the same requests: the faults are the steps.
                        lambda done, total: None,
                        fault=fault,
                        probe=True,
                        fills=gate == "replay",
                    )
                except (CaptureError, ServerError) as error:
                    # Nothing is said about the arm: it was not its fault that ended the pass.
                    raise EvidenceError(f"seeded fault {fault}: {error}", advice=error.advice) from error
                entries.append(
                    {"fault": fault, "claimed_by": gate, "records": found["records"], "responses": found["responses"]}
                )
                tell(number, len(faults))
            self._bundle.write(ORACLE, {"schema": 2, "passes": passes, "poison": entries})
        self._dispatched_again("oracle")

    def _keep_reproducers(self, name: str, records: object) -> None:
        """What ``kvqual replay`` checks, one file per finding that brought one."""
        for rank in records if isinstance(records, list) else ():
            for entry in rank.get("reproducers", ()):
                try:
                    file = f"reproducer-{name}-{entry['gate']}-rank{rank['rank']}.npz"
                    data = base64.b64decode(entry["npz"])
                except (KeyError, TypeError, ValueError) as error:
                    raise CaptureError(f"{self._label}: found a reproducer that cannot be read: {error}") from error
                (self.path / file).write_bytes(data)
                self._bundle.seal(file)
                self.say(f"a finding of {entry['gate']}: kvqual replay {self.path / file}")

    def determinism(self, faults: Sequence[str]) -> None:
        """The parity panel in several orders: records, the inputs of each step, and how the answers differ."""
        from pytest_kvqual.capture.orders import capture_orders
        from pytest_kvqual.tasks import orders

        study, rules = self._selection.study, self._selection.study.oracle
        panel = load_task_panel(self._selection, "parity")
        answers: dict[str, dict[str, tuple[int, ...]]] = {}

        def one(name: str, part: Panel, runs: Sequence[str], what: str, rotation: int) -> dict[str, list[object]]:
            with self._bundle.stream(name) as writer:
                return capture_orders(
                    self._live(),
                    part,
                    _Answers(writer, answers if name == ORDERS else {}),
                    runs=runs,
                    rotation=rotation,
                    model=study.model.name,
                    wave_size=self._selection.length.wave_size,
                    timeout_s=study.engine.request_timeout_s,
                    progress=self.steps(what),
                )

        inputs = one(ORDERS, panel, orders.RUNS, "determinism", rules.rotation)
        self._bundle.write(ORDER_INPUTS, {"schema": 1, "runs": inputs})
        self._bundle.write(ORDER_COMPARISON, orders.comparison(study.determinism, answers))
        brief = replace(panel, items=panel.items[:ORDER_POISON_PROMPTS])
        for fault in faults:
            with self._planted(fault):
                one(poisoned(ORDERS, fault), brief, orders.REQUIRED, "determinism under a seeded fault", rules.rotation)
        self._dispatched_again("determinism")

    def parity(
        self, name: str, order: Literal["forward", "reverse"], *, fault: str | None = None, prompts: int | None = None
    ) -> None:
        """Greedy answers to the parity panel, one prompt at a time, or to its first ``prompts`` under a fault."""
        from pytest_kvqual.capture.quality import capture_parity

        panel = load_task_panel(self._selection, "parity")
        panel = replace(panel, items=panel.items[:prompts])
        study = self._selection.study
        what = f"parity ({order})" if fault is None else "parity under a seeded fault"
        with self._planted(fault), self._bundle.stream(name) as writer:
            capture_parity(
                self._live(),
                panel,
                writer,
                model=study.model.name,
                order=order,
                timeout_s=study.engine.request_timeout_s,
                progress=self.steps(what),
            )
        if fault is None:
            self._dispatched_again(_stem(name))

    def nll(self, name: str, *, fault: str | None = None, documents: int | None = None) -> None:
        """The raw loss of each forced target of the nll panel, or of its first ``documents`` under a fault."""
        from pytest_kvqual.capture.quality import capture_nll

        panel = load_task_panel(self._selection, "nll")
        study = self._selection.study
        what = "nll" if fault is None else "nll under a seeded fault"
        with self._planted(fault), self._bundle.stream(name) as writer:
            capture_nll(
                self._live(),
                panel,
                writer,
                model=study.model.name,
                schedule=study.schedule,
                wave_size=self._selection.length.wave_size,
                timeout_s=study.engine.request_timeout_s,
                documents=documents,
                progress=self.steps(what),
            )
        if fault is None:
            self._dispatched_again(_stem(name))

    def scored(self, panel: Panel, name: str, *, fault: str | None = None, questions: int | None = None) -> None:
        """The answers to a scored panel, or to its first ``questions`` under a fault.

        Raises:
            CaptureError: Every request failed.
            ServerError: The server ended.
        """
        from pytest_kvqual.capture.quality import capture_scored

        study = self._selection.study
        rules = study.preservation[panel.task]
        what = panel.task if fault is None else f"{panel.task} under a seeded fault"
        with self._planted(fault), self._bundle.stream(name) as writer:
            capture_scored(
                self._live(),
                panel,
                writer,
                model=study.model.name,
                # A stop inside a part that is dropped would end the answer before it began: the parser applies it.
                stop=rules.stop if rules.reasoning is None else (),
                schedule=study.schedule,
                wave_size=self._selection.length.wave_size,
                timeout_s=study.engine.request_timeout_s,
                questions=questions,
                progress=self.steps(what),
            )
        self._live().check()
        if fault is None:
            self._dispatched_again(_stem(name))

    def keep(self, name: str, data: bytes) -> None:
        """Seal a file that was not captured but decides what is: a panel that no study holds."""
        (self.path / name).write_bytes(data)
        self._bundle.seal(name)

    def reference(self) -> None:
        """The parity panel in process, in both orders, with the arm's own engine arguments. The server must be gone.

        Raises:
            CaptureError: It failed, or gave another number of records than asked for.
        """
        from pytest_kvqual.server.boot_log import BootLog
        from pytest_kvqual.server.reference import ORDERS, run_reference

        panel = load_task_panel(self._selection, "parity")
        selection, engine = self._selection, self._selection.study.engine
        self._installed()
        inside, begun_ns, stages = f"{self._label} in process", monotonic_ns(), BootLog(self.path / REFERENCE_LOG)
        tell: Callable[[int, int], None] | None = None
        first_ns: int | None = None

        def step(done: int, total: int) -> None:
            nonlocal first_ns, tell
            if done and first_ns is None:
                first_ns = monotonic_ns()
                self._activity.boots.append((inside, (first_ns - begun_ns) / 1e9))
                self._booting(inside, "ready", (first_ns - begun_ns) / 1e9)
                tell = self.steps("parity in process")
            if tell is None:
                self._booting(inside, stages.stage(), (monotonic_ns() - begun_ns) / 1e9)
            else:
                tell(done, total)

        try:
            run_reference(
                selection,
                model=self._model,
                panel=panel,
                worker_config=self._worker_config(),
                python=python_of(selection.arm),
                inherited=os.environ,
                log=self.path / REFERENCE_LOG,
                out=self.path / REFERENCE,
                timeout_s=engine.boot_timeout_s + len(ORDERS) * engine.request_timeout_s,
                progress=step,
            )
            # One prompt follows the other: from the first answer to the last the engine is in a step.
            self._activity.busy_ns += monotonic_ns() - (first_ns or monotonic_ns())
        finally:
            for name in (REFERENCE_CONFIG, REFERENCE_LOG):
                if (self.path / name).exists():
                    self._bundle.seal(name)
        self._bundle.seal(REFERENCE)

    @contextmanager
    def _planted(self, fault: str | None) -> Iterator[None]:
        """The fault is in the server's worker inside the block, and taken back whatever happens in it."""
        if fault is None:
            yield
            return
        self.call("kvqual_plant", fault)
        try:
            yield
        except BaseException:
            with suppress(KvqualError):
                self.call("kvqual_unplant")
            raise
        self.call("kvqual_unplant")

    # -- progress ----------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """A note: one line that is kept."""
        self._progress(f"{self._label}: {text}")

    def steps(self, what: str, unit: str = "requests") -> Callable[[int, int], None]:
        """Begin a series of steps; the result takes (done, total) of it, and is not called again at its end."""
        first, last = Step(arm=self._label, what=what, begun_ns=monotonic_ns(), unit=unit), 0
        self._progress(first)

        def step(done: int, total: int) -> None:
            nonlocal last
            if done != last:
                last = done
                self._progress(replace(first, done=done, total=total, over=done >= total))

        return step

    @contextmanager
    def timed(self, what: str, *, begun_ns: int, requests: int, done: int, total: int) -> Iterator[None]:
        """Inside the block requests are timed, and nothing is shown: see :class:`pytest_kvqual.progress.Timed`."""
        event = Timed(arm=self._label, what=what, begun_ns=begun_ns, requests=requests, done=done, total=total)
        self._progress(event)
        yield
        self._progress(replace(event, done=done + requests, over=True))

    def _at(self, what: str) -> None:
        self._progress(Step(arm=self._label, what=what, begun_ns=monotonic_ns()))

    def _booting(self, arm: str, stage: BootStage, seconds: float) -> None:
        self._progress(Boot(arm=arm, stage=stage, seconds=seconds))


def _checked(records: object) -> str:
    """How much one pass of the oracles looked at, summed over the ranks: ``37 steps, 1,234 rows``."""
    steps = rows = 0
    for rank in records if isinstance(records, list) else ():
        step, row = _part(rank, "steps"), _part(_part(rank, "placement"), "rows_checked")
        steps += step if isinstance(step, int) else 0
        rows += row if isinstance(row, int) else 0
    return f"{steps:,} steps, {rows:,} rows checked"
