"""Where each model runner keeps what is read of it, held against the engine's own data structures on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode  # noqa: E402 - the engine may be absent
from vllm.forward_context import ForwardContext, override_forward_context  # noqa: E402
from vllm.v1.worker import cpu_model_runner, gpu_model_runner  # noqa: E402
from vllm.v1.worker.gpu import cudagraph_utils  # noqa: E402
from vllm.v1.worker.gpu import model_runner as second  # noqa: E402
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers  # noqa: E402

from pytest_kvqual.worker.attributes import Attributes  # noqa: E402
from pytest_kvqual.worker.runner import (  # noqa: E402
    RunnerV1,
    RunnerV2,
    graph_mode,
    has_full_graphs,
    maps_of,
    note_maps,
    resolved,
    runner_of,
)
from pytest_kvqual.worker.wire import WorkerError  # noqa: E402

pytestmark = pytest.mark.engine


def _scheduled(**counts: int) -> SimpleNamespace:
    return SimpleNamespace(num_scheduled_tokens=counts)


# -- the engine has what is read ---------------------------------------------------------------------------------------


def test_the_cpu_runner_is_the_first_gpu_runner() -> None:
    """What is proven on the CPU worker goes through the methods of V1's GPU runner, which it does not replace."""
    gpu, cpu = gpu_model_runner.GPUModelRunner, cpu_model_runner.CPUModelRunner
    assert issubclass(cpu, gpu)
    for name in ("execute_model", "sample_tokens", "_model_forward", "_prepare_inputs", "_build_attention_metadata"):
        assert getattr(cpu, name) is getattr(gpu, name)


@pytest.mark.parametrize(
    ("holder", "names"),
    [
        (gpu_model_runner.GPUModelRunner, ("_model_forward", "capture_model", "execute_model", "sample_tokens")),
        (second.GPUModelRunner, ("prepare_attn", "prepare_inputs", "capture_model", "execute_model", "sample_tokens")),
        (cudagraph_utils.ModelCudaGraphManager, ("run_fullgraph", "dispatch")),
    ],
)
def test_the_engine_has_the_methods_that_are_followed(holder: type, names: tuple[str, ...]) -> None:
    """Each method that a tap hangs on exists in the pinned engine under that name."""
    assert [name for name in names if not callable(getattr(holder, name, None))] == []


def test_the_second_runner_prepares_attention_for_real_batches_alone() -> None:
    """``prepare_attn`` is called by ``execute_model`` where no dummy runs, and ``run_fullgraph`` for full graphs."""
    import inspect

    source = inspect.getsource(second.GPUModelRunner.execute_model)
    real = source.index("if not dummy_run:\n            # Common case.")
    assert real < source.index("self.prepare_attn(input_batch)") < source.index("# No actual tokens to run.")
    assert "self.cudagraph_manager.run_fullgraph(batch_desc)" in source


# -- V1 ----------------------------------------------------------------------------------------------------------------


class _Dispatcher:
    def dispatch(self, num_tokens: int, valid_modes: object = None, invalid_modes: object = None) -> object:
        return valid_modes


