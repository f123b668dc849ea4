"""The golden command lines against the argument parser of the installed vLLM. It is imported; no engine boots."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "argv"
STOCK = "vllm.entrypoints.openai.api_server"
#: By arm: the backend and the FlashAttention version that vLLM must be asked for.
SELECTED = {
    "native-flashinfer": ("FLASHINFER", None, False),
    "native-fa3": ("FLASH_ATTN", 3, None),
    "candidate": ("FLASHINFER", None, False),
    "triton-k16v8": ("CUSTOM", None, None),
}


def test_every_arm_of_every_study_is_parsed(tmp_path: Path) -> None:
    """The server's parser, and that of the reference in process, take each command line, and read what it means."""
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    server = make_arg_parser(FlexibleArgumentParser())
    in_process = EngineArgs.add_cli_args(FlexibleArgumentParser())
    seen = 0
    for file in sorted(FOLDER.glob("*.json")):
        for key, command in json.loads(file.read_text()).items():
            argv = command["argv"]
            # With the hub switched off a folder that is not there counts as the name of a repository, and is refused.
            flags = [str(tmp_path) if word == "/model" else word for word in argv[argv.index(STOCK) + 1 :]]
            args: Any = server.parse_args(flags)
            validate_parsed_serve_args(args)
            assert (args.host, args.port) == ("127.0.0.1", 8000), key
            _check(AsyncEngineArgs.from_cli_args(args), flags, key)
            # The reference has the same flags without those of the server alone.
            _check(EngineArgs.from_cli_args(in_process.parse_args(flags[flags.index("--model") :])), flags, key)
            seen += 1
    assert seen >= 12


def _check(engine: Any, flags: list[str], key: str) -> None:
    """The parsed arguments are those that the command line spells."""
    *_, length, arm = key.split("/")
    given = {flag: value for flag, value in pairwise(flags) if flag.startswith("--")}
    assert engine.kv_cache_memory_bytes == int(given["--kv-cache-memory-bytes"]), key
    assert engine.block_size == int(given["--block-size"]), key
    assert engine.max_model_len == int(given["--max-model-len"]) > int(length), key
    assert engine.worker_cls == given["--worker-cls"], key
    assert engine.enable_prefix_caching is False, key
    assert engine.additional_config["kvqual"]["arm"] == arm, key
    if engine.additional_config["kvqual"]["distribution"] != "vllm":
        return
    backend, version, trtllm = SELECTED[arm]
    chosen = engine.attention_backend
    assert getattr(chosen, "name", chosen) == backend, key
    assert engine.attention_config.flash_attn_version == version, key
    assert engine.attention_config.use_trtllm_attention is trtllm, key
    compilation = engine.compilation_config
    assert int(compilation.mode) == 3, key
    assert compilation.cudagraph_mode.name == "FULL_AND_PIECEWISE", key
    assert compilation.cudagraph_capture_sizes == [1, 2, 4, 8, 16, 24, 32], key
    assert engine.async_scheduling is False, key
    assert engine.quantization == ("awq_marlin" if key.startswith("awq/") else None), key
    assert engine.dtype == ("float16" if key.startswith("awq/") else "bfloat16"), key
