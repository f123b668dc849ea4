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
``cpu-attn-fp8-…``    the same with K and V in 8 bits, each divided by its scale: ``cpu-attn-fp8-e4m3`` and
                      ``cpu-attn-fp8-e5m2`` as OFP8 defines the conversion (nearest, ties to even, saturating), and with
                      ``-toward-zero`` appended as the kernel of vLLM 0.32.0 computes it (:class:`CpuAttn8`)
====================  =====================================================================================

The 8-bit codecs here are written from the definition (OCP OFP8 1.0, section 5) in integer arithmetic and explicit
tables, so that they share no code with the casts that backends use.

A name that is not declared here may be an arm's format all the same (:data:`pytest_kvqual.kv.declarations.DECLARED`):
nothing can then be said of what its cells must hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from pytest_kvqual.errors import FormatError, StudyError
from pytest_kvqual.kv.declarations import DECLARED, not_established

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


# -- E5M2, from its definition ------------------------------------------------------------------------------------


@cache
def e5m2_values() -> torch.Tensor:
    """What each of the 256 E5M2 bytes stands for: float32 ``[256]``; 0x7C and 0xFC are the infinities, above is NaN."""
    values = []
    for byte in range(256):
        sign = -1.0 if byte & 0x80 else 1.0
        exponent, mantissa = (byte >> 2) & 0x1F, byte & 0x3
        if exponent == 0x1F:
            values.append(math.nan if mantissa else sign * math.inf)
        elif exponent == 0:
            values.append(sign * math.ldexp(mantissa, -16))
        else:
            values.append(sign * math.ldexp(4 + mantissa, exponent - 17))
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def encode_e5m2(values: torch.Tensor) -> torch.Tensor:
    """E5M2 bytes of ``values``: clamped to +-57344, infinities too, rounded to nearest, ties to even.

    NaN becomes 0x7F with its sign bit. From 2**-14 on, the two mantissa bits are the float32's upper ones, rounded at
    bit 21, and the exponent bias goes from 127 to 15. Below, the code is the number of steps of 2**-16.

    Args:
        values: float32, any shape.

    Returns:
        uint8 of the same shape.
    """
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    clamped = magnitude.clamp(max=0x47600000)  # 57344.0
    steps = torch.round(clamped.view(torch.float32) * 65536.0).to(torch.int32)
    small = clamped < 0x38800000  # 2**-14
    code = ((clamped + 0xFFFFF + ((clamped >> 21) & 1)) >> 21) - ((127 - 15) << 2)
    code = torch.where(small, steps, code)
    code = torch.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(torch.uint8)


# -- Toward zero --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Eight:
    """One 8-bit floating type: bits of its mantissa, its exponent bias and the byte of its largest finite number."""

    mantissa: int
    bias: int
    largest: int


_E4M3, _E5M2 = _Eight(3, 7, 0x7E), _Eight(2, 15, 0x7B)


def _toward_zero(values: torch.Tensor, kind: _Eight) -> torch.Tensor:
    """8-bit bytes of float32 ``values``: the largest byte whose magnitude is not above, and the sign.

    Beyond the range, infinities included, the largest finite number of that sign. A zero is 0x00 whatever its sign, and
    NaN is the largest finite number, positive whatever its sign.
    """
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    below, least = 23 - kind.mantissa, 128 - kind.bias
    largest = ((kind.largest << below) + ((127 - kind.bias) << 23)) & 0x7FFFFFFF
    clamped = magnitude.clamp(max=largest)
    # A number below the normal range is a count of steps: its significand, shifted by how far its exponent is below.
    shift = (least - (clamped >> 23)).clamp(0, 23 + 1) + below
    steps = torch.where(shift < 31, ((clamped & 0x7FFFFF) | 0x800000) >> shift.clamp(max=30), 0)
    code = torch.where((clamped >> 23) < least, steps, (clamped >> below) - ((127 - kind.bias) << kind.mantissa))
    code = torch.where(magnitude == 0, 0, code | ((bits >> 24) & 0x80))
    return torch.where(magnitude > 0x7F800000, kind.largest, code).to(torch.uint8)


