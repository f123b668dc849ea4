"""Where the gates and the studies are: inside the package where a wheel brought it, else at the root of its checkout.

Standard library only: the plugin imports it in every run of pytest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

PACKAGE: Path = Path(__file__).resolve().parent
"""The package's own folder. Read through the module, so that a test can move it."""

QUALIFICATION: Final = "qualification"
STUDIES: Final = "studies"
GATES_MODULE: Final = "pytest_kvqual.qualification"
"""What ``pytest --pyargs`` takes."""

SHIPPED: Final = ("docs", QUALIFICATION, STUDIES)
"""Folders of the checkout's root that a wheel holds inside the package. They are no part of the package's code."""


def installed() -> bool:
    """Whether the package holds its gates and studies itself, as a wheel does; an editable install does not."""
    return (PACKAGE / QUALIFICATION).is_dir()


def folder(name: str) -> Path:
    """One of :data:`SHIPPED`: in the package where it is installed, else in the checkout that the package runs from."""
    return (PACKAGE if installed() else PACKAGE.parents[1]) / name


def gates_argument() -> str:
    """What names the gates on pytest's command line: in a checkout from its root, of an installed package anywhere."""
    return f"--pyargs {GATES_MODULE}" if installed() else f"{QUALIFICATION}/"
