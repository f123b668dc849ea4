"""Command lines and environments of arms do not change unnoticed. tests/engine/test_parsed_argv.py parses them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
STUDIES = sorted(path.parent.name for path in (HERE.parents[1] / "studies").glob("*/study.toml"))


def generator() -> ModuleType:
    """``make_argv.py``."""
    spec = importlib.util.spec_from_file_location("make_argv", HERE / "make_argv.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", STUDIES)
def test_golden_commands(name: str) -> None:
    """Every arm of a study, at every length and in every format, has the stored command line and environment."""
    assert generator().document(name) == (HERE / "argv" / f"{name}.json").read_bytes()


def test_every_study_has_its_file_and_no_other() -> None:
    """A study without a golden file, and a file without a study, would be missed by the test above."""
    assert sorted(path.stem for path in (HERE / "argv").iterdir()) == STUDIES


@pytest.mark.parametrize("name", ["qwen3-8b-awq", "phi-4"])
def test_arms_of_a_length_differ_in_what_they_declare_alone(name: str) -> None:
    """Two arms have the same flags but for the attention backend, and no name of this machine is in any of them."""
    found = json.loads((HERE / "argv" / f"{name}.json").read_text())
    own = ("--additional-config", "--attention-backend", "--attention-config", "{")
    shared: dict[str, list[str]] = {}
    for key, command in found.items():
        place = key.rpartition("/")[0]
        flags = [word for word in command["argv"][2:] if not word.startswith(own)]
        assert shared.setdefault(place, flags) == flags
        assert str(Path.home()) not in json.dumps(command)
        assert not {"VLLM_ATTENTION_BACKEND", "TRITON_INTERPRET", "OMP_NUM_THREADS"} & command["env"].keys()


def test_formats_differ_in_dtype_and_quantisation_alone() -> None:
    """What --format changes is the weights' quantisation and the dtype."""
    found = json.loads((HERE / "argv" / "qwen3-8b-awq.json").read_text())
    awq, bf16 = (found[f"{form}/8192/native-fa3"]["argv"] for form in ("awq", "bf16"))
    assert set(awq) ^ set(bf16) == {"--dtype=float16", "--dtype=bfloat16", "--quantization=awq_marlin"}
