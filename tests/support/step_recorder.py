"""An arm's plugin that keeps what the scheduler told the worker in each step, for tests to read over the RPC."""

from __future__ import annotations

from typing import Any

from pytest_kvqual.worker import pool


def install(worker: Any) -> None:
    """Adds ``steps``, ``hold`` and ``release`` to the worker's methods. Named in an arm's ``after_init``."""
    kept: list[dict[str, Any]] = []
    execute = worker.execute_model

    def execute_model(scheduled: Any) -> Any:
        kept.append(_step(scheduled))
        return execute(scheduled)

    def steps() -> list[dict[str, Any]]:
        found = list(kept)
        kept.clear()
        return found

    worker.execute_model = execute_model
    worker.steps, worker.hold, worker.release = steps, pool.hold, pool.release


def _step(scheduled: Any) -> dict[str, Any]:
    cached = scheduled.scheduled_cached_reqs
    return {
        "new": [
            {
                "request": new.req_id,
                "prompt": len(new.prompt_token_ids),
                "blocks": [list(group) for group in new.block_ids],
                "computed": new.num_computed_tokens,
                "prefill_token_ids": new.prefill_token_ids,
            }
            for new in scheduled.scheduled_new_reqs
        ],
        "cached": [
            {
                "request": request,
                "resumed": request in cached.resumed_req_ids,
                "new_blocks": granted and [list(group) for group in granted],
                "computed": cached.num_computed_tokens[index],
                "output_tokens": cached.num_output_tokens[index],
                "all_tokens": len(cached.all_token_ids[request]) if request in cached.all_token_ids else None,
            }
            for index, (request, granted) in enumerate(zip(cached.req_ids, cached.new_block_ids, strict=True))
        ],
        "new_token_ids": cached.new_token_ids,
        "scheduled": dict(scheduled.num_scheduled_tokens),
        "preempted": sorted(scheduled.preempted_req_ids or ()),
        "finished": sorted(scheduled.finished_req_ids),
        "to_zero": scheduled.new_block_ids_to_zero,
    }
