"""A paged-attention engine without a model: scheduler, block pool, prefix cache, runner and layers over one backend.

K, V and query of a token are fixed random functions of (layer, identity, token, position); outputs do not feed the next
layer, so that a fault in one layer stays there. The scheduler's decisions go to the oracle windows as they are made;
what the runner derives from them goes to the backend, and the windows compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from pytest_kvqual.errors import FormatError
from pytest_kvqual.kv import formats
from pytest_kvqual.kv.formats import Format
from pytest_kvqual.kv.geometry import Geometry

DEFAULT_GEOMETRY = Geometry(query_heads=6, kv_heads=3, head_size=16, block_size=8)
"""Head counts, group, block and head size pairwise different: an index taken from the wrong one is out of place."""

VOCABULARY = 97
TAKEN_BACK = -1
"""Stands in ``Request.blocks`` for a block that lay before the window."""

_PLACES = 256
_OUTLIER = 3
_IDENTITIES = 16


class Backend(Protocol):
    """``write`` and ``attend`` of ``pytest_kvqual.kv.backends.paged``'s shapes.

    An optional attribute ``takes`` names what ``attend`` accepts beyond them: ``k_scale``, ``window``.
    """

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        k_scale: float = ...,
        v_scale: float = ...,
    ) -> object:
        """Stores K and V of each row in its slot; slot -1 is skipped."""

    @property
    def attend(self) -> Callable[..., object]:
        """``attend(query, cache, block_table, seq_lens, query_start_loc, *, scale, v_scale, output)``."""


# -- What the scheduler holds ---------------------------------------------------------------------------------------


@dataclass
class Request:
    """One request as the scheduler knows it: ``computed`` of ``tokens`` are in ``blocks``."""

    name: str
    tokens: list[int]
    identity: str = ""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    running: bool = False
    published: int = 0


class BlockPool:
    """Free blocks and the holders of the others. Block 0 is never granted.

    ``take`` grants the most recently freed block first; blocks in shuffled order at the start, the topmost one second.
    Seams: ``take``, ``give``, ``share``.
    """

    def __init__(self, blocks: int, generator: torch.Generator) -> None:
        self.free: list[int] = (torch.randperm(blocks - 2, generator=generator) + 1).tolist()
        self.free.insert(len(self.free) - 1, blocks - 1)
        self.holders: dict[int, int] = {}

    def take(self, count: int) -> list[int]:
        """Grants ``count`` blocks.

        Raises:
            FormatError: Fewer blocks are free.
        """
        if count > len(self.free):
            raise FormatError(f"found {len(self.free)} free blocks, expected {count}, in the transfer engine's pool")
        blocks = [self.free.pop() for _ in range(count)]
        for block in blocks:
            self.holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a holder to each block, which may be free but still hold a prefix."""
        for block in blocks:
            if self.holders.get(block, 0) == 0:
                self.free.remove(block)
            self.holders[block] = self.holders.get(block, 0) + 1

    def give(self, blocks: Iterable[int], *, keep: Callable[[int], bool] = lambda block: False) -> None:
        """Takes a holder from each block; those that nobody holds are free, the ones to ``keep`` to be granted last."""
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free.insert(0 if keep(block) else len(self.free), block)


class PrefixCache:
    """Which block holds the K and V of which hashed prefix. Seams: ``match``, ``publish``, ``evict``."""

    def __init__(self) -> None:
        self.block_of: dict[object, int] = {}
        self.hash_of: dict[int, object] = {}

    def match(self, hashes: Sequence[object]) -> list[int]:
        """The blocks of the longest known run of leading hashes."""
        found = []
        for key in hashes:
            if key not in self.block_of:
                break
            found.append(self.block_of[key])
        return found

    def publish(self, key: object, block: int) -> None:
        """Makes a full block known; the first block of a hash stays."""
        if key not in self.block_of and block not in self.hash_of:
            self.block_of[key] = block
            self.hash_of[block] = key

    def evict(self, block: int) -> None:
        """Forgets a block that is granted anew."""
        key = self.hash_of.pop(block, None)
        if key is not None:
            del self.block_of[key]

    def holds(self, block: int) -> bool:
        """Whether a prefix points to the block."""
        return block in self.hash_of


# -- What the runner holds --------------------------------------------------------------------------------------------


@dataclass
class RunnerState:
    """One request as the runner knows it from what the scheduler sent."""

    tokens: list[int]
    identity: int
    blocks: list[int]
    computed: int


