"""A study of two gates."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pytest_kvqual.study.model import GatePlan, Study


@pytest.fixture
def small_study() -> Study:
    """Gates identity and routing, both required; the other parts are not looked at."""
    parts: dict[str, Any] = {name: Mock() for name in ("model", "engine", "oracle", "parity", "nll")}
    return Study(
        name="small",
        directory=Path("/nowhere"),
        platform="cpu",
        arms={},
        lengths={},
        schedule="waves",
        determinism="order-invariant",
        gates=tuple(GatePlan(name=name, state="required", timing=False) for name in ("identity", "routing")),
        preservation={},
        gsm8k_source=None,
        fidelity=None,
        timing={},
        waivers=(),
        **parts,
    )
