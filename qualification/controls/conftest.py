"""A way to open campaigns outside a session of gates, and the tables of what was caught."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.campaign import Campaign

BY_NAME = ("live_controls", "from_start")
"""Markers of controls that boot servers: they run when ``-m`` names them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What boots a server is asked for by name, ``-m live_controls`` or ``-m from_start``."""
    named = config.getoption("markexpr", "")
    left = [marker for marker in BY_NAME if marker not in named]
    out = [item for item in items if any(item.get_closest_marker(marker) is not None for marker in left)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Caught and seeded faults: of the matrix by gate and by row of the catalogue, of a served arm by gate."""
    told = [
        dict(report.user_properties)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call" and any(name == "first_gate" for name, _ in report.user_properties)
    ]
    if not told:
        return
    from pytest_kvqual.faults.document import by_gate, summary

    matrix = {str(cell["fault"]): bool(cell["right"]) for cell in told if "arm" not in cell}
    if matrix:
        terminalreporter.section("seeded faults on the transfer engine")
        for line in summary(matrix):
            terminalreporter.write_line(line)
    for arm in dict.fromkeys(str(cell["arm"]) for cell in told if "arm" in cell):
        mine = [cell for cell in told if cell.get("arm") == arm]
        terminalreporter.section(f"seeded faults in the served arm {arm}")
        for line in by_gate({str(cell["fault"]): bool(cell["right"]) for cell in mine}):
            terminalreporter.write_line(line)
        seconds = [float(str(cell["seconds"])) for cell in mine]
        terminalreporter.write_line(f"{sum(seconds):.0f} s under faults, {max(seconds):.1f} s at most under one")


class OpenCampaign(Protocol):
    """Without arguments the campaign that the options name; with them, one that differs from it."""

    def __call__(self, **changes: Any) -> Campaign:
        """The campaign, not prepared yet."""


@pytest.fixture(scope="module")
def open_campaign(pytestconfig: pytest.Config) -> OpenCampaign:
    """Opens campaigns of the study, arm and length that the options name."""
    from pytest_kvqual.campaign import Campaign, open_campaign
    from pytest_kvqual.report import progress
    from pytest_kvqual.session import options_of

    say = partial(progress.show, pytestconfig)

    def call(**changes: Any) -> Campaign:
        named = open_campaign(options_of(pytestconfig, platform="cpu", timing=False), say)
        if not changes:
            return named
        shared = {"selection": named.selection, "run_dir": named.run_dir, "install": named.install, "progress": say}
        return Campaign(**{**shared, **changes})

    return call
