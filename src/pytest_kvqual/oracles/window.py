"""The window: all oracles over one run of steps, fed with what a scheduler decided and what a backend was handed.

It knows no engine. Whoever drives it (the taps in the engine's worker, the transfer engine, the static taps of a
captured graph) tells it, in this order:

1. what the scheduler decided: ``admit``, ``grant``, ``evict``, ``release``, ``sampled``;
2. for each step ``begin``, then for each layer ``update`` and ``attend`` around the backend's own calls.

A window never raises on wrong metadata or tensors; it records findings, each in the section of the gate that must make
it. It opens with no request in flight.

Of a format without a declaration only maps, slots and rows are checked; what needs a cell's content counts nothing.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pytest_kvqual.errors import FormatError
from pytest_kvqual.kv.formats import Cells, Format, Undeclared
from pytest_kvqual.kv.ledger import Ledger
from pytest_kvqual.oracles import fills, fingerprints, maps, outputs, placement, reproducer, routing
from pytest_kvqual.oracles.findings import Tally
from pytest_kvqual.oracles.shadow import Shadow, Wrong, block_sums, differing
from pytest_kvqual.oracles.step import NO_SLOT, RowRequest, StepPlan, plan_step, row_map_mismatches, slots_of
from pytest_kvqual.oracles.whereabouts import Holding

_SAMPLE_TOKENS = 64
_GAIN_VECTORS = 256
"""(Row, query head) pairs from which on a layer's mean deviation says something: fewer may all round to one side."""

_KEPT_ROWS = 256
"""Rows of a step that are kept as the step before, per layer."""

_NUMBERS = 1 << 20
"""Requests of one window that are told apart by their fingerprints."""

