"""The laws of ``write`` and ``attend``: what a paged cache and attention over it must do, for both backends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_kvqual.errors import FormatError
from pytest_kvqual.kv import formats
from pytest_kvqual.kv.backends import k16v8, reference
from pytest_kvqual.kv.geometry import NAMED, Geometry

BACKENDS: dict[str, tuple[ModuleType, formats.Format]] = {
    "reference": (reference, formats.K16V16()),
    "k16v8": (k16v8, formats.K16V8()),
}
SCALE = 0.0375
FAST = settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])

# Pairwise different head count, group and block size; blocks below, at and above the size of one batched item.
GEOMETRIES = (
    Geometry(query_heads=6, kv_heads=2, head_size=32, block_size=16),
    Geometry(query_heads=28, kv_heads=4, head_size=16, block_size=8),
    Geometry(query_heads=9, kv_heads=3, head_size=64, block_size=128),
    Geometry(query_heads=2, kv_heads=2, head_size=8, block_size=160),
    Geometry(query_heads=5, kv_heads=1, head_size=24, block_size=48),
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One torch thread: the tensors are small, and idle torch threads spin on the cores of other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Inputs of one request: ``key`` and ``value`` of all its positions, ``query`` of its last rows."""

    key: torch.Tensor
    value: torch.Tensor
    query: torch.Tensor

    @property
    def length(self) -> int:
        return int(self.key.shape[0])

    @property
    def rows(self) -> int:
        return int(self.query.shape[0])


def make_request(geometry: Geometry, length: int, rows: int, seed: int, dtype: torch.dtype) -> Request:
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int, heads: int, size: float = 1.0) -> torch.Tensor:
        return (torch.randn(count, heads, geometry.head_size, generator=generator) * size).to(dtype)

    # Scores of a standard deviation of about 3: sharper than random, so that a lost key is seen.
    return Request(
        key=normal(length, geometry.kv_heads, 2.0),
        value=normal(length, geometry.kv_heads),
        query=normal(rows, geometry.query_heads, 1.5),
    )


