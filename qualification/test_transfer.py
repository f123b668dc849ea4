"""Transfer: the oracles on synthetic inputs against any backend that offers ``write`` and ``attend``, without a model.

    pytest qualification/ -m cpu -k transfer --geometry qwen3-8b --backend my_package.my_backend:k16v8

Each test draws geometries (unless one is fixed), prompt lengths, block tables, cache strides and batch orders, and asks
one kind of question. Each then plants the fault that it is there to see, and fails where nobody sees it. They decide no
gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.kv.geometry import Geometry
    from pytest_kvqual.transfer.check import Case, Outcome, Subject
    from pytest_kvqual.transfer.engine import TransferEngine

pytestmark = [pytest.mark.cpu, pytest.mark.transfer]

DEFAULT_BACKENDS = ("pytest_kvqual.kv.backends.reference:k16v16", "pytest_kvqual.kv.backends.k16v8:k16v8")
SHRINKS = 100
"""Further cases that are run to make a failed one smaller."""

LARGE = 1024
"""Elements of the query of one row from which on a geometry gets fewer examples."""


class FoundError(AssertionError):
    """The oracles found something in a case."""

    def __init__(self, case: Case, outcome: Outcome, objections: Sequence[str]) -> None:
        super().__init__(objections[0])
        self.case = case
        self.outcome = outcome
        self.objections = objections


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What the options name, and the ways to ask."""

    geometry: Geometry | None
    subjects: Sequence[Subject]
    folder: Path

    def holds(self, sections: Sequence[str], ask: Callable[[Case], None] | None = None, **case: Any) -> None:
        """Draws cases and fails with the smallest one that the given sections object to.

        Args:
            sections: Sections of the record that must be without findings.
            ask: Asked in place of one run of the case.
            case: ``probe``, ``fills``, and arguments of the engine.
        """
        flags: dict[str, Any] = {name: case.pop(name) for name in ("probe", "fills") if name in case}
        for subject in self.subjects:
            law = partial(self._law, subject, ask or (lambda drawn: self.expect(drawn, sections)), flags, case)
            self._fail_if_found(law)

    def _law(
        self, subject: Subject, ask: Callable[[Case], None], flags: dict[str, Any], engine: dict[str, Any]
    ) -> None:
        from hypothesis import HealthCheck, given, settings
        from hypothesis import strategies as st

        from pytest_kvqual.transfer import strategies
        from pytest_kvqual.transfer.check import Case

        fixed = self.geometry
        large = fixed is not None and fixed.query_heads * fixed.head_size >= LARGE
        # What each case gave, so that none runs twice, and how many ran up to the first that failed.
        known: dict[str, FoundError | None] = {}
        tried = [0]

        @settings(
            max_examples=8 if large else 12,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.data())
        def law(data: st.DataObject) -> None:
            geometry = fixed or data.draw(strategies.geometries())
            script = data.draw(strategies.scripts(geometry.block_size))
            drawn = {
                "gap": data.draw(st.sampled_from((64, 0, 512))),
                "seed": data.draw(st.integers(0, 3)),
                "blocks": 24,
            }
            case = Case(subject=subject, geometry=geometry, script=script, engine={**drawn, **engine}, **flags)
            words = case.command()
            if words not in known:
                failed = any(known.values())
                if failed and len(known) - tried[0] >= SHRINKS:
                    return  # the smallest case so far is small enough
                known[words] = None
                try:
                    ask(case)
                except FoundError as found:
                    known[words] = found
                if not failed:
                    tried[0] = len(known)
            before = known[words]
            if before is not None:
                raise FoundError(before.case, before.outcome, before.objections)

        law()

    def expect(self, case: Case, sections: Sequence[str]) -> None:
        """Runs a case.

        Raises:
            FoundError: The sections object.
        """
        outcome = case.run()
        objections = outcome.objections(sections)
        if objections:
            raise FoundError(case, outcome, objections)

    def _fail_if_found(self, run: Callable[[], None]) -> None:
        try:
            run()
        except FoundError as found:
            text = found.case.report(found.outcome, found.objections, self.folder)
        else:
            return
        # Outside the handler: pytest would print the chained exception too.
        pytest.fail(text, pytrace=False)

    def sees(self, plant: Callable[[TransferEngine], None], section: str, **case: Any) -> None:
        """The negative control: a run without the planted fault is clean, and one with it is not."""
        from pytest_kvqual.transfer.check import Case
        from pytest_kvqual.transfer.engine import DEFAULT_GEOMETRY
        from pytest_kvqual.transfer.workload import short_workload

        geometry = self.geometry or DEFAULT_GEOMETRY
        flags: dict[str, Any] = {name: case.pop(name) for name in ("probe", "fills") if name in case}
        for subject in self.subjects:
            control = Case(
                subject=subject, geometry=geometry, script=short_workload(geometry.block_size), engine=case, **flags
            )
            self._fail_if_found(partial(self.expect, control, [section]))
            if not control.run(plant).objections([section]):
                pytest.fail(
                    f"{subject} at {geometry}: found nothing in {section} with the planted fault {plant.__name__}, "
                    "expected an objection: this test cannot be trusted",
                    pytrace=False,
                )