FILLS = fills.NAMES
SECTIONS = ("row_map", "stale-maps", "routing", "shifted-outputs", "placement", "replay")
CONDITIONS = (
    "mixed",
    "chunked",
    "below-block",
    "at-block",
    "above-block",
    "reused-block",
    "top-of-pool",
    "shrinking-batch",
    "prefix-hit",
    "resumed",
    "padding",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerView:
    """One attention layer with its physical cache, as bound when the caches were made.

    ``cache`` is ``[blocks, kv_heads, block_size, content]`` and may be strided. ``window``: a row sees its last so many
    positions, its own included; None for all.
    """

    name: str
    cache: torch.Tensor
    codec: Format
    v_scale: float
    query_heads: int
    kv_heads: int
    head_size: int
    softmax_scale: float
    window: int | None = None


@dataclass(slots=True)
class _Request:
    """What the scheduler said of one request."""

    number: int
    tokens: list[int]
    blocks: list[int]
    identity: str
    cached: int
    computed: int = 0
    """Positions written, or taken from the cache."""
    furthest: int = 0
    """Positions that were ever written, before a preemption too."""


@dataclass(slots=True)
class _Retired:
    """A request that has left: who holds its name may come back, and its blocks may be hit."""

    number: int
    furthest: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class _Layer:
    view: LayerView
    number: int
    initial: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    before: outputs.Step | None = None
    agreement: float = 0.0
    """Sum over all rows of the products of output and reference."""
    size: float = 0.0
    """Sum over all rows of the squares of the reference."""
    vectors: int = 0
    """(Row, query head) pairs in these sums."""
    k_width: int = 0
    """Bytes of a cell's K, as the first update encoded it: the ledger keeps K and V joined."""

    def split(self, cells: torch.Tensor) -> Cells:
        """Cells of the ledger as K and V; contiguous, so that they are compared eight bytes at a time."""
        return Cells(k=cells[..., : self.k_width].contiguous(), v=cells[..., self.k_width :].contiguous())


class Window:
    """Oracles over one run of steps.

    Args:
        layers: Every attention layer of one rank, in layer order; all of one format and geometry.
        block_size: Tokens per block of the scheduler's blocks.
        rounding: Rounding unit of the engine's 16-bit type (:func:`pytest_kvqual.oracles.placement.unit`).
        probe: K, V and queries that the backend gets are replaced by fingerprints
            (:mod:`pytest_kvqual.oracles.fingerprints`).
        fills: Every attention call is made again with unwritten cells filled (:mod:`pytest_kvqual.oracles.fills`).
        seed: Of the fingerprints: what an earlier window left in the cache must not look like this one's.
    """

    def __init__(
        self,
        layers: Sequence[LayerView],
        *,
        block_size: int,
        rounding: float,
        probe: bool = False,
        fills: bool = False,
        seed: int = 0,
    ) -> None:
        self._layers = {view.name: _Layer(view=view, number=number) for number, view in enumerate(layers)}
        self._first = layers[0]
        self._declared = not isinstance(self._first.codec, Undeclared)
        self._block_size = block_size
        self._rounding = rounding
        self._probe = probe
        self._fills = fills
        self._ledger = Ledger()
        self._shadow = Shadow({view.name: (view.cache, view.codec) for view in layers}, block_size)
        self._requests: dict[str, _Request] = {}
        self._retired: dict[str, _Retired] = {}
        self._prefixes: dict[bytes, dict[str, torch.Tensor]] = {}
        self._unseen: list[tuple[str, int]] = []
        self._awaited: dict[str, int] = {}
        self._recycled: set[int] = set()
        self._numbers = seed * _NUMBERS
        self._plan: StepPlan | None = None
        self._batch = 0
        self._maps: object = None
        self._map_now: object = None
        self._steps = 0
        self._updated: set[str] = set()
        self._attended: set[str] = set()
        self._ambiguous = 0
        self._worst = 0.0
        self._self_tests = {"row_map": "missed", "shifted-outputs": "missed"}
        self._filled = dict.fromkeys(FILLS, 0)
        self._sample: dict[str, object] = {}
        self._reproducers: dict[str, bytes] = {}
        self._tallies = {name: Tally() for name in SECTIONS}
        self._rows = {"scheduled": 0, "prefix": 0, "recomputed": 0}
        self._conditions = dict.fromkeys(CONDITIONS, 0)

    def __getitem__(self, section: str) -> Tally:
        """The tally of a section: one of :data:`SECTIONS`."""
        return self._tallies[section]

    def open(self) -> None:
        """Digests every block of every layer. No request may be in flight."""
        for layer in self._layers.values():
            layer.initial = block_sums(layer.view.cache)

    # -- what the scheduler decided ----------------------------------------------------------------------------------

    def admit(
        self, request: str, *, tokens: Sequence[int], blocks: Sequence[int], cached: int = 0, identity: str = ""
    ) -> None:
        """A new or resumed request.

        Args:
            request: Its name.
            tokens: All of its tokens that are known, from position 0.
            blocks: Its blocks in logical order.
            cached: Leading positions that are said to be in ``blocks`` already: a prefix hit, a restore, a fork. What
                their cells must hold follows from ``identity`` and ``tokens``.
            identity: Whatever else K and V depend on (an adapter, a salt).
        """
        if request in self._requests:
            self.release(request)
        retired = self._retired.pop(request, None)
        if retired is not None:
            self._conditions["resumed"] += 1
        self._numbers += 1
        held = _Request(
            number=retired.number if retired else self._numbers,
            tokens=list(tokens),
            blocks=list(blocks),
            identity=identity,
            cached=cached,
            computed=cached,
            furthest=max(cached, retired.furthest if retired else 0),
        )
        if cached:
            self._conditions["prefix-hit"] += 1
            self._rows["prefix"] += max(0, cached - (retired.furthest if retired else 0))
            history = self._history_of(identity, tokens, cached)
            if history is None and self._writes_soon(identity, tokens, cached):
                self._awaited[request] = cached
            elif history is None:
                self["routing"].find(
                    "unknown-prefix",
                    f"request {request}: {cached} positions are taken from the cache, and no request of this window"
                    " wrote their tokens",
                    cached,
                )
            else:
                for name, cells in history.items():
                    self._ledger.record(name, request, 0, cells)
                self._unseen.append((request, cached))
        self._note_blocks(blocks)
        self._requests[request] = held

    def grant(self, request: str, blocks: Sequence[int]) -> None:
        """Further blocks of a request."""
        held = self._requests.get(request)
        if held is None:
            self["routing"].find("unknown-request", f"request {request} is granted blocks and was never admitted")
            return
        self._note_blocks(blocks)
        held.blocks.extend(blocks)

    def evict(self, request: str, logical: Sequence[int]) -> None:
        """Takes back blocks of a request, by their logical numbers: they lie before its sliding window."""
        held = self._requests.get(request)
        for number in logical:
            if held is not None and number < len(held.blocks):
                self._recycled.add(held.blocks[number])
                held.blocks[number] = NO_SLOT

    def release(self, request: str) -> None:
        """A request that finished or was preempted; its blocks may be granted to another."""
        held = self._requests.pop(request, None)
        if held is None:
            return
        self._unseen = [(name, cached) for name, cached in self._unseen if name != request]
        self._retire_prefix(request, held)
        self._recycled.update(block for block in held.blocks if block != NO_SLOT)
        self._retired[request] = _Retired(number=held.number, furthest=held.furthest, tokens=tuple(held.tokens))
        self._ledger.forget(request)

    def sampled(self, request: str, tokens: Sequence[int]) -> None:
        """The tokens that a step appended to a request."""
        held = self._requests.get(request)
        if held is not None:
            held.tokens.extend(int(token) for token in tokens)
            # The last token has no K and V yet; those behind it are of drafts that were rejected.
            held.computed = min(held.computed, max(0, len(held.tokens) - 1))

    def tokens(self, request: str) -> tuple[int, ...]:
        """The tokens known of a request that is live or has left; empty where it was never admitted."""
        held = self._requests.get(request)
        if held is not None:
            return tuple(held.tokens)
        retired = self._retired.get(request)
        return retired.tokens if retired is not None else ()

    def _note_blocks(self, blocks: Sequence[int]) -> None:
        self._conditions["reused-block"] += sum(block in self._recycled for block in blocks)

    def _keys(self, identity: str, tokens: Sequence[int], length: int) -> list[bytes]:
        """A key for each full block of the first ``length`` tokens: all tokens up to its end, and the identity."""
        chain, keys = identity.encode(), []
        for start in range(0, length - length % self._block_size, self._block_size):
            part = ",".join(str(token) for token in tokens[start : start + self._block_size])
            chain = hashlib.sha256(chain + b"|" + part.encode()).digest()
            keys.append(chain)
        return keys

    def _retire_prefix(self, request: str, held: _Request) -> None:
        length = min(held.computed, len(held.tokens))
        for number, key in enumerate(self._keys(held.identity, held.tokens, length)):
            if key not in self._prefixes:
                span = slice(number * self._block_size, (number + 1) * self._block_size)
                if all(self._ledger.covers(name, request, span.stop) for name in self._layers):
                    self._prefixes[key] = {
                        name: self._ledger.history(name, request, span.stop)[span].clone() for name in self._layers
                    }

    def _history_of(self, identity: str, tokens: Sequence[int], length: int) -> dict[str, torch.Tensor] | None:
        """The cells of the first ``length`` positions, per layer, of whoever wrote these tokens before."""
        if length > len(tokens):
            return None
        wanted = list(tokens[:length])
        for name, other in self._requests.items():
            same = other.identity == identity and other.tokens[:length] == wanted
            if same and all(self._ledger.covers(layer, name, length) for layer in self._layers):
                return {layer: self._ledger.history(layer, name, length) for layer in self._layers}
        # Whoever wrote a block wrote those before it: a live request has the whole prefix, or those that left do.
        parts: dict[str, list[torch.Tensor]] = {layer: [] for layer in self._layers}
        keys = self._keys(identity, tokens, length)
        for key in keys:
            held = self._prefixes.get(key)
            if held is None:
                return None
            for layer, cells in held.items():
                parts[layer].append(cells)
        if len(keys) * self._block_size < length:
            return None
        return {layer: torch.cat(cells) for layer, cells in parts.items()}

    def _writes_soon(self, identity: str, tokens: Sequence[int], length: int) -> bool:
        """Whether a live request will have written these tokens by the time they are read: a hit within one step."""
        wanted = list(tokens[:length])
        return any(other.identity == identity and other.tokens[:length] == wanted for other in self._requests.values())

    def _arrive(self, layer: str, request: str) -> None:
        """What a request took from the cache in the step in which another wrote it, once that is in the ledger."""
        held, length = self._requests[request], self._awaited[request]
        for name, other in self._requests.items():
            if name != request and other.identity == held.identity and other.tokens[:length] == held.tokens[:length]:
                if not self._ledger.covers(layer, name, length):
                    continue
                blocks = -(-length // self._block_size)
                if other.blocks[:blocks] != held.blocks[:blocks]:
                    self["routing"].find(
                        "wrong-prefix",
                        f"{layer}: request {request} takes {length} positions from blocks {held.blocks[:blocks]}, and"
                        f" request {name}, which writes them, holds {other.blocks[:blocks]}",
                    )
                self._ledger.record(layer, request, 0, self._ledger.history(layer, name, length))
                return

    # -- one step ----------------------------------------------------------------------------------------------------

    def begin(self, rows: Sequence[tuple[str, int, int]], fed: torch.Tensor) -> StepPlan:
        """Opens a step.

        Args:
            rows: (request, first position, rows) in row order.
            fed: Integer ``[>= T]``: the token of each row as the model received it.
        """
        self._awaited = {name: length for name, length in self._awaited.items() if name in self._requests}
        requests = []
        for name, start, count in rows:
            held = self._requests.get(name)
            if held is None:
                self["routing"].find("unknown-request", f"request {name} is scheduled and was never admitted")
                held = _Request(number=0, tokens=[], blocks=[], identity="", cached=0)
            requests.append(RowRequest(request=name, start=start, scheduled=count, blocks=self._in_pool(name, held)))
        plan = self._plan = plan_step(requests, self._block_size)
        self._steps += 1
        self._rows["scheduled"] += plan.rows
        homeless = int((plan.slots == NO_SLOT).sum())
        if homeless:
            row = int(torch.nonzero(plan.slots == NO_SLOT).flatten()[0])
            self["routing"].find("no-block", f"{plan.name(row)} has no block", homeless)
        self._check_rows(plan, fed)
        routing.check_sharing(self["routing"], self._holders(), self._may_share)
        self._adopt(plan)
        self._note_conditions(plan)
        for request in requests:
            held = self._requests.get(request.request)
            if held is not None:
                self._rows["recomputed"] += max(0, min(request.seq_len, held.furthest) - request.start)
                held.computed = request.seq_len
                held.furthest = max(held.furthest, request.seq_len)
        return plan

    def _in_pool(self, name: str, held: _Request) -> tuple[int, ...]:
        blocks = self._first.cache.shape[0]
        wild = [block for block in held.blocks if not (block == NO_SLOT or 0 <= block < blocks)]
        if wild:
            self["routing"].find(
                "no-block", f"request {name} holds block {wild[0]}, expected 0 to {blocks - 1}", len(wild)
            )
        return tuple(block if 0 <= block < blocks else NO_SLOT for block in held.blocks)

    def _check_rows(self, plan: StepPlan, fed: torch.Tensor) -> None:
        tokens = {name: held.tokens for name, held in self._requests.items()}
        tally = self["row_map"]
        checked, wrong = row_map_mismatches(plan, fed, tokens)
        tally.checked("checked", checked)
        if wrong:
            tally.find("wrong-token", f"row {wrong[0]} was not fed the token of {plan.name(wrong[0])}", len(wrong))
        if len(plan.requests) > 1 and self._self_tests["row_map"] != "caught":
            # The known permutation: the same rows under a batch order rotated by one request.
            rotated = plan_step(plan.requests[1:] + plan.requests[:1], self._block_size)
            if row_map_mismatches(rotated, fed, tokens)[1]:
                self._self_tests["row_map"] = "caught"

    def _holders(self) -> dict[int, list[tuple[str, int]]]:
        holders: dict[int, list[tuple[str, int]]] = {}
        for name, held in self._requests.items():
            for number, block in enumerate(held.blocks):
                if block != NO_SLOT:
                    holders.setdefault(block, []).append((name, number))
        return {block: held for block, held in holders.items() if len(held) > 1}

    def _may_share(self, left: str, right: str, number: int) -> bool:
        one, two = self._requests[left], self._requests[right]
        end = (number + 1) * self._block_size
        if one.identity != two.identity or one.tokens[:end] != two.tokens[:end]:
            return False
        rows = {request.request: request for request in self._plan.requests} if self._plan else {}
        writers, takers = [], []
        for name, held in ((left, one), (right, two)):
            row = rows.get(name)
            if min(held.computed, row.start if row else held.computed) >= end:
                takers.append(name)
            elif row is None or row.seq_len < end:
                return False
            else:
                writers.append(name)
        # A block may be taken in the very step in which its one writer completes it, and not be written again later.
        return not writers or (len(writers) == 1 and all(name in self._awaited for name in takers))

    def _adopt(self, plan: StepPlan) -> None:
        """Takes new blocks into the shadow, and states what positions taken from the cache must hold."""
        held = {block for request in self._requests.values() for block in request.blocks if block != NO_SLOT}
        held = {block for block in held if 0 <= block < self._first.cache.shape[0]}
        fresh = sorted((held | set(plan.live_blocks())) - self._shadow.blocks)
        if fresh:
            at, claimed = torch.tensor(fresh), self._claimed_blocks()
            for name, layer in self._layers.items():
                if not layer.initial.numel():
                    continue
                changed = torch.nonzero(block_sums(layer.view.cache[at]) != layer.initial[at]).flatten()
                # A restore or a copy writes to a block before the first step of its request.
                wrong = [fresh[index] for index in changed.tolist() if fresh[index] not in claimed]
                if wrong:
                    self["routing"].find(
                        "changed-block", f"{name}: block {wrong[0]} changed before any request held it", len(wrong)
                    )
            self._shadow.adopt(fresh)
        for request, cached in self._unseen:
            if request in self._requests:
                self._claim(request, cached)
        self._unseen.clear()

    def _claimed_blocks(self) -> set[int]:
        claimed: set[int] = set()
        for request, cached in self._unseen:
            if request in self._requests:
                claimed.update(self._requests[request].blocks[: -(-cached // self._block_size)])
        return claimed

    def _claim(self, request: str, cached: int) -> None:
        """Positions that a request takes from the cache must hold what its tokens dictate."""
        held = self._requests[request]
        positions = torch.arange(cached)
        slots = slots_of(self._in_pool(request, held), positions, self._block_size)
        shared = {
            block
            for name, other in self._requests.items()
            if name != request
            for block in other.blocks[: -(-other.computed // self._block_size)]
        }
        for name, layer in self._layers.items():
            cells = layer.split(self._ledger.history(name, request, cached))
            blocks = slots // self._block_size
            others = torch.tensor([block in shared for block in blocks.tolist()]) & (slots >= 0)
            if bool(others.any()):
                found = self._shadow.expected(name, slots[others])
                wrong = differing(slots[others], found, Cells(k=cells.k[others], v=cells.v[others]))
                self._find_cells(wrong, name, "wrong-prefix")
            mine = ~others & (slots >= 0)
            self._shadow.write(name, slots[mine], Cells(k=cells.k[mine], v=cells.v[mine]))

    def _note_conditions(self, plan: StepPlan) -> None:
        size, note = self._block_size, self._conditions
        decoding = [request for request in plan.requests if request.scheduled == 1 and request.start > 0]
        filling = [request for request in plan.requests if request.scheduled > 1]
        note["mixed"] += bool(decoding and filling)
        note["chunked"] += sum(request.start > 0 for request in filling)
        for request in plan.requests:
            rest = request.seq_len % size
            for name, value in (("below-block", size - 1), ("at-block", 0), ("above-block", 1)):
                note[name] += rest == value % size
        note["top-of-pool"] += self._first.cache.shape[0] - 1 in plan.live_blocks()
        note["shrinking-batch"] += len(plan.requests) < self._batch
        self._batch = len(plan.requests)

    # -- the backend's calls -----------------------------------------------------------------------------------------

    def update(
        self,
        layer: str,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        write: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> None:
        """Around one layer's cache update.

        Args:
            layer: Its name.
            key: ``[>= T, Hkv, D]`` as handed to the backend, of its 16-bit type.
            value: The same of V.
            slot_mapping: Integer ``[>= T]``.
            write: Calls the backend with K and V; called once.
        """
        plan, here, tally = self._plan, self._layers.get(layer), self["routing"]
        if plan is None or here is None or key.shape[0] < plan.rows or not plan.rows:
            tally.find(
                "no-step",
                f"{layer}: found a cache update of {key.shape[0]} rows, expected those of a step of a known layer",
            )
            write(key, value)
            return
        view, rows = here.view, plan.rows
        if key[0].numel() != view.kv_heads * view.head_size or value.shape != key.shape:
            tally.find(
                "wrong-shape",
                f"{layer}: found K of {tuple(key.shape)} and V of {tuple(value.shape)}, expected"
                f" [T, {view.kv_heads}, {view.head_size}] of both",
                rows,
            )
            write(key, value)
            return
        if not self._declared:
            routing.check_slot_mapping(tally, plan, layer=layer, slot_mapping=slot_mapping)
            self._conditions["padding"] += slot_mapping.numel() > rows
            self._map_now = (slot_mapping.tolist(),)
            write(key, value)
            self._updated.add(layer)
            return
        key, value = key.view(-1, view.kv_heads, view.head_size), value.view(-1, view.kv_heads, view.head_size)
        if self._probe:
            key, value = self._fingerprints(plan, here, key, value)
        # Encoded before the call: a backend that writes to its inputs must not write to the ledger.
        try:
            cells = view.codec.encode(key[:rows], value[:rows], view.v_scale)
        except FormatError as error:
            tally.find("wrong-shape", f"{layer}: {error}", rows)
            write(key, value)
            return
        odd = ~(torch.isfinite(key[:rows]).flatten(1).all(dim=1) & torch.isfinite(value[:rows]).flatten(1).all(dim=1))
        if bool(odd.any()):
            row = int(torch.nonzero(odd).flatten()[0])
            tally.find("not-finite", f"{layer}: K or V of {plan.name(row)} is not finite", int(odd.sum()))
        routing.check_slot_mapping(tally, plan, layer=layer, slot_mapping=slot_mapping)
        self._conditions["padding"] += slot_mapping.numel() > rows
        self._map_now = (slot_mapping.tolist(),)
        write(key, value)
        here.k_width = cells.k.shape[-1]
        joined = torch.cat([cells.k, cells.v], dim=-1)
        starts = plan.query_start()
        # Whoever writes a prefix comes before those that take it in the same step.
        for index in sorted(range(len(plan.requests)), key=lambda at: plan.requests[at].request in self._awaited):
            request = plan.requests[index]
            if request.request in self._awaited and not self._ledger.covers(layer, request.request, request.start):
                self._arrive(layer, request.request)  # nothing arrives twice: the ledger covers it from then on
            if not self._ledger.covers(layer, request.request, request.start):
                tally.find(
                    "unseen-history",
                    f"{layer}: request {request.request} starts at position {request.start}, and the ledger has not"
                    " seen what is before it",
                )
                continue
            self._ledger.record(layer, request.request, request.start, joined[starts[index] : starts[index + 1]])
        self._shadow.write(layer, plan.slots, cells)
        self._compare(layer)
        tally.checked("writes_checked", rows)
        self._updated.add(layer)

    def _fingerprints(
        self, plan: StepPlan, here: _Layer, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        view, rows = here.view, plan.rows
        numbers = torch.tensor(
            [self._requests[it.request].number if it.request in self._requests else 0 for it in plan.requests]
        )
        made = fingerprints.keys_values(
            numbers[plan.owner],
            plan.positions,
            layer=here.number,
            heads=view.kv_heads,
            size=view.head_size,
            v_scale=view.v_scale,
            dtype=key.dtype,
        )
        key, value = key.clone(), value.clone()
        key[:rows], value[:rows] = made
        return key, value

    def _compare(self, layer: str) -> None:
        cells, wrong = self._shadow.compare(layer)
        self["routing"].checked("cells_checked", cells)
        if wrong is not None:
            self._find_cells(wrong, layer, "wrong-cell")

    def _find_cells(self, wrong: Wrong, layer: str, kind: str) -> None:
        if not wrong.slots.numel():
            return
        tally, view = self["routing"], self._layers[layer].view
        routing.check_cells(
            tally,
            wrong,
            layer=layer,
            kind=kind,
            block_size=self._block_size,
            owner=self._owner_of,
            holdings=self._holdings(view),
            decode=lambda cells: view.codec.decode(cells, view.v_scale),
            peek=lambda slots: view.codec.read(view.cache, slots),
            slots=view.cache.shape[0] * self._block_size,
        )
        if "routing" not in self._reproducers:
            kept = slice(0, 16)
            self._reproducers["routing"] = reproducer.pack(
                "cells",
                tally.findings[-1] if tally.findings else kind,
                {
                    "found_k": wrong.found.k[kept],
                    "expected_k": wrong.expected.k[kept],
                    "found_v": wrong.found.v[kept],
                    "expected_v": wrong.expected.v[kept],
                    "slots": wrong.slots[kept],
                },
                layer=layer,
                block_size=self._block_size,
            )

    def _owner_of(self, slot: int) -> str:
        block, offset = divmod(slot, self._block_size)
        for name, held in self._requests.items():
            if block in held.blocks:
                position = held.blocks.index(block) * self._block_size + offset
                state = "" if position < held.computed else ", not written"
                return f"request {name} position {position}{state}"
        return "held by nobody"

    def _holdings(self, view: LayerView) -> list[Holding]:
        held = []
        for name, request in self._requests.items():
            length = self._ledger.length(view.name, name)
            if length:
                cells = self._layers[view.name].split(self._ledger.history(view.name, name, length))
                slots = slots_of(request.blocks, torch.arange(length), self._block_size)
                held.append(Holding(request=name, k=cells.k, v=cells.v, slots=slots))
        return held

    def attend(
        self,
        layer: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        output: torch.Tensor,
        run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object],
    ) -> object:
        """Around one layer's attention.

        Args:
            layer: Its name.
            query: ``[>= T, Hq, D]`` or ``[>= T, Hq * D]``.
            key: K of the step's rows, handed on as it is.
            value: V of the step's rows, handed on as it is.
            block_table: Integer ``[>= R, B]``, as the kernel is about to use it.
            seq_lens: Integer ``[>= R]``.
            query_start_loc: Integer ``[>= R + 1]``.
            output: ``[>= T, Hq * D]`` or ``[>= T, Hq, D]``: where ``run`` writes.
            run: Calls the backend with query, K and V; called again for each fill.

        Returns:
            What the first call returned.
        """
        plan, here = self._plan, self._layers.get(layer)
        if plan is None or here is None or query.shape[0] < plan.rows or not plan.rows:
            self["placement"].find(
                "no-step",
                f"{layer}: found an attention call of {query.shape[0]} rows, expected those of a step of a known layer",
            )
            return run(query, key, value)
        view, rows = here.view, plan.rows
        # Where the oracles make their own tensors.
        place = plan.slots.device
        table = block_table.to(place)
        lengths, row_starts = seq_lens.to(place), query_start_loc.to(place)
        self._check_maps(layer, plan, table, lengths, row_starts)
        if not self._declared:
            return run(query, key, value)
        self._check_history(layer, plan, view, table)
        history = self._decoded(layer, plan, view)
        asked = query[:rows].reshape(rows, view.query_heads, view.head_size).clone()
        if self._probe and history is not None:
            asked = self._spikes(plan, here, history, query.dtype)
            query = query.clone()
            query[:rows] = asked.view(query[:rows].shape)
        # A backend may scale its query in place: each repetition gets what the first call got.
        given = query.clone() if self._fills else query
        result = run(query, key, value)
        self._check_padding(layer, rows, output)
        if output.shape[0] < rows:
            self["placement"].find(
                "no-rows", f"{layer}: found {output.shape[0]} output rows for a step of {rows} rows", rows
            )
            return result
        if self._fills:
            self._run_fills(layer, plan, view, table, output, lambda: run(given.clone(), key, value))
        if history is None:
            self["placement"].find("unseen-history", f"{layer}: the ledger does not hold the history of every row")
            return result
        self._check_outputs(here, plan, asked, history, output)
        return result

    def _check_padding(self, layer: str, rows: int, output: torch.Tensor) -> None:
        """Padding rows are nobody's, but what takes a maximum over the whole batch reads them too."""
        odd = ~torch.isfinite(output[rows:]).flatten(1).all(dim=1) if output.shape[0] > rows else torch.zeros(0)
        if bool(odd.any()):
            row = rows + int(torch.nonzero(odd).flatten()[0])
            self["placement"].find(
                "padding-output", f"{layer}: padding row {row} of the output is not finite", int(odd.sum())
            )

    def _check_maps(
        self, layer: str, plan: StepPlan, table: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor
    ) -> None:
        tally = self["stale-maps"]
        good = maps.check_maps(tally, plan, layer=layer, block_table=table, seq_lens=lengths, query_start_loc=starts)
        if layer == self._first.name:
            now = (self._map_now, table.tolist(), lengths.tolist(), starts.tolist())
            tally.checked("maps_changed", self._maps is not None and now != self._maps)
            self._maps = now
        if not good and "stale-maps" not in self._reproducers:
            width = max(len(request.blocks) for request in plan.requests)
            blocks = [[*request.blocks, *([NO_SLOT] * (width - len(request.blocks)))] for request in plan.requests]
            self._reproducers["stale-maps"] = reproducer.pack(
                "maps",
                tally.findings[-1],
                {
                    "block_table": table,
                    "seq_lens": lengths,
                    "query_start_loc": starts,
                    "starts": torch.tensor([request.start for request in plan.requests]),
                    "scheduled": torch.tensor([request.scheduled for request in plan.requests]),
                    "blocks": torch.tensor(blocks),
                },
                layer=layer,
                block_size=self._block_size,
            )

    def _check_history(self, layer: str, plan: StepPlan, view: LayerView, table: torch.Tensor) -> None:
        """Gathers each request's history through the table that the kernel is about to use."""
        slots, expected = [], []
        pool = view.cache.shape[0] * self._block_size
        for index, request in enumerate(plan.requests):
            length = request.seq_len
            first = 0 if view.window is None else max(0, request.start - view.window + 1)
            if index >= table.shape[0] or not self._ledger.covers(layer, request.request, length):
                continue
            positions = torch.arange(first, length)
            column = positions // self._block_size
            if length and int(column[-1]) >= table.shape[1]:
                # check_maps has already objected to a table that is too narrow.
                positions, column = positions[column < table.shape[1]], column[column < table.shape[1]]
            found = table[index, column].to(torch.int64)
            # A table entry outside the pool cannot be gathered; check_maps has already objected to it.
            slots.append((found * self._block_size + positions % self._block_size).clamp(0, pool - 1))
            expected.append(self._ledger.history(layer, request.request, length)[positions])
        if not slots:
            return
        gathered = torch.cat(slots)
        wrong = differing(
            gathered, view.codec.read(view.cache, gathered), self._layers[view.name].split(torch.cat(expected))
        )
        self["routing"].checked("history_cells", gathered.numel())
        self._find_cells(wrong, layer, "wrong-history")

    def _decoded(self, layer: str, plan: StepPlan, view: LayerView) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """K and V of each request's history as the ledger holds them, in float32; None where it does not."""
        history = []
        for request in plan.requests:
            if not self._ledger.covers(layer, request.request, request.seq_len):
                return None
            cells = self._ledger.history(layer, request.request, request.seq_len)
            history.append(view.codec.decode(self._layers[view.name].split(cells), view.v_scale))
        return history

    def _spikes(
        self, plan: StepPlan, here: _Layer, history: list[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype
    ) -> torch.Tensor:
        view, parts = here.view, []
        for request, (keys, _) in zip(plan.requests, history, strict=True):
            positions = torch.arange(request.start, request.seq_len)
            candidates = fingerprints.boundaries(request.seq_len, self._block_size, (request.start,))
            at = fingerprints.targets(
                positions, candidates, query_heads=view.query_heads, layer=here.number, window=view.window
            )
            looked = fingerprints.spikes(keys, at, softmax_scale=view.softmax_scale, dtype=dtype)
            parts.append(
                looked
                + fingerprints.ahead(
                    keys, positions, query_heads=view.query_heads, softmax_scale=view.softmax_scale, dtype=dtype
                )
            )
        return torch.cat(parts)

    def _run_fills(
        self,
        layer: str,
        plan: StepPlan,
        view: LayerView,
        table: torch.Tensor,
        output: torch.Tensor,
        run: Callable[[], object],
    ) -> None:
        before = output.clone()
        held = frozenset(block for request in self._requests.values() for block in request.blocks if block != NO_SLOT)
        slots = fills.unwritten(plan, table, held=held, blocks=view.cache.shape[0], recycled=frozenset(self._recycled))
        tally = self["replay"]
        tally.checked("cells_filled", slots.numel() * view.kv_heads)
        if not slots.numel():
            return
        kept = view.codec.read(view.cache, slots)
        made = fills.contents(
            view.codec,
            count=slots.numel(),
            kv_heads=view.kv_heads,
            head_size=view.head_size,
            dtype=before.dtype,
            v_scale=view.v_scale,
            other=self._other_cells(layer, plan, view, before.dtype),
        )
        run()
        differ = fills.changed_rows(before, output, plan.rows)
        if differ.numel():
            # Nothing can be said of fills then.
            tally.find(
                "not-repeatable",
                f"{layer}: output of {plan.name(int(differ[0]))} differs between two calls with the same cells"
                f" ({differ.numel()} of {plan.rows} rows of this step)",
                differ.numel(),
            )
            self._keep_fill(layer, "none", int(differ[0]), before, output)
            output.copy_(before)
            return
        try:
            for fill in fills.NAMES:
                view.codec.place(view.cache, slots, made[fill])
                run()
                self._filled[fill] += plan.rows
                row = fills.check_fill(tally, plan, layer=layer, fill=fill, before=before, after=output)
                if row is not None:
                    self._keep_fill(layer, fill, row, before, output)
        finally:
            # A backend that raises must not leave the cache filled.
            view.codec.place(view.cache, slots, kept)
            output.copy_(before)

    def _keep_fill(self, layer: str, fill: str, row: int, before: torch.Tensor, after: torch.Tensor) -> None:
        if "replay" not in self._reproducers:
            both = {"before": before[row], "after": after[row]}
            self._reproducers["replay"] = reproducer.pack(
                "fill",
                self["replay"].findings[-1],
                {name: output.contiguous().view(torch.uint8) for name, output in both.items()},
                layer=layer,
                fill=fill,
            )

    def _other_cells(self, layer: str, plan: StepPlan, view: LayerView, dtype: torch.dtype) -> Cells:
        """Written cells to fill with: of the step's last request; a fill of its own tail is of other positions."""
        request = plan.requests[-1]
        length = self._ledger.length(layer, request.request)
        if not length:
            one = torch.ones(1, view.kv_heads, view.head_size, dtype=dtype)
            return view.codec.encode(one, one, view.v_scale)
        return self._layers[view.name].split(self._ledger.history(layer, request.request, length))

    def _check_outputs(
        self,
        here: _Layer,
        plan: StepPlan,
        asked: torch.Tensor,
        history: list[tuple[torch.Tensor, torch.Tensor]],
        output: torch.Tensor,
    ) -> None:
        view = here.view
        found, allowed = [], []
        starts = plan.query_start()
        for index, (request, (keys, values)) in enumerate(zip(plan.requests, history, strict=True)):
            part = placement.attention(
                asked[starts[index] : starts[index + 1]],
                keys,
                values,
                start=request.start,
                scale=view.softmax_scale,
                rounding=self._rounding,
                window=view.window,
            )
            found.append(part.output)
            allowed.append(part.tolerance)
        reference = placement.Reference(torch.cat(found), torch.cat(allowed))
        step = outputs.Step(plan=plan, reference=reference)
        shift = outputs.check_shift(self["shifted-outputs"], step, layer=view.name, output=output, before=here.before)
        self._test_shift(step, view.name)
        ambiguous, worst, row = placement.check_rows(
            self["placement"], plan, layer=view.name, output=output, reference=reference
        )
        here.before = _shortened(step)
        rows = output[: plan.rows].reshape(reference.output.shape).float() if output.shape[0] >= plan.rows else None
        if rows is not None:
            here.agreement += float((rows.double() * reference.output.double()).sum())
            here.size += float(reference.output.double().square().sum())
            here.vectors += plan.rows * view.query_heads
        self._attended.add(view.name)
        self._ambiguous += ambiguous
        self._worst = worst if math.isnan(worst) or worst > self._worst else self._worst
        if row is not None:
            self._keep_row("placement", "row", here, plan, row, asked, history, output, {})
        if shift is not None and shift[1] >= 0:
            other = shift[1]
            more = {"other_output": reference.output[other], "other_tolerance": reference.tolerance[other]}
            self._keep_row("shifted-outputs", "shift", here, plan, shift[0], asked, history, output, more, other)
        self._keep_sample(view, plan, asked, output)

    def _test_shift(self, step: outputs.Step, layer: str) -> None:
        """The known permutation: every row's reference, handed out one row further, must be a shift."""
        if self._self_tests["shifted-outputs"] == "caught" or step.plan.rows < 2:
            return
        scratch = Tally()
        outputs.check_shift(scratch, step, layer=layer, output=step.reference.output.roll(1, 0), before=None)
        if scratch.kinds.get("shifted-row"):
            self._self_tests["shifted-outputs"] = "caught"

    def _keep_row(
        self,
        gate: str,
        what: str,
        here: _Layer,
        plan: StepPlan,
        row: int,
        asked: torch.Tensor,
        history: list[tuple[torch.Tensor, torch.Tensor]],
        output: torch.Tensor,
        more: Mapping[str, torch.Tensor],
        other: int | None = None,
    ) -> None:
        position = int(plan.positions[row])
        if gate in self._reproducers or position >= reproducer.LONGEST:
            return
        view = here.view
        keys, values = history[int(plan.owner[row])]
        names: dict[str, str | int] = {}
        if other is not None:
            owner = plan.requests[int(plan.owner[other])].request
            names = {"other": owner, "other_position": int(plan.positions[other])}
        self._reproducers[gate] = reproducer.pack(
            what,
            self[gate].findings[-1],
            {
                "query": asked[row].float(),
                "key": keys[: position + 1],
                "value": values[: position + 1],
                "output": output[row].reshape(view.query_heads, view.head_size).float(),
                **more,
            },
            layer=view.name,
            request=plan.requests[int(plan.owner[row])].request,
            position=position,
            scale=view.softmax_scale,
            rounding=self._rounding,
            window=view.window or 0,
            **names,
        )

    def _keep_sample(self, view: LayerView, plan: StepPlan, asked: torch.Tensor, output: torch.Tensor) -> None:
        """Keeps one short decode row of the first layer whole, so that the comparison can be redone offline."""
        if self._sample or view is not self._first:
            return
        starts = plan.query_start()
        for index, request in enumerate(plan.requests):
            if request.scheduled == 1 and 1 < request.seq_len <= _SAMPLE_TOKENS:
                row = starts[index]
                if not bool(torch.isfinite(asked[row]).all() and torch.isfinite(output[row]).all()):
                    # It is a finding, and JSON has no word for it.
                    continue
                cells = self._ledger.history(view.name, request.request, request.seq_len)
                self._sample = {
                    "layer": view.name,
                    "kv_format": view.codec.name,
                    "v_scale": view.v_scale,
                    "scale": view.softmax_scale,
                    "position": request.start,
                    "query": asked[row].float().tolist(),
                    "output": output[row].reshape(asked[row].shape).float().tolist(),
                    "cells_shape": list(cells.shape),
                    "cells": base64.b64encode(cells.cpu().contiguous().numpy().tobytes()).decode(),
                }
                return

    def _check_gain(self) -> float:
        """The largest mean deviation of a layer's outputs along their references: at most two rounding units, one ulp.

        Rounding to nearest errs to both sides and cancels over many rows; rounding to one side errs by less than an
        ulp. A factor that is one per cent off is within the tolerance of every row and does not cancel.
        """
        worst = 0.0
        for name, layer in self._layers.items():
            if layer.vectors < _GAIN_VECTORS or not layer.size:
                continue
            gain = abs(layer.agreement / layer.size - 1)
            worst = gain if math.isnan(gain) or gain > worst else worst
            if not gain <= 2 * self._rounding:
                self["placement"].find(
                    "gain",
                    f"{name}: outputs are {layer.agreement / layer.size:.5f} times their references on average over"
                    f" {layer.vectors} rows and heads, expected 1 within {2 * self._rounding:.5f}: a scale or a softmax"
                    " factor is off",
                )
        return worst

    # -- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, object]:
        """Compares the whole pool a last time and returns the record of the window."""
        touched = self._shadow.blocks
        for name, layer in self._layers.items():
            if self._declared:
                self._compare(name)
            if not layer.initial.numel():
                continue
            sums = block_sums(layer.view.cache)
            untouched = torch.tensor(
                [block not in touched for block in range(layer.view.cache.shape[0])], dtype=torch.bool
            )
            changed = torch.nonzero((sums != layer.initial) & untouched).flatten()
            self["routing"].checked("blocks_compared", int(untouched.sum()))
            if changed.numel():
                self["routing"].find(
                    "changed-block",
                    f"{name}: block {int(changed[0])} changed and no request of the window holds it",
                    changed.numel(),
                )
        gain = self._check_gain()
        sections = {name: tally.to_dict() for name, tally in self._tallies.items()}
        return {
            "steps": self._steps,
            "layers": len(self._updated),
            "probe": self._probe,
            "fills": self._fills,
            "rows": dict(self._rows),
            "conditions": dict(self._conditions),
            "row_map": {"checked": 0, **sections["row_map"], "self_test": self._self_tests["row_map"]},
            "stale-maps": {"tables_compared": 0, "maps_changed": 0, **sections["stale-maps"]},
            "routing": {
                "cells_checked": 0,
                "writes_checked": 0,
                "history_cells": 0,
                "padding_rows": 0,
                "blocks_compared": 0,
                **sections["routing"],
            },
            "shifted-outputs": {
                "rows_checked": 0,
                **sections["shifted-outputs"],
                "layers": len(self._attended),
                "self_test": self._self_tests["shifted-outputs"],
            },
            "placement": {
                "rows_checked": 0,
                **sections["placement"],
                "layers": len(self._attended),
                "ambiguous_rows": self._ambiguous,
                "worst_ratio": self._worst if math.isfinite(self._worst) else str(self._worst),
                "worst_gain": gain if math.isfinite(gain) else str(gain),
            },
            "replay": {"cells_filled": 0, **sections["replay"], "rows_compared": dict(self._filled)},
            "reproducers": [
                {"gate": gate, "npz": base64.b64encode(data).decode()} for gate, data in self._reproducers.items()
            ],
            "samples": self._sample,
        }


def _shortened(step: outputs.Step) -> outputs.Step:
    """The first rows of a step, as what the next one is compared with."""
    if step.plan.rows <= _KEPT_ROWS:
        return step
    plan = StepPlan(
        requests=step.plan.requests,
        block_size=step.plan.block_size,
        owner=step.plan.owner[:_KEPT_ROWS],
        positions=step.plan.positions[:_KEPT_ROWS],
        slots=step.plan.slots[:_KEPT_ROWS],
    )
    reference = placement.Reference(
        step.reference.output[:_KEPT_ROWS].clone(), step.reference.tolerance[:_KEPT_ROWS].clone()
    )
    return outputs.Step(plan=plan, reference=reference)
