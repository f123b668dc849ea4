"""What a step was given: one digest of its fed tokens and maps, so that two orders can be shown to differ in them.

A run whose order changed and whose inputs did not has proved nothing. The maps are read from the metadata that the
builders return to the runner, with whatever a seeded fault did to it before the hooks were put on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pytest_kvqual.worker.attributes import Attributes
from pytest_kvqual.worker.runner import maps_of, note_maps, runner_of
from pytest_kvqual.worker.wire import WorkerError

_BUILDS = ("build", "update_block_table")


def _add(digest: Any, name: str, values: torch.Tensor) -> None:
    """Adds a name, a length and the values as little-endian int64, so that no two inputs share their bytes."""
    data = values.detach().reshape(-1).to("cpu", torch.int64).contiguous().numpy().astype("<i8")
    digest.update(f"{name}:{data.size};".encode())
    digest.update(data.tobytes())


def maps_digest(metadata: Sequence[tuple[Any, int]], *, fed: torch.Tensor, tokens: int, requests: int) -> str:
    """SHA-256 of one step's inputs.

    Args:
        metadata: Per cache group its attention metadata and block size. Of the table, the columns in use count:
            ``ceil(seq_len / block_size)`` per row. What lies behind them is no input.
        fed: Token ids, at least ``tokens``.
        tokens: Rows of the step without padding.
        requests: Requests of the step without padding.
    """
    digest = hashlib.sha256()
    _add(digest, "tokens", fed[:tokens])
    for group, (built, block_size) in enumerate(metadata):
        held = maps_of(built)
        if held.slot_mapping is None:
            raise WorkerError(f"found no slot_mapping in {type(built).__name__}, expected one")
        lengths = held.seq_lens[:requests].to("cpu", torch.int64)
        _add(digest, f"{group}.seq_lens", lengths)
        _add(digest, f"{group}.query_start_loc", held.query_start_loc[: requests + 1])
        _add(digest, f"{group}.slot_mapping", held.slot_mapping[:tokens])
        columns = (lengths + block_size - 1) // block_size
        table = held.block_table[:requests].to("cpu", torch.int64)
        used = torch.arange(table.shape[1])[None, :] < columns[:, None]
        _add(digest, f"{group}.columns", columns)
        _add(digest, f"{group}.block_table", table[used])
    return digest.hexdigest()


class StepInputs:
    """Digests the inputs of every engine step between :meth:`start` and :meth:`finish`, one digest per step.

    Args:
        builders: The attention metadata builders, one or more per cache group.
        runner: The engine's model runner: ``execute_model(scheduled, ...)`` bounds a step.
        block_size: Tokens per block where a builder does not say otherwise in ``kv_cache_spec.block_size``.
    """

    def __init__(self, *, builders: Sequence[Any], runner: Any, block_size: int) -> None:
        self._builders = list(builders)
        self._runner = runner_of(runner)
        self._block_size = block_size
        self._attributes = Attributes()
        self._scheduled: Any = None
        self._parts: list[tuple[Any, int]] = []
        self._digests: list[str] = []
        self._objection = ""

    @property
    def installed(self) -> bool:
        """Whether any hook is on."""
        return bool(self._attributes)

    def start(self) -> None:
        """Puts the hooks on.

        Raises:
            WorkerError: They are on already, or there is no builder.
        """
        if self._attributes:
            raise WorkerError("step inputs are being digested already")
        if not self._builders:
            raise WorkerError("found no attention metadata builder, expected one per cache group, in the model runner")
        self._digests.clear()
        self._objection = ""
        runner = self._runner.runner
        self._attributes.replace(runner, "execute_model", self._stepping(runner.execute_model))
        note_maps(self._attributes, self._builders)
        self._runner.follow(self._attributes, before=_nothing, replayed=_nothing)
        for builder in self._builders:
            spec = getattr(builder, "kv_cache_spec", None)
            block_size = int(getattr(spec, "block_size", None) or self._block_size)
            for method in _BUILDS:
                if hasattr(builder, method):
                    self._attributes.replace(builder, method, self._building(getattr(builder, method), block_size))

    def _stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self._parts.clear()
            self._scheduled = scheduled
            try:
                result = original(scheduled, *args, **kwargs)
            finally:
                self._scheduled = None
            if scheduled.total_num_scheduled_tokens and not self._objection:
                self._close(scheduled)
            return result

        return execute_model

    def _building(self, original: Callable[..., Any], block_size: int) -> Callable[..., Any]:
        def build(*args: Any, **kwargs: Any) -> Any:
            metadata = original(*args, **kwargs)
            # Warm-up builds too, outside any step.
            if self._scheduled is not None:
                self._parts.append((metadata, block_size))
            return metadata

        return build

    def _close(self, scheduled: Any) -> None:
        step = len(self._digests)
        if not self._parts:
            self._objection = f"step {step} built no attention metadata, expected one per cache group"
            return
        try:
            self._digests.append(
                maps_digest(
                    self._parts,
                    fed=self._runner.fed(),
                    tokens=int(scheduled.total_num_scheduled_tokens),
                    requests=len(scheduled.num_scheduled_tokens),
                )
            )
        except (WorkerError, AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
            # Reported by finish: an exception here would end the engine.
            self._objection = f"step {step}: {error}, expected block_table, seq_lens, query_start_loc and slot_mapping"
        self._parts.clear()

    def remove(self) -> None:
        """Takes the hooks off."""
        self._attributes.restore()

    def finish(self) -> dict[str, object]:
        """Takes the hooks off and returns ``{"steps": int, "digests": [hex SHA-256, one per step]}``.

        Raises:
            WorkerError: The hooks are not on, or the inputs of a step could not be read.
        """
        if not self._attributes:
            raise WorkerError("no step inputs are being digested")
        self.remove()
        if self._objection:
            raise WorkerError(self._objection)
        return {"steps": len(self._digests), "digests": list(self._digests)}


def _nothing() -> None:
    pass