@pytest.fixture
def transfer(pytestconfig: pytest.Config, tmp_path: Path) -> Iterator[Transfer]:
    """The geometry and the backends that the options name; one torch thread, as the tensors are small."""
    try:
        import torch
    except ModuleNotFoundError:
        pytest.fail("transfer tests: found no torch, expected it: pip install torch, of any build", pytrace=False)

    from pytest_kvqual.transfer.check import find_backend

    named = pytestconfig.getoption("backend")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield Transfer(
            geometry=pytestconfig.getoption("geometry"),
            subjects=[find_backend(text) for text in ([named] if named is not None else DEFAULT_BACKENDS)],
            folder=tmp_path,
        )
    finally:
        torch.set_num_threads(threads)


def test_transfer_page_remapping(transfer: Transfer) -> None:
    """Every write lands where its block table says, nowhere else; other tables give the same outputs."""
    from dataclasses import replace

    import torch

    from pytest_kvqual.transfer.plants import write_before_block_start

    def ask(case: Case) -> None:
        outcomes = []
        for pool_seed in (11, 12):
            mapped = replace(case, engine={**case.engine, "pool_seed": pool_seed})
            outcome = mapped.run()
            objections = outcome.objections(["row_map", "routing"])
            if objections:
                raise FoundError(mapped, outcome, objections)
            outcomes.append(outcome)
        for number, (left, right) in enumerate(zip(outcomes[0].steps, outcomes[1].steps, strict=True)):
            for layer, output in left.outputs.items():
                bits = [part.contiguous().view(torch.int16) for part in (output, right.outputs[layer])]
                if not torch.equal(bits[0], bits[1]):
                    line = f"remapping: step {number}, {layer}: outputs differ between two block tables"
                    raise FoundError(mapped, outcomes[1], [line])

    transfer.holds((), ask)
    transfer.sees(write_before_block_start, "routing")


def test_transfer_gathers(transfer: Transfer) -> None:
    """Each row gets K and V of every position of its own history, with spike keys at block boundaries."""
    from pytest_kvqual.transfer.check import Case
    from pytest_kvqual.transfer.engine import DEFAULT_GEOMETRY
    from pytest_kvqual.transfer.plants import first_block_twice
    from pytest_kvqual.transfer.workload import workload

    transfer.holds(("routing", "placement"), probe=True)
    geometry = transfer.geometry or DEFAULT_GEOMETRY
    for subject in transfer.subjects:
        case = Case(subject=subject, geometry=geometry, script=workload(geometry.block_size), probe=True)
        outcome = case.run()
        objections = outcome.objections()
        missing = [name for record in outcome.records for name, count in record["conditions"].items() if not count]
        objections += [f"conditions: {name} was not seen" for name in missing]
        if objections:
            pytest.fail(case.report(outcome, objections, transfer.folder), pytrace=False)
    transfer.sees(first_block_twice, "placement", probe=True)


def test_transfer_long_histories(transfer: Transfer) -> None:
    """Hundreds of positions, nine requests at once, ten decode steps and slots beyond sixteen bits change nothing."""
    from pytest_kvqual.transfer.check import Case
    from pytest_kvqual.transfer.engine import DEFAULT_GEOMETRY
    from pytest_kvqual.transfer.workload import LONG_SLOTS, long_workload

    geometry = transfer.geometry or DEFAULT_GEOMETRY
    pool = {"blocks": LONG_SLOTS // geometry.block_size + 2 * max(1, 4096 // geometry.block_size), "layers": 1}
    for subject in transfer.subjects:
        for probe in (False, True):
            case = Case(subject=subject, geometry=geometry, script=long_workload(), probe=probe, engine=pool)
            outcome = case.run()
            objections = outcome.objections(("routing", "shifted-outputs", "placement"))
            if objections:
                pytest.fail(case.report(outcome, objections, transfer.folder), pytrace=False)


def test_transfer_output_placement(transfer: Transfer) -> None:
    """Each output row is the attention of its own request, position and heads, whatever the order of the batch."""
    from pytest_kvqual.transfer.plants import heads_turned

    transfer.holds(("placement",))
    transfer.sees(heads_turned, "placement")


def test_transfer_stale_maps(transfer: Transfer) -> None:
    """With input buffers that live on from step to step, each step follows its own maps."""
    from pytest_kvqual.transfer.plants import previous_lengths_and_table

    # Four requests of at most 2b + 1 tokens, and three padding rows.
    block = transfer.geometry.block_size if transfer.geometry else 16
    transfer.holds(("stale-maps", "routing", "placement"), static=(6, 8 * block + 8), probe=True)
    transfer.sees(previous_lengths_and_table, "stale-maps")


def test_transfer_shifted_outputs(transfer: Transfer) -> None:
    """No output row is the attention of another row of this step or of the step before."""
    from pytest_kvqual.transfer.plants import rows_shifted

    transfer.holds(("shifted-outputs",))
    transfer.sees(rows_shifted, "shifted-outputs")


def test_transfer_poison(transfer: Transfer) -> None:
    """Outputs stay the same bit for bit when cells that nobody wrote hold NaN, 1e4 or another request's K and V."""
    from pytest_kvqual.transfer.plants import zero_times_unwritten

    transfer.holds(("replay",), fills=True)
    transfer.sees(zero_times_unwritten, "replay", fills=True)
