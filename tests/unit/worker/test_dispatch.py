"""The dispatch reader sees what each layer ran, and only that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_kvqual.kv.backends import k16v8, reference
from pytest_kvqual.worker.dispatch import Activity, DispatchReader, attribute
from pytest_kvqual.worker.runner import RunnerV2
from pytest_kvqual.worker.wire import WorkerError

BLOCK, HEADS, KV_HEADS, SIZE = 8, 6, 3, 16
SDPA = "aten::scaled_dot_product_attention"
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


class _Impl:
    """One of our backends, as the engine's glue calls it."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        self._functions.write(key, value, kv_cache, slot_mapping, v_scale=0.01)

    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, output: Any) -> Any:
        table, lengths, starts = metadata
        return self._functions.attend(
            query, kv_cache, table, lengths, starts, scale=SIZE**-0.5, v_scale=0.01, output=output
        )


class _Fallback(_Impl):
    """The same numbers by another implementation: the history gathered, then torch's own attention."""

    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, output: Any) -> Any:
        table, lengths, starts = (part.tolist() for part in metadata)
        for row, (blocks, length) in enumerate(zip(table, lengths, strict=True)):
            first, last = starts[row], starts[row + 1]
            cells = kv_cache[blocks].transpose(1, 2).reshape(-1, KV_HEADS, 2 * SIZE)[:length]
            k, v = (part.transpose(0, 1)[None] for part in cells.split(SIZE, dim=-1))
            mask = torch.arange(length)[None, :] <= torch.arange(length - (last - first), length)[:, None]
            attended = torch.nn.functional.scaled_dot_product_attention(
                query[first:last].transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True
            )
            output[first:last] = attended[0].transpose(0, 1)
        return output


class _Custom(_Impl):
    """The operators of an engine that are not torch's own."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        torch.ops.kvqual_test_dispatch.reshape_and_cache(key, kv_cache)

    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, output: Any) -> Any:
        torch.ops.kvqual_test_dispatch.attention_with_kv_cache(query, output)


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    """Two custom operators with an inner aten operator each."""
    library = torch.library.Library("kvqual_test_dispatch", "DEF")  # type: ignore[no-untyped-call]  # torch
    for name in ("reshape_and_cache", "attention_with_kv_cache"):
        library.define(f"{name}(Tensor source, Tensor(a!) target) -> ()")  # type: ignore[no-untyped-call]  # torch

        def implementation(source: torch.Tensor, target: torch.Tensor) -> None:
            target.flatten()[:1].copy_(source.flatten()[:1])

        library.impl(name, implementation, "CPU")  # type: ignore[no-untyped-call]  # torch
    yield
    library._destroy()  # type: ignore[no-untyped-call]  # torch


def _layer(impl: Any, *, name: str | None = "KVQUAL_X", dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN", **({"kvqual_name": name} if name else {}))
    content = 3 * SIZE if dtype == torch.uint8 else 2 * SIZE
    cache = torch.zeros(4, KV_HEADS, BLOCK, content, dtype=dtype)
    return SimpleNamespace(impl=impl, kv_cache=cache, attn_backend=backend)


STEPS = {
    "prefill": (torch.tensor([[1, 2]]), torch.tensor([11]), torch.tensor([0, 11])),
    "decode": (torch.tensor([[1, 2]]), torch.tensor([12]), torch.tensor([0, 1])),
}


def _run(layer: Any, step: str) -> torch.Tensor:
    random = torch.Generator().manual_seed(len(step))
    table, lengths, starts = STEPS[step]
    rows, last = int(starts[-1]), int(lengths[0])
    query, key, value = (torch.randn(rows, n, SIZE, generator=random).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS))
    positions = torch.arange(last - rows, last)
    slots = table[0, positions // BLOCK] * BLOCK + positions % BLOCK
    output = torch.zeros(rows, HEADS, SIZE, dtype=torch.bfloat16)
    layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
    torch.linalg.inv(torch.eye(2))  # the model between a layer's two calls
    layer.impl.forward(layer, query, key, value, layer.kv_cache, (table, lengths, starts), output)
    return output


def test_each_layer_reads_as_what_it_ran() -> None:
    """Our backends, a fallback with the same numbers, custom operators and a layer never called are told apart."""
    layers = {
        "ours": _layer(_Impl(reference)),
        "bytes": _layer(_Impl(k16v8), dtype=torch.uint8),
        "fallback": _layer(_Fallback(reference)),
        "custom": _layer(_Custom(None), name=None),
        "idle": _layer(_Impl(reference)),
    }
    reader = DispatchReader(layers)
    reader.start()
    for step in STEPS:
        outputs = {name: _run(layer, step) for name, layer in layers.items() if name != "idle"}
        torch.testing.assert_close(outputs["fallback"], outputs["ours"], rtol=2**-6, atol=2**-6)
    record: Any = reader.finish()
    kernels = {name: set(entry["kernels"]) for name, entry in record.items()}
    assert {FLASH, "aten::bmm", "aten::index_select", "aten::index_put_"} <= kernels["ours"]
    assert SDPA not in kernels["ours"]
    assert "aten::bitwise_left_shift_" in kernels["bytes"]
    assert SDPA in kernels["fallback"]
    assert "aten::exp_" not in kernels["fallback"]
    assert kernels["custom"] >= {
        "kvqual_test_dispatch::reshape_and_cache",
        "kvqual_test_dispatch::attention_with_kv_cache",
        "aten::copy_",
    }
    assert kernels["idle"] == set()
    assert not any("linalg" in kernel or "profiler" in kernel for found in kernels.values() for kernel in found)
    assert record["ours"]["kernels"] == sorted(record["ours"]["kernels"])


def test_a_layer_says_what_it_is() -> None:
    """Backend name, implementation class and cache dtype are those of the layer."""
    reader = DispatchReader({"a": _layer(_Impl(k16v8), dtype=torch.uint8), "b": _layer(_Custom(None), name=None)})
    reader.start()
    record = reader.finish()
    assert {key: record["a"][key] for key in ("backend", "cache_dtype")} == {
        "backend": "KVQUAL_X",
        "cache_dtype": "torch.uint8",
    }
    assert (record["b"]["backend"], record["b"]["cache_dtype"]) == ("CPU_ATTN", "torch.bfloat16")
    assert str(record["a"]["impl"]).endswith("._Impl")
    assert str(record["b"]["impl"]).endswith("._Custom")


def test_prefill_and_decode_read_differently() -> None:
    """A reading of a decode alone does not show the prefill's kernel."""
    layer = _layer(_Impl(reference))
    _run(layer, "prefill")
    found = {}
    for step in STEPS:
        reader = DispatchReader({"a": layer})
        reader.start()
        _run(layer, step)
        found[step] = set(reader.finish()["a"]["kernels"])  # type: ignore[call-overload]  # a list of names
    assert FLASH in found["prefill"] - found["decode"]
    assert "aten::exp_" in found["decode"] - found["prefill"]


