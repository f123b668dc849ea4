"""What the tests of the Triton backend run in a process of their own, where Triton interprets its kernels.

The choice between interpreter and compiler is made when Triton is imported, for the whole process: so it is made in a
child, and the process of the tests stays as it is. Each function here is one body; what it raises is the test's
failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_kvqual.errors import FormatError
from pytest_kvqual.kv import formats
from pytest_kvqual.kv.backends import k16v8
from pytest_kvqual.kv.geometry import NAMED, Geometry, parse_geometry
from pytest_kvqual.transfer.paged_step import PagedStep

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SMALL = Geometry(query_heads=6, kv_heads=3, head_size=16, block_size=8)


def interpret() -> None:
    """Runs first in the child."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _backend(kv_format: str) -> Any:
    from pytest_kvqual.kv.backends import triton_k16v8

    return triton_k16v8.for_format(kv_format)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.int16), right.contiguous().view(torch.int16))


# -- E4M3 -------------------------------------------------------------------------------------------------------------


def bytes_read(dtype: str) -> None:
    """All 256 bytes."""
    from triton import language

    from pytest_kvqual.kv.backends import triton_kernels as kernels

    values = torch.empty(256)
    raw = torch.arange(256, dtype=torch.uint8)
    kernels.decode_bytes[(1,)](raw, values, DTYPE=getattr(language, dtype), CAST=False)
    read, expected = values * 2.0**8, formats.e4m3_values()
    assert torch.equal(read.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(read[finite], expected[finite])
    assert torch.equal(read[finite].signbit(), expected[finite].signbit())


def values_written(kv_format: str, dtype: str, v_scale: float) -> None:
    """All 65,536 values of a 16-bit type as K and as V, some rows without a slot, in a cache with gaps."""
    kind, heads, size, block = DTYPES[dtype], 8, 128, 16
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(kind).view(64, heads, size)
    if kind is torch.bfloat16:
        # The interpreter widens a subnormal bfloat16 wrongly; the compiled kernel is for a GPU to show.
        bits = every.view(torch.int16)
        every = torch.where((bits & 0x7F80) == 0, bits & -0x8000, bits).view(kind)
    codec = formats.declared(kv_format, dtype=kind)
    content = formats.cell_bytes(codec, size)
    random = torch.Generator().manual_seed(1)
    whole = torch.randint(0, 256, (8, heads + 1, block, content), dtype=torch.uint8, generator=random)
    expected = whole.clone()
    slots = torch.randperm(8 * block, generator=random)[:64]
    slots[::9] = -1
    key, value = every, every.flip(0)
    _backend(kv_format).write(key, value, whole[:, :heads], slots, v_scale=v_scale)
    keep = slots >= 0
    cells = codec.encode(key[keep], value[keep], v_scale)
    codec.place(expected[:, :heads], slots[keep], cells)
    assert torch.equal(whole, expected)


# -- attention --------------------------------------------------------------------------------------------------------

BATCH = ((20, 20), (33, 1), (9, 3), (1, 1), (0, 0))


def named_geometry(name: str, kv_format: str, dtype: str) -> None:
    """Prefill, chunk, decode and padding in one step, fewer of the geometry's KV heads."""
    whole = NAMED[name]
    heads = 2 if whole.kv_heads > 3 else whole.kv_heads
    geometry = Geometry(
        query_heads=heads * whole.group, kv_heads=heads, head_size=whole.head_size, block_size=whole.block_size
    )
    step = PagedStep(geometry, BATCH, kv_format=kv_format, dtype=DTYPES[dtype], padding=2, seed=4)
    backend = _backend(kv_format)
    assert step.fill(backend) == 0
    output = step.run(backend)
    assert step.worst(output) <= 1.0
    # The tolerance is one that a wrong scale, a shifted row and a row left out do not meet.
    assert step.worst(output * 1.05) > 1.0
    assert step.worst(output.roll(1, 0)) > 1.0


def drawn_geometries(examples: int) -> None:
    """Head counts, sizes, blocks, batches and strides that need not divide one another."""

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.data())
    def law(data: st.DataObject) -> None:
        kv_heads = data.draw(st.sampled_from((1, 2, 3)))
        geometry = Geometry(
            query_heads=kv_heads * data.draw(st.sampled_from((1, 2, 5, 7))),
            kv_heads=kv_heads,
            head_size=data.draw(st.sampled_from((16, 8, 24, 32, 64))),
            block_size=data.draw(st.sampled_from((16, 4, 12, 32))),
        )
        batch = []
        for _ in range(data.draw(st.integers(1, 3))):
            positions = data.draw(st.integers(1, 70))
            batch.append((positions, data.draw(st.sampled_from((1, min(3, positions), positions)))))
        kv_format = data.draw(st.sampled_from(("k16v8", "k16v16")))
        step = PagedStep(
            geometry,
            batch,
            kv_format=kv_format,
            dtype=data.draw(st.sampled_from(list(DTYPES.values()))),
            padding=data.draw(st.integers(0, 2)),
            columns=data.draw(st.sampled_from((0, 20))),
            v_scale=data.draw(st.sampled_from((0.02, 1.0, 3.7e-4))),
            seed=data.draw(st.integers(0, 9)),
        )
        backend = _backend(kv_format)
        assert step.fill(backend) == 0
        assert step.worst(step.run(backend)) <= 1.0

    law()


