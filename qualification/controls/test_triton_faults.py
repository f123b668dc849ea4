"""Each seeded fault that a backend without replaceable parts can have, on the Triton backend in its interpreter.

    pytest qualification/controls/test_triton_faults.py

Takes tens of minutes on a CPU. ``scripts/device_check.py`` asks the same of the compiled kernels, in minutes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from pytest_kvqual.faults import FAULTS

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("triton_cases", reason="its cases are among the tests of a checkout, in tests/support")

import triton_cases as cases

from pytest_kvqual.faults import matrix

pytestmark = [pytest.mark.controls]

PLANTED = cases.applicable()


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Runs a function in a child whose Triton interprets."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=cases.interpret) as pool:
        yield lambda body, *arguments: pool.submit(body, *arguments).result()


@pytest.mark.parametrize("scenario", sorted({FAULTS[name].scenario for name in PLANTED}))
def test_no_gate_objects_to_the_healthy_triton_backend(interpreted: Callable[..., Any], scenario: str) -> None:
    """Without a fault no gate has a finding."""
    assert interpreted(cases.catalogued, None, scenario) == {}


@pytest.mark.parametrize("name", PLANTED)
def test_the_claiming_gate_is_the_first_to_object_to_the_triton_backend(
    interpreted: Callable[..., Any], name: str
) -> None:
    """The gates before the claiming one are silent, it is not; a benign difference is met with silence."""
    cell = matrix.Cell(fault=FAULTS[name], findings=interpreted(cases.catalogued, name, FAULTS[name].scenario))
    assert cell.right, str(cell)