def empty_cache(
    geometry: Geometry, blocks: int, fmt: formats.Format, fill: float, dtype: torch.dtype, gap: int = 0
) -> torch.Tensor:
    """A cache whose every K and V reads as ``fill``; ``gap`` > 0 leaves bytes between blocks and between heads."""
    width = (fmt.k_bytes + fmt.v_bytes) * geometry.head_size
    tile = geometry.block_size * width
    storage = torch.empty(blocks * (geometry.kv_heads * (tile + gap) + gap), dtype=torch.uint8)
    cache = storage.as_strided(
        (blocks, geometry.kv_heads, geometry.block_size, width),
        (geometry.kv_heads * (tile + gap) + gap, tile + gap, width, 1),
    )
    filling = torch.full((1, 1, geometry.head_size), fill, dtype=dtype)
    cells = fmt.encode(filling, filling, 1.0)
    cache.copy_(torch.cat([cells.k, cells.v], dim=-1).view(1, 1, 1, width).expand(cache.shape))
    return cache if fmt.v_bytes == 1 else cache.view(dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step over a cache: all K and V are written, and the arguments of ``attend`` are ready."""

    cache: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    query: torch.Tensor
    slots: tuple[torch.Tensor, ...]


def make_step(
    name: str,
    geometry: Geometry,
    requests: list[Request],
    *,
    seed: int = 0,
    fill: float = 0.0,
    gap: int = 0,
    padding: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Step:
    module, _ = BACKENDS[name]
    fmt = formats.declared(BACKENDS[name][1].name, dtype=dtype)
    size = geometry.block_size
    counts = [-(-request.length // size) for request in requests]
    blocks = sum(counts) + 3
    cache = empty_cache(geometry, blocks, fmt, fill, dtype, gap)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))
    # A stale tail: entries behind a request's last block name no block of the cache.
    table = torch.full((len(requests), max(counts) + 2), 2**30, dtype=torch.int32)
    slots = []
    for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
        table[row, :count], order = order[:count].int(), order[count:]
        position = torch.arange(request.length)
        slots.append(table[row].long()[position // size] * size + position % size)
        module.write(request.key, request.value, cache, slots[-1], k_scale=1.0, v_scale=SCALE)
    query = torch.cat([request.query for request in requests])
    if padding:
        query = torch.cat([query, torch.full((padding, *query.shape[1:]), math.nan, dtype=dtype)])
    starts = torch.tensor([0, *(request.rows for request in requests)]).cumsum(0).int()
    lengths = torch.tensor([request.length for request in requests], dtype=torch.int32)
    return Step(cache=cache, table=table, lengths=lengths, starts=starts, query=query, slots=tuple(slots))


def attend(name: str, step: Step) -> torch.Tensor:
    output: torch.Tensor = torch.full_like(step.query, math.nan)
    returned: torch.Tensor = BACKENDS[name][0].attend(
        step.query,
        step.cache,
        step.table,
        step.lengths,
        step.starts,
        scale=step.query.shape[-1] ** -0.5,
        v_scale=SCALE,
        output=output,
    )
    assert returned is output
    return returned


def exact(name: str, geometry: Geometry, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 over the declared cells, and the largest error that the arithmetic may have.

    The bound, with u = 2**-8 (bfloat16) or 2**-11 (float16), e = 2**-24, v the largest visible |V| of the head:

    * the output is rounded to 16 bits: u * v;
    * more than one row: the fused kernel rounds the weights (u * v) and its own output (u * v, twice where an earlier
      and an own part are merged, whose weights sum to one, and once more for the scale): 3 u * v in all;
    * float32: a score errs by at most d = (D + 4) e * scale * sum |q||k|, a weight by the factor exp(2 d), and L + 16
      operations follow: (exp(2 d) - 1 + (L + 16) e) * 2 v.
    """
    _, plain = BACKENDS[name]
    dtype = request.key.dtype
    fmt = formats.declared(plain.name, dtype=dtype)
    key, value = fmt.decode(fmt.encode(request.key, request.value, SCALE), SCALE)
    k = key.double().repeat_interleave(geometry.group, dim=1)
    v = value.double().repeat_interleave(geometry.group, dim=1)
    q = request.query.double()
    scale = geometry.head_size**-0.5
    scores = torch.einsum("qhd,lhd->hql", q, k) * scale
    visible = torch.ones(request.rows, request.length, dtype=torch.bool).tril(request.length - request.rows)
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    result = torch.einsum("hql,lhd->qhd", weights, v)
    size = torch.einsum("qhd,lhd->hql", q.abs(), k.abs()).amax(-1) * scale  # [Hq, rows]
    u = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    e = 2.0**-24
    d = (geometry.head_size + 4) * e * size
    rounding = u if request.rows == 1 else 4 * u
    relative = rounding * (1 + 4 * u) + 2 * (torch.expm1(2 * d) + (request.length + 16) * e)
    bound = relative * v.abs().amax(dim=(0, 2))[:, None]  # [Hq, rows]
    return result, bound.T[:, :, None]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Geometry, list[Request], torch.dtype]:
    """Ragged requests: lengths at and around block multiples; one query row, some, or all of them."""
    geometry = draw(st.sampled_from(GEOMETRIES))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    block = geometry.block_size
    edges = [max(1, n * block + o) for n in (0, 1, 2, 3) for o in (-1, 0, 1)]
    lengths = draw(st.lists(st.one_of(st.sampled_from(edges), st.integers(1, 3 * block + 20)), min_size=1, max_size=6))
    requests = []
    for seed, length in enumerate(lengths):
        rows = draw(st.one_of(st.just(1), st.just(length), st.integers(1, length)))
        requests.append(make_request(geometry, length, rows, seed, dtype))
    return geometry, requests, dtype


BOTH = pytest.mark.parametrize("name", BACKENDS)


@BOTH
@FAST
@given(case=cases(), seed=st.integers(0, 100), gap=st.sampled_from([0, 2, 64]))
def test_cells_hold_the_declared_bytes(
    name: str, case: tuple[Geometry, list[Request], torch.dtype], seed: int, gap: int
) -> None:
    """Every written cell holds exactly the declared bytes, and no other byte of the cache changes."""
    geometry, requests, dtype = case
    fmt = formats.declared(BACKENDS[name][1].name, dtype=dtype)
    step = make_step(name, geometry, requests, seed=seed, gap=gap, fill=3.0, dtype=dtype)
    for request, slots in zip(requests, step.slots, strict=True):
        k_bad, v_bad = fmt.read(step.cache, slots).unequal(fmt.encode(request.key, request.value, SCALE))
        assert not bool(k_bad.any())
        assert not bool(v_bad.any())
    untouched = torch.ones(step.cache.shape[0] * geometry.block_size, dtype=torch.bool)
    untouched[torch.cat(step.slots)] = False
    rest = untouched.nonzero().flatten()
    filling = torch.full((rest.numel(), geometry.kv_heads, geometry.head_size), 3.0, dtype=dtype)
    k_bad, v_bad = fmt.read(step.cache, rest).unequal(fmt.encode(filling, filling, 1.0))
    assert not bool(k_bad.any())
    assert not bool(v_bad.any())


