"""The seam between pytest and a qualification: one hook, and the records that cross it.

``pytest_kvqual_campaign`` builds the object that captures, judges and writes receipts. The plugin's own implementation
returns :class:`pytest_kvqual.campaign.Campaign`; a ``conftest.py`` may return any object with the methods of
:class:`Campaign` below (the plugin's tests do).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import pytest

from pytest_kvqual.progress import Progress as Progress  # the type of the hook below

if TYPE_CHECKING:
    from pytest_kvqual.judge.verdict import Verdict
    from pytest_kvqual.study.model import Study


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the user typed, converted.

    ``arm`` and ``length`` are None when not given: the study's only candidate, the study's first length. So is
    ``format``: the first of the model's formats. ``install`` is the folder of ``kvqual-install.toml``, absolute, None
    where none was given.
    ``cache_bytes`` in bytes, None for the study's own. ``platform`` is the one that ``-m`` names, and ``timing`` says
    whether ``-m`` names ``timing`` too. ``run_dir`` is absolute. ``gsm8k`` is the file of the GSM8K
    test set, absolute, None for the hub's. ``block`` is
    the block of a trial, None where none was asked for.
    """

    study: str
    arm: str | None
    length: int | None
    cache_bytes: int | None
    prefix: str
    run_dir: Path | None
    root: Path
    platform: Literal["cpu", "gpu"]
    timing: bool
    gsm8k: Path | None = None
    block: int | None = None
    format: str | None = None
    install: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """One gate's verdict and the receipt that states it.

    ``standing`` is true when the receipt is an earlier run's, of the same scope, that still counts.
    """

    verdict: Verdict
    receipt: Path
    standing: bool = False


class Campaign(Protocol):
    """Captures, judges and writes receipts; decides nothing about pytest."""

    @property
    def study(self) -> Study:
        """The study under qualification."""

    @property
    def arm(self) -> str:
        """The name of the arm under qualification."""

    @property
    def title(self) -> str:
        """The scope in a few words: arm, length, cache bytes."""

    @property
    def run_dir(self) -> Path:
        """Where evidence and receipts go."""

    def prepare(self, gates: Sequence[str]) -> Sequence[str]:
        """Check what must hold before a server boots; return one line for each earlier receipt that no longer counts.

        Args:
            gates: The gates that this run is about to decide, in order.

        Raises:
            KvqualError: the lock, the model, the engine or the disk is not what the study declares.
        """

    def decide(self, gate: str) -> Decision:
        """Capture what ``gate`` needs, judge it, write its receipt. A refusal or a failed capture is a verdict too."""

    def absent(self, gate: str, reason: str) -> Decision:
        """The standing PASS of a gate that this run did not decide, else a new receipt that says why it did not."""

    def pilot(self, cell: str | None) -> Sequence[str]:
        """Measure the arm at one load of the plan, to explore; returns lines for a person.

        Raises:
            KvqualError: a gate through parity does not stand, or the measurement failed.
        """

    def summary(self) -> Sequence[str]:
        """Lines for the end of the report: the share of wall time in which an engine was busy."""

    def close(self) -> None:
        """End every process that the campaign started."""


@pytest.hookspec(firstresult=True)
def pytest_kvqual_campaign(options: Options, progress: Progress) -> Campaign | None:
    """Build the campaign that a session of gates runs on.

    Called once, after collection, when at least one gate is collected. ``progress`` takes what the run is at
    (:mod:`pytest_kvqual.progress`); a text is a line for a person.

    Raises:
        KvqualError: what was asked does not fit the study; becomes a usage error of one line.
    """
