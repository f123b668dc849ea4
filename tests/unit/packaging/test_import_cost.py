"""What importing the package costs every pytest run of every project that has it installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_kvqual

HEAVY = (
    *(
        "aiohttp",
        "httpx",
        "hypothesis",
        "jinja2",
        "numpy",
        "psutil",
        "rich",
        "scipy",
        "torch",
        "transformers",
        "triton",
        "vllm",
    ),
)


def loaded_by(statement: str) -> set[str]:
    """The names in ``sys.modules`` after ``statement`` in a fresh process."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    source = str(Path(pytest_kvqual.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return set(done.stdout.splitlines())


@pytest.mark.parametrize(
    "module",
    [
        "pytest_kvqual.plugin",
        "pytest_kvqual.session",
        "pytest_kvqual.fixtures",
        "pytest_kvqual.cli",
        "pytest_kvqual.models",
        "pytest_kvqual.study.load",
        "pytest_kvqual.judge.sequence",
        "pytest_kvqual.report.progress",
        "pytest_kvqual.report.terminal",
    ],
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    """What a plain `pytest --help` or `kvqual --help` imports pulls in no numerical, HTTP or engine package."""
    loaded = loaded_by(f"import {module}")
    assert module in loaded
    assert not loaded.intersection(HEAVY)


def test_the_package_itself_imports_nothing() -> None:
    """`import pytest_kvqual` adds no module of ours but itself."""
    added = loaded_by("import pytest_kvqual") - loaded_by("pass")
    assert {name for name in added if name.partition(".")[0] == "pytest_kvqual"} == {"pytest_kvqual"}
    assert not added.intersection(HEAVY)


@pytest.mark.parametrize("name", pytest_kvqual.__all__)
def test_each_public_name_resolves(name: str) -> None:
    """Every name of `__all__` is found on first use and listed by dir()."""
    assert getattr(pytest_kvqual, name).__name__ == name
    assert name in dir(pytest_kvqual)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """The lazy lookup does not invent names."""
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pytest_kvqual.nothing
