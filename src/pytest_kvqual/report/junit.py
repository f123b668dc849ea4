"""Verdicts as properties of the suite, for pytest's own ``--junitxml``.

The xunit2 schema has no properties on a test case (``record_property`` breaks it), so each gate gets its own names on
the suite: ``kvqual.routing.verdict`` and so on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

    from pytest_kvqual.report.terminal import Row


def properties(title: str, table: Iterable[Row]) -> list[tuple[str, str]]:
    """Names and values, in the order of the table."""
    out = [("kvqual.scope", title)]
    for row in table:
        name = f"kvqual.{row.gate}"
        if row.decision is None:
            out.append((f"{name}.verdict", row.note))
            continue
        verdict = row.decision.verdict
        out.append((f"{name}.verdict", verdict.outcome.value))
        out.append((f"{name}.figure", verdict.figure))
        if verdict.null is not None:
            out.append((f"{name}.null", f"{'passed' if verdict.null.passed else 'failed'}: {verdict.null.figure}"))
        if verdict.poison:
            out.append((f"{name}.faults", f"{verdict.faults_caught}/{verdict.faults_seeded}"))
        out.append((f"{name}.receipt", row.receipt))
    return out


def add_properties(config: pytest.Config, pairs: Iterable[tuple[str, str]]) -> None:
    """Add them to the JUnit file of this run, if there is one."""
    # The key has no public name; the public fixture record_testsuite_property uses it, and is out of reach after the
    # last test, when the gates that did not run are accounted for.
    from _pytest.junitxml import xml_key

    xml = config.stash.get(xml_key, None)
    if xml is None:
        return
    for name, value in pairs:
        xml.add_global_property(name, value)
