"""A program: ``ServingWorker`` over vLLM's own GPU worker class, with a model runner that needs no GPU.

What of the GPU worker can run here runs here: its ``compile_or_warm_up_model``, ``execute_model`` and
``sample_tokens`` are the engine's. Its runner is :mod:`served_graphs`'s, whose graphs are recorded steps. Prints one
JSON document.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.platforms import current_platform

with mock.patch.object(type(current_platform), "is_cpu", return_value=False):
    from pytest_kvqual.worker.serving_worker import ServingWorker

import torch
from graph_engine import BLOCK, SIZE, TOKENS
from served_graphs import STEPS, Kind, Served
from vllm.config import CompilationMode
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker import gpu_worker

from pytest_kvqual.kv import formats
from pytest_kvqual.worker.attributes import Attributes
from pytest_kvqual.worker.graph import RecordedStep


class Late(AsyncModelRunnerOutput):  # type: ignore[misc]  # the engine is not typed for us
    """The sampled tokens, which the engine of a GPU gets later; they can be had once."""

    def __init__(self, output: Any) -> None:
        self._output = ModelRunnerOutput(
            req_ids=output.req_ids,
            req_id_to_index={name: index for index, name in enumerate(output.req_ids)},
            sampled_token_ids=output.sampled_token_ids,
        )

    def get_output(self) -> ModelRunnerOutput:
        made = self._output
        del self._output
        return made


def worker_of(kind: Kind, *, taps: bool, told: list[str]) -> tuple[Any, Served]:
    """A worker around a runner of that kind; ``told`` gets what happens, in order."""
    served = Served(kind, captured=False)
    for index, layer in enumerate(served.graph.layers.values()):
        layer._v_scale, layer._v_scale_float = torch.tensor(0.5 * (index + 1)), 0.5 * (index + 1)
        layer.impl.scale = SIZE**-0.5
        layer.attn_backend = SimpleNamespace(get_name=lambda: "GRAPHED")
    runner = served.runner
    worker: Any = ServingWorker.__new__(ServingWorker)

    def capture_model() -> int:
        snapshot = worker._kvqual_scales.get("before_capture")
        told.append(f"capture, scales {'read' if snapshot else 'not read'}")
        # The engine's capture runs each layer once, from Python.
        served.graph.step = RecordedStep(served.graph.forward)
        return 0

    runner.capture_model = capture_model
    runner.maybe_remove_all_loras = lambda config: None
    runner.lora_config = None
    runner.needs_cudagraph_capture = lambda: False
    runner.is_pooling_model = False
    runner.sample_tokens = lambda grammar: Late(served.output())
    compilation = SimpleNamespace(
        mode=CompilationMode.NONE,
        cudagraph_mode=runner.compilation_config.cudagraph_mode,
        max_cudagraph_capture_size=TOKENS,
        static_forward_context=served.graph.layers,
        backend="",
        compilation_time=0.0,
        encoder_compilation_time=0.0,
    )
    worker.kvqual_config = SimpleNamespace(taps=taps, v_scales=None, kv_format="k16v16", arm="graphed")
    worker.rank = 0
    worker.model_runner = runner
    worker.use_v2_model_runner = kind == "v2"
    worker.profiler = None
    worker._pp_send_work = []
    worker.model_config = SimpleNamespace(enforce_eager=False, seed=0, dtype=torch.bfloat16)
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=1, block_size=BLOCK)
    worker.scheduler_config = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=TOKENS)
    worker.parallel_config = SimpleNamespace(data_parallel_index=0)
    worker.compilation_config = compilation
    worker.vllm_config = SimpleNamespace(
        compilation_config=compilation,
        cache_config=worker.cache_config,
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
    )
    # As ServingWorker.__init__ leaves them, and its caches as initialize_from_config does.
    worker.kvqual_undo = []
    worker._kvqual_window = worker._kvqual_dispatch = worker._kvqual_inputs = worker._kvqual_static = None
    worker._kvqual_windows = 0
    worker._kvqual_eager = Attributes()
    worker._kvqual_scales = {}
    worker._kvqual_activity = {"busy_ns": 0, "steps": 0, "tokens": 0}
    worker._kvqual_caches = {name: layer.kv_cache for name, layer in served.graph.layers.items()}
    worker._kvqual_formats = dict.fromkeys(served.graph.layers, formats.declared("k16v16"))
    return worker, served


@contextmanager
def without_a_device(told: list[str]) -> Iterator[None]:
    """What of the engine's own calls needs a device or a process group is left out."""
    group = SimpleNamespace(is_first_rank=True, is_last_rank=False)
    with ExitStack() as stack:
        for name, stand_in in (
            ("kernel_warmup", lambda worker: told.append("kernels warm")),
            ("set_random_seed", lambda *args: None),
            ("freeze_gc_heap", lambda: None),
            ("maybe_attach_gc_debug_callback", lambda: None),
            ("get_pp_group", lambda: group),
        ):
            stack.enter_context(mock.patch.object(gpu_worker, name, stand_in))
        yield


