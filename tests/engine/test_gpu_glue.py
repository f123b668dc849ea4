"""The glue of the Triton backend, against the pinned engine's own classes, without a server and without a GPU."""

from __future__ import annotations

import multiprocessing
import tomllib
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton_cases as cases

from pytest_kvqual.errors import FormatError

pytestmark = pytest.mark.engine

BACKENDS = [("TritonK16V8Backend", "k16v8"), ("TritonK16V16Backend", "k16v16")]


@pytest.fixture
def glue(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The glue module; what a test registers is undone."""
    from vllm.v1.attention.backends import registry

    from pytest_kvqual.kv.backends import vllm_gpu

    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", dict(registry._ATTN_OVERRIDES))
    return vllm_gpu


@pytest.mark.parametrize(
    ("register", "name"),
    [("register_triton_k16v8", "KVQUAL_TRITON_K16V8"), ("register_triton_k16v16", "KVQUAL_TRITON_K16V16")],
)
def test_the_registered_class_is_what_custom_gives(glue: Any, register: str, name: str) -> None:
    """The engine finds the class behind CUSTOM, its enum lookup by the class's name works, and its own name is ours."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from pytest_kvqual.worker.dispatch import backend_name

    getattr(glue, register)(object())
    backend = AttentionBackendEnum.CUSTOM.get_class()
    assert AttentionBackendEnum[backend.get_name()] is AttentionBackendEnum.CUSTOM
    assert backend.kvqual_name == name
    assert backend_name(SimpleNamespace(attn_backend=backend)) == name


def test_the_entry_point_registers_and_takes_no_name_away(glue: Any) -> None:
    """The declared entry point puts K16/V8 behind CUSTOM; where another package stands there it stays."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["kvqual"].partition(":")
    register = getattr(import_module(module), function)
    register()
    assert AttentionBackendEnum.CUSTOM.get_class() is glue.TritonK16V8Backend
    register_backend(AttentionBackendEnum.CUSTOM, "somebody.Else")
    register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "somebody.Else"


def test_page_bytes(glue: Any) -> None:
    """K16/V8 asks for three quarters of the dense page, K16/V16 for all of it, at every block size of the engine."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.utils import customize_attention_spec

    for block_size in (16, 32, 64, 128):
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=8, head_size=128, dtype=torch.float16)
        eight = customize_attention_spec(glue.TritonK16V8Backend, spec)
        assert (eight.dtype, eight.state_content_bytes) == (torch.uint8, 384)
        assert eight.page_size_bytes * 4 == spec.page_size_bytes * 3
        assert customize_attention_spec(glue.TritonK16V16Backend, spec).page_size_bytes == spec.page_size_bytes


def test_the_engines_view_of_the_pool_is_the_declared_page(glue: Any) -> None:
    """The engine's views of its pool, in the layout that we ask for, are dense ``[blocks, heads, size, 3 * D]``."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, compute_layout_strides
    from vllm.v1.worker.utils import customize_attention_spec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.float16)
    (layout,) = glue.TritonK16V8Backend.supported_kv_cache_layouts()
    strides = compute_layout_strides(customize_attention_spec(glue.TritonK16V8Backend, spec), 10, 2, layout)
    assert strides[1:] == (8 * 16 * 384, 16 * 384, 384, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"block_size": 24}, "block_size not supported"),
        ({"head_size": 512}, "head_size not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"has_sliding_window": True}, "sliding window not supported"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"attn_type": "encoder"}, "attention type encoder not supported"),
        ({"capability": (7, 5)}, "compute capability not supported"),
        ({"head_size": 256}, None),
        ({"capability": (8, 9)}, None),
        ({"head_size": 192, "capability": (8, 9)}, "heads of more than 128 need a device with 160 KiB"),
    ],
)
def test_what_the_engine_is_told_it_can_ask_for(glue: Any, change: dict[str, Any], reason: str | None) -> None:
    """Hopper, Qwen3-8B's layer and any block of sixteens are valid; what the kernels do not do is named."""
    from vllm.platforms.interface import DeviceCapability

    asked = {
        "head_size": 128,
        "dtype": torch.float16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "attn_type": "decoder",
        "has_sliding_window": False,
    }
    capability = DeviceCapability(*change.pop("capability", (9, 0)))
    found = glue.TritonK16V8Backend.validate_configuration(**{**asked, **change}, device_capability=capability)
    assert found == ([] if reason is None else [reason])


def test_full_graphs_are_for_steps_of_one_row_a_request(glue: Any) -> None:
    """The builder says what a full graph may hold, and that writing the cache is a call of its own."""
    from vllm.v1.attention.backend import AttentionCGSupport

    builder = glue.TritonK16V8Backend.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert glue.TritonK16V8Backend.forward_includes_kv_cache_update is False


@pytest.mark.parametrize(("backend", "kv_format"), BACKENDS)
def test_layer_calls_in_the_interpreter(backend: str, kv_format: str) -> None:
    """The engine's calls of a layer reach the kernels with its scales, and what the kernels cannot do is refused."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=cases.interpret) as pool:
        pool.submit(cases.glue, backend, kv_format).result(timeout=240)


@pytest.mark.parametrize(
    "given",
    [
        {"alibi_slopes": [1.0]},
        {"sliding_window": 128},
        {"logits_soft_cap": 30.0},
        {"kv_cache_dtype": "fp8"},
        {"attn_type": "encoder_only"},
        {"kv_sharing_target_layer_name": "layers.0.attn"},
        {"sinks": torch.zeros(8)},
    ],
)
def test_another_attention_is_refused(glue: Any, given: dict[str, Any]) -> None:
    """A layer that is not plain causal attention is refused by name."""
    with pytest.raises(FormatError, match=f"found a layer with {next(iter(given))}, expected plain causal attention"):
        glue.TritonK16V8Impl(8, 128, 0.088, 2, **given)
