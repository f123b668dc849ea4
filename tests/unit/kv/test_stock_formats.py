"""The 8-bit caches of vLLM's CPU backend: codecs by definition and toward zero, layouts of one byte, declarations."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.errors import FormatError
from pytest_kvqual.kv import formats
from pytest_kvqual.kv.declarations import DECLARED, NEED_DECLARATION, is_declared, not_established

HEADS, BLOCK, SIZE = 3, 8, 16
KINDS = ("e4m3", "e5m2")
TABLE = {"e4m3": formats.e4m3_values, "e5m2": formats.e5m2_values}
NEAREST = {"e4m3": formats.encode_e4m3, "e5m2": formats.encode_e5m2}
CUT = {"e4m3": formats.encode_e4m3_toward_zero, "e5m2": formats.encode_e5m2_toward_zero}
FINITE = {"e4m3": 0x7F, "e5m2": 0x7C}
"""How many bytes from 0 on are finite numbers that are not negative."""

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def _every(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def _place(order: str) -> Callable[[int, int, int], int]:
    """Where element ``dim`` of K (``which`` 0) or V (1) at ``offset`` lies in its tile."""
    if order == "columns":  # K by element, V by position
        return lambda which, offset, dim: dim * BLOCK + offset if which == 0 else BLOCK * SIZE + offset * SIZE + dim
    # K in pairs of elements for eight positions, V in pairs of positions
    return lambda which, offset, dim: (
        (dim // 2) * 2 * BLOCK + offset * 2 + dim % 2
        if which == 0
        else BLOCK * SIZE + (offset // 2) * 2 * SIZE + dim * 2 + offset % 2
    )


def writer(kind: str, *, order: str = "columns", toward_zero: bool = False) -> Write:
    """A stand-in for the stock cache update, written without the formats' own permutation."""
    place, encode = _place(order), (CUT if toward_zero else NEAREST)[kind]
    at = [
        torch.tensor([[place(which, offset, dim) for dim in range(SIZE)] for offset in range(BLOCK)])
        for which in (0, 1)
    ]

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        tiles, heads = cache.view(*cache.shape[:2], -1), torch.arange(cache.shape[1])[None, :, None]
        for which, part in enumerate((key, value)):
            tiles[(slots // BLOCK)[:, None, None], heads, at[which][slots % BLOCK][:, None]] = encode(part.float())

    return write


@cache
def healthy(kind: str) -> formats.LayoutPermutation:
    """The layout of :func:`writer`."""
    return probed(kind, writer(kind))


def probed(kind: str, write: Write, dtype: torch.dtype = torch.bfloat16) -> formats.LayoutPermutation:
    """The layout that the probe finds."""
    return formats.probe_layout(
        write, head_size=SIZE, block_size=BLOCK, kv_heads=HEADS, dtype=dtype, name=f"cpu-attn-fp8-{kind}"
    )


# -- codecs ----------------------------------------------------------------------------------------------------------


def test_e5m2_is_the_published_table() -> None:
    """The E5M2 table has the extremes of OCP OFP8 1.0, table 1."""
    values = formats.e5m2_values()
    assert values[0x7B] == 57344.0
    assert values[0x04] == 2.0**-14
    assert values[0x01] == 2.0**-16
    assert values[0x03] == 0.75 * 2.0**-14
    assert values[0x7C] == math.inf
    assert values[0xFC] == -math.inf
    assert bool(values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]].isnan().all())
    assert math.copysign(1.0, float(values[0x80])) == -1.0


def test_e5m2_equals_the_cast_of_torch() -> None:
    """The table and torch's own cast agree on every byte and on every float16, clamped to the range."""
    bytes_ = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    cast = bytes_.view(torch.float8_e5m2).float()
    assert torch.equal(cast.nan_to_num(nan=1e9, posinf=2e9), formats.e5m2_values().nan_to_num(nan=1e9, posinf=2e9))
    halves = _every(torch.float16).float()
    wanted = halves.clamp(-57344, 57344).to(torch.float8_e5m2).view(torch.uint8)
    assert torch.equal(formats.encode_e5m2(halves), wanted)