def test_a_step_on_another_thread_is_read() -> None:
    """The thread that opens the reading need not be the one that runs the layers."""
    layer = _layer(_Impl(reference))
    reader = DispatchReader({"a": layer})
    reader.start()
    thread = threading.Thread(target=_run, args=(layer, "prefill"))
    thread.start()
    thread.join()
    assert FLASH in reader.finish()["a"]["kernels"]  # type: ignore[operator]  # a list of names


def test_ranges_restore_what_they_found() -> None:
    """After a reading the layers carry what they did before, a planted method included."""
    layers = {"a": _layer(_Impl(reference)), "b": _layer(_Impl(reference))}
    layers["a"].impl.forward = layers["b"].impl.forward
    before = {name: dict(vars(layer.impl)) for name, layer in layers.items()}
    reader = DispatchReader(layers)
    reader.start()
    assert reader.installed
    with pytest.raises(WorkerError, match="open already"):
        reader.start()
    reader.finish()
    assert not reader.installed
    assert {name: dict(vars(layer.impl)) for name, layer in layers.items()} == before
    with pytest.raises(WorkerError, match="no dispatch reading is open"):
        reader.finish()
    reader.start()
    reader.remove()
    assert {name: dict(vars(layer.impl)) for name, layer in layers.items()} == before


def _activity(
    kind: str, name: str, start: int, end: int, *, thread: int = 1, correlation: int = 0, linked: int = 0
) -> Activity:
    return Activity(kind=kind, name=name, start=start, end=end, thread=thread, correlation=correlation, linked=linked)