@dataclass
class StepInputs:
    """What a step's layers are given, on the host or on the device.

    ``tokens``, ``positions``, ``identities``, ``slot_mapping`` int64 ``[T + padding]``; ``block_table`` int32
    ``[R, B]``; ``seq_lens`` int32 ``[R]``; ``query_start_loc`` int32 ``[R + 1]``.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    identities: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        return dict(vars(self))


class Runner:
    """The persistent batch: one row per scheduled request, and a block table whose rows keep stale tails.

    Seams: ``add``, ``extend``, ``remove``, ``drop``, ``move``, ``swap``, ``arrange``, ``advance``, ``forget``.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.states: dict[str, RunnerState] = {}
        self.names: list[str] = []
        self.table = torch.zeros(rows, width, dtype=torch.int32)
        self.counts = [0] * rows

    def learn(self, name: str, state: RunnerState) -> None:
        """A new or resumed request."""
        self.states[name] = state

    def forget(self, name: str) -> None:
        """A finished or preempted request."""
        if name in self.names:
            self.remove(name)
        self.states.pop(name, None)

    def extend(self, name: str, blocks: Sequence[int]) -> None:
        """Further blocks of a known request."""
        state = self.states[name]
        if name in self.names:
            row = self.names.index(name)
            self._write(row, self.counts[row], blocks)
        state.blocks.extend(blocks)

    def drop(self, name: str, logical: int) -> None:
        """A block of a request that was taken back: block 0 stands in its place."""
        self.states[name].blocks[logical] = 0
        if name in self.names:
            self.table[self.names.index(name), logical] = 0

    def add(self, name: str) -> None:
        """Gives a request the next row."""
        self.names.append(name)
        self._write(len(self.names) - 1, 0, self.states[name].blocks)

    def _write(self, row: int, at: int, blocks: Sequence[int]) -> None:
        self.table[row, at : at + len(blocks)] = torch.tensor(list(blocks), dtype=torch.int32)
        self.counts[row] = at + len(blocks)

    def remove(self, name: str) -> None:
        """Takes a request's row away; the last row moves into the gap."""
        row, last = self.names.index(name), len(self.names) - 1
        if row != last:
            self.move(last, row)
            self.names[row] = self.names[last]
        self.names.pop()

    def move(self, source: int, target: int) -> None:
        """Copies the live entries of a table row; what lies behind them in the target stays."""
        count = self.counts[source]
        self.table[target, :count] = self.table[source, :count]
        self.counts[target] = count

    def swap(self, left: int, right: int) -> None:
        """Exchanges two rows."""
        self.table[[left, right]] = self.table[[right, left]]
        self.counts[left], self.counts[right] = self.counts[right], self.counts[left]
        self.names[left], self.names[right] = self.names[right], self.names[left]

    def arrange(self, order: Sequence[str]) -> None:
        """Brings the rows into an order."""
        for row, name in enumerate(order):
            found = self.names.index(name)
            if found != row:
                self.swap(row, found)

    def advance(self, name: str, *, scheduled: int, kept: int, tokens: Sequence[int]) -> None:
        """After a step: ``kept`` of the ``scheduled`` positions count, and ``tokens`` follow the known ones."""
        state = self.states[name]
        state.computed += kept
        state.tokens.extend(tokens)


class Builder:
    """Makes the attention metadata of a step from its device inputs; a fault may wrap ``build``."""

    def build(self, inputs: StepInputs) -> SimpleNamespace:
        """``block_table``, ``seq_lens``, ``query_start_loc``, ``slot_mapping`` as the inputs say."""
        return SimpleNamespace(
            block_table=inputs.block_table,
            seq_lens=inputs.seq_lens,
            query_start_loc=inputs.query_start_loc,
            slot_mapping=inputs.slot_mapping,
            causal=True,
        )


# -- Layers -----------------------------------------------------------------------------------------------------------


class Impl:
    """The attention of one layer: hands what it is given to the backend, with the layer's scales."""

    def __init__(self, backend: Backend, geometry: Geometry, window: int | None) -> None:
        self.backend = backend
        self.num_heads = geometry.query_heads
        self.num_kv_heads = geometry.kv_heads
        self.head_size = geometry.head_size
        self.scale = geometry.head_size**-0.5
        self.window = window

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        """Writes K and V ``[T, Hkv, D]`` to the slots."""
        self.backend.write(
            key, value, kv_cache, slot_mapping, k_scale=layer._k_scale_float, v_scale=layer._v_scale_float
        )

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, output: Any
    ) -> torch.Tensor:
        """Attention of ``query [T, Hq, D]`` into ``output`` of the same shape."""
        offered = {"k_scale": layer._k_scale_float, "window": self.window}
        takes = getattr(self.backend, "takes", ())
        self.backend.attend(
            query,
            kv_cache,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            scale=self.scale,
            v_scale=layer._v_scale_float,
            output=output,
            **{name: value for name, value in offered.items() if name in takes},
        )
        return output  # type: ignore[no-any-return]  # the caller's tensor


@dataclass
class Rank:
    """One tensor-parallel rank: its layers, its heads (``query`` and ``kv``: first and count) and its window."""

    number: int
    geometry: Geometry
    layers: dict[str, Any]
    query: tuple[int, int]
    kv: tuple[int, int]
    window: Any = None


