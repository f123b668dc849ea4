"""Faults planted one after the other in one served arm: which gate objects first, and is the arm healthy afterwards.

Every reading is one that the gates' own captures take, and every objection one that their judges or oracles make. A
fault claimed by identity is looked for in weights and scales; one claimed by dispatch in these and in the kernels, read
twice; one claimed by an oracle in the pass that its ``live_pass`` names; one claimed by determinism in a pass and in
answers in several orders.

Before a fault counts as caught it is taken back, and the server must answer a prompt as it did before the first fault.
A server that does not is ended and another one booted for the next fault.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_kvqual._clock import monotonic_ns
from pytest_kvqual.errors import CaptureError, KvqualError, ServerError
from pytest_kvqual.faults.catalogue import GATES, LIVE_PASSES, Fault, live
from pytest_kvqual.faults.seeded import ROTATION_ONLY
from pytest_kvqual.progress import Boot, Progress, Step, silent
from pytest_kvqual.server import rpc

if TYPE_CHECKING:
    from pytest_kvqual.judge.verdict import Verdict
    from pytest_kvqual.server.checkout import Install
    from pytest_kvqual.server.process import Server
    from pytest_kvqual.study.model import Selection
    from pytest_kvqual.study.panels import Panel

ORDER_PROMPTS: Final = 8
"""How many prompts are sent in each order: one that differs shows the fault."""

TIMEOUT_S: Final = 180.0
"""Bound of one request and of one worker call, in seconds: a fault may hang the engine."""

_SECTIONS: Mapping[str, tuple[str, ...]] = {
    # Each oracle gate objects to a wrong row map, so the first of them does.
    "stale-maps": ("row_map", "stale-maps"),
    "routing": ("routing",),
    "shifted-outputs": ("shifted-outputs",),
    "placement": ("placement",),
    "replay": ("replay",),
}
_EXCEPTION = re.compile(r"((?:[A-Za-z_][\w.]*)?(?:Error|Exception): \S.*)")
_BOOT, _AGAIN = "boot", "again"
_ALTERABLE = ("parameters", "scales")


def shown(selection: Selection) -> tuple[Fault, ...]:
    """The live faults that an arm can show under the study's policy and waivers, benign ones included."""
    return tuple(fault for fault in live(scales=True, ours=True) if hidden(fault, selection) is None)


def hidden(fault: Fault, selection: Selection) -> str | None:
    """Why an arm cannot show a live fault, in a few words; None where it can."""
    study, arm = selection.study, selection.arm
    if fault not in live(scales=arm.scales is not None, ours=arm.attention_backend.startswith("KVQUAL_")):
        return f"it needs {fault.needs}"
    if study.determinism == "rotation-diagnostic" and fault.name in ROTATION_ONLY:
        return "it shows in a rotated order alone, which may differ"
    if fault.finding in study.waived(arm.name, fault.claimed_by):
        return f"its one finding, {fault.finding}, is waived for the arm"
    return None


