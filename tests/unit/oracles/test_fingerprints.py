"""Fingerprints: keys and values that say whose they are, and queries that look at boundaries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvqual.kv import formats
from pytest_kvqual.oracles import fingerprints, placement
from pytest_kvqual.oracles.placement import attention, error_ratios

# Query heads, KV heads, head size: all sizes differ pairwise.
GEOMETRIES = [(9, 3, 64), (8, 2, 32), (5, 1, 128), (4, 4, 48)]
UNIT = placement.unit(torch.bfloat16)


def _keys_values(
    length: int,
    *,
    owner: int = 1,
    layer: int = 0,
    heads: int = 3,
    size: int = 64,
    v_scale: float = 0.01,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(first, first + length)
    return fingerprints.keys_values(
        torch.full_like(positions, owner),
        positions,
        layer=layer,
        heads=heads,
        size=size,
        v_scale=v_scale,
        dtype=torch.bfloat16,
    )


# -- K and V -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(0, 5000), st.integers(0, 40), st.sampled_from([32, 64, 80, 128]))
def test_a_fingerprint_depends_on_its_row_alone(owner: int, position: int, layer: int, size: int) -> None:
    """K and V of a row are the same alone and among others: a prefix that is computed again gives the same bytes."""
    whole = _keys_values(3, owner=owner, first=position, layer=layer, size=size)
    alone = _keys_values(1, owner=owner, first=position + 1, layer=layer, size=size)
    for many, one in zip(whole, alone, strict=True):
        assert many.shape == (3, 3, size)
        assert many.dtype == torch.bfloat16
        assert torch.equal(many[1], one[0])


@pytest.mark.parametrize("size", [32, 63, 64, 80, 128, 200])
def test_fingerprints_are_pairwise_different(size: int) -> None:
    """No two of (layer, request, position, KV head) share a K or a V, and no K is a V of the same place."""
    keys, values = [], []
    for layer in range(3):
        for owner in range(4):
            key, value = _keys_values(40, owner=owner, layer=layer, size=size)
            keys.append(key.flatten(0, 1))
            values.append(value.flatten(0, 1))
    for every in (torch.cat(keys), torch.cat(values)):
        assert torch.unique(every.float(), dim=0).shape[0] == every.shape[0] == 3 * 4 * 40 * 3
    assert not bool((torch.cat(keys).sign() == torch.cat(values).sign()).all(dim=1).any())


def test_keys_are_signs_and_nearly_orthogonal() -> None:
    """K is +-1, balanced, and any two have a small product: a query finds its target and nothing else."""
    key = _keys_values(200, heads=1, size=128)[0][:, 0].float()
    assert bool((key.abs() == 1).all())
    assert abs(float(key.mean())) < 0.02
    assert bool((key.mean(0).abs() < 0.35).all())
    products = key @ key.T / 128
    products.fill_diagonal_(0)
    assert float(products.abs().max()) < 0.5
    assert abs(float(products.square().mean()) * 128 - 1) < 0.1


@pytest.mark.parametrize(("v_scale", "amplitude"), [(0.0137, 64 * 0.0137), (1.0, 1.0), (2.0, 128.0)])
def test_values_have_eight_magnitudes_in_the_middle_of_the_range(v_scale: float, amplitude: float) -> None:
    """|V| is one of eight magnitudes of the amplitude, one per (request, position, head); all occur."""
    value = _keys_values(160, v_scale=v_scale)[1].float()[..., 1:].abs() / amplitude
    assert bool(((value - value[..., :1]).abs() <= 0.01).all())
    magnitudes = (value[..., 0].flatten() * 8 - 8).round()
    assert sorted(set(magnitudes.tolist())) == list(range(8))
    assert torch.allclose(value, (1 + magnitudes.view(160, 3, 1) / 8).expand_as(value), rtol=2**-8)


@pytest.mark.parametrize("v_scale", [0.0137, 1.0])
def test_every_sixteenth_position_is_beyond_the_range(v_scale: float) -> None:
    """At positions 15, 31, ... the first element of V is beyond 448 scales in every head, in turn on each side."""
    key, value = _keys_values(48, v_scale=v_scale)
    beyond = value.float()[:, :, 0].abs() / v_scale > 448
    assert (value.float()[[15, 31, 47], 0, 0] > 0).tolist() == [False, True, False]
    assert beyond.all(dim=1).nonzero().flatten().tolist() == [15, 31, 47]
    assert bool((beyond.any(dim=1) == beyond.all(dim=1)).all())
    assert not bool((value.float()[:, :, 1:].abs() / v_scale > 448).any())
    assert formats.K16V8().encode(key, value, v_scale).v[31, :, 0].tolist() == [0x7E] * 3


# -- targets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "block_size", "chunks", "expected"),
    [
        (1, 4, (), [0]),
        (4, 4, (), [0, 1, 3]),
        (5, 4, (), [0, 1, 3, 4]),
        (6, 4, (), [0, 1, 3, 4, 5]),
        (14, 4, (), [0, 1, 3, 4, 5, 7, 8, 9, 11, 12, 13]),
        (14, 8, (0,), [0, 1, 7, 8, 9]),
        (14, 8, (5,), [0, 1, 4, 5, 7, 8, 9]),
        (14, 8, (5, 12), [0, 1, 4, 5, 7, 8, 9, 11, 12]),
        (3, 1, (), [0, 1, 2]),
        (0, 4, (), []),
    ],
)
def test_boundaries(length: int, block_size: int, chunks: tuple[int, ...], expected: list[int]) -> None:
    """Beside every block multiple and every chunk's start, below the length, ascending and once."""
    assert fingerprints.boundaries(length, block_size, chunks).tolist() == expected