@BOTH
def test_every_bit_pattern_is_written(name: str) -> None:
    """All 65,536 bit patterns of K and V, NaN and infinities among them, give the declared bytes."""
    module, fmt = BACKENDS[name]
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(512, 2, 64)
    width = (fmt.k_bytes + fmt.v_bytes) * 64
    cache = torch.zeros(33, 2, 16, width, dtype=torch.uint8)
    slots = torch.arange(512) + 16
    module.write(bits, bits, cache, slots, k_scale=1.0, v_scale=SCALE)
    k_bad, v_bad = fmt.read(cache, slots).unequal(fmt.encode(bits, bits, SCALE))
    assert not bool(k_bad.any())
    assert not bool(v_bad.any())


@BOTH
@FAST
@given(data=st.data(), rows=st.integers(1, 40), extra=st.integers(0, 3))
def test_slot_minus_one_is_skipped(name: str, data: st.DataObject, rows: int, extra: int) -> None:
    """Rows with slot -1, and rows behind the slot mapping, write nothing; the others write as they would alone."""
    module, fmt = BACKENDS[name]
    geometry = GEOMETRIES[0]
    request = make_request(geometry, rows + extra, 1, rows, torch.bfloat16)
    kept = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    slots = torch.where(kept, torch.randperm(64)[:rows], -1)
    left = empty_cache(geometry, 4, fmt, 1.0, torch.bfloat16)
    right = left.clone()
    module.write(request.key, request.value, left, slots, k_scale=1.0, v_scale=SCALE)
    index = kept.nonzero().flatten()
    module.write(request.key[index], request.value[index], right, slots[index], k_scale=1.0, v_scale=SCALE)
    assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@BOTH
@FAST
@given(case=cases(), seed=st.integers(0, 100), gap=st.sampled_from([0, 2, 64]), padding=st.integers(0, 3))
def test_attention_is_exact_within_the_derived_bound(
    name: str, case: tuple[Geometry, list[Request], torch.dtype], seed: int, gap: int, padding: int
) -> None:
    """Each row is the float64 attention of its request and position within the derived bound; padding rows are 0."""
    geometry, requests, dtype = case
    step = make_step(name, geometry, requests, seed=seed, gap=gap, padding=padding, dtype=dtype, fill=math.nan)
    output = attend(name, step)
    for request, first in zip(requests, step.starts.tolist(), strict=False):
        wanted, bound = exact(name, geometry, request)
        error = (output[first : first + request.rows].double() - wanted).abs()
        assert bool((error <= bound).all()), f"{float((error / bound).max())} of the bound"
    assert bool((output[int(step.starts[-1]) :] == 0).all())


@BOTH
@FAST
@given(case=cases(), seed=st.integers(0, 100), fill=st.sampled_from([math.nan, 1e4, -1e4]))
def test_unwritten_cells_do_not_reach_the_output(
    name: str, case: tuple[Geometry, list[Request], torch.dtype], seed: int, fill: float
) -> None:
    """The output is bitwise the same whatever the unwritten cells hold."""
    geometry, requests, dtype = case
    clean = attend(name, make_step(name, geometry, requests, seed=seed, dtype=dtype))
    filled = attend(name, make_step(name, geometry, requests, seed=seed, fill=fill, dtype=dtype))
    assert torch.equal(clean.view(torch.int16), filled.view(torch.int16))


@BOTH
@FAST
@given(case=cases(), seed=st.integers(0, 100), data=st.data())
def test_permuting_requests_permutes_outputs(
    name: str, case: tuple[Geometry, list[Request], torch.dtype], seed: int, data: st.DataObject
) -> None:
    """A request's rows are bitwise the same in every batch order and in every physical placement of its blocks."""
    geometry, requests, dtype = case
    order = data.draw(st.permutations(range(len(requests))))
    step = make_step(name, geometry, requests, seed=seed, dtype=dtype)
    other = make_step(name, geometry, [requests[i] for i in order], seed=seed + 1, dtype=dtype)
    left, right = attend(name, step), attend(name, other)
    for place, index in enumerate(order):
        rows = requests[index].rows
        mine = left[int(step.starts[index]) :][:rows]
        theirs = right[int(other.starts[place]) :][:rows]
        assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))


@BOTH
@FAST
@given(case=cases(), seed=st.integers(0, 100))
def test_a_request_is_answered_as_if_alone(
    name: str, case: tuple[Geometry, list[Request], torch.dtype], seed: int
) -> None:
    """A request's rows are bitwise the same whatever else is in the batch."""
    geometry, requests, dtype = case
    step = make_step(name, geometry, requests, seed=seed, dtype=dtype)
    together = attend(name, step)
    for index, request in enumerate(requests):
        alone = attend(name, make_step(name, geometry, [request], seed=seed, dtype=dtype))
        mine = together[int(step.starts[index]) :][: request.rows]
        assert torch.equal(mine.view(torch.int16), alone.view(torch.int16))