def rank_heads(geometry: Geometry, ranks: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """First and count of a rank's query heads and of its KV heads; KV heads are replicated when ranks outnumber them.

    Raises:
        FormatError: The heads do not divide among the ranks.
    """
    heads, kv = geometry.query_heads, geometry.kv_heads
    if heads % ranks or (kv % ranks and ranks % kv):
        raise FormatError(f"found {heads} query and {kv} KV heads, expected heads that divide among {ranks} ranks")
    own = max(1, kv // ranks)
    first = rank * own if ranks <= kv else rank // (ranks // kv)
    return (rank * (heads // ranks), heads // ranks), (first, own)


class _Projection:
    """Query, K and V of one layer as functions of (identity, token, position)."""

    def __init__(self, geometry: Geometry, seed: int) -> None:
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        self._sizes = [heads * geometry.head_size for heads in (geometry.query_heads, *[geometry.kv_heads] * 2)]
        self._head_size = geometry.head_size
        self._tokens = [torch.randn(VOCABULARY, size, generator=generator) for size in self._sizes]
        self._identities = [torch.randn(_IDENTITIES, size, generator=generator) for size in self._sizes]
        self._places: list[list[torch.Tensor]] = [[], [], []]

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, identities: torch.Tensor) -> list[torch.Tensor]:
        """Query ``[T, Hq, D]``, K and V ``[T, Hkv, D]`` in float32."""
        last = int(positions.max()) if positions.numel() else 0
        while len(self._places[0]) <= last // _PLACES:
            generator = torch.Generator().manual_seed(self._seed * 1009 + len(self._places[0]) + 1)
            for kind, size in enumerate(self._sizes):
                self._places[kind].append(torch.randn(_PLACES, size, generator=generator))
        found = []
        for kind in range(3):
            places = self._places[kind][0] if len(self._places[kind]) == 1 else torch.cat(self._places[kind])
            mixed = self._tokens[kind][tokens] + places[positions] + self._identities[kind][identities]
            vectors = (mixed * 3**-0.5).view(len(tokens), -1, self._head_size)
            if kind:
                vectors[..., _OUTLIER % self._head_size] *= 4.0
            found.append(vectors)
        return found


# -- The engine -------------------------------------------------------------------------------------------------------


class TransferEngine:
    """Scheduler, runner and attention layers over one backend; doubles as the worker that faults are planted in.

    Args:
        geometry: Head counts, head size and block size of the whole model.
        backend: ``write`` and ``attend``; its parts are seams too (see ``kv.backends.exemplar.Exemplar``).
        kv_format: ``k16v16``, ``k16v8``, ``k8v8`` or ``k8v8-inline``.
        layers: Attention layers.
        blocks: Blocks of the pool; block 0 is never granted.
        seed: Of K, V, query and sampling.
        pool_seed: Of the pool's order and of what it holds before anything is written; None: ``seed``.
        gap: Bytes that lie between two blocks of a cache: caches are strided.
        windows: Sliding window of each layer, repeated over the layers; None: all positions. Needs a backend that takes
            ``window``.
        ranks: Tensor-parallel ranks, each with its own caches and its own oracle window.
        rows: Rows of the persistent batch.
        static: ``(rows, tokens)`` of fixed input buffers that each step refreshes, as a captured graph has them; None:
            fresh tensors in each step.
        evict: Whether blocks that lie before the window of every layer are taken back from running requests.
        prefix_cache: Whether full blocks are found again by their hash.
        decode_first: Whether the runner brings requests with one row to the front; else rows follow the batch as given.
        dtype: The 16-bit dtype of K, V, query and output.

    What drives it: ``open``, ``submit``, ``step``, ``finish``, ``preempt``, ``fork``, ``offload``, ``close``.

    What a seeded fault replaces (as an instance attribute; undo through ``kvqual_undo``):

    =======================  ==========================================================================================
    ``pool``                 ``take``, ``give``, ``share``: grants, freeing, holders of shared blocks
    ``prefix_cache``         ``match``, ``publish``, ``evict``: what is found, what a recycled block leaves behind
    ``block_hash``           the key of a block: (parent key, tokens, identity)
    ``copy_block``           the copy of a partly filled block when a request is forked
    ``save_block``           a block to host memory, all ranks' heads; ``when_saved`` says when: after the step's writes
    ``restore_block``        host memory to a block, each rank its heads
    ``rank_heads``           which KV heads of a saved block are a rank's
    ``resume_tokens``        the tokens that the runner is told of a new or resumed request
    ``evictable``            which logical blocks of a request lie before every layer's window
    ``runner``               ``add``, ``extend``, ``remove``, ``drop``, ``move``, ``swap``, ``arrange``,
                             ``advance``, ``forget``
    ``row_order``            the request-to-row map that the windows are told
    ``slot_mapping``         slots from (block table, rows, positions)
    ``host_buffers``         how many host buffers take turns; ``fill`` writes one, ``run_ahead`` the next step's
    ``upload``               host to device: a copy, so that the host may run ahead
    ``refresh``              a step's inputs into the static buffers, padding neutralised
    ``builder``              ``build``: the attention metadata
    ``between``              called after the metadata is built and before the first layer runs
    ``project``              query, K and V of a rank's heads
    ``layer.impl``           ``do_kv_cache_update``, ``forward``
    ``backend``              the backend's own parts
    =======================  ==========================================================================================
    """

    def __init__(
        self,
        geometry: Geometry = DEFAULT_GEOMETRY,
        backend: Backend | None = None,
        *,
        kv_format: str = "k16v8",
        layers: int = 2,
        blocks: int = 48,
        seed: int = 0,
        pool_seed: int | None = None,
        gap: int = 64,
        windows: Sequence[int | None] = (None,),
        ranks: int = 1,
        rows: int = 16,
        static: tuple[int, int] | None = None,
        evict: bool = False,
        prefix_cache: bool = True,
        decode_first: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.geometry = geometry
        self.backend = backend if backend is not None else default_backend(kv_format)
        self.kv_format = kv_format
        self.dtype = dtype
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed if pool_seed is None else pool_seed)
        self.kvqual_undo: list[Callable[[], None]] = []
        self.block_size = geometry.block_size
        self.decode_first = decode_first
        self.caching = prefix_cache
        widest = [windows[index % len(windows)] for index in range(layers)]
        self.evict_window = max((w for w in widest if w is not None), default=0) if evict and None not in widest else 0
        self.pool = BlockPool(blocks, self.generator)
        self.prefix_cache = PrefixCache()
        self.requests: dict[str, Request] = {}
        self.host_store: dict[object, dict[str, torch.Tensor]] = {}
        self.runner = Runner(rows, blocks)
        self.builder = Builder()
        self.host_buffers = 2
        self._host: dict[int, StepInputs] = {}
        self._turn = 0
        self._static = None if static is None else self._buffers(*static)
        self._to_save: list[tuple[object, int]] = []
        self._identities: dict[str, int] = {}
        self.steps = 0
        self.outputs: dict[str, torch.Tensor] = {}
        names = [f"layers.{index}.attn" for index in range(layers)]
        self._projections = {name: _Projection(geometry, seed * 31 + i + 1) for i, name in enumerate(names)}
        self.ranks: list[Rank] = []
        for number in range(ranks):
            query, kv = rank_heads(geometry, ranks, number)
            own = Geometry(
                query_heads=query[1], kv_heads=kv[1], head_size=geometry.head_size, block_size=geometry.block_size
            )
            made = {
                name: self._layer(index, own, kv, windows[index % len(windows)], blocks, gap)
                for index, name in enumerate(names)
            }
            self.ranks.append(Rank(number=number, geometry=own, layers=made, query=query, kv=kv))

    def _layer(
        self, index: int, geometry: Geometry, kv: tuple[int, int], window: int | None, blocks: int, gap: int
    ) -> SimpleNamespace:
        eight_v, eight_k = self.kv_format != "k16v16", self.kv_format.startswith("k8")
        v_scale = 0.01 * (1 + index) if eight_v else 1.0
        k_scale = 0.004 * (2 + index) if eight_k else 1.0
        codec = self._codec(k_scale, kv)
        content = formats.cell_bytes(codec, geometry.head_size)
        tile = geometry.kv_heads * geometry.block_size * content
        raw = torch.randint(0, 256, (blocks, tile + gap), generator=self.generator, dtype=torch.uint8)
        if not eight_v:
            raw = raw.view(self.dtype)
        width = content // raw.element_size()
        heads, size = geometry.kv_heads, geometry.block_size
        cache = raw.as_strided((blocks, heads, size, width), (raw.shape[1], size * width, width, 1))
        return SimpleNamespace(
            impl=Impl(self.backend, geometry, window),
            kv_cache=cache,
            pool=raw,
            codec=codec,
            _k_scale_float=k_scale,
            _v_scale_float=v_scale,
            k_scale_declared=k_scale,
            v_scale_declared=v_scale,
        )

    def _codec(self, k_scale: float, kv: tuple[int, int]) -> Format:
        if self.kv_format != "k8v8":
            return formats.declared(self.kv_format, dtype=self.dtype)
        # Head factors are the backend's; across ranks each would need its own, so they are for one rank.
        return formats.K8V8(
            dtype=self.dtype,
            k_scale=k_scale,
            k_factors=tuple(getattr(self.backend, "k_factors", ())),
            v_factors=tuple(getattr(self.backend, "v_factors", ())),
        )

    # -- what faults use of a worker --------------------------------------------------------------------------------

    def kvqual_layers(self) -> dict[str, Any]:
        """The layers by name; with several ranks ``rankN.`` stands before the name."""
        if len(self.ranks) == 1:
            return self.ranks[0].layers
        return {f"rank{rank.number}.{name}": layer for rank in self.ranks for name, layer in rank.layers.items()}

    def kvqual_block_size(self) -> int:
        """Positions of one block."""
        return self.block_size

    def kvqual_codec(self, name: str) -> Format:
        """The declared encoding of a layer's cells."""
        return self.kvqual_layers()[name].codec  # type: ignore[no-any-return]  # a namespace

    def kvqual_metadata_builders(self) -> list[Builder]:
        """The builder of the steps' metadata."""
        return [self.builder]

    def undo(self) -> None:
        """Takes the planted faults back, the last one first."""
        while self.kvqual_undo:
            self.kvqual_undo.pop()()

    # -- life -------------------------------------------------------------------------------------------------------

    def views(self, rank: int = 0) -> list[Any]:
        """A ``LayerView`` of each layer of a rank."""
        from pytest_kvqual.oracles.window import LayerView

        held = self.ranks[rank]
        return [
            LayerView(
                name=name,
                cache=layer.kv_cache,
                codec=layer.codec,
                v_scale=layer.v_scale_declared,
                query_heads=held.geometry.query_heads,
                kv_heads=held.geometry.kv_heads,
                head_size=held.geometry.head_size,
                softmax_scale=layer.impl.scale,
                window=layer.impl.window,
            )
            for name, layer in held.layers.items()
        ]

    def open(self, *, probe: bool = False, fills: bool = False, make: Callable[..., Any] | None = None) -> list[Any]:
        """Opens an oracle window over each rank; no request may be in flight.

        ``make`` replaces ``oracles.window.Window`` and is called like it.
        """
        if make is None:
            from pytest_kvqual.oracles.window import Window

            make = Window
        rounding = float(torch.finfo(self.dtype).eps) / 2
        for rank in self.ranks:
            rank.window = make(
                self.views(rank.number), block_size=self.block_size, rounding=rounding, probe=probe, fills=fills
            )
            rank.window.open()
        return [rank.window for rank in self.ranks]

    def close(self) -> list[dict[str, object]]:
        """Finishes the windows and returns their records, one of each rank."""
        records = []
        for rank in self.ranks:
            if rank.window is not None:
                records.append({**rank.window.finish(), "rank": rank.number})
                rank.window = None
        return records

    def _tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        for rank in self.ranks:
            if rank.window is not None:
                getattr(rank.window, method)(*args, **kwargs)

    # -- what a client asks -------------------------------------------------------------------------------------------

    def submit(self, name: str, tokens: Sequence[int], *, identity: str = "") -> None:
        """A request that the next step which names it admits; ``identity`` (an adapter) changes its K and V."""
        self.requests[name] = Request(name, [int(token) for token in tokens], identity)

    def finish(self, name: str) -> None:
        """Ends a request; its blocks are free."""
        self._leave(self.requests.pop(name))

    def preempt(self, name: str) -> None:
        """Takes a request's blocks; the next step that names it computes it again, cached prefixes apart."""
        self._leave(self.requests[name])

    def _leave(self, request: Request) -> None:
        if not request.running:
            return
        self.pool.give([block for block in request.blocks if block != TAKEN_BACK], keep=self.prefix_cache.holds)
        request.blocks, request.computed, request.published, request.running = [], 0, 0, False
        self.runner.forget(request.name)
        self._tell("release", request.name)

    def fork(self, parent: str, child: str, token: int) -> None:
        """A second continuation of ``parent``: shares its full blocks, copies the partial one, goes on with ``token``.

        The tokens of which K and V are in the cache are shared; ``token`` is the child's own next one.
        """
        source = self.requests[parent]
        full, part = divmod(source.computed, self.block_size)
        request = Request(child, [*source.tokens[: source.computed], int(token)], source.identity)
        shared = source.blocks[:full]
        self.pool.share(block for block in shared if block != TAKEN_BACK)
        own = self._allocate(1) if part else []
        request.blocks = [*shared, *own]
        request.computed, request.published = source.computed, full
        self.requests[child] = request
        self._admit(request)
        for block in own:
            self.copy_block(source.blocks[full], block, part)

    def offload(self, name: str) -> None:
        """Copies a request's full blocks to host memory; a prefix that the pool lost is found there."""
        request = self.requests[name]
        for key, block in zip(self.hashes(request, request.computed), request.blocks, strict=False):
            if block != TAKEN_BACK:
                self._to_save.append((key, block))
        self.when_saved()

    def forget_prefixes(self) -> None:
        """Empties the prefix cache; what is in host memory stays."""
        for block in list(self.prefix_cache.hash_of):
            self.prefix_cache.evict(block)

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(
        self,
        batch: Sequence[tuple[str, int | None]],
        *,
        padding: int = 0,
        drafts: Mapping[str, Sequence[int]] | None = None,
        accept: Mapping[str, int] | None = None,
    ) -> dict[str, list[int]]:
        """Runs one step.

        Args:
            batch: Requests in row order with the tokens to compute now; None: all that are left.
            padding: Rows behind the last request's; ignored with static buffers, which pad to their size.
            drafts: Guessed tokens that follow a request's known ones; its count must reach into them.
            accept: How many of its drafts each request keeps; none when it is not named.

        Returns:
            The tokens that each request was given after the step.
        """
        guessed = {name: list(tokens) for name, tokens in (drafts or {}).items()}
        schedule: dict[str, int] = {}
        for name, count in batch:
            schedule[name] = self._schedule(self.requests[name], count, len(guessed.get(name, ())))
        self._place_rows(schedule)
        order = self.row_order(schedule)
        inputs = self.prepare(schedule, guessed, padding)
        metadata = self.metadata(inputs)
        self._tell("begin", order, inputs.tokens)
        self.between(metadata)
        self._forward(inputs, metadata)
        self.steps += 1
        sampled: dict[str, list[int]] = {}
        for name, count in schedule.items():
            sampled[name] = self._settle(self.requests[name], count, guessed.get(name, []), (accept or {}).get(name, 0))
        self.when_saved()
        return sampled

    def _schedule(self, request: Request, count: int | None, guessed: int) -> int:
        known = len(request.tokens) + guessed
        if not request.running:
            self._find_cached(request)
            fresh = True
        else:
            fresh = False
        count = known - request.computed if count is None else min(count, known - request.computed)
        needed = -(-(request.computed + count) // self.block_size)
        granted = self._allocate(max(0, needed - len(request.blocks)))
        if fresh:
            restored = request.published
            request.blocks += granted
            self._admit(request)
            self._restore(request, restored)
        elif granted:
            request.blocks += granted
            self.runner.extend(request.name, granted)
            self._tell("grant", request.name, granted)
        return count

    def _find_cached(self, request: Request) -> None:
        """Blocks of a new request that hold its prefix already; at least one token is left to compute."""
        keys = self.hashes(request, len(request.tokens) - 1) if self.caching else []
        found = self.prefix_cache.match(keys)
        self.pool.share(found)
        request.blocks = list(found)
        request.published = len(found)
        stored = 0
        while len(found) + stored < len(keys) and keys[len(found) + stored] in self.host_store:
            stored += 1
        request.blocks += self._allocate(stored)
        request.computed = len(request.blocks) * self.block_size

    def _restore(self, request: Request, first: int) -> None:
        keys = self.hashes(request, request.computed)
        for index in range(first, request.computed // self.block_size):
            self.restore_block(request.blocks[index], self.host_store[keys[index]])
        self._publish(request)

    def _admit(self, request: Request) -> None:
        request.running = True
        identity = self._identities.setdefault(request.identity, len(self._identities) % _IDENTITIES)
        self.runner.learn(
            request.name,
            RunnerState(
                tokens=self.resume_tokens(request),
                identity=identity,
                blocks=[0 if block == TAKEN_BACK else block for block in request.blocks],
                computed=request.computed,
            ),
        )
        self._tell(
            "admit",
            request.name,
            tokens=list(request.tokens),
            blocks=list(request.blocks),
            cached=request.computed,
            identity=request.identity,
        )

    def _allocate(self, count: int) -> list[int]:
        blocks = self.pool.take(count)
        for block in blocks:
            self.prefix_cache.evict(block)
        return blocks

    def _place_rows(self, schedule: Mapping[str, int]) -> None:
        for name in [name for name in self.runner.names if name not in schedule]:
            self.runner.remove(name)
        for name in schedule:
            if name not in self.runner.names:
                self.runner.add(name)
        order = list(schedule)
        if self.decode_first:
            order.sort(key=lambda name: schedule[name] > 1)
        self.runner.arrange(order)

    def _settle(self, request: Request, count: int, guessed: list[int], accepted: int) -> list[int]:
        """After a step: which positions count, and what was sampled."""
        end = request.computed + count
        new: list[int] = []
        kept = count
        if end >= len(request.tokens):
            tried = end - len(request.tokens)
            accepted = min(accepted, tried)
            kept = count - tried + accepted
            new = [*guessed[:accepted], self.sample(request, end - tried + accepted)]
        request.computed += kept
        request.tokens += new
        self.runner.advance(request.name, scheduled=count, kept=kept, tokens=new)
        if new:
            self._tell("sampled", request.name, new)
        self._publish(request)
        self._evict(request)
        return new

    def _evict(self, request: Request) -> None:
        for logical in self.evictable(request):
            block, request.blocks[logical] = request.blocks[logical], TAKEN_BACK
            self.runner.drop(request.name, logical)
            self._tell("evict", request.name, [logical])
            self.pool.give([block], keep=self.prefix_cache.holds)

    def evictable(self, request: Request) -> list[int]:
        """Logical blocks that no later row of a request sees in any layer."""
        if not self.evict_window:
            return []
        seen = max(0, request.computed - self.evict_window + 1)
        return [i for i in range(seen // self.block_size) if request.blocks[i] != TAKEN_BACK]

    def sample(self, request: Request, position: int) -> int:
        """The next token of a request: a fixed random function of its name and the position."""
        digest = hashlib.sha256(f"{self.seed}:{request.name}:{position}".encode()).digest()
        return int.from_bytes(digest[:4], "big") % VOCABULARY

    # -- prefixes -----------------------------------------------------------------------------------------------------

    def block_hash(self, parent: object, tokens: tuple[int, ...], identity: str) -> object:
        """The key of a full block: what it holds depends on all tokens up to its end and on the identity."""
        return hashlib.sha256(repr((parent, tokens, identity)).encode()).hexdigest()

    def hashes(self, request: Request, length: int) -> list[object]:
        """The keys of the full blocks among the first ``length`` positions."""
        keys: list[object] = []
        parent: object = None
        for start in range(0, length // self.block_size * self.block_size, self.block_size):
            tokens = tuple(request.tokens[start : start + self.block_size])
            parent = self.block_hash(parent, tokens, request.identity)
            keys.append(parent)
        return keys

    def _publish(self, request: Request) -> None:
        full = request.computed // self.block_size
        if not self.caching or full <= request.published:
            return
        keys = self.hashes(request, request.computed)
        for index in range(request.published, full):
            self.prefix_cache.publish(keys[index], request.blocks[index])
        request.published = full

    # -- copies of blocks ---------------------------------------------------------------------------------------------

    def copy_block(self, source: int, target: int, positions: int) -> None:
        """Copies the first ``positions`` positions of a block, in every layer and rank."""
        for rank in self.ranks:
            for layer in rank.layers.values():
                layer.kv_cache[target, :, :positions] = layer.kv_cache[source, :, :positions]

    def when_saved(self) -> None:
        """Copies the waiting blocks to host memory: after the step's writes, before a block is granted anew."""
        while self._to_save:
            key, block = self._to_save.pop(0)
            self.host_store[key] = self.save_block(block)

    def save_block(self, block: int) -> dict[str, torch.Tensor]:
        """Each layer's cells of a block with the KV heads of all ranks in order: ``[Hkv, block_size, content]``."""
        saved = {}
        for name in self._projections:
            heads: dict[int, torch.Tensor] = {}
            for rank in self.ranks:
                first, count = self.rank_heads(rank.number)
                cells = rank.layers[name].kv_cache[block]
                heads.update({first + head: cells[head].clone() for head in range(count)})
            saved[name] = torch.stack([heads[head] for head in sorted(heads)])
        return saved

    def restore_block(self, block: int, saved: Mapping[str, torch.Tensor]) -> None:
        """Writes a saved block: each rank its heads."""
        for rank in self.ranks:
            first, count = self.rank_heads(rank.number)
            for name, layer in rank.layers.items():
                layer.kv_cache[block] = saved[name][first : first + count]

    def rank_heads(self, rank: int) -> tuple[int, int]:
        """First and count of a rank's KV heads among all."""
        return self.ranks[rank].kv

    # -- what the runner derives --------------------------------------------------------------------------------------

    def resume_tokens(self, request: Request) -> list[int]:
        """The tokens that the runner is told of a new or resumed request."""
        return list(request.tokens)

    def row_order(self, schedule: Mapping[str, int]) -> list[tuple[str, int, int]]:
        """(request, start, scheduled) of each row, in row order, as the scheduler decided."""
        return [(name, self.requests[name].computed, schedule[name]) for name in self.runner.names]

    def slot_mapping(self, table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The slot of each (table row, position): int64 ``[T]``."""
        block = table[rows, positions // self.block_size].long()
        return block * self.block_size + positions % self.block_size

    def _buffers(self, rows: int, tokens: int) -> StepInputs:
        def whole(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype)

        return StepInputs(
            tokens=whole(tokens),
            positions=whole(tokens),
            identities=whole(tokens),
            slot_mapping=torch.full((tokens,), -1),
            block_table=whole(rows, self.runner.table.shape[1], dtype=torch.int32),
            seq_lens=whole(rows, dtype=torch.int32),
            query_start_loc=whole(rows + 1, dtype=torch.int32),
        )

    def prepare(self, schedule: Mapping[str, int], guessed: Mapping[str, Sequence[int]], padding: int) -> StepInputs:
        """Fills the host buffer whose turn it is and uploads it; then the host runs ahead into the next one."""
        host = self.fill(self._turn % self.host_buffers, schedule, guessed, padding)
        device = self.upload(host)
        self._turn += 1
        self.run_ahead(self._turn % self.host_buffers, host)
        return device

    def fill(
        self, buffer: int, schedule: Mapping[str, int], guessed: Mapping[str, Sequence[int]], padding: int
    ) -> StepInputs:
        """The step's inputs from the runner's rows, in a host buffer."""
        tokens: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        identities: list[int] = []
        starts, lengths = [0], []
        for row, name in enumerate(self.runner.names):
            state = self.runner.states[name]
            known = [*state.tokens, *guessed.get(name, ())]
            where = range(state.computed, state.computed + schedule[name])
            tokens += [known[position] if position < len(known) else 0 for position in where]
            positions += where
            rows += [row] * schedule[name]
            identities += [state.identity] * schedule[name]
            starts.append(len(tokens))
            lengths.append(state.computed + schedule[name])
        table = self.runner.table[: len(lengths)].clone()
        slots = self.slot_mapping(table, torch.tensor(rows, dtype=torch.int64), torch.tensor(positions))
        host = StepInputs(
            tokens=torch.tensor(tokens + [0] * padding),
            positions=torch.tensor(positions + [0] * padding),
            identities=torch.tensor(identities + [0] * padding),
            slot_mapping=torch.cat([slots, torch.full((padding,), -1)]),
            block_table=table,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
        )
        self._host[buffer] = host
        return host

    def upload(self, host: StepInputs) -> StepInputs:
        """The device's copy of a host buffer."""
        return StepInputs(**{name: tensor.clone() for name, tensor in host.tensors().items()})

    def run_ahead(self, buffer: int, current: StepInputs) -> None:
        """Writes a later step's inputs into a host buffer while the device has not run the current one yet.

        What the next step will be is not known, so another order of the same rows stands for it.
        """
        target = self._host.get(buffer)
        if target is None:
            return
        for name, tensor in target.tensors().items():
            source = getattr(current, name)
            if name in ("block_table", "seq_lens", "slot_mapping", "tokens"):
                source = source.roll(1, 0)
            if tensor.shape == source.shape:
                tensor.copy_(source)

    def metadata(self, inputs: StepInputs) -> Any:
        """The attention metadata; with static buffers ``inputs`` is replaced by them."""
        if self._static is not None:
            self.refresh(self._static, inputs)
            for name, tensor in self._static.tensors().items():
                setattr(inputs, name, tensor)
        return self.builder.build(inputs)

    def refresh(self, static: StepInputs, inputs: StepInputs) -> None:
        """Copies a step's inputs into the static buffers and neutralises what lies behind them.

        Padding rows of the batch have length 0 and no query rows; padding tokens have slot -1.

        Raises:
            FormatError: The step is larger than the buffers.
        """
        rows, tokens = inputs.seq_lens.numel(), inputs.tokens.numel()
        if rows > static.seq_lens.numel() or tokens > static.tokens.numel():
            raise FormatError(
                f"found a step of {rows} requests and {tokens} rows, expected at most {static.seq_lens.numel()} and "
                f"{static.tokens.numel()}, in static buffers"
            )
        for name in ("tokens", "positions", "identities", "slot_mapping"):
            buffer = getattr(static, name)
            buffer[:tokens] = getattr(inputs, name)
            buffer[tokens:] = -1 if name == "slot_mapping" else 0
        static.block_table[:rows] = inputs.block_table
        static.block_table[rows:] = 0
        static.seq_lens[:rows] = inputs.seq_lens
        static.seq_lens[rows:] = 0
        static.query_start_loc[: rows + 1] = inputs.query_start_loc
        static.query_start_loc[rows + 1 :] = inputs.query_start_loc[-1]

    def between(self, metadata: Any) -> None:
        """Runs after the metadata is built and before the first layer."""

    # -- layers -------------------------------------------------------------------------------------------------------

    def project(self, rank: Rank, layer: str, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, K and V of a rank's heads: ``[T, Hq, D]`` and twice ``[T, Hkv, D]``."""
        query, key, value = self._projections[layer](inputs.tokens, inputs.positions, inputs.identities)
        first, count = rank.query
        kv_first, kv_count = rank.kv
        return (
            query[:, first : first + count].to(self.dtype),
            key[:, kv_first : kv_first + kv_count].to(self.dtype),
            value[:, kv_first : kv_first + kv_count].to(self.dtype),
        )

    def _forward(self, inputs: StepInputs, metadata: Any) -> None:
        for rank in self.ranks:
            for name, layer in rank.layers.items():
                self._run_layer(rank, name, layer, inputs, metadata)

    def _run_layer(self, rank: Rank, name: str, layer: Any, inputs: StepInputs, metadata: Any) -> None:
        query, key, value = self.project(rank, name, inputs)
        # NaN, so that a row that nobody wrote is seen.
        output = torch.full_like(query, torch.nan)

        def write(key: torch.Tensor, value: torch.Tensor) -> object:
            return layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, metadata.slot_mapping)

        def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> object:
            return layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, output)

        if rank.window is None:
            write(key, value)
            run(query, key, value)
        else:
            rank.window.update(name, key, value, metadata.slot_mapping, write=write)
            rank.window.attend(
                name,
                query,
                key,
                value,
                block_table=metadata.block_table,
                seq_lens=metadata.seq_lens,
                query_start_loc=metadata.query_start_loc,
                output=output,
                run=run,
            )
        self.outputs[f"rank{rank.number}.{name}"] = output


def default_backend(kv_format: str) -> Backend:
    """Our backend of a format: ``reference``, ``k16v8``, or the exemplar for the test encodings."""
    if kv_format in ("k16v16", "k16v8"):
        from pytest_kvqual.kv.backends import k16v8, reference

        return reference if kv_format == "k16v16" else k16v8
    from pytest_kvqual.kv.backends import exemplar

    return exemplar.for_format(kv_format)