class _FirstRunner:
    """The attributes of V1's runner that are read, and its forward."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(
            num_reqs=3,
            req_ids=["c", "a", "b"],
            block_table=[SimpleNamespace(get_device_tensor=lambda rows: torch.zeros(rows, 7))],
        )
        self.input_ids = SimpleNamespace(gpu=torch.tensor([4, 5, 6]))
        self.attn_groups = [
            [SimpleNamespace(metadata_builders=["one", "two"])],
            [SimpleNamespace(metadata_builders=[])],
        ]
        self.compilation_config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
        self.cudagraph_dispatcher = _Dispatcher()

    def _model_forward(self, told: list[str]) -> str:
        told.append("layers")
        return "hidden states"


def test_v1_is_read_where_it_keeps_things() -> None:
    """Requests, order, tokens, columns and builders of V1 come from its persistent batch."""
    runner = runner_of(_FirstRunner())
    assert isinstance(runner, RunnerV1)
    assert (runner.in_flight(), runner.order(_scheduled(a=1, b=2, c=1)), runner.columns()) == (3, ["c", "a", "b"], 7)
    assert runner.order(_scheduled(b=1)) == ["b"]
    assert runner.fed().tolist() == [4, 5, 6]
    assert runner.builders == ["one", "two"]
    with pytest.raises(WorkerError, match="holds 1 of the 2 requests"):
        runner.order(_scheduled(a=1, stranger=1))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (None, ["before", "layers"]),
        (CUDAGraphMode.NONE, ["before", "layers"]),
        (CUDAGraphMode.PIECEWISE, ["before", "layers"]),
        (CUDAGraphMode.FULL, ["before", "layers", "replayed"]),
    ],
)
def test_v1_is_followed_around_its_forward(mode: CUDAGraphMode | None, expected: list[str]) -> None:
    """Before the layers, and after them where the forward context says that a full graph was replayed."""
    raw, told, attributes = _FirstRunner(), list[str](), Attributes()
    before, replayed = (lambda: told.append("before")), (lambda: told.append("replayed"))
    runner_of(raw).follow(attributes, before=before, replayed=replayed, label="kvqual.replay")
    if mode is None:
        assert raw._model_forward(told) == "hidden states"
    else:
        context = ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={}, cudagraph_runtime_mode=mode)
        with override_forward_context(context):
            assert raw._model_forward(told) == "hidden states"
    assert told == expected
    attributes.restore()
    assert vars(raw).get("_model_forward") is None


def test_v1_runs_without_graphs_while_asked_to() -> None:
    """Dispatch is left the mode NONE alone, and is put back."""
    raw, attributes = _FirstRunner(), Attributes()
    runner_of(raw).eager(attributes)
    assert raw.cudagraph_dispatcher.dispatch(4, invalid_modes={CUDAGraphMode.FULL}) == {CUDAGraphMode.NONE}
    attributes.restore()
    assert raw.cudagraph_dispatcher.dispatch(4) is None


# -- V2 ----------------------------------------------------------------------------------------------------------------

NAMES = ["z", "x"]


def _batch() -> InputBatch:
    """The engine's own batch of two requests of two rows each, on a CPU."""
    buffers = InputBuffers(max_num_reqs=4, max_num_tokens=8, device=torch.device("cpu"))
    batch = InputBatch.make_dummy(2, 4, buffers)
    batch.req_ids = NAMES
    batch.input_ids.copy_(torch.tensor([9, 8, 7, 6]))
    return batch


class _Manager(cudagraph_utils.CudaGraphManager):  # type: ignore[misc]  # the engine is not typed for us
    """The engine's dispatch over one captured graph; a replay says so instead of replaying."""

    def __init__(self, told: list[str]) -> None:
        self.told = told
        self.graph = cudagraph_utils.BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.FULL, num_tokens=4, num_reqs=4, uniform_token_count=1
        )
        self._lora_dispatch_map: dict[int, int] = {}
        self._candidates = {(count, 0): [self.graph] for count in range(1, 5)}
        self._graphs_captured = True

    def run_fullgraph(self, desc: object) -> str:
        self.told.append("replay")
        return "hidden states"


class _SecondRunner:
    """The attributes of V2's runner that are read, around the engine's own batch and dispatch."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.req_states = SimpleNamespace(req_id_to_index={"x": 3, "z": 0})
        self.block_tables = SimpleNamespace(input_block_tables=[torch.zeros(4, 11, dtype=torch.int32)])
        self.cudagraph_manager = _Manager(self.told)
        self.attn_groups = [[SimpleNamespace(metadata_builders=["one"])]]
        self.speculator = self.ubatch_runner = self.pcp_manager = None

    def prepare_attn(self, input_batch: InputBatch) -> str:
        self.told.append("maps")
        return "tables and slots"


def test_v2_is_read_where_it_keeps_things() -> None:
    """Requests come from the slots; order and tokens from the batch that the step was prepared with."""
    raw, attributes = _SecondRunner(), Attributes()
    runner = runner_of(raw)
    assert isinstance(runner, RunnerV2)
    assert (runner.in_flight(), runner.columns(), runner.builders, runner.unsupported()) == (2, 11, ["one"], [])
    with pytest.raises(WorkerError, match="found no batch of a step, expected one"):
        runner.fed()
    runner.follow(attributes, before=lambda: raw.told.append("before"), replayed=lambda: raw.told.append("replayed"))
    assert raw.prepare_attn(_batch()) == "tables and slots"
    assert raw.told == ["maps", "before"]
    assert runner.order(_scheduled(x=2, z=2)) == NAMES
    assert runner.fed().tolist() == [9, 8, 7, 6]
    with pytest.raises(WorkerError, match="holds 2 of the 1 requests"):
        runner.order(_scheduled(x=2))
    assert raw.cudagraph_manager.run_fullgraph(raw.cudagraph_manager.graph) == "hidden states"
    assert raw.told == ["maps", "before", "replay", "replayed"]
    attributes.restore()
    assert "prepare_attn" not in vars(raw)
    assert "run_fullgraph" not in vars(raw.cudagraph_manager)


def test_v2_runs_without_graphs_while_asked_to() -> None:
    """The engine's own dispatch finds no graph meanwhile, and no padding; afterwards it finds it again."""
    raw, attributes = _SecondRunner(), Attributes()
    dispatch = raw.cudagraph_manager.dispatch
    assert dispatch(3, 3, 1, 0) == raw.cudagraph_manager.graph
    runner_of(raw).eager(attributes)
    assert (dispatch(3, 3, 1, 0).cg_mode, dispatch(3, 3, 1, 0).num_tokens) == (CUDAGraphMode.NONE, 3)
    attributes.restore()
    assert dispatch(3, 3, 1, 0) == raw.cudagraph_manager.graph


