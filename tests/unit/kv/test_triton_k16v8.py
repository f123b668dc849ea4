"""The Triton backend on CPU tensors, in Triton's interpreter: bits, attention against float64, seeded faults.

The bodies are in ``tests/support/triton_cases.py`` and run in one child process. What the compiler makes of the kernels
is not shown here; ``engine/test_triton_compiles.py`` compiles them, and ``scripts/device_check.py`` runs them on a GPU.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import triton_cases as cases  # noqa: E402 - torch may be absent

from pytest_kvqual.errors import FormatError  # noqa: E402
from pytest_kvqual.kv.backends import triton_k16v8  # noqa: E402

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    """Runs a body in the child and returns or raises what it does."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=cases.interpret) as pool:
        yield lambda body, *arguments: pool.submit(body, *arguments).result(timeout=240)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_byte_is_read_as_its_value(interpreted: Run, dtype: str) -> None:
    """Each of the 256 E4M3 bytes, signed zeros and NaN included, comes out as the definition says."""
    interpreted(cases.bytes_read, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("kv_format", "v_scale"), [("k16v8", 1.0), ("k16v8", 0.0137), ("k16v16", 0.5)])
def test_every_value_is_written_as_declared(interpreted: Run, kv_format: str, dtype: str, v_scale: float) -> None:
    """All 65,536 values as K and as V land as the declared bytes in their slots; no other byte of the pool changes."""
    interpreted(cases.values_written, kv_format, dtype, v_scale)


@pytest.mark.parametrize(
    ("name", "kv_format", "dtype"),
    [
        ("qwen3-8b", "k16v8", "float16"),
        ("phi-4", "k16v8", "bfloat16"),
        ("smollm2", "k16v8", "bfloat16"),
        ("qwen3-8b", "k16v16", "bfloat16"),
    ],
)
def test_named_geometries_against_float64(interpreted: Run, name: str, kv_format: str, dtype: str) -> None:
    """Prefill, chunk and decode rows lie within the oracle's tolerance; 5 % more, or a row off, does not."""
    interpreted(cases.named_geometry, name, kv_format, dtype)


def test_drawn_geometries_against_float64(interpreted: Run) -> None:
    """Any head counts, head and block sizes, batches, table widths and scales lie within the oracle's tolerance."""
    interpreted(cases.drawn_geometries, 6)


def test_parts_of_a_long_history_are_merged(interpreted: Run) -> None:
    """A history of all parts and those around one and two parts equal float64; the workspace's size changes no bit."""
    interpreted(cases.long_history)


def test_bits_of_a_row_hang_on_its_request(interpreted: Run) -> None:
    """A request alone, among others in another order, or under a wider table has the same bits."""
    interpreted(cases.bits_of_a_row)


def test_unwritten_cells_reach_no_output(interpreted: Run) -> None:
    """NaN and large numbers in cells that nobody wrote change no bit; in a written cell they do."""
    interpreted(cases.unwritten_cells)


def test_padding_comes_back_as_zero(interpreted: Run) -> None:
    """Rows behind the last request, and rows of a request of no positions, are zero."""
    interpreted(cases.padding)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("cells", "FormatError: found a cache of torch.uint8"),
        ("strided", "FormatError: found query, output or block table with a strided"),
        ("rows", "FormatError: found key (1, 3, 16)"),
        ("type", "FormatError: found a cache of torch.uint8"),
        ("workspace", "FormatError: found a workspace of (1, 2, 1, 16)"),
        ("positions", "FormatError: found a request with more query rows than positions"),
        ("kv-heads", "FormatError: found a key of 6 heads, expected the 3 of the cache"),
        ("heads", "FormatError: found 7 query heads over 3"),
        ("output", "FormatError: found 6 query heads over 3, 1 rows of output for 3"),
        ("lengths", "FormatError: found 6 query heads over 3, 1 rows of output for 1, 0 lengths"),
        ("starts", "FormatError: found 6 query heads over 3, 1 rows of output for 1, 1 lengths and 1 starts"),
    ],
)
def test_what_does_not_fit_is_refused(interpreted: Run, call: str, message: str) -> None:
    """Wrong cells, rows, types and workspaces are one line, before a kernel runs."""
    assert interpreted(cases.refused, call).startswith(message)


def test_another_format_is_refused() -> None:
    """Only K16/V8 and K16/V16 have kernels."""
    with pytest.raises(FormatError, match="found format 'k8v8', expected k16v8 or k16v16"):
        triton_k16v8.for_format("k8v8")


@pytest.mark.parametrize("kv_format", ["k16v8", "k16v16"])
def test_a_healthy_backend_is_met_with_silence(interpreted: Run, kv_format: str) -> None:
    """No oracle objects to prefill and decode steps with fingerprints, nor, for K16/V8, with fills."""
    flags = {"probe": True, "fills": kv_format == "k16v8"}
    assert interpreted(cases.under_the_oracles, str(cases.SMALL), kv_format, "", "", flags) == 0


@pytest.mark.parametrize(
    ("plant", "section", "flags"),
    [
        ("write_before_block_start", "routing", {}),
        ("first_block_twice", "placement", {"probe": True}),
        ("heads_turned", "placement", {}),
        ("previous_lengths_and_table", "stale-maps", {}),
        ("rows_shifted", "shifted-outputs", {}),
        ("zero_times_unwritten", "replay", {"fills": True}),
    ],
)
def test_planted_faults_are_seen(interpreted: Run, plant: str, section: str, flags: dict[str, Any]) -> None:
    """Each planted fault makes the section object that it is for."""
    assert interpreted(cases.under_the_oracles, str(cases.SMALL), "k16v8", plant, section, flags) > 0


def test_triton_is_imported_by_the_first_call() -> None:
    """Neither the module nor the other backends nor the plugin import Triton; on a CPU the first call refuses."""
    code = (
        "import sys, torch\n"
        "import pytest_kvqual.plugin, pytest_kvqual.kv.backends.k16v8, pytest_kvqual.transfer.check\n"
        "from pytest_kvqual.kv.backends import triton_k16v8\n"
        "from pytest_kvqual.errors import FormatError\n"
        "assert 'triton' not in sys.modules\n"
        "x = torch.zeros(1, 1, 16).bfloat16()\n"
        "try:\n"
        "    triton_k16v8.write(x, x, torch.zeros(1, 1, 8, 48).byte(), torch.zeros(1).long())\n"
        "except FormatError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "expected a GPU, or TRITON_INTERPRET=1 in the environment before Triton is imported" in done.stdout
