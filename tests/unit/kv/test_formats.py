from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_kvqual.errors import FormatError, StudyError
from pytest_kvqual.kv import formats
from pytest_kvqual.kv.backends import k16v8, reference

HEADS, BLOCK, SIZE = 3, 8, 16


def write_reference(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    reference.write(key, value, cache, slots)


def write_k16v8(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    k16v8.write(key, value, cache, slots, v_scale=0.0375)


def write_packed(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """A stand-in for the stock cache: K of a tile transposed, then V as pairs of positions."""
    tiles = cache.view(*cache.shape[:2], 2, BLOCK * SIZE)
    for row, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, BLOCK)
        dims = torch.arange(SIZE)
        tiles[block, :, 0, dims * BLOCK + offset] = key[row]
        tiles[block, :, 1, (offset // 2) * 2 * SIZE + dims * 2 + offset % 2] = value[row]


# -- E4M3 ------------------------------------------------------------------------------------------------------


def test_e4m3_is_the_published_table() -> None:
    """The E4M3 table has the extremes of OCP OFP8 1.0, table 1."""
    values = formats.e4m3_values()
    assert values[0x7E] == 448.0
    assert values[0x08] == 2.0**-6
    assert values[0x01] == 2.0**-9
    assert values[0x07] == 0.875 * 2.0**-6
    assert values[0x7F].isnan()
    assert values[0xFF].isnan()
    assert math.copysign(1.0, float(values[0x80])) == -1.0
    assert int(values.isnan().sum()) == 2


def test_e4m3_equals_the_cast_of_torch() -> None:
    """The table and torch's own cast agree on every byte and on every float16, clamped to the range."""
    every = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    assert torch.equal(
        every.view(torch.float8_e4m3fn).float().nan_to_num(nan=1e9), formats.e4m3_values().nan_to_num(nan=1e9)
    )
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    cast = halves.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(formats.encode_e4m3(halves), cast)


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_e4m3_rounds_ties_to_even(side: float) -> None:
    """A value halfway between two codes takes the even one, and its neighbours the nearest."""
    magnitudes = formats.e4m3_values()[:127]
    middle = (magnitudes[1:] + magnitudes[:-1]) / 2
    low = torch.arange(126)
    sign = 0x80 if side < 0 else 0
    assert torch.equal(formats.encode_e4m3(side * middle).int(), low + low % 2 + sign)
    below = torch.nextafter(middle, torch.zeros(1))
    above = torch.nextafter(middle, torch.full((1,), 1e9))
    assert torch.equal(formats.encode_e4m3(side * below).int(), low + sign)
    assert torch.equal(formats.encode_e4m3(side * above).int(), low + 1 + sign)


def test_division_by_the_scale_is_rounded_once() -> None:
    """The quotient that is encoded is the float32 nearest to the real one, for every bfloat16 and several scales."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    value = every[every.isfinite()].view(-1, 1, 8)
    for scale in (0.0375, 1.0, 3.0, 2.0**-7, 0.0123456789):
        single = float(torch.tensor(scale))
        # float64, then float32, is one rounding for operands of 24 bits (53 >= 2 * 24 + 2).
        wanted = formats.encode_e4m3((value.double() / single).float())
        assert torch.equal(formats.K16V8().encode(value, value, scale).v, wanted)


# -- Encodings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["k16v16", "k16v8"])
def test_declared_sizes(name: str, dtype: torch.dtype) -> None:
    """Encoded cells have the declared number of bytes per element."""
    fmt = formats.declared(name, dtype=dtype)
    cells = fmt.encode(torch.ones(5, HEADS, SIZE, dtype=dtype), torch.ones(5, HEADS, SIZE, dtype=dtype), 1.0)
    assert cells.k.shape == (5, HEADS, fmt.k_bytes * SIZE)
    assert cells.v.shape == (5, HEADS, fmt.v_bytes * SIZE)
    assert cells.k.dtype == cells.v.dtype == torch.uint8


def test_k16v8_values() -> None:
    """V is divided by the scale, clamped and rounded; NaN keeps its sign; decoding multiplies by the scale."""
    fmt = formats.K16V8()
    value = torch.tensor([1.0, -1.0, 1000.0, -1000.0, 0.0, -0.0, math.inf, 0.0, 0.0]).bfloat16().view(1, 1, 9)
    value.view(torch.int16)[..., 7:] = torch.tensor([0x7FC0, 0xFFC0 - 0x10000], dtype=torch.int16)
    cells = fmt.encode(value, value, 0.5)
    assert cells.v.flatten().tolist() == [0x40, 0xC0, 0x7E, 0xFE, 0x00, 0x80, 0x7E, 0x7F, 0xFF]
    _, decoded = fmt.decode(cells, 0.5)
    assert decoded.flatten().tolist()[:7] == [1.0, -1.0, 224.0, -224.0, 0.0, -0.0, 224.0]
    assert bool(decoded.flatten()[7:].isnan().all())


def test_comparison_is_bitwise() -> None:
    """-0.0 differs from 0.0, NaN equals the same NaN, and one differing byte marks its (slot, head) only."""
    fmt = formats.K16V16()
    zero = torch.zeros(2, HEADS, SIZE).bfloat16()
    nan = torch.full_like(zero, math.nan)
    k_bad, v_bad = fmt.encode(zero, nan, 1.0).unequal(fmt.encode(-zero, nan, 1.0))
    assert bool(k_bad.all())
    assert not bool(v_bad.any())
    other = zero.clone()
    other[1, 2, 7] = 1.0
    k_bad, v_bad = fmt.encode(zero, nan, 1.0).unequal(fmt.encode(other, nan, 1.0))
    assert k_bad.nonzero().tolist() == [[1, 2]]


def test_cells_of_another_shape_are_not_compared() -> None:
    """Comparing cells of different shapes is an error, not a difference of zero."""
    fmt = formats.K16V16()
    one, two = (torch.zeros(rows, HEADS, SIZE).bfloat16() for rows in (1, 2))
    with pytest.raises(FormatError, match="found K cells of shape"):
        fmt.encode(one, one, 1.0).unequal(fmt.encode(two, two, 1.0))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-60])
def test_bad_scale(scale: float) -> None:
    """A scale that is not a positive finite float32 is refused."""
    value = torch.zeros(1, 1, 8).bfloat16()
    with pytest.raises(FormatError, match="found v_scale"):
        formats.K16V8().encode(value, value, scale)


def test_unknown_name() -> None:
    """A format that is not declared is refused, and the declared ones are named."""
    with pytest.raises(StudyError, match="expected one of k16v16, k16v8, k8v8, k8v8-inline, cpu-attn-bf16"):
        formats.declared("k8v4")


def test_other_dtypes_are_refused() -> None:
    """K and V must have the format's dtype, and that dtype has 16 bits."""
    with pytest.raises(FormatError, match="float32"):
        formats.K16V8(dtype=torch.float32)
    half = torch.zeros(1, 1, 8, dtype=torch.float16)
    with pytest.raises(FormatError, match="found key of torch"):
        formats.K16V16().encode(half, half, 1.0)


@pytest.mark.parametrize("slots", [[-1], [24], [0, 24]])
def test_read_refuses_slots_outside_the_cache(slots: list[int]) -> None:
    """Reading slot -1 or a slot behind the cache is refused."""
    cache = torch.zeros(3, HEADS, BLOCK, 3 * SIZE, dtype=torch.uint8)
    with pytest.raises(FormatError, match="expected 0 to 23"):
        formats.K16V8().read(cache, torch.tensor(slots))


# -- Probes ----------------------------------------------------------------------------------------------------


def test_probe_finds_a_packed_layout() -> None:
    """The probe finds where a permuting write puts each element, and reads it back in canonical order."""
    layout = formats.probe_layout(write_packed, head_size=SIZE, block_size=BLOCK, kv_heads=HEADS)
    assert layout.k[3, 5] == 5 * BLOCK + 3
    assert layout.v[3, 5] == BLOCK * SIZE + 1 * 2 * SIZE + 5 * 2 + 1


def _swap_last_two(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    write_reference(key, value, cache, slots)
    cache[..., SIZE - 1] = cache[..., SIZE - 2]


def _head_dependent(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    write_reference(key, value, cache, slots)
    cache[:, 1] = cache[:, 1].flip(-1).roll(SIZE, -1)


def _scaled(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    write_reference(key * 1.5, value, cache, slots)


def _elsewhere(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    write_reference(key, value, cache, slots - BLOCK)


def _drops_one_slot(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    write_reference(key[:-1], value[:-1], cache, slots[:-1])


def _rounds(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    write_reference(key.to(torch.float8_e5m2).to(key.dtype), value, cache, slots)


def _order_dependent(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    write_reference(key, value, cache, slots.sort().values)


@pytest.mark.parametrize(
    "write", [_swap_last_two, _head_dependent, _scaled, _elsewhere, _drops_one_slot, _rounds, _order_dependent]
)
def test_probe_refuses_what_is_no_permutation(write: Callable[..., None]) -> None:
    """A write that loses, alters, misplaces or mixes elements has no layout."""
    with pytest.raises(FormatError, match="expected"):
        formats.probe_layout(write, head_size=SIZE, block_size=BLOCK, kv_heads=HEADS)


@pytest.mark.parametrize(
    ("write", "content", "dtype", "expected"),
    [
        (write_reference, 2 * SIZE, torch.bfloat16, (2, 2)),
        (write_k16v8, 3 * SIZE, torch.uint8, (2, 1)),
        (write_packed, 2 * SIZE, torch.bfloat16, (2, 2)),
    ],
)
def test_observed_bytes(
    write: Callable[..., None], content: int, dtype: torch.dtype, expected: tuple[int, int]
) -> None:
    """The bytes per element are counted in what a write changes."""
    like = torch.zeros(4, HEADS, BLOCK, content, dtype=dtype)
    assert formats.observe_bytes(write, like=like, head_size=SIZE) == expected


def test_observed_bytes_of_a_wide_cache_with_narrow_values() -> None:
    """A 16-bit cache that holds E4M3 values in its low bytes is observed as 1 byte per V element."""

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        small = formats.encode_e4m3(value.float()).to(torch.int16).view(torch.bfloat16)
        write_reference(key, small, cache, slots)

    like = torch.zeros(4, HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16)
    assert formats.observe_bytes(write, like=like, head_size=SIZE) == (2, 1)


def test_observed_bytes_refuse_shared_bytes() -> None:
    """A byte that depends on K and on V has no side to be counted on."""

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        write_reference(key + value, value, cache, slots)

    like = torch.zeros(4, HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16)
    with pytest.raises(FormatError, match="depend on K and on V"):
        formats.observe_bytes(write, like=like, head_size=SIZE)


def test_observed_bytes_refuse_a_write_that_does_nothing() -> None:
    """A write that changes nothing is an error, not 0 bytes."""
    like = torch.zeros(4, HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16)
    with pytest.raises(FormatError, match="expected more than 0"):
        formats.observe_bytes(lambda *_: None, like=like, head_size=SIZE)


class _Divisors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is divided by: a tensor beside what is divided, or a number of the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.beside: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("aten::div"):
            self.beside.append(isinstance(args[1], torch.Tensor) and args[1].device == args[0].device)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["k16v8", "k8v8-inline"])
def test_v_is_divided_by_a_tensor_that_lies_beside_it(name: str) -> None:
    """A device multiplies by the reciprocal of a number of the host; the middle of two bytes then goes elsewhere."""
    fmt = formats.declared(name, dtype=torch.float16)
    row = torch.empty(3, 2, 8, dtype=torch.float16, device="meta")
    with _Divisors() as seen:
        fmt.encode(row, row, 0.02)
    assert seen.beside
    assert all(seen.beside)


def test_a_reciprocal_would_give_other_bytes() -> None:
    """With scales of few bits, some float16 over the scale lies in the middle of two bytes: only a quotient ties."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    every = every[every.isfinite()]
    differ = 0
    for significand in range(2049, 4096, 2**5):
        scale = torch.tensor((significand - 1) * 2.0**-17)
        differ += int((formats.encode_e4m3(every / scale) != formats.encode_e4m3(every * (1 / scale))).sum())
    assert differ > 0
