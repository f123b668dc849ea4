"""The engine's own worker, with qualification methods that the server's development RPC can call.

It serves exactly as the stock worker does. Beyond that it runs the functions that an arm brings, installs the frozen V
scales before warm-up and keeps what they were at three moments, digests the weights as the loader left them, and puts
the oracle's taps on and off. Every ``kvqual_`` method returns JSON-ready values.

One class stands on the CPU worker and on the GPU worker of vLLM, and on both of its model runners: where those differ
is in :mod:`pytest_kvqual.worker.runner`. What only a GPU has (a state, graphs, taps in them) is reported as absent on a
CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_kvqual._clock import monotonic_ns
from pytest_kvqual.kv import formats
from pytest_kvqual.kv.declarations import is_declared
from pytest_kvqual.oracles.window import LayerView
from pytest_kvqual.worker import device, identity, pool, scales, settings
from pytest_kvqual.worker.attributes import Attributes
from pytest_kvqual.worker.dispatch import DispatchReader, backend_name
from pytest_kvqual.worker.places import made_on
from pytest_kvqual.worker.runner import Runner, graph_mode, has_full_graphs, note_maps, runner_of
from pytest_kvqual.worker.static_taps import StaticTap
from pytest_kvqual.worker.step_inputs import StepInputs
from pytest_kvqual.worker.taps import OracleTaps, layer_order
from pytest_kvqual.worker.wire import CONFIG_KEY, WorkerConfig, WorkerError, decode_config, extend_path, resolve

_DISTRIBUTIONS = ("torch", "transformers")
_PARTS = frozenset({"layers", "parameters", "scales", "distributions", "settings", "device"})


def _base_worker() -> type:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker  # type: ignore[no-any-return]  # vLLM is not typed for us
    from vllm.v1.worker.gpu_worker import Worker

    return Worker  # type: ignore[no-any-return]  # vLLM is not typed for us


class ServingWorker(_base_worker()):  # type: ignore[misc]  # the base depends on the platform
    """The platform's worker plus qualification. Named by ``--worker-cls``."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self.kvqual_config: WorkerConfig = decode_config(vllm_config.additional_config)
        self.kvqual_undo: list[Callable[[], None]] = []
        self._kvqual_window: OracleTaps | None = None
        self._kvqual_windows = 0
        self._kvqual_dispatch: DispatchReader | None = None
        self._kvqual_inputs: StepInputs | None = None
        self._kvqual_static: StaticTap | None = None
        self._kvqual_eager = Attributes()
        self._kvqual_caches: dict[str, torch.Tensor] = {}
        self._kvqual_formats: dict[str, formats.Format] = {}
        self._kvqual_bytes: dict[str, tuple[float | None, float | None]] = {}
        self._kvqual_loaded: dict[str, str] = {}
        self._kvqual_shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._kvqual_axes: dict[str, int] = {}
        self._kvqual_served: dict[str, str] = {}
        self._kvqual_scales: dict[str, list[dict[str, object]]] = {}
        self._kvqual_activity = {"busy_ns": 0, "steps": 0, "tokens": 0}
        extend_path(self.kvqual_config.pythonpath)
        super().__init__(vllm_config, *args, **kwargs)

    # -- the engine's own calls -----------------------------------------------------------------------------------

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Runs ``before_load``, loads the model, digests its parameters before repacking, installs the scales."""
        for path in self.kvqual_config.before_load:
            resolve(path)(self)
        from vllm.model_executor.model_loader import base_loader

        original = base_loader.process_weights_after_loading

        def digesting(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._kvqual_loaded = identity.loaded_digests(model)
            self._kvqual_shapes = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
            self._kvqual_axes = identity.output_axes(model)
            return original(model, *args, **kwargs)

        base_loader.process_weights_after_loading = digesting
        try:
            super().load_model(*args, **kwargs)
        finally:
            base_loader.process_weights_after_loading = original
        if self.model_config.quantization is not None:
            self._kvqual_served = identity.held_digests(self.model_runner.get_model())
        scales.install(self.kvqual_layers(), self.kvqual_config.v_scales)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Makes the KV caches, notes whose each physical tensor is, observes K and V bytes; runs ``after_init``."""
        super().initialize_from_config(kv_cache_config)
        for name, layer in self.kvqual_layers().items():
            cache = layer.kv_cache
            if not isinstance(cache, torch.Tensor) or cache.numel() == 0:
                raise WorkerError(f"layer {name} has no KV cache after initialisation")
            self._kvqual_caches[name] = cache
            self._kvqual_formats[name] = self._declared_format(layer, cache)
            # Before after_init: this is what the backend itself stores. Where its writes go is for routing to say.
            with made_on(cache.device):
                self._kvqual_bytes[name] = self._observed_bytes(layer, cache)
        self._kvqual_scales["before_warmup"] = scales.snapshot(self.kvqual_layers())
        for path in self.kvqual_config.after_init:
            resolve(path)(self)
        # What an arm brings stays for the life of the server; only faults planted by RPC are taken back.
        self.kvqual_undo.clear()

    def compile_or_warm_up_model(self) -> Any:
        """Warms up; the scales are read immediately before graphs are captured, or at its end where none are.

        With ``taps`` in the worker's configuration, full graphs are captured with the static taps on.
        """
        runner = self.model_runner
        capture = getattr(runner, "capture_model", None)
        if capture is not None:

            def capturing(*args: Any, **kwargs: Any) -> Any:
                self._kvqual_scales["before_capture"] = scales.snapshot(self.kvqual_layers())
                if not (self.kvqual_config.taps and has_full_graphs(runner)):
                    return capture(*args, **kwargs)
                return self._capture_with_taps(lambda: capture(*args, **kwargs))

            runner.capture_model = capturing
        try:
            times = super().compile_or_warm_up_model()
        finally:
            if capture is not None:
                del runner.capture_model
        self._kvqual_scales.setdefault("before_capture", scales.snapshot(self.kvqual_layers()))
        return times

    def _capture_with_taps(self, capture: Callable[[], Any]) -> Any:
        """Captures with the static taps on; afterwards they are in the graphs and nowhere else."""
        tokens = int(self.vllm_config.compilation_config.max_cudagraph_capture_size)
        static = StaticTap(
            self.kvqual_layers(),
            tokens=tokens,
            # A captured step may be padded to as many requests as tokens.
            requests=max(tokens, int(self.scheduler_config.max_num_seqs)),
            columns=self._kvqual_runner().columns(),
            dtype=self.model_config.dtype,
        )
        notes = Attributes()
        note_maps(notes, self.kvqual_metadata_builders())
        static.install()
        try:
            captured = capture()
        finally:
            static.remove()
            notes.restore()
        self._kvqual_static = static
        return captured

    def _kvqual_runner(self) -> Runner:
        return runner_of(self.model_runner)

    def execute_model(self, scheduler_output: Any) -> Any:
        """One engine step."""
        window = self._kvqual_window
        if window is not None:
            window.begin_step(scheduler_output)
        started = monotonic_ns()
        output = super().execute_model(scheduler_output)
        self._count(started, scheduler_output.total_num_scheduled_tokens)
        if window is not None:
            window.end_step(output)
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """The sampling half of a step, where the engine splits it off."""
        started = monotonic_ns()
        output = super().sample_tokens(*args, **kwargs)
        self._count(started, 0)
        if self._kvqual_window is not None:
            self._kvqual_window.end_step(output)
        return output

    def _count(self, started: int, tokens: int) -> None:
        self._kvqual_activity["busy_ns"] += monotonic_ns() - started
        if tokens:
            self._kvqual_activity["steps"] += 1
            self._kvqual_activity["tokens"] += tokens

    # -- what faults and arms may use -----------------------------------------------------------------------------

    def kvqual_layers(self) -> dict[str, Any]:
        """Attention layers of this rank by name, in layer order."""
        context = self.vllm_config.compilation_config.static_forward_context
        found = {
            name: layer for name, layer in context.items() if hasattr(layer, "impl") and hasattr(layer, "kv_cache")
        }
        return {name: found[name] for name in layer_order(found)}

    def kvqual_block_size(self) -> int:
        """Tokens per block."""
        return int(self.vllm_config.cache_config.block_size)

    def kvqual_codec(self, name: str) -> formats.Format:
        """The declared encoding of a layer's cells."""
        return self._kvqual_formats[name]

    def kvqual_metadata_builders(self) -> list[Any]:
        """The attention metadata builders of this rank."""
        return self._kvqual_runner().builders

    def _declared_format(self, layer: Any, cache: torch.Tensor) -> formats.Format:
        name = self.kvqual_config.kv_format
        dtype = self.model_config.dtype
        if not is_declared(name):
            return formats.Undeclared(name=name)
        if not formats.needs_layout(name):
            return formats.declared(name, dtype=dtype)
        # The stock cache is permuted inside each tile by the kernel's instruction path: derive it once.
        if self._kvqual_formats:
            return next(iter(self._kvqual_formats.values()))
        if cache.element_size() != formats.stored_as(name, dtype).itemsize:
            raise WorkerError(
                f"layer {self._kvqual_name(layer)}: found a cache of {cache.dtype}, expected"
                f" {formats.stored_as(name, dtype)} for the KV format {name}: give the arm the flag --kv-cache-dtype"
                " that stores it"
            )
        held = Attributes()
        try:
            # Numbers that the cache keeps exactly are exact only where nothing is scaled.
            for which in ("_k_scale_float", "_v_scale_float"):
                held.replace(layer, which, 1.0)
            layout = formats.probe_layout(
                self._writer(layer),
                head_size=layer.impl.head_size,
                block_size=self.kvqual_block_size(),
                kv_heads=layer.impl.num_kv_heads,
                dtype=dtype,
                name=name,
            )
        finally:
            held.restore()
        return formats.declared(name, dtype=dtype, layout=layout)

    def _kvqual_name(self, layer: Any) -> str:
        return next(name for name, other in self.kvqual_layers().items() if other is layer)

    def _observed_bytes(self, layer: Any, cache: torch.Tensor) -> tuple[float | None, float | None]:
        """Bytes per element of K and of V; None of each where nothing is declared and nothing can be observed."""
        try:
            return formats.observe_bytes(
                self._writer(layer), like=cache, head_size=layer.impl.head_size, dtype=self.model_config.dtype
            )
        except Exception:
            if is_declared(self.kvqual_config.kv_format):
                raise
            return None, None

    def _writer(self, layer: Any) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]:
        def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> object:
            return layer.impl.do_kv_cache_update(layer, key, value, cache, slots)

        return write

    def _v_scale(self, index: int) -> float:
        declared = self.kvqual_config.v_scales
        return 1.0 if declared is None else declared[index]

    # -- RPC ------------------------------------------------------------------------------------------------------

    def kvqual_identity(self, options: dict[str, object] | None = None) -> dict[str, object]:
        """What this rank runs, observed now.

        ``options["parts"]`` limits the answer to some of ``layers``, ``parameters``, ``scales``, ``distributions`` and
        ``settings``; without it all are read.
        """
        parts = set((options or {}).get("parts") or _PARTS)  # type: ignore[call-overload]  # checked on the next line
        if not parts <= _PARTS:
            raise WorkerError(f"identity parts {sorted(parts - _PARTS)} are unknown, expected some of {sorted(_PARTS)}")
        layers = self.kvqual_layers()
        record: dict[str, object] = {
            "rank": int(self.rank),
            "arm": self.kvqual_config.arm,
            "kv_format": self.kvqual_config.kv_format,
            "block_size": self.kvqual_block_size(),
            "runner": {
                "kind": self._kvqual_runner().kind,
                "graphs": graph_mode(self.model_runner),
                "taps_in_graphs": self._kvqual_static is not None,
                "taps_bytes": self._kvqual_static.bytes if self._kvqual_static is not None else 0,
            },
        }
        if "device" in parts:
            record["device"] = device.of(next(iter(self._kvqual_caches.values())).device)
        if "layers" in parts:
            record |= self._identity_layers(layers)
        if "parameters" in parts:
            model = self.model_runner.get_model()
            size = int(self.parallel_config.tensor_parallel_size)
            record["parameters"] = {
                "loaded": self._kvqual_loaded,
                "now": identity.served_digests(
                    model, self._kvqual_shapes, loaded=self._kvqual_loaded, after_load=self._kvqual_served
                ),
                "expected": identity.expected_digests(
                    model,
                    self.kvqual_config.model_dir,
                    self.model_config.dtype,
                    # The innermost of the engine's parallel dimensions.
                    rank=int(self.rank) % size,
                    size=size,
                    axes=self._kvqual_axes,
                ),
            }
        if "scales" in parts:
            record["scales"] = {**self._kvqual_scales, "now": scales.snapshot(layers)}
        if "settings" in parts:
            record["settings"] = settings.effective(self.vllm_config)
        if "distributions" in parts:
            records, recorded = [], set()
            on_gpu = next(iter(self._kvqual_caches.values())).device.type == "cuda"
            kernels = identity.loaded_kernels() if on_gpu else {}
            for name in (self.kvqual_config.distribution, *_DISTRIBUTIONS, *kernels.values()):
                distribution, modules = identity.distribution_record(name)
                records.append(distribution)
                recorded |= modules
            checkouts: dict[str, set[str]] = {}
            roots: tuple[Any, ...] = ()
            if self.kvqual_config.checkouts is not None:
                brought, checkouts, roots = identity.checkout_records(self.kvqual_config.checkouts)
                records += brought
            record["distributions"] = records
            packages = ("vllm", "torch", "transformers", *(identity.KERNELS if on_gpu else ()))
            record["modules"] = identity.trace_with_checkouts(packages, recorded, checkouts, roots)
        return record

    def _identity_layers(self, layers: dict[str, Any]) -> dict[str, object]:
        described = []
        for name, layer in layers.items():
            cache = self._kvqual_caches[name]
            k_bytes, v_bytes = self._kvqual_bytes[name]
            described.append(
                {
                    **identity.cache_layout(name, cache),
                    "bound": layer.kv_cache.data_ptr() == cache.data_ptr(),
                    "k_bytes_per_element": k_bytes,
                    "v_bytes_per_element": v_bytes,
                }
            )
        return {
            "attention_backend": {name: backend_name(layer) for name, layer in layers.items()},
            "attention_impl": {name: _qualified(type(layer.impl)) for name, layer in layers.items()},
            "layers": described,
            "pool_bytes": sum(cache.numel() * cache.element_size() for cache in self._kvqual_caches.values()),
        }

    def kvqual_oracle_start(self, options: dict[str, object] | None = None) -> dict[str, object]:
        """Opens an oracle window: plants ``options["fault"]`` where given, then puts the taps on.

        ``options["probe"]`` and ``options["fills"]`` are the window's. No request may be in flight.
        """
        asked = options or {}
        if self._kvqual_window is not None:
            raise WorkerError("an oracle window is open already")
        runner = self._kvqual_runner()
        if runner.in_flight():
            raise WorkerError(
                f"{runner.in_flight()} requests are in flight, expected none before an oracle window opens"
            )
        if runner.unsupported():
            raise WorkerError(f"the runner uses {', '.join(runner.unsupported())}, which the taps do not follow")
        fault = asked.get("fault")
        if fault is not None:
            self.kvqual_plant(str(fault))
        probe, fills = asked.get("probe") is True, asked.get("fills") is True
        window = OracleTaps(
            layers=self.kvqual_layers(),
            views=self._views(),
            runner=self.model_runner,
            block_size=self.kvqual_block_size(),
            rounding=float(torch.finfo(self.model_config.dtype).eps) / 2,
            probe=probe,
            fills=fills,
            seed=self._kvqual_windows,
            # Both need each layer to be called by itself: such a window lets every step run without graphs.
            static=None if probe or fills else self._kvqual_static,
        )
        window.install()
        self._kvqual_window = window
        self._kvqual_windows += 1
        return {"installed": True, "fault": fault}

    def _views(self) -> list[LayerView]:
        """The attention layers as the oracles see them."""
        size = self.kvqual_block_size()
        for name, cache in self._kvqual_caches.items():
            if cache.dim() != 4 or cache.shape[2] != size:
                raise WorkerError(
                    f"layer {name} has a cache of {tuple(cache.shape)}, expected [blocks, heads, {size}, content]: its"
                    " kernels divide the scheduler's blocks"
                )
        return [
            LayerView(
                name=name,
                cache=self._kvqual_caches[name],
                codec=self._kvqual_formats[name],
                v_scale=self._v_scale(index),
                query_heads=layer.impl.num_heads,
                kv_heads=layer.impl.num_kv_heads,
                head_size=layer.impl.head_size,
                softmax_scale=float(layer.impl.scale),
            )
            for index, (name, layer) in enumerate(self.kvqual_layers().items())
        ]

    def kvqual_oracle_finish(self) -> dict[str, object]:
        """Closes the window, takes back a planted fault and returns the record of this rank."""
        window = self._kvqual_window
        if window is None:
            raise WorkerError("no oracle window is open")
        try:
            record = window.finish()
        finally:
            window.remove()
            self._kvqual_window = None
            self.kvqual_unplant()
        return {"rank": int(self.rank), **record}

    def kvqual_hold_blocks(self, free_blocks: int) -> dict[str, object]:
        """Holds all but the last ``free_blocks`` of the engine's blocks; see :func:`pytest_kvqual.worker.pool.hold`."""
        return pool.hold(free_blocks)

    def kvqual_release_blocks(self) -> dict[str, object]:
        """Gives the held blocks back."""
        return pool.release()

    def kvqual_taps(self) -> dict[str, object]:
        """Whether any tap or fault is in place, and how many blocks of the pool are held.

        Taps that the graphs were captured with are in place for the life of the server.
        """
        return {
            "installed": self._kvqual_static is not None
            or any(
                held is not None and held.installed
                for held in (self._kvqual_window, self._kvqual_dispatch, self._kvqual_inputs)
            ),
            "faults": len(self.kvqual_undo),
            "held": pool.held(),
        }

    def kvqual_plant(self, fault: str) -> dict[str, object]:
        """Plants a seeded fault by its name in the catalogue or as ``module:function``."""
        if ":" in fault:
            plant = fault
        else:
            catalogue = resolve("pytest_kvqual.faults.catalogue:lookup")
            plant = str(catalogue(fault))
        resolve(plant)(self)
        self._kvqual_without_graphs()
        return {"planted": fault}

    def _kvqual_without_graphs(self) -> None:
        """While a fault is planted no step runs as a graph: a fault acts in Python, which a replay does not enter.

        Kernels are read with the graphs all the same: a reading without them would differ from the healthy one whatever
        the fault.
        """
        planted = bool(self.kvqual_undo) and self._kvqual_dispatch is None
        if not planted:
            self._kvqual_eager.restore()
        elif not self._kvqual_eager and graph_mode(self.model_runner) != "NONE":
            self._kvqual_runner().eager(self._kvqual_eager)

    def kvqual_unplant(self) -> dict[str, object]:
        """Takes back every planted fault."""
        undone = len(self.kvqual_undo)
        while self.kvqual_undo:
            self.kvqual_undo.pop()()
        self._kvqual_without_graphs()
        return {"undone": undone}

    def kvqual_dispatch_start(self) -> dict[str, object]:
        """Profiles every layer's cache update and attention until :meth:`kvqual_dispatch_finish`."""
        if self._kvqual_dispatch is not None:
            raise WorkerError("a dispatch reading is open already")
        if self._kvqual_window is not None:
            # The oracles' own operators would count as the layer's.
            raise WorkerError("an oracle window is open, expected none during a dispatch reading")
        reader = DispatchReader(
            self.kvqual_layers(), runner=self._kvqual_runner() if has_full_graphs(self.model_runner) else None
        )
        # Before the reader's own hooks: what was put on last comes off first.
        self._kvqual_dispatch = reader
        self._kvqual_without_graphs()
        try:
            reader.start()
        except BaseException:
            self._kvqual_dispatch = None
            self._kvqual_without_graphs()
            raise
        return {"installed": True}

    def kvqual_dispatch_finish(self) -> dict[str, object]:
        """What each layer of this rank is and which kernels it ran since :meth:`kvqual_dispatch_start`."""
        reader, self._kvqual_dispatch = self._kvqual_dispatch, None
        if reader is None:
            raise WorkerError("no dispatch reading is open")
        layers = reader.finish()
        self._kvqual_without_graphs()
        return {"rank": int(self.rank), "layers": layers}

    def kvqual_inputs_start(self) -> dict[str, object]:
        """Digests the inputs of every step until :meth:`kvqual_inputs_finish`."""
        if self._kvqual_inputs is not None:
            raise WorkerError("step inputs are being digested already")
        inputs = StepInputs(
            builders=self.kvqual_metadata_builders(), runner=self.model_runner, block_size=self.kvqual_block_size()
        )
        inputs.start()
        self._kvqual_inputs = inputs
        return {"installed": True}

    def kvqual_inputs_finish(self) -> dict[str, object]:
        """Steps of this rank since :meth:`kvqual_inputs_start` and the digest of each."""
        inputs, self._kvqual_inputs = self._kvqual_inputs, None
        if inputs is None:
            raise WorkerError("no step inputs are being digested")
        return {"rank": int(self.rank), **inputs.finish()}

    def kvqual_activity(self) -> dict[str, object]:
        """Time spent in engine steps since the start (ns), steps with tokens, and tokens computed."""
        return dict(self._kvqual_activity)


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


__all__ = ["CONFIG_KEY", "ServingWorker", "backend_name"]
