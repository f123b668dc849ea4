"""Plain types that cross into the worker process, and the functions that an arm brings."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CONFIG_KEY = "kvqual"
"""Where the worker's configuration stands in the engine's ``additional_config``."""

_KEYS = {
    "arm",
    "kv_format",
    "attention_backend",
    "v_scales",
    "before_load",
    "after_init",
    "model_dir",
    "pythonpath",
    "distribution",
}
_OPTIONAL = {"taps", "checkouts"}


class WorkerError(RuntimeError):
    """The worker refuses: what was found, what was expected, where."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """What the server's command line tells the worker.

    ``v_scales`` holds one float per attention layer in layer order, or None for an arm without frozen scales. With
    ``taps`` the full graphs are captured with static taps in them: the server is then one for the oracles.
    ``checkouts`` is the file with the digests of the source trees that the arm brings, None where it brings none.
    """

    arm: str
    kv_format: str
    attention_backend: str
    v_scales: tuple[float, ...] | None
    before_load: tuple[str, ...]
    after_init: tuple[str, ...]
    model_dir: Path
    pythonpath: tuple[str, ...]
    distribution: str
    checkouts: Path | None = None
    taps: bool = False


def _strings(value: object, key: str) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(item, str) for item in value):
        raise WorkerError(f"additional_config.{CONFIG_KEY}.{key} is {value!r}, expected a list of strings")
    return tuple(value)


def _string(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise WorkerError(f"additional_config.{CONFIG_KEY}.{key} is {value!r}, expected a string")
    return value


def decode_config(additional_config: object) -> WorkerConfig:
    """Reads the worker's configuration from the engine's ``additional_config``.

    Raises:
        WorkerError: A key is missing, unknown or of the wrong type.
    """
    raw = additional_config.get(CONFIG_KEY) if isinstance(additional_config, Mapping) else None
    if not isinstance(raw, Mapping):
        raise WorkerError(f"additional_config has no mapping {CONFIG_KEY!r}; start the server through pytest-kvqual")
    if set(raw) - _OPTIONAL != _KEYS:
        raise WorkerError(f"additional_config.{CONFIG_KEY} has the keys {sorted(raw)}, expected {sorted(_KEYS)}")
    taps = raw.get("taps", False)
    if not isinstance(taps, bool):
        raise WorkerError(f"additional_config.{CONFIG_KEY}.taps is {taps!r}, expected true or false")
    scales = raw["v_scales"]
    if scales is not None:
        if not isinstance(scales, Sequence) or not all(isinstance(item, float) for item in scales):
            raise WorkerError(f"additional_config.{CONFIG_KEY}.v_scales is {scales!r}, expected floats or null")
        scales = tuple(scales)
    return WorkerConfig(
        arm=_string(raw["arm"], "arm"),
        kv_format=_string(raw["kv_format"], "kv_format"),
        attention_backend=_string(raw["attention_backend"], "attention_backend"),
        v_scales=scales,
        before_load=_strings(raw["before_load"], "before_load"),
        after_init=_strings(raw["after_init"], "after_init"),
        model_dir=Path(_string(raw["model_dir"], "model_dir")),
        pythonpath=_strings(raw["pythonpath"], "pythonpath"),
        distribution=_string(raw["distribution"], "distribution"),
        checkouts=Path(_string(raw["checkouts"], "checkouts")) if "checkouts" in raw else None,
        taps=taps,
    )


def resolve(path: str) -> Callable[..., object]:
    """Imports ``module:function``.

    Raises:
        WorkerError: The text has another form, the module cannot be imported or has no such function.
    """
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise WorkerError(f"plugin {path!r} is not of the form module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise WorkerError(f"plugin {path!r}: {error}; is its folder in the arm's pythonpath?") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise WorkerError(f"plugin {path!r}: module {module_name} has no function {name}")
    return function  # type: ignore[no-any-return]  # checked to be callable just above


def extend_path(folders: Sequence[str]) -> None:
    """Puts the arm's folders in front of the import path, once each."""
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)
