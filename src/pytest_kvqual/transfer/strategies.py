"""Hypothesis strategies: geometries whose sizes differ, and scripts of a few requests around block multiples."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from pytest_kvqual.kv.geometry import Geometry
from pytest_kvqual.transfer.workload import Script

_MOST_REQUESTS = 4


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Small geometries: heads, group, head size and block size that need not divide one another."""
    kv_heads = draw(st.sampled_from((3, 1, 2, 4, 5)))
    group = draw(st.sampled_from((2, 1, 3, 7)))
    return Geometry(
        query_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_size=draw(st.sampled_from((16, 8, 24, 32))),
        block_size=draw(st.sampled_from((8, 4, 16, 12))),
    )


def lengths(block_size: int) -> st.SearchStrategy[int]:
    """Prompt lengths from 1 to 2b + 1, most of them beside a block multiple."""
    b = block_size
    edges = sorted({max(1, n) for n in (1, b - 1, b, b + 1, 2 * b - 1, 2 * b, 2 * b + 1)})
    return st.one_of(st.sampled_from(edges), st.integers(1, 2 * b + 1))


@st.composite
def scripts(draw: st.DrawFn, block_size: int, *, steps: int = 4) -> Script:
    """Requests that come, are computed whole or in chunks, decode in a new order each step, and leave.

    A later request may share the first block of an earlier one that has computed it, so that it hits its prefix. (Two
    that computed it apart would leave two fingerprints of one prefix.)
    """
    ops: list[tuple[Any, ...]] = []
    left: dict[str, int] = {}
    seeds: dict[str, int] = {}
    first_block: set[str] = set()

    def submit() -> str:
        name = f"r{len(seeds)}"
        length = draw(lengths(block_size))
        sharing = sorted(first_block) if length > block_size else []
        shared = draw(st.sampled_from([None, *sharing])) if sharing else None
        seeds[name] = len(seeds)
        own = (len(seeds) + 100, length - block_size if shared else length)
        segments = ((seeds[shared] + 101, block_size), own) if shared else (own,)
        ops.append(("submit", name, segments, ""))
        left[name] = length
        return name

    for _ in range(draw(st.integers(1, 3))):
        submit()
    for number in range(draw(st.integers(2, steps))):
        if number and len(seeds) < _MOST_REQUESTS and draw(st.booleans()):
            submit()
        if number and len(left) > 1 and draw(st.booleans()):
            gone = draw(st.sampled_from(sorted(left)))
            if ("submit", gone) != ops[-1][:2]:
                ops.append((draw(st.sampled_from(("finish", "preempt"))), gone))
                if ops[-1][0] == "finish":
                    del left[gone]
                else:
                    left[gone] = max(left[gone], 2)
        batch: list[tuple[str, int | None]] = []
        for name in draw(st.permutations(sorted(left))):
            chunk = draw(st.sampled_from((None, block_size, block_size + 1, max(1, block_size - 1))))
            count = chunk if left[name] > 1 else 1
            if left[name] > block_size and (count is None or count >= block_size):
                first_block.add(name)
            left[name] = 1 if count is None else max(1, left[name] - count)
            batch.append((name, count))
        ops.append(("step", tuple(batch), draw(st.sampled_from((0, 0, 1, 3))), {}, {}))
    return Script(tuple(ops))
