"""The timing gates of a campaign: what they need, in which order, and the one attempt at each trial.

Like :mod:`pytest_kvqual.campaign` it only wires. Each gate is entered with a permit, granted anew from the receipts
that stand. A trial is one arm of one block of the frozen plan: it is claimed by a marker that only one process can
make, so that whatever becomes of it, there is no second one in a run directory under the same lock.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_kvqual._canonical import pretty_bytes, sha256_bytes
from pytest_kvqual._clock import monotonic_ns, wall_utc
from pytest_kvqual.attempt import DISPATCH, IDENTITY, REFERENCE, load_task_panel
from pytest_kvqual.errors import EvidenceError, KvqualError, RefusedError, StudyError
from pytest_kvqual.judge.verdict import Outcome, Verdict
from pytest_kvqual.trial import TRIAL, TRIAL_IDENTITY, WARM_UP, Loads, cell_file, run_trial

if TYPE_CHECKING:
    from pytest_kvqual.attempt import Attempt
    from pytest_kvqual.campaign import Campaign
    from pytest_kvqual.evidence.reader import Reader
    from pytest_kvqual.evidence.records import Scope
    from pytest_kvqual.judge.gates.superiority import Trial
    from pytest_kvqual.judge.permit import TimingPermit
    from pytest_kvqual.judge.sequence import Standing
    from pytest_kvqual.study.model import Cell, TimingRules
    from pytest_kvqual.study.panels import Panel
    from pytest_kvqual.study.plan import Plan

FIDELITY_LIMIT_S: Final = 180.0
"""Bound of all loads of the fidelity gate together, in seconds."""

_FIRST_CASE: Final = "fidelity-open.jsonl"

PILOT: Final = "pilot-"
"""What the prefix of a pilot's evidence begins with: no gate reads it."""


def _panel(campaign: Campaign, rules: TimingRules) -> Panel:
    from pytest_kvqual.study.panels import load_panel

    model = campaign.study.model
    return load_panel(
        rules.panel,
        task="timing",
        length=campaign.selection.length.tokens,
        vocabulary=model.vocabulary,
        tokenizer=model.files.get("tokenizer.json"),
    )


