"""The declared encoding of KV cache cells, independent of any backend's own write path.

A **cell** is what one (slot, KV head) holds: one K vector and one V vector. A slot is ``block * block_size + offset``.
A physical per-layer cache is ``[blocks, kv_heads, block_size, content]``; ``content`` counts bytes when the cache's
dtype is ``uint8`` and elements otherwise. Cells are compared as bytes in canonical (position, head, element) order,
so -0.0 differs from 0.0 and NaN equals NaN when the bytes do.

Formats:

====================  =====================================================================================
``k16v16``            ours: per cell K then V, 16 bits each, as they came
``k16v8``             ours: per cell K (16 bits), then V as E4M3 of ``clamp(V / v_scale, -448, 448)``
``k8v8``              E4M3 K and then E4M3 V, each divided by its scale times a factor of the head
``k8v8-inline``       E4M3 K, E4M3 V, then the float32 scale of K and that of V, one pair per token and head
``cpu-attn-bf16``     stock vLLM CPU cache: 16-bit K and V, permuted inside each (block, head) tile; the permutation
                      depends on the instruction set and is found by ``probe_layout``
====================  =====================================================================================

The E4M3 codec here is written from the definition (OCP OFP8 1.0, section 5.2) in integer arithmetic and an explicit
table, so that it shares no code with the casts that backends use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from pytest_kvqual.errors import FormatError, StudyError

_SIXTEEN = (torch.bfloat16, torch.float16)

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]
"""``write(key [T,Hkv,D], value [T,Hkv,D], cache, slot_mapping int64 [T])``: a backend's own cache update."""

E4M3_MAX = 448.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """The bytes of ``T`` slots: ``k`` uint8 ``[T, Hkv, k_bytes * D]`` and ``v`` uint8 ``[T, Hkv, v_bytes * D]``."""

    k: torch.Tensor
    v: torch.Tensor

    def unequal(self, other: Cells) -> tuple[torch.Tensor, torch.Tensor]:
        """Which (slot, head) pairs differ in any byte: two bool ``[T, Hkv]``, one for K and one for V.

        Raises:
            FormatError: The shapes differ; there is nothing that could be compared.
        """
        for name, mine, theirs in (("K", self.k, other.k), ("V", self.v, other.v)):
            if mine.shape != theirs.shape:
                raise FormatError(
                    f"found {name} cells of shape {tuple(mine.shape)}, expected {tuple(theirs.shape)}, in a comparison"
                )
        return _differ(self.k, other.k), _differ(self.v, other.v)