def test_device_kernels_belong_to_the_range_of_their_launch() -> None:
    """A kernel runs after its range ended: its launch decides, or the operator it is linked to where there is none."""
    trace = [
        _activity("user_annotation", "kvqual.dispatch/a", 0, 100),
        _activity("user_annotation", "kvqual.dispatch/b", 200, 300),
        _activity("user_annotation", "somebody else's range", 0, 1000),
        _activity("cpu_op", "aten::mm", 10, 20, correlation=5),
        # Launched without an operator, as Triton does; a launch carries the number of the system's thread.
        _activity("cuda_driver", "cuLaunchKernel", 250, 251, thread=4711, correlation=900, linked=3),
        _activity("kernel", "paged_attention_kernel", 700, 800, thread=0, correlation=900, linked=3),
        _activity("kernel", "gemm", 600, 650, thread=0, correlation=901, linked=5),
        _activity("cuda_runtime", "cudaLaunchKernel", 400, 401, thread=4711, correlation=902),
        _activity("kernel", "outside", 402, 500, thread=0, correlation=902),
        _activity("gpu_memcpy", "Memcpy DtoH", 660, 670, thread=0, correlation=900),
    ]
    assert attribute(trace, ["a", "b", "c"]) == {
        "a": {"aten::mm", "gemm"},
        "b": {"paged_attention_kernel", "Memcpy DtoH"},
        "c": set(),
    }


def test_an_operator_belongs_to_the_range_of_its_thread() -> None:
    """What another thread runs meanwhile, or what outlasts the range, is not the layer's."""
    trace = [
        _activity("user_annotation", "kvqual.dispatch/a", 0, 100),
        _activity("user_annotation", "kvqual.dispatch/b", 50, 60, thread=2),
        _activity("cpu_op", "inside", 55, 56),
        _activity("cpu_op", "other thread", 55, 56, thread=3),
        _activity("cpu_op", "second thread", 55, 56, thread=2),
        _activity("cpu_op", "outlasts", 90, 101),
        _activity("cpu_op", "after", 101, 102),
    ]
    assert attribute(trace, ["a", "b"]) == {"a": {"inside"}, "b": {"second thread"}}


def _entry(kind: str, name: str, start: int, end: int, correlation: int = 0, *, thread: int = 1) -> Activity:
    return Activity(kind=kind, name=name, start=start, end=end, thread=thread, correlation=correlation, linked=0)


def test_the_kernels_of_a_full_graph_are_every_layers() -> None:
    """What a replay launched is known for the step alone; an eager step's kernels stay with the layer that ran them."""
    found = attribute(
        [
            _entry("user_annotation", "kvqual.dispatch/a", 0, 10),
            _entry("cuda_runtime", "cudaLaunchKernel", 2, 3, 7),
            _entry("kernel", "prefill_kernel", 30, 40, 7),
            _entry("user_annotation", "kvqual.replay", 50, 60),
            _entry("cuda_runtime", "cudaGraphLaunch", 52, 53, 8),
            _entry("kernel", "decode_kernel", 70, 80, 8),
            _entry("gpu_memcpy", "Memcpy DtoD", 80, 81, 8),
        ],
        ["a", "b"],
    )
    assert found == {
        "a": {"prefill_kernel", "decode_kernel", "Memcpy DtoD"},
        "b": {"decode_kernel", "Memcpy DtoD"},
    }


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("cudaGraphLaunch", 20, 21),
        ("cudaGraphLaunch", 59, 61),
        ("cudaLaunchKernel", 52, 53),
    ],
    ids=["piecewise", "past-the-range", "no-graph"],
)
def test_other_launches_are_no_layers(name: str, start: int, end: int) -> None:
    """Piecewise graphs are launched outside a replay's range, sampling's kernels without a graph: they are nobody's."""
    found = attribute(
        [
            _entry("user_annotation", "kvqual.replay", 50, 60),
            _entry("cuda_runtime", name, start, end, 8),
            _entry("kernel", "gemm", 70, 80, 8),
        ],
        ["a"],
    )
    assert found == {"a": set()}


def test_a_replay_stands_in_a_range_of_its_own() -> None:
    """With a runner that replays graphs, the reader puts a range around each replay and takes it off again."""
    layers = {"a": _layer(_Impl(reference))}
    manager = SimpleNamespace(run_fullgraph=lambda: torch.ones(2) + 1)
    prepare = lambda batch: None  # noqa: E731 - a method of the runner
    runner = RunnerV2(SimpleNamespace(prepare_attn=prepare, cudagraph_manager=manager))
    reader = DispatchReader(layers, runner=runner)
    reader.start()
    manager.run_fullgraph()
    profiler = reader._profiler
    reader.finish()
    names = {str(event.name()) for event in profiler.profiler.kineto_results.events()}
    assert "kvqual.replay" in names
    assert runner.runner.prepare_attn is prepare