def objections(record: Mapping[str, Any], waived: Mapping[str, Collection[str]]) -> Iterator[tuple[str, str]]:
    """(gate, first finding) of each gate that has findings in one rank's record, in the gates' order.

    Args:
        record: The record of an oracle window.
        waived: Of each gate the kinds of finding that do not count.
    """
    for gate, sections in _SECTIONS.items():
        for section in (record[name] for name in sections):
            known = {kind: count for kind, count in section["kinds"].items() if kind in waived.get(gate, ())}
            left = section["findings_total"] - sum(known.values())
            if left:
                # A kept line does not say its kind, so beside waived findings it may be one of them.
                others = ", ".join(f"{count} {kind}" for kind, count in section["kinds"].items() if kind not in known)
                yield gate, others if sum(known.values()) else str(section["findings"][0])
                break
    # An oracle that is blind to what it was shown on purpose cannot be silent.
    for gate, section in (("stale-maps", "row_map"), ("shifted-outputs", "shifted-outputs")):
        if record[section]["self_test"] != "caught":
            yield gate, f"{section}: the case that it was shown on purpose was missed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Planted:
    """One fault, or none, in the served arm.

    Attributes:
        fault: What was planted; None for a healthy engine.
        findings: Each gate that objected, with its first objection, in the order of the gates.
        seconds: From planting until the arm was found healthy again.
        trouble: What went wrong beside the gates: the engine failed, or is not as it was. Nothing is caught then.
    """

    fault: Fault | None
    findings: Mapping[str, str]
    seconds: float
    trouble: str | None = None

    @property
    def first(self) -> str | None:
        """The first gate that objected."""
        return next((gate for gate in GATES if gate in self.findings), None)

    @property
    def expected(self) -> str | None:
        """The gate that must be the first to object; None where all must be silent."""
        return None if self.fault is None or self.fault.benign else self.fault.claimed_by

    @property
    def right(self) -> bool:
        """Whether the expected gate was the first to object, and nothing else went wrong."""
        return self.trouble is None and self.first == self.expected

    def __str__(self) -> str:
        name = "healthy" if self.fault is None else self.fault.name
        found = "; ".join(f"{gate}: {line}" for gate, line in self.findings.items()) or "no gate objected"
        trouble = "" if self.trouble is None else f"; {self.trouble}"
        return f"{name}: expected {self.expected or 'no gate'} first, found {found}{trouble}"


