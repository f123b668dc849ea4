"""A captured graph on a CPU: the operators of one step over fixed tensors, re-run without the Python that made them.

What a device graph does to a step, this does where there is no device. Python runs once, at capture; a replay re-runs
the recorded operators on the very tensors of the capture and writes each result where the captured one lies. So a new
value takes effect only if it is copied into a captured input, constants computed on the host at capture stay, and what
no operator writes keeps its content from the replay before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytest_kvqual.worker.wire import WorkerError

# Read a tensor on the host without an operator that a dispatch mode would see.
_HOST_READS = frozenset({"tolist", "numpy", "__array__", "cpu"})
_ALLOCATIONS = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
)
_INDEXED = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})


def _refuse(name: str, why: str) -> WorkerError:
    return WorkerError(f"found {name}, which {why}, expected operators of fixed shapes only, in a captured step")


def _masked(arguments: tuple[Any, ...]) -> bool:
    indices = arguments[1] if len(arguments) > 1 else ()
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices or ())


class _HostReads(TorchFunctionMode):
    """Refuses the reads that no operator stands for."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HOST_READS:
            raise _refuse(f"Tensor.{name}", "reads values on the host")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook on subclasses
    """Runs each operator and keeps it with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.calls: list[_Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        # Under inference mode composite operators arrive whole; what they are made of decides whether they may be held.
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        name = str(func._schema.name)
        if name in _INDEXED:
            if _masked(args):
                raise _refuse(name, "takes a mask and has a shape that depends on values")
        elif torch.Tag.dynamic_output_shape in func.tags:
            raise _refuse(name, "has a shape that depends on values")
        elif torch.Tag.data_dependent_output in func.tags:
            raise _refuse(name, "reads values on the host")
        if name in ("aten::_to_copy", "aten::copy_") and _leaves_device(args, kwargs):
            raise _refuse(name, "copies from a device to the host")
        result = func(*args, **kwargs)
        self.calls.append(_Call(name, func, args, kwargs, result))
        return result


def _leaves_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    devices = [leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    if kwargs.get("device") is not None:
        devices.insert(0, torch.device(kwargs["device"]).type)
    return len(devices) > 1 and devices[0] == "cpu" and devices[1] != "cpu"


class _Call:
    __slots__ = ("_args", "_func", "_kept", "_kwargs", "_passive", "name")

    def __init__(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.name = name
        self._func, self._args, self._kwargs = func, args, kwargs
        self._kept = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        # A view is where it was; an allocation of a graph is memory that keeps its content.
        self._passive = bool(func.is_view) or name in _ALLOCATIONS

    def replay(self) -> None:
        if self._passive:
            return
        fresh = [
            leaf for leaf in tree_leaves(self._func(*self._args, **self._kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        for kept, new in zip(self._kept, fresh, strict=True):
            # In-place and out= operators return what they wrote to.
            if kept is not new and kept.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                kept.copy_(new)


class RecordedStep:
    """Records ``step`` by running it once; :meth:`replay` runs it again over the same tensors.

    The inputs of the step are the tensors that it reads from outside: to replay with new values, copy them into those.

    Args:
        step: Called once, without arguments. Its result's tensors are rewritten by each replay.

    Raises:
        WorkerError: The step used an operator whose outcome the host must look at: a value read back, a shape that
            depends on values, a mask as an index.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        recorder = _Recorder()
        with _HostReads(), recorder:
            self.result = step()
        self._calls = recorder.calls

    @property
    def operators(self) -> tuple[str, ...]:
        """The recorded operators in order, as ``namespace::name``."""
        return tuple(call.name for call in self._calls)

    def replay(self) -> None:
        """Runs the recorded operators again, in order; no Python of the step runs."""
        # Tensors made in inference mode may be written only in it; others may be in either.
        with torch.inference_mode():
            for call in self._calls:
                call.replay()
