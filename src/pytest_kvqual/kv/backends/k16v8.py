"""The K16/V8 backend: 16-bit K as it came, V as E4M3 of ``clamp(V / v_scale, -448, 448)``: 3 bytes per K/V pair.

NaN stays NaN on write and on read. See ``paged`` for shapes and rules.
"""

from __future__ import annotations

import torch

from pytest_kvqual.kv.backends import paged

_MAX = 448.0


class E4M3:
    """V as one E4M3 byte.

    The bits of an E4M3 byte, moved to the sign, the low four exponent bits and the high three mantissa bits of a
    float16, are the value times 2**-8, subnormals included; only NaN needs the cast, which is not vectorised.
    """

    v_bytes = 1

    def store(self, value: torch.Tensor, v_scale: float) -> torch.Tensor:
        scaled = value.float().div_(v_scale).clamp_(-_MAX, _MAX)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def load(self, raw: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        magnitude = paged.scratch("magnitude", tuple(raw.shape), torch.uint8)
        torch.bitwise_and(raw, 0x7F, out=magnitude)
        if int(magnitude.max()) == 0x7F:
            out.copy_(raw.view(torch.float8_e4m3fn))
            out.mul_(2.0**-8)
            return
        bits = paged.scratch("e4m3", tuple(raw.shape), torch.int16)
        bits.copy_(raw.view(torch.int8))  # sign extended
        bits.bitwise_left_shift_(7).bitwise_and_(0xBF80 - 0x10000)
        out.copy_(bits.view(torch.float16))

    def factor(self, v_scale: float) -> float:
        return v_scale * 2.0**8


_CODEC = E4M3()


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Stores K and V of each row in its slot; slot -1 is skipped. ``k_scale`` is accepted and not applied."""
    paged.write(_CODEC, key, value, cache, slot_mapping, v_scale=v_scale)


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    v_scale: float = 1.0,
    output: torch.Tensor,
) -> torch.Tensor:
    """Causal attention over the cache, written to ``output``; see ``paged.attend``."""
    return paged.attend(
        _CODEC, query, cache, block_table, seq_lens, query_start_loc, scale=scale, v_scale=v_scale, output=output
    )
