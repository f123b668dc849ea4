"""A way to open campaigns outside a session of gates."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from pytest_kvqual.campaign import Campaign


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
