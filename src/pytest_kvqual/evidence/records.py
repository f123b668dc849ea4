"""The identity of what a record belongs to. Evidence from another scope counts for nothing."""

from __future__ import annotations

from dataclasses import dataclass


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