class Served:
    """One arm's server, booted when it is first needed and again after a fault that it did not survive.

    A context manager; leaving it ends the server.

    Args:
        selection: The arm at one length.
        model: The verified model folder.
        folder: Receives the servers' logs, ``server-N.log``.
        progress: Takes what is being done.
        install: Where the arm's checkouts come from, which are looked at before each boot.
    """

    def __init__(
        self,
        selection: Selection,
        *,
        model: Path,
        folder: Path,
        progress: Progress = silent,
        install: Install | None = None,
    ) -> None:
        self.selection = selection
        self.boots = 0
        self._model = model
        self._folder = folder
        self._progress = progress
        self._install = install
        self._server: Server | None = None
        self._identity: list[dict[str, object]] = []
        self._dispatch: list[object] = []
        self._answer: tuple[int, ...] = ()
        self._log_start = 0

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # -- what is asked ------------------------------------------------------------------------------------------------

    def healthy(self, passes: Collection[str] = tuple(LIVE_PASSES)) -> Planted:
        """Every reading that a fault may be given, without one, and these passes: all gates must be silent.

        Raises:
            KvqualError: The healthy arm's server did not boot, or failed.
        """
        begun = monotonic_ns()
        findings: dict[str, str] = {}
        for gate, line in self._healthy(passes):
            findings.setdefault(gate, line)
        return Planted(
            fault=None,
            findings={gate: findings[gate] for gate in GATES if gate in findings},
            seconds=(monotonic_ns() - begun) / 1e9,
            trouble=self._unlike_before(),
        )

    def plant(self, fault: Fault) -> Planted:
        """Plants a fault, reads what shows it, takes it back, and checks that the arm is as it was.

        Raises:
            KvqualError: The server of a healthy arm did not boot, or could not be read before the fault was planted.
        """
        # Readings of the healthy arm that this fault is compared with must be there before it is.
        if fault.claimed_by in ("identity", "dispatch"):
            self._read_identity()
        if fault.claimed_by == "dispatch":
            self._read_dispatch()
        begun = monotonic_ns()
        self._log_start = self._running().log.stat().st_size
        findings: dict[str, str] = {}
        trouble = None
        try:
            for gate, line in self._under(fault):
                findings.setdefault(gate, line)
        except KvqualError as error:
            trouble = f"the engine failed under it: {self._death(error)}"
        trouble = self._unlike_before() if trouble is None else trouble
        if trouble is not None:
            self.stop()
        return Planted(
            fault=fault,
            findings={gate: findings[gate] for gate in GATES if gate in findings},
            seconds=(monotonic_ns() - begun) / 1e9,
            trouble=trouble,
        )

    def stop(self) -> None:
        """End the server, if there is one. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    # -- the server ---------------------------------------------------------------------------------------------------

    def _running(self) -> Server:
        if self._server is None:
            self._server = self._boot()
            self.boots += 1
            self._identity, self._dispatch, self._log_start = [], [], 0
            self._answer = self._answered()
        return self._server

    def _boot(self) -> Server:
        from pytest_kvqual.attempt import python_of
        from pytest_kvqual.server.checkout import verify
        from pytest_kvqual.server.command import serve_command, worker_config
        from pytest_kvqual.server.process import Server, Timeouts, free_port
        from pytest_kvqual.study.panels import selected_scales

        selection, port = self.selection, free_port()
        if self._install is not None:
            verify(self._install, selection.arm.name)
        command = serve_command(
            selection,
            model=self._model,
            port=port,
            worker_config=worker_config(selection, model=self._model, v_scales=selected_scales(selection)),
            python=python_of(selection.arm),
            inherited=os.environ,
        )
        return Server.start(
            command,
            port=port,
            log=self._folder / f"server-{self.boots}.log",
            timeouts=Timeouts(boot_s=selection.study.engine.boot_timeout_s),
            progress=lambda stage, seconds: self._progress(Boot(arm=selection.arm.name, stage=stage, seconds=seconds)),
        )

    def _death(self, error: KvqualError) -> str:
        """What ended the server where it is gone, else the error at hand; with the first exception that it logged."""
        server = self._server
        if server is None:
            return error.line()
        line = error.line()
        try:
            server.check()
        except ServerError as gone:
            line = gone.line()
        with server.log.open(encoding="utf-8", errors="replace") as log:
            log.seek(self._log_start)
            first = next((found[1] for found in map(_EXCEPTION.search, log) if found is not None), None)
        return line if first is None else f"{line}; it logged {first}"

    def _unlike_before(self) -> str | None:
        """Takes back what is planted; how the arm then differs from what it was before the first fault, in one line."""
        try:
            self._call("kvqual_unplant")
            taps = self._call("kvqual_taps")
            if any(not isinstance(rank, dict) or any(rank.values()) for rank in taps):
                return f"found taps, faults or held blocks after it, expected none: {taps}"
            answer = self._answered()
        except KvqualError as error:
            return f"the server no longer answers: {self._death(error)}"
        if answer != self._answer:
            return f"found the answer {answer} after it was taken back, expected {self._answer} as before"
        return None

    def _answered(self) -> tuple[int, ...]:
        """The tokens of one greedy answer, to a prompt of less than a block."""
        from pytest_kvqual.capture import http
        from pytest_kvqual.capture.quality import record, request, send_all
        from pytest_kvqual.tasks.completion import parse_answer

        item = self._brief.items[1]
        responses: list[http.Response] = []
        send_all(
            self._running(),
            [request(self.selection.study.model.name, "oracle", 0, item, item.max_tokens, ())],
            schedule="serial",
            wave_size=1,
            timeout_s=TIMEOUT_S,
            on_response=responses.append,
        )
        if len(responses) != 1 or responses[0].error is not None:
            raise CaptureError(f"a short request failed: {responses[0].error if responses else 'no answer'}")
        return parse_answer(record(responses[0], "forward"), origin="short request", logprobs=False).token_ids

    def _call(self, method: str, *args: object) -> list[object]:
        return rpc.call(self._running().base_url, method, *args, timeout_s=TIMEOUT_S)

    # -- panels -------------------------------------------------------------------------------------------------------

    @cached_property
    def _whole(self) -> Panel:
        from pytest_kvqual.attempt import load_task_panel

        return load_task_panel(self.selection, "oracle")

    @cached_property
    def _brief(self) -> Panel:
        limit = self.selection.study.oracle.poison_prompt_tokens
        return replace(self._whole, items=tuple(item for item in self._whole.items if len(item.prompt) <= limit))

    @cached_property
    def _orders(self) -> Panel:
        from pytest_kvqual.attempt import load_task_panel

        panel = load_task_panel(self.selection, "parity")
        return replace(panel, items=panel.items[:ORDER_PROMPTS])

    # -- readings -----------------------------------------------------------------------------------------------------

    def _under(self, fault: Fault) -> Iterator[tuple[str, str]]:
        gate = fault.claimed_by
        if gate in _SECTIONS:
            yield from self._pass(fault.live_pass, fault=fault.name, fills=gate == "replay")
            return
        if gate == "determinism":
            # The oracles come before it and must not see what it claims.
            yield from self._pass("probe", fault=fault.name, fills=True)
        with self._planted(fault):
            if gate == "determinism":
                yield from self._order_differences()
                return
            yield from self._identity_now(fault.name)
            if gate == "dispatch":
                yield from self._dispatch_under(fault.name)

    def _healthy(self, passes: Collection[str]) -> Iterator[tuple[str, str]]:
        self._running()
        self._read_identity()
        yield from self._identity_now(None)
        self._read_dispatch()
        yield from self._dispatch_again()
        for name in passes:
            yield from self._pass(name, fills=name == "probe")
        yield from self._order_differences()

    @contextmanager
    def _planted(self, fault: Fault) -> Iterator[None]:
        self._call("kvqual_plant", fault.name)
        yield
        # Where the block raised, `_unlike_before` takes it back.
        self._call("kvqual_unplant")

    def _pass(self, name: str, *, fault: str | None = None, fills: bool = False) -> Iterator[tuple[str, str]]:
        from pytest_kvqual.capture.oracle import capture_oracle

        study = self.selection.study
        found = capture_oracle(
            self._running(),
            self._whole if name == "whole" else self._brief,
            fault=fault,
            probe=name != "model",
            fills=fills,
            free_blocks=study.oracle.free_blocks if name == "pressure" else None,
            model=study.model.name,
            schedule=study.schedule,
            wave_size=self.selection.length.wave_size,
            timeout_s=TIMEOUT_S,
        )
        waived = {gate: study.waived(self.selection.arm.name, gate) for gate in _SECTIONS}
        records: Any = found["records"]
        for record in records:
            for gate, line in objections(record, waived):
                yield gate, f"pass {name}, rank {record['rank']}: {line}"

    def _read_identity(self) -> None:
        if not self._identity:
            self._progress(Step(arm=self.selection.arm.name, what="identity", begun_ns=monotonic_ns()))
            self._identity = [_mapping(rank) for rank in self._call("kvqual_identity")]

    def _identity_now(self, fault: str | None) -> Iterator[tuple[str, str]]:
        """What the judge of identity says of weights and scales as they are now, the rest as it was at the start."""
        from pytest_kvqual.judge.gates import identity
        from pytest_kvqual.study.panels import selected_scales

        now = [_mapping(rank) for rank in self._call("kvqual_identity", {"parts": list(_ALTERABLE)})]
        name = self.selection.arm.name
        document: dict[str, object] = {
            "schema": identity.SCHEMA,
            "arm": name,
            "ranks": [{**before, **after} for before, after in zip(self._identity, now, strict=True)],
            "sockets": [[it.address, it.port] for it in self._running().sockets()],
        }
        verdict = identity.judge(
            self.selection.study,
            name,
            cache_bytes=self.selection.cache_bytes,
            scales=selected_scales(self.selection),
            candidate=document,
            null=None,
            poison=[] if fault is None else [{"fault": fault, "identity": document}],
            faults=() if fault is None else (fault,),
        )
        yield from _said(verdict, fault)

    def _read_dispatch(self) -> None:
        if not self._dispatch:
            self._dispatch = self._kernels()

    def _kernels(self) -> list[object]:
        from pytest_kvqual.capture.dispatch import read_dispatch

        name = self.selection.study.model.name
        return read_dispatch(self._running(), self._brief.items[1], model=name, timeout_s=TIMEOUT_S)

    def _dispatch_again(self) -> Iterator[tuple[str, str]]:
        yield from self._judge_dispatch([{"after": _AGAIN, "ranks": self._kernels()}], None, [])

    def _dispatch_under(self, fault: str) -> Iterator[tuple[str, str]]:
        """The kernels read early and late, since a layer may fall back after some calls."""
        for _ in range(2):
            found = list(self._judge_dispatch([], fault, [{"fault": fault, "ranks": self._kernels()}]))
            if found:
                yield from found
                return

    def _judge_dispatch(
        self, readings: list[dict[str, object]], fault: str | None, poison: list[dict[str, object]]
    ) -> Iterator[tuple[str, str]]:
        from pytest_kvqual.judge.gates import dispatch

        arm = self.selection.arm.name
        verdict = dispatch.judge(
            self.selection.study,
            arm=arm,
            null_arm=arm,
            candidate={
                "schema": dispatch.SCHEMA,
                "arm": arm,
                "readings": [{"after": _BOOT, "ranks": self._dispatch}, *readings],
                "poison": poison,
            },
            null=None,
            faults=() if fault is None else (fault,),
            after=(_BOOT, *(str(reading["after"]) for reading in readings)),
        )
        yield from _said(verdict, fault)

    def _order_differences(self) -> Iterator[tuple[str, str]]:
        from pytest_kvqual.capture.orders import capture_orders
        from pytest_kvqual.tasks import orders
        from pytest_kvqual.tasks.completion import parse_answer

        study = self.selection.study
        kept = _Kept()
        capture_orders(
            self._running(),
            self._orders,
            kept,
            runs=orders.REQUIRED,
            rotation=study.oracle.rotation,
            model=study.model.name,
            wave_size=self.selection.length.wave_size,
            timeout_s=TIMEOUT_S,
        )
        answers: dict[str, dict[str, tuple[int, ...]]] = {}
        for record in kept.records:
            plain = {key: value for key, value in record.items() if key != "run"}
            answer = parse_answer(plain, origin="orders", logprobs=False)
            answers.setdefault(str(record["run"]), {})[answer.id] = answer.token_ids
        decides = (orders.AGAIN,) if study.determinism == "rotation-diagnostic" else (orders.ROTATED, orders.AGAIN)
        pairs: Any = orders.comparison(study.determinism, answers)["pairs"]
        for pair in pairs:
            if pair["right"] in decides and pair["differ"]:
                yield "determinism", f"{pair['differ']} of {pair['of']} answers of run {pair['right']} differ"


class _Kept:
    """A writer that keeps its records in memory: nothing here is evidence."""

    def __init__(self) -> None:
        self.records: list[dict[str, object]] = []

    def append(self, record: dict[str, object]) -> None:
        """Keep one record."""
        self.records.append(record)


def _said(verdict: Verdict, fault: str | None) -> Iterator[tuple[str, str]]:
    """What a judge objected to: under a fault what its poison was caught by, else the rules that are not kept."""
    if fault is not None:
        yield from ((verdict.gate, poison.figure) for poison in verdict.poison if poison.caught)
        return
    # Null and poison are not captured here, and a judge says so; what it finds in the evidence begins with its rule.
    yield from ((verdict.gate, line) for line in verdict.findings if line.startswith("rule "))


def _mapping(rank: object) -> dict[str, object]:
    if not isinstance(rank, dict):
        raise CaptureError(f"found {rank!r:.100} from a rank, expected a mapping")
    return rank
