"""Runs of pytest on a study without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GATE = """
import pytest
pytestmark = [pytest.mark.cpu, pytest.mark.gpu{more}]
@pytest.mark.gate("{name}")
def test_{name}(gate):
    gate.decide()
"""


class Runner:
    """Gates of the fake study in a folder, and a way to run pytest on them."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.run_dir = pytester.path / ".kvqual" / "fake"
        self.folder = pytester.mkdir("qualification")
        (pytester.path / "conftest.py").write_text((HERE / "fake_campaign.py").read_text())
        (pytester.path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers --import-mode=importlib\n")
        for number, name, more in (
            (1, "routing", ""),
            (3, "identity", ""),
            (7, "parity", ""),
            (12, "trial", ", pytest.mark.timing"),
        ):
            self.module(number, name, GATE.format(name=name, more=more))

    def module(self, number: int, name: str, text: str) -> Path:
        path = self.folder / f"test_{number:02d}_{name}.py"
        path.write_text(text)
        return path

    def verdicts(self, **outcomes: str) -> None:
        (self.pytester.path / "verdicts.json").write_text(json.dumps(outcomes))

    def run(self, *args: str, subprocess: bool = False) -> pytest.RunResult:
        argv = ["-p", "pytest_kvqual.plugin", *args]
        if subprocess:
            return self.pytester.runpytest_subprocess(*argv, timeout=60)
        return self.pytester.runpytest_inprocess(*argv)

    def receipts(self) -> dict[str, dict[str, str]]:
        """The last receipt of each gate."""
        found = [json.loads(path.read_text()) for path in sorted((self.run_dir / "receipts").glob("*.json"))]
        return {receipt["gate"]: receipt for receipt in found}


@pytest.fixture
def gates(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """The fake study's gates in a fresh folder; only this plugin is loaded."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    return Runner(pytester)