def _aims(
    length: int, start: int, *, block_size: int, query_heads: int, layer: int, window: int | None
) -> torch.Tensor:
    return fingerprints.targets(
        torch.arange(start, length),
        fingerprints.boundaries(length, block_size, (start,)),
        query_heads=query_heads,
        layer=layer,
        window=window,
    )


SHAPES = st.tuples(
    st.integers(1, 150), st.integers(2, 33), st.sampled_from([4, 5, 8, 9]), st.one_of(st.none(), st.integers(1, 60))
)


@given(SHAPES, st.integers(0, 40), st.integers(0, 149))
def test_targets_are_in_sight_or_just_beside_it(
    shape: tuple[int, int, int, int | None], layer: int, start: int
) -> None:
    """Each target is seen by its row, or is the one position before its sight or behind it, and exists."""
    length, block_size, query_heads, window = shape
    start = min(start, length - 1)
    found = _aims(length, start, block_size=block_size, query_heads=query_heads, layer=layer, window=window)
    positions = torch.arange(start, length)[:, None]
    first = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0)
    assert found.shape == (length - start, query_heads)
    assert bool((found >= (first - 1).clamp(min=0)).all())
    assert bool((found <= (positions + 1).clamp(max=length - 1)).all())
    assert torch.equal(found[:, layer % query_heads], positions[:, 0])
    beside = torch.cat([positions, (positions - 1).clamp(min=0), first, first - 1, positions + 1], dim=1)
    listed = fingerprints.boundaries(length, block_size, (start,))
    assert bool(((found[..., None] == beside[:, None]).any(-1) | torch.isin(found, listed)).all())


@settings(max_examples=25, deadline=None)
@given(SHAPES)
def test_every_boundary_in_sight_is_a_target(shape: tuple[int, int, int, int | None]) -> None:
    """Over layers and a run of decoded rows every boundary in sight is looked at, and its edges are."""
    length, block_size, query_heads, window = shape
    candidates = fingerprints.boundaries(length, block_size)
    layers = 4
    rows = 8 * (candidates.numel() + 5) // (query_heads - 1) // layers + 8
    hit: set[int] = set()
    beside = {"own": 0, "before": 0, "first": 0, "outside": 0}
    for row in range(length, length + rows):
        aims: set[int] = set()
        for layer in range(layers):
            aims |= set(
                _aims(row + 1, row, block_size=block_size, query_heads=query_heads, layer=layer, window=window)
                .flatten()
                .tolist()
            )
        first = 0 if window is None else max(0, row - window + 1)
        hit |= aims
        beside["own"] += row in aims
        beside["before"] += max(row - 1, first) in aims
        beside["first"] += first in aims
        beside["outside"] += first - 1 in aims
    seen = 0 if window is None else max(0, length + rows - window)
    assert {int(at) for at in candidates if at >= seen} <= hit
    assert beside["own"] == rows
    assert beside["before"] > 0
    assert beside["first"] > 0
    assert beside["outside"] > 0 or seen == 0


@settings(max_examples=25)
@given(st.integers(2, 120), st.integers(2, 33), st.sampled_from([4, 5, 8, 9]))
def test_every_boundary_of_a_prompt_is_a_target_of_another_row(length: int, block_size: int, query_heads: int) -> None:
    """Within one prompt each boundary, but for those of the last rows, is looked at by a row behind it."""
    hit: set[int] = set()
    ahead: set[int] = set()
    positions = torch.arange(length)[:, None]
    for layer in range(4):
        found = _aims(length, 0, block_size=block_size, query_heads=query_heads, layer=layer, window=None)
        hit |= set(found[found < positions].tolist())
        ahead |= set(found[found > positions].tolist())
    early = fingerprints.boundaries(max(1, length - 24), block_size)
    assert {int(at) for at in early} <= hit
    assert length < 12 or ahead


