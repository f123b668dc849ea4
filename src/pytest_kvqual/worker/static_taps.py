"""Taps that live inside a captured graph: copies into buffers whose address never changes.

A captured graph replays device work and re-enters no Python, so a tap there can only be work that was captured with it:
``buffer[:n].copy_(tensor)``, and a counter that the same graph adds to. Shapes are the graph's own; no value is read
back while a step runs. After a replay, :meth:`StaticTap.feed` reads the buffers and hands them to the oracle.

The copies stay in a graph that was captured with them, whatever :meth:`StaticTap.remove` takes off. So a server whose
graphs have taps is told so at its start, is used for the oracles and for nothing else, and says so whenever it is asked
whether taps are installed; what is timed runs in another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytest_kvqual.oracles.window import Window
from pytest_kvqual.worker.attributes import Attributes
from pytest_kvqual.worker.runner import maps_of
from pytest_kvqual.worker.wire import WorkerError


class _Buffer:
    """A tensor of fixed address, and how much of it the graph that ran last has written."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, axes: int) -> None:
        self._name = name
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        self._sizes = torch.zeros(axes, dtype=torch.int64, device=device)

    def copy(self, source: torch.Tensor) -> None:
        """Copies ``source`` to the front of the buffer; tensor operations only."""
        if source.dim() != self._data.dim() or any(
            found > most for found, most in zip(source.shape, self._data.shape, strict=True)
        ):
            raise WorkerError(
                f"found {self._name} of shape {tuple(source.shape)}, expected at most {tuple(self._data.shape)}, in a"
                " static tap; allocate it for the largest captured step"
            )
        self._data[tuple(slice(0, size) for size in source.shape)].copy_(source)
        # Several graphs share the buffer: a smaller one must say how little of it is its own.
        for axis in range(self._sizes.numel()):
            self._sizes[axis].fill_(source.shape[axis])

    @property
    def bytes(self) -> int:
        """Device memory that it takes."""
        return self._data.numel() * self._data.element_size()

    def read(self) -> torch.Tensor:
        """What the last graph wrote: a copy, which later replays leave alone."""
        return self._data[tuple(slice(0, size) for size in self._sizes.tolist())].clone()


