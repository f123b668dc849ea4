"""Where the engine's model runner keeps what the qualification reads: one answer for each kind of runner.

vLLM 0.32 has two model runners, and a CPU subclass of each. The two keep the batch in different places, and enter the
model's layers in different ways:

==============================  ========================================  ==========================================
what                            V1 (``gpu_model_runner.py``)              V2 (``gpu/model_runner.py``)
==============================  ========================================  ==========================================
requests in flight              ``input_batch.num_reqs``                  ``req_states.req_id_to_index``
order of a step's rows          ``input_batch.req_ids``                   ``InputBatch.req_ids``, made by
                                                                          ``prepare_inputs`` for this step alone
tokens fed                      ``input_ids.gpu``                         ``InputBatch.input_ids``
block tables                    ``input_batch.block_table[group]``        ``block_tables.input_block_tables[group]``
before the layers run           ``_model_forward`` is called              ``prepare_attn`` has returned
a full graph is replayed        inside ``_model_forward``                 by ``cudagraph_manager.run_fullgraph``
which graph a step gets         ``cudagraph_dispatcher.dispatch``         ``cudagraph_manager.dispatch``
==============================  ========================================  ==========================================

Everything else is in one place for both: layers with their caches in ``static_forward_context``, metadata builders in
``attn_groups``, maps in the metadata of a step, ``execute_model``, ``sample_tokens`` and ``capture_model``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch

from pytest_kvqual.worker.attributes import Attributes
from pytest_kvqual.worker.wire import WorkerError

_COMMON = "kvqual_common"
"""Under this name a step's metadata carries what it was built from."""


class Maps(NamedTuple):
    """Block table ``[R, B]``, sequence lengths ``[R]``, row starts ``[R + 1]`` and slots ``[T]`` of one step."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor | None


def maps_of(metadata: Any) -> Maps:
    """The maps of a step's attention metadata.

    Backends whose metadata has no block table of their own (FlashInfer plans its kernels from one and keeps the plan)
    have those that the metadata was built from, noted by :func:`note_maps`.

    Raises:
        WorkerError: There are neither.
    """
    if hasattr(metadata, "block_table") and hasattr(metadata, "seq_lens"):
        return Maps(
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            getattr(metadata, "slot_mapping", None),
        )
    common = getattr(metadata, _COMMON, None)
    if common is None:
        raise WorkerError(
            f"found attention metadata {type(metadata).__name__} without block_table and seq_lens, expected them, or"
            " metadata that was built while the taps were on"
        )
    return Maps(common.block_table_tensor, common.seq_lens, common.query_start_loc, common.slot_mapping)


def note_maps(attributes: Attributes, builders: Sequence[Any]) -> None:
    """Lets metadata without a block table carry what it is built from, until ``attributes`` are restored."""
    for builder in builders:
        if hasattr(builder, "build"):
            attributes.replace(builder, "build", _noting(builder.build))
        if hasattr(builder, "update_block_table"):
            attributes.replace(builder, "update_block_table", _updating(builder.update_block_table))


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    def build(*args: Any, **kwargs: Any) -> Any:
        metadata = original(*args, **kwargs)
        common = kwargs.get("common_attn_metadata", args[1] if len(args) > 1 else None)
        if common is not None and not hasattr(metadata, "block_table"):
            # Not setattr: the metadata of some backends is frozen.
            object.__setattr__(metadata, _COMMON, common)
        return metadata

    return build


def _updating(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_block_table(metadata: Any, table: torch.Tensor, slots: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = original(metadata, table, slots, *args, **kwargs)
        common = getattr(metadata, _COMMON, None)
        if common is not None:
            object.__setattr__(made, _COMMON, replace(common, block_table_tensor=table, slot_mapping=slots))
        return made

    return update_block_table


class Runner(ABC):
    """One model runner, read. Nothing of it is changed but by :meth:`follow` and :meth:`eager`, until restored."""

    kind: ClassVar[str]

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    @property
    def builders(self) -> list[Any]:
        """The attention metadata builders of this rank."""
        return [
            builder
            for groups in getattr(self.runner, "attn_groups", ())
            for group in groups
            for builder in group.metadata_builders
        ]

    @abstractmethod
    def in_flight(self) -> int:
        """Requests that the runner holds."""

    @abstractmethod
    def order(self, scheduled: Any) -> list[str]:
        """The requests of the step at hand in row order.

        Raises:
            WorkerError: The runner's batch does not hold the requests that the scheduler scheduled.
        """

    @abstractmethod
    def fed(self) -> torch.Tensor:
        """Integer ``[>= T]``: the token of each row of the step at hand, as the model is given it."""

    @abstractmethod
    def columns(self) -> int:
        """Columns of a step's block table."""

    @abstractmethod
    def follow(
        self, attributes: Attributes, *, before: Callable[[], None], replayed: Callable[[], None], label: str = ""
    ) -> None:
        """Calls ``before`` when a step's inputs are ready and no layer has run, ``replayed`` after a full graph ran.

        A step in eager mode or under piecewise graphs calls each layer from Python, so ``replayed`` is not called.
        With ``label`` each replay stands in a profiler range of that name.
        """

    @abstractmethod
    def eager(self, attributes: Attributes) -> None:
        """Lets every step run without a graph, of whatever kind, until ``attributes`` are restored."""

    @abstractmethod
    def unsupported(self) -> list[str]:
        """What this runner does that the taps do not follow; empty where they do."""

    def _checked(self, order: list[str], scheduled: Any) -> list[str]:
        counts = scheduled.num_scheduled_tokens
        if sorted(order) != sorted(counts):
            raise WorkerError(
                f"the runner's batch holds {len(order)} of the {len(counts)} requests that the scheduler scheduled,"
                " expected all"
            )
        return order


