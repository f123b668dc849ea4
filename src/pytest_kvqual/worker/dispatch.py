"""Which kernels each attention layer really ran, by the profiler's own names.

A configuration says what was asked for; a backend that cannot serve a shape, a dtype or a phase may run something else
and answer correctly. So each layer's cache update and attention are wrapped in a named profiler range, and what ran
inside it is read from the trace: operators (``aten::bmm``, ``_C::cpu_attention_with_kv_cache``) and, where there is a
device, the kernels launched from inside it.

Under a full graph no Python runs during a replay and no layer's range is entered. The kernels that a replay launches
are known for the step as a whole, not by layer: each layer has all of them, beside those that it ran in steps without a
graph (a prompt's, usually). A pattern that a declared kernel must match is then met by any kernel of the step, and one
that none may match by none of the whole step.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

from pytest_kvqual.worker.attributes import Attributes
from pytest_kvqual.worker.runner import Runner
from pytest_kvqual.worker.wire import WorkerError

_PREFIX = "kvqual.dispatch/"
_REPLAY = "kvqual.replay"
_GRAPH_LAUNCH = "GraphLaunch"
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "runtime", "driver"})
_DEVICE = frozenset({"kernel", "concurrent_kernel", "gpu_memcpy", "gpu_memset"})
# The profiler's own operators, which a range brings with it.
_OWN = "profiler::"


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """One entry of a profiler trace.

    ``kind`` is the profiler's activity type: ``user_annotation`` (a range), ``cpu_op``, ``cuda_runtime`` or
    ``cuda_driver`` (a launch), ``kernel`` and the copies of a device. Times are in nanoseconds on one clock.
    ``correlation`` joins a launch with what it launched; ``linked`` names the ``cpu_op`` that was active at a launch.
    """

    kind: str
    name: str
    start: int
    end: int
    thread: int
    correlation: int
    linked: int


def attribute(activities: Iterable[Activity], layers: Iterable[str]) -> dict[str, set[str]]:
    """Names of the operators and device kernels inside each layer's ranges, nested ones included.

    An operator belongs to the range of its thread that contains it. A kernel runs later than its launch, so it belongs
    to the range that contains the launch; where the trace has no launch, to that of the operator it is linked to.
    A launch has the thread number of the operating system and is placed by time alone. A kernel of a graph that was
    launched in the range of a replay belongs to every layer.
    """
    found: dict[str, set[str]] = {name: set() for name in layers}
    activities = list(activities)
    replays = _graph_launches(activities)
    ranges = sorted(
        (entry.start, entry.end, entry.thread, entry.name.removeprefix(_PREFIX))
        for entry in activities
        if entry.kind == "user_annotation" and entry.name.startswith(_PREFIX)
    )
    starts = [start for start, *_ in ranges]

    def layer_of(entry: Activity, *, any_thread: bool) -> str | None:
        # The last range that began and has not ended contains the entry: an attention may call its own cache update.
        index = bisect.bisect_right(starts, entry.start) - 1
        while index >= 0:
            _, end, thread, name = ranges[index]
            if (any_thread or thread == entry.thread) and entry.end <= end:
                return name
            index -= 1
        return None

    launched: dict[int, str] = {}
    operators: dict[int, str] = {}
    for entry in activities:
        if entry.kind == "cpu_op" and not entry.name.startswith(_OWN):
            name = layer_of(entry, any_thread=False)
            if name is not None:
                found.setdefault(name, set()).add(entry.name)
                operators[entry.correlation] = name
        elif entry.kind in _LAUNCHES:
            name = layer_of(entry, any_thread=True)
            if name is not None:
                launched[entry.correlation] = name
    for entry in activities:
        if entry.kind in _DEVICE and entry.correlation in replays:
            for names in found.values():
                names.add(entry.name)
        elif entry.kind in _DEVICE:
            name = launched.get(entry.correlation) or operators.get(entry.linked)
            if name is not None:
                found.setdefault(name, set()).add(entry.name)
    return found


def _graph_launches(activities: Iterable[Activity]) -> set[int]:
    """Correlations of the graphs that were launched inside a replay's range; piecewise graphs are launched outside."""
    activities = list(activities)
    spans = sorted(
        (entry.start, entry.end) for entry in activities if entry.kind == "user_annotation" and entry.name == _REPLAY
    )
    starts = [start for start, _ in spans]
    found = set()
    for entry in activities:
        if entry.kind in _LAUNCHES and _GRAPH_LAUNCH in entry.name:
            index = bisect.bisect_right(starts, entry.start) - 1
            if index >= 0 and entry.end <= spans[index][1]:
                found.add(entry.correlation)
    return found