def test_targets_of_nothing_are_none() -> None:
    """No rows have no targets; without candidates a row looks beside itself."""
    empty = torch.empty(0, dtype=torch.int64)
    assert fingerprints.targets(empty, torch.tensor([0]), query_heads=4, layer=1, window=None).shape == (0, 4)
    found = fingerprints.targets(torch.tensor([5, 6]), empty, query_heads=5, layer=0, window=3)
    assert sorted(set(found.flatten().tolist()) - {5, 6}) == [2, 3, 4]


def test_rows_spread_over_choices_that_grow_with_them() -> None:
    """Each row has one candidate more than the one before: the walk does not stand still."""
    hit: set[int] = set()
    for row in range(100, 140):
        found = fingerprints.targets(torch.tensor([row]), torch.arange(row), query_heads=9, layer=0, window=None)
        hit |= set(found[0, 1:].tolist())
    assert len(hit & set(range(100))) > 90


# -- queries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("query_heads", "kv_heads", "size"), GEOMETRIES)
@pytest.mark.parametrize("scale", [0.125, 0.3])
def test_a_query_scores_its_target(query_heads: int, kv_heads: int, size: int, scale: float) -> None:
    """The score of the target is 16 in every head, over the K of the head's own group."""
    keys = _keys_values(30, heads=kv_heads, size=size)[0].float()
    at = torch.randint(0, 30, (7, query_heads), generator=torch.Generator().manual_seed(1))
    query = fingerprints.spikes(keys, at, softmax_scale=scale, dtype=torch.bfloat16)
    assert query.shape == (7, query_heads, size)
    assert query.dtype == torch.bfloat16
    for row in range(7):
        for head in range(query_heads):
            scores = keys[:, head // (query_heads // kv_heads)] @ query[row, head].float() * scale
            assert abs(float(scores[at[row, head]]) - 16) < 0.1
            assert int(scores.argmax()) == int(at[row, head])


def test_a_key_of_zero_makes_a_query_of_zero() -> None:
    """A stored K that is zero gives no infinity."""
    query = fingerprints.spikes(torch.zeros(2, 1, 8), torch.tensor([[0, 1]]), softmax_scale=1.0, dtype=torch.bfloat16)
    assert float(query.abs().max()) == 0.0


@settings(max_examples=30)
@given(
    st.integers(2, 90),
    st.sampled_from([2, 7, 16, 31]),
    st.sampled_from(GEOMETRIES),
    st.one_of(st.none(), st.integers(2, 50)),
    st.sampled_from(["k16v16", "k16v8"]),
    st.integers(0, 3),
)
def test_dropping_a_target_or_reading_one_too_many_moves_the_row(
    length: int, block_size: int, geometry: tuple[int, int, int], window: int | None, kv_format: str, layer: int
) -> None:
    """A decoded row that misses any target in its sight, or reads a target just out of it, is beyond tolerance."""
    query_heads, kv_heads, size = geometry
    scale, v_scale = size**-0.5, 1.0 if kv_format == "k16v16" else 0.0137
    codec = formats.declared(kv_format)
    made = _keys_values(length + 1, layer=layer, heads=kv_heads, size=size, v_scale=v_scale)
    keys, values = codec.decode(codec.encode(*made, v_scale), v_scale)
    row = length - 1
    first = 0 if window is None else max(0, row - window + 1)
    # Two rows, of which the last but one is looked at: it knows the position behind it.
    at = fingerprints.targets(
        torch.tensor([row, row + 1]),
        fingerprints.boundaries(length + 1, block_size),
        query_heads=query_heads,
        layer=layer,
        window=window,
    )[:1]
    query = fingerprints.spikes(keys, at, softmax_scale=scale, dtype=torch.bfloat16)

    def out(seen: list[int]) -> torch.Tensor:
        part = attention(query, keys[seen], values[seen], start=len(seen) - 1, scale=scale, rounding=UNIT)
        return part.output.to(torch.bfloat16)

    whole = attention(query, keys[:length], values[:length], start=row, scale=scale, rounding=UNIT, window=window)
    seen = list(range(first, length))
    assert bool((error_ratios(out(seen), whole) <= 1).all())
    for target in sorted(set(at.flatten().tolist())):
        if target in seen and len(seen) > 1:
            other = [position for position in seen if position != target]
        elif target not in seen:
            other = sorted({*seen, target})
        else:
            continue
        assert not bool((error_ratios(out(other), whole) <= 1).all()), target
