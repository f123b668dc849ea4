"""Drives an oracle window as a paged engine would: a pool, a scheduler told what to do, and a backend one can damage.

K, V and query of a row are fixed random functions of (layer, token). The backend shares nothing with the oracles but
the cache's encoding: attention is computed row by row in float64 over what the cache holds. Sizes differ pairwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_kvqual.kv import formats
from pytest_kvqual.oracles.window import LayerView, Window

HQ, HKV, SIZE, BLOCK, BLOCKS, LAYERS = 6, 3, 8, 4, 13, 2
TOKENS = 41
ROUNDING = 2.0**-8 / 2


@dataclass
class Maps:
    """What one layer's calls are handed in one step; a hook may change any of it."""

    layer: str
    slots: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, first: int, window: int | None
) -> torch.Tensor:
    """Rows ``[n, Hq, D]`` of positions ``first`` on over K and V ``[L, Hkv, D]``, one row at a time, in float64."""
    rows = []
    group = query.shape[1] // key.shape[1]
    for row in range(query.shape[0]):
        last = min(first + row + 1, key.shape[0])
        begin = 0 if window is None else max(0, first + row + 1 - window)
        keys, values = (it[begin:last].double().repeat_interleave(group, dim=1) for it in (key, value))
        scores = torch.einsum("hd,lhd->hl", query[row].double(), keys) * SIZE**-0.5
        rows.append(torch.einsum("hl,lhd->hd", torch.softmax(scores, dim=1), values))
    return torch.stack(rows)