class _LayerBuffers:
    def __init__(
        self,
        name: str,
        layer: Any,
        *,
        tokens: int,
        requests: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        impl = layer.impl

        def buffer(what: str, *shape: int, kind: torch.dtype, axes: int = 1) -> _Buffer:
            return _Buffer(f"{what} of {name}", shape, kind, device, axes)

        self.key = buffer("key", tokens, impl.num_kv_heads, impl.head_size, kind=dtype)
        self.value = buffer("value", tokens, impl.num_kv_heads, impl.head_size, kind=dtype)
        self.query = buffer("query", tokens, impl.num_heads, impl.head_size, kind=dtype)
        self.output = buffer("output", tokens, impl.num_heads, impl.head_size, kind=dtype)
        self.slots = buffer("slot_mapping", tokens, kind=torch.int64)
        self.table = buffer("block_table", requests, columns, kind=torch.int64, axes=2)
        self.lengths = buffer("seq_lens", requests, kind=torch.int64)
        self.starts = buffer("query_start_loc", requests + 1, kind=torch.int64)
        self.heads = (impl.num_kv_heads, impl.num_heads, impl.head_size)
        every = (self.key, self.value, self.query, self.output, self.slots, self.table, self.lengths, self.starts)
        self.bytes = sum(one.bytes for one in every)
        # Added to by the graph itself: [updates, attentions] so far.
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        self.fed = [0, 0]


class StaticTap:
    """Captures what each layer's cache update and attention were given, as part of the graph.

    Install it before the graph is captured; call :meth:`feed` after each replay. The window must have neither probe nor
    fills: both need to run the layer again, which a graph does not allow.

    Args:
        layers: Attention layers by name, in layer order. ``impl`` gives ``num_heads``, ``num_kv_heads``, ``head_size``.
        tokens: Rows of the largest captured step, padding included.
        requests: Rows of its block table, padding included.
        columns: Columns of its block table.
        dtype: 16-bit type of K, V, queries and outputs.
    """

    def __init__(
        self, layers: Mapping[str, Any], *, tokens: int, requests: int, columns: int, dtype: torch.dtype
    ) -> None:
        self._layers = dict(layers)
        self._buffers = {
            name: _LayerBuffers(
                name,
                layer,
                tokens=tokens,
                requests=requests,
                columns=columns,
                dtype=dtype,
                device=layer.kv_cache.device,
            )
            for name, layer in self._layers.items()
        }
        self._attributes = Attributes()

    @property
    def installed(self) -> bool:
        """Whether any tap is on. A graph captured meanwhile keeps its copies."""
        return bool(self._attributes)

    @property
    def bytes(self) -> int:
        """Device memory of all buffers."""
        return sum(buffers.bytes for buffers in self._buffers.values())

    def install(self) -> None:
        """Puts the taps on.

        Raises:
            WorkerError: They are on already.
        """
        if self._attributes:
            raise WorkerError("the static taps are on already")
        for name, layer in self._layers.items():
            buffers, impl = self._buffers[name], layer.impl
            self._attributes.replace(impl, "do_kv_cache_update", _updating(buffers, impl.do_kv_cache_update))
            self._attributes.replace(impl, "forward", _attending(buffers, impl.forward))

    def remove(self) -> None:
        """Takes the taps off."""
        self._attributes.restore()

    def skip(self) -> None:
        """Forgets the steps that ran so far: warm-up and the capture itself."""
        for buffers in self._buffers.values():
            buffers.fed = [int(count) for count in buffers.counts.tolist()]

    def feed(self, window: Window) -> tuple[str, ...]:
        """Hands the step that was replayed last to ``window``, whose ``begin`` was called for it before the replay.

        Returns:
            The layers whose cache update and attention both ran since the last feed. A part that did not run is not
            handed over: its buffers hold an older step.

        Raises:
            WorkerError: A layer ran more than once since the last feed, so that a step was overwritten unseen.
        """
        whole = []
        for name, buffers in self._buffers.items():
            counts = [int(count) for count in buffers.counts.tolist()]
            ran = [now - before for now, before in zip(counts, buffers.fed, strict=True)]
            if max(ran) > 1:
                raise WorkerError(
                    f"found {max(ran)} steps of {name} since the last feed, expected one, in a static tap; feed after"
                    " each replay"
                )
            buffers.fed = counts
            if not ran[0] and not ran[1]:
                continue
            key, value = buffers.key.read(), buffers.value.read()
            if ran[0]:
                window.update(name, key, value, buffers.slots.read(), write=lambda key, value: None)
            if ran[1]:
                window.attend(
                    name,
                    buffers.query.read(),
                    key,
                    value,
                    block_table=buffers.table.read(),
                    seq_lens=buffers.lengths.read(),
                    query_start_loc=buffers.starts.read(),
                    output=buffers.output.read(),
                    run=lambda query, key, value: None,
                )
            if ran[0] and ran[1]:
                whole.append(name)
        return tuple(whole)


def _updating(buffers: _LayerBuffers, original: Callable[..., Any]) -> Callable[..., Any]:
    kv_heads, _, size = buffers.heads

    def update(layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> Any:
        # Before the call: what a backend does to its inputs is not what it was given.
        buffers.key.copy(key.view(key.shape[0], kv_heads, size))
        buffers.value.copy(value.view(value.shape[0], kv_heads, size))
        buffers.slots.copy(slot_mapping)
        buffers.counts[0].add_(1)
        return original(layer, key, value, kv_cache, slot_mapping)

    return update


def _attending(buffers: _LayerBuffers, original: Callable[..., Any]) -> Callable[..., Any]:
    _, heads, size = buffers.heads

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
        if metadata is None:  # the engine's profiling run
            return original(layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)
        buffers.query.copy(query.view(query.shape[0], heads, size))
        maps = maps_of(metadata)
        buffers.table.copy(maps.block_table)
        buffers.lengths.copy(maps.seq_lens)
        buffers.starts.copy(maps.query_start_loc)
        result = original(layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)
        buffers.output.copy(output.view(output.shape[0], heads, size))
        buffers.counts[1].add_(1)
        return result

    return forward
