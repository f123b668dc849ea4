"""The campaign behind the fixtures: boots one arm at a time, captures, hands evidence to the judges, writes receipts.

It only wires: no threshold and no judgement is here. In order:

1. ``prepare``: the run directory is claimed, and lock, model and disk space are checked before anything boots.
2. The first gate captures the controls whole, one server after the other, then boots the arm under qualification.
3. Each gate captures what it needs from that server, which stays up; parity, the last gate that needs it stopped, takes
   the losses of nll first, stops it, and runs the same arm in process.
4. A capture that was completed earlier, in this run directory and in exactly this scope, is used instead of a new one.
   A new attempt captures from identity on: evidence of one attempt comes from one server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_kvqual._clock import monotonic_ns
from pytest_kvqual.errors import CaptureError, EvidenceError, KvqualError, RefusedError, ServerError, StudyError
from pytest_kvqual.hooks import Decision
from pytest_kvqual.judge.verdict import Outcome, Verdict

if TYPE_CHECKING:
    from pytest_kvqual.evidence.bundle import Bundle
    from pytest_kvqual.evidence.reader import Reader
    from pytest_kvqual.evidence.records import Scope
    from pytest_kvqual.faults import Fault
    from pytest_kvqual.hooks import Options, Progress
    from pytest_kvqual.server.process import Server
    from pytest_kvqual.study.model import Arm, Selection, Study
    from pytest_kvqual.study.panels import Panel

FREE_BYTES: Final = 256 << 20
"""Space that must be free in the run directory before a server boots: evidence and logs of one run, with a margin."""

PROGRESS_S: Final = 10.0
"""Least time between two lines about one capture."""

IDENTITY, IDENTITY_POISON = "identity.json", "identity-poison.json"
ORACLE = "oracle.json"
PARITY, PARITY_REVERSE, REFERENCE = "parity.jsonl", "parity-reverse.jsonl", "reference.jsonl"
NLL, NLL_AGAIN = "nll.jsonl", "nll-again.jsonl"
SERVER_LOG, REFERENCE_LOG = "server.log", "reference.log"
PARITY_POISON_PROMPTS: Final = 4


def open_campaign(options: Options, progress: Progress) -> Campaign:
    """The campaign that the user's options ask for.

    Raises:
        StudyError: The study is malformed, or lacks the arm or the length.
    """
    from pytest_kvqual.study.load import load_study, select

    study = load_study(options.study)
    arm = options.arm if options.arm is not None else _only_candidate(study)
    length = options.length if options.length is not None else next(iter(study.lengths))
    selection = select(study, arm=arm, length=length, cache_bytes=options.cache_bytes)
    run_dir = options.run_dir if options.run_dir is not None else options.root / ".kvqual" / study.name
    return Campaign(selection, run_dir=run_dir, prefix=options.prefix, progress=progress)


def _only_candidate(study: Study) -> str:
    candidates = [arm.name for arm in study.arms.values() if arm.role == "candidate"]
    if len(candidates) != 1:
        raise StudyError(
            f"--arm: found none given and {len(candidates)} candidates in study {study.name}, expected one of "
            f"{', '.join(study.arms)}"
        )
    return candidates[0]


@dataclass(kw_only=True, slots=True)
class _Activity:
    """What the engines did with the time. Nanoseconds."""

    busy_ns: int = 0
    boots: list[tuple[str, float]] = field(default_factory=list)
    begun_ns: int = 0


class _Live:
    """One attempt on one running server."""

    def __init__(self, selection: Selection, bundle: Bundle, server: Server) -> None:
        self.selection = selection
        self.bundle = bundle
        self.server = server


class Campaign:
    """One arm at one length in one run directory.

    Args:
        selection: What is under qualification. Its arm may bring more code than the study's arm of that name
            (a seeded fault in ``after_init``); ``label`` then keeps its evidence apart.
        run_dir: Where evidence and receipts go.
        prefix: Prefix of the folders of evidence and receipts.
        progress: Takes one line about a long step.
        label: The arm's name in scopes; default its own.
        controls_dir: The run directory in which the controls' captures lie or are made; default ``run_dir``.
    """

    def __init__(
        self,
        selection: Selection,
        *,
        run_dir: Path,
        prefix: str = "",
        progress: Progress,
        label: str | None = None,
        controls_dir: Path | None = None,
    ) -> None:
        self._selection = selection
        self.study: Study = selection.study
        self.arm: str = label or selection.arm.name
        self.run_dir = run_dir
        self._controls_dir = controls_dir or run_dir
        self._prefix = prefix
        self._progress = progress
        self._gates: tuple[str, ...] = ()
        self._scopes: dict[str, Scope] = {}
        self._readers: dict[str, Reader] = {}
        self._live: _Live | None = None
        self._failure: KvqualError | None = None
        self._deferred: dict[str, KvqualError] = {}
        self._activity = _Activity()
        self._stack = contextlib.ExitStack()
        self._model: Path | None = None
        self._lock_sha256 = ""
        self._implementation = ""

    @property
    def title(self) -> str:
        """Arm, length and pool size."""
        return (
            f"{self.arm} of {self.study.name} at length {self._selection.length.tokens}, "
            f"{self._selection.cache_bytes} cache bytes"
        )

    # -- before a server boots ---------------------------------------------------------------------------------------

    def prepare(self, gates: Sequence[str]) -> Sequence[str]:
        """Claim the run directory, and check lock, model and disk space. ``gates`` are those that this run decides.

        Raises:
            KvqualError: one line; nothing has booted.
        """
        from pytest_kvqual import models
        from pytest_kvqual.study.freeze import verify_lock

        self._activity.begun_ns = monotonic_ns()
        self._gates = tuple(gates)
        lock = verify_lock(self.study)
        self._lock_sha256 = lock.sha256
        folder = models.model_folder(self.study.model)
        models.verify_model(folder, self.study.model.files)
        self._model = folder
        for place in dict.fromkeys((self.run_dir, self._controls_dir)):
            self._claim(place)
        return ()

    def _claim(self, place: Path) -> None:
        from filelock import FileLock, Timeout

        try:
            place.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(place).free
            lock = FileLock(place / ".lock", timeout=0)
            lock.acquire()
        except Timeout:
            raise EvidenceError(
                f"{place}: found another run that uses it, expected none", advice="wait for it, or give another --run-dir"
            ) from None
        except OSError as error:
            raise EvidenceError(
                f"cannot write {place}: {error.strerror or error}", advice="give a --run-dir that you may write to"
            ) from error
        self._stack.callback(lock.release)
        if free < FREE_BYTES:
            raise EvidenceError(
                f"{place}: found {free} bytes free, expected at least {FREE_BYTES} for evidence",
                advice="free space there, or give another --run-dir",
            )

    def _scope(self, arm: Arm, label: str | None = None) -> Scope:
        from pytest_kvqual._canonical import digest
        from pytest_kvqual.evidence.records import Scope
        from pytest_kvqual.server.install import engine_identity

        name = label or arm.name
        if name not in self._scopes:
            self._scopes[name] = Scope(
                lock=self._lock_sha256,
                arm=name,
                length=self._selection.length.tokens,
                cache_bytes=self._selection.cache_bytes,
                engine=digest(engine_identity(self.study, _python(arm))),
            )
        return self._scopes[name]

    # -- gates -------------------------------------------------------------------------------------------------------

    def decide(self, gate: str) -> Decision:
        """Capture what ``gate`` needs, judge it, write its receipt. Refusals and failed captures are verdicts."""
        try:
            self._refuse(gate)
            verdict = self._judge(gate)
        except KvqualError as error:
            verdict = Verdict(gate=gate, outcome=_outcome(error), figure=error.line())
        return self._record(verdict)

    def _judge(self, gate: str) -> Verdict:
        judges: Mapping[str, Callable[[], Verdict]] = {
            "identity": self._identity,
            "routing": self._routing,
            "placement": self._placement,
            "parity": self._parity,
            "nll": self._nll,
        }
        if gate not in judges:
            raise RefusedError(f"gate {gate}: found no judge for it, expected one: it is planned")
        self._controls()
        self._capture(gate)
        return judges[gate]()

    def _identity(self) -> Verdict:
        from pytest_kvqual.judge.gates import identity
        from pytest_kvqual.study.panels import selected_scales

        poison = self._own().document(IDENTITY_POISON)["poison"]
        return identity.judge(
            self.study,
            self._selection.arm.name,
            cache_bytes=self._selection.cache_bytes,
            scales=selected_scales(self._selection),
            candidate=self._own().document(IDENTITY),
            null=self._null().document(IDENTITY),
            poison=poison if isinstance(poison, list) else [],
            faults=self._faults("identity"),
        )

    def _routing(self) -> Verdict:
        from pytest_kvqual.judge.gates import routing

        return routing.judge(
            self.study,
            candidate=self._own().document(ORACLE),
            null=self._null().document(ORACLE),
            faults=self._faults("routing"),
        )

    def _placement(self) -> Verdict:
        from pytest_kvqual.judge.gates import placement

        return placement.judge(
            self.study,
            candidate=self._own().document(ORACLE),
            null=self._null().document(ORACLE),
            faults=self._faults("placement"),
        )

    def _parity(self) -> Verdict:
        from pytest_kvqual.judge.gates import parity

        fault = self._reading_fault()
        return parity.judge(
            self.study,
            self._panel("parity"),
            http=self._own().records(PARITY),
            reference=self._own().records(REFERENCE),
            null=(self._null().records(PARITY), self._null().records(PARITY_REVERSE)),
            poison={fault: self._own().records(_poisoned(PARITY, fault))},
            faults=(fault,),
        )

    def _nll(self) -> Verdict:
        from pytest_kvqual.judge.gates import nll

        fault = self._reading_fault()
        return nll.judge(
            self.study,
            self._panel("nll"),
            candidate=self._own().records(NLL),
            controls={arm.name: self._readers[arm.name].records(NLL) for arm in self._control_arms()},
            null=(self._null().records(NLL), self._null().records(NLL_AGAIN)),
            poison={fault: self._own().records(_poisoned(NLL, fault))},
            arm=self._selection.arm.name,
            faults=(fault,),
        )

    # -- which arms, which faults, which files -----------------------------------------------------------------------

    def _null_arm(self) -> Arm:
        return self.study.controls()[0]

    def _control_arms(self) -> tuple[Arm, ...]:
        """The controls to capture: the null's always, the others where losses are compared."""
        others = tuple(arm for arm in self.study.controls() if arm.name != self._selection.arm.name)
        return (self._null_arm(), *(arm for arm in others if arm != self._null_arm() and "nll" in self._gates))

    def _faults(self, gate: str) -> tuple[str, ...]:
        """The names of the faults that ``gate`` claims and that this arm can show."""
        return tuple(fault.name for fault in self._live_faults() if fault.claimed_by == gate)

    def _live_faults(self) -> tuple[Fault, ...]:
        from pytest_kvqual.faults import FAULTS

        return tuple(
            # Without scales there is none to drop.
            fault
            for fault in FAULTS.values()
            if fault.name != "v-scale-dropped-on-read" or self._selection.arm.scales is not None
        )

    def _reading_fault(self) -> str:
        """A fault of the read path, so that answers and losses must change."""
        return "v-scale-dropped-on-read" if self._selection.arm.scales is not None else "other-layer-cache"

    def _needed(self, gates: Sequence[str]) -> tuple[str, ...]:
        """The files that the arm's attempt must hold for these gates."""
        fault = self._reading_fault()
        names = {
            "identity": (IDENTITY, IDENTITY_POISON),
            "routing": (ORACLE,),
            "placement": (ORACLE,),
            "parity": (PARITY, _poisoned(PARITY, fault), REFERENCE),
            "nll": (NLL, _poisoned(NLL, fault)),
        }
        return tuple(dict.fromkeys(name for gate in gates for name in names.get(gate, ())))

    def _control_needed(self, arm: Arm) -> tuple[str, ...]:
        names = {
            "identity": (IDENTITY,),
            "routing": (ORACLE,),
            "placement": (ORACLE,),
            "parity": (PARITY, PARITY_REVERSE),
            "nll": (NLL, NLL_AGAIN),
        }
        if arm != self._null_arm():
            return (IDENTITY, NLL)
        return tuple(dict.fromkeys((IDENTITY, *(name for gate in self._gates for name in names.get(gate, ())))))

    def _own(self) -> Reader:
        return self._readers[self.arm]

    def _null(self) -> Reader:
        # A control under qualification has its null in an attempt of its own, like any other arm.
        return self._readers[_control_key(self._null_arm())]

    def _panel(self, task: str) -> Panel:
        from pytest_kvqual.study.panels import load_panel

        length = self._selection.length
        own = task in length.panels
        return load_panel(
            length.panels[task] if own else self.study.parity.panel,
            task=task,
            length=length.tokens if own else None,
            vocabulary=self.study.model.vocabulary,
            tokenizer=self.study.model.files.get("tokenizer.json"),
        )
