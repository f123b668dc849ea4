"""Fingerprints: K and V that say whose they are, and queries that look at one boundary position each.

With random data a key that is dropped at 400 positions moves the output by less than the rounding of an 8-bit cache. A
fingerprint pass replaces what the model computed:

- K of (request, position, KV head) is a vector of signs, nearly orthogonal to every other;
- V of (request, position, KV head) is a vector of signs times one of eight magnitudes, different for every triple; at
  every sixteenth position its first element is beyond the range of an 8-bit format, which must clamp it;
- the query of each (row, query head, layer) is the K of one earlier position times a factor that makes its score
  :data:`TARGET_SCORE`, so that the output is the V of that position. Over heads, layers and rows the targets go through
  every block boundary, the first position of the window, the row's own position and the one before it. Two lie just out
  of sight, the last position before the window and the one behind the row: a row that reads one too many finds its
  target there, and one that does not finds a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

TARGET_SCORE = 16.0
AHEAD_SCORE = 20.0
"""Score of the position behind a row's own, which a causal mask must keep from it."""

_BEYOND = 500.0
_BEYOND_EVERY = 16
_GOLDEN = -7046029254386353131  # 2^64 divided by the golden ratio, as int64
_WORD = 63  # sign bits taken of one hashed integer


def _hash(value: torch.Tensor) -> torch.Tensor:
    """A 64-bit mix of each element (the finaliser of splitmix64, Steele et al. 2014); int64 wraps around."""
    value = value + _GOLDEN
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


def _seeds(owners: torch.Tensor, positions: torch.Tensor, heads: int, salt: int) -> torch.Tensor:
    rows = _hash(_hash(owners + salt * 0x10001) ^ positions)
    return _hash(rows[:, None] ^ (torch.arange(heads) + 1)[None, :] * 0x5851F42D)