@BOTH
@pytest.mark.parametrize("geometry", NAMED.values(), ids=NAMED)
def test_named_geometries(name: str, geometry: Geometry) -> None:
    """The named geometries are exact within the bound over lengths of several items, decode and prefill mixed."""
    lengths = [(1, 1), (127, 1), (128, 1), (129, 1), (255, 1), (257, 1), (600, 1), (300, 300), (300, 44), (40, 2)]
    requests = [make_request(geometry, length, rows, rows, torch.bfloat16) for length, rows in lengths]
    step = make_step(name, geometry, requests, fill=math.nan)
    output = attend(name, step)
    for request, first in zip(requests, step.starts.tolist(), strict=False):
        wanted, bound = exact(name, geometry, request)
        error = (output[first : first + request.rows].double() - wanted).abs()
        assert bool((error <= bound).all())


@BOTH
def test_two_threads_give_the_same_bits(name: str) -> None:
    """The output is bitwise the same with one thread and with two, over more items than are gathered at a time."""
    geometry = NAMED["smollm2"]
    sizes = [(1000 + 17 * row, 1) for row in range(8)] + [(300, 300), (500, 100)]
    requests = [make_request(geometry, length, rows, length, torch.bfloat16) for length, rows in sizes]
    step = make_step(name, geometry, requests)
    one = attend(name, step)
    torch.set_num_threads(2)
    two = attend(name, step)
    torch.set_num_threads(1)
    assert torch.equal(one.view(torch.int16), two.view(torch.int16))


@BOTH
@pytest.mark.parametrize("rows", [1, 5])
def test_a_key_that_is_written_as_nan_is_seen(name: str, rows: int) -> None:
    """A NaN in a visible cell reaches the rows that see it: clearing the unwritten cells hides nothing."""
    geometry = GEOMETRIES[0]
    for part in ("key", "value"):
        request = make_request(geometry, 40, rows, 0, torch.bfloat16)
        getattr(request, part)[7, 1, 3] = math.nan
        output = attend(name, make_step(name, geometry, [request]))
        own = slice(geometry.group, 2 * geometry.group)
        assert bool(output[:, own].isnan().any(dim=-1).all())
        assert not bool(output[:, : geometry.group].isnan().any())


@BOTH
def test_requests_without_rows_are_left_out(name: str) -> None:
    """A request without query rows, of any length, takes part in nothing."""
    geometry = GEOMETRIES[0]
    requests = [make_request(geometry, length, 1, length, torch.bfloat16) for length in (5, 40)]
    step = make_step(name, geometry, requests)
    wanted = attend(name, step)
    wider = Step(
        cache=step.cache,
        table=torch.cat([step.table[:1], torch.full_like(step.table[:1], -1), step.table[1:]]),
        lengths=torch.tensor([5, 0, 40], dtype=torch.int32),
        starts=torch.tensor([0, 1, 1, 2], dtype=torch.int32),
        query=step.query,
        slots=(),
    )
    assert torch.equal(attend(name, wider), wanted)


@BOTH
def test_a_cache_of_another_cell_size_is_refused(name: str) -> None:
    """A cache whose cells have not the backend's size is refused by write and by attend."""
    geometry = GEOMETRIES[0]
    step = make_step(name, geometry, [make_request(geometry, 5, 1, 0, torch.bfloat16)])
    narrow = step.cache[..., :-8]
    with pytest.raises(FormatError, match="dense bytes"):
        BACKENDS[name][0].write(step.query[:, :2], step.query[:, :2], narrow, torch.tensor([0]))
    with pytest.raises(FormatError, match="dense bytes"):
        attend(
            name,
            Step(cache=narrow, table=step.table, lengths=step.lengths, starts=step.starts, query=step.query, slots=()),
        )


@BOTH
def test_more_rows_than_positions_are_refused(name: str) -> None:
    """A request with more query rows than positions is refused."""
    geometry = GEOMETRIES[0]
    step = make_step(name, geometry, [make_request(geometry, 5, 3, 0, torch.bfloat16)])
    short = Step(
        cache=step.cache, table=step.table, lengths=step.lengths - 3, starts=step.starts, query=step.query, slots=()
    )
    with pytest.raises(FormatError, match="more query rows than positions"):
        attend(name, short)


@pytest.mark.parametrize("size", [4, 64])
def test_the_two_e4m3_read_paths_agree(size: int) -> None:
    """The path with bit moves and the path with the cast give the same values for every byte but NaN."""
    raw = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    raw = raw.repeat(size)
    moved, cast = torch.empty(raw.shape), torch.empty(raw.numel() + 1)
    k16v8.E4M3().load(raw, moved, torch.bfloat16)
    k16v8.E4M3().load(torch.cat([raw, torch.tensor([0x7F], dtype=torch.uint8)]), cast, torch.bfloat16)
    assert torch.equal(moved, cast[:-1])
    assert bool(cast[-1].isnan())
    assert torch.equal(moved * 256, formats.e4m3_values()[raw.long()])