def long_history() -> None:
    """More positions than all parts of the shortest size hold, and lengths around one and two parts."""
    from pytest_kvqual.kv.backends import triton_k16v8 as module

    geometry = Geometry(query_heads=2, kv_heads=1, head_size=16, block_size=16)
    lengths = (module.SPLITS * module.SHORTEST + 77, module.SHORTEST, module.SHORTEST + 1, 2 * module.SHORTEST - 1)
    step = PagedStep(geometry, [(length, 1) for length in lengths])
    backend = _backend("k16v8")
    assert step.fill(k16v8) == 0  # which writes the same bytes, and faster
    output = step.run(backend)
    assert step.worst(output) <= 1.0
    # Every part of the longest was computed, each other has its own count, and the workspace's size changes nothing.
    space = module.Workspace.make(len(lengths), 2, 16, 10**5, "cpu")
    space.sums.zero_()
    assert _same(step.run(backend, workspace=space), output)
    assert (space.sums > 0).sum(dim=2)[:, 0].tolist() == [14, 1, 2, 2]
    # A request whose second part is lost is not within tolerance.
    lost = step.lengths.clone()
    step.lengths[3] = module.SHORTEST
    short = step.run(backend)
    step.lengths = lost
    assert step.worst(short, requests=[3]) > 1.0


def bits_of_a_row() -> None:
    """Each request alone, in another order, with more padding, a wider table and a given bound on rows."""
    batch = [(40, 1), (300, 1), (17, 17), (5, 2)]
    backend = _backend("k16v8")
    step = PagedStep(SMALL, batch, seed=2)
    assert step.fill(backend) == 0
    output = step.run(backend)
    for request, (_, rows) in enumerate(batch):
        first = int(step.starts[request])
        single = torch.empty(rows + 3, *step.query.shape[1:], dtype=step.dtype)
        backend.attend(
            torch.nn.functional.pad(step.query[first : first + rows], (0, 0, 0, 0, 0, 3)),
            step.cache,
            torch.nn.functional.pad(step.table[request : request + 1], (0, 11), value=10**6),
            step.lengths[request : request + 1],
            torch.tensor([0, rows], dtype=torch.int32),
            scale=step.scale,
            v_scale=step.v_scale,
            output=single,
        )
        assert _same(single[:rows], output[first : first + rows])
        assert not bool(single[rows:].any())
    order = [3, 1, 0, 2]
    starts = torch.tensor([0, 2, 3, 4, 21], dtype=torch.int32)
    rows_of = [range(int(step.starts[r]), int(step.starts[r + 1])) for r in order]
    turned = torch.tensor([row for rows in rows_of for row in rows])
    other = torch.empty_like(step.query)
    backend.attend(
        step.query[turned],
        step.cache,
        step.table[order],
        step.lengths[order],
        starts,
        scale=step.scale,
        v_scale=step.v_scale,
        output=other,
        max_query_len=17,
    )
    assert _same(other, output[turned])


