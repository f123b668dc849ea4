"""The fixtures, registered in every run and empty-handed until one is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.hooks import Campaign
    from pytest_kvqual.session import Gate, Pilot
    from pytest_kvqual.study.model import Study


@pytest.fixture(scope="session")
def kvqual_arm(request: pytest.FixtureRequest) -> str | None:
    """The arm of a gate's group under ``-n``; None in a run of one process, which has one arm."""
    name: str | None = getattr(request, "param", None)
    return name


@pytest.fixture(scope="session")
def campaign(request: pytest.FixtureRequest, kvqual_arm: str | None) -> Campaign:
    """The campaign of this session (see :mod:`pytest_kvqual.hooks`)."""
    from pytest_kvqual.session import session_of

    return session_of(request.config).campaign


@pytest.fixture(scope="session")
def study(campaign: Campaign) -> Study:
    """The study under qualification."""
    return campaign.study


@pytest.fixture(scope="session")
def arm(campaign: Campaign) -> str:
    """The name of the arm under qualification."""
    return campaign.arm


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Gate:
    """The gate that this test's ``gate`` mark names; ``gate.decide()`` is the whole test."""
    from pytest_kvqual.session import session_of

    return session_of(request.config).gate(request.node)


@pytest.fixture
def pilot(request: pytest.FixtureRequest) -> Pilot:
    """An exploratory measurement; ``pilot.measure()`` is the whole test."""
    from pytest_kvqual.session import session_of

    return session_of(request.config).pilot()
