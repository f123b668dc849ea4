"""The identity of what a record belongs to. Evidence from another scope counts for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pytest_kvqual._canonical import canonical_bytes, digest
from pytest_kvqual._decode import Table, parse_json
from pytest_kvqual.errors import EvidenceError, KvqualError

_ARM = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
SCOPE_FIELDS: Final = ("lock", "arm", "length", "cache_bytes", "engine")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """What one capture, receipt or verdict is about.

    ``lock`` is the SHA-256 of the lock file's bytes, ``engine`` the SHA-256 of the engine's identity document.
    """

    lock: str
    arm: str
    length: int
    cache_bytes: int
    engine: str

    def to_dict(self) -> dict[str, object]:
        """A JSON-ready mapping."""
        return {
            "lock": self.lock,
            "arm": self.arm,
            "length": self.length,
            "cache_bytes": self.cache_bytes,
            "engine": self.engine,
        }

    def difference(self, other: Scope) -> tuple[str, ...]:
        """One line for each field in which ``other`` differs from this scope."""
        return tuple(
            f"{name}: found {found}, expected {expected}"
            for (name, expected), found in zip(self.to_dict().items(), other.to_dict().values(), strict=True)
            if found != expected
        )

    @classmethod
    def from_table(cls, table: Table) -> Scope:
        """The scope in a decoded table, whose keys must be the five fields."""
        return cls(
            lock=table.sha256("lock"),
            arm=table.string("arm", pattern=_ARM, form="the name of an arm"),
            length=table.integer("length", minimum=1),
            cache_bytes=table.integer("cache_bytes", minimum=1),
            engine=table.sha256("engine"),
        )

    @classmethod
    def from_dict(cls, value: object, *, origin: str, error: type[KvqualError] = EvidenceError) -> Scope:
        """The scope in what a JSON document holds.

        Args:
            value: What :meth:`to_dict` gave, read back.
            origin: The file that errors name.
            error: The class of the errors raised.

        Raises:
            KvqualError: As ``error``: a key is unknown, missing, or of the wrong type or form.
        """
        return cls.from_table(Table(value, origin=origin, error=error, known=SCOPE_FIELDS))


def with_digest(document: Mapping[str, object]) -> bytes:
    """The canonical bytes of ``document`` plus its own digest under ``sha256``, with a final newline.

    For the documents that no manifest seals: an edit of any byte shows.
    """
    return canonical_bytes({**document, "sha256": digest(document)}) + b"\n"


def read_with_digest(data: bytes, *, origin: str, known: Iterable[str]) -> Table:
    """The document that :func:`with_digest` wrote.

    Raises:
        EvidenceError: The bytes are no such document, or not those that were written; names both digests.
    """
    value = parse_json(data, origin=origin, error=EvidenceError, advice=DAMAGED)
    table = Table(value, origin=origin, error=EvidenceError, known=(*known, "sha256"))
    expected = table.sha256("sha256")
    found = digest({name: table.raw(name) for name in table.names() if name != "sha256"})
    if found != expected:
        raise EvidenceError(f"{origin}: found content of sha256 {found}, expected {expected}", advice=DAMAGED)
    require_canonical(value, data, origin=origin)
    return table


def require_canonical(value: object, data: bytes, *, origin: str) -> None:
    """Refuse bytes that differ from the canonical form of the value in them (and a final newline).

    Raises:
        EvidenceError: They differ.
    """
    if canonical_bytes(value) + b"\n" != data:
        raise EvidenceError(
            f"{origin}: found bytes that are not the canonical form of their content, expected them as written",
            advice=DAMAGED,
        )


#: What to do about evidence that is not as it was written.
DAMAGED: Final = "the evidence was changed after it was written: start over in a new --run-dir"
