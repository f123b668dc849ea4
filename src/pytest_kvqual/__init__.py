"""Qualify a change of vLLM's KV-cache path in one pytest run, before anybody times it.

The public names are resolved on first use: importing this package imports nothing else, because pytest imports it in
every run of every project that has the plugin installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_kvqual.errors import KvqualError
    from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict
    from pytest_kvqual.study.load import load_study
    from pytest_kvqual.study.model import Arm, Study

__all__ = ["Arm", "Check", "KvqualError", "Outcome", "Poison", "Study", "Verdict", "load_study"]

__version__ = "0.1.0"

_HOMES = {
    "Arm": "pytest_kvqual.study.model",
    "Check": "pytest_kvqual.judge.verdict",
    "KvqualError": "pytest_kvqual.errors",
    "Outcome": "pytest_kvqual.judge.verdict",
    "Poison": "pytest_kvqual.judge.verdict",
    "Study": "pytest_kvqual.study.model",
    "Verdict": "pytest_kvqual.judge.verdict",
    "load_study": "pytest_kvqual.study.load",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