def steps(worker: Any, served: Served) -> int:
    """Runs every step through the worker; returns how many outputs the engine could still get."""
    whole = 0
    for rows in STEPS:
        worker.execute_model(served.scheduled(rows))
        whole += worker.sample_tokens(None).get_output().req_ids == served.output().req_ids
    for name in list(served.computed):
        del served.computed[name]
    return whole


def window(worker: Any, served: Served, **options: object) -> dict[str, Any]:
    """One oracle window over every step."""
    before = served.eager, served.replays
    started = worker.kvqual_oracle_start(options)
    taps = worker.kvqual_taps()
    whole = steps(worker, served)
    record = worker.kvqual_oracle_finish()
    return {
        "started": started,
        "taps": taps,
        "outputs": whole,
        "eager": served.eager - before[0],
        "replays": served.replays - before[1],
        "record": {key: record[key] for key in ("steps", "rows", "conditions", "row_map", "routing", "placement")},
        "kinds": {name: part["kinds"] for name, part in record.items() if isinstance(part, dict) and "kinds" in part},
    }


def planted(worker: Any) -> None:
    """A fault: every slot of the last layer's cache update is another one's."""
    layer = list(worker.kvqual_layers().values())[-1]
    original = layer.impl.do_kv_cache_update

    def late(layer: Any, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        original(layer, key, value, kv_cache, torch.where(slots >= 0, slots ^ 1, -1))

    layer.impl.do_kv_cache_update = late
    worker.kvqual_undo.append(lambda: delattr(layer.impl, "do_kv_cache_update"))


def main(kind: Kind, taps: bool) -> None:
    told: list[str] = []
    worker, served = worker_of(kind, taps=taps, told=told)
    attributes = {name: set(vars(layer.impl)) for name, layer in served.graph.layers.items()}
    with without_a_device(told):
        worker.compile_or_warm_up_model()
        found = {
            "base": [f"{base.__module__}.{base.__name__}" for base in ServingWorker.__bases__],
            "told": told,
            "scales": worker._kvqual_scales["before_capture"],
            "runner": worker.kvqual_identity({"parts": ["device"]}),
            "left": {
                name: sorted(set(vars(layer.impl)) - attributes[name]) for name, layer in served.graph.layers.items()
            },
            "idle": worker.kvqual_taps(),
            "plain": window(worker, served),
            "probe": window(worker, served, probe=True, fills=True),
            "fault": window(worker, served, fault="gpu_worker:planted", probe=True),
        }
        worker.kvqual_inputs_start()
        steps(worker, served)
        found["inputs"] = worker.kvqual_inputs_finish()
        found["after"] = worker.kvqual_taps()
        found["activity"] = {key: worker.kvqual_activity()[key] for key in ("steps", "tokens")}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    # The fault is looked up by its module's name.
    sys.modules["gpu_worker"] = sys.modules["__main__"]
    main("v1" if sys.argv[1] == "v1" else "v2", sys.argv[2] == "taps")
