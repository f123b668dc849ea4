"""What the transfer engine is and does while a fault is planted: each scenario has the conditions of some faults.

A scenario makes an engine and then drives it; both are repeatable. Names of requests are single letters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import torch

from pytest_kvqual.kv.backends.exemplar import Exemplar, Mode
from pytest_kvqual.kv.geometry import Geometry
from pytest_kvqual.transfer.engine import VOCABULARY, Backend, TransferEngine

WINDOW = 12


def tokens(length: int, seed: int) -> list[int]:
    """A prompt of ``length`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return cast(list[int], torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One engine and what it is asked.

    Args:
        drive: Runs the requests. Its second argument turns the order of the rows of each step.
        kv_format: Of the cache.
        mode: How the kernel cuts a request's positions into parts.
        options: Further arguments of the engine.
        prepare: Changes the engine before anything is planted.
        probe: Whether K, V and queries may be replaced by fingerprints in a second pass.
        garbage: Whether the pool starts with random bytes, NaN among them, instead of what earlier requests left.
    """

    drive: Callable[[TransferEngine, Turn], None]
    kv_format: str = "k16v8"
    mode: Mode = "whole"
    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[TransferEngine], None] | None = None
    probe: bool = True
    garbage: bool = False

    def engine(self, backend: Backend | None = None) -> TransferEngine:
        """A new engine of this scenario, over the exemplar or over another backend of its format."""
        name = f"EXEMPLAR-{self.kv_format}" if backend is None else type(backend).__name__
        if backend is None:
            factors = {"k_factors": (1.0, 0.75, 1.5), "v_factors": (0.5, 1.0, 1.25)} if self.kv_format == "k8v8" else {}
            backend = Exemplar(self.kv_format, mode=self.mode, splits=4, **factors)  # type: ignore[arg-type]  # its own
        engine = TransferEngine(backend=backend, kv_format=self.kv_format, **self.options)
        for layer in engine.kvqual_layers().values():
            layer.attn_backend = SimpleNamespace(kvqual_name=name)
        if self.prepare is not None:
            self.prepare(engine)
        if not self.garbage:
            fill_pool(engine)
        return engine


Turn = Callable[[Sequence[Any]], list[Any]]
"""Puts the rows of a step into the order of a run."""


def core(engine: TransferEngine, turn: Turn) -> None:
    """Ragged lengths around the block, chunks, mixed and shrinking batches, reuse, preemption and resume, padding."""
    size = engine.block_size
    prompts = {"a": size - 1, "b": size, "c": 2 * size + 5, "d": 1, "e": 2 * size + 1}
    for seed, (name, length) in enumerate(prompts.items()):
        engine.submit(name, tokens(length, seed))
    engine.step(turn([("c", 5), ("a", None), ("b", None)]))
    engine.step(turn([("a", 1), ("b", 1), ("c", size), ("d", 1)]), padding=2)
    engine.step(turn([("b", 1), ("a", 1), ("d", 1), ("c", 1)]), padding=1)
    engine.finish("b")
    engine.step(turn([("c", None), ("a", 1), ("d", 1)]), padding=3)
    engine.step(turn([("d", 1), ("e", None), ("a", 1)]))
    engine.preempt("a")
    engine.finish("d")
    engine.step(turn([("e", 1), ("c", 1)]), padding=2)
    engine.submit("f", tokens(size + 3, 11))
    engine.step(turn([("c", 1), ("e", 1), ("f", 4), ("a", None)]))
    # The rest of a prompt in the row of a request that had more blocks.
    engine.step(turn([("c", 1), ("f", None), ("a", 1)]))
    for _ in range(size - 3):
        engine.step(turn([("f", 1), ("a", 1), ("c", 1)]), padding=1)


def drafts(engine: TransferEngine, turn: Turn) -> None:
    """Speculative steps whose requests accept different counts."""
    size = engine.block_size
    for seed, (name, length) in enumerate({"a": size - 2, "b": size + 1, "c": 3}.items()):
        engine.submit(name, tokens(length, seed))
    engine.step(turn([("a", None), ("b", None), ("c", None)]))
    for accepted in ({"a": 0, "b": 3, "c": 1}, {"a": 2, "b": 1, "c": 3}, {"a": 3, "b": 2, "c": 0}):
        guesses = {name: tokens(3, seed + 20) for seed, name in enumerate(accepted)}
        engine.step(turn([("a", 4), ("b", 4), ("c", 4)]), drafts=guesses, accept=accepted)
    engine.step(turn([("a", 1), ("b", 1), ("c", 1)]))


def windowed(engine: TransferEngine, turn: Turn) -> None:
    """Lengths around a sliding window, chunks beyond it, and blocks that are taken back and granted anew."""
    size = engine.block_size
    for seed, (name, length) in enumerate({"a": WINDOW - 2, "b": 3 * size + 2, "c": 2}.items()):
        engine.submit(name, tokens(length, seed))
    engine.step(turn([("a", None), ("b", size + 1), ("c", None)]))
    engine.step(turn([("a", 1), ("b", None), ("c", 1)]), padding=1)
    for _ in range(size):
        engine.step(turn([("a", 1), ("b", 1), ("c", 1)]))
    engine.submit("d", tokens(2 * size, 7))
    engine.step(turn([("a", 1), ("b", 1), ("d", None)]))
    engine.step(turn([("b", 1), ("d", 1), ("a", 1)]))


def cascade(engine: TransferEngine, turn: Turn) -> None:
    """Requests that share two full blocks, warm and cold, in one batch."""
    size = engine.block_size
    common = tokens(2 * size, 40)
    for seed, (name, length) in enumerate({"a": 3, "b": 5, "c": 1}.items()):
        engine.submit(name, [*common, *tokens(length, 41 + seed)])
    engine.step(turn([("a", None)]))
    engine.step(turn([("a", 1), ("b", None), ("c", None)]))
    for _ in range(3):
        engine.step(turn([("c", 1), ("a", 1), ("b", 1)]))


def long(engine: TransferEngine, turn: Turn) -> None:
    """One history of many blocks, read by a chunk and by single rows."""
    engine.submit("a", tokens(engine.block_size * 40 + 3, 50))
    engine.submit("b", tokens(5, 51))
    engine.step(turn([("a", engine.block_size * 40 - 2)]))
    engine.step(turn([("a", None), ("b", None)]))
    engine.step(turn([("a", 1), ("b", 1)]))


def _alike(engine: TransferEngine, agree: Callable[[object], object]) -> tuple[list[int], list[int]]:
    """Two first blocks of other tokens on whose keys ``agree`` agrees."""
    seen: dict[object, list[int]] = {}
    for seed in range(10_000):
        block = tokens(engine.block_size, 1000 + seed)
        key = agree(engine.block_hash(None, tuple(block), ""))
        if key in seen and seen[key] != block:
            return seen[key], block
        seen[key] = block
    raise RuntimeError("no two blocks agree")


def prefixes(engine: TransferEngine, turn: Turn) -> None:
    """Prefix hits, keys that nearly agree, forks, and prefixes that are stored, lost, and restored."""
    size = engine.block_size
    first, second, tail = tokens(size, 60), tokens(size, 61), tokens(3, 62)
    left, right = _alike(engine, _eight_bits)
    prompts: dict[str, tuple[list[int], str]] = {
        "a": ([*first, *second, *tail], "adapter:x#1"),
        # The same tokens for other identities, one of which differs in its tag only and one in its id only.
        "b": ([*first, *second, *tail], "salt:x#1"),
        "c": ([*first, *second, *tail], "adapter:x#2"),
        # A hit that is a block shorter than the prompt.
        "d": ([*first, *second, *tokens(size + 2, 63)], "adapter:x#1"),
        # What was the second block, first; and the first one backwards.
        "e": ([*second, *tail], "adapter:x#1"),
        "f": ([*first[::-1], *tail], "adapter:x#1"),
        "g": ([*left, *tail], ""),
        "h": ([*right, *tail], ""),
    }
    for name, (prompt, identity) in prompts.items():
        engine.submit(name, prompt, identity=identity)
    engine.step(turn([("a", None), ("g", None)]))
    engine.offload("a")
    engine.step(turn([("a", 1), ("b", None), ("c", None), ("h", None)]))
    engine.step(turn([("d", None), ("a", 1), ("e", None), ("f", None)]), padding=1)
    engine.fork("a", "k", 5)
    engine.step(turn([("a", 1), ("k", None), ("d", 1)]))
    for name in "abcefgh":
        engine.finish(name)
    engine.step(turn([("k", 1), ("d", 1)]))
    # New requests take every block; the prefixes that they held are gone from the pool.
    for seed, (name, length) in enumerate({"l": 9, "m": 9, "n": 9, "o": 9, "q": 7}.items()):
        engine.submit(name, tokens(size * length - 6, 70 + seed))
    engine.step(turn([("k", 1), ("d", 1), ("l", None), ("m", None)]))
    engine.finish("d")
    engine.finish("k")
    engine.step(turn([("n", None), ("o", None), ("q", None), ("l", 1)]))
    for name in "noq":
        engine.finish(name)
    engine.submit("p", [*first, *second, *tail], identity="adapter:x#1")
    engine.step(turn([("l", 1), ("p", None)]))
    # Stored at its end; its blocks are granted anew at once.
    engine.submit("s", tokens(2 * size + 1, 80))
    engine.step(turn([("p", 1), ("s", None)]))
    engine.offload("s")
    engine.forget_prefixes()
    engine.finish("s")
    engine.submit("t", tokens(3 * size, 81))
    engine.step(turn([("t", None), ("p", 1)]))
    for _ in range(3):
        engine.step(turn([("p", 1), ("t", 1)]))
    engine.submit("u", tokens(2 * size + 1, 80))
    engine.step(turn([("u", None), ("p", 1), ("l", 1)]))


def _eight_bits(key: object) -> int:
    import hashlib

    return hashlib.sha256(repr(key).encode()).digest()[0]


def _round_queries(engine: TransferEngine) -> None:
    original = engine.project

    def project(*args: Any) -> Any:
        query, key, value = original(*args)
        return query.to(torch.float8_e4m3fn).to(query.dtype), key, value

    vars(engine)["project"] = project  # a seam


def fill_pool(engine: TransferEngine) -> None:
    """What earlier requests left: K and V of the model's own magnitude in every cell, small numbers between blocks.

    A pool of random bytes holds NaN, which any gate objects to.
    """
    generator = torch.Generator().manual_seed(engine.seed + 1)
    for layer in engine.kvqual_layers().values():
        layer.pool.view(torch.uint8).bitwise_and_(0x37)
        blocks, heads, size, _ = layer.kv_cache.shape
        key, value = torch.randn(2, blocks * size, heads, layer.impl.head_size, generator=generator).to(engine.dtype)
        cells = layer.codec.encode(key, value, layer.v_scale_declared)
        layer.codec.place(layer.kv_cache, torch.arange(blocks * size), cells)


def _halves(engine: TransferEngine) -> None:
    """A K scale of 0.5 and a V scale of 2: unequal, not 1, and near enough to it that a wrong one shows as such."""
    for layer in engine.kvqual_layers().values():
        layer.codec = replace(layer.codec, k_scale=0.5)
        layer._k_scale_float = layer.k_scale_declared = 0.5
        layer._v_scale_float = layer.v_scale_declared = 2.0


_WINDOWED = {"windows": (WINDOW,), "evict": True, "prefix_cache": False}
_TWO_HEADS = Geometry(query_heads=4, kv_heads=2, head_size=16, block_size=8)

SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        "plain": Scenario(drive=core),
        "decode-first": Scenario(drive=core, options={"decode_first": True}),
        "eight": Scenario(drive=core, kv_format="k8v8"),
        "halves": Scenario(drive=core, kv_format="k8v8", prepare=_halves),
        "eight-bit-query": Scenario(drive=core, kv_format="k8v8", prepare=_round_queries, probe=False),
        "inline": Scenario(drive=core, kv_format="k8v8-inline"),
        "split": Scenario(drive=core, mode="split"),
        "splits": Scenario(drive=core, mode="kv-splits"),
        "static": Scenario(drive=core, options={"static": (6, 48)}),
        "drafts": Scenario(drive=drafts),
        "garbage": Scenario(drive=core, garbage=True),
        "sixteen": Scenario(drive=core, kv_format="k16v16"),
        "window": Scenario(drive=windowed, options=_WINDOWED),
        "cascade": Scenario(drive=cascade, mode="cascade"),
        "long": Scenario(drive=long),
        "prefixes": Scenario(drive=prefixes, options={"blocks": 44}),
        "two-heads": Scenario(drive=prefixes, kv_format="k16v16", options={"geometry": _TWO_HEADS, "blocks": 44}),
        "ranks": Scenario(
            drive=prefixes, kv_format="k16v16", options={"geometry": _TWO_HEADS, "ranks": 4, "layers": 1, "blocks": 44}
        ),
    }
)