@pytest.mark.parametrize(
    ("attribute", "word"),
    [("speculator", "speculative"), ("ubatch_runner", "microbatches"), ("pcp_manager", "context parallelism")],
)
def test_v2_says_what_is_not_followed(attribute: str, word: str) -> None:
    """What makes several rows or calls of one is named."""
    raw = _SecondRunner()
    setattr(raw, attribute, object())
    assert [word in name for name in runner_of(raw).unsupported()] == [True]


@pytest.mark.parametrize("order", [{"a": 1, "b": 3, "c": 1}, {"c": 1, "b": 3, "a": 1}])
def test_v2_orders_decodes_first(order: dict[str, int]) -> None:
    """The engine's own order of a batch puts decodes before prefills: it is not the scheduler's order, and is read."""
    found = second.sort_batch_req_ids(order, {}, 1)
    assert found == [name for name in order if order[name] == 1] + ["b"]


# -- both --------------------------------------------------------------------------------------------------------------


def test_another_runner_is_refused() -> None:
    """A runner that has neither's attributes is named."""
    with pytest.raises(WorkerError, match=r"found the model runner .*SimpleNamespace, expected V1 or V2"):
        runner_of(SimpleNamespace())


@pytest.mark.parametrize(
    ("mode", "full"),
    [
        (CUDAGraphMode.NONE, False),
        (CUDAGraphMode.PIECEWISE, False),
        (CUDAGraphMode.FULL, True),
        (CUDAGraphMode.FULL_DECODE_ONLY, True),
        (CUDAGraphMode.FULL_AND_PIECEWISE, True),
    ],
)
def test_the_graph_mode_is_named(mode: CUDAGraphMode, full: bool) -> None:
    """Every mode of the engine is known by name, and whether it has full graphs."""
    runner = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
    assert (graph_mode(runner), has_full_graphs(runner)) == (mode.name, full)
    assert graph_mode(SimpleNamespace()) == "NONE"


def test_an_output_on_its_way_is_asked_once() -> None:
    """The engine's own call gets the very output that was waited for; one that is there already is itself."""

    class Late:
        asked = 0

        def get_output(self) -> object:
            self.asked += 1
            return SimpleNamespace(req_ids=["a"], sampled_token_ids=[[7]])

    late: Any = Late()
    first = resolved(late)
    assert late.get_output() is first
    assert late.asked == 1
    assert resolved(first) is first
    assert resolved(None) is None


@dataclass(frozen=True)
class _Planned:
    """Metadata without a block table, as FlashInfer's: a plan was made of it."""

    slot_mapping: Any


@dataclass
class _Common:
    block_table_tensor: Any = "table"
    seq_lens: Any = "lengths"
    query_start_loc: Any = "starts"
    slot_mapping: Any = "slots"


class _Builder:
    def build(self, common_prefix_len: int, common_attn_metadata: object) -> object:
        return _Planned(slot_mapping="slots")

    def build_for_cudagraph_capture(self, common: object) -> object:
        return self.build(common_prefix_len=0, common_attn_metadata=common)

    def update_block_table(self, metadata: object, table: object, slots: object) -> object:
        return _Planned(slot_mapping=slots)


@pytest.mark.parametrize(
    "build",
    [
        lambda builder: builder.build(0, _Common()),
        lambda builder: builder.build(common_prefix_len=0, common_attn_metadata=_Common()),
        lambda builder: builder.build_for_cudagraph_capture(_Common()),
    ],
)
def test_planned_metadata_has_the_maps_that_it_was_planned_from(build: Callable[[Any], Any]) -> None:
    """A backend that keeps a plan instead of maps is seen by what its builder was given, while the taps are on."""
    builder, attributes = _Builder(), Attributes()
    with pytest.raises(WorkerError, match="found attention metadata _Planned without block_table"):
        maps_of(build(builder))
    note_maps(attributes, [builder])
    made = build(builder)
    assert list(maps_of(made)) == ["table", "lengths", "starts", "slots"]
    updated = builder.update_block_table(made, "other table", "other slots")
    assert list(maps_of(updated)) == ["other table", "lengths", "starts", "other slots"]
    attributes.restore()
    assert vars(builder) == {}


def test_metadata_with_maps_of_its_own_is_read_itself() -> None:
    """The maps that a kernel is about to use come before those that they were made from."""
    own = SimpleNamespace(block_table="own", seq_lens="l", query_start_loc="q", kvqual_common=_Common())
    assert list(maps_of(own)) == ["own", "l", "q", None]