def backend_name(layer: Any) -> str:
    """The attention backend's name: its ``kvqual_name`` where an arm replaced a stock one, else the engine's name."""
    backend = layer.attn_backend
    return str(getattr(backend, "kvqual_name", None) or backend.get_name())


class DispatchReader:
    """Profiles the cache update and the attention of every layer between :meth:`start` and :meth:`finish`.

    Args:
        layers: Attention layers by name, each with ``impl``, ``kv_cache`` and ``attn_backend``.
        runner: The engine's model runner where it replays full graphs.
    """

    def __init__(self, layers: Mapping[str, Any], *, runner: Runner | None = None) -> None:
        self._layers = dict(layers)
        self._runner = runner
        self._attributes = Attributes()
        self._profiler: Any = None

    @property
    def installed(self) -> bool:
        """Whether any range is on."""
        return bool(self._attributes)

    def start(self) -> None:
        """Puts the ranges on and starts the profiler.

        Raises:
            WorkerError: This reader is started already.
        """
        if self._profiler is not None:
            raise WorkerError("a dispatch reading is open already")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(
            activities=activities,
            # The engine may answer RPCs on another thread than the one that runs its steps.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        profiler.start()
        self._profiler = profiler
        try:
            if self._runner is not None:
                self._runner.follow(self._attributes, before=_nothing, replayed=_nothing, label=_REPLAY)
            for name, layer in self._layers.items():
                for method in ("do_kv_cache_update", "forward"):
                    self._tap(layer.impl, method, _PREFIX + name)
        except AttributeError as error:
            self.remove()
            raise WorkerError(f"{error}, expected do_kv_cache_update and forward of every layer") from error

    def _tap(self, holder: Any, method: str, label: str) -> None:
        original = getattr(holder, method)

        def ranged(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(label):
                return original(*args, **kwargs)

        self._attributes.replace(holder, method, ranged)

    def remove(self) -> None:
        """Takes the ranges off and stops the profiler; nothing is read."""
        self._attributes.restore()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def finish(self) -> dict[str, dict[str, object]]:
        """Takes the ranges off, stops the profiler and returns what each layer is and ran.

        Returns:
            Per layer ``{"backend": str, "impl": qualified class name, "cache_dtype": str(dtype), "kernels": [names,
            sorted]}``. ``kernels`` is empty for a layer that was not called.

        Raises:
            WorkerError: No reading is open, or the profiler kept no trace.
        """
        profiler = self._profiler
        if profiler is None:
            raise WorkerError("no dispatch reading is open")
        self.remove()
        # The trace as recorded: torch's own table of it takes sixty times as long to build.
        results = getattr(profiler.profiler, "kineto_results", None)
        if results is None:
            raise WorkerError("the profiler kept no trace, expected one from torch built with Kineto")
        kernels = attribute(
            (
                Activity(
                    kind=str(event.activity_type()),
                    name=str(event.name()),
                    start=int(event.start_ns()),
                    end=int(event.end_ns()),
                    thread=int(event.start_thread_id()),
                    correlation=int(event.correlation_id()),
                    linked=int(event.linked_correlation_id()),
                )
                for event in results.events()
            ),
            self._layers,
        )
        return {
            name: {
                "backend": backend_name(layer),
                "impl": f"{type(layer.impl).__module__}.{type(layer.impl).__qualname__}",
                "cache_dtype": str(layer.kv_cache.dtype),
                "kernels": sorted(kernels[name]),
            }
            for name, layer in self._layers.items()
        }


def _nothing() -> None:
    pass
