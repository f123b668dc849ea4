"""Makes the engine's free blocks scarce, so that requests live at the top of the pool and are preempted for real.

The blocks belong to the scheduler. Its block pool (``vllm.v1.core.block_pool.BlockPool``) is within reach only where
the worker runs inside the engine core's process (executor ``uni``). What calls a worker method there is the core, so it
is on the stack of the call. It is not looked for through :mod:`gc`: the core freezes its heap once it is up
(``vllm.v1.engine.core``, ``freeze_gc_heap``), and frozen objects are not listed.

Only public calls of the pool are used: ``get_new_blocks``, ``free_blocks``, ``get_num_free_blocks``. Taking a block
drops its content from the prefix cache, so a pool that was held starts cold.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from pytest_kvqual.worker.wire import WorkerError

_held: list[Any] = []


def hold(free_blocks: int) -> dict[str, object]:
    """Takes all blocks but the ``free_blocks`` with the highest ids; those are then handed out from the top down.

    Call it as a worker method while no request is in flight.

    Args:
        free_blocks: How many blocks stay free, at least 1 and fewer than the pool has.

    Returns:
        ``{"found": True, "blocks": blocks of the pool with the null block, "held": n, "free": [ids, in the order in
        which they will be handed out]}``, or ``{"found": False}`` where the scheduler is in another process.

    Raises:
        WorkerError: Blocks are held already, some block is in use, or ``free_blocks`` is out of range.
    """
    pool = _block_pool()
    if pool is None:
        return {"found": False}
    blocks = int(pool.num_gpu_blocks)
    if _held:
        raise WorkerError(f"{len(_held)} blocks of the pool are held already, expected none; release them first")
    if not 1 <= free_blocks < blocks:
        raise WorkerError(f"free_blocks is {free_blocks}, expected 1 to {blocks - 1} of a pool of {blocks} blocks")
    _require_whole(pool)
    every = sorted(pool.get_new_blocks(blocks - 1), key=_block_id)
    kept = every[len(every) - free_blocks :]
    _held.extend(every[: len(every) - free_blocks])
    # Blocks without a hash go to the front of the free queue, in the order given.
    pool.free_blocks(reversed(kept))
    return {"found": True, "blocks": blocks, "held": len(_held), "free": [block.block_id for block in reversed(kept)]}


def release() -> dict[str, object]:
    """Gives the held blocks back and, where no request is in flight, puts the free queue in the order of the ids.

    Returns:
        ``{"found": True, "blocks": blocks of the pool with the null block, "released": n, "free": n, "whole": whether
        every block but the null block is free}``, or ``{"found": False}`` where the scheduler is in another process.
    """
    pool = _block_pool()
    if pool is None:
        return {"found": False}
    released = len(_held)
    pool.free_blocks(_held)
    _held.clear()
    blocks = int(pool.num_gpu_blocks)
    whole = int(pool.get_num_free_blocks()) == blocks - 1
    if whole and released:
        # The order at the start of the server, so that what comes next gets the same blocks whatever came before.
        pool.free_blocks(sorted(pool.get_new_blocks(blocks - 1), key=_block_id))
    return {
        "found": True,
        "blocks": blocks,
        "released": released,
        "free": int(pool.get_num_free_blocks()),
        "whole": whole,
    }


def held() -> int:
    """Blocks that are held now; 0 in a process without the scheduler. Nothing is timed while there are any."""
    return len(_held)


def _block_id(block: Any) -> int:
    return int(block.block_id)


def _block_pool() -> Any | None:
    """The block pool of the engine core that is calling, or None."""
    from vllm.v1.engine.core import EngineCore

    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, EngineCore):
            return caller.scheduler.kv_cache_manager.block_pool
        frame = frame.f_back
    return None


def _require_whole(pool: Any) -> None:
    used = int(pool.num_gpu_blocks) - 1 - int(pool.get_num_free_blocks())
    if used:
        raise WorkerError(f"{used} blocks of the pool are in use, expected none before blocks are held")
