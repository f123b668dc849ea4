"""The eight-bit encodings: their bytes, and the exemplar that writes and reads them."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_kvqual.errors import FormatError
from pytest_kvqual.kv import formats
from pytest_kvqual.kv.backends.exemplar import FORMATS, Exemplar, for_format

BLOCKS, HEADS, BLOCK, SIZE = 5, 3, 8, 16
K_SCALE, V_SCALE = 0.5, 2.0
FACTORS = (0.5, 1.0, 3.0)
CODECS: dict[str, formats.Format] = {
    "k16v16": formats.K16V16(),
    "k16v8": formats.K16V8(),
    "k8v8": formats.K8V8(k_scale=K_SCALE, k_factors=FACTORS, v_factors=FACTORS[::-1]),
    "k8v8-inline": formats.K8V8Inline(),
}


def backend(name: str) -> Exemplar:
    return Exemplar(name, k_factors=FACTORS, v_factors=FACTORS[::-1]) if name == "k8v8" else for_format(name)


def vectors(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = ((torch.randn(count, HEADS, SIZE, generator=generator) * 40).to(torch.bfloat16) for _ in range(2))
    key[0, 0, 0], value[0, 1, 2] = 5000.0, -5000.0
    key[1, 2, 3] = value[1, 0, 1] = math.nan
    key[2] = value[2] = 0.0
    return key, value


def empty(name: str) -> torch.Tensor:
    width = formats.cell_bytes(CODECS[name], SIZE)
    raw = torch.full((BLOCKS, HEADS * BLOCK * width + 64), 0x7F, dtype=torch.uint8)
    raw = raw.view(torch.bfloat16) if name == "k16v16" else raw
    width //= raw.element_size()
    return raw.as_strided((BLOCKS, HEADS, BLOCK, width), (raw.shape[1], BLOCK * width, width, 1))


@pytest.mark.parametrize("name", FORMATS)
def test_the_exemplar_writes_the_declared_bytes(name: str) -> None:
    """Outliers are clamped, NaN stays NaN, zero vectors encode, and a strided cache keeps its gap."""
    key, value = vectors(7)
    cache, codec = empty(name), CODECS[name]
    slots = torch.tensor([39, 3, 8, 25, 16, 0, -1])
    backend(name).write(key, value, cache, slots, k_scale=K_SCALE, v_scale=V_SCALE)
    cells = codec.encode(key, value, V_SCALE)
    k, v = codec.read(cache, slots[:6]).unequal(formats.Cells(k=cells.k[:6], v=cells.v[:6]))
    assert not bool(k.any())
    assert not bool(v.any())


@pytest.mark.parametrize("name", ["k8v8", "k8v8-inline"])
def test_what_is_placed_is_read(name: str) -> None:
    """``place`` is the inverse of ``read``, and other cells keep their bytes."""
    cache, codec = empty(name), CODECS[name]
    slots = torch.tensor([39, 3, 8])
    cells = codec.encode(*vectors(3), V_SCALE)
    codec.place(cache, slots, cells)
    assert torch.equal(codec.read(cache, slots).k, cells.k)
    assert torch.equal(codec.read(cache, slots).v, cells.v)
    assert bool((codec.read(cache, torch.tensor([4, 38])).k == 0x7F).all())


def test_k8v8_is_e4m3_of_the_quotient() -> None:
    """A byte is the nearest E4M3 of K over scale times factor; the largest is 448."""
    key, value = vectors(4)
    k, v = CODECS["k8v8"].decode(CODECS["k8v8"].encode(key, value, V_SCALE), V_SCALE)
    assert float(k[0, 0, 0]) == 448 * K_SCALE * FACTORS[0]
    assert float(v[0, 1, 2]) == -448 * V_SCALE * FACTORS[1]
    assert math.isnan(float(k[1, 2, 3]))
    assert math.isnan(float(v[1, 0, 1]))
    fits = key.float().abs() <= 448 * K_SCALE * torch.tensor(FACTORS)[:, None]
    error = (k - key.float()).abs()[fits]
    assert bool((error <= key.float().abs()[fits] / 16 + K_SCALE * 3 * 2**-9).all())


def test_inline_scales_follow_their_vector() -> None:
    """The largest magnitude is kept up to rounding, and the scale of a zero vector is 1."""
    key, value = vectors(4)
    codec = formats.K8V8Inline()
    cells = codec.encode(key, value, V_SCALE)
    k, _ = codec.decode(cells, V_SCALE)
    assert float(k[0, 0, 0]) == pytest.approx(float(key[0, 0, 0]), rel=1e-6)
    assert bool((cells.k[2, :, -4:].contiguous().view(torch.float32) == 1).all())
    assert bool((k[2] == 0).all())
    assert math.isnan(float(k[1, 2, 3]))
    assert bool(torch.isfinite(k[1, 2, 4:]).all())
    assert cells.k.shape[-1] == SIZE + 4
    assert formats.cell_bytes(codec, SIZE) == 2 * SIZE + 8


def test_wrong_factors_and_caches_are_refused() -> None:
    """Each is one line."""
    key, value = vectors(3)
    with pytest.raises(FormatError, match="found 2 head factors, expected 3"):
        formats.K8V8(k_factors=(1.0, 2.0)).encode(key, value, 1.0)
    with pytest.raises(FormatError, match="expected uint8"):
        formats.K8V8Inline().read(torch.zeros(2, 3, 4, 40), torch.tensor([0]))
    with pytest.raises(FormatError, match="found format 'k4', expected one of k16v16"):
        Exemplar("k4")


@pytest.mark.parametrize("mode", ["split", "kv-splits", "cascade"])
def test_parts_merge_to_the_whole(mode: str) -> None:
    """Attention in parts is attention in one, to float32 rounding, with a window and without."""
    key, value = vectors(24, seed=3)
    key, value = key.nan_to_num(nan=0.0) / 40, value.nan_to_num(nan=0.0)
    query = torch.randn(7, 2 * HEADS, SIZE, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    table = torch.tensor([[1, 2, 4], [1, 3, 0]])
    slots = torch.tensor([*range(8, 24), *range(32, 40)])
    found = []
    for name in ("whole", mode):
        made = Exemplar("k16v16", mode=name, splits=4)  # type: ignore[arg-type]  # one of its modes
        cache = empty("k16v16")
        made.write(key, value, cache, slots)
        made.write(key[:4] + 1, value[:4] + 1, cache, torch.tensor([24, 25, 26, 27]))
        output = torch.full((8, 2 * HEADS, SIZE), math.nan)
        lengths, starts = torch.tensor([24, 12]), torch.tensor([0, 5, 7])
        made.attend(query, cache, table, lengths, starts, scale=0.25, output=output)
        found.append(output)
    assert bool(torch.isfinite(found[0]).all())
    assert bool((found[0][7:] == 0).all())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-4)


def test_two_parts_that_see_nothing_merge_to_zero() -> None:
    """Two states of log-sum-exp minus infinity are no NaN."""
    made = for_format("k16v16")
    nothing = torch.zeros(2, 3, 4), torch.full((2, 3), -math.inf)
    assert bool((made.merge([nothing[0]] * 2, [nothing[1]] * 2) == 0).all())
