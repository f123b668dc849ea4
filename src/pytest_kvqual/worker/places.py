"""Where tensors are made that are made without a device: beside the caches, or on the host as the engine expects it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def made_on(device: torch.device) -> AbstractContextManager[Any]:
    """Tensors that are made inside without a device are made on ``device``."""
    return nullcontext() if device.type == "cpu" else device


def made_by_the_engine(device: torch.device) -> AbstractContextManager[Any]:
    """Inside :func:`made_on`: as if outside it. The engine's own code makes its host tensors without a device."""
    return nullcontext() if device.type == "cpu" else torch.device("cpu")
