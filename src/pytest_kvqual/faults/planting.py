"""How a fault gets in: what an engine's objects do is replaced, and ``worker.kvqual_undo`` takes it back.

What a fault makes itself is made where the caches are; what it calls of the engine is called as the engine does.

A fault knows an engine through what its worker hands out: attention layers with ``impl.do_kv_cache_update`` and
``impl.forward``, metadata builders with ``build``. Faults of one kernel's parts replace a method of the ``Exemplar``
that a layer of the transfer engine runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_kvqual.worker import attributes
from pytest_kvqual.worker.places import made_by_the_engine, made_on


def replace(worker: Any, holder: Any, name: str, value: object) -> None:
    """Sets an attribute and remembers how to take it back."""
    attributes.replace(worker.kvqual_undo, holder, name, value)


@contextmanager
def held_as(holder: Any, **values: object) -> Iterator[None]:
    """Attributes set for the length of a ``with`` block."""
    missing = object()
    kept = {name: vars(holder).get(name, missing) for name in values}
    for name, value in values.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is missing:
                delattr(holder, name)
            else:
                setattr(holder, name, value)


def wrap_updates(worker: Any, change: Callable[..., object]) -> None:
    """Replaces each layer's cache update by ``change(original, layer, key, value, kv_cache, slot_mapping)``."""
    for layer in worker.kvqual_layers().values():
        original = layer.impl.do_kv_cache_update

        def update(layer: Any, key: Any, value: Any, cache: Any, slots: Any, *, original: Any = original) -> object:
            def engine(*args: Any) -> object:
                with made_by_the_engine(cache.device):
                    return original(*args)

            with made_on(cache.device):
                return change(engine, layer, key, value, cache, slots)

        replace(worker, layer.impl, "do_kv_cache_update", update)


class Call:
    """One attention call that a fault may look at, change and run.

    ``query`` and ``output`` are views ``[>= T, Hq, D]``. ``table``, ``lengths`` and ``starts`` are the step's.
    """

    def __init__(self, original: Any, layer: Any, args: tuple[Any, ...], extra: tuple[Any, ...], named: Any) -> None:
        self.layer = layer
        self.query, self.key, self.value, self.cache, self.metadata, self.output = args
        self._original, self._extra, self._named = original, extra, named
        heads, size = layer.impl.num_heads, layer.impl.head_size
        self.rows = self.output.view(self.output.shape[0], heads, size)
        self.asked = self.query.view(self.query.shape[0], heads, size)
        self.table: torch.Tensor = self.metadata.block_table
        self.lengths: torch.Tensor = self.metadata.seq_lens
        self.starts: torch.Tensor = self.metadata.query_start_loc

    @property
    def counts(self) -> torch.Tensor:
        """Query rows of each request: int ``[R]``."""
        return self.starts[1:] - self.starts[:-1]

    def spans(self) -> Iterator[tuple[int, int, int, int]]:
        """``(request, first row, end row, length)`` of each request that has rows."""
        starts, lengths = self.starts.tolist(), self.lengths.tolist()
        for request in range(len(starts) - 1):
            if starts[request + 1] > starts[request]:
                yield request, starts[request], starts[request + 1], lengths[request]

    def run(self, **changes: Any) -> Any:
        """Runs the original with ``query``, ``cache``, ``output``, ``table``, ``lengths`` or ``starts`` changed."""
        metadata = copy.copy(self.metadata)
        for name, attribute in (("table", "block_table"), ("lengths", "seq_lens"), ("starts", "query_start_loc")):
            if name in changes:
                setattr(metadata, attribute, changes[name])
        query = changes.get("query", self.query)
        output = changes.get("output", self.output)
        cache = changes.get("cache", self.cache)
        with made_by_the_engine(self.cache.device):
            return self._original(
                self.layer, query, self.key, self.value, cache, metadata, output, *self._extra, **self._named
            )

    def row(self, row: int, table: torch.Tensor, length: int) -> torch.Tensor:
        """The output ``[Hq, D]`` of one query row as the last of ``length`` positions of a block table ``[B]``."""
        output = torch.zeros_like(self.output[:1])
        lengths = torch.full_like(self.lengths[:1], length)
        starts = torch.arange(2, dtype=self.starts.dtype)
        self.run(query=self.query[row : row + 1], output=output, table=table[None], lengths=lengths, starts=starts)
        return output.view(self.rows.shape[1:])


