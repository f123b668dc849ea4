"""The digests of step inputs: one a step, of what is in use, and different when anything in use differs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_kvqual.worker.step_inputs import StepInputs, maps_digest
from pytest_kvqual.worker.wire import WorkerError

BLOCK = 4


def _metadata() -> SimpleNamespace:
    """Two requests of 5 and 3 positions with 2 and 1 rows; a padding request, a padding row and unused columns."""
    return SimpleNamespace(
        seq_lens=torch.tensor([5, 3, 99], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 2, 3, 98], dtype=torch.int32),
        slot_mapping=torch.tensor([7, 8, 14, 77]),
        block_table=torch.tensor([[1, 2, 66], [3, 55, 44], [33, 22, 11]], dtype=torch.int32),
    )


FED = torch.tensor([4, 5, 6, 88])


def _digest(metadata: SimpleNamespace, fed: torch.Tensor = FED) -> str:
    return maps_digest([(metadata, BLOCK)], fed=fed, tokens=3, requests=2)


def _alter(name: str, *index: int) -> Callable[[SimpleNamespace], None]:
    def alter(metadata: SimpleNamespace) -> None:
        getattr(metadata, name)[index] += 1

    return alter


@pytest.mark.parametrize(
    "alter",
    [
        _alter("seq_lens", 0),
        _alter("seq_lens", 1),
        _alter("query_start_loc", 1),
        _alter("slot_mapping", 2),
        _alter("block_table", 0, 1),
        _alter("block_table", 1, 0),
    ],
)
def test_anything_in_use_changes_the_digest(alter: Callable[[SimpleNamespace], None]) -> None:
    """One element of any map, in the rows and columns in use, gives another digest."""
    metadata = _metadata()
    alter(metadata)
    assert _digest(metadata) != _digest(_metadata())


@pytest.mark.parametrize(
    "alter",
    [
        _alter("seq_lens", 2),
        _alter("query_start_loc", 3),
        _alter("slot_mapping", 3),
        _alter("block_table", 0, 2),
        _alter("block_table", 1, 1),
        _alter("block_table", 2, 0),
    ],
)
def test_padding_and_unused_columns_do_not_count(alter: Callable[[SimpleNamespace], None]) -> None:
    """What lies in padding rows or behind a request's last block leaves the digest as it is."""
    metadata = _metadata()
    alter(metadata)
    assert _digest(metadata) == _digest(_metadata())


def test_tokens_count_and_integer_widths_do_not() -> None:
    """The fed tokens are part of the digest; the same numbers in another integer type are the same inputs."""
    assert _digest(_metadata(), torch.tensor([4, 5, 7])) != _digest(_metadata())
    wide = SimpleNamespace(**{name: value.to(torch.int64) for name, value in vars(_metadata()).items()})
    assert _digest(wide, FED.to(torch.int32)) == _digest(_metadata())


def test_a_second_cache_group_counts() -> None:
    """Two groups with the same maps are not one group."""
    metadata = _metadata()
    once = _digest(metadata)
    assert maps_digest([(metadata, BLOCK)] * 2, fed=FED, tokens=3, requests=2) != once


class _Builder:
    def __init__(self) -> None:
        self.next = _metadata()

    def build(self, common_prefix_len: int, common: object) -> SimpleNamespace:
        return self.next


class _Runner:
    def __init__(self, builders: list[Any]) -> None:
        self.input_ids = SimpleNamespace(gpu=FED.clone())
        self._builders = builders

    def execute_model(self, scheduled: Any, intermediate: object = None) -> str:
        if scheduled.total_num_scheduled_tokens:
            for builder in self._builders:
                builder.build(0, None)
        return "output"


def _scheduled(tokens: int = 3) -> SimpleNamespace:
    return SimpleNamespace(total_num_scheduled_tokens=tokens, num_scheduled_tokens={"a": 2, "b": 1} if tokens else {})


