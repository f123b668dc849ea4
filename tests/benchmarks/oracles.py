"""What the oracles cost on one core: cells and rows compared per second, and the memory of a window.

    python tests/benchmarks/oracles.py

A cell is one (slot, KV head). Exits 1 where the shadow comparison is below 1,000,000 cells per second in any format and
geometry, or a window over 2,800 tokens of SmolLM2 takes more than 2 GiB.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_kvqual.kv import formats
from pytest_kvqual.kv.formats import Cells, Format
from pytest_kvqual.oracles import placement
from pytest_kvqual.oracles.findings import Tally
from pytest_kvqual.oracles.shadow import Shadow, differing
from pytest_kvqual.oracles.step import RowRequest, plan_step
from pytest_kvqual.oracles.window import LayerView, Window

CELLS_PER_SECOND = 1_000_000
WINDOW_MIB = 2048
BLOCK = 32
FORMATS = ("k16v8", "k16v16", "cpu-attn-bf16")
_AT_LEAST_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Heads of one attention layer."""

    name: str
    query_heads: int
    kv_heads: int
    size: int


SMOLLM2 = Geometry(name="SmolLM2", query_heads=9, kv_heads=3, size=64)
QWEN3 = Geometry(name="Qwen3-8B", query_heads=32, kv_heads=8, size=128)


def _codec(name: str, size: int) -> Format:
    order = torch.randperm(2 * BLOCK * size, generator=torch.Generator().manual_seed(1)).view(2, BLOCK, size)
    layout = formats.LayoutPermutation(k=order[0], v=order[1])
    return formats.declared(name, layout=layout if name == "cpu-attn-bf16" else None)