@pytest.mark.parametrize("kind", KINDS)
@given(value=floats)
def test_the_nearest_byte_is_taken(kind: str, value: float) -> None:
    """No finite number of the type is nearer than the one taken; of two as near, the one whose byte is even."""
    table = TABLE[kind]()[: FINITE[kind]].tolist()
    byte = int(NEAREST[kind](torch.tensor([value])))
    magnitude, found = Fraction(abs(value)), byte & 0x7F
    distances = [abs(Fraction(number) - magnitude) for number in table]
    least = min(distances)
    nearest = [code for code, distance in enumerate(distances) if distance == least]
    assert found == next((code for code in nearest if code % 2 == 0), nearest[0])
    assert byte >> 7 == (math.copysign(1.0, value) < 0)


@pytest.mark.parametrize("kind", KINDS)
@given(value=floats)
def test_toward_zero_no_number_between_is_left_out(kind: str, value: float) -> None:
    """The number taken is not beyond the input, and the next one is; E4M3 below 2**-6 sees a multiple of 2**-29."""
    table = TABLE[kind]()[: FINITE[kind]].tolist()
    byte = int(CUT[kind](torch.tensor([value])))
    magnitude, found = Fraction(abs(value)), byte & 0x7F
    if kind == "e4m3" and magnitude < Fraction(1, 64):
        magnitude = Fraction(round(magnitude * 2**29), 2**29)
    assert Fraction(table[found]) <= magnitude
    assert found == len(table) - 1 or magnitude < Fraction(table[found + 1])
    assert byte >> 7 == (value < 0)


@pytest.mark.parametrize(("kind", "largest"), [("e4m3", 0x7E), ("e5m2", 0x7B)])
def test_what_is_not_a_number_in_range(kind: str, largest: int) -> None:
    """By definition NaN stays NaN and saturation keeps the sign; toward zero NaN is the largest and -0.0 is 0x00."""
    odd = torch.tensor([math.inf, -math.inf, 1e30, -1e30, -0.0, math.nan, -math.nan])
    odd.view(torch.int32)[6] = -0x400000  # a NaN with its sign bit
    near = [largest, largest | 0x80, largest, largest | 0x80, 0x80, 0x7F, 0xFF]
    assert NEAREST[kind](odd).tolist() == near
    assert CUT[kind](odd).tolist() == [*near[:4], 0x00, largest, largest]


def test_a_subnormal_product_is_rounded_before_it_is_cut() -> None:
    """Just below 2**-6 the E4M3 of the kernel is 2**-6: the float32 product on the way is rounded up to it."""
    below = torch.nextafter(torch.tensor([2.0**-6]), torch.zeros(1))
    assert formats.encode_e4m3_toward_zero(torch.cat([below, -below])).tolist() == [0x08, 0x88]
    assert formats.encode_e4m3_toward_zero(torch.tensor([2.0**-40, -(2.0**-40), 1e-45])).tolist() == [0x00, 0x80, 0x00]


def test_a_reciprocal_is_not_a_quotient() -> None:
    """41 over a scale of 41 is 1 by definition, and 0.9375 where a rounded reciprocal is multiplied and cut off."""
    layout = healthy("e4m3")
    value = torch.full((1, HEADS, SIZE), 41.0).bfloat16()
    for toward_zero, byte in ((False, 0x38), (True, 0x37)):
        fmt = formats.CpuAttn8(kind="e4m3", layout=layout, toward_zero=toward_zero, k_scale=41.0)
        cells = fmt.encode(value, value, 41.0)
        assert set(cells.k.flatten().tolist()) == set(cells.v.flatten().tolist()) == {byte}


