"""An arm as a command line and an environment."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_kvqual.server.command import PACKAGE_ROOT, engine_arguments, serve_command, worker_config
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Selection

STUDY = Path(__file__).parents[3] / "studies" / "smollm2-cpu"


@pytest.fixture
def selection() -> Selection:
    """The embedded study's candidate at 1,024 tokens."""
    return select(load_study(str(STUDY)), arm="candidate", length=1024, cache_bytes=None)


def make(selection: Selection, **inherited: str) -> tuple[list[str], dict[str, str]]:
    """The command's arguments and environment."""
    command = serve_command(
        selection,
        model=Path("/models/m"),
        port=8123,
        worker_config=worker_config(selection, model=Path("/models/m"), v_scales=(0.5, 2.0)),
        python=Path("/arm/bin/python"),
        inherited=inherited,
    )
    return list(command.argv), dict(command.env)


def value(argv: list[str], flag: str) -> str:
    """What follows a flag that stands there once."""
    assert argv.count(flag) == 1
    return argv[argv.index(flag) + 1]


def test_the_arm_is_served_on_loopback_with_the_studys_sizes(selection: Selection) -> None:
    """Address, port, pool, lengths and model stand on the command line as the study and the caller say."""
    argv, _ = make(selection)
    assert argv[:4] == ["/arm/bin/python", "-m", "pytest_kvqual.server.launcher", "vllm.entrypoints.openai.api_server"]
    assert value(argv, "--host") == "127.0.0.1"
    assert value(argv, "--port") == "8123"
    assert value(argv, "--model") == "/models/m"
    assert value(argv, "--kv-cache-memory-bytes") == str(selection.cache_bytes)
    assert value(argv, "--max-model-len") == str(selection.length.max_model_len)
    assert value(argv, "--block-size") == str(selection.study.engine.block_size)
    assert value(argv, "--worker-cls") == "pytest_kvqual.worker.serving_worker.ServingWorker"
    assert value(argv, "--logits-processors") == "pytest_kvqual.worker.teacher:Teacher"
    assert all(flag in argv for flag in selection.study.engine.flags)


def test_where_there_is_a_gpu_the_stock_program_is_started_directly(selection: Selection) -> None:
    """The launcher is for CPU studies, where the engine's core is a fresh interpreter."""
    study = replace(selection.study, platform="gpu")
    argv, _ = make(replace(selection, study=study))
    assert argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]


def test_another_pool_changes_the_command(selection: Selection) -> None:
    """The pool's size is the selection's, not the length's."""
    argv, _ = make(replace(selection, cache_bytes=12345))
    assert value(argv, "--kv-cache-memory-bytes") == "12345"


def test_server_and_reference_have_the_pool_that_was_asked_for() -> None:
    """``--length 1024 --cache-bytes 34359738368`` reaches the server and the generation in process alike."""
    selection = select(load_study(str(STUDY)), arm="candidate", length=1024, cache_bytes=34359738368)
    served, _ = make(selection)
    reference = engine_arguments(selection, model=Path("/models/m"), worker_config={})
    for argv in (served, list(reference)):
        assert value(argv, "--kv-cache-memory-bytes") == "34359738368"
        assert value(argv, "--max-model-len") == "1280"


def test_the_worker_is_told_its_arm(selection: Selection) -> None:
    """The additional configuration carries what the worker needs, as JSON."""
    argv, _ = make(selection)
    told = json.loads(value(argv, "--additional-config"))["kvqual"]
    assert told["arm"] == "candidate"
    assert told["before_load"] == list(selection.arm.before_load)
    assert told["v_scales"] == [0.5, 2.0]
    assert told["kv_format"] == selection.arm.kv_format
    assert told["model_dir"] == "/models/m"
    assert told["distribution"] == selection.study.engine.distribution


