"""Where a wrong value belongs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.oracles.whereabouts import Holding, belongs, distance

HEADS = 3


def _holding(name: str, first: int, slots: list[int], *, v_bytes: int = 4) -> Holding:
    count = len(slots)
    k = (torch.arange(count * HEADS).view(count, HEADS, 1) + first).expand(-1, -1, 4).to(torch.uint8)
    v = (torch.arange(count * HEADS).view(count, HEADS, 1) + first + 100).expand(-1, -1, v_bytes).to(torch.uint8)
    return Holding(request=name, k=k.clone(), v=v.clone(), slots=torch.tensor(slots))


A = _holding("a", 0, [20, 21, 22])
B = _holding("b", 30, [8, 9])


def test_a_value_is_found_where_it_belongs() -> None:
    """K of another request is named with its position and its slot, over the heads that differ only."""
    assert belongs(B.k[1], [A, B], what="K", heads=[0, 1, 2], slot=21) == ("K of request b position 1", 9)
    mixed = A.k[2].clone()
    mixed[0] = 255
    assert belongs(mixed, [A, B], what="K", heads=[1, 2], slot=21) == ("K of request a position 2", 22)
    assert belongs(mixed, [A, B], what="K", heads=[0], slot=21) is None


def test_v_in_the_place_of_k_is_found_where_the_sizes_agree() -> None:
    """The other one of K and V is looked up after the same one, and only where it has as many bytes."""
    assert belongs(A.v[1], [A, B], what="K", heads=[0, 1], slot=20) == ("V of request a position 1", 21)
    assert belongs(A.k[1], [A, B], what="V", heads=[0, 1], slot=20) == ("K of request a position 1", 21)
    narrow = _holding("n", 0, [4], v_bytes=2)
    assert belongs(torch.zeros(HEADS, 2, dtype=torch.uint8), [narrow], what="V", heads=[0], slot=4) is None


def test_the_same_of_k_and_v_comes_first() -> None:
    """A value that is somebody's K and somebody's V is looked up as what was asked for, however far."""
    twin = Holding(request="t", k=A.v.clone(), v=A.k.clone(), slots=torch.tensor([500, 501, 502]))
    assert belongs(A.v[1], [A, twin], what="V", heads=[0], slot=501) == ("V of request a position 1", 21)


def test_another_heads_value_names_that_head() -> None:
    """A value of the same request and position, but of another KV head, is named with the head."""
    found = A.k[1].clone()
    found[1] = A.k[1, 2]
    assert belongs(found, [B, A], what="K", heads=[1], slot=21) == ("K of request a position 1, KV head 2", 21)
    value = B.v[0].clone()
    value[0] = B.v[0, 1]
    assert belongs(value, [A, B], what="V", heads=[0], slot=8) == ("V of request b position 0, KV head 1", 8)


def test_of_several_homes_the_nearest_is_named() -> None:
    """One value at several positions: the home that is nearest to where it was found."""
    same = Holding(
        request="s", k=A.k[:1].expand(3, -1, -1), v=A.v[:1].expand(3, -1, -1), slots=torch.tensor([3, 40, 60])
    )
    for slot, home in ((5, 3), (39, 40), (41, 40), (59, 60)):
        found = belongs(A.k[0], [same], what="K", heads=[0, 1, 2], slot=slot)
        assert found is not None
        assert found[1] == home


def test_nowhere_and_nothing() -> None:
    """A value that nobody holds belongs nowhere, and so does any where nothing is held."""
    alien = torch.full((HEADS, 4), 250, dtype=torch.uint8)
    assert belongs(alien, [A, B], what="K", heads=[0], slot=1) is None
    assert belongs(alien, [], what="K", heads=[0], slot=1) is None
    empty = Holding(request="e", k=A.k[:0], v=A.v[:0], slots=A.slots[:0])
    assert belongs(alien, [empty], what="V", heads=[2], slot=1) is None


@pytest.mark.parametrize(
    ("found", "home", "expected"),
    [
        (21, 21, "in its own slot"),
        (22, 21, "one slot late"),
        (20, 21, "one slot early"),
        (23, 21, "2 slots late"),
        (18, 21, "3 slots early"),
        (25, 21, "one block late"),
        (17, 21, "one block early"),
        (29, 21, "2 blocks late"),
        (13, 21, "2 blocks early"),
        (26, 21, "home is block 5 offset 1"),
        (0, 21, "home is block 5 offset 1"),
    ],
)
def test_distances_in_words(found: int, home: int, expected: str) -> None:
    """Slots within a block, whole blocks, and the home itself where neither says it."""
    assert distance(found, home, 4) == expected


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 17))
def test_a_distance_says_which_way(found: int, home: int, block_size: int) -> None:
    """Late is behind the home slot and early before it, wherever a distance is given."""
    text = distance(found, home, block_size)
    assert ("late" in text) <= (found > home)
    assert ("early" in text) <= (found < home)
    assert ("own" in text) == (found == home)