# -- probes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("toward_zero", [False, True])
@pytest.mark.parametrize("order", ["columns", "pairs"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_probe_finds_a_layout_of_bytes(kind: str, order: str, toward_zero: bool, dtype: torch.dtype) -> None:
    """Each element's byte is found, however the backend rounds, and one byte of each is what a write changes."""
    write = writer(kind, order=order, toward_zero=toward_zero)
    layout = probed(kind, write, dtype)
    for which, found in enumerate((layout.k, layout.v)):
        assert [[_place(order)(which, offset, dim) for dim in range(SIZE)] for offset in range(BLOCK)] == found.tolist()
    like = torch.zeros(4, HEADS, BLOCK, 2 * SIZE, dtype=torch.uint8)
    assert formats.observe_bytes(write, like=like, head_size=SIZE, dtype=dtype) == (1, 1)


def _damaged(change: Callable[[torch.Tensor], object]) -> Write:
    write = writer("e4m3")

    def damaged(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        write(key, value, cache, slots)
        change(cache.view(*cache.shape[:2], -1))

    return damaged


DAMAGE: dict[str, Callable[[torch.Tensor], object]] = {
    "an element is lost": lambda tiles: tiles[..., 5].zero_(),
    "one head is permuted in another way": lambda tiles: tiles[:, 1, :2].copy_(tiles[:, 1, :2].flip(-1)),
    "one block is permuted in another way": lambda tiles: tiles[-1].copy_(tiles[-1].flip(-1)),
    "a byte is no number that was written": lambda tiles: tiles[1, 0, :1].fill_(0x7F),
    "another block is written": lambda tiles: tiles[2, 0, :1].fill_(0x38),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_the_probe_refuses_what_is_no_permutation_of_bytes(case: str) -> None:
    """A write that loses, mixes or invents bytes has no layout."""
    with pytest.raises(FormatError, match="expected"):
        probed("e4m3", _damaged(DAMAGE[case]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_of_the_other_type_is_refused(kind: str) -> None:
    """The bytes of E5M2 are no layout of E4M3, and the other way round: a flag that names the other type is seen."""
    other = {"e4m3": "e5m2", "e5m2": "e4m3"}[kind]
    with pytest.raises(FormatError, match="expected"):
        probed(kind, writer(other))


@given(
    slots=st.lists(st.integers(0, 4 * BLOCK - 1), min_size=2, max_size=12, unique=True),
    which=st.integers(0, 1),
    dims=st.lists(st.integers(0, SIZE - 1), min_size=2, max_size=2, unique=True),
    head=st.integers(0, HEADS - 1),
    seed=st.integers(0, 99),
)
def test_two_swapped_elements_are_found(slots: list[int], which: int, dims: list[int], head: int, seed: int) -> None:
    """Two bytes of one cell that changed places are found in that cell, slot and head, and nowhere else."""
    write, random = writer("e4m3"), torch.Generator().manual_seed(seed)
    fmt = formats.CpuAttn8(kind="e4m3", layout=healthy("e4m3"))
    pool = torch.zeros(4, HEADS, BLOCK, 2 * SIZE, dtype=torch.uint8)
    key, value = (torch.randn(len(slots), HEADS, SIZE, generator=random).bfloat16() for _ in range(2))
    at = torch.tensor(slots)
    write(key, value, pool, at)
    wanted = fmt.encode(key, value, 1.0)
    assert not any(bool(part.any()) for part in fmt.read(pool, at).unequal(wanted))
    tile = pool[slots[1] // BLOCK, head].view(-1)
    places = (fmt.layout.k, fmt.layout.v)[which][slots[1] % BLOCK, dims]
    tile[places] = tile[places.flip(0)]
    bad = fmt.read(pool, at).unequal(wanted)
    differs = (wanted.k, wanted.v)[which][1, head, dims[0]] != (wanted.k, wanted.v)[which][1, head, dims[1]]
    assert bad[which].nonzero().tolist() == ([[1, head]] if differs else [])
    assert not bool(bad[1 - which].any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_input_is_compared_with_the_declared_encoding(kind: str, dtype: torch.dtype) -> None:
    """A write that rounds as declared deviates nowhere; one that rounds otherwise does, and is shown where."""
    writes = {False: writer(kind), True: writer(kind, toward_zero=True)}
    layout = healthy(kind)
    for toward_zero in (False, True):
        fmt = formats.CpuAttn8(kind=kind, layout=layout, toward_zero=toward_zero, dtype=dtype)
        for same in (True, False):
            found = formats.probe_encoding(writes[toward_zero is same], fmt, kv_heads=HEADS)
            for part in found.values():
                assert part.inputs == 65536
                assert ((part.finite, part.not_finite) == (0, 0)) is same
                assert (part.first == ()) is same
    odd = sum(1 for value in _every(dtype).tolist() if not math.isfinite(value))
    assert found["k"].not_finite == odd - 2  # the infinities saturate either way


def test_one_wrong_byte_of_65536_is_found() -> None:
    """An encoding that is right but for one input is not the declared one."""
    write = writer("e5m2")
    fmt = formats.CpuAttn8(kind="e5m2", layout=healthy("e5m2"))

    def wrong(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        write(key, torch.where(value == 3.0, torch.tensor(4.0).bfloat16(), value), cache, slots)

    found = formats.probe_encoding(wrong, fmt, kv_heads=HEADS)
    assert (found["k"].finite, found["v"].finite) == (0, 1)
    assert found["v"].first == ((3.0, 0x44, 0x42),)


# -- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in DECLARED if formats.needs_layout(name)])
def test_a_declared_stock_format_keeps_what_it_can_hold(name: str) -> None:
    """Decoded cells encode to themselves, over a scale too, and the declaration agrees with the codec."""
    kind = name.removeprefix("cpu-attn-fp8-").partition("-")[0]
    layout = healthy("e4m3")
    fmt = formats.declared(name, layout=layout)
    assert fmt.name == name
    assert (fmt.k_bytes, fmt.v_bytes) == (DECLARED[name].k_bytes, DECLARED[name].v_bytes)
    assert formats.cell_bytes(fmt, SIZE) == (fmt.k_bytes + fmt.v_bytes) * SIZE
    value = torch.tensor([1.0, -1.5, 0.25, 96.0]).bfloat16().repeat(SIZE // 4).expand(2, HEADS, SIZE).contiguous()
    scale = 0.5 if kind in KINDS else 1.0
    key, decoded = fmt.decode(fmt.encode(value, value, scale), scale)
    assert torch.equal(key, value.float())
    assert torch.equal(decoded, value.float())


def test_a_stock_format_needs_its_layout() -> None:
    """Without the probed permutation there is no stock format, and no 8-bit type but the two."""
    for name in ("cpu-attn-bf16", "cpu-attn-fp8-e4m3", "cpu-attn-fp8-e5m2-toward-zero"):
        with pytest.raises(FormatError, match="found no layout"):
            formats.declared(name)
    layout = healthy("e4m3")
    with pytest.raises(FormatError, match="found the 8-bit type 'e3m4', expected e4m3 or e5m2"):
        formats.CpuAttn8(kind="e3m4", layout=layout)


def test_a_cache_of_sixteen_bits_is_no_cache_of_eight() -> None:
    """An 8-bit format does not read a 16-bit cache."""
    fmt = formats.CpuAttn8(kind="e4m3", layout=healthy("e4m3"))
    with pytest.raises(FormatError, match="expected 8-bit"):
        fmt.read(torch.zeros(2, HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16), torch.tensor([0]))


@pytest.mark.parametrize("kind", KINDS)
def test_cells_of_nan_read_as_nan_however_the_backend_rounds(kind: str) -> None:
    """A cell that nobody wrote can hold a NaN even where no write makes one."""
    layout = healthy(kind)
    for toward_zero in (False, True):
        fmt = formats.CpuAttn8(kind=kind, layout=layout, toward_zero=toward_zero)
        key, value = fmt.decode(formats.nan_cells(fmt, (2, HEADS, SIZE), torch.bfloat16, 1.0), 1.0)
        assert bool(key.isnan().all() and value.isnan().all())
    _, value = formats.K16V8().decode(formats.nan_cells(formats.K16V8(), (1, 1, 4), torch.bfloat16, 0.5), 0.5)
    assert bool(value.isnan().all())


def test_a_format_without_a_declaration_answers_nothing() -> None:
    """Whoever asks what a cell of an undeclared format holds gets a line that names it and the declared ones."""
    fmt = formats.Undeclared(name="turboquant_k8v4")
    one = torch.zeros(1, 1, 4).bfloat16()
    cells = formats.Cells(k=one.view(torch.uint8), v=one.view(torch.uint8))
    for ask in (
        lambda: fmt.encode(one, one, 1.0),
        lambda: fmt.decode(cells, 1.0),
        lambda: fmt.read(one, torch.tensor([0])),
        lambda: fmt.place(one, torch.tensor([0]), cells),
        lambda: fmt.k_bytes,
        lambda: fmt.v_bytes,
    ):
        with pytest.raises(FormatError, match="found no declaration of the KV format 'turboquant_k8v4', expected one"):
            ask()


def test_declarations() -> None:
    """The declared formats are those that a codec exists for, and the flags of a stock one are the engine's."""
    assert not is_declared("int8_per_token_head")
    assert is_declared("cpu-attn-fp8-e5m2")
    assert "routing" in NEED_DECLARATION
    assert not_established("x", "what it holds").endswith("what it holds could not be established")
    layout = healthy("e4m3")
    for name in DECLARED:
        made = formats.declared(name, layout=layout if formats.needs_layout(name) else None)
        assert made.name == name
