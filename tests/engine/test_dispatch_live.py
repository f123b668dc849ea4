"""The dispatch reading and the step inputs on the real engine: what each arm runs, and a fallback that is right."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from served_arm import serving

from pytest_kvqual.server import rpc
from pytest_kvqual.server.process import Server
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Selection

pytestmark = pytest.mark.engine

LIMIT_S = 300.0
PROMPT = list(range(1000, 1140))  # more than one block
STOCK = {"_C::cpu_attn_reshape_and_cache", "_C::cpu_attention_with_kv_cache"}
PREFILL = "aten::_scaled_dot_product_flash_attention_for_cpu"
DECODE = "aten::exp_"
FALLBACK = '''
import torch

def plant(worker):
    """Layer 7 attends by another implementation, with the same numbers."""
    impl = list(worker.kvqual_layers().values())[7].impl

    def forward(layer, query, key, value, kv_cache, metadata, output, *args, **kwargs):
        if metadata is None:
            return output
        size = impl.head_size
        result = output.view(output.shape[0], impl.num_heads, size)
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for row, length in enumerate(lengths):
            first, last = starts[row], starts[row + 1]
            blocks = metadata.block_table[row, : -(-length // kv_cache.shape[2])].long()
            cells = kv_cache[blocks].transpose(1, 2).reshape(-1, impl.num_kv_heads, 3 * size)[:length]
            k = cells[..., : 2 * size].contiguous().view(torch.bfloat16).float()
            v = cells[..., 2 * size :].contiguous().view(torch.float8_e4m3fn).float() * layer._v_scale_float
            mask = torch.arange(length)[None, :] <= torch.arange(length - (last - first), length)[:, None]
            attended = torch.nn.functional.scaled_dot_product_attention(
                query[first:last].float().transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
                attn_mask=mask, scale=impl.scale, enable_gqa=True,
            )
            result[first:last] = attended[0].transpose(0, 1).to(result.dtype)
        return output

    impl.forward = forward
    worker.kvqual_undo.append(lambda: delattr(impl, "forward"))
'''


def ask(server: Server, selection: Selection, *, tokens: int) -> list[int]:
    """The tokens of one greedy request: one prefill step, then a decode step for each token but the first."""
    answer: Any = rpc.post(
        server.base_url,
        "/v1/completions",
        {
            "model": selection.study.model.name,
            "prompt": PROMPT,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
        timeout_s=LIMIT_S,
        what="a completion",
    )
    found: list[int] = answer["choices"][0]["token_ids"]
    assert len(found) == tokens
    return found


def reading(server: Server, selection: Selection, *, tokens: int) -> tuple[dict[str, Any], list[int]]:
    """What each layer ran during one request, and the request's tokens."""
    rpc.call(server.base_url, "kvqual_dispatch_start", timeout_s=LIMIT_S)
    found = ask(server, selection, tokens=tokens)
    (rank,) = rpc.call(server.base_url, "kvqual_dispatch_finish", timeout_s=LIMIT_S)
    assert isinstance(rank, dict)
    assert rank["rank"] == 0
    assert len(rank["layers"]) == selection.study.model.layers
    return rank["layers"], found


def matches(entry: dict[str, Any], pattern: str) -> bool:
    """Whether any kernel of a layer matches."""
    return any(fnmatchcase(kernel, pattern) for kernel in entry["kernels"])


def test_the_stock_arm_runs_the_stock_kernels(tmp_path: Path) -> None:
    """Every layer of the native arm runs vLLM's two operators and none of torch's attention, in either phase."""
    selection = select(load_study("smollm2-cpu"), arm="native", length=1024, cache_bytes=None)
    with serving(selection, tmp_path / "server.log") as server:
        for tokens in (1, 4):
            layers, _ = reading(server, selection, tokens=tokens)
            for entry in layers.values():
                assert (entry["backend"], entry["cache_dtype"]) == ("CPU_ATTN", "torch.bfloat16")
                assert entry["impl"].endswith("cpu_attn.CPUAttentionBackendImpl")
                assert set(entry["kernels"]) >= STOCK
                assert not matches(entry, "aten::*dot_product*")
                assert not matches(entry, "aten::bmm")
        assert rpc.call(server.base_url, "kvqual_taps", timeout_s=10) == [{"installed": False, "faults": 0, "held": 0}]


def test_the_candidate_runs_its_own_and_a_fallback_shows(tmp_path: Path) -> None:
    """Every layer of the candidate runs our operators; a layer that falls back answers the same and reads otherwise."""
    (tmp_path / "stranger.py").write_text(FALLBACK)
    selection = select(load_study("smollm2-cpu"), arm="candidate", length=1024, cache_bytes=None)
    selection = replace(selection, arm=replace(selection.arm, pythonpath=(tmp_path,)))
    with serving(selection, tmp_path / "server.log") as server:
        prefill, _ = reading(server, selection, tokens=1)
        both, healthy = reading(server, selection, tokens=4)
        rpc.call(server.base_url, "kvqual_plant", "stranger:plant", timeout_s=LIMIT_S)
        fallen, tokens = reading(server, selection, tokens=4)
        rpc.call(server.base_url, "kvqual_unplant", timeout_s=LIMIT_S)

        rpc.call(server.base_url, "kvqual_inputs_start", timeout_s=LIMIT_S)
        ask(server, selection, tokens=4)
        (inputs,) = rpc.call(server.base_url, "kvqual_inputs_finish", timeout_s=LIMIT_S)
        assert rpc.call(server.base_url, "kvqual_taps", timeout_s=10) == [{"installed": False, "faults": 0, "held": 0}]
    for entry in both.values():
        assert (entry["backend"], entry["cache_dtype"]) == ("KVQUAL_K16V8", "torch.uint8")
        assert not matches(entry, "_C::*attn*")
        assert matches(entry, PREFILL)
        assert matches(entry, DECODE)
        assert matches(entry, "aten::index_put_")
    assert all(matches(entry, PREFILL) and not matches(entry, DECODE) for entry in prefill.values())
    assert tokens == healthy
    assert [number for number, entry in enumerate(fallen.values()) if not matches(entry, DECODE)] == [7]
    assert [n for n, e in enumerate(fallen.values()) if matches(e, "aten::scaled_dot_product_attention")] == [7]
    assert isinstance(inputs, dict)
    assert inputs["rank"] == 0
    assert inputs["steps"] == len(set(inputs["digests"])) == 4
