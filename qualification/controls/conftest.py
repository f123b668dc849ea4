"""A way to open campaigns outside a session of gates, and the table of the fault matrix."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.campaign import Campaign

LIVE = "live_controls"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A fault planted in a served arm takes a boot: those runs are asked for by name, ``-m live_controls``."""
    if LIVE in config.getoption("markexpr", ""):
        return
    live = [item for item in items if item.get_closest_marker(LIVE) is not None]
    if live:
        config.hook.pytest_deselected(items=live)
        items[:] = [item for item in items if item.get_closest_marker(LIVE) is None]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Caught and seeded faults of the matrix, by gate and by row of the catalogue."""
    told = [
        dict(report.user_properties)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call" and any(name == "first_gate" for name, _ in report.user_properties)
    ]
    if not told:
        return
    from pytest_kvqual.faults.document import summary

    terminalreporter.section("seeded faults on the transfer engine")
    for line in summary({str(cell["fault"]): bool(cell["right"]) for cell in told}):
        terminalreporter.write_line(line)


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

    say = partial(progress.write, pytestconfig)

    def call(**changes: Any) -> Campaign:
        named = open_campaign(options_of(pytestconfig, platform="cpu", timing=False), say)
        if not changes:
            return named
        return Campaign(**{"selection": named.selection, "run_dir": named.run_dir, "progress": say, **changes})

    return call
