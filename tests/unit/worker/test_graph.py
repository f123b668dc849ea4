"""A recorded step replays its operators over captured tensors, and refuses what a graph cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from pytest_kvqual.kv.backends import masked, reference
from pytest_kvqual.worker.graph import RecordedStep
from pytest_kvqual.worker.wire import WorkerError

MODES: list[Callable[[], AbstractContextManager[object]]] = [nullcontext, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
def test_a_replay_follows_captured_inputs_only(mode: Callable[[], AbstractContextManager[object]]) -> None:
    """New values take effect when copied into a captured input; a host constant and a rebound name do not."""
    with mode():
        held = {"x": torch.ones(3), "w": torch.eye(3)}
        calls = []
        factor = 2.0

        def step() -> torch.Tensor:
            calls.append(1)
            y = (held["x"].reshape(1, 3) @ held["w"].t()).reshape(-1) * factor
            y[0] += 1
            return y

        recorded = RecordedStep(step)
        captured = held["x"]
        result = recorded.result
        assert isinstance(result, torch.Tensor)
        assert result.tolist() == [3, 2, 2]
        factor = 5.0
        held["x"] = torch.full((3,), 9.0)
        recorded.replay()
        assert result.tolist() == [3, 2, 2]
        captured.copy_(torch.tensor([1.0, 2.0, 3.0]))
        for _ in range(2):
            recorded.replay()
            assert result.tolist() == [3, 4, 6]
        assert len(calls) == 1
        assert "aten::mm" in recorded.operators


def test_captured_memory_keeps_what_no_operator_writes() -> None:
    """An allocation of the step is the same memory in every replay: rows that a replay does not write are stale."""
    source, rows = torch.ones(4), torch.arange(4)

    def step() -> torch.Tensor:
        buffer = torch.empty(4)
        buffer.index_copy_(0, rows, source)
        return buffer

    recorded = RecordedStep(step)
    result = recorded.result
    assert isinstance(result, torch.Tensor)
    rows.copy_(torch.tensor([0, 0, 1, 1]))
    source.fill_(5.0)
    recorded.replay()
    assert result.tolist() == [5, 5, 1, 1]


def test_results_in_lists_and_through_views_are_rewritten() -> None:
    """An operator with several results and a view of a result both follow the replay."""
    x = torch.tensor([3.0, 1.0, 2.0])

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        values, order = torch.sort(x)
        return values[1:], order

    recorded = RecordedStep(step)
    x.copy_(torch.tensor([9.0, 8.0, 7.0]))
    recorded.replay()
    found = recorded.result
    assert isinstance(found, tuple)
    assert found[0].tolist() == [8, 9]
    assert found[1].tolist() == [2, 1, 0]


def test_a_custom_operator_that_mutates_its_argument_is_replayed() -> None:
    """An engine's own operator is recorded under its own name and runs again on the captured tensors."""
    library = torch.library.Library("kvqual_test_graph", "DEF")  # type: ignore[no-untyped-call]  # torch

    def put(cache: torch.Tensor, row: torch.Tensor) -> None:
        cache.add_(row)

    library.define("put(Tensor(a!) cache, Tensor row) -> ()")  # type: ignore[no-untyped-call]  # torch
    library.impl("put", put, "CPU")  # type: ignore[no-untyped-call]  # torch
    try:
        cache, row = torch.zeros(2), torch.ones(2)
        recorded = RecordedStep(lambda: torch.ops.kvqual_test_graph.put(cache, row))
        row.fill_(10.0)
        recorded.replay()
        assert recorded.operators == ("kvqual_test_graph::put",)
        assert cache.tolist() == [11, 11]
    finally:
        library._destroy()  # type: ignore[no-untyped-call]  # torch


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum().item(),
        lambda x: int(x[0]),
        lambda x: bool((x > 0).all()),
        lambda x: range(torch.tensor(2) + x[0].long()),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.clone().index_put_((x > 0,), torch.ones(())),
        lambda x: x.clone().__setitem__(x > 0, torch.ones(1)),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.unique(x),
        lambda x: torch.equal(x, x),
    ],
)
def test_what_depends_on_values_is_refused(
    step: Callable[[torch.Tensor], object], mode: Callable[[], AbstractContextManager[object]]
) -> None:
    """A value read on the host or a shape that depends on values is refused in one line, in either mode."""
    with mode():
        x = torch.ones(3)
        with pytest.raises(WorkerError, match="expected operators of fixed shapes only, in a captured step") as caught:
            RecordedStep(lambda: step(x))
    assert "\n" not in str(caught.value)


def test_an_index_of_numbers_is_held() -> None:
    """Gathers and scatters by integer indices have fixed shapes and are recorded."""
    x, index = torch.arange(4.0), torch.tensor([0, 1])
    recorded = RecordedStep(lambda: x[index])
    index.copy_(torch.tensor([3, 2]))
    recorded.replay()
    assert recorded.result.tolist() == [3, 2]  # type: ignore[attr-defined]  # a tensor


def test_the_backends_are_told_apart() -> None:
    """The reference backend looks at lengths on the host and is refused; the masked one is held."""
    cache = torch.zeros(4, 3, 8, 32, dtype=torch.bfloat16)
    query, key = torch.randn(2, 6, 16).bfloat16(), torch.randn(2, 3, 16).bfloat16()
    slots, table, lengths, starts = torch.tensor([8, -1]), torch.tensor([[1]]), torch.tensor([1]), torch.tensor([0, 1])
    output = torch.zeros_like(query)

    def step(backend: object) -> object:
        backend.write(key, key, cache, slots)  # type: ignore[attr-defined]  # a module
        return backend.attend(query, cache, table, lengths, starts, scale=0.25, output=output)  # type: ignore[attr-defined]

    with pytest.raises(WorkerError, match="expected operators of fixed shapes only"):
        RecordedStep(lambda: step(reference))
    recorded = RecordedStep(lambda: step(masked))
    key.add_(1)
    recorded.replay()
    torch.testing.assert_close(output[0], key[0].repeat_interleave(2, dim=0))
    assert not bool(output[1].any())