def _signs(seeds: torch.Tensor, size: int) -> torch.Tensor:
    words = [_hash(seeds + number) for number in range(-(-size // _WORD))]
    bits = torch.stack(words, dim=-1)[..., None] >> torch.arange(_WORD)
    return (bits.flatten(-2)[..., :size] & 1) * 2 - 1


def keys_values(
    owners: torch.Tensor,
    positions: torch.Tensor,
    *,
    layer: int,
    heads: int,
    size: int,
    v_scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of rows: ``[T, heads, size]`` each, of ``dtype``.

    Args:
        owners: int64 ``[T]``, a number for the request of each row.
        positions: int64 ``[T]``.
        layer: The layer's number.
        heads: KV heads.
        size: Head size.
        v_scale: The layer's V scale; V is in the middle of the range of a format that has one.
        dtype: The engine's 16-bit type.
    """
    key = _signs(_seeds(owners, positions, heads, 2 * layer), size)
    seeds = _seeds(owners, positions, heads, 2 * layer + 1)
    magnitude = 1 + ((_hash(seeds) >> 17) & 7) / 8
    amplitude = 1.0 if v_scale == 1.0 else 64.0 * v_scale
    value = _signs(seeds, size) * magnitude[..., None] * amplitude
    beyond = positions % _BEYOND_EVERY == _BEYOND_EVERY - 1
    # Of both signs: a cast can overflow on one side only.
    side = ((positions // _BEYOND_EVERY) % 2 * 2 - 1).to(value.dtype)
    value[beyond, :, 0] = (side * _BEYOND * v_scale)[beyond, None]
    return key.to(dtype), value.to(dtype)


def boundaries(length: int, block_size: int, chunks: Sequence[int] = ()) -> torch.Tensor:
    """Positions below ``length`` beside a block multiple or a chunk's start, and 0: int64, ascending."""
    multiples = torch.arange(0, length + 1, block_size)
    around = torch.cat([multiples - 1, multiples, multiples + 1, *(torch.tensor([c - 1, c]) for c in chunks)])
    found: torch.Tensor = torch.unique(around[(around >= 0) & (around < length)])
    return found


def targets(
    positions: torch.Tensor, candidates: torch.Tensor, *, query_heads: int, layer: int, window: int | None
) -> torch.Tensor:
    """The position that each (row, query head) looks at: int64 ``[n, query_heads]``.

    Each is within the row's sight, but for the two positions beside it; of these, one that is not below 0 nor above the
    last of ``positions``.

    Args:
        positions: int64 ``[n]``, the rows' own positions.
        candidates: int64, ascending: see :func:`boundaries`.
        query_heads: Query heads.
        layer: The layer's number.
        window: A row sees its last ``window`` positions; None for all.
    """
    if not positions.numel():
        return torch.empty(0, query_heads, dtype=torch.int64)
    first = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0)
    # Beside the candidates in sight: the row's own position, the one before it, the first that it sees, and the two
    # just out of sight; the own one where there is none.
    beside = torch.stack(
        [
            positions,
            torch.maximum(positions - 1, first),
            first,
            torch.where(first > 0, first - 1, positions),
            (positions + 1).clamp(max=int(positions.max())),
        ],
        dim=1,
    )
    low = torch.searchsorted(candidates, first)
    count = torch.searchsorted(candidates, positions, right=True) - low
    choices = (count + beside.shape[1])[:, None]
    # Successive rows begin at multiples of the golden ratio of all choices: any run of rows spreads evenly over them,
    # while their number grows too (Weyl; a fixed step stands still where it grows with the position).
    begin = (((positions * _GOLDEN) >> 33) & 0x7FFFFFFF)[:, None] * choices >> 31
    choice = (torch.arange(query_heads)[None, :] + query_heads * layer + begin) % choices
    extra = choice - count[:, None]
    found = beside.gather(1, extra.clamp(min=0))
    if candidates.numel():
        place = (low[:, None] + choice).clamp(max=candidates.numel() - 1)
        found = torch.where(extra < 0, candidates[place], found)
    # One head of each row looks at the row's own position: else two rows could look at the same positions in all heads.
    found[:, layer % query_heads] = positions
    return found


def spikes(keys: torch.Tensor, at: torch.Tensor, *, softmax_scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Queries that look at given positions: ``[n, Hq, D]`` of ``dtype``.

    Args:
        keys: float32 ``[L, Hkv, D]``, the request's K as the ledger holds it.
        at: int64 ``[n, Hq]``.
        softmax_scale: Factor of the scores.
        dtype: The engine's 16-bit type.
    """
    query_heads, kv_heads = at.shape[1], keys.shape[1]
    head = torch.arange(query_heads) // (query_heads // kv_heads)
    chosen = keys[at, head[None, :]]
    square = chosen.square().sum(dim=-1, keepdim=True)
    return (chosen * (TARGET_SCORE / softmax_scale) / square.clamp(min=1e-30)).to(dtype)


def ahead(
    keys: torch.Tensor, positions: torch.Tensor, *, query_heads: int, softmax_scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """What is added to each row's query so that the position behind its own would outweigh all others if it were seen.

    Args:
        keys: float32 ``[L, Hkv, D]``, the request's K as the ledger holds it.
        positions: int64 ``[n]``, the rows' own positions; the last of the request has none behind it and gets zero.
        query_heads: Query heads.
        softmax_scale: Factor of the scores.
        dtype: The engine's 16-bit type.

    Returns:
        ``[n, query_heads, D]`` of ``dtype``.
    """
    head = torch.arange(query_heads) // (query_heads // keys.shape[1])
    behind = (positions + 1).clamp(max=keys.shape[0] - 1)
    chosen = keys[behind[:, None], head[None, :]]
    square = chosen.square().sum(dim=-1, keepdim=True)
    added = chosen * (AHEAD_SCORE / softmax_scale) / square.clamp(min=1e-30)
    added[positions + 1 >= keys.shape[0]] = 0
    return added.to(dtype)