@dataclass
class Driver:
    """One rank: ``layers`` layers over a pool, and the window over them."""

    kv_format: str = "k16v8"
    declared: bool = True
    layers: int = LAYERS
    probe: bool = False
    fills: bool = False
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    on_maps: Callable[[Maps], None] = lambda maps: None
    on_write: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = lambda key, value: (
        key,
        value,
    )
    after_write: Callable[[str, torch.Tensor], None] = lambda layer, cache: None
    after_attend: Callable[[str, torch.Tensor], None] = lambda layer, cache: None
    on_output: Callable[[str, torch.Tensor], None] = lambda layer, output: None
    read: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = lambda key, value: (key, value)
    skip_update: bool = False
    skip_attend: bool = False
    update_rows: int | None = None
    tokens: dict[str, list[int]] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        if formats.needs_layout(self.kv_format):
            order = torch.randperm(2 * BLOCK * SIZE, generator=random)
            layout = formats.LayoutPermutation(
                k=order[: BLOCK * SIZE].view(BLOCK, SIZE), v=order[BLOCK * SIZE :].view(BLOCK, SIZE)
            )
            self.codec = formats.declared(self.kv_format, dtype=self.dtype, layout=layout)
        else:
            self.codec = formats.declared(self.kv_format, dtype=self.dtype)
        self.caches: dict[str, torch.Tensor] = {}
        self.sources: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.scales: dict[str, float] = {}
        views = []
        for number in range(self.layers):
            name = f"layers.{number}.attn"
            if self.kv_format in ("k16v16", "cpu-attn-bf16"):
                cache = torch.randn(BLOCKS, HKV, BLOCK, 2 * SIZE, generator=random).to(self.dtype)
            else:
                per_cell = formats.cell_bytes(self.codec, SIZE)
                cache = torch.randint(0, 256, (BLOCKS, HKV, BLOCK, per_cell), generator=random).to(torch.uint8)
            self.caches[name] = cache
            self.scales[name] = 0.01 * (1 + number) if self.kv_format in ("k16v8", "k8v8") else 1.0
            self.sources[name] = tuple(  # type: ignore[assignment]  # three tensors
                torch.randn(TOKENS, heads, SIZE, generator=random).to(self.dtype) for heads in (HQ, HKV, HKV)
            )
            views.append(
                LayerView(
                    name=name,
                    cache=cache,
                    codec=self.codec if self.declared else formats.Undeclared(name="a-stock-format"),
                    v_scale=self.scales[name],
                    query_heads=HQ,
                    kv_heads=HKV,
                    head_size=SIZE,
                    softmax_scale=SIZE**-0.5,
                    window=self.window,
                )
            )
        self.oracle = Window(
            views,
            block_size=BLOCK,
            rounding=float(torch.finfo(self.dtype).eps) / 2,
            probe=self.probe,
            fills=self.fills,
        )
        self.oracle.open()

    # the scheduler

    def admit(
        self, name: str, tokens: Sequence[int], blocks: Sequence[int], *, cached: int = 0, identity: str = ""
    ) -> None:
        """Admits a request to the window and to the engine."""
        self.tokens[name], self.blocks[name] = list(tokens), list(blocks)
        self.oracle.admit(name, tokens=tokens, blocks=blocks, cached=cached, identity=identity)

    def grant(self, name: str, blocks: Sequence[int]) -> None:
        """Further blocks of a request."""
        self.blocks[name] += blocks
        self.oracle.grant(name, blocks)

    def sampled(self, name: str, tokens: Sequence[int]) -> None:
        """Tokens that a step appended."""
        self.tokens[name] += tokens
        self.oracle.sampled(name, tokens)

    # one step

    def step(self, rows: Sequence[tuple[str, int, int]], *, padding: int = 0, pad_slot: int = -1) -> None:
        """Runs one step of (request, start, scheduled) rows through every layer."""
        fed, slots, starts, lengths = [], [], [0], []
        width = max((len(self.blocks.get(name, ())) for name, *_ in rows), default=0) + 2
        table = torch.full((len(rows), width), BLOCKS - 2, dtype=torch.int32)
        for row, (name, start, count) in enumerate(rows):
            blocks, tokens = self.blocks.get(name, []), self.tokens.get(name, [])
            fed += [tokens[at] if at < len(tokens) else 0 for at in range(start, start + count)]
            slots += [
                blocks[at // BLOCK] * BLOCK + at % BLOCK if at // BLOCK < len(blocks) else -1
                for at in range(start, start + count)
            ]
            starts.append(starts[-1] + count)
            lengths.append(start + count)
            table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        ids = torch.tensor([*fed, *([0] * padding)], dtype=torch.int64)
        self.oracle.begin(rows, ids)
        for name in self.caches:
            maps = Maps(
                layer=name,
                slots=torch.tensor([*slots, *([pad_slot] * padding)], dtype=torch.int64),
                table=table.clone(),
                lengths=torch.tensor(lengths, dtype=torch.int32),
                starts=torch.tensor(starts, dtype=torch.int32),
            )
            self.on_maps(maps)
            self._layer(name, ids, maps)

    def _layer(self, name: str, ids: torch.Tensor, maps: Maps) -> None:
        cache = self.caches[name]
        query, key, value = (source[ids] for source in self.sources[name])

        def write(key: torch.Tensor, value: torch.Tensor) -> None:
            key, value = self.on_write(key, value)
            keep = (maps.slots >= 0) & (maps.slots < BLOCKS * BLOCK)
            count = min(key.shape[0], keep.numel())
            keep = keep[:count]
            cells = self.codec.encode(key[:count][keep].clone(), value[:count][keep].clone(), self.scales[name])
            self.codec.place(cache, maps.slots[:count][keep], cells)
            self.after_write(name, cache)

        if not self.skip_update:
            count = self.update_rows
            self.oracle.update(name, key[:count], value[:count], maps.slots, write=write)
        output = torch.full((ids.numel(), HQ * SIZE), 7.0, dtype=self.dtype)

        def run(query: torch.Tensor, key: Any, value: Any) -> str:
            self._attend(name, query, maps, output)
            self.on_output(name, output)
            return "ran"

        if not self.skip_attend:
            found = self.oracle.attend(
                name,
                query,
                key,
                value,
                block_table=maps.table,
                seq_lens=maps.lengths,
                query_start_loc=maps.starts,
                output=output,
                run=run,
            )
            assert found == "ran"
            self.outputs.append(output.clone())
            self.after_attend(name, cache)

    def _attend(self, name: str, query: torch.Tensor, maps: Maps, output: torch.Tensor) -> None:
        """What a backend does: it follows the maps, wherever they lead inside the pool."""
        for row in range(min(maps.table.shape[0], maps.lengths.numel(), maps.starts.numel() - 1)):
            first, last, length = int(maps.starts[row]), int(maps.starts[row + 1]), int(maps.lengths[row])
            if not 0 <= first < last <= output.shape[0] or length < 1:
                continue
            positions = torch.arange(min(length, maps.table.shape[1] * BLOCK))
            slots = maps.table[row, positions // BLOCK].long() * BLOCK + positions % BLOCK
            cells = self.codec.read(self.caches[name], slots.clamp(0, BLOCKS * BLOCK - 1))
            key, value = self.read(*self.codec.decode(cells, self.scales[name]))
            made = attention(query[first:last], key, value, first=length - (last - first), window=self.window)
            output[first:last] = made.reshape(last - first, -1).to(output.dtype)

    def finish(self) -> dict[str, Any]:
        """The record of the window."""
        return self.oracle.finish()


SECTIONS = ("row_map", "stale-maps", "routing", "shifted-outputs", "placement", "replay")


def findings(record: dict[str, Any]) -> dict[str, dict[str, int]]:
    """The kinds that were found, by section, without the sections that found nothing."""
    return {name: record[name]["kinds"] for name in SECTIONS if record[name]["findings_total"]}


def workload(driver: Driver, *, base: int = 1) -> None:
    """Chunked prefill beside decodes, lengths around a block, a shrinking batch, reused blocks, padding."""
    first = [(base + 3 * at) % TOKENS for at in range(9)]
    second = [(base + 7 + 5 * at) % TOKENS for at in range(4)]
    third = [(base + 11 + 2 * at) % TOKENS for at in range(3)]
    driver.admit("a", first, [7, 2])
    driver.admit("b", second, [5])
    driver.step([("a", 0, 5), ("b", 0, 4)])
    driver.sampled("b", [3])
    driver.grant("b", [9])
    driver.grant("a", [12])
    driver.admit("c", third, [1])
    driver.step([("b", 4, 1), ("a", 5, 4), ("c", 0, 3)], padding=2)
    driver.sampled("b", [6])
    driver.sampled("a", [8])
    driver.sampled("c", [10])
    driver.step([("c", 3, 1), ("a", 9, 1)])
    driver.oracle.release("b")
    driver.sampled("a", [2])
    driver.admit("d", [*third, 4, 9], [5, 9])
    driver.step([("a", 10, 1), ("d", 0, 5)], padding=1)
