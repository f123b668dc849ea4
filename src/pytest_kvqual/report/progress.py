"""One line about a long step, on the terminal, also while a test's output is captured."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def write(config: pytest.Config, line: str) -> None:
    """Write the line, unless ``-q`` asks for quiet or there is no terminal reporter."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.option.verbose < 0:
        return
    capture = config.pluginmanager.get_plugin("capturemanager")
    if capture is None:
        _write(reporter, line)
        return
    with capture.global_and_fixture_disabled():
        _write(reporter, line)


def _write(reporter: pytest.TerminalReporter, line: str) -> None:
    reporter.ensure_newline()
    reporter.write_line(line)
    reporter.flush()
