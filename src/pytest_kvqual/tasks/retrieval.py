"""Retrieval: a word or a number that stands somewhere in a long prompt is asked for. Read as one word."""

from __future__ import annotations

from pytest_kvqual.tasks.words import read

__all__ = ["read"]