class RunnerV1(Runner):
    """``vllm.v1.worker.gpu_model_runner.GPUModelRunner`` and its CPU subclass."""

    kind = "v1"

    def in_flight(self) -> int:
        """Requests in the persistent batch."""
        return int(self.runner.input_batch.num_reqs)

    def order(self, scheduled: Any) -> list[str]:
        """The persistent batch's order, of those that are scheduled."""
        counts = scheduled.num_scheduled_tokens
        return self._checked([request for request in self.runner.input_batch.req_ids if request in counts], scheduled)

    def fed(self) -> torch.Tensor:
        """The persistent input buffer, as the device has it."""
        fed: torch.Tensor = self.runner.input_ids.gpu
        return fed

    def columns(self) -> int:
        """Width of the persistent block table of the first group."""
        return int(self.runner.input_batch.block_table[0].get_device_tensor(1).shape[1])

    def follow(
        self, attributes: Attributes, *, before: Callable[[], None], replayed: Callable[[], None], label: str = ""
    ) -> None:
        """Around ``_model_forward``; the forward context says whether it replays a full graph."""
        original = getattr(self.runner, "_model_forward", None)
        if original is None:
            return

        def forward(*args: Any, **kwargs: Any) -> Any:
            before()
            if not _full_graph():
                return original(*args, **kwargs)
            with _range(label):
                result = original(*args, **kwargs)
            replayed()
            return result

        attributes.replace(self.runner, "_model_forward", forward)

    def eager(self, attributes: Attributes) -> None:
        """Dispatch finds no mode but NONE."""
        dispatcher = getattr(self.runner, "cudagraph_dispatcher", None)
        if dispatcher is None:
            return
        original = dispatcher.dispatch

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            from vllm.config import CUDAGraphMode

            return original(*args, **{**kwargs, "valid_modes": {CUDAGraphMode.NONE}, "invalid_modes": None})

        attributes.replace(dispatcher, "dispatch", dispatch)

    def unsupported(self) -> list[str]:
        """Speculation feeds tokens that no request has, and microbatches run a layer twice a step."""
        return _told(
            {
                "speculative decoding": getattr(self.runner, "speculative_config", None) is not None,
                "microbatches": bool(
                    getattr(getattr(self.runner, "parallel_config", None), "use_ubatching", False) is True
                ),
            }
        )


