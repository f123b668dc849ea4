"""A second device where there is none: tensors are marked as lying on it, and operators that mix the two are refused.

Tensors that are made inside :meth:`SecondDevice.default` without a device lie there, as do those made with the device
of another tensor, and results of operators on them. ``cpu()`` and ``to("cpu")`` of a marked tensor are copies that are
not. What a real device would do with a mixed operator is an error, so it is one here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

# Copies between devices, and reads with an index that lies on the host, are what real devices allow.
_ACROSS = frozenset({"aten::copy_", "aten::_to_copy", "aten::lift_fresh", "aten::lift_fresh_copy"})
_INDEXED = frozenset({"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"})


class MixedError(AssertionError):
    """An operator was given tensors of both devices."""


class SecondDevice(AbstractContextManager["SecondDevice"]):
    """Watches every operator while it is entered."""

    def __init__(self) -> None:
        self._marked = WeakIdKeyDictionary()
        self._default = False
        self._watching = True
        self._stack = ExitStack()

    def __enter__(self) -> SecondDevice:
        self._stack.enter_context(_Functions(self))
        self._stack.enter_context(_Operators(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def mark(self, tensor: torch.Tensor) -> torch.Tensor:
        """Puts a tensor on the second device."""
        self._marked[tensor] = True
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies there; a tensor of one element without dimensions may lie anywhere."""
        return tensor in self._marked

    @contextmanager
    def default(self, on: bool) -> Iterator[None]:
        """Whether tensors that are made without a device lie there."""
        before, self._default = self._default, on
        try:
            yield
        finally:
            self._default = before

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """A backend's own code, which runs on a device as it likes."""
        before, self._watching = self._watching, False
        try:
            yield
        finally:
            self._watching = before

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._watching:
            return func(*args, **kwargs)
        name = str(func._schema.name)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = [leaf for leaf in given if self.holds(leaf)]
        there = [leaf for leaf in given if not self.holds(leaf) and leaf.dim()]
        if name in _INDEXED:
            # An index may come from the host; what is indexed and what is put may not be of both.
            values = [leaf for leaf in (args[0], *args[2:3]) if isinstance(leaf, torch.Tensor)]
            if any(self.holds(one) for one in values) and any(not self.holds(one) and one.dim() for one in values):
                raise MixedError(f"{name}: values of both devices")
            if not self.holds(args[0]) and here:
                raise MixedError(f"{name}: an index on the second device into a tensor on the host")
        elif here and there and name not in _ACROSS:
            raise MixedError(f"{name}: {[tuple(one.shape) for one in here]} and {[tuple(one.shape) for one in there]}")
        result = func(*args, **kwargs)
        if name == "aten::copy_":
            return result
        marked = bool(here) if given else self._default
        if given and not here and name.startswith(("aten::new_", "aten::lift_fresh")):
            marked = self._default if name.startswith("aten::lift_fresh") else False
        if marked:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.mark(leaf)
        return result


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook on subclasses
    def __init__(self, device: SecondDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._device.run(func, args, dict(kwargs or {}))


class _Functions(TorchFunctionMode):
    """What no operator stands for on a host: a copy to where the tensor is already, and a look at its memory."""

    def __init__(self, device: SecondDevice) -> None:
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if not self._device._watching:
            return func(*args, **kwargs)
        held = args and isinstance(args[0], torch.Tensor) and self._device.holds(args[0])
        if held and name in ("numpy", "__array__"):
            raise MixedError(f"Tensor.{name} of a tensor on the second device")
        wanted = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, torch.device | str)]
        if held and (name == "cpu" or (name == "to" and "cpu" in wanted)):
            return self._moved(args, there=False)
        # The code under test names the host in words, and another device only as that of another tensor.
        if args and not held and name == "to" and any(isinstance(one, torch.device) for one in wanted):
            return self._moved(args, there=True)
        if kwargs.get("device") is not None:
            with self._device.default(kwargs["device"] != "cpu"):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _moved(self, args: tuple[Any, ...], *, there: bool) -> torch.Tensor:
        with self._device.default(there):
            # Made from nothing: it lies where the default says.
            made = torch.empty(tuple(args[0].shape), dtype=args[0].dtype)
        made.copy_(args[0])
        kinds = [one for one in args[1:] if isinstance(one, torch.dtype)]
        return made.to(kinds[0]) if kinds else made