def _reader(builders: list[Any]) -> tuple[_Runner, StepInputs]:
    runner = _Runner(builders)
    return runner, StepInputs(builders=builders, runner=runner, block_size=BLOCK)


def test_one_digest_per_step_whatever_the_number_of_groups() -> None:
    """Steps are counted by the runner's calls; warm-up builds and empty steps are none."""
    builders = [_Builder(), _Builder()]
    runner, inputs = _reader(builders)
    runner.execute_model(_scheduled())
    inputs.start()
    builders[0].build(0, None)
    assert runner.execute_model(_scheduled(), None) == "output"
    runner.execute_model(_scheduled(0))
    runner.input_ids.gpu[0] = 9
    runner.execute_model(_scheduled())
    record: Any = inputs.finish()
    assert record["steps"] == len(record["digests"]) == 2
    assert record["digests"][0] != record["digests"][1]
    assert record["digests"][0] == maps_digest([(_metadata(), BLOCK)] * 2, fed=FED, tokens=3, requests=2)


def test_a_builders_own_block_size_decides_what_is_in_use() -> None:
    """Where a builder's cache has another block size than the engine, its columns in use are counted by its own."""
    builder = _Builder()
    builder.kv_cache_spec = SimpleNamespace(block_size=2)  # type: ignore[attr-defined]  # as the engine's builders have
    runner, inputs = _reader([builder])
    inputs.start()
    runner.execute_model(_scheduled())
    record: Any = inputs.finish()
    assert record["digests"] == [maps_digest([(_metadata(), 2)], fed=FED, tokens=3, requests=2)]


def test_metadata_without_build_is_followed_too() -> None:
    """A group whose metadata is another's with a new table counts as built."""

    class Updating(_Builder):
        def update_block_table(self, metadata: Any, table: Any, slots: Any) -> SimpleNamespace:
            return self.next

        def build(self, *args: Any) -> Any:
            return self.update_block_table(None, None, None)

    runner, inputs = _reader([_Builder()])
    other = Updating()
    inputs = StepInputs(builders=[other], runner=runner, block_size=BLOCK)
    runner._builders = [SimpleNamespace(build=lambda *args: other.update_block_table(None, None, None))]
    inputs.start()
    runner.execute_model(_scheduled())
    assert inputs.finish()["steps"] == 1


def test_hooks_restore_what_they_found() -> None:
    """After a reading, runner and builders carry what they did before; a second reading starts from zero."""
    builder = _Builder()
    builder.build = builder.build  # type: ignore[method-assign]  # a planted instance attribute
    runner, inputs = _reader([builder])
    before = dict(vars(builder)), dict(vars(runner))
    for _ in range(2):
        inputs.start()
        assert inputs.installed
        with pytest.raises(WorkerError, match="already"):
            inputs.start()
        runner.execute_model(_scheduled())
        assert inputs.finish()["steps"] == 1
        assert not inputs.installed
        assert (dict(vars(builder)), dict(vars(runner))) == before
    with pytest.raises(WorkerError, match="no step inputs"):
        inputs.finish()


def test_a_step_without_maps_is_reported_at_the_end() -> None:
    """A builder of another kind does not stop the engine; finish names the step and what was missing."""
    builder = _Builder()
    runner, inputs = _reader([builder])
    inputs.start()
    runner.execute_model(_scheduled())
    del builder.next.slot_mapping
    assert runner.execute_model(_scheduled()) == "output"
    with pytest.raises(WorkerError, match=r"step 1: .*slot_mapping.* expected block_table, seq_lens"):
        inputs.finish()
    runner._builders = []
    inputs.start()
    runner.execute_model(_scheduled())
    with pytest.raises(WorkerError, match="step 0 built no attention metadata"):
        inputs.finish()


def test_no_builder_is_refused() -> None:
    """A runner without builders cannot be read."""
    with pytest.raises(WorkerError, match="found no attention metadata builder"):
        _reader([])[1].start()
