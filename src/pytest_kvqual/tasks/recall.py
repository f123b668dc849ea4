"""Recall: a word or a number that a short prompt gives or that the model knows is asked for. Read as one word."""

from __future__ import annotations

from pytest_kvqual.tasks.words import read

__all__ = ["read"]