class RunnerV2(Runner):
    """``vllm.v1.worker.gpu.model_runner.GPUModelRunner`` and its CPU subclass."""

    kind = "v2"

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._batch: Any = None

    def in_flight(self) -> int:
        """Requests that hold a slot."""
        return len(self.runner.req_states.req_id_to_index)

    def order(self, scheduled: Any) -> list[str]:
        """The order of the step's own batch."""
        return self._checked(list(self._step().req_ids), scheduled)

    def fed(self) -> torch.Tensor:
        """The step's own view of the input buffer."""
        fed: torch.Tensor = self._step().input_ids
        return fed

    def _step(self) -> Any:
        if self._batch is None:
            raise WorkerError("found no batch of a step, expected one: the runner's prepare_attn was not followed")
        return self._batch

    def columns(self) -> int:
        """Width of the forward pass's block table of the first group."""
        return int(self.runner.block_tables.input_block_tables[0].shape[1])

    def follow(
        self, attributes: Attributes, *, before: Callable[[], None], replayed: Callable[[], None], label: str = ""
    ) -> None:
        """After ``prepare_attn``, which dummy runs do not call; after ``run_fullgraph``."""
        prepare = self.runner.prepare_attn

        def prepare_attn(input_batch: Any) -> Any:
            prepared = prepare(input_batch)
            self._batch = input_batch
            before()
            return prepared

        attributes.replace(self.runner, "prepare_attn", prepare_attn)
        manager = getattr(self.runner, "cudagraph_manager", None)
        if manager is None:
            return
        run = manager.run_fullgraph

        def run_fullgraph(*args: Any, **kwargs: Any) -> Any:
            with _range(label):
                result = run(*args, **kwargs)
            replayed()
            return result

        attributes.replace(manager, "run_fullgraph", run_fullgraph)

    def eager(self, attributes: Attributes) -> None:
        """Dispatch finds no captured graph."""
        manager = getattr(self.runner, "cudagraph_manager", None)
        if manager is not None:
            attributes.replace(manager, "_graphs_captured", False)

    def unsupported(self) -> list[str]:
        """As for V1; context parallelism partitions the rows besides."""
        return _told(
            {
                "speculative decoding": getattr(self.runner, "speculator", None) is not None,
                "microbatches": getattr(self.runner, "ubatch_runner", None) is not None,
                "prefill context parallelism": getattr(self.runner, "pcp_manager", None) is not None,
            }
        )


def runner_of(runner: Any) -> Runner:
    """The runner's reader, by what the runner has.

    Raises:
        WorkerError: It is neither of the two.
    """
    if hasattr(runner, "req_states"):
        return RunnerV2(runner)
    if hasattr(runner, "input_ids"):
        return RunnerV1(runner)
    raise WorkerError(
        f"found the model runner {type(runner).__module__}.{type(runner).__qualname__}, expected V1 or V2"
    )


def resolved(output: Any) -> Any:
    """The output of a step with its sampled tokens: of one that is still on its way, what it will be.

    Waits for the device. The engine asks the same object once more, and an output can be asked only once, so what it
    gave is kept in it.
    """
    if output is None or not hasattr(output, "get_output"):
        return output
    result = output.get_output()
    output.get_output = lambda: result
    return result


def graph_mode(runner: Any) -> str:
    """The graph mode that the runner resolved: ``NONE``, ``PIECEWISE``, ``FULL``, or a pair as ``FULL_DECODE_ONLY``."""
    mode = getattr(getattr(runner, "compilation_config", None), "cudagraph_mode", None)
    return str(getattr(mode, "name", None) or "NONE")


def has_full_graphs(runner: Any) -> bool:
    """Whether some steps replay a full graph, which calls no layer from Python."""
    return "FULL" in graph_mode(runner)


def _full_graph() -> bool:
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return False
    return str(getattr(get_forward_context().cudagraph_runtime_mode, "name", "NONE")) == "FULL"


def _range(label: str) -> AbstractContextManager[Any]:
    return torch.profiler.record_function(label) if label else nullcontext()


def _told(flags: dict[str, bool]) -> list[str]:
    return [name for name, present in flags.items() if present]