def unwritten_cells() -> None:
    """NaN and large numbers where nobody wrote, and block numbers that no pool has behind the last block."""
    batch = [(40, 1), (16, 1), (17, 17), (5, 2)]
    for kv_format in ("k16v8", "k16v16"):
        backend = _backend(kv_format)
        step = PagedStep(SMALL, batch, kv_format=kv_format, columns=9)
        assert step.fill(backend) == 0
        for row, (positions, _) in enumerate(batch):
            step.table[row, -(-positions // SMALL.block_size) :] = 10**6
        step.fill_unwritten(0)
        output = step.run(backend)
        for value in (0xFF, 0x77):
            step.fill_unwritten(value)
            assert _same(step.run(backend), output)
        # And a written one is seen.
        step.cache[int(step.table[0, 0]), :, 0] = 0xFF
        assert bool(step.run(backend)[0].isnan().any())


def padding() -> None:
    """Requests without rows, a request of length 0, rows behind the last request; static buffers' shapes."""
    backend = _backend("k16v8")
    step = PagedStep(SMALL, [(12, 1), (5, 1), (0, 0), (0, 0)], padding=4)
    assert step.fill(backend) == 0
    output = step.run(backend, max_query_len=1)
    assert step.worst(output) <= 1.0
    # As a graph is captured with dummies: a row each, of which some have no positions.
    starts = torch.arange(5, dtype=torch.int32)
    backend.attend(
        step.query,
        step.cache,
        step.table,
        step.lengths,
        starts,
        scale=step.scale,
        v_scale=step.v_scale,
        output=output,
        max_query_len=1,
    )
    assert bool(output[:2].any())
    assert not bool(output[2:].any())
    backend.write(step.query[:0, :3], step.query[:0, :3], step.cache, torch.empty(0, dtype=torch.int64))
    # And a step of nothing but padding.
    output.fill_(7.0)
    backend.attend(
        step.query, step.cache, step.table[:0], step.lengths[:0], step.starts[:1], scale=step.scale, output=output
    )
    assert not bool(output.any())


def refused(call: str) -> str:
    """The message of the refusal."""
    from pytest_kvqual.kv.backends import triton_k16v8 as module

    step = PagedStep(SMALL, [(12, 1)])
    backend = _backend("k16v8")
    key = step.query[:, :3]

    def attend(**changes: torch.Tensor) -> object:
        whole = {
            "query": step.query,
            "cache": step.cache,
            "block_table": step.table,
            "seq_lens": step.lengths,
            "query_start_loc": step.starts,
            "output": torch.zeros_like(step.query),
        }
        return backend.attend(**{**whole, **changes}, scale=1.0)

    calls: dict[str, Callable[[], object]] = {
        "cells": lambda: backend.write(key, key, step.cache[..., :32], torch.tensor([3])),
        "strided": lambda: step.run(backend, output=torch.empty(1, 16, 6).bfloat16().transpose(1, 2)),
        "rows": lambda: backend.write(key, key, step.cache, torch.tensor([3, 4])),
        "type": lambda: backend.write(key.float(), key.float(), step.cache, torch.tensor([3])),
        "workspace": lambda: step.run(backend, workspace=module.Workspace.make(1, 2, 16, 10, "cpu")),
        "kv-heads": lambda: backend.write(step.query, step.query, step.cache, torch.tensor([3])),
        "heads": lambda: attend(query=torch.zeros(1, 7, 16).bfloat16(), output=torch.zeros(1, 7, 16).bfloat16()),
        "output": lambda: attend(query=torch.zeros(3, 6, 16).bfloat16()),
        "lengths": lambda: attend(seq_lens=step.lengths[:0]),
        "starts": lambda: attend(query_start_loc=step.starts[:1]),
        "positions": lambda: backend.attend(
            step.query.repeat(3, 1, 1),
            step.cache,
            step.table,
            torch.tensor([2]),
            torch.tensor([0, 3]),
            scale=1.0,
            output=step.query.repeat(3, 1, 1),
        ),
    }
    try:
        calls[call]()
    except (FormatError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- under the oracles ------------------------------------------------------------------------------------------------


def under_the_oracles(geometry: str, kv_format: str, plant: str, section: str, flags: dict[str, Any]) -> int:
    """Objections of a section on three steps of two requests, with a planted fault or (empty name) without."""
    from pytest_kvqual.transfer import plants
    from pytest_kvqual.transfer.check import find_backend, run
    from pytest_kvqual.transfer.workload import Script

    sizes = parse_geometry(geometry)
    subject = find_backend(f"pytest_kvqual.kv.backends.triton_k16v8:{kv_format}")
    script = Script(
        (
            ("submit", "left", ((1, sizes.block_size + 1),), ""),
            ("submit", "right", ((2, 3),), ""),
            ("step", (("left", None), ("right", None)), 0, {}, {}),
            ("step", (("right", 1), ("left", 1)), 1, {}, {}),
            ("step", (("left", 1), ("right", 1)), 0, {}, {}),
        )
    )
    outcome = run(subject, sizes, script, layers=1, blocks=16, plant=getattr(plants, plant) if plant else None, **flags)
    return len(outcome.objections([section] if section else SECTIONS))


SECTIONS = ("row_map", "stale-maps", "routing", "shifted-outputs", "placement", "replay")


ORACLES = ("stale-maps", "routing", "shifted-outputs", "placement", "replay")


def applicable() -> list[str]:
    """The catalogue's faults that a backend without replaceable parts can have, in a scenario of its formats."""
    from pytest_kvqual.faults import FAULTS, matrix
    from pytest_kvqual.faults.scenarios import SCENARIOS
    from pytest_kvqual.transfer.engine import default_backend

    found = []
    for fault in FAULTS.values():
        scenario = SCENARIOS[fault.scenario]
        ours = scenario.kv_format in ("k16v8", "k16v16") and scenario.mode == "whole"
        if (
            not ours
            or "windows" in scenario.options
            or "transfer" not in fault.where
            or fault.claimed_by not in ORACLES
        ):
            continue
        try:
            matrix.plant(fault, scenario.engine(default_backend(scenario.kv_format)))
        except AttributeError:  # it replaces a part that only the exemplar has
            continue
        found.append(fault.name)
    return found


def catalogued(name: str | None, scenario_name: str) -> dict[str, str]:
    """What the gates up to replay object to in a scenario, with a fault of the catalogue or without."""
    from pytest_kvqual.faults import FAULTS, matrix
    from pytest_kvqual.faults.scenarios import SCENARIOS

    scenario = SCENARIOS[scenario_name]
    return matrix.windows(FAULTS[name] if name else None, scenario, _backend(scenario.kv_format))


# -- the glue ---------------------------------------------------------------------------------------------------------


def glue(backend_name: str, kv_format: str) -> None:
    """The layer's calls through the engine's implementation class, against the functions."""
    from pytest_kvqual.kv.backends import vllm_gpu

    backend = getattr(vllm_gpu, backend_name)
    step = PagedStep(SMALL, [(20, 1), (9, 1), (0, 0)], kv_format=kv_format, padding=1, v_scale=0.03)
    functions = _backend(kv_format)
    functions_cache = step.cache.clone()
    impl = backend.get_impl_cls()(6, 16, step.scale, 3)
    layer = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=step.v_scale)
    slots = step.slots()
    key, value = torch.randn(2, len(slots), 3, 16).bfloat16()
    impl.do_kv_cache_update(layer, key, value, step.cache, slots)
    functions.write(key, value, functions_cache, slots, v_scale=step.v_scale)
    assert torch.equal(step.cache, functions_cache)
    impl.do_kv_cache_update(layer, key, value, step.cache, torch.full((2,), -1))
    assert torch.equal(step.cache, functions_cache)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        model_config=SimpleNamespace(get_num_attention_heads=lambda parallel: 6),
        parallel_config=None,
    )
    builder = backend.get_builder_cls()(SimpleNamespace(head_size=16), ["layer"], config, torch.device("cpu"))
    common = SimpleNamespace(
        num_actual_tokens=2,
        max_query_len=1,
        max_seq_len=20,
        query_start_loc=step.starts,
        seq_lens=step.lengths,
        block_table_tensor=step.table,
        slot_mapping=slots[-2:],
        causal=True,
    )
    metadata = builder.build(0, common)
    assert metadata.block_table is step.table
    assert metadata.workspace is builder.build(0, common).workspace
    output = torch.full((3, 96), 7.0, dtype=step.dtype)
    assert impl.forward(layer, step.query, key, value, step.cache, metadata, output) is output
    assert _same(output.view_as(step.query), step.run(functions))
    assert step.worst(output.view_as(step.query)) <= 1.0
    assert not bool(impl.forward(layer, step.query, key, value, step.cache, None, output).any())
    for change in ({"causal": False}, {"causal": torch.ones(3)}):
        try:
            builder.build(0, SimpleNamespace(**{**vars(common), **change}))
        except FormatError:
            continue
        raise AssertionError("a step that is not causal was built")
    try:
        impl.forward(layer, step.query, key, value, step.cache, metadata, output, output_scale=torch.ones(1))
    except FormatError:
        return
    raise AssertionError("a fused output scale was taken")
