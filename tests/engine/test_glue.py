"""The glue, against the pinned engine's own classes, without a server."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_kvqual.errors import FormatError

pytestmark = pytest.mark.engine


@pytest.fixture
def glue(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The glue module; what a test registers is undone."""
    from vllm.v1.attention.backends import registry

    from pytest_kvqual.kv.backends import vllm_cpu

    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", dict(registry._ATTN_OVERRIDES))
    return vllm_cpu


def _impl(backend: Any, heads: int, kv_heads: int, size: int) -> Any:
    """An implementation object as the attention layer holds it, made without an engine configuration."""
    impl = object.__new__(backend.get_impl_cls())
    impl.num_heads, impl.num_kv_heads, impl.head_size, impl.scale = heads, kv_heads, size, size**-0.5
    return impl


@pytest.mark.parametrize(
    ("register", "name"), [("register_k16v16", "KVQUAL_K16V16"), ("register_k16v8", "KVQUAL_K16V8")]
)
def test_registered_backends_are_told_apart(glue: Any, register: str, name: str) -> None:
    """A registered backend is what the engine gets for CPU_ATTN; its enum lookup works and its own name differs."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert glue.declared_name(CPUAttentionBackend) == "CPU_ATTN"
    getattr(glue, register)(object())
    backend = AttentionBackendEnum.CPU_ATTN.get_class()
    assert glue.declared_name(backend) == name
    assert AttentionBackendEnum[backend.get_name()] is AttentionBackendEnum.CPU_ATTN


def test_page_bytes(glue: Any) -> None:
    """K16/V8 asks for three quarters of the stock page, K16/V16 for all of it."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.utils import customize_attention_spec

    spec = FullAttentionSpec(block_size=128, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    assert customize_attention_spec(glue.K16V16Backend, spec).page_size_bytes == spec.page_size_bytes
    assert customize_attention_spec(glue.K16V8Backend, spec).page_size_bytes * 4 == spec.page_size_bytes * 3


@pytest.mark.parametrize(("backend", "content"), [("K16V16Backend", 256), ("K16V8Backend", 192)])
def test_layer_calls(glue: Any, backend: str, content: int) -> None:
    """The layer's write and read scale reach the functions, and a profiling run without metadata touches nothing."""
    functions = getattr(glue, backend).get_impl_cls().functions
    impl = _impl(getattr(glue, backend), 9, 3, 64)
    layer = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=0.03)
    caches = [torch.zeros(4, 3, 128, content, dtype=torch.uint8) for _ in range(2)]
    key, value, query = (torch.randn(5, heads, 64).bfloat16() for heads in (3, 3, 9))
    slots = torch.tensor([130, 131, 132, 133, 134])
    impl.do_kv_cache_update(layer, key, value, caches[0], slots)
    functions.write(key, value, caches[1], slots, v_scale=0.03)
    assert torch.equal(caches[0], caches[1])
    step = (torch.tensor([[1]]), torch.tensor([7]), torch.tensor([0, 5]))
    metadata = SimpleNamespace(block_table=step[0], seq_lens=step[1], query_start_loc=step[2], causal=True)
    outputs = [torch.zeros_like(query) for _ in range(3)]
    impl.forward(layer, query, key, value, caches[0], metadata, outputs[0])
    functions.attend(query, caches[0], *step, scale=64**-0.5, v_scale=0.03, output=outputs[1])
    assert torch.equal(outputs[0], outputs[1])
    assert bool(outputs[0].any())
    impl.forward(layer, query, key, value, caches[0], None, outputs[2])
    assert not bool(outputs[2].any())


@pytest.mark.parametrize(
    "change",
    [
        lambda call: call.update(output_scale=torch.ones(1)),
        lambda call: call["attn_metadata"].__setattr__("causal", False),
    ],
)
def test_what_the_functions_cannot_do_is_refused(glue: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """A fused output scale or a step that is not causal is refused, not ignored."""
    impl = _impl(glue.K16V8Backend, 9, 3, 64)
    call: dict[str, Any] = {"attn_metadata": SimpleNamespace(causal=True), "output": torch.zeros(1)}
    change(call)
    with pytest.raises(FormatError, match="expected neither"):
        impl.forward(SimpleNamespace(), *[torch.zeros(1)] * 4, **call)
