"""The Triton kernels through the compiler, for a Hopper GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.engine  # seconds of compiling; no engine is booted

CODE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pytest_kvqual.kv.backends import triton_kernels as kernels

SIZES = {"HEADS": 32, "GROUP": 4, "HEAD": 128, "D": 128, "BLOCK": 16, "N": 64, "SPLITS": 16, "SHORTEST": 256}
SIZES |= {"TOKENS": 16, "H": 4, "CAST": False, "WIDEN": False}
KERNELS = (
    ("kvqual_write_cells", 4, 3, {}),
    ("kvqual_decode_parts", 4, 5, {"M": 16}),
    ("kvqual_merge_parts", 4, 3, {}),
    ("kvqual_attend_rows", 8, 2, {"M": 128, "ROWS": 32}),
)
assert not kernels.INTERPRETED
for sixteen, eight in (("fp16", False), ("bf16", True)):
    pointers = {"values": "*u8" if eight else "*" + sixteen, "value": "*" + sixteen, "slots": "*i64"}
    pointers |= dict.fromkeys(("query", "output", "key", "keys"), "*" + sixteen)
    pointers |= dict.fromkeys(("table", "lengths", "starts"), "*i32")
    pointers |= dict.fromkeys(("maxima", "sums", "partial"), "*fp32")
    pointers |= dict.fromkeys(("scale", "factor", "v_scale"), "fp32")
    for name, warps, stages, more in KERNELS:
        kernel = getattr(kernels, name)
        names = kernel.arg_names
        constants = {key: value for key, value in {**SIZES, "V8": eight, **more}.items() if key in names}
        signature = {key: "constexpr" if key in constants else pointers.get(key, "i32") for key in names}
        aligned = [key for key in names if signature[key][0] == "*" or "_" in key and signature[key] == "i32"]
        source = ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(names.index(key),): value for key, value in constants.items()},
            attrs={(names.index(key),): [["tt.divisibility", 16]] for key in aligned},
        )
        options = {"num_warps": warps, "num_stages": stages}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.asm["cubin"][:4] == b"\\x7fELF"
        assert made.metadata.shared <= 232448, (name, made.metadata.shared)
        print(name, sixteen, eight, made.metadata.shared)
"""


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """Qwen3-8B's sizes, both formats and types, give machine code for capability 9.0 that fits its shared memory."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 8
