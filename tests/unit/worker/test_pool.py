"""Held blocks, on a block pool of the same calls as the engine's."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest

from pytest_kvqual.worker import pool
from pytest_kvqual.worker.wire import WorkerError

BLOCKS = 10


@dataclass
class _Block:
    block_id: int


class _Pool:
    """Block 0 is the null block. Freed blocks go to the front, as the engine's without a hash do."""

    def __init__(self) -> None:
        self.num_gpu_blocks = BLOCKS
        self.queue = [_Block(index) for index in range(1, BLOCKS)]

    def get_num_free_blocks(self) -> int:
        return len(self.queue)

    def get_new_blocks(self, count: int) -> list[_Block]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        return taken

    def free_blocks(self, blocks: Iterable[_Block]) -> None:
        self.queue = [*blocks, *self.queue]

    def ids(self) -> list[int]:
        return [block.block_id for block in self.queue]


class _Core:
    """The engine's core: it calls, and is found on the stack."""

    def __init__(self) -> None:
        self.pool = _Pool()
        self.scheduler = SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=self.pool))

    def hold(self, free: int) -> dict[str, object]:
        return pool.hold(free)

    def release(self) -> dict[str, object]:
        return pool.release()


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Core]:
    """A core with a whole pool; what a test holds is forgotten after it."""
    module = ModuleType("vllm.v1.engine.core")
    module.EngineCore = _Core  # type: ignore[attr-defined]  # a module made here
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield _Core()
    pool._held.clear()


@pytest.mark.parametrize("free", [1, 4, BLOCKS - 1])
def test_the_top_of_the_pool_stays_free(core: _Core, free: int) -> None:
    """Exactly the highest ids stay free, the topmost is handed out first, whatever order the queue was in."""
    core.pool.queue = core.pool.queue[4:] + core.pool.queue[:4]
    top = list(range(BLOCKS - 1, BLOCKS - 1 - free, -1))
    assert core.hold(free) == {"found": True, "blocks": BLOCKS, "held": BLOCKS - 1 - free, "free": top}
    assert core.pool.ids() == top
    assert pool.held() == BLOCKS - 1 - free


def test_release_restores_the_order_of_the_ids(core: _Core) -> None:
    """After a release every block but the null block is free, in the order of a fresh pool."""
    core.hold(3)
    core.pool.free_blocks(core.pool.get_new_blocks(2))
    assert core.release() == {
        "found": True, "blocks": BLOCKS, "released": BLOCKS - 4, "free": BLOCKS - 1, "whole": True,
    }  # fmt: skip
    assert core.pool.ids() == list(range(1, BLOCKS))
    assert pool.held() == 0


def test_release_while_a_request_has_blocks(core: _Core) -> None:
    """The held blocks come back and the pool is said not to be whole."""
    core.hold(3)
    core.pool.get_new_blocks(2)
    found = core.release()
    assert (found["released"], found["free"], found["whole"]) == (BLOCKS - 4, BLOCKS - 3, False)


def test_release_of_nothing_leaves_the_queue_alone(core: _Core) -> None:
    """Where nothing is held nothing is reordered."""
    core.pool.queue.reverse()
    before = core.pool.ids()
    assert core.release()["released"] == 0
    assert core.pool.ids() == before


@pytest.mark.parametrize("free", [0, -1, BLOCKS])
def test_out_of_range(core: _Core, free: int) -> None:
    """No block, or as many as the pool has with its null block, are refused and nothing is taken."""
    with pytest.raises(WorkerError, match=f"free_blocks is {free}, expected 1 to {BLOCKS - 1}"):
        core.hold(free)
    assert core.pool.get_num_free_blocks() == BLOCKS - 1


def test_a_second_hold(core: _Core) -> None:
    """Held blocks must be released before others are held."""
    core.hold(3)
    with pytest.raises(WorkerError, match=f"{BLOCKS - 4} blocks of the pool are held already, expected none"):
        core.hold(3)


def test_a_pool_in_use(core: _Core) -> None:
    """While a request has a block nothing is held."""
    core.pool.get_new_blocks(1)
    with pytest.raises(WorkerError, match="1 blocks of the pool are in use, expected none"):
        core.hold(3)
    assert core.pool.get_num_free_blocks() == BLOCKS - 2


def test_no_core_on_the_stack(core: _Core) -> None:
    """In a process of its own a worker finds no pool, and says so instead of failing."""
    assert pool.hold(3) == {"found": False}
    assert pool.release() == {"found": False}
    assert core.pool.get_num_free_blocks() == BLOCKS - 1
