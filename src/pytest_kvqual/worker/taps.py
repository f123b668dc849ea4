"""The taps: they watch the cache update, the attention and its metadata of every layer, and feed the oracles' window.

A tap is an instance attribute over ``impl.do_kv_cache_update`` and ``impl.forward``. It sees what the engine hands in,
calls whatever was there before (a seeded fault included) and checks in place; tensors never leave the worker. Removing
the taps restores the very objects that were found.

A step that replays a full graph calls no layer from Python. What its layers were given comes from the static taps that
the graph was captured with (:mod:`pytest_kvqual.worker.static_taps`), once it has run. Where it has none, or where each
layer must be called by itself, no step of the window runs as a graph.

The oracles make their own tensors where the caches are, so that nothing is compared across devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytest_kvqual.oracles.window import LayerView, Window
from pytest_kvqual.worker.attributes import Attributes
from pytest_kvqual.worker.places import made_by_the_engine, made_on
from pytest_kvqual.worker.runner import graph_mode, maps_of, note_maps, resolved, runner_of
from pytest_kvqual.worker.static_taps import StaticTap
from pytest_kvqual.worker.wire import WorkerError


class OracleTaps:
    """Taps over one run of steps that starts and ends with no request in flight.

    Args:
        layers: Every attention layer of this rank by name, in layer order.
        views: The same layers as the oracles see them, in the same order.
        runner: The engine's model runner: read for the row order and the tokens of each step, nothing else.
        static: The taps in the runner's full graphs, where it has been captured with any.
        block_size: Tokens per block of the engine's block table.
        rounding: Rounding unit of the model's 16-bit type.
        probe: See :class:`pytest_kvqual.oracles.window.Window`.
        fills: See there.
        seed: See there.
    """

    def __init__(
        self,
        *,
        layers: Mapping[str, Any],
        views: list[LayerView],
        runner: Any,
        block_size: int,
        rounding: float,
        probe: bool = False,
        fills: bool = False,
        seed: int = 0,
        static: StaticTap | None = None,
    ) -> None:
        if static is not None and (probe or fills):
            raise WorkerError(
                "found static taps with fingerprints or fills, expected none of them: a graph runs each layer once"
            )
        self._layers = dict(layers)
        self._runner = runner_of(runner)
        self._static = static
        self._device = views[0].cache.device
        self._attributes = Attributes()
        self._scheduled: Any = None
        self._replays = 0
        self.window = Window(views, block_size=block_size, rounding=rounding, probe=probe, fills=fills, seed=seed)

    # -- life -----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Digests every block of every layer and puts the taps on."""
        with made_on(self._device):
            self.window.open()
        note_maps(self._attributes, self._runner.builders)
        self._runner.follow(self._attributes, before=self._planned, replayed=self._replayed)
        if self._static is not None:
            self._static.skip()
        elif graph_mode(self._runner.runner) != "NONE":
            self._runner.eager(self._attributes)
        for name, layer in self._layers.items():
            impl = layer.impl
            self._attributes.replace(impl, "do_kv_cache_update", self._updating(name, impl.do_kv_cache_update))
            self._attributes.replace(impl, "forward", self._attending(name, impl.forward))

    @property
    def installed(self) -> bool:
        """Whether any tap is on."""
        return bool(self._attributes)

    def remove(self) -> None:
        """Takes the taps off."""
        self._attributes.restore()

    def finish(self) -> dict[str, object]:
        """Takes the taps off and returns the record of the window.

        Its conditions have one more: ``replayed``, the steps that ran as a full graph.
        """
        self.remove()
        with made_on(self._device):
            record = self.window.finish()
        conditions = record["conditions"]
        return {**record, "conditions": {**conditions, "replayed": self._replays}}  # type: ignore[dict-item]  # counts

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin_step(self, scheduled: Any) -> None:
        """Follows the scheduler's decisions of one step: which request holds which blocks."""
        with made_on(self._device):
            self._decided(scheduled)

    def _decided(self, scheduled: Any) -> None:
        window = self.window
        self._scheduled = scheduled
        # In this order: what a finished or preempted request held may be granted to another in the same step.
        for request in scheduled.finished_req_ids:
            window.release(request)
        for request in getattr(scheduled, "preempted_req_ids", None) or ():
            window.release(request)
        for new in scheduled.scheduled_new_reqs:
            # Under the second model runner a resumed request comes as a new one, with all its tokens.
            tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids or ()
            window.admit(new.req_id, tokens=tokens, blocks=new.block_ids[0], cached=new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        for index, request in enumerate(cached.req_ids):
            granted = cached.new_block_ids[index]
            if request in cached.resumed_req_ids:
                window.admit(
                    request,
                    tokens=getattr(cached, "all_token_ids", {}).get(request) or window.tokens(request),
                    blocks=granted[0] if granted is not None else (),
                    cached=cached.num_computed_tokens[index],
                )
            elif granted is not None:
                window.grant(request, granted[0])

    def end_step(self, output: Any) -> None:
        """Learns the tokens that the step sampled: they are what the next step must be fed."""
        self._scheduled = None
        output = resolved(output)
        if output is None or not getattr(output, "req_ids", None):
            return
        for request, sampled in zip(output.req_ids, output.sampled_token_ids, strict=False):
            self.window.sampled(request, sampled)

    def _planned(self) -> None:
        """Opens the step in the window, once: the runner has ordered its rows by then, and no layer has run."""
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is None:
            return
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        counts = scheduled.num_scheduled_tokens
        order = self._runner.order(scheduled)
        with made_on(self._device):
            self.window.begin([(request, starts[request], counts[request]) for request in order], self._runner.fed())

    def _replayed(self) -> None:
        """Hands over what the static taps hold of the graph that ran."""
        self._replays += 1
        if self._static is None:
            raise WorkerError(
                "found a full graph without taps in it, expected the oracles to see each layer; boot the server with"
                " taps, or the engine in eager mode"
            )
        with made_on(self._device):
            self._static.feed(self.window)

    # -- taps -----------------------------------------------------------------------------------------------------

    def _updating(self, name: str, original: Callable[..., object]) -> Callable[..., None]:
        def update(layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
            self._planned()

            def write(key: torch.Tensor, value: torch.Tensor) -> object:
                with made_by_the_engine(self._device):
                    return original(layer, key, value, kv_cache, slot_mapping)

            with made_on(self._device):
                self.window.update(name, key, value, slot_mapping, write=write)

        return update

    def _attending(self, name: str, original: Callable[..., object]) -> Callable[..., object]:
        def forward(
            layer: Any,
            query: torch.Tensor,
            key: Any,
            value: Any,
            kv_cache: Any,
            metadata: Any,
            output: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> object:
            def run(query: torch.Tensor, key: Any, value: Any) -> object:
                with made_by_the_engine(self._device):
                    return original(layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)

            if metadata is None:
                return run(query, key, value)
            self._planned()
            maps = maps_of(metadata)
            with made_on(self._device):
                return self.window.attend(
                    name,
                    query,
                    key,
                    value,
                    block_table=maps.block_table,
                    seq_lens=maps.seq_lens,
                    query_start_loc=maps.query_start_loc,
                    output=output,
                    run=run,
                )

        return forward


def layer_order(names: Mapping[str, Any]) -> list[str]:
    """Attention layer names in the order of their layer numbers."""

    def key(name: str) -> tuple[int, ...]:
        return tuple(int(part) for part in name.split(".") if part.isdigit())

    return sorted(names, key=key)