class Timing:
    """The timing gates of one campaign, which is prepared.

    Args:
        campaign: The campaign.
        block: The block of the trial; None where this run has none.
    """

    def __init__(self, campaign: Campaign, *, block: int | None) -> None:
        self._campaign = campaign
        self._block = block
        self._evidence: dict[str, dict[str, str]] = {}

    # -- before anything starts --------------------------------------------------------------------------------------

    def rules(self) -> TimingRules:
        """The timing rules of the campaign's length.

        Raises:
            StudyError: The study has none at this length.
        """
        study, tokens = self._campaign.study, self._campaign.selection.length.tokens
        if tokens not in study.timing:
            raise StudyError(
                f"study {study.name}: found no timing plan at length {tokens}, expected one of "
                f"{', '.join(map(str, study.timing)) or 'none'}",
                advice=f"choose a --length that is timed, or declare [timing.{tokens}]",
            )
        return study.timing[tokens]

    def plan(self) -> Plan:
        """The frozen plan, which must be what the study and its traces give.

        Raises:
            StudyError: It is missing, or another one.
        """
        from pytest_kvqual.study.plan import check

        rules, tokens = self.rules(), self._campaign.selection.length.tokens
        return check(self._plan_bytes(), self._campaign.study, tokens, self._traces(), origin=str(rules.plan))

    def _plan_bytes(self) -> bytes:
        from pytest_kvqual.study.timing_files import read_file

        return read_file(self.rules().plan, "run `kvqual trace`, `kvqual plan` and `kvqual freeze`")

    def _traces(self) -> dict[str, bytes]:
        from pytest_kvqual.study.timing_files import read_traces

        return read_traces(self._campaign.study, self._campaign.selection.length.tokens)

    def prepare(self, gates: Sequence[str]) -> None:
        """Check the plan, and where this run has a trial, that it is one of the plan's and was never begun.

        Args:
            gates: What this run decides.

        Raises:
            StudyError: No plan, another plan, a block or arm that is not in it, or superiority of an arm that no
                comparison has as its candidate.
            RefusedError: The trial was begun before.
        """
        from pytest_kvqual.study.plan import trials

        block, arm = self._block, self._campaign.selection.arm.name
        if block is None and not self._campaign.study.timing:
            # Fidelity alone is required: there is nothing to plan yet.
            return
        plan = self.plan()
        compared = list(dict.fromkeys(comparison.candidate for comparison in self.rules().comparisons))
        if "superiority" in gates and arm not in compared:
            raise StudyError(
                f"--arm: found {arm}, expected for superiority a candidate of the plan's comparisons: "
                f"{', '.join(compared)}",
                advice="a control is timed with --block",
            )
        if block is None:
            return
        of_arm = [number for name, number in trials(plan) if name == arm]
        if not of_arm:
            raise StudyError(f"--arm: found {arm}, expected an arm of the plan: {', '.join(plan.arms)}")
        if block not in of_arm:
            raise StudyError(
                f"--block: found {block}, expected a block of the plan in which {arm} is timed: "
                f"{', '.join(map(str, of_arm))}"
            )
        marker = self._marker(self._campaign.own_scope(), block)
        if marker.exists():
            raise RefusedError(
                f"block {block} of {arm}: found {marker}, the mark of an earlier attempt at it, expected none: a block "
                "is timed once",
                advice="what it recorded is kept; a new campaign needs a new --run-dir",
            )

    def _marker(self, scope: Scope, block: int) -> Path:
        folder = f"{self._campaign.prefix}{scope.arm}-{scope.length}-{scope.cache_bytes}"
        return self._campaign.run_dir / "claims" / folder / f"{scope.lock[:16]}-block-{block}.json"

    def _claim(self, block: int, attempt: str) -> None:
        """Make the mark of the one attempt at a block.

        Raises:
            RefusedError: It is there already.
            EvidenceError: It cannot be written.
        """
        scope = self._campaign.own_scope()
        marker = self._marker(scope, block)
        document = {"schema": 1, "block": block, "attempt": attempt, "scope": scope.to_dict(), "claimed": wall_utc()}
        try:
            marker.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            raise RefusedError(
                f"block {block} of {scope.arm}: found {marker}, the mark of another attempt at it, expected none"
            ) from None
        except OSError as error:
            raise EvidenceError(f"cannot write {marker}: {error.strerror or error}") from error
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(pretty_bytes(document))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            # Nothing was timed: the block is as it was.
            with suppress(OSError):
                marker.unlink()
            raise EvidenceError(f"cannot write {marker}: {error.strerror or error}") from error

    # -- the gates ---------------------------------------------------------------------------------------------------

    def judge(self, gate: str) -> Verdict:
        """Capture what a timing gate needs, and judge it.

        Raises:
            RefusedError: No permit: a receipt above it is missing, failed or stale.
            KvqualError: The capture failed, or the evidence cannot be read.
        """
        permit = self._campaign.permit(gate)
        if gate == "fidelity":
            return self._fidelity(permit)
        return self._trial(permit) if gate == "trial" else self._superiority()

    def evidence(self, gate: str) -> Mapping[str, str]:
        """The digests of the files that a timing gate's verdict rests on."""
        return self._evidence.get(gate, {})

    def _note(self, gate: str, reader: Reader, names: list[str]) -> None:
        kept = self._evidence.setdefault(gate, {})
        kept |= {f"{reader.name}/{name}": reader.digests[name] for name in names if reader.has(name)}

    def _fidelity(self, permit: TimingPermit) -> Verdict:
        from pytest_kvqual.capture.fidelity import capture_fidelity, cases
        from pytest_kvqual.evidence.reader import Reader
        from pytest_kvqual.faults.recorder import RECORDER_FAULTS
        from pytest_kvqual.judge.gates import fidelity

        campaign, rules = self._campaign, self._campaign.study.fidelity
        if rules is None:
            raise StudyError("found no [fidelity] rules, expected them: the gate is required")
        scope = campaign.own_scope()
        reader = Reader.latest(campaign.run_dir, scope, prefix=campaign.prefix, names=(_FIRST_CASE,))
        # What was recorded under other receipts is kept, and is none of this judgment.
        if reader is None or _judgment_in(reader) != permit.judgment:
            with campaign.begin(campaign.selection, scope) as attempt:
                planned = sum(len(case.offered) for case in cases(rules))
                # One word before the first load and one after the last: between two of them the next one is being made.
                with attempt.timed("fidelity", begun_ns=monotonic_ns(), requests=planned, done=0, total=planned):
                    files = capture_fidelity(rules, permit=permit, folder=attempt.path, timeout_s=FIDELITY_LIMIT_S)
                for path in files:
                    attempt.seal(path.name)
            reader = Reader.open(attempt.path)
        names = [name for name in reader.digests if name.startswith("fidelity-")]
        self._note("fidelity", reader, names)
        stems = {name: name.removeprefix("fidelity-") for name in names}
        return fidelity.judge(
            campaign.study,
            recordings={
                stem.removesuffix(".jsonl"): reader.data(name)
                for name, stem in stems.items()
                if stem.endswith(".jsonl")
            },
            truths={
                stem.removesuffix("-truth.json"): reader.document(name)
                for name, stem in stems.items()
                if stem.endswith("-truth.json")
            },
            faults=tuple(RECORDER_FAULTS),
        )

    def _trial(self, permit: TimingPermit) -> Verdict:
        from pytest_kvqual.evidence.reader import Reader

        campaign, block = self._campaign, self._block
        if block is None:
            raise RefusedError("trial: found no --block, expected the number of a block of the plan")
        scope = campaign.own_scope()
        attempt = campaign.begin(campaign.selection, scope)
        with attempt:
            self._claim(block, attempt.name)
            self._run(attempt, permit, self.rules().cells, block)
        return self._judged(Reader.open(attempt.path), scope, block, note="trial")

    def _run(self, attempt: Attempt, permit: TimingPermit, cells: tuple[Cell, ...], block: int | None) -> None:
        from pytest_kvqual.study.trace import parse_trace

        campaign, rules = self._campaign, self.rules()
        panel, traces = _panel(campaign, rules), self._traces()
        loads = Loads(
            cells=[
                (
                    cell,
                    parse_trace(traces[cell.name], origin=str(cell.trace)),
                    sha256_bytes(traces[cell.name]),
                )
                for cell in cells
            ],
            items={item.id: item for item in panel.items},
            warm_up=[item for item in panel.items if item.grade == "warm-up"][: rules.warm_up],
            settle_s=rules.settle_s,
        )
        qualified = self._qualified(campaign.standing("trial" if block is not None else "nll", campaign.own_scope()))
        about = {
            "arm": campaign.selection.arm.name,
            "length": campaign.selection.length.tokens,
            "block": block,
            "plan_sha256": sha256_bytes(self._plan_bytes()),
            "qualified": qualified.name,
        }
        run_trial(
            attempt,
            loads,
            permit=permit,
            about=about,
            model=campaign.study.model.name,
            timeout_s=campaign.study.engine.request_timeout_s,
        )

    def _qualified(self, standing: Standing) -> Reader:
        """The attempt that the standing receipts of an arm rest on."""
        from pytest_kvqual.evidence.reader import Reader

        receipt = standing.receipts.get("parity")
        names = [] if receipt is None else [name for name in receipt.evidence if name.endswith(f"/{REFERENCE}")]
        if len(names) != 1:
            raise RefusedError(f"found {len(names)} qualified attempts, expected the one of the receipt of parity")
        return Reader.open(self._campaign.run_dir / "evidence" / names[0].rpartition("/")[0])

    def _judged(self, reader: Reader, scope: Scope, block: int, *, note: str) -> Verdict:
        """The verdict of one trial's records."""
        from pytest_kvqual.faults.trial import faults_of
        from pytest_kvqual.judge.gates import trial
        from pytest_kvqual.judge.permit import judgment_of

        campaign, rules, traces = self._campaign, self.rules(), self._traces()
        standing = campaign.standing("trial", scope)
        qualified = self._qualified(standing)
        names = [TRIAL, TRIAL_IDENTITY, WARM_UP, *(cell_file(cell.name) for cell in rules.cells)]
        self._note(note, reader, names)
        self._note(note, qualified, [IDENTITY, DISPATCH, REFERENCE])
        document, readings = qualified.document(IDENTITY), qualified.document(DISPATCH).get("readings")
        ranks, first = document.get("ranks"), readings[0] if isinstance(readings, list) and readings else {}
        kernels = first.get("ranks") if isinstance(first, dict) else None
        expected = trial.Expected(
            arm=scope.arm,
            length=scope.length,
            block=block,
            plan_sha256=sha256_bytes(self._plan_bytes()),
            judgment=judgment_of(campaign.study, "trial", scope, standing.requires()),
            traces=traces,
            trace_sha256={name: sha256_bytes(data) for name, data in traces.items()},
            kernels=kernels if isinstance(kernels, list) else [],
            identity=ranks if isinstance(ranks, list) else [],
            reference=qualified.records(REFERENCE),
        )
        recordings = {
            cell.name: reader.data(cell_file(cell.name)) for cell in rules.cells if reader.has(cell_file(cell.name))
        }
        evidence = trial.Evidence(
            trial=reader.document(TRIAL),
            identity=reader.document(TRIAL_IDENTITY),
            recordings={**recordings, trial.WARM_UP: reader.data(WARM_UP)},
        )
        return trial.judge(
            rules,
            _panel(campaign, rules),
            load_task_panel(campaign.selection, "parity"),
            evidence=evidence,
            expected=expected,
            faults=faults_of(cold=rules.cold),
        )

    def _superiority(self) -> Verdict:
        from pytest_kvqual.judge.gates import superiority
        from pytest_kvqual.study.plan import trials

        campaign, plan = self._campaign, self.plan()
        found = {(arm, block): self._result(arm, block) for arm, block in trials(plan)}
        return superiority.judge(campaign.study, plan, arm=campaign.selection.arm.name, trials=found)

    def _result(self, arm: str, block: int) -> Trial | None:
        """One trial as the statistics take it; None where none was begun."""
        from pytest_kvqual.judge.gates.superiority import Trial
        from pytest_kvqual.judge.gates.trial import cell_figures

        campaign, rules = self._campaign, self.rules()
        scope = campaign.scope_of(campaign.study.arms[arm])
        try:
            readers = self._readers(scope, block)
        except KvqualError as error:
            return Trial(valid=False, why=error.line(), figures={})
        if not readers:
            return None
        if len(readers) > 1:
            names = ", ".join(reader.name for reader in readers)
            return Trial(valid=False, why=f"found {len(readers)} attempts ({names}), expected one", figures={})
        (reader,) = readers
        if reader.outcome != "complete":
            return Trial(valid=False, why=f"{reader.name} is {reader.outcome}: {reader.reason}", figures={})
        try:
            verdict = self._judged(reader, scope, block, note="superiority")
            figures = {
                (cell.name, name): value
                for cell in rules.cells
                for name, value in cell_figures(reader.data(cell_file(cell.name)), origin=cell.name).items()
            }
        except KvqualError as error:
            return Trial(valid=False, why=error.line(), figures={})
        valid = verdict.outcome is Outcome.PASS
        return Trial(valid=valid, why="" if valid else verdict.figure, figures=figures)

    def _readers(self, scope: Scope, block: int) -> list[Reader]:
        """Every attempt at a block in this scope, by its mark and by what lies in the evidence.

        Raises:
            EvidenceError: The mark or an attempt cannot be read, or the attempt that the mark names is not there.
        """
        from pytest_kvqual._decode import parse_json
        from pytest_kvqual.evidence.layout import attempts
        from pytest_kvqual.evidence.reader import Reader
        from pytest_kvqual.study.timing_files import read_file

        campaign, marker = self._campaign, self._marker(scope, block)
        claimed = ""
        if marker.exists():
            document = parse_json(read_file(marker, ""), origin=str(marker), error=EvidenceError)
            claimed = str(document.get("attempt")) if isinstance(document, dict) else ""
        found = []
        for path in attempts(campaign.run_dir, scope.arm, scope.length, scope.cache_bytes, campaign.prefix):
            named = f"{path.parent.name}/{path.name}"
            if named != claimed and not (path / TRIAL).exists():
                continue
            reader = Reader.open(path)
            if reader.scope != scope:
                continue
            if named == claimed or (reader.has(TRIAL) and reader.document(TRIAL).get("block") == block):
                found.append(reader)
        if marker.exists() and claimed not in [reader.name for reader in found]:
            # Something was timed, and is gone: not the same as a trial that nobody made.
            raise EvidenceError(f"{marker}: found no attempt '{claimed}' in this scope, which it names, expected it")
        return found

    # -- the pilot ---------------------------------------------------------------------------------------------------

    def pilot(self, cell_name: str | None) -> list[str]:
        """One exploratory measurement of the arm at one load, which satisfies no requirement and enters no statistics.

        Returns:
            Lines for a person: where the records are, and the cell's figures.

        Raises:
            StudyError: The plan has no such cell.
            RefusedError: A gate up to parity has no standing PASS receipt.
            KvqualError: The measurement failed.
        """
        from pytest_kvqual.evidence.reader import Reader
        from pytest_kvqual.metrics.recording import read_recording
        from pytest_kvqual.metrics.summary import summarise

        campaign, rules = self._campaign, self.rules()
        self.plan()
        names = [cell.name for cell in rules.cells]
        name = cell_name if cell_name is not None else names[0]
        if name not in names:
            raise StudyError(f"--cell: found {name}, expected one of {', '.join(names)}")
        cell = rules.cells[names.index(name)]
        permit = campaign.pilot_permit()
        with campaign.begin(campaign.selection, campaign.own_scope(), prefix=PILOT) as attempt:
            self._run(attempt, permit, (cell,), None)
        reader = Reader.open(attempt.path)
        summary = summarise(read_recording(reader.data(cell_file(name)), origin=cell_file(name)))
        lines = [
            f"exploratory: {campaign.selection.arm.name}, cell {name}: satisfies no requirement, enters no statistics",
            f"{summary.completed} of {summary.offered} requests completed; records: {attempt.path}",
        ]
        for figure in ("ttft_intended_p50", "ttft_intended_p99", "tpot_p50", "lateness_p99"):
            value = summary.figures[figure].value
            lines.append(f"{figure}: {'none' if value is None else f'{float(value) / 1e6:.3f} ms'}")
        return lines


def _judgment_in(reader: Reader) -> object:
    """The judgment that an attempt's recordings of fidelity carry.

    Raises:
        EvidenceError: The first of them is damaged.
    """
    from pytest_kvqual.metrics.recording import read_recording

    return read_recording(reader.data(_FIRST_CASE), origin=f"{reader.name}/{_FIRST_CASE}").header["judgment"]
