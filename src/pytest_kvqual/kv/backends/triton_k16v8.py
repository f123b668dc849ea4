"""The K16/V8 backend in Triton: 16-bit K as it came, V as E4M3 of ``clamp(V / v_scale, -448, 448)``; K16/V16 too.

Cells, shapes and rules are those of ``paged``: a cell holds K and then V, a page is ``[kv_heads, block_size]`` cells,
and strides may be any that keep a cell dense. ``for_format("k16v16")`` is the same kernels with V as it came, so that a
difference between the two in time is the bytes'.

How it runs:

* Nothing is read back from the device, and what is launched follows from shapes, so that a call can be captured in a
  graph and replayed with other contents of the same tensors.
* A request with one query row is cut into parts of its positions (split-KV): at most ``SPLITS``, none shorter than
  ``SHORTEST`` but the last. How it is cut hangs on its own length alone. The parts are merged by their maxima and sums.
* A request with more query rows is computed in tiles of its rows, each over all positions that the tile sees.
* Scores, sums and merges are float32; weights are rounded to the 16-bit type before they meet V.
* The bits of a row therefore hang on its own request: query rows, positions, how many of its rows the step computes.
* Positions at or behind a request's length are masked where they are loaded: what lies there reaches no output. A V
  that is NaN at a position that some row of a tile sees reaches the tile's other rows too, those before it included.

Triton is imported by the first call. Without a GPU ``TRITON_INTERPRET=1`` must stand in the environment by then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

from pytest_kvqual.errors import FormatError

SPLITS = 16
"""Parts of a long request. Eight KV heads times this many fill the multiprocessors of a Hopper GPU at batch size 1."""

SHORTEST = 256
"""Positions of the shortest part: a shorter one costs more in the merge than it gains."""

TILE = 64
"""Positions of one step of the inner loops."""

WARPS, STAGES = 4, 5
"""Of the decode kernel. A page is found through the table, which takes two stages; the others hold two tiles ahead."""

TOKENS = 16
"""Rows of one program of the write kernel."""

_ROWS = 128
"""Query rows times query heads of one program that computes several rows."""

_TOGETHER = 4
"""Query heads of one program of the merge."""

_SIXTEEN = (torch.bfloat16, torch.float16)
_LOG2E = 1.0 / math.log(2.0)


@cache
def _kernels() -> ModuleType:
    from pytest_kvqual.kv.backends import triton_kernels

    return triton_kernels


def _power(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """What the parts of decoding requests are kept in until they are merged: float32 ``[R, Hq, splits(, D)]``."""

    maxima: torch.Tensor
    sums: torch.Tensor
    partial: torch.Tensor

    @classmethod
    def make(
        cls, requests: int, query_heads: int, head_size: int, positions: int, device: torch.device | str
    ) -> Workspace:
        """One for at most ``requests`` of at most ``positions`` each."""
        shape = (requests, query_heads, splits_for(positions))
        maxima, sums = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        partial = torch.empty(*shape, _head_width(head_size), dtype=torch.float32, device=device)
        return cls(maxima=maxima, sums=sums, partial=partial)


def splits_for(positions: int) -> int:
    """The most parts that a request of at most ``positions`` can have."""
    return max(1, min(SPLITS, -(-positions // SHORTEST)))


def _head_width(head_size: int) -> int:
    return max(16, _power(head_size))


class Triton:
    """``write`` and ``attend`` of one format.

    Args:
        name: ``k16v8`` or ``k16v16``.
        cast: Whether E4M3 is read by the hardware's conversion, which the interpreter does not have. The default takes
            the bits apart, on every device alike. Both give the same values.
        tile: Positions of one step of the inner loops; a power of two that divides ``SHORTEST``.
        warps: Warps of a program of the decode kernel.
        stages: Of its software pipeline.

    The last three are for measurements: a backend that serves keeps the defaults.

    Raises:
        FormatError: Another format.
    """

    def __init__(
        self, name: str, *, cast: bool = False, tile: int = TILE, warps: int = WARPS, stages: int = STAGES
    ) -> None:
        if name not in ("k16v8", "k16v16"):
            raise FormatError(f"found format {name!r}, expected k16v8 or k16v16, for the Triton backend")
        self.name = name
        self.cast = cast
        self.tile = tile
        self.warps = warps
        self.stages = stages
        self._eight = name == "k16v8"

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Stores the first ``len(slot_mapping)`` rows of K and V in their slots; slot -1 is skipped.

        Args:
            key: ``[T, Hkv, D]``, bfloat16 or float16.
            value: As ``key``.
            cache: ``[blocks, Hkv, block_size, content]``.
            slot_mapping: Integer ``[<= T]``.
            k_scale: Accepted and not applied.
            v_scale: What V is divided by; K16/V16 does not apply it.

        Raises:
            FormatError: The cache's cells have not the format's size, or the tensors are where no kernel runs.
        """
        kernels = _on(key)
        rows, head_size = slot_mapping.shape[0], key.shape[2]
        if not rows:
            return
        if key.shape[0] < rows or value.shape != key.shape or key.stride(2) != 1 or value.stride(2) != 1:
            raise FormatError(
                f"found key {tuple(key.shape)} and value {tuple(value.shape)} for {rows} slots, expected the same "
                "[T, heads, head_size] with dense heads and a row for each slot, in a cache update"
            )
        keys, values = self._pages(cache, head_size, key.dtype)
        if keys.shape[1] != key.shape[1]:
            raise FormatError(
                f"found a key of {key.shape[1]} heads, expected the {keys.shape[1]} of the cache, in a cache update"
            )
        kernels.kvqual_write_cells[(-(-rows // TOKENS), key.shape[1])](
            key,
            value,
            keys,
            values,
            slot_mapping,
            rows,
            float(v_scale),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            *keys.stride()[:3],
            *values.stride()[:3],
            HEAD=head_size,
            D=_head_width(head_size),
            BLOCK=keys.shape[2],
            TOKENS=TOKENS,
            V8=self._eight,
            num_warps=4,
        )

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        *,
        scale: float,
        v_scale: float = 1.0,
        output: torch.Tensor,
        max_query_len: int | None = None,
        workspace: Workspace | None = None,
    ) -> torch.Tensor:
        """Causal attention of every query row over its request's cached positions, written to ``output``.

        Args:
            query: ``[T, Hq, D]``, bfloat16 or float16. Query head ``h`` reads KV head ``h // (Hq // Hkv)``.
            cache: ``[blocks, Hkv, block_size, content]``; the positions of the query rows are already written.
            block_table: Integer ``[R, B]``; entries behind a request's last block are not read.
            seq_lens: Integer ``[R]``: positions of each request, its query rows included. Of one of more than
                ``B * block_size`` no position behind that is read.
            query_start_loc: Integer ``[R + 1]``, ascending from 0. A padding request has no rows, or one and length 0.
            scale: Factor of the scores.
            v_scale: Factor of the stored V; K16/V16 does not apply it.
            output: ``[T, Hq, D]`` or ``[T, Hq * D]``; rows from ``query_start_loc[R]`` on are set to zero.
            max_query_len: At least the rows of every request. None: ``T``, and both kernels are launched.
            workspace: For at least ``R`` requests of ``B * block_size`` positions; None: fresh memory.

        Returns:
            ``output``.

        Raises:
            FormatError: The cache's cells have not the format's size, the workspace is too small, the shapes do not fit
                one another, or, where the tensors are on a CPU, a request has more rows than positions.
        """
        kernels = _on(query)
        rows, query_heads, head_size = query.shape
        keys, values = self._pages(cache, head_size, query.dtype)
        kv_heads, block_size = keys.shape[1:3]
        requests, columns = block_table.shape
        result = output.view(output.shape[0], query_heads, head_size)
        if query.stride(2) != 1 or block_table.stride(1) != 1 or result.stride(2) != 1:
            raise FormatError("found query, output or block table with a strided last dimension, expected a dense one")
        if (
            query_heads % kv_heads
            or result.shape[0] < rows
            or seq_lens.shape[0] < requests
            or query_start_loc.shape[0] <= requests
        ):
            raise FormatError(
                f"found {query_heads} query heads over {kv_heads}, {result.shape[0]} rows of output for {rows}, "
                f"{seq_lens.shape[0]} lengths and {query_start_loc.shape[0]} starts for {requests} requests, expected "
                "whole groups, a row for each and a length for each, in attention"
            )
        if query.device.type == "cpu":
            counts = query_start_loc[1:] - query_start_loc[:-1]
            if bool(((counts > seq_lens) & (counts > 1)).any()):
                raise FormatError(
                    "found a request with more query rows than positions, expected at most as many, in attention"
                )
            if max_query_len is None and requests:
                max_query_len = int(counts.max())
        group, width = query_heads // kv_heads, _head_width(head_size)
        splits = splits_for(columns * block_size)
        if workspace is None:
            workspace = Workspace.make(requests, query_heads, head_size, columns * block_size, query.device)
        _fits(workspace, requests, query_heads, splits, width)
        factor = (v_scale if self.cast else v_scale * 2.0**8) if self._eight else 1.0
        sizes = {"HEAD": head_size, "D": width, "BLOCK": block_size}
        policy = {"SPLITS": SPLITS, "SHORTEST": SHORTEST, "N": self.tile}
        widen = kernels.INTERPRETED and query.dtype == torch.bfloat16
        coding = {"V8": self._eight, "CAST": self.cast, "WIDEN": widen}
        parts = (workspace.maxima, workspace.sums, workspace.partial)
        strides = (*keys.stride()[:3], *values.stride()[:3], block_table.stride(0))
        stride = workspace.maxima.shape[2]
        kernels.kvqual_decode_parts[(splits, kv_heads, requests)](
            query,
            keys,
            values,
            block_table,
            seq_lens,
            query_start_loc,
            *parts,
            scale * _LOG2E,
            columns,
            stride,
            *query.stride()[:2],
            *strides,
            HEADS=query_heads,
            GROUP=group,
            M=max(16, _power(group)),
            **sizes,
            **policy,
            **coding,
            num_warps=self.warps,
            num_stages=self.stages,
        )
        together = min(_TOGETHER, _power(query_heads))
        kernels.kvqual_merge_parts[(max(requests, result.shape[0]), -(-query_heads // together))](
            result,
            seq_lens,
            query_start_loc,
            *parts,
            float(factor),
            requests,
            result.shape[0],
            columns,
            stride,
            *result.stride()[:2],
            HEADS=query_heads,
            H=together,
            **sizes,
            **policy,
            num_warps=4,
        )
        if max_query_len is None or max_query_len > 1:
            tile = max(_ROWS, _power(group))
            tile_rows = tile // group
            kernels.kvqual_attend_rows[(rows // tile_rows + requests, kv_heads)](
                query,
                result,
                keys,
                values,
                block_table,
                seq_lens,
                query_start_loc,
                scale * _LOG2E,
                float(factor),
                requests,
                columns,
                *query.stride()[:2],
                *result.stride()[:2],
                *strides,
                GROUP=group,
                M=tile,
                N=self.tile,
                ROWS=tile_rows,
                **sizes,
                **coding,
                num_warps=8,
                num_stages=2,
            )
        return output

    def _pages(self, cache: torch.Tensor, head_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K (16-bit) and V (bytes, or 16-bit) of every cell: views ``[blocks, Hkv, block_size, D or more]``."""
        expected = (3 if self._eight else 4) * head_size
        if (
            dtype not in _SIXTEEN
            or cache.dim() != 4
            or cache.stride(-1) != 1
            or cache.shape[-1] * cache.element_size() != expected
            or head_size % 2
        ):
            raise FormatError(
                f"found a cache of {cache.dtype} {tuple(cache.shape)} with strides {cache.stride()} for rows of "
                f"{head_size} {dtype}, expected [blocks, heads, block_size] cells of {expected} dense bytes for "
                "16-bit rows of an even number"
            )
        raw = cache.view(torch.uint8)
        keys = raw.view(dtype)
        return keys, raw[..., 2 * head_size :] if self._eight else keys[..., head_size:]


def _on(tensor: torch.Tensor) -> ModuleType:
    """The kernels, where they can run on the tensor's device."""
    kernels = _kernels()
    if tensor.device.type == "cpu" and not kernels.INTERPRETED:
        raise FormatError(
            "found tensors on a CPU and compiled kernels, expected a GPU, or TRITON_INTERPRET=1 in the environment "
            "before Triton is imported, in the Triton backend"
        )
    return kernels


def _fits(workspace: Workspace, requests: int, query_heads: int, splits: int, width: int) -> None:
    shape = workspace.partial.shape
    if shape[0] < requests or shape[1] != query_heads or shape[2] < splits or shape[3] != width:
        raise FormatError(
            f"found a workspace of {tuple(shape)}, expected at least {(requests, query_heads, splits, width)}, "
            "with the same heads and width, in attention"
        )


_K16V8 = Triton("k16v8")
write = _K16V8.write
attend = _K16V8.attend


def for_format(name: str) -> Triton:
    """The kernels of ``k16v8`` or ``k16v16``.

    Raises:
        FormatError: Another format.
    """
    return Triton(name)
