"""Seeded faults: each names the gate that must catch it."""

from __future__ import annotations

from pytest_kvqual.faults.catalogue import FAULTS, Fault

__all__ = ["FAULTS", "Fault"]
