"""The taps: they watch the cache update, the attention and its metadata of every layer, and feed the oracles.

A tap is an instance attribute over ``impl.do_kv_cache_update`` and ``impl.forward``. It sees what the engine hands in,
calls whatever was there before (a seeded fault included) and checks in place; tensors never leave the worker. Removing
the taps restores the very objects that were found.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pytest_kvqual.kv.formats import Cells, Format
from pytest_kvqual.kv.ledger import Ledger
from pytest_kvqual.oracles import placement, routing
from pytest_kvqual.oracles.findings import Tally
from pytest_kvqual.oracles.step import RowRequest, StepPlan, plan_step, row_map_mismatches
from pytest_kvqual.worker.wire import WorkerError

_SAMPLE_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TappedLayer:
    """One attention layer with its physical cache, as bound when the caches were made."""

    name: str
    layer: Any
    cache: torch.Tensor
    codec: Format
    v_scale: float


class _Shadow:
    """What every cell of every block written in the window must hold, per layer."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._row: dict[int, int] = {}
        self._cells: dict[str, torch.Tensor] = {}
        self.slots = torch.empty(0, dtype=torch.int64)

    @property
    def blocks(self) -> set[int]:
        return set(self._row)

    def adopt(self, blocks: list[int], read: Callable[[str, torch.Tensor], torch.Tensor], layers: list[str]) -> None:
        """Takes the present content of blocks that are not shadowed yet, before the step writes to them."""
        offsets = torch.arange(self._block_size, dtype=torch.int64)
        slots = (torch.tensor(blocks, dtype=torch.int64)[:, None] * self._block_size + offsets).flatten()
        for layer in layers:
            cells = read(layer, slots)
            held = self._cells.get(layer)
            self._cells[layer] = cells if held is None else torch.cat([held, cells])
        for block in blocks:
            self._row[block] = len(self._row)
        self.slots = torch.cat([self.slots, slots])

    def write(self, layer: str, slots: torch.Tensor, cells: torch.Tensor) -> None:
        """Applies the writes that the plan dictates."""
        rows = torch.tensor([self._row[block] for block in (slots // self._block_size).tolist()], dtype=torch.int64)
        self._cells[layer][rows * self._block_size + slots % self._block_size] = cells

    def expected(self, layer: str) -> torch.Tensor:
        """The cells of :attr:`slots`."""
        return self._cells[layer]


def _joined(codec: Format, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    cells = codec.read(cache, slots)
    return torch.cat([cells.k, cells.v], dim=-1)


class OracleWindow:
    """Taps and oracles over one window of steps that starts and ends with no request in flight.

    Args:
        layers: Every attention layer of this rank, in layer order.
        block_size: Tokens per block of the engine's block table.
        runner: The engine's model runner: read for the row order and the tokens of each step, nothing else.
        rounding: Rounding unit of the model's 16-bit type.
    """

    def __init__(self, *, layers: list[TappedLayer], block_size: int, runner: Any, rounding: float) -> None:
        self._layers = {tapped.name: tapped for tapped in layers}
        self._block_size = block_size
        self._runner = runner
        self._rounding = rounding
        cell_bytes = (layers[0].codec.k_bytes + layers[0].codec.v_bytes) * layers[0].layer.impl.head_size
        self._ledger = Ledger(layers[0].layer.impl.num_kv_heads, cell_bytes)
        self._shadow = _Shadow(block_size)
        self._initial: dict[str, torch.Tensor] = {}
        self._blocks: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._scheduled: Any = None
        self._plan: StepPlan | None = None
        self._undo: list[Callable[[], None]] = []
        self.routing = Tally()
        self.placement = Tally()
        self.rows = Tally()
        self._steps = 0
        self._ambiguous = 0
        self._worst = 0.0
        self._self_test = "missed"
        self._seen_layers: set[str] = set()
        self._attended_layers: set[str] = set()
        self._sample: dict[str, object] = {}

    # -- life -----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Digests every block of every layer and puts the taps on."""
        for name, tapped in self._layers.items():
            self._initial[name] = routing.block_sums(tapped.cache)
            impl = tapped.layer.impl
            self._tap(impl, "do_kv_cache_update", self._updating(name, impl.do_kv_cache_update))
            self._tap(impl, "forward", self._attending(name, impl.forward))

    def _tap(self, holder: Any, name: str, function: Callable[..., Any]) -> None:
        held = vars(holder)
        if name in held:
            old = held[name]
            self._undo.append(lambda: setattr(holder, name, old))
        else:
            self._undo.append(lambda: delattr(holder, name))
        setattr(holder, name, function)

    @property
    def installed(self) -> bool:
        """Whether any tap is on."""
        return bool(self._undo)

    def remove(self) -> None:
        """Takes the taps off."""
        while self._undo:
            self._undo.pop()()

    def finish(self) -> dict[str, object]:
        """Takes the taps off, compares the whole pool a last time and returns the record of the window."""
        self.remove()
        touched = self._shadow.blocks
        for name, tapped in self._layers.items():
            if touched:
                self._compare_shadow(name)
            sums = routing.block_sums(tapped.cache)
            untouched = [block for block in range(tapped.cache.shape[0]) if block not in touched]
            changed = [block for block in untouched if int(sums[block]) != int(self._initial[name][block])]
            self.routing.checked("blocks_compared", len(untouched))
            if changed:
                self.routing.find(
                    f"{name}: block {changed[0]} changed and no request of the window holds it", len(changed)
                )
        return {
            "steps": self._steps,
            "layers": len(self._seen_layers),
            "routing": {
                "cells_checked": 0,
                "writes_checked": 0,
                "history_cells": 0,
                "padding_rows": 0,
                "blocks_compared": 0,
                **self.routing.to_dict(),
            },
            "placement": {
                "rows_checked": 0,
                **self.placement.to_dict(),
                "layers": len(self._attended_layers),
                "ambiguous_rows": self._ambiguous,
                "worst_ratio": self._worst if math.isfinite(self._worst) else str(self._worst),
            },
            "row_map": {"checked": 0, **self.rows.to_dict(), "self_test": self._self_test},
            "samples": self._sample,
        }

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin_step(self, scheduled: Any) -> None:
        """Follows the scheduler's decisions of one step: which request holds which blocks."""
        self._plan = None
        self._scheduled = scheduled
        for request in scheduled.finished_req_ids:
            self._blocks.pop(request, None)
            self._tokens.pop(request, None)
            self._ledger.forget(request)
        for new in scheduled.scheduled_new_reqs:
            self._blocks[new.req_id] = list(new.block_ids[0])
            self._tokens[new.req_id] = list(new.prompt_token_ids or ())
        cached = scheduled.scheduled_cached_reqs
        for index, request in enumerate(cached.req_ids):
            granted = cached.new_block_ids[index]
            if request not in self._blocks:
                raise WorkerError(f"request {request} was in flight before the oracle window opened, expected none")
            if request in cached.resumed_req_ids:
                self._blocks[request] = list(granted[0])
            elif granted is not None:
                self._blocks[request].extend(granted[0])

    def end_step(self, output: Any) -> None:
        """Learns the tokens that the step sampled: they are what the next step must be fed."""
        if output is None or not getattr(output, "req_ids", None):
            return
        for request, sampled in zip(output.req_ids, output.sampled_token_ids, strict=False):
            if request in self._tokens:
                self._tokens[request].extend(int(token) for token in sampled)

    def _planned(self) -> StepPlan:
        if self._plan is not None:
            return self._plan
        scheduled = self._scheduled
        if scheduled is None:
            raise WorkerError("a tap was called outside a scheduled step")
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        order = [request for request in self._runner.input_batch.req_ids if request in scheduled.num_scheduled_tokens]
        if sorted(order) != sorted(scheduled.num_scheduled_tokens):
            raise WorkerError(
                f"the runner's batch holds {len(order)} of the {len(scheduled.num_scheduled_tokens)} requests that the"
                " scheduler scheduled, expected all"
            )
        plan = plan_step(
            [
                RowRequest(
                    request=request,
                    start=starts[request],
                    scheduled=scheduled.num_scheduled_tokens[request],
                    blocks=tuple(self._blocks[request]),
                )
                for request in order
            ],
            self._block_size,
        )
        self._plan = plan
        self._steps += 1
        self._check_rows(plan)
        routing.check_disjoint(self.routing, plan)
        fresh = [block for block in plan.live_blocks() if block not in self._shadow.blocks]
        if fresh:
            for name, tapped in self._layers.items():
                sums = routing.block_sums(tapped.cache[fresh])
                changed = torch.nonzero(sums != self._initial[name][fresh]).flatten()
                if changed.numel():
                    self.routing.find(
                        f"{name}: block {fresh[int(changed[0])]} changed before any request held it", changed.numel()
                    )
            self._shadow.adopt(
                fresh,
                lambda name, slots: _joined(self._layers[name].codec, self._layers[name].cache, slots),
                list(self._layers),
            )
        return plan

    def _check_rows(self, plan: StepPlan) -> None:
        fed = self._runner.input_ids.gpu
        checked, wrong = row_map_mismatches(plan, fed, self._tokens)
        self.rows.checked("checked", checked)
        if wrong:
            self.rows.find(f"row {wrong[0]} was not fed the token of {plan.name(wrong[0])}", len(wrong))
        if len(plan.requests) > 1 and self._self_test != "caught":
            # The known permutation: the same rows under a batch order rotated by one request.
            rotated = plan_step(plan.requests[1:] + plan.requests[:1], self._block_size)
            if row_map_mismatches(rotated, fed, self._tokens)[1]:
                self._self_test = "caught"

    # -- taps -----------------------------------------------------------------------------------------------------

    def _updating(self, name: str, original: Callable[..., None]) -> Callable[..., None]:
        def update(layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
            plan = self._planned()
            tapped = self._layers[name]
            # Cloned before the call: a backend that writes to its inputs must not write to the ledger.
            declared = tapped.codec.encode(key[: plan.rows], value[: plan.rows], tapped.v_scale)
            cells = torch.cat([declared.k, declared.v], dim=-1)
            routing.check_slot_mapping(self.routing, plan, layer=name, slot_mapping=slot_mapping)
            original(layer, key, value, kv_cache, slot_mapping)
            starts = plan.query_start()
            for index, request in enumerate(plan.requests):
                part = cells[starts[index] : starts[index + 1]]
                if not self._ledger.covers(name, request.request, request.start):
                    self.routing.find(
                        f"{name}: request {request.request} starts at position {request.start},"
                        " and the ledger has not seen what is before it"
                    )
                    continue
                self._ledger.record(name, request.request, request.start, part)
            self._shadow.write(name, plan.slots, cells)
            self._compare_shadow(name)
            self.routing.checked("writes_checked", plan.rows)
            self._seen_layers.add(name)

        return update

    def _compare_shadow(self, name: str) -> None:
        tapped = self._layers[name]
        slots = self._shadow.slots
        wrong = routing.wrong_cells(_joined(tapped.codec, tapped.cache, slots), self._shadow.expected(name))
        self.routing.checked("cells_checked", slots.numel())
        if bool(wrong.any()):
            where = routing.describe_cells(slots, wrong, self._block_size)
            self.routing.find(f"{name}: {where} does not hold the declared encoding of its K and V", int(wrong.sum()))

    def _attending(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            layer: Any,
            query: Any,
            key: Any,
            value: Any,
            kv_cache: Any,
            metadata: Any,
            output: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if metadata is None:
                return original(layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)
            plan = self._planned()
            self._check_history(name, plan, metadata)
            asked = query[: plan.rows].clone()
            result = original(layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)
            self._check_outputs(name, plan, asked, output)
            return result

        return forward

    def _check_history(self, name: str, plan: StepPlan, metadata: Any) -> None:
        """Gathers each request's history through the table that the kernel is about to use."""
        tapped = self._layers[name]
        table = metadata.block_table.cpu()
        routing.check_metadata(
            self.routing,
            plan,
            layer=name,
            block_table=table,
            seq_lens=metadata.seq_lens.cpu(),
            query_start_loc=metadata.query_start_loc.cpu(),
        )
        slots, expected = [], []
        pool = tapped.cache.shape[0] * self._block_size
        for index, request in enumerate(plan.requests):
            length = request.seq_len
            if index >= table.shape[0] or not self._ledger.covers(name, request.request, length):
                continue
            positions = torch.arange(length)
            found = table[index, positions // self._block_size].to(torch.int64)
            # A table entry outside the pool cannot be gathered; check_metadata has already objected to it.
            slots.append((found * self._block_size + positions % self._block_size).clamp(0, pool - 1))
            expected.append(self._ledger.history(name, request.request, length))
        if not slots:
            return
        gathered = torch.cat(slots)
        wrong = routing.wrong_cells(_joined(tapped.codec, tapped.cache, gathered), torch.cat(expected))
        self.routing.checked("history_cells", gathered.numel())
        if bool(wrong.any()):
            where = routing.describe_cells(gathered, wrong, self._block_size)
            self.routing.find(
                f"{name}: the history gathered through the block table differs from the ledger at {where}",
                int(wrong.sum()),
            )

    def _check_outputs(self, name: str, plan: StepPlan, query: torch.Tensor, output: torch.Tensor) -> None:
        tapped = self._layers[name]
        impl = tapped.layer.impl
        outputs, tolerances = [], []
        starts = plan.query_start()
        queries = query.view(plan.rows, impl.num_heads, impl.head_size)
        for index, request in enumerate(plan.requests):
            if not self._ledger.covers(name, request.request, request.seq_len):
                self.placement.find(f"{name}: the ledger does not cover request {request.request}")
                return
            cells = self._ledger.history(name, request.request, request.seq_len)
            split = tapped.codec.k_bytes * impl.head_size
            keys, values = tapped.codec.decode(Cells(k=cells[..., :split], v=cells[..., split:]), tapped.v_scale)
            reference = placement.attention(
                queries[starts[index] : starts[index + 1]],
                keys,
                values,
                start=request.start,
                scale=impl.scale,
                rounding=self._rounding,
            )
            outputs.append(reference.output)
            tolerances.append(reference.tolerance)
        reference = placement.Reference(torch.cat(outputs), torch.cat(tolerances))
        ambiguous, worst = placement.check_rows(self.placement, plan, layer=name, output=output, reference=reference)
        self._attended_layers.add(name)
        self._ambiguous += ambiguous
        self._worst = worst if math.isnan(worst) or worst > self._worst else self._worst
        self._keep_sample(name, plan, queries, output)

    def _keep_sample(self, name: str, plan: StepPlan, queries: torch.Tensor, output: torch.Tensor) -> None:
        """Keeps one short decode row of the first layer whole, so that the comparison can be redone offline."""
        if self._sample or name != next(iter(self._layers)):
            return
        starts = plan.query_start()
        for index, request in enumerate(plan.requests):
            if request.scheduled == 1 and 1 < request.seq_len <= _SAMPLE_TOKENS:
                tapped = self._layers[name]
                row = starts[index]
                cells = self._ledger.history(name, request.request, request.seq_len)
                self._sample = {
                    "layer": name,
                    "kv_format": tapped.codec.name,
                    "v_scale": tapped.v_scale,
                    "scale": float(tapped.layer.impl.scale),
                    "position": request.start,
                    "query": queries[row].float().tolist(),
                    "output": output[row].reshape(queries[row].shape).float().tolist(),
                    "cells_shape": list(cells.shape),
                    "cells": base64.b64encode(cells.contiguous().numpy().tobytes()).decode(),
                }
                return


def layer_order(names: Mapping[str, Any]) -> list[str]:
    """Attention layer names in the order of their layer numbers."""

    def key(name: str) -> tuple[int, ...]:
        return tuple(int(part) for part in name.split(".") if part.isdigit())

    return sorted(names, key=key)