def test_seeded_faults_come_after_the_arms_own_code(selection: Selection) -> None:
    """Code to call after the caches exist is the arm's first, then the caller's."""
    arm = replace(selection.arm, after_init=("own:code",))
    told = worker_config(replace(selection, arm=arm), model=Path("/m"), after_init=("stranger:fault",))
    assert told["after_init"] == ["own:code", "stranger:fault"]
    assert told["v_scales"] is None


def test_the_shells_engine_settings_are_not_inherited(selection: Selection) -> None:
    """Variables that steer the engine come from the study and the arm only."""
    _, env = make(
        selection,
        VLLM_CPU_KVCACHE_SPACE="4",
        VLLM_LOGGING_LEVEL="ERROR",
        OMP_NUM_THREADS="7",
        LD_PRELOAD="/evil.so",
        PYTHONPATH="/elsewhere",
        PYTHONHOME="/elsewhere",
        CUDA_VISIBLE_DEVICES="1",
        PATH="/bin",
    )
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL", "LD_PRELOAD", "PYTHONHOME"):
        assert name not in env
    assert env.get("OMP_NUM_THREADS") != "7"
    assert env["CUDA_VISIBLE_DEVICES"] == "1"
    assert env["PATH"] == "/bin"
    assert env["PYTHONPATH"].split(":")[0] == str(PACKAGE_ROOT)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_LOG_LEVEL", "CUDNN_LOGINFO_DBG", "NCCL_ALGO",
        "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "MKL_NUM_THREADS", "ONEDNN_MAX_CPU_ISA",
        "ATEN_CPU_CAPABILITY",
    ],
)  # fmt: skip
def test_what_steers_the_kernels_is_not_inherited(selection: Selection, name: str) -> None:
    """A library's variable in the shell changes what an arm computes or how long it takes, and no record would say."""
    assert name not in make(selection, **{name: "1"})[1]


def test_the_arms_environment_and_path_win(selection: Selection) -> None:
    """The arm's variables override the study's, and its import paths follow ours."""
    arm = replace(selection.arm, environment={"HF_HUB_OFFLINE": "0", "X": "1"}, pythonpath=(Path("/arm/code"),))
    _, env = make(replace(selection, arm=arm))
    assert env["HF_HUB_OFFLINE"] == "0"
    assert env["X"] == "1"
    assert env["PYTHONPATH"] == f"{PACKAGE_ROOT}:/arm/code"


def test_the_engines_own_traffic_stays_on_loopback(selection: Selection) -> None:
    """Addresses that the engine's processes use among themselves are loopback, and the dev endpoints are on."""
    _, env = make(selection)
    assert env["VLLM_HOST_IP"] == "127.0.0.1"
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    assert env["VLLM_SERVER_DEV_MODE"] == "1"


def test_threads_do_not_spin_for_ever_on_a_cpu(selection: Selection) -> None:
    """A CPU study bounds the spinning of OpenMP threads, unless it says otherwise; a GPU study is left alone."""
    assert make(selection)[1]["GOMP_SPINCOUNT"] == "1000"
    arm = replace(selection.arm, environment={"GOMP_SPINCOUNT": "0"})
    assert make(replace(selection, arm=arm))[1]["GOMP_SPINCOUNT"] == "0"
    study = replace(selection.study, platform="gpu")
    assert "GOMP_SPINCOUNT" not in make(replace(selection, study=study))[1]


def test_a_scale_that_is_not_finite_is_refused(selection: Selection) -> None:
    """JSON has no NaN: such a scale cannot reach the worker."""
    config = worker_config(selection, model=Path("/m"), v_scales=(float("nan"),))
    with pytest.raises(ValueError, match="not JSON compliant"):
        serve_command(selection, model=Path("/m"), port=1, worker_config=config, python=Path("/p"), inherited={})


def test_the_same_selection_gives_the_same_command(selection: Selection) -> None:
    """Nothing but the arguments enters: two calls are equal."""
    assert make(selection, PATH="/bin") == make(selection, PATH="/bin")
