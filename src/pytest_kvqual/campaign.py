"""The campaign behind the fixtures: boots one arm at a time, captures, hands evidence to the judges, writes receipts.

It only wires: no threshold and no judgement is here. In order:

1. ``prepare``: the run directory is claimed, and lock, model and disk space are checked before anything boots.
2. The first gate captures the controls whole, one server after the other, then boots the arm under qualification.
3. Each gate captures what it needs from that server, which stays up. Parity needs it stopped, because one engine runs
   at a time: it takes what the gates below it need first, then runs the same arm in process.
4. A capture that was completed earlier, in this run directory and in exactly this scope, is used instead of a new one.
   A new attempt captures from identity on: evidence of one attempt comes from one server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from pytest_kvqual._clock import monotonic_ns
from pytest_kvqual.attempt import (
    DISPATCH,
    GSM8K_PANEL,
    IDENTITY,
    IDENTITY_POISON,
    INSTALL,
    NLL,
    ORACLE,
    ORDER_COMPARISON,
    ORDER_INPUTS,
    ORDERS,
    PARITY,
    PARITY_REVERSE,
    REFERENCE,
    Activity,
    Attempt,
    again,
    load_task_panel,
    pass_panels,
    poisoned,
    python_of,
    scored,
)
from pytest_kvqual.errors import (
    CaptureError,
    EvidenceError,
    InstallError,
    KvqualError,
    RefusedError,
    ServerError,
    StudyError,
)
from pytest_kvqual.hooks import Decision
from pytest_kvqual.judge.verdict import Outcome, Verdict
from pytest_kvqual.kv.declarations import NEED_DECLARATION, is_declared
from pytest_kvqual.progress import silent
from pytest_kvqual.study.load import ORACLE_GATES, SCORED_TASKS, TIMING_GATES
from pytest_kvqual.timing import Timing

if TYPE_CHECKING:
    from pytest_kvqual.evidence.reader import Reader
    from pytest_kvqual.evidence.records import Scope
    from pytest_kvqual.hooks import Options
    from pytest_kvqual.judge.permit import TimingPermit
    from pytest_kvqual.judge.sequence import Refusal, Standing
    from pytest_kvqual.progress import Progress
    from pytest_kvqual.receipt.statement import Receipt
    from pytest_kvqual.receipt.write import Receipts
    from pytest_kvqual.server.checkout import Install
    from pytest_kvqual.study.model import Arm, Selection, Study
    from pytest_kvqual.study.panels import Panel

QUALITY_GATES: Final = ("nll", *SCORED_TASKS)
"""The gates that compare an arm's answers with every control's."""

FREE_BYTES: Final = 256 << 20
"""Space that must be free in the run directory before a server boots: evidence and logs of one run, with a margin."""

PARITY_POISON_PROMPTS: Final = 4
"""How many prompts are asked under a planted fault: one that differs shows it."""


def open_campaign(options: Options, progress: Progress) -> Campaign:
    """The campaign that the user's options ask for.

    Raises:
        StudyError: The study is malformed or not prepared, or lacks the arm or the length.
        InstallError: The install cannot be read, or names another study's arm.
    """
    from pytest_kvqual.server.checkout import apply, read_install
    from pytest_kvqual.study.load import load_study, require_prepared, select

    study = load_study(options.study, options.format)
    require_prepared(study)
    install = None
    if options.install is not None:
        install = read_install(options.install, study)
        study = apply(study, install)
    arm = options.arm if options.arm is not None else _only_candidate(study)
    length = options.length if options.length is not None else next(iter(study.lengths))
    selection = select(study, arm=arm, length=length, cache_bytes=options.cache_bytes)
    place = study.name if study.model.format is None else f"{study.name}-{study.model.format}"
    run_dir = options.run_dir if options.run_dir is not None else options.root / ".kvqual" / place
    return Campaign(
        selection,
        run_dir=run_dir,
        prefix=options.prefix,
        progress=progress,
        gsm8k=options.gsm8k,
        block=options.block,
        install=install,
    )


def _only_candidate(study: Study) -> str:
    candidates = [arm.name for arm in study.arms.values() if arm.role == "candidate"]
    if len(candidates) != 1:
        raise StudyError(
            f"--arm: found none given and {len(candidates)} candidates in study {study.name}, expected one of "
            f"{', '.join(study.arms)}"
        )
    return candidates[0]


class Campaign:
    """One arm at one length in one run directory.

    Args:
        selection: What is under qualification. Its arm may bring more code than the study's arm of that name
            (a seeded fault in ``after_init``); ``label`` then keeps its evidence apart.
        run_dir: Where evidence and receipts go.
        prefix: Prefix of the folders of evidence and receipts.
        progress: Takes what the run is at.
        label: The arm's name in scopes; default its own.
        gsm8k: The file of the GSM8K test set; None for the hub's.
        block: The block of the trial; None where this run has none.
        install: Where interpreter and checkouts of arms come from; ``selection`` has them already.
    """

    def __init__(
        self,
        selection: Selection,
        *,
        run_dir: Path,
        prefix: str = "",
        progress: Progress = silent,
        label: str | None = None,
        gsm8k: Path | None = None,
        block: int | None = None,
        install: Install | None = None,
    ) -> None:
        self.selection: Selection = selection
        self.study: Study = selection.study
        self.arm: str = label or selection.arm.name
        self.run_dir = run_dir
        self.prefix = prefix
        self._timing = Timing(self, block=block)
        self.install = install
        self._gsm8k_file = gsm8k
        self._gsm8k_panel = b""
        self._progress = progress
        self._gates: tuple[str, ...] = ()
        self._scopes: dict[str, Scope] = {}
        self._readers: dict[str, Reader] = {}
        self._attempt: Attempt | None = None
        self._deferred: dict[str, KvqualError] = {}
        self._activity = Activity()
        self._claims = contextlib.ExitStack()
        self._controls_there: set[Path] | None = None
        # UUIDs; empty on a CPU, and where the driver tells none.
        self._devices: frozenset[str] = frozenset()
        self._model = Path()
        self._lock = ""
        self._implementation = ""

    @property
    def title(self) -> str:
        """Arm, length and pool size."""
        form = "" if self.study.model.format is None else f" ({self.study.model.format})"
        return (
            f"{self.arm} of {self.study.name}{form} at length {self.selection.length.tokens}, "
            f"{self.selection.cache_bytes} cache bytes"
        )

    # -- before a server boots ---------------------------------------------------------------------------------------

    def prepare(self, gates: Sequence[str]) -> Sequence[str]:
        """Claim the run directory, and check memory, lock, model and disk. ``gates`` are those that this run decides.

        Raises:
            KvqualError: one line; nothing has booted.
        """
        from pytest_kvqual import models
        from pytest_kvqual._canonical import digest
        from pytest_kvqual.study.freeze import keep, verify_lock

        self._activity.begun_ns = monotonic_ns()
        self._gates = tuple(gates)
        self._fits()
        self._installed()
        lock = verify_lock(self.study)
        self._lock = lock.sha256
        self._implementation = digest(dict(lock.implementation))
        self._model = models.model_folder(self.study.model)
        models.check_model(self.study.model, self._model)
        if "gsm8k" in gates:
            self._gsm8k_panel = self._built_gsm8k()
        if any(gate in TIMING_GATES for gate in gates):
            self._timing.prepare(gates)
        self._claim(self.run_dir)
        self._claim_devices()
        # What other arms' runs capture from now on is not used: whose controls a receipt rests on must not be a race.
        self._controls_there = {
            path for arm in self._control_arms() for path, ended in self._attempts(arm.name).items() if ended
        }
        keep(self.study, lock, self.run_dir)
        return [*self._open(), *self._unfinished(), *self._stale()]

    def _open(self) -> list[str]:
        """One line where the arm's KV format has no declaration: what this run cannot show."""
        arm, without = self.selection.arm, [gate for gate in self._gates if gate in NEED_DECLARATION]
        if is_declared(arm.kv_format) or not without:
            return []
        return [f"arm {arm.name}: the KV format '{arm.kv_format}' has no declaration: {', '.join(without)} cannot pass"]

    def _unfinished(self) -> list[str]:
        """One line for each attempt of this arm that never came to an outcome. It stays, and nothing is read of it."""
        return [
            f"{path.parent.name}/{path.name}: found no outcome.json: its process was killed, or captures it now as "
            "another arm's control; it counts for nothing"
            for path, ended in self._attempts(self.arm).items()
            if not ended
        ]

    def _attempts(self, arm: str) -> dict[Path, bool]:
        """The attempts at an arm that are there, in order, and whether each came to an outcome."""
        from pytest_kvqual.evidence import layout

        length, cache_bytes = self.selection.length.tokens, self.selection.cache_bytes
        folder = layout.scope_folder(self.run_dir, arm=arm, length=length, cache_bytes=cache_bytes, prefix=self.prefix)
        paths = [layout.attempt_folder(folder, number) for number in layout.numbers(folder)]
        return {path: (path / layout.OUTCOME).exists() for path in paths}

    def _built_gsm8k(self) -> bytes:
        """The panel of the GSM8K test set, which no study holds, checked like one that a study does."""
        from pytest_kvqual.gsm8k import build_panel
        from pytest_kvqual.study.panels import check_fit

        source, length = self.study.gsm8k_source, self.selection.length
        if source is None:
            raise StudyError(f"{self.study.directory}: found no [gsm8k] source, expected one: the gate is required")
        rules = self.study.preservation["gsm8k"]
        _, data = build_panel(source, rules, self._model / "tokenizer.json", self._gsm8k_file)
        panel, wanted = self._parsed(data), length.questions["gsm8k"]
        if len(panel.items) != wanted:
            raise StudyError(
                f"{self.study.directory / 'study.toml'}: in 'lengths.{length.tokens}.questions.gsm8k': found {wanted}, "
                f"expected {len(panel.items)}, the questions of the test set",
                advice="every question is asked",
            )
        check_fit(GSM8K_PANEL, panel, length.max_model_len, length.tokens)
        return data

    def _parsed(self, data: bytes) -> Panel:
        from pytest_kvqual.study.panels import parse_panel

        model = self.study.model
        return parse_panel(
            data,
            origin=GSM8K_PANEL,
            task="gsm8k",
            length=None,
            vocabulary=model.vocabulary,
            tokenizer=model.files.get("tokenizer.json"),
        )

    def _panel(self, task: str) -> Panel:
        return self._parsed(self._gsm8k_panel) if task == "gsm8k" else load_task_panel(self.selection, task)

    def _fits(self) -> None:
        """A CPU engine's pool is host memory; without this the kernel ends the engine halfway."""
        if self.study.platform != "cpu":
            return
        import psutil

        total = psutil.virtual_memory().total
        if self.selection.cache_bytes > total:
            raise RefusedError(
                f"--cache-bytes: found {self.selection.cache_bytes} bytes, expected at most this machine's memory of "
                f"{total} bytes",
                advice="give a smaller --cache-bytes",
            )

    def _installed(self) -> None:
        """Every checkout that this run may import from is the declared one, and no arm lacks what it brings."""
        from pytest_kvqual.server.checkout import verify

        for arm in dict.fromkeys((self.selection.arm.name, *(it.name for it in self._control_arms()))):
            declared = self.study.arms[arm]
            if declared.installed and (self.install is None or arm not in self.install.arms):
                found = "no --install" if self.install is None else f"{self.install.path} without [arms.{arm}]"
                raise InstallError(
                    f"arm {arm}: found {found}, expected one that names it: its code is no part of the study",
                    advice="docs/writing-an-arm.md says what kvqual-install.toml holds",
                )
            if self.install is not None:
                verify(self.install, arm)

    def _claim(self, place: Path) -> None:
        from filelock import FileLock, Timeout

        try:
            place.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(place).free
            # One run of an arm; others may write beside it. Receipts and attempts are numbered by who makes them first.
            length, cache_bytes = self.selection.length.tokens, self.selection.cache_bytes
            lock = FileLock(place / f".{self.prefix}{self.arm}-{length}-{cache_bytes}.lock", timeout=0)
            lock.acquire()
        except Timeout:
            raise EvidenceError(
                f"{place}: found another run of {self.arm} that uses it, expected none",
                advice="wait for it, or give another --run-dir",
            ) from None
        except OSError as error:
            raise EvidenceError(
                f"cannot write {place}: {error.strerror or error}", advice="give a --run-dir that you may write to"
            ) from error
        self._claims.callback(lock.release)
        if free < FREE_BYTES:
            raise EvidenceError(
                f"{place}: found {free} bytes free, expected at least {FREE_BYTES} for evidence",
                advice="free space there, or give another --run-dir",
            )

    def _claim_devices(self) -> None:
        """Hold the devices of every arm that may boot, and the host: alone where this run times, else with others.

        Raises:
            RefusedError: Another run has one of them.
        """
        from pytest_kvqual.server.command import environment
        from pytest_kvqual.server.devices import devices_of_host, hold, in_use

        study, on_gpu = self.study, self.study.platform == "gpu"
        timed = not self._gates or any(gate in TIMING_GATES for gate in self._gates)
        other = "another run on this host, expected none while an arm is timed"
        taken = f"found {other if timed else 'a run on this host that times an arm, expected none'}"
        self._claims.enter_context(hold("host", taken, shared=not timed))
        arms = (self.selection.arm, *self._control_arms())
        # An arm may name its devices itself; the CPUs of a worker are nobody's but the worker's.
        environments = [environment(replace(self.selection, arm=arm), inherited=os.environ) for arm in arms]
        host, each = devices_of_host() if on_gpu else (), study.engine.tensor_parallel_size
        found = [
            name
            for env in (environments if on_gpu else [os.environ])
            for name in in_use(env, platform=study.platform, each=each, host=host)
        ]
        for name in dict.fromkeys(found):
            self._claims.enter_context(hold(name, f"{name}: found another run that uses this device, expected none"))
        self._devices = frozenset(name.removeprefix("gpu-") for name in found if name.startswith("gpu-GPU-"))

    def _on_this_device(self, reader: Reader) -> bool:
        """Whether a capture is of a device of this run: identity holds an arm against controls of the same one.

        True where the driver tells no UUID, or the capture none: identity says so then.
        """
        from pytest_kvqual.server.devices import recorded

        seen = recorded(reader.document(IDENTITY)) if reader.has(IDENTITY) else frozenset()
        return not self._devices or seen <= self._devices

    def scope_of(self, arm: Arm) -> Scope:
        """The scope of an arm of the study at this campaign's length and pool."""
        return self._scope(arm)

    def _scope(self, arm: Arm, label: str | None = None) -> Scope:
        from pytest_kvqual._canonical import digest
        from pytest_kvqual.evidence.records import Scope
        from pytest_kvqual.server.checkout import verify
        from pytest_kvqual.server.install import engine_identity

        name = label or arm.name
        if name not in self._scopes:
            brought = {"checkouts": verify(self.install, arm.name)} if self.install is not None else {}
            self._scopes[name] = Scope(
                lock=self._lock,
                arm=name,
                length=self.selection.length.tokens,
                cache_bytes=self.selection.cache_bytes,
                engine=digest(engine_identity(self.study, python_of(arm), **brought)),
            )
        return self._scopes[name]

    # -- gates -------------------------------------------------------------------------------------------------------

    def decide(self, gate: str) -> Decision:
        """Capture what ``gate`` needs, judge it, write its receipt. Refusals and failed captures are verdicts."""
        above = self._above(gate)
        if not above.complete:
            return self._record(_refused(gate, above), above)
        try:
            verdict = self._judge(gate)
        except KvqualError as error:
            attempt = self._attempt
            kept = (f"{attempt.name} is kept as failed",) if attempt is not None and attempt.failure is not None else ()
            verdict = Verdict(gate=gate, outcome=_outcome(error), figure=error.line(), findings=kept)
        return self._record(verdict, above)

    def verdict(self, gate: str) -> Verdict:
        """Capture what ``gate`` needs and judge it, whatever stands above it; no receipt: it qualifies nothing.

        Raises:
            KvqualError: The capture failed, or the evidence cannot be read.
        """
        return self._judge(gate)

    def _judge(self, gate: str) -> Verdict:
        judges: Mapping[str, Callable[[], Verdict]] = {
            "identity": self._identity,
            "dispatch": self._dispatch,
            **{name: partial(self._oracle, name) for name in ORACLE_GATES},
            "determinism": self._determinism,
            "parity": self._parity,
            "nll": self._nll,
            **{name: partial(self._preserved, name) for name in SCORED_TASKS},
        }
        if gate in TIMING_GATES:
            return self._timing.judge(gate)
        if gate not in judges:
            raise RefusedError(f"gate {gate}: found no judge for it, expected one: it is planned")
        self.capture_controls()
        self._capture(gate)
        return judges[gate]()

    def _identity(self) -> Verdict:
        from pytest_kvqual.judge.gates import identity
        from pytest_kvqual.study.panels import selected_scales

        poison = self._own().document(IDENTITY_POISON)["poison"]
        return identity.judge(
            self.study,
            self.selection.arm.name,
            cache_bytes=self.selection.cache_bytes,
            scales=selected_scales(self.selection),
            candidate=self._own().document(IDENTITY),
            null=self._null().document(IDENTITY),
            poison=poison if isinstance(poison, list) else [],
            faults=self._faults("identity"),
        )

    def _dispatch(self) -> Verdict:
        from pytest_kvqual.judge.gates import dispatch

        return dispatch.judge(
            self.study,
            arm=self.selection.arm.name,
            null_arm=self._null_arm().name,
            candidate=self._own().document(DISPATCH),
            null=self._null().document(DISPATCH),
            faults=self._faults("dispatch"),
        )

    def _oracle(self, gate: str) -> Verdict:
        from importlib import import_module

        module = import_module(f"pytest_kvqual.judge.gates.{gate.replace('-', '_')}")
        verdict: Verdict = module.judge(
            self.study,
            load_task_panel(self.selection, "oracle"),
            arm=self.selection.arm.name,
            null_arm=self._null_arm().name,
            candidate=self._own().document(ORACLE),
            null=self._null().document(ORACLE),
            faults=self._faults(gate),
            panels=pass_panels(self.selection),
        )
        return verdict

    def _determinism(self) -> Verdict:
        from pytest_kvqual.judge.gates import determinism

        def evidence(reader: Reader) -> determinism.Evidence:
            return determinism.Evidence(
                records=reader.records(ORDERS),
                inputs=reader.document(ORDER_INPUTS),
                comparison=reader.document(ORDER_COMPARISON),
            )

        faults = self._faults("determinism")
        return determinism.judge(
            self.study,
            load_task_panel(self.selection, "parity"),
            candidate=evidence(self._own()),
            null=evidence(self._null()),
            poison={fault: self._own().records(poisoned(ORDERS, fault)) for fault in faults},
            faults=faults,
            earlier_failures=self._earlier_failures("determinism"),
        )

    def _earlier_failures(self, gate: str) -> tuple[str, ...]:
        """The receipts of ``gate`` in this run directory that say FAIL of this arm, length and pool, of any lock."""
        scope = self.own_scope()
        place = (scope.arm, scope.length, scope.cache_bytes)
        return tuple(
            receipt.name
            for receipt in self._receipts().receipts
            if receipt.gate == gate
            and receipt.outcome is Outcome.FAIL
            and (receipt.scope.arm, receipt.scope.length, receipt.scope.cache_bytes) == place
        )

    def _parity(self) -> Verdict:
        from pytest_kvqual.judge.gates import parity

        fault = self._reading_fault()
        return parity.judge(
            self.study,
            load_task_panel(self.selection, "parity"),
            http=self._own().records(PARITY),
            reference=self._own().records(REFERENCE),
            null=(self._null().records(PARITY), self._null().records(PARITY_REVERSE)),
            poison={fault: self._own().records(poisoned(PARITY, fault))},
            faults=(fault,),
        )

    def _nll(self) -> Verdict:
        from pytest_kvqual.judge.gates import nll

        fault = self._reading_fault()
        return nll.judge(
            self.study,
            load_task_panel(self.selection, "nll"),
            candidate=self._own().records(NLL),
            controls={arm.name: self._readers[_control_key(arm)].records(NLL) for arm in self._control_arms()},
            null=(self._null().records(NLL), self._null().records(again(NLL))),
            poison={fault: self._own().records(poisoned(NLL, fault))},
            arm=self.selection.arm.name,
            faults=(fault,),
        )

    def _preserved(self, gate: str) -> Verdict:
        from pytest_kvqual.judge.gates import preservation

        fault, name = self._reading_fault(), scored(gate)
        if gate == "gsm8k":
            self._same_questions()
        return preservation.judge(
            self.study,
            self._panel(gate),
            gate=gate,
            questions=self.selection.length.questions[gate],
            candidate=self._own().records(name),
            controls={arm.name: self._readers[_control_key(arm)].records(name) for arm in self._control_arms()},
            null=(self._null().records(name), self._null().records(again(name))),
            poison={fault: self._own().records(poisoned(name, fault))},
            arm=self.selection.arm.name,
            faults=(fault,),
        )

    def _same_questions(self) -> None:
        """Refuse captures of other questions than this run's: the panel is built anew in every run."""
        for reader in (self._own(), *(self._readers[_control_key(arm)] for arm in self._control_arms())):
            if reader.data(GSM8K_PANEL) != self._gsm8k_panel:
                raise EvidenceError(
                    f"{reader.name}/{GSM8K_PANEL}: found other questions than this run's, expected the same",
                    advice="give the same --gsm8k file, or start over in a new --run-dir",
                )

    # -- which arms, which faults, which files -----------------------------------------------------------------------

    def _null_arm(self) -> Arm:
        return self.study.controls()[0]

    def _control_arms(self) -> tuple[Arm, ...]:
        """The controls to capture: the null's always, the others where answers are compared."""
        others = tuple(arm for arm in self.study.controls() if arm.name != self.selection.arm.name)
        compared = any(gate in self._gates for gate in QUALITY_GATES)
        return (self._null_arm(), *(arm for arm in others if arm != self._null_arm() and compared))

    def _faults(self, gate: str) -> tuple[str, ...]:
        """The names of the faults that each qualification plants against ``gate`` and that this arm can show."""
        from pytest_kvqual.faults.seeded import seeded

        return seeded(
            gate,
            scales=self.selection.arm.scales is not None,
            rotation_may_differ=self.study.determinism == "rotation-diagnostic",
            waived=self.study.waived(self.selection.arm.name, gate),
            declared=is_declared(self.selection.arm.kv_format),
        )

    def _reading_fault(self) -> str:
        """A fault of the read path, so that answers and losses must change."""
        return "v-scale-dropped-on-read" if self.selection.arm.scales is not None else "other-layer-cache"

    def _needed(self, gates: Sequence[str]) -> tuple[str, ...]:
        """The files that the arm's attempt must hold for these gates."""
        fault = self._reading_fault()
        installed = (INSTALL,) if self.selection.arm.checkouts else ()
        names = {
            "identity": (*installed, IDENTITY, IDENTITY_POISON),
            "dispatch": (DISPATCH,),
            **dict.fromkeys(ORACLE_GATES, (ORACLE,)),
            "determinism": (
                ORDERS,
                ORDER_INPUTS,
                ORDER_COMPARISON,
                *(poisoned(ORDERS, name) for name in self._faults("determinism")),
            ),
            "parity": (PARITY, poisoned(PARITY, fault), REFERENCE),
            "nll": (NLL, poisoned(NLL, fault)),
            **{task: (*_panel_files(task), scored(task), poisoned(scored(task), fault)) for task in SCORED_TASKS},
        }
        return tuple(dict.fromkeys(name for gate in gates for name in names.get(gate, ())))

    def _control_names(self, arm: Arm, gates: Sequence[str]) -> tuple[str, ...]:
        """The files that a control's attempt must hold for these gates."""
        identity = (*((INSTALL,) if arm.checkouts else ()), IDENTITY)
        if arm != self._null_arm():
            others = {"nll": (NLL,), **{task: (*_panel_files(task), scored(task)) for task in SCORED_TASKS}}
            files = [name for gate in gates for name in others.get(gate, ())]
            return tuple(dict.fromkeys((*identity, *files))) if files else ()
        names = {
            "identity": identity,
            "dispatch": (DISPATCH,),
            **dict.fromkeys(ORACLE_GATES, (ORACLE,)),
            "determinism": (ORDERS, ORDER_INPUTS, ORDER_COMPARISON),
            "parity": (PARITY, PARITY_REVERSE),
            "nll": (NLL, again(NLL)),
            **{task: (*_panel_files(task), scored(task), again(scored(task))) for task in SCORED_TASKS},
        }
        return tuple(dict.fromkeys((*identity, *(name for gate in gates for name in names.get(gate, ())))))

    def _own(self) -> Reader:
        return self._readers[self.arm]

    def _null(self) -> Reader:
        return self._readers[_control_key(self._null_arm())]

    # -- capture -----------------------------------------------------------------------------------------------------

    def capture_controls(self) -> None:
        """The captures of every control that this run's gates need, one server after the other.

        Raises:
            EvidenceError: A control could not be captured.
        """
        for arm in self._control_arms():
            key = _control_key(arm)
            if key in self._readers:
                continue
            try:
                self._readers[key] = self._control(arm)
            except (CaptureError, ServerError) as error:
                # Nothing is said about the arm under qualification: its instrument is missing.
                raise EvidenceError(f"control {arm.name}: {error}", advice=error.advice) from error

    def _control(self, arm: Arm) -> Reader:
        from pytest_kvqual.evidence.reader import Reader

        names = self._control_names(arm, self._gates)
        scope = self._scope(arm)
        # Those that this arm's receipts rest on come first: another arm's run may have captured the control since.
        cited = {
            file.rpartition("/")[0]
            for receipt in self._receipts().receipts
            if receipt.scope == self.own_scope()
            for file in receipt.evidence
        }
        reader = Reader.latest(
            self.run_dir,
            scope,
            prefix=self.prefix,
            names=names,
            known=self._controls_there,
            first=cited,
            accept=self._on_this_device,
        )
        if reader is not None:
            self._progress(f"{arm.name}: captured earlier in {reader.name}")
            return reader
        with self.begin(replace(self.selection, arm=arm), scope) as attempt:
            attempt.boot()
            attempt.identity()
            if DISPATCH in names:
                attempt.dispatch(())
            if ORACLE in names:
                attempt.oracle(())
            if ORDERS in names:
                attempt.determinism(())
            if PARITY in names:
                attempt.parity(PARITY, "forward")
                attempt.parity(PARITY_REVERSE, "reverse")
            for name in (NLL, again(NLL)):
                if name in names:
                    attempt.nll(name)
            if GSM8K_PANEL in names:
                attempt.keep(GSM8K_PANEL, self._gsm8k_panel)
            for task in SCORED_TASKS:
                for name in (scored(task), again(scored(task))):
                    if name in names:
                        attempt.scored(self._panel(task), name)
        return Reader.open(attempt.path)

    def begin(self, selection: Selection, scope: Scope, *, prefix: str = "") -> Attempt:
        """A new attempt; ``prefix`` goes before that of the campaign."""
        return Attempt(
            selection,
            scope,
            run_dir=self.run_dir,
            prefix=prefix + self.prefix,
            model=self._model,
            progress=self._progress,
            activity=self._activity,
            install=self.install,
        )

    def _capture(self, gate: str) -> None:
        """What ``gate`` needs of the arm under qualification, in ``self._readers``."""
        from pytest_kvqual.evidence.reader import Reader

        if self._attempt is None and self.arm not in self._readers:
            scope = self._scope(self.selection.arm, self.arm)
            names = self._needed(self._gates)
            reader = Reader.latest(self.run_dir, scope, prefix=self.prefix, names=names, accept=self._on_this_device)
            if reader is not None:
                self._progress(f"{self.arm}: captured earlier in {reader.name}")
                self._readers[self.arm] = reader
            else:
                self._attempt = self.begin(self.selection, scope)
        attempt = self._attempt
        if attempt is None:
            return
        if gate in self._deferred:
            raise self._deferred[gate]
        if attempt.failure is not None:
            if attempt.failure in self._deferred.values() and all(attempt.has(it) for it in self._needed((gate,))):
                # Another gate's capture failed, and this one's was whole before.
                return
            raise attempt.failure
        with attempt.failing():
            if not attempt.has(IDENTITY):
                attempt.boot()
                attempt.identity()
                attempt.identity_poison(self._faults("identity"))
            # Before anything else is captured: what comes later is compared with it.
            if gate != "identity" and not attempt.has(DISPATCH):
                attempt.dispatch(self._faults("dispatch"))
            if gate in ORACLE_GATES and not attempt.has(ORACLE):
                attempt.oracle([(name, claims) for claims in ORACLE_GATES for name in self._faults(claims)])
            if gate == "determinism" and not attempt.has(ORDERS):
                attempt.determinism(self._faults(gate))
            if gate == "parity":
                self._capture_parity(attempt)
            if gate in QUALITY_GATES:
                self._capture_quality(attempt, gate)
            if all(attempt.has(name) for name in self._needed(self._gates)):
                attempt.complete()
        self._readers[self.arm] = Reader.open(attempt.path)

    def _capture_parity(self, attempt: Attempt) -> None:
        fault = self._reading_fault()
        attempt.parity(PARITY, "forward")
        attempt.parity(poisoned(PARITY, fault), "forward", fault=fault, prompts=PARITY_POISON_PROMPTS)
        for gate in QUALITY_GATES:
            if gate in self._gates:
                try:
                    self._capture_quality(attempt, gate)
                except KvqualError as error:
                    # It is that gate's failure; parity is judged on what parity needs.
                    self._deferred[gate] = error
        attempt.stop(gone=bool(self._deferred))
        attempt.reference()
        if self._deferred:
            attempt.fail(next(iter(self._deferred.values())))

    def _capture_quality(self, attempt: Attempt, gate: str) -> None:
        fault = self._reading_fault()
        if gate == "nll":
            if not attempt.has(NLL):
                attempt.nll(NLL)
                attempt.nll(poisoned(NLL, fault), fault=fault, documents=self.study.nll.poison_documents)
            return
        name, panel = scored(gate), self._panel(gate)
        if not attempt.has(name):
            if gate == "gsm8k":
                attempt.keep(GSM8K_PANEL, self._gsm8k_panel)
            attempt.scored(panel, name)
            questions = self.study.preservation[gate].poison_questions
            attempt.scored(panel, poisoned(name, fault), fault=fault, questions=questions)

    # -- receipts ----------------------------------------------------------------------------------------------------

    def own_scope(self) -> Scope:
        """The scope of the arm under qualification."""
        return self._scope(self.selection.arm, self.arm)

    def permit(self, gate: str) -> TimingPermit:
        """The permit for a timing gate, from the receipts that stand now.

        Raises:
            RefusedError: A receipt above it is missing, failed or stale.
        """
        from pytest_kvqual.judge.permit import grant
        from pytest_kvqual.receipt.write import disk_digests

        found = self._receipts()
        return grant(
            self.study,
            gate,
            found.receipts,
            self.own_scope(),
            implementation=self._implementation,
            digests=disk_digests(self.run_dir),
            damaged=found.damaged,
        )

    def pilot_permit(self) -> TimingPermit:
        """The permit for an exploratory measurement.

        Raises:
            RefusedError: A receipt of a gate up to parity is missing, failed or stale.
        """
        from pytest_kvqual.judge.permit import grant_pilot
        from pytest_kvqual.receipt.write import disk_digests

        found = self._receipts()
        return grant_pilot(
            self.study,
            found.receipts,
            self.own_scope(),
            implementation=self._implementation,
            digests=disk_digests(self.run_dir),
            damaged=found.damaged,
        )

    def _receipts(self) -> Receipts:
        from pytest_kvqual.receipt.write import read_all

        return read_all(self.run_dir, prefix=self.prefix)

    def _above(self, gate: str) -> Standing:
        return self.standing(gate, self.own_scope())

    def standing(self, gate: str, scope: Scope) -> Standing:
        """The receipts that ``gate`` may rest on in a scope of this run directory."""
        from pytest_kvqual.judge.sequence import standing
        from pytest_kvqual.receipt.write import disk_digests

        found = self._receipts()
        return standing(
            self.study,
            gate,
            found.receipts,
            scope,
            implementation=self._implementation,
            digests=disk_digests(self.run_dir),
            damaged=found.damaged,
        )

    def _stands(self, gate: str) -> Receipt | Refusal:
        from pytest_kvqual.judge.sequence import own
        from pytest_kvqual.receipt.write import disk_digests

        found = self._receipts()
        stands = own(
            self.study,
            gate,
            found.receipts,
            self.own_scope(),
            implementation=self._implementation,
            digests=disk_digests(self.run_dir),
            damaged=found.damaged,
        )
        return next((receipt for receipt in found.receipts if receipt is stands), None) or cast("Refusal", stands)

    def _stale(self) -> list[str]:
        """One line for each gate that has receipts of this arm, length and pool here, none of which counts."""
        from pytest_kvqual.judge.sequence import Refusal

        scope, lines, there = self.own_scope(), [], self._receipts()
        place = (scope.arm, scope.length, scope.cache_bytes)
        here = {it.gate for it in there.receipts if (it.scope.arm, it.scope.length, it.scope.cache_bytes) == place}
        here |= {it.gate for it in there.damaged if (it.arm, it.length, it.cache_bytes) == place}
        for plan in self.study.gates:
            if plan.name not in here:
                # Another arm's receipts are none of this one's business.
                continue
            found = self._stands(plan.name)
            if isinstance(found, Refusal) and found.kind in ("stale", "damaged"):
                lines.append(f"an earlier receipt counts no more: {found.line()}")
        return lines

    def _record(self, verdict: Verdict, above: Standing) -> Decision:
        """The receipt of a verdict: the standing one where it says exactly this, else a new one."""
        from pytest_kvqual.judge.sequence import Refusal
        from pytest_kvqual.receipt.statement import build, encode
        from pytest_kvqual.receipt.write import write

        gate = verdict.gate
        evidence = self._evidence(gate) if verdict.outcome is not Outcome.REFUSED else {}
        statement = build(
            verdict,
            self.own_scope(),
            order=1 + [plan.name for plan in self.study.gates].index(gate),
            evidence=evidence,
            requires={name: receipt.sha256 for name, receipt in above.receipts.items()},
            implementation=self._implementation,
        )
        stands = self._stands(gate)
        # A second receipt of the same content would make the receipts that rest on the first one stale.
        if not isinstance(stands, Refusal) and encode(statement, attempt=stands.attempt) == stands.data:
            return Decision(verdict=verdict, receipt=self.run_dir / stands.name)
        return Decision(verdict=verdict, receipt=write(self.run_dir, statement, prefix=self.prefix))

    def _evidence(self, gate: str) -> dict[str, str]:
        """The digests of the files that a gate's verdict rests on, by ``BUNDLE/attempt-N/FILE``."""
        if gate in TIMING_GATES:
            return dict(self._timing.evidence(gate))
        found: dict[str, str] = {}
        own = self._readers.get(self.arm)
        if own is not None:
            found |= {f"{own.name}/{name}": own.digests[name] for name in self._needed((gate,)) if own.has(name)}
        for arm in self._control_arms():
            reader = self._readers.get(_control_key(arm))
            if reader is not None:
                names = self._control_names(arm, (gate,))
                found |= {f"{reader.name}/{name}": reader.digests[name] for name in names if reader.has(name)}
        return found

    def absent(self, gate: str, reason: str) -> Decision:
        """The standing PASS of a gate that this run did not decide, else a new receipt that says why it did not."""
        from pytest_kvqual.judge.sequence import Refusal

        stands = self._stands(gate)
        if isinstance(stands, Refusal):
            earlier = () if stands.kind == "missing" else (stands.line(),)
            verdict = Verdict(gate=gate, outcome=Outcome.REFUSED, figure=reason, findings=earlier)
            return self._record(verdict, self._above(gate))
        return Decision(verdict=stands.verdict, receipt=self.run_dir / stands.name, standing=True)

    # -- the end -----------------------------------------------------------------------------------------------------

    def pilot(self, cell: str | None) -> Sequence[str]:
        """One exploratory measurement of the arm at one load; lines for a person."""
        return self._timing.pilot(cell)

    def summary(self) -> Sequence[str]:
        """The share of the run's wall time in which an engine was busy, and how long each took to boot."""
        wall_ns = max(1, monotonic_ns() - self._activity.begun_ns)
        busy = 100 * self._activity.busy_ns / wall_ns
        boots = ", ".join(f"{arm} {seconds:.1f} s" for arm, seconds in self._activity.boots) or "none"
        return [f"engine busy {busy:.0f} %, idle {100 - busy:.0f} % of {wall_ns / 1e9:.0f} s; booted: {boots}"]

    def close(self) -> None:
        """Stop what runs. An attempt that lacks what this run planned is closed as failed, and says what is missing."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            missing = [name for name in self._needed(self._gates) if not attempt.has(name)]
            attempt.fail(CaptureError(f"not captured: {', '.join(missing)}"))
        self._claims.close()


def _panel_files(task: str) -> tuple[str, ...]:
    """The files that say what was asked, where no study does."""
    return (GSM8K_PANEL,) if task == "gsm8k" else ()


def _control_key(arm: Arm) -> str:
    # A control under qualification has its null in an attempt of its own, like any other arm.
    return f"control {arm.name}"


def _refused(gate: str, above: Standing) -> Verdict:
    lines = tuple(refusal.line() for refusal in above.refusals)
    # Why an earlier gate failed stands in its own row; why a receipt is missing or stale stands nowhere else.
    short = "; ".join(
        f"{refusal.gate}: failed" if refusal.kind == "failed" else refusal.line() for refusal in above.refusals
    )
    return Verdict(gate=gate, outcome=Outcome.REFUSED, figure=f"no standing receipt of {short}", findings=lines)


def _outcome(error: KvqualError) -> Outcome:
    """What an error of a gate's capture or judgement concludes: a capture that failed is the arm's failure."""
    if isinstance(error, RefusedError):
        return Outcome.REFUSED
    return Outcome.FAIL if isinstance(error, CaptureError | ServerError) else Outcome.INCONCLUSIVE