def _cache(codec: Format, geometry: Geometry, blocks: int) -> torch.Tensor:
    shape = (blocks, geometry.kv_heads, BLOCK, formats.cell_bytes(codec, geometry.size))
    raw = torch.randint(0, 128, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    return raw if codec.name == "k16v8" else raw.view(torch.bfloat16)


def _rate(work: Callable[[], int]) -> float:
    """Units per second of ``work``, which returns how many it did; the best of the calls within half a second."""
    best, end = 0.0, time.perf_counter() + _AT_LEAST_S
    work()
    while time.perf_counter() < end:
        begun = time.perf_counter()
        done = work()
        best = max(best, done / (time.perf_counter() - begun))
    return best


def shadow_rate(name: str, geometry: Geometry, blocks: int = 100) -> float:
    """Cells per second of the comparison of a layer with its shadow."""
    codec = _codec(name, geometry.size)
    cache = _cache(codec, geometry, blocks)
    held = Shadow({"L": (cache, codec)}, BLOCK)
    held.adopt(list(range(1, blocks)))

    def compare() -> int:
        cells, wrong = held.compare("L")
        assert wrong is None
        return cells

    return _rate(compare)


def history_rate(name: str, geometry: Geometry, length: int = 1024) -> float:
    """Cells per second of gathering a history through a table and comparing it with the ledger's."""
    codec = _codec(name, geometry.size)
    cache = _cache(codec, geometry, length // BLOCK + 1)
    slots = torch.randperm(length // BLOCK).repeat_interleave(BLOCK) * BLOCK + torch.arange(BLOCK).repeat(
        length // BLOCK
    )
    cells = codec.read(cache, slots)
    joined = torch.cat([cells.k, cells.v], dim=-1)
    split = cells.k.shape[-1]

    def gather() -> int:
        expected = Cells(k=joined[..., :split].contiguous(), v=joined[..., split:].contiguous())
        wrong = differing(slots, codec.read(cache, slots), expected)
        assert not wrong.slots.numel()
        return length * geometry.kv_heads

    return _rate(gather)


def placement_rate(geometry: Geometry, length: int, rows: int) -> float:
    """Rows per second of one request's reference and its check, ``rows`` rows at the end of ``length`` positions."""
    random = torch.Generator().manual_seed(3)
    query = torch.randn(rows, geometry.query_heads, geometry.size, generator=random).bfloat16()
    key, value = (torch.randn(length, geometry.kv_heads, geometry.size, generator=random) for _ in range(2))
    plan = plan_step([RowRequest(request="a", start=length - rows, scheduled=rows, blocks=())], BLOCK)

    def check() -> int:
        reference = placement.attention(
            query, key, value, start=length - rows, scale=geometry.size**-0.5, rounding=2.0**-8
        )
        output = reference.output.bfloat16()
        tally = Tally()
        placement.check_rows(tally, plan, layer="L", output=output, reference=reference)
        assert not tally.findings_total
        return rows

    return _rate(check)


def window_memory(tokens: int = 2800, layers: int = 30, requests: int = 12) -> None:
    """Prints the peak resident memory that a window over SmolLM2 adds to the engine's cache and inputs, in MiB."""
    geometry, codec = SMOLLM2, _codec("k16v8", SMOLLM2.size)
    each = tokens // requests
    per_request = -(-each // BLOCK)
    blocks = requests * per_request + 1
    caches = [_cache(codec, geometry, blocks) for _ in range(layers)]
    views = [
        LayerView(
            name=f"layers.{number}.attn",
            cache=cache,
            codec=codec,
            v_scale=0.01,
            query_heads=geometry.query_heads,
            kv_heads=geometry.kv_heads,
            head_size=geometry.size,
            softmax_scale=geometry.size**-0.5,
        )
        for number, cache in enumerate(caches)
    ]
    query = torch.randn(512, geometry.query_heads, geometry.size).bfloat16()
    key, value = (torch.randn(512, geometry.kv_heads, geometry.size).bfloat16() for _ in range(2))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = pages * resource.getpagesize() // 1024
    window = Window(views, block_size=BLOCK, rounding=2.0**-8)
    window.open()
    begun = time.perf_counter()
    for number in range(requests):
        name = f"r{number}"
        held = list(range(1 + number * per_request, 1 + (number + 1) * per_request))
        window.admit(name, tokens=list(range(each)), blocks=held)
        plan = window.begin([(name, 0, each)], torch.arange(each))
        for view in views:
            _layer(window, view, plan.slots, query[:each], key[:each], value[:each], held)
        if number % 2:
            window.release(name)
    record: Any = window.finish()
    # The output is attention by the reference itself: what is measured is the window, not a backend.
    assert record["routing"]["findings_total"] == record["placement"]["findings_total"] == 0, record["routing"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{(peak - before) / 1024:.0f} {time.perf_counter() - begun:.1f}")


def _layer(
    window: Window,
    view: LayerView,
    slots: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: list[int],
) -> None:
    rows = query.shape[0]
    cells = view.codec.encode(key, value, view.v_scale)
    window.update(view.name, key, value, slots, write=lambda key, value: view.codec.place(view.cache, slots, cells))
    output = torch.empty_like(query)

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        decoded = view.codec.decode(cells, view.v_scale)
        output.copy_(placement.attention(query, *decoded, start=0, scale=view.softmax_scale, rounding=2.0**-8).output)

    window.attend(
        view.name,
        query,
        key,
        value,
        block_table=torch.tensor([blocks]),
        seq_lens=torch.tensor([rows]),
        query_start_loc=torch.tensor([0, rows]),
        output=output,
        run=run,
    )


def main() -> int:
    """Prints the table; 1 where a limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window-memory", action="store_true", help="print the memory of a window, in this process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.window_memory:
        window_memory()
        return 0
    good = True
    print(f"{'':28s} {'SmolLM2':>12s} {'Qwen3-8B':>12s}")
    for name in FORMATS:
        rates = [shadow_rate(name, geometry) for geometry in (SMOLLM2, QWEN3)]
        good = good and all(rate >= CELLS_PER_SECOND for rate in rates)
        print(f"{f'shadow {name}, cells/s':28s} " + " ".join(f"{rate:12,.0f}" for rate in rates))
    for name in FORMATS:
        rates = [history_rate(name, geometry) for geometry in (SMOLLM2, QWEN3)]
        print(f"{f'history {name}, cells/s':28s} " + " ".join(f"{rate:12,.0f}" for rate in rates))
    for length, rows in ((64, 1), (1024, 1), (256, 256), (1024, 512)):
        rates = [placement_rate(geometry, length, rows) for geometry in (SMOLLM2, QWEN3)]
        print(f"{f'placement {rows} of {length}, rows/s':28s} " + " ".join(f"{rate:12,.0f}" for rate in rates))
    # In a process of its own: the peak is of the window and of nothing that was measured before.
    answer = subprocess.run(
        [sys.executable, __file__, "--window-memory"], check=True, capture_output=True, text=True
    ).stdout.split()
    good = good and float(answer[0]) <= WINDOW_MIB
    print(f"window of 2,800 tokens and 30 layers of SmolLM2: {answer[0]} MiB, {answer[1]} s")
    print(f"limits: {CELLS_PER_SECOND:,} cells/s of the shadow, {WINDOW_MIB} MiB: {'met' if good else 'NOT met'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