def _differ(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    # Eight bytes at a time where the row length allows it: the comparison is bound by the number of elements.
    if left.shape[-1] % 8 == 0 and left.is_contiguous() and right.is_contiguous() and left.numel():
        left, right = left.view(torch.int64), right.view(torch.int64)
    return (left != right).any(dim=-1)


class Format(Protocol):
    """The declared encoding of one cache format.

    ``k_bytes`` and ``v_bytes`` are the declared physical bytes per element of K and of V. They are declarations: what a
    backend really writes is found by ``observe_bytes``.
    """

    @property
    def name(self) -> str: ...

    @property
    def k_bytes(self) -> int: ...

    @property
    def v_bytes(self) -> int: ...

    def encode(self, key: torch.Tensor, value: torch.Tensor, v_scale: float) -> Cells:
        """Exactly the bytes that the cells of ``key`` and ``value`` (both ``[T, Hkv, D]``) must hold."""
        ...

    def decode(self, cells: Cells, v_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The K and V that ``cells`` stand for: float32 ``[T, Hkv, D]`` each."""
        ...

    def read(self, cache: torch.Tensor, slots: torch.Tensor) -> Cells:
        """The bytes that the physical cache holds at ``slots`` (int64 ``[T]``), in canonical order."""
        ...

    def place(self, cache: torch.Tensor, slots: torch.Tensor, cells: Cells) -> None:
        """Puts ``cells`` (in canonical order) into the physical cache at ``slots`` (int64 ``[T]``)."""
        ...


# -- E4M3, from its definition ------------------------------------------------------------------------------------


@cache
def e4m3_values() -> torch.Tensor:
    """What each of the 256 E4M3 bytes stands for: float32 ``[256]``; 0x7F and 0xFF are NaN."""
    values = []
    for byte in range(256):
        sign = -1.0 if byte & 0x80 else 1.0
        exponent, mantissa = (byte >> 3) & 0xF, byte & 0x7
        if exponent == 0xF and mantissa == 0x7:
            values.append(math.nan)
        elif exponent == 0:
            values.append(sign * math.ldexp(mantissa, -9))
        else:
            values.append(sign * math.ldexp(8 + mantissa, exponent - 10))
    # Kept for whoever asks next, whatever the default device is now.
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _meant(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """What each byte of ``codes`` stands for, by a table of 256 values."""
    return values.to(codes.device)[codes.long()]


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes of ``values``: clamped to +-448, rounded to nearest, ties to even; NaN keeps its sign bit.

    From 2**-6 on, the three mantissa bits are the float32's upper ones, rounded at bit 20, and the exponent bias goes
    from 127 to 7. Below, the code is the number of steps of 2**-9.

    Args:
        values: float32, any shape.

    Returns:
        uint8 of the same shape.
    """
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    clamped = magnitude.clamp(max=0x43E00000)  # 448.0
    steps = torch.round(clamped.view(torch.float32) * 512.0).to(torch.int32)
    small = clamped < 0x3C800000  # 2**-6
    odd = (clamped >> 20).bitwise_and_(1)
    code = clamped.add_(0x7FFFF).add_(odd).bitwise_right_shift_(20).sub_((127 - 7) << 3)
    code = torch.where(small, steps, code)
    code = torch.where(magnitude > 0x7F800000, 0x7F, code)
    return code.bitwise_or_((bits >> 24).bitwise_and_(0x80)).to(torch.uint8)


# -- Our own formats ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class K16V16:
    """Per cell: ``D`` 16-bit K elements, then ``D`` 16-bit V elements, as they came. ``v_scale`` is not applied."""

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        _sixteen(self.dtype, "k16v16")

    @property
    def name(self) -> str:
        return "k16v16"

    @property
    def k_bytes(self) -> int:
        return 2

    @property
    def v_bytes(self) -> int:
        return 2

    def encode(self, key: torch.Tensor, value: torch.Tensor, v_scale: float) -> Cells:
        _same(key, value, self.dtype, self.name)
        return Cells(k=_bytes(key), v=_bytes(value))

    def decode(self, cells: Cells, v_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return _sixteen_bits(cells.k, self.dtype), _sixteen_bits(cells.v, self.dtype)

    def read(self, cache: torch.Tensor, slots: torch.Tensor) -> Cells:
        return _read_adjacent(cache, slots, self)

    def place(self, cache: torch.Tensor, slots: torch.Tensor, cells: Cells) -> None:
        _place_adjacent(cache, slots, cells, self)


@dataclass(frozen=True, kw_only=True, slots=True)
class K16V8:
    """Per cell: ``D`` 16-bit K elements, then ``D`` bytes, the E4M3 of float32 ``V / v_scale`` clamped to +-448."""

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        _sixteen(self.dtype, "k16v8")

    @property
    def name(self) -> str:
        return "k16v8"

    @property
    def k_bytes(self) -> int:
        return 2

    @property
    def v_bytes(self) -> int:
        return 1

    def encode(self, key: torch.Tensor, value: torch.Tensor, v_scale: float) -> Cells:
        _same(key, value, self.dtype, self.name)
        divisor = _scale(v_scale)
        return Cells(k=_bytes(key), v=encode_e4m3(value.float() / divisor))

    def decode(self, cells: Cells, v_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        value = _meant(e4m3_values(), cells.v) * _scale(v_scale)
        return _sixteen_bits(cells.k, self.dtype), value

    def read(self, cache: torch.Tensor, slots: torch.Tensor) -> Cells:
        return _read_adjacent(cache, slots, self)

    def place(self, cache: torch.Tensor, slots: torch.Tensor, cells: Cells) -> None:
        _place_adjacent(cache, slots, cells, self)


# -- Eight-bit K and V --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class K8V8:
    """Per cell: ``D`` bytes E4M3 of ``K / (k_scale * k_factors[h])``, then ``D`` bytes of V likewise, clamped to +-448.

    The factors are one positive float32 per KV head; empty stands for 1 everywhere. NaN stays NaN.
    """

    dtype: torch.dtype = torch.bfloat16
    k_scale: float = 1.0
    k_factors: tuple[float, ...] = ()
    v_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _sixteen(self.dtype, "k8v8")

    @property
    def name(self) -> str:
        return "k8v8"

    @property
    def k_bytes(self) -> int:
        return 1

    @property
    def v_bytes(self) -> int:
        return 1

    def encode(self, key: torch.Tensor, value: torch.Tensor, v_scale: float) -> Cells:
        _same(key, value, self.dtype, self.name)
        k_divisor = _per_head(self.k_scale, self.k_factors, key.shape[1])
        v_divisor = _per_head(v_scale, self.v_factors, value.shape[1])
        return Cells(k=encode_e4m3(key.float() / k_divisor), v=encode_e4m3(value.float() / v_divisor))

    def decode(self, cells: Cells, v_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        k = _meant(e4m3_values(), cells.k) * _per_head(self.k_scale, self.k_factors, cells.k.shape[1])
        return k, _meant(e4m3_values(), cells.v) * _per_head(v_scale, self.v_factors, cells.v.shape[1])

    def read(self, cache: torch.Tensor, slots: torch.Tensor) -> Cells:
        return _read_adjacent(cache, slots, self)

    def place(self, cache: torch.Tensor, slots: torch.Tensor, cells: Cells) -> None:
        _place_adjacent(cache, slots, cells, self)


@dataclass(frozen=True, kw_only=True, slots=True)
class K8V8Inline:
    """Per cell: ``D`` bytes of K, ``D`` bytes of V, the float32 scale of K, the float32 scale of V (native byte order).

    A scale is the largest finite magnitude of its vector divided by 448, or 1 where that is zero; the bytes are the
    E4M3 of the vector divided by it, clamped to +-448; NaN stays NaN. ``v_scale`` is not applied. In ``Cells`` each
    scale follows its own bytes: ``k`` and ``v`` are uint8 ``[T, Hkv, D + 4]``.
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        _sixteen(self.dtype, "k8v8-inline")

    @property
    def name(self) -> str:
        return "k8v8-inline"

    @property
    def k_bytes(self) -> int:
        return 1

    @property
    def v_bytes(self) -> int:
        return 1

    def encode(self, key: torch.Tensor, value: torch.Tensor, v_scale: float) -> Cells:
        _same(key, value, self.dtype, self.name)
        return Cells(k=_inline(key.float()), v=_inline(value.float()))

    def decode(self, cells: Cells, v_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return _from_inline(cells.k), _from_inline(cells.v)

    def read(self, cache: torch.Tensor, slots: torch.Tensor) -> Cells:
        size = self._size(cache)
        block, offset = _slots(cache, slots)
        cells = cache[block, :, offset]
        k, v, scales = cells[..., :size], cells[..., size : 2 * size], cells[..., 2 * size :]
        return Cells(k=torch.cat([k, scales[..., :4]], dim=-1), v=torch.cat([v, scales[..., 4:]], dim=-1))

    def place(self, cache: torch.Tensor, slots: torch.Tensor, cells: Cells) -> None:
        size = self._size(cache)
        block, offset = _slots(cache, slots)
        parts = (cells.k[..., :size], cells.v[..., :size], cells.k[..., size:], cells.v[..., size:])
        cache[block, :, offset] = torch.cat(parts, dim=-1)

    def _size(self, cache: torch.Tensor) -> int:
        if cache.dim() != 4 or cache.stride(-1) != 1 or cache.dtype != torch.uint8 or cache.shape[-1] % 2:
            raise FormatError(
                f"found a cache of {cache.dtype} {tuple(cache.shape)}, expected uint8 [blocks, heads, block_size, "
                f"2 * head_size + 8] with dense content, for format {self.name!r}"
            )
        return cache.shape[-1] // 2 - 4


def _per_head(scale: float, factors: tuple[float, ...], heads: int) -> torch.Tensor:
    """What each head is divided by: float32 ``[heads, 1]``, the product of two float32 numbers."""
    if factors and len(factors) != heads:
        raise FormatError(f"found {len(factors)} head factors, expected {heads}, for format 'k8v8'")
    return torch.tensor([[_scale(factor)] for factor in factors or (1.0,) * heads]) * _scale(scale)


def _inline(values: torch.Tensor) -> torch.Tensor:
    finite = torch.where(torch.isfinite(values), values.abs(), 0.0)
    peak = finite.amax(dim=-1, keepdim=True)
    scale = torch.where(peak > 0, peak / E4M3_MAX, 1.0)
    return torch.cat([encode_e4m3(values / scale), scale.view(torch.uint8)], dim=-1)


def _from_inline(cells: torch.Tensor) -> torch.Tensor:
    scale = cells[..., -4:].contiguous().view(torch.float32)
    return _meant(e4m3_values(), cells[..., :-4]) * scale


def cell_bytes(fmt: Format, head_size: int) -> int:
    """The bytes of one cell of ``fmt``, inline scales included, found by encoding zeros."""
    heads = max(1, len(getattr(fmt, "k_factors", ())), len(getattr(fmt, "v_factors", ())))
    zeros = torch.zeros(1, heads, head_size, dtype=getattr(fmt, "dtype", torch.bfloat16))
    cells = fmt.encode(zeros, zeros, 1.0)
    return int(cells.k.shape[-1] + cells.v.shape[-1])


# -- The stock CPU cache ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPermutation:
    """Where each K and V element lies inside its (block, head) tile.

    ``k`` and ``v`` are int64 ``[block_size, head_size]``: the flat element index inside a tile of
    ``2 * block_size * head_size`` elements. Together they are a bijection onto the tile.
    """

    k: torch.Tensor
    v: torch.Tensor

    @property
    def block_size(self) -> int:
        return int(self.k.shape[0])

    @property
    def head_size(self) -> int:
        return int(self.k.shape[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuAttn16:
    """vLLM's stock CPU cache with 16-bit K and V: the bits of K and V, permuted inside each tile by ``layout``."""

    layout: LayoutPermutation
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        _sixteen(self.dtype, "cpu-attn-bf16")

    @property
    def name(self) -> str:
        return "cpu-attn-bf16"

    @property
    def k_bytes(self) -> int:
        return 2

    @property
    def v_bytes(self) -> int:
        return 2

    def encode(self, key: torch.Tensor, value: torch.Tensor, v_scale: float) -> Cells:
        _same(key, value, self.dtype, self.name)
        return Cells(k=_bytes(key), v=_bytes(value))

    def decode(self, cells: Cells, v_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return _sixteen_bits(cells.k, self.dtype), _sixteen_bits(cells.v, self.dtype)

    def read(self, cache: torch.Tensor, slots: torch.Tensor) -> Cells:
        tiles, rows, heads, offset = self._tiles(cache, slots)
        k = tiles[rows, heads, self.layout.k[offset][:, None, :]]
        v = tiles[rows, heads, self.layout.v[offset][:, None, :]]
        return Cells(k=k.view(torch.uint8), v=v.view(torch.uint8))

    def place(self, cache: torch.Tensor, slots: torch.Tensor, cells: Cells) -> None:
        tiles, rows, heads, offset = self._tiles(cache, slots)
        tiles[rows, heads, self.layout.k[offset][:, None, :]] = cells.k.contiguous().view(torch.int16)
        tiles[rows, heads, self.layout.v[offset][:, None, :]] = cells.v.contiguous().view(torch.int16)

    def _tiles(
        self, cache: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The cache as int16 ``[blocks, heads, elements of a tile]``, and where the cells of ``slots`` lie in it."""
        layout = self.layout
        tile = (layout.block_size, 2 * layout.head_size)
        if cache.dim() != 4 or cache.element_size() != 2 or tuple(cache.shape[2:]) != tile:
            raise FormatError(
                f"found a cache of {cache.dtype} {tuple(cache.shape)}, expected 16-bit "
                f"[blocks, heads, {layout.block_size}, {2 * layout.head_size}], for format {self.name!r}"
            )
        if not cache[0, 0].is_contiguous():
            raise FormatError(
                f"found tile strides {cache.stride()[2:]}, expected a dense tile, for format {self.name!r}"
            )
        tiles = cache.view(torch.int16).flatten(2)
        block, offset = _slots(cache, slots)
        heads = torch.arange(cache.shape[1])[None, :, None]
        return tiles, block[:, None, None], heads, offset


def declared(name: str, *, dtype: torch.dtype = torch.bfloat16, layout: LayoutPermutation | None = None) -> Format:
    """The format that a study names.

    Args:
        name: ``k16v16``, ``k16v8``, ``k8v8``, ``k8v8-inline`` or ``cpu-attn-bf16``. ``k8v8`` comes with a K scale of 1
            and no head factors; build ``K8V8`` for others.
        dtype: The 16-bit dtype of K, and of V where it has 16 bits.
        layout: The tile permutation; required by ``cpu-attn-bf16`` and by no other.

    Raises:
        StudyError: The name is not declared here.
        FormatError: The dtype has not 16 bits, or the layout is missing.
    """
    if name == "k16v16":
        return K16V16(dtype=dtype)
    if name == "k16v8":
        return K16V8(dtype=dtype)
    if name == "k8v8":
        return K8V8(dtype=dtype)
    if name == "k8v8-inline":
        return K8V8Inline(dtype=dtype)
    if name == "cpu-attn-bf16":
        if layout is None:
            raise FormatError("found no layout, expected the probed one, for format 'cpu-attn-bf16'")
        return CpuAttn16(dtype=dtype, layout=layout)
    raise StudyError(f"found KV format {name!r}, expected one of k16v16, k16v8, k8v8, k8v8-inline, cpu-attn-bf16")


# -- Probes -------------------------------------------------------------------------------------------------------

_DIGIT = 128  # codes 1..128 and their negatives are exact in bfloat16 and float16


def probe_layout(
    write: Write, *, head_size: int, block_size: int, kv_heads: int, dtype: torch.dtype = torch.bfloat16
) -> LayoutPermutation:
    """Finds the tile permutation of a backend whose cells keep the bits of 16-bit K and V.

    The linear index ``offset * head_size + element`` is written in base-128 digits, one pass per digit, K as 1..128 and
    V as -1..-128; 0 marks an element that was not written. The permutation is then checked on random bits over several
    blocks and heads in shuffled slot order.

    Args:
        write: The backend's own update; called on scratch caches only.
        head_size: Elements of one K or V vector.
        block_size: Positions of one block.
        kv_heads: Heads of the scratch caches.
        dtype: The 16-bit dtype of K, V and the scratch caches.

    Raises:
        FormatError: The elements do not map one to one onto the tile, heads or blocks differ, or random bits do not
            read back.
    """
    _sixteen(dtype, "a probed layout")
    size = block_size * head_size
    slots = torch.arange(block_size) + block_size  # block 1: block 0 stays untouched and is checked
    linear = torch.arange(size).view(block_size, 1, head_size).expand(block_size, kv_heads, head_size)
    found_k = torch.zeros(kv_heads, 2 * size, dtype=torch.int64)
    found_v = torch.zeros_like(found_k)
    weight = 1
    is_k = is_v = torch.zeros(0)
    while weight < size:
        digit = (linear // weight) % _DIGIT
        cache = torch.zeros(3, kv_heads, block_size, 2 * head_size, dtype=dtype)
        write((digit + 1).to(dtype), (-(digit + 1)).to(dtype), cache, slots)
        if bool((cache[0] != 0).any()) or bool((cache[2] != 0).any()):
            raise FormatError("found writes outside block 1, expected none, while probing the cache layout")
        tile = cache[1].flatten(1).double()
        is_k, is_v = tile > 0, tile < 0
        code = tile.abs()
        if not bool(((code == code.round()) & (code <= _DIGIT)).all()):
            raise FormatError(
                "found a value that was not written, expected the bits of K and V, while probing the cache layout"
            )
        found_k += torch.where(is_k, (code.long() - 1) * weight, 0)
        found_v += torch.where(is_v, (code.long() - 1) * weight, 0)
        weight *= _DIGIT
    layouts = []
    for name, mask, found in (("K", is_k, found_k), ("V", is_v, found_v)):
        index = torch.full((kv_heads, size), -1, dtype=torch.int64)
        for head in range(kv_heads):
            physical = mask[head].nonzero().flatten()
            logical = found[head][physical]
            if physical.numel() != size or not torch.equal(logical.sort().values, torch.arange(size)):
                raise FormatError(
                    f"found {len(set(logical.tolist()))} distinct {name} elements at {physical.numel()} places of head "
                    f"{head}, expected {size} at {size}, while probing the cache layout"
                )
            index[head, logical] = physical
        if not bool((index == index[0]).all()):
            raise FormatError(f"found {name} layouts that differ by head, expected one, while probing the cache layout")
        layouts.append(index[0].view(block_size, head_size).contiguous())
    layout = LayoutPermutation(k=layouts[0], v=layouts[1])
    _verify_layout(write, layout, kv_heads, dtype)
    return layout


def _verify_layout(write: Write, layout: LayoutPermutation, kv_heads: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(20)
    blocks = 5
    fmt = CpuAttn16(layout=layout, dtype=dtype)
    cache = torch.zeros(blocks, kv_heads, layout.block_size, 2 * layout.head_size, dtype=dtype)
    slots = torch.randperm(blocks * layout.block_size, generator=generator)[: 3 * layout.block_size + 1]
    shape = (slots.numel(), kv_heads, layout.head_size)
    key, value = (_random_bits(shape, dtype, generator) for _ in range(2))
    write(key, value, cache, slots)
    k_bad, v_bad = fmt.read(cache, slots).unequal(fmt.encode(key, value, 1.0))
    if bool(k_bad.any()) or bool(v_bad.any()):
        raise FormatError(
            f"found {int(k_bad.sum())} K and {int(v_bad.sum())} V cells with other bits, expected 0, "
            "while verifying the probed cache layout on random data"
        )
    written = torch.zeros(blocks * layout.block_size, dtype=torch.bool)
    written[slots] = True
    rest = fmt.read(cache, (~written).nonzero().flatten())
    if bool(rest.k.any()) or bool(rest.v.any()):
        raise FormatError("found writes to slots that were not given, expected none, while verifying the cache layout")


def _random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Finite values of ``dtype`` whose every bit varies; exponents stay where no format overflows."""
    # Drawn on the host, whatever the default device, and put there.
    mantissa = 1 + torch.rand(shape, generator=generator, device="cpu")
    exponent = torch.randint(-12, 8, shape, generator=generator, device="cpu")
    sign = torch.randint(0, 2, shape, generator=generator, device="cpu") * 2 - 1
    return torch.empty(shape, dtype=dtype).copy_(torch.ldexp(mantissa, exponent) * sign)


def observe_bytes(
    write: Write,
    *,
    like: torch.Tensor,
    head_size: int,
    dtype: torch.dtype = torch.bfloat16,
    draws: int = 24,
) -> tuple[float, float]:
    """The physical bytes per K element and per V element, as observed in what ``write`` changes.

    Only K (then only V) changes between two writes of the same slots to equal scratch caches; the byte offsets that
    change in any of ``draws`` random draws are counted and divided by the number of elements. No declaration is read.

    Args:
        write: The backend's own update; called on scratch caches only.
        like: A cache of the layer, ``[blocks, kv_heads, block_size, content]``: gives shape and dtype, is not touched.
        head_size: Elements of one K or V vector.
        dtype: Dtype of K and V as they come.
        draws: Random draws; a byte that changes with probability p per draw is missed with (1 - p) ** draws.

    Returns:
        ``(k_bytes_per_element, v_bytes_per_element)``; whole numbers for an element-wise encoding.

    Raises:
        FormatError: Some byte depends on both K and V, or a write changes nothing.
    """
    _, kv_heads, block_size, content = like.shape
    generator = torch.Generator().manual_seed(30)
    slots = torch.arange(block_size) + block_size
    shape = (block_size, kv_heads, head_size)

    def image(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cache = torch.zeros(3, kv_heads, block_size, content, dtype=like.dtype)
        write(key, value, cache, slots)
        return cache.view(torch.uint8).flatten()

    key, value = (_random_bits(shape, dtype, generator) for _ in range(2))
    base = image(key, value)
    k_changed = torch.zeros_like(base, dtype=torch.bool)
    v_changed = torch.zeros_like(k_changed)
    for _ in range(draws):
        k_changed |= image(_random_bits(shape, dtype, generator), value) != base
        v_changed |= image(key, _random_bits(shape, dtype, generator)) != base
    shared = int((k_changed & v_changed).sum())
    if shared:
        raise FormatError(f"found {shared} bytes that depend on K and on V, expected none, while observing the cache")
    elements = block_size * kv_heads * head_size
    k_bytes, v_bytes = int(k_changed.sum()) / elements, int(v_changed.sum()) / elements
    if not (k_bytes > 0 and v_bytes > 0):
        raise FormatError(
            f"found {k_bytes} K and {v_bytes} V bytes per element changed by a write, expected more than 0, "
            "while observing the cache"
        )
    return k_bytes, v_bytes


# -- Helpers ------------------------------------------------------------------------------------------------------


def _sixteen(dtype: torch.dtype, where: str) -> None:
    if dtype not in _SIXTEEN:
        raise FormatError(f"found dtype {dtype}, expected torch.bfloat16 or torch.float16, for {where}")


def _same(key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    if key.dim() != 3 or key.shape != value.shape:
        raise FormatError(
            f"found key {tuple(key.shape)} and value {tuple(value.shape)}, expected the same [T, heads, head_size], "
            f"for format {name!r}"
        )
    for what, tensor in (("key", key), ("value", value)):
        if tensor.dtype != dtype:
            raise FormatError(f"found {what} of {tensor.dtype}, expected {dtype}, for format {name!r}")


def _scale(v_scale: float) -> float:
    """``v_scale`` as the float32 that the engine holds."""
    scale = float(torch.tensor(v_scale, dtype=torch.float32))
    if not (math.isfinite(scale) and scale > 0):
        raise FormatError(f"found v_scale {v_scale!r}, expected a positive finite float32")
    return scale


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _sixteen_bits(cells: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return cells.contiguous().view(dtype).float()


def _slots(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    capacity = cache.shape[0] * cache.shape[2]
    if slots.dim() != 1 or slots.dtype != torch.int64:
        raise FormatError(f"found slots {slots.dtype} {tuple(slots.shape)}, expected int64 [T]")
    if slots.numel() and (int(slots.min()) < 0 or int(slots.max()) >= capacity):
        raise FormatError(
            f"found slots from {int(slots.min())} to {int(slots.max())}, expected 0 to {capacity - 1}, in a cache read"
        )
    return slots // cache.shape[2], slots % cache.shape[2]


def _read_adjacent(cache: torch.Tensor, slots: torch.Tensor, fmt: Format) -> Cells:
    """Reads cells that hold K and then V in one run of bytes; the cache may be strided outside the run."""
    raw, split = _adjacent(cache, fmt)
    block, offset = _slots(cache, slots)
    cells = raw[block, :, offset]
    return Cells(k=cells[..., :split].contiguous(), v=cells[..., split:].contiguous())


def _place_adjacent(cache: torch.Tensor, slots: torch.Tensor, cells: Cells, fmt: Format) -> None:
    raw, split = _adjacent(cache, fmt)
    if cells.k.shape[-1] != split or cells.v.shape[-1] != raw.shape[-1] - split:
        raise FormatError(
            f"found cells of {cells.k.shape[-1]} K and {cells.v.shape[-1]} V bytes, expected {split} and "
            f"{raw.shape[-1] - split}, for format {fmt.name!r}"
        )
    block, offset = _slots(cache, slots)
    raw[block, :, offset] = torch.cat([cells.k, cells.v], dim=-1)


def _adjacent(cache: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, int]:
    """The cache as bytes, and how many bytes of a cell are K."""
    if cache.dim() != 4 or cache.stride(-1) != 1:
        raise FormatError(
            f"found a cache of shape {tuple(cache.shape)}, strides {cache.stride()}, expected "
            f"[blocks, heads, block_size, content] with dense content, for format {fmt.name!r}"
        )
    raw = cache.view(torch.uint8)
    per_element = fmt.k_bytes + fmt.v_bytes
    if raw.shape[-1] % per_element:
        raise FormatError(
            f"found {raw.shape[-1]} bytes per cell, expected a multiple of {per_element}, for format {fmt.name!r}"
        )
    return raw, raw.shape[-1] // per_element * fmt.k_bytes