def encode_e4m3_toward_zero(values: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes of float32 ``values``, rounded toward zero; zeros are 0x00, NaN 0x7E, beyond the range 0x7E or 0xFE.

    Below 2**-6 the number is first rounded to a multiple of 2**-29, ties to even: the kernel of vLLM's CPU backend
    scales it by 2**-120 in float32 before it cuts the bits off, and that product is subnormal.
    """
    small = values.abs() < 2.0**-6
    # Exact: at most 23 significant bits are left, and both factors are powers of two.
    rounded = torch.round(values.double() * 2.0**29) * 2.0**-29
    return _toward_zero(torch.where(small, rounded.float(), values), _E4M3) | torch.where(
        small & (values < 0), 0x80, 0
    ).to(torch.uint8)


def encode_e5m2_toward_zero(values: torch.Tensor) -> torch.Tensor:
    """E5M2 bytes of float32 ``values``, rounded toward zero; zeros are 0x00, NaN 0x7B, beyond range 0x7B or 0xFB."""
    return _toward_zero(values, _E5M2)


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
        return Cells(k=_bytes(key), v=encode_e4m3(_quotient(value.float(), _scale(v_scale))))

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
    scale = torch.where(peak > 0, _quotient(peak, E4M3_MAX), 1.0)
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
        return _read_tiles(cache, slots, self.layout, torch.int16, self.name)

    def place(self, cache: torch.Tensor, slots: torch.Tensor, cells: Cells) -> None:
        _place_tiles(cache, slots, cells, self.layout, torch.int16, self.name)


def _read_tiles(
    cache: torch.Tensor, slots: torch.Tensor, layout: LayoutPermutation, word: torch.dtype, name: str
) -> Cells:
    tiles, rows, heads, offset = _tiles(cache, slots, layout, word, name)
    k = tiles[rows, heads, layout.k[offset][:, None, :]]
    v = tiles[rows, heads, layout.v[offset][:, None, :]]
    return Cells(k=k.view(torch.uint8), v=v.view(torch.uint8))


def _place_tiles(
    cache: torch.Tensor, slots: torch.Tensor, cells: Cells, layout: LayoutPermutation, word: torch.dtype, name: str
) -> None:
    tiles, rows, heads, offset = _tiles(cache, slots, layout, word, name)
    tiles[rows, heads, layout.k[offset][:, None, :]] = cells.k.contiguous().view(word)
    tiles[rows, heads, layout.v[offset][:, None, :]] = cells.v.contiguous().view(word)


def _tiles(
    cache: torch.Tensor, slots: torch.Tensor, layout: LayoutPermutation, word: torch.dtype, name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cache as ``word`` ``[blocks, heads, elements of a tile]``, and where the cells of ``slots`` lie in it."""
    tile = (layout.block_size, 2 * layout.head_size)
    if cache.dim() != 4 or cache.element_size() != word.itemsize or tuple(cache.shape[2:]) != tile:
        raise FormatError(
            f"found a cache of {cache.dtype} {tuple(cache.shape)}, expected {8 * word.itemsize}-bit "
            f"[blocks, heads, {layout.block_size}, {2 * layout.head_size}], for format {name!r}"
        )
    if not cache[0, 0].is_contiguous():
        raise FormatError(f"found tile strides {cache.stride()[2:]}, expected a dense tile, for format {name!r}")
    tiles = cache.view(word).flatten(2)
    block, offset = _slots(cache, slots)
    heads = torch.arange(cache.shape[1])[None, :, None]
    return tiles, block[:, None, None], heads, offset


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuAttn8:
    """vLLM's stock CPU cache with 8-bit K and V: one byte an element, permuted inside each tile by ``layout``.

    ``kind`` is ``e4m3`` or ``e5m2``. As defined, an element is the nearest byte, ties to even, of the float32 quotient
    of K (V) and its scale; beyond the range it is the largest finite number, and NaN is NaN. With ``toward_zero`` it
    is what ``cpu_attn_reshape_and_cache`` of vLLM 0.32.0 was found to write for each of the 65,536 inputs: K (V) is
    multiplied by the float32 reciprocal of the scale, and bits that do not fit are cut off
    (:func:`encode_e4m3_toward_zero`, :func:`encode_e5m2_toward_zero`).
    """

    layout: LayoutPermutation
    kind: str
    toward_zero: bool = False
    dtype: torch.dtype = torch.bfloat16
    k_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("e4m3", "e5m2"):
            raise FormatError(f"found the 8-bit type {self.kind!r}, expected e4m3 or e5m2, for a stock CPU cache")
        _sixteen(self.dtype, self.name)

    @property
    def name(self) -> str:
        return f"cpu-attn-fp8-{self.kind}{'-toward-zero' if self.toward_zero else ''}"

    @property
    def k_bytes(self) -> int:
        return 1

    @property
    def v_bytes(self) -> int:
        return 1

    def encode(self, key: torch.Tensor, value: torch.Tensor, v_scale: float) -> Cells:
        _same(key, value, self.dtype, self.name)
        return Cells(k=self._bytes(key, self.k_scale), v=self._bytes(value, v_scale))

    def _bytes(self, values: torch.Tensor, scale: float) -> torch.Tensor:
        divisor = torch.tensor(_scale(scale), dtype=torch.float32)
        if self.toward_zero:
            scaled = values.float() * (1 / divisor)
            return encode_e4m3_toward_zero(scaled) if self.kind == "e4m3" else encode_e5m2_toward_zero(scaled)
        quotient = _quotient(values.float(), float(divisor))
        return encode_e4m3(quotient) if self.kind == "e4m3" else encode_e5m2(quotient)

    def decode(self, cells: Cells, v_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        table = e4m3_values() if self.kind == "e4m3" else e5m2_values()
        return _meant(table, cells.k) * _scale(self.k_scale), _meant(table, cells.v) * _scale(v_scale)

    def read(self, cache: torch.Tensor, slots: torch.Tensor) -> Cells:
        return _read_tiles(cache, slots, self.layout, torch.uint8, self.name)

    def place(self, cache: torch.Tensor, slots: torch.Tensor, cells: Cells) -> None:
        _place_tiles(cache, slots, cells, self.layout, torch.uint8, self.name)


# -- A format without a declaration -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Undeclared:
    """A format of which nothing is declared: whatever asks what a cell must hold gets a ``FormatError``."""

    name: str

    @property
    def k_bytes(self) -> int:
        raise self._error()

    @property
    def v_bytes(self) -> int:
        raise self._error()

    def encode(self, key: torch.Tensor, value: torch.Tensor, v_scale: float) -> Cells:
        raise self._error()

    def decode(self, cells: Cells, v_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        raise self._error()

    def read(self, cache: torch.Tensor, slots: torch.Tensor) -> Cells:
        raise self._error()

    def place(self, cache: torch.Tensor, slots: torch.Tensor, cells: Cells) -> None:
        raise self._error()

    def _error(self) -> FormatError:
        return FormatError(not_established(self.name, "what a cell holds"))


_NAMES = ("k16v16", "k16v8", "k8v8", "k8v8-inline", *(name for name in DECLARED if name.startswith("cpu-attn")))
_CPU_ATTN_8 = "cpu-attn-fp8-"


def declared(name: str, *, dtype: torch.dtype = torch.bfloat16, layout: LayoutPermutation | None = None) -> Format:
    """The format that a study names.

    Args:
        name: A name of :data:`~pytest_kvqual.kv.declarations.DECLARED`, or ``k8v8-inline``. ``k8v8`` comes with a K
            scale of 1 and no head factors; build ``K8V8`` for others.
        dtype: The 16-bit dtype of K and V as they come, and of what has 16 bits in the cache.
        layout: The tile permutation; required by the formats of the stock CPU cache (``cpu-attn-…``) and by no other.

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
    if name not in _NAMES:
        raise StudyError(f"found KV format {name!r}, expected one of {', '.join(_NAMES)}")
    if layout is None:
        raise FormatError(f"found no layout, expected the probed one, for format {name!r}")
    if name == "cpu-attn-bf16":
        return CpuAttn16(dtype=dtype, layout=layout)
    kind, _, rounding = name.removeprefix(_CPU_ATTN_8).partition("-")
    return CpuAttn8(kind=kind, toward_zero=rounding == "toward-zero", dtype=dtype, layout=layout)


def nan_cells(fmt: Format, shape: tuple[int, int, int], dtype: torch.dtype, v_scale: float) -> Cells:
    """Cells ``[T, heads, head_size]`` that read as NaN in every element, where the format has a NaN at all.

    The write path of some backend makes no NaN of one; what a cell holds that it did not write can be one nevertheless.
    """
    if isinstance(fmt, CpuAttn8):
        return Cells(k=torch.full(shape, 0x7F, dtype=torch.uint8), v=torch.full(shape, 0x7F, dtype=torch.uint8))
    one = torch.full(shape, math.nan, dtype=dtype)
    return fmt.encode(one, one, v_scale)


def needs_layout(name: str) -> bool:
    """Whether :func:`declared` needs the tile permutation that :func:`probe_layout` finds."""
    return name.startswith("cpu-attn")


# -- Probes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Alphabet:
    """Positive numbers that a cache keeps exactly, ascending, and what each stored element stands for.

    ``stored(tile)`` gives float64 of a raw tile. With them a probe can write an index digit by digit.
    """

    letters: torch.Tensor
    stored: Callable[[torch.Tensor], torch.Tensor]


def _alphabet(name: str) -> _Alphabet:
    if name == "cpu-attn-bf16":
        # Codes 1..128 and their negatives are exact in bfloat16 and float16.
        return _Alphabet(torch.arange(1, 129, dtype=torch.float64), lambda tile: tile.double())
    table = e4m3_values() if "e4m3" in name else e5m2_values()
    # Two mantissa bits and exponents from -4 to 3: normal numbers of both 8-bit types, however they round.
    letters = torch.tensor(
        [math.ldexp(4 + mantissa, exponent - 2) for exponent in range(-4, 4) for mantissa in range(4)]
    )
    return _Alphabet(letters.double(), lambda tile: table[tile.view(torch.uint8).long()].double())


def probe_layout(
    write: Write,
    *,
    head_size: int,
    block_size: int,
    kv_heads: int,
    dtype: torch.dtype = torch.bfloat16,
    name: str = "cpu-attn-bf16",
) -> LayoutPermutation:
    """Finds the tile permutation of a backend whose cells keep the bits of 16-bit K and V, or one byte for each.

    The linear index ``offset * head_size + element`` is written in digits, one pass per digit: K as a positive and V as
    a negative number that the cache keeps exactly; 0 marks an element that was not written. The permutation is then
    checked on random numbers that the cache keeps exactly, over several blocks and heads in shuffled slot order. How
    other numbers are rounded plays no part.

    Args:
        write: The backend's own update with scales of 1; called on scratch caches only.
        head_size: Elements of one K or V vector.
        block_size: Positions of one block.
        kv_heads: Heads of the scratch caches.
        dtype: The 16-bit dtype of K and V, and of a scratch cache that has 16 bits.
        name: The format: ``cpu-attn-bf16``, or one with 8 bits (``cpu-attn-fp8-…``).

    Raises:
        FormatError: The elements do not map one to one onto the tile, heads or blocks differ, or random numbers do not
            read back.
    """
    _sixteen(dtype, "a probed layout")
    alphabet, size = _alphabet(name), block_size * head_size
    letters, base = alphabet.letters, alphabet.letters.numel()
    slots = torch.arange(block_size) + block_size  # block 1: block 0 stays untouched and is checked
    linear = torch.arange(size).view(block_size, 1, head_size).expand(block_size, kv_heads, head_size)
    found_k = torch.zeros(kv_heads, 2 * size, dtype=torch.int64)
    found_v = torch.zeros_like(found_k)
    weight = 1
    is_k = is_v = torch.zeros(0)
    while weight < size:
        written = letters[(linear // weight) % base].to(dtype)
        cache = torch.zeros(3, kv_heads, block_size, 2 * head_size, dtype=stored_as(name, dtype))
        write(written, -written, cache, slots)
        if bool((cache[0] != 0).any()) or bool((cache[2] != 0).any()):
            raise FormatError("found writes outside block 1, expected none, while probing the cache layout")
        tile = alphabet.stored(cache[1].flatten(1))
        is_k, is_v = tile > 0, tile < 0
        code = torch.searchsorted(letters, tile.abs().contiguous()).clamp(max=base - 1)
        if not bool(((tile == 0) | (letters[code] == tile.abs())).all()):
            raise FormatError(
                "found a value that was not written, expected the bits of K and V, while probing the cache layout"
            )
        found_k += torch.where(is_k, code * weight, 0)
        found_v += torch.where(is_v, code * weight, 0)
        weight *= base
    layouts = []
    for which, mask, found in (("K", is_k, found_k), ("V", is_v, found_v)):
        index = torch.full((kv_heads, size), -1, dtype=torch.int64)
        for head in range(kv_heads):
            physical = mask[head].nonzero().flatten()
            logical = found[head][physical]
            if physical.numel() != size or not torch.equal(logical.sort().values, torch.arange(size)):
                raise FormatError(
                    f"found {len(set(logical.tolist()))} distinct {which} elements at {physical.numel()} places of"
                    f" head {head}, expected {size} at {size}, while probing the cache layout"
                )
            index[head, logical] = physical
        if not bool((index == index[0]).all()):
            raise FormatError(
                f"found {which} layouts that differ by head, expected one, while probing the cache layout"
            )
        layouts.append(index[0].view(block_size, head_size).contiguous())
    layout = LayoutPermutation(k=layouts[0], v=layouts[1])
    _verify_layout(write, layout, kv_heads, dtype, name)
    return layout


def stored_as(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a stock CPU cache of that format, for K and V of ``dtype``."""
    return dtype if name == "cpu-attn-bf16" else torch.uint8


def _verify_layout(write: Write, layout: LayoutPermutation, kv_heads: int, dtype: torch.dtype, name: str) -> None:
    generator = torch.Generator().manual_seed(20)
    blocks = 5
    fmt = declared(name, layout=layout, dtype=dtype)
    cache = torch.zeros(blocks, kv_heads, layout.block_size, 2 * layout.head_size, dtype=stored_as(name, dtype))
    slots = torch.randperm(blocks * layout.block_size, generator=generator)[: 3 * layout.block_size + 1]
    shape = (slots.numel(), kv_heads, layout.head_size)
    key, value = (_exact(fmt, shape, dtype, generator) for _ in range(2))
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


def _exact(fmt: Format, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random numbers of ``dtype`` that ``fmt`` keeps exactly: any finite one, but for a negative zero in 8 bits."""
    if not isinstance(fmt, CpuAttn8):
        return _random_bits(shape, dtype, generator)
    table = e4m3_values() if fmt.kind == "e4m3" else e5m2_values()
    kept = table[table.isfinite() & (table != 0)]
    return kept[torch.randint(0, kept.numel(), shape, generator=generator)].to(dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """Inputs of one 16-bit dtype for which a backend writes other bytes than the declared encoding dictates.

    Of ``inputs`` numbers (every bit pattern), ``finite`` and ``not_finite`` are the finite and the other ones that
    deviate, in K or in V. ``first``: the input, the byte that was found and the one that was expected, of up to eight.
    """

    inputs: int
    finite: int
    not_finite: int
    first: tuple[tuple[float, int, int], ...]


def probe_encoding(write: Write, fmt: CpuAttn8, *, kv_heads: int, v_scale: float = 1.0) -> dict[str, Deviation]:
    """Compares the bytes that ``write`` stores with the declared ones, for every bit pattern of ``fmt.dtype``.

    Args:
        write: The backend's own update with ``fmt.k_scale`` and ``v_scale``; called on a scratch cache only.
        fmt: The declared encoding, with its layout.
        kv_heads: Heads of the scratch cache.
        v_scale: The scale of V.

    Returns:
        The deviations of ``"k"`` and of ``"v"``.
    """
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(fmt.dtype)
    row = kv_heads * fmt.layout.head_size
    count = -(-every.numel() // row)
    padded = torch.cat([every, every.new_zeros(count * row - every.numel())]).view(count, kv_heads, -1)
    blocks = -(-count // fmt.layout.block_size)
    cache = torch.zeros(blocks, kv_heads, fmt.layout.block_size, 2 * fmt.layout.head_size, dtype=torch.uint8)
    slots = torch.arange(count)
    write(padded, padded, cache, slots)
    found, expected = fmt.read(cache, slots), fmt.encode(padded, padded, v_scale)
    result = {}
    for which, got, wanted in (("k", found.k, expected.k), ("v", found.v, expected.v)):
        wrong = (got != wanted).flatten()[: every.numel()]
        finite = every.isfinite()
        at = wrong.nonzero().flatten()[:8].tolist()
        result[which] = Deviation(
            inputs=every.numel(),
            finite=int((wrong & finite).sum()),
            not_finite=int((wrong & ~finite).sum()),
            first=tuple((float(every[i]), int(got.flatten()[i]), int(wanted.flatten()[i])) for i in at),
        )
    return result


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


def _quotient(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """The correctly rounded float32 ``values / divisor``, wherever ``values`` lie.

    On a GPU torch multiplies by the reciprocal where the divisor is a number of the host, and a quotient in the middle
    of two bytes then goes to the other one.
    """
    return values / torch.full((), divisor, dtype=torch.float32, device=values.device)


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
