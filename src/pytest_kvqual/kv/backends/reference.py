"""The reference backend: 16-bit K and 16-bit V, each stored as it came. See ``paged`` for shapes and rules.

It shares every operation but the V codec with ``k16v8``: against the stock backend it isolates the implementation,
against ``k16v8`` the quantisation. No scale is applied.
"""

from __future__ import annotations

import torch

from pytest_kvqual.kv.backends import paged


class Sixteen:
    """V as its own 16 bits."""

    v_bytes = 2

    def store(self, value: torch.Tensor, v_scale: float) -> torch.Tensor:
        return value.contiguous().view(torch.int16)

    def load(self, raw: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        out.copy_(raw.view(dtype))

    def factor(self, v_scale: float) -> float:
        return 1.0


_CODEC = Sixteen()


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Stores K and V of each row in its slot; slot -1 is skipped. Scales are accepted and not applied."""
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
