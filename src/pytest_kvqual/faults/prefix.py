"""Faults of shared prefixes: what a cached block is found by, and who may write to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from pytest_kvqual.faults.planting import replace


def _keyed_by(worker: Any, key: Any) -> None:
    """A block's key is ``key(original, parent, tokens, identity)``."""
    original = worker.block_hash
    replace(worker, worker, "block_hash", lambda parent, tokens, identity: key(original, parent, tokens, identity))


def extra_identity_untagged(worker: Any) -> None:
    """An adapter and a salt enter the key as bare strings: equal strings are one identity."""
    _keyed_by(worker, lambda hashed, parent, tokens, who: hashed(parent, tokens, who.rpartition(":")[2]))


def identity_by_label(worker: Any) -> None:
    """The key holds the label of an adapter, which two of them share, instead of its id."""
    _keyed_by(worker, lambda hashed, parent, tokens, who: hashed(parent, tokens, who.partition("#")[0]))


def block_hash_truncated(worker: Any) -> None:
    """The key is cut to eight bits."""
    _keyed_by(
        worker,
        lambda hashed, parent, tokens, who: hashlib.sha256(repr((parent, tokens, who)).encode()).digest()[0],
    )


def block_hash_without_parents(worker: Any) -> None:
    """The key of a block is that of its own tokens: what stands before them is not in it."""
    _keyed_by(worker, lambda hashed, parent, tokens, who: hashed(None, tokens, who))


def hash_match_trusted(worker: Any) -> None:
    """The key does not tell the order of a block's tokens, and tokens are not compared at a match."""
    _keyed_by(worker, lambda hashed, parent, tokens, who: hashed(parent, tuple(sorted(tokens)), who))


def recycled_block_keeps_its_hash(worker: Any) -> None:
    """A block that is granted anew stays known as the prefix that it held."""
    replace(worker, worker.prefix_cache, "evict", lambda block: None)


def longest_match_of_all_groups(worker: Any) -> None:
    """The cached length is the longest of all groups of layers; full-attention layers never wrote the last block."""
    original = worker.prefix_cache.match

    def match(hashes: Sequence[object]) -> list[int]:
        found: list[int] = original(hashes)
        return [*found, worker.pool.free[-1]] if found and len(found) < len(hashes) else found

    replace(worker, worker.prefix_cache, "match", match)


def partial_block_copied_double(worker: Any) -> None:
    """The copy of a partly filled block moves twice its bytes: the block behind the target is overwritten."""
    original = worker.copy_block

    def copy_block(source: int, target: int, positions: int) -> None:
        original(source, target, positions)
        for layer in worker.kvqual_layers().values():
            last = len(layer.kv_cache) - 1
            layer.kv_cache[min(target + 1, last)] = layer.kv_cache[min(source + 1, last)].clone()

    replace(worker, worker, "copy_block", copy_block)


def shared_block_freed_by_first_holder(worker: Any) -> None:
    """The first request that leaves gives a shared block back to the pool; tables and hashes still point to it."""
    pool = worker.pool

    def give(blocks: Iterable[int], **named: Any) -> None:
        for block in blocks:
            if pool.holders.get(block, 0) > 0:
                pool.holders[block] = 0
                pool.free.append(block)

    replace(worker, pool, "give", give)


def fork_shares_partial_block(worker: Any) -> None:
    """A fork takes over all blocks of its parent, the partly filled one too, and both go on writing to it."""

    def fork(parent: str, child: str, token: int) -> None:
        source = worker.requests[parent]
        forked = type(source)(child, [*source.tokens[: source.computed], token], source.identity)
        forked.blocks = source.blocks[: -(-source.computed // worker.kvqual_block_size())]
        forked.computed = source.computed
        forked.published = source.computed // worker.kvqual_block_size()
        worker.pool.share(forked.blocks)
        worker.requests[child] = forked
        worker._admit(forked)

    replace(worker, worker, "fork", fork)


def fork_copies_table_only(worker: Any) -> None:
    """A fork gets a block of its own for the partly filled one, and nothing is copied into it."""
    replace(worker, worker, "copy_block", lambda source, target, positions: None)