def wrap_attention(worker: Any, change: Callable[[Call], object], *, only: int | None = None) -> None:
    """Replaces each layer's attention, or that of layer number ``only``, by ``change(call)``."""
    for number, layer in enumerate(worker.kvqual_layers().values()):
        if only is not None and number != only % len(worker.kvqual_layers()):
            continue
        original = layer.impl.forward

        def forward(
            layer: Any,
            query: Any,
            key: Any,
            value: Any,
            kv_cache: Any,
            attn_metadata: Any,
            output: Any,
            *extra: Any,
            original: Any = original,
            **named: Any,
        ) -> object:
            if attn_metadata is None:  # the engine's profiling run
                return original(layer, query, key, value, kv_cache, attn_metadata, output, *extra, **named)
            call = Call(original, layer, (query, key, value, kv_cache, attn_metadata, output), extra, named)
            with made_on(kv_cache.device):
                result = change(call)
            return output if result is None else result

        replace(worker, layer.impl, "forward", forward)


def wrap_metadata(worker: Any, change: Callable[[Any, int], None]) -> None:
    """Calls ``change(metadata, number)`` on what each metadata builder has built; it sets what it wants changed."""
    for number, builder in enumerate(worker.kvqual_metadata_builders()):
        original = builder.build

        def build(*args: Any, number: int = number, original: Any = original, **named: Any) -> Any:
            metadata = original(*args, **named)
            with made_on(metadata.seq_lens.device):
                change(metadata, number)
            return metadata

        replace(worker, builder, "build", build)


class Step:
    """What the first metadata builder built last: the maps of the step in flight. Tensors are copies."""

    def __init__(self, worker: Any) -> None:
        self.table = self.lengths = self.starts = torch.zeros(0)
        self.number = 0
        wrap_metadata(worker, self._see)

    def _see(self, metadata: Any, number: int) -> None:
        if number == 0:
            self.table = metadata.block_table.clone()
            self.lengths = metadata.seq_lens.clone()
            self.starts = metadata.query_start_loc.clone()
            self.number += 1

    def places(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Request, position and number of query rows of each of the first ``rows`` rows; request -1 is padding."""
        starts, lengths = self.starts.long(), self.lengths.long()
        counts = starts[1:] - starts[:-1]
        owner = torch.repeat_interleave(torch.arange(counts.numel()), counts)[:rows]
        within = torch.arange(owner.numel()) - starts[owner]
        position = lengths[owner] - counts[owner] + within
        pad = rows - owner.numel()
        return tuple(  # type: ignore[return-value]  # three tensors
            torch.nn.functional.pad(x, (0, pad), value=-1) for x in (owner, position, counts[owner])
        )


@contextmanager
def scaled(layer: Any, *, k: float | None = None, v: float | None = None) -> Iterator[None]:
    """The K and V scales that a layer's kernel reads, held at other values for the length of a ``with`` block.

    A kernel reads a number or a tensor; both are held.
    """
    wanted = {name: value for name, value in (("_k_scale", k), ("_v_scale", v)) if value is not None}
    tensors = [(getattr(layer, name, None), value) for name, value in wanted.items()]
    kept = [(tensor, tensor.clone()) for tensor, _ in tensors if isinstance(tensor, torch.Tensor)]
    with held_as(layer, **{f"{name}_float": value for name, value in wanted.items()}):
        for tensor, value in tensors:
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(value)
        try:
            yield
        finally:
            for tensor, before in kept:
                tensor.copy_(before)


def kernels(worker: Any) -> list[Any]:
    """The kernels (``Exemplar``) that the transfer engine's layers run, each once."""
    found = {id(layer.impl.backend): layer.impl.backend for layer in worker.kvqual_layers().values()}
    return list(found.values())


def override(worker: Any, part: str, change: Callable[..., object]) -> None:
    """Replaces a part of each kernel by ``change(kernel, original, *arguments)``."""
    for kernel in kernels(worker):
        original = getattr(kernel, part)

        def changed(*args: Any, kernel: Any = kernel, original: Any = original, **named: Any) -> object:
            return change(kernel, original, *args, **named)

        replace(worker, kernel, part, changed)
