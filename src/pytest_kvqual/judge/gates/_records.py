"""Matching capture records with a frozen panel: each item once, nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.judge.gates._conclude import Objections


class Item(Protocol):
    """What a judge needs of one panel item."""

    @property
    def id(self) -> str:
        """Unique within the panel."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids."""

    @property
    def targets(self) -> tuple[int, ...]:
        """Forced token ids; empty where nothing is forced."""

    @property
    def max_tokens(self) -> int:
        """The number of tokens to generate."""

    @property
    def expected(self) -> str:
        """The right answer; empty where nothing is scored."""

    @property
    def grade(self) -> str:
        """The group of questions that it is reported in; empty where nothing is scored."""


class Panel(Protocol):
    """What a judge needs of a panel: its items, in the frozen order."""

    @property
    def items(self) -> Sequence[Item]:
        """In the frozen order."""


Record = object
"""A capture record as it was read: not known to be a mapping, let alone a well-formed one."""


def by_item(
    result: Objections,
    rule: int,
    panel: Panel,
    records: object,
    *,
    origin: str,
    only: int | None = None,
) -> list[tuple[Item, Record, str]]:
    """Each item that has exactly one record, with its record and the record's place, in the order of the records.

    A missing, repeated or unknown id is a gap under ``rule``. With ``only``, that many items suffice, whichever.
    """
    if records is None:
        result.gap(rule, f"{origin}: the records are missing")
        return []
    if not isinstance(records, list | tuple):
        result.gap(rule, f"{origin}: found {type(records).__name__}, expected a list of records")
        return []
    items = {item.id: item for item in panel.items}
    found: dict[str, tuple[Item, Record, str]] = {}
    repeated: set[str] = set()
    for place, record in enumerate(records):
        where = f"{origin}[{place}]"
        with result.reading(rule):
            name = record.get("id") if isinstance(record, Mapping) else None
            if not isinstance(name, str):
                raise EvidenceError(f"{where}: found no id, expected one of the panel")
            if name not in items:
                raise EvidenceError(f"{where}: found the id '{name}', expected one of the panel's {len(items)}")
            if name in found:
                repeated.add(name)
                raise EvidenceError(f"{where}: found '{name}' twice, expected once")
            found[name] = (items[name], record, where)
    if only is None:
        for item in panel.items:
            if item.id not in found:
                result.gap(rule, f"{origin}: no record of '{item.id}'")
    elif len(found) != only:
        result.gap(rule, f"{origin}: found {len(found)} records, expected {only}")
    return [entry for name, entry in found.items() if name not in repeated]
